#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "engine/evaluation/conversation.hpp"
#include "engine/evaluation/policy_file.hpp"
#include "policies/executor.hpp"
#include "sim/head_view.hpp"
#include "sim/live_counts.hpp"
#include "tools/command.hpp"
#include "tools/drafts.hpp"
#include "tools/options.hpp"
#include "tools/turns.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;

struct Request {
  std::string model, policy_file;
  PromptOptions prompt;
  TurnOptions turns;
  bool beyond_context = false;
  CacheOptions caches;
  DraftRequest drafts;
  CommonOptions common;

  bool has_drafts() const { return !drafts.policy.empty(); }
};

void check(Request& request, const GivenOptions& given) {
  require_model(given, request.model);
  take_drafter(request.drafts, given, request.caches);
  if (request.has_drafts() && request.common.device == Device::cuda)
    throw std::invalid_argument(cpu_only("--draft-policy"));
  request.turns.sampling.seed = request.caches.sweep.seed;
  if (given.has("policy-file")) refuse_beside_policy_file(given);
  if (!request.turns.turns.empty())
    given.refuse({"features"},
                 "it has features of the first prompt only, and --turn adds another prompt");
}

void add_options(OptionTable& table, Request& request) {
  add_model_option(table, request.model);
  add_prompt_options(table, request.prompt);
  add_turn_options(table, request.turns);
  add_context_option(table, request.beyond_context);
  table.text("policy-file", "FILE", request.policy_file,
             "policy file of `kvlab deploy` or `kvlab tune`");
  add_cache_options(table, request.caches);
  add_features_option(table, request.caches.features);
  add_draft_options(table, request.drafts);
  add_common_options(table, request.common);
}

/// The requested cache, and the policy file if the cache comes from one.
struct RequestedCache {
  CacheConfig cache;
  std::optional<PolicyFile> file;
};

RequestedCache requested_cache(const Request& request) {
  const CompiledPolicies compiled = compiled_policies(request.caches, request.common);
  if (request.policy_file.empty()) return {.cache = only_config(request.caches, compiled)};
  const PolicyFile file = read_policy_file(request.policy_file, compiled);
  return {.cache = file.cache, .file = file};
}

void warn(const std::string& message) {
  if (!message.empty()) fmt::print(stderr, "kvlab generate: {}\n", message);
}

/// Whether heads may keep different numbers of tokens.
bool keeps_unequal_counts(const ResolvedConfig& cache) {
  return !cache.head_budgets.empty() || cache.shares_slots();
}

/// For example "kept at the end: 24.5 tokens per KV head on average, 8 to 40". Counts only heads
/// that a policy evicts from. "" if there are none.
std::string kept_text(const SequenceDecoder& decoder, const ResolvedConfig& cache) {
  double sum = 0, heads = 0;
  std::uint32_t min_kept = ~0u, max_kept = 0;
  const auto kept = decoder.kept();
  const auto acts = [&](std::uint32_t layer) {
    return cache.window_of(layer) == 0 && !cache.exempts(layer);
  };
  for (std::uint32_t layer = 0; layer < kept.size(); ++layer)
    for (std::size_t head = 0; acts(layer) && head < kept[layer].size(); ++head) {
      sum += kept[layer][head], heads += 1;
      min_kept = std::min(min_kept, kept[layer][head]),
      max_kept = std::max(max_kept, kept[layer][head]);
    }
  if (heads == 0) return "";
  return fmt::format("kept at the end: {:.1f} tokens per KV head on average, {} to {}", sum / heads,
                     min_kept, max_kept);
}

/// Bytes of one element of a key or value in the cache.
std::size_t value_bytes(const Backend& backend) {
  return bytes_of(backend.rounding().value_or(Dtype::f32));
}

/// The segments of the conversation as they were fed to the decoder: each turn, and its answer. The
/// last token of the last answer is not fed.
std::vector<Segment> segments_fed(const std::vector<std::vector<std::int32_t>>& turns,
                                  const std::vector<Answer>& answers, std::uint32_t fed) {
  std::vector<Segment> segments;
  std::uint32_t start = 0;
  const auto add = [&](std::size_t tokens, SegmentKind kind) {
    const auto own = std::min(static_cast<std::uint32_t>(tokens), fed - start);
    if (own > 0) segments.push_back({start, own, kind});
    start += own;
  };
  for (std::size_t turn = 0; turn < answers.size(); ++turn) {
    add(turns[turn].size(), SegmentKind::prompt);
    add(answers[turn].ids.size(), SegmentKind::decode);
  }
  return segments;
}

/// For example "evicted 412 tokens of each KV head; KV 96.0 of 204.0 KiB in 16 bit", or why nothing
/// was evicted. `fed`: the segments of the conversation. If the engine's elements have more than 16
/// bits, the text also gives the bytes in float32.
std::string evicted_text(const SequenceDecoder& decoder, const CacheShape& model,
                         std::size_t number_bytes, const ResolvedConfig& cache,
                         const std::vector<Segment>& fed) {
  const CacheShape shape = model.policy_layers();
  const double heads = static_cast<double>(shape.layers) * shape.kv_heads;
  const std::uint64_t evictions = decoder.evictions();
  if (evictions == 0)
    return fmt::format("evicted nothing: all {} tokens fit the budget of {}", decoder.tokens(),
                       cache.budget_tokens);
  const double gone = static_cast<double>(evictions) / heads;
  ResolvedConfig counted = cache;
  plan_appends(counted, fed);
  const double token = heads * static_cast<double>(kv_bytes_per_token(shape.head_size)) / 1024;
  const double held = memory_of(counted, model).end / 1024;
  std::string text =
      fmt::format("evicted {:.0f} tokens of each KV head; KV {:.1f} of {:.1f} KiB in 16 bit", gone,
                  held, decoder.tokens() * token);
  if (number_bytes > 2 && cache.policy.tier_plan.is_plain())
    text += fmt::format(" ({:.1f} KiB in float32, which the CPU computes in)", 2 * held);
  if (!cache.windows.empty()) text += ", in the layers without a window";
  if (cache.prefill.chunk == 0)
    text +=
        "; with --prefill dense the whole prompt is in memory while it is read (--prefill stream "
        "stays within the budget)";
  return text;
}

/// Bytes of the keys and values that layers with a window hold at the end. `token_bytes`: bytes of
/// one token in one KV head.
std::size_t window_bytes(const SequenceDecoder& decoder, const ResolvedConfig& cache,
                         std::size_t token_bytes) {
  std::size_t tokens = 0;
  const auto kept = decoder.kept();
  for (std::uint32_t layer = 0; layer < kept.size(); ++layer)
    for (const std::uint32_t own : kept[layer]) tokens += cache.window_of(layer) > 0 ? own : 0;
  return tokens * token_bytes;
}

/// Adds the settings of a cache.
void add_cache(ordered_json& json, const ResolvedConfig& cache) {
  json["policy"] = cache.policy.name;
  json["params"] = cache.policy.params_text();
  json["budget_tokens"] =
      cache.evicts() ? ordered_json(cache.requested_tokens) : ordered_json("all");
  json["positions"] = name_of(cache.positions);
  json["prefill"] = cache.prefill.text();
}

ordered_json to_json(const std::vector<Answer>& answers, const ResolvedConfig& cache,
                     const SequenceDecoder& decoder, const Conversation& conversation,
                     Dtype engine_dtype) {
  std::string text;
  std::vector<std::int32_t> ids;
  ordered_json turns = ordered_json::array();
  for (const Answer& answer : answers) {
    text += answer.text;
    ids.insert(ids.end(), answer.ids.begin(), answer.ids.end());
    turns.push_back({{"text", answer.text},
                     {"ids", answer.ids},
                     {"stopped", answer.ended ? "end of text" : "length"}});
  }
  ordered_json json{{"text", text}, {"ids", ids}, {"turns", turns}};
  add_cache(json, cache);
  json["prompt_tokens"] = conversation.prompt_pace().tokens;
  json["prompt_tokens_per_second"] = conversation.prompt_pace().tokens_per_second();
  json["tokens_per_second"] = conversation.decode_pace().tokens_per_second();
  json["evictions"] = cache.evicts() ? decoder.evictions() : 0;
  json["kv_bytes_measured"] = decoder.kv_bytes_peak();
  json["engine_dtype"] = torch_name(engine_dtype);
  if (keeps_unequal_counts(cache) && !decoder.kept().empty()) json["kept_tokens"] = decoder.kept();
  return json;
}

int run(const Request& request) {
  const std::uint32_t max_new_tokens = request.turns.max_new_tokens;
  const std::string prompt = request.prompt.read();
  const RequestedCache requested = requested_cache(request);
  const DraftOptions drafts = draft_options(request.drafts);

  const auto backend = load_backend(request.common.device, request.model, request.common.threads);
  const ModelConfig& config = backend->config();
  const Tokenizer tokenizer = tokenizer_of(request.model, config);
  const auto turns = ids_of_turns(request.turns.turns, tokenizer,
                                  first_ids(request.prompt.name(), prompt, tokenizer));
  const std::uint32_t length = max_tokens(turns, max_new_tokens);
  if (requested.file) check_shape(*requested.file, config.heads());
  ResolvedConfig cache =
      resolve(requested.cache.at_prompt(static_cast<std::uint32_t>(turns.front().size())), length,
              0, config.heads());
  find_features(cache, turns.front(), config.heads());
  // With drafts, the model generates the text with the full cache, and `cache` is the cache of the
  // drafter.
  const ResolvedConfig text_cache =
      request.has_drafts() ? resolve({}, length, 0, config.heads()) : cache;
  const std::string too_long =
      check_context(request.beyond_context, max_new_tokens, config, text_cache, turns);
  if (requested.file) warn(model_mismatch(*requested.file, config.name, backend->weights_xxh3()));
  warn(too_long);

  say_of_model(config, tokenizer, prompt);
  const bool json = request.common.json;
  std::unique_ptr<DraftingDecoder> drafting;
  std::unique_ptr<SequenceDecoder> plain;
  if (request.has_drafts())
    drafting = backend->drafting_decoder(cache, drafts);
  else
    plain = backend->decoder(cache, length);
  SequenceDecoder* const decoder = drafting ? drafting.get() : plain.get();
  Conversation conversation(*decoder, config, tokenizer, request.turns.sampling);
  std::vector<Answer> answers;
  for (const auto& turn : turns) {
    answers.push_back(conversation.ask(turn, max_new_tokens, [&](const std::string& text) {
      if (json) return;
      fmt::print("{}", text);
      std::fflush(stdout);
    }));
    if (!json) fmt::print("\n");
  }
  std::fflush(
      stdout);  // so that the text precedes the messages about it if both streams go to one file
  if (json) {
    ordered_json result = to_json(answers, text_cache, *decoder, conversation,
                                  backend->rounding().value_or(Dtype::f32));
    result["first_token"] = first_token(tokenizer, prompt);
    if (!cache.windows.empty() && !decoder->kept().empty())
      result["window_bytes_end"] =
          window_bytes(*decoder, cache, 2 * config.head_size * value_bytes(*backend));
    if (drafting) {
      ordered_json& draft = result["draft"];
      add_cache(draft, cache);
      draft["evictions"] = decoder->evictions();
      draft.update(drafts_json(drafting->stats()));
    }
    print_json(result);
    return 0;
  }
  if (drafting) {
    warn(acceptance_text(drafting->stats()));
    warn(speedup_text(drafting->stats()));
    return 0;
  }
  if (cache.evicts())
    warn(evicted_text(*decoder, config.heads(), value_bytes(*backend), cache,
                      segments_fed(turns, answers, decoder->tokens())));
  if (keeps_unequal_counts(cache)) warn(kept_text(*decoder, cache));
  return 0;
}

}  // namespace

Command generate_command() {
  return {.name = "generate",
          .summary = "generates text from a model with the cache of any policy",
          .usage =
              "--model DIR --prompt TEXT|--prompt-file FILE [--policy P --budget B | "
              "--policy-file FILE] [options]",
          .example =
              "kvlab generate --model engine/models/tiny --prompt 'It was a dark night' --policy "
              "sink --budget 32",
          .prepare = make_prepare(add_options, check, run)};
}

}  // namespace kvlab
