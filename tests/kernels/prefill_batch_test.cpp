// Checks that one call for prompts of several sequences gives the same bits as one call per
// sequence.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "tests/catch.hpp"
#include "tests/kernels/attention_reference.hpp"
#include "tests/kernels/paged_layer.hpp"
#include "tests/skip.hpp"

using namespace kvlab;

namespace {

/// The number of queries of each sequence, and the number of older slots of each pair.
struct Prompts {
  std::vector<int> queries, older;  ///< [sequence], [pair]
  std::vector<std::int32_t> first;  ///< [sequence + 1]: first query
};

constexpr int kKvHeads = 2, kFirst = 5, kMaxQueries = 513, kMaxOlder = 90;
constexpr int kLeading = 3, kTrailing = 9;  // unused queries

Prompts prompts_of(const std::vector<int>& queries) {
  Prompts prompts{queries, {}, {kLeading}};
  for (const int count : queries) {
    prompts.first.push_back(prompts.first.back() + count);
    for (int head = 0; head < kKvHeads; ++head)
      prompts.older.push_back(static_cast<int>(prompts.older.size()) * 31 % kMaxOlder);
  }
  return prompts;
}

const Prompts kLong = prompts_of({1, 17, 64, 0, 513, 200, 3});
const Prompts kShort = prompts_of({64, 0, 33, 1, 129, 2, 300});
constexpr int kSequences = 7;

struct Case {
  LayerSize size;
  Paging paging = {};
  kvlab_needs needs = KVLAB_MASS;
  bool weighted = false, group_max = false;
};

struct Results {
  std::vector<std::byte> out;
  std::vector<float> lse;
  std::vector<kvlab_row_softmax> rows;
  std::vector<kvlab_observation> seen;
};

template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

/// A cache with random contents, queries, and outputs that are poisoned before each run.
class Batch {
 public:
  explicit Batch(const Case& given)
      : case_(given),
        cache_(given.size, given.paging,
               std::vector<int>(kSequences * kKvHeads, kFirst + kMaxOlder + kMaxQueries)),
        all_(kLeading + kTrailing + std::max(kLong.first.back(), kShort.first.back())),
        q_(all() * row_bytes()),
        out_(all() * row_bytes()),
        lse_(rows()),
        softmax_(rows()),
        seen_(cache_.slots()),
        first_query_(std::size_t{kSequences + 1}),
        older_(std::size_t{kSequences * kKvHeads}) {
    std::vector<float> weights;
    for (int age = 0; age < kMaxQueries + 100; ++age)
      weights.push_back(1 / (1 + static_cast<float>(age) / 8));
    weights_ = std::make_unique<DeviceArray<float>>(std::span<const float>(weights));
    write_cache();
  }

  /// Sets new queries. Queries that belong to no sequence are NaN.
  void set(const Prompts& prompts) {
    prompts_ = prompts;
    std::vector<std::byte> q(all() * row_bytes(), std::byte{0xFF});
    const auto count = static_cast<std::size_t>(prompts.first.back() - kLeading);
    const auto own = kernels::encode(
        type(),
        kernels::random_values(
            type(), count * static_cast<std::size_t>(heads() * case_.size.head_size), random_));
    std::ranges::copy(own, q.begin() + static_cast<std::ptrdiff_t>(kLeading * row_bytes()));
    copy(q_, q);
    copy(first_query_, prompts.first);
    copy(older_, prompts.older);
  }

  /// Runs one call per sequence.
  Results run_each() {
    poison();
    for (int s = 0; s < kSequences; ++s) {
      const auto index = static_cast<std::size_t>(s);
      if (prompts_.queries[index] == 0) continue;
      kvlab_observe_args args = batch_args();
      kvlab_prefill_args& prefill = args.prefill;
      const kvlab_cache_view one = cache_.sequence(s);
      const auto first = static_cast<std::size_t>(prompts_.first[index]);
      const std::size_t row = first * static_cast<std::size_t>(heads());
      prefill.sequences = prefill.all_queries = 0;
      prefill.first_query = nullptr;
      prefill.queries = prompts_.queries[index];
      prefill.q = q_.data() + first * row_bytes();
      prefill.first_slot = one.first_slot;
      prefill.older += s * kKvHeads;
      prefill.out = out_.data() + first * row_bytes();
      prefill.lse += row;
      prefill.rows += row;
      prefill.pages = one.pages;
      args.positions = nullptr;
      args.position = kPositions[index];
      args.youngers = nullptr;
      args.younger = kYoungers[index];
      args.threshold16 += s;
      enqueue(args, nullptr);
    }
    return results();
  }

  Results run_batch() {
    poison();
    enqueue(batch_args(), nullptr);
    return results();
  }

  Results launch(CapturedGraph& graph) {
    poison();
    graph.launch();
    return results();
  }

  /// Runs both calls. The workspace has exactly the required size and arbitrary contents.
  cudaError_t enqueue(kvlab_observe_args args, cudaStream_t stream) {
    check_cuda(kvlab_prefill_attention(&args.prefill, stream));
    if (stream == nullptr) {
      const std::size_t bytes = kvlab_observe_workspace(&args);
      workspace_ = std::make_unique<DeviceArray<std::byte>>(bytes);
      check_cuda(cudaMemset(workspace_->data(), 0xFF, bytes));
    }
    args.workspace = workspace_->data();
    check_cuda(kvlab_observe(&args, stream));
    if (stream == nullptr) check_cuda(cudaDeviceSynchronize());
    return cudaSuccess;
  }

  kvlab_observe_args batch_args() const {
    const kvlab_cache_view cache = cache_.cache();
    kvlab_observe_args args{.struct_size = sizeof(kvlab_observe_args)};
    args.prefill = {.struct_size = sizeof(kvlab_prefill_args),
                    .type = case_.size.type,
                    .query_heads = heads(),
                    .kv_heads = kKvHeads,
                    .head_size = case_.size.head_size,
                    .softmax_scale = cache.softmax_scale,
                    .first = kFirst,
                    .queries = kMaxQueries,
                    .q = q_.data(),
                    .keys = cache.keys,
                    .values = cache.values,
                    .first_slot = cache.first_slot,
                    .older = older_.data(),
                    .out = out_.data(),
                    .lse = lse_.data(),
                    .rows = softmax_.data(),
                    .pages = cache.pages,
                    .sequences = kSequences,
                    .all_queries = all_,
                    .first_query = first_query_.data()};
    args.needs = case_.needs;
    args.keys_end = kFirst + kMaxOlder + kMaxQueries;
    args.threshold16 = thresholds_.data();
    args.seen = seen_.data();
    args.group_max = case_.group_max ? 1 : 0;
    if (case_.weighted) args.weights = weights_->data();
    args.tail = case_.weighted ? 130 : 0;
    args.positions = positions_.data();
    args.youngers = youngers_.data();
    return args;
  }

 private:
  static constexpr std::uint32_t kPositions[kSequences] = {0, 700, 3, 0, 9000, 12, 1};
  static constexpr std::int32_t kYoungers[kSequences] = {0, 7, 200, 0, 0, 60, 64};
  static constexpr std::uint32_t kThresholds[kSequences] = {655, 655, 6553, 1, 0, 3000, 65536};

  kernels::Type type() const { return case_.size.type; }
  int heads() const { return case_.size.group * kKvHeads; }
  std::size_t all() const { return static_cast<std::size_t>(all_); }
  std::size_t rows() const { return all() * static_cast<std::size_t>(heads()); }
  std::size_t row_bytes() const {
    return static_cast<std::size_t>(heads() * case_.size.head_size) * kernels::bytes_of(type());
  }
  template <class T>
  static void copy(const DeviceArray<T>& to, const std::vector<T>& from) {
    to.assign(from);
  }

  /// Fills every slot with random keys and values.
  void write_cache() {
    std::vector<std::int32_t> sequences, slots;
    for (int s = 0; s < kSequences; ++s)
      for (int slot = 0; slot < kFirst + kMaxOlder + kMaxQueries; ++slot) {
        sequences.push_back(s);
        slots.push_back(slot);
      }
    const auto heads_of_qkv = static_cast<std::size_t>(heads() + 2 * kKvHeads);
    const auto elements =
        sequences.size() * heads_of_qkv * static_cast<std::size_t>(case_.size.head_size);
    const auto values = kernels::encode(type(), kernels::random_values(type(), elements, random_));
    const DeviceArray<std::byte> qkv{std::span<const std::byte>(values)},
        q(sequences.size() * row_bytes());
    const DeviceArray<std::int32_t> device_sequences{std::span<const std::int32_t>(sequences)},
        device_slots{std::span<const std::int32_t>(slots)};
    kvlab_write_args args{.struct_size = sizeof(kvlab_write_args)};
    args.cache = cache_.cache();
    args.tokens = static_cast<int>(sequences.size());
    args.qkv = qkv.data();
    args.sequences = device_sequences.data();
    args.slots = device_slots.data();
    args.q = q.data();
    check_cuda(kvlab_write(&args, nullptr));
    check_cuda(cudaDeviceSynchronize());
  }

  void poison() {
    check_cuda(cudaMemset(out_.data(), 0xFF, all() * row_bytes()));
    check_cuda(cudaMemset(lse_.data(), 0xFF, rows() * sizeof(float)));
    check_cuda(cudaMemset(softmax_.data(), 0xFF, rows() * sizeof(kvlab_row_softmax)));
    seen_.clear();
    check_cuda(cudaDeviceSynchronize());
  }
  Results results() const {
    return {out_.to_host(), lse_.to_host(), softmax_.to_host(), seen_.to_host()};
  }

  Case case_;
  std::mt19937 random_{11};
  PagedCache cache_;
  int all_;
  Prompts prompts_;
  DeviceArray<std::byte> q_, out_;
  DeviceArray<float> lse_;
  DeviceArray<kvlab_row_softmax> softmax_;
  DeviceArray<kvlab_observation> seen_;
  DeviceArray<std::int32_t> first_query_, older_;
  DeviceArray<std::uint32_t> positions_{std::span<const std::uint32_t>(kPositions)},
      thresholds_{std::span<const std::uint32_t>(kThresholds)};
  DeviceArray<std::int32_t> youngers_{std::span<const std::int32_t>(kYoungers)};
  std::unique_ptr<DeviceArray<float>> weights_;
  std::unique_ptr<DeviceArray<std::byte>> workspace_;
};

void compare(const Results& each, const Results& batch) {
  CHECK(same(each.out, batch.out));
  CHECK(same(each.lse, batch.lse));
  CHECK(same(each.rows, batch.rows));
  CHECK(same(each.seen, batch.seen));
}

/// Checks that calls per sequence write only their sequence's outputs, and that no output is NaN.
void check_each(const Results& each, const Prompts& prompts, int heads) {
  const auto begin = static_cast<std::size_t>(prompts.first.front() * heads),
             end = static_cast<std::size_t>(prompts.first.back() * heads);
  std::size_t wrong = 0;
  for (std::size_t row = 0; row < each.lse.size(); ++row)
    wrong += std::isnan(each.lse[row]) == (row >= begin && row < end);
  CHECK(wrong == 0);
}

/// Compares the results of direct calls, and of two launches of one graph with different prompts.
void run_and_check(const Case& given) {
  INFO(given.size.name() << " page " << given.paging.page << " by pair " << given.paging.by_pair
                         << " needs " << given.needs << " weighted " << given.weighted
                         << " group max " << given.group_max);
  Batch batch(given);
  batch.set(kLong);
  const Results each_long = batch.run_each();
  check_each(each_long, kLong, given.size.group * kKvHeads);
  compare(each_long, batch.run_batch());
  CapturedGraph graph(
      [&](cudaStream_t stream) { return batch.enqueue(batch.batch_args(), stream); });
  compare(each_long, batch.launch(graph));
  batch.set(kShort);
  const Results again = batch.launch(graph);
  compare(batch.run_each(), again);
}

/// Arguments that are complete except for memory. Their pointers are never dereferenced.
kvlab_observe_args args_of_nothing() {
  alignas(16) static std::byte somewhere[16];
  void* const any = somewhere;
  kvlab_observe_args args{.struct_size = sizeof(kvlab_observe_args)};
  args.prefill = {.struct_size = sizeof(kvlab_prefill_args),
                  .type = KVLAB_BF16,
                  .query_heads = 8,
                  .kv_heads = 2,
                  .head_size = 64,
                  .softmax_scale = 1,
                  .queries = 100,
                  .q = any,
                  .keys = any,
                  .values = any,
                  .first_slot = static_cast<const std::int64_t*>(any),
                  .out = any,
                  .rows = static_cast<kvlab_row_softmax*>(any),
                  .sequences = 3,
                  .all_queries = 130,
                  .first_query = static_cast<const std::int32_t*>(any)};
  args.needs = KVLAB_MASS;
  args.keys_end = 100;
  args.seen = static_cast<kvlab_observation*>(any);
  args.workspace = any;
  return args;
}

}  // namespace

TEST_CASE("Batches of prompts that the kernels do not support are refused") {
  const auto refused = [](auto change) {
    kvlab_observe_args args = args_of_nothing();
    change(args.prefill);
    return kvlab_prefill_attention(&args.prefill, nullptr) == cudaErrorInvalidValue &&
           kvlab_observe(&args, nullptr) == cudaErrorInvalidValue;
  };
  CHECK(refused([](kvlab_prefill_args& args) { args.sequences = 0; }));
  CHECK(refused([](kvlab_prefill_args& args) { args.sequences = -1; }));
  CHECK(refused([](kvlab_prefill_args& args) { args.sequences = 65536; }));
  CHECK(refused([](kvlab_prefill_args& args) { args.first_query = nullptr; }));
  CHECK(refused([](kvlab_prefill_args& args) { args.all_queries = 99; }));
  CHECK(refused([](kvlab_prefill_args& args) { args.all_queries = 1 << 27; }));
  CHECK(refused([](kvlab_prefill_args& args) { args.sequences = 0, args.first_query = nullptr; }));
  // Terms take 8 bytes per query. The terms of each sequence begin at a multiple of 64 queries.
  kvlab_observe_args args = args_of_nothing();
  CHECK(kvlab_observe_workspace(&args) == std::size_t{8} * 8 * (128 + 3 * 64));
  if (has_device()) return;  // with a device these calls would launch
  CHECK(kvlab_prefill_attention(&args.prefill, nullptr) != cudaErrorInvalidValue);
  CHECK(kvlab_observe(&args, nullptr) != cudaErrorInvalidValue);
}

TEST_CASE("Prompts in one call equal prompts in separate calls, for every type, size and group",
          "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const kvlab_type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const int head_size : {64, 96, 128, 256})
      for (const int group : {1, 3, 8})
        run_and_check(
            {.size = {.type = type, .head_size = head_size, .group = group}, .needs = KVLAB_BOTH});
}

TEST_CASE("Prompts in one call equal prompts in separate calls, with pages", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const kvlab_type type : {KVLAB_BF16, KVLAB_F32})
    for (const Paging& paging :
         {Paging{.page = 16}, Paging{.page = 64, .order = PoolOrder::head_slot},
          Paging{.page = 16, .order = PoolOrder::keys_values}, Paging{.page = 32, .by_pair = true}})
      run_and_check(
          {.size = {.type = type, .head_size = 128}, .paging = paging, .needs = KVLAB_BOTH});
}

TEST_CASE("Prompts in one call equal prompts in separate calls, weighted and with group=max",
          "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const kvlab_type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const bool group_max : {false, true})
      run_and_check({.size = {.type = type, .head_size = 64},
                     .needs = KVLAB_BOTH,
                     .weighted = true,
                     .group_max = group_max});
}
