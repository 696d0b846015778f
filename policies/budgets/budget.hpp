// A budget as requested, and the budget of each head that follows from it.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "policies/policy.hpp"

namespace kvlab {

inline constexpr std::uint32_t kNoBudget = 0xffff'ffffu;  ///< never evicts

/// Budgets in tokens, [layer][kv_head]. All heads of an exempt layer have kNoBudget.
using HeadBudgets = std::vector<std::vector<std::uint32_t>>;

/// Number of layers, KV heads per layer, and channels per head; 0: unknown.
struct CacheShape {
  std::uint32_t layers = 0, kv_heads = 0, head_size = 0;
  /// Sliding window by layer, in tokens; 0: none. Empty: no layer has a window.
  std::vector<std::uint32_t> windows = {};
  /// The layers' numbers in the model; empty: 0, 1, 2, …
  std::vector<std::uint32_t> numbers = {};

  /// The shape of the layers without a sliding window. Policies act only on these.
  CacheShape policy_layers() const;
};

/// Bytes of a token's key and value in 16 bit. Budgets in tokens count tokens of this size.
constexpr std::uint64_t kv_bytes_per_token(std::uint32_t head_size) {
  return std::uint64_t{4} * head_size;
}

/// Thrown if the budget is too small for a policy, its protected tokens or its tier plan.
class BudgetTooSmall : public std::invalid_argument {
 public:
  /// `remedy` is a setting that would fit, such as "snapkv:recent=14 would fit".
  BudgetTooSmall(const std::string& what, std::string remedy)
      : std::invalid_argument(what), remedy_(std::move(remedy)) {}
  const std::string& remedy() const { return remedy_; }

 private:
  std::string remedy_;
};

/// A budget in one of its forms: `128`, `20%`, `64KiB`, `20%bytes`, `all`, `ratio(0.5)`,
/// `pyramid(20%)`, `ada(20%)`, or budgets by head from a file.
struct Budget {
  /// How the mean budget `extent` is distributed. even: every head gets it. pyramid: over layers,
  /// as in PyramidKV. ada: over the heads of a layer by their tokens' ranks after the prompt, as in
  /// Ada-KV.
  enum class Split { even, pyramid, ada };

  Extent extent = {};       ///< budget of each head; if heads differ, the rounded mean
  std::uint64_t bytes = 0;  ///< bytes of each head, instead of `extent`; 0: not given
  /// Whether the budget is in bytes. It is then `bytes`, or if that is 0, the share `extent` of the
  /// bytes that all tokens take in 16 bit.
  bool in_bytes = false;
  bool all = false;
  /// Whether `extent` is the share of the prompt that is evicted, as in kvpress.
  bool is_prompt_share = false;
  Split split = Split::even;
  /// From a file. If a layer has only one number, all its heads have this budget.
  HeadBudgets heads = {};
  std::string file = {};  ///< path of that file, as the user typed it

  std::string text() const;
  /// The budget in 16-bit tokens; if heads differ, their mean. A share is a share of `length`,
  /// rounded down, but at least 1. For `all` the result is `length`. Throws std::invalid_argument
  /// if `bytes` is less than one token of `token_bytes` bytes (0: of a 16-bit token), or if the
  /// head size is needed and unknown.
  std::uint32_t resolve(std::uint32_t length, std::uint32_t head_size,
                        std::uint64_t token_bytes = 0) const;
  /// Converts `ratio(r)`, for a prompt of `prompt` tokens, to a number of tokens: the number that
  /// kvpress keeps, plus the next token. Any other budget is returned unchanged.
  Budget at_prompt(std::uint32_t prompt) const;
  /// For a budget in bytes: the bytes of one head in a sequence of `length` tokens.
  std::uint64_t bytes_of(std::uint32_t length, std::uint32_t head_size) const;
  /// Converts a share, or bytes, to a fixed budget for `length` tokens. The `extent` of the result
  /// is in tokens.
  Budget at_length(std::uint32_t length, std::uint32_t head_size,
                   std::uint64_t token_bytes = 0) const;
  /// Whether all heads have the budget that resolve() returns.
  bool is_even() const { return split == Split::even && heads.empty(); }
  /// Whether a file exempts a layer. An exempt layer keeps all tokens in 16 bit.
  bool exempts() const;
};

/// The mean over the layers that are not exempt, rounded to a whole number. Each layer has the same
/// weight.
std::uint32_t mean_budget(const HeadBudgets& heads);

/// Makes a budget from the contents of the file `file`. Throws std::invalid_argument if there are
/// no layers, layers have different numbers of heads, a number is 0, or all layers are exempt. The
/// caller puts the file's name before the error's text.
Budget budget_of_heads(HeadBudgets heads, std::string file = {});

/// Throws std::invalid_argument if the number of layers or of KV heads differs from the model's.
void check_shape(const HeadBudgets& heads, const CacheShape& model, const std::string& what);

/// The budgets of layers in PyramidKV (Cai et al. 2024, section 4.2, with the authors' beta = 20):
/// they fall in equal steps from 2 · mean − last in the first layer to `last` in the last layer,
/// where `last` is a twentieth of the mean, but at least `min_budget`. If the first layer would get
/// more than `length`, it gets `length`, and `last` becomes 2 · mean − length. The sum is exactly
/// `layers` times the mean.
std::vector<std::uint32_t> pyramid_budgets(std::uint32_t mean, std::uint32_t length,
                                           std::uint32_t min_budget, std::uint32_t layers);

}  // namespace kvlab
