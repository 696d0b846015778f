#include "engine/evaluation/eval.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <stdexcept>

#include "engine/evaluation/conversation.hpp"
#include "engine/evaluation/end_to_end.hpp"
#include "sim/head_view.hpp"
#include "sim/run/overlap.hpp"
#include "traces/base/parallel.hpp"

namespace kvlab {
namespace {

using Ids = std::vector<std::int32_t>;

/// The sequences of all texts.
struct Sequences {
  std::vector<Ids> ids;
  std::vector<std::size_t> text;  ///< [sequence]: index of its text
};

SequenceOptions sequence_options(const EvalOptions& options, std::size_t sequence,
                                 std::size_t tokens, unsigned threads) {
  const std::size_t prompt = options.prompt_tokens ? options.prompt_tokens : tokens / 2;
  return {.prompt_tokens = static_cast<std::uint32_t>(prompt),
          .queries = options.queries,
          .draft = options.draft,
          .sequence = static_cast<std::uint32_t>(sequence),
          .threads = threads,
          .compares_to_first = options.compares_to_full};
}

/// Throws std::invalid_argument that names the text if no token of the sequence would be scored, or
/// if fewer tokens would be scored than a configuration drafts at once.
void check_scored(const Ids& ids, std::size_t text, const EvalOptions& options) {
  const std::string name =
      text < options.names.size() ? options.names[text] : fmt::format("{}", text + 1);
  if (ids.empty())
    throw std::invalid_argument(fmt::format("text {}: has no tokens; give a longer one", name));
  try {
    const auto tokens = static_cast<std::uint32_t>(ids.size());
    const ScoredRange range = scored_range(tokens, sequence_options(options, 0, tokens, 1));
    if (const std::uint32_t scored = tokens - 1 - range.first_scored; options.draft > scored)
      throw std::invalid_argument(
          fmt::format("a sequence of {} tokens has {} scored tokens, fewer than --draft {}; give "
                      "a longer text or a smaller --draft",
                      tokens, scored, options.draft));
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(fmt::format("text {}: {}", name, error.what()));
  }
}

/// Cuts texts into sequences. Each sequence begins with the tokenizer's special tokens. If the text
/// itself begins with them, they are not added again.
Sequences sequences_of(const ModelConfig& model, const std::vector<Ids>& texts,
                       const EvalOptions& options) {
  const std::size_t first = options.before.size();
  const std::size_t window = options.window ? options.window : model.trained_context;
  if (window < first + 2)
    throw std::invalid_argument(
        fmt::format("window {}: should be at least {} tokens", window, first + 2));
  Sequences sequences;
  for (std::size_t index = 0; index < texts.size(); ++index) {
    const auto text =
        std::span(texts[index]).subspan(common_prefix_length(texts[index], options.before));
    if (text.empty()) check_scored({}, index, options);
    std::size_t length = text.size();
    if (options.max_tokens) length = std::min<std::size_t>(length, options.max_tokens);
    const std::size_t step = options.stream ? std::max<std::size_t>(length, 1) : window - first;
    for (std::size_t start = 0; start < length; start += step) {
      Ids ids = options.before;
      const std::size_t end = std::min(length, start + step);
      ids.insert(ids.end(), text.begin() + static_cast<std::ptrdiff_t>(start),
                 text.begin() + static_cast<std::ptrdiff_t>(end));
      // A remainder shorter than half a window would evict hardly any tokens, and a remainder that
      // is only a prompt would have no scored tokens. Both are left out.
      const bool long_enough =
          ids.size() * 2 >= window &&
          (options.queries == Queries::all || ids.size() > std::size_t{options.prompt_tokens} + 1);
      if (start > 0 && !long_enough) continue;
      check_scored(ids, index, options);
      sequences.ids.push_back(std::move(ids));
      sequences.text.push_back(index);
    }
  }
  if (sequences.ids.empty())
    throw std::invalid_argument("text: no text is given; give at least one");
  return sequences;
}

/// Which sequences are also contained in a longer text.
Overlaps overlaps_of(const Sequences& sequences, const EvalOptions& options) {
  std::vector<TextPiece> pieces;
  for (std::size_t s = 0; s < sequences.ids.size(); ++s) {
    const Ids& ids = sequences.ids[s];
    const auto tokens = static_cast<std::uint32_t>(ids.size());
    const ScoredRange range = scored_range(tokens, sequence_options(options, s, tokens, 1));
    pieces.push_back(
        {.text = sequences.text[s], .ids = ids, .first_scored = range.first_scored + 1});
  }
  return kvlab::overlaps_of(pieces);
}

/// Names of the texts; "text 1", "text 2", … for those without a name.
std::vector<std::string> names_of(std::size_t texts, std::vector<std::string> names) {
  for (std::size_t t = names.size(); t < texts; ++t) names.push_back(fmt::format("text {}", t + 1));
  return names;
}

std::vector<Segment> segments_of_sequence(const Ids& ids, std::size_t index,
                                          const EvalOptions& options) {
  const auto tokens = static_cast<std::uint32_t>(ids.size());
  return segments_of(tokens,
                     scored_range(tokens, sequence_options(options, index, tokens, 1)).prompt);
}

/// The configurations whose budget fits every sequence.
std::vector<CacheConfig> fitting(const ModelConfig& model, const std::vector<Ids>& ids,
                                 std::vector<CacheConfig> configs, const EvalOptions& options) {
  return configs_that_fit(
      std::move(configs),
      [&](const CacheConfig& config) {
        for (std::size_t s = 0; s < ids.size(); ++s)
          resolve(config, segments_of_sequence(ids[s], s, options), 0, model.heads());
      },
      options.leave_out);
}

/// A warning if some configuration attends over more positions than the model was trained for;
/// otherwise "".
std::string note_of_context(const ModelConfig& model, const std::vector<Ids>& ids,
                            std::span<const CacheConfig> configs, const EvalOptions& options) {
  std::uint32_t longest = 0;
  for (std::size_t s = 0; s < ids.size(); ++s) {
    const auto segments = segments_of_sequence(ids[s], s, options);
    const auto tokens = static_cast<std::uint32_t>(ids[s].size());
    for (const CacheConfig& config : configs)
      longest = std::max(longest, needed_positions(resolve(config, segments, 0, model.heads()),
                                                   segments.front().tokens, tokens));
  }
  return context_note(model, longest, "--window");
}

/// Notes for budgets at which no configuration evicts anything.
std::vector<std::string> notes_of_budgets(const ModelConfig& model, std::uint32_t length,
                                          std::uint32_t prompt,
                                          std::span<const CacheConfig> configs) {
  std::map<std::string, bool> evicts;  // [budget]
  for (const CacheConfig& config : configs)
    if (config.evicts() && config.budget.is_even()) {
      bool& any = evicts[config.budget.text()];
      any = any ||
            (!config.budget.all &&
             resolve(config.at_prompt(prompt), length, 0, model.heads()).budget_tokens < length);
    }
  std::vector<std::string> notes;
  for (const auto& [budget, any] : evicts)
    if (!any)
      notes.push_back(fmt::format(
          "budget {} holds all {} tokens of the longest sequence, so nothing is evicted", budget,
          length));
  return notes;
}

/// The memory of the configurations over the sequences.
std::vector<std::vector<Memory>> memory_of(const ModelConfig& model, const std::vector<Ids>& ids,
                                           std::span<const CacheConfig> configs,
                                           const EvalOptions& options) {
  std::vector<std::vector<Memory>> memory(configs.size());
  for (std::size_t s = 0; s < ids.size(); ++s) {
    const auto segments = segments_of_sequence(ids[s], s, options);
    for (std::size_t c = 0; c < configs.size(); ++c)
      memory[c].push_back(
          memory_of(resolve(configs[c], segments, 0, model.heads()), model.heads()));
  }
  return memory;
}

/// Calls run(ids, configs, SequenceOptions) for each sequence, `num_parallel` at a time.
template <class Run>
std::vector<std::vector<TokenScores>> run_each(const std::vector<Ids>& sequences,
                                               const EvalOptions& options, unsigned num_parallel,
                                               Run run) {
  std::vector<std::vector<TokenScores>> scores(sequences.size());
  std::vector<double> done(
      sequences.size());  // [sequence]: number of tokens done, over all configurations
  double tokens = 0;
  for (const Ids& ids : sequences) tokens += static_cast<double>(ids.size());
  if (options.progress) options.progress(0);
  std::mutex mutex;
  const auto show = [&](std::size_t sequence, double part) {
    if (!options.progress) return;
    const std::lock_guard lock(mutex);
    done[sequence] = part * static_cast<double>(sequences[sequence].size());
    options.progress(std::accumulate(done.begin(), done.end(), 0.0) / tokens);
  };
  parallel_for(sequences.size(), num_parallel, [&](std::size_t s) {
    SequenceOptions how =
        sequence_options(options, s, sequences[s].size(), num_parallel == 1 ? options.threads : 1);
    how.progress = [&, s](double part) { show(s, part); };
    scores[s] = run(sequences[s], how);
    show(s, 1);
  });
  return scores;
}

}  // namespace

std::vector<std::vector<TokenScores>> run_sequences_in_turn(
    const std::vector<Ids>& sequences, const EvalOptions& options,
    const std::function<std::vector<TokenScores>(const Ids&, const SequenceOptions&)>& run) {
  return run_each(sequences, options, 1, run);
}

SweepRunner layer_sweep_runner(const Model& model) {
  return [model](const std::vector<Ids>& sequences, std::span<const CacheConfig> configs,
                 const EvalOptions& options) {
    // Windows are independent, so each gets one thread. A single stream uses threads for its heads
    // instead.
    return run_each(sequences, options, sequences.size() == 1 ? 1 : options.threads,
                    [&](const Ids& ids, const SequenceOptions& how) {
                      return evaluate_by_layers(model, ids, configs, how);
                    });
  };
}

SweepRunner token_sweep_runner(Backend& backend) {
  return [&backend](const std::vector<Ids>& sequences, std::span<const CacheConfig> configs,
                    const EvalOptions& options) {
    return run_sequences_in_turn(sequences, options,
                                 [&](const Ids& ids, const SequenceOptions& how) {
                                   return evaluate_by_tokens(backend, ids, configs, how);
                                 });
  };
}

Evaluation evaluate(const ModelConfig& model, const SweepRunner& run_sweep,
                    const std::vector<Ids>& texts, std::vector<CacheConfig> configs,
                    const EvalOptions& options) {
  Sequences sequences = sequences_of(model, texts, options);
  configs = fitting(model, sequences.ids, std::move(configs), options);
  if (options.compares_to_full || std::ranges::any_of(configs, &CacheConfig::is_full))
    configs = put_full_first(std::move(configs));
  if (configs.empty())
    throw std::invalid_argument(
        "nothing to score: no policy is given, and --no-full leaves out the full cache");

  std::size_t longest = 0;
  for (const Ids& ids : sequences.ids) longest = std::max(longest, ids.size());
  const auto length = static_cast<std::uint32_t>(longest);
  const std::uint32_t prompt = sequence_options(options, 0, longest, 1).prompt_tokens;

  const Overlaps overlaps = overlaps_of(sequences, options);
  const ScoredSequences scored{run_sweep(sequences.ids, configs, options),
                               std::move(sequences.text), overlaps.repeats,
                               memory_of(model, sequences.ids, configs, options)};
  Evaluation result{.compares_to_full = options.compares_to_full,
                    .draft = options.draft,
                    .kl = paired_scores(scored, &TokenScores::kl),
                    .nll = paired_scores(scored, &TokenScores::nll),
                    .same_first = paired_scores(scored, &TokenScores::same_first),
                    .acceptance = paired_scores(scored, &TokenScores::acceptance),
                    .notes = notes_of_budgets(model, length, prompt, configs)};
  if (std::string note = note_of_context(model, sequences.ids, configs, options); !note.empty())
    result.notes.insert(result.notes.begin(), std::move(note));
  const auto names = names_of(texts.size(), options.names);
  for (std::string& line : overlap_warnings(overlaps, names))
    result.notes.push_back(std::move(line));
  for (std::string& line : short_text_warnings(scored, names))
    result.notes.push_back(std::move(line));
  for (std::size_t c = 0; c < configs.size(); ++c)
    result.scores.push_back(score_of(
        configs[c],
        configs[c].evicts() ? configs[c].at_prompt(prompt).budget_in_tokens(length, model.head_size)
                            : length,
        c, scored, result, options.block_tokens));
  return result;
}

std::string context_note(const ModelConfig& model, std::uint32_t tokens, std::string_view option) {
  if (tokens <= model.trained_context) return "";
  return fmt::format(
      "sequences of up to {} tokens are longer than the {} that the model was trained on, so its "
      "predictions mean little, even with the full cache; give {} {} or less",
      tokens, model.trained_context, option, model.trained_context);
}

}  // namespace kvlab
