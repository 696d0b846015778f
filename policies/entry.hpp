// A policy that a command line can name: one line of the registry, or a header that was compiled at
// run time.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "policies/ops/ops.hpp"

namespace kvlab {

class FeatureSource;  // policies/features/features.hpp

/// The header of a policy that was compiled at run time.
struct PolicySource {
  std::string path;  ///< as requested
  std::string text;
  std::string xxh3;  ///< of the text, 16 hex digits
  std::string type;  ///< qualified name of the struct: kvlab::Peak
};

/// `text` as a C++ literal: for #line.
inline std::string c_literal(const std::string& text) {
  std::string literal = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') literal += '\\';
    literal += c;
  }
  return literal + '"';
}

/// What a layer's tokens of a prompt bring, before RoPE: [token, head, dim] each.
struct SeenRows {
  std::uint32_t sequence, layer, first, tokens, query_heads, kv_heads, head_size;
  const float *q, *k, *v;
  std::span<const float> inv_freq;
  float rope_factor, softmax_scale;
};

/// One policy that a command line can name. Copies share all but the struct itself: what the table
/// points to lives as long as the process.
struct PolicyEntry : PolicyOps {
  std::shared_ptr<const PolicySource> source = nullptr;  ///< null: compiled with kvlab
  /// What hooks that are no text of ours call back: their `params` are a pointer to it. Null: they
  /// are a policy's own.
  std::shared_ptr<const void> host = nullptr;
  /// The policy whose rank this one multiplies by its last feature (policies/features/product.hpp);
  /// null: it is no product.
  std::shared_ptr<const PolicyEntry> factored = nullptr;
  /// Shown each layer of a prompt before a token of it is ranked; in a replay, instead, which trace
  /// holds the rows of a sequence. Null: it does not look. Prompts have to be dense.
  std::function<void(const SeenRows&)> see_rows = nullptr;
  std::function<void(std::uint32_t sequence, const std::string& trace)> see_trace = nullptr;
};

/// Policies beside the registry's: those of --policy-source, in its order. No two have one name.
/// And what brings them, and the registry's, the features that no decoder computes.
struct CompiledPolicies {
  CompiledPolicies() = default;
  CompiledPolicies(std::nullptr_t) {}
  CompiledPolicies(std::shared_ptr<const PolicyEntry> only) : entries{std::move(only)} {}

  /// Null where none has that name.
  std::shared_ptr<const PolicyEntry> find(std::string_view name) const {
    for (const auto& entry : entries)
      if (entry->info.name == name) return entry;
    return nullptr;
  }

  std::vector<std::shared_ptr<const PolicyEntry>> entries;
  std::shared_ptr<const FeatureSource> feature_source = nullptr;  ///< null: a replay's trace alone
};

}  // namespace kvlab
