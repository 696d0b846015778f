#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/evict/append.hpp"
#include "policies/observation.hpp"
#include "tests/catch.hpp"
#include "tests/kernels/prefill_fixture.hpp"
#include "tests/skip.hpp"

using namespace kvlab;
using namespace kvlab::kernels;

namespace {

constexpr std::uint32_t kPosition = 1000;  // position of the first query
constexpr Observation kUntouched{
    .mass = 12345, .requests = 678, .last_request = 0xffff'ffff, .queries = 90};

struct Request {
  Needs needs = Needs::mass;
  double tau = 0.01;
  bool weighted = false;  ///< weights 1 / (1 + age / 8); if false, no weights are given
  bool ones = false;      ///< weights that are all 1
  std::uint32_t tail = kNoTail;
  int younger = 0;
  int parts = 1;
  bool group_max = false;

  float weight(int age) const { return weighted ? 1 / (1 + age / 8.0f) : 1.0f; }
};

/// The second pass over a chunk, which observes after the attention.
class Observer {
 public:
  Observer(const PrefillChunk& chunk, const Request& requested)
      : chunk_(chunk),
        requested_(requested),
        weights_(std::span<const float>(weights())),
        threshold_(std::span<const std::uint32_t>(&kept_threshold_, 1)),
        workspace_(observe_workspace(chunk.args())) {
    clear();
  }

  /// Sets the observations of the slots that queries see to zero, and marks the others, which must
  /// not change.
  void clear() {
    std::vector<Observation> start(chunk_.all_slots(), kUntouched);
    for (int h = 0; h < chunk_.size().kv_heads; ++h)
      std::fill_n(start.begin() + static_cast<std::ptrdiff_t>(chunk_.begin(h)), chunk_.visible(h),
                  Observation{});
    seen_.assign(start);
    check_cuda(cudaMemset(workspace_.data(), kPoison, observe_workspace(chunk_.args())));
    check_cuda(cudaDeviceSynchronize());
  }

  cudaError_t enqueue(cudaStream_t stream) const {
    const int all = chunk_.size().queries;
    for (int part = 0; part < requested_.parts; ++part) {
      const int begin = all * part / requested_.parts, end = all * (part + 1) / requested_.parts;
      const std::size_t row = begin * chunk_.query_heads();
      kvlab_prefill_args queries = chunk_.args();
      queries.first += begin;
      queries.queries = end - begin;
      queries.q = static_cast<const std::byte*>(queries.q) + row * chunk_.row_bytes();
      queries.first_slot = chunk_.first_slot();
      queries.rows += row;
      const kvlab_observe_args args{
          .prefill = queries,
          .needs = static_cast<kvlab_needs>(requested_.needs),
          .keys_end = static_cast<int>(chunk_.visible(chunk_.size().kv_heads - 1)) - all + end,
          .position = kPosition + begin,
          .threshold16 = threshold_.data(),
          .seen = reinterpret_cast<kvlab_observation*>(seen_.data()),
          .workspace = workspace_.data(),
          .group_max = requested_.group_max,
          .weights = requested_.weighted || requested_.ones ? weights_.data() : nullptr,
          .tail = requested_.tail,
          .younger = requested_.younger + all - end};
      if (const cudaError_t error = observe_queries(args, stream); error != cudaSuccess)
        return error;
    }
    return cudaSuccess;
  }

  std::vector<Observation> seen() const { return seen_.to_host(); }

 private:
  std::vector<float> weights() const {
    std::vector<float> all;
    for (int age = 0; age < chunk_.size().queries + requested_.younger; ++age)
      all.push_back(requested_.weight(age));
    return all;
  }

  const PrefillChunk& chunk_;
  Request requested_;
  std::uint32_t kept_threshold_ = request_threshold16(requested_.tau);
  DeviceArray<float> weights_;
  DeviceArray<std::uint32_t> threshold_;
  DeviceArray<Observation> seen_{chunk_.all_slots()};
  DeviceArray<std::byte> workspace_;
};

std::vector<double> logits(const PrefillChunk& chunk, std::size_t row) {
  const auto query = chunk.query(row), keys = chunk.keys(row);
  std::vector<double> logit(chunk.seen_by(row));
  for (std::size_t j = 0; j < logit.size(); ++j) {
    double dot = 0;
    for (std::size_t d = 0; d < query.size(); ++d)
      dot += double{query[d]} * keys[j * query.size() + d];
    logit[j] = dot * chunk.size().scale;
  }
  return logit;
}

/// A row's probabilities: in float64, and as plain attention computes them, with weights rounded to
/// the type of keys and values.
struct Row {
  std::vector<double> exact, plain;

  Row(const PrefillChunk& chunk, std::size_t row) : exact(logits(chunk, row)) {
    const double sink = chunk.sink(row),
                 max = std::max(sink, *std::max_element(exact.begin(), exact.end()));
    double sum = std::exp(sink - max), plain_sum = sum;
    for (double& logit : exact) {
      const float weight = std::exp(static_cast<float>(logit) - static_cast<float>(max));
      plain_sum += weight;
      plain.push_back(round_to(chunk.size().type, weight));
      logit = std::exp(logit - max);
      sum += logit;
    }
    for (double& p : exact) p /= sum;
    for (double& p : plain) p /= plain_sum;
  }
};

/// The expected statistics of a key.
struct Expected {
  double mass = 0, plain_mass = 0;
  /// `surely`: the number of queries that request the key under any rounding. `perhaps`: the number
  /// of those that may request it, depending on rounding.
  std::uint32_t surely = 0, perhaps = 0;
  std::uint32_t last_surely = 0, last_perhaps = 0;
};

std::vector<Expected> expect(const PrefillChunk& chunk, const Request& requested) {
  constexpr double kNear = 1e-3;  // relative distance of a probability from the threshold
  std::vector<Expected> all(chunk.all_slots());
  const int group = chunk.size().group, queries = chunk.size().queries;
  const double tau = request_threshold16(requested.tau) / 65536.0;
  for (std::size_t first_row = 0; first_row < chunk.rows(); first_row += group) {
    const int query = static_cast<int>(first_row / chunk.query_heads());
    const int age = requested.younger + queries - 1 - query;
    const double weight =
        static_cast<std::uint32_t>(age) < requested.tail ? requested.weight(age) : 0.0f;
    const std::size_t begin = chunk.begin(chunk.kv_head(first_row));
    std::vector<int> asks(chunk.seen_by(first_row));  // 1: perhaps, 2: for certain
    std::vector<double> mass(asks.size()), plain_mass(asks.size());
    const auto give = [&](double& sum, double p) {
      sum = requested.group_max ? std::max(sum, p) : sum + p;
    };
    for (std::size_t row = first_row; row < first_row + group; ++row) {
      const Row p(chunk, row);
      const double threshold = tau * *std::max_element(p.exact.begin(), p.exact.end());
      for (std::size_t j = 0; j < asks.size(); ++j) {
        give(mass[j], weight * p.exact[j]);
        give(plain_mass[j], weight * p.plain[j]);
        const int asks_here = p.exact[j] >= threshold * (1 + kNear)   ? 2
                              : p.exact[j] >= threshold * (1 - kNear) ? 1
                                                                      : 0;
        asks[j] = std::max(asks[j], asks_here);
      }
    }
    for (std::size_t j = 0; j < asks.size(); ++j) {
      const std::uint32_t position = kPosition + query;
      Expected& key = all[begin + j];
      key.mass += mass[j], key.plain_mass += plain_mass[j];
      if (asks[j] > 0) ++key.perhaps, key.last_perhaps = position;
      if (asks[j] > 1) ++key.surely, key.last_surely = position;
    }
  }
  return all;
}

void check_mass(const PrefillChunk& chunk, const std::vector<Observation>& seen,
                const std::vector<Expected>& expected) {
  double error = 0, plain_error = 0, largest = 0;
  for (int h = 0; h < chunk.size().kv_heads; ++h)
    for (std::size_t i = chunk.begin(h); i < chunk.begin(h) + chunk.visible(h); ++i) {
      error = std::max(error, std::abs(std::ldexp(double(seen[i].mass), -32) - expected[i].mass));
      plain_error = std::max(plain_error, std::abs(expected[i].plain_mass - expected[i].mass));
      largest = std::max(largest, expected[i].mass);
    }
  INFO("error " << error << ", error of plain attention " << plain_error << ", largest mass "
                << largest);
  // 2^-17 is the error that any float32 attention has if logits are up to 100.
  CHECK(error <= 2 * plain_error + std::ldexp(largest, -17));
}

void check_requests(const PrefillChunk& chunk, const std::vector<Observation>& seen,
                    const std::vector<Expected>& expected) {
  int bad = 0;
  for (int h = 0; h < chunk.size().kv_heads; ++h)
    for (std::size_t i = chunk.begin(h); i < chunk.begin(h) + chunk.visible(h); ++i) {
      const Observation& key = seen[i];
      const Expected& right = expected[i];
      if (key.requests < right.surely || key.requests > right.perhaps) ++bad;
      if (key.requests > 0 &&
          (key.last_request < right.last_surely || key.last_request > right.last_perhaps))
        ++bad;
    }
  CHECK(bad == 0);
}

/// Whether the statistics that were not requested are unchanged.
bool has_only(const PrefillChunk& chunk, const std::vector<Observation>& seen, Needs needs) {
  bool only = true;
  for (int h = 0; h < chunk.size().kv_heads; ++h)
    for (std::size_t i = chunk.begin(h); i < chunk.begin(h) + chunk.visible(h); ++i) {
      const Observation& key = seen[i];
      if (!needs_mass(needs)) only = only && key.mass == 0;
      if (!needs_requests(needs)) only = only && key.requests == 0 && key.last_request == 0;
      only = only && key.queries == 0;
    }
  return only;
}

void check_rest_untouched(const PrefillChunk& chunk, const std::vector<Observation>& seen) {
  std::vector<bool> visible(chunk.all_slots());
  for (int h = 0; h < chunk.size().kv_heads; ++h)
    std::fill_n(visible.begin() + static_cast<std::ptrdiff_t>(chunk.begin(h)), chunk.visible(h),
                true);
  bool untouched = true;
  for (std::size_t i = 0; i < seen.size(); ++i)
    untouched = untouched && (visible[i] || seen[i] == kUntouched);
  CHECK(untouched);
}

std::vector<Observation> run(const PrefillChunk& chunk, const Request& requested) {
  const Stream stream;
  const Observer observer(chunk, requested);
  check_cuda(chunk.enqueue(stream.get()));
  check_cuda(observer.enqueue(stream.get()));
  return observer.seen();
}

void run_and_check(const PrefillSize& size, const Request& requested) {
  INFO(size.text() << (needs_mass(requested.needs) ? " mass" : "")
                   << (needs_requests(requested.needs) ? " requests" : "") << " tau "
                   << requested.tau << " tail " << requested.tail << " parts " << requested.parts
                   << (requested.group_max ? " group max" : ""));
  const PrefillChunk chunk(size);
  const auto seen = run(chunk, requested);
  const auto expected = expect(chunk, requested);
  if (needs_mass(requested.needs)) check_mass(chunk, seen, expected);
  if (needs_requests(requested.needs)) check_requests(chunk, seen, expected);
  CHECK(has_only(chunk, seen, requested.needs));
  check_rest_untouched(chunk, seen);
}

}  // namespace

TEST_CASE("the second pass agrees with float64 for every type, head size and group", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const int head_size : {64, 96, 128, 256})
      for (const int group : {1, 2, 3, 4, 7, 8, 13, 16})
        for (const Needs needs : {Needs::mass, Needs::requests, Needs::both})
          run_and_check({.type = type,
                         .head_size = head_size,
                         .group = group,
                         .first = 37,
                         .queries = 67,
                         .scale = 3 / std::sqrt(static_cast<float>(head_size))},
                        {.needs = needs});
}

TEST_CASE("the second pass supports any first slot and number of queries", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F32})
    for (const int first : {0, 1, 63, 127, 128, 129, 300})
      for (const int queries : {1, 63, 64, 65, 127, 128, 129, 200})
        for (const Needs needs : {Needs::mass, Needs::requests, Needs::both})
          run_and_check({.type = type, .kv_heads = 1, .first = first, .queries = queries},
                        {.needs = needs});
}

TEST_CASE("the second pass supports more queries than one block processes", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Needs needs : {Needs::mass, Needs::requests, Needs::both})
    run_and_check({.head_size = 64, .group = 1, .kv_heads = 1, .first = 3, .queries = 2100},
                  {.needs = needs});
}

TEST_CASE("the second pass supports KV heads of unequal length, wherever they begin", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F32})
    for (const Needs needs : {Needs::mass, Needs::requests, Needs::both})
      run_and_check({.type = type, .kv_heads = 3, .first = 5, .queries = 100, .ragged = true},
                    {.needs = needs});
}

TEST_CASE("the second pass weighs the queries of the tail by age, and ignores the others",
          "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F32})
    for (const bool weighted : {false, true})
      for (const std::uint32_t tail : {1u, 64u, 100u, kNoTail})
        for (const int younger : {0, 30})
          run_and_check({.type = type, .first = 20, .queries = 200},
                        {.weighted = weighted, .tail = tail, .younger = younger});
}

TEST_CASE("the second pass counts the largest of a group's masses", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const int head_size : {64, 96, 128, 256})
      for (const int group : {1, 2, 3, 8, 16})
        for (const bool weighted : {false, true})
          run_and_check({.type = type,
                         .head_size = head_size,
                         .group = group,
                         .first = 37,
                         .queries = 167,
                         .scale = 3 / std::sqrt(static_cast<float>(head_size))},
                        {.needs = Needs::both, .weighted = weighted, .group_max = true});
  for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32}) {
    const PrefillChunk one({.type = type, .group = 1, .first = 11, .queries = 300});
    CHECK((run(one, {.group_max = true}) == run(one, {})));
    const PrefillChunk chunk({.type = type, .group = 3, .first = 11, .queries = 300});
    const auto whole = run(chunk, {.group_max = true});
    CHECK((run(chunk, {.parts = 7, .group_max = true}) == whole));
  }
}

TEST_CASE("queries older than the tail change nothing", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  const auto seen = run(PrefillChunk({.queries = 100}), {.tail = 64, .younger = 64});
  CHECK(std::all_of(seen.begin(), seen.end(), [](const Observation& key) {
    return key == Observation{} || key == kUntouched;
  }));
}

TEST_CASE("thresholds from 0 to the largest probability decide requests", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F32})
    for (const double tau : {0.0, 0.5, 1.0})
      run_and_check({.type = type, .first = 70, .queries = 90},
                    {.needs = Needs::requests, .tau = tau});
}

TEST_CASE("the second pass is correct for logits of +80 and -80, and for equal logits", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const Needs needs : {Needs::mass, Needs::requests, Needs::both}) {
      PrefillSize size{.type = type, .first = 70, .queries = 130, .equal_keys = true};
      run_and_check(size, {.needs = needs, .tau = 0.999});
      size.equal_keys = false;
      size.scale = 30 / std::sqrt(128.0f);  // the largest of several hundred logits are beyond 80
      run_and_check(size, {.needs = needs});
    }
}

TEST_CASE("the second pass takes sink logits into account", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const int head_size : {64, 128, 256})
      for (const bool group_max : {false, true})
        run_and_check({.type = type,
                       .head_size = head_size,
                       .group = 5,
                       .first = 37,
                       .queries = 67,
                       .sinks = true},
                      {.needs = Needs::both, .group_max = group_max});
}

TEST_CASE("the parts of an append add up to the whole append, to the bit", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const Needs needs : {Needs::mass, Needs::requests, Needs::both}) {
      const PrefillChunk chunk({.type = type, .group = 3, .first = 11, .queries = 300});
      const auto whole = run(chunk, {.needs = needs});
      for (const int parts : {2, 3, 7})
        CHECK((run(chunk, {.needs = needs, .parts = parts}) == whole));
    }
}

TEST_CASE("sums of masses equal the sum of separately rounded masses, to the bit", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const int head_size : {64, 96, 128, 256}) {
      const PrefillChunk chunk({.type = type, .head_size = head_size, .first = 50, .queries = 400});
      CHECK((run(chunk, {.ones = true}) == run(chunk, {})));
    }
}

TEST_CASE("200 runs of the second pass give equal bits, plain and in a captured graph", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const Needs needs : {Needs::mass, Needs::requests, Needs::both}) {
      const PrefillChunk chunk({.type = type, .first = 100, .queries = 300});
      const auto seen = run(chunk, {.needs = needs});
      Observer observer(chunk, {.needs = needs});
      const Stream stream;
      CapturedGraph graph([&](cudaStream_t captured) { return observer.enqueue(captured); });
      int different = 0;
      for (int again = 0; again < 200; ++again) {
        observer.clear();
        if (again % 2 == 0)
          check_cuda(observer.enqueue(stream.get()));
        else
          graph.launch();
        different += observer.seen() == seen ? 0 : 1;
      }
      CHECK(different == 0);
    }
}

TEST_CASE("the second pass refuses unsupported arguments before any launch") {
  kvlab_observe_args args{.prefill = {.type = KVLAB_BF16,
                                      .query_heads = 32,
                                      .kv_heads = 8,
                                      .head_size = 128,
                                      .softmax_scale = 1,
                                      .queries = 1},
                          .needs = KVLAB_MASS,
                          .keys_end = 1};
  kvlab_prefill_args& queries = args.prefill;
  CHECK(observe_queries(args, nullptr) == cudaErrorInvalidValue);  // null pointers
  alignas(16) std::byte bytes[16];
  queries.q = queries.keys = args.workspace = bytes;
  queries.first_slot = reinterpret_cast<const std::int64_t*>(bytes);
  queries.rows = reinterpret_cast<RowSoftmax*>(bytes);
  args.seen = reinterpret_cast<kvlab_observation*>(bytes);
  args.needs = KVLAB_NOTHING;
  CHECK(observe_queries(args, nullptr) == cudaErrorInvalidValue);
  args.needs = KVLAB_REQUESTS;  // requires a threshold
  CHECK(observe_queries(args, nullptr) == cudaErrorInvalidValue);
  args.needs = KVLAB_MASS;
  queries.head_size = 80;
  CHECK(observe_queries(args, nullptr) == cudaErrorInvalidValue);
}
