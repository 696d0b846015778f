#include "sim/head_view.hpp"

#include <algorithm>

namespace kvlab {

TokenColumns::TokenColumns(const std::vector<std::string>& names, const HeadView& view,
                           const std::vector<Admission>& admissions)
    : width_(names.size()) {
  if (names.empty()) return;
  ColumnMaker maker(names, view.head_size, view.output);
  for (const Admission& admission : admissions) {
    const KeyValueRows rows{view.key(admission.first),
                            view.v + admission.first * view.kv_token_stride, view.kv_token_stride,
                            admission.tokens};
    const float* const columns = maker.admit(rows, view.brought, admission.first);
    values_.insert(values_.end(), columns, columns + admission.tokens * width_);
  }
}

void bring_columns(const TraceReader& trace, std::uint32_t layer, std::uint32_t kv_head,
                   const std::vector<std::string>& names, bool knows_projections,
                   BroughtColumns& brought) {
  for (const std::string& name : names) {
    if (is_computed(name, knows_projections) || brought.contains(name)) continue;
    std::vector<float>& column = brought[name];
    column.resize(trace.tokens());
    trace.column(name, layer, kv_head, column.data());
  }
}

void rotate_original(const RopeTable& rope, const HeadArithmetic& arithmetic, const float* x,
                     std::uint32_t head_size, std::uint32_t position, float* y) {
  rope.rotate(x, head_size, position, y);
  if (arithmetic.rounding)
    for (std::uint32_t d = 0; d < head_size; ++d) y[d] = round_to(*arithmetic.rounding, y[d]);
}

ResolvedConfig resolve(const CacheConfig& config, const std::vector<Segment>& segments,
                       std::uint32_t sequence, HeadCounts model) {
  const std::uint32_t length =
      segments.empty() ? 0 : segments.back().start + segments.back().tokens;
  ResolvedConfig resolved = resolve(config, length, sequence, model);
  for (const Segment& segment : segments) {
    const bool is_prompt = segment.kind == SegmentKind::prompt;
    const bool dense = is_prompt && config.prefill.chunk == 0;
    const std::uint32_t chunk = dense ? segment.tokens : is_prompt ? config.prefill.chunk : 1;
    for (std::uint32_t done = 0; done < segment.tokens; done += chunk)
      resolved.admissions.push_back({segment.start + done, std::min(chunk, segment.tokens - done)});
    if (is_prompt && segment.tokens > 0) resolved.admissions.back().ends_prompt = true;
    resolved.in_dense_prompt.resize(segment.start + segment.tokens, dense);
  }
  return resolved;
}

}  // namespace kvlab
