#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "traces/base/numeric/panels.hpp"
#include "traces/base/numeric/softmax.hpp"
#include "traces/base/parallel.hpp"
#include "traces/layer_ropes.hpp"
#include "traces/shard.hpp"
#include "traces/trace.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kMaxProblems = 20;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Larger scores are refused, because the exponentials are not defined for them.
constexpr float kLargestScore = 0x1p20f;
constexpr double kLargestValue = 0x1p50;  // largest norm; its square fits float32

/// Allowed difference between the decoder's rows and the recomputed ones. A decoder sums in another
/// order and, in a narrow dtype, rounds probabilities and outputs that kvlab does not round. See
/// docs/reference/trace-format.md.
double tolerance_of(Dtype dtype) { return dtype == Dtype::f32 ? 1e-4 : 2e-2; }

// Upper bound of a score's rounding error in float32, relative to the largest possible score. For
// scores above 100 this error exceeds a tolerance of 1e-4.
constexpr double kOfScore = 1e-6;

/// The largest of some numbers and its position; NaN counts as infinite.
struct Largest {
  double value = 0;
  std::uint32_t position = 0;

  void include(double other, std::uint32_t at) {
    if (std::isnan(other)) other = kInfinity;
    if (other > value) *this = {other, at};
  }
};

/// The errors of the sampled rows of one KV head.
struct HeadCheck {
  double worst_out = 0, worst_lse = 0;
  std::uint64_t rows = 0;
  std::vector<std::string> problems;
};

/// ||out - ref|| / ||ref||.
double relative_error(const float* out, const float* reference, std::size_t size) {
  double difference = 0, norm = 0;
  for (std::size_t d = 0; d < size; ++d) {
    const double r = reference[d], e = out[d] - r;
    difference += e * e;
    norm += r * r;
  }
  if (norm == 0) return difference == 0 ? 0 : kInfinity;
  return std::sqrt(difference / norm);
}

/// Recomputes the sampled rows of the query heads that share one KV head.
class HeadVerifier {
 public:
  HeadVerifier(const TraceReader& trace, const RopeTable& table, std::uint32_t layer,
               std::uint32_t kv_head)
      : trace_(trace),
        table_(table),
        row_(trace.row(layer)),
        layer_(layer),
        kv_head_(kv_head),
        size_(trace.shape().head_size),
        keys_(trace.tokens(), size_),
        values_(std::size_t{trace.tokens()} * size_),
        tolerance_(tolerance_of(trace.shape().dtype)) {
    load_keys();
    trace.read(Part::v, layer, kv_head, 0, trace.tokens(), values_.data());
  }

  HeadCheck run() {
    check_values();
    trace_.release();  // from here on, only sixteen queries per shard are read
    if (!result_.problems.empty()) return std::move(result_);
    for (std::size_t shard = 0; shard < trace_.shards().size(); ++shard) {
      const auto check = trace_.check_rows(shard, layer_);
      const std::uint32_t group = trace_.shape().group();
      for (std::uint32_t g = 0; g < group; ++g) compare(shard, kv_head_ * group + g, check);
    }
    return std::move(result_);
  }

 private:
  /// Rotates a query or key to its original position, as the decoder did.
  void rotate(float* x, std::uint32_t position) const {
    table_.rotate(x, size_, position, x);
    if (trace_.header().rounding == Rounding::none) return;
    for (std::size_t d = 0; d < size_; ++d) x[d] = round_to(trace_.shape().dtype, x[d]);
  }

  /// Checks every value, not only those of sampled rows: they must be finite, and so small that no
  /// score of a query with a key exceeds the range of the exponentials (by the Cauchy-Schwarz
  /// inequality).
  void check_values() {
    Largest value;
    include_norms(value, values_.data(), 0, trace_.tokens());
    complain("values of KV head", kv_head_, value, kLargestValue);
    const double factor = row_.rope.factor, scale = std::fabs(row_.scale) * factor * factor;
    for (std::uint32_t g = 0; g < trace_.shape().group(); ++g) {
      const std::uint32_t head = kv_head_ * trace_.shape().group() + g;
      Largest query;
      for_each_shard(Part::q, head, [&](float* rows, const ShardInfo& shard) {
        include_norms(query, rows, shard.first, shard.tokens);
      });
      const bool key_leads = largest_key_.value >= query.value;
      complain(key_leads ? "keys of KV head" : "queries of query head", key_leads ? kv_head_ : head,
               {largest_key_.value * query.value * scale,
                key_leads ? largest_key_.position : query.position},
               kLargestScore);
    }
  }

  /// Updates `largest` with the norms of `tokens` rows. The first row is at position `first`.
  void include_norms(Largest& largest, const float* rows, std::uint32_t first,
                     std::uint32_t tokens) const {
    for (std::uint32_t i = 0; i < tokens; ++i, rows += size_) {
      double squares = 0;
      for (std::size_t d = 0; d < size_; ++d)
        squares += static_cast<double>(rows[d]) * static_cast<double>(rows[d]);
      largest.include(std::sqrt(squares), first + i);
    }
  }

  void complain(std::string_view what, std::uint32_t head, const Largest& largest,
                double tolerance) {
    if (largest.value <= tolerance) return;
    result_.problems.push_back(
        fmt::format("layer {}, {} {}: the value at position {} is not finite, or too large to "
                    "compute attention with",
                    trace_.shape().number(layer_), what, head, largest.position));
  }

  /// Calls use(rows, shard) for the rows of one head, one shard at a time.
  template <class Use>
  void for_each_shard(Part part, std::uint32_t head, Use use) const {
    std::vector<float> rows(kShardTokens * size_);
    for (const ShardInfo& shard : trace_.shards()) {
      trace_.read(part, layer_, head, shard.first, shard.tokens, rows.data());
      use(rows.data(), shard);
    }
  }

  void load_keys() {
    for_each_shard(Part::k, kv_head_, [&](float* rows, const ShardInfo& shard) {
      include_norms(largest_key_, rows, shard.first, shard.tokens);
      for (std::uint32_t i = 0; i < shard.tokens; ++i) {
        rotate(rows + i * size_, shard.first + i);
        keys_.set_row(shard.first + i, rows + i * size_);
      }
    });
  }

  void compare(std::size_t shard, std::uint32_t query_head, const TraceReader::CheckRows& check) {
    std::vector<float> queries(kCheckRows * size_);
    for (std::size_t i = 0; i < kCheckRows; ++i) {
      float* query = queries.data() + i * size_;
      trace_.read(Part::q, layer_, query_head, check.rows[i], 1, query);
      rotate(query, check.rows[i]);
    }
    // Rows ascend, so the last one sees the most keys.
    const std::size_t panels = check.rows.back() / 16 + 1, stride = panels * 16;
    scores_.resize(kCheckRows * stride);
    multiply(queries.data(), kCheckRows, size_, keys_, 0, panels, scores_.data(), stride);
    Largest out, lse;
    for (std::size_t i = 0; i < kCheckRows; ++i) {
      const std::size_t at = query_head * kCheckRows + i;
      excess_ = excess_of(queries.data() + i * size_);
      const float* const sink = row_.sinks.empty() ? nullptr : &row_.sinks[query_head];
      compare_row(scores_.data() + i * stride, check.rows[i], sink, check.out.data() + at * size_,
                  check.lse.empty() ? nullptr : &check.lse[at], out, lse);
    }
    result_.rows += kCheckRows;
    result_.worst_out = std::max(result_.worst_out, out.value);
    result_.worst_lse = std::max(result_.worst_lse, lse.value);
    report(shard, query_head, "output", out);
    report(shard, query_head, "log-sum-exp", lse);
  }

  /// Returns the factor, at least 1, by which a row's tolerance exceeds the usual one. It is above
  /// 1 if the largest score that the row's query can have with any key is too large for float32 to
  /// hold it precisely enough.
  double excess_of(const float* query) const {
    double squares = 0;
    for (std::size_t d = 0; d < size_; ++d) squares += static_cast<double>(query[d]) * query[d];
    const double tolerance =
        std::sqrt(squares) * largest_key_.value * row_.rope.factor * std::fabs(row_.scale);
    return std::max(1.0, tolerance * kOfScore / tolerance_);
  }

  void compare_row(float* scores, std::uint32_t position, const float* sink, const float* out,
                   const float* lse, Largest& worst_out, Largest& worst_lse) {
    const std::size_t first = first_seen(row_.window, position), count = position + 1 - first;
    scores += first;
    make_scores(scores, count, row_.scale, row_.softcap);
    // For NaN the comparison is false, so NaN is not usable.
    const auto usable = [](float score) { return std::fabs(score) < kLargestScore; };
    if (!std::all_of(scores, scores + count, usable)) {
      worst_out.include(kInfinity, position);
      return;
    }
    const RowSum sum = row_exponentials(scores, count, sink, scores);
    divide(scores, count, sum.sum, scores);
    std::vector<float> reference(size_);
    accumulate_rows({scores, count}, {}, values_.data() + first * size_, size_, size_,
                    reference.data());
    worst_out.include(relative_error(out, reference.data(), size_) / excess_, position);
    if (lse)
      worst_lse.include(std::fabs(*lse - log_sum_exp(sum.shift, sum.sum)) / excess_, position);
  }

  void report(std::size_t shard, std::uint32_t query_head, std::string_view quantity,
              const Largest& worst) {
    if (worst.value <= tolerance_) return;
    result_.problems.push_back(fmt::format(
        "{}: layer {}, query head {}: the decoder's {} at position {} differs by {:.3g} from the "
        "one computed from the trace's q, k and v; at most {:g} is allowed",
        trace_.shards()[shard].file, trace_.shape().number(layer_), query_head, quantity,
        worst.position, worst.value, tolerance_));
  }

  const TraceReader& trace_;
  const RopeTable& table_;
  const RowSpec& row_;
  std::uint32_t layer_, kv_head_;
  std::size_t size_;
  Panels keys_;                // rotated; [tokens, head_size]
  Largest largest_key_;        // by norm
  std::vector<float> values_;  // [tokens, head_size]
  std::vector<float> scores_;  // [16, tokens], of the current rows
  double tolerance_, excess_ = 1;
  HeadCheck result_;
};

/// Compares the checksum of every file that the manifest names.
std::vector<std::string> damaged_files(const TraceReader& trace, unsigned threads) {
  std::vector<std::pair<const SafetensorsFile*, std::string>> files{
      {&trace.tokens_file(), trace.tokens_xxh3()}};
  for (std::size_t i = 0; i < trace.shards().size(); ++i)
    files.emplace_back(&trace.shard_file(i), trace.shards()[i].xxh3);
  if (trace.sketch_file()) files.emplace_back(trace.sketch_file(), trace.extras().sketch->xxh3);
  for (std::size_t i = 0; i < trace.gradient_files().size(); ++i)
    files.emplace_back(&trace.gradient_files()[i], trace.extras().gradients->files[i].xxh3);
  for (std::size_t i = 0; i < trace.feature_files().size(); ++i)
    files.emplace_back(&trace.feature_files()[i], trace.extras().features[i].xxh3);
  if (trace.selected_file())
    files.emplace_back(trace.selected_file(), trace.extras().selections->xxh3);
  std::vector<std::string> problems(files.size());
  parallel_for(files.size(), threads, [&](std::size_t i) {
    const auto& [file, wanted] = files[i];
    const std::string found = xxh3_hex(file->bytes());
    file->release();
    if (found != wanted)
      problems[i] = fmt::format("{}: is damaged: its XXH3-64 is {}, but the manifest says {}",
                                file->path().filename().string(), found, wanted);
  });
  std::erase(problems, "");
  return problems;
}

/// Finds extras with values that no decoder can have computed.
std::vector<std::string> wrong_extras(const TraceReader& trace) {
  std::vector<std::string> problems;
  const auto finite = [](float x) { return std::isfinite(x); };
  std::vector<float> norms(trace.tokens());
  for (std::uint32_t layer = 0; layer < trace.shape().layers; ++layer) {
    if (trace.extras().residual_norm2) {
      trace.residual_norm2(layer, norms.data());
      const auto wrong =
          std::find_if(norms.begin(), norms.end(), [&](float x) { return !finite(x) || x < 0; });
      if (wrong != norms.end())
        problems.push_back(fmt::format(
            "layer {}: {} at position {} is {}; a finite number of at least 0 is expected",
            trace.shape().number(layer), kResidualTensor, wrong - norms.begin(), *wrong));
    }
    for (std::uint32_t head = 0; trace.sketch_file() && head < trace.shape().kv_heads; ++head) {
      const std::vector<float> sketch = trace.sketch(layer, head, kSketchColumns);
      constexpr float kMax = 1e18f;  // so that the product of two stays finite
      const auto within = [](float x) { return std::abs(x) <= kMax; };
      if (std::all_of(sketch.begin(), sketch.end(), within)) continue;
      problems.push_back(
          fmt::format("{}: layer {}, KV head {}: a value is not finite, or beyond {:g}",
                      kSketchFile, trace.shape().number(layer), head, kMax));
    }
  }
  return problems;
}

/// Finds feature values that are not finite. Reports the first position of each layer.
std::vector<std::string> wrong_features(const TraceReader& trace) {
  std::vector<std::string> problems;
  for (std::size_t i = 0; i < trace.feature_files().size(); ++i)
    for (std::uint32_t layer = 0; layer < trace.shape().layers; ++layer) {
      const std::string name =
          feature_tensor(trace.shape().number(layer), trace.extras().features[i].name);
      const TensorView& tensor = trace.feature_files()[i].at(name);
      const std::size_t wrong = first_not_finite(Dtype::f32, tensor.data);
      if (wrong < tensor.elements())
        problems.push_back(fmt::format("{}: {}: KV head {}: the value of token {} is not finite",
                                       trace.feature_files()[i].path().filename().string(), name,
                                       wrong / trace.tokens(), wrong % trace.tokens()));
    }
  return problems;
}

/// Finds gradients that are not finite. Reports the first one of each file and layer.
std::vector<std::string> wrong_gradients(const TraceReader& trace, unsigned threads) {
  const ModelShape& shape = trace.shape();
  std::vector<std::string> problems(trace.gradient_files().size() * shape.layers);
  parallel_for(problems.size(), threads, [&](std::size_t i) {
    const SafetensorsFile& file = trace.gradient_files()[i / shape.layers];
    const auto layer = static_cast<std::uint32_t>(i % shape.layers);
    const TensorView& tensor = file.at(layer_tensor(shape.number(layer), kGradientTensor));
    const std::size_t wrong = first_not_finite(shape.dtype, tensor.data);
    if (wrong == tensor.elements()) return;
    const std::size_t row = wrong / shape.head_size, tokens = tensor.shape[2];
    problems[i] = fmt::format(
        "{}: layer {}, gradient sample {}, query head {}: the gradient at token {} of the file is "
        "not finite",
        file.path().filename().string(), shape.number(layer), row / tokens / shape.query_heads,
        row / tokens % shape.query_heads, row % tokens);
  });
  std::erase(problems, "");
  return problems;
}

/// Finds rows that are not a valid selection for their query. Reports the first one of each KV
/// head. Adds the number of checked selections to `count`.
std::vector<std::string> wrong_selections(const TraceReader& trace, unsigned threads,
                                          std::uint64_t& count) {
  if (!trace.selected_file()) return {};
  const std::vector<std::uint32_t> layers = trace.layers_with_window(false);
  const std::uint32_t kv_heads = trace.shape().kv_heads;
  std::vector<std::string> problems(layers.size() * kv_heads);
  std::vector<std::uint64_t> counts(problems.size());
  parallel_for(problems.size(), threads, [&](std::size_t i) {
    try {
      trace.selections(layers[i / kv_heads], static_cast<std::uint32_t>(i % kv_heads),
                       [&](std::uint32_t, std::span<const std::uint32_t>) { ++counts[i]; });
    } catch (const std::runtime_error& wrong) {
      problems[i] = wrong.what();
    }
  });
  for (const std::uint64_t of_head : counts) count += of_head;
  std::erase(problems, "");
  return problems;
}

void add_problems(TraceCheck& check, std::vector<std::string> problems) {
  if (!problems.empty()) check.ok = false;
  std::move(problems.begin(), problems.end(), std::back_inserter(check.problems));
}

void shorten(std::vector<std::string>& problems) {
  if (problems.size() <= kMaxProblems) return;
  const std::size_t more = problems.size() - kMaxProblems;
  problems.resize(kMaxProblems);
  problems.push_back(fmt::format("and {} more", more));
}

}  // namespace

TraceCheck verify_trace(const TraceReader& trace, unsigned threads) {
  TraceCheck check;
  check.tolerance = tolerance_of(trace.shape().dtype);
  add_problems(check, damaged_files(trace, threads));
  if (check.ok) add_problems(check, wrong_extras(trace));
  if (check.ok) add_problems(check, wrong_gradients(trace, threads));
  if (check.ok) add_problems(check, wrong_features(trace));
  if (check.ok) add_problems(check, wrong_selections(trace, threads, check.selections));
  if (!check.ok) {  // it is pointless to recompute rows of damaged files
    shorten(check.problems);
    return check;
  }
  if (!trace.has_tensors()) return check;
  const ModelShape& shape = trace.shape();
  const LayerRopes ropes(trace);
  std::vector<HeadCheck> heads(std::size_t{shape.layers} * shape.kv_heads);
  parallel_for(heads.size(), threads, [&](std::size_t i) {
    const auto layer = static_cast<std::uint32_t>(i / shape.kv_heads);
    const auto kv_head = static_cast<std::uint32_t>(i % shape.kv_heads);
    heads[i] = HeadVerifier(trace, ropes[layer], layer, kv_head).run();
  });
  for (HeadCheck& head : heads) {
    check.worst_out = std::max(check.worst_out, head.worst_out);
    check.worst_lse = std::max(check.worst_lse, head.worst_lse);
    check.rows += head.rows;
    add_problems(check, std::move(head.problems));
  }
  shorten(check.problems);
  return check;
}

TraceReader open_verified_trace(const std::filesystem::path& directory, unsigned threads) {
  TraceReader trace = TraceReader::open(directory);
  const TraceCheck check = verify_trace(trace, threads);
  if (!check.ok)
    throw std::runtime_error(fmt::format("{}: fails verification: {}; see `kvlab trace verify`",
                                         directory.string(), check.problems.front()));
  return trace;
}

}  // namespace kvlab
