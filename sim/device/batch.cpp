#include "sim/device/batch.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/host/transfer.hpp"
#include "traces/base/parallel.hpp"

namespace kvlab {

using cuda::check;
using cuda::DeviceBuffer;
using kernels::ReplaySum;
using kernels::Type;

constexpr std::uint32_t kAlignment = 16;  // of what is multiplied, bytes

void Batch::allocate() {
  std::vector<std::uint32_t> layers, kv_heads;
  for (const ReplayUnit& unit : units_) {
    layers.push_back(unit.layer);
    kv_heads.push_back(unit.kv_head);
  }
  layers_ = cuda::upload(layers, "the replay");
  kv_heads_ = cuda::upload(kv_heads, "the replay");
  args_.layers = layers_.as<std::uint32_t>();
  args_.kv_heads = kv_heads_.as<std::uint32_t>();
  memory_ = cuda::placed(
      [&](cuda::Arena& arena) { lay_out(arena, sizes_, units_.size(), parts_, args_); },
      "the replay");
  const auto clear = [&](auto part) {
    if (part.empty()) return;
    check(cudaMemsetAsync(part.data(), 0, part.size_bytes(), stream_), "clearing");
  };
  clear(parts_.progress);
  clear(parts_.sums);
  clear(parts_.errors);
  clear(parts_.zero_outputs);
  clear(parts_.named);
}

/// The arguments of the members' walk.
kernels::ReplayArgs Batch::args_of(const Members& members) const {
  kernels::ReplayArgs args = args_;
  args.members = members.on_device.as<std::int32_t>();
  args.member_count = static_cast<int>(members.configs.size());
  args.slot_bytes = members.policy->slot_bytes;
  args.squeezed = members.squeezed;
  args.room_slots = members.most_slots;
  return args;
}

Walk Batch::walk_of(const Members& members) const {
  kernels::ReplayArgs args = args_of(members);
  args.rows.count = 1;  // any
  Walk walk{members.policy, {}};
  check(kernels::walk_variant(args, walk.variant), "asking for the device's limits");
  return walk;
}

std::vector<Walk> Batch::walks() const {
  std::vector<Walk> all;
  for (const Members& members : grid_.members) all.push_back(walk_of(members));
  return all;
}

/// Some units at a time: the threads read, the device rotates.
void Batch::read() {
  const ModelShape& shape = plan_.trace.shape();
  const std::size_t tokens = plan_.trace.tokens(), head = tokens * shape.head_size,
                    heads = shape.group() + 2;
  const std::size_t at_once = sizes_.land_at_once(units_.size(), plan_.threads);
  const cuda::PinnedBuffer staging(at_once * sizes_.landing());
  const DeviceBuffer landing(staging.bytes(), "the replay");
  for (std::size_t first = 0; first < units_.size(); first += at_once) {
    const std::size_t count = std::min(at_once, units_.size() - first);
    parallel_for(count * heads, plan_.threads, [&](std::size_t i) {
      const ReplayUnit unit = units_[first + i / heads];
      const auto h = static_cast<std::uint32_t>(i % heads), group = shape.group();
      const Part part = h < group ? Part::q : h == group ? Part::k : Part::v;
      plan_.trace.read(part, unit.layer, part == Part::q ? unit.kv_head * group + h : unit.kv_head,
                       0, plan_.trace.tokens(), staging.as<float>() + i * head);
    });
    check(cudaMemcpyAsync(landing.data(), staging.data(), count * heads * head * sizeof(float),
                          cudaMemcpyHostToDevice, stream_),
          "sending a trace");
    for (std::size_t i = 0; i < count * heads; ++i) {
      const auto h = static_cast<std::uint32_t>(i % heads), group = shape.group();
      rotate(landing.as<float>() + i * head, first + i / heads,
             h < group    ? Part::q
             : h == group ? Part::k
                          : Part::v,
             h);
    }
    check(cudaStreamSynchronize(stream_), "reading a trace");
  }
  read_projections();
}

void Batch::read_projections() {
  const auto send = [&](float* to, auto read) {
    std::vector<std::vector<float>> some(std::max(1u, plan_.threads));
    for (std::size_t first = 0; first < units_.size(); first += some.size()) {
      some.resize(std::min(some.size(), units_.size() - first));
      parallel_for(some.size(), plan_.threads,
                   [&](std::size_t i) { some[i] = read(units_[first + i]); });
      for (const auto& own : some) {
        check(cudaMemcpy(to, own.data(), own.size() * sizeof(float), cudaMemcpyHostToDevice),
              "sending a trace");
        to += own.size();
      }
    }
  };
  if (sizes_.columns.residual)
    send(parts_.sketches, [&](const ReplayUnit& unit) {
      return plan_.trace.sketch(unit.layer, unit.kv_head, kResidualColumns);
    });
  if (sizes_.columns.draws)
    send(parts_.gradients, [&](const ReplayUnit& unit) {
      return sampled_gradients(plan_.trace, unit.layer, unit.kv_head, plan_.span);
    });
}

void Batch::rotate(const float* from, std::size_t unit, Part part, std::uint32_t head) {
  const UnitSizes& s = sizes_;
  const std::size_t of_unit = unit * s.tokens * s.dim;
  kernels::ReplayRotateArgs args{.from = from,
                                 .rope = args_.tensors.rope,
                                 .rows = static_cast<int>(plan_.trace.tokens()),
                                 .tokens = static_cast<int>(plan_.trace.tokens()),
                                 .head_size = args_.shape.head_size,
                                 .rotated = args_.shape.rotated,
                                 .group = 1,
                                 .group_head = 0,
                                 .plain = nullptr,
                                 .parts = nullptr,
                                 .rounded = nullptr,
                                 .rounding = args_.shape.rounding};
  if (part != Part::q) {  // as in the trace
    kernels::ReplayRotateArgs copy = args;
    copy.rotated = 0;
    copy.rounding = args_.tensors.type;
    copy.rounded = (part == Part::k ? parts_.keys : parts_.values) + of_unit * s.element_bytes;
    check(kernels::replay_rotate(copy, stream_), "reading a trace");
  }
  if (part == Part::v) return;
  if (part == Part::k && parts_.paired_keys)
    check(kernels::replay_pair_keys(
              args_.shape, args.tokens, from, args_.tensors.type,
              parts_.paired_keys + unit * s.tokens * 2 * s.pairs * s.element_bytes,
              parts_.key_scales + unit * s.tokens, stream_),
          "reading a trace");
  if (part == Part::q && parts_.plain_queries) {
    kernels::ReplayRotateArgs copy = args;
    copy.rotated = 0;
    copy.group = static_cast<int>(s.group);
    copy.group_head = static_cast<int>(head);
    copy.plain = parts_.plain_queries + of_unit * s.group;
    check(kernels::replay_rotate(copy, stream_), "reading a trace");
  }
  if (part == Part::k) {
    args.parts = parts_.key_parts ? parts_.key_parts + 3 * of_unit : nullptr;
    args.rounded = parts_.rounded_keys + of_unit * s.product_bytes;
  } else {
    args.group = static_cast<int>(s.group);
    args.group_head = static_cast<int>(head);
    args.plain = parts_.queries + of_unit * s.group;
    args.rounded = parts_.rounded_queries + of_unit * s.group * s.product_bytes;
  }
  check(kernels::replay_rotate(args, stream_), "rotating queries and keys");
}

void Batch::multiply(Type type, const void* queries, const void* keys, float* to,
                     std::uint32_t first, std::uint32_t count) {
  const auto tokens = static_cast<std::int64_t>(sizes_.tokens),
             group = static_cast<std::int64_t>(sizes_.group),
             dim = static_cast<std::int64_t>(sizes_.dim);
  const auto* const from = static_cast<const std::byte*>(queries) +
                           first * group * dim * static_cast<std::int64_t>(kernels::bytes_of(type));
  product_({.type = type,
            .batches = static_cast<int>(units_.size()),
            .rows = static_cast<int>(count * group),
            .n = static_cast<int>(first + count),
            .k = static_cast<int>(dim),
            .x = from,
            .x_row = dim,
            .x_batch = tokens * group * dim,
            .w = keys,
            .w_row = dim,
            .w_batch = tokens * dim,
            .y = to,
            .y_row = tokens,
            .y_batch = static_cast<std::int64_t>(sizes_.block) * group * tokens,
            .alignment = kAlignment},
           stream_);
}

/// Of queries and keys that were not rounded, in float32, by three products in TF32.
void Batch::multiply_parts(std::uint32_t first, std::uint32_t count) {
  check(kernels::replay_query_parts(args_.shape, static_cast<int>(first), static_cast<int>(count),
                                    args_.rows.block, parts_.queries, parts_.query_parts, stream_),
        "computing rows");
  const auto tokens = static_cast<std::int64_t>(sizes_.tokens),
             rows = static_cast<std::int64_t>(sizes_.block * sizes_.group),
             parts = static_cast<std::int64_t>(3 * sizes_.dim);
  product_({.type = Type::f32,
            .batches = static_cast<int>(units_.size()),
            .rows = static_cast<int>(count * sizes_.group),
            .n = static_cast<int>(first + count),
            .k = static_cast<int>(parts),
            .x = parts_.query_parts,
            .x_row = parts,
            .x_batch = rows * parts,
            .w = parts_.key_parts,
            .w_row = parts,
            .w_batch = tokens * parts,
            .y = parts_.unrounded_products,
            .y_row = tokens,
            .y_batch = rows * tokens,
            .tf32 = true,
            .alignment = kAlignment},
           stream_);
}

void Batch::make_rows(std::uint32_t first, std::uint32_t count) {
  args_.rows.first = static_cast<int>(first);
  args_.rows.count = static_cast<int>(count);
  multiply(args_.shape.rounding, parts_.rounded_queries, parts_.rounded_keys, parts_.products,
           first, count);
  if (parts_.key_parts) multiply_parts(first, count);
  check(kernels::replay_rows({.shape = args_.shape,
                              .span = args_.span,
                              .rows = args_.rows,
                              .products = parts_.products,
                              .unrounded = parts_.unrounded_products,
                              .tensors = args_.tensors},
                             stream_),
        "computing rows");
}

void Batch::replay(const Walks& walks) {
  const std::uint32_t tokens = plan_.trace.tokens(),
                      block = static_cast<std::uint32_t>(sizes_.block);
  for (std::uint32_t first = 0; first < tokens; first += block) {
    make_rows(first, std::min(block, tokens - first));
    streams_.fork();
    for (std::size_t m = 0; m < grid_.members.size(); ++m) {
      const Members& members = grid_.members[m];
      check(kernels::replay_walk(walks.kernel(walk_of(members)), args_of(members),
                                 streams_.branch(m)),
            fmt::format("replaying {}", members.policy->info.name));
    }
    if (!grid_.windows.empty()) {
      kernels::ReplayArgs args = args_;
      args.members = grid_.windows_on_device.as<std::int32_t>();
      args.member_count = static_cast<int>(grid_.windows.size());
      check(kernels::replay_windows(args, streams_.branch(grid_.members.size())),
            "replaying windows");
    }
    streams_.join();
    check(kernels::replay_outputs(args_, stream_), "computing outputs");
    project_errors();
    check(kernels::replay_errors(args_, stream_), "computing errors");
  }
  check(cudaStreamSynchronize(stream_), "replaying");
}

void Batch::project_errors() {
  if (sizes_.columns.draws) check(kernels::replay_changes(args_, stream_), "computing errors");
  if (!sizes_.columns.residual) return;
  static_assert(kernels::kReplayResiduals == kResidualColumns);
  const auto width = static_cast<std::int64_t>(sizes_.group * sizes_.dim),
             rows = static_cast<std::int64_t>(sizes_.configs * sizes_.block_samples);
  constexpr std::int64_t kColumns = kernels::kReplayResiduals;
  product_({.type = Type::f32,
            .batches = static_cast<int>(units_.size()),
            .rows = static_cast<int>(rows),
            .n = static_cast<int>(kColumns),
            .k = static_cast<int>(width),
            .x = args_.samples.own,
            .x_row = width,
            .x_batch = rows * width,
            .w = parts_.sketches,
            .w_row = kColumns,
            .w_batch = width * kColumns,
            .w_by_k = true,
            .y = args_.samples.residual,
            .y_row = kColumns,
            .y_batch = rows * kColumns},
           stream_);
}

std::vector<std::vector<HeadOutcome>> Batch::outcomes() const {
  const auto fetch = [](auto part) {
    return cuda::download(std::span<const typename decltype(part)::element_type>(part));
  };
  const Figures figures{fetch(parts_.sums),         fetch(parts_.errors), fetch(parts_.projected),
                        fetch(parts_.zero_outputs), fetch(parts_.named),  fetch(parts_.progress)};
  std::vector<std::vector<HeadOutcome>> all(units_.size());
  parallel_for(units_.size(), plan_.threads, [&](std::size_t unit) {
    for (std::size_t c = 0; c < sizes_.configs; ++c)
      all[unit].push_back(outcome(unit * sizes_.configs + c, figures));
  });
  return all;
}

HeadOutcome Batch::outcome(std::size_t figure, const Figures& figures) const {
  const auto& [sums, errors, projected, zeros, named, progress] = figures;
  const std::size_t heads = 4 * sizes_.quads;
  const auto sum = [&, &sums = sums](ReplaySum kind, std::size_t head, std::uint32_t block) {
    return sums[((figure * kernels::kReplaySums + static_cast<std::size_t>(kind)) * heads + head) *
                    kernels::kReplaySpanBlocks +
                block];
  };
  HeadOutcome outcome;
  HeadStats& stats = outcome.stats;
  stats.resize(plan_.span, static_cast<std::uint32_t>(sizes_.group), sizes_.columns.all());
  for (std::uint32_t i = 0; i < plan_.span.size(); ++i)
    stats.heads[0].recall.below[plan_.span.block_of(i)] += 1;
  const std::vector<double> queries = stats.heads[0].recall.below;
  for (std::size_t head = 0; head < sizes_.group; ++head) {
    HeadStats::PerQueryHead& own = stats.heads[head];
    own.recall.below = own.nll.below = queries;
    for (std::uint32_t block = 0; block < plan_.span.blocks(); ++block) {
      own.recall.above[block] = sum(ReplaySum::recall, head, block);
      own.nll.above[block] = sum(ReplaySum::nll, head, block);
      own.miss.add(block, sum(ReplaySum::missed, head, block), sum(ReplaySum::wanted, head, block));
      own.error.add(block, sum(ReplaySum::error, head, block), sum(ReplaySum::errors, head, block));
      for (std::size_t s = 0; s < sizes_.named; ++s) {
        const double2& of =
            named[((figure * sizes_.named + s) * heads + head) * kernels::kReplaySpanBlocks +
                  block];
        own.spans[s].add(block, of.x, of.y);
      }
    }
    own.zero_outputs = zeros[figure * heads + head];
  }
  for (std::size_t sample = 0; sample < sizes_.samples; ++sample) {
    stats.error2[sample] = errors[2 * (figure * sizes_.samples + sample)];
    stats.output2[sample] = errors[2 * (figure * sizes_.samples + sample) + 1];
  }
  std::copy_n(projected.begin() + static_cast<std::ptrdiff_t>(figure * stats.projected.size()),
              stats.projected.size(), stats.projected.begin());
  const auto window = grid_.window_counts.find(static_cast<std::int32_t>(figure % sizes_.configs));
  const Grid::Counts counts = window != grid_.window_counts.end()
                                  ? window->second
                                  : Grid::Counts{progress[figure].evictions,
                                                 progress[figure].most_live, progress[figure].live};
  outcome.evictions = counts.evictions;
  outcome.live_max = counts.most_live;
  outcome.live_end = counts.live;
  return outcome;
}

int Batch::waves(const Walks& walks) const {
  int all = 0;
  for (const Members& members : grid_.members) {
    kernels::ReplayArgs args = args_of(members);
    args.rows.count = 1;
    int own = 0;
    check(kernels::replay_waves(walks.kernel(walk_of(members)), args, own),
          "asking for the device's limits");
    all += own;
  }
  return all;
}

double Batch::attend() {
  const auto tokens = static_cast<std::int64_t>(sizes_.tokens),
             dim = static_cast<std::int64_t>(sizes_.dim),
             rows = static_cast<std::int64_t>(sizes_.block * sizes_.group);
  const auto block = static_cast<std::uint32_t>(sizes_.block);
  double flops = 0;
  for (std::uint32_t first = 0; first < plan_.trace.tokens(); first += block) {
    const std::uint32_t count = std::min(block, plan_.trace.tokens() - first);
    multiply(args_.shape.rounding, parts_.rounded_queries, parts_.rounded_keys, parts_.products,
             first, count);
    check(kernels::replay_softmax({.shape = args_.shape,
                                   .first = static_cast<int>(first),
                                   .count = static_cast<int>(count),
                                   .block = static_cast<int>(block),
                                   .products = parts_.products,
                                   .type = args_.tensors.type,
                                   .to = args_.rows.e},
                                  stream_),
          "softmax");
    const int width = static_cast<int>(first + count),
              wanted = static_cast<int>(count * sizes_.group);
    product_({.type = args_.tensors.type,
              .batches = args_.shape.units,
              .rows = wanted,
              .n = static_cast<int>(dim),
              .k = width,
              .x = args_.rows.e,
              .x_row = tokens,
              .x_batch = rows * tokens,
              .w = parts_.values,
              .w_row = dim,
              .w_batch = tokens * dim,
              .w_by_k = true,
              .y = args_.rows.outputs,
              .y_row = dim,
              .y_batch = rows * dim,
              .alignment = kAlignment},
             stream_);
    flops += 4.0 * args_.shape.units * wanted * width * static_cast<double>(dim);
  }
  check(cudaStreamSynchronize(stream_), "attention");
  return flops;
}

void Batch::keep_sets() {
  args_.figures.words = static_cast<int>((sizes_.tokens + 31) / 32);
  const std::size_t words = static_cast<std::size_t>(args_.figures.words);
  kept_ = cuda::zeroes(units_.size() * sizes_.configs * sizes_.tokens * words * 4, "kept sets");
  args_.figures.kept = kept_.as<std::uint32_t>();
}

void Batch::show_sets(std::size_t first_unit, const KeptWatcher& watcher) const {
  const auto bits = cuda::download<std::uint32_t>(kept_);
  const auto words = static_cast<std::size_t>(args_.figures.words);
  std::vector<std::uint32_t> live;
  for (std::size_t figure = 0; figure < units_.size() * sizes_.configs; ++figure)
    for (std::uint32_t query = 0; query < plan_.trace.tokens(); ++query) {
      const std::uint32_t* const row = bits.data() + (figure * sizes_.tokens + query) * words;
      live.clear();
      for (std::uint32_t position = 0; position <= query; ++position)
        if (row[position / 32] >> position % 32 & 1) live.push_back(position);
      watcher(first_unit + figure / sizes_.configs, figure % sizes_.configs, query, live);
    }
}

}  // namespace kvlab
