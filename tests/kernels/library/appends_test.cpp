// Checks special appends through kvlab.h: drafts, shared prefixes, and KV heads that are split over
// devices. Their results must have the same bits as those of plain appends.
#include <algorithm>
#include <memory>
#include <random>
#include <string>

#include "tests/catch.hpp"
#include "tests/kernels/library/appending_layer.hpp"
#include "tests/skip.hpp"

using namespace kvlab;

namespace {

const Paging kSlots{}, kBlocks{.page = 16}, kBlocksOfHeads{.page = 32, .by_pair = true};
constexpr int kPrompt = 70, kDrafted = 8;

std::vector<std::string> policies() {
  std::vector<std::string> names;
  while (const char* name = kvlab_policy_name(static_cast<int>(names.size())))
    names.emplace_back(name);
  return names;
}

void check_layers(const AppendingLayer& expected, const AppendingLayer& found) {
  for (int pair = 0; pair < expected.pairs(); ++pair) {
    INFO("pair " << pair);
    check_equal(expected.live(pair), found.live(pair));
  }
  CHECK(first_difference(expected.outputs(), found.outputs()) == -1);
}

/// Samples, for each sequence, the number of right tokens: the accepted drafts and the token after
/// them, or 0 if the sequence is idle.
AppendingLayer::Counts sample_right(int sequences, std::mt19937& random) {
  AppendingLayer::Counts right;
  for (int s = 0; s < sequences; ++s)
    right.push_back(random() % 7 == 0 ? 0 : 1 + static_cast<int>(random() % kDrafted));
  return right;
}

/// Appends prompts, then drafts of which some tokens are right, with some decoded tokens in
/// between. Compares the result with appends of the right tokens only.
void check_drafts(const LayerSize& size, const Paging& paging) {
  INFO(size.name() << " page " << paging.page);
  const int free_slots = std::max(kDrafted, std::ranges::max(size.prompts));
  AppendingLayer drafts(size, paging, free_slots), exact(size, paging, free_slots);
  const int sequences = drafts.sequences();
  const AppendingLayer::Counts all(static_cast<std::size_t>(sequences), kDrafted);
  for (AppendingLayer* layer : {&drafts, &exact}) layer->append(size.prompts, size.prompts);
  std::mt19937 random(3);
  for (int step = 0; step < 12; ++step) {
    const auto right = sample_right(sequences, random);
    drafts.append(all, right);
    exact.append(right, right);
    if (step % 5 != 4) continue;
    for (AppendingLayer* layer : {&drafts, &exact}) {
      layer->decode();
      layer->decode();
      layer->evict_to_budget();
    }
  }
  check_layers(exact, drafts);
}

constexpr int kPrefix = 64, kRest = 37;

/// Appends a prefix once and shares it among the sequences. Compares the result with appending each
/// prompt as a whole.
void check_prefix(const LayerSize& size, const Paging& paging) {
  INFO(size.name() << " page " << paging.page);
  const auto sequences = size.prompts.size();
  const AppendingLayer::Counts whole(sequences, kPrefix + kRest), rest(sequences, kRest);
  AppendingLayer::Counts prefix(sequences, 0);
  prefix.front() = kPrefix;
  AppendingLayer anew(size, paging, kPrefix + kRest), hits(size, paging, kPrefix + kRest),
      kept_anew(size, paging, 1), kept(size, paging, 1);
  const auto end = [](AppendingLayer& from, AppendingLayer& to) {
    const kvlab_compact_args args = from.end_args(to);
    check_cuda(kvlab_compact(from.policy(), &args, nullptr));
    from.ended(to);
  };
  for (AppendingLayer* layer : {&anew, &hits}) layer->begin_alike(kPrefix);
  anew.put(whole, whole);
  anew.attend();
  anew.observe();
  end(anew, kept_anew);
  hits.put(prefix, prefix);
  hits.attend();
  hits.observe();
  check_cuda(hits.share_prefix(paging.page));
  hits.put(rest, rest);
  hits.attend();
  hits.observe();
  end(hits, kept);
  for (int pair = 0; pair < kept.pairs(); ++pair) {
    INFO("pair " << pair);
    check_equal(kept_anew.live(pair), kept.live(pair));
  }
}

/// Runs four KV heads on one device, and the same four heads split over two devices that exchange
/// the ranks of tokens.
class TwoDevices {
 public:
  TwoDevices(const LayerSize& size, bool by_layer, std::uint32_t smooth)
      : by_layer_(by_layer), smooth_(smooth), one_(whole(size), kSlots, kPrompt) {
    for (int device = 0; device < kDevices; ++device)
      both_.push_back(
          std::make_unique<AppendingLayer>(half(size), kBlocks, kPrompt, OwnHeads{2 * device, 4}));
    ranks_ = std::make_unique<DeviceArray<std::uint64_t>>(kDevices * ranks_of_one());
  }

  void append(const AppendingLayer::Counts& tokens) {
    for (AppendingLayer* layer : all()) {
      layer->put(tokens, tokens);
      layer->attend();
      layer->observe();
    }
    const kvlab_compact_args whole = args_of(one_);
    check_cuda(kvlab_compact(one_.policy(), &whole, nullptr));
    std::uint64_t* ranks = ranks_->data();
    for (const auto& layer : both_) {
      const kvlab_compact_args args = args_of(*layer);
      check_cuda(by_layer_ ? kvlab_compute_ranks(one_.policy(), &args, ranks, nullptr)
                           : kvlab_compact(one_.policy(), &args, nullptr));
      ranks += ranks_of_one();
    }
    for (const auto& layer : both_) {
      const kvlab_compact_args args = args_of(*layer);
      if (by_layer_)
        check_cuda(kvlab_compact_ranked(one_.policy(), &args, ranks_->data(), kDevices, nullptr));
    }
    for (AppendingLayer* layer : all()) layer->ended(*layer);
  }
  void decode() {
    for (AppendingLayer* layer : all()) layer->decode();
  }
  void evict_to_budget() {
    for (AppendingLayer* layer : all()) layer->evict_to_budget();
  }
  void check() const {
    for (int pair = 0; pair < one_.pairs(); ++pair) {
      INFO("pair " << pair);
      const int head = pair % 4;
      check_equal(one_.live(pair),
                  both_[static_cast<std::size_t>(head / 2)]->live(pair / 4 * 2 + head % 2));
    }
  }

 private:
  static constexpr int kDevices = 2;

  static LayerSize whole(LayerSize size) { return size.kv_heads = 4, size; }
  static LayerSize half(LayerSize size) { return size.kv_heads = 2, size; }
  std::vector<AppendingLayer*> all() { return {&one_, both_[0].get(), both_[1].get()}; }
  std::size_t ranks_of_one() const {
    const kvlab_cache_view cache = both_[0]->end_args(*both_[0]).from;
    return static_cast<std::size_t>(both_[0]->pairs() * cache.max_slots);
  }
  kvlab_compact_args args_of(const AppendingLayer& layer) const {
    kvlab_compact_args args = layer.end_args(layer);
    args.by_layer = by_layer_ ? 1 : 0;
    args.smooth = smooth_;
    return args;
  }

  bool by_layer_;
  std::uint32_t smooth_;
  AppendingLayer one_;
  std::vector<std::unique_ptr<AppendingLayer>> both_;
  std::unique_ptr<DeviceArray<std::uint64_t>> ranks_;
};

kvlab_prefix_args prefix_of_nothing(std::int64_t& slot, kvlab_observation& seen, float& feature) {
  return {.struct_size = sizeof(kvlab_prefix_args),
          .sequences = 1,
          .kv_heads = 1,
          .tokens = 1,
          .first_slot = &slot,
          .to_first_slot = &slot,
          .seen = &seen,
          .to_seen = &seen,
          .features = &feature,
          .to_features = &feature};
}

}  // namespace

TEST_CASE("Accepted drafts equal one append, and rejected drafts change nothing", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const std::string& policy : policies())
    for (const Paging& paging : {kSlots, kBlocks}) check_drafts({.policy = policy}, paging);
}

TEST_CASE("Accepted drafts equal one append for every type, size and group", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const kvlab_type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const int head_size : {64, 96, 128, 256})
      for (const int group : {1, 5, 8})
        check_drafts({.policy = group == 5 ? "lru" : "h2o",
                      .type = type,
                      .head_size = head_size,
                      .group = group,
                      .prompts = {300, 5, 33},
                      .budgets = {280, 40, 65, 8},
                      .in_parts = group > 1},
                     kBlocksOfHeads);
}

TEST_CASE("One graph attends to drafts, and another one appends them", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const std::string policy : {"h2o", "lru", "snapkv", "keydiff", "random"}) {
    const LayerSize size{.policy = policy};
    INFO(policy);
    AppendingLayer drafts(size, kBlocks, kPrompt), exact(size, kSlots, kPrompt);
    const AppendingLayer::Counts all(size.prompts.size(), kDrafted);
    drafts.append(all, all);
    exact.append(all, all);
    drafts.put(all, all);
    CapturedGraph attention(
        [&](cudaStream_t stream) { return drafts.attend(stream), cudaSuccess; });
    CapturedGraph append([&](cudaStream_t stream) {
      drafts.observe(stream);
      const kvlab_compact_args args = drafts.end_args(drafts);
      return kvlab_compact(drafts.policy(), &args, stream);
    });
    const auto verify = [&](const AppendingLayer::Counts& right) {
      attention.launch();
      check_cuda(cudaDeviceSynchronize());
      append.launch();
      drafts.ended(drafts);
      exact.append(right, right);
    };
    verify(all);
    std::mt19937 random(5);
    for (int step = 0; step < 10; ++step) {
      const auto right = sample_right(drafts.sequences(), random);
      drafts.put(all, right);
      verify(right);
    }
    check_layers(exact, drafts);
  }
}

TEST_CASE(
    "A shared prefix gives the same cache as a prefix that is appended again, for every policy "
    "that allows it",
    "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  int shared = 0;
  for (const std::string& policy : policies()) {
    const kvlab_policy* const held = kvlab_find_policy(policy.c_str());
    if (kvlab_policy_weighted(held) || policy == "keydiff") continue;
    for (const Paging& paging : {kBlocks, kBlocksOfHeads}) {
      check_prefix({.policy = policy}, paging);
      check_prefix({.policy = policy, .type = KVLAB_F32, .group = 3}, paging);
    }
    ++shared;
  }
  CHECK(shared > 15);
}

TEST_CASE("A prefix is refused by name if its state depends on the tokens after it") {
  std::int64_t slot = 0;
  kvlab_observation seen{};
  float feature = 0;
  const kvlab_prefix_args good = prefix_of_nothing(slot, seen, feature);
  const auto said = [](const std::string& policy, const kvlab_prefix_args& args) {
    const cudaError_t error = kvlab_copy_prefix(kvlab_find_policy(policy.c_str()), &args, nullptr);
    CHECK(error != cudaSuccess);
    return std::to_string(error) + " " + kvlab_last_error();
  };
  const std::string call = " kvlab_copy_prefix: ",
                    refused = std::to_string(cudaErrorNotSupported) + call,
                    wrong = std::to_string(cudaErrorInvalidValue) + call;
  const std::string depends = ", so the result for the prefix depends on the tokens that follow it";
  CHECK(said("keydiff", good) ==
        refused + "policy keydiff reads key_cosine, which depends on all keys" + depends);
  for (const std::string& policy : policies())
    if (kvlab_policy_weighted(kvlab_find_policy(policy.c_str())))
      CHECK(said(policy, good) == refused + "policy " + policy +
                                      " weighs queries by the number of later queries" + depends);
  kvlab_prefix_args args = good;
  args.tokens = 0;
  CHECK(said("h2o", args) ==
        wrong +
            "sequences is 1, kv_heads 1, tokens 0; each should be at least 1, and sequences "
            "times kv_heads at most 65535");
  args = good;
  args.to_seen = nullptr;
  CHECK(said("h2o", args) ==
        wrong +
            "seen or to_seen is NULL, but h2o needs the numbers of queries that saw each token");
  args = good;
  args.features = nullptr;
  CHECK(said("knorm", args) ==
        wrong + "features or to_features is NULL, but policy knorm reads features (1 per slot)");
}

TEST_CASE("KV heads split over two devices keep and sample the same tokens as on one", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const std::string& policy : policies()) {
    INFO(policy);
    TwoDevices devices({.policy = policy, .budgets = {17}}, false, 0);
    devices.append({70, 5, 33});
    for (int step = 0; step < 10; ++step) devices.decode();
    devices.evict_to_budget();
    devices.append({3, 0, 60});
    devices.check();
  }
}

TEST_CASE("KV heads split over two devices keep one set per layer", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const std::string& policy : policies())
    for (const std::uint32_t smooth : {0u, 2u}) {
      INFO(policy << " smooth " << smooth);
      TwoDevices devices({.policy = policy, .type = KVLAB_F16, .budgets = {29}}, true, smooth);
      devices.append({70, 5, 33});
      devices.append({3, 0, 60});
      devices.append({1, 69, 2});
      devices.check();
    }
}
