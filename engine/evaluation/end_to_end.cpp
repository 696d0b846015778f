#include "engine/evaluation/end_to_end.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <stdexcept>

#include "policies/executor.hpp"
#include "policies/observation.hpp"
#include "sim/head_run.hpp"
#include "sim/live_counts.hpp"
#include "traces/base/numeric/softmax.hpp"
#include "traces/base/parallel.hpp"
#include "traces/layer_ropes.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kLogitRows = 48;  // rows of logits in memory at once

/// A layer's projections for all tokens, before RoPE.
struct Projections {
  std::vector<float> q, k, v;  // [token, query_heads, dim], [token, kv_heads, dim] twice

  Projections(const ModelShape& shape, std::size_t tokens)
      : q(tokens * shape.query_heads * shape.head_size),
        k(tokens * shape.kv_heads * shape.head_size),
        v(k.size()) {}
};

HeadView view_of(const Projections& p, const ModelShape& shape, std::uint32_t tokens,
                 std::uint32_t kv_head, const RowSpec& row, OutputWeights output) {
  const std::size_t dim = shape.head_size, kv_offset = kv_head * dim;
  return {.tokens = tokens,
          .group = shape.group(),
          .head_size = shape.head_size,
          .q = p.q.data() + kv_offset * shape.group(),
          .q_head_stride = dim,
          .q_token_stride = shape.query_heads * dim,
          .k = p.k.data() + kv_offset,
          .v = p.v.data() + kv_offset,
          .kv_token_stride = shape.kv_heads * dim,
          .sinks = row.sinks_of(kv_head, shape.group()),
          .output = output,
          .rope = &row.rope,
          .softmax_scale = row.scale};
}

/// A layer's attention under several configurations. They have the same queries, keys and values
/// and share their exponentials, until change() is called.
class LayerAttention {
 public:
  /// `p` and `rope` must outlive it.
  LayerAttention(const ModelShape& shape, const Projections& p, std::uint32_t layer,
                 const OutputProjections* output, const RopeTable& rope, const RowSpec& row,
                 const HeadArithmetic& arithmetic, unsigned threads)
      : shape_(shape), layer_(layer), rope_(rope), arithmetic_(arithmetic), threads_(threads) {
    const auto tokens = static_cast<std::uint32_t>(p.k.size() / shape.kv_heads / shape.head_size);
    for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
      views_.push_back(view_of(p, shape, tokens, head, row, weights_of(output, layer, head)));
      rows_.emplace_back(views_.back(), rope, arithmetic);
    }
    by_head_.resize(shape.kv_heads);
    feature_values_.resize(shape.kv_heads);
    for (std::uint32_t head = 0; head < shape.kv_heads; ++head)
      views_[head].feature_values = &feature_values_[head];
  }

  /// Adds a configuration, which must outlive this. Its outputs are written to `out` [token,
  /// query_heads, dim]; null: nowhere.
  void add(const ResolvedConfig& config, float* out) {
    configs_.push_back(&config);
    output_indices_.push_back({config.evicts_by_layer(),
                               config.evicts_by_layer() ? by_layer_.size() : by_head_[0].size()});
    if (output_indices_.back().by_layer) by_layer_.emplace_back();
    HeadArithmetic arithmetic = arithmetic_;
    arithmetic.threshold16 = config.threshold16();
    for (std::uint32_t head = 0; head < shape_.kv_heads; ++head) {
      bring(config, layer_, head, views_[head].tokens, feature_values_[head]);
      (output_indices_.back().by_layer ? by_layer_.back() : by_head_[head])
          .push_back(std::make_unique<HeadRun>(config.live_set(layer_, head),
                                               config.positions_of(layer_), config.appends,
                                               views_[head], rope_, arithmetic));
    }
    write_outputs(output_indices_.size() - 1, out);
  }

  /// Attention of all configurations.
  void attend(QueryRange queries) {
    attend_by_head(queries, 0, by_head_[0].size());
    attend_by_layer(queries, 0, by_layer_.size());
  }
  /// Attention of the i-th configuration that was added.
  void attend_one(std::size_t i, QueryRange queries) {
    const auto [by_layer, at] = output_indices_[i];
    by_layer ? attend_by_layer(queries, at, 1) : attend_by_head(queries, at, 1);
  }
  /// Queries, keys and values from token `first` on have changed. The i-th configuration continues
  /// with them and writes to `out`.
  void change(std::uint32_t first, std::size_t i, float* out) {
    for (std::uint32_t head = 0; head < shape_.kv_heads; ++head) {
      rows_[head].read_keys(first);
      run(i, head).look_again();
    }
    write_outputs(i, out);
  }

  /// Peak bytes of the i-th configuration's keys and values.
  std::uint64_t peak_bytes(std::size_t i) {
    std::uint64_t bytes = 0;
    for (std::uint32_t head = 0; head < shape_.kv_heads; ++head) {
      const LiveSet& live = run(i, head).live();
      bytes +=
          live.is_quantized()
              ? live_counts(*configs_[i], live.budget()).bytes_peak * shape_.head_size / kQuantBlock
              : live.live_max() * std::uint64_t{2} * shape_.head_size * sizeof(float);
    }
    return bytes;
  }

 private:
  struct OutputIndex {
    bool by_layer;
    std::size_t at;  // index among the configurations that run in the same way
  };

  HeadRun& run(std::size_t i, std::uint32_t head) {
    const auto [by_layer, at] = output_indices_[i];
    return by_layer ? *by_layer_[at][head] : *by_head_[head][at];
  }

  void write_outputs(std::size_t i, float* out) {
    const std::size_t dim = shape_.head_size, group = shape_.group();
    for (std::uint32_t head = 0; out && head < shape_.kv_heads; ++head)
      run(i, head).write_outputs({.out = out + head * group * dim,
                                  .token_stride = shape_.query_heads * dim,
                                  .head_stride = dim});
  }

  void attend_by_head(QueryRange queries, std::size_t first, std::size_t count) {
    parallel_for(shape_.kv_heads, threads_, [&](std::size_t head) {
      run_head(queries, rows_[head], std::span(by_head_[head]).subspan(first, count));
    });
  }
  void attend_by_layer(QueryRange queries, std::size_t first, std::size_t count) {
    run_layer(queries, rows_, std::span(by_layer_).subspan(first, count));
  }

  const ModelShape& shape_;
  std::uint32_t layer_;
  const RopeTable& rope_;
  const HeadArithmetic arithmetic_;
  unsigned threads_;
  std::vector<FeaturesByName> feature_values_;                  // [kv_head]
  std::vector<HeadView> views_;                                 // [kv_head]
  std::vector<SharedRows> rows_;                                // [kv_head]
  std::vector<std::vector<std::unique_ptr<HeadRun>>> by_head_;  // [kv_head][configuration]
  std::vector<LayerRun> by_layer_;                              // [configuration][kv_head]
  std::vector<OutputIndex> output_indices_;
  std::vector<const ResolvedConfig*> configs_;
};

/// Configurations that append the prompt at once see exactly the same prompt in every layer. The
/// first of them, the base, has rows of all tokens; the others have rows of decoded tokens only.
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
      (appends_at_once(c) ? alike_ : apart_).push_back(c);
  }

  std::vector<EvalScores> run() {
    first_layer();
    for (std::uint32_t layer = 1; layer < shape_.layers; ++layer) {
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

  /// The cost of a configuration's logits in layers, by their products.
  double layers_of_scores() const {
    const ModelConfig& config = model_.config();
    const double heads = (2 * shape_.query_heads + 2 * shape_.kv_heads) * shape_.head_size;
    return static_cast<double>(config.vocab) * (tokens_ - 1 - range_.first_scored) /
           ((heads + 3.0 * static_cast<double>(config.mlp)) * tokens_);
  }

  /// Counts work done: `layers` of a configuration, or work of the same size.
  void note_done(double layers) {
    done_ += layers;
    const double each = shape_.layers + layers_of_scores();
    if (options_.progress) options_.progress(done_ / (each * static_cast<double>(configs_.size())));
  }

  bool appends_at_once(std::size_t c) const { return appends_prompt_at_once(configs_[c], range_); }
  /// The first token of which a configuration has a row.
  std::uint32_t first_row(std::size_t c) const {
    return appends_at_once(c) && c != alike_[0] ? range_.prompt : 0;
  }
  const float* hidden_at(std::size_t c, std::size_t token) const {
    const std::size_t own = token < first_row(c) ? alike_[0] : c;
    return hidden_[own].data() + (token - first_row(own)) * model_.config().hidden;
  }

  LayerAttention attention(std::uint32_t layer, const Projections& p) const {
    const RowSpec& row = model_.config().rows[layer];
    return {shape_,
            p,
            layer,
            output_.get(),
            ropes_[layer],
            row,
            {.softmax_scale = row.scale,
             .softcap = row.softcap,
             .window = row.window},  // (the rest differs by configuration)
            options_.threads};
  }

  void first_layer() {
    std::vector<float> x(std::size_t{tokens_} * model_.config().hidden);
    model_.embed(ids_, x.data());
    for (std::size_t c = 0; c < configs_.size(); ++c)
      hidden_[c].assign(x.begin() + first_row(c) * std::ptrdiff_t{model_.config().hidden}, x.end());
    Projections p(shape_, tokens_);
    model_.attention_inputs(0, x.data(), tokens_, p.q.data(), p.k.data(), p.v.data(),
                            options_.threads);
    std::vector<std::vector<float>> outputs(configs_.size(), std::vector<float>(output_floats()));
    LayerAttention all = attention(0, p);
    for (std::size_t c = 0; c < configs_.size(); ++c) {
      show(0, c, p);
      all.add(configs_[c], outputs[c].data());
    }
    all.attend({0, tokens_});
    for (std::size_t c = 0; c < configs_.size(); ++c) {
      finish_layer(0, c, all.peak_bytes(c), outputs[c]);
      outputs[c] = {};
    }
  }

  void next_layer(std::uint32_t layer, std::size_t c) {
    Projections p(shape_, tokens_);
    project(layer, c, p);
    std::vector<float> output(output_floats());
    LayerAttention own = attention(layer, p);
    own.add(configs_[c], output.data());
    own.attend({0, tokens_});
    finish_layer(layer, c, own.peak_bytes(0), output);
  }

  /// Runs the next layer of the configurations alike_. After the prompt, which they share, `p`
  /// contains the decoded rows of each in turn.
  void next_layer_alike(std::uint32_t layer) {
    Projections p(shape_, tokens_);
    project(layer, alike_[0], p);
    std::vector<float> output(output_floats());
    LayerAttention all = attention(layer, p);
    for (const std::size_t c : alike_) {
      show(layer, c, p);
      all.add(configs_[c], c == alike_[0] ? output.data() : nullptr);
    }
    all.attend({0, range_.prompt});
    for (std::size_t i = 0; i < alike_.size(); ++i) {
      if (i > 0) {
        project(layer, alike_[i], p);
        all.change(range_.prompt, i, output.data());
      }
      all.attend_one(i, {range_.prompt, tokens_});
      finish_layer(layer, alike_[i], all.peak_bytes(i), output);
    }
  }

  /// Shows the prompt's rows to a policy that reads rows. Such policies append the prompt at once.
  void show(std::uint32_t layer, std::size_t c, const Projections& p) const {
    const PolicyEntry& policy = *configs_[c].policy.entry;
    const RowSpec& row = model_.config().rows[layer];
    if (policy.see_rows)
      policy.see_rows({options_.sequence, layer, 0, range_.prompt, shape_.query_heads,
                       shape_.kv_heads, shape_.head_size, p.q.data(), p.k.data(), p.v.data(),
                       row.rope.inv_freq, row.rope.factor, row.scale});
  }

  /// Computes the projections of a configuration's rows.
  void project(std::uint32_t layer, std::size_t c, Projections& p) const {
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
    for (EvalScores& scores : scores_) {
      scores.nll.resize(scored);
      scores.kl.resize(scored);
      scores.same_first.resize(scored);
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
  }
  bool is_yardstick(std::size_t c) const { return c == 0 || !options_.against_first; }

  const Model& model_;
  const ModelShape shape_;
  std::span<const std::int32_t> ids_;
  std::shared_ptr<const OutputProjections> output_;  // null if no feature reads it
  std::vector<ResolvedConfig> configs_;
  const SequenceOptions& options_;
  std::vector<std::size_t> alike_, apart_;  // configurations
  std::uint32_t tokens_;
  ScoredRange range_;
  LayerRopes ropes_;
  std::vector<std::vector<float>> hidden_;  // [configuration][its row, hidden]
  std::vector<EvalScores> scores_;
  double done_ = 0;  // in layers
};

constexpr std::uint32_t kBlock = 256;      // tokens whose logits are in memory at once
constexpr std::uint32_t kMaxBlock = 8192;  // limit, if a prompt's chunks require more

/// How many tokens of a prompt to feed at once, so that every configuration appends it as if it
/// were fed whole; 0: all.
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

  std::vector<EvalScores> run() {
    const std::uint32_t at_once = prompt_block_ == 0 ? range_.prompt : prompt_block_;
    for (std::uint32_t first = 0; first < range_.prompt; first += at_once)
      feed(first, std::min(at_once, range_.prompt - first), SegmentKind::prompt);
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

  /// Scores rows first to first + count - 1 of all configurations. The last token has no successor
  /// to predict.
  void score(std::uint32_t first, std::uint32_t count) {
    const std::uint32_t begin = std::max(first, range_.first_scored);
    const std::uint32_t end = std::min(first + count, tokens_ - 1);
    for (std::size_t c = 0; c < decoders_.size() && begin < end; ++c) {
      std::vector<RowScore> rows(end - begin);
      parallel_for(rows.size(), options_.threads, [&](std::size_t i) {
        const std::size_t at = (begin - first + i) * vocab_;
        rows[i] = score_row(std::span(logits_[yardstick(c)]).subspan(at, vocab_),
                            std::span(logits_[c]).subspan(at, vocab_), ids_[begin + i + 1]);
      });
      for (const RowScore& row : rows) {
        scores_[c].nll.push_back(row.nll);
        scores_[c].kl.push_back(c == yardstick(c) ? 0 : row.kl);
        scores_[c].same_first.push_back(c == yardstick(c) || row.same_first);
        scores_[c].seconds.push_back(seconds_[c]);
      }
    }
  }
  std::size_t yardstick(std::size_t c) const { return options_.against_first ? 0 : c; }

  std::size_t vocab_;
  std::span<const std::int32_t> ids_;
  const SequenceOptions& options_;
  std::uint32_t tokens_;
  ScoredRange range_;
  std::uint32_t prompt_block_;
  std::vector<std::unique_ptr<SequenceDecoder>> decoders_;  // by configuration
  std::vector<std::vector<float>> logits_;                  // by configuration, [token, vocab]
  std::vector<float> seconds_;  // [configuration]: seconds for a token of the last feed
  std::vector<EvalScores> scores_;
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

std::vector<EvalScores> evaluate_by_layers(const Model& model, std::span<const std::int32_t> ids,
                                           std::span<const CacheConfig> configs,
                                           const SequenceOptions& options) {
  return LayerEvaluation(model, ids, configs, options).run();
}

std::vector<EvalScores> evaluate_by_tokens(Backend& backend, std::span<const std::int32_t> ids,
                                           std::span<const CacheConfig> configs,
                                           const SequenceOptions& options) {
  return TokenEvaluation(backend, ids, configs, options).run();
}

}  // namespace kvlab
