#include "engine/decoder.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <map>
#include <stdexcept>

#include "engine/sequence_decoder.hpp"
#include "policies/executor.hpp"
#include "sim/cache/growing_rope.hpp"
#include "sim/cache/layer_cache.hpp"
#include "traces/base/parallel.hpp"

namespace kvlab {
namespace {

// Maximum number of tokens of an append in configurations whose results do not depend on the size
// of appends. The maximum limits the memory.
constexpr std::uint32_t kFullAppend = 512;
// Minimum number of multiplications at which several threads are faster than one.
constexpr double kThreadedProducts = 1e6;

}  // namespace

HeadShape head_shape(const ModelConfig& model, std::uint32_t layer, const ResolvedConfig& cache) {
  const RowSpec& row = model.rows[layer];
  return {.head_size = model.head_size,
          .group = model.query_heads / model.kv_heads,
          .positions = cache.positions_of(layer),
          .softmax_scale = row.scale,
          .threshold16 = cache.threshold16(),
          .window = row.window,
          .softcap = row.softcap,
          .sinks = row.sinks};
}

class Decoder::Impl {
 public:
  Impl(const Model& model, ResolvedConfig cache, unsigned threads)
      : model_(model), config_(model.config()), requested_(std::move(cache)), threads_(threads) {
    requested_.windows = config_.heads().windows;
    check_held(kDecoder, requested_, config_.heads());
    if (wants_projections(requested_.policy.features)) output_ = model.output_projections();
    for (std::uint32_t layer = 0; layer < config_.layers; ++layer) {
      const RowSpec& row = config_.rows[layer];
      layers_.emplace_back(requested_, head_shape(config_, layer, requested_), config_.kv_heads,
                           layer, output_.get());
      ropes_.try_emplace(row.table, row.rope);
    }
  }

  std::span<const float> feed(std::span<const std::int32_t> ids, SegmentKind kind,
                              std::vector<float>* all_logits) {
    check_length(ids.size());
    if (all_logits) all_logits->resize(ids.size() * config_.vocab);
    logits_.resize(config_.vocab);
    const std::size_t chunk = append_tokens(kind, ids.size());
    for (std::size_t start = 0; start < ids.size(); start += chunk) {
      const auto part = ids.subspan(start, std::min(chunk, ids.size() - start));
      if (observer_)
        observer_->begin_append(part, tokens_, kind, kind == SegmentKind::prompt && start == 0);
      Impl* const self = this;
      run_layers({&self, 1}, part, Rows::own);
      if (observer_) observer_->end_append();
      const float* const x = work_.x.data();
      if (all_logits)
        model_.logits(x, part.size(), all_logits->data() + start * config_.vocab, threads_);
      else if (start + part.size() == ids.size())
        model_.logits(x + (part.size() - 1) * config_.hidden, 1, logits_.data(), threads_);
    }
    if (all_logits) std::copy_n(all_logits->end() - config_.vocab, config_.vocab, logits_.begin());
    if (kind == SegmentKind::prompt) end_prompt();
    return logits_;
  }

  void extend(Sampler& sampler, std::uint32_t count,
              const std::function<bool(std::int32_t)>& on_id) {
    if (tokens_ == 0)
      throw std::invalid_argument("decoder: there is nothing to extend; feed a prompt first");
    for (std::uint32_t sampled = 0; sampled < count; ++sampled) {
      const std::int32_t id = sampler.pick(logits_);
      if (!on_id(id) || sampled + 1 == count) return;
      feed({&id, 1}, SegmentKind::decode, nullptr);
    }
  }

  static void step(std::span<Decoder* const> decoders, std::span<const std::int32_t> ids,
                   float* logits) {
    const std::vector<Impl*> all = impls_of(decoders);
    run_layers(all, ids, Rows::own);
    keep_logits(all, all.front()->work_.x.data(), all.size());
    copy_logits(all, logits);
  }

  static void prompt(std::span<Decoder* const> decoders, std::span<const std::int32_t> ids,
                     float* logits) {
    const std::vector<Impl*> all = impls_of(decoders);
    std::vector<Impl*> original, cache_positions;
    for (Impl* const one : all) {
      const bool whole = any_chunk(one->requested_) || one->requested_.prefill.chunk == 0;
      if (one->tokens_ > 0 || !whole || ids.empty())
        one->feed(ids, SegmentKind::prompt, nullptr);
      else
        (one->requested_.positions == Positions::original ? original : cache_positions)
            .push_back(one);
    }
    for (const auto& together : {original, cache_positions}) {
      if (together.empty()) continue;
      run_layers(together, ids, Rows::shared);
      const Impl& first = *together.front();
      keep_logits(together, first.work_.x.data() + (ids.size() - 1) * first.config_.hidden, 1);
      for (Impl* const one : together) one->end_prompt();
    }
    copy_logits(all, logits);
  }

  std::span<const float> feed_with(Impl& drafter, std::span<const std::int32_t> ids,
                                   SegmentKind kind) {
    check_length(ids.size());
    const std::vector<Impl*> both{this, &drafter};
    const std::size_t chunk = drafter.append_tokens(kind, ids.size());
    for (std::size_t start = 0; start < ids.size(); start += chunk)
      run_layers(both, ids.subspan(start, std::min(chunk, ids.size() - start)), Rows::shared);
    logits_.resize(config_.vocab);
    model_.logits(work_.x.data() + work_.x.size() - config_.hidden, 1, logits_.data(), threads_);
    for (Impl* const one : both)
      if (kind == SegmentKind::prompt) one->end_prompt();
    return logits_;
  }

  std::span<const float> draft(DraftRows& drafts, std::span<const std::int32_t> ids,
                               std::span<const std::uint32_t> parents) {
    check_length(drafts.paths.size() + ids.size());
    if (drafts.paths.empty()) {
      drafts.layers.resize(config_.layers);
      for (LayerCache& layer : layers_) layer.drop_drafts();
    }
    const std::size_t before = drafts.paths.size(), n = ids.size();
    std::uint32_t depth = 0;
    for (std::size_t i = 0; i < n; ++i) {
      const auto node = static_cast<std::uint32_t>(before + i);
      DraftPath path = node == 0 ? DraftPath{} : drafts.paths.at(parents[i]);
      path.push_back(node);
      depth = std::max(depth, static_cast<std::uint32_t>(path.size()));
      drafts.paths.push_back(std::move(path));
    }
    const std::span paths = std::span(drafts.paths).subspan(before);
    work_.resize(config_, n);
    through_layers(ids, [&](std::uint32_t layer) {
      DraftRows::Layer& own = drafts.layers[layer];
      own.q.insert(own.q.end(), work_.q.begin(), work_.q.end());
      own.k.insert(own.k.end(), work_.k.begin(), work_.k.end());
      own.v.insert(own.v.end(), work_.v.begin(), work_.v.end());
      GrowingRope& rope = ropes_.at(config_.rows[layer].table);
      const auto tokens = static_cast<std::uint32_t>(n);
      layers_[layer].attend_draft(rows({work_, 0, tokens, true}), paths,
                                  rope.covering(tokens_ + depth), threads_for(layer, tokens));
    });
    draft_logits_.resize(n * config_.vocab);
    model_.logits(work_.x.data(), n, draft_logits_.data(), threads_);
    return draft_logits_;
  }

  void accept(const DraftRows& drafts, std::span<const std::uint32_t> path) {
    const std::size_t queries = std::size_t{config_.query_heads} * config_.head_size,
                      keys = std::size_t{config_.kv_heads} * config_.head_size;
    const auto count = static_cast<std::uint32_t>(path.size());
    for (std::uint32_t layer = 0; layer < config_.layers; ++layer) {
      const DraftRows::Layer& from = drafts.layers[layer];
      const RopeTable& rope = ropes_.at(config_.rows[layer].table).covering(tokens_ + count);
      for (std::uint32_t i = 0; i < count; ++i)
        layers_[layer].step({.first = tokens_ + i,
                             .tokens = 1,
                             .q = &from.q[path[i] * queries],
                             .k = &from.k[path[i] * keys],
                             .v = &from.v[path[i] * keys],
                             .out = nullptr},
                            rope, threads_for(layer, 1));
    }
    tokens_ += count;
    count_bytes();
  }

  std::uint64_t evictions() const {
    std::uint64_t sum = 0;
    for (std::uint32_t layer = 0; layer < config_.layers; ++layer)
      for (const HostCache& head : layers_[layer].heads())
        if (requested_.window_of(layer) == 0) sum += head.live().evictions();
    return sum;
  }

  const LiveSet& live(std::uint32_t layer, std::uint32_t kv_head) const {
    return layers_.at(layer).heads().at(kv_head).live();
  }

  std::uint32_t tokens() const { return tokens_; }
  std::vector<std::vector<std::uint32_t>> kept() const {
    std::vector<std::vector<std::uint32_t>> kept(config_.layers);
    for (std::size_t l = 0; l < layers_.size(); ++l)
      for (const HostCache& head : layers_[l].heads())
        kept[l].push_back(static_cast<std::uint32_t>(head.live().size()));
    return kept;
  }
  std::uint64_t kv_bytes_peak() const { return kv_bytes_peak_; }
  void watch(DecoderObserver* observer) { observer_ = observer; }

 private:
  /// Buffers of a pass through the layers; rows are tokens.
  struct Work {
    std::vector<float> x, q, k, v, out, lse;

    void resize(const ModelConfig& config, std::size_t rows) {
      x.resize(rows * config.hidden);
      q.resize(rows * config.query_heads * config.head_size);
      k.resize(rows * config.kv_heads * config.head_size);
      v.resize(k.size());
      out.resize(q.size());
      lse.resize(rows * config.query_heads);
    }
  };
  /// The tokens of one decoder in a Work.
  struct Part {
    Work& work;
    std::size_t first_row;
    std::uint32_t tokens;
    bool wants_outputs;
  };
  /// Whether each of the decoders that run together has its own rows (the same number each), or all
  /// of them use the same rows.
  enum class Rows { own, shared };

  void check_length(std::size_t more) const {
    if (more == 0) throw std::invalid_argument("decoder: no tokens to feed; give at least one");
    const std::uint32_t max_tokens = longest_sequence(config_.query_heads / config_.kv_heads);
    if (more > max_tokens - tokens_)
      throw std::invalid_argument(
          fmt::format("decoder: a sequence has at most {} tokens; start a new one", max_tokens));
  }

  void end_prompt() {
    for (LayerCache& layer : layers_) layer.end_prompt();
  }

  std::size_t append_tokens(SegmentKind kind, std::size_t count) const {
    const std::uint32_t requested = kind == SegmentKind::decode ? 1 : requested_.prefill.chunk;
    if (any_chunk(requested_) && (requested == 0 || kind == SegmentKind::decode))
      return kFullAppend;
    return requested == 0 ? count : requested;
  }

  static std::vector<Impl*> impls_of(std::span<Decoder* const> decoders) {
    std::vector<Impl*> impls;
    for (const Decoder* const decoder : decoders) impls.push_back(decoder->impl_.get());
    return impls;
  }

  /// Computes the logits of hidden states x [rows, hidden] and stores them in the decoders. There
  /// is one row for each decoder, or one row for all of them.
  static void keep_logits(std::span<Impl* const> decoders, const float* x, std::size_t rows) {
    const Impl& first = *decoders.front();
    const std::size_t vocab = first.config_.vocab;
    std::vector<float> computed(rows * vocab);
    first.model_.logits(x, rows, computed.data(), first.threads_);
    for (std::size_t d = 0; d < decoders.size(); ++d) {
      const float* const own = computed.data() + (rows == 1 ? 0 : d * vocab);
      decoders[d]->logits_.assign(own, own + vocab);
    }
  }
  /// Copies the logits to `logits` [decoder, vocab], unless that is null.
  static void copy_logits(std::span<Impl* const> decoders, float* logits) {
    if (!logits) return;
    for (const Impl* const one : decoders)
      logits = std::copy(one->logits_.begin(), one->logits_.end(), logits);
  }

  /// Runs one append of each decoder through all layers, using the Work of the first decoder. The
  /// hidden states after the last layer [row, hidden] remain in that Work.
  static void run_layers(std::span<Impl* const> decoders, std::span<const std::int32_t> ids,
                         Rows rows) {
    Impl& first = *decoders.front();
    const unsigned threads = first.threads_;
    const std::size_t n = ids.size();
    Work& work = first.work_;
    work.resize(first.config_, n);
    const auto each = static_cast<std::uint32_t>(rows == Rows::shared ? n : n / decoders.size());
    // Many decoders with one token each: each thread attends for some of the decoders. Otherwise,
    // the decoders attend one after another, and each divides its heads among the threads.
    const bool side_by_side = decoders.size() > 1 && each == 1;
    const auto attend = [&](std::uint32_t layer, std::size_t d) {
      const std::size_t row = rows == Rows::shared ? 0 : d * each;
      const bool wants_outputs = d == 0 || rows == Rows::own;
      decoders[d]->attend(layer, {work, row, each, wants_outputs}, side_by_side ? 1 : threads);
    };

    first.through_layers(ids, [&](std::uint32_t layer) {
      parallel_for(decoders.size(), side_by_side ? threads : 1,
                   [&](std::size_t d) { attend(layer, d); });
    });
    for (Impl* const one : decoders) {
      one->tokens_ += each;
      one->count_bytes();
    }
  }

  /// Runs the tokens of work_ through the layers. `attend` computes a layer's attention outputs.
  void through_layers(std::span<const std::int32_t> ids,
                      const std::function<void(std::uint32_t layer)>& attend) {
    const std::size_t n = ids.size();
    model_.embed(ids, work_.x.data());
    for (std::uint32_t layer = 0; layer < config_.layers; ++layer) {
      model_.attention_inputs(layer, work_.x.data(), n, work_.q.data(), work_.k.data(),
                              work_.v.data(), threads_);
      attend(layer);
      if (observer_) observer_->layer(layer, work_.q, work_.k, work_.v, work_.out, work_.lse);
      model_.attention_output(layer, work_.out.data(), n, work_.x.data(), threads_);
      if (observer_ && config_.norms.post_attention.empty()) observer_->residual(layer, work_.x);
      model_.mlp(layer, work_.x.data(), n, threads_);
    }
  }

  /// Passes this decoder's rows through the caches of a layer, which evict, attend and observe.
  void attend(std::uint32_t layer, const Part& part, unsigned max_threads) {
    GrowingRope& rope = ropes_.at(config_.rows[layer].table);
    layers_[layer].step(rows(part), rope.covering(tokens_ + part.tokens),
                        std::min(max_threads, threads_for(layer, part.tokens)));
    if (observer_) show_step(layer);
  }

  /// Shows the observer what the caches of a layer evicted and observed in a step.
  void show_step(std::uint32_t layer) {
    const auto& heads = layers_[layer].heads();
    for (std::uint32_t head = 0; head < heads.size(); ++head)
      observer_->evicted(layer, head, tokens_, heads[head].victims());
    for (std::uint32_t head = 0; head < heads.size(); ++head) {
      const LiveSet& live = heads[head].live();
      std::vector<std::byte> states;
      for (std::size_t age = 0; age < live.size(); ++age) {
        const auto bytes = live.state(age);
        states.insert(states.end(), bytes.begin(), bytes.end());
      }
      observer_->observed(layer, head, {live.positions(), states, live.feature_values()},
                          heads[head].observations());
    }
  }

  LayerRows rows(const Part& part) const {
    const std::size_t queries = part.first_row * config_.query_heads,
                      keys = part.first_row * config_.kv_heads, dim = config_.head_size;
    Work& work = part.work;
    return {.first = tokens_,
            .tokens = part.tokens,
            .q = work.q.data() + queries * dim,
            .k = work.k.data() + keys * dim,
            .v = work.v.data() + keys * dim,
            .out = part.wants_outputs ? work.out.data() + queries * dim : nullptr,
            .lse = observer_ ? work.lse.data() + queries : nullptr};
  }

  unsigned threads_for(std::uint32_t layer, std::uint32_t n) {
    const double live = static_cast<double>(layers_[layer].heads()[0].live().size()) + n;
    const double products = live * n * config_.query_heads * config_.head_size;
    return products < kThreadedProducts ? 1 : threads_;
  }

  void count_bytes() {
    std::uint64_t bytes = 0;
    for (const LayerCache& layer : layers_)
      for (const HostCache& head : layer.heads()) bytes += head.live_bytes();
    kv_bytes_peak_ = std::max(kv_bytes_peak_, bytes);
  }

  const Model& model_;
  const ModelConfig& config_;
  ResolvedConfig requested_;
  unsigned threads_;
  std::shared_ptr<const OutputProjections> output_;  // null if no feature reads it
  std::deque<LayerCache> layers_;
  std::map<std::uint32_t, GrowingRope> ropes_;  // [RoPE table]
  DecoderObserver* observer_ = nullptr;
  std::uint32_t tokens_ = 0;
  std::uint64_t kv_bytes_peak_ = 0;
  Work work_;
  std::vector<float> logits_, draft_logits_;
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
void Decoder::step(std::span<Decoder* const> decoders, std::span<const std::int32_t> ids,
                   float* logits) {
  Impl::step(decoders, ids, logits);
}
void Decoder::prompt(std::span<Decoder* const> decoders, std::span<const std::int32_t> ids,
                     float* logits) {
  Impl::prompt(decoders, ids, logits);
}
std::span<const float> Decoder::feed_with(Decoder& drafter, std::span<const std::int32_t> ids,
                                          SegmentKind kind) {
  return impl_->feed_with(*drafter.impl_, ids, kind);
}
std::span<const float> Decoder::draft(DraftRows& drafts, std::span<const std::int32_t> ids,
                                      std::span<const std::uint32_t> parents) {
  return impl_->draft(drafts, ids, parents);
}
void Decoder::accept(const DraftRows& drafts, std::span<const std::uint32_t> path) {
  impl_->accept(drafts, path);
}
std::uint32_t Decoder::tokens() const { return impl_->tokens(); }
std::uint64_t Decoder::kv_bytes_peak() const { return impl_->kv_bytes_peak(); }
std::uint64_t Decoder::evictions() const { return impl_->evictions(); }
std::vector<std::vector<std::uint32_t>> Decoder::kept() const { return impl_->kept(); }
const LiveSet& Decoder::live(std::uint32_t layer, std::uint32_t kv_head) const {
  return impl_->live(layer, kv_head);
}

}  // namespace kvlab
