#include <fmt/format.h>

#include <optional>

#include "engine/evaluation/conversation.hpp"
#include "engine/evaluation/policy_file.hpp"
#include "engine/evaluation/verify.hpp"
#include "engine/tokenizer/tokenizer.hpp"
#include "tools/command.hpp"
#include "tools/options.hpp"
#include "tools/turns.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

struct Request {
  std::string model, policy_file;
  std::uint32_t check_every = 1;
  bool checks_logits = true;
  PromptOptions prompt;
  TurnOptions turns;
  bool beyond_context = false;
  CacheOptions caches;
  CommonOptions common;
};

void check(Request& request, const GivenOptions& given) {
  request.turns.sampling.seed = request.caches.sweep.seed;
  if (given.has("policy-file")) refuse_beside_policy_file(given);
  require_model(given, request.model);
}

void add_options(OptionTable& table, Request& request) {
  add_model_option(table, request.model);
  add_threshold_option(table, request.caches.sweep.threshold);
  table.whole("check-every", "N", {1, 1 << 30}, request.check_every,
              "do checks (b) and (d) at every N-th append only; the other checks are always "
              "complete");
  table.flag("skip-logits", request.checks_logits,
             "leave out check (e), which also runs the model on the CPU in float32", false);
  add_prompt_options(table, request.prompt);
  add_turn_options(table, request.turns);
  add_context_option(table, request.beyond_context);
  table.text("policy-file", "FILE", request.policy_file,
             "a deployed policy, instead of --policy and --budget");
  add_cache_options(table, request.caches);
  add_common_options(table, request.common);
}

void print_outputs(const OutputCheck& check, std::string_view dtype) {
  if (check.rows == 0)
    fmt::print("  (d) attention outputs    not checked\n");
  else
    fmt::print(
        "  (d) attention outputs    {}: {} rows, worst relative error {:.2e} in layer {} (at most "
        "{:.1e}, {})\n",
        check.right() ? "right" : "WRONG", check.rows, check.worst_error, check.layer,
        check.tolerance, dtype);
}

void print_logits(const LogitCheck& check, std::string_view dtype) {
  if (check.rows == 0)
    fmt::print("  (e) logits               not checked\n");
  else
    fmt::print(
        "  (e) logits               {}: {} rows, relative error {:.2e} (at most {:.1e}, {})\n",
        check.right() ? "right" : "WRONG", check.rows, check.error, check.tolerance, dtype);
}

void print_report(const CacheConfig& config, const VerifyReport& report, std::string_view dtype) {
  fmt::print("{} budget {} prefill {} positions {}\n", config.policy.text(), config.budget.text(),
             config.prefill.text(), name_of(config.positions));
  fmt::print("  (a) states and victims   {}: {} appends, {} evictions\n",
             report.identical ? "bit-identical" : "DIFFERENT", report.appends, report.evictions);
  if (!report.identical) fmt::print("      {}\n", report.first_difference);
  if (report.observations == 0)
    fmt::print("  (b) observations         none needed\n");
  else
    fmt::print(
        "  (b) observations         {}: {} tokens, worst error {:.2e} (at most {:.1e}), {} wrong "
        "requests\n",
        report.right() ? "right" : "WRONG", report.observations, report.worst_mass,
        report.tolerance, report.wrong_requests);
  fmt::print("  (c) free-running         {} of {} heads evict a different token at least once\n",
             report.partings.size(), report.heads);
  for (const Parting& p : report.partings)
    fmt::print("      layer {} head {} at position {}: engine {}, simulator {}, margin {:.2e}\n",
               p.layer, p.kv_head, p.now, p.engine_victim, p.simulator_victim, p.margin);
  print_outputs(report.outputs, dtype);
  print_logits(report.logits, dtype);
}

nlohmann::ordered_json to_json(const CacheConfig& config, const VerifyReport& report,
                               std::string_view dtype) {
  nlohmann::ordered_json partings = nlohmann::ordered_json::array();
  for (const Parting& p : report.partings)
    partings.push_back({{"layer", p.layer},
                        {"head", p.kv_head},
                        {"position", p.now},
                        {"engine_victim", p.engine_victim},
                        {"simulator_victim", p.simulator_victim},
                        {"margin", p.margin}});
  return {{"policy", config.policy.name},
          {"params", config.policy.params_text()},
          {"budget", config.budget.text()},
          {"prefill", config.prefill.text()},
          {"positions", name_of(config.positions)},
          {"ok", report.ok()},
          {"states",
           {{"identical", report.identical},
            {"first_difference", report.first_difference},
            {"appends", report.appends},
            {"evictions", report.evictions}}},
          {"observations",
           {{"right", report.right()},
            {"tokens", report.observations},
            {"worst_error", report.worst_mass},
            {"tolerance", report.tolerance},
            {"wrong_requests", report.wrong_requests}}},
          {"free_running", {{"heads", report.heads}, {"partings", std::move(partings)}}},
          {"dtype", dtype},
          {"outputs",
           {{"right", report.outputs.right()},
            {"rows", report.outputs.rows},
            {"worst_error", report.outputs.worst_error},
            {"tolerance", report.outputs.tolerance},
            {"layer", report.outputs.layer}}},
          {"logits",
           {{"right", report.logits.right()},
            {"rows", report.logits.rows},
            {"error", report.logits.error},
            {"tolerance", report.logits.tolerance}}}};
}

/// The turns to decode, and the caches to decode them with.
struct Dialogue {
  std::vector<VerifyTurn> turns;
  std::vector<CacheConfig> configs;  ///< configurations whose budget fits
  std::vector<ResolvedConfig> caches;
};

Dialogue make_dialogue(const Request& request, std::vector<CacheConfig> sweep,
                       const ModelConfig& config, const Tokenizer& tokenizer) {
  auto first = first_ids(request.prompt.name(), request.prompt.read(), tokenizer);
  auto prompts = ids_of_turns(request.turns.turns, tokenizer, std::move(first));
  const std::uint32_t decode_tokens = request.turns.max_new_tokens;
  const auto resolved = [&](const CacheConfig& cache) {
    return resolve(cache.at_prompt(static_cast<std::uint32_t>(prompts.front().size())),
                   max_tokens(prompts, decode_tokens), 0, config.heads());
  };
  Dialogue dialogue{
      .turns = {},
      .configs = configs_that_fit(std::move(sweep), resolved, report_omissions("verify")),
      .caches = {}};
  std::string warning;
  for (const CacheConfig& cache : dialogue.configs) {
    dialogue.caches.push_back(resolved(cache));
    warning = check_context(request.beyond_context, decode_tokens, config, dialogue.caches.back(),
                            prompts);
  }
  if (!warning.empty()) fmt::print(stderr, "kvlab verify: {}\n", warning);
  for (auto& ids : prompts) dialogue.turns.push_back({std::move(ids), decode_tokens});
  return dialogue;
}

int run(const Request& request) {
  const auto& [threads, device, json] = request.common;
  const CompiledPolicies compiled = compiled_policies(request.caches, request.common);
  std::optional<PolicyFile> file;
  if (!request.policy_file.empty()) file = read_policy_file(request.policy_file, compiled);
  auto sweep = file ? std::vector{file->cache}
                    : sweep_of(request.caches, compiled, report_omissions("verify"));
  // The model on the CPU. With --device cpu it decodes. With another device it only computes the
  // logits to which that device's logits are compared.
  std::optional<Model> model;
  if (device == Device::cpu || request.checks_logits) model = Model::load(request.model, threads);
  const auto backend = device == Device::cpu ? cpu_backend(*model, threads)
                                             : load_backend(device, request.model, threads);
  if (file) check_shape(*file, backend->config().heads());
  const Tokenizer tokenizer = tokenizer_of(request.model, backend->config());
  const Dialogue dialogue = make_dialogue(request, std::move(sweep), backend->config(), tokenizer);
  say_of_model(backend->config(), tokenizer);

  const std::string_view dtype = torch_name(backend->rounding().value_or(Dtype::f32));
  bool ok = true;
  nlohmann::ordered_json results = nlohmann::ordered_json::array();
  for (std::size_t c = 0; c < dialogue.configs.size(); ++c) {
    const CacheConfig& config = dialogue.configs[c];
    const VerifyReport report =
        verify_decoder(*backend, dialogue.caches[c], dialogue.turns, request.turns.sampling,
                       {.threads = threads,
                        .check_every = request.check_every,
                        .reference = request.checks_logits ? &*model : nullptr});
    ok = ok && report.ok();
    if (json)
      results.push_back(to_json(config, report, dtype));
    else
      print_report(config, report, dtype);
  }
  if (json) print_json({{"ok", ok}, {"configurations", std::move(results)}});
  return ok ? 0 : 1;
}

}  // namespace

Command verify_command() {
  return {
      .name = "verify",
      .summary = "checks the decoder's evictions, attention and logits",
      .usage = "--model DIR --prompt TEXT|--prompt-file FILE --policy LIST --budget LIST [options]",
      .example =
          "kvlab verify --model engine/models/tiny --prompt 'It was a dark night' --policy h2o,lru "
          "--budget 64 --max-new-tokens 200",
      .prepare = make_prepare(add_options, check, run)};
}

}  // namespace kvlab
