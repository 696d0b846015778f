// The setting `centre`: how a cache centres its keys, and with which constants.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "policies/tiers/key_centre.hpp"

namespace kvlab {

/// The centres of a model's KV heads, from a centre file.
struct CentreConstants {
  std::uint32_t kv_heads = 0, head_size = 0;
  /// By the model's layer number: [kv_head, dim], for keys after RoPE.
  std::map<std::uint32_t, std::vector<float>> layers = {};
  std::string xxh3 = {};  ///< hash of the file's bytes, 16 hex digits; empty: not from a file

  /// The centre of a KV head. Throws std::logic_error if there is none.
  std::span<const float> centre(std::uint32_t layer, std::uint32_t kv_head) const;
};

/// The setting `centre`: `none`, `prompt` or `@FILE`.
struct CentreSetting {
  // Implicit, so that a setting without a file can be written as its kind.
  CentreSetting(KeyCentre source = KeyCentre::none) : kind(source) {}  // NOLINT

  KeyCentre kind;
  std::string file = {};  ///< path of the centre file; empty for the other kinds
  /// The contents of `file`. Null until load_centre() has read them.
  std::shared_ptr<const CentreConstants> constants = nullptr;

  /// `none`, `prompt` or `@FILE`.
  std::string text() const;
  /// The same setting as text for a JSON file in `folder`: the path of the centre file is relative
  /// to that folder, so that both files can be moved together.
  std::string text_in(const std::filesystem::path& folder) const;

  bool operator==(KeyCentre other) const { return kind == other; }
};

/// Parses `none`, `prompt` or `@FILE`, but does not read the file. Throws std::invalid_argument for
/// any other text, and for a path that a policy's text cannot contain.
CentreSetting parse_key_centre(std::string_view text);
/// Parses what text_in() returns. Also throws if the path is absolute.
CentreSetting parse_key_centre_in(const std::filesystem::path& folder, std::string_view text);

/// Throws std::invalid_argument for a model with soft caps or sink logits, because its softmax does
/// not cancel a constant that is added to all scores of a query.
void check_centre(bool has_softcap, bool has_sink_logits);

}  // namespace kvlab
