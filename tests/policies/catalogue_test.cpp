#include "policies/catalogue.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <ranges>

#include "policies/mass/presets.hpp"
#include "tests/catch.hpp"
#include "tests/error_of.hpp"

using namespace kvlab;
using kvlab::test::error_of;

namespace {

constexpr std::string_view kOracles[] = {"oracle_attention", "oracle_topk"};

std::string policy_refusal(std::string_view text) {
  return error_of<std::invalid_argument>([&] { parse_policy(text, kOracles); });
}
std::string budget_refusal(std::string_view text) {
  return error_of<std::invalid_argument>([&] { parse_budget(text); });
}
std::string protected_tokens_refusal(std::string_view text, std::uint32_t budget) {
  return error_of<std::invalid_argument>(
      [&] { resolve_protected_tokens(parse_policy(text), budget); });
}

}  // namespace

TEST_CASE("the catalogue lists the policies that need no token feature") {
  for (const std::string_view name :
       {"full", "window", "sink", "lru", "h2o", "streaming_h2o", "random", "tova", "snapkv", "nacl",
        "lfu", "scissorhands", "lazy_eviction", "a2sf", "h2o_mean", "roco"}) {
    INFO(name);
    CHECK(std::ranges::count(policy_catalogue(), name,
                             [](const PolicyEntry& entry) { return entry.info.name; }) == 1);
  }
}

TEST_CASE("defaults are those of the documented table") {
  const auto text = [](std::string_view name) { return parse_policy(name).text(); };
  CHECK(text("full") == "full");
  CHECK(text("window") == "window:sinks=0:recent=0");
  CHECK(text("sink") == "sink:sinks=4:recent=0");
  CHECK(text("lru") == "lru:sinks=0:recent=0");
  CHECK(text("h2o") == "h2o:sinks=0:recent=50%");
  CHECK(text("streaming_h2o") == "streaming_h2o:sinks=0:recent=50%");
  CHECK(text("random") == "random:sinks=0:recent=0");
  CHECK(text("tova") == "tova:sinks=0:recent=0");
  CHECK(text("snapkv") == "snapkv:window=32:sinks=0:recent=32:once:smooth=2");
  CHECK(text("nacl") == "nacl:proxy=32:random=0.35:sinks=4:recent=5%:once");
  CHECK(text("lfu") == "lfu:sinks=0:recent=50%");
  CHECK(text("scissorhands") == "scissorhands:window=400:sinks=0:recent=10");
  CHECK(text("lazy_eviction") == "lazy_eviction:sinks=0:recent=25%");
  CHECK(text("a2sf") == "a2sf:keep=0.98:sinks=0:recent=50%");
  CHECK(text("h2o_mean") == "h2o_mean:sinks=0:recent=50%");
  CHECK(text("roco") == "roco:spread=1:sinks=0:recent=10");
  const auto cache_positions = [](std::string_view name) {
    return parse_policy(name).entry->info.positions == Positions::cache;
  };
  CHECK(cache_positions("sink"));
  CHECK(cache_positions("streaming_h2o"));
  for (const std::string_view name : {"full", "window", "lru", "h2o", "random"})
    CHECK_FALSE(cache_positions(name));
}

TEST_CASE("a policy's text parses back to the same policy") {
  for (const std::string_view requested :
       {"full", "window", "sink:sinks=8", "lru:recent=50%:sinks=4", "h2o:recent=33.3333%",
        "streaming_h2o:sinks=0.5%", "random:recent=100%", "h2o:recent=2147483647",
        "lru:sinks=0%"}) {
    INFO(requested);
    const PolicySpec spec = parse_policy(requested);
    const PolicySpec again = parse_policy(spec.text());
    CHECK(again.entry == spec.entry);
    CHECK(again.params == spec.params);
    CHECK(again.sinks == spec.sinks);
    CHECK(again.recent == spec.recent);
    CHECK(again.text() == spec.text());
  }
  CHECK(parse_policy("lru:recent=50%:sinks=4").text() == "lru:sinks=4:recent=50%");
}

TEST_CASE("oracles are found by name and take no parameters") {
  const PolicySpec spec = parse_policy("oracle_topk", kOracles);
  CHECK(spec.entry == nullptr);
  CHECK(spec.text() == "oracle_topk");
  CHECK(policy_refusal("oracle_attention:sinks=4") ==
        "policy oracle_attention is an oracle: it has no parameters and no protected tokens");
  CHECK(error_of<std::invalid_argument>([] {
          parse_policy("oracle_attention");
        }).starts_with("unknown policy 'oracle_attention'"));
}

TEST_CASE("an unknown policy is refused with the nearest name") {
  CHECK(policy_refusal("h20") == "unknown policy 'h20'; did you mean 'h2o'?");
  CHECK(policy_refusal("windw") == "unknown policy 'windw'; did you mean 'window'?");
  CHECK(policy_refusal("streaming_h20") ==
        "unknown policy 'streaming_h20'; did you mean 'streaming_h2o'?");
  CHECK(policy_refusal("oracle_attentio") ==
        "unknown policy 'oracle_attentio'; did you mean 'oracle_attention'?");
  CHECK(policy_refusal("quest").starts_with("unknown policy 'quest'; known: full, "));
  CHECK(policy_refusal("").starts_with("unknown policy ''; known: full"));
}

TEST_CASE("an unknown or malformed parameter is refused with the nearest name") {
  CHECK(policy_refusal("h2o:recnt=4") ==
        "policy h2o: unknown parameter 'recnt'; did you mean 'recent'?");
  CHECK(policy_refusal("h2o:decay=0.5") ==
        "policy h2o: unknown parameter 'decay'; known: sinks, recent, prompt, every, once, "
        "smooth, pool, scope, group, tiers, centre");
  CHECK(policy_refusal("h2o:recent") == "policy h2o: 'recent' should read parameter=value");
  CHECK(policy_refusal("h2o:") == "policy h2o: '' should read parameter=value");
  CHECK(policy_refusal("h2o:recent=") ==
        "policy h2o: recent: '' should be a whole number of tokens, at least 0 and below 2^31, or "
        "a share such as 20%");
  CHECK(policy_refusal("h2o:recent=4x") ==
        "policy h2o: recent: '4x' should be a whole number of tokens, at least 0 and below 2^31, "
        "or a share such as 20%");
  CHECK(policy_refusal("h2o:recent=nan") ==
        "policy h2o: recent: 'nan' should be a whole number of tokens, at least 0 and below 2^31, "
        "or a share such as 20%");
  CHECK(policy_refusal("h2o:recent=4:recent=5") ==
        "policy h2o: recent is given twice; give it once");
  CHECK(policy_refusal("full:sinks=4") ==
        "policy full never evicts: it has no parameters and no protected tokens");
}

TEST_CASE("protected tokens are numbers of tokens or shares up to 100%") {
  const std::string tokens =
      " should be a whole number of tokens, at least 0 and below 2^31, or a share such as 20%";
  CHECK(policy_refusal("h2o:recent=-1") == "policy h2o: recent: '-1'" + tokens);
  CHECK(policy_refusal("h2o:sinks=1.5") == "policy h2o: sinks: '1.5'" + tokens);
  CHECK(policy_refusal("h2o:sinks=2147483648") == "policy h2o: sinks: '2147483648'" + tokens);
  CHECK(policy_refusal("h2o:recent=101%") ==
        "policy h2o: recent: 101% should be at least 0% and at most 100%");
  CHECK(policy_refusal("h2o:recent=-1%") ==
        "policy h2o: recent: -1% should be at least 0% and at most 100%");
}

TEST_CASE("reserved words are refused with a message that says so") {
  for (const std::string word : {"page", "storage"})
    CHECK(policy_refusal("h2o:" + word + "=head") ==
          "policy h2o: " + word + " is reserved for a later version; leave it out");
  CHECK(budget_refusal("null") ==
        "budget: null is reserved for a later version; give tokens or a share");
}

TEST_CASE("a budget is at least one token or a share above 0% and up to 100%") {
  const std::string tokens =
      " should be a whole number of tokens, at least 1 and below 2^31, or a share such as 20%";
  CHECK(budget_refusal("0") == "budget: '0'" + tokens);
  CHECK(budget_refusal("-64") == "budget: '-64'" + tokens);
  CHECK(budget_refusal("6.5") == "budget: '6.5'" + tokens);
  CHECK(budget_refusal("4294967296") == "budget: '4294967296'" + tokens);
  CHECK(budget_refusal("0%") == "budget: 0% should be at least 0.0001%");
  CHECK(budget_refusal("0.00001%") == "budget: 0.00001% should be at least 0.0001%");
  CHECK(budget_refusal("-5%") == "budget: -5% should be at least 0% and at most 100%");
  CHECK(budget_refusal("101%") == "budget: 101% should be at least 0% and at most 100%");
  CHECK(budget_refusal("many") ==
        "budget: 'many' should be a whole number of tokens, at least 1 and below 2^31, or a share "
        "such as 20%");
  CHECK(budget_refusal("%") == "budget: '' should be a share such as 20%");
  CHECK(budget_refusal("1e999") ==
        "budget: '1e999' should be a whole number of tokens, at least 1 and below 2^31, or a share "
        "such as 20%");
}

TEST_CASE("a budget's share is rounded down from the length, to at least one token") {
  CHECK(parse_budget("20%").resolve(999, 0) == 199);
  CHECK(parse_budget("100%").resolve(999, 0) == 999);
  CHECK(parse_budget("1%").resolve(50, 0) == 1);
  CHECK(parse_budget("128").resolve(64, 0) == 128);
  CHECK(Budget{.all = true}.resolve(777, 0) == 777);
  CHECK(parse_budget("20%").text() == "20%");
  CHECK(parse_budget("128").text() == "128");
  CHECK(Budget{.all = true}.text() == "all");
}

TEST_CASE("a budget in bytes holds as many 16-bit tokens as fit, for a known head size") {
  constexpr std::uint32_t kHead = 64;  // 256 bytes per token
  CHECK(parse_budget("64KiB").resolve(9, kHead) == 256);
  CHECK(parse_budget("1000B").resolve(9, kHead) == 3);
  CHECK(parse_budget("2GiB").resolve(9, 1) == 536'870'912);
  CHECK(parse_budget("25%bytes").resolve(1000, kHead) == 250);
  CHECK(parse_budget("25%bytes").bytes_of(999, kHead) == 63'936);
  CHECK(parse_budget("pyramid(1KiB)").resolve(9, kHead) == 4);
  for (const char* text : {"64KiB", "3MiB", "5B", "25%bytes", "ada(2KiB)", "pyramid(5%bytes)"})
    CHECK(parse_budget(text).text() == text);
  CHECK(parse_budget("2048B").text() == "2KiB");
  const Budget fixed = parse_budget("25%bytes").at_length(999, kHead);
  CHECK(fixed.text() == "63936B");
  CHECK(fixed.resolve(5, kHead) == 249);
  CHECK(fixed.extent.tokens == 249);
  CHECK(parse_budget("20%").at_length(999, kHead).text() == "199");
}

TEST_CASE("an invalid budget in bytes is refused in one line") {
  CHECK(budget_refusal("1.5KiB") ==
        "budget: '1.5' should be a whole number of KiB, at least 1 and below 2^31, such as 64KiB");
  CHECK(budget_refusal("0B") ==
        "budget: '0' should be a whole number of B, at least 1 and below 2^31, such as 64KiB");
  CHECK(budget_refusal("120%bytes") == "budget: 120% should be at least 0% and at most 100%");
  CHECK_THROWS_WITH(
      parse_budget("255B").resolve(9, 64),
      "budget 255B: is less than one token, which takes 256 bytes; give at least 256B");
  CHECK_THROWS_WITH(parse_budget("1KiB").resolve(9, 0),
                    "budget 1KiB: the size of a head is not known here; give tokens or a share");
}

TEST_CASE("sinks and recent must fit the budget") {
  const ProtectedTokens protected_tokens =
      resolve_protected_tokens(parse_policy("h2o:sinks=4"), 128);
  CHECK(protected_tokens.sinks == 4);
  CHECK(protected_tokens.recent == 64);
  CHECK(resolve_protected_tokens(parse_policy("lru:sinks=1:recent=1"), 2).recent == 1);
  CHECK(protected_tokens_refusal("lru:sinks=4:recent=61", 64) ==
        "policy lru: sinks=4 and recent=61 tokens exceed the budget of 64 tokens; sinks + recent "
        "should be at most the budget");
  CHECK(protected_tokens_refusal("lru:sinks=50%:recent=51%", 100)
            .starts_with("policy lru: sinks=50 and"));
  CHECK(protected_tokens_refusal("sink", 4) ==
        "policy sink: sinks=4 should be below the budget of 4 tokens");
  CHECK(protected_tokens_refusal("lru:recent=2147483647:sinks=3", 4)
            .starts_with("policy lru: sinks=3 and"));
}

TEST_CASE("prefill is dense, stream or chunk:N") {
  CHECK(parse_prefill("dense").chunk == 0);
  CHECK(parse_prefill("stream").chunk == 1);
  CHECK(parse_prefill("chunk:64").chunk == 64);
  CHECK(parse_prefill("chunk:1").text() == "stream");
  for (const std::string_view text : {"dense", "stream", "chunk:64"})
    CHECK(parse_prefill(text).text() == text);
  const auto refused = [](std::string_view text) {
    return error_of<std::invalid_argument>([&] { parse_prefill(text); });
  };
  CHECK(refused("chunk:0") ==
        "prefill: chunk: '0' should be a whole number of tokens, at least 1 and below 2^31");
  CHECK(refused("chunk:20%") ==
        "prefill: chunk: '20%' should be a whole number of tokens, at least 1 and below 2^31");
  CHECK(refused("chunks") ==
        "prefill: 'chunks' should be dense, stream or chunk:N (N tokens in each append)");
}

TEST_CASE("positions are original or cache") {
  CHECK(parse_positions("original") == Positions::original);
  CHECK(name_of(parse_positions("cache")) == "cache");
  CHECK(error_of<std::invalid_argument>([] { parse_positions("here"); }) ==
        "positions: 'here' should be original or cache");
}

TEST_CASE("a suggested name differs by at most two edits or a third of the word") {
  const std::vector<std::string> names{"window", "streaming_h2o"};
  CHECK(nearest_name("windwo", names) == "window");
  CHECK(nearest_name("strming_h20", names) == "streaming_h2o");
  CHECK_FALSE(nearest_name("quest", names));
}

TEST_CASE("a product of a policy and a feature has that policy's settings") {
  const PolicySpec spec = parse_policy("a2sf*value_norm1:keep=0.9:sinks=4");
  CHECK(spec.features == std::vector<std::string>{"value_norm1"});
  CHECK(spec.text() == "a2sf*value_norm1:keep=0.9:sinks=4:recent=50%");
  CHECK(parse_policy(spec.text()).text() == spec.text());
  CHECK(parse_policy("feature*x:name=y").features == std::vector<std::string>{"y", "x"});
  const auto refused = [](const char* text) {
    return error_of<std::invalid_argument>([&] { parse_policy(text); });
  };
  CHECK(refused("full*value_norm") ==
        "policy full*value_norm: full never evicts, so it ranks nothing");
  CHECK(refused("h2o*") ==
        "policy h2o*: a feature's name should follow the *, as in h2o*value_norm");
  CHECK(refused("h2o*a*b").starts_with("policy h2o*a*b: a feature's name should follow"));
  CHECK(refused("missing*value_norm").starts_with("unknown policy 'missing*value_norm'"));
}

TEST_CASE("each preset of h2o reproduces another project's H2O") {
  for (const Preset& preset : h2o_presets()) {
    const std::string requested = fmt::format("h2o:preset={}", preset.name);
    INFO(requested);
    if (preset.policy.empty())
      CHECK(error_of<std::invalid_argument>([&] { parse_policy(requested); }) ==
            fmt::format("policy h2o: kvlab's eviction rule cannot express preset {} ({}): {}",
                        preset.name, preset.code, preset.deviates));
    else
      CHECK(parse_policy(requested).text() == parse_policy(preset.policy).text());
  }
  CHECK(parse_policy("h2o:preset=kvpress").name == "h2o_mean");
  CHECK(parse_policy("h2o:every=8:preset=sparse_vllm").text() ==
        parse_policy("h2o:scope=layer:group=max:every=8").text());
  CHECK(error_of<std::invalid_argument>([] { parse_policy("h2o:preset=kvpres"); }) ==
        "policy h2o: unknown preset 'kvpres'; did you mean 'kvpress'?");
  CHECK(error_of<std::invalid_argument>([] {
          parse_policy("lru:preset=kvpress");
        }).starts_with("policy lru: unknown preset 'kvpress'"));
  CHECK(error_of<std::invalid_argument>([] {
          parse_policy("lfu:preset=kvpress");
        }).starts_with("policy lfu: unknown parameter 'preset'"));
  CHECK(parse_policy("lru:preset=hisparse:recent=4").text() ==
        parse_policy("hisparse:recent=4").text());
}
