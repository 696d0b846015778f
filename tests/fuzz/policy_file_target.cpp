// Input: policy.json, or a file of budgets by head. An accepted policy file is written and read
// back unchanged.
#include "engine/evaluation/policy_file.hpp"
#include "sim/budgets/budget_file.hpp"
#include "tests/fuzz/fuzz.hpp"
#include "traces/base/files.hpp"

using namespace kvlab;

namespace {

void rewrite(const fuzz::Folder& folder) {
  const auto path = folder / "policy.json", copy = folder.path() / "copy.json";
  const auto written = [&](const std::filesystem::path& from) {
    write_policy_file(copy, read_policy_file(from));
    return read_text_file(copy, std::size_t{1} << 24);
  };
  fuzz::accepts(
      [&] {
        const std::string text = written(path);
        fuzz::require(written(copy) == text, "it changed:", text);
      },
      path.string());
  std::error_code ignored;
  std::filesystem::remove(copy, ignored);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const fuzz::Folder folder(fuzz::text_of(data, size));
  const auto budgets = folder / "budgets.json";
  std::error_code ignored;
  if (std::filesystem::exists(folder / "policy.json", ignored)) rewrite(folder);
  if (std::filesystem::exists(budgets, ignored))
    fuzz::accepts([&] { budgets_text(read_budget("@" + budgets.string()).heads); },
                  budgets.string());
  return 0;
}
