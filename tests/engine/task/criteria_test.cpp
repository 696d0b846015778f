// Tests of the choice of a configuration to deploy by two criteria, KL and task accuracy.
#include "engine/evaluation/deploy/deploy.hpp"

#include "engine/backend.hpp"
#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tools/eval_model.hpp"

namespace kvlab {
namespace {

std::vector<bool> samples(int right, int all = 40) {
  std::vector<bool> answers(static_cast<std::size_t>(all));
  std::fill_n(answers.begin(), right, true);
  return answers;
}

/// Finalists, each with its KL and with how many of 40 samples it answers right.
struct Field {
  std::vector<Finalist> finalists;
  std::vector<TaskAccuracy> evaluated{
      {.task = "passkey", .words = 250, .full = samples(40), .right = {}}};

  void add(const char* policy, double kl, int right) {
    finalists.push_back({{.policy = parse_policy(policy), .budget = parse_budget("64")}, kl});
    evaluated[0].right.push_back(right < 0 ? std::vector<bool>{} : samples(right));
  }
  std::string text(std::size_t f) const { return finalists[f].config.policy.text(); }
  Choice choice() const { return choose_by_both_criteria(finalists, evaluated); }
};

TEST_CASE("A configuration with more right answers is deployed if its KL is at most 20% higher") {
  Field field;
  field.add("a2sf", 1.00, 10);
  field.add("lru", 1.05, 12);
  field.add("h2o", 1.15, 28);
  const Choice choice = field.choice();
  CHECK(choice.deployed == 2);
  CHECK(choice.best_accuracy == 2);
  CHECK(choice.why.find("70% of passkey, and the best policy by KL answers 25%") !=
        std::string::npos);
  CHECK(choice.why.find("the chosen policy has 15% more KL than the lowest") != std::string::npos);
}

TEST_CASE(
    "If more right answers cost more than 20% KL, both configurations and the cost are "
    "named") {
  Field field;
  field.add("a2sf", 1.00, 10);
  field.add("lru", 1.19, 14);
  field.add("h2o", 1.35, 40);
  const Choice choice = field.choice();
  CHECK(choice.best_accuracy == 2);
  CHECK(choice.deployed == 1);
  CHECK(choice.why.find(field.text(2) + " answers 100% of passkey, but has 35% more KL") !=
        std::string::npos);
  const auto json = criteria_json(field.finalists, field.evaluated, choice);
  CHECK(json["distribution"] == field.text(0));
  CHECK(json["task_accuracy"] == field.text(2));
  CHECK(json["deployed"] == field.text(1));
  CHECK(json["policies"][2]["kl_over_lowest"] == Approx(1.35));
  CHECK(json["policies"][1]["task_accuracy"][0]["right"] == Approx(0.35));
  CHECK(json["policies"][1]["task_accuracy"][0]["low"] < 0.35);
  CHECK(criteria_text(json).find("best by task accuracy: " + field.text(2)) != std::string::npos);
}

TEST_CASE("A small gain in task accuracy does not justify higher KL") {
  Field field;
  field.add("a2sf", 1.00, 38);
  field.add("h2o", 1.01, 40);
  CHECK(field.choice().deployed == 0);
  CHECK(field.choice().best_accuracy == 0);
}

TEST_CASE("A choice for its memory stays the choice, and differences of KL are from the lowest") {
  Field field;
  field.add("a2sf", 1.10, 20);
  field.add("lru", 1.00, 20);
  field.add("h2o", 1.25, 40);
  Choice choice = field.choice();
  CHECK(choice.deployed == 0);
  CHECK(choice.why.find(field.text(2) + " answers 100% of passkey, but has 25% more KL") !=
        std::string::npos);
  const auto json = criteria_json(field.finalists, field.evaluated, choice);
  CHECK(json["policies"][0]["kl_over_lowest"] == Approx(1.1));
  CHECK(json["policies"][1]["kl_over_lowest"] == 1);
  field.evaluated[0].right[1] = samples(40);
  choice = field.choice();
  CHECK(choice.deployed == 1);
  CHECK(choice.why.find("the chosen policy has 0% more KL than the lowest") != std::string::npos);
}

TEST_CASE("The first task decides first, and the next task among the rest") {
  Field field;
  field.evaluated.push_back({.task = "needle", .words = 250, .full = samples(40), .right = {}});
  field.add("a2sf", 1.00, 10);
  field.add("h2o", 1.10, 40);
  field.add("lru", 1.15, 39);
  field.evaluated[1].right = {samples(40), samples(10), samples(30)};
  CHECK(field.choice().deployed == 2);
}

TEST_CASE("Tasks that were not evaluated, or that the full cache fails, decide nothing") {
  Field field;
  field.add("a2sf", 1.00, -1);
  field.add("h2o", 1.01, -1);
  field.evaluated[0] = {.task = "passkey", .words = 0, .full = {}, .right = {{}, {}}};
  CHECK(field.choice().deployed == 0);
  CHECK(field.choice().why.find("the model itself (full cache) answers too few") !=
        std::string::npos);
  const Choice choice = choose_by_both_criteria(field.finalists, {});
  CHECK_FALSE(choice.best_accuracy);
  CHECK(choice.why == "task accuracy was not measured");
  CHECK(criteria_json(field.finalists, {}, choice)["task_accuracy"].is_null());
}

TEST_CASE("Finalists answer the same samples, and of many finalists only the best answer all") {
  const std::string directory = KVLAB_SOURCE_DIR "/engine/models/tiny";
  const auto backend = load_backend(Device::cpu, directory, 2);
  const Tokenizer tokenizer = Tokenizer::load(directory + "/tokenizer.json");
  TaskAccuracyPlan plan{.tasks = {{{.kind = TaskKind::passkey}, 20}}, .samples = 3};
  std::vector<Finalist> finalists;
  for (int budget = 16; budget < 30; ++budget)
    finalists.push_back(
        {{.policy = parse_policy("window"), .budget = parse_budget(std::to_string(budget))},
         1 + 0.01 * budget});
  double last = 0;
  const auto evaluated = evaluate_finalists(*backend, tokenizer, finalists, plan, [&](double done) {
    CHECK(done >= last);
    last = done;
  });
  CHECK(last == Approx(1));
  REQUIRE(evaluated.size() == 1);
  CHECK(evaluated[0].samples() == 15);
  CHECK(evaluated[0].right[0].size() == 15);  // the finalist with the lowest KL is always evaluated
  CHECK(std::ranges::count_if(evaluated[0].right,
                              [](const auto& own) { return own.size() == 15; }) == 12);
  CHECK(std::ranges::count_if(evaluated[0].right, &std::vector<bool>::empty) == 2);

  // No length is found, because the bundled model never finds a pass key.
  find_lengths(*backend, tokenizer, plan);
  CHECK(plan.tasks[0].words == 0);
  CHECK(task_accuracy_work(12, plan) == 0);
}

TEST_CASE("The tasks of finalists are given by name, or none") {
  const auto plan = [](const std::string& task) {
    OptionTable table;
    TaskAccuracyOptions options;
    const std::vector<std::string> features;
    add_task_accuracy_options(table, options, features);
    table.options().front().fill(task);
    for (const OptionTable::Check& check : table.checks()) check(GivenOptions({"task"}));
    return options.plan;
  };
  CHECK(plan("passkey,needle").tasks.size() == 2);
  CHECK(plan("passkey,needle").samples * 5 >= 40);
  CHECK(plan("none").tasks.empty());
  CHECK_THROWS_AS(plan("riddle"), std::invalid_argument);
}

}  // namespace
}  // namespace kvlab
