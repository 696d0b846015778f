#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "engine/evaluation/eval.hpp"
#include "engine/evaluation/eval/score.hpp"
#include "engine/evaluation/policy_file.hpp"
#include "policies/executor.hpp"
#include "sim/report/recommendation.hpp"
#include "sim/report/text.hpp"
#include "tools/command.hpp"
#include "tools/eval_model.hpp"
#include "tools/options.hpp"
#include "tools/turns.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

constexpr std::int64_t kMaxTokens = std::int64_t{1} << 30;
constexpr std::int64_t kMaxDraft = 64;  // tokens

struct Request {
  std::string model, policy_file, out;
  std::vector<std::string> texts;  ///< paths
  EvalOptions how;
  bool by_tokens = false;  ///< evaluate token by token; --stream sets it too
  bool sweeps = false;     ///< whether other policies than that of --policy-file are evaluated
  CacheOptions caches;
  CommonOptions common;
};

void check_draft(Request& request, const GivenOptions& given) {
  if (request.how.draft == 0) return;
  given.refuse({"no-full"}, "--draft compares the drafts with the full cache");
  given.refuse({"by-tokens"}, "--draft works layer by layer");
  if (!request.sweeps && request.policy_file.empty())
    throw std::invalid_argument("--draft: requires --policy, the policies whose caches draft");
  if (request.how.queries == Queries::all)
    throw std::invalid_argument(
        "--draft: only decoded tokens are drafted; leave out --queries all");
  if (given.has("device") && request.common.device == Device::cuda)
    throw std::invalid_argument(cpu_only("--draft"));
  request.common.device = Device::cpu;
}

void check(Request& request, const GivenOptions& given) {
  if (request.texts.empty())
    throw std::invalid_argument("--text: missing; give one or more files: --text FILE");
  request.how.names = text_names(request.texts);
  request.how.threads = request.common.threads;
  if (request.how.stream) {
    given.refuse({"window"}, "--stream scores each text as one sequence, without windows");
    request.by_tokens = true;
  }
  const bool has_file = given.has("policy-file");
  request.sweeps = given.has("policy") || (has_policy_sources(request.caches) && !has_file) ||
                   (given.has("tiers") && !has_file);  // then the policy is `full`
  if (!request.sweeps && has_file) refuse_beside_policy_file(given);
  if (!request.sweeps && !has_file) {
    refuse_lone_budget(request.caches);
    refuse_lone_modes(given);
  }
  check_draft(request, given);
  if (!request.out.empty()) refuse_existing(request.out, "--out");
  require_model(given, request.model);
}

void add_options(OptionTable& table, Request& request) {
  constexpr Range kTokens{0, kMaxTokens};
  EvalOptions& how = request.how;
  add_model_option(table, request.model);
  table.texts("text", "FILE...", Takes::several_words, request.texts, "texts to score");
  table.whole("window", "N", kTokens, how.window,
              "tokens in a window, including the model's first token (0: the context that the "
              "model was trained on)");
  table.flag("stream", how.stream, "score each text as one sequence, without windows");
  table.whole("prompt-tokens", "P", kTokens, how.prompt_tokens,
              "tokens of each sequence that form its prompt (0: half of them)");
  table.whole("max-tokens", "T", kTokens, how.max_tokens,
              "use the first T tokens of each text (0: all)");
  table.parsed("queries", "decode|all", how.queries, parse_queries,
               "which predictions are scored: those of decoded tokens, or all", "decode");
  table.flag("by-tokens", request.by_tokens,
             "on a CUDA device, decode token by token instead of layer by layer; slower, and a "
             "check of the default (--stream implies this switch)");
  table.flag("no-full", how.compares_to_full,
             "do not run the full cache. KL and top-1 are then not measured. For streams that are "
             "too long for the full cache",
             false);
  table.whole(
      "draft", "G", {0, kMaxDraft}, how.draft,
      "measure on the CPU which share of the tokens that each policy's cache drafts is accepted by "
      "the full cache, with G tokens before each verification (0: do not draft)");
  table.whole("block-tokens", "N", kTokens, how.block_tokens,
              "also print the perplexity of every N scored tokens of a text, in order (0: do not)");
  add_threshold_option(table, request.caches.sweep.threshold);
  table.text("out", "DIR", request.out,
             "new directory for eval.csv, blocks.csv and eval.json; `kvlab report` makes a page of "
             "it");
  table.text("policy-file", "FILE", request.policy_file,
             "a deployed policy, in addition to those of --policy");
  add_cache_options(table, request.caches);
  add_features_option(table, request.caches.features);
  add_common_options(table, request.common);
}

CacheConfig read_deployed(const std::string& path, const CompiledPolicies& compiled,
                          const ModelConfig& config, const std::string& weights_xxh3) {
  const PolicyFile file = read_policy_file(path, compiled);
  if (const auto warning = model_mismatch(file, config.name, weights_xxh3); !warning.empty())
    fmt::print(stderr, "kvlab eval: {}\n", warning);
  check_shape(file, config.heads());
  return file.cache;
}

/// The budget in tokens. The full cache evicts nothing, so its cell shows the budget's text
/// instead.
std::string budget_cell(const EvalScore& score) {
  return score.config.evicts() ? std::to_string(score.budget_tokens) : score.config.budget_text();
}

/// The label of a configuration. If the tier plan differs by layer and the label is long, the label
/// is cut, and the mean bits of the plan are appended. eval.csv has the whole label.
std::string short_label(const EvalScore& score) {
  constexpr std::size_t kLongest = 40;
  const std::string label = score.label();
  const TierPlan& tier_plan = score.config.policy.tier_plan;
  if (!tier_plan.is_by_layer() || label.size() <= kLongest) return label;
  return fmt::format("{}... ({:.2f} bits)", label.substr(0, kLongest - 14), tier_plan.mean_bits());
}

/// The names in the first column: the policy and, if the table has several, its positions and its
/// prefill mode.
std::vector<std::string> row_names(const std::vector<EvalScore>& scores) {
  const bool has_both = std::ranges::any_of(scores, [&](const EvalScore& score) {
    return score.config.positions != scores.front().config.positions;
  });
  const bool has_prefills = std::ranges::any_of(scores, [&](const EvalScore& score) {
    return score.config.evicts() &&
           score.config.prefill.chunk != scores.back().config.prefill.chunk;
  });
  std::vector<std::string> names;
  for (const EvalScore& score : scores) {
    std::vector<std::string> parts;
    if (has_prefills && score.config.evicts()) parts.push_back(score.config.prefill.text());
    if (has_both) parts.emplace_back(name_of(score.config.positions));
    names.push_back(short_label(score));
    if (!parts.empty()) names.back() += fmt::format(" ({})", fmt::join(parts, ", "));
  }
  return names;
}

/// The width of the column of names: the length of its heading or of the longest name, whichever is
/// larger.
std::size_t width_of(const std::vector<std::string>& names) {
  std::size_t width = std::string_view("policy").size();
  for (const std::string& name : names) width = std::max(width, name.size());
  return width;
}

void print_blocks(const EvalScore& score, std::size_t width) {
  constexpr std::size_t kMinWidth = 10;
  for (const EvalBlock& block : score.blocks)
    fmt::print("  from token {:>9} {:>{}.3f}{}\n", block.first, std::exp(block.nll),
               std::max(width + 1, kMinWidth),
               std::isnan(block.milliseconds_per_token)
                   ? ""
                   : fmt::format("  {:.4f} ms/token", block.milliseconds_per_token));
}

void print_table(const std::vector<EvalScore>& scores, const CacheShape& model) {
  const std::vector<std::string> names = row_names(scores);
  const std::size_t width = width_of(names);
  constexpr const char* kRow = "{:<{}} {:>6} {:>16} {:>7} {:>6} {:>9} {:>9}\n";
  fmt::print(fmt::runtime(kRow), "policy", width, "budget", "perplexity", "KL", "top-1", "mean KV",
             "peak KV");
  for (std::size_t s = 0; s < scores.size(); ++s) {
    const EvalScore& score = scores[s];
    const std::string error =
        std::isnan(score.perplexity_error) ? "" : fmt::format(" ± {:.3f}", score.perplexity_error);
    fmt::print(fmt::runtime(kRow), names[s], width, budget_cell(score),
               fmt::format("{:.3f}{}", score.perplexity, error),
               std::isnan(score.kl) ? "-" : fmt::format("{:.4f}", score.kl),
               std::isnan(score.same_first) ? "-" : fmt::format("{:.1f}%", 100 * score.same_first),
               bytes_text(score.memory.mean), bytes_text(score.memory.peak));
    print_blocks(score, width);
  }
  fmt::print("KV: bytes of keys and values (16 bit) that a sequence holds, over decoded queries\n");
  for (const EvalScore& score : scores)
    if (const Memory& own = score.memory; own.exempt_peak > 0)
      fmt::print("{}: {}\n", score.label(), exempt_text(own.peak, own.exempt_peak));
  const Memory& memory = scores.front().memory;
  if (const std::size_t windows = model.layers - model.policy_layers().layers; windows > 0)
    fmt::print("{}\n", windows_text(windows, memory.window_mean, memory.window_peak));
}

std::string share_text(const MeanWithError& share) {
  return std::isnan(share.error) ? fmt::format("{:.3f}", share.mean)
                                 : fmt::format("{:.3f} ± {:.3f}", share.mean, share.error);
}

/// Prints how often drafted tokens are accepted.
void print_drafts(const Evaluation& evaluation) {
  const std::vector<std::string> names = row_names(evaluation.scores);
  const std::size_t width = width_of(names);
  constexpr const char* kRow = "{:<{}} {:>6} {:>15} {:>7} {:>6}  {}\n";
  fmt::print(fmt::runtime(kRow), "policy", width, "budget", "acceptance", "tokens", "top-1",
             fmt::format("at depth 1 to {}", evaluation.draft));
  for (std::size_t s = 0; s < evaluation.scores.size(); ++s) {
    const EvalScore& score = evaluation.scores[s];
    std::string by_depth;
    for (const MeanWithError& own : score.draft->by_depth)
      by_depth += fmt::format("{}{:.3f}", by_depth.empty() ? "" : " ", own.mean);
    fmt::print(fmt::runtime(kRow), names[s], width, budget_cell(score),
               share_text(score.draft->acceptance),
               fmt::format("{:.2f}", score.draft->tokens_per_verification.mean),
               fmt::format("{:.1f}%", 100 * score.same_first), by_depth);
  }
  fmt::print(
      "acceptance: share of drafted tokens that the full cache accepts, at temperature 1\n"
      "tokens: expected tokens that one verification yields, at most {}\n"
      "top-1: share of tokens at which greedy decoding accepts the draft\n",
      evaluation.draft + 1);
}

/// Prints for each configuration the mean and the standard deviation over its texts.
void print_texts(const Evaluation& evaluation) {
  if (evaluation.draft > 0 || evaluation.deciding().texts() < 2) return;
  fmt::print("\nby text, {}: mean and standard deviation of the texts' means\n",
             std::isnan(evaluation.scores.front().kl) ? "-ln p" : "KL");
  for (const EvalScore& score : evaluation.scores) {
    if (!score.config.evicts()) continue;
    const bool compares_to_full = !std::isnan(score.kl);
    fmt::print("{:<40} {:>6} {:>9.4f} ± {:.4f}\n", short_label(score), score.budget_tokens,
               compares_to_full ? score.kl : score.nll,
               compares_to_full ? score.kl_deviation : score.nll_deviation);
  }
}

/// Prints the recommendation at each budget, and the next command.
void print_recommendations(const Evaluation& evaluation, const std::string& out) {
  const std::vector<Recommendation> made = evaluation.recommendations();
  if (made.empty()) return;
  fmt::print("\n{}", recommendations_text(made));
  const auto [scores, decisive] = evaluation.judge_budget(made[decisive_budget(made)].scope.budget);
  const CacheConfig& config = evaluation.scores[scores[decisive.choice]].config;
  const std::string policy = config.policy.brief(), budget = config.budget.text();
  fmt::print("Next: kvlab generate --model DIR --prompt TEXT ");
  if (evaluation.draft > 0) {
    fmt::print("--draft-policy {} --draft-budget {} --gamma {}\n", policy, budget,
               evaluation.draft);
  } else {
    const std::string_view quote = budget.find('(') != std::string::npos ? "'" : "";  // for a shell
    fmt::print("--policy {} --budget {}{}{}", policy, quote, budget, quote);
    if (config.prefill.chunk != 0) fmt::print(" --prefill {}", config.prefill.text());
    if (config.positions != config.policy.entry->info.positions)
      fmt::print(" --positions {}", name_of(config.positions));
    fmt::print("\n");
  }
  if (!out.empty()) fmt::print("Next: kvlab report {} --out eval.html\n", out);
}

int run(const Request& request) {
  EvalOptions how = request.how;
  how.progress = progress_bar("eval");
  how.leave_out = report_omissions("eval");
  const auto compiled = compiled_policies(request.caches, request.common);
  std::vector<CacheConfig> configs;
  if (request.sweeps) configs = sweep_of(request.caches, compiled, how.leave_out);
  std::optional<AtomicFolder> folder;
  if (!request.out.empty()) folder.emplace(request.out);
  const EvalModel model = load_eval_model(
      request.model, request.common, request.by_tokens ? EvalMethod::tokens : EvalMethod::layers);
  const ModelConfig& config = model.backend->config();
  const std::string weights_xxh3 = model.backend->weights_xxh3();
  if (!request.policy_file.empty())
    configs.push_back(read_deployed(request.policy_file, compiled, config, weights_xxh3));

  how.before = model.tokenizer.before();
  // --max-tokens does not count the special tokens that the tokenizer puts before a text.
  const std::size_t max_tokens = how.max_tokens ? how.max_tokens + how.before.size() : kAllTokens;
  std::vector<std::vector<std::int32_t>> texts;
  for (const std::string& path : request.texts)
    texts.push_back(ids_of_file(path, model.tokenizer, max_tokens));
  say_of_model(model.backend->config(), model.tokenizer);
  const Evaluation evaluation = evaluate(config, model.run_sweep, texts, std::move(configs), how);
  for (const std::string& warning : eval_warnings(evaluation))
    fmt::print(stderr, "kvlab eval: {}\n", warning);
  nlohmann::ordered_json json{
      {"model", config.name},
      {"weights_xxh3", weights_xxh3},
      {"kvlab", KVLAB_RELEASE},
      {"engine_dtype", torch_name(model.backend->rounding().value_or(Dtype::f32))},
      {"first_token", first_token(model.tokenizer)},
      {"queries", name_of(how.queries)}};
  json.update(eval_json(evaluation, how.names));
  if (folder) {
    write_file_atomically(*folder / kEvalCsv, eval_csv(evaluation, how.names));
    write_file_atomically(*folder / kEvalBlocksCsv, eval_blocks_csv(evaluation, how.names));
    write_file_atomically(*folder / kEvalJson, json_text(json, 1) + "\n");
    folder->commit();
  }
  if (request.common.json) {
    print_json(json);
    return 0;
  }
  if (evaluation.draft > 0)
    print_drafts(evaluation);
  else
    print_table(evaluation.scores, config.heads());
  print_texts(evaluation);
  print_recommendations(evaluation, request.out);
  return 0;
}

}  // namespace

Command eval_command() {
  return {.name = "eval",
          .summary = "evaluates policies and budgets end to end: KL and perplexity",
          .usage = "--model DIR --text FILE... [--policy LIST --budget LIST] [options]",
          .example =
              "kvlab eval --model engine/models/tiny --text tools/demo/prompt.txt "
              "--policy window,sink,h2o --budget 64,128 --prefill stream",
          .prepare = make_prepare(add_options, check, run)};
}

}  // namespace kvlab
