// A run's folder: read, ranked, put into the report's words, deployed at its first budget.
#include "engine/loop/deploy/deploy.hpp"
#include "sim/report/answer.hpp"
#include "tests/fuzz/fuzz.hpp"

using namespace kvlab;

namespace {

void say(const Run& run, const Figures& figures, const BudgetColumn& budget) {
  const std::string metric(best_metric(run.rows));
  if (const MetricInfo* const info = find_metric(metric)) {
    answer_html(figures, budget, *info);
    best_by_budget_html(figures, styles_of(figures.series()), *info);
  }
  const Ballot ballot = rank_for_deployment(run, figures, budget.text, metric);
  const auto path = fuzz::Folder::path() / "policy.json";
  const PolicyFile file = policy_file_of(run, figures, ballot);
  write_policy_file(path, file);
  read_policy_file(path);
  std::filesystem::remove(path);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const fuzz::Folder folder(fuzz::text_of(data, size));
  std::optional<Run> run;
  if (!fuzz::accepts([&] { run = load_run(folder.path()); }, folder.path().string())) return 0;
  fuzz::accepts([&] {
    const Figures figures(run->rows);
    for (const BudgetColumn& budget : figures.budgets()) say(*run, figures, budget);
  });
  return 0;
}
