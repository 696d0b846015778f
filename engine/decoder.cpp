#include "engine/decoder.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <stdexcept>

#include "engine/head_cache.hpp"
#include "traces/base/parallel.hpp"

namespace kvlab {
namespace {

constexpr std::uint32_t kFullAdmission = 512;  // tokens: bounds memory where chunks do not matter
constexpr std::uint32_t kQueryBlock = 32;      // queries that share one pass over the keys
constexpr double kThreadedProducts = 1e6;      // fewer multiplications: threads cost more
constexpr std::uint32_t kLongestSequence = 1u << 31;  // tokens

}  // namespace

class Decoder::Impl {
 public:
  Impl(const Model& model, ResolvedConfig cache, unsigned threads)
      : model_(model), config_(model.config()), asked_(std::move(cache)), threads_(threads) {
    check_for_decoder(asked_, config_.layers, config_.kv_heads);
    const HeadShape shape{.head_size = config_.head_size,
                          .group = config_.query_heads / config_.kv_heads,
                          .positions = asked_.positions,
                          .softmax_scale = config_.softmax_scale(),
                          .threshold16 = asked_.threshold16()};
    for (std::uint32_t layer = 0; layer < config_.layers; ++layer)
      for (std::uint32_t head = 0; head < config_.kv_heads; ++head)
        heads_.emplace_back(shape, asked_.live_set(layer, head));
  }

  std::span<const float> feed(std::span<const std::int32_t> ids, SegmentKind kind,
                              std::vector<float>* all_logits) {
    if (ids.empty()) throw std::invalid_argument("decoder: no tokens to feed; give at least one");
    if (ids.size() > kLongestSequence - tokens_)
      throw std::invalid_argument(
          fmt::format("decoder: more than {} tokens in a sequence", kLongestSequence));
    if (all_logits) all_logits->resize(ids.size() * config_.vocab);
    logits_.resize(config_.vocab);
    const std::size_t chunk = admission_tokens(kind, ids.size());
    for (std::size_t start = 0; start < ids.size(); start += chunk) {
      const auto part = ids.subspan(start, std::min(chunk, ids.size() - start));
      run_layers(part, kind, kind == SegmentKind::prompt && start == 0);
      if (all_logits)
        model_.logits(x_.data(), part.size(), all_logits->data() + start * config_.vocab, threads_);
      else if (start + part.size() == ids.size())
        model_.logits(x_.data() + (part.size() - 1) * config_.hidden, 1, logits_.data(), threads_);
    }
    if (all_logits) std::copy_n(all_logits->end() - config_.vocab, config_.vocab, logits_.begin());
    return logits_;
  }

  void extend(Sampler& sampler, std::uint32_t count,
              const std::function<bool(std::int32_t)>& on_id) {
    if (tokens_ == 0)
      throw std::invalid_argument("decoder: nothing to extend; feed a prompt first");
    for (std::uint32_t sampled = 0; sampled < count; ++sampled) {
      const std::int32_t id = sampler.pick(logits_);
      if (!on_id(id) || sampled + 1 == count) return;
      feed({&id, 1}, SegmentKind::decode, nullptr);
    }
  }

  std::uint64_t evictions() const {
    std::uint64_t sum = 0;
    for (const HeadCache& head : heads_) sum += head.live().evictions();
    return sum;
  }

  const LiveSet& live(std::uint32_t layer, std::uint32_t kv_head) const {
    return heads_.at(std::size_t{layer} * config_.kv_heads + kv_head).live();
  }

  std::uint32_t tokens() const { return tokens_; }
  std::uint64_t kv_bytes_peak() const { return kv_bytes_peak_; }
  void watch(DecoderObserver* observer) { observer_ = observer; }

 private:
  std::size_t admission_tokens(SegmentKind kind, std::size_t count) const {
    const bool any_chunk = !asked_.evicts() && asked_.policy.entry->info.needs == Needs::nothing;
    const std::uint32_t asked = kind == SegmentKind::decode ? 1 : asked_.prefill.chunk;
    if (any_chunk && (asked == 0 || kind == SegmentKind::decode)) return kFullAdmission;
    return asked == 0 ? count : asked;
  }

  /// One admission through all layers; leaves the last hidden states in x_ [token, hidden].
  void run_layers(std::span<const std::int32_t> ids, SegmentKind kind, bool new_segment) {
    const std::size_t n = ids.size();
    x_.resize(n * config_.hidden);
    q_.resize(n * config_.query_heads * config_.head_size);
    k_.resize(n * config_.kv_heads * config_.head_size);
    v_.resize(k_.size());
    out_.resize(q_.size());
    lse_.resize(n * config_.query_heads);
    cover_positions(tokens_ + static_cast<std::uint32_t>(n));

    model_.embed(ids, x_.data());
    if (observer_) observer_->admission(ids, tokens_, kind, new_segment);
    for (std::uint32_t layer = 0; layer < config_.layers; ++layer) {
      model_.attention_inputs(layer, x_.data(), n, q_.data(), k_.data(), v_.data(), threads_);
      attend(layer, static_cast<std::uint32_t>(n));
      if (observer_) observer_->layer(layer, q_, k_, v_, out_, lse_);
      model_.attention_output(layer, out_.data(), n, x_.data(), threads_);
      if (observer_) observer_->residual(layer, x_);
      model_.mlp(layer, x_.data(), n, threads_);
    }
    tokens_ += static_cast<std::uint32_t>(n);
    count_bytes();
    if (observer_) observer_->admitted();
  }

  /// Steps 1 to 4 of the rule for all KV heads of a layer.
  void attend(std::uint32_t layer, std::uint32_t n) {
    const std::uint32_t heads = config_.kv_heads;
    for (std::uint32_t head = 0; head < heads; ++head) {
      const auto victims = cache(layer, head).make_room(tokens_);
      if (observer_) observer_->evicted(layer, head, tokens_, victims);
    }
    const unsigned threads = threads_for(layer, n);
    parallel_for(heads, threads,
                 [&](std::size_t head) { cache(layer, head).admit(admission(head, n), *rope_); });
    const std::uint32_t blocks = (n + kQueryBlock - 1) / kQueryBlock;
    parallel_for(std::size_t{heads} * blocks, threads, [&](std::size_t item) {
      const std::size_t head = item % heads;
      const auto begin = static_cast<std::uint32_t>(item / heads) * kQueryBlock;
      cache(layer, head)
          .attend(admission(head, n), begin, std::min(n, begin + kQueryBlock), *rope_);
    });
    for (std::uint32_t head = 0; head < heads; ++head) {
      const auto seen = cache(layer, head).observe();
      if (observer_) show(layer, head, seen);
    }
  }

  void show(std::uint32_t layer, std::uint32_t head, std::span<const Observation> seen) {
    const LiveSet& live = cache(layer, head).live();
    std::vector<std::byte> states;
    for (std::size_t age = 0; age < live.size(); ++age) {
      const auto bytes = live.state(age);
      states.insert(states.end(), bytes.begin(), bytes.end());
    }
    observer_->observed(layer, head, {live.positions(), states}, seen);
  }

  HeadCache& cache(std::size_t layer, std::size_t head) {
    return heads_[layer * config_.kv_heads + head];
  }

  HeadAdmission admission(std::size_t head, std::uint32_t n) {
    const std::size_t group = config_.query_heads / config_.kv_heads, dim = config_.head_size;
    return {.first = tokens_,
            .tokens = n,
            .q = q_.data() + head * group * dim,
            .out = out_.data() + head * group * dim,
            .query_stride = config_.query_heads * dim,
            .k = k_.data() + head * dim,
            .v = v_.data() + head * dim,
            .key_stride = config_.kv_heads * dim,
            .lse = lse_.data() + head * group,
            .lse_stride = config_.query_heads};
  }

  unsigned threads_for(std::uint32_t layer, std::uint32_t n) {
    const double live = static_cast<double>(cache(layer, 0).live().size()) + n;
    const double products = live * n * config_.query_heads * config_.head_size;
    return products < kThreadedProducts ? 1 : threads_;
  }

  void cover_positions(std::uint32_t count) {
    if (rope_ && rope_->positions() >= count) return;
    const std::uint32_t doubled = rope_ ? 2 * rope_->positions() : 1024;
    rope_.emplace(config_.rope, std::max(count, doubled));
  }

  void count_bytes() {
    std::uint64_t live = 0;
    for (const HeadCache& head : heads_) live += head.live().size();
    kv_bytes_peak_ = std::max(kv_bytes_peak_, live * 2 * config_.head_size * sizeof(float));
  }

  const Model& model_;
  const ModelConfig& config_;
  ResolvedConfig asked_;
  unsigned threads_;
  std::deque<HeadCache> heads_;  // [layer, kv_head]
  std::optional<RopeTable> rope_;
  DecoderObserver* observer_ = nullptr;
  std::uint32_t tokens_ = 0;
  std::uint64_t kv_bytes_peak_ = 0;
  std::vector<float> x_, q_, k_, v_, out_, lse_, logits_;
};

Decoder::Decoder(const Model& model, ResolvedConfig cache, unsigned threads)
    : impl_(std::make_unique<Impl>(model, std::move(cache), threads)) {}
Decoder::~Decoder() = default;

void Decoder::watch(DecoderObserver* observer) { impl_->watch(observer); }
std::span<const float> Decoder::feed(std::span<const std::int32_t> ids, SegmentKind kind,
                                     std::vector<float>* all_logits) {
  return impl_->feed(ids, kind, all_logits);
}
void Decoder::extend(Sampler& sampler, std::uint32_t count,
                     const std::function<bool(std::int32_t)>& on_id) {
  impl_->extend(sampler, count, on_id);
}
std::uint32_t Decoder::tokens() const { return impl_->tokens(); }
std::uint64_t Decoder::kv_bytes_peak() const { return impl_->kv_bytes_peak(); }
std::uint64_t Decoder::evictions() const { return impl_->evictions(); }
const LiveSet& Decoder::live(std::uint32_t layer, std::uint32_t kv_head) const {
  return impl_->live(layer, kv_head);
}

}  // namespace kvlab
