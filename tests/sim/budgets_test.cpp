// Tests of budgets by head, which come from files or from the curves of a run.
#include <algorithm>
#include <functional>
#include <random>

#include "sim/budgets/allocate.hpp"
#include "sim/budgets/budget_file.hpp"
#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/sim/run_fixture.hpp"
#include "tests/traces/temporary_folder.hpp"

using namespace kvlab;
using Catch::Matchers::ContainsSubstring;
using kvlab::test::error_of;
using kvlab::test::read_bytes;
using kvlab::test::TemporaryFolder;
using kvlab::test::write_bytes;

namespace {

Budget read(const std::string& text) {
  const TemporaryFolder folder;
  write_bytes(folder / "b.json", text);
  return read_budget("@" + (folder / "b.json").string());
}

std::string refusal(const std::string& text) {
  return error_of<std::runtime_error>([&] { read(text); });
}

/// The lowest error of all ways to share `total` tokens among the hulls.
double min_error(std::span<const Curve> hulls, std::uint64_t total) {
  const std::function<double(std::size_t, std::uint64_t)> best = [&](std::size_t c,
                                                                     std::uint64_t left) {
    const Curve& hull = hulls[c];
    if (c + 1 == hulls.size())
      return left < hull.front().tokens || left > hull.back().tokens
                 ? std::numeric_limits<double>::infinity()
                 : error_at(hull, static_cast<std::uint32_t>(left));
    double lowest = std::numeric_limits<double>::infinity();
    for (std::uint32_t own = hull.front().tokens;
         own <= std::min<std::uint64_t>(hull.back().tokens, left); ++own)
      lowest = std::min(lowest, error_at(hull, own) + best(c + 1, left - own));
    return lowest;
  };
  return best(0, total);
}

Curve random_curve(std::mt19937& rng) {
  Curve curve;
  std::uint32_t tokens = 1 + rng() % 3;
  for (int i = 0; i < 4; ++i, tokens += 1 + rng() % 5)
    curve.push_back({tokens, static_cast<double>(rng() % 1000) / 64});
  curve.push_back({tokens, 0});
  return curve;
}

/// Two layers of two heads with errors a / tokens at `tokens`, for a = 1, 4, 16, 64.
Run run_of_curves(const std::string& metric, const std::vector<std::string>& budgets) {
  Run run = made_up_run({{"h2o", "sinks=0:recent=50%", 1, 0}});
  run.info.traces.front().layers = 2;
  const MadeUp h2o{"h2o", "sinks=0:recent=50%", 0, 0.01};
  for (const std::string& budget : budgets) {
    double sum = 0;
    for (int layer = 0; layer < 2; ++layer)
      for (int head = 0; head < 2; ++head) {
        const double own = std::pow(4, 2 * layer + head) / std::stod(budget);
        run.rows.push_back(made_up_row(h2o, "trace0", budget, metric, own, layer, head));
        sum += own;
      }
    run.rows.push_back(made_up_row(h2o, "trace0", budget, metric, sum));
  }
  return run;
}

AllocationRequest at(const std::string& budget) { return {.budget = parse_budget(budget)}; }

}  // namespace

TEST_CASE("a file gives one budget, or one for each layer, or for each layer and KV head") {
  CHECK(read("64").is_even());
  CHECK(read("64").resolve(1000, 0) == 64);
  CHECK(read("[64, 32]").heads == HeadBudgets{{64}, {32}});
  const Budget heads = read("[[64, 32], [1, 2147483647]]");
  CHECK(heads.heads == HeadBudgets{{64, 32}, {1, 2147483647}});
  CHECK(heads.text() == "@" + heads.file);
  CHECK(read(budgets_text(heads.heads)).heads == heads.heads);
  const Budget exempting = read("[null, [64, 32]]");
  CHECK(exempting.heads == HeadBudgets{{kNoBudget, kNoBudget}, {64, 32}});
  CHECK(exempting.exempts());
  CHECK(exempting.extent.tokens == 48);
  CHECK(read(budgets_text(exempting.heads)).heads == exempting.heads);
  CHECK(read_budget("pyramid(20%)").split == Budget::Split::pyramid);
}

TEST_CASE("an invalid budget file is refused in one line, with the file and the position") {
  for (const auto& [text, says] : std::vector<std::pair<std::string, std::string>>{
           {"0", "b.json: budgets: should be a number of tokens, at least 1"},
           {"-3", "b.json: budgets"},
           {"6.5", "b.json: budgets"},
           {"NaN", "b.json"},
           {"\"64\"", "b.json: budgets"},
           {"null", "b.json: budgets"},
           {"[null, null]", "b.json: budgets exempts every layer; give tokens for at least one"},
           {"[[64, null], [64, 2]]", "b.json: budgets[0][1]"},
           {"{\"budgets\": 3}", "b.json: budgets"},
           {"[]", "b.json: budgets holds no layers"},
           {"[[]]", "b.json: budgets[0]"},
           {"[[], []]", "b.json: budgets[0]: 0 numbers"},
           {"[64, [32]]", "b.json: budgets[1]: should be a number of tokens, as in earlier layers"},
           {"[[64], 32]", "b.json: budgets[1]: should be a list of numbers of tokens"},
           {"[[64, 1], [32]]", "b.json: budgets[1]: 1 numbers; layer 0 has 2"},
           {"[[64, -1]]", "b.json: budgets[0][1]"},
           {"[[64, 2147483648]]", "b.json: budgets[0][1]: should be a number of tokens"},
           {"[[64, 1e99]]", "b.json: budgets[0][1]"},
           {"[[64, [1]]]", "b.json: budgets[0][1]"},
           {"[[64, 1]", "b.json"}}) {
    INFO(text);
    CHECK_THAT(refusal(text), ContainsSubstring(says));
    CHECK(refusal(text).find('\n') == std::string::npos);
  }
  CHECK_THAT(error_of<std::runtime_error>([] { read_budget("@no-such-file.json"); }),
             ContainsSubstring("no-such-file.json"));
  CHECK_THAT(error_of<std::invalid_argument>([] { read_budget("@"); }),
             ContainsSubstring("a file's path"));
}

TEST_CASE("The configurations of one command are counted before they are made") {
  SweepRequest request{.policies = {"h2o"}, .budgets = {}};
  for (std::size_t i = 1; i <= kMaxConfigs; ++i) request.budgets.push_back(std::to_string(i + 1));
  // This would take seconds if each configuration were compared with all others.
  CHECK(make_sweep(request, {}, {}).size() == kMaxConfigs);
  request.budgets.push_back("1");
  const auto refusal = [&] {
    return error_of<std::invalid_argument>([&] { make_sweep(request, {}, {}); });
  };
  CHECK_THAT(refusal(), ContainsSubstring("up to 10001 configurations"));
  request = {.policies = std::vector<std::string>(2'000'000, "no such policy"), .budgets = {}};
  CHECK_THAT(refusal(), ContainsSubstring("at most 10000"));
  request = {.policies = std::vector<std::string>(5001, "h2o"), .budgets = {"1", "2"}};
  CHECK_THAT(refusal(), ContainsSubstring("up to 10002 configurations"));
}

TEST_CASE("a lower hull is convex, lies below its curve, and touches it at both ends") {
  std::mt19937 rng(3);
  for (int i = 0; i < 200; ++i) {
    const Curve curve = random_curve(rng), hull = lower_hull(curve);
    CHECK(hull.front().tokens == curve.front().tokens);
    CHECK(hull.back().tokens == curve.back().tokens);
    for (const CurvePoint& point : curve)
      CHECK(error_at(hull, point.tokens) <= point.error + 1e-12);
    for (std::uint32_t t = hull.front().tokens + 1; t < hull.back().tokens; ++t)
      CHECK(error_at(hull, t - 1) - error_at(hull, t) >=
            error_at(hull, t) - error_at(hull, t + 1) - 1e-12);
  }
}

TEST_CASE("no other way to share tokens over hulls has a lower error") {
  std::mt19937 rng(5);
  for (int i = 0; i < 60; ++i) {
    std::vector<Curve> hulls;
    std::uint64_t min_total = 0, max_total = 0;
    for (std::uint32_t c = 0; c < 2 + rng() % 3; ++c) {
      hulls.push_back(lower_hull(random_curve(rng)));
      min_total += hulls.back().front().tokens;
      max_total += hulls.back().back().tokens;
    }
    for (const std::uint64_t total :
         {min_total, min_total + 1, (min_total + max_total) / 2, max_total - 1, max_total}) {
      const auto tokens = share_tokens(hulls, total);
      std::uint64_t sum = 0;
      double error = 0;
      for (std::size_t c = 0; c < hulls.size(); ++c)
        sum += tokens[c], error += error_at(hulls[c], tokens[c]);
      CHECK(sum == total);
      CHECK(std::abs(error - min_error(hulls, total)) <= 1e-9);
    }
    CHECK_THROWS_AS(share_tokens(hulls, min_total - 1), std::invalid_argument);
    CHECK_THROWS_AS(share_tokens(hulls, max_total + 1), std::invalid_argument);
  }
}

TEST_CASE("heads that gain more from a token get more tokens, at equal bytes") {
  const Run run = run_of_curves("residual_error", {"8", "16", "32", "64", "128", "256", "512"});
  for (const char* budget : {"8", "32", "100", "12.8%"}) {
    const Allocation found = allocate_budgets(run, at(budget));
    INFO(budget);
    CHECK(found.metric == "residual_error");
    CHECK(found.mean_tokens == parse_budget(budget).resolve(1000, 0));
    std::vector<std::uint32_t> all;
    for (const auto& layer : found.heads) all.insert(all.end(), layer.begin(), layer.end());
    REQUIRE(all.size() == 4);
    CHECK(all[0] + all[1] + all[2] + all[3] == 4 * found.mean_tokens);
    CHECK(std::ranges::is_sorted(all));
    if (found.mean_tokens > 8) CHECK(all[0] < all[3]);
    CHECK(found.shared <= found.even + 1e-12);
  }
}

TEST_CASE("kl_estimate decides if the run has it, unless another metric is requested") {
  Run run = run_of_curves("residual_error", {"8", "64", "512"});
  const Run other = run_of_curves("kl_estimate", {"8", "64", "512"});
  for (const ResultRow& row : other.rows)
    if (row.metric == "kl_estimate") run.rows.push_back(row);
  CHECK(allocate_budgets(run, at("64")).metric == "kl_estimate");
  CHECK(allocate_budgets(run, {.metric = "residual_error", .budget = parse_budget("64")}).metric ==
        "residual_error");
}

TEST_CASE("the budgets name the model's layers, which may have other numbers than 0, 1, 2") {
  Run run = run_of_curves("residual_error", {"8", "64", "512"});
  run.info.traces.front().numbers = {5, 11};
  for (ResultRow& row : run.rows)
    if (row.layer >= 0) row.layer = row.layer == 0 ? 5 : 11;
  CHECK(allocate_budgets(run, at("64")).layers == std::vector<std::uint32_t>{5, 11});
}

TEST_CASE("a policy with tiers has the error of `full` with the same tiers at the full length") {
  const auto with_tiers = [](double full_error, const std::string& full_tiers) {
    Run run = run_of_curves("residual_error", {"8", "64", "512"});
    for (ResultRow& row : run.rows) {
      if (row.policy != "h2o" || row.metric != "residual_error") continue;
      row.params += ":tiers=4";
      row.value += 1;  // the error of quantization, which is the same at each budget
    }
    std::erase_if(run.rows, [](const ResultRow& row) { return row.metric != "residual_error"; });
    const MadeUp full{"full", full_tiers, 0, 0.01};
    for (int layer = -1; layer < 2; ++layer)
      for (int head = -1; head < (layer < 0 ? 0 : 2); ++head)
        run.rows.push_back(
            made_up_row(full, "trace0", "all", "residual_error", full_error, layer, head));
    return run;
  };
  // The errors of four heads add up. Tokens are worth what they are worth without tiers.
  const Allocation plain = allocate_budgets(run_of_curves("residual_error", {"8", "64", "512"}),
                                            at("600")),
                   tiers = allocate_budgets(with_tiers(1, "tiers=4"), at("600"));
  CHECK(tiers.heads == plain.heads);
  CHECK(std::abs(tiers.even - plain.even - 4) < 1e-9);
  CHECK(std::abs(tiers.shared - plain.shared - 4) < 1e-9);
  for (const char* other : {"", "tiers=8", "tiers=4:centre=prompt"})
    CHECK_THAT(
        error_of<std::invalid_argument>([&] { allocate_budgets(with_tiers(1, other), at("600")); }),
        ContainsSubstring("no residual_error of `full` with the same tiers"));
}

TEST_CASE("a run without the data for budgets by head is refused") {
  const auto refused = [](Run run, const AllocationRequest& request) {
    return error_of<std::invalid_argument>([&] { allocate_budgets(run, request); });
  };
  const Run good = run_of_curves("residual_error", {"8", "64", "512"});
  REQUIRE(refused(good, at("64")).empty());
  CHECK_THAT(refused(made_up_run({{"h2o", "", 1, 0}}), at("64")),
             ContainsSubstring("no kl_estimate and no residual_error"));
  CHECK_THAT(refused(good, {.metric = "kl_estimate", .budget = parse_budget("64")}),
             ContainsSubstring("the run has no kl_estimate") && ContainsSubstring("gradients"));
  CHECK_THAT(refused(good, {.metric = "recall", .budget = parse_budget("64")}),
             ContainsSubstring("--metric: 'recall' should be one of kl_estimate, residual_error"));
  CHECK_THAT(refused(run_of_curves("residual_error", {"8", "64"}), at("64")),
             ContainsSubstring("at 2 budgets"));
  CHECK_THAT(refused(good, at("4")),
             ContainsSubstring("--budget: 4 is 4 tokens; should be from 8"));
  CHECK_THAT(refused(good, at("2000")), ContainsSubstring("to 1000"));
  CHECK_THAT(refused(good, {.policy = "lru", .budget = parse_budget("64")}),
             ContainsSubstring("--policy: lru is not in this run; give one of h2o"));
  Run several = good;
  several.rows.push_back(made_up_row({"lru", "", 1, 0}, "trace0", "64", "recall", 0.5));
  CHECK_THAT(refused(several, at("64")),
             ContainsSubstring("it matches 2 configurations of the run; give one of"));
  CHECK(refused(several, {.policy = "h2o", .budget = parse_budget("64")}).empty());
  Run part = good;
  part.info.layers = {0};
  CHECK_THAT(refused(part, at("64")), ContainsSubstring("only some of the layers"));
  Run lengths = made_up_run({{"h2o", "", 1, 0}}, 2);
  lengths.info.traces[1].tokens = 900;
  CHECK_THAT(refused(lengths, at("64")), ContainsSubstring("1000 and 900 tokens"));
  Run models = made_up_run({{"h2o", "", 1, 0}}, 2);
  models.info.traces[1].weights_xxh3 = "00000000000000ff";
  CHECK_THAT(refused(models, at("64")), ContainsSubstring("come from different models"));
  Run hole = good;
  std::erase_if(hole.rows, [](const ResultRow& row) { return row.layer == 1 && row.head == 1; });
  CHECK_THAT(refused(hole, at("64")), ContainsSubstring("layer 1, KV head 1"));
}
