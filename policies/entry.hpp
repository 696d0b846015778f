// A policy that the command line can name: a policy of the registry, or one from a header that is
// compiled at run time.
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
  std::string path;  ///< as the user typed it
  std::string text;  ///< the header's text, with old names replaced by the new ones (old_names.hpp)
  std::string xxh3;  ///< hash of the file's original text, 16 hex digits
  std::string type;  ///< qualified name of the struct: kvlab::Peak
  bool has_old_names = false;  ///< whether the file's original text differs from `text`
};

/// `text` as a C++ string literal, for #line directives.
inline std::string c_literal(const std::string& text) {
  std::string literal = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') literal += '\\';
    literal += c;
  }
  return literal + '"';
}

/// The queries, keys and values of a prompt's tokens in one layer, before RoPE. Each array has the
/// shape [token, head, dim].
struct SeenRows {
  std::uint32_t sequence, layer, first, tokens, query_heads, kv_heads, head_size;
  const float *q, *k, *v;
  std::span<const float> inv_freq;
  float rope_factor, softmax_scale;
};

/// One policy that the command line can name. A copy is shallow: the pointers of all copies refer
/// to the same data, which lives as long as the process.
struct PolicyEntry : PolicyOps {
  std::shared_ptr<const PolicySource> source = nullptr;  ///< null: compiled with kvlab
  /// Set if the hooks call functions outside kvlab (Python). The argument `params` of the hooks
  /// then contains a pointer to this object instead of parameters. Null if the hooks are functions
  /// of the policy itself.
  std::shared_ptr<const void> host = nullptr;
  /// Set by product_of(): the policy whose rank this policy multiplies by its last feature. Null if
  /// this is not a product.
  std::shared_ptr<const PolicyEntry> factored = nullptr;
  /// see_rows is called with each layer of a prompt before any token of the prompt is ranked. A
  /// replay calls see_trace instead, with the path of the trace that contains a sequence's rows. A
  /// policy that sets one of them requires a dense prefill. Null if the policy does not use these
  /// rows.
  std::function<void(const SeenRows&)> see_rows = nullptr;
  std::function<void(std::uint32_t sequence, const std::string& trace)> see_trace = nullptr;
};

/// Policies in addition to those of the registry: the policies of --policy-source, in command-line
/// order, with unique names. Also holds the source of the features that no decoder computes.
/// Policies of the registry use this source, too.
struct CompiledPolicies {
  CompiledPolicies() = default;
  CompiledPolicies(std::nullptr_t) {}
  CompiledPolicies(std::shared_ptr<const PolicyEntry> only) : entries{std::move(only)} {}

  /// Returns null if no policy has this name.
  std::shared_ptr<const PolicyEntry> find(std::string_view name) const {
    for (const auto& entry : entries)
      if (entry->info.name == name) return entry;
    return nullptr;
  }

  std::vector<std::shared_ptr<const PolicyEntry>> entries;
  /// null: features come only from the replayed trace
  std::shared_ptr<const FeatureSource> feature_source = nullptr;
};

}  // namespace kvlab
