#include "engine/evaluation/end_to_end.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <iterator>
#include <numeric>
#include <stdexcept>

#include "policies/executor.hpp"
#include "policies/observation.hpp"
#include "sim/cache/layer_cache.hpp"
#include "sim/head_view.hpp"
#include "sim/live_counts.hpp"
#include "traces/base/cancel.hpp"
#include "traces/base/numeric/softmax.hpp"
#include "traces/base/parallel.hpp"
#include "traces/layer_ropes.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kLogitRows = 48;  // rows of logits in memory at once

/// Queries, keys and values of all tokens in a layer, before RoPE.
struct Projections {
  std::vector<float> q, k, v;  // [token, query_heads, dim], [token, kv_heads, dim] twice

  Projections(const ModelShape& shape, std::size_t tokens)
      : q(tokens * shape.query_heads * shape.head_size),
        k(tokens * shape.kv_heads * shape.head_size),
        v(k.size()) {}
};

// Number of tokens of each append in texts whose results are the same for every size of appends.
constexpr std::uint32_t kFreeAppend = 512;

/// One layer's attention over a text whose queries, keys and values are known.
class LayerAttention {
 public:
  /// `p` and `rope` must outlive this object. `p` may change between two calls.
  LayerAttention(const ModelConfig& model, std::uint32_t layer, const Projections& p,
                 const RopeTable& rope, unsigned threads)
      : model_(model), layer_(layer), p_(p), rope_(rope), threads_(threads) {}

  /// Appends a prompt of more than one token to all caches. No cache quantizes a token of the
  /// prompt before all queries of the prompt have attended. So all caches see the same tokens, and
  /// the first cache attends for all of them. Writes the outputs to `out` [token, query_heads,
  /// dim].
  void append_prompt(std::deque<LayerCache>& caches, std::uint32_t tokens, float* out) const {
    parallel_for(model_.kv_heads, threads_, [&](std::size_t h) {
      const HeadAppend append = caches.front().head_append(rows(0, tokens, out), h);
      std::vector<HostCache*> heads;
      for (LayerCache& cache : caches) heads.push_back(&cache.heads()[h]);
      for (HostCache* const head : heads) head->begin_step(append, rope_);
      for (std::uint32_t begin = 0; begin < tokens; begin += kQueryBlock) {
        throw_if_cancelled();
        heads[0]->attend(append, begin, std::min(tokens, begin + kQueryBlock), rope_,
                         {.followers = std::span(heads).subspan(1)});
      }
      for (LayerCache& cache : caches) {
        HostCache& head = cache.heads()[h];
        head.end_step();
        head.end_prompt();
        // Evicts now, so that only these heads hold whole prompts at the same time.
        if (!cache.evicts_together()) head.evict_to_budget(tokens);
      }
    });
  }

  /// Runs the configuration's appends of the tokens [first, end) with one cache. If `out` is null,
  /// outputs are not computed.
  void run(LayerCache& cache, const ResolvedConfig& config, std::uint32_t first, std::uint32_t end,
           float* out) const {
    const std::vector<Append> appends = appends_of(config, first, end);
    if (cache.evicts_together()) {
      for (const Append& append : appends) {
        throw_if_cancelled();
        cache.step(rows(append.first, append.tokens, out), rope_, threads_);
        if (append.ends_prompt) cache.end_prompt();
      }
      return;
    }
    parallel_for(model_.kv_heads, threads_, [&](std::size_t h) {
      for (const Append& append : appends) {
        throw_if_cancelled();
        cache.heads()[h].step(cache.head_append(rows(append.first, append.tokens, out), h), rope_);
        if (append.ends_prompt) cache.heads()[h].end_prompt();
      }
    });
  }

  /// Decodes the tokens [first, end) in windows of `window` tokens. For each window, the cache
  /// drafts the tokens with the projections of `drafts`, drops the draft tokens, and appends the
  /// tokens with the projections of this object. Writes the attention outputs of the draft tokens
  /// to `out`.
  void run_drafts(LayerCache& cache, const LayerAttention& drafts, std::uint32_t first,
                  std::uint32_t end, std::uint32_t window, float* out) const {
    const std::vector<DraftPath> paths = chain_paths(window);
    const auto run_heads = [&](std::size_t begin, std::size_t heads) {
      for (std::uint32_t next = first; next < end; next += window)
        run_window(cache, {begin, heads}, drafts,
                   {next, std::span(paths).first(std::min(window, end - next))}, out);
    };
    if (cache.evicts_together()) return run_heads(0, model_.kv_heads);
    parallel_for(model_.kv_heads, threads_, [&](std::size_t h) { run_heads(h, 1); });
  }

 private:
  struct HeadRange {
    std::size_t first, count;
  };
  /// Tokens that are drafted before they are verified. Each follows the one before it.
  struct DraftWindow {
    std::uint32_t first;
    std::span<const DraftPath> paths;  // [token]
  };

  static std::vector<DraftPath> chain_paths(std::uint32_t tokens) {
    std::vector<DraftPath> paths(tokens);
    for (std::uint32_t token = 0; token < tokens; ++token)
      for (std::uint32_t node = 0; node <= token; ++node) paths[token].push_back(node);
    return paths;
  }

  /// Drafts and appends one window for some KV heads of the cache.
  void run_window(LayerCache& cache, HeadRange heads, const LayerAttention& drafts,
                  const DraftWindow& window, float* out) const {
    throw_if_cancelled();
    const auto tokens = static_cast<std::uint32_t>(window.paths.size());
    for (std::size_t h = heads.first; h < heads.first + heads.count; ++h)
      cache.heads()[h].attend_draft(cache.head_append(drafts.rows(window.first, tokens, out), h),
                                    window.paths, rope_);
    for (std::uint32_t token = window.first; token < window.first + tokens; ++token)
      for (std::size_t h = heads.first; h < heads.first + heads.count; ++h)
        cache.heads()[h].step(cache.head_append(rows(token, 1, nullptr), h), rope_);
  }

  LayerRows rows(std::uint32_t first, std::uint32_t tokens, float* out) const {
    const std::size_t keys = std::size_t{first} * model_.kv_heads * model_.head_size,
                      queries = std::size_t{first} * model_.query_heads * model_.head_size;
    return {.first = first,
            .tokens = tokens,
            .q = p_.q.data() + queries,
            .k = p_.k.data() + keys,
            .v = p_.v.data() + keys,
            .out = out ? out + queries : nullptr};
  }

  std::vector<Append> appends_of(const ResolvedConfig& config, std::uint32_t first,
                                 std::uint32_t end) const {
    std::vector<Append> appends;
    if (!any_chunk(config) || model_.rows[layer_].window > 0) {
      std::ranges::copy_if(config.appends, std::back_inserter(appends), [&](const Append& append) {
        return append.first >= first && append.first < end;
      });
      return appends;
    }
    for (; first < end; first += kFreeAppend)
      appends.push_back({.first = first, .tokens = std::min(kFreeAppend, end - first)});
    return appends;
  }

  const ModelConfig& model_;
  std::uint32_t layer_;
  const Projections& p_;
  const RopeTable& rope_;
  unsigned threads_;
};

/// Runs all configurations layer by layer. Configurations that append the prompt at once have
/// exactly the same hidden states for the prompt in every layer. So only the first of them stores
/// the hidden states of all tokens, and the others store those of decoded tokens.
class LayerEvaluation {
 public:
  LayerEvaluation(const Model& model, std::span<const std::int32_t> ids,
                  std::span<const CacheConfig> configs, const SequenceOptions& options)
      : model_(model),
        shape_(model.config().shape()),
        ids_(ids),
        options_(options),
        tokens_(static_cast<std::uint32_t>(ids.size())),
        range_(scored_range(tokens_, options)),
        ropes_(model.config().rows, tokens_),
        p_(shape_, tokens_),
        drafts_(shape_, options.draft > 0 ? tokens_ : 0),
        hidden_(configs.size()),
        scores_(configs.size()) {
    const std::vector<Segment> segments = segments_of(tokens_, range_.prompt);
    for (const CacheConfig& config : configs) {
      configs_.push_back(resolve(config, segments, options.sequence, model.config().heads()));
      check_held(kEvaluation, configs_.back());
      find_features(configs_.back(), ids.first(range_.prompt), model.config().heads());
      if (wants_projections(config.policy.features)) output_ = model.output_projections();
    }
    for (std::size_t c = 0; c < configs_.size(); ++c)
      (shares_prompt(c) ? alike_ : apart_).push_back(c);
  }

  std::vector<TokenScores> run() {
    embed();
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      if (drafts()) {
        next_layer_drafting(layer);
        continue;
      }
      for (const std::size_t c : apart_) next_layer(layer, c);
      if (!alike_.empty()) next_layer_alike(layer);
    }
    score();
    return std::move(scores_);
  }

 private:
  std::size_t output_floats() const {
    return std::size_t{tokens_} * shape_.query_heads * shape_.head_size;
  }

  /// The cost of computing a configuration's logits, expressed as a number of layers.
  double layers_of_scores() const {
    const ModelConfig& config = model_.config();
    const double heads = (2 * shape_.query_heads + 2 * shape_.kv_heads) * shape_.head_size;
    return static_cast<double>(config.vocab) * (tokens_ - 1 - range_.first_scored) /
           ((heads + 3.0 * static_cast<double>(config.mlp)) * tokens_);
  }

  /// Counts finished work: `layers` of a configuration, or work of the same cost.
  void note_done(double layers) {
    done_ += layers;
    const double each = shape_.layers + layers_of_scores();
    if (options_.progress) options_.progress(done_ / (each * static_cast<double>(configs_.size())));
  }

  bool drafts() const { return options_.draft > 0; }
  /// Whether a configuration has the hidden states of the full cache for the prompt. It always has
  /// them if configurations draft. Otherwise it has them if it appends the prompt at once, and if
  /// the prompt has at least two tokens, because a single token may be quantized before its own
  /// query attends, like a decoded token.
  bool shares_prompt(std::size_t c) const {
    return drafts() || (range_.prompt > 1 && appends_prompt_at_once(configs_[c], range_));
  }
  /// The first token of which a configuration has a row.
  std::uint32_t first_row(std::size_t c) const {
    return shares_prompt(c) && c != alike_[0] ? range_.prompt : 0;
  }
  const float* hidden_at(std::size_t c, std::size_t token) const {
    const std::size_t own = token < first_row(c) ? alike_[0] : c;
    return hidden_[own].data() + (token - first_row(own)) * model_.config().hidden;
  }

  /// Computes the embeddings of all configurations and the first layer's projections.
  void embed() {
    std::vector<float> x(std::size_t{tokens_} * model_.config().hidden);
    model_.embed(ids_, x.data());
    model_.attention_inputs(0, x.data(), tokens_, p_.q.data(), p_.k.data(), p_.v.data(),
                            options_.threads);
    for (std::size_t c = 0; c < configs_.size(); ++c)
      hidden_[c].assign(x.begin() + first_row(c) * std::ptrdiff_t{model_.config().hidden}, x.end());
  }

  LayerAttention attention(std::uint32_t layer) const { return attention(layer, p_); }
  LayerAttention attention(std::uint32_t layer, const Projections& p) const {
    return {model_.config(), layer, p, ropes_[layer], options_.threads};
  }
  /// Shows the prompt in p_ to a configuration's policy, and adds the configuration's empty caches.
  void add(std::deque<LayerCache>& caches, std::uint32_t layer, std::size_t c) const {
    show(layer, c);
    caches.emplace_back(configs_[c], head_shape(model_.config(), layer, configs_[c]),
                        shape_.kv_heads, layer, output_.get());
  }

  void next_layer(std::uint32_t layer, std::size_t c) {
    project(layer, c, p_);
    std::vector<float> output(output_floats());
    std::deque<LayerCache> own;
    add(own, layer, c);
    attention(layer).run(own.front(), configs_[c], 0, tokens_, output.data());
    finish_layer(layer, c, peak_bytes(c, layer, own.front()), output);
  }

  /// Runs the next layer of the full cache, whose rows stay in p_, and of the configurations that
  /// draft.
  void next_layer_drafting(std::uint32_t layer) {
    next_layer(layer, 0);
    std::vector<float> output(output_floats());
    for (std::size_t c = 1; c < configs_.size(); ++c) {
      std::deque<LayerCache> own;
      add(own, layer, c);
      attention(layer).run(own.front(), configs_[c], 0, range_.prompt, nullptr);
      project(layer, c, drafts_);
      attention(layer).run_drafts(own.front(), attention(layer, layer == 0 ? p_ : drafts_),
                                  range_.prompt, tokens_, options_.draft, output.data());
      finish_layer(layer, c, peak_bytes(c, layer, own.front()), output);
    }
  }

  /// Runs the next layer of the configurations alike_, which share the prompt's rows in p_. The
  /// configurations run one after another, and each writes its rows of decoded tokens to p_ behind
  /// the prompt's rows.
  void next_layer_alike(std::uint32_t layer) {
    project(layer, alike_[0], p_);
    std::vector<float> output(output_floats());
    std::deque<LayerCache> caches;
    for (const std::size_t c : alike_) add(caches, layer, c);
    attention(layer).append_prompt(caches, range_.prompt, output.data());
    for (const std::size_t c : alike_) {
      if (c != alike_[0]) project(layer, c, p_);
      attention(layer).run(caches.front(), configs_[c], range_.prompt, tokens_, output.data());
      finish_layer(layer, c, peak_bytes(c, layer, caches.front()), output);
      caches.pop_front();
    }
  }

  /// Peak bytes of a configuration's keys and values in a layer.
  std::uint64_t peak_bytes(std::size_t c, std::uint32_t layer, const LayerCache& cache) const {
    std::uint64_t bytes = 0;
    for (const HostCache& head : cache.heads()) {
      const LiveSet& live = head.live();
      bytes += live.is_quantized()
                   ? live_counts(configs_[c], layer, live.budget()).bytes_peak * shape_.head_size /
                         kQuantBlock
                   : live.live_max() * std::uint64_t{2} * shape_.head_size * sizeof(float);
    }
    return bytes;
  }

  /// Shows the prompt's queries, keys and values to a policy that reads them. Such policies append
  /// the prompt at once.
  void show(std::uint32_t layer, std::size_t c) const {
    const PolicyEntry& policy = *configs_[c].policy.entry;
    const RowSpec& row = model_.config().rows[layer];
    if (policy.see_rows)
      policy.see_rows({options_.sequence, layer, 0, range_.prompt, shape_.query_heads,
                       shape_.kv_heads, shape_.head_size, p_.q.data(), p_.k.data(), p_.v.data(),
                       row.rope.inv_freq, row.rope.factor, row.scale});
  }

  /// Computes the projections of a configuration's rows, in `p`. embed() has computed those of
  /// layer 0, in p_.
  void project(std::uint32_t layer, std::size_t c, Projections& p) {
    if (layer == 0) return;
    const std::size_t first = first_row(c), dim = shape_.head_size,
                      kv = first * shape_.kv_heads * dim;
    model_.attention_inputs(layer, hidden_[c].data(), tokens_ - first,
                            p.q.data() + first * shape_.query_heads * dim, p.k.data() + kv,
                            p.v.data() + kv, options_.threads);
  }

  void finish_layer(std::uint32_t layer, std::size_t c, std::uint64_t bytes,
                    const std::vector<float>& output) {
    const std::size_t first = first_row(c);
    scores_[c].kv_bytes_peak += bytes;
    model_.attention_output(layer, output.data() + first * shape_.query_heads * shape_.head_size,
                            tokens_ - first, hidden_[c].data(), options_.threads);
    model_.mlp(layer, hidden_[c].data(), tokens_ - first, options_.threads);
    note_done(1);
  }

  void score() {
    const std::size_t scored = tokens_ - 1 - range_.first_scored;
    for (TokenScores& scores : scores_) {
      scores.nll.resize(scored);
      scores.kl.resize(scored);
      scores.same_first.resize(scored);
      if (drafts()) scores.acceptance.resize(scored);
    }
    const std::size_t blocks = (scored + kLogitRows - 1) / kLogitRows;
    for (std::size_t block = 0; block < blocks; ++block) {
      const std::size_t first = block * kLogitRows;
      score_rows(first, std::min(kLogitRows, scored - first));
      note_done(layers_of_scores() * static_cast<double>(configs_.size()) /
                static_cast<double>(blocks));
    }
  }

  void score_rows(std::size_t first, std::size_t count) {
    const std::size_t vocab = model_.config().vocab, hidden = model_.config().hidden;
    std::vector<float> full(count * vocab), other(count * vocab), rows(count * hidden);
    for (std::size_t c = 0; c < configs_.size(); ++c) {
      std::vector<float>& logits = is_yardstick(c) ? full : other;
      for (std::size_t i = 0; i < count; ++i)
        std::copy_n(hidden_at(c, range_.first_scored + first + i), hidden,
                    rows.data() + i * hidden);
      model_.logits(rows.data(), count, logits.data(), options_.threads);
      parallel_for(count, options_.threads, [&](std::size_t i) {
        score_one(c, first + i, std::span(full).subspan(i * vocab, vocab),
                  std::span(logits).subspan(i * vocab, vocab));
      });
    }
  }

  void score_one(std::size_t c, std::size_t row, std::span<const float> full,
                 std::span<const float> logits) {
    const RowScore score = score_row(full, logits, ids_[range_.first_scored + row + 1]);
    scores_[c].nll[row] = score.nll;
    scores_[c].kl[row] = is_yardstick(c) ? 0 : score.kl;
    scores_[c].same_first[row] = is_yardstick(c) || score.same_first;
    if (drafts()) scores_[c].acceptance[row] = acceptance_of(full, logits);
  }
  bool is_yardstick(std::size_t c) const { return c == 0 || !options_.compares_to_first; }

  const Model& model_;
  const ModelShape shape_;
  std::span<const std::int32_t> ids_;
  std::shared_ptr<const OutputProjections> output_;  // null if no feature reads it
  std::vector<ResolvedConfig> configs_;
  const SequenceOptions& options_;
  std::vector<std::size_t> alike_, apart_;  // indices of configurations
  std::uint32_t tokens_;
  ScoredRange range_;
  LayerRopes ropes_;
  Projections p_;       // of the layer in progress
  Projections drafts_;  // of the drafted tokens of a configuration; empty if none drafts
  std::vector<std::vector<float>> hidden_;  // [configuration][row of the configuration, hidden]
  std::vector<TokenScores> scores_;
  double done_ = 0;  // in layers
};

constexpr std::uint32_t kBlock = 256;  // tokens whose logits are in memory at once
// Maximum size of blocks that have to be larger, because they consist of whole chunks of a prompt.
constexpr std::uint32_t kMaxBlock = 8192;

/// How many tokens of a prompt to feed at once, so that every configuration appends them as if the
/// prompt were fed as a whole; 0: all.
std::uint32_t prompt_block(std::span<const CacheConfig> configs) {
  std::uint64_t block = 1;
  for (const CacheConfig& config : configs) {
    if (!config.evicts() && !config.policy.tier_plan.is_quantized()) continue;
    if (config.prefill.chunk == 0) return 0;
    block = std::lcm(block, std::uint64_t{config.prefill.chunk});
    if (block > kMaxBlock) return 0;
  }
  return static_cast<std::uint32_t>((kBlock + block - 1) / block * block);
}

class TokenEvaluation {
 public:
  TokenEvaluation(Backend& backend, std::span<const std::int32_t> ids,
                  std::span<const CacheConfig> configs, const SequenceOptions& options)
      : vocab_(backend.config().vocab),
        ids_(ids),
        options_(options),
        tokens_(static_cast<std::uint32_t>(ids.size())),
        range_(scored_range(tokens_, options)),
        prompt_block_(prompt_block(configs)),
        logits_(configs.size()),
        seconds_(configs.size()),
        scores_(configs.size()) {
    for (const CacheConfig& config : configs) {
      const CacheShape heads = backend.config().heads();
      ResolvedConfig resolved =
          resolve(config.at_prompt(range_.prompt), tokens_, options.sequence, heads);
      find_features(resolved, ids.first(range_.prompt), heads);
      decoders_.push_back(backend.decoder(resolved, tokens_));
    }
  }

  std::vector<TokenScores> run() {
    const std::uint32_t chunk_tokens = prompt_block_ == 0 ? range_.prompt : prompt_block_;
    for (std::uint32_t first = 0; first < range_.prompt; first += chunk_tokens)
      feed(first, std::min(chunk_tokens, range_.prompt - first), SegmentKind::prompt);
    for (std::uint32_t first = range_.prompt; first < tokens_; first += kBlock)
      feed(first, std::min(kBlock, tokens_ - first), SegmentKind::decode);
    for (std::size_t c = 0; c < decoders_.size(); ++c)
      scores_[c].kv_bytes_peak = decoders_[c]->kv_bytes_peak();
    return std::move(scores_);
  }

 private:
  void feed(std::uint32_t first, std::uint32_t count, SegmentKind kind) {
    if (count == 0) return;
    using Clock = std::chrono::steady_clock;
    const bool scored = first + count > range_.first_scored;
    for (std::size_t c = 0; c < decoders_.size(); ++c) {
      const Clock::time_point start = Clock::now();
      decoders_[c]->feed(ids_.subspan(first, count), kind, scored ? &logits_[c] : nullptr);
      const std::chrono::duration<float> taken = Clock::now() - start;
      seconds_[c] = taken.count() / static_cast<float>(count);
    }
    if (scored) score(first, count);
    if (options_.progress)
      options_.progress(static_cast<double>(first + count) / static_cast<double>(tokens_));
  }

  /// Scores rows `first` to first + count - 1 of all configurations. The last token of a sequence
  /// is not scored, because no token follows it.
  void score(std::uint32_t first, std::uint32_t count) {
    const std::uint32_t begin = std::max(first, range_.first_scored);
    const std::uint32_t end = std::min(first + count, tokens_ - 1);
    for (std::size_t c = 0; c < decoders_.size() && begin < end; ++c) {
      std::vector<RowScore> rows(end - begin);
      parallel_for(rows.size(), options_.threads, [&](std::size_t i) {
        const std::size_t at = (begin - first + i) * vocab_;
        rows[i] = score_row(std::span(logits_[baseline_of(c)]).subspan(at, vocab_),
                            std::span(logits_[c]).subspan(at, vocab_), ids_[begin + i + 1]);
      });
      for (const RowScore& row : rows) {
        scores_[c].nll.push_back(row.nll);
        scores_[c].kl.push_back(c == baseline_of(c) ? 0 : row.kl);
        scores_[c].same_first.push_back(c == baseline_of(c) || row.same_first);
        scores_[c].seconds.push_back(seconds_[c]);
      }
    }
  }
  std::size_t baseline_of(std::size_t c) const { return options_.compares_to_first ? 0 : c; }

  std::size_t vocab_;
  std::span<const std::int32_t> ids_;
  const SequenceOptions& options_;
  std::uint32_t tokens_;
  ScoredRange range_;
  std::uint32_t prompt_block_;
  std::vector<std::unique_ptr<SequenceDecoder>> decoders_;  // by configuration
  std::vector<std::vector<float>> logits_;                  // by configuration, [token, vocab]
  std::vector<float> seconds_;  // [configuration]: seconds for a token of the last feed
  std::vector<TokenScores> scores_;
};

}  // namespace

ScoredRange scored_range(std::uint32_t tokens, const SequenceOptions& options) {
  if (tokens < 2)
    throw std::invalid_argument(
        fmt::format("a sequence of {} has no token to score, because nothing predicts its first "
                    "token; give a longer text",
                    tokens == 1 ? "1 token" : "no tokens"));
  const std::uint32_t prompt = std::min(options.prompt_tokens, tokens);
  const std::uint32_t first_scored = options.queries == Queries::decode ? prompt : 0;
  if (first_scored + 1 >= tokens)
    throw std::invalid_argument(
        fmt::format("a sequence of {} tokens with a prompt of {} leaves no token to score; give a "
                    "longer text, a shorter prompt or --queries all",
                    tokens, prompt));
  return {prompt, first_scored};
}

std::vector<Segment> segments_of(std::uint32_t tokens, std::uint32_t prompt) {
  std::vector<Segment> segments;
  if (prompt > 0) segments.push_back({0, prompt, SegmentKind::prompt});
  if (prompt < tokens) segments.push_back({prompt, tokens - prompt, SegmentKind::decode});
  return segments;
}

double acceptance_of(std::span<const float> full, std::span<const float> draft) {
  std::vector<float> p(full.size()), q(draft.size());
  shared_exponentials(full.data(), full.size(), p.data());
  shared_exponentials(draft.data(), draft.size(), q.data());
  const double p_sum = lane_sum(p.data(), p.size()), q_sum = lane_sum(q.data(), q.size());
  double lost = 0;
  for (std::size_t i = 0; i < p.size(); ++i)
    lost += std::max(0.0, static_cast<double>(p[i]) / p_sum - static_cast<double>(q[i]) / q_sum);
  return 1 - lost;
}

std::vector<TokenScores> evaluate_by_layers(const Model& model, std::span<const std::int32_t> ids,
                                            std::span<const CacheConfig> configs,
                                            const SequenceOptions& options) {
  return LayerEvaluation(model, ids, configs, options).run();
}

std::vector<TokenScores> evaluate_by_tokens(Backend& backend, std::span<const std::int32_t> ids,
                                            std::span<const CacheConfig> configs,
                                            const SequenceOptions& options) {
  return TokenEvaluation(backend, ids, configs, options).run();
}

}  // namespace kvlab
