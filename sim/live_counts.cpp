#include "sim/live_counts.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "policies/aged_set.hpp"
#include "policies/rungs/rung_counts.hpp"

namespace kvlab {
namespace {

/// What the tokens on each rung of a ladder take.
class RungBytes : public RungCounts {
 public:
  using RungCounts::RungCounts;

  /// While the last `attending` attend.
  double held(std::uint32_t attending) const {
    if (ladder()[0].form->kivi)
      return static_cast<double>(kivi_bytes(attending, 2)) / kKvForms[0].block_bytes();
    return in_16_bit([&](std::size_t rung) { return on(rung); });
  }
  /// As LiveCounts::bytes_peak, with the youngest `staged` not coded yet.
  std::uint64_t bytes(std::uint32_t staged, std::uint64_t element_bytes) const {
    if (ladder()[0].form->kivi) return kivi_bytes(std::max(staged, 1u), element_bytes);
    const std::uint64_t exact = 2 * kCodeBlock * element_bytes;
    std::uint64_t bytes = staged * exact;
    for (std::size_t r = 0; r < ladder().size(); ++r) {
      const KvForm& form = *ladder()[r].form;
      bytes += (on(r) - (r == 0 ? staged : 0)) * (form.exact() ? exact : form.block_bytes());
    }
    return bytes;
  }
  double room() const {
    return in_16_bit([&](std::size_t rung) { return ladder()[rung].slots; });
  }

 private:
  /// Of a block of channels of all tokens, where the last few are not coded yet and an exact
  /// element takes so many bytes.
  std::uint64_t kivi_bytes(std::uint32_t exact, std::uint64_t element_bytes) const {
    const KvForm& form = *ladder()[0].form;
    const std::uint64_t keys = kivi_keys(on(0) - exact), values = kivi_values(on(0) - exact);
    return keys * form.part_bytes(form.key_bits) + values * form.part_bytes(form.value_bits) +
           (2 * std::uint64_t{on(0)} - keys - values) * kCodeBlock * element_bytes;
  }
  /// The bytes of count(rung) tokens on each rung, in tokens of 16 bit.
  template <class Count>
  double in_16_bit(Count count) const {
    double bytes = 0;
    for (std::size_t r = 0; r < ladder().size(); ++r)
      bytes += static_cast<double>(count(r)) * ladder()[r].form->block_bytes();
    return bytes / kKvForms[0].block_bytes();
  }
};

}  // namespace

LiveCounts live_counts(const ResolvedConfig& config, std::uint32_t budget,
                       std::uint64_t element_bytes) {
  const auto ladder = config.rungs.find(budget);
  const std::vector<RungSlots> rungs =
      ladder == config.rungs.end() ? std::vector{RungSlots{.slots = budget}} : ladder->second;
  LiveCounts counts;
  RungBytes on(rungs);
  std::uint64_t decoded = 0;
  double held = 0;
  bool after_prompt = false;
  for (const Admission& admission : config.admissions) {
    const std::uint32_t leaving = on.make_room(config.policy.modifiers, budget, after_prompt);
    on.admit(admission.tokens);
    counts.evictions += leaving;
    counts.end += admission.tokens - leaving;
    counts.most = std::max(counts.most, counts.end);
    const std::uint32_t staged = admission.tokens > 1 ? admission.tokens : 0;
    counts.bytes_peak = std::max(counts.bytes_peak, on.bytes(staged, element_bytes));
    after_prompt = admission.ends_prompt;
    if (!admission.decodes) continue;
    held += on.held(1), ++decoded;
    counts.held_peak = std::max(counts.held_peak, on.held(1));
  }
  counts.held_end = on.held(0);
  counts.held_budget = budget == kNoBudget ? counts.held_end : on.room();
  if (decoded == 0) counts.held_peak = counts.held_end;
  counts.held_mean = decoded == 0 ? counts.held_end : held / static_cast<double>(decoded);
  return counts;
}

Memory memory_of(const ResolvedConfig& config, const CacheShape& model) {
  std::map<std::uint32_t, double> heads, of_spans;  // by budget
  for (std::uint32_t layer = 0; layer < model.layers; ++layer)
    for (std::uint32_t head = 0; head < model.kv_heads; ++head)
      (config.span_of(layer) > 0 ? of_spans : heads)[config.budget_of(layer, head)] += 1;
  const auto bytes = static_cast<double>(kv_bytes_per_token(model.head_size)),
             state = static_cast<double>(state_bytes_per_token(config)),
             plain = static_cast<double>(state_bytes_per_token({}));
  Memory memory;
  for (const auto& [budget, count] : heads) {
    const LiveCounts counts = live_counts(config, budget);
    memory.mean += count * bytes * counts.held_mean;
    memory.peak += count * bytes * counts.held_peak;
    memory.end += count * bytes * counts.held_end;
    const bool exempt = config.evicts() && budget == kNoBudget;
    memory.exempt_peak += exempt ? count * bytes * counts.held_peak : 0;
    memory.state += count * (exempt ? plain : state) * counts.end;
    memory.budget += count * bytes * counts.held_budget;
  }
  ResolvedConfig window;
  window.admissions = config.admissions;
  for (const auto& [span, count] : of_spans) {
    const LiveCounts counts = live_counts(window, span);
    memory.span_mean += count * bytes * counts.held_mean;
    memory.span_peak += count * bytes * counts.held_peak;
  }
  return memory;
}

std::string span_text(std::size_t layers, double mean_bytes, double peak_bytes) {
  if (layers == 0) return "";
  constexpr double kMiB = 1 << 20;
  return fmt::format(
      "{} layers with a span beside them keep {:.2f} MiB of keys and values, at most {:.2f}",
      layers, mean_bytes / kMiB, peak_bytes / kMiB);
}

std::string exempt_text(double peak_bytes, double exempt_peak_bytes) {
  constexpr double kMiB = 1 << 20;
  return fmt::format(
      "at most {:.2f} MiB of keys and values where it acts, {:.2f} in exempt layers, {:.2f} "
      "together",
      (peak_bytes - exempt_peak_bytes) / kMiB, exempt_peak_bytes / kMiB, peak_bytes / kMiB);
}

std::uint64_t state_bytes_per_token(const CacheConfig& config) {
  const std::uint64_t slot = config.policy.entry ? config.policy.entry->token_bytes() : 8;
  return slot + 4 + (config.positions == Positions::cache ? 4 : 0);
}

}  // namespace kvlab
