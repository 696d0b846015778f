#include "engine/loop/eval.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <stdexcept>

#include "engine/loop/batch_loop.hpp"
#include "engine/loop/decoder_loop.hpp"
#include "sim/metrics.hpp"
#include "traces/base/parallel.hpp"

namespace kvlab {
namespace {

using Ids = std::vector<std::int32_t>;

constexpr std::size_t kLeastSequences = 8;  // fewer: blocks are parts of sequences
constexpr std::uint32_t kParts = 16;

/// Cuts texts into sequences, each behind the model's first token (where it has one).
std::vector<Ids> sequences_of(const ModelConfig& model, const std::vector<Ids>& texts,
                              const EvalOptions& options) {
  const std::size_t first = model.bos >= 0 ? 1 : 0;
  const std::size_t window = options.window ? options.window : model.trained_context;
  if (window < first + 2)
    throw std::invalid_argument(
        fmt::format("window {}: should be at least {} tokens", window, first + 2));
  std::vector<Ids> sequences;
  for (const Ids& text : texts) {
    std::size_t length = text.size();
    if (options.max_tokens) length = std::min<std::size_t>(length, options.max_tokens);
    const std::size_t step = options.stream ? std::max<std::size_t>(length, 1) : window - first;
    for (std::size_t start = 0; start < length; start += step) {
      Ids ids;
      if (first) ids.push_back(model.bos);
      const std::size_t end = std::min(length, start + step);
      ids.insert(ids.end(), text.begin() + static_cast<std::ptrdiff_t>(start),
                 text.begin() + static_cast<std::ptrdiff_t>(end));
      // A remainder shorter than half a window would be scored without a cache worth evicting from,
      // and one that is all prompt not at all.
      const bool long_enough =
          ids.size() * 2 >= window &&
          (options.span == Span::all || ids.size() > std::size_t{options.prompt_tokens} + 1);
      if (start == 0 || long_enough) sequences.push_back(std::move(ids));
    }
  }
  if (sequences.empty()) throw std::invalid_argument("text: has no tokens; a longer one is needed");
  return sequences;
}

LoopOptions loop_options(const EvalOptions& options, std::size_t sequence, std::size_t tokens,
                         unsigned threads) {
  const std::size_t prompt = options.prompt_tokens ? options.prompt_tokens : tokens / 2;
  return {.prompt_tokens = static_cast<std::uint32_t>(prompt),
          .span = options.span,
          .sequence = static_cast<std::uint32_t>(sequence),
          .threads = threads,
          .against_first = options.against_full,
          .progress = {}};
}

/// One configuration's scores by `tokens` of each sequence.
std::vector<EvalBlock> blocks_of(std::size_t c, const std::vector<std::vector<LoopScores>>& scores,
                                 std::size_t tokens) {
  std::vector<EvalBlock> blocks;
  if (tokens == 0) return blocks;
  std::size_t longest = 0;
  for (const auto& sequence : scores) longest = std::max(longest, sequence[c].nll.size());
  for (std::size_t first = 0; first < longest; first += tokens) {
    double nll = 0, seconds = 0;
    std::size_t count = 0, timed = 0;
    for (const auto& sequence : scores) {
      const LoopScores& one = sequence[c];
      for (std::size_t i = first; i < std::min(first + tokens, one.nll.size()); ++i, ++count) {
        nll += one.nll[i];
        if (i < one.seconds.size()) seconds += static_cast<double>(one.seconds[i]), ++timed;
      }
    }
    blocks.push_back({.first = first,
                      .nll = nll / static_cast<double>(count),
                      .milliseconds_per_token = timed ? 1e3 * seconds / static_cast<double>(timed)
                                                      : std::numeric_limits<double>::quiet_NaN()});
  }
  return blocks;
}

/// One configuration's scores over all sequences, as sums by block.
EvalScore summarise(const CacheConfig& config, std::uint32_t budget_tokens, std::size_t c,
                    const std::vector<std::vector<LoopScores>>& scores) {
  const bool split = scores.size() < kLeastSequences;
  const std::uint32_t parts = split ? kParts : 1;
  BlockedRatio nll, kl, same;
  for (BlockedRatio* ratio : {&nll, &kl, &same})
    ratio->resize(static_cast<std::uint32_t>(scores.size()) * parts);
  std::uint64_t tokens = 0, peak = 0;
  for (std::size_t s = 0; s < scores.size(); ++s) {
    const LoopScores& one = scores[s][c];
    for (std::size_t i = 0; i < one.nll.size(); ++i) {
      const auto block = static_cast<std::uint32_t>(s * parts + i * parts / one.nll.size());
      nll.add(block, one.nll[i], 1);
      kl.add(block, one.kl[i], 1);
      same.add(block, one.same_first[i], 1);
    }
    tokens += one.nll.size();
    peak = std::max(peak, one.kv_bytes_peak);
  }
  const auto estimate = [](const BlockedRatio& ratio) {
    const BlockedRatio* const one[] = {&ratio};
    return mean_of(one);
  };
  const Estimate n = estimate(nll), k = estimate(kl);
  return {.config = config,
          .budget_tokens = budget_tokens,
          .nll = n.value,
          .nll_error = n.standard_error,
          .perplexity = std::exp(n.value),
          .perplexity_error = std::exp(n.value) * n.standard_error,
          .kl = k.value,
          .kl_error = k.standard_error,
          .same_first = estimate(same).value,
          .tokens = tokens,
          .kv_bytes_peak = peak,
          .blocks = {}};
}

/// Sequence by sequence, `at_once` of them: run(ids, configs, LoopOptions).
template <class Run>
std::vector<std::vector<LoopScores>> run_each(const std::vector<Ids>& sequences,
                                              const EvalOptions& options, unsigned at_once,
                                              Run run) {
  std::vector<std::vector<LoopScores>> scores(sequences.size());
  std::size_t done = 0;
  std::mutex mutex;
  const auto show = [&](double more) {
    if (options.progress)
      options.progress((static_cast<double>(done) + more) / static_cast<double>(sequences.size()));
  };
  parallel_for(sequences.size(), at_once, [&](std::size_t s) {
    LoopOptions how =
        loop_options(options, s, sequences[s].size(), at_once == 1 ? options.threads : 1);
    if (at_once == 1) how.progress = show;
    scores[s] = run(sequences[s], how);
    const std::lock_guard lock(mutex);
    ++done;
    show(0);
  });
  return scores;
}

}  // namespace

Sweep sweep_by_layers(const Model& model) {
  return [model](const std::vector<Ids>& sequences, std::span<const CacheConfig> configs,
                 const EvalOptions& options) {
    // Windows are independent: one thread each. A single stream spreads over its heads instead.
    return run_each(sequences, options, sequences.size() == 1 ? 1 : options.threads,
                    [&](const Ids& ids, const LoopOptions& how) {
                      return run_closed_loop(model, ids, configs, how);
                    });
  };
}

Sweep sweep_by_tokens(Backend& backend) {
  return [&backend](const std::vector<Ids>& sequences, std::span<const CacheConfig> configs,
                    const EvalOptions& options) {
    return run_each(sequences, options, 1, [&](const Ids& ids, const LoopOptions& how) {
      return run_decoder_loop(backend, ids, configs, how);
    });
  };
}

Sweep sweep_by_batches(BatchBackend& backend) {
  return [&backend](const std::vector<Ids>& sequences, std::span<const CacheConfig> configs,
                    const EvalOptions& options) {
    return run_batch_loop(backend, sequences, configs,
                          {.prompt_tokens = options.prompt_tokens,
                           .against_first = options.against_full,
                           .progress = options.progress});
  };
}

std::vector<EvalScore> evaluate(const ModelConfig& model, const Sweep& sweep,
                                const std::vector<Ids>& texts, std::vector<CacheConfig> configs,
                                const EvalOptions& options) {
  const std::vector<Ids> sequences = sequences_of(model, texts, options);
  const auto is_full = [](const CacheConfig& c) {
    return !c.evicts() && c.positions == Positions::original;
  };
  const auto full = std::find_if(configs.begin(), configs.end(), is_full);
  if (full != configs.end())
    std::rotate(configs.begin(), full, full + 1);
  else if (options.against_full)
    configs.insert(configs.begin(), CacheConfig{});
  if (configs.empty())
    throw std::invalid_argument("nothing to score: no policy, and not the full cache either");

  std::size_t longest = 0;
  for (const Ids& ids : sequences) longest = std::max(longest, ids.size());

  const std::vector<std::vector<LoopScores>> scores = sweep(sequences, configs, options);
  std::vector<EvalScore> result;
  for (std::size_t c = 0; c < configs.size(); ++c) {
    const auto length = static_cast<std::uint32_t>(longest);
    EvalScore score = summarise(
        configs[c], configs[c].evicts() ? configs[c].budget.resolve(length) : length, c, scores);
    if (!options.against_full)
      score.kl = score.kl_error = score.same_first = std::numeric_limits<double>::quiet_NaN();
    score.blocks = blocks_of(c, scores, options.block_tokens);
    result.push_back(std::move(score));
  }
  return result;
}

}  // namespace kvlab
