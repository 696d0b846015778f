// Tests of centred keys. Attention in 16 bit must not change, biased keys must lose far less by
// quantization, and the centre of the first prompt must stay the same.
#include <fmt/format.h>

#include <cmath>
#include <memory>
#include <random>

#include "policies/cache_config.hpp"
#include "sim/cache/host_cache.hpp"
#include "sim/live_counts.hpp"
#include "sim/replay.hpp"
#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/sim/random_trace.hpp"
#include "tests/traces/temporary_folder.hpp"

using namespace kvlab;

namespace {

constexpr std::uint32_t kDim = 32, kTokens = 220;

struct Tensors {
  std::vector<float> q, k, v;  // [token, dim]
};

/// Random rows. The bias of every key is `bias` in one channel that RoPE does not rotate.
Tensors biased_tensors(float bias, unsigned seed = 5) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, 1);
  Tensors all;
  for (auto* tensor : {&all.q, &all.k, &all.v})
    for (std::uint32_t i = 0; i < kTokens * kDim; ++i) tensor->push_back(normal(generator));
  for (std::uint32_t i = 0; i < kTokens; ++i) all.k[i * kDim + kDim - 1] += bias;
  return all;
}

/// A table that hardly rotates the last pair of channels.
RopeTable rope_table() {
  Rope rope;
  for (std::uint32_t i = 0; i < kDim / 2; ++i)
    rope.inv_freq.push_back(i + 1 < kDim / 2 ? std::pow(100.0f, -2.0f * i / kDim) : 0.0f);
  return {rope, kTokens};
}

HostCache cache_of(const std::string& policy, std::uint32_t budget,
                   HeadShape shape = {.head_size = kDim, .group = 1, .softmax_scale = 0.2f}) {
  const ResolvedConfig config =
      resolve({.policy = parse_policy(policy), .budget = {.extent = tokens(budget)}}, kTokens);
  return {shape, config.live_set(0, 0)};
}

/// A cache whose centre is `centre`, as if it had been read from a file.
HostCache cache_with(const std::vector<float>& centre, const std::string& policy,
                     Prefill prefill = {}) {
  CacheConfig config{.policy = parse_policy(policy + ":centre=@c.safetensors"),
                     .budget = {.extent = tokens(8)},
                     .prefill = prefill};
  config.policy.centre.constants =
      std::make_shared<CentreConstants>(CentreConstants{1, kDim, {{0, centre}}});
  return {{.head_size = kDim, .group = 1, .softmax_scale = 0.2f},
          resolve(config, kTokens, 0, {1, 1, kDim}).live_set(0, 0)};
}

/// The mean of the first `count` keys after RoPE.
std::vector<float> mean_key(const Tensors& all, std::uint32_t count) {
  const RopeTable rope = rope_table();
  std::vector<CentreChannel> channels(kDim);
  std::vector<float> key(kDim), mean;
  for (std::uint32_t i = 0; i < count; ++i) {
    rope.rotate(&all.k[i * kDim], kDim, i, key.data());
    for (std::uint32_t d = 0; d < kDim; ++d) channels[d].add(key[d]);
  }
  for (const CentreChannel& channel : channels) mean.push_back(channel.mean());
  return mean;
}

HeadAppend append_of(const Tensors& all, std::uint32_t first, std::uint32_t count, float* out) {
  return {.first = first,
          .tokens = count,
          .q = &all.q[first * kDim],
          .query_head_stride = kDim,
          .query_stride = kDim,
          .k = &all.k[first * kDim],
          .v = &all.v[first * kDim],
          .key_stride = kDim,
          .out = out};
}

/// Appends tokens [first, first + count) and returns their attention outputs.
std::vector<float> append(HostCache& cache, const Tensors& all, std::uint32_t first,
                          std::uint32_t count, bool ends_prompt = false) {
  std::vector<float> out(count * kDim);
  cache.step(append_of(all, first, count, out.data()), rope_table());
  if (ends_prompt) cache.end_prompt();
  return out;
}

/// Appends a prompt in two chunks, decoded tokens, a second prompt, and decoded tokens. Returns the
/// outputs of all tokens.
std::vector<float> run(HostCache& cache, const Tensors& all) {
  std::vector<float> outputs;
  const auto add = [&](std::uint32_t first, std::uint32_t count, bool ends_prompt = false) {
    const auto own = append(cache, all, first, count, ends_prompt);
    outputs.insert(outputs.end(), own.begin(), own.end());
  };
  add(0, 130);
  add(130, 20, true);
  for (std::uint32_t t = 150; t < 180; ++t) add(t, 1);
  add(180, 10, true);
  for (std::uint32_t t = 190; t < kTokens; ++t) add(t, 1);
  return outputs;
}

double max_difference(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    largest = std::max(largest, std::abs(double{a[i]} - b[i]));
  return largest;
}

std::vector<std::uint32_t> kept(const HostCache& cache) {
  const auto positions = cache.live().positions();
  return {positions.begin(), positions.end()};
}

}  // namespace

TEST_CASE(
    "Centred keys in 16 bit leave attention unchanged to rounding, and keep the same tokens") {
  const Tensors all = biased_tensors(8);
  for (const std::string policy :
       {"window", "h2o", "lru:sinks=2", "h2o:every=3", "snapkv:recent=4"}) {
    INFO(policy);
    // The centre takes the memory of one token.
    HostCache plain = cache_of(policy + ":tiers=16@50%+16@50%", 64),
              centred = cache_of(policy + ":tiers=16@50%+16@50%:centre=prompt", 65);
    CHECK(max_difference(run(plain, all), run(centred, all)) < 1e-4);
    CHECK(kept(plain) == kept(centred));
    CHECK(centred.live_bytes() == plain.live_bytes() + kDim * sizeof(float));
  }
}

TEST_CASE("Keys with a large bias lose far less to quantization when they are centred") {
  const Tensors all = biased_tensors(60);
  HostCache exact = cache_of("full", 1);
  const std::vector<float> expected = run(exact, all);
  // Values are quantized in both caches, which limits the gain.
  for (const auto& [format, gain] : {std::pair{"8", 3.0}, {"4", 4.0}, {"fp8", 4.0}}) {
    INFO(format);
    HostCache plain = cache_of(fmt::format("full:tiers={}", format), 1),
              centred = cache_of(fmt::format("full:tiers={}:centre=prompt", format), 1);
    const auto error = [&](HostCache& cache) {
      const std::vector<float> own = run(cache, all);
      double sum = 0;
      for (std::size_t i = 0; i < own.size(); ++i)
        sum += (double{own[i]} - expected[i]) * (double{own[i]} - expected[i]);
      return std::sqrt(sum);
    };
    const double plain_error = error(plain), centred_error = error(centred);
    INFO(plain_error << " " << centred_error);
    CHECK(centred_error * gain < plain_error);
  }
}

TEST_CASE("The centre is the mean of the first 128 keys of the first append, and stays") {
  // If later keys do not change the centre, they do not change the first token's quantized key, so
  // the outputs are equal bit for bit.
  const Tensors all = biased_tensors(20);
  Tensors later = all;
  for (std::size_t i = 128 * kDim; i < 140 * kDim; ++i) later.k[i] += 3;
  const auto first_token = [&](const Tensors& tensors, std::uint32_t prompt) {
    // The window holds the first token, in 4 bits, and the newest two.
    HostCache cache = cache_of("window:sinks=1:tiers=4:centre=prompt", 2);
    append(cache, tensors, 0, prompt, true);
    return append(cache, all, 210, 1);
  };
  CHECK(first_token(all, 150) == first_token(later, 150));
  later = all;
  for (std::size_t i = 1 * kDim; i < 128 * kDim; ++i) later.k[i] += 3;
  CHECK(first_token(all, 150) != first_token(later, 150));
}

TEST_CASE("Constants that equal the prompt's mean give the outputs of centre=prompt") {
  const Tensors all = biased_tensors(20);
  const std::vector<float> centre = mean_key(all, 128);
  for (const char* policy : {"full:tiers=4", "h2o:tiers=16@4t+4@100%"}) {
    INFO(policy);
    HostCache of_prompt = cache_of(std::string(policy) + ":centre=prompt", 8),
              of_file = cache_with(centre, policy);
    // In the first append, the keys of the two caches have different centres, so the outputs are
    // equal up to rounding.
    CHECK(max_difference(append(of_prompt, all, 0, 150, true), append(of_file, all, 0, 150, true)) <
          1e-4);
    CHECK(append(of_prompt, all, 150, 20, true) == append(of_file, all, 150, 20, true));
    for (std::uint32_t t = 170; t < kTokens; ++t)
      CHECK(append(of_prompt, all, t, 1) == append(of_file, all, t, 1));
    CHECK(of_prompt.live_bytes() == of_file.live_bytes());
  }
}

TEST_CASE("Constants centre keys from the first decoded token on, and in every prefill") {
  const Tensors all = biased_tensors(60);
  HostCache exact = cache_of("full", 1), plain = cache_of("full:tiers=4", 1),
            centred = cache_with(mean_key(all, 128), "full:tiers=4", {1});
  double plain_error = 0, centred_error = 0;  // sums of the largest error of each token
  for (std::uint32_t t = 0; t < 100; ++t) {
    const auto expected = append(exact, all, t, 1);
    plain_error += max_difference(append(plain, all, t, 1), expected);
    centred_error += max_difference(append(centred, all, t, 1), expected);
  }
  INFO(plain_error << " " << centred_error);
  CHECK(centred_error * 3 < plain_error);
  CHECK(centred.live_bytes() == plain.live_bytes() + kDim * sizeof(float));
}

TEST_CASE("A copy of a cache has its centre") {
  const Tensors all = biased_tensors(20);
  for (const char* policy :
       {"full:tiers=4:centre=prompt", "h2o:tiers=16@4t+4@100%:centre=prompt"}) {
    HostCache cache = cache_of(policy, 40);
    append(cache, all, 0, 100, true);
    HostCache staged(cache);  // copied before the centre is subtracted
    append(cache, all, 100, 1);
    append(staged, all, 100, 1);
    HostCache copy(cache);
    const auto own = append(cache, all, 101, 9);
    CHECK(own == append(copy, all, 101, 9));
    CHECK(own == append(staged, all, 101, 9));
    CHECK(copy.live_bytes() == cache.live_bytes());
  }
}

TEST_CASE("Without a prompt there is no centre") {
  const Tensors all = biased_tensors(20);
  HostCache plain = cache_of("full:tiers=4", 1),
            centred = cache_of("full:tiers=4:centre=prompt", 1);
  for (HostCache* const cache : {&plain, &centred}) append(*cache, all, 0, 1);
  CHECK(append(plain, all, 1, 50, true) == append(centred, all, 1, 50, true));
  CHECK(append(plain, all, 51, 1) == append(centred, all, 51, 1));
  CHECK(plain.live_bytes() == centred.live_bytes());
}

TEST_CASE("Draft tokens of a quantized cache stay in 16 bit, and leave no trace") {
  const Tensors all = biased_tensors(20);
  const RopeTable rope = rope_table();
  const auto drafted = [&](HostCache& cache, std::uint32_t first) {
    const std::vector<DraftPath> paths{{0}, {0, 1}, {0, 1, 2}};
    std::vector<float> out(paths.size() * kDim);
    cache.drop_drafts();
    cache.attend_draft(append_of(all, first, 3, out.data()), paths, rope);
    return out;
  };
  for (const char* policy : {"full:tiers=4", "full:tiers=kivi4", "full:tiers=4:centre=prompt",
                             "h2o:tiers=16@4t+4@100%:centre=prompt", "window:tiers=8@50%+4@50%"}) {
    INFO(policy);
    HostCache exact = cache_of("full", 1), drafting = cache_of(policy, 40),
              plain = cache_of(policy, 40);
    CHECK(drafted(drafting, 0) == drafted(exact, 0));
    CHECK(append(drafting, all, 0, 130, true) == append(plain, all, 0, 130, true));
    for (std::uint32_t t = 130; t < 200; ++t) {
      drafted(drafting, t);
      CHECK(append(drafting, all, t, 1) == append(plain, all, t, 1));
    }
    CHECK(kept(drafting) == kept(plain));
    CHECK(drafting.live_bytes() == plain.live_bytes());
  }
}

TEST_CASE("The mean is summed in order in float32") {
  CentreChannel channel;
  for (const float key : {1e8f, 1.0f, -1e8f}) channel.add(key);
  CHECK(channel.mean() == 0);
  CHECK(centre_keys(0) == 0);
  CHECK(centre_keys(1) == 0);
  CHECK(centre_keys(2) == 2);
  CHECK(centre_keys(128) == 128);
  CHECK(centre_keys(4000) == 128);
}

TEST_CASE("A centre is refused where softmax would not cancel it, or where it has no effect") {
  const auto refused = [](const CacheConfig& config, const std::string& why) {
    CHECK_THROWS_WITH(resolve(config, 300), why);
  };
  CHECK_THROWS_WITH(parse_policy("h2o:centre=prompt"),
                    "policy h2o: centre: keys are centred only in a tier plan; add tiers=4, or "
                    "leave centre out");
  CHECK_THROWS_WITH(parse_policy("full:tiers=4:centre=mean"),
                    "centre: 'mean' should be none, prompt or @FILE");
  CHECK(parse_policy("full:centre=none").text() == "full");
  CHECK(parse_policy("full:tiers=4:centre=prompt").text() == "full:tiers=4:centre=prompt");
  CHECK(parse_policy("h2o:centre=prompt:tiers=4").brief() == "h2o:tiers=4:centre=prompt");
  CHECK(parse_policy("h2o:tiers=4:centre=@a/c=1.safetensors").brief() ==
        "h2o:tiers=4:centre=@a/c=1.safetensors");
  CHECK_THROWS_WITH(parse_policy("full:tiers=4:centre=@"),
                    "centre: '@' should be none, prompt or @FILE");
  CHECK_THROWS_WITH(parse_key_centre("@a:b"),
                    "centre: '@a:b': the path cannot contain ':' or ','; rename the file or its "
                    "folder");
  refused({.policy = parse_policy("full:tiers=kivi4:centre=prompt")},
          "policy full: tiers kivi4: centre: this format has a minimum for each channel already; "
          "use centre=none");
  refused({.policy = parse_policy("window:tiers=16@50%+16@50%:centre=prompt"),
           .budget = {.extent = tokens(32)},
           .positions = Positions::cache},
          "policy window: tiers 16:50%,16:50%: centre: cache positions change stored keys; "
          "use --positions original");
  refused(
      {.policy = parse_policy("h2o:tiers=4:centre=prompt"),
       .budget = {.extent = tokens(32)},
       .prefill = {127}},
      "policy h2o: tiers 4: centre: the prompt's first chunk has fewer tokens than the 128 whose "
      "mean is the centre; use --prefill dense or chunk:128");
  CHECK_THROWS_WITH(
      cache_of("full:tiers=4:centre=prompt", 1, {.head_size = kDim, .group = 1, .softcap = 50}),
      "centre: the model has a soft cap on attention scores, so a centre would change "
      "attention; use centre=none");
  CHECK_THROWS_WITH(
      cache_of("full:tiers=4:centre=prompt", 1, {.head_size = kDim, .group = 1, .sinks = {0.5f}}),
      "centre: the model has sink logits, so a centre would change attention; use "
      "centre=none");
}

TEST_CASE("A centre file of another model is refused, with its layer and the expected shape") {
  CacheConfig config{.policy = parse_policy("full:tiers=4:centre=@c.safetensors")};
  const auto refusal_of = [&](const CacheShape& model) {
    return test::error_of<std::invalid_argument>([&] { resolve(config, kTokens, 0, model); });
  };
  CHECK(refusal_of({1, 1, kDim}) ==
        "centre @c.safetensors: this command does not read centre files; use centre=prompt");
  CentreConstants constants{.kv_heads = 2, .head_size = kDim};
  for (const std::uint32_t layer : {0u, 3u}) constants.layers[layer].resize(2 * kDim);
  config.policy.centre.constants = std::make_shared<CentreConstants>(constants);
  CHECK(refusal_of({1, 1, kDim}) ==
        "centre: c.safetensors: layer 0 of the model needs vectors of shape [1, 32], and the file "
        "has [2, 32]; make one for this model: `kvlab plan --trace TRACE --centre-out FILE`");
  CHECK(refusal_of({1, 2, 2 * kDim}).find("shape [2, 64], and the file has [2, 32]") !=
        std::string::npos);
  CHECK(refusal_of({2, 2, kDim})
            .find("layer 1 of the model needs vectors of shape [2, 32], and "
                  "the file has none") != std::string::npos);
  // Layers are found by their numbers, and a layer with a window needs no centre.
  resolve(config, kTokens, 0, {2, 2, kDim, {}, {0, 3}});
  resolve(config, kTokens, 0, {4, 2, kDim, {0, 8, 8, 0}});
}

TEST_CASE("The centre's bytes count towards the budget") {
  for (const char* budget : {"32", "4096B"}) {
    const auto resolved = [&](const char* policy) {
      return resolve({.policy = parse_policy(policy), .budget = parse_budget(budget)}, 300, 0,
                     {1, 1, kDim});
    };
    // 32 tokens of 128 bytes. A token in 4 bits takes 40.
    CHECK(resolved("h2o:tiers=4").budget_tokens == 4096 / 40);
    CHECK(resolved("h2o:tiers=4:centre=prompt").budget_tokens == (4096 - 128) / 40);
  }
}

TEST_CASE("Centred keys use the plain replay, also if configuration batches are enabled") {
  const test::TemporaryFolder folder;
  const TraceReader trace = write_random_trace(folder.path() / "trace",
                                               {.query_heads = 4, .kv_heads = 2, .head_size = 32});
  const auto metrics = [&](const std::string& policy, std::uint32_t budget, bool plain) {
    const CacheConfig config{.policy = parse_policy(policy), .budget = {.extent = tokens(budget)}};
    std::map<std::string, double> all;
    for (const Measurement& m :
         replay(trace, 0, std::span(&config, 1), {.every_output_error = true, .plain = plain})
             .measurements)
      if (m.layer < 0 && m.head < 0) all[m.metric] = m.value;
    return all;
  };
  for (const bool plain : {true, false}) {
    const auto exact = metrics("h2o:tiers=16@50%+16@50%", 12, plain),
               centred = metrics("h2o:tiers=16@50%+16@50%:centre=prompt", 13, plain);
    CHECK(centred.at("recall") == Approx(exact.at("recall")).epsilon(1e-6));
    CHECK(centred.at("output_error") == Approx(exact.at("output_error")).epsilon(1e-5));
    CHECK(centred.at("kv_bytes_peak") > exact.at("kv_bytes_peak"));
  }
  CHECK(metrics("h2o:tiers=4:centre=prompt", 12, true) ==
        metrics("h2o:tiers=4:centre=prompt", 12, false));
}
