#include "tools/cuda_replay.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <optional>
#include <stdexcept>

#include "engine/backend.hpp"
#include "engine/cuda/batched_product.hpp"
#include "kernels/replay.hpp"
#include "policies/live_set.hpp"
#include "tools/exact_pass.hpp"
#include "traces/numeric/parallel.hpp"

namespace kvlab {
namespace {

using cuda::check;
using cuda::DeviceBuffer;
using kernels::ReplayArgs;
using kernels::ReplayPolicy;
using kernels::ReplayRule;
using kernels::ReplaySum;
using kernels::Type;

constexpr int kTokenMultiple = 16;         // rows of products begin aligned
constexpr double kUsableMemory = 0.9;      // of what is free
constexpr std::size_t kMostUnits = 65535;  // of a grid

Type type_of(const std::optional<Dtype>& rounding) {
  if (!rounding || *rounding == Dtype::f32) return Type::f32;
  return *rounding == Dtype::bf16 ? Type::bf16 : Type::f16;
}

const ReplayPolicy* find_policy(std::string_view name) {
  const auto& all = kernels::replay_policies();
  const auto found = std::find_if(all.begin(), all.end(),
                                  [&](const ReplayPolicy& policy) { return policy.name == name; });
  return found == all.end() ? nullptr : &*found;
}

/// The most tokens that are ever live.
std::uint32_t most_live(const std::vector<Admission>& admissions, std::uint32_t budget) {
  std::uint32_t live = 0, most = 0;
  for (const Admission& admission : admissions) {
    if (budget != kNoBudget) live = std::min(live, budget - 1);
    live += admission.tokens;
    most = std::max(most, live);
  }
  return most;
}

template <class T>
DeviceBuffer upload(const std::vector<T>& values, std::string_view what) {
  DeviceBuffer buffer(values.size() * sizeof(T), what);
  if (values.empty()) return buffer;
  check(cudaMemcpy(buffer.data(), values.data(), buffer.bytes(), cudaMemcpyHostToDevice), what);
  return buffer;
}

template <class T>
std::vector<T> download(const DeviceBuffer& buffer) {
  std::vector<T> values(buffer.bytes() / sizeof(T));
  check(cudaMemcpy(values.data(), buffer.data(), buffer.bytes(), cudaMemcpyDeviceToHost),
        "fetching figures");
  return values;
}

/// Configurations of one policy and of about the same size.
struct Members {
  const ReplayPolicy* policy;
  int size_class;
  std::vector<std::int32_t> configs;
  std::uint32_t most_slots = 0;
  DeviceBuffer on_device;
};

/// The grid as the kernels read it: the same for every unit.
class Grid {
 public:
  explicit Grid(const ReplayPlan& plan) {
    std::vector<ReplayRule> rules;
    std::vector<kernels::ReplayAdmission> admissions;
    std::vector<std::byte> params;
    for (const ResolvedConfig& resolved : plan.configs) {
      const ReplayConfig& config = *resolved.config;
      const ReplayPolicy& policy = *find_policy(config.policy.name);
      const std::uint32_t slots = most_live(*resolved.admissions, resolved.budget);
      rules.push_back({.rule = {resolved.budget, resolved.guards.sinks, resolved.guards.recent},
                       .squeezed = config.positions == Positions::cache,
                       .seed = config.seed,
                       .first_slot = unit_slots,
                       .slots = slots,
                       .params = static_cast<std::uint32_t>(params.size()),
                       .admissions = static_cast<std::uint32_t>(admissions.size())});
      squeezed |= rules.back().squeezed;
      unit_slots += slots;
      slot_stride = std::max(slot_stride, static_cast<int>((policy.slot_bytes + 7) / 8 * 8));
      params.resize(params.size() + (policy.params_bytes + 15) / 16 * 16);
      if (policy.params_bytes) policy.params(config.policy.params, &params[rules.back().params]);
      for (const Admission& admission : *resolved.admissions)
        admissions.push_back({admission.first, admission.tokens});
      admissions.push_back({plan.trace.tokens(), 0});
      add_member(policy, static_cast<std::int32_t>(rules.size() - 1), slots);
    }
    params.resize(params.size() + 16);  // never empty
    std::stable_sort(members.begin(), members.end(), [](const Members& a, const Members& b) {
      return a.most_slots > b.most_slots;
    });
    for (Members& m : members) m.on_device = upload(m.configs, "the replay's grid");
    rules_ = upload(rules, "the replay's grid");
    admissions_ = upload(admissions, "the replay's grid");
    params_ = upload(params, "the replay's grid");
  }

  void describe(ReplayArgs& args) const {
    args.rules = rules_.as<ReplayRule>();
    args.admissions = admissions_.as<kernels::ReplayAdmission>();
    args.params = params_.data();
  }

  std::vector<Members> members;
  std::int64_t unit_slots = 0;
  int slot_stride = 8;
  bool squeezed = false;

 private:
  void add_member(const ReplayPolicy& policy, std::int32_t config, std::uint32_t slots) {
    const int size_class = std::bit_width(slots - 1);
    auto found = std::find_if(members.begin(), members.end(), [&](const Members& m) {
      return m.policy == &policy && m.size_class == size_class;
    });
    if (found == members.end())
      found = members.insert(found, Members{&policy, size_class, {}, 0, {}});
    found->configs.push_back(config);
    found->most_slots = std::max(found->most_slots, slots);
  }

  DeviceBuffer rules_, admissions_, params_;
};

/// Device memory of some units, in the order of `bytes_of_unit`.
struct UnitSizes {
  std::size_t tokens, group, dim, quads, block, slots, configs, samples;
  std::size_t slot_stride, product_bytes, element_bytes;
  bool squeezed, rounds;

  std::size_t tensors() const {
    const std::size_t vectors = tokens * (group + 1) * dim;
    return vectors * product_bytes + tokens * group * dim * 4 + 2 * tokens * dim * element_bytes +
           (unrounded() ? tokens * dim * 4 : 0);
  }
  bool unrounded() const { return squeezed && rounds; }
  std::size_t products() const { return block * group * tokens * 4; }
  std::size_t row() const { return block * quads * tokens * 16; }
  std::size_t caches() const { return slots * (slot_stride + 4 * 4 + 8 + 24 + 16 * quads); }
  std::size_t figures() const {
    return configs * (kernels::kReplaySums * 4 * quads * 8 * kernels::kReplaySpanBlocks +
                      samples * 16 + 4 * 4 * quads + sizeof(kernels::ReplayProgress));
  }
  std::size_t bytes() const {
    return tensors() + (unrounded() ? 2 : 1) * products() + (squeezed ? 2 : 1) * row() + caches() +
           figures() + block * (group * dim * 4 + quads * 48);
  }
};

/// A stream, and branches of it that run side by side.
class Streams {
 public:
  Streams() {
    for (std::size_t i = 0; i < std::size(branches_); ++i) ends_.emplace_back();
  }
  cudaStream_t first() const { return first_.get(); }
  cudaStream_t branch(std::size_t i) const { return branches_[i % std::size(branches_)].get(); }
  /// Branches go on from where the first stream is.
  void fork() {
    begin_.record(first());
    for (const cuda::Stream& branch : branches_)
      check(cudaStreamWaitEvent(branch.get(), begin_.get()), "waiting for a stream");
  }
  /// The first stream goes on when all branches have ended.
  void join() {
    for (std::size_t i = 0; i < std::size(branches_); ++i) {
      ends_[i].record(branches_[i].get());
      check(cudaStreamWaitEvent(first(), ends_[i].get()), "waiting for a stream");
    }
  }

 private:
  cuda::Stream first_, branches_[8];
  cuda::Event begin_;
  std::vector<cuda::Event> ends_;
};

/// What all units read.
struct Tables {
  DeviceBuffer turns, fine, span;
};

/// Units that are on the device together, from their tensors to their figures.
class Batch {
 public:
  Batch(const ReplayPlan& plan, const Grid& grid, const UnitSizes& sizes,
        std::span<const ReplayUnit> units, const Tables& tables, cuda::BatchedProduct& product,
        Streams& streams)
      : plan_(plan),
        grid_(grid),
        sizes_(sizes),
        units_(units),
        product_(product),
        streams_(streams),
        stream_(streams.first()) {
    const ModelShape& shape = plan.trace.shape();
    args_.shape = {.units = static_cast<int>(units.size()),
                   .tokens = static_cast<int>(sizes.tokens),
                   .group = static_cast<int>(shape.group()),
                   .head_size = static_cast<int>(shape.head_size),
                   .rotated = static_cast<int>(plan.trace.header().rope.rotated()),
                   .softmax_scale = plan.arithmetic.softmax_scale,
                   .rounding = type_of(plan.arithmetic.rounding),
                   .threshold16 = plan.arithmetic.threshold16};
    args_.tensors.type = type_of(shape.dtype);
    args_.tensors.turns = tables.turns.as<float2>();
    args_.tensors.fine = tables.fine.as<float2>();
    args_.span = {tables.span.as<std::int32_t>(), static_cast<int>(plan.span.size()),
                  static_cast<int>(plan.span.blocks()), static_cast<int>(plan.span.sample_every())};
    args_.sequence = plan.sequence;
    grid.describe(args_);
    allocate();
  }

  void read();
  void replay();
  std::vector<std::vector<HeadOutcome>> outcomes() const;
  /// Of one query, over the policies.
  int waves();
  /// Attention of every query. Returns its flops.
  double attend();
  /// Keeps what every query attended, from before replay() on.
  void keep_sets();
  void show_sets(std::size_t first_unit, const KeptWatcher& watcher) const;

 private:
  template <class T>
  T* take(std::size_t bytes_of_unit, bool zero = false) {
    DeviceBuffer& buffer = buffers_.emplace_back(bytes_of_unit * units_.size(), "the replay");
    if (zero && buffer.bytes() > 0)
      check(cudaMemsetAsync(buffer.data(), 0, buffer.bytes(), stream_), "clearing");
    return buffer.as<T>();
  }
  void allocate();
  void turn(const float* from, std::size_t unit, Part part, std::uint32_t head);
  void make_rows(std::uint32_t first, std::uint32_t count);
  void multiply(Type type, const void* queries, const void* keys, float* to, std::uint32_t first,
                std::uint32_t count);
  HeadOutcome outcome(std::size_t figure, const std::vector<double>& sums,
                      const std::vector<double>& errors, const std::vector<std::uint32_t>& zeros,
                      const std::vector<kernels::ReplayProgress>& progress) const;

  const ReplayPlan& plan_;
  const Grid& grid_;
  const UnitSizes& sizes_;
  std::span<const ReplayUnit> units_;
  cuda::BatchedProduct& product_;
  Streams& streams_;
  cudaStream_t stream_;
  ReplayArgs args_{};
  std::vector<DeviceBuffer> buffers_;
  float *queries_ = nullptr, *unrounded_keys_ = nullptr;
  std::byte *keys_ = nullptr, *values_ = nullptr;
  std::byte *rounded_queries_ = nullptr, *rounded_keys_ = nullptr;
  float *products_ = nullptr, *unrounded_products_ = nullptr;
};

void Batch::allocate() {
  const UnitSizes& s = sizes_;
  std::vector<std::uint32_t> layers, kv_heads;
  for (const ReplayUnit& unit : units_) {
    layers.push_back(unit.layer);
    kv_heads.push_back(unit.kv_head);
  }
  buffers_.reserve(40);
  args_.layers = buffers_.emplace_back(upload(layers, "the replay")).as<std::uint32_t>();
  args_.kv_heads = buffers_.emplace_back(upload(kv_heads, "the replay")).as<std::uint32_t>();

  queries_ = take<float>(s.tokens * s.group * s.dim * 4);
  keys_ = take<std::byte>(s.tokens * s.dim * s.element_bytes);
  values_ = take<std::byte>(s.tokens * s.dim * s.element_bytes);
  rounded_queries_ = take<std::byte>(s.tokens * s.group * s.dim * s.product_bytes);
  rounded_keys_ = take<std::byte>(s.tokens * s.dim * s.product_bytes);
  if (s.unrounded()) unrounded_keys_ = take<float>(s.tokens * s.dim * 4);
  args_.tensors.queries = queries_;
  args_.tensors.keys = keys_;
  args_.tensors.values = values_;

  products_ = take<float>(s.products());
  if (s.unrounded()) unrounded_products_ = take<float>(s.products());
  args_.rows.block = static_cast<int>(s.block);
  args_.rows.e = take<float4>(s.row());
  if (s.squeezed) args_.rows.logits = take<float4>(s.row());
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
  caches.own = take<float4>(s.slots * 16 * s.quads);
  caches.progress =
      take<kernels::ReplayProgress>(s.configs * sizeof(kernels::ReplayProgress), true);

  kernels::ReplayFigures& figures = args_.figures;
  figures.configs = static_cast<int>(s.configs);
  figures.samples = static_cast<int>(s.samples);
  figures.sums = take<double>(
      s.configs * kernels::kReplaySums * 4 * s.quads * kernels::kReplaySpanBlocks * 8, true);
  figures.errors = take<double>(s.configs * s.samples * 16, true);
  figures.zero_outputs = take<std::uint32_t>(s.configs * 4 * s.quads * 4, true);
}

/// Some units at a time: the threads read, the device turns.
void Batch::read() {
  const ModelShape& shape = plan_.trace.shape();
  const std::size_t tokens = plan_.trace.tokens(), head = tokens * shape.head_size,
                    heads = shape.group() + 2;
  const std::size_t at_once = std::min<std::size_t>(units_.size(), plan_.threads);
  const cuda::PinnedBuffer staging(at_once * heads * head * sizeof(float));
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
  if (part == Part::k) {
    args.plain = unrounded_keys_ ? unrounded_keys_ + of_unit : nullptr;
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

void Batch::make_rows(std::uint32_t first, std::uint32_t count) {
  args_.rows.first = static_cast<int>(first);
  args_.rows.count = static_cast<int>(count);
  multiply(args_.shape.rounding, rounded_queries_, rounded_keys_, products_, first, count);
  if (unrounded_keys_)
    multiply(Type::f32, queries_, unrounded_keys_, unrounded_products_, first, count);
  check(kernels::replay_rows({.shape = args_.shape,
                              .span = args_.span,
                              .rows = args_.rows,
                              .products = products_,
                              .unrounded = unrounded_products_,
                              .type = args_.tensors.type,
                              .values = values_},
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
      args_.room_slots = members.most_slots;
      check(members.policy->walk(args_, streams_.branch(m)),
            fmt::format("replaying {}", members.policy->name));
    }
    streams_.join();
  }
  check(cudaStreamSynchronize(stream_), "replaying");
}

std::vector<std::vector<HeadOutcome>> Batch::outcomes() const {
  const auto buffer_of = [&](const void* data) -> const DeviceBuffer& {
    return *std::find_if(buffers_.begin(), buffers_.end(), [&](const DeviceBuffer& buffer) {
      return static_cast<const void*>(buffer.data()) == data;
    });
  };
  const auto sums = download<double>(buffer_of(args_.figures.sums));
  const auto errors = download<double>(buffer_of(args_.figures.errors));
  const auto zeros = download<std::uint32_t>(buffer_of(args_.figures.zero_outputs));
  const auto progress = download<kernels::ReplayProgress>(buffer_of(args_.caches.progress));
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
  outcome.evictions = progress[figure].evictions;
  outcome.live_max = progress[figure].most_live;
  outcome.live_end = progress[figure].live;
  return outcome;
}

int Batch::waves() {
  int all = 0;
  args_.rows.count = 1;
  for (const Members& members : grid_.members) {
    args_.member_count = static_cast<int>(members.configs.size());
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
  const auto bits = download<std::uint32_t>(buffers_.back());
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

class Replayer final : public CudaReplayer {
 public:
  explicit Replayer(KeptWatcher watcher) : watcher_(std::move(watcher)) {}

  bool takes(const TraceHeader& header, const ReplayConfig& config) const override {
    const ModelShape& shape = header.shape;
    const PolicyEntry* const entry = config.policy.entry.get();
    return entry && !entry->source && find_policy(config.policy.name) &&
           shape.group() <= kernels::kMostReplayGroup &&
           shape.head_size <= kernels::kMostReplayHeadSize && shape.head_size % 8 == 0 &&
           header.rope.rotated() % 4 == 0;
  }

  double reading_seconds() const override { return reading_; }

  std::vector<std::vector<HeadOutcome>> run(const ReplayPlan& plan,
                                            std::span<const ReplayUnit> units) override {
    std::vector<std::vector<HeadOutcome>> all;
    in_batches(plan, units, [&](Batch& batch, std::size_t first) {
      if (watcher_) batch.keep_sets();
      batch.replay();
      if (watcher_) batch.show_sets(first, watcher_);
      waves_ = batch.waves();
      for (auto& outcomes : batch.outcomes()) all.push_back(std::move(outcomes));
    });
    return all;
  }

  int waves() const override { return waves_; }

  ExactPass exact_pass(const TraceReader& trace, unsigned threads) override {
    const RopeTable rope(trace.header().rope, trace.tokens());
    const HeadArithmetic arithmetic{.softmax_scale = trace.header().softmax_scale,
                                    .rounding = trace.header().rounding == Rounding::model_dtype
                                                    ? std::optional(trace.shape().dtype)
                                                    : std::nullopt};
    const QuerySpan span(trace.segments(), false, 1);
    const ReplayPlan plan{trace, 0, rope, arithmetic, span, threads, {}};
    std::vector<ReplayUnit> units;
    for (std::uint32_t layer = 0; layer < trace.shape().layers; ++layer)
      for (std::uint32_t kv_head = 0; kv_head < trace.shape().kv_heads; ++kv_head)
        units.push_back({layer, kv_head});
    ExactPass pass;
    in_batches(plan, units, [&](Batch& batch, std::size_t) {
      batch.attend();  // chooses algorithms
      const WorkTime time = timed([&] { pass.flops += batch.attend(); });
      pass.time.seconds += time.seconds;
      pass.time.cpu_seconds += time.cpu_seconds;
    });
    return pass;
  }

 private:
  /// Calls work(batch, index of its first unit) for as many units at a time as fit.
  template <class Work>
  void in_batches(const ReplayPlan& plan, std::span<const ReplayUnit> units, Work work) {
    const Grid grid(plan);
    const Tables tables{upload(turns_of(plan.rope), "the angles"),
                        upload(fine_turns_of(plan.trace.header().rope), "the angles"),
                        upload(span_of(plan), "the span")};
    const UnitSizes sizes = sizes_of(plan, grid);
    const std::size_t at_once = units_at_once(sizes, units.size());
    for (std::size_t first = 0; first < units.size(); first += at_once) {
      Batch batch(plan, grid, sizes, units.subspan(first, std::min(at_once, units.size() - first)),
                  tables, product_, streams_);
      reading_ += timed([&] { batch.read(); }).seconds;
      work(batch, first);
    }
  }

  static std::vector<float2> turns_of(const RopeTable& rope) {
    std::vector<float2> turns;
    for (std::uint32_t position = 0; position < rope.positions(); ++position)
      for (std::size_t d = 0; d < rope.cosines(position).size(); ++d)
        turns.push_back({rope.cosines(position)[d], rope.sines(position)[d]});
    return turns;
  }

  static std::vector<float2> fine_turns_of(const Rope& rope) {
    constexpr int kFine = 64;
    std::vector<float2> turns;
    for (int position = 0; position < kFine; ++position)
      for (const float frequency : rope.inv_freq) {
        const double angle = position * static_cast<double>(frequency);
        turns.push_back({static_cast<float>(std::cos(angle)), static_cast<float>(std::sin(angle))});
      }
    return turns;
  }

  static std::vector<std::int32_t> span_of(const ReplayPlan& plan) {
    std::vector<std::int32_t> index;
    std::int32_t next = 0;
    for (std::uint32_t query = 0; query < plan.trace.tokens(); ++query)
      index.push_back(plan.span.contains(query) ? next++ : -1);
    return index;
  }

  static UnitSizes sizes_of(const ReplayPlan& plan, const Grid& grid) {
    const ModelShape& shape = plan.trace.shape();
    const Type rounding = type_of(plan.arithmetic.rounding);
    return {.tokens = (plan.trace.tokens() + kTokenMultiple - 1) / kTokenMultiple * kTokenMultiple,
            .group = shape.group(),
            .dim = shape.head_size,
            .quads = (shape.group() + 3) / 4,
            .block = kernels::kMostReplayQueries,
            .slots = static_cast<std::size_t>(grid.unit_slots),
            .configs = plan.configs.size(),
            .samples = plan.span.samples(),
            .slot_stride = static_cast<std::size_t>(grid.slot_stride),
            .product_bytes = kernels::bytes_of(rounding),
            .element_bytes = bytes_of(shape.dtype),
            .squeezed = grid.squeezed,
            .rounds = rounding != Type::f32};
  }

  static std::size_t units_at_once(const UnitSizes& sizes, std::size_t units) {
    const cuda::MemoryInfo memory = cuda::memory_info();
    const auto usable = static_cast<std::size_t>(kUsableMemory * static_cast<double>(memory.free));
    const std::size_t fit = usable / sizes.bytes();
    if (fit == 0)
      throw std::runtime_error(
          fmt::format("device memory: one KV head of this replay needs {}, {} of {} are free; "
                      "fewer budgets at once need less, or use --device cpu",
                      cuda::bytes_text(sizes.bytes()), cuda::bytes_text(memory.free),
                      cuda::bytes_text(memory.total)));
    return std::min({fit, units, kMostUnits});
  }

  KeptWatcher watcher_;
  double reading_ = 0;
  int waves_ = 0;
  Streams streams_;
  cuda::BatchedProduct product_;
};

}  // namespace

std::unique_ptr<CudaReplayer> cuda_replayer(KeptWatcher watcher) {
  if (!has_cuda_device())
    throw std::runtime_error("--device: no CUDA device on this machine; use --device cpu");
  return std::make_unique<Replayer>(std::move(watcher));
}

}  // namespace kvlab
