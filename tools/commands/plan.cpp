#include "sim/plan/format_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>

#include "engine/evaluation/eval.hpp"
#include "policies/executor.hpp"
#include "sim/plan/centre_file.hpp"
#include "sim/plan/plan_traces.hpp"
#include "sim/report/text.hpp"
#include "tools/command.hpp"
#include "tools/commands/plan_heads.hpp"
#include "tools/eval_model.hpp"
#include "tools/options.hpp"
#include "tools/turns.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

enum class PlanBy { layer, head };

struct Request {
  PlanBy by = PlanBy::layer;
  HeadsRequest heads;  // with --by head
  std::vector<std::string> traces;
  PlanRequest plan;
  std::string budget;
  std::string centre, centre_out, out;
  bool confirm = false;
  std::string model;               // this member and the next two are for --confirm
  std::vector<std::string> texts;  // paths
  std::uint32_t max_tokens = 1024;
  CommonOptions common;
};

/// Whether kvlab runs the plans itself.
bool is_of_kvlab(const FormatSet& set) {
  return set.name.empty() || set.name == "kvlab" || set.name == "cuda";
}

/// Throws unless the file is new or a centre file, because other safetensors files are weights or
/// parts of a trace.
void check_centre_out(const std::string& path) {
  refuse_unwritable(path, "--centre-out");
  if (!std::filesystem::exists(path)) return;
  try {
    read_centre_file(path);
  } catch (const std::runtime_error&) {
    throw std::invalid_argument(
        fmt::format("--centre-out: {} exists and is not a centre file; name another file", path));
  }
}

/// Whether the user requests only a centre file, and no plan. If so, throws std::invalid_argument
/// for options that have no effect on a centre file.
bool is_only_centre(const Request& request, const GivenOptions& given) {
  if (request.centre_out.empty() || given.has("budget") || given.has("out")) return false;
  given.refuse({"formats", "centre", "queries", "metric", "confirm", "model", "text", "max-tokens",
                "device"},
               "--centre-out alone makes no plan, which needs --budget and --out");
  return true;
}

/// Checks what is requested with --by head.
void check_heads(Request& request, const GivenOptions& given) {
  given.refuse({"trace", "formats", "centre", "centre-out", "queries", "confirm", "model", "text",
                "max-tokens", "device"},
               "--by head plans budgets from the run, not formats");
  given.require("run", "kvlab plan RUN --by head, a directory of `kvlab replay`");
  given.require("budget", "--budget B, tokens or a share");
  given.require("out", "--out budgets.json");
  refuse_unwritable(request.out, "--out");
  request.heads.allocation.budget = parse_mean_budget(request.budget);
  request.heads.allocation.metric = request.plan.metric;
  request.heads.out = request.out;
  request.heads.json = request.common.json;
}

void check(Request& request, const GivenOptions& given) {
  if (request.by == PlanBy::head) return check_heads(request, given);
  given.refuse({"run", "policy"}, "it is for --by head, and formats by layer need --trace TRACE");
  given.require("trace", "--trace TRACE, a captured trace");
  if (given.has("centre-out")) check_centre_out(request.centre_out);
  if (is_only_centre(request, given)) return;
  given.require("budget", "--budget B, such as 4.5bits or 25%bytes");
  given.require("out", "--out plan.json");
  refuse_unwritable(request.out, "--out");
  request.plan.bits = parse_plan_bits(request.budget);
  if (!given.has("formats")) request.plan.set = format_sets().front();
  request.plan.centre = centre_of_option(request.centre);
  if (request.plan.centre != KeyCentre::none && !is_of_kvlab(request.plan.set))
    throw std::invalid_argument(
        fmt::format("--centre: {} does not centre keys; leave it out, or plan with --formats kvlab",
                    request.plan.set.name));
  request.plan.threads = request.common.threads;
  given.refuse_without("confirm", {"model", "text", "max-tokens", "device"});
  if (!request.confirm) return;
  require_model(given, request.model, "--model DIR, the model that --confirm runs");
  given.require("text", "--text FILE..., the texts that --confirm scores");
  if (request.common.device == Device::cuda && request.plan.set.name != "cuda")
    throw std::invalid_argument(
        cpu_only("--confirm", "CUDA devices do not support all of these formats") +
        ", or plan with --formats cuda");
}

PlanBy parse_by(const std::string& text) {
  if (text == "layer") return PlanBy::layer;
  if (text == "head") return PlanBy::head;
  throw std::invalid_argument(fmt::format("--by: '{}' should be layer or head", text));
}

void add_options(OptionTable& table, Request& request) {
  table.text("run", "RUN", request.heads.run, "a directory of `kvlab replay`");
  table.parsed("by", "layer|head", request.by, parse_by,
               "layer: formats for the keys and values of each layer, from traces; head: budgets "
               "for each KV head, from the errors of RUN, which has at least three budgets",
               "layer");
  table.texts("trace", "TRACE", Takes::several_words, request.traces,
              "captured traces of one model; may be given several times");
  table.text("budget", "B", request.budget,
             "mean number of bits for each element of keys and values, including scales and "
             "minima: 4.5bits, or a share such as 25%bytes, where 100% is 16 bit; with --by head, "
             "mean budget of a head: tokens, or a share of the length");
  table.parsed(
      "formats", "SET", request.plan.set, parse_format_set,
      "formats to choose from: kvlab, cuda (those that kvlab also has on CUDA), vllm, "
      "llama.cpp, tensorrt-llm, transformers (what that engine can do), or a list such as 16,8,4",
      "kvlab");
  table.text("centre", "none|prompt|@FILE", request.centre,
             "centre keys before they are quantized (default: none)");
  table.text(
      "centre-out", "FILE", request.centre_out,
      "write the mean of the first 128 keys of each trace's prompt to this safetensors file, "
      "for --centre @FILE; without --budget and --out, make no plan");
  table.parsed("queries", "decode|all", request.plan.queries, parse_queries,
               "queries to measure: those of decoded tokens, or all", "decode");
  table.text("metric", "METRIC", request.plan.metric,
             "loss to minimize: kl_estimate, which needs gradients, or residual_error (default: "
             "kl_estimate if all traces, or the run, have it)");
  table.text("policy", "P", request.heads.allocation.policy,
             "with --by head: the policy whose errors are used; needed if RUN has several");
  table.text("out", "FILE", request.out,
             "file of the plan, for --tiers @FILE, or of the budgets, for --budget @FILE; an "
             "existing file is replaced");
  table.flag("confirm", request.confirm,
             "evaluate the plan and the best single format end to end, and write the one with the "
             "lower KL (requires --model and --text)");
  add_model_option(table, request.model);
  table.texts("text", "FILE...", Takes::several_words, request.texts,
              "with --confirm: texts to score; use other texts than those of the traces");
  table.whole("max-tokens", "T", Range{64, 1 << 20}, request.max_tokens,
              "with --confirm: tokens of each text; the first half is the prompt");
  add_common_options(table, request.common, Device::cpu);  // only --confirm needs a device
}

std::string loss_text(const PlanLoss& loss) {
  if (std::isnan(loss.standard_error)) return number_text(loss.value);
  return fmt::format("{} ± {}", number_text(loss.value), number_text(loss.standard_error));
}

/// Prints one line for each group of consecutive layers that have the same formats.
void print_layers(const FormatPlan& plan) {
  const TierPlan& tier_plan = plan.plan.tier_plan;
  const auto format_of = [&](std::size_t layer) {
    return tier_plan.is_by_layer() ? tier_plan.layers[layer] : tier_plan.tiers.front().format;
  };
  fmt::print("{:<12} {:>9} {:>9} {:>6}\n", "layers", "keys", "values", "bits");
  for (std::size_t begin = 0, end; begin < plan.layers.size(); begin = end) {
    const KvFormat format = format_of(begin);
    for (end = begin + 1; end < plan.layers.size() && format_of(end) == format;) ++end;
    const std::string layers =
        end - begin == 1 ? fmt::format("{}", plan.layers[begin])
                         : fmt::format("{} to {}", plan.layers[begin], plan.layers[end - 1]);
    fmt::print("{:<12} {:>9} {:>9} {:>6.2f}\n", layers, format.key->name, format.value->name,
               format.bits());
  }
}

/// Pads the text with spaces on the left to a width of `columns` columns. "±" has two bytes in
/// UTF-8, but takes one column.
std::string right_aligned(const std::string& text, std::size_t columns) {
  const bool has_sign = text.find("±") != std::string::npos;
  return fmt::format("{:>{}}", text, columns + has_sign);
}

/// The model and the texts of --confirm.
struct Confirmation {
  EvalModel model;
  std::vector<std::vector<std::int32_t>> texts;
};

/// Loads the model and the texts of --confirm. This happens before the plan is made, so that a
/// wrong model or text is refused at once. Returns nullopt without --confirm.
std::optional<Confirmation> load_confirmation(const Request& request, const TraceReader& trace) {
  if (!request.confirm) return std::nullopt;
  Confirmation loaded{load_eval_model(request.model, request.common), {}};
  if (loaded.model.backend->weights_xxh3() != trace.header().weights_xxh3)
    throw std::invalid_argument(
        fmt::format("--model: {} has other weights than the model {} of the traces; give the model "
                    "that was captured",
                    request.model, trace.header().model));
  const Tokenizer& tokenizer = loaded.model.tokenizer;
  const std::size_t max_tokens = request.max_tokens + tokenizer.before().size();
  for (const std::string& path : request.texts)
    loaded.texts.push_back(ids_of_file(path, tokenizer, max_tokens));
  return loaded;
}

/// Measures KL of the plan and of the best single format.
void confirm(const Request& request, const Confirmation& with, FormatPlan& plan) {
  EvalOptions how{.window = request.max_tokens, .before = with.model.tokenizer.before()};
  how.max_tokens = request.max_tokens;
  how.names = text_names(request.texts);
  how.threads = request.common.threads;
  how.progress = progress_bar("confirm");
  const auto measure = [&](FormatChoice& choice) {
    if (!choice.tier_plan.is_quantized()) {  // this choice is the full cache
      choice.measured = {0, 0};
      return;
    }
    CacheConfig config;
    config.policy.tier_plan = choice.tier_plan;
    config.policy.centre = request.plan.centre;
    const Evaluation evaluation =
        evaluate(with.model.backend->config(), with.model.run_sweep, with.texts, {config}, how);
    choice.measured = {evaluation.scores.back().kl, evaluation.scores.back().kl_error};
  };
  measure(plan.plan);
  if (plan.uniform.tier_plan == plan.plan.tier_plan)
    plan.uniform.measured = plan.plan.measured;
  else
    measure(plan.uniform);
}

void print_confirmation(const FormatPlan& plan, const Request& request, const std::string& centre) {
  fmt::print(
      "\nmeasured KL: mean over {}, each of at most {} tokens, against the full cache in 16 bit\n",
      request.texts.size() == 1 ? "one text" : fmt::format("{} texts", request.texts.size()),
      request.max_tokens);
  if (plan.metric == "kl_estimate" && plan.plan.joint.value > 0)
    fmt::print("measured / predicted: {:.2f}\n", plan.plan.measured.value / plan.plan.joint.value);
  const bool is_plan = &plan.chosen() == &plan.plan;
  fmt::print("{}: {}\n", request.out,
             is_plan ? "this plan" : "the single format, which has the lower measured KL");
  fmt::print("Next: kvlab generate --model {} --prompt TEXT --policy full --tiers @{}{}\n",
             request.model, request.out, centre);
}

void print(const FormatPlan& plan, const Request& request) {
  const double bits = request.plan.bits;
  fmt::print("{}, {} {}: formats of at most {:.4g} bits per element, by {}\n\n", plan.model,
             request.traces.size(), request.traces.size() == 1 ? "trace" : "traces", bits,
             plan.metric);
  print_layers(plan);
  const std::string joint = plan.metric == "kl_estimate" ? "kl_estimate_joint" : plan.metric;
  const bool confirmed = request.confirm;
  const std::string uniform = fmt::format("{} in all layers", plan.uniform.tier_plan.text());
  const std::size_t width = uniform.size();
  fmt::print("\n{:<{}} {:>5} {:>13} {:>19}{}\n", "", width, "bits", "sum of losses", joint,
             confirmed ? "        measured KL" : "");
  const auto line = [&](const std::string& name, const FormatChoice& choice) {
    fmt::print("{:<{}} {:>5.2f} {:>13} {}{}\n", name, width, choice.bits, number_text(choice.added),
               right_aligned(loss_text(choice.joint), 19),
               confirmed ? right_aligned(loss_text(choice.measured), 19) : "");
  };
  line("this plan", plan.plan);
  line(uniform, plan.uniform);
  fmt::print("\nplans of other sizes, by their sums of losses\n");
  fmt::print("{:>6} {:>14}\n", "bits", "sum of losses");
  for (const FormatChoice& choice : plan.frontier)
    if (choice.bits <= 9.05)
      fmt::print("{:>6.2f} {:>14}\n", choice.bits, number_text(choice.added));
  const bool centres = request.plan.centre != KeyCentre::none && plan.plan.tier_plan.is_quantized();
  const std::string centre = centres ? " --centre " + request.plan.centre.text() : "";
  if (confirmed) {
    print_confirmation(plan, request, centre);
    return;
  }
  fmt::print(
      "\n{}: the losses are offline estimates; confirm them on another text:\n"
      "Next: kvlab eval --model DIR --text OTHER --policy full --tiers @{} --tiers {}{}\n",
      request.out, request.out, plan.uniform.tier_plan.text(), centre);
}

/// Writes the centre file of --centre-out.
void write_centre(const Request& request, std::span<const TraceReader* const> traces) {
  const OutputClaim claim(request.centre_out);
  const CentreConstants centre = mean_centres(traces);
  write_centre_file(request.centre_out, centre);
  if (!request.out.empty()) return;  // then the text about the plan follows
  if (request.common.json)
    print_json({{"centre_file", request.centre_out},
                {"layers", centre.layers.size()},
                {"kv_heads", centre.kv_heads},
                {"head_size", centre.head_size}});
  else
    fmt::print(
        "{}: centres of {} layers with {} KV heads of {} channels\n"
        "Next: kvlab eval --model DIR --text OTHER --policy full --tiers 4 --centre @{}\n",
        request.centre_out, centre.layers.size(), centre.kv_heads, centre.head_size,
        request.centre_out);
}

int run(const Request& given) {
  if (given.by == PlanBy::head) return plan_heads(given.heads);
  std::optional<OutputClaim> claim;
  if (!given.out.empty()) claim.emplace(given.out);
  std::vector<TraceReader> traces;
  for (const std::string& path : given.traces)
    traces.push_back(open_verified_trace(path, given.common.threads));
  std::vector<const TraceReader*> pointers;
  for (const TraceReader& trace : traces) pointers.push_back(&trace);
  if (given.out.empty()) {
    write_centre(given, pointers);
    return 0;
  }
  PlanRequest request = given.plan;
  request.progress = progress_bar("plan");
  const std::optional<Confirmation> with = load_confirmation(given, traces.front());
  FormatPlan plan = plan_formats(pointers, request);
  if (with) confirm(given, *with, plan);
  const std::string text = plan_text(plan, request, std::filesystem::path(given.out).parent_path());
  if (!given.centre_out.empty()) write_centre(given, pointers);  // only if there is a plan
  write_file_atomically(given.out, text);
  if (given.common.json)
    fmt::print("{}", text);
  else
    print(plan, given);
  return 0;
}

}  // namespace

Command plan_command() {
  return {.name = "plan",
          .summary = "chooses formats for each layer, or a budget for each head",
          .usage =
              "--trace TRACE... --budget B [--formats SET] --out plan.json, or kvlab plan RUN "
              "--by head --budget B [--policy P] --out budgets.json",
          .example = "kvlab plan --trace trace --budget 4bits --out plan.json",
          .positional = "run",
          .prepare = make_prepare(add_options, check, run)};
}

}  // namespace kvlab
