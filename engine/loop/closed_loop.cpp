#include "engine/loop/closed_loop.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>

#include "policies/executor.hpp"
#include "policies/observation.hpp"
#include "sim/run_heads.hpp"
#include "traces/base/numeric/softmax.hpp"
#include "traces/base/parallel.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kLogitRows = 48;  // rows of logits held at once

/// A layer's projections for all tokens, before RoPE.
struct Projections {
  std::vector<float> q, k, v;  // [token, query_heads, dim], [token, kv_heads, dim] twice

  Projections(const ModelShape& shape, std::size_t tokens)
      : q(tokens * shape.query_heads * shape.head_size),
        k(tokens * shape.kv_heads * shape.head_size),
        v(k.size()) {}
};

HeadView view_of(const Projections& p, const ModelShape& shape, std::uint32_t tokens,
                 std::uint32_t kv_head, OutputWeights output) {
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
          .output = output};
}

/// Where the attention of a configuration goes: [token, query_heads, dim].
struct Target {
  std::size_t config;
  float* out;
};

class ClosedLoop {
 public:
  ClosedLoop(const Model& model, std::span<const std::int32_t> ids,
             std::span<const CacheConfig> configs, const LoopOptions& options)
      : model_(model),
        shape_(model.config().shape()),
        ids_(ids),
        options_(options),
        tokens_(static_cast<std::uint32_t>(ids.size())),
        rope_(model.config().rope, tokens_),
        arithmetic_{.softmax_scale = model.config().softmax_scale(),
                    .rounding = std::nullopt,
                    .threshold16 = 0},  // each configuration has its own
        hidden_(configs.size()),
        scores_(configs.size()) {
    const auto [prompt, first_scored] = loop_span(tokens_, options);
    const std::vector<Segment> segments = segments_of(tokens_, prompt);
    first_scored_ = first_scored;
    for (const CacheConfig& config : configs) {
      configs_.push_back(resolve(config, segments, options.sequence, model.config().heads()));
      check_held(kDecoder, configs_.back());
      if (wants_projections(config.policy.columns)) output_ = model.output_projections();
    }
  }

  std::vector<LoopScores> run() {
    first_layer();
    note_done(static_cast<double>(configs_.size()));
    for (std::uint32_t layer = 1; layer < shape_.layers; ++layer)
      for (std::size_t c = 0; c < configs_.size(); ++c) {
        next_layer(layer, c);
        note_done(1);
      }
    score();
    return std::move(scores_);
  }

 private:
  std::size_t output_floats() const {
    return std::size_t{tokens_} * shape_.query_heads * shape_.head_size;
  }

  /// How many layers the logits of a configuration are worth, by their products.
  double layers_of_scores() const {
    const ModelConfig& config = model_.config();
    const double heads = (2 * shape_.query_heads + 2 * shape_.kv_heads) * shape_.head_size;
    return static_cast<double>(config.vocab) * (tokens_ - 1 - first_scored_) /
           ((heads + 3.0 * static_cast<double>(config.mlp)) * tokens_);
  }

  /// `layers` of a configuration, or what is worth as many.
  void note_done(double layers) {
    done_ += layers;
    const double each = shape_.layers + layers_of_scores();
    if (options_.progress) options_.progress(done_ / (each * static_cast<double>(configs_.size())));
  }

  /// All configurations see the same queries, keys and values, and share their exponentials.
  void first_layer() {
    std::vector<float> x(std::size_t{tokens_} * model_.config().hidden);
    model_.embed(ids_, x.data());
    Projections p(shape_, tokens_);
    model_.attention_inputs(0, x.data(), tokens_, p.q.data(), p.k.data(), p.v.data(),
                            options_.threads);
    std::vector<std::vector<float>> outputs(configs_.size(), std::vector<float>(output_floats()));
    attend(0, 0, p, outputs);
    for (std::size_t c = 0; c < configs_.size(); ++c) {
      hidden_[c] = x;
      finish_layer(0, c, outputs[c]);
      outputs[c] = {};
    }
  }

  void next_layer(std::uint32_t layer, std::size_t c) {
    Projections p(shape_, tokens_);
    model_.attention_inputs(layer, hidden_[c].data(), tokens_, p.q.data(), p.k.data(), p.v.data(),
                            options_.threads);
    std::vector<std::vector<float>> outputs(1, std::vector<float>(output_floats()));
    attend(layer, c, p, outputs);
    finish_layer(layer, c, outputs[0]);
  }

  void finish_layer(std::uint32_t layer, std::size_t c, const std::vector<float>& output) {
    model_.attention_output(layer, output.data(), tokens_, hidden_[c].data(), options_.threads);
    model_.mlp(layer, hidden_[c].data(), tokens_, options_.threads);
  }

  /// Attention of configurations first, first + 1, … into `outputs`, one each.
  void attend(std::uint32_t layer, std::size_t first, const Projections& p,
              std::vector<std::vector<float>>& outputs) {
    std::vector<Target> by_layer, by_head;
    for (std::size_t i = 0; i < outputs.size(); ++i)
      (configs_[first + i].evicts_by_layer() ? by_layer : by_head)
          .push_back({first + i, outputs[i].data()});
    if (!by_head.empty()) attend_by_head(layer, p, by_head);
    if (!by_layer.empty()) attend_by_layer(layer, p, by_layer);
  }

  void attend_by_head(std::uint32_t layer, const Projections& p, std::span<const Target> targets) {
    parallel_for(shape_.kv_heads, options_.threads, [&](std::size_t h) {
      const auto kv_head = static_cast<std::uint32_t>(h);
      const HeadView view =
          view_of(p, shape_, tokens_, kv_head, weights_of(output_.get(), layer, kv_head));
      std::vector<std::unique_ptr<HeadRun>> runs;
      for (const Target& target : targets) runs.push_back(make_run(target, layer, kv_head, view));
      SharedRows rows(view, rope_, arithmetic_);
      run_head(tokens_, rows, runs);
      for (std::size_t i = 0; i < runs.size(); ++i) count_bytes(targets[i], *runs[i]);
    });
  }

  void attend_by_layer(std::uint32_t layer, const Projections& p, std::span<const Target> targets) {
    std::vector<SharedRows> rows;
    std::vector<LayerRun> runs(targets.size());
    for (std::uint32_t h = 0; h < shape_.kv_heads; ++h) {
      const HeadView view = view_of(p, shape_, tokens_, h, weights_of(output_.get(), layer, h));
      rows.emplace_back(view, rope_, arithmetic_);
      for (std::size_t i = 0; i < targets.size(); ++i)
        runs[i].push_back(make_run(targets[i], layer, h, view));
    }
    run_layer(tokens_, rows, runs);
    for (std::size_t i = 0; i < targets.size(); ++i)
      for (const auto& run : runs[i]) count_bytes(targets[i], *run);
  }

  void count_bytes(const Target& target, const HeadRun& run) {
    const std::lock_guard lock(bytes_mutex_);
    scores_[target.config].kv_bytes_peak +=
        std::uint64_t{run.live().live_max()} * 2 * shape_.head_size * sizeof(float);
  }

  std::unique_ptr<HeadRun> make_run(const Target& target, std::uint32_t layer,
                                    std::uint32_t kv_head, const HeadView& view) {
    const ResolvedConfig& config = configs_[target.config];
    HeadArithmetic arithmetic = arithmetic_;
    arithmetic.threshold16 = config.threshold16();
    auto run = std::make_unique<HeadRun>(config.live_set(layer, kv_head), config.positions,
                                         config.admissions, view, rope_, arithmetic);
    const std::size_t dim = shape_.head_size;
    run->write_outputs({.out = target.out + kv_head * shape_.group() * dim,
                        .token_stride = shape_.query_heads * dim,
                        .head_stride = dim});
    return run;
  }

  void score() {
    const std::size_t scored = tokens_ - 1 - first_scored_;
    for (LoopScores& scores : scores_) {
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
    std::vector<float> full(count * vocab), other(count * vocab);
    for (std::size_t c = 0; c < configs_.size(); ++c) {
      std::vector<float>& logits = is_yardstick(c) ? full : other;
      model_.logits(hidden_[c].data() + (first_scored_ + first) * hidden, count, logits.data(),
                    options_.threads);
      parallel_for(count, options_.threads, [&](std::size_t i) {
        score_one(c, first + i, std::span(full).subspan(i * vocab, vocab),
                  std::span(logits).subspan(i * vocab, vocab));
      });
    }
  }

  void score_one(std::size_t c, std::size_t row, std::span<const float> full,
                 std::span<const float> logits) {
    const RowScore score = score_row(full, logits, ids_[first_scored_ + row + 1]);
    scores_[c].nll[row] = score.nll;
    scores_[c].kl[row] = is_yardstick(c) ? 0 : score.kl;
    scores_[c].same_first[row] = is_yardstick(c) || score.same_first;
  }
  bool is_yardstick(std::size_t c) const { return c == 0 || !options_.against_first; }

  const Model& model_;
  const ModelShape shape_;
  std::span<const std::int32_t> ids_;
  std::shared_ptr<const OutputProjections> output_;  // null where no column takes it
  std::vector<ResolvedConfig> configs_;
  const LoopOptions& options_;
  std::uint32_t tokens_, first_scored_ = 0;
  RopeTable rope_;
  HeadArithmetic arithmetic_;
  std::vector<std::vector<float>> hidden_;  // by configuration: [token, hidden]
  std::vector<LoopScores> scores_;
  double done_ = 0;         // layers
  std::mutex bytes_mutex_;  // of kv_bytes_peak, in scores_
};

}  // namespace

LoopSpan loop_span(std::uint32_t tokens, const LoopOptions& options) {
  const std::uint32_t prompt = std::min(options.prompt_tokens, tokens);
  const std::uint32_t first_scored = options.span == Span::decode ? prompt : 0;
  if (tokens < 2 || first_scored + 1 >= tokens)
    throw std::invalid_argument(
        fmt::format("a sequence of {} tokens with a prompt of {} leaves none to score; a longer "
                    "text, a shorter prompt or --span all would",
                    tokens, prompt));
  return {prompt, first_scored};
}

std::vector<Segment> segments_of(std::uint32_t tokens, std::uint32_t prompt) {
  std::vector<Segment> segments;
  if (prompt > 0) segments.push_back({0, prompt, SegmentKind::prompt});
  if (prompt < tokens) segments.push_back({prompt, tokens - prompt, SegmentKind::decode});
  return segments;
}

std::vector<LoopScores> run_closed_loop(const Model& model, std::span<const std::int32_t> ids,
                                        std::span<const CacheConfig> configs,
                                        const LoopOptions& options) {
  return ClosedLoop(model, ids, configs, options).run();
}

}  // namespace kvlab
