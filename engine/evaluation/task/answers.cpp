#include "engine/evaluation/task/answers.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "engine/evaluation/conversation.hpp"
#include "policies/executor.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using Ids = std::vector<std::int32_t>;

// maximum number of logits in memory at once, unless a single step has more
constexpr std::size_t kLogitFloats = std::size_t{1} << 24;

/// One cache that answers: a question, its query mode, and a configuration.
struct Row {
  std::size_t prompt, mode, config;
};

/// Questions that are answered and stored together.
struct Unit {
  std::size_t batch, first;  ///< batch of configurations; first prompt
  std::vector<Row> rows;
};

/// The model's own greedy answer. A decoder is fed tokens, and the path takes the most probable
/// token after each, as long as the fed tokens are those of the path.
struct Path {
  Ids ids;
  bool open = true;  ///< whether the fed tokens are still those of the path
};

char ascii_lower(char letter) {
  return letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter - 'A' + 'a') : letter;
}

/// A checksum followed by the answers.
std::string pack_answers(std::span<const TaskAnswer> answers) {
  nlohmann::json list = nlohmann::json::array();
  for (const TaskAnswer& answer : answers)
    list.push_back({answer.right, answer.log_likelihood, answer.said,
                    answer.found ? nlohmann::json(*answer.found) : nlohmann::json()});
  const std::string text = list.dump();
  return xxh3_hex(text) + "\n" + text;
}

/// The answers; empty if the bytes are damaged.
std::vector<TaskAnswer> unpack_answers(const std::string& bytes) {
  const std::size_t border = std::min(bytes.find('\n'), bytes.size() - 1);
  const std::string text = bytes.empty() ? "" : bytes.substr(border + 1);
  if (text.empty() || xxh3_hex(text) != bytes.substr(0, border)) return {};
  std::vector<TaskAnswer> answers;
  for (const auto& entry : parse_json(text, "answers"))
    answers.push_back(
        {entry.at(0).get<bool>(), entry.at(1).get<double>(), entry.at(2).get<std::string>(),
         entry.at(3).is_null() ? std::nullopt : std::optional(entry.at(3).get<double>())});
  return answers;
}

class TaskAnswerer {
 public:
  TaskAnswerer(BatchBackend& backend, const Tokenizer& tokenizer,
               std::span<const TaskPrompt> prompts, std::span<const QueryMode> modes,
               std::span<const CacheConfig> configs, const AnswerOptions& options)
      : backend_(backend),
        vocab_(backend.config().vocab),
        tokenizer_(tokenizer),
        prompts_(prompts),
        modes_(modes),
        configs_(configs),
        options_(options),
        answers_(prompts.size(),
                 std::vector(modes.size(), std::vector<TaskAnswer>(configs.size()))) {}

  std::vector<std::vector<std::vector<TaskAnswer>>> run() {
    std::vector<Unit> missing;
    for (Unit& unit : units())
      if (load_stored(unit))
        note_done(unit);
      else
        missing.push_back(std::move(unit));
    show();  // reports the initial progress
    for (const Unit& unit : missing) {
      answer(unit.rows);
      keep(unit);
      note_done(unit);
      show();
    }
    return std::move(answers_);
  }

 private:
  /// Units of whole prompts. Each unit has as many prompts as fit into a batch, but at least one.
  std::vector<Unit> units() const {
    const auto alike = [&](const CacheConfig& one, const CacheConfig& other) {
      return backend_.side_by_side(one, other);
    };
    std::vector<Unit> units;
    const auto batches = batches_of(configs_, configs_.size(), alike);
    for (std::size_t b = 0; b < batches.size(); ++b) {
      const std::size_t each = modes_.size() * batches[b].size();
      const std::size_t step = std::max<std::size_t>(1, options_.max_rows / each);
      for (std::size_t first = 0; first < prompts_.size(); first += step) {
        units.push_back({b, first, {}});
        for (std::size_t p = first; p < std::min(first + step, prompts_.size()); ++p)
          for (std::size_t m = 0; m < modes_.size(); ++m)
            for (const std::size_t c : batches[b]) units.back().rows.push_back({p, m, c});
      }
    }
    return units;
  }

  void answer(std::span<const Row> rows) {
    std::vector<Row> open;
    for_each_group(rows, [&](std::span<const Row> group, BatchDecoder& decoder) {
      const std::vector<Row> undecided = force(group, decoder);
      open.insert(open.end(), undecided.begin(), undecided.end());
    });
    for_each_group(
        open, [&](std::span<const Row> group, BatchDecoder& decoder) { follow(group, decoder); });
  }

  /// Reads the stored answers of a unit. Returns false if there are none, or if they are damaged.
  bool load_stored(const Unit& unit) {
    const std::vector<Row>& rows = unit.rows;
    const auto bytes =
        options_.kept ? options_.kept->read_unit(unit.batch, unit.first) : std::nullopt;
    const auto answers = bytes ? unpack_answers(*bytes) : std::vector<TaskAnswer>{};
    if (answers.size() != rows.size()) return false;
    for (std::size_t r = 0; r < rows.size(); ++r) answer_of(rows[r]) = answers[r];
    return true;
  }
  void keep(const Unit& unit) {
    if (!options_.kept) return;
    std::vector<TaskAnswer> answers;
    for (const Row& row : unit.rows) answers.push_back(answer_of(row));
    options_.kept->write_unit(unit.batch, unit.first, pack_answers(answers));
  }

  /// Calls `body` with as many rows as fit in memory, and with a decoder for them.
  template <class Body>
  void for_each_group(std::span<const Row> rows, Body body) {
    std::size_t max_rows = options_.max_rows;
    while (!rows.empty()) {
      const std::size_t count = std::min(max_rows, rows.size());
      const auto decoder = decoder_of(rows.first(count));
      if (decoder) {
        body(rows.first(count), *decoder);
        rows = rows.subspan(count);
      } else if (count > 1) {
        max_rows = count / 2;
      } else {
        throw std::runtime_error("device memory: not even one question fits; use fewer --words");
      }
    }
  }

  const TaskPrompt& prompt_of(const Row& row) const { return prompts_[row.prompt]; }
  TaskAnswer& answer_of(const Row& row) { return answers_[row.prompt][row.mode][row.config]; }

  std::unique_ptr<BatchDecoder> decoder_of(std::span<const Row> rows) {
    std::vector<ResolvedConfig> caches;
    std::uint32_t longest = 0;
    for (const Row& row : rows) {
      const std::uint32_t tokens = prompt_of(row).tokens();
      const auto segments = prompt_of(row).segments(modes_[row.mode]);
      const auto prompt = static_cast<std::uint32_t>(segments.front().size());
      caches.push_back(resolve(configs_[row.config].at_prompt(prompt), tokens,
                               static_cast<std::uint32_t>(row.prompt), backend_.config().heads()));
      Ids ids;
      for (const Ids& segment : segments) ids.insert(ids.end(), segment.begin(), segment.end());
      find_features(caches.back(), ids, backend_.config().heads());
      longest = std::max(longest, tokens);
    }
    return backend_.batch_decoder(caches, longest + longest_answer(rows));
  }

  std::uint32_t longest_answer(std::span<const Row> rows) const {
    std::size_t longest = 0;
    for (const Row& row : rows)
      longest = std::max({longest, max_new_tokens(row), prompt_of(row).answer.size()});
    return static_cast<std::uint32_t>(longest);
  }

  std::size_t max_new_tokens(const Row& row) const { return options_.limit(prompt_of(row)); }

  /// Appends the prompts. Returns the logits of the last tokens [row, vocab].
  std::unique_ptr<LogitMemory> append(std::span<const Row> rows, BatchDecoder& decoder) {
    auto logits = backend_.logit_memory(rows.size() * vocab_);
    for (std::size_t first = 0; first < rows.size();) {
      std::size_t count = 1;  // rows with the same question
      while (first + count < rows.size() && rows[first + count].prompt == rows[first].prompt &&
             rows[first + count].mode == rows[first].mode)
        ++count;
      for (const Ids& segment : prompt_of(rows[first]).segments(modes_[rows[first].mode]))
        decoder.prompt(static_cast<int>(first), static_cast<int>(count), segment,
                       logits->data() + first * vocab_);
      first += count;
    }
    return logits;
  }

  /// Scores rows of logits, each against its next id. A row whose next id is -1 is not scored.
  std::vector<RowScore> score(const float* logits, const Ids& next) {
    Ids itself(next.size());
    std::iota(itself.begin(), itself.end(), 0);
    std::vector<RowScore> scores = backend_.score(
        {.logits = logits, .baseline = logits, .baseline_rows = itself, .next = next});
    for (std::size_t i = 0; i < scores.size(); ++i)
      if (next[i] >= 0 && !std::isfinite(scores[i].nll))
        throw std::runtime_error("task: a logit is not finite; the model may need another dtype");
    return scores;
  }

  /// Feeds the right answers, which gives their log-likelihood. Also follows the model's own answer
  /// until it differs from the right one. Returns the rows whose answer is not decided yet.
  std::vector<Row> force(std::span<const Row> rows, BatchDecoder& decoder) {
    std::vector<Path> paths(rows.size());
    std::size_t longest = 0;
    for (const Row& row : rows) longest = std::max(longest, prompt_of(row).answer.size());
    take_scores(rows, 0, 1, append(rows, decoder)->data(), paths);
    const std::size_t max_steps =
        std::clamp<std::size_t>(kLogitFloats / (rows.size() * vocab_), 1, longest);
    const auto logits = backend_.logit_memory(max_steps * rows.size() * vocab_);
    for (std::size_t at = 0; at < longest; at += max_steps) {
      const std::size_t steps = std::min(max_steps, longest - at);
      Ids ids;
      for (std::size_t step = at; step < at + steps; ++step)
        for (const Row& row : rows) {
          const Ids& answer = prompt_of(row).answer;
          // A shorter answer repeats its last token. Logits after the answer's end are not scored.
          ids.push_back(answer[std::min(step, answer.size() - 1)]);
        }
      decoder.decode(static_cast<int>(rows.size()), ids, logits->data());
      take_scores(rows, at + 1, steps, logits->data(), paths);
    }
    std::vector<Row> open;
    for (std::size_t r = 0; r < rows.size(); ++r)
      if (!decide(rows[r], paths[r].ids)) open.push_back(rows[r]);
    return open;
  }

  /// Scores the logits [step, row, vocab] of the answers' tokens from `at` on.
  void take_scores(std::span<const Row> rows, std::size_t at, std::size_t steps,
                   const float* logits, std::vector<Path>& paths) {
    Ids next;
    for (std::size_t step = at; step < at + steps; ++step)
      for (const Row& row : rows) {
        const Ids& answer = prompt_of(row).answer;
        // The row after the last token of the answer is also scored (id 0 is arbitrary). Its most
        // probable token is needed, because it may continue the answer's number.
        next.push_back(step < answer.size() ? answer[step] : step == answer.size() ? 0 : -1);
      }
    const std::vector<RowScore> scores = score(logits, next);
    for (std::size_t i = 0; i < scores.size(); ++i) {
      const std::size_t r = i % rows.size(), step = at + i / rows.size();
      const Ids& answer = prompt_of(rows[r]).answer;
      if (next[i] < 0) continue;
      if (step < answer.size()) answer_of(rows[r]).log_likelihood -= scores[i].nll;
      if (!paths[r].open) continue;
      paths[r].ids.push_back(scores[i].first);
      paths[r].open = step < answer.size() && scores[i].first == answer[step];
    }
  }

  /// Returns whether the model's answer so far decides the row. Stores the answer.
  bool decide(const Row& row, Ids path) {
    const auto end = std::ranges::find_first_of(path, backend_.config().eos);
    const bool ended = end != path.end() || path.size() >= max_new_tokens(row);
    path.erase(end, path.end());
    TaskAnswer& answer = answer_of(row);
    // Decodes the answer together with the question. The answer may begin within a word, and a
    // tokenizer decodes tokens correctly only if it knows the tokens before them.
    const Ids& before = prompt_of(row).question;
    Ids text = before;
    text.insert(text.end(), path.begin(), path.end());
    std::string said = tokenizer_.decode(text).substr(tokenizer_.decode(before).size());
    answer.said = take_utf8(said, true);
    const std::vector<std::string>& expected = prompt_of(row).expected;
    if (prompt_of(row).matching == Matching::strings) {
      answer.found = found_share(answer.said, expected);
      answer.right = answer.found == 1;
      return answer.right || ended;
    }
    const Judgement judgement = judge(answer.said, expected, ended);
    answer.right = judgement == Judgement::right;
    return judgement != Judgement::open;
  }

  /// Decodes the model's own answer until it is decided.
  void follow(std::span<const Row> rows, BatchDecoder& decoder) {
    std::vector<Path> paths(rows.size());
    auto logits = append(rows, decoder);
    while (true) {
      const std::vector<RowScore> scores = score(logits->data(), Ids(rows.size(), 0));
      Ids ids;
      bool open = false;
      for (std::size_t r = 0; r < rows.size(); ++r) {
        ids.push_back(scores[r].first);
        if (!paths[r].open) continue;
        paths[r].ids.push_back(scores[r].first);
        paths[r].open = !decide(rows[r], paths[r].ids);
        open = open || paths[r].open;
      }
      if (!open) return;
      decoder.decode(static_cast<int>(rows.size()), ids, logits->data());
    }
  }

  /// Counts work by the tokens of the prompts, because long prompts take longer.
  void note_done(const Unit& unit) {
    for (const Row& row : unit.rows) done_ += prompt_of(row).tokens();
  }
  void show() const {
    if (options_.progress) options_.progress(done_ / all_tokens());
  }
  double all_tokens() const {
    double tokens = 0;
    for (const TaskPrompt& prompt : prompts_) tokens += prompt.tokens();
    return tokens * static_cast<double>(modes_.size() * configs_.size());
  }

  BatchBackend& backend_;
  std::size_t vocab_;
  const Tokenizer& tokenizer_;
  std::span<const TaskPrompt> prompts_;
  std::span<const QueryMode> modes_;
  std::span<const CacheConfig> configs_;
  const AnswerOptions& options_;
  std::vector<std::vector<std::vector<TaskAnswer>>> answers_;
  double done_ = 0;  // prompt tokens of finished rows
};

}  // namespace

Judgement judge(std::string_view said, std::span<const std::string> expected, bool ended) {
  constexpr std::string_view kDigits = "0123456789";
  std::vector<std::string_view> missing(expected.begin(), expected.end());
  for (std::size_t at = said.find_first_of(kDigits); !missing.empty();
       at = said.find_first_of(kDigits, at)) {
    if (at == std::string_view::npos) return ended ? Judgement::wrong : Judgement::open;
    const std::size_t end = said.find_first_not_of(kDigits, at);
    const std::string_view number = said.substr(at, end - at);
    if (end == std::string_view::npos && !ended) {  // the number may continue
      const bool may_be = std::ranges::any_of(
          missing, [&](std::string_view one) { return one.starts_with(number); });
      return may_be ? Judgement::open : Judgement::wrong;
    }
    const auto found = std::ranges::find(missing, number);
    if (found == missing.end()) return Judgement::wrong;
    missing.erase(found);
    at = end;
  }
  return Judgement::right;
}

double found_share(std::string_view said, std::span<const std::string> expected) {
  const auto equal = [](char one, char other) { return ascii_lower(one) == ascii_lower(other); };
  const auto found = std::ranges::count_if(expected, [&](const std::string& string) {
    return !std::ranges::search(said, string, equal).empty();
  });
  return static_cast<double>(found) / static_cast<double>(expected.size());
}

std::vector<std::vector<std::vector<TaskAnswer>>> answer_tasks(BatchBackend& backend,
                                                               const Tokenizer& tokenizer,
                                                               std::span<const TaskPrompt> prompts,
                                                               std::span<const QueryMode> modes,
                                                               std::span<const CacheConfig> configs,
                                                               const AnswerOptions& options) {
  return TaskAnswerer(backend, tokenizer, prompts, modes, configs, options).run();
}

}  // namespace kvlab
