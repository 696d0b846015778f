#include "engine/loop/calibrate/calibrate.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <numeric>
#include <stdexcept>

#include "engine/row_score.hpp"
#include "sim/shared_rows.hpp"
#include "traces/base/parallel.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kBlockTokens = 64;  // whose mean is one draw of the standard error
constexpr std::size_t kLogitRows = 48;    // rows of logits computed at once

/// Noise in one head's output.
struct Variant {
  std::uint32_t head;
  bool is_half;  ///< of half the size: the check
};

/// Of a layer's variant, over all sequences.
struct Sums {
  std::vector<double> kl;      // by block of tokens
  std::vector<double> noise2;  // likewise: squared norms
};

/// One sequence: the states of the full run, and what noise does to what follows.
class NoisyRun {
 public:
  NoisyRun(const Model& model, std::span<const std::int32_t> ids, std::uint64_t seed, double noise,
           unsigned threads)
      : model_(model),
        shape_(model.config().shape()),
        tokens_(static_cast<std::uint32_t>(ids.size())),
        seed_(seed),
        noise_(noise),
        threads_(threads),
        rope_(model.config().rope, tokens_) {
    std::vector<float> x(std::size_t{tokens_} * model.config().hidden);
    model.embed(ids, x.data());
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      before_.push_back(x);
      outputs_.push_back(attend(layer, x, threads_));
      finish(layer, outputs_.back(), x, threads_);
    }
    const std::size_t vocab = model.config().vocab;
    logits_.resize(tokens_ * vocab);
    for (std::size_t first = 0; first < tokens_; first += kLogitRows)
      model.logits(x.data() + first * model.config().hidden,
                   std::min<std::size_t>(kLogitRows, tokens_ - first),
                   logits_.data() + first * vocab, threads_);
  }

  /// Adds what every variant of a layer does to the sums. `done`: called for each variant.
  void add(std::uint32_t layer, std::span<const Variant> variants, std::span<Sums> sums,
           const std::function<void()>& done) const {
    std::vector<std::vector<float>> x(variants.size());
    std::vector<std::vector<double>> noise2(variants.size());
    parallel_for(variants.size(), threads_, [&](std::size_t i) {
      std::vector<float> output = outputs_[layer];
      noise2[i] = disturb(layer, variants[i], output);
      x[i] = before_[layer];
      finish(layer, output, x[i], 1);
      for (std::uint32_t above = layer + 1; above < shape_.layers; ++above)
        finish(above, attend(above, x[i], 1), x[i], 1);
      done();
    });
    const auto kl = divergences(x);
    for (std::size_t i = 0; i < variants.size(); ++i)
      for (std::size_t first = 0; first < tokens_; first += kBlockTokens) {
        const std::size_t count = std::min<std::size_t>(kBlockTokens, tokens_ - first);
        const auto sum = [&](const std::vector<double>& of) {
          const auto begin = of.begin() + static_cast<std::ptrdiff_t>(first);
          return std::accumulate(begin, begin + static_cast<std::ptrdiff_t>(count), 0.0);
        };
        sums[i].kl.push_back(sum(kl[i]));
        sums[i].noise2.push_back(sum(noise2[i]));
      }
  }

 private:
  std::size_t width() const { return std::size_t{shape_.query_heads} * shape_.head_size; }

  /// Attention's outputs with the full cache, [token, query_heads, head_size].
  std::vector<float> attend(std::uint32_t layer, const std::vector<float>& x,
                            unsigned threads) const {
    const std::size_t dim = shape_.head_size, kv_width = shape_.kv_heads * dim;
    std::vector<float> q(tokens_ * width()), k(tokens_ * kv_width), v(k.size()), out(q.size());
    model_.attention_inputs(layer, x.data(), tokens_, q.data(), k.data(), v.data(), threads);
    parallel_for(shape_.kv_heads, threads, [&](std::size_t kv_head) {
      const std::size_t first = kv_head * shape_.group() * dim;
      const HeadView view{.tokens = tokens_,
                          .group = shape_.group(),
                          .head_size = shape_.head_size,
                          .q = q.data() + first,
                          .q_head_stride = dim,
                          .q_token_stride = width(),
                          .k = k.data() + kv_head * dim,
                          .v = v.data() + kv_head * dim,
                          .kv_token_stride = kv_width};
      SharedRows rows(view, rope_, {.softmax_scale = model_.config().softmax_scale()});
      for (std::uint32_t query = 0; query < tokens_; ++query) {
        if (query % rows.block_queries() == 0)
          rows.compute(query, std::min(rows.block_queries(), tokens_ - query));
        for (std::uint32_t head = 0; head < shape_.group(); ++head) {
          const auto own = rows.output(query, head);
          std::copy(own.begin(), own.end(), out.data() + query * width() + first + head * dim);
        }
      }
    });
    return out;
  }

  void finish(std::uint32_t layer, const std::vector<float>& output, std::vector<float>& x,
              unsigned threads) const {
    model_.attention_output(layer, output.data(), tokens_, x.data(), threads);
    model_.mlp(layer, x.data(), tokens_, threads);
  }

  /// Adds a variant's noise to the outputs. Returns its squared norms, by token.
  std::vector<double> disturb(std::uint32_t layer, const Variant& variant,
                              std::vector<float>& output) const {
    const std::size_t dim = shape_.head_size;
    const auto at = [&](std::size_t token) {
      return output.data() + token * width() + variant.head * dim;
    };
    double norm2 = 0;
    for (std::size_t token = 0; token < tokens_; ++token)
      for (std::size_t d = 0; d < dim; ++d) norm2 += std::pow(static_cast<double>(at(token)[d]), 2);
    const double size = noise_ * (variant.is_half ? 0.5 : 1.0) *
                        std::sqrt(norm2 / static_cast<double>(tokens_ * dim));
    std::vector<double> noise2(tokens_);
    std::uint64_t index =
        (std::uint64_t{layer} * shape_.query_heads + variant.head) * tokens_ * dim;
    for (std::size_t token = 0; token < tokens_; ++token)
      for (std::size_t d = 0; d < dim; ++d) {
        const float before = at(token)[d];
        at(token)[d] += static_cast<float>(size * sketch_normal(seed_, index++));
        noise2[token] +=
            std::pow(static_cast<double>(at(token)[d]) - static_cast<double>(before), 2);
      }
    return noise2;
  }

  /// Of the full run's distributions from those of each state, [state][token].
  std::vector<std::vector<double>> divergences(const std::vector<std::vector<float>>& x) const {
    const std::size_t vocab = model_.config().vocab, hidden = model_.config().hidden;
    std::vector<std::vector<double>> kl(x.size(), std::vector<double>(tokens_));
    std::vector<float> other(kLogitRows * vocab);
    for (std::size_t first = 0; first < tokens_; first += kLogitRows) {
      const std::size_t count = std::min<std::size_t>(kLogitRows, tokens_ - first);
      for (std::size_t i = 0; i < x.size(); ++i) {
        model_.logits(x[i].data() + first * hidden, count, other.data(), threads_);
        parallel_for(count, threads_, [&](std::size_t row) {
          kl[i][first + row] = score_row(std::span(logits_).subspan((first + row) * vocab, vocab),
                                         std::span(other).subspan(row * vocab, vocab), 0)
                                   .kl;
        });
      }
    }
    return kl;
  }

  const Model& model_;
  const ModelShape shape_;
  std::uint32_t tokens_;
  std::uint64_t seed_;
  double noise_;
  unsigned threads_;
  RopeTable rope_;
  std::vector<std::vector<float>> before_, outputs_;  // by layer: [token, hidden], [token, width]
  std::vector<float> logits_;                         // of the full run: [token, vocab]
};

/// 2 KL / E‖noise‖², and its standard error over blocks.
struct Sensitivity {
  double value = 0, standard_error = 0;
};
Sensitivity sensitivity_of(const Sums& sums) {
  const auto total = [](const std::vector<double>& of) {
    return std::accumulate(of.begin(), of.end(), 0.0);
  };
  const double noise2 = total(sums.noise2);
  if (noise2 <= 0) return {};  // a head that puts out nothing
  Sensitivity s{2 * total(sums.kl) / noise2, 0};
  // Of a ratio of sums: what each block adds beyond its share.
  double squares = 0;
  const auto n = static_cast<double>(sums.kl.size());
  for (std::size_t b = 0; b < sums.kl.size(); ++b)
    squares += std::pow(2 * sums.kl[b] - s.value * sums.noise2[b], 2);
  s.standard_error = std::sqrt(n / (n - 1) * squares) / noise2;
  return s;
}

/// Of a layer, the head that is measured with half the noise too.
std::uint32_t checked_head(std::uint32_t layer, std::uint32_t heads) {
  return layer % std::max(heads, 1u);
}

/// Every head, and one of them with half the noise.
std::vector<Variant> variants_of(std::uint32_t layer, std::uint32_t heads) {
  std::vector<Variant> variants;
  for (std::uint32_t head = 0; head < heads; ++head) variants.push_back({head, false});
  variants.push_back({checked_head(layer, heads), true});
  return variants;
}

void check(const std::vector<std::vector<std::int32_t>>& sequences,
           const CalibrateOptions& options) {
  if (!(options.noise > 0 && options.noise <= 1))
    throw std::invalid_argument(
        fmt::format("noise {}: should be above 0 and at most 1", options.noise));
  std::size_t blocks = 0;
  for (const auto& ids : sequences) blocks += (ids.size() + kBlockTokens - 1) / kBlockTokens;
  if (blocks < 2)
    throw std::invalid_argument(
        fmt::format("the texts have {} block of {} tokens; a standard error needs two",
                    blocks == 0 ? "no" : "one", kBlockTokens));
}

}  // namespace

CalibrateResult calibrate(const Model& model,
                          const std::vector<std::vector<std::int32_t>>& sequences,
                          const CalibrateOptions& options) {
  check(sequences, options);
  const ModelShape shape = model.config().shape();
  std::vector<std::vector<Sums>> sums(shape.layers, std::vector<Sums>(shape.query_heads + 1));
  const double work = static_cast<double>(sequences.size()) * (shape.query_heads + 1) *
                      (shape.layers + 1) * shape.layers / 2;
  double done = 0;
  std::mutex mutex;
  for (std::size_t s = 0; s < sequences.size(); ++s) {
    const NoisyRun run(model, sequences[s], options.seed + s, options.noise, options.threads);
    for (std::uint32_t layer = 0; layer < shape.layers; ++layer)
      run.add(layer, variants_of(layer, shape.query_heads), sums[layer], [&] {
        const std::lock_guard lock(mutex);
        done += shape.layers - layer;
        if (options.progress) options.progress(done / work);
      });
  }
  CalibrateResult result;
  Calibration& calibration = result.calibration;
  calibration.weights_xxh3 = model.weights_xxh3();
  calibration.layers = shape.layers;
  calibration.query_heads = shape.query_heads;
  double whole = 0, half = 0;
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
    for (std::uint32_t head = 0; head < shape.query_heads; ++head) {
      const Sensitivity s = sensitivity_of(sums[layer][head]);
      calibration.sensitivity.push_back(s.value);
      calibration.standard_error.push_back(s.standard_error);
    }
    const double own = calibration.of_layer(layer)[checked_head(layer, shape.query_heads)],
                 own_half = sensitivity_of(sums[layer].back()).value;
    whole += own;
    half += own_half;
    if (own > 0 && std::abs(own_half / own - 1) > std::abs(result.check.worst - 1))
      result.check = {1, own_half / own, layer};
  }
  result.check.ratio = whole > 0 ? half / whole : 1;
  for (const auto& ids : sequences) result.tokens += ids.size();
  result.blocks = sums[0][0].kl.size();
  return result;
}

}  // namespace kvlab
