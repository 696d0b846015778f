// What observing costs a dense prefill, one layer of the 8B shape (32/8 heads of 128, hidden 4096,
// feed-forward 14336): the second pass and the shrink, beside attention and the least time that the
// layer's products can take at the matrix rate of the same run.
#include "kernels/bench/limits.cuh"
#include "kernels/evict/admission.hpp"

namespace {

using namespace kvlab;
using namespace kvlab::kernels;
using kvlab::bench::check;
using kvlab::bench::DeviceBuffer;
using kvlab::bench::median_ms;
using Element = __nv_bfloat16;

constexpr int kQueryHeads = 32, kKvHeads = 8, kHeadSize = 128;
constexpr double kHidden = 4096, kFeedForward = 14336;
constexpr double kWeights =
    kHidden * (2 * kQueryHeads + 2 * kKvHeads) * kHeadSize + 3 * kHidden * kFeedForward;
constexpr int kMostTokens = 32768;

struct Memory {
  DeviceBuffer<Element> q{std::size_t{kMostTokens} * kQueryHeads * kHeadSize}, out{q.size()};
  DeviceBuffer<Element> keys{std::size_t{kMostTokens} * kKvHeads * kHeadSize}, values{keys.size()};
  DeviceBuffer<Element> kept_keys{keys.size()}, kept_values{keys.size()};
  DeviceBuffer<Element> square{std::size_t{3} << 26};
  DeviceBuffer<RowSoftmax> rows{std::size_t{kMostTokens} * kQueryHeads};
  DeviceBuffer<Observation> seen{std::size_t{kMostTokens} * kKvHeads};
  DeviceBuffer<std::byte> workspace{256 << 20};
};

template <class T>
struct Uploaded : DeviceBuffer<T> {
  explicit Uploaded(const std::vector<T>& values) : DeviceBuffer<T>(values.size()) {
    check(
        cudaMemcpy(this->data(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
};

AttentionShape shape(int tokens) {
  const std::int64_t head_stride = std::int64_t{tokens} * kHeadSize;
  return {.type = Type::bf16,
          .query_heads = kQueryHeads,
          .kv_heads = kKvHeads,
          .head_size = kHeadSize,
          .softmax_scale = 0.088388f,
          .sequence_stride = head_stride * kKvHeads,
          .head_stride = head_stride};
}

/// Calls part(first, queries) for a prompt in parts.
template <class Part>
void in_parts(int tokens, int each, Part part) {
  for (int first = 0; first < tokens; first += each) part(first, std::min(each, tokens - first));
}

double attention_ms(const Memory& memory, int tokens, int each) {
  return median_ms(
      [&](cudaStream_t stream) {
        in_parts(tokens, each, [&](int first, int queries) {
          const std::size_t row = std::size_t(first) * kQueryHeads;
          check(prefill_attention({.shape = shape(tokens),
                                   .first = first,
                                   .queries = queries,
                                   .q = memory.q.data() + row * kHeadSize,
                                   .keys = memory.keys.data(),
                                   .values = memory.values.data(),
                                   .out = memory.out.data() + row * kHeadSize,
                                   .lse = nullptr,
                                   .rows = memory.rows.data() + row},
                                  stream));
        });
      },
      5);
}

double observe_ms(const Memory& memory, int tokens, int each, Needs needs, std::uint32_t tail) {
  const Uploaded<std::uint32_t> threshold({655});
  return median_ms(
      [&](cudaStream_t stream) {
        check(cudaMemsetAsync(memory.seen.data(), 0, memory.seen.size() * sizeof(Observation),
                              stream));
        in_parts(tokens, each, [&](int first, int queries) {
          const std::size_t row = std::size_t(first) * kQueryHeads;
          check(observe_queries({.shape = shape(tokens),
                                 .needs = needs,
                                 .first = first,
                                 .queries = queries,
                                 .keys_end = first + queries,
                                 .younger = tokens - first - queries,
                                 .position = static_cast<std::uint32_t>(first),
                                 .q = memory.q.data() + row * kHeadSize,
                                 .keys = memory.keys.data(),
                                 .rows = memory.rows.data() + row,
                                 .tail = tail,
                                 .threshold16 = threshold.data(),
                                 .seen = memory.seen.data(),
                                 .workspace = memory.workspace.data()},
                                stream));
        });
      },
      5);
}

/// Milliseconds of the shrink of one sequence's layer to `budget` tokens a KV head.
double shrink_ms(const Memory& memory, std::string_view name, int tokens, std::uint32_t budget) {
  std::vector<std::int64_t> starts, kept_starts;
  for (int h = 0; h < kKvHeads; ++h) {
    starts.push_back(std::int64_t{h} * tokens);
    kept_starts.push_back(std::int64_t{h} * budget);
  }
  const Uploaded first_slot(starts), kept_first_slot(kept_starts);
  const std::vector<std::int32_t> none(kKvHeads);
  const Uploaded lengths(none), kept_lengths(none), next_slots(none);
  const DeviceBuffer<std::uint32_t> positions(memory.seen.size()), kept_positions(positions.size());
  const DeviceBuffer<std::byte> states(memory.seen.size() * 16), kept_states(states.size());
  const Uploaded rules(std::vector<PairRule>(kKvHeads, {budget, 4, budget / 2}));
  const Uploaded<std::uint64_t> seeds({1});
  const Uploaded<std::uint32_t> ids({0}), now({0}), admitted({static_cast<std::uint32_t>(tokens)});
  SlotCache from{.type = Type::bf16,
                 .sequences = 1,
                 .query_heads = kQueryHeads,
                 .kv_heads = kKvHeads,
                 .head_size = kHeadSize,
                 .softmax_scale = 1,
                 .most_slots = tokens,
                 .first_slot = first_slot.data(),
                 .keys = memory.keys.data(),
                 .values = memory.values.data(),
                 .positions = positions.data(),
                 .lengths = lengths.data(),
                 .next_slots = next_slots.data()};
  SlotCache to = from;
  to.most_slots = static_cast<int>(budget);
  to.first_slot = kept_first_slot.data();
  to.keys = memory.kept_keys.data();
  to.values = memory.kept_values.data();
  to.positions = kept_positions.data();
  to.lengths = kept_lengths.data();
  for (const DevicePolicy& policy : device_policies())
    if (policy.name == name)
      return median_ms([&](cudaStream_t stream) {
        check(shrink(policy,
                     {.from = from,
                      .to = to,
                      .policy = {.states = states.data(),
                                 .rules = rules.data(),
                                 .params = nullptr,
                                 .threshold16 = nullptr,
                                 .seeds = seeds.data(),
                                 .sequence_ids = ids.data(),
                                 .layer = 0,
                                 .seen = nullptr},
                      .to_states = kept_states.data(),
                      .now = now.data(),
                      .admitted = admitted.data(),
                      .seen = memory.seen.data(),
                      .workspace = memory.workspace.data()},
                     stream));
      });
  return 0;
}

void print_second_passes(const Memory& memory, double rate, int tokens, int each) {
  const double products = 2 * kWeights * tokens / rate * 1e3;
  const double attention = attention_ms(memory, tokens, each);
  const double seen = tokens * (tokens + 1.0) / 2;
  const auto print = [&](const char* what, double ms, double operations) {
    std::printf("%7d %6d %-16s %9.3f %8.0f %10.1f%% %12.2f%%\n", tokens, each, what, ms,
                operations / ms * 1e-9, 100 * ms / attention, 100 * ms / (attention + products));
  };
  const double half = 2.0 * kHeadSize * kQueryHeads * seen;
  std::printf("%7d %6d %-16s %9.3f\n", tokens, each, "products' floor", products);
  print("attention", attention, 2 * half);
  print("mass", observe_ms(memory, tokens, each, Needs::mass, kNoTail), half);
  print("requests", observe_ms(memory, tokens, each, Needs::requests, kNoTail), half);
  const double tail = 2.0 * kHeadSize * kQueryHeads * 64 * tokens;
  print("mass, tail 64", observe_ms(memory, tokens, each, Needs::mass, 64), tail);
  for (const char* name : {"window", "h2o"}) {
    observe_ms(memory, tokens, each, Needs::mass, kNoTail);
    const double ms = shrink_ms(memory, name, tokens, tokens / 5);
    std::printf("%7d %6d shrink %-9s %9.3f %8s %10.1f%% %12.2f%%\n", tokens, each, name, ms, "",
                100 * ms / attention, 100 * ms / (attention + products));
  }
}

}  // namespace

int main() {
  const Memory memory;
  for (const auto* buffer : {&memory.q, &memory.keys, &memory.values, &memory.square})
    kvlab::bench::fill(*buffer);
  const double rate = kvlab::bench::matrix_rate(memory.square);
  std::printf("bf16 matrix rate %.0f TFLOP/s; one layer, 8B shape\n\n", rate * 1e-12);
  std::printf("%7s %6s %-16s %9s %8s %11s %13s\n", "tokens", "parts", "", "ms", "TFLOP/s",
              "of attention", "of the layer");
  for (const int tokens : {2048, 8192, 32768}) print_second_passes(memory, rate, tokens, tokens);
  for (const int tokens : {8192, 32768}) print_second_passes(memory, rate, tokens, 2048);
}
