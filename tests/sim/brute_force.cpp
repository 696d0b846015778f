#include "tests/sim/brute_force.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace kvlab::brute {
namespace {

constexpr double kTwo32 = 4294967296.0;

double norm2(const Vector& a) { return dot(a, a); }

Vector difference(const Vector& a, const Vector& b) {
  Vector c(a);
  for (std::size_t d = 0; d < a.size(); ++d) c[d] -= b[d];
  return c;
}

/// Rounds a probability to float32 and converts it to units of 2^-32. (All weights are 1.)
std::uint64_t fixed_point(double p) {
  return static_cast<std::uint64_t>(
      std::nearbyint(static_cast<double>(static_cast<float>(p)) * kTwo32));
}

/// For each entry of a row, whether its query head requests it.
std::vector<bool> requests_of(const Vector& p, std::uint64_t threshold16, double* narrowest) {
  std::vector<std::uint64_t> hat;
  for (double x : p) hat.push_back(fixed_point(x));
  const std::uint64_t limit = threshold16 * *std::max_element(hat.begin(), hat.end());
  std::vector<bool> requested;
  for (std::uint64_t x : hat) {
    requested.push_back(x * 65536 >= limit);
    if (limit > 0 && narrowest)
      *narrowest = std::min(
          *narrowest, std::abs(static_cast<double>(x * 65536) / static_cast<double>(limit) - 1));
  }
  return requested;
}

using Ranks = std::vector<std::uint64_t>;

/// For each token, the mean or the maximum of the ranks of the tokens at most config.smooth indices
/// away.
Ranks smoothed(const Config& config, const Ranks& ranks) {
  Ranks result;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    std::uint64_t sum = 0, highest = 0, count = 0;
    for (std::size_t j = 0; j < ranks.size(); ++j) {
      if ((i > j ? i - j : j - i) > config.smooth) continue;
      sum += ranks[j], highest = std::max(highest, ranks[j]), ++count;
    }
    result.push_back(config.max_pool ? highest : sum / count);
  }
  return result;
}

std::uint64_t split_mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

double round_to_bits(double value, int bits) {
  int exponent = 0;
  const double fraction = std::frexp(value, &exponent);  // in [0.5, 1)
  return std::ldexp(std::nearbyint(std::ldexp(fraction, bits)), exponent - bits);
}

RowSpec Sequence::row(std::uint32_t layer) const {
  if (!rows.empty()) return rows[layer];
  return {.scale = static_cast<float>(scale), .rope = {inv_freq, rope_factor}};
}

double Sequence::score(std::uint32_t layer, double product) const {
  if (rows.empty()) return scale * product;
  const double all = rows[layer].scale * product, cap = rows[layer].softcap;
  return cap > 0 ? cap * std::tanh(all / cap) : all;
}

RopeAngles exact_angles(const Sequence& s, std::uint32_t layer) {
  RopeAngles angles;
  const Rope rope = s.row(layer).rope;
  for (std::uint32_t position = 0; position < s.tokens; ++position) {
    angles.cos.emplace_back(), angles.sin.emplace_back();
    for (float frequency : rope.inv_freq) {
      const double angle = position * static_cast<double>(frequency);
      angles.cos.back().push_back(std::cos(angle) * static_cast<double>(rope.factor));
      angles.sin.back().push_back(std::sin(angle) * static_cast<double>(rope.factor));
    }
  }
  return angles;
}

Vector rotate(const RopeAngles& angles, const Vector& x, std::uint32_t position) {
  const Vector &c = angles.cos[position], &r = angles.sin[position];
  const std::size_t half = c.size();
  Vector y(x);
  for (std::size_t i = 0; i < half; ++i) {
    y[i] = x[i] * c[i] - x[i + half] * r[i];
    y[i + half] = x[i + half] * c[i] + x[i] * r[i];
  }
  return y;
}

Vector rotate_and_round(const Sequence& s, std::uint32_t layer, const Vector& x,
                        std::uint32_t position) {
  const Rope rope = s.row(layer).rope;
  const std::size_t half = rope.inv_freq.size();
  Vector y(x);
  for (std::size_t i = 0; i < half; ++i) {
    const double angle = position * static_cast<double>(rope.inv_freq[i]);
    const float c = static_cast<float>(std::cos(angle)) * rope.factor;
    const float r = static_cast<float>(std::sin(angle)) * rope.factor;
    const auto a = static_cast<float>(x[i]), b = static_cast<float>(x[i + half]);
    y[i] = static_cast<double>(a * c - b * r);
    y[i + half] = static_cast<double>(b * c + a * r);
  }
  for (double& value : y) value = round_to_bits(value, s.rounding_bits);
  return y;
}

Vector softmax(const Vector& logits, double sink) {
  const double max_logit = std::max(sink, *std::max_element(logits.begin(), logits.end()));
  Vector p;
  double sum = 0;
  for (double x : logits) sum += p.emplace_back(std::exp(x - max_logit));
  sum += p.emplace_back(std::exp(sink - max_logit));
  for (double& x : p) x /= sum;
  return p;
}

Config standard(const std::string& policy, std::uint32_t budget) {
  Config c{.policy = policy, .budget = budget};
  if (policy == "sink") c.sinks = 4;
  if (policy == "h2o" || policy == "streaming_h2o") c.recent = budget / 2;
  c.cache_positions = policy == "sink" || policy == "streaming_h2o";
  return c;
}

Simulator::Simulator(Sequence sequence, double threshold)
    : s_(std::move(sequence)),
      threshold16_(static_cast<std::uint64_t>(std::lround(threshold * 65536))) {
  full_.resize(s_.layers), future_.resize(s_.layers);
  for (std::uint32_t layer = 0; layer < s_.layers; ++layer)
    angles_.push_back(exact_angles(s_, layer));
  for (std::uint32_t layer = 0; layer < s_.layers; ++layer) {
    for (std::uint32_t h = 0; h < s_.query_heads; ++h)
      full_[layer].push_back(attend_in_full(layer, h));
    for (std::uint32_t g = 0; g < s_.kv_heads; ++g) {
      // The row after the last query stays zero, because no query follows it.
      std::vector<std::vector<std::uint64_t>> sums(s_.tokens + 1,
                                                   std::vector<std::uint64_t>(s_.tokens));
      for (std::uint32_t now = s_.tokens; now-- > 0;)
        for (std::uint32_t j = 0; j < s_.tokens; ++j) {
          sums[now][j] = sums[now + 1][j];
          for (std::uint32_t h = g * s_.group(); h < (g + 1) * s_.group() && j <= now; ++h)
            sums[now][j] += fixed_point(full_[layer][h].p[now][j]);
        }
      future_[layer].push_back(std::move(sums));
    }
  }
}

Simulator::Full Simulator::attend_in_full(std::uint32_t layer, std::uint32_t query_head) const {
  const Matrix& q = s_.q[layer][query_head];
  const Matrix& k = s_.k[layer][query_head / s_.group()];
  const Matrix& v = s_.v[layer][query_head / s_.group()];
  const auto turn = [&](const Vector& x, std::uint32_t position) {
    return s_.rounding_bits ? rotate_and_round(s_, layer, x, position)
                            : rotate(angles_[layer], x, position);
  };
  Matrix turned_k;
  for (std::uint32_t j = 0; j < s_.tokens; ++j) turned_k.push_back(turn(k[j], j));
  Full full;
  for (std::uint32_t t = 0; t < s_.tokens; ++t) {
    const Vector turned_q = turn(q[t], t);
    Vector logits, out(s_.head_size);
    const RowSpec row = s_.row(layer);
    for (std::uint32_t j = 0; j <= t; ++j)
      logits.push_back(row.window == 0 || t - j < row.window
                           ? s_.score(layer, dot(turned_q, turned_k[j]))
                           : -std::numeric_limits<double>::infinity());
    Vector p = softmax(logits, sink_of(row, query_head));
    full.sink.push_back(p.back());
    p.pop_back();
    for (std::uint32_t j = 0; j <= t; ++j)
      for (std::uint32_t d = 0; d < s_.head_size; ++d) out[d] += p[j] * v[j][d];
    full.requested.push_back(requests_of(p, threshold16_, nullptr));
    full.logits.push_back(logits);
    full.p.push_back(p);
    full.out.push_back(out);
  }
  return full;
}

std::uint64_t Simulator::future_mass(std::uint32_t layer, std::uint32_t kv_head,
                                     std::uint32_t token, std::uint32_t now) const {
  return future_[layer][kv_head][now][token];
}

/// One KV head under one configuration.
class Simulator::HeadRun {
 public:
  HeadRun(const Simulator& sim, const Config& config, std::uint32_t layer, std::uint32_t kv_head,
          Cache& cache, std::vector<std::vector<AtQuery>>& queries, double& narrowest)
      : sim_(sim),
        s_(sim.s_),
        config_(config),
        layer_(layer),
        kv_head_(kv_head),
        cache_(cache),
        queries_(queries),
        narrowest_(narrowest) {
    cache_.kept.resize(s_.tokens);
    cache_.mass.resize(s_.tokens);
    last_request_.resize(s_.tokens);
  }

  std::size_t live() const { return live_.size(); }

  Ranks ranks(std::uint32_t now) const {
    Ranks all;
    for (const std::uint32_t position : live_) all.push_back(rank(position, now));
    return all;
  }

  void append(std::uint32_t first, std::uint32_t count) {
    const std::size_t before = live_.size();
    for (std::uint32_t t = first; t < first + count; ++t) {
      live_.push_back(t);
      last_request_[t] = t;
    }
    cache_.live_end = static_cast<std::uint32_t>(live_.size());
    cache_.live_max = std::max(cache_.live_max, cache_.live_end);
    std::vector<std::uint64_t> mass(live_.size());
    std::vector<std::int64_t> request(live_.size(), -1);
    for (std::uint32_t i = 0; i < count; ++i) attend(before + i, mass, request);
    for (std::size_t i = 0; i < live_.size(); ++i) {
      cache_.mass[live_[i]] += mass[i];
      if (request[i] >= 0) last_request_[live_[i]] = static_cast<std::uint32_t>(request[i]);
    }
  }

  /// Evicts the first victims until budget - 1 tokens are left.
  void evict(const Ranks& ranks, std::uint32_t now) {
    std::vector<EvictionCandidate> order;
    for (std::size_t i = 0; i < live_.size(); ++i) {
      int protection = 0;
      if (std::uint64_t{live_[i]} + config_.recent > now) protection = 1;
      if (live_[i] < config_.sinks) protection = 2;
      order.push_back({protection, ranks[i], live_[i]});
    }
    std::sort(order.begin(), order.end());
    const std::size_t num_evicted = live_.size() - (config_.budget - 1);
    if (num_evicted < order.size()) note_gap(order[num_evicted - 1], order[num_evicted]);
    cache_.evictions += num_evicted;
    live_.clear();
    for (std::size_t i = num_evicted; i < order.size(); ++i) live_.push_back(order[i].position);
    std::sort(live_.begin(), live_.end());
  }

 private:
  struct EvictionCandidate {
    int protection;
    std::uint64_t rank;
    std::uint32_t position;
    bool operator<(const EvictionCandidate& o) const {
      return std::tie(protection, rank, position) < std::tie(o.protection, o.rank, o.position);
    }
  };

  std::uint64_t rank(std::uint32_t position, std::uint32_t now) const {
    const std::string& policy = config_.policy;
    if (policy == "window" || policy == "sink") return position;
    if (policy == "lru") return last_request_[position];
    if (policy == "h2o" || policy == "streaming_h2o") return cache_.mass[position];
    if (policy == "oracle_attention") return sim_.future_mass(layer_, kv_head_, position, now);
    if (policy == "random") {
      const std::uint64_t cache = split_mix(split_mix(config_.seed) ^ config_.sequence);
      const std::uint64_t head = (std::uint64_t{layer_} << 32) + kv_head_;
      return split_mix(split_mix(cache ^ head) ^ ((std::uint64_t{position} << 32) + now));
    }
    throw std::invalid_argument("brute force knows no policy " + policy);
  }

  bool ranks_by_sums() const {
    return config_.policy == "h2o" || config_.policy == "streaming_h2o" ||
           config_.policy == "oracle_attention";
  }

  void note_gap(const EvictionCandidate& last_out, const EvictionCandidate& first_in) {
    if (!ranks_by_sums() || last_out.protection != first_in.protection || first_in.rank == 0)
      return;
    const double gap =
        static_cast<double>(first_in.rank - last_out.rank) / static_cast<double>(first_in.rank);
    // A gap of 0 is not a close decision. Ranks are equal only if they are small integers or
    // because of a symmetry. In both cases the replay's float32 ranks are also equal.
    if (gap > 0) narrowest_ = std::min(narrowest_, gap);
  }

  /// The query of the live token at `index` attends to the live tokens up to itself.
  void attend(std::size_t index, std::vector<std::uint64_t>& mass,
              std::vector<std::int64_t>& request) {
    const std::uint32_t t = live_[index];
    cache_.kept[t].assign(live_.begin(), live_.begin() + static_cast<std::ptrdiff_t>(index + 1));
    const Matrix cache_position_keys =
        config_.cache_positions ? keys_at_cache_positions(index) : Matrix{};
    std::vector<std::uint64_t> given(index + 1);
    for (std::uint32_t g = 0; g < s_.group(); ++g) {
      const std::uint32_t h = kv_head_ * s_.group() + g;
      Vector logits;
      const Vector q = config_.cache_positions ? rotate(sim_.angles_[layer_], s_.q[layer_][h][t],
                                                        static_cast<std::uint32_t>(index))
                                               : Vector{};
      for (std::size_t i = 0; i <= index; ++i)
        logits.push_back(config_.cache_positions ? s_.score(layer_, dot(q, cache_position_keys[i]))
                                                 : sim_.full_[layer_][h].logits[t][live_[i]]);
      Vector p = softmax(logits, sink_of(s_.row(layer_), h));
      p.pop_back();
      double* narrowest = config_.policy == "lru" ? &narrowest_ : nullptr;
      const std::vector<bool> requested = requests_of(p, sim_.threshold16_, narrowest);
      for (std::size_t i = 0; i <= index; ++i) {
        const std::uint64_t own = fixed_point(p[i]);
        given[i] = config_.max_group ? std::max(given[i], own) : given[i] + own;
        if (requested[i]) request[i] = std::max<std::int64_t>(request[i], t);
      }
      queries_[h][t] = compare(h, t, p, index);
    }
    for (std::size_t i = 0; i <= index; ++i) mass[i] += given[i];
  }

  Matrix keys_at_cache_positions(std::size_t index) const {
    Matrix keys;
    for (std::size_t i = 0; i <= index; ++i)
      keys.push_back(rotate(sim_.angles_[layer_], s_.k[layer_][kv_head_][live_[i]],
                            static_cast<std::uint32_t>(i)));
    return keys;
  }

  /// Compares the query of token `t` with its result with the full cache. `p`: its probabilities of
  /// the first index + 1 live tokens.
  AtQuery compare(std::uint32_t h, std::uint32_t t, const Vector& p, std::size_t index) const {
    const Full& full = sim_.full_[layer_][h];
    AtQuery at;
    Vector out(s_.head_size);
    std::vector<bool> live(t + 1);
    at.recall = full.sink[t];
    for (std::size_t i = 0; i <= index; ++i) {
      live[live_[i]] = true;
      at.recall += full.p[t][live_[i]];
      for (std::uint32_t d = 0; d < s_.head_size; ++d)
        out[d] += p[i] * s_.v[layer_][kv_head_][live_[i]][d];
    }
    for (std::uint32_t j = 0; j < t; ++j)
      if (full.requested[t][j]) {
        ++at.requested;
        if (!live[j]) ++at.missed;
      }
    for (const Passage& passage : s_.passages) {
      std::pair<double, double> mass{0, 0};
      for (std::uint32_t j = passage.start; j < passage.start + passage.tokens; ++j) {
        if (passage.start + passage.tokens > t) continue;
        mass.second += full.p[t][j];
        if (live[j]) mass.first += full.p[t][j];
      }
      at.passages.push_back(mass);
    }
    at.out2 = norm2(full.out[t]);
    at.off = difference(full.out[t], out);
    at.error2 = norm2(at.off);
    return at;
  }

  const Simulator& sim_;
  const Sequence& s_;
  const Config& config_;
  std::uint32_t layer_, kv_head_;
  Cache& cache_;
  std::vector<std::vector<AtQuery>>& queries_;
  double& narrowest_;
  std::vector<std::uint32_t> live_;  // by age
  std::vector<std::uint32_t> last_request_;
};

/// Evicts to the budget. The KV heads of a layer may be ranked together.
void Simulator::evict_to_budget(const Config& config, std::vector<HeadRun>& heads,
                                std::uint32_t now, bool after_prompt) {
  if (config.policy == "full" || (config.once && !after_prompt)) return;
  if (heads.front().live() < config.budget - 1 + config.every) return;
  std::vector<Ranks> ranks;
  for (const HeadRun& head : heads) ranks.push_back(head.ranks(now));
  if (config.by_layer) {
    for (std::size_t h = 1; h < heads.size(); ++h)
      for (std::size_t i = 0; i < ranks[0].size(); ++i) ranks[0][i] += ranks[h][i];
    ranks.assign(heads.size(), Ranks(ranks[0]));
  }
  const bool smooth = config.smooth > 0 && (config.every > 1 || config.once || after_prompt);
  for (std::size_t h = 0; h < heads.size(); ++h)
    heads[h].evict(smooth ? smoothed(config, ranks[h]) : ranks[h], now);
}

/// Runs the rule, step by step.
void Simulator::run_layer(const Config& config, std::vector<HeadRun>& heads) const {
  bool after_prompt = false;
  for (const Segment& segment : s_.segments) {
    const bool prompt = segment.kind == SegmentKind::prompt;
    const std::uint32_t step = !prompt ? 1 : config.chunk ? config.chunk : segment.tokens;
    for (std::uint32_t done = 0; done < segment.tokens; done += step) {
      evict_to_budget(config, heads, segment.start + done, after_prompt);
      for (HeadRun& head : heads)
        head.append(segment.start + done, std::min(step, segment.tokens - done));
      after_prompt = prompt && done + step >= segment.tokens;
    }
  }
}

void Simulator::run_topk(const Config& config, std::uint32_t layer, std::uint32_t query_head,
                         std::vector<AtQuery>& queries) const {
  const Full& full = full_[layer][query_head];
  for (const Segment& segment : s_.segments)
    for (std::uint32_t t = segment.start; t < segment.start + segment.tokens; ++t) {
      const bool cut = segment.kind == SegmentKind::decode || config.chunk > 0;
      std::vector<std::uint32_t> order;
      for (std::uint32_t j = 0; j <= t; ++j) order.push_back(j);
      std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
        return full.p[t][a] > full.p[t][b];
      });
      if (cut && order.size() > config.budget) order.resize(config.budget);
      AtQuery at;
      for (std::uint32_t j = 0; j < t; ++j) at.requested += full.requested[t][j] ? 1 : 0;
      at.missed = at.requested;
      at.recall = full.sink[t];
      for (std::uint32_t j : order) {
        at.recall += full.p[t][j];
        if (j < t && full.requested[t][j]) --at.missed;
      }
      queries[t] = at;
    }
}

Outcome Simulator::run(const Config& config) const {
  Outcome outcome;
  outcome.config = config;
  outcome.caches.resize(s_.layers);
  for (std::uint32_t layer = 0; layer < s_.layers; ++layer) {
    auto& queries = outcome.queries.emplace_back(s_.query_heads, std::vector<AtQuery>(s_.tokens));
    if (config.policy == "oracle_topk") {
      for (std::uint32_t h = 0; h < s_.query_heads; ++h) run_topk(config, layer, h, queries[h]);
      continue;
    }
    outcome.caches[layer].resize(s_.kv_heads);
    std::vector<HeadRun> heads;
    for (std::uint32_t g = 0; g < s_.kv_heads; ++g)
      heads.emplace_back(*this, config, layer, g, outcome.caches[layer][g], queries,
                         outcome.narrowest);
    run_layer(config, heads);
  }
  return outcome;
}

}  // namespace kvlab::brute
