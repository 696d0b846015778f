// Attention over tokens that a tier plan keeps quantized: the readable implementation.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "policies/aged_set.hpp"
#include "sim/head_view.hpp"
#include "sim/shared_rows.hpp"
#include "traces/base/numeric/panels.hpp"

namespace kvlab {

/// A token's key after RoPE, and its value, both after the Hadamard rotation: the input of
/// quantization.
void take_token(const HeadView& view, const RopeTable& rope, const HeadArithmetic& arithmetic,
                std::uint32_t position, std::span<float> key, std::span<float> value);
/// Passes both through the formats of demotion_path(), in order.
void quantize_token(std::span<const KvFormat* const> path, std::span<float> key,
                    std::span<float> value);

/// Attention over the tokens of one KV head as one configuration stores them.
class KeptRows {
 public:
  virtual ~KeptRows() = default;
  /// Call before a query attends. The query sees the `visible` oldest live tokens; tokens from age
  /// `exact_from` on are in 16 bit.
  virtual void update(const LiveSet& live, std::uint32_t visible, std::uint32_t exact_from) = 0;
  /// Whether all tokens that the query sees are in 16 bit.
  virtual bool all_exact() const = 0;
  /// Writes logits to `to` [visible], by age.
  virtual void logits(std::uint32_t query, std::uint32_t head, SharedRows& rows, float* to) = 0;
  /// Adds p [visible] times the values to `out` [dim].
  virtual void accumulate(std::span<const float> p, std::span<float> out) = 0;
};

/// Creates the rows for a tier plan whose first format is `format`. `view`'s data and `rope` must
/// outlive it. Throws std::invalid_argument if the head size is not a multiple of the block size.
std::unique_ptr<KeptRows> kept_rows(const KvFormat& format, const HeadView& view,
                                    const RopeTable& rope, const HeadArithmetic& arithmetic);

/// A quantized row is a pure function of a token and its tier: the token is quantized by each
/// tier's format from the top down to its tier.
class QuantizedRows : public KeptRows {
 public:
  QuantizedRows(const HeadView& view, const RopeTable& rope, const HeadArithmetic& arithmetic);

  void update(const LiveSet& live, std::uint32_t visible, std::uint32_t exact_from) override;
  bool all_exact() const override { return quantized_.empty(); }
  void logits(std::uint32_t query, std::uint32_t head, SharedRows& rows, float* to) override;
  void accumulate(std::span<const float> p, std::span<float> out) override;

 private:
  struct Held {
    std::uint32_t position = kNoBudget;
    int tier = -1;
  };
  void demote(std::uint32_t slot, std::uint32_t position, int tier);
  /// The elements of p at these ages.
  std::span<const float> some_of(std::span<const float> p, std::span<const std::uint32_t> ages);

  HeadView view_;
  const RopeTable& rope_;
  HeadArithmetic arithmetic_;
  std::span<const TierSlots> tier_plan_;
  Panels keys_;                // [slot, dim]: of quantized tokens, after the Hadamard rotation
  std::vector<float> values_;  // [slot, dim]: of quantized tokens, after the Hadamard rotation
  std::vector<Held> held_;     // [slot]
  std::vector<std::uint32_t> exact_, exact_ages_;          // positions
  std::vector<std::uint32_t> quantized_, quantized_ages_;  // slots
  std::vector<float> some_, by_slot_;
};

}  // namespace kvlab
