// Checks every #include of the project against the table of docs/internals/architecture.md.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/catch.hpp"

namespace kvlab {
namespace {

namespace fs = std::filesystem;

/// Maps a folder, as a path without the last slash, to the folders that it may include.
using Table = std::map<std::string, std::set<std::string>>;

constexpr const char* kAll = "all";

/// The cells of a row `| a | b | c |`, without backticks and spaces around them.
std::vector<std::string> cells_of(std::string row) {
  row.erase(std::remove(row.begin(), row.end(), '`'), row.end());
  std::vector<std::string> cells;
  std::istringstream text(row.substr(1));
  for (std::string cell; std::getline(text, cell, '|');) {
    const auto first = cell.find_first_not_of(' '), last = cell.find_last_not_of(' ');
    cells.push_back(first == cell.npos ? "" : cell.substr(first, last - first + 1));
  }
  return cells;
}

std::string without_slash(std::string folder) {
  if (folder.ends_with('/')) folder.pop_back();
  return folder;
}

/// Parses "nothing", "all", or folders separated by commas.
std::set<std::string> folders_of(const std::string& cell) {
  std::set<std::string> folders;
  if (cell.starts_with("nothing")) return folders;
  static const std::regex kFolder("[^, ]+");
  for (std::sregex_iterator i(cell.begin(), cell.end(), kFolder), end; i != end; ++i)
    folders.insert(without_slash(i->str()));
  return folders;
}

/// The first table whose rows begin with a folder and end with the folders that it may include.
/// Throws std::runtime_error if a row names a folder that does not exist.
Table read_table(std::istream& page) {
  Table table;
  bool found = false;
  for (std::string line; std::getline(page, line);) {
    if (line.starts_with("| folder |")) {
      found = true;
    } else if (found && !line.starts_with("|")) {
      break;
    } else if (found && !line.starts_with("| ---")) {
      const auto cells = cells_of(line);
      table[without_slash(cells.front())] = folders_of(cells.back());
    }
  }
  for (const auto& [folder, may] : table)
    for (const std::string& other : may)
      if (other != kAll && !table.contains(other))
        throw std::runtime_error(folder + " may include " + other + ", which has no row");
  return table;
}

/// Returns the folder whose row applies to a path: the innermost folder that has a row, or "" if
/// none has one.
std::string row_of(const Table& table, const std::string& path) {
  for (fs::path folder = fs::path(path).parent_path(); !folder.empty();
       folder = folder.parent_path())
    if (table.contains(folder.string())) return folder.string();
  return "";
}

bool allowed(const Table& table, const std::string& from, const std::string& to) {
  const std::string row = row_of(table, from), other = row_of(table, to);
  if (row.empty() || other.empty()) return false;
  const auto& may = table.at(row);
  return row == other || may.contains(kAll) || may.contains(other);
}

/// Every `#include "…"` of a text that the table forbids, as "FILE:LINE includes OTHER".
std::vector<std::string> broken_includes(const Table& table, const std::string& file,
                                         std::istream& text) {
  static const std::regex kInclude(R"re(\s*#\s*include\s*"([^"]+)".*)re");
  std::vector<std::string> broken;
  int number = 0;
  for (std::string line; std::getline(text, line);) {
    ++number;
    std::smatch include;
    // A name without a folder is not checked. It occurs only in a text that
    // sim/source/policy_source.cpp compiles.
    if (line.find("include") == line.npos || !std::regex_match(line, include, kInclude) ||
        include[1].str().find('/') == std::string::npos)
      continue;
    if (!allowed(table, file, include[1]))
      broken.push_back(file + ":" + std::to_string(number) + " includes " + include[1].str());
  }
  return broken;
}

TEST_CASE("No include breaks the table of docs/internals/architecture.md") {
  const fs::path root = KVLAB_SOURCE_DIR;
  std::ifstream page(root / "docs/internals/architecture.md");
  const Table table = read_table(page);
  REQUIRE(table.contains("policies"));
  const std::set<std::string> kinds = {".h", ".hpp", ".cpp", ".cuh", ".cu"};
  int files = 0;
  for (const auto& row : table) {
    if (row.first.find('/') != std::string::npos) continue;  // its parent's row covers it
    for (const auto& entry : fs::recursive_directory_iterator(root / row.first)) {
      if (!kinds.contains(entry.path().extension().string())) continue;
      std::ifstream text(entry.path());
      for (const auto& broken :
           broken_includes(table, fs::relative(entry.path(), root).string(), text))
        FAIL_CHECK(broken);
      ++files;
    }
  }
  CHECK(files > 300);
}

TEST_CASE("The check of includes reports forbidden includes") {
  std::istringstream page(
      "| folder | what lives there | may include |\n| --- | --- | --- |\n"
      "| `a/` | the base | nothing of ours |\n| `b/` | more | a |\n| `b/device/` | x | a, b |\n"
      "| `c/` | all | all |\n\n| folder | of another table |\n");
  const Table table = read_table(page);
  CHECK(table.size() == 4);
  CHECK(allowed(table, "a/x.cpp", "a/deep/y.hpp"));
  CHECK(allowed(table, "b/deep/x.cpp", "a/y.hpp"));
  CHECK(allowed(table, "b/device/x.cpp", "b/y.hpp"));
  CHECK(allowed(table, "c/x.cpp", "b/device/y.hpp"));
  CHECK_FALSE(allowed(table, "a/x.cpp", "b/y.hpp"));
  CHECK_FALSE(allowed(table, "b/x.cpp", "b/device/y.hpp"));
  CHECK_FALSE(allowed(table, "c/x.cpp", "elsewhere/y.hpp"));
  std::istringstream text("// #include \"b/no.hpp\"\n  # include \"b/y.hpp\"  // why\n");
  CHECK(broken_includes(table, "a/x.cpp", text) ==
        std::vector<std::string>{"a/x.cpp:2 includes b/y.hpp"});
  std::istringstream unknown("| folder | may include |\n| `a/` | b |\n");
  CHECK_THROWS_AS(read_table(unknown), std::runtime_error);
}

}  // namespace
}  // namespace kvlab
