#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <span>

#include "engine/checkpoint/checkpoint.hpp"
#include "engine/evaluation/eval/score.hpp"
#include "engine/evaluation/fidelity/fidelity.hpp"
#include "engine/evaluation/pages.hpp"
#include "engine/evaluation/scores.hpp"
#include "engine/tokenizer/tokenizer.hpp"
#include "sim/report/page.hpp"
#include "sim/report/report.hpp"
#include "tools/options.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

void add_options(po::options_description& options) {
  options.add_options()("run", text_option("RUN"),
                        "directory of `kvlab replay`, `fidelity`, `eval --out` or `task --out`, or "
                        "a policy file of `tune`")("out", text_option("FILE"),
                                                   "the page; an existing file is replaced")(
      "budget", text_option("B")->default_value("", "the middle budget of the run"),
      "budget of the headline and of the heat maps; one of the run's budgets")(
      "model", text_option("DIR"),
      "model of the traces; shows the text of the tokens that were kept")(
      "figures", text_option("DIR"),
      "also write every figure into this new directory, as Vega-Lite, and as SVG and PNG if "
      "vl-convert is installed (pip install vl-convert-python)")("json", po::bool_switch(),
                                                                 "print one JSON object");
}

/// The text of each token of the shown trace, by the tokenizer of --model.
std::vector<std::string> token_texts(const Run& run, const po::variables_map& options) {
  std::vector<std::string> texts;
  if (!options.count("model") || !run.kept) return texts;
  const std::string file = options["model"].as<std::string>() + "/tokenizer.json";
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

/// The page of a run. Requested figures are written to `figures`, here and below; null: none are
/// requested.
PageDocument page_of_run(const std::filesystem::path& folder, const po::variables_map& options,
                         const AtomicFolder* figures) {
  const Run run = load_run(folder);
  if (figures) say(write_figures(run, options["budget"].as<std::string>(), *figures));
  return report_page(run, {.budget = options["budget"].as<std::string>(),
                           .folder = folder.string(),
                           .tokens = token_texts(run, options)});
}

/// The page of a folder of any kind.
PageDocument page_of(const std::filesystem::path& folder, const po::variables_map& options,
                     const AtomicFolder* figures) {
  if (std::error_code error; !std::filesystem::exists(folder, error))
    throw std::runtime_error(fmt::format(
        "{}: there is no such directory; give a run of `kvlab replay`", folder.string()));
  if (std::filesystem::exists(folder / "run.json")) return page_of_run(folder, options, figures);
  for (const char* option : {"budget", "model"})
    if (options.count(option) && !options[option].as<std::string>().empty())
      throw std::invalid_argument(
          fmt::format("--{}: is only for a run of `kvlab replay`; leave it out", option));
  const bool eval = std::filesystem::exists(folder / kEvalJson);
  if (eval || std::filesystem::exists(folder / kTaskJson)) {
    if (figures) say(write_figures(vega_lites(figures_of(load_scores(folder))), *figures));
    return eval ? eval_page(folder) : task_page(folder);
  }
  if (std::filesystem::exists(folder / kFidelityJson)) {
    if (figures) say(write_figures(vega_lites(fidelity_figures(folder)), *figures));
    return fidelity_page(folder);
  }
  if (std::filesystem::is_regular_file(folder)) {
    refuse_given(options, {"figures"},
                 "a page of `kvlab tune` has no files of figures; save its figure from the page");
    return tune_page(folder);
  }
  throw std::runtime_error(
      fmt::format("{}: holds no run.json, eval.json, fidelity.json or task.json; it should be a "
                  "directory made by `kvlab replay`, `eval --out`, `fidelity` or `task --out`, or "
                  "a policy file of `kvlab tune`",
                  folder.string()));
}

int run(const po::variables_map& options) {
  const std::string directory =
      required(options, "run", "kvlab report RUN, a directory of `kvlab replay`");
  const std::string out = required(options, "out", "--out report.html");
  if (options.count("figures")) refuse_existing(options["figures"].as<std::string>(), "--figures");
  if (options.count("model")) refuse_hub_name(options["model"].as<std::string>());
  refuse_unwritable(out, "--out");
  const OutputClaim claim(out);
  if (!vega_script()) say(std::string(kNoVega));
  std::optional<AtomicFolder> figures;
  if (options.count("figures")) figures.emplace(options["figures"].as<std::string>());
  const std::string html = page_html(page_of(directory, options, figures ? &*figures : nullptr));
  AtomicFile page(out);  // writes both or, on a full disk, none
  page.write(std::as_bytes(std::span(html)));
  if (figures) figures->commit();
  page.commit();
  if (options["json"].as<bool>())
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
          .add_options = add_options,
          .positional = "run",
          .run = run};
}

}  // namespace kvlab
