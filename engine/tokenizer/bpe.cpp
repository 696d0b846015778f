#include "engine/tokenizer/bpe.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <queue>
#include <stdexcept>
#include <unordered_set>
#include <utility>

#include "engine/tokenizer/text.hpp"
#include "traces/base/json.hpp"

namespace kvlab::tokenizer {
namespace {

constexpr std::size_t kBlockBytes =
    16 * 1024;  // block size for a long piece, so that merging needs little memory

/// The start of the last character of `text`.
std::size_t last_char(std::string_view text) {
  std::size_t at = text.size() - 1;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
  return at;
}

/// The key of the two characters on either side of `at`.
std::uint64_t junction_key(std::string_view text, std::size_t at) {
  return std::uint64_t{code_point_at(text, last_char(text.substr(0, at)))} << 32 |
         code_point_at(text, at);
}

std::uint64_t pair_key(std::int32_t left, std::int32_t right) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 |
         static_cast<std::uint32_t>(right);
}

// A model without a type counts as BPE if it has merges, as in the earliest files.
void require_bpe(const Node& model) {
  if (model.find("type") == nullptr && model.find("merges") != nullptr) return;
  const std::string type = model.type();
  if (type != "BPE") {
    throw std::runtime_error(
        fmt::format("model.type {} is not supported; it must be \"BPE\"", json_quoted(type)));
  }
}

void refuse_unsupported_options(const Node& model) {
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!model.text_or(key, "").empty()) {
      throw std::runtime_error(fmt::format("model.{} is not supported; it must be null", key));
    }
  }
  const Json* dropout = model.find("dropout");
  if (dropout != nullptr && *dropout != 0.0) {
    throw std::runtime_error("model.dropout is not supported; it must be null");
  }
}

// A merge is written "a b" or ["a", "b"].
std::pair<std::string, std::string> merge_parts(const Json& merge, std::size_t index) {
  if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
    return {merge[0].get<std::string>(), merge[1].get<std::string>()};
  }
  if (merge.is_string()) {
    const auto text = merge.get<std::string>();
    const std::size_t space = text.find(' ');
    if (space != text.npos && text.find(' ', space + 1) == text.npos) {
      return {text.substr(0, space), text.substr(space + 1)};
    }
  }
  throw std::runtime_error(
      fmt::format("model.merges[{}] must be two tokens, as \"a b\" or [\"a\", \"b\"]", index));
}

}  // namespace

// A possible merge of the symbol at `left` with the next one.
struct Bpe::Candidate {
  std::int32_t rank, id;
  std::uint32_t left;
  // Order of the priority queue: the lowest rank first, then the leftmost.
  bool operator<(const Candidate& other) const {
    return std::pair(other.rank, other.left) < std::pair(rank, left);
  }
};

// The symbols of a piece as a linked list. A merge removes its right symbol.
class Bpe::Word {
 public:
  Word(const Bpe& bpe, std::vector<std::int32_t> ids) : bpe_(bpe), symbols_(ids.size()) {
    const auto size = static_cast<Position>(ids.size());
    for (Position i = 0; i < size; ++i)
      symbols_[i] = {ids[i], i == 0 ? kNone : i - 1, i + 1 == size ? kNone : i + 1};
  }

  void merge_all() {
    std::vector<Candidate> first;
    first.reserve(symbols_.size());
    for (Position i = 0; i + 1 < symbols_.size(); ++i) add_candidate(i, first);
    std::priority_queue<Candidate> queue({}, std::move(first));
    std::vector<Candidate> added;
    while (!queue.empty()) {
      const Candidate top = queue.top();
      queue.pop();
      if (!is_current(top)) continue;
      merge(top);
      added.clear();
      if (symbols_[top.left].previous != kNone) add_candidate(symbols_[top.left].previous, added);
      add_candidate(top.left, added);
      for (const Candidate& candidate : added) queue.push(candidate);
    }
  }

  void append_ids(std::vector<std::int32_t>& out) const {
    if (symbols_.empty()) return;
    for (Position i = 0; i != kNone; i = symbols_[i].next) out.push_back(symbols_[i].id);
  }

 private:
  using Position = std::uint32_t;  // a text has at most 2^30 bytes
  static constexpr Position kNone = std::numeric_limits<Position>::max();
  static constexpr std::int32_t kMerged = -1;
  struct Symbol {
    std::int32_t id;
    Position previous, next;
  };

  void add_candidate(Position left, std::vector<Candidate>& out) const {
    const Position right = symbols_[left].next;
    if (right == kNone) return;
    const Merge* found = bpe_.find_merge(symbols_[left].id, symbols_[right].id);
    if (found != nullptr) out.push_back({found->rank, found->id, left});
  }

  // Whether the candidate is still valid: one of its symbols may have changed since it was found.
  // Like the tokenizers library, this compares the resulting id and not the rank.
  bool is_current(const Candidate& candidate) const {
    const Symbol& left = symbols_[candidate.left];
    if (left.id == kMerged || left.next == kNone) return false;
    const Merge* found = bpe_.find_merge(left.id, symbols_[left.next].id);
    return found != nullptr && found->id == candidate.id;
  }

  void merge(const Candidate& candidate) {
    Symbol& left = symbols_[candidate.left];
    Symbol& right = symbols_[left.next];
    left.id = candidate.id;
    left.next = right.next;
    right.id = kMerged;
    if (right.next != kNone) symbols_[right.next].previous = candidate.left;
  }

  const Bpe& bpe_;
  std::vector<Symbol> symbols_;
};

Bpe::Bpe(const Node& model) {
  require_bpe(model);
  refuse_unsupported_options(model);
  fuse_unk_ = model.flag("fuse_unk", false);
  ignore_merges_ = model.flag("ignore_merges", false);
  read_vocabulary(model);
  read_merges(model);
  read_fallbacks(model);
}

void Bpe::read_vocabulary(const Node& model) {
  const Node vocab = model.child("vocab");
  std::unordered_set<std::int32_t> used;
  vocabulary_.reserve(vocab.json().size());
  for (const auto& [token, value] : vocab.json().items()) {
    const std::int32_t id = token_id(value, fmt::format("model.vocab[{}]", json_quoted(token)));
    if (!used.insert(id).second) {
      throw std::runtime_error(fmt::format("model.vocab: two tokens have id {}", id));
    }
    vocabulary_.emplace(token, id);
  }
  if (vocabulary_.empty()) throw std::runtime_error("model.vocab is empty");
}

void Bpe::read_merges(const Node& model) {
  const Json& merges = model.list("merges");
  merges_.reserve(merges.size());
  std::int32_t rank = 0;
  for (const Json& merge : merges) {
    const auto [left, right] = merge_parts(merge, static_cast<std::size_t>(rank));
    const auto known = [&](const std::string& token) {
      if (const auto id = id_of(token)) return *id;
      throw std::runtime_error(fmt::format("model.merges[{}]: token {} is not in model.vocab", rank,
                                           json_quoted(token)));
    };
    const std::uint64_t key = pair_key(known(left), known(right));
    merges_.insert_or_assign(key, Merge{rank, known(left + right)});
    if (!left.empty() && !right.empty()) junctions_.insert(junction_key(left + right, left.size()));
    ++rank;
  }
}

void Bpe::read_fallbacks(const Node& model) {
  if (const std::string unk = model.text_or("unk_token", ""); !unk.empty()) {
    unk_ = id_of(unk);
    if (!unk_) {
      throw std::runtime_error(
          fmt::format("model.unk_token {} is not in model.vocab", json_quoted(unk)));
    }
  }
  if (!model.flag("byte_fallback", false)) return;
  for (int byte = 0; byte < kBytes; ++byte) {
    byte_ids_.push_back(id_of(fallback_token(static_cast<std::uint8_t>(byte))));
  }
  byte_fallback_is_whole_ = std::all_of(byte_ids_.begin(), byte_ids_.end(),
                                        [](const auto& id) { return id.has_value(); });
  const std::unordered_set<std::optional<std::int32_t>> bytes(byte_ids_.begin(), byte_ids_.end());
  const auto is_byte = [&](std::uint64_t id) {
    return bytes.contains(static_cast<std::int32_t>(id));
  };
  bytes_are_isolated_ =
      byte_fallback_is_whole_ && std::ranges::none_of(merges_, [&](const auto& m) {
        return is_byte(m.first >> 32) || is_byte(m.first & 0xffffffffu);
      });
}

std::optional<std::int32_t> Bpe::id_of(std::string_view token) const {
  const auto it = vocabulary_.find(token);
  return it == vocabulary_.end() ? std::nullopt : std::optional(it->second);
}

const Bpe::Merge* Bpe::find_merge(std::int32_t left, std::int32_t right) const {
  const auto it = merges_.find(pair_key(left, right));
  return it == merges_.end() ? nullptr : &it->second;
}

// Whether junctions_ lists every merge that can join the character to a neighbour. This is certain
// for a character with an id. A character without an id may be fused with unknown neighbours, or it
// may be replaced by byte tokens, which a merge may join to the byte tokens of a neighbour.
bool Bpe::is_isolated(std::string_view character) const {
  return id_of(character).has_value() || bytes_are_isolated_;
}

// A block ends between two characters that no merge joins.
std::size_t Bpe::end_of_block(std::string_view piece) const {
  std::size_t before = 0;
  for (std::size_t at = char_bytes(piece[0]); at < piece.size();
       before = at, at += char_bytes(piece[at])) {
    if (at < kBlockBytes || junctions_.contains(junction_key(piece, at))) continue;
    const std::string_view left = piece.substr(before, at - before),
                           right = piece.substr(at, char_bytes(piece[at]));
    if (is_isolated(left) && is_isolated(right)) return at;
  }
  return piece.size();
}

void Bpe::encode(std::string_view piece, std::vector<std::int32_t>& ids,
                 std::size_t max_ids) const {
  if (ignore_merges_) {
    if (const auto whole = id_of(piece)) {
      ids.push_back(*whole);
      return;
    }
  }
  for (const std::size_t begin = ids.size(); !piece.empty() && ids.size() - begin < max_ids;) {
    const std::size_t end = end_of_block(piece);
    Word word(*this, characters(piece.substr(0, end)));
    word.merge_all();
    word.append_ids(ids);
    piece.remove_prefix(end);
  }
}

// Appends the ids of all bytes of the character. If a byte has no id, appends nothing and returns
// false.
bool Bpe::append_bytes(std::string_view character, std::vector<std::int32_t>& ids) const {
  if (byte_ids_.empty()) return false;
  const auto id_of_byte = [&](char byte) { return byte_ids_[static_cast<std::uint8_t>(byte)]; };
  if (!std::all_of(character.begin(), character.end(), id_of_byte)) return false;
  for (const char byte : character) ids.push_back(*id_of_byte(byte));
  return true;
}

// The ids of single characters, before any merge.
std::vector<std::int32_t> Bpe::characters(std::string_view piece) const {
  std::vector<std::int32_t> ids;
  ids.reserve(piece.size());
  bool unk_waits = false;  // whether there is a run of unknown characters that may still be fused
  for (std::size_t at = 0, bytes; at < piece.size(); at += bytes) {
    bytes = char_bytes(piece[at]);
    const std::string_view character = piece.substr(at, bytes);
    if (const auto id = id_of(character)) {
      if (std::exchange(unk_waits, false)) ids.push_back(*unk_);
      ids.push_back(*id);
    } else if (!append_bytes(character, ids) && unk_) {
      // As in the tokenizers library, byte tokens do not end a run of unknown characters.
      if (unk_waits && !fuse_unk_) ids.push_back(*unk_);
      unk_waits = true;
    }
  }
  if (unk_waits) ids.push_back(*unk_);
  return ids;
}

}  // namespace kvlab::tokenizer
