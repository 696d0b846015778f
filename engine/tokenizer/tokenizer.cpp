#include "engine/tokenizer/tokenizer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "engine/tokenizer/added.hpp"
#include "engine/tokenizer/bpe.hpp"
#include "engine/tokenizer/detokenizer.hpp"
#include "engine/tokenizer/pretokenizer.hpp"
#include "engine/tokenizer/text.hpp"
#include "traces/base/cancel.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using tokenizer::AddedToken;
using tokenizer::AddedTokenMatcher;
using tokenizer::Bpe;
using tokenizer::Detokenizer;
using tokenizer::Normalizer;
using tokenizer::PostProcessor;
using tokenizer::PreTokenizer;
using tokenizer::Segment;

// Refuses a tokenizer that would lose characters without an error. Byte-level vocabularies are
// accepted even if they lack the tokens of some bytes (such as SmolLM2's), because the tokenizers
// library also drops such bytes.
void require_no_loss(const Bpe& model, const PreTokenizer& pre_tokenizer) {
  if (!model.loses_unknown_characters() || pre_tokenizer.is_byte_level()) return;
  throw std::runtime_error(
      "model: a character outside the vocabulary would be lost; the tokenizer needs byte_fallback "
      "with all of <0x00> to <0xFF>, an unk_token, or a ByteLevel pre_tokenizer");
}

// Encodes pieces. If a piece occurs again, its ids are copied from its first occurrence.
class PieceEncoder {
 public:
  PieceEncoder(const Bpe& model, std::vector<std::int32_t>& ids, std::size_t max_ids)
      : model_(model), ids_(ids), max_(max_ids) {}

  // Returns false when there are enough ids.
  bool append(std::string_view piece) {
    throw_if_cancelled();
    if (const auto it = seen_.find(piece); it != seen_.end()) {
      const Range range = it->second;
      for (std::size_t i = range.begin; i < range.end; ++i) ids_.push_back(ids_[i]);
      return ids_.size() < max_;
    }
    const std::size_t begin = ids_.size();
    model_.encode(piece, ids_, max_ - std::min(max_, begin));
    if (piece.size() <= kMaxPieceBytes && seen_.size() < kMaxPieces) {
      seen_.emplace(piece, Range{begin, ids_.size()});
    }
    return ids_.size() < max_;
  }

  bool append(std::int32_t id) {
    ids_.push_back(id);
    return ids_.size() < max_;
  }

 private:
  static constexpr std::size_t kMaxPieceBytes = 128, kMaxPieces = 1 << 16;
  struct Range {
    std::size_t begin, end;  // range in ids_
  };

  const Bpe& model_;
  std::vector<std::int32_t>& ids_;
  std::size_t max_;
  tokenizer::StringMap<Range> seen_;
};

constexpr std::size_t kMaxQuoted = 60;

std::string quote(std::string_view text) {
  return json_quoted(text.size() <= kMaxQuoted ? std::string(text)
                                               : std::string(text.substr(0, kMaxQuoted)) + "...");
}

/// The position of `text` in `whole`, where it must occur exactly once.
std::size_t find_once(std::string_view whole, std::string_view text) {
  const std::size_t found = text.empty() ? whole.npos : whole.find(text);
  if (found == whole.npos)
    throw std::invalid_argument(
        fmt::format("{} is not in the prompt; give a text that appears in it once", quote(text)));
  if (whole.find(text, found + 1) != whole.npos)
    throw std::invalid_argument(
        fmt::format("{} appears in the prompt more than once; give a text that appears in it once",
                    quote(text)));
  return found;
}

}  // namespace

class Tokenizer::Impl {
 public:
  explicit Impl(const tokenizer::Node& file)
      : model_(file.child("model")),
        normalizer_(Normalizer::from_file(file)),
        pre_tokenizer_(PreTokenizer::from_file(file)),
        post_processor_(PostProcessor::from_file(file)),
        detokenizer_(Detokenizer::from_file(file)) {
    require_no_loss(model_, pre_tokenizer_);
    for (const auto& [token, id] : model_.vocabulary()) add_id(id, token);
    read_added(tokenizer::read_added_tokens(file));
    require_known(post_processor_.before);
    require_known(post_processor_.after);
  }

  std::vector<std::int32_t> encode(std::string_view bytes, bool add_special,
                                   std::size_t max_ids) const {
    const std::string mended = tokenizer::valid_bytes(bytes) == bytes.size()
                                   ? std::string()
                                   : tokenizer::replace_invalid_utf8(bytes);
    const std::string_view text = mended.empty() ? bytes : mended;
    std::vector<std::int32_t> ids;
    if (add_special) ids = post_processor_.before;
    PieceEncoder pieces(model_, ids, max_ids);
    const tokenizer::MatchTime time(text.size());
    std::string normalized;
    const bool whole = text_tokens_.split(text, [&](const Segment& segment) {
      const std::string_view part = text.substr(segment.begin, segment.end - segment.begin);
      return segment.id ? pieces.append(*segment.id)
                        : encode_normalized(normalizer_.apply(part, normalized), segment.begin == 0,
                                            time, pieces);
    });
    const auto& after = post_processor_.after;
    if (add_special && whole) ids.insert(ids.end(), after.begin(), after.end());
    if (ids.size() > max_ids) ids.resize(max_ids);
    return ids;
  }

  std::string decode(std::span<const std::int32_t> ids, bool skip_special,
                     std::size_t model_ids) const {
    std::vector<std::string> tokens;
    tokens.reserve(ids.size());
    for (const std::int32_t id : ids) {
      const auto it = token_of_.find(id);
      if (it == token_of_.end()) {
        if (id >= 0 && static_cast<std::size_t>(id) < model_ids) continue;
        throw std::out_of_range(fmt::format(
            "token id {} is not in the vocabulary, whose largest id is {}", id, max_id_));
      }
      if (skip_special && special_.contains(id)) continue;
      tokens.push_back(it->second);
    }
    return detokenizer_.apply(std::move(tokens));
  }

  std::optional<std::int32_t> id_of(std::string_view token) const {
    const auto it = added_id_of_.find(token);
    return it != added_id_of_.end() ? std::optional(it->second) : model_.id_of(token);
  }

  const std::vector<std::int32_t>& before() const { return post_processor_.before; }
  std::size_t vocab_size() const { return static_cast<std::size_t>(max_id_) + 1; }
  std::size_t known_ids() const { return token_of_.size(); }

 private:
  void add_id(std::int32_t id, const std::string& token) {
    const auto [it, is_new] = token_of_.emplace(id, token);
    if (!is_new && it->second != token) {
      throw std::runtime_error(fmt::format("added_tokens: id {} of {} is already that of {}", id,
                                           json_quoted(token), json_quoted(it->second)));
    }
    max_id_ = std::max(max_id_, id);
  }

  void read_added(const std::vector<AddedToken>& tokens) {
    for (const AddedToken& token : tokens) {
      const auto model_id = model_.id_of(token.content);
      if (model_id && *model_id != token.id) {
        throw std::runtime_error(fmt::format("added_tokens: {} has id {}, but {} in model.vocab",
                                             json_quoted(token.content), token.id, *model_id));
      }
      add_id(token.id, token.content);
      token_of_[token.id] = token_text(token);
      added_id_of_.emplace(token.content, token.id);
      if (token.special) special_.insert(token.id);
    }
    // Special tokens are added first, because the first of several tokens with one spelling counts.
    for (const bool special : {true, false}) {
      for (const AddedToken& token : tokens) {
        if (token.special == special) index(token);
      }
    }
  }

  // How an added token is spelled for decoding. That spelling has to decode to the text that the
  // token matches in encoding. A byte-level decoder interprets each character as a byte, so the
  // text is converted to the characters that decode to it.
  std::string token_text(const AddedToken& token) const {
    std::string text = spelling(token);
    if (!pre_tokenizer_.is_byte_level()) return text;
    const auto bytes = tokenizer::chars_to_bytes(text);
    const bool is_text = !bytes || tokenizer::replace_invalid_utf8(*bytes) == *bytes;
    return is_text ? text : tokenizer::bytes_to_chars(text);
  }

  std::string spelling(const AddedToken& token) const {
    std::string normalized;
    return std::string(token.normalized ? normalizer_.apply(token.content, normalized)
                                        : std::string_view(token.content));
  }

  void index(const AddedToken& token) {
    (token.normalized ? normalized_tokens_ : text_tokens_).add(spelling(token), token);
  }

  void require_known(const std::vector<std::int32_t>& ids) const {
    for (const std::int32_t id : ids) {
      if (!token_of_.contains(id)) {
        throw std::runtime_error(
            fmt::format("post_processor: token id {} is not in the vocabulary", id));
      }
    }
  }

  bool encode_normalized(std::string_view text, bool at_start, const tokenizer::MatchTime& time,
                         PieceEncoder& pieces) const {
    return normalized_tokens_.split(text, [&](const Segment& segment) {
      if (segment.id) return pieces.append(*segment.id);
      const bool first = at_start && segment.begin == 0;
      return pre_tokenizer_.apply(text.substr(segment.begin, segment.end - segment.begin), first,
                                  time,
                                  [&](std::string_view piece) { return pieces.append(piece); });
    });
  }

  Bpe model_;
  Normalizer normalizer_;
  PreTokenizer pre_tokenizer_;
  PostProcessor post_processor_;
  Detokenizer detokenizer_;
  AddedTokenMatcher text_tokens_, normalized_tokens_;
  std::unordered_map<std::int32_t, std::string> token_of_;
  tokenizer::StringMap<std::int32_t> added_id_of_;
  std::unordered_set<std::int32_t> special_;
  std::int32_t max_id_ = 0;
};

Tokenizer Tokenizer::load(const std::filesystem::path& tokenizer_json) {
  const tokenizer::Json json = tokenizer::read_json(tokenizer_json);
  Tokenizer result;
  result.place_ = tokenizer_json.string();
  try {
    result.impl_ = std::make_shared<const Impl>(tokenizer::Node::root(json));
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(fmt::format("{}: {}", tokenizer_json.string(), error.what()));
  }
  return result;
}

Tokenizer Tokenizer::load(const std::filesystem::path& tokenizer_json, std::size_t model_ids) {
  Tokenizer result = load(tokenizer_json);
  result.model_ids_ = model_ids;
  if (const std::size_t known = result.impl_->known_ids(); known < model_ids - model_ids / 2)
    throw std::runtime_error(fmt::format(
        "{}: has {} tokens, but the model has {} ids; give the tokenizer.json of this model",
        result.place_, known, model_ids));
  return result;
}

std::vector<std::int32_t> Tokenizer::encode(std::string_view text, bool add_special,
                                            std::size_t max_ids) const {
  std::vector<std::int32_t> ids;
  try {
    ids = impl_->encode(text, add_special, max_ids);
  } catch (const Cancelled&) {
    throw;
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(fmt::format("{}: {}", place_, error.what()));
  }
  if (model_ids_ == 0) return ids;
  for (const std::int32_t id : ids)
    if (static_cast<std::size_t>(id) >= model_ids_)
      throw std::runtime_error(
          fmt::format("{}: the text has the token id {}, but the model has only {} ids; give the "
                      "tokenizer.json of this model",
                      place_, id, model_ids_));
  return ids;
}

std::string Tokenizer::decode(std::span<const std::int32_t> ids, bool skip_special) const {
  return impl_->decode(ids, skip_special, model_ids_);
}

std::optional<std::int32_t> Tokenizer::id_of(std::string_view token) const {
  return impl_->id_of(token);
}

const std::vector<std::int32_t>& Tokenizer::before() const { return impl_->before(); }

std::size_t Tokenizer::vocab_size() const { return impl_->vocab_size(); }

TokenRange covering_tokens(const Tokenizer& tokenizer, std::span<const std::int32_t> ids,
                           std::string_view text) {
  const bool special = !ids.empty() && tokenizer.decode(ids.first(1)).empty();
  const std::span<const std::int32_t> rest = ids.subspan(special ? 1 : 0);
  const auto spelled = [&](std::size_t count) {
    return tokenizer.decode(rest.first(count), false).size();
  };
  const std::size_t begin = find_once(tokenizer.decode(rest, false), text);
  /// Finds by bisection the smallest number of tokens whose text has at least `bytes` bytes.
  const auto fewest = [&](std::size_t bytes) {
    std::size_t low = 0, high = rest.size();
    while (low < high) {
      const std::size_t middle = (low + high) / 2;
      if (spelled(middle) < bytes)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  };
  const std::size_t first = fewest(begin + 1) - 1, end = fewest(begin + text.size());
  return {static_cast<std::uint32_t>(first + (special ? 1 : 0)),
          static_cast<std::uint32_t>(end - first)};
}

}  // namespace kvlab
