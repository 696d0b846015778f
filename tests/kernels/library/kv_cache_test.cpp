// Compares kvlab_kv_cache with the CPU's caches, which get the same queries, keys and values. The
// tests of its refusals need no device.
#include <memory>
#include <random>

#include "tests/conformance.hpp"
#include "tests/kernels/library/kv_cache_fixture.hpp"
#include "tests/skip.hpp"

using namespace kvlab;

namespace {

/// Runs a prompt, decoded tokens and a second turn on the device and on the CPU, and compares the
/// kept tokens. Returns the largest difference of an output, relative to the largest output.
double conversation(const ResolvedConfig& config) {
  const Layout layout(config);
  Slots slots(layout);
  Host host(config);
  SampledRows sampled;
  double off = 0;
  std::uint32_t fed = 0;
  const auto turn = [&](std::uint32_t prompt, std::uint32_t steps) {
    const std::uint32_t chunk = config.prefill.chunk == 0 ? prompt : config.prefill.chunk;
    std::vector<std::vector<float>> rows;
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) rows.push_back(sampled.rows(prompt));
    // Appends all chunks of a prompt in one layer before the next layer begins, as kvlab.hf does in
    // transformers.
    for (std::uint32_t layer = 0; layer < kLayers; ++layer)
      for (std::uint32_t first = 0; first < prompt; first += chunk) {
        const std::uint32_t tokens = std::min(chunk, prompt - first);
        const auto part = std::span(rows[layer]).subspan(first * kRow, tokens * kRow);
        const bool ends = first + tokens == prompt;
        off = std::max(off, worst(slots.append(0, layer, fed + first, ends, part),
                                  host.attend(layer, fed + first, ends, part)));
      }
    fed += prompt;
    for (std::uint32_t step = 0; step < steps; ++step, ++fed) {
      slots.begin_step();
      for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
        const auto row = sampled.rows(1);
        off = std::max(off, worst(slots.step(layer, row), host.attend(layer, fed, false, row)));
      }
    }
  };
  turn(60, 30);
  turn(20, 15);
  std::size_t left = 0;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer)
    for (std::uint32_t head = 0; head < kHeads; ++head) {
      CHECK(slots.kept(0, layer, head) == host.kept(layer, head));
      left += fed - host.kept(layer, head).size();
    }
  CHECK(slots.held().tokens == fed);
  CHECK(slots.held().evictions == left);
  CHECK(slots.held().kv_bytes <= slots.held().allocated);
  return off;
}

}  // namespace

TEST_CASE("A device's cache keeps the same tokens as the CPU's caches and gives the same outputs",
          "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  const test::Choices choices{
      .policies = {"window", "sink", "lru", "h2o", "snapkv", "random", "knorm", "keydiff"},
      .tier_plans = {"", "4", "16@5t+4@100%", "8@25%+4@50%+k4v2@25%", "fp8@50%+2@50%"},
      .budgets = test::budgets_about(36, kModel)};
  for (const CacheConfig& config : test::covering(choices, &kKernelLibrary, kTokens, kModel)) {
    INFO(test::text_of(config));
    // Outputs on quantized tiers differ more, because a key that differs in its last bit may have
    // another quantized value.
    CHECK(conversation(resolve(config, kTokens, 0, kModel)) <
          (config.policy.tier_plan.is_quantized() ? 3e-2 : 1e-4));
  }
  CHECK(conversation(resolved("full:tiers=8", 32)) < 3e-2);
  const std::string rest = "x" + std::to_string(kLayers - 1);
  for (const std::string& policy : {"h2o:tiers=16x1-4" + rest, "full:tiers=8x1-4/2" + rest}) {
    INFO(policy);
    CHECK(conversation(resolve({.policy = parse_policy(policy), .budget = parse_budget("36")},
                               kTokens, 0, kModel)) < 3e-2);
  }
}

TEST_CASE("A captured graph of a cache's steps stays valid, also after clear()", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  const Layout layout(resolved("h2o:tiers=16@8t+4@100%", 32), 1, KVLAB_BF16);
  CHECK(layout.config.tier_count == 2);
  // The rows are floats that are read as 2-byte numbers. They are only zeros and ones, because one
  // half of an arbitrary float may be NaN as a 2-byte number.
  constexpr std::size_t kBytes = kRow * 2;
  Stream stream;
  kvlab_kv_cache* slots = nullptr;
  done(kvlab_kv_cache_create(&layout.config, stream.get(), &slots));
  std::mt19937 random(3);
  std::vector<std::uint16_t> all(80 * kRow);
  for (auto& value : all)
    value = static_cast<std::uint16_t>(0x3f00 + random() % 256 + random() % 2 * 0x8000);
  const DeviceArray<std::uint16_t> tokens{std::span<const std::uint16_t>(all)}, row(kRow),
      out(kQueries);
  const auto step = [&] {
    for (int layer = 0; layer < static_cast<int>(kLayers); ++layer)
      done(kvlab_kv_cache_step(slots, layer, row.data(), out.data(), nullptr, stream.get()));
  };
  cudaGraphExec_t graph = nullptr;
  const auto text = [&](bool replayed) {
    std::vector<std::uint16_t> outputs;
    done(kvlab_kv_cache_clear(slots, stream.get()));
    for (std::size_t t = 0; t < 80; ++t) {
      done(kvlab_kv_cache_begin_step(slots, nullptr, stream.get()));
      check_cuda(cudaMemcpyAsync(row.data(), tokens.data() + t * kRow, kBytes,
                                 cudaMemcpyDeviceToDevice, stream.get()));
      if (replayed)
        check_cuda(cudaGraphLaunch(graph, stream.get()));
      else
        step();
      check_cuda(cudaStreamSynchronize(stream.get()));
      const auto own = out.to_host();
      outputs.insert(outputs.end(), own.begin(), own.end());
    }
    return outputs;
  };
  const auto plain = text(false);
  cudaGraph_t recorded = nullptr;
  check_cuda(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
  step();
  check_cuda(cudaStreamEndCapture(stream.get(), &recorded));
  check_cuda(cudaGraphInstantiate(&graph, recorded, 0));
  CHECK(text(true) == plain);
  CHECK(text(true) == plain);
  cudaGraphExecDestroy(graph);
  cudaGraphDestroy(recorded);
  kvlab_kv_cache_destroy(slots);
}

TEST_CASE("Sequences of a cache give the same results in a batch as alone", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  const ResolvedConfig config = resolved("h2o:every=4", 24);
  const Layout both(config, 2), one(config);
  Slots slots(both), alone(one);
  SampledRows sampled;
  const auto prompt = sampled.rows(40);
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    slots.append(1, layer, 0, true, prompt);
    alone.append(0, layer, 0, true, prompt);
  }
  for (int step = 0; step < 30; ++step) {
    const bool first =
        step % 3 == 0;  // the first sequence, which has no prompt, decodes less often
    slots.begin_step({static_cast<unsigned char>(first), 1});
    alone.begin_step();
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      const auto rows = sampled.rows(2);
      auto out = slots.step(layer, rows);
      out.erase(out.begin(), out.begin() + kQueries);
      CHECK(worst(out, alone.step(layer, std::span(rows).subspan(kRow))) < 1e-5);
    }
  }
  CHECK(slots.held(0).tokens == 10);
  for (std::uint32_t head = 0; head < kHeads; ++head)
    CHECK(slots.kept(1, 1, head) == alone.kept(0, 1, head));
}

TEST_CASE("Requests leave and join a batch, and each gives the same results as alone", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const char* policy : {"h2o", "h2o:every=4", "h2o:tiers=16@8t+4@100%", "keydiff", "sink"}) {
    CAPTURE(policy);
    const ResolvedConfig config = resolved(policy, 24);
    const Layout both(config, 2), one(config);
    Slots batch(both), first(one), second(one), joining(one);
    SampledRows sampled;
    const auto prompt = [&](Slots& alone, int sequence, std::uint32_t tokens) {
      for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
        const auto rows = sampled.rows(tokens);
        CHECK(batch.append(sequence, layer, 0, true, rows) ==
              alone.append(0, layer, 0, true, rows));
      }
    };
    const auto steps = [&](Slots& first_slots, int count) {
      for (int step = 0; step < count; ++step) {
        for (Slots* slots : {&batch, &first_slots, &second}) slots->begin_step();
        for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
          const auto rows = sampled.rows(2);
          auto out = first_slots.step(layer, std::span(rows).first(kRow));
          const auto other = second.step(layer, std::span(rows).subspan(kRow));
          out.insert(out.end(), other.begin(), other.end());
          CHECK(worst(batch.step(layer, rows), out) < 1e-5);
        }
      }
    };
    prompt(first, 0, 40);
    prompt(second, 1, 35);
    steps(first, 10);
    batch.start(0);  // the first request has ended
    CHECK(batch.held(0).tokens == 0);
    prompt(joining, 0, 30);
    steps(joining, 20);
    for (std::uint32_t layer = 0; layer < kLayers; ++layer)
      for (std::uint32_t head = 0; head < kHeads; ++head) {
        CHECK(batch.kept(0, layer, head) == joining.kept(0, layer, head));
        CHECK(batch.kept(1, layer, head) == second.kept(0, layer, head));
      }

    batch.copy(1, 0);
    for (int step = 0; step < 10; ++step) {
      batch.begin_step();
      for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
        auto rows = sampled.rows(1);
        rows.insert(rows.end(), rows.begin(), rows.begin() + kRow);
        const auto out = batch.step(layer, rows);
        CHECK(std::ranges::equal(std::span(out).first(kQueries), std::span(out).subspan(kQueries)));
      }
    }
    CHECK(batch.kept(0, 1, 1) == batch.kept(1, 1, 1));
    CHECK(batch.held(0).evictions == batch.held(1).evictions);
  }
}

TEST_CASE("A prompt's chunks may go through all layers, with steps between them", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const char* policy :
       {"h2o", "snapkv:recent=8", "keydiff", "h2o:every=4", "h2o:tiers=16@8t+4@100%"}) {
    CAPTURE(policy);
    const ResolvedConfig config = resolved(policy, 24);
    Layout interleaved(config, 2);
    interleaved.config.interleaves_appends = 1;
    const Layout one(config);
    Slots cache(interleaved), first(one), second(one);
    SampledRows sampled;
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      const auto rows = sampled.rows(40);
      CHECK(cache.append(0, layer, 0, true, rows) == first.append(0, layer, 0, true, rows));
    }
    constexpr std::uint32_t kPrompt = 50, kChunk = 16;
    std::vector<std::vector<float>> prompt, outputs(kLayers);
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) prompt.push_back(sampled.rows(kPrompt));
    for (std::uint32_t at = 0; at < kPrompt; at += kChunk) {
      for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
        const auto out = cache.append_chunk(
            1, layer, at, kPrompt,
            std::span(prompt[layer]).subspan(at * kRow, std::min(kChunk, kPrompt - at) * kRow));
        outputs[layer].insert(outputs[layer].end(), out.begin(), out.end());
      }
      cache.begin_step({1, 0});
      first.begin_step();
      for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
        auto rows = sampled.rows(2);
        auto out = cache.step(layer, rows);
        rows.resize(kRow), out.resize(kQueries);
        CHECK(worst(out, first.step(layer, rows)) < 1e-5);
      }
    }
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      CHECK(worst(outputs[layer], second.append(0, layer, 0, true, prompt[layer])) < 1e-5);
      for (std::uint32_t head = 0; head < kHeads; ++head) {
        CHECK(cache.kept(0, layer, head) == first.kept(0, layer, head));
        CHECK(cache.kept(1, layer, head) == second.kept(0, layer, head));
      }
    }
  }
}

TEST_CASE("Steps and appends of different sequences of a cache do not affect each other", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  const ResolvedConfig config = resolved("h2o", 24);
  Layout three(config, 3);
  three.config.tokens = 0;
  const Layout one(config);
  Slots slots(three), alone(one);
  SampledRows sampled;
  const auto prompt = sampled.rows(5), next = sampled.rows(1), rows = sampled.rows(3);
  const auto unannounced = [&] {
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) slots.step(layer, rows);
  };
  unannounced();
  CHECK(slots.kept(0, 1, 0).empty());  // steps without begin_step() append nothing

  const auto same = [&](int sequence, std::uint32_t layer, std::uint32_t fed, const auto& tokens,
                        const std::vector<float>& out) {
    CHECK(worst(slots.append(sequence, layer, fed, true, tokens), out) < 1e-5);
  };
  std::vector<std::vector<float>> first, second;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer)
    first.push_back(alone.append(0, layer, 0, true, prompt));
  for (std::uint32_t layer = 0; layer < kLayers; ++layer)
    second.push_back(alone.append(0, layer, 5, true, next));
  for (int sequence = 0; sequence < 3; ++sequence)
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      same(sequence, layer, 0, prompt, first[layer]);
      if (sequence > 0 || layer > 0) continue;
      // Between two layers of an append, another append of far too many tokens is refused.
      const kvlab_append_chunk part{.struct_size = sizeof part,
                                    .sequence = 1,
                                    .tokens = 1u << 30,
                                    .count = 1,
                                    .qkv = slots.rows(),
                                    .out = slots.rows()};
      CHECK(kvlab_kv_cache_append(slots.get(), &part, nullptr) == cudaErrorMemoryAllocation);
    }
  slots.begin_step({0, 1, 0});  // another sequence's append comes before the launches of this step
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) same(0, layer, 5, next, second[layer]);
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) slots.step(layer, rows);
  unannounced();  // appends nothing, because each step needs its begin_step()
  CHECK(slots.kept(1, 1, 0).size() == 6);
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) same(2, layer, 5, next, second[layer]);
}

TEST_CASE("A cache is measured without a device, and refusals give a reason") {
  const auto why = [](auto spoil) {
    Layout layout(resolved("h2o:tiers=16@8t+4@100%", 32));
    spoil(layout);
    std::size_t bytes = 0;
    const cudaError_t error = kvlab_kv_cache_memory(&layout.config, &bytes);
    return error == cudaSuccess ? "" : std::string(kvlab_last_error());
  };
  const std::string call = "kvlab_kv_cache_memory: ";
  CHECK(why([](Layout& l) { l.config.struct_size = 0; }).starts_with(call + "struct_size is 0"));
  CHECK(why([](Layout& l) { l.config.head_size = 80; }) ==
        call + "config.head_size is 80; it should be 64, 96, 128 or 256");
  CHECK(why([](Layout& l) {
          l.rules[1].sinks = 90;
        }).starts_with(call + "rules[1].budget is 84; it should be more than sinks, 90,"));
  CHECK(why([](Layout& l) { l.tiers[3].slots = 1; })
            .starts_with(
                call +
                "tiers of pair 1: the slots add up to 9; they should add up to the budget, 84"));
  CHECK(why([](Layout& l) { l.rules[3].group_max = 1; }) ==
        call + "rules[3].group_max is 1; it should be that of rules[0], 0");
  CHECK(why([](Layout& l) { l.tiers[1].format = KVLAB_FORMAT_16; }).empty());
  CHECK(why([](Layout& l) {
          l.tiers[0].format = KVLAB_FORMAT_2;
        }).starts_with(call + "tiers of pair 0: format 3 follows format 5"));
  CHECK(why([](Layout& l) { l.config.feature_count = 1; }) ==
        call +
            "feature_count is 1; it should be 0, as many as the policy reads, and features should "
            "not be NULL unless it is 0");
  CHECK(why([](Layout& l) { l.layers[1].rope = 1; }) ==
        call + "layers[1].rope is 1; it should be below rope_count, 1");
  CHECK(why([](Layout& l) { l.config.rules = nullptr; }) ==
        call + "policy, layers, ropes or rules is NULL");
  CHECK(why([](Layout& l) { l.config.part = 0x8000'0000; })
            .starts_with(
                call +
                "tokens is 150, part 2147483648, longest 0; each should be at most 2147483647"));
  CHECK_FALSE(why([](Layout& l) { l.config.longest = 0x8000'0000; }).empty());
  CHECK(why([](Layout& l) {
          l.table.rotated = 7;
        }).starts_with(call + "ropes[0].rotated is 7; it should be even"));
  CHECK(why([](Layout& l) {
          l.config.numbering = KVLAB_CACHE_POSITIONS;
        }).starts_with(call + "quantized tiers under KVLAB_CACHE_POSITIONS"));
  CHECK(why([](Layout& l) {
          l.config.smooth = 2;
        }).starts_with(call + "smooth is 2 and tier_count 2; on several tiers, smooth needs"));
  CHECK(why([](Layout& l) { l.config.draft_tokens = 4; }) ==
        call + "tiers are quantized, but draft_tokens is given; use tiers in 16 bit, or none");
  CHECK(why([](Layout& l) { l.config.devices = 2; }) ==
        call + "devices is 2, but gather is NULL; give both or neither");
  CHECK(why([](Layout& l) { l.layers[0].keys = &l; }) ==
        call + "a layer has keys or values, but pages is zeroed; give both or neither");
  CHECK(why([](Layout& l) {
          l.config.by_layer = 1;
          l.rules[3].recent = 1;
        }) ==
        call +
            "by_layer is 1, but rules[3] differs from rules[2]; the KV heads of a layer should "
            "have equal rules");
  CHECK(kvlab_kv_cache_append(nullptr, nullptr, nullptr) == cudaErrorInvalidValue);

  Layout outputs(resolved("criticalkv", 32));
  std::size_t bytes = 0;
  CHECK(kvlab_kv_cache_memory(&outputs.config, &bytes) == cudaErrorInvalidValue);
  CHECK(std::string(kvlab_last_error()).starts_with(call + "layers[0].output is NULL"));
}

TEST_CASE("Blocks, drafts and gathered ranks that do not fit the configuration are refused") {
  const auto why = [](const char* policy, const auto& change) {
    Layout layout(resolved(policy, 32), 2);
    change(layout);
    std::size_t bytes = 0;
    const cudaError_t error = kvlab_kv_cache_memory(&layout.config, &bytes);
    return error == cudaSuccess ? "" : std::string(kvlab_last_error());
  };
  alignas(16) static std::byte pool[16];
  static const std::int32_t table = 0;
  const auto paged = [](Layout& layout, int max_blocks) {
    for (kvlab_layer& layer : layout.layers) layer.keys = layer.values = pool;
    layout.config.pages = {.blocks = &table,
                           .page = 16,
                           .max_blocks = max_blocks,
                           .block_stride = 16 * 2 * kSize,
                           .slot_stride = 2 * kSize,
                           .head_stride = kSize};
  };
  const std::string call = "kvlab_kv_cache_memory: ";
  CHECK(why("h2o", [&](Layout& l) { paged(l, 2); }).empty());
  CHECK(why("h2o",
            [&](Layout& l) {
              paged(l, 2);
              l.config.draft_tokens = 5;
            }) == call +
                      "pages.max_blocks is 2, of 16 slots each; 36 slots are needed "
                      "(kvlab_kv_cache_slots)");
  CHECK(why("h2o", [&](Layout& l) {
          paged(l, 2);
          l.layers[1].values = nullptr;
        }).starts_with(call + "pages is given, but keys or values of a layer is NULL"));
  CHECK(why("h2o", [&](Layout& l) {
          paged(l, 2);
          l.config.pages.page = 10;
        }).starts_with(call + "config.pages.page is 10; it should be a power of two"));
  CHECK(why("h2o:tiers=4", [&](Layout& l) { paged(l, 2); }) ==
        call + "tiers are quantized, but pages is given; use tiers in 16 bit, or none");
  CHECK(why("h2o", [](Layout& l) {
          l.config.draft_tokens = 2;
          l.config.numbering = KVLAB_CACHE_POSITIONS;
        }).starts_with(call + "draft_tokens is 2, but numbering is KVLAB_CACHE_POSITIONS"));
  CHECK(why("h2o", [](Layout& l) {
          l.config.draft_tokens = 1u << 30;
        }).starts_with(call + "draft_tokens is 1073741824, with 2 sequences"));
  CHECK(why("h2o", [](Layout& l) {
          l.config.devices = 2;
          l.config.gather = [](void*, const std::uint64_t*, std::uint64_t*, std::size_t,
                               cudaStream_t) { return cudaSuccess; };
        }) == call + "by_layer is 0, but gather is given, which is for by_layer only");

  Layout layout(resolved("h2o:every=4", 32), 2);
  int slots = 0;
  done(kvlab_kv_cache_slots(&layout.config, &slots));
  CHECK(slots == 32 + 3);
  layout.config.draft_tokens = 5;
  done(kvlab_kv_cache_slots(&layout.config, &slots));
  CHECK(slots == 32 + 3 + 4);
  layout.config.layers = nullptr;
  CHECK(kvlab_kv_cache_slots(&layout.config, &slots) == cudaErrorInvalidValue);
}

TEST_CASE("A cache that keeps all tokens keeps them in its first tier") {
  constexpr std::size_t kMany = 1 << 14;  // so that workspaces, which differ by GPU, are small
  const auto bytes = [](const char* policy) {
    Layout layout(resolved(policy, 32), 1, KVLAB_BF16);
    layout.config.tokens = kMany;
    std::size_t all = 0;
    done(kvlab_kv_cache_memory(&layout.config, &all));
    return all;
  };
  // Each of the `saved` channels takes 4 or 5 bits instead of 16, so more than half a byte is
  // saved.
  const std::size_t saved = kLayers * kHeads * kMany * 2 * kSize;
  CHECK(bytes("full:tiers=4") + saved / 2 < bytes("full"));
}
