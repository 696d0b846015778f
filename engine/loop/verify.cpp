#include "engine/loop/verify.hpp"

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
#include <vector>

#include "engine/cache/growing_rope.hpp"
#include "policies/observation.hpp"
#include "policies/policy.hpp"
#include "sim/coded_rows.hpp"
#include "sim/head_run.hpp"
#include "traces/base/numeric/code.hpp"
#include "traces/base/numeric/rope.hpp"
#include "traces/base/parallel.hpp"
#include "traces/layer_ropes.hpp"

namespace kvlab {
namespace {

// Attention in float64, plainly: what observations are checked against.

class Float64Attention {
 public:
  Float64Attention(const Rope& rope, std::uint32_t head_size, double softmax_scale)
      : rope_(rope), head_size_(head_size), scale_(softmax_scale) {}

  /// q or k rotated to `position`, [dim].
  std::vector<double> rotate(const float* x, std::uint32_t position) const {
    std::vector<double> y(x, x + head_size_);
    const std::size_t half = rope_.inv_freq.size();
    for (std::size_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(position) * static_cast<double>(rope_.inv_freq[i]);
      const double c = std::cos(angle) * rope_.factor, s = std::sin(angle) * rope_.factor;
      const double a = x[i], b = x[i + half];
      y[i] = a * c - b * s;
      y[i + half] = b * c + a * s;
    }
    return y;
  }

  /// Probabilities of one query over keys [count]; `keys[i]` and `query` are rotated already.
  /// `sink`: the logit that takes what no token gets, or null.
  std::vector<double> probabilities(const std::vector<double>& query,
                                    std::span<const std::vector<double>> keys,
                                    const float* sink) const {
    std::vector<double> p;
    for (const std::vector<double>& key : keys) {
      double logit = 0;
      for (std::uint32_t d = 0; d < head_size_; ++d) logit += query[d] * key[d];
      p.push_back(logit * scale_);
    }
    double largest = *std::max_element(p.begin(), p.end());
    if (sink) largest = std::max(largest, double{*sink});
    double sum = sink ? std::exp(*sink - largest) : 0;
    for (double& x : p) sum += x = std::exp(x - largest);
    for (double& x : p) x /= sum;
    return p;
  }

 private:
  Rope rope_;
  std::uint32_t head_size_;
  double scale_;
};

constexpr double kFloatError = 1e-5;  // of a float32 probability

/// The evicting run of one KV head, as it is watched.
struct WatchedHead {
  const Float64Attention* reference = nullptr;  // its layer's
  const float* sinks = nullptr;                 // [group] logits, or null
  GrowingRope* rope = nullptr;                  // likewise, as the engine turns keys for codes
  std::unique_ptr<LiveSet> shadow;           // the simulator's, fed with the engine's observations
  std::unique_ptr<ColumnMaker> maker;        // the simulator's too; null where there are no columns
  std::vector<float> columns;                // the engine's, of the admission in progress
  std::vector<float> q, k, v;                // [token, group, dim], [token, dim]
  std::vector<std::vector<double>> rotated;  // [token][dim]: keys at original positions, float64
  std::vector<Observation> seen;             // of the admission in progress, by age
  std::map<std::uint32_t, std::vector<std::uint32_t>> victims;  // by `now`: positions
};

/// Float64's view of what one token should have observed.
struct Expected {
  double mass = 0, plain_mass = 0;          // plain: of an attention on rounded q and k
  std::uint32_t requests = 0, unclear = 0;  // surely requested; too near the threshold to say
  std::uint32_t last_request = 0, queries = 0;
};

/// Float64's probabilities of one row, and those of a plain attention on rounded q and k.
struct CheckedRow {
  std::vector<double> exact, plain;
};

/// The first eviction on which a free-running replay of one head disagrees, if any.
class FreeRun {
 public:
  FreeRun(const WatchedHead& head, std::uint32_t layer, std::uint32_t kv_head)
      : head_(head), layer_(layer), kv_head_(kv_head) {}

  /// Before room is made for `now`.
  void compare(std::uint32_t now, const LiveSet& live) {
    settle(live);
    if (parting || live.surplus() == 0) return;
    now_ = now;
    type_ = live.ranks(now).type;
    keys_ = live.leaving_keys(now);
  }

  /// Who has left since then, of a ladder not just the first by rank, beside whom the engine
  /// evicted.
  void settle(const LiveSet& live) {
    std::sort(keys_.begin(), keys_.end());
    const LeavingKey* spared = nullptr;  // the token that the engine should have evicted,
    const LeavingKey* taken = nullptr;   // and the one that it evicted instead
    for (const LeavingKey& key : keys_) {
      const bool by_engine = std::ranges::binary_search(head_.victims.at(now_), key.position),
                 left = !std::ranges::binary_search(live.positions(), key.position);
      if (left && !by_engine) spared = &key;
      if (!left && by_engine && !taken) taken = &key;
    }
    if (spared && taken) {
      const double took = rank_number(type_, taken->rank),
                   leaves = rank_number(type_, spared->rank);
      const double larger = std::max(std::fabs(took), std::fabs(leaves));
      parting = Parting{
          layer_,          kv_head_,         now_,
          taken->position, spared->position, larger > 0 ? std::fabs(took - leaves) / larger : 0};
    }
    keys_.clear();
  }

  std::optional<Parting> parting;

 private:
  const WatchedHead& head_;
  std::uint32_t layer_, kv_head_;
  std::uint32_t now_ = 0;
  RankType type_ = {};
  std::vector<LeavingKey> keys_;
};

}  // namespace

class Verifier::Watch final : public DecoderObserver {
 public:
  Watch(const ModelConfig& config, const ResolvedConfig& cache, std::optional<Dtype> rounding,
        VerifyOptions how, std::shared_ptr<const OutputProjections> output)
      : config_(config),
        shape_(config.shape()),
        asked_(cache),
        rounding_(rounding),
        how_(std::move(how)),
        output_(std::move(output)),
        heads_(std::size_t{shape_.layers} * shape_.kv_heads) {
    asked_.spans = config_.heads().spans;
    for (const RowSpec& row : config_.rows) {
      references_.emplace_back(row.rope, shape_.head_size, row.scale);
      ropes_.emplace_back(row.rope);
    }
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer)
      for (std::uint32_t h = 0; h < shape_.kv_heads; ++h) {
        WatchedHead& head = at(layer, h);
        head.reference = &references_[layer];
        head.sinks = config_.rows[layer].sinks_of(h, shape_.group());
        head.rope = &ropes_[layer];
        head.shadow = std::make_unique<LiveSet>(asked_.live_set(layer, h));
        if (const auto& names = head.shadow->columns(); !names.empty())
          head.maker = std::make_unique<ColumnMaker>(names, shape_.head_size,
                                                     weights_of(output_.get(), layer, h));
      }
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      std::vector<AgedSet*> shadows;
      for (std::uint32_t h = 0; h < shape_.kv_heads; ++h)
        shadows.push_back(at(layer, h).shadow.get());
      share_ranks(shadows);
    }
  }

  void admission(std::span<const std::int32_t> ids, std::uint32_t first, SegmentKind kind,
                 bool new_segment) override {
    if (in_prompt_ && (kind == SegmentKind::decode || new_segment)) end_prompt();
    in_prompt_ = kind == SegmentKind::prompt;
    admissions_.push_back({first, static_cast<std::uint32_t>(ids.size())});
  }

  void evicted(std::uint32_t layer, std::uint32_t kv_head, std::uint32_t now,
               std::span<const std::uint32_t> victims) override {
    WatchedHead& head = at(layer, kv_head);
    const std::vector<std::uint32_t> before(head.shadow->positions().begin(),
                                            head.shadow->positions().end());
    std::vector<std::uint32_t> expected;
    for (const std::uint32_t i : head.shadow->make_room(now)) expected.push_back(before[i]);
    std::vector<std::uint32_t> actual(victims.begin(), victims.end());
    std::sort(actual.begin(), actual.end());
    if (actual != expected)
      differ("layer {} head {} position {}: the engine evicts [{}], the simulator [{}]", layer,
             kv_head, now, fmt::join(actual, " "), fmt::join(expected, " "));
    report.evictions += actual.size();
    ++report.admissions;
    head.victims[now] = std::move(actual);
    if (!head.maker) head.shadow->admit(now, admissions_.back().tokens);
  }

  void observed(std::uint32_t layer, std::uint32_t kv_head, const LiveTokens& live,
                std::span<const Observation> seen) override {
    WatchedHead& head = at(layer, kv_head);
    head.seen.assign(seen.begin(), seen.end());
    if (head.maker) admit_with_columns(layer, kv_head, head, live);
    head.shadow->observe(seen);
    compare_states(layer, kv_head, *head.shadow, live);
  }

  void layer(std::uint32_t layer, std::span<const float> q, std::span<const float> k,
             std::span<const float> v, std::span<const float>, std::span<const float>) override {
    if (!looks_at(layer)) return;
    for (std::uint32_t h = 0; h < shape_.kv_heads; ++h) {
      WatchedHead& head = at(layer, h);
      append(head, h, q, k, v);
      if (head.maker) compare_columns(layer, h, head);
      if (head.shadow->needs() != Needs::nothing && admissions_.size() % how_.check_every == 0)
        check_observations(head);
    }
  }

  void admitted() override { report.tolerance = std::max(report.tolerance, 2 * worst_plain_); }

  bool looks_at(std::uint32_t layer) const {
    return how_.layers.empty() || std::ranges::find(how_.layers, layer) != how_.layers.end();
  }

  WatchedHead& at(std::uint32_t layer, std::uint32_t kv_head) {
    return heads_[std::size_t{layer} * shape_.kv_heads + kv_head];
  }

  VerifyReport report;
  VerifyReport finish();  ///< asks (c)

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
    admissions_.back().ends_prompt = true;
    for (WatchedHead& head : heads_) head.shadow->end_prompt();
  }

  void compare_states(std::uint32_t layer, std::uint32_t kv_head, const LiveSet& shadow,
                      const LiveTokens& live) {
    const std::uint32_t now = admissions_.back().first;
    if (!std::ranges::equal(shadow.positions(), live.positions))
      return differ("layer {} head {} position {}: other tokens are live", layer, kv_head, now);
    const std::size_t slot_bytes = live.states.size() / std::max(1u, live.size());
    for (std::uint32_t i = 0; i < live.size(); ++i) {
      const auto state = live.states.subspan(i * slot_bytes, slot_bytes);
      if (!shadow.has_state(i, state))
        return differ("layer {} head {} position {}: token {} has another state", layer, kv_head,
                      now, live.positions[i]);
    }
  }

  /// The columns are the engine's here; compare_columns() holds them to their definition.
  void admit_with_columns(std::uint32_t layer, std::uint32_t kv_head, WatchedHead& head,
                          const LiveTokens& live) {
    const Admission& admission = admissions_.back();
    const std::size_t own = admission.tokens * head.shadow->columns().size();
    if (live.columns.size() < own) {
      head.columns.assign(own, 0.0f);
      differ("layer {} head {} position {}: the engine shows no columns", layer, kv_head,
             admission.first);
    } else {
      head.columns.assign(live.columns.end() - static_cast<std::ptrdiff_t>(own),
                          live.columns.end());
    }
    head.shadow->admit(admission.first, admission.tokens, head.columns.data());
    if (!std::ranges::equal(head.shadow->brought(), live.columns))
      differ("layer {} head {} position {}: the columns of a live token have changed", layer,
             kv_head, admission.first);
  }

  /// After append(): what the keys and values of the admission come to, bit for bit.
  void compare_columns(std::uint32_t layer, std::uint32_t kv_head, WatchedHead& head) {
    const Admission& admission = admissions_.back();
    const std::size_t offset = std::size_t{admission.first} * shape_.head_size;
    const RowSpec& row = config_.rows[layer];
    const std::uint32_t dim = shape_.head_size, group = shape_.group();
    const float* const columns = head.maker->admit({.k = head.k.data() + offset,
                                                    .v = head.v.data() + offset,
                                                    .stride = dim,
                                                    .tokens = admission.tokens,
                                                    .q = head.q.data() + offset * group,
                                                    .q_head_stride = dim,
                                                    .q_stride = std::size_t{group} * dim,
                                                    .group = group,
                                                    .inv_freq = row.rope.inv_freq,
                                                    .rope_factor = row.rope.factor,
                                                    .softmax_scale = row.scale},
                                                   nullptr, 0);
    for (std::size_t i = 0; i < head.columns.size(); ++i)
      if (std::bit_cast<std::uint32_t>(columns[i]) != std::bit_cast<std::uint32_t>(head.columns[i]))
        return differ(
            "layer {} head {} position {}: column {} is {:.9g} in the engine, {:.9g} in "
            "the simulator",
            layer, kv_head, admission.first + i / head.shadow->columns().size(),
            head.shadow->columns()[i % head.shadow->columns().size()], head.columns[i], columns[i]);
  }

  /// Keeps one head's part of an admission's tensors.
  void append(WatchedHead& head, std::uint32_t h, std::span<const float> q,
              std::span<const float> k, std::span<const float> v) const {
    const std::size_t dim = shape_.head_size, group = shape_.group();
    const Admission& admission = admissions_.back();
    for (std::size_t i = 0; i < admission.tokens; ++i) {
      const float* query = q.data() + (i * shape_.query_heads + h * group) * dim;
      const float* key = k.data() + (i * shape_.kv_heads + h) * dim;
      const float* value = v.data() + (i * shape_.kv_heads + h) * dim;
      head.q.insert(head.q.end(), query, query + group * dim);
      head.k.insert(head.k.end(), key, key + dim);
      head.v.insert(head.v.end(), value, value + dim);
      head.rotated.push_back(
          head.reference->rotate(key, admission.first + static_cast<std::uint32_t>(i)));
    }
  }

  void check_observations(WatchedHead& head) {
    const std::vector<Expected> expected = expected_observations(head);
    const double heads = shape_.group();
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const Expected& e = expected[i];
      const Observation& seen = head.seen[i];
      ++report.observations;
      if (needs_mass(head.shadow->needs())) {
        const double mass = std::ldexp(static_cast<double>(seen.mass), -32);
        const double rows = heads * std::max(1u, e.queries);
        double error = std::fabs(mass - e.mass) / rows;
        if (std::isnan(error)) error = std::numeric_limits<double>::infinity();
        worst_plain_ = std::max(worst_plain_, std::fabs(e.plain_mass - e.mass) / rows);
        report.worst_mass = std::max(report.worst_mass, error);
      }
      if (needs_requests(head.shadow->needs())) {
        const bool count_fits =
            seen.requests >= e.requests && seen.requests <= e.requests + e.unclear;
        const bool last_fits =
            e.unclear > 0 || seen.requests == 0 || seen.last_request == e.last_request;
        report.wrong_requests += !(count_fits && last_fits);
      }
      report.wrong_requests += seen.queries != e.queries;
    }
  }

  /// `query` and `keys` are rotated, in float64.
  CheckedRow row_of(const Float64Attention& reference, const std::vector<double>& query,
                    std::span<const std::vector<double>> keys, const float* sink) const {
    CheckedRow row{.exact = reference.probabilities(query, keys, sink)};
    if (!rounding_) return row;
    const auto rounded = [&](const std::vector<double>& x) {
      std::vector<double> y;
      for (const double value : x)
        y.push_back(static_cast<double>(round_to(*rounding_, static_cast<float>(value))));
      return y;
    };
    std::vector<std::vector<double>> rounded_keys;
    for (const auto& key : keys) rounded_keys.push_back(rounded(key));
    row.plain = reference.probabilities(rounded(query), rounded_keys, sink);
    return row;
  }

  /// By how much a probability near the threshold may be off, relatively.
  double relative_error(const CheckedRow& row, double threshold) const {
    double worst = 0;
    for (std::size_t i = 0; i < row.plain.size(); ++i)
      if (row.exact[i] > threshold / 2)
        worst = std::max(worst, std::fabs(row.plain[i] - row.exact[i]) / row.exact[i]);
    return std::max(kFloatError, 2 * worst);
  }

  /// The key of the live token at `age`, turned, in float64: what its code holds, if it has one.
  std::vector<double> key_of(const WatchedHead& head, std::uint32_t age) const {
    const Admission& admission = admissions_.back();
    const std::uint32_t position = head.shadow->positions()[age];
    const float* const plain = head.k.data() + std::size_t{position} * shape_.head_size;
    if (asked_.positions == Positions::cache) return head.reference->rotate(plain, age);
    const bool staged = admission.tokens > 1 && position >= admission.first;
    if (staged || head.shadow->form(age).exact()) return head.rotated[position];
    std::vector<float> code(shape_.head_size);
    head.rope->covering(position + 1).rotate(plain, code.size(), position, code.data());
    for (float& x : code) x = rounding_ ? round_to(*rounding_, x) : x;
    butterflies(code);
    code_token(way_down(head.shadow->ladder(), -1, static_cast<int>(head.shadow->rung(age))), code,
               {});
    std::vector<double> key(code.begin(), code.end());
    butterflies(key);
    for (double& x : key) x /= kCodeBlock;
    return key;
  }

  std::vector<Expected> expected_observations(const WatchedHead& head) {
    const auto live = head.shadow->positions();
    const Admission& admission = admissions_.back();
    std::vector<std::vector<double>> keys;
    for (std::uint32_t age = 0; age < live.size(); ++age) keys.push_back(key_of(head, age));
    std::vector<Expected> expected(live.size());
    for (std::uint32_t n = 0; n < admission.tokens; ++n) {
      const std::uint32_t visible = head.shadow->size() - (admission.tokens - 1 - n);
      expect_from_query(head, admission.first + n, std::span(keys).first(visible),
                        admission.tokens - 1 - n, expected);
    }
    return expected;
  }

  void expect_from_query(const WatchedHead& head, std::uint32_t query,
                         std::span<const std::vector<double>> keys, std::uint32_t age,
                         std::vector<Expected>& expected) {
    const double threshold = asked_.threshold16() / 65536.0;
    const auto place = static_cast<std::uint32_t>(keys.size() - 1);
    const LiveSet& live = *head.shadow;
    const double weight = age < live.tail() ? static_cast<double>(live.weight(age)) : 0.0;
    std::vector<std::uint8_t> sure(keys.size()), unclear(keys.size());
    std::vector<double> mass(keys.size()), plain_mass(keys.size());
    const bool by_largest = live.modifiers().group == Modifiers::Group::max;
    const auto give = [&](double& sum, double one) {
      sum = by_largest ? std::max(sum, one) : sum + one;
    };
    for (std::uint32_t g = 0; g < shape_.group(); ++g) {
      const float* q = head.q.data() + (std::size_t{query} * shape_.group() + g) * shape_.head_size;
      const CheckedRow row =
          row_of(*head.reference,
                 head.reference->rotate(q, asked_.positions == Positions::original ? query : place),
                 keys, head.sinks ? head.sinks + g : nullptr);
      const std::vector<double>& p = row.exact;
      const double largest = *std::max_element(p.begin(), p.end());
      const double relative = relative_error(row, threshold * largest);
      for (std::size_t i = 0; i < p.size(); ++i) {
        give(mass[i], weight * p[i]);
        give(plain_mass[i], weight * (rounding_ ? row.plain[i] : p[i]));
        // The relative error of a probability, and the absolute one of its Q32.32.
        const double slack = relative * threshold * largest + 0x1p-31;
        sure[i] |= p[i] > threshold * largest + slack;
        unclear[i] |= std::fabs(p[i] - threshold * largest) <= slack;
      }
    }
    for (std::size_t i = 0; i < keys.size(); ++i) {
      ++expected[i].queries;
      expected[i].mass += mass[i];
      expected[i].plain_mass += plain_mass[i];
      if (sure[i])
        ++expected[i].requests, expected[i].last_request = query;
      else
        expected[i].unclear += unclear[i];
    }
  }

  ModelConfig config_;
  ModelShape shape_;
  ResolvedConfig asked_;
  std::optional<Dtype> rounding_;
  VerifyOptions how_;
  std::shared_ptr<const OutputProjections> output_;  // null where no column takes it
  std::vector<Float64Attention> references_;         // by layer
  std::vector<GrowingRope> ropes_;                   // likewise
  double worst_plain_ = 0;
  std::vector<WatchedHead> heads_;  // [layer, kv_head]
  std::vector<Admission> admissions_;
  bool in_prompt_ = false;  // the last admission was of a prompt
};

/// The KV heads of a layer from `first` on, query by query.
std::vector<std::optional<Parting>> Verifier::Watch::run_free(const RopeTable& rope,
                                                              std::uint32_t layer,
                                                              std::uint32_t first,
                                                              std::uint32_t count) {
  const std::size_t dim = shape_.head_size;
  const RowSpec& row = config_.rows[layer];
  const HeadArithmetic arithmetic{.softmax_scale = row.scale,
                                  .rounding = rounding_,
                                  .threshold16 = asked_.threshold16(),
                                  .softcap = row.softcap,
                                  .span = row.span};
  std::deque<FreeRun> free;
  std::vector<SharedRows> rows;
  LayerRun runs;
  for (std::uint32_t kv_head = first; kv_head < first + count; ++kv_head) {
    const WatchedHead& head = at(layer, kv_head);
    const HeadView view{.tokens = rope.positions(),
                        .group = shape_.group(),
                        .head_size = shape_.head_size,
                        .q = head.q.data(),
                        .q_head_stride = dim,
                        .q_token_stride = shape_.group() * dim,
                        .k = head.k.data(),
                        .v = head.v.data(),
                        .kv_token_stride = dim,
                        .sinks = head.sinks,
                        .output = weights_of(output_.get(), layer, kv_head),
                        .rope = &config_.rows[layer].rope,
                        .softmax_scale = row.scale};
    FreeRun& own = free.emplace_back(head, layer, kv_head);
    runs.push_back(std::make_unique<HeadRun>(asked_.live_set(layer, kv_head),
                                             asked_.positions_of(layer), admissions_, view, rope,
                                             arithmetic));
    runs.back()->watch_admissions(
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
  if (admissions_.empty()) return report;
  const LayerRopes ropes(config_.rows, admissions_.back().first + admissions_.back().tokens);
  std::vector<std::optional<Parting>> partings(heads_.size());
  const std::uint32_t together = asked_.evicts_by_layer() ? shape_.kv_heads : 1;
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

VerifyReport verify_decoder(Backend& backend, const ResolvedConfig& cache,
                            const std::vector<VerifyTurn>& turns, SamplingOptions sampling,
                            const VerifyOptions& options) {
  Verifier verifier(
      backend.config(), cache, backend.rounding(), options,
      wants_projections(cache.policy.columns) ? backend.output_projections() : nullptr);
  std::uint32_t tokens = 0;
  for (const VerifyTurn& turn : turns)
    tokens += static_cast<std::uint32_t>(turn.prompt.size()) + turn.decode_tokens;
  const auto decoder = backend.watched_decoder(cache, tokens, verifier.observer());
  Sampler sampler(sampling);
  for (const VerifyTurn& turn : turns) {
    std::span<const float> logits = decoder->feed(turn.prompt, SegmentKind::prompt);
    for (std::uint32_t i = 0; i < turn.decode_tokens; ++i) {
      const std::int32_t id = sampler.pick(logits);
      logits = decoder->feed(std::span(&id, 1), SegmentKind::decode);
    }
  }
  return verifier.report();
}

}  // namespace kvlab
