// Tests of paged caches: invalid pages are refused, and results equal those of caches without
// pages.
#include <utility>

#include "tests/catch.hpp"
#include "tests/kernels/paged_layer.hpp"
#include "tests/skip.hpp"

using namespace kvlab;

namespace {

const std::vector<Paging> kPagings{{.page = 16},
                                   {.page = 64, .order = PoolOrder::head_slot},
                                   {.page = 16, .order = PoolOrder::keys_values},
                                   {.page = 64, .by_pair = true},
                                   {.page = 16, .by_pair = true}};

void compare(const LayerLeft& contiguous, const LayerLeft& paged) {
  CHECK(paged.strays == 0);
  CHECK(paged.prompt_outputs == contiguous.prompt_outputs);
  CHECK(paged.step_outputs == contiguous.step_outputs);
  CHECK(paged.positions == contiguous.positions);
  CHECK(paged.lengths == contiguous.lengths);
  CHECK(paged.next_slots == contiguous.next_slots);
  CHECK(paged.rows == contiguous.rows);
  CHECK(paged.states == contiguous.states);
  CHECK(paged.features == contiguous.features);
  CHECK(paged.ages == contiguous.ages);
  CHECK(paged.seen == contiguous.seen);
}

/// Runs prompts and steps with each kind of pages, and compares them with a run without pages.
void check_layer(const LayerSize& size, int steps, const std::vector<Paging>& pagings = kPagings) {
  INFO(size.name());
  const LayerLeft contiguous = run_layer(size, {}, {}, steps);
  CHECK(contiguous.strays == 0);
  for (const Paging& paging : pagings) {
    INFO("page " << paging.page << " order " << static_cast<int>(paging.order) << " by pair "
                 << paging.by_pair);
    compare(contiguous, run_layer(size, paging, paging, steps));
  }
}

/// A cache that is complete except for its memory. Its pointers are never dereferenced.
kvlab_cache_view cache_of_nothing() {
  static std::byte somewhere[64];
  void* const any =
      reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(somewhere) + 15) / 16 * 16);
  kvlab_cache_view cache{};
  cache.type = KVLAB_BF16;
  cache.sequences = 1;
  cache.query_heads = 8;
  cache.kv_heads = 2;
  cache.head_size = 64;
  cache.softmax_scale = 1;
  cache.max_slots = 100;
  cache.first_slot = static_cast<const std::int64_t*>(any);
  cache.keys = cache.values = any;
  cache.positions = static_cast<std::uint32_t*>(any);
  cache.lengths = cache.next_slots = static_cast<std::int32_t*>(any);
  cache.pages = {.blocks = static_cast<const std::int32_t*>(any),
                 .page = 16,
                 .max_blocks = 7,
                 .by_pair = 0,
                 .block_stride = 16 * 128,
                 .slot_stride = 128,
                 .head_stride = 64};
  return cache;
}

kvlab_compact_args compact_args(const kvlab_cache_view& from, const kvlab_cache_view& to) {
  void* const any = from.keys;
  kvlab_compact_args args{.struct_size = sizeof(kvlab_compact_args)};
  args.from = from;
  args.to = to;
  args.policy.rules = static_cast<const kvlab_rule*>(any);
  args.policy.seeds = static_cast<const std::uint64_t*>(any);
  args.policy.sequence_ids = args.now = args.appended = static_cast<const std::uint32_t*>(any);
  args.workspace = any;
  return args;
}

cudaError_t compact_between(const kvlab_cache_view& from, const kvlab_cache_view& to) {
  const kvlab_compact_args args = compact_args(from, to);
  return kvlab_compact(kvlab_find_policy("window"), &args, nullptr);
}

cudaError_t write_to(const kvlab_cache_view& cache) {
  kvlab_write_args args{.struct_size = sizeof(kvlab_write_args)};
  args.cache = cache;
  args.tokens = 1;
  args.qkv = args.q = cache.keys;
  args.sequences = cache.lengths;
  return kvlab_write(&args, nullptr);
}

cudaError_t features_of(const kvlab_cache_view& cache) {
  kvlab_feature_args args{.struct_size = sizeof(kvlab_feature_args)};
  args.cache = cache;
  args.count = 1;
  args.features[0] = KVLAB_VALUE_NORM;
  args.slots = cache.next_slots;
  args.tokens = 1;
  args.keys = cache.keys;
  args.to = static_cast<float*>(cache.keys);
  return kvlab_compute_features(&args, nullptr);
}

cudaError_t attend_prompt(const kvlab_cache_view& cache) {
  kvlab_prefill_args args{.struct_size = sizeof(kvlab_prefill_args)};
  args.type = cache.type;
  args.query_heads = cache.query_heads;
  args.kv_heads = cache.kv_heads;
  args.head_size = cache.head_size;
  args.softmax_scale = 1;
  args.queries = cache.max_slots;
  args.q = args.keys = args.values = cache.keys;
  args.out = cache.keys;
  args.first_slot = cache.first_slot;
  args.pages = cache.pages;
  return kvlab_prefill_attention(&args, nullptr);
}

}  // namespace

TEST_CASE("The library refuses unsupported pages before any launch") {
  const kvlab_cache_view good = cache_of_nothing();
  const auto all_refuse = [](const kvlab_cache_view& cache) {
    kvlab_cache_view to = cache;
    to.pages = {};
    return write_to(cache) == cudaErrorInvalidValue &&
           features_of(cache) == cudaErrorInvalidValue &&
           attend_prompt(cache) == cudaErrorInvalidValue &&
           compact_between(cache, to) == cudaErrorInvalidValue &&
           compact_between(to, cache) == cudaErrorInvalidValue &&
           kvlab_evicting_attention_workspace(kvlab_find_policy("h2o"), &cache) == 0;
  };
  const auto refused = [&](auto change) {
    kvlab_cache_view cache = good;
    change(cache.pages);
    return all_refuse(cache);
  };
  CHECK(refused([](kvlab_pages& pages) { pages.page = 8, pages.max_blocks = 100; }));
  CHECK(refused([](kvlab_pages& pages) { pages.page = 24; }));
  // There are more blocks than the largest number of tokens needs.
  CHECK(refused([](kvlab_pages& pages) { pages.page = 1, pages.max_blocks = 100; }));
  CHECK(refused([](kvlab_pages& pages) { pages.page = 0; }));
  CHECK(refused([](kvlab_pages& pages) { pages.page = -16; }));
  CHECK(refused([](kvlab_pages& pages) { pages.blocks = nullptr; }));
  CHECK(refused([](kvlab_pages& pages) { pages.slot_stride = 32; }));
  CHECK(refused([](kvlab_pages& pages) { pages.slot_stride = std::int64_t{1} << 33; }));
  CHECK(refused([](kvlab_pages& pages) { pages.block_stride += 1; }));
  CHECK(refused([](kvlab_pages& pages) { pages.head_stride = 8; }));
  const kvlab_policy* const h2o = kvlab_find_policy("h2o");
  kvlab_evicting_attention_args layers[9]{};
  for (auto& layer : layers) layer.struct_size = sizeof layer;
  CHECK(kvlab_attend(h2o, nullptr, nullptr) == cudaErrorInvalidValue);
  CHECK(kvlab_attend(nullptr, layers, nullptr) == cudaErrorInvalidValue);
  CHECK(kvlab_attend(h2o, layers, nullptr) == cudaErrorInvalidValue);
  CHECK(kvlab_choose_victims(nullptr, layers, 1, nullptr) == cudaErrorInvalidValue);
  for (const int count : {-1, 0, 1, 9})
    CHECK(kvlab_choose_victims(h2o, layers, count, nullptr) == cudaErrorInvalidValue);
  if (has_device()) return;  // with a device these calls would launch
  CHECK(write_to(good) != cudaErrorInvalidValue);
  CHECK(features_of(good) != cudaErrorInvalidValue);
  CHECK(attend_prompt(good) != cudaErrorInvalidValue);
  CHECK(compact_between(good, good) != cudaErrorInvalidValue);
}

TEST_CASE("The two calls of a compaction over several devices refuse missing arguments") {
  const kvlab_policy* const window = kvlab_find_policy("window");
  const kvlab_cache_view cache = cache_of_nothing();
  kvlab_compact_args args = compact_args(cache, cache);
  const auto said = [&](const std::uint64_t* ranks, int devices) {
    CHECK(kvlab_compact_ranked(window, &args, ranks, devices, nullptr) == cudaErrorInvalidValue);
    return std::string(kvlab_last_error());
  };
  std::uint64_t rank = 0;
  CHECK(said(&rank, 2) ==
        "kvlab_compact_ranked: by_layer is 0, so ranks of other devices are not used; call "
        "kvlab_compact, or set by_layer");
  CHECK(kvlab_compute_ranks(window, &args, &rank, nullptr) == cudaErrorInvalidValue);
  args.by_layer = 1;
  CHECK(said(nullptr, 2) == "kvlab_compact_ranked: ranks is NULL");
  CHECK(said(&rank, 0) ==
        "kvlab_compact_ranked: devices is 0, with 2 KV heads each; give 1 or more devices, and at "
        "most 65535 "
        "heads");
}

TEST_CASE("A paged cache evicts as a cache without pages, for every type, size and group",
          "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const kvlab_type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const int head_size : {64, 96, 128, 256})
      for (const int group : {1, 3, 8})
        check_layer({.policy = group == 3 ? "lru" : "h2o",
                     .type = type,
                     .head_size = head_size,
                     .group = group},
                    20);
}

TEST_CASE("A paged cache evicts as a cache without pages, under policies that observe nothing",
          "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const std::string policy : {"window", "knorm", "keydiff"})
    for (const kvlab_type type : {KVLAB_BF16, KVLAB_F32})
      check_layer({.policy = policy, .type = type, .head_size = 128}, 30);
  check_layer({.policy = "knorm", .prompts = {900, 1300}, .budgets = {600, 1000, 63}}, 9);
}

// The feature is computed from values, which the kernel reads from pages.
TEST_CASE("A paged cache evicts as a cache without pages, under a token feature of values",
          "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const std::string policy : {"vatp", "criticalkv"})
    for (const kvlab_type type : {KVLAB_BF16, KVLAB_F32})
      check_layer({.policy = policy, .type = type, .head_size = 128}, 30);
}

TEST_CASE("A paged cache evicts as a cache without pages, with cache positions", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const kvlab_type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const int head_size : {64, 96, 128, 256}) {
      check_layer({.policy = "streaming_h2o",
                   .type = type,
                   .numbering = KVLAB_CACHE_POSITIONS,
                   .head_size = head_size},
                  25);
      check_layer({.policy = "sink",
                   .type = type,
                   .numbering = KVLAB_CACHE_POSITIONS_ROTATED,
                   .head_size = head_size},
                  25);
    }
}

TEST_CASE("A paged cache evicts as a cache without pages, in a graph", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const bool settled : {false, true})
    for (const std::string policy : {"h2o", "window", "keydiff"})
      check_layer({.policy = policy, .head_size = 128, .captured = true, .settled = settled}, 40);
}

TEST_CASE("Victims are the same if they are chosen on a second stream", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const std::string policy : {"h2o", "window", "keydiff"})
    for (const bool captured : {false, true}) {
      LayerSize size{.policy = policy, .head_size = 128, .captured = captured};
      const LayerLeft one_stream = run_layer(size, {}, {}, 20);
      size.two_streams = true;
      compare(one_stream, run_layer(size, {}, {}, 20));
      compare(one_stream, run_layer(size, kPagings[0], kPagings[0], 20));
    }
}

TEST_CASE("A policy compiled by the library evicts as the registry's policy", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const auto& [policy, header] : {std::pair{"h2o", "mass/h2o.hpp"},
                                       {"a2sf", "mass/a2sf.hpp"},
                                       {"lazy_eviction", "requests/lazy_eviction.hpp"},
                                       {"window", "recency/window.hpp"},
                                       {"random", "baseline/random.hpp"},
                                       {"keydiff", "features/keydiff.hpp"}})
    for (const bool captured : {false, true}) {
      LayerSize size{.policy = policy, .head_size = 128, .captured = captured};
      INFO(size.name());
      const LayerLeft registered = run_layer(size, {}, {}, 40);
      size.header = header;
      compare(registered, run_layer(size, {}, {}, 40));
      compare(registered, run_layer(size, kPagings[0], kPagings[0], 40));
    }
}

TEST_CASE("A paged prompt is compacted in place", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const std::string policy : {"h2o", "knorm", "window"})
    check_layer({.policy = policy, .prompts = {300, 20, 129}, .in_place = true}, 20);
}

TEST_CASE(
    "A prompt is compacted from pages to slots, from slots to pages, and to pages of "
    "another size",
    "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const kvlab_type type : {KVLAB_BF16, KVLAB_F32}) {
    const LayerSize size{.policy = "h2o", .type = type, .prompts = {200, 77}};
    const LayerLeft contiguous = run_layer(size, {}, {}, 15);
    const Paging sixteen = kPagings[0], sixty_four = kPagings[1], by_pair = kPagings[3];
    for (const auto& [from, to] : {std::pair{sixteen, Paging{}}, std::pair{Paging{}, sixteen},
                                   std::pair{sixteen, sixty_four}, std::pair{sixty_four, by_pair}})
      compare(contiguous, run_layer(size, from, to, 15));
  }
}

TEST_CASE("A paged cache evicts as a cache without pages, with split pairs and many tiles ahead",
          "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  const std::vector<Paging> two{kPagings[0], kPagings[1]};
  check_layer(
      {.policy = "h2o", .head_size = 128, .prompts = {9100, 9000}, .budgets = {9000, 511, 4097}}, 3,
      two);
  check_layer(
      {.policy = "window", .head_size = 128, .prompts = {9000, 9100}, .budgets = {9000, 511, 4097}},
      3, two);
  check_layer({.policy = "window",
               .head_size = 64,
               .group = 2,
               .kv_heads = 8,
               .prompts = std::vector<int>(9, 4000),
               .budgets = {4000}},
              3, two);
}
