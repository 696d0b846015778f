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

void Batch::allocate() {
  const UnitSizes& s = sizes_;
  std::vector<std::uint32_t> layers, kv_heads;
  for (const ReplayUnit& unit : units_) {
    layers.push_back(unit.layer);
    kv_heads.push_back(unit.kv_head);
  }
  buffers_.reserve(40);
  args_.layers = buffers_.emplace_back(cuda::upload(layers, "the replay")).as<std::uint32_t>();
  args_.kv_heads = buffers_.emplace_back(cuda::upload(kv_heads, "the replay")).as<std::uint32_t>();

  queries_ = take<float>(s.tokens * s.group * s.dim * 4);
  keys_ = take<std::byte>(s.tokens * s.dim * s.element_bytes);
  values_ = take<std::byte>(s.tokens * s.dim * s.element_bytes);
  rounded_queries_ = take<std::byte>(s.tokens * s.group * s.dim * s.product_bytes);
  rounded_keys_ = take<std::byte>(s.tokens * s.dim * s.product_bytes);
  if (s.unrounded()) key_parts_ = take<float>(s.tokens * 3 * s.dim * 4);
  if (s.unrounded()) query_parts_ = take<float>(s.query_parts());
  if (s.squeezed) plain_queries_ = take<float>(s.tokens * s.group * s.dim * 4);
  if (s.squeezed) paired_keys_ = take<std::byte>(s.tokens * 2 * s.pairs * s.element_bytes);
  if (s.squeezed) key_scales_ = take<float>(s.tokens * 4);
  args_.tensors.queries = queries_;
  args_.tensors.keys = keys_;
  args_.tensors.values = values_;
  args_.tensors.plain_queries = plain_queries_;
  args_.tensors.paired_keys = paired_keys_;
  args_.tensors.key_scales = key_scales_;

  products_ = take<float>(s.products());
  if (s.unrounded()) unrounded_products_ = take<float>(s.products());
  args_.rows.block = static_cast<int>(s.block);
  args_.rows.e = take<float4>(s.row());
  if (s.squeezed) {
    args_.rows.squeezed = s.unrounded() ? take<float4>(s.row()) : args_.rows.e;
    args_.rows.most = take<float4>(s.block * s.quads * 16);
    args_.rows.fragments = take<uint4>(s.fragments());
    args_.rows.scales = take<float4>(s.block * s.quads * 16);
  }
  args_.rows.sums = take<float4>(s.block * s.quads * 16);
  args_.rows.least = take<float4>(s.block * s.quads * 16);
  args_.rows.wanted = take<uint4>(s.block * s.quads * 16);
  args_.rows.outputs = take<float>(s.block * s.group * s.dim * 4);

  kernels::ReplayCaches& caches = args_.caches;
  caches.unit_slots = grid_.unit_slots;
  caches.slot_stride = grid_.slot_stride;
  caches.states = take<std::byte>(s.slots * s.slot_stride);
  caches.positions = take<std::uint32_t>(s.slots * 4);
  caches.places = take<std::uint32_t>(s.slots * 4);
  caches.holes = take<std::uint32_t>(s.slots * 4);
  caches.fillers = take<std::uint32_t>(s.slots * 4);
  caches.ranks = take<std::uint64_t>(s.slots * 8);
  caches.seen = take<Observation>(s.slots * sizeof(Observation));
  caches.planes = static_cast<int>(s.planes());
  caches.own = take<float4>(s.slots * 16 * s.quads * s.planes());
  caches.progress =
      take<kernels::ReplayProgress>(s.configs * sizeof(kernels::ReplayProgress), true);

  kernels::ReplaySamples& samples = args_.samples;
  samples.capacity = static_cast<int>(s.block_samples);
  samples.words = static_cast<int>(s.words());
  const std::size_t kept = s.configs * s.block_samples;
  samples.shared = take<std::uint32_t>(kept * s.words() * 4);
  samples.samples = take<kernels::ReplaySample>(kept * sizeof(kernels::ReplaySample));
  samples.own = take<float>(kept * s.group * s.dim * 4);
  samples.errors = take<double2>(kept * kernels::kMostReplayGroup * sizeof(double2));

  kernels::ReplayFigures& figures = args_.figures;
  figures.configs = static_cast<int>(s.configs);
  figures.samples = static_cast<int>(s.samples);
  figures.sums = take<double>(
      s.configs * kernels::kReplaySums * 4 * s.quads * kernels::kReplaySpanBlocks * 8, true);
  figures.errors = take<double>(s.configs * s.samples * 16, true);
  args_.windows = take<float4>(s.window_figures());
  figures.zero_outputs = take<std::uint32_t>(s.configs * 4 * s.quads * 4, true);
}

/// Some units at a time: the threads read, the device turns.
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
      turn(landing.as<float>() + i * head, first + i / heads,
           h < group    ? Part::q
           : h == group ? Part::k
                        : Part::v,
           h);
    }
    check(cudaStreamSynchronize(stream_), "reading a trace");
  }
}

void Batch::turn(const float* from, std::size_t unit, Part part, std::uint32_t head) {
  const UnitSizes& s = sizes_;
  const std::size_t of_unit = unit * s.tokens * s.dim;
  kernels::ReplayTurnArgs args{.from = from,
                               .turns = args_.tensors.turns,
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
    kernels::ReplayTurnArgs copy = args;
    copy.rotated = 0;
    copy.rounding = args_.tensors.type;
    copy.rounded = (part == Part::k ? keys_ : values_) + of_unit * s.element_bytes;
    check(kernels::replay_turn(copy, stream_), "reading a trace");
  }
  if (part == Part::v) return;
  if (part == Part::k && paired_keys_)
    check(kernels::replay_pair_keys(args_.shape, args.tokens, from, args_.tensors.type,
                                    paired_keys_ + unit * s.tokens * 2 * s.pairs * s.element_bytes,
                                    key_scales_ + unit * s.tokens, stream_),
          "reading a trace");
  if (part == Part::q && plain_queries_) {
    kernels::ReplayTurnArgs copy = args;
    copy.rotated = 0;
    copy.group = static_cast<int>(s.group);
    copy.group_head = static_cast<int>(head);
    copy.plain = plain_queries_ + of_unit * s.group;
    check(kernels::replay_turn(copy, stream_), "reading a trace");
  }
  if (part == Part::k) {
    args.parts = key_parts_ ? key_parts_ + 3 * of_unit : nullptr;
    args.rounded = rounded_keys_ + of_unit * s.product_bytes;
  } else {
    args.group = static_cast<int>(s.group);
    args.group_head = static_cast<int>(head);
    args.plain = queries_ + of_unit * s.group;
    args.rounded = rounded_queries_ + of_unit * s.group * s.product_bytes;
  }
  check(kernels::replay_turn(args, stream_), "turning queries and keys");
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
            .w_by_k = false,
            .y = to,
            .y_row = tokens,
            .y_batch = static_cast<std::int64_t>(sizes_.block) * group * tokens},
           stream_);
}

/// Of queries and keys that were not rounded, in float32, by three products in TF32.
void Batch::multiply_parts(std::uint32_t first, std::uint32_t count) {
  check(kernels::replay_query_parts(args_.shape, static_cast<int>(first), static_cast<int>(count),
                                    args_.rows.block, queries_, query_parts_, stream_),
        "computing rows");
  const auto tokens = static_cast<std::int64_t>(sizes_.tokens),
             rows = static_cast<std::int64_t>(sizes_.block * sizes_.group),
             parts = static_cast<std::int64_t>(3 * sizes_.dim);
  product_({.type = Type::f32,
            .batches = static_cast<int>(units_.size()),
            .rows = static_cast<int>(count * sizes_.group),
            .n = static_cast<int>(first + count),
            .k = static_cast<int>(parts),
            .x = query_parts_,
            .x_row = parts,
            .x_batch = rows * parts,
            .w = key_parts_,
            .w_row = parts,
            .w_batch = tokens * parts,
            .w_by_k = false,
            .y = unrounded_products_,
            .y_row = tokens,
            .y_batch = rows * tokens,
            .tf32 = true},
           stream_);
}

void Batch::make_rows(std::uint32_t first, std::uint32_t count) {
  args_.rows.first = static_cast<int>(first);
  args_.rows.count = static_cast<int>(count);
  multiply(args_.shape.rounding, rounded_queries_, rounded_keys_, products_, first, count);
  if (key_parts_) multiply_parts(first, count);
  check(kernels::replay_rows({.shape = args_.shape,
                              .span = args_.span,
                              .rows = args_.rows,
                              .products = products_,
                              .unrounded = unrounded_products_,
                              .tensors = args_.tensors},
                             stream_),
        "computing rows");
}

void Batch::replay() {
  const std::uint32_t tokens = plan_.trace.tokens(),
                      block = static_cast<std::uint32_t>(sizes_.block);
  for (std::uint32_t first = 0; first < tokens; first += block) {
    make_rows(first, std::min(block, tokens - first));
    streams_.fork();
    for (std::size_t m = 0; m < grid_.members.size(); ++m) {
      const Members& members = grid_.members[m];
      args_.members = members.on_device.as<std::int32_t>();
      args_.member_count = static_cast<int>(members.configs.size());
      args_.squeezed = members.squeezed;
      args_.room_slots = members.most_slots;
      check(members.policy->walk(args_, streams_.branch(m)),
            fmt::format("replaying {}", members.policy->name));
    }
    if (!grid_.windows.empty()) {
      args_.members = grid_.windows_on_device.as<std::int32_t>();
      args_.member_count = static_cast<int>(grid_.windows.size());
      check(kernels::replay_windows(args_, streams_.branch(grid_.members.size())),
            "replaying windows");
    }
    streams_.join();
    check(kernels::replay_outputs(args_, stream_), "computing outputs");
  }
  check(cudaStreamSynchronize(stream_), "replaying");
}

std::vector<std::vector<HeadOutcome>> Batch::outcomes() const {
  const auto buffer_of = [&](const void* data) -> const DeviceBuffer& {
    return *std::find_if(buffers_.begin(), buffers_.end(), [&](const DeviceBuffer& buffer) {
      return static_cast<const void*>(buffer.data()) == data;
    });
  };
  const auto sums = cuda::download<double>(buffer_of(args_.figures.sums));
  const auto errors = cuda::download<double>(buffer_of(args_.figures.errors));
  const auto zeros = cuda::download<std::uint32_t>(buffer_of(args_.figures.zero_outputs));
  const auto progress = cuda::download<kernels::ReplayProgress>(buffer_of(args_.caches.progress));
  std::vector<std::vector<HeadOutcome>> all(units_.size());
  parallel_for(units_.size(), plan_.threads, [&](std::size_t unit) {
    for (std::size_t c = 0; c < sizes_.configs; ++c)
      all[unit].push_back(outcome(unit * sizes_.configs + c, sums, errors, zeros, progress));
  });
  return all;
}

HeadOutcome Batch::outcome(std::size_t figure, const std::vector<double>& sums,
                           const std::vector<double>& errors,
                           const std::vector<std::uint32_t>& zeros,
                           const std::vector<kernels::ReplayProgress>& progress) const {
  const std::size_t heads = 4 * sizes_.quads;
  const auto sum = [&](ReplaySum kind, std::size_t head, std::uint32_t block) {
    return sums[((figure * kernels::kReplaySums + static_cast<std::size_t>(kind)) * heads + head) *
                    kernels::kReplaySpanBlocks +
                block];
  };
  HeadOutcome outcome;
  HeadStats& stats = outcome.stats;
  stats.resize(plan_.span, static_cast<std::uint32_t>(sizes_.group));
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
    }
    own.zero_outputs = zeros[figure * heads + head];
  }
  for (std::size_t sample = 0; sample < sizes_.samples; ++sample) {
    stats.error2[sample] = errors[2 * (figure * sizes_.samples + sample)];
    stats.output2[sample] = errors[2 * (figure * sizes_.samples + sample) + 1];
  }
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

int Batch::waves() {
  int all = 0;
  args_.rows.count = 1;
  for (const Members& members : grid_.members) {
    args_.member_count = static_cast<int>(members.configs.size());
    args_.squeezed = members.squeezed;
    args_.room_slots = members.most_slots;
    int own = 0;
    check(members.policy->waves(args_, own), "asking for the device's limits");
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
    multiply(args_.shape.rounding, rounded_queries_, rounded_keys_, products_, first, count);
    check(kernels::replay_softmax({.shape = args_.shape,
                                   .first = static_cast<int>(first),
                                   .count = static_cast<int>(count),
                                   .block = static_cast<int>(block),
                                   .products = products_,
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
              .w = values_,
              .w_row = dim,
              .w_batch = tokens * dim,
              .w_by_k = true,
              .y = args_.rows.outputs,
              .y_row = dim,
              .y_batch = rows * dim},
             stream_);
    flops += 4.0 * args_.shape.units * wanted * width * static_cast<double>(dim);
  }
  check(cudaStreamSynchronize(stream_), "attention");
  return flops;
}

void Batch::keep_sets() {
  args_.figures.words = static_cast<int>((sizes_.tokens + 31) / 32);
  const std::size_t words = static_cast<std::size_t>(args_.figures.words);
  args_.figures.kept = take<std::uint32_t>(sizes_.configs * sizes_.tokens * words * 4, true);
}

void Batch::show_sets(std::size_t first_unit, const KeptWatcher& watcher) const {
  const auto bits = cuda::download<std::uint32_t>(buffers_.back());
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
