#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <stdexcept>
#include <utility>

#include "engine/backend.hpp"
#include "engine/capture.hpp"
#include "engine/evaluation/conversation.hpp"
#include "engine/tokenizer/tokenizer.hpp"
#include "sim/access/key_quantization.hpp"
#include "tools/command.hpp"
#include "tools/options.hpp"
#include "tools/turns.hpp"
#include "traces/base/json.hpp"
#include "traces/manifest.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;
using Ids = std::vector<std::int32_t>;

constexpr std::int64_t kMaxTokens = 1 << 30;

struct Request {
  std::string model, out, prefill = "dense";
  PromptOptions prompt;
  TurnOptions turns;
  bool teacher_forced = false, beyond_context = false;
  std::int64_t prompt_tokens = 0;       ///< for teacher-forced captures
  std::size_t max_tokens = kAllTokens;  ///< for teacher-forced captures
  std::vector<std::string> passages;
  CommonOptions common;
};

/// If an error left an incomplete trace in `out`, returns the text that is appended to the error
/// message. Returns "" if `out` has no shard or is a complete trace.
std::string describe_unfinished(const std::string& out) {
  const std::filesystem::path folder = out;
  if (!std::filesystem::exists(folder / shard_name(0)) ||
      std::filesystem::exists(folder / kManifestFile))
    return "";
  return fmt::format(
      "; {} is unfinished; `kvlab trace seal {}` makes a trace of its complete shards", out, out);
}

void check_modes(const Request& request, const GivenOptions& given) {
  const auto refuse = [&](const char* name, std::string_view why) {
    if (given.has(name)) throw std::invalid_argument(fmt::format("--{}: {}", name, why));
  };
  if (!request.teacher_forced) {
    refuse("prompt-tokens", "requires --teacher-forced");
    refuse("max-tokens", "requires --teacher-forced");
    return;
  }
  if (!given.has("prompt-tokens"))
    throw std::invalid_argument(
        "--prompt-tokens: missing; --teacher-forced needs --prompt-tokens P");
  for (const char* name : {"max-new-tokens", "turn", "temperature", "top-k", "top-p", "seed"})
    refuse(name, "is for sampling, and --teacher-forced does not sample; leave out one of them");
}

void check(Request& request, const GivenOptions& given) {
  check_modes(request, given);
  require_model(given, request.model, "--model DIR, the directory of a checkpoint");
  given.require("out", "--out TRACE, a new directory");
  const std::string& out = request.out;
  if (const std::string left = describe_unfinished(out); !left.empty())
    throw std::runtime_error("--out: " + out + " exists" + left);
  if (!is_unbegun_trace(out)) refuse_existing(out, "--out");
  parse_prefill(request.prefill);
}

void add_options(OptionTable& table, Request& request) {
  add_model_option(table, request.model);
  table.text("out", "TRACE", request.out, "directory of the trace; it must not exist yet");
  add_prompt_options(table, request.prompt);
  add_turn_options(table, request.turns);
  table.flag("teacher-forced", request.teacher_forced,
             "decode the given text instead of sampled tokens");
  table.whole("prompt-tokens", "P", kAnyNumber, request.prompt_tokens,
              "--teacher-forced: number of tokens of the text that form the prompt; the others are "
              "decoded",
              "");
  table.whole("max-tokens", "T", {1, kMaxTokens}, request.max_tokens,
              "--teacher-forced: use the first T tokens of the text (default: all)", "");
  table.texts("passage", "TEXT", Takes::one_word, request.passages,
              "a part of the prompt that appears in it once; the trace stores its tokens as a "
              "passage; may be given several times");
  table.text("prefill", "MODE", request.prefill,
             "how the prompt is processed: dense, chunk:N or stream (all give the same trace)");
  add_seed_option(table, request.turns.sampling.seed);
  add_context_option(table, request.beyond_context);
  add_common_options(table, request.common);
}

/// What to capture: a given text, or turns that the model answers.
struct Plan {
  bool teacher_forced = false;
  std::vector<Ids> turns;            // teacher-forced: a single turn with the whole text
  std::size_t prompt_tokens = 0;     // teacher-forced
  std::uint32_t max_new_tokens = 0;  // if not teacher-forced
};

Plan plan_of(const Request& request, const Tokenizer& tokenizer, Ids text) {
  Plan plan{.teacher_forced = request.teacher_forced};
  if (!plan.teacher_forced) {
    plan.max_new_tokens = request.turns.max_new_tokens;
    plan.turns = ids_of_turns(request.turns.turns, tokenizer, std::move(text));
    return plan;
  }
  const auto length = static_cast<std::int64_t>(text.size());
  if (length == 0) throw std::invalid_argument("--prompt: the text has no tokens; give some text");
  check_range("prompt-tokens", request.prompt_tokens, {1, length});
  plan.prompt_tokens = static_cast<std::size_t>(request.prompt_tokens);
  plan.turns = {std::move(text)};
  return plan;
}

/// Number of prompt tokens in all turns.
std::uint32_t prompt_tokens(const Plan& plan) {
  if (plan.teacher_forced) return static_cast<std::uint32_t>(plan.prompt_tokens);
  return max_tokens(plan.turns, 0);
}

/// The passages of the prompt that `--passage` names. The name of a passage is its text.
std::vector<Passage> find_passages(const std::vector<std::string>& texts,
                                   const Tokenizer& tokenizer, const Ids& prompt) {
  std::vector<Passage> passages;
  for (const std::string& text : texts) {
    const auto refuse = [](std::string_view why) {
      throw std::invalid_argument(fmt::format("--passage: {}", why));
    };
    if (std::ranges::find(passages, without_controls(text), &Passage::name) != passages.end())
      refuse(json_quoted(text) + " is given twice; give it once");
    try {
      const TokenRange range = covering_tokens(tokenizer, prompt, text);
      passages.push_back({without_controls(text), range.start, range.tokens});
    } catch (const std::invalid_argument& error) {
      refuse(error.what());
    }
  }
  return passages;
}

nlohmann::json record(const Request& request) {
  nlohmann::json record{{"prefill", request.prefill}, {"teacher_forced", request.teacher_forced}};
  if (request.teacher_forced) return record;
  const SamplingOptions& sampling = request.turns.sampling;
  record["temperature"] = sampling.temperature;
  record["top_k"] = sampling.top_k;
  record["top_p"] = sampling.top_p;
  record["seed"] = sampling.seed;
  return record;
}

/// Feeds all tokens of the plan to the decoder. Returns the sampled text.
std::string run_plan(const Plan& plan, SequenceDecoder& decoder, const ModelConfig& config,
                     const Tokenizer& tokenizer, SamplingOptions sampling) {
  if (plan.teacher_forced) {
    const std::span<const std::int32_t> text = plan.turns.front();
    decoder.feed(text.first(plan.prompt_tokens), SegmentKind::prompt);
    if (plan.prompt_tokens < text.size())
      decoder.feed(text.subspan(plan.prompt_tokens), SegmentKind::decode);
    return "";
  }
  Conversation conversation(decoder, config, tokenizer, sampling);
  std::string sampled;
  for (const Ids& turn : plan.turns)
    sampled += conversation.ask(turn, plan.max_new_tokens, [](const std::string&) {}).text;
  return sampled;
}

int run(const Request& request) {
  const std::string& out = request.out;
  const unsigned threads = request.common.threads;
  ResolvedConfig cache;  // the full cache
  cache.prefill = parse_prefill(request.prefill);
  const std::string prompt = request.prompt.read();

  const auto backend = load_backend(request.common.device, request.model, threads);
  const ModelConfig& config = backend->config();
  const Tokenizer tokenizer = tokenizer_of(request.model, config);
  const Plan plan = plan_of(
      request, tokenizer, first_ids(request.prompt.name(), prompt, tokenizer, request.max_tokens));

  const std::uint32_t total_tokens = max_tokens(plan.turns, plan.max_new_tokens);
  if (!request.beyond_context) refuse_beyond_context(config, prompt_tokens(plan));

  say_of_model(config, tokenizer, prompt);
  if (const std::string warning = context_warning(config, total_tokens); !warning.empty())
    fmt::print(stderr, "kvlab capture: {}\n", warning);

  nlohmann::json how = record(request);
  how["first_token"] = first_token(tokenizer, prompt);
  TraceHeader header = backend->trace_header(how);
  announce_traces("capture", header.shape, total_tokens, "into " + out);
  header.passages = find_passages(request.passages, tokenizer, plan.turns.front());
  TraceWriter writer(out, std::move(header));
  writer.sketch(output_sketch(request.model, kSketchSeed, threads));
  const auto bar = progress_bar("capture");
  std::string text;
  try {
    const auto decoder = backend->capturing_decoder(
        cache, total_tokens, writer,
        [&](std::uint32_t tokens) { bar(static_cast<double>(tokens) / total_tokens); });
    text = run_plan(plan, *decoder, config, tokenizer, request.turns.sampling);
    decoder->flush();
    writer.finish();
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(error.what() + describe_unfinished(out));
  }
  bar(1.0);
  if (const std::string warning = key_quantization_warning(TraceReader::open(out));
      !warning.empty())
    fmt::print(stderr, "kvlab capture: {}\n", warning);

  if (request.common.json) {
    ordered_json result{{"trace", out}, {"model", config.name}, {"tokens", writer.tokens()}};
    if (!plan.teacher_forced) result["text"] = text;
    print_json(result);
  } else {
    fmt::print("{}: {} tokens of {}\n", out, writer.tokens(), config.name);
  }
  return 0;
}

}  // namespace

Command capture_command() {
  return {.name = "capture",
          .summary = "runs a model on a text and writes a trace of its attention",
          .usage =
              "--model DIR --prompt TEXT|--prompt-file FILE [--max-new-tokens N | --teacher-forced "
              "--prompt-tokens P] --out TRACE",
          .example =
              "kvlab capture --model engine/models/tiny --prompt-file tools/demo/prompt.txt "
              "--teacher-forced --prompt-tokens 256 --out trace",
          .prepare = make_prepare(add_options, check, run)};
}

}  // namespace kvlab
