#include "sim/source/policy_struct.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <optional>
#include <span>
#include <stdexcept>
#include <vector>

namespace kvlab {
namespace {

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

/// Where the comment, literal or directive that begins at `at` ends; `at` itself if none does.
std::size_t end_of_opaque(std::string_view text, std::size_t at) {
  const auto after = [&](std::string_view mark) {
    const std::size_t found = text.find(mark, at + 2);
    return found == std::string_view::npos ? text.size() : found + mark.size();
  };
  if (text.substr(at, 2) == "/*") return after("*/");
  if (text.substr(at, 2) == "//" || text[at] == '#')
    return std::min(text.find('\n', at), text.size());
  const bool separator = text[at] == '\'' && at > 0 && is_word(text[at - 1]);  // 1'000
  if ((text[at] != '"' && text[at] != '\'') || separator) return at;
  for (std::size_t i = at + 1; i < text.size(); ++i) {
    if (text[i] == '\\')
      ++i;
    else if (text[i] == text[at] || text[i] == '\n')
      return i + 1;
  }
  return text.size();
}

/// `text` with blanks for comments, literals and directives: every other character keeps its place.
std::string without_opaque(std::string_view text) {
  std::string plain(text);
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = end_of_opaque(text, at);
    for (std::size_t i = at; i < end; ++i)
      if (plain[i] != '\n') plain[i] = ' ';
    at = std::max(end, at + 1);
  }
  return plain;
}

/// What a brace opens.
struct Scope {
  enum class Kind { name_space, structure, other } kind = Kind::other;
  std::string name;
  std::size_t begin = 0;  ///< of its keyword
};

/// A word or one other character of a text, blanks left out.
struct Piece {
  std::string_view text;
  std::size_t begin;
};

std::vector<Piece> pieces_of(std::string_view text) {
  std::vector<Piece> pieces;
  for (std::size_t at = 0; at < text.size();) {
    std::size_t end = at;
    while (end < text.size() && is_word(text[end])) ++end;
    if (end == at) ++end;
    if (!std::isspace(static_cast<unsigned char>(text[at])))
      pieces.push_back({text.substr(at, end - at), at});
    at = end;
  }
  return pieces;
}

/// Whether what follows a struct's name may stand between it and its brace: final, bases.
bool ends_head(std::span<const Piece> rest) {
  if (!rest.empty() && rest[0].text == "final") rest = rest.subspan(1);
  const auto is_equals = [](const Piece& piece) { return piece.text == "="; };
  return rest.empty() || (rest[0].text == ":" && std::ranges::none_of(rest, is_equals));
}

/// The name behind `namespace`, all that is left; empty if it is none.
std::string_view namespace_name(std::string_view text, std::span<const Piece> rest) {
  if (rest.empty() || !is_word(rest[0].text[0])) return {};
  const std::size_t begin = rest.front().begin, end = rest.back().begin + rest.back().text.size();
  const std::string_view name = text.substr(begin, end - begin);
  return std::ranges::all_of(name, [](char c) { return is_word(c) || c == ':'; })
             ? name
             : std::string_view();
}

/// `plain` from `head`, up to the brace at `brace`, says what the brace opens.
Scope scope_of(const std::string& plain, std::size_t head, std::size_t brace) {
  const std::string_view text = std::string_view(plain).substr(head, brace - head);
  const std::vector<Piece> pieces = pieces_of(text);
  const std::span all(pieces);
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].text == "namespace")
      if (const auto name = namespace_name(text, all.subspan(i + 1)); !name.empty())
        return {Scope::Kind::name_space, std::string(name), head + all[i].begin};
    const bool opens = all[i].text == "struct" || all[i].text == "class";
    if (opens && i + 1 < all.size() && is_word(all[i + 1].text[0]) && ends_head(all.subspan(i + 2)))
      return {Scope::Kind::structure, std::string(all[i + 1].text), head + all[i].begin};
  }
  return {};
}

/// Walks the braces of a header and notes its structs.
class Walk {
 public:
  explicit Walk(std::string plain) : plain_(std::move(plain)) {
    for (std::size_t at = 0; at < plain_.size(); ++at) step(at);
  }

  std::vector<PolicyStruct> with_info;
  std::optional<PolicyStruct> last;

 private:
  void step(std::size_t at) {
    switch (plain_[at]) {
      case '{':
        open(scope_of(plain_, head_, at));
        break;
      case '}':
        if (!scopes_.empty()) scopes_.pop_back();
        break;
      case ';':
        break;
      default:
        if (is_info(at) && !scopes_.empty() && scopes_.back().kind == Scope::Kind::structure)
          with_info.push_back(named(scopes_.back()));
        return;
    }
    head_ = at + 1;
  }
  void open(Scope scope) {
    const bool in_namespace = scopes_.empty() || scopes_.back().kind == Scope::Kind::name_space;
    scopes_.push_back(std::move(scope));
    if (in_namespace && scopes_.back().kind == Scope::Kind::structure) last = named(scopes_.back());
  }
  bool is_info(std::size_t at) const {
    static constexpr std::string_view kDeclared = "PolicyInfo";
    if (plain_.compare(at, kDeclared.size(), kDeclared) != 0) return false;
    std::size_t next = at + kDeclared.size();
    while (next < plain_.size() && std::isspace(static_cast<unsigned char>(plain_[next]))) ++next;
    return next > at + kDeclared.size() && plain_.compare(next, 5, "kInfo") == 0 &&
           !is_word(plain_[std::min(next + 5, plain_.size() - 1)]);
  }
  PolicyStruct named(const Scope& scope) const {
    std::string name;
    for (const Scope& outer : scopes_) name += (name.empty() ? "" : "::") + outer.name;
    const auto begin = plain_.begin() + static_cast<std::ptrdiff_t>(scope.begin);
    return {name, 1 + static_cast<unsigned>(std::count(plain_.begin(), begin, '\n'))};
  }

  std::string plain_;
  std::vector<Scope> scopes_;
  std::size_t head_ = 0;  // after the last brace or semicolon
};

}  // namespace

PolicyStruct find_policy_struct(std::string_view text, std::string_view path) {
  const Walk walk(without_opaque(text));
  if (walk.with_info.size() > 1)
    throw std::invalid_argument(
        fmt::format("{}:{}: {} has a kInfo, and so has {}; a policy source holds one policy", path,
                    walk.with_info[1].line, walk.with_info[1].name, walk.with_info[0].name));
  if (!walk.with_info.empty()) return walk.with_info.front();
  if (walk.last) return *walk.last;
  throw std::invalid_argument(fmt::format(
      "{}: holds no struct; a policy is a struct with `static constexpr PolicyInfo kInfo{{...}}`, "
      "as docs/adding-a-policy.md shows",
      path));
}

}  // namespace kvlab
