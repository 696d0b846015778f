#include "engine/attention_bench.hpp"

#include <algorithm>
#include <functional>
#include <numeric>
#include <stdexcept>

#include "engine/backend.hpp"
#include "engine/cuda/bench/bench_tools.hpp"
#include "engine/cuda/bench/limits.hpp"
#include "engine/cuda/cache/observed_attention.hpp"
#include "engine/cuda/fill.hpp"
#include "kernels/attention.hpp"
#include "kernels/evict/eviction_kernels.hpp"
#include "kernels/host/transfer.hpp"
#include "policies/catalogue.hpp"
#include "policies/observation.hpp"

namespace kvlab {
namespace {

using cuda::check;
using cuda::DeviceBuffer;
using kernels::kSignalBytes;
using kernels::Type;

constexpr std::uint32_t kKvHeads = 8;
constexpr std::uint64_t kPool = std::uint64_t{8} << 30;  // bytes of keys and values, at most
constexpr int kMostLayers = 32;
constexpr int kRepeats = 9;
constexpr std::uint64_t kElement = 2;  // bytes
constexpr const char* kWhat = "the attention bench";

template <class T>
DeviceBuffer upload(const std::vector<T>& values) {
  return cuda::upload(values, kWhat);
}

DeviceBuffer zeroes(std::size_t bytes) { return cuda::zeroes(bytes, kWhat); }

/// The caches of some layers, all full: every step evicts.
class Layers {
 public:
  Layers(std::uint32_t head_size, std::uint32_t group, std::uint32_t batch, std::uint32_t slots)
      : head_size_(head_size), group_(group), batch_(batch), slots_(slots) {
    const std::uint64_t fit = std::max<std::uint64_t>(kPool / bytes(), 2);
    layers_ = static_cast<int>(std::min<std::uint64_t>(fit, kMostLayers));
    const auto count = static_cast<std::size_t>(layers_);
    keys_ = DeviceBuffer(count * bytes() / 2, kWhat);
    values_ = DeviceBuffer(count * bytes() / 2, kWhat);
    q_ = DeviceBuffer(std::size_t{batch} * kKvHeads * group * head_size * kElement, kWhat);
    out_ = DeviceBuffer(q_.bytes(), kWhat);
    fill(keys_);
    fill(values_);
    fill(q_);
    std::vector<std::int64_t> first(pairs());
    for (std::size_t pair = 0; pair < pairs(); ++pair)
      first[pair] = static_cast<std::int64_t>(pair * slots);
    first_slot_ = upload(first);
    std::vector<std::uint32_t> positions(count * pairs() * slots);
    for (std::size_t i = 0; i < positions.size(); ++i)
      positions[i] = static_cast<std::uint32_t>(i % slots);
    positions_ = upload(positions);
    ages_ = upload(positions);
    now_ = upload(std::vector<std::uint32_t>(batch, slots));
    lengths_ = upload(std::vector<std::int32_t>(count * pairs(), static_cast<int>(slots)));
    next_slots_ = zeroes(count * pairs() * sizeof(std::int32_t));
    std::vector<float> inv_freq(head_size / 2, 0.01f);
    inv_freq_ = upload(inv_freq);
  }

  int layers() const { return layers_; }
  std::size_t pairs() const { return std::size_t{batch_} * kKvHeads; }
  /// Of one layer's keys and values.
  std::uint64_t bytes() const { return 2 * pairs() * slots_ * head_size_ * kElement; }
  std::byte* keys(int layer) const { return keys_.data() + half(layer); }
  std::byte* values(int layer) const { return values_.data() + half(layer); }

  kernels::DecodeAttentionArgs plain(int layer, std::byte* workspace) const {
    const std::int64_t head_stride = std::int64_t{slots_} * head_size_;
    return {.shape = {.type = Type::bf16,
                      .query_heads = static_cast<int>(kKvHeads * group_),
                      .kv_heads = kKvHeads,
                      .head_size = static_cast<int>(head_size_),
                      .softmax_scale = 0.1f,
                      .sequence_stride = head_stride * kKvHeads,
                      .head_stride = head_stride},
            .sequences = static_cast<int>(batch_),
            .slots = static_cast<int>(slots_),
            .q = q_.data(),
            .keys = keys(layer),
            .values = values(layer),
            .lengths = lengths_.as<std::int32_t>(),
            .out = out_.data(),
            .lse = nullptr,
            .workspace = workspace,
            .settled = true};
  }
  kernels::EvictingAttentionArgs evicting(int layer, Positions numbering) const {
    const std::size_t pair = static_cast<std::size_t>(layer) * pairs();
    return {.cache = {.type = Type::bf16,
                      .sequences = static_cast<int>(batch_),
                      .query_heads = static_cast<int>(kKvHeads * group_),
                      .kv_heads = kKvHeads,
                      .head_size = static_cast<int>(head_size_),
                      .softmax_scale = 0.1f,
                      .most_slots = static_cast<int>(slots_),
                      .first_slot = first_slot_.as<std::int64_t>(),
                      .keys = keys(layer),
                      .values = values(layer),
                      .positions = positions_.as<std::uint32_t>() + pair * slots_,
                      .lengths = lengths_.as<std::int32_t>() + pair,
                      .next_slots = next_slots_.as<std::int32_t>() + pair,
                      .ages = ages_.as<std::uint32_t>() + pair * slots_},
            .policy = {},
            .numbering = numbering,
            .now = now_.as<std::uint32_t>(),
            .q = q_.data(),
            .inv_freq = inv_freq_.as<float>(),
            .rotated = static_cast<int>(head_size_),
            .rope_factor = 1,
            .out = out_.data(),
            .lse = nullptr,
            .workspace = nullptr,
            .settled = true};
  }

 private:
  std::size_t half(int layer) const { return static_cast<std::size_t>(layer) * bytes() / 2; }
  static void fill(const DeviceBuffer& buffer) {
    check(cuda::fill_normal(Type::bf16, buffer.data(), buffer.bytes() / kElement, 1.0f, 3, nullptr),
          kWhat);
  }

  std::uint32_t head_size_, group_, batch_, slots_;
  int layers_;
  DeviceBuffer keys_, values_, q_, out_, first_slot_, positions_, ages_, now_, lengths_,
      next_slots_, inv_freq_;
};

/// Median microseconds of one of so many layers, which `enqueue` enqueues in a row.
double microseconds(const cuda::Stream& stream, int layers, const std::function<void()>& enqueue) {
  const cuda::Graph graph(stream.get(), enqueue);
  return median_milliseconds(
             stream.get(), [&] { graph.launch(stream.get()); }, kRepeats) *
         1e3 / layers;
}

double time_plain(const Layers& layers, const cuda::Stream& stream) {
  const auto shape = layers.plain(0, nullptr);
  const DeviceBuffer workspace =
      zeroes(kernels::decode_attention_workspace(shape.shape, shape.sequences, shape.slots));
  return microseconds(stream, layers.layers(), [&] {
    for (int layer = 0; layer < layers.layers(); ++layer)
      check(kernels::decode_attention(layers.plain(layer, workspace.data()), stream.get()), kWhat);
  });
}

kernels::EvictionKernels kernels_of(std::string_view name) {
  for (const kernels::DevicePolicy& policy : kernels::device_policies())
    if (policy.name == name) return kernels::observing_kernels(policy);
  throw std::invalid_argument("no policy of that name is compiled for the device: " +
                              std::string(name));
}

EvictingTime time_evicting(const Layers& layers, const PolicySpec& spec, const AttentionTime& shape,
                           const cuda::Stream& stream) {
  const kernels::EvictionKernels kernels = kernels_of(spec.entry->info.name);
  EvictingTime time{.policy = spec.text(), .positions = spec.entry->info.positions};
  const Guards guards = resolve_guards(spec, shape.slots);
  const std::size_t slots = layers.pairs() * shape.slots;  // of a layer
  const auto count = static_cast<std::size_t>(layers.layers());
  const DeviceBuffer states = zeroes(count * slots * kernels.slot_bytes);
  const DeviceBuffer rules = upload(std::vector<kernels::PairRule>(
      layers.pairs(), {.budget = shape.slots, .sinks = guards.sinks, .recent = guards.recent}));
  std::vector<std::byte> params(kernels.params_bytes * shape.batch);
  for (std::uint32_t s = 0; s < shape.batch && kernels.params_bytes > 0; ++s)
    kernels.params(spec.params, params.data() + s * kernels.params_bytes);
  const DeviceBuffer device_params = upload(params);
  const DeviceBuffer thresholds =
      upload(std::vector<std::uint32_t>(shape.batch, request_threshold16(0.01)));
  const DeviceBuffer seeds = zeroes(shape.batch * sizeof(std::uint64_t)),
                     ids = zeroes(shape.batch * sizeof(std::uint32_t));
  std::vector<kernels::EvictingAttentionArgs> args;
  for (std::size_t layer = 0; layer < count; ++layer) {
    args.push_back(layers.evicting(static_cast<int>(layer), time.positions));
    args.back().two_frames = time.positions == Positions::cache && kernels.oldest_first;
    args.back().policy = {.states = states.data() + layer * slots * kernels.slot_bytes,
                          .rules = rules.as<kernels::PairRule>(),
                          .params = device_params.data(),
                          .threshold16 = thresholds.as<std::uint32_t>(),
                          .seeds = seeds.as<std::uint64_t>(),
                          .sequence_ids = ids.as<std::uint32_t>(),
                          .layer = static_cast<std::uint32_t>(layer),
                          .seen = nullptr};
  }
  const kernels::SlotCache cache = args.front().cache;
  const DeviceBuffer workspaces(ObserverBranch::bytes(kernels, cache, layers.layers()), kWhat);
  const ObserverBranch branch(kernels, cache, layers.layers(), workspaces.data(), stream.get());
  const ObservedAttention attention(kernels, std::move(args), branch, stream.get());
  time.microseconds = microseconds(stream, layers.layers(), [&] {
    for (std::size_t layer = 0; layer < count; ++layer) {
      attention.attend(layer);
      attention.observe(layer);
    }
    attention.join();
  });
  return time;
}

}  // namespace

AttentionBench bench_attention(const AttentionBenchOptions& options) {
  if (!has_cuda_device())
    throw std::runtime_error("no CUDA device on this machine; bench measures its attention");
  std::vector<PolicySpec> specs;
  for (const std::string& policy : options.policies) specs.push_back(parse_policy(policy));
  AttentionBench bench;
  bench.device = cuda::device_name();
  bench.read_bytes_per_second = cuda::read_bytes_per_second();
  const cuda::Stream stream;
  for (const std::uint32_t head_size : options.head_sizes)
    for (const std::uint32_t group : options.groups)
      for (const std::uint32_t batch : options.batches) {
        const Layers layers(head_size, group, batch, options.slots);
        AttentionTime time{
            .head_size = head_size, .group = group, .batch = batch, .slots = options.slots};
        time.bytes = layers.bytes();
        time.microseconds = time_plain(layers, stream);
        for (const PolicySpec& spec : specs)
          time.evicting.push_back(time_evicting(layers, spec, time, stream));
        bench.times.push_back(std::move(time));
      }
  return bench;
}

}  // namespace kvlab
