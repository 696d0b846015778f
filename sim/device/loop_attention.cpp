#include "sim/device/loop_attention.hpp"

#include <algorithm>

#include "kernels/host/transfer.hpp"
#include "traces/base/numeric/dtype.hpp"
#include "traces/base/parallel.hpp"

namespace kvlab {
namespace {

Grid grid_of(const UnitsPlan& plan, std::span<const ResolvedConfig* const> configs) {
  return {configs, plan.tokens, false, false, static_cast<int>(plan.shape.kv_heads)};
}

UnitSizes outputs_alone(const UnitsPlan& plan, const Grid& grid) {
  UnitSizes sizes = sizes_of(plan, grid, 1);
  sizes.figures = false;
  return sizes;
}

/// Of each layer: configurations, each with its KV heads.
std::vector<ReplayUnit> units_of(const UnitsPlan& plan, std::size_t configs) {
  std::vector<ReplayUnit> units;
  for (std::uint32_t layer = 0; layer < plan.shape.layers; ++layer)
    for (std::size_t c = 0; c < configs; ++c)
      for (std::uint32_t head = 0; head < plan.shape.kv_heads; ++head)
        units.push_back({layer, head});
  return units;
}

std::uint64_t kv_bytes_peak_of(const ResolvedConfig& config, const ModelShape& shape) {
  ResolvedConfig window;  // what a layer with a span is
  window.admissions = config.admissions;
  std::uint64_t sum = 0;
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer)
    for (std::uint32_t head = 0; head < shape.kv_heads; ++head)
      sum += live_counts(config.span_of(layer) > 0 ? window : config, config.budget_of(layer, head),
                         bytes_of(shape.dtype))
                 .bytes_peak;
  return sum * shape.head_size / kCodeBlock;
}

}  // namespace

LoopAttention::LoopAttention(const UnitsPlan& plan, std::span<const ResolvedConfig* const> configs,
                             const Tables& tables, unsigned threads, cuda::Products& product,
                             Streams& streams, Walks& walks)
    : plan_(plan),
      configs_(configs),
      threads_(threads),
      grid_(grid_of(plan, configs)),
      units_(plan, grid_, outputs_alone(plan, grid_), units_of(plan, configs.size()), tables,
             product, streams, plan.shape.layers),
      walks_(walks),
      count_(configs.size() * plan.shape.kv_heads) {
  for (const ResolvedConfig* const config : configs)
    kv_bytes_peak_.push_back(kv_bytes_peak_of(*config, plan.shape));
  walks_.load(units_.walks(), threads);
}

std::size_t LoopAttention::bytes_of_config(const UnitsPlan& plan,
                                           std::span<const ResolvedConfig* const> configs) {
  return plan.shape.kv_heads * bytes_of(outputs_alone(plan, grid_of(plan, configs)), 1);
}

void LoopAttention::send_columns(std::uint32_t layer) {
  const UnitSizes& s = units_.sizes();
  const std::size_t heads = plan_.shape.kv_heads, of_head = s.tokens * s.dim,
                    of_unit = s.tokens * s.token_columns;
  std::vector<float> rows(2 * heads * of_head), columns(heads * of_unit);
  for (std::size_t c = 0; c < configs_.size(); ++c) {
    const auto& names = configs_[c]->policy.columns;
    if (names.empty()) continue;
    cuda::check(cudaStreamSynchronize(units_.stream()), "the closed loop");
    const auto fetch = [&](const std::byte* from, float* to) {
      const std::size_t bytes = heads * of_head * s.element_bytes;
      const auto stored = cuda::download(std::span(from + c * bytes, bytes));
      to_float(plan_.shape.dtype, stored.data(), heads * of_head, to);
    };
    fetch(keys(), rows.data());
    fetch(values(), rows.data() + heads * of_head);
    parallel_for(heads, threads_, [&](std::size_t head) {
      const float* const keys = rows.data() + head * of_head;
      const HeadView view{
          .tokens = plan_.tokens,
          .head_size = static_cast<std::uint32_t>(s.dim),
          .k = keys,
          .v = keys + heads * of_head,
          .kv_token_stride = s.dim,
          .output = weights_of(plan_.output, layer, static_cast<std::uint32_t>(head))};
      const TokenColumns own(names, view, configs_[c]->admissions);
      std::copy_n(own.from(0), view.tokens * names.size(), columns.data() + head * of_unit);
    });
    cuda::write(units_.parts().columns + c * heads * of_unit, columns, "the closed loop");
  }
}

void LoopAttention::attend(std::uint32_t layer, const std::byte* queries, std::byte* outputs) {
  const UnitSizes& s = units_.sizes();
  const kernels::Type type = units_.parts().block.shape.type;
  const std::size_t of_head = s.dim * s.element_bytes, of_key = s.tokens * of_head,
                    width = plan_.shape.query_heads;
  for (std::size_t unit = 0; unit < count_; ++unit) {
    const std::size_t config = unit / plan_.shape.kv_heads, kv_head = unit % plan_.shape.kv_heads;
    units_.take_keys({keys() + unit * of_key, type, static_cast<std::int64_t>(s.dim)}, unit);
    for (std::uint32_t head = 0; head < s.group; ++head)
      units_.take_queries(
          {queries + (config * s.tokens * width + kv_head * s.group + head) * of_head, type,
           static_cast<std::int64_t>(width * s.dim)},
          unit, head);
  }
  units_.make_copies();
  send_columns(layer);
  units_.clear();
  units_.set_layer(layer);
  const auto block = static_cast<std::uint32_t>(s.block);
  for (std::uint32_t first = 0; first < plan_.tokens; first += block)
    units_.replay_block(walks_, first, std::min(block, plan_.tokens - first), outputs);
}

}  // namespace kvlab
