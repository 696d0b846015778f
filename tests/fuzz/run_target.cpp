// Input: a run's folder. It is read, ranked, reported and deployed at each of its budgets, then
// written and read back unchanged.
#include "engine/evaluation/deploy/deploy.hpp"
#include "sim/report/recommendation.hpp"
#include "tests/fuzz/fuzz.hpp"

using namespace kvlab;

namespace {

void say(const Run& run, const MetricTable& metric_table, const BudgetColumn& budget) {
  const std::string metric(best_metric(run.rows));
  if (const MetricInfo* const info = find_metric(metric)) {
    const auto made = recommendations_of(metric_table, *info, 1, "");
    recommendations_text(made);
    page_json(made, [](const std::string&) { return std::string(); });
    for (const Recommendation& one : made) recommendation_json(one);
  }
  const Ballot ballot = rank_for_deployment(run, metric_table, budget.text, metric);
  const auto path = fuzz::Folder::path() / "policy.json";
  const PolicyFile file = policy_file_of(run, metric_table, ballot);
  write_policy_file(path, file);
  read_policy_file(path);
  std::filesystem::remove(path);
}

void rewrite(const Run& run) {
  const auto directory = fuzz::Folder::path() / "copy";
  std::filesystem::remove_all(directory);
  std::filesystem::create_directory(directory);
  Run copy = run;
  save_run(copy, directory);
  const Run again = load_run(directory);
  fuzz::require(again.info == run.info && again.kept == run.kept && again.hash == copy.hash &&
                    results_csv(again.rows) == results_csv(run.rows),
                "the run changed");
  fuzz::require(job_of(again.info, "build") == job_of(run.info, "build"), "the job changed");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const fuzz::Folder folder(fuzz::text_of(data, size));
  std::optional<Run> run;
  if (!fuzz::accepts([&] { run = load_run(folder.path()); }, folder.path().string())) return 0;
  rewrite(*run);
  fuzz::accepts([&] {
    const MetricTable metric_table(run->rows);
    for (const BudgetColumn& budget : metric_table.budgets()) say(*run, metric_table, budget);
  });
  return 0;
}
