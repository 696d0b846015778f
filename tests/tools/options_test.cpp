#include "tools/options.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>

#include "tests/catch.hpp"
#include "tests/tools/command_line.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/work_plan.hpp"

using namespace kvlab;
using kvlab::test::error_of;
using kvlab::test::kTiny;
using kvlab::test::refusal;
using kvlab::test::split_words;

namespace {

struct Given {
  CacheOptions caches;
  CommonOptions common;
  std::string model;
};

void add_options(OptionTable& table, Given& given) {
  add_cache_options(table, given.caches);
  add_common_options(table, given.common);
  add_model_option(table, given.model);
}

/// The options that the words of a command line set.
Given parse(const std::string& line) {
  static Given parsed;
  Command command{.name = "test",
                  .prepare = make_prepare<Given>(add_options, nullptr, [](const Given& given) {
                    parsed = given;
                    return 0;
                  })};
  run_command(command, split_words(line));
  return parsed;
}

std::vector<CacheConfig> sweep_from(const Given& given,
                                    std::span<const std::string_view> oracles = {}) {
  return sweep_of(given.caches, compiled_policies(given.caches), nullptr, oracles);
}

/// The sweep as text: one "policy budget prefill positions" per line.
std::string sweep(const std::string& words, std::span<const std::string_view> oracles = {}) {
  std::string text;
  for (const CacheConfig& c : sweep_from(parse(words), oracles))
    text += fmt::format("{} {} {} {}\n", c.policy.text(), c.budget.text(), c.prefill.text(),
                        name_of(c.positions));
  return text;
}

std::string message_of(const std::string& words) {
  return error_of<std::invalid_argument>([&] { sweep_from(parse(words)); });
}

}  // namespace

TEST_CASE("The sweep is every policy at every budget, with the policy's default positions") {
  CHECK(sweep("--policy window,sink --budget 64,20%") ==
        "window:sinks=0:recent=0 64 dense original\n"
        "window:sinks=0:recent=0 20% dense original\n"
        "sink:sinks=4:recent=0 64 dense cache\n"
        "sink:sinks=4:recent=0 20% dense cache\n");
  CHECK(sweep("") == "full all dense original\n");
}

TEST_CASE("The sweep accepts lists of prefill and position modes") {
  CHECK(sweep("--policy h2o:recent=8 --budget 64 --prefill stream,chunk:63 --positions "
              "original,cache") ==
        "h2o:sinks=0:recent=8 64 stream original\n"
        "h2o:sinks=0:recent=8 64 stream cache\n"
        "h2o:sinks=0:recent=8 64 chunk:63 original\n"
        "h2o:sinks=0:recent=8 64 chunk:63 cache\n");
}

TEST_CASE("The full cache is one row of the sweep, and duplicates are one row") {
  CHECK(
      sweep("--policy full,sink,sink:sinks=4,full --budget 64,64,96 --prefill dense,stream,stream "
            "--positions cache") ==
      "full all dense original\n"
      "sink:sinks=4:recent=0 64 dense cache\n"
      "sink:sinks=4:recent=0 64 stream cache\n"
      "sink:sinks=4:recent=0 96 dense cache\n"
      "sink:sinks=4:recent=0 96 stream cache\n");
}

TEST_CASE("Oracles come at original positions only") {
  const std::string_view oracles[] = {"oracle_topk"};
  CHECK(sweep("--policy oracle_topk --budget 64 --positions cache", oracles) ==
        "oracle_topk 64 dense original\n");
  CHECK_THROWS_AS(sweep_from(parse("--policy oracle_topk --budget 64")), std::invalid_argument);
}

TEST_CASE("Bad sweeps are refused by name") {
  using Catch::Matchers::ContainsSubstring;
  CHECK_THAT(message_of("--policy sink"), ContainsSubstring("--budget: policy sink needs one"));
  CHECK_THAT(message_of("--policy snik --budget 8"), ContainsSubstring("did you mean 'sink'"));
  CHECK_THAT(message_of("--policy sink --budget 4"), ContainsSubstring("sinks=4"));
  CHECK_THAT(message_of("--policy sink --budget 0"), ContainsSubstring("budget"));
  CHECK_THAT(message_of("--policy sink --budget -3"), ContainsSubstring("budget"));
  CHECK_THAT(message_of("--policy sink --budget 120%"), ContainsSubstring("100%"));
  CHECK_THAT(message_of("--policy sink --budget 8 --positions here"),
             ContainsSubstring("original or cache"));
  CHECK_THAT(message_of("--policy sink --budget 8 --prefill chunk:0"),
             ContainsSubstring("prefill"));
  CHECK_THAT(message_of("--seed=-1"), ContainsSubstring("--seed"));
  CHECK_THROWS_AS(only_config(parse("--policy sink --budget 8,9").caches, {}),
                  std::invalid_argument);
}

TEST_CASE("Errors for threads, devices and required options say what is expected") {
  CHECK(parse("--threads 3").common.threads == 3);
  CHECK(parse("").common.threads >= 1);
  CHECK_THROWS_AS(parse("--threads 0"), std::invalid_argument);
  CHECK_THROWS_AS(parse("--device tpu"), std::invalid_argument);
  CHECK(parse("--device cpu").common.device == Device::cpu);
  CHECK(parse("").common.device == (has_cuda_device() ? Device::cuda : Device::cpu));
  if (!cuda_in_build()) CHECK_THROWS_AS(parse("--device cuda"), std::invalid_argument);
  CHECK(parse("--model dir").model == "dir");
  CHECK_NOTHROW(GivenOptions({"model"}).require("model", "--model DIR"));
  CHECK(error_of<std::invalid_argument>([] { GivenOptions({}).require("model", "--model DIR"); }) ==
        "--model: missing; give --model DIR");
}

TEST_CASE("Options that do not apply are refused by name") {
  const GivenOptions given({"task", "words"});
  CHECK(error_of<std::invalid_argument>([&] {
          given.refuse({"seed", "words"}, "has no use");
        }) == "--words: has no use; leave it out");
  CHECK_NOTHROW(given.refuse({"seed"}, "has no use"));
  CHECK(error_of<std::invalid_argument>([&] { given.refuse_without("confirm", {"task"}); }) ==
        "--task: requires --confirm; leave it out");
  CHECK_NOTHROW(given.refuse_without("task", {"words"}));
}

TEST_CASE("Each --tiers gives one tier plan, and auto gives several") {
  CHECK(parse("").caches.tier_plans.size() == 1);
  CHECK(parse("--tiers 4 --tiers 8").caches.tier_plans.size() == 2);
  CHECK(parse("--tiers auto").caches.tier_plans.size() == std::size(kStandardTierPlans));
}

TEST_CASE("The option --centre applies to the plans of --tiers that quantize") {
  const auto caches = parse("--tiers 16 --tiers 4 --centre prompt").caches;
  CHECK(apply_tier_plans({"h2o"}, caches.tier_plans, caches.centre) ==
        std::vector<std::string>{"h2o", "h2o:tiers=4:centre=prompt"});
  CHECK_THROWS_WITH(parse("--tiers 4 --centre mean"),
                    "centre: 'mean' should be none, prompt or @FILE");
  CHECK_THROWS_WITH(parse("--centre prompt"),
                    "--centre: no plan of --tiers quantizes keys; add --tiers 4, or leave --centre "
                    "out");
}

TEST_CASE("An output path that exists is refused") {
  CHECK_THROWS_AS(refuse_existing("/", "--out"), std::runtime_error);
  CHECK_NOTHROW(refuse_existing(KVLAB_SOURCE_DIR "/no/such/path", "--out"));
}

TEST_CASE("A list is split at each comma") {
  CHECK(split_list("a,b,,c") == std::vector<std::string>{"a", "b", "", "c"});
  CHECK(split_list("") == std::vector<std::string>{""});
}

TEST_CASE("Commands that run only policies refuse an oracle, and say that it is one") {
  CHECK(
      message_of("--policy oracle_topk --budget 64") ==
      "policy oracle_topk: this is an oracle, which uses future attention and runs only in `kvlab "
      "replay`; give a policy");
}

TEST_CASE("The remaining time is computed from the start of the work") {
  CHECK(time_left(0, 0.25, 60) == "3:00 left");
  CHECK(time_left(0.5, 0.75, 65) == "1:05 left");
  CHECK(time_left(0.9, 0.901, 100) == "2:45:00 left");
  CHECK(time_left(0, 0, 60).empty());
  CHECK(time_left(0, 1, 60).empty());
  CHECK(time_left(0, 0.5, 0.2).empty());
}

TEST_CASE("Long work is announced once its rate is known; short work is not announced") {
  CHECK(announcement(0, 0.1, 12) == "about 1:48 left, 2:00 in all");
  CHECK(announcement(0.5, 0.6, 60) == "about 4:00 left, 5:00 in all");
  CHECK(announcement(0, 0.1, 1).empty());
  CHECK(announcement(0, 0.9, 12).empty());
  CHECK(announcement(0, 0, 12).empty());
}

/// Simulates work in phases, with its own clock. `worst`: the largest factor by which the estimate
/// of the remaining time is wrong, once a tenth of the time has passed.
struct Simulated {
  double now = 0, fraction = 0, worst = 1;

  /// Spends `seconds` on each phase, in ten steps each.
  void run(WorkPlan& plan, const std::vector<double>& seconds) {
    double all = 0;
    for (const double one : seconds) all += one;
    for (std::size_t p = 0; p < seconds.size(); ++p)
      for (int step = 1; step <= 10; ++step) {
        now += seconds[p] / 10;
        plan.phase(p)(step / 10.0);
        const double left = now * (1 - fraction) / fraction;
        if (now < 0.1 * all || all - now < 1) continue;
        worst = std::max({worst, left / (all - now), (all - now) / left});
      }
  }
};

TEST_CASE("The remaining time of different phases is right within a factor of two after a tenth") {
  Simulated work;
  // The phases are a capture, a replay of four configurations, and successive halving. A unit of
  // work takes 0.1 s in a capture, 1 ms in a replay and 0.2 s in successive halving.
  WorkPlan plan([&](double fraction) { work.fraction = fraction; },
                {{0, 100}, {1, 400}, {0, 100}, {1, 400}, {2, 1000}}, {0, 0, 0.15},
                [&] { return work.now; });
  work.run(plan, {10, 0.4, 10, 0.4, 200});
  CHECK(work.worst < 2);
  CHECK(work.fraction == Approx(1));

  // If each phase had the same share of the progress bar, a tenth of the bar would have been
  // reached after 21 s of 221 s.
  Simulated other;
  WorkPlan longer([&](double fraction) { other.fraction = fraction; }, {{0, 100}, {1, 10}}, {0, 1},
                  [&] { return other.now; });
  longer.set_work(1, 100);
  other.run(longer, {50, 100});
  CHECK(other.worst < 1.2);
}

TEST_CASE("Errors for unexpected words and for a budget without effect name them") {
  const auto starts = [](const std::string& text) { return Catch::Matchers::StartsWith(text); };
  CHECK_THAT(refusal("generate Once"),
             starts("'Once' is not expected here; usage: kvlab generate"));
  CHECK_THAT(refusal("deploy run extra"), starts("'extra' is not expected here"));
  CHECK(refusal("replay --out a --out b") == "--out: given more than once; give it once");
  CHECK_THAT(refusal("replay ---"), starts("unknown option '---'"));
  const std::string tiny = " --budget 4 --device cpu --model " + kTiny;
  CHECK_THAT(refusal("generate --prompt It" + tiny),
             starts("--budget: the full cache has no budget;"));
  CHECK_THAT(refusal("eval --text " + kTiny + "/config.json" + tiny),
             starts("--budget: the full cache has no budget;"));
}

TEST_CASE("Errors for a misspelt option or an invalid number say what is expected") {
  CHECK(refusal("replay --bugdet 64") == "unknown option '--bugdet'; did you mean --budget?");
  CHECK(refusal("replay --volume 11") ==
        "unknown option '--volume'; `kvlab replay --help` lists the known options");
  CHECK(refusal("replay --threads abc") == "--threads: 'abc' should be a whole number");
  CHECK(refusal("replay --seed 1.5") == "--seed: '1.5' should be a whole number");
  CHECK(refusal("replay --request-threshold low") ==
        "--request-threshold: 'low' should be a number");
}

TEST_CASE(
    "An output that cannot be written is refused before the work: no parent folder, or a "
    "folder") {
  const kvlab::test::TemporaryFolder folder;
  const std::string file = (folder / "a.json").string(), none = (folder / "b" / "a.json").string();
  CHECK_NOTHROW(refuse_unwritable(file, "--out"));
  CHECK_NOTHROW(refuse_unwritable("a.json", "--out"));
  CHECK(error_of([&] { refuse_unwritable(none, "--out"); }) ==
        fmt::format("--out: {}: parent directory {} does not exist; make it first", none,
                    (folder / "b").string()));
  CHECK(error_of([&] { refuse_unwritable(folder.path().string(), "--out"); }) ==
        fmt::format("--out: {} is a directory; give a file", folder.path().string()));
  CHECK(error_of([&] { refuse_unwritable(file + "/", "--out"); }).starts_with("--out: " + file));
}

TEST_CASE("Commands refuse a folder in place of a file before they load a model") {
  const kvlab::test::TemporaryFolder folder;
  const std::string path = folder.path().string(), wrong = path + " is a directory; give a file";
  const std::string none = " --model none --text t --budget 8 --out " + path;
  CHECK(refusal("tune" + none) == "--out: " + wrong);
  CHECK(refusal("fidelity --policy h2o,sink,lru" + none + "/out --report " + path) ==
        "--report: " + wrong);
}

TEST_CASE("Texts are named by file name, or by path if file names are equal") {
  CHECK(text_names({"a/one.txt", "b/two.txt"}) == std::vector<std::string>{"one", "two"});
  const std::vector<std::string> twice{"a/one.txt", "b/one.txt"};
  CHECK(text_names(twice) == twice);
  const std::vector<std::string> all{"a/all.txt", "b/two.txt"};
  CHECK(text_names(all) == all);
  CHECK(error_of<std::invalid_argument>([] { text_names({"all"}); }) ==
        "--text: the name 'all' stands for all texts in the results; write ./all");
  CHECK(text_names({"./all"}) == std::vector<std::string>{"./all"});
}
