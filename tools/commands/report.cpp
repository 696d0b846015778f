#include <fmt/format.h>

#include <filesystem>

#include "engine/loop/eval/page.hpp"
#include "engine/loop/fidelity/page.hpp"
#include "engine/loop/fidelity/table.hpp"
#include "sim/report/interactive/vega.hpp"
#include "sim/report/report.hpp"
#include "tools/options.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

void add_options(po::options_description& options) {
  options.add_options()("run", text_option("RUN"),
                        "a directory of `kvlab replay`, `fidelity` or `eval --out`")(
      "out", text_option("FILE"), "the page; an older one is replaced")(
      "budget", text_option("B")->default_value("", "the run's middle one"),
      "budget of the headline and of the heat maps, one of the run")(
      "fixed", po::bool_switch(), "fixed pictures and no script, even where there is Vega")(
      "json", po::bool_switch(), "print one JSON object");
}

/// The page of whatever lies in the folder.
std::string page_of(const std::filesystem::path& folder, const std::string& budget, bool fixed) {
  const bool of_eval = std::filesystem::exists(folder / kEvalJson);
  if (of_eval || std::filesystem::exists(folder / kFidelityJson)) {
    if (!budget.empty())
      throw std::invalid_argument("--budget: is for a run of `kvlab replay`; leave it out");
    return of_eval ? eval_page(folder) : fidelity_page(folder);
  }
  if (!std::filesystem::exists(folder / "run.json"))
    throw std::runtime_error(
        fmt::format("{}: holds no run.json, eval.json or fidelity.json; it should be a directory "
                    "made by `kvlab replay`, `eval --out` or `fidelity`",
                    folder.string()));
  if (!fixed && !vega_script()) fmt::print(stderr, "kvlab report: {}\n", kNoVega);
  return report_html(load_run(folder),
                     {.budget = budget, .fixed = fixed, .progress = progress_bar("report")});
}

int run(const po::variables_map& options) {
  const std::string directory =
      required(options, "run", "kvlab report RUN, a directory of `kvlab replay`");
  const std::string out = required(options, "out", "--out report.html");
  const std::string html =
      page_of(directory, options["budget"].as<std::string>(), options["fixed"].as<bool>());
  write_file_atomically(out, html);
  if (options["json"].as<bool>())
    print_json({{"report", out}, {"bytes", html.size()}});
  else
    fmt::print("{}: {} KiB; open it in any browser\n", out, (html.size() + 1023) / 1024);
  return 0;
}

}  // namespace

Command report_command() {
  return {.name = "report",
          .summary = "one self-contained page about a run",
          .usage = "RUN --out report.html [--budget B]",
          .example = "kvlab report run --out report.html",
          .add_options = add_options,
          .positional = "run",
          .run = run};
}

}  // namespace kvlab
