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
#include "tools/options.hpp"
#include "tools/turns.hpp"
#include "traces/base/json.hpp"
#include "traces/manifest.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;
using Ids = std::vector<std::int32_t>;

constexpr std::int64_t kMaxTokens = 1 << 30;

void add_options(po::options_description& options) {
  auto add = options.add_options();
  add("model", text_option("DIR"), "checkpoint: config.json, safetensors files, tokenizer.json");
  add("out", text_option("TRACE"), "directory of the trace; it must not exist yet");
  add_prompt_options(options);
  add_turn_options(options);
  add("teacher-forced", po::bool_switch(), "decode the given text instead of sampled tokens");
  add("prompt-tokens", number_option("P"),
      "--teacher-forced: number of tokens of the text that form the prompt; the others are "
      "decoded");
  add("max-tokens", number_option("T"),
      "--teacher-forced: use the first T tokens of the text (default: all)");
  add("passage", po::value<std::vector<std::string>>()->composing()->value_name("TEXT"),
      "a part of the prompt that appears in it once; the trace stores its tokens as a passage; may "
      "be given several times");
  add("prefill", text_option("MODE", "dense"),
      "how the prompt is processed: dense, chunk:N or stream; the trace is the same");
  add("seed", number_option("N", 0), "random seed");
  add_context_option(options);
  add_common_options(options);
}

/// What to capture: a given text, or turns that the model answers.
struct Plan {
  bool teacher_forced = false;
  std::vector<Ids> turns;            // teacher-forced: a single one, the whole text
  std::size_t prompt_tokens = 0;     // teacher-forced
  std::uint32_t max_new_tokens = 0;  // otherwise
};

void check_modes(const po::variables_map& options) {
  const bool forced = options["teacher-forced"].as<bool>();
  const auto refuse = [&](const char* name, std::string_view why) {
    if (options.count(name) && !options[name].defaulted())
      throw std::invalid_argument(fmt::format("--{}: {}", name, why));
  };
  if (!forced) {
    refuse("prompt-tokens", "requires --teacher-forced");
    refuse("max-tokens", "requires --teacher-forced");
    return;
  }
  if (!options.count("prompt-tokens"))
    throw std::invalid_argument(
        "--prompt-tokens: missing; --teacher-forced needs --prompt-tokens P");
  for (const char* name : {"max-new-tokens", "turn", "temperature", "top-k", "top-p"})
    refuse(name, "is for sampling, and --teacher-forced does not sample; leave out one of them");
}

/// The most tokens of the text to use.
std::size_t max_tokens_from(const po::variables_map& options) {
  if (!options.count("max-tokens")) return kAllTokens;
  return static_cast<std::size_t>(number_from(options, "max-tokens", 1, kMaxTokens));
}

Plan plan_from(const po::variables_map& options, const Tokenizer& tokenizer, Ids text) {
  Plan plan{.teacher_forced = options["teacher-forced"].as<bool>()};
  if (!plan.teacher_forced) {
    plan.max_new_tokens = max_new_tokens_from(options);
    plan.turns = turns_from(options, tokenizer, std::move(text));
    return plan;
  }
  const auto length = static_cast<std::int64_t>(text.size());
  if (length == 0) throw std::invalid_argument("--prompt: the text has no tokens; give some text");
  plan.prompt_tokens = static_cast<std::size_t>(number_from(options, "prompt-tokens", 1, length));
  plan.turns = {std::move(text)};
  return plan;
}

/// Prompt tokens of all turns.
std::uint32_t prompt_tokens(const Plan& plan) {
  if (plan.teacher_forced) return static_cast<std::uint32_t>(plan.prompt_tokens);
  return max_tokens(plan.turns, 0);
}

/// The passages of the prompt that `--passage` names; each text is its passage's name.
std::vector<Passage> passages_from(const po::variables_map& options, const Tokenizer& tokenizer,
                                   const Ids& prompt) {
  std::vector<Passage> passages;
  if (!options.count("passage")) return passages;
  for (const std::string& text : options["passage"].as<std::vector<std::string>>()) {
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

nlohmann::json record(const po::variables_map& options, const Plan& plan) {
  nlohmann::json record{{"prefill", options["prefill"].as<std::string>()},
                        {"teacher_forced", plan.teacher_forced}};
  if (plan.teacher_forced) return record;
  record["temperature"] = options["temperature"].as<double>();
  record["top_k"] = options["top-k"].as<std::int64_t>();
  record["top_p"] = options["top-p"].as<double>();
  record["seed"] = options["seed"].as<std::int64_t>();
  return record;
}

/// Feeds everything. Returns the sampled text.
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

/// The message about a trace that an error left incomplete.
std::string unfinished(const std::string& out) {
  const std::filesystem::path folder = out;
  if (!std::filesystem::exists(folder / shard_name(0)) ||
      std::filesystem::exists(folder / kManifestFile))
    return "";
  return fmt::format(
      "; {} is unfinished; `kvlab trace seal {}` makes a trace of its complete shards", out, out);
}

int run(const po::variables_map& options) {
  const Device device = device_from(options);
  check_modes(options);
  const std::string directory =
      required(options, "model", "--model DIR, the directory of a checkpoint");
  const std::string out = required(options, "out", "--out TRACE, a new directory");
  if (const std::string left = unfinished(out); !left.empty())
    throw std::runtime_error("--out: " + out + " exists" + left);
  if (!is_unbegun_trace(out)) refuse_existing(out, "--out");
  const unsigned threads = threads_from(options);
  const SamplingOptions sampling = sampling_from(options);
  ResolvedConfig cache;  // the full cache
  cache.prefill = parse_prefill(options["prefill"].as<std::string>());
  const std::string prompt = prompt_from(options);

  const auto backend = load_backend(device, directory, threads);
  const ModelConfig& config = backend->config();
  const Tokenizer tokenizer = tokenizer_of(directory, config);
  const Plan plan =
      plan_from(options, tokenizer,
                first_ids(prompt_name(options), prompt, tokenizer, max_tokens_from(options)));

  const std::uint32_t most = max_tokens(plan.turns, plan.max_new_tokens);
  if (!options["beyond-context"].as<bool>()) refuse_beyond_context(config, prompt_tokens(plan));

  say_of_model(config, tokenizer, prompt);
  if (const std::string warning = context_warning(config, most); !warning.empty())
    fmt::print(stderr, "kvlab capture: {}\n", warning);

  nlohmann::json how = record(options, plan);
  how["first_token"] = first_token(tokenizer, prompt);
  TraceHeader header = backend->trace_header(how);
  announce_traces("capture", header.shape, most, "into " + out);
  header.passages = passages_from(options, tokenizer, plan.turns.front());
  TraceWriter writer(out, std::move(header));
  writer.sketch(output_sketch(directory, kSketchSeed, threads));
  const auto bar = progress_bar("capture");
  std::string text;
  try {
    const auto decoder = backend->capturing_decoder(cache, most, writer, [&](std::uint32_t tokens) {
      bar(static_cast<double>(tokens) / most);
    });
    text = run_plan(plan, *decoder, config, tokenizer, sampling);
    decoder->flush();
    writer.finish();
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(error.what() + unfinished(out));
  }
  bar(1.0);
  if (const std::string warning = key_quantization_warning(TraceReader::open(out));
      !warning.empty())
    fmt::print(stderr, "kvlab capture: {}\n", warning);

  if (options["json"].as<bool>()) {
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
          .add_options = add_options,
          .run = run};
}

}  // namespace kvlab
