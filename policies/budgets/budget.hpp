// A budget as requested, and what it comes to for each head of a model.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "policies/policy.hpp"

namespace kvlab {

inline constexpr std::uint32_t kNoBudget = 0xffff'ffffu;  ///< never evicts

/// Tokens [layer][kv_head]; kNoBudget in all of a layer that is exempt.
using HeadBudgets = std::vector<std::vector<std::uint32_t>>;

/// A model's layers, the KV heads of each, and the channels of a head; 0: not known.
struct CacheShape {
  std::uint32_t layers = 0, kv_heads = 0, head_size = 0;
  /// By layer, how many tokens a query sees; 0: all. Empty: all in every layer.
  std::vector<std::uint32_t> windows = {};

  /// Policies act on layers without a window: as if the model had these alone.
  CacheShape policy_layers() const;
};

/// Bytes of a token's key and value in 16 bit, which is what budgets count them as.
constexpr std::uint64_t kv_bytes_per_token(std::uint32_t head_size) {
  return std::uint64_t{4} * head_size;
}

/// A budget that is too small for a policy, its protected tokens or its tier plan.
class BudgetTooSmall : public std::invalid_argument {
 public:
  /// `remedy` is what would fit: "snapkv:recent=14 would fit".
  BudgetTooSmall(const std::string& what, std::string remedy)
      : std::invalid_argument(what), remedy_(std::move(remedy)) {}
  const std::string& remedy() const { return remedy_; }

 private:
  std::string remedy_;
};

/// `128`, `20%`, `64KiB`, `20%bytes`, `all`, `ratio(0.5)`, `pyramid(20%)`, `ada(20%)`, or what a
/// file says of each head.
struct Budget {
  /// How `extent`, a mean, is shared: every head has it; over layers as in PyramidKV; over the
  /// heads of a layer by their ranks after the prompt, as in Ada-KV.
  enum class Split { even, pyramid, ada };

  Extent extent = {};       ///< of a head; the mean, rounded, where heads differ
  std::uint64_t bytes = 0;  ///< of a head, before `extent`; 0: none
  bool in_bytes = false;    ///< `bytes`, or a share of what all tokens take in 16 bit
  bool all = false;
  bool of_prompt = false;  ///< `extent` is the share of the prompt that leaves, as kvpress counts
  Split split = Split::even;
  HeadBudgets heads = {};  ///< of a file; a layer of one number has it for all its heads
  std::string file = {};   ///< its path, as requested

  std::string text() const;
  /// In tokens of 16 bit, the mean where heads differ; a share is rounded down from `length`, at
  /// least 1. `all` is the length. Throws std::invalid_argument where `bytes` hold no token of
  /// `token_bytes` (0: a token of 16 bit), or heads of an unknown size.
  std::uint32_t resolve(std::uint32_t length, std::uint32_t head_size,
                        std::uint64_t token_bytes = 0) const;
  /// `ratio(r)` of a prompt of so many tokens, in tokens: those that kvpress keeps, and the one to
  /// come. Any other is as it was.
  Budget at_prompt(std::uint32_t prompt) const;
  /// A head's, where requested in bytes.
  std::uint64_t bytes_of(std::uint32_t length, std::uint32_t head_size) const;
  /// A share, or bytes, fixed at what they are of `length`; `extent` is in tokens then.
  Budget at_length(std::uint32_t length, std::uint32_t head_size,
                   std::uint64_t token_bytes = 0) const;
  /// Whether all heads have one budget, which resolve() says.
  bool is_even() const { return split == Split::even && heads.empty(); }
  /// Whether a file leaves a layer alone: there all tokens stay, in 16 bit.
  bool exempts() const;
};

/// The mean over the layers that are not exempt, each counting alike, rounded.
std::uint32_t mean_budget(const HeadBudgets& heads);

/// What a file at `file` says. Throws std::invalid_argument that is to follow the file's name: no
/// layers, layers of different numbers of heads, a number that is 0, or nothing but exempt layers.
Budget budget_of_heads(HeadBudgets heads, std::string file = {});

/// Throws std::invalid_argument: not so many layers, or KV heads.
void check_shape(const HeadBudgets& heads, const CacheShape& model, const std::string& what);

/// PyramidKV's series (Cai et al. 2024, section 4.2, with the authors' beta = 20): from
/// 2 · mean − last in the first layer down to `last`, a twentieth of the mean, in equal steps;
/// where the first layer would have more than `length`, it has that, and the last one the more. The
/// sum is `layers` times the mean, exactly. `least`: what the last layer has at least.
std::vector<std::uint32_t> pyramid_budgets(std::uint32_t mean, std::uint32_t length,
                                           std::uint32_t least, std::uint32_t layers);

}  // namespace kvlab
