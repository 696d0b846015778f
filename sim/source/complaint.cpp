#include "sim/source/complaint.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string_view>

#include "traces/base/text.hpp"

namespace kvlab {
namespace {

/// Whether a line of the log is about our headers.
bool is_ours(std::string_view line) {
  constexpr std::string_view kIncluded = "In file included from ";
  if (line.starts_with(kIncluded)) line.remove_prefix(kIncluded.size());
  return line.starts_with("policies/");
}

/// The sentence of a static_assert of ours, without what stands around it; empty if it is none.
std::string_view check_in(std::string_view line) {
  if (!line.starts_with("policies/") || line.find("error: static") == std::string_view::npos)
    return {};
  const std::size_t at = line.rfind("policy: ");
  if (at == std::string_view::npos) return {};
  line.remove_prefix(at);
  return line.substr(0, line.find('"'));
}

/// What the linker did not find, each name once: "exp, std::log".
std::string missing_in(std::string_view log) {
  constexpr std::string_view kMissing = "undefined reference to `";
  std::set<std::string_view> names;
  for (std::size_t at = 0; (at = log.find(kMissing, at)) != std::string_view::npos;) {
    at += kMissing.size();
    names.insert(log.substr(at, log.find('\'', at) - at));
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace

std::string complaint(std::string log, const std::filesystem::path& folder,
                      const PolicySource& source, unsigned line) {
  const std::string prefix = folder.string() + "/";
  std::string plain;
  for (std::size_t at = 0, found = 0; at < log.size(); at = found + prefix.size()) {
    found = std::min(log.find(prefix, at), log.size());
    plain.append(log, at, found - at);
  }
  if (const std::string missing = missing_in(plain); !missing.empty())
    return fmt::format(
        "\n{}:{}: error: calls {}; a policy has no mathematical library, only integers and + - * / "
        "on doubles, which give the same bits on every machine and device",
        source.path, line, missing);
  std::string own, checks;
  bool ours = false;  // what follows a fault of the text is about our headers, not about the text
  for (const std::string& text : split_list(plain, '\n')) {
    ours = ours || is_ours(text);
    if (const std::string_view check = check_in(text); !check.empty())
      checks += fmt::format("\n{}:{}: error: {}", source.path, line, check);
    else if (!ours && !text.empty() && text.find("from entry.cpp") == std::string::npos &&
             !text.ends_with("[-Wunused-command-line-argument]"))  // clang's word on GCC's options
      own += "\n" + text;
  }
  if (!own.empty()) return own;
  return checks.empty() ? "\n" + plain : checks;
}

}  // namespace kvlab
