#include "sim/device/batch.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/host/transfer.hpp"
#include "traces/base/parallel.hpp"

namespace kvlab {

using cuda::check;
using cuda::DeviceBuffer;
using kernels::Type;

/// Reads the head tasks, several at a time. Threads on the host read the trace, and the device
/// rotates the vectors.
void Batch::read() {
  const ModelShape& shape = plan_.trace.shape();
  const std::size_t tokens = plan_.trace.tokens(), head = tokens * shape.head_size,
                    heads = shape.group() + 2;
  const std::size_t group_size = sizes_.land_at_once(tasks_.size(), plan_.threads);
  const cuda::PinnedBuffer staging(group_size * sizes_.landing());
  const DeviceBuffer landing(staging.bytes(), "the replay");
  for (std::size_t first = 0; first < tasks_.size(); first += group_size) {
    const std::size_t count = std::min(group_size, tasks_.size() - first);
    parallel_for(count * heads, plan_.threads, [&](std::size_t i) {
      const HeadTask task = tasks_[first + i / heads];
      const auto h = static_cast<std::uint32_t>(i % heads), group = shape.group();
      const Part part = h < group ? Part::q : h == group ? Part::k : Part::v;
      plan_.trace.read(part, task.layer, part == Part::q ? task.kv_head * group + h : task.kv_head,
                       0, plan_.trace.tokens(), staging.as<float>() + i * head);
    });
    check(cudaMemcpyAsync(landing.data(), staging.data(), count * heads * head * sizeof(float),
                          cudaMemcpyHostToDevice, on_device_.stream()),
          "sending a trace");
    send_features(first, count, staging.as<float>());
    for (std::size_t i = 0; i < count * heads; ++i) {
      const kernels::ReplayVectors from{landing.as<float>() + i * head, KVLAB_F32, shape.head_size};
      const auto h = static_cast<std::uint32_t>(i % heads), group = shape.group();
      const std::size_t task = first + i / heads;
      if (h < group) on_device_.take_queries(from, task, h);
      if (h >= group) on_device_.copy(from, task, h == group ? Part::k : Part::v);
      if (h == group) on_device_.take_keys(from, task);
    }
    check(cudaStreamSynchronize(on_device_.stream()), "reading a trace");
  }
  on_device_.make_copies();
  read_projections();
}

void Batch::send_features(std::size_t first, std::size_t count, const float* landed) const {
  const std::size_t task_values = sizes_.tokens * sizes_.token_features,
                    head = plan_.trace.tokens() * sizes_.dim;
  std::vector<float> all(count * task_values);
  parallel_for(task_values ? count : 0, plan_.threads, [&](std::size_t i) {
    const HeadTask task = tasks_[first + i];
    const float* const keys = landed + (i * (sizes_.group + 2) + sizes_.group) * head;
    FeaturesByName feature_values;
    const RowSpec& row = plan_.trace.row(task.layer);
    const HeadView view{.tokens = plan_.trace.tokens(),
                        .group = static_cast<std::uint32_t>(sizes_.group),
                        .head_size = static_cast<std::uint32_t>(sizes_.dim),
                        .q = keys - sizes_.group * head,
                        .q_head_stride = head,
                        .q_token_stride = sizes_.dim,
                        .k = keys,
                        .v = keys + head,
                        .kv_token_stride = sizes_.dim,
                        .output = weights_of(plan_.output, task.layer, task.kv_head),
                        .feature_values = &feature_values,
                        .rope = &row.rope,
                        .softmax_scale = row.scale};
    for (const DeviceSweep::Features& features : sweep_.features) {
      const auto& names = features.like->policy.features;
      add_trace_features(plan_.trace, task.layer, task.kv_head, names, plan_.output,
                         feature_values);
      const TokenFeatures own(names, view, features.like->appends);
      std::copy_n(own.from(0), view.tokens * names.size(),
                  all.data() + i * task_values + features.first * sizes_.tokens);
    }
  });
  cuda::write(parts_.features + first * task_values, all, "sending a trace");
}

void Batch::read_projections() {
  const auto send = [&](auto read, auto put) {
    std::vector<decltype(read(tasks_[0]))> some(std::max(1u, plan_.threads));
    for (std::size_t first = 0; first < tasks_.size(); first += some.size()) {
      some.resize(std::min(some.size(), tasks_.size() - first));
      parallel_for(some.size(), plan_.threads,
                   [&](std::size_t i) { some[i] = read(tasks_[first + i]); });
      for (std::size_t i = 0; i < some.size(); ++i) put(first + i, some[i]);
    }
  };
  const auto copy = [](auto* to, std::size_t task, const auto& own) {
    check(cudaMemcpy(to + task * own.size(), own.data(), own.size() * sizeof(own[0]),
                     cudaMemcpyHostToDevice),
          "sending a trace");
  };
  if (sizes_.columns.residual)
    send(
        [&](const HeadTask& task) {
          return plan_.trace.sketch(task.layer, task.kv_head, kResidualColumns);
        },
        [&](std::size_t task, const auto& own) { copy(parts_.sketches, task, own); });
  if (!sizes_.columns.gradient_samples) return;
  const std::vector<std::uint32_t> queries = plan_.measured.queries();
  send([&](const HeadTask& task) { return scaled_gradients(task, queries); },
       [&](std::size_t task, const ScaledGradients& own) {
         copy(parts_.gradients, task, own.values);
         copy(parts_.term_scales, task, own.scales);
       });
}

/// Multiplies each query's gradients by a power of two that scales the largest to [2^7, 2^8), so
/// that every dtype can represent them.
Batch::ScaledGradients Batch::scaled_gradients(const HeadTask& task,
                                               std::span<const std::uint32_t> queries) const {
  constexpr int kExponent = 8;
  std::vector<float> rows = gradients_of(plan_.trace, task.layer, task.kv_head, queries);
  ScaledGradients scaled;
  const std::size_t query_size = sizes_.gradient();
  for (auto row = rows.begin(); row != rows.end(); row += static_cast<std::ptrdiff_t>(query_size)) {
    float max_magnitude = 0;
    for (std::size_t i = 0; i < query_size; ++i)
      max_magnitude = std::max(max_magnitude, std::abs(row[i]));
    const int exponent = max_magnitude > 0 ? std::ilogb(max_magnitude) + 1 - kExponent : 0;
    for (std::size_t i = 0; i < query_size; ++i) row[i] = std::ldexp(row[i], -exponent);
    scaled.scales.push_back(std::ldexp(1.0f, exponent));
  }
  scaled.values.resize(rows.size() * sizes_.element_bytes);
  from_float(plan_.trace.shape().dtype, rows.data(), rows.size(), scaled.values.data());
  return scaled;
}

void Batch::replay(const Walks& walks) {
  const std::uint32_t tokens = plan_.trace.tokens(),
                      block = static_cast<std::uint32_t>(sizes_.block);
  for (std::uint32_t first = 0; first < tokens; first += block) {
    on_device_.replay_block(walks, first, std::min(block, tokens - first));
    project_errors();
    on_device_.sum_metrics();
  }
  check(cudaStreamSynchronize(on_device_.stream()), "replaying");
}

void Batch::project_errors() {
  if (sizes_.columns.gradient_samples) on_device_.change();
  if (!sizes_.columns.residual) return;
  static_assert(kernels::kReplayResiduals == kResidualColumns);
  const std::size_t width = sizes_.group * sizes_.dim, rows = sizes_.configs * sizes_.block_samples;
  on_device_.multiply({.type = KVLAB_F32,
                       .rows = rows,
                       .n = kResidualColumns,
                       .k = width,
                       .x = {parts_.block.sets.values, width, rows * width},
                       .w = {parts_.sketches, kResidualColumns, width * kResidualColumns},
                       .y = {parts_.block_residual, kResidualColumns, rows * kResidualColumns},
                       .w_by_k = true,
                       .alignment = 256});
}

std::vector<std::vector<HeadOutcome>> Batch::outcomes() const {
  const auto fetch = [](auto part) {
    return cuda::download(std::span<const typename decltype(part)::element_type>(part));
  };
  const BatchSums batch_sums{fetch(parts_.sums), fetch(parts_.errors), fetch(parts_.progress)};
  std::vector<std::vector<HeadOutcome>> all(tasks_.size());
  parallel_for(tasks_.size(), plan_.threads, [&](std::size_t task) {
    std::vector<HeadOutcome>& own = all[task];
    for (std::size_t c = 0; c < sizes_.configs; ++c)
      own.push_back(outcome(task * sizes_.configs + c, batch_sums));
    // The following arrays are by far the largest. Each head task copies its part separately, so
    // that all threads write to the host's memory.
    const auto share = [&](std::span<const float> part, auto put) {
      const std::size_t task_values = part.size() / tasks_.size(),
                        size = task_values / sizes_.configs;
      const auto fetched = fetch(part.subspan(task * task_values, task_values));
      for (std::size_t c = 0; c < own.size(); ++c)
        put(own[c].stats, std::span(fetched).subspan(c * size, size));
    };
    const auto copy_to = [](std::vector<float> HeadStats::*part) {
      return [part](HeadStats& to, auto from) { (to.*part).assign(from.begin(), from.end()); };
    };
    share(parts_.residual, copy_to(&HeadStats::residual));
    separate_quantization(own);  // before the recalls are copied, because fp16 copies have none
    share(parts_.changes, copy_to(&HeadStats::changes));
    share(parts_.recalls,
          [&](HeadStats& to, auto from) { to.take_recalls(plan_.measured, from.data()); });
  });
  return all;
}

/// Computes the errors that are due to quantization alone: those of a configuration minus those of
/// its fp16 copy. Then removes the outcomes of the fp16 copies.
void Batch::separate_quantization(std::vector<HeadOutcome>& own) const {
  const std::size_t configs = sweep_.fp16_copy.size(), columns = sizes_.columns.residual;
  for (std::size_t c = 0; c < configs; ++c) {
    if (sweep_.fp16_copy[c] < 0) continue;
    const std::vector<float> without =
                                 own[static_cast<std::size_t>(sweep_.fp16_copy[c])].stats.residual,
                             with = std::exchange(own[c].stats.residual, {});
    for (std::size_t at = 0; at < with.size(); at += columns) {
      const auto from = with.begin() + static_cast<std::ptrdiff_t>(at);
      own[c].stats.residual.insert(own[c].stats.residual.end(), from,
                                   from + static_cast<std::ptrdiff_t>(columns));
      for (std::size_t i = at; i < at + columns; ++i)
        own[c].stats.residual.push_back(with[i] - without[i]);
    }
  }
  own.erase(own.begin() + static_cast<std::ptrdiff_t>(configs), own.end());
}

LiveCounts Batch::counts_of(std::size_t cache, const kernels::ReplayProgress& walked) const {
  const auto window = sweep_.window_configs.find(static_cast<std::int32_t>(cache % sizes_.configs));
  if (window == sweep_.window_configs.end())
    return {.evictions = walked.evictions, .max_live = walked.max_live, .end = walked.live};
  const HeadTask task = tasks_[cache / sizes_.configs];
  return live_counts(*window->second, task.layer,
                     window->second->budget_of(task.layer, task.kv_head));
}

HeadOutcome Batch::outcome(std::size_t cache, const BatchSums& batch_sums) const {
  const LiveCounts counts = counts_of(cache, batch_sums.progress[cache]);
  HeadOutcome outcome{{}, counts.evictions, counts.max_live, counts.end};
  HeadStats& stats = outcome.stats;
  stats.resize(plan_.measured, static_cast<std::uint32_t>(sizes_.group), sizes_.columns);
  // stats.resize() has set the sums that MeasuredQueries counts. The device leaves these at 0, so
  // its sums can be added.
  for (std::size_t i = 0; i < stats.sums.size(); ++i)
    stats.sums[i] += batch_sums.sums[cache * stats.sums.size() + i];
  std::copy_n(batch_sums.errors.data() + cache * stats.errors.size(), stats.errors.size(),
              stats.errors.data());
  return outcome;
}

double Batch::attend() {
  const HeadTaskSizes& s = sizes_;
  const kernels::ReplayBlock& buffers = parts_.block;
  const std::size_t rows = s.block * s.group;
  const auto block = static_cast<std::uint32_t>(s.block);
  double flops = 0;
  for (std::uint32_t first = 0; first < plan_.trace.tokens(); first += block) {
    const std::uint32_t count = std::min(block, plan_.trace.tokens() - first),
                        width = first + count;
    on_device_.multiply_rows(first, count, parts_.rounded_keys);
    check(kernels::replay_softmax(
              {buffers.shape, static_cast<int>(first), static_cast<int>(count),
               static_cast<int>(block), parts_.products, buffers.shape.type, buffers.rows.e},
              on_device_.stream()),
          "softmax");
    on_device_.multiply({.type = buffers.shape.type,
                         .rows = count * s.group,
                         .n = s.dim,
                         .k = width,
                         .x = {buffers.rows.e, s.tokens, rows * s.tokens},
                         .w = {parts_.values, s.dim, s.tokens * s.dim},
                         .y = {parts_.outputs, s.dim, rows * s.dim},
                         .w_by_k = true});
    flops += 4.0 * buffers.shape.tasks * static_cast<double>(count * s.group * width * s.dim);
  }
  check(cudaStreamSynchronize(on_device_.stream()), "attention");
  return flops;
}

void Batch::keep_sets() {
  kept_ = cuda::zeroes(tasks_.size() * sizes_.configs * sizes_.tokens * sizes_.words() * 4,
                       "kept sets");
  on_device_.keep_bits(kept_.as<std::uint32_t>());
}

void Batch::show_sets(std::size_t first_task, const KeptWatcher& watcher) const {
  const auto bits = cuda::download<std::uint32_t>(kept_);
  std::vector<std::uint32_t> live;
  for (std::size_t cache = 0; cache < tasks_.size() * sizes_.configs; ++cache)
    for (std::uint32_t query = 0;
         cache % sizes_.configs < sweep_.fp16_copy.size() && query < plan_.trace.tokens();
         ++query) {
      const std::uint32_t* const row =
          bits.data() + (cache * sizes_.tokens + query) * sizes_.words();
      live.clear();
      for (std::uint32_t position = 0; position <= query; ++position)
        if (row[position / 32] >> position % 32 & 1) live.push_back(position);
      watcher(first_task + cache / sizes_.configs, cache % sizes_.configs, query, live);
    }
}

}  // namespace kvlab
