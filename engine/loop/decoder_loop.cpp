#include "engine/loop/decoder_loop.hpp"

#include <algorithm>
#include <chrono>
#include <numeric>

#include "traces/base/parallel.hpp"

namespace kvlab {
namespace {

constexpr std::uint32_t kBlock = 256;       // tokens whose logits are held at once
constexpr std::uint32_t kMostBlock = 8192;  // where a prompt's chunks make them more

/// How many tokens of a prompt to feed at once, so that every configuration admits it as if fed
/// whole; 0: all.
std::uint32_t prompt_block(std::span<const CacheConfig> configs) {
  std::uint64_t block = 1;
  for (const CacheConfig& config : configs) {
    if (!config.evicts() && !config.policy.ladder.is_coded()) continue;
    if (config.prefill.chunk == 0) return 0;
    block = std::lcm(block, std::uint64_t{config.prefill.chunk});
    if (block > kMostBlock) return 0;
  }
  return static_cast<std::uint32_t>((kBlock + block - 1) / block * block);
}

class DecoderLoop {
 public:
  DecoderLoop(Backend& backend, std::span<const std::int32_t> ids,
              std::span<const CacheConfig> configs, const LoopOptions& options)
      : vocab_(backend.config().vocab),
        ids_(ids),
        options_(options),
        tokens_(static_cast<std::uint32_t>(ids.size())),
        span_(loop_span(tokens_, options)),
        prompt_block_(prompt_block(configs)),
        logits_(configs.size()),
        seconds_(configs.size()),
        scores_(configs.size()) {
    for (const CacheConfig& config : configs) {
      const CacheShape heads = backend.config().heads();
      ResolvedConfig resolved =
          resolve(config.at_prompt(span_.prompt), tokens_, options.sequence, heads);
      find_columns(resolved, ids.first(span_.prompt), heads);
      decoders_.push_back(backend.decoder(resolved, tokens_));
    }
  }

  std::vector<LoopScores> run() {
    const std::uint32_t at_once = prompt_block_ == 0 ? span_.prompt : prompt_block_;
    for (std::uint32_t first = 0; first < span_.prompt; first += at_once)
      feed(first, std::min(at_once, span_.prompt - first), SegmentKind::prompt);
    for (std::uint32_t first = span_.prompt; first < tokens_; first += kBlock)
      feed(first, std::min(kBlock, tokens_ - first), SegmentKind::decode);
    for (std::size_t c = 0; c < decoders_.size(); ++c)
      scores_[c].kv_bytes_peak = decoders_[c]->kv_bytes_peak();
    return std::move(scores_);
  }

 private:
  void feed(std::uint32_t first, std::uint32_t count, SegmentKind kind) {
    if (count == 0) return;
    using Clock = std::chrono::steady_clock;
    const bool scored = first + count > span_.first_scored;
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

  /// Rows first … first + count - 1 of all configurations; the last token has nothing to foretell.
  void score(std::uint32_t first, std::uint32_t count) {
    const std::uint32_t begin = std::max(first, span_.first_scored);
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
  const LoopOptions& options_;
  std::uint32_t tokens_;
  LoopSpan span_;
  std::uint32_t prompt_block_;
  std::vector<std::unique_ptr<SequenceDecoder>> decoders_;  // by configuration
  std::vector<std::vector<float>> logits_;                  // by configuration, [token, vocab]
  std::vector<float> seconds_;  // the same, a token of what was fed last
  std::vector<LoopScores> scores_;
};

}  // namespace

std::vector<LoopScores> run_decoder_loop(Backend& backend, std::span<const std::int32_t> ids,
                                         std::span<const CacheConfig> configs,
                                         const LoopOptions& options) {
  return DecoderLoop(backend, ids, configs, options).run();
}

}  // namespace kvlab
