#include "sim/head_measure.hpp"

#include "traces/base/numeric/softmax.hpp"

namespace kvlab {

std::span<const float> HeadMeasure::add_row(std::uint32_t query, std::uint32_t head,
                                            std::span<const std::uint32_t> tokens, SharedRows& rows,
                                            const Accumulate& accumulate) {
  if (head == 0) begin_query(query);
  const SharedRows::Row full = rows.row(query, head);
  double recall = 1;
  if (tokens.size() <= query) {
    kept_.resize(tokens.size());
    for (std::size_t i = 0; i < tokens.size(); ++i) kept_[i] = full.e[tokens[i]];
    const double kept = lane_sum(kept_.data(), tokens.size()) + static_cast<double>(full.sink);
    recall = kept / static_cast<double>(full.sum);
  }
  const SharedRows::Requests wanted = rows.requests(query, head);
  std::uint32_t hits = 0;
  for (const std::uint32_t position : tokens)
    if (position < query) hits += wanted.flags[position];
  add(0, head,
      {.recall = recall,
       .position = query,
       .live = static_cast<std::uint32_t>(tokens.size()),
       .wanted = wanted.count,
       .missed = wanted.count - hits});
  add_passages(head, full.e.data(), 1, full.sum, tokens);
  if (!samples(query) && rows.gradient_samples() == 0) return {};
  out_.assign(view_.head_size, 0.0f);
  accumulate(out_.data());
  const std::span<const float> full_output = rows.output(query, head);
  add_changes(query, head, full_output, rows);
  if (!samples(query)) return out_;
  double error = 0, size = 0;
  for (std::size_t d = 0; d < out_.size(); ++d) {
    const double x = full_output[d], difference = x - out_[d];
    error += difference * difference;
    size += x * x;
  }
  add_output(0, head, error, size, full_output.data(), out_.data(), 1.0f);
  return out_;
}

/// Adds, for each gradient sample, how much the error of the head's output changes the
/// log-likelihood.
void HeadMeasure::add_changes(std::uint32_t query, std::uint32_t head, std::span<const float> full,
                              SharedRows& rows) {
  for (std::uint32_t gradient_sample = 0; gradient_sample < rows.gradient_samples();
       ++gradient_sample) {
    const float* const gradient =
        rows.gradients(query) + (gradient_sample * view_.group + head) * full.size();
    double change = 0;
    for (std::size_t d = 0; d < full.size(); ++d)
      change += static_cast<double>(gradient[d]) *
                (static_cast<double>(out_[d]) - static_cast<double>(full[d]));
    changes(0, rows.gradient_samples())[gradient_sample] += static_cast<float>(change);
  }
}

}  // namespace kvlab
