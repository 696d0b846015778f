#include <fmt/format.h>

#include <optional>

#include "engine/evaluation/conversation.hpp"
#include "engine/evaluation/policy_file.hpp"
#include "engine/evaluation/verify.hpp"
#include "engine/tokenizer/tokenizer.hpp"
#include "tools/options.hpp"
#include "tools/turns.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

void add_options(po::options_description& options) {
  auto add = options.add_options();
  add("model", text_option("DIR"), "checkpoint: config.json, safetensors files, tokenizer.json");
  add_threshold_option(options);
  add("check-every", number_option("N", 1),
      "do checks (b) and (d) at every N-th append only; the other checks are always complete");
  add("skip-logits", po::bool_switch(),
      "leave out check (e), which also runs the model on the CPU in float32");
  add_prompt_options(options);
  add_turn_options(options);
  add_context_option(options);
  add("policy-file", text_option("FILE"), "a deployed policy, instead of --policy and --budget");
  add_policy_options(options);
  add_common_options(options);
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

/// What to decode, and under which caches.
struct Dialogue {
  std::vector<VerifyTurn> turns;
  std::vector<CacheConfig> configs;  ///< configurations whose budget fits
  std::vector<ResolvedConfig> caches;
};

Dialogue dialogue_from(const po::variables_map& options, std::vector<CacheConfig> requested,
                       const ModelConfig& config, const Tokenizer& tokenizer) {
  auto first = first_ids(prompt_name(options), prompt_from(options), tokenizer);
  auto prompts = turns_from(options, tokenizer, std::move(first));
  const std::uint32_t decode_tokens = max_new_tokens_from(options);
  const auto resolved = [&](const CacheConfig& cache) {
    return resolve(cache.at_prompt(static_cast<std::uint32_t>(prompts.front().size())),
                   max_tokens(prompts, decode_tokens), 0, config.heads());
  };
  Dialogue dialogue{
      .turns = {},
      .configs = configs_that_fit(std::move(requested), resolved, left_out_of("verify")),
      .caches = {}};
  std::string warning;
  for (const CacheConfig& cache : dialogue.configs) {
    dialogue.caches.push_back(resolved(cache));
    warning = check_context(options, config, dialogue.caches.back(), prompts);
  }
  if (!warning.empty()) fmt::print(stderr, "kvlab verify: {}\n", warning);
  for (auto& ids : prompts) dialogue.turns.push_back({std::move(ids), decode_tokens});
  return dialogue;
}

std::optional<PolicyFile> policy_file_from(const po::variables_map& options) {
  if (!options.count("policy-file")) return std::nullopt;
  refuse_beside_policy_file(options);
  return read_policy_file(options["policy-file"].as<std::string>(), policy_sources_from(options));
}

int run(const po::variables_map& options) {
  const unsigned threads = threads_from(options);
  const std::optional<PolicyFile> file = policy_file_from(options);
  auto sweep = file ? std::vector{file->cache}
                    : sweep_from(options, {}, policy_sources_from(options), left_out_of("verify"));
  const std::string directory = required(options, "model", "--model DIR, a checkpoint's directory");
  const Device device = device_from(options);
  // The model on the CPU: it runs, or a device's logits are compared with it.
  std::optional<Model> model;
  if (device == Device::cpu || !options["skip-logits"].as<bool>())
    model = Model::load(directory, threads);
  const auto backend = device == Device::cpu ? cpu_backend(*model, threads)
                                             : load_backend(device, directory, threads);
  if (file) check_shape(*file, backend->config().heads());
  const Tokenizer tokenizer = tokenizer_of(directory, backend->config());
  const Dialogue dialogue = dialogue_from(options, std::move(sweep), backend->config(), tokenizer);
  say_of_model(backend->config(), tokenizer);

  const std::string_view dtype = torch_name(backend->rounding().value_or(Dtype::f32));
  bool ok = true;
  nlohmann::ordered_json results = nlohmann::ordered_json::array();
  for (std::size_t c = 0; c < dialogue.configs.size(); ++c) {
    const CacheConfig& config = dialogue.configs[c];
    const VerifyReport report =
        verify_decoder(*backend, dialogue.caches[c], dialogue.turns, sampling_from(options),
                       {.threads = threads,
                        .check_every = count_from(options, "check-every", 1, 1 << 30),
                        .reference = options["skip-logits"].as<bool>() ? nullptr : &*model});
    ok = ok && report.ok();
    if (options["json"].as<bool>())
      results.push_back(to_json(config, report, dtype));
    else
      print_report(config, report, dtype);
  }
  if (options["json"].as<bool>()) print_json({{"ok", ok}, {"configurations", std::move(results)}});
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
      .add_options = add_options,
      .run = run};
}

}  // namespace kvlab
