#include "sim/lanes/span_sums.hpp"

#include <algorithm>
#include <array>

namespace kvlab {
namespace {

using QuadSums = std::array<double, kQuad>;

void add_token(QuadSums& sums, const float* e, std::uint32_t token) {
  for (std::size_t h = 0; h < kQuad; ++h) sums[h] += e[std::size_t{token} * kQuad + h];
}

}  // namespace

void add_span_sums(const QuerySpan& span, std::uint32_t query, const GroupRows& rows,
                   const std::uint32_t* tokens, std::span<const std::size_t> begins,
                   std::span<HeadStats> stats) {
  for (std::size_t s = 0; s < span.named().size(); ++s) {
    const NamedSpan& named = span.named()[s];
    const std::uint32_t end = named.start + named.tokens;
    if (end > query) continue;
    for (std::uint32_t quad = 0; quad < rows.quads(); ++quad) {
      const float* const e = rows.e(query, quad);
      QuadSums all{}, kept{};
      for (std::uint32_t token = named.start; token < end; ++token) add_token(all, e, token);
      for (std::size_t l = 0; l < stats.size(); ++l) {
        const auto* const last = tokens + begins[l + 1];
        for (const auto* token = std::lower_bound(tokens + begins[l], last, named.start);
             token < last && *token < end; ++token)
          add_token(kept, e, *token);
        for (std::uint32_t h = 0; h < rows.view().heads_in(quad); ++h) {
          const std::size_t head = quad * kQuad + h;
          const double sum = rows.sums(query)[head];
          stats[l].heads[head].spans[s].add(span.block(query), kept[h] / sum, all[h] / sum);
        }
      }
    }
  }
}

}  // namespace kvlab
