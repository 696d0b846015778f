#include "engine/tokenizer/pretokenizer.hpp"

#include <fmt/format.h>

#include <stdexcept>
#include <utility>

#include "engine/tokenizer/text.hpp"
#include "traces/base/text.hpp"

namespace kvlab::tokenizer {
namespace {

constexpr std::size_t kMaxGrowth = 64;

constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

Pattern read_pattern(const Node& split) {
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
  // Files from before prepend_scheme existed have add_prefix_space instead.
  const bool prefix = node.flag("add_prefix_space", true);
  const std::string scheme = node.text_or("prepend_scheme", prefix ? "always" : "never");
  if (scheme == "always") return PrependScheme::kAlways;
  if (scheme == "first") return PrependScheme::kFirst;
  if (scheme == "never") return PrependScheme::kNever;
  throw std::runtime_error(fmt::format("{} {} must be always, first or never",
                                       node.path("prepend_scheme"), json_quoted(scheme)));
}

std::string_view part(std::string_view text, ByteRange range) {
  return text.substr(range.begin, range.end - range.begin);
}

// Splits before every mark.
bool cut_before(std::string_view mark, std::string_view piece, const PieceSink& sink) {
  for (std::size_t begin = 0, end; begin < piece.size(); begin = end) {
    const std::size_t from = begin + (piece.substr(begin).starts_with(mark) ? mark.size() : 0);
    end = std::min(piece.find(mark, from), piece.size());
    if (!sink(part(piece, {begin, end}))) return false;
  }
  return true;
}

}  // namespace

Normalizer Normalizer::from_file(const Node& file) {
  Normalizer normalizer;
  for (const Node& node : flatten_sequence(file, "normalizer", "normalizers")) {
    normalizer.steps_.push_back(read_step(node));
  }
  return normalizer;
}

Normalizer::Step Normalizer::read_step(const Node& node) {
  const std::string type = node.type();
  if (type == "NFC") return Nfc{};
  if (type == "Prepend") return Prepend{node.content("prepend")};
  if (type == "Replace") return Replace{string_pattern(node), node.content("content")};
  throw std::runtime_error(
      fmt::format("{}: normalizer {} is not supported; NFC, Prepend, Replace and Sequence are",
                  node.where(), json_quoted(type)));
}

std::string_view Normalizer::apply(std::string_view text, std::string& result) const {
  std::string_view done = text;
  for (const Step& step : steps_) {
    done = result = std::visit([&](const auto& known) { return run(known, done); }, step);
    if (result.size() / kMaxGrowth > text.size() + kMaxContentBytes) {
      throw std::runtime_error(fmt::format(
          "the tokenizer's normalizer makes the text more than {} times as long", kMaxGrowth));
    }
  }
  return done;
}

std::string Normalizer::run(const Nfc&, std::string_view text) { return nfc(text); }

std::string Normalizer::run(const Prepend& step, std::string_view text) {
  if (text.empty()) return {};
  return step.text + std::string(text);
}

std::string Normalizer::run(const Replace& step, std::string_view text) {
  return replace_all(text, step.from, step.to);
}

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
  if (type == "Split") return read_split(node);
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

PreTokenizer::Split PreTokenizer::read_split(const Node& node) {
  const std::string behavior = node.text("behavior");
  const bool invert = node.flag("invert", false);
  if (behavior == "Isolated") return {read_pattern(node)};
  if (behavior == "MergedWithPrevious")
    return {read_pattern(node), Behavior::kMergedWithPrevious, invert};
  if (behavior == "Removed" && invert) return {read_pattern(node), Behavior::kKept};
  throw std::runtime_error(fmt::format(
      "{}: Split behavior {}{} is not supported; Isolated, MergedWithPrevious and Removed with "
      "invert are",
      node.where(), json_quoted(behavior), invert ? " with invert" : ""));
}

bool PreTokenizer::is_byte_level() const {
  return !steps_.empty() && std::holds_alternative<ByteLevel>(steps_.back());
}

bool PreTokenizer::apply_from(std::size_t step, std::string_view piece, bool at_start,
                              const MatchTime& time, const PieceSink& sink) const {
  if (piece.empty()) return true;
  if (step == steps_.size()) return sink(piece);
  bool first = at_start;
  const PieceSink next = [&](std::string_view part) {
    return apply_from(step + 1, part, std::exchange(first, false), time, sink);
  };
  return std::visit([&](const auto& known) { return run(known, piece, at_start, time, next); },
                    steps_[step]);
}

bool PreTokenizer::run(const Split& step, std::string_view piece, bool, const MatchTime& time,
                       const PieceSink& sink) {
  if (step.behavior != Behavior::kMergedWithPrevious)
    return step.pattern.cut(piece, time, [&](ByteRange range, bool is_match) {
      return step.behavior == Behavior::kKept && !is_match ? true : sink(part(piece, range));
    });
  // A match is joined to the piece before it, unless that piece already ended with a match.
  ByteRange open{0, 0};
  bool ended = false;
  const bool more = step.pattern.cut(piece, time, [&](ByteRange range, bool is_match) {
    const bool ends = is_match != step.invert, joins = ends && !ended && open.end > 0;
    ended = ends;
    if (joins) range.begin = open.begin;
    const ByteRange before = std::exchange(open, range);
    return joins || before.end == 0 || sink(part(piece, before));
  });
  return more && sink(part(piece, open));
}

bool PreTokenizer::run(const ByteLevel& step, std::string_view piece, bool, const MatchTime& time,
                       const PieceSink& sink) {
  const std::string spaced =
      step.add_prefix_space && !piece.starts_with(' ') ? ' ' + std::string(piece) : std::string();
  const std::string_view text = spaced.empty() ? piece : spaced;
  if (!step.pattern) return sink(bytes_to_chars(text));
  return step.pattern->cut(
      text, time, [&](ByteRange range, bool) { return sink(bytes_to_chars(part(text, range))); });
}

bool PreTokenizer::run(const Metaspace& step, std::string_view piece, bool at_start,
                       const MatchTime&, const PieceSink& sink) {
  const std::string& mark = step.mark.replacement;
  const bool wanted = step.mark.scheme == PrependScheme::kAlways ||
                      (step.mark.scheme == PrependScheme::kFirst && at_start);
  std::string marked = replace_all(piece, " ", mark);
  if (wanted && !marked.starts_with(mark)) marked.insert(0, mark);
  return step.split ? cut_before(mark, marked, sink) : sink(marked);
}

}  // namespace kvlab::tokenizer
