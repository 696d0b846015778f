// Byte pair encoding: a vocabulary and ranked merges, which convert a piece of text to ids.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "engine/tokenizer/json.hpp"

namespace kvlab::tokenizer {

/// A hash that allows lookups of a string_view in a map of strings.
struct StringHash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const {
    return std::hash<std::string_view>{}(text);
  }
};
template <class Value>
using StringMap = std::unordered_map<std::string, Value, StringHash, std::equal_to<>>;

class Bpe {
 public:
  /// Reads the file's `model` object. Throws std::runtime_error if it is broken or is not BPE.
  explicit Bpe(const Node& model);

  /// Appends to `ids` the ids of one piece (valid UTF-8 from the pre-tokenizer). If there are more
  /// than `max_ids` ids, it may stop after the first `max_ids`. Takes O(n log n).
  void encode(std::string_view piece, std::vector<std::int32_t>& ids,
              std::size_t max_ids = std::numeric_limits<std::size_t>::max()) const;

  const StringMap<std::int32_t>& vocabulary() const { return vocabulary_; }
  std::optional<std::int32_t> id_of(std::string_view token) const;
  /// Whether characters that have no id are lost, because neither `unk` nor byte tokens replace
  /// them.
  bool loses_unknown_characters() const { return !unk_ && !byte_fallback_is_whole_; }

 private:
  struct Merge {
    std::int32_t rank, id;
  };
  using Merges = std::unordered_map<std::uint64_t, Merge>;  // by pair_key()
  struct Candidate;
  class Word;

  void read_vocabulary(const Node& model);
  void read_merges(const Node& model);
  void read_fallbacks(const Node& model);
  /// Returns the end of the first block of `piece`. A long piece may be split there without
  /// changing its ids.
  std::size_t end_of_block(std::string_view piece) const;
  bool is_isolated(std::string_view character) const;
  std::vector<std::int32_t> characters(std::string_view piece) const;
  bool append_bytes(std::string_view character, std::vector<std::int32_t>& ids) const;
  const Merge* find_merge(std::int32_t left, std::int32_t right) const;

  StringMap<std::int32_t> vocabulary_;
  Merges merges_;
  std::unordered_set<std::uint64_t> junctions_;  // pairs of characters that some merge joins
  std::optional<std::int32_t> unk_;
  std::vector<std::optional<std::int32_t>> byte_ids_;  // [byte]; empty without byte fallback
  bool byte_fallback_is_whole_ = false;
  bool bytes_are_isolated_ = false;  ///< no merge joins the tokens that byte fallback produces
  bool fuse_unk_ = false;
  bool ignore_merges_ = false;
};

}  // namespace kvlab::tokenizer
