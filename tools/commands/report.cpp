#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <span>
#include <utility>

#include "engine/checkpoint/checkpoint.hpp"
#include "engine/evaluation/eval/score.hpp"
#include "engine/evaluation/fidelity/fidelity.hpp"
#include "engine/evaluation/pages.hpp"
#include "engine/evaluation/scores.hpp"
#include "engine/tokenizer/tokenizer.hpp"
#include "sim/plan/plan_page.hpp"
#include "sim/report/page.hpp"
#include "sim/report/report.hpp"
#include "tools/command.hpp"
#include "tools/options.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kMaxFileBytes = std::size_t{64} << 20;

struct Request {
  std::string run, out, budget, model, figures;
  bool json = false;
};

void check(Request& request, const GivenOptions& given) {
  given.require("run", "kvlab report RUN, a directory of `kvlab replay`");
  given.require("out", "--out report.html");
  if (given.has("figures")) refuse_existing(request.figures, "--figures");
  refuse_hub_name(request.model);
  refuse_unwritable(request.out, "--out");
}

void add_options(OptionTable& table, Request& request) {
  table.text("run", "RUN", request.run,
             "directory of `kvlab replay`, `fidelity`, `eval --out` or `task --out`, or a file "
             "of `tune` or `plan`");
  table.text("out", "FILE", request.out, "the page; an existing file is replaced");
  table.text("budget", "B", request.budget,
             "budget of the headline and of the heat maps; one of the run's budgets",
             "the one that the run's `Next:` line names");
  table.text("model", "DIR", request.model,
             "model of the traces; shows the text of the tokens that were kept");
  table.text("figures", "DIR", request.figures,
             "also write every figure into this new directory, as Vega-Lite, and as SVG and PNG if "
             "vl-convert is installed (pip install vl-convert-python)");
  add_json_option(table, request.json);
}

/// The text of each token of the shown trace, which the tokenizer of --model decodes.
std::vector<std::string> token_texts(const Run& run, const std::string& model) {
  std::vector<std::string> texts;
  if (model.empty() || !run.kept) return texts;
  const std::string file = model + "/tokenizer.json";
  const auto trace = std::ranges::find(run.info.traces, run.kept->trace, &RunTrace::name);
  const std::string hash = xxh3_hex(read_text_file(file, kMaxTokenizerBytes));
  if (trace != run.info.traces.end() && !trace->tokenizer_xxh3.empty() &&
      trace->tokenizer_xxh3 != hash)
    throw std::invalid_argument(
        fmt::format("--model: {} is not the model of trace {}; give the model {}", file,
                    trace->name, trace->model));
  const Tokenizer tokenizer = Tokenizer::load(file);
  for (const std::int32_t id : run.kept->ids)
    texts.push_back(tokenizer.decode(std::span(&id, 1), false));
  return texts;
}

/// Prints a line to standard error, unless it is empty.
void say(const std::string& line) {
  if (!line.empty()) fmt::print(stderr, "kvlab report: {}\n", line);
}

// Each function makes the page of one kind of results. If figures were requested, writes them to
// `figures`, which is null otherwise.

PageDocument page_of_run(const std::filesystem::path& folder, const Request& request,
                         const AtomicFolder* figures) {
  const Run run = load_run(folder);
  if (figures) say(write_figures(run, request.budget, *figures));
  return report_page(run, {.budget = request.budget,
                           .folder = folder.string(),
                           .tokens = token_texts(run, request.model)});
}

PageDocument page_of_fidelity(const std::filesystem::path& folder, const AtomicFolder* figures) {
  FidelityPage made = fidelity_page(folder);
  if (figures) say(write_figures(vega_lites(made.figures), *figures));
  return std::move(made.page);
}

PageDocument page_of_file(const std::string& path, const AtomicFolder* figures) {
  if (figures)
    throw std::invalid_argument(
        "--figures: the figures of a file of `kvlab tune` or `plan` are only in the page; leave "
        "--figures out, and save the figures from the page");
  nlohmann::json top = parse_json(read_text_file(path, kMaxFileBytes), path);
  return is_plan_file(top) ? plan_page(top, path) : tune_page(std::move(top), path);
}

/// The page of a folder that `replay`, `eval`, `fidelity` or `task` wrote, or of a file of `tune`
/// or `plan`.
PageDocument page_of(const std::filesystem::path& folder, const Request& request,
                     const AtomicFolder* figures) {
  if (std::error_code error; !std::filesystem::exists(folder, error))
    throw std::runtime_error(fmt::format(
        "{}: there is no such directory; give the output of a kvlab command", folder.string()));
  if (std::filesystem::exists(folder / "run.json")) return page_of_run(folder, request, figures);
  if (!request.budget.empty() || !request.model.empty())
    throw std::invalid_argument(
        fmt::format("--{}: is only for a run of `kvlab replay`; leave it out",
                    request.budget.empty() ? "model" : "budget"));
  const bool eval = std::filesystem::exists(folder / kEvalJson);
  if (eval || std::filesystem::exists(folder / kTaskJson)) {
    const ScoreSet scores = load_scores(folder);
    if (figures) say(write_figures(vega_lites(figures_of(scores)), *figures));
    return eval ? eval_page(scores) : task_page(scores);
  }
  if (std::filesystem::exists(folder / kFidelityJson)) return page_of_fidelity(folder, figures);
  if (std::filesystem::is_regular_file(folder)) return page_of_file(folder.string(), figures);
  throw std::runtime_error(
      fmt::format("{}: holds no run.json, eval.json, fidelity.json or task.json; it should be a "
                  "directory made by `kvlab replay`, `eval --out`, `fidelity` or `task --out`, or "
                  "a file of `kvlab tune` or `kvlab plan`",
                  folder.string()));
}

int run(const Request& request) {
  const std::string& out = request.out;
  const OutputClaim claim(out);
  if (!vega_script()) say(std::string(kNoVega));
  std::optional<AtomicFolder> figures;
  if (!request.figures.empty()) figures.emplace(request.figures);
  const std::string html = page_html(page_of(request.run, request, figures ? &*figures : nullptr));
  AtomicFile page(out);  // writes all of the page or, if for example the disk is full, nothing
  page.write(std::as_bytes(std::span(html)));
  if (figures) figures->commit();
  page.commit();
  if (request.json)
    print_json({{"report", out}, {"bytes", html.size()}});
  else
    fmt::print("{}: {} KiB; open it in any browser\n", out, (html.size() + 1023) / 1024);
  return 0;
}

}  // namespace

Command report_command() {
  return {.name = "report",
          .summary = "writes one self-contained HTML page about a run",
          .usage = "RUN --out report.html [--budget B] [--model DIR] [--figures DIR]",
          .example = "kvlab report run --model engine/models/tiny --out report.html",
          .positional = "run",
          .prepare = make_prepare(add_options, check, run)};
}

}  // namespace kvlab
