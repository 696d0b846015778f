#include "engine/tokenizer/pretokenizer.hpp"

#include <fmt/format.h>

#include <stdexcept>
#include <utility>

#include "engine/tokenizer/bytes.hpp"
#include "engine/tokenizer/text.hpp"
#include "traces/base/text.hpp"

namespace kvlab::tokenizer {
namespace {

constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

Pattern read_pattern(const Node& split) {
  const std::string behavior = split.text("behavior");
  if (behavior != "Isolated") {
    throw std::runtime_error(fmt::format("{}: Split behavior {} is not supported; Isolated is",
                                         split.where(), json_quoted(behavior)));
  }
  const Node pattern = split.child("pattern");
  if (pattern.find("Regex") == nullptr) return Pattern::literal(string_pattern(split));
  try {
    return Pattern::regex(pattern.text("Regex"));
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(fmt::format("{}: {}", pattern.path("Regex"), error.what()));
  }
}

Pattern digits_pattern(const Node& node) {
  return Pattern::regex(node.flag("individual_digits", false) ? "\\p{N}" : "\\p{N}+");
}

PrependScheme read_scheme(const Node& node) {
  // Files older than prepend_scheme say add_prefix_space.
  const bool prefix = node.flag("add_prefix_space", true);
  const std::string scheme = node.text_or("prepend_scheme", prefix ? "always" : "never");
  if (scheme == "always") return PrependScheme::kAlways;
  if (scheme == "first") return PrependScheme::kFirst;
  if (scheme == "never") return PrependScheme::kNever;
  throw std::runtime_error(fmt::format("{} {} must be always, first or never",
                                       node.path("prepend_scheme"), json_quoted(scheme)));
}

void append_cut(const Pattern& pattern, std::string_view piece, const MatchTime& time,
                std::vector<std::string>& out) {
  for (const ByteRange range : pattern.isolate(piece, time)) {
    out.emplace_back(piece.substr(range.begin, range.end - range.begin));
  }
}

// Every mark begins a piece.
void append_cut_before(std::string_view mark, std::string_view piece,
                       std::vector<std::string>& out) {
  for (std::size_t begin = 0, end; begin < piece.size(); begin = end) {
    const std::size_t from = begin + (piece.substr(begin).starts_with(mark) ? mark.size() : 0);
    end = std::min(piece.find(mark, from), piece.size());
    out.emplace_back(piece.substr(begin, end - begin));
  }
}

}  // namespace

MetaspaceMark MetaspaceMark::read(const Node& node) {
  std::string replacement = node.text("replacement");
  if (replacement.empty() || char_bytes(replacement.front()) != replacement.size()) {
    throw std::runtime_error(fmt::format("{} must be one character", node.path("replacement")));
  }
  return {std::move(replacement), read_scheme(node)};
}

PreTokenizer PreTokenizer::from_file(const Node& file) {
  PreTokenizer result;
  for (const Node& node : flatten_sequence(file, "pre_tokenizer", "pretokenizers")) {
    if (result.is_byte_level()) {
      throw std::runtime_error(
          fmt::format("{}: {} after ByteLevel is not supported; ByteLevel "
                      "must come last",
                      node.where(), json_quoted(node.type())));
    }
    result.steps_.push_back(read_step(node));
  }
  return result;
}

PreTokenizer::Step PreTokenizer::read_step(const Node& node) {
  const std::string type = node.type();
  if (type == "Split") return Split{read_pattern(node)};
  if (type == "Digits") return Split{digits_pattern(node)};
  if (type == "Metaspace") return Metaspace{MetaspaceMark::read(node), node.flag("split", true)};
  if (type == "ByteLevel") {
    ByteLevel step{node.flag("add_prefix_space", true), std::nullopt};
    if (node.flag("use_regex", true)) step.pattern = Pattern::regex(kGpt2Pattern);
    return step;
  }
  throw std::runtime_error(
      fmt::format("{}: pre-tokenizer {} is not supported; ByteLevel, Split, "
                  "Digits, Metaspace and Sequence are",
                  node.where(), json_quoted(type)));
}

bool PreTokenizer::is_byte_level() const {
  return !steps_.empty() && std::holds_alternative<ByteLevel>(steps_.back());
}

std::vector<std::string> PreTokenizer::apply(std::string text, bool at_start,
                                             const MatchTime& time) const {
  if (text.empty()) return {};
  Pieces pieces;
  pieces.push_back(std::move(text));
  for (const Step& step : steps_) {
    pieces = std::visit(
        [&](const auto& known) { return run(known, std::move(pieces), at_start, time); }, step);
  }
  return pieces;
}

PreTokenizer::Pieces PreTokenizer::run(const Split& step, const Pieces& pieces, bool,
                                       const MatchTime& time) {
  Pieces out;
  for (const std::string& piece : pieces) append_cut(step.pattern, piece, time, out);
  return out;
}

PreTokenizer::Pieces PreTokenizer::run(const ByteLevel& step, Pieces pieces, bool,
                                       const MatchTime& time) {
  Pieces out;
  for (std::string& piece : pieces) {
    if (step.add_prefix_space && !piece.starts_with(' ')) piece.insert(piece.begin(), ' ');
    if (step.pattern) {
      append_cut(*step.pattern, piece, time, out);
    } else {
      out.push_back(std::move(piece));
    }
  }
  for (std::string& piece : out) piece = bytes_to_chars(piece);
  return out;
}

PreTokenizer::Pieces PreTokenizer::run(const Metaspace& step, const Pieces& pieces, bool at_start,
                                       const MatchTime&) {
  const std::string& mark = step.mark.replacement;
  Pieces out;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    std::string piece = replace_all(pieces[i], " ", mark);
    const bool wanted = step.mark.scheme == PrependScheme::kAlways ||
                        (step.mark.scheme == PrependScheme::kFirst && at_start && i == 0);
    if (wanted && !piece.starts_with(mark)) piece.insert(0, mark);
    if (step.split) {
      append_cut_before(mark, piece, out);
    } else {
      out.push_back(std::move(piece));
    }
  }
  return out;
}

}  // namespace kvlab::tokenizer
