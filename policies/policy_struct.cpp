#include "policies/policy_struct.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <optional>
#include <stdexcept>
#include <vector>

#include "policies/old_names.hpp"

namespace kvlab {
namespace {

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

/// If a comment, literal or directive begins at `at`, returns the offset of its end; otherwise
/// returns `at`.
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

/// `text` with comments, literals and directives replaced by blanks. Other characters keep their
/// offsets.
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

/// The kind of block that a brace opens.
struct Scope {
  enum class Kind { name_space, structure, other } kind = Kind::other;
  std::string name;
  std::size_t begin = 0;  ///< offset of its keyword
};

/// A word of a header and its offset.
struct Word {
  std::string_view text;
  std::size_t at = 0;
};

/// The words and punctuation marks of a range. Names that are joined by `::` are one word.
std::vector<Word> words_of(std::string_view plain, std::size_t begin, std::size_t end) {
  std::vector<Word> words;
  const auto joins = [&](std::size_t at) {
    return is_word(plain[at]) || (plain.substr(at, 2) == "::" && at + 2 < end) ||
           (at > begin && plain.substr(at - 1, 2) == "::");
  };
  for (std::size_t at = begin; at < end;) {
    std::size_t next = at;
    while (next < end && joins(next)) ++next;
    if (next == at) ++next;
    if (!std::isspace(static_cast<unsigned char>(plain[at])))
      words.push_back({plain.substr(at, next - at), at});
    at = next;
  }
  return words;
}

/// Determines what the brace at `brace` opens, from the text between `head` and the brace:
/// `namespace NAME`, or `struct NAME [final] [: bases]`, possibly after other text.
Scope scope_of(std::string_view plain, std::size_t head, std::size_t brace) {
  const std::vector<Word> words = words_of(plain, head, brace);
  const auto named = [&](Scope::Kind kind, std::size_t keyword) {
    return Scope{kind, std::string(words[keyword + 1].text), words[keyword].at};
  };
  if (words.size() >= 2 && words[words.size() - 2].text == "namespace")
    return named(Scope::Kind::name_space, words.size() - 2);
  for (std::size_t i = 0; i + 1 < words.size(); ++i) {
    if (words[i].text != "struct" && words[i].text != "class") continue;
    std::size_t next = i + 2;
    if (next < words.size() && words[next].text == "final") ++next;
    if (is_word(words[i + 1].text.front()) && (next == words.size() || words[next].text == ":"))
      return named(Scope::Kind::structure, i);
  }
  return {};
}

/// Traverses the braces of a header and records its structs.
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
          with_info.push_back(struct_of(scopes_.back()));
        return;
    }
    head_ = at + 1;
  }
  void open(Scope scope) {
    const bool in_namespace = scopes_.empty() || scopes_.back().kind == Scope::Kind::name_space;
    scopes_.push_back(std::move(scope));
    if (in_namespace && scopes_.back().kind == Scope::Kind::structure)
      last = struct_of(scopes_.back());
  }
  bool is_info(std::size_t at) const {
    constexpr std::string_view kType = "PolicyInfo", kName = "kInfo";
    const std::string_view plain = plain_;
    if (plain.substr(at, kType.size()) != kType) return false;
    const std::size_t name = plain.find_first_not_of(" \t\n\r", at + kType.size()),
                      after = name + kName.size();
    return name != std::string_view::npos && name > at + kType.size() &&
           plain.substr(name, kName.size()) == kName &&
           (after >= plain.size() || !is_word(plain[after]));
  }
  PolicyStruct struct_of(const Scope& scope) const {
    std::string name;
    for (const Scope& outer : scopes_) name += (name.empty() ? "" : "::") + outer.name;
    const auto begin = plain_.begin() + static_cast<std::ptrdiff_t>(scope.begin);
    return {name, 1 + static_cast<unsigned>(std::count(plain_.begin(), begin, '\n'))};
  }

  std::string plain_;
  std::vector<Scope> scopes_;
  std::size_t head_ = 0;  // offset after the last brace or semicolon
};

}  // namespace

PolicyStruct find_policy_struct(std::string_view text, std::string_view path) {
  const Walk walk(without_opaque(text));
  if (walk.with_info.size() > 1)
    throw std::invalid_argument(
        fmt::format("{}:{}: {} has a kInfo, and so does {}; a policy source should hold one policy",
                    path, walk.with_info[1].line, walk.with_info[1].name, walk.with_info[0].name));
  if (!walk.with_info.empty()) return walk.with_info.front();
  if (walk.last) return *walk.last;
  throw std::invalid_argument(fmt::format(
      "{}: holds no struct; a policy is a struct with `static constexpr PolicyInfo kInfo{{...}}`, "
      "as docs/guides/write-a-policy.md shows",
      path));
}

std::string current_header(std::string_view header) {
  std::string text;
  bool directive = false;
  for (std::size_t at = 0; at < header.size();) {
    const char c = header[at];
    std::size_t end = at + 1;
    if (c == '\n')
      directive = false;
    else if (c == '#')
      directive = true;
    else if ((c == '/' || c == '"' || c == '\'') && !directive)  // comments are kept, too
      end = std::max(end, end_of_opaque(header, at));
    const bool word = is_word(c);
    while (word && end < header.size() && is_word(header[end])) ++end;
    const std::string_view piece = header.substr(at, end - at);
    text += word ? current_name(kOldHeaderWords, piece) : piece;
    at = end;
  }
  return text;
}

}  // namespace kvlab
