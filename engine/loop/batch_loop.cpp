#include "engine/loop/batch_loop.hpp"

#include <algorithm>
#include <functional>
#include <stdexcept>

#include "policies/executor.hpp"

namespace kvlab {
namespace {

using Ids = std::vector<std::int32_t>;

constexpr std::size_t kMostRows = 128;                      // of a batch
constexpr std::size_t kLogitFloats = std::size_t{1} << 24;  // of a batch that are held at once

/// Whether configurations can be fed side by side.
bool alike(const CacheConfig& one, const CacheConfig& other) {
  return side_by_side(one, other) && one.prefill.chunk == other.prefill.chunk;
}

/// A sequence of the group, the longer ones first.
struct Window {
  std::size_t sequence;
  const Ids* ids;
  std::uint32_t prompt;
  std::uint32_t tokens() const { return static_cast<std::uint32_t>(ids->size()); }
};

/// Windows under the configurations of one batch: row = window * configurations + configuration.
class BatchRun {
 public:
  BatchRun(std::unique_ptr<BatchDecoder> decoder, std::vector<std::size_t> of_loop, bool is_stream)
      : configs(std::move(of_loop)), decoder_(std::move(decoder)), is_stream_(is_stream) {}

  /// A prompt that is admitted token by token is fed as decoded tokens are: side by side.
  void prompts(std::span<const Window> windows) {
    for (std::size_t w = 0; w < windows.size(); ++w)
      for (std::size_t c = 0; c < configs.size(); ++c)
        decoder_->prompt(static_cast<int>(w * configs.size() + c), 1,
                         std::span(*windows[w].ids).first(is_stream_ ? 1 : windows[w].prompt),
                         nullptr);
    if (!is_stream_) return;
    for (std::uint32_t at = 1; at < windows.front().prompt; ++at) {
      std::size_t active = 0;
      while (active < windows.size() && windows[active].prompt > at) ++active;
      decode(
          windows.first(active), [&](const Window&) { return at; }, 1, nullptr);
    }
  }

  /// Feeds `steps` tokens of each window, from position_of(window) on.
  template <class PositionOf>
  void decode(std::span<const Window> windows, PositionOf position_of, std::uint32_t steps,
              float* logits) {
    Ids ids;
    for (std::uint32_t step = 0; step < steps; ++step)
      for (const Window& window : windows)
        ids.insert(ids.end(), configs.size(), (*window.ids)[position_of(window) + step]);
    decoder_->decode(static_cast<int>(windows.size() * configs.size()), ids, logits);
  }

  std::uint64_t kv_bytes_peak(std::size_t window, std::size_t config) const {
    return decoder_->kv_bytes_peak(static_cast<int>(window * configs.size() + config));
  }

  std::vector<std::size_t> configs;  ///< indices of the loop's

 private:
  std::unique_ptr<BatchDecoder> decoder_;
  bool is_stream_;
};

class BatchLoop {
 public:
  BatchLoop(BatchBackend& backend, const std::vector<Ids>& sequences,
            std::span<const CacheConfig> configs, const LoopOptions& options)
      : backend_(backend),
        vocab_(backend.config().vocab),
        sequences_(sequences),
        configs_(configs),
        options_(options),
        batches_(batches_of(configs, kMostRows, alike)),
        scores_(sequences.size(), std::vector<LoopScores>(configs.size())) {
    for (std::size_t s = 0; s < sequences.size(); ++s) {
      const auto tokens = static_cast<std::uint32_t>(sequences[s].size());
      const std::uint32_t asked = options.prompt_tokens ? options.prompt_tokens : tokens / 2;
      const LoopSpan span =
          loop_span(tokens, {.prompt_tokens = asked, .span = Span::decode, .progress = {}});
      // The first token is a prompt in any case.
      windows_.push_back({s, &sequences[s], std::max(1u, span.prompt)});
      all_tokens_ += tokens;
    }
    std::ranges::stable_sort(windows_, std::greater<>{}, &Window::tokens);
  }

  std::vector<std::vector<LoopScores>> run() {
    std::size_t widest = 0;
    for (const auto& batch : batches_) widest = std::max(widest, batch.size());
    std::size_t at_once = std::clamp<std::size_t>(kMostRows / widest, 1, windows_.size());
    const std::size_t floats = std::max(kLogitFloats, at_once * widest * vocab_);
    first_logits_ = backend_.logit_memory(floats);
    other_logits_ = backend_.logit_memory(floats);
    for (std::size_t first = 0; first < windows_.size();) {
      const std::span windows = std::span(windows_).subspan(first);
      const std::size_t count = std::min(at_once, windows.size());
      std::vector<BatchRun> runs = decoders(windows.first(count));
      if (runs.empty()) {
        if (count == 1)
          throw std::runtime_error(
              "device memory: not even one sequence fits under all configurations; fewer policies "
              "or a smaller --window would");
        at_once = count / 2;
        continue;
      }
      run_group(windows.first(count), runs);
      first += count;
    }
    return std::move(scores_);
  }

 private:
  /// One for each batch of configurations; none if they do not fit together.
  std::vector<BatchRun> decoders(std::span<const Window> windows) {
    std::vector<BatchRun> runs;
    for (const auto& batch : batches_) {
      std::vector<ResolvedConfig> caches;
      for (const Window& window : windows)
        for (const std::size_t c : batch)
          caches.push_back(resolve(configs_[c], window.tokens(),
                                   static_cast<std::uint32_t>(window.sequence),
                                   backend_.config().heads()));
      auto decoder = backend_.batch_decoder(caches, windows.front().tokens());
      if (!decoder) return {};
      const CacheConfig& cache = configs_[batch.front()];
      runs.emplace_back(std::move(decoder), batch, cache.evicts() && cache.prefill.chunk == 1);
    }
    return runs;
  }

  /// All batches in step, so that each can be held against the first.
  void run_group(std::span<const Window> windows, std::vector<BatchRun>& runs) {
    for (BatchRun& run : runs) run.prompts(windows);
    for (const Window& window : windows) note_done(window.prompt);
    // Tokens that a window decodes: fewer for the later ones.
    const auto decodes = [](const Window& window) { return window.tokens() - window.prompt; };
    std::uint32_t step = 0;
    while (step < decodes(windows.front())) {
      std::size_t active = windows.size();
      while (decodes(windows[active - 1]) <= step) --active;
      const std::uint32_t steps =
          std::min(decodes(windows[active - 1]) - step, most_steps(active, runs));
      decode_block(windows.first(active), step, steps, runs);
      note_done(std::uint64_t{steps} * active);
      step += steps;
    }
    for (const BatchRun& run : runs)
      for (std::size_t w = 0; w < windows.size(); ++w)
        for (std::size_t c = 0; c < run.configs.size(); ++c)
          scores_[windows[w].sequence][run.configs[c]].kv_bytes_peak = run.kv_bytes_peak(w, c);
  }

  std::uint32_t most_steps(std::size_t windows, const std::vector<BatchRun>& runs) const {
    std::size_t widest = 0;
    for (const BatchRun& run : runs) widest = std::max(widest, run.configs.size());
    return static_cast<std::uint32_t>(
        std::clamp<std::size_t>(kLogitFloats / (windows * widest * vocab_), 1, 64));
  }

  void decode_block(std::span<const Window> windows, std::uint32_t step, std::uint32_t steps,
                    std::vector<BatchRun>& runs) {
    for (std::size_t r = 0; r < runs.size(); ++r) {
      float* const logits = (r == 0 ? first_logits_ : other_logits_)->data();
      runs[r].decode(
          windows, [&](const Window& w) { return w.prompt + step; }, steps, logits);
      score(windows, step, steps, runs[0].configs.size(), runs[r], logits);
    }
  }

  /// logits [step, window, configuration, vocab]; the yardstick is the first run's first
  /// configuration.
  void score(std::span<const Window> windows, std::uint32_t step, std::uint32_t steps,
             std::size_t first_width, const BatchRun& run, const float* logits) {
    const std::size_t width = run.configs.size(), rows = windows.size() * width;
    Ids next(steps * rows, -1), yardsticks(steps * rows);
    for (std::size_t i = 0; i < next.size(); ++i) {
      const Window& window = windows[i % rows / width];
      const std::size_t at = window.prompt + step + i / rows + 1;
      if (at < window.ids->size()) next[i] = (*window.ids)[at];  // the last token foretells nothing
      const std::size_t full = (i / rows * windows.size() + i % rows / width) * first_width;
      yardsticks[i] = static_cast<std::int32_t>(options_.against_first ? full : i);
    }
    const std::vector<RowScore> scored =
        backend_.score({.logits = logits,
                        .yardstick = options_.against_first ? first_logits_->data() : logits,
                        .yardstick_rows = yardsticks,
                        .next = next});
    for (std::size_t i = 0; i < scored.size(); ++i) {
      if (next[i] < 0) continue;
      const std::size_t c = run.configs[i % width];
      const bool itself = c == 0 || !options_.against_first;
      LoopScores& scores = scores_[windows[i % rows / width].sequence][c];
      scores.nll.push_back(scored[i].nll);
      scores.kl.push_back(itself ? 0 : scored[i].kl);
      scores.same_first.push_back(itself || scored[i].same_first);
    }
  }

  void note_done(std::uint64_t tokens) {
    done_ += tokens;
    if (options_.progress)
      options_.progress(static_cast<double>(done_) / static_cast<double>(all_tokens_));
  }

  BatchBackend& backend_;
  std::size_t vocab_;
  const std::vector<Ids>& sequences_;
  std::span<const CacheConfig> configs_;
  const LoopOptions& options_;
  std::vector<std::vector<std::size_t>> batches_;
  std::vector<Window> windows_;
  std::vector<std::vector<LoopScores>> scores_;  // [sequence][configuration]
  // [step, window, configuration, vocab]: the yardstick's run, and the one that is held against it.
  std::unique_ptr<LogitMemory> first_logits_, other_logits_;
  std::uint64_t done_ = 0, all_tokens_ = 0;
};

}  // namespace

std::vector<std::vector<LoopScores>> run_batch_loop(BatchBackend& backend,
                                                    const std::vector<Ids>& sequences,
                                                    std::span<const CacheConfig> configs,
                                                    const LoopOptions& options) {
  return BatchLoop(backend, sequences, configs, options).run();
}

}  // namespace kvlab
