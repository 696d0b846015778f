#include "engine/evaluation/verify.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

#include "engine/evaluation/verify/attention_check.hpp"
#include "engine/evaluation/verify/logit_comparison.hpp"
#include "policies/observation.hpp"
#include "policies/policy.hpp"
#include "sim/plain_run.hpp"
#include "traces/base/numeric/rope.hpp"
#include "traces/base/parallel.hpp"
#include "traces/layer_ropes.hpp"

namespace kvlab {
namespace {

struct WatchedHead {
  std::unique_ptr<LiveSet> shadow;      // the simulator's live set; gets the engine's observations
  std::unique_ptr<FeatureMaker> maker;  // computes features as the simulator does; null if there
                                        // are none
  std::vector<float> features;          // the engine's features of the current append
  std::vector<Observation> seen;        // observations of the current append, oldest first
  std::map<std::uint32_t, std::vector<std::uint32_t>> victims;  // [now]: positions of the victims
};

/// Compares a free-running replay of one head, which gets only q and k, with the engine. Finds the
/// first eviction in which the two differ.
class FreeRun {
 public:
  FreeRun(const WatchedHead& head, std::uint32_t layer, std::uint32_t kv_head)
      : head_(head), layer_(layer), kv_head_(kv_head) {}

  /// Called before tokens are evicted for `now`.
  void compare(std::uint32_t now, const LiveSet& live) {
    settle(live);
    if (parting || live.surplus() == 0) return;
    now_ = now;
    type_ = live.ranks(now).type;
    keys_ = live.eviction_keys(now);
  }

  /// Compares the tokens that the replay has evicted since compare() with the engine's victims. A
  /// token counts as evicted if it is gone. Its rank does not show this, because with a tier plan
  /// the lowest rank may not be the one that is evicted.
  void settle(const LiveSet& live) {
    std::sort(keys_.begin(), keys_.end());
    const EvictionKey* spared = nullptr;  // evicted by the replay, kept by the engine
    const EvictionKey* taken = nullptr;   // evicted by the engine, kept by the replay
    for (const EvictionKey& key : keys_) {
      const bool by_engine = std::ranges::binary_search(head_.victims.at(now_), key.position),
                 left = !std::ranges::binary_search(live.positions(), key.position);
      if (left && !by_engine) spared = &key;
      if (!left && by_engine && !taken) taken = &key;
    }
    if (spared && taken) {
      const double took = rank_number(type_, taken->rank), stays = rank_number(type_, spared->rank);
      const double larger = std::max(std::fabs(took), std::fabs(stays));
      parting = Parting{
          layer_,          kv_head_,         now_,
          taken->position, spared->position, larger > 0 ? std::fabs(took - stays) / larger : 0};
    }
    keys_.clear();
  }

  std::optional<Parting> parting;

 private:
  const WatchedHead& head_;
  std::uint32_t layer_, kv_head_;
  std::uint32_t now_ = 0;
  RankType type_ = {};
  std::vector<EvictionKey> keys_;
};

}  // namespace

class Verifier::Watch final : public DecoderObserver {
 public:
  Watch(const ModelConfig& config, const ResolvedConfig& cache, std::optional<Dtype> rounding,
        VerifyOptions how, std::shared_ptr<const OutputProjections> output)
      : config_(config),
        shape_(config.shape()),
        requested_(cache),
        rounding_(rounding),
        how_(std::move(how)),
        output_(std::move(output)),
        heads_(std::size_t{shape_.layers} * shape_.kv_heads) {
    if (requested_.policy.centre != KeyCentre::none)
      throw std::invalid_argument(
          "centre: verify computes attention in float64 without centred keys; use centre=none");
    requested_.windows = config_.heads().windows;
    attention_.emplace(config_, requested_, rounding_, how_.threads);
    if (how_.reference) logits_.emplace(*how_.reference, requested_, rounding_, how_.threads);
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer)
      for (std::uint32_t h = 0; h < shape_.kv_heads; ++h) {
        WatchedHead& head = at(layer, h);
        head.shadow = std::make_unique<LiveSet>(requested_.live_set(layer, h));
        if (const auto& names = head.shadow->features(); !names.empty())
          head.maker = std::make_unique<FeatureMaker>(names, shape_.head_size,
                                                      weights_of(output_.get(), layer, h));
      }
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      std::vector<AgedSet*> shadows;
      for (std::uint32_t h = 0; h < shape_.kv_heads; ++h)
        shadows.push_back(at(layer, h).shadow.get());
      share_ranks(shadows);
    }
  }

  void begin_append(std::span<const std::int32_t> ids, std::uint32_t first, SegmentKind kind,
                    bool new_segment) override {
    if (in_prompt_ && (kind == SegmentKind::decode || new_segment)) end_prompt();
    in_prompt_ = kind == SegmentKind::prompt;
    appends_.push_back({first, static_cast<std::uint32_t>(ids.size())});
    if (logits_) logits_->begin(ids, first);
  }

  void evicted(std::uint32_t layer, std::uint32_t kv_head, std::uint32_t now,
               std::span<const std::uint32_t> victims) override {
    WatchedHead& head = at(layer, kv_head);
    const std::vector<std::uint32_t> before(head.shadow->positions().begin(),
                                            head.shadow->positions().end());
    std::vector<std::uint32_t> expected;
    for (const std::uint32_t i : head.shadow->evict_to_budget(now)) expected.push_back(before[i]);
    std::vector<std::uint32_t> actual(victims.begin(), victims.end());
    std::sort(actual.begin(), actual.end());
    if (actual != expected)
      differ("layer {} head {} position {}: the engine evicts [{}], the simulator evicts [{}]",
             layer, kv_head, now, fmt::join(actual, " "), fmt::join(expected, " "));
    report.evictions += actual.size();
    ++report.appends;
    head.victims[now] = std::move(actual);
    if (!head.maker) head.shadow->append(now, appends_.back().tokens);
  }

  void observed(std::uint32_t layer, std::uint32_t kv_head, const LiveTokens& live,
                std::span<const Observation> seen) override {
    WatchedHead& head = at(layer, kv_head);
    head.seen.assign(seen.begin(), seen.end());
    if (head.maker) append_with_features(layer, kv_head, head, live);
    head.shadow->observe(seen);
    compare_states(layer, kv_head, *head.shadow, live);
  }

  void layer(std::uint32_t layer, std::span<const float> q, std::span<const float> k,
             std::span<const float> v, std::span<const float> out,
             std::span<const float>) override {
    if (logits_)
      logits_->layer(
          layer, [&](std::uint32_t h) -> const LiveSet& { return *at(layer, h).shadow; }, k, v);
    if (!looks_at(layer)) return;
    attention_->append(layer, {q, k, v, appends_.back().tokens});
    std::vector<AttendingHead> heads;
    for (std::uint32_t h = 0; h < shape_.kv_heads; ++h) {
      WatchedHead& head = at(layer, h);
      if (head.maker) compare_features(layer, h, head);
      heads.push_back({head.shadow.get(), head.seen});
    }
    if (appends_.size() % how_.check_every == 0)
      attention_->check(layer, appends_.back(), heads, out);
  }

  void compare_logits(std::span<const float> watched, std::span<const float> alone) {
    if (logits_) logits_->compare(watched, alone);
  }

  bool looks_at(std::uint32_t layer) const {
    return how_.layers.empty() || std::ranges::find(how_.layers, layer) != how_.layers.end();
  }

  WatchedHead& at(std::uint32_t layer, std::uint32_t kv_head) {
    return heads_[std::size_t{layer} * shape_.kv_heads + kv_head];
  }

  VerifyReport report;
  VerifyReport finish();  ///< runs check (c)

 private:
  std::vector<std::optional<Parting>> run_free(const RopeTable& rope, std::uint32_t layer,
                                               std::uint32_t first, std::uint32_t count);

  template <class... Args>
  void differ(fmt::format_string<Args...> format, Args&&... args) {
    if (report.identical)
      report.first_difference = fmt::format(format, std::forward<Args>(args)...);
    report.identical = false;
  }

  void end_prompt() {
    appends_.back().ends_prompt = true;
    for (WatchedHead& head : heads_) head.shadow->end_prompt();
  }

  void compare_states(std::uint32_t layer, std::uint32_t kv_head, const LiveSet& shadow,
                      const LiveTokens& live) {
    const std::uint32_t now = appends_.back().first;
    if (!std::ranges::equal(shadow.positions(), live.positions))
      return differ(
          "layer {} head {} position {}: the engine and the simulator keep different tokens", layer,
          kv_head, now);
    const std::size_t slot_bytes = live.states.size() / std::max(1u, live.size());
    for (std::uint32_t i = 0; i < live.size(); ++i) {
      const auto state = live.states.subspan(i * slot_bytes, slot_bytes);
      if (!shadow.has_state(i, state))
        return differ(
            "layer {} head {} position {}: token {} has a different state in engine and simulator",
            layer, kv_head, now, live.positions[i]);
    }
  }

  /// Appends with the engine's features. compare_features() checks them against their definition.
  void append_with_features(std::uint32_t layer, std::uint32_t kv_head, WatchedHead& head,
                            const LiveTokens& live) {
    const Append& append = appends_.back();
    const std::size_t own = append.tokens * head.shadow->features().size();
    if (live.features.size() < own) {
      head.features.assign(own, 0.0f);
      differ("layer {} head {} position {}: the engine gives no features", layer, kv_head,
             append.first);
    } else {
      head.features.assign(live.features.end() - static_cast<std::ptrdiff_t>(own),
                           live.features.end());
    }
    head.shadow->append(append.first, append.tokens, head.features.data());
    if (!std::ranges::equal(head.shadow->feature_values(), live.features))
      differ("layer {} head {} position {}: the features of a live token have changed", layer,
             kv_head, append.first);
  }

  /// After append(): compares the engine's features with those computed from keys and values, bit
  /// for bit.
  void compare_features(std::uint32_t layer, std::uint32_t kv_head, WatchedHead& head) {
    const Append& append = appends_.back();
    const std::size_t offset = std::size_t{append.first} * shape_.head_size;
    const RowSpec& row = config_.rows[layer];
    const std::uint32_t dim = shape_.head_size, group = shape_.group();
    const HeadTokens& tokens = attention_->tokens(layer, kv_head);
    const float* const features = head.maker->append({.k = tokens.k.data() + offset,
                                                      .v = tokens.v.data() + offset,
                                                      .stride = dim,
                                                      .tokens = append.tokens,
                                                      .q = tokens.q.data() + offset * group,
                                                      .q_head_stride = dim,
                                                      .q_stride = std::size_t{group} * dim,
                                                      .group = group,
                                                      .inv_freq = row.rope.inv_freq,
                                                      .rope_factor = row.rope.factor,
                                                      .softmax_scale = row.scale},
                                                     nullptr, 0);
    for (std::size_t i = 0; i < head.features.size(); ++i)
      if (std::bit_cast<std::uint32_t>(features[i]) !=
          std::bit_cast<std::uint32_t>(head.features[i]))
        return differ(
            "layer {} head {} position {}: feature {} is {:.9g} in the engine, {:.9g} in "
            "the simulator",
            layer, kv_head, append.first + i / head.shadow->features().size(),
            head.shadow->features()[i % head.shadow->features().size()], head.features[i],
            features[i]);
  }

  ModelConfig config_;
  ModelShape shape_;
  ResolvedConfig requested_;
  std::optional<Dtype> rounding_;
  VerifyOptions how_;
  std::shared_ptr<const OutputProjections> output_;  // null if no feature reads it
  std::optional<AttentionCheck> attention_;
  std::optional<LogitComparison> logits_;  // none without a reference model
  std::vector<WatchedHead> heads_;         // [layer, kv_head]
  std::vector<Append> appends_;
  bool in_prompt_ = false;  // whether the last append was of a prompt
};

/// Replays KV heads `first` to first + count - 1 of a layer from q and k alone, over all queries.
/// Returns for each head the first eviction that differs from the engine's.
std::vector<std::optional<Parting>> Verifier::Watch::run_free(const RopeTable& rope,
                                                              std::uint32_t layer,
                                                              std::uint32_t first,
                                                              std::uint32_t count) {
  const std::size_t dim = shape_.head_size;
  const RowSpec& row = config_.rows[layer];
  const HeadArithmetic arithmetic{.softmax_scale = row.scale,
                                  .rounding = rounding_,
                                  .threshold16 = requested_.threshold16(),
                                  .softcap = row.softcap,
                                  .window = row.window};
  std::deque<FreeRun> free;
  std::vector<SharedRows> rows;
  LayerRun runs;
  for (std::uint32_t kv_head = first; kv_head < first + count; ++kv_head) {
    const WatchedHead& head = at(layer, kv_head);
    const HeadTokens& tokens = attention_->tokens(layer, kv_head);
    const HeadView view{.tokens = rope.positions(),
                        .group = shape_.group(),
                        .head_size = shape_.head_size,
                        .q = tokens.q.data(),
                        .q_head_stride = dim,
                        .q_token_stride = shape_.group() * dim,
                        .k = tokens.k.data(),
                        .v = tokens.v.data(),
                        .kv_token_stride = dim,
                        .sinks = row.sinks_of(kv_head, shape_.group()),
                        .output = weights_of(output_.get(), layer, kv_head),
                        .rope = &config_.rows[layer].rope,
                        .softmax_scale = row.scale};
    FreeRun& own = free.emplace_back(head, layer, kv_head);
    runs.push_back(std::make_unique<PlainRun>(requested_.live_set(layer, kv_head),
                                              requested_.positions_of(layer), appends_, view, rope,
                                              arithmetic));
    runs.back()->watch_appends(
        [&own](std::uint32_t now, const LiveSet& live) { own.compare(now, live); });
    rows.emplace_back(view, rope, arithmetic);
  }
  run_layer({0, rope.positions()}, rows, {&runs, 1});
  std::vector<std::optional<Parting>> partings;
  for (std::size_t i = 0; i < free.size(); ++i) {
    free[i].settle(runs[i]->live());
    partings.push_back(free[i].parting);
  }
  return partings;
}

VerifyReport Verifier::Watch::finish() {
  if (appends_.empty()) return report;
  attention_->add_to(report);
  if (logits_) report.logits = logits_->result();
  const LayerRopes ropes(config_.rows, appends_.back().first + appends_.back().tokens);
  std::vector<std::optional<Parting>> partings(heads_.size());
  const std::uint32_t together = requested_.evicts_by_layer() ? shape_.kv_heads : 1;
  parallel_for(heads_.size() / together, how_.threads, [&](std::size_t i) {
    const std::size_t first = i * together;
    const auto layer = static_cast<std::uint32_t>(first / shape_.kv_heads);
    if (!looks_at(layer)) return;
    const auto own = run_free(ropes[layer], layer,
                              static_cast<std::uint32_t>(first % shape_.kv_heads), together);
    std::ranges::copy(own, partings.begin() + static_cast<std::ptrdiff_t>(first));
  });
  for (std::size_t i = 0; i < partings.size(); ++i) {
    report.heads += looks_at(static_cast<std::uint32_t>(i / shape_.kv_heads));
    if (partings[i]) report.partings.push_back(*partings[i]);
  }
  return report;
}

Verifier::Verifier(const ModelConfig& config, const ResolvedConfig& cache,
                   std::optional<Dtype> rounding, VerifyOptions options,
                   std::shared_ptr<const OutputProjections> output)
    : watch_(std::make_unique<Watch>(config, cache, rounding, std::move(options),
                                     std::move(output))) {}
Verifier::~Verifier() = default;
DecoderObserver& Verifier::observer() { return *watch_; }
VerifyReport Verifier::report() { return watch_->finish(); }
void Verifier::compare_logits(std::span<const float> watched, std::span<const float> alone) {
  watch_->compare_logits(watched, alone);
}

VerifyReport verify_decoder(Backend& backend, const ResolvedConfig& cache,
                            const std::vector<VerifyTurn>& turns, SamplingOptions sampling,
                            const VerifyOptions& options) {
  Verifier verifier(
      backend.config(), cache, backend.rounding(), options,
      wants_projections(cache.policy.features) ? backend.output_projections() : nullptr);
  std::uint32_t tokens = 0;
  for (const VerifyTurn& turn : turns)
    tokens += static_cast<std::uint32_t>(turn.prompt.size()) + turn.decode_tokens;
  const auto decoder = backend.watched_decoder(cache, tokens, verifier.observer());
  // Also feeds a decoder without an observer, because it may use other kernels than the watched
  // one.
  const auto alone = options.reference ? backend.decoder(cache, tokens) : nullptr;
  const auto feed = [&](std::span<const std::int32_t> ids, SegmentKind kind) {
    const std::span<const float> logits = decoder->feed(ids, kind);
    if (alone) verifier.compare_logits(logits, alone->feed(ids, kind));
    return logits;
  };
  Sampler sampler(sampling);
  for (const VerifyTurn& turn : turns) {
    std::span<const float> logits = feed(turn.prompt, SegmentKind::prompt);
    for (std::uint32_t i = 0; i < turn.decode_tokens; ++i) {
      const std::int32_t id = sampler.pick(logits);
      logits = feed(std::span(&id, 1), SegmentKind::decode);
    }
  }
  return verifier.report();
}

}  // namespace kvlab
