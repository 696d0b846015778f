// Compares answers under a policy with decoders that are fed one sequence at a time.
#include "engine/evaluation/task/answers.hpp"

#include <cmath>

#include "engine/backend.hpp"
#include "engine/evaluation/task/run.hpp"
#include "engine/sampler.hpp"
#include "tests/catch.hpp"
#include "tests/engine/tiny.hpp"
#include "tests/error_of.hpp"
#include "tests/skip.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

const std::vector<QueryMode> kModes{QueryMode::aware, QueryMode::agnostic};

const Tokenizer& tokenizer() {
  static const Tokenizer tokenizer = Tokenizer::load(kTinyModel + "/tokenizer.json");
  return tokenizer;
}

CacheConfig config(const char* policy, std::uint32_t budget, Prefill prefill = {}) {
  CacheConfig config{
      .policy = parse_policy(policy), .budget = {.extent = tokens(budget)}, .prefill = prefill};
  config.positions = config.policy.entry->info.positions;
  return config;
}

std::vector<TaskPrompt> some_prompts(TaskSpec spec = {}) {
  std::vector<TaskPrompt> prompts;
  for (const std::uint32_t words : {25u, 45u})
    prompts.push_back(encode_task(
        tokenizer(), {}, sample_task(spec, Haystack(bundled_haystack()), {words, 0.5}, 3, 0)));
  return prompts;
}

/// The answer by definition. One decoder is fed the right answer, which gives its log-likelihood.
/// Another one generates to the end.
TaskAnswer plain_answer(const TaskPrompt& prompt, QueryMode mode, const CacheConfig& config,
                        std::uint32_t sequence, std::uint32_t max_new_tokens) {
  const ResolvedConfig cache = resolve(config, prompt.tokens(), sequence);
  const auto requested = [&] {
    auto decoder = tiny().decoder(cache, 4096);
    for (const auto& segment : prompt.segments(mode)) decoder->feed(segment, SegmentKind::prompt);
    return decoder;
  };
  TaskAnswer answer;
  auto decoder = tiny().decoder(cache, 4096);
  std::vector<float> logits;
  for (const auto& segment : prompt.segments(mode)) {
    const auto last = decoder->feed(segment, SegmentKind::prompt);
    logits.assign(last.begin(), last.end());
  }
  for (const std::int32_t id : prompt.answer) {
    answer.log_likelihood -= score_row(logits, logits, id).nll;
    const auto last = decoder->feed({&id, 1}, SegmentKind::decode);
    logits.assign(last.begin(), last.end());
  }
  std::vector<std::int32_t> ids;
  Sampler greedy(SamplingOptions{});
  const auto& eos = tiny().config().eos;
  requested()->extend(greedy, max_new_tokens, [&](std::int32_t id) {
    if (std::count(eos.begin(), eos.end(), id)) return false;
    ids.push_back(id);
    return true;
  });
  std::vector<std::int32_t> text = prompt.question;
  text.insert(text.end(), ids.begin(), ids.end());
  answer.said = tokenizer().decode(text).substr(tokenizer().decode(prompt.question).size());
  answer.right = judge(answer.said, prompt.expected, true) == Judgement::right;
  return answer;
}

TEST_CASE("Every answer has the bits of a decoder that is fed alone") {
  const std::vector<CacheConfig> configs{config("full", 1),           config("window", 24),
                                         config("h2o", 24),           config("h2o", 40, Prefill{7}),
                                         config("streaming_h2o", 30), config("lru", 24, Prefill{1}),
                                         config("random", 40)};
  constexpr std::uint32_t kMax = 14;
  // For pass keys, the model generates no number for long. For lists, it generates some number,
  // which the test takes as the right answer.
  std::vector<TaskPrompt> prompts = some_prompts();
  for (TaskPrompt prompt : some_prompts({.kind = TaskKind::recall})) {
    const std::string said = plain_answer(prompt, QueryMode::aware, configs[0], 0, kMax).said;
    const std::size_t first = said.find_first_of("0123456789");
    REQUIRE(first != std::string::npos);
    const std::size_t end = said.find_first_not_of("0123456789", first);
    prompt.expected = {said.substr(first, end - first)};
    prompt.answer = tokenizer().encode(said.substr(0, end), false);
    prompts.push_back(std::move(prompt));
  }
  std::vector<TaskAnswer> wanted;
  for (std::size_t p = 0; p < prompts.size(); ++p)
    for (const QueryMode mode : kModes)
      for (const CacheConfig& one : configs)
        wanted.push_back(plain_answer(prompts[p], mode, one, static_cast<std::uint32_t>(p), kMax));
  const auto right = std::ranges::count_if(wanted, &TaskAnswer::right);
  CHECK(right >= 4);
  CHECK(right < static_cast<std::ptrdiff_t>(wanted.size() / 2));

  for (const std::uint32_t rows : {3u, 64u}) {
    const auto answers = answer_tasks(tiny().batches(), tokenizer(), prompts, kModes, configs,
                                      {.max_new_tokens = kMax, .max_rows = rows, .progress = {}});
    std::size_t i = 0;
    for (const auto& prompt_answers : answers)
      for (const auto& mode_answers : prompt_answers)
        for (const TaskAnswer& answer : mode_answers) {
          CAPTURE(rows, i, answer.said, wanted[i].said);
          CHECK(answer.log_likelihood == wanted[i].log_likelihood);
          CHECK(answer.right == wanted[i].right);
          CHECK(wanted[i].said.starts_with(answer.said));
          ++i;
        }
    CHECK(i == wanted.size());
  }
}

TEST_CASE("A budget for the whole sequence gives the same answers as the full cache, to the bit") {
  const std::vector<CacheConfig> configs{config("full", 1), config("h2o", 1000),
                                         config("lru", 1000, Prefill{1}), config("sink", 1000),
                                         config("window", 20)};
  const auto prompts = some_prompts({.kind = TaskKind::needle, .keys = 2, .values = 2});
  const auto answers = answer_tasks(tiny().batches(), tokenizer(), prompts, kModes, configs, {});
  for (const auto& prompt_answers : answers)
    for (const auto& mode_answers : prompt_answers)
      for (std::size_t c = 1; c < 4; ++c) {
        if (c < 3) CHECK(mode_answers[c].log_likelihood == mode_answers[0].log_likelihood);
        // The log-likelihoods may differ slightly, because sink uses cache positions, whose
        // rotations are rounded differently.
        CHECK(std::abs(mode_answers[c].log_likelihood - mode_answers[0].log_likelihood) < 1e-3);
        CHECK(mode_answers[c].said == mode_answers[0].said);
        CHECK(mode_answers[4].log_likelihood != mode_answers[0].log_likelihood);
      }
  // The ids are the same in both modes, so the full cache gives the same answers.
  for (const auto& prompt_answers : answers)
    CHECK(prompt_answers[0][0].log_likelihood == prompt_answers[1][0].log_likelihood);
}

TEST_CASE("Answers of a stopped task are reused; damaged ones are computed again") {
  const std::vector<CacheConfig> configs{config("full", 1), config("h2o", 24)};
  const auto prompts = some_prompts();
  AnswerOptions options{.max_new_tokens = 4, .max_rows = 1, .progress = {}};
  const auto answers = [&] {
    return answer_tasks(tiny().batches(), tokenizer(), prompts, kModes, configs, options);
  };
  const auto plain = answers();
  const test::TemporaryFolder folder;
  const RunFolder kept(folder / "run", {{"questions", "these"}}, false, "task");
  options.kept = &kept;
  struct Stop {};
  options.progress = [](double done) {
    if (done > 0) throw Stop();
  };
  CHECK_THROWS_AS(answers(), Stop);
  const auto unit = kept.read_unit(0, 0);
  REQUIRE(unit);
  CHECK_FALSE(kept.read_unit(0, 1));

  // A run that reuses the file takes the answers from it unchanged, even this wrong one.
  options.progress = {};
  auto told = parse_json(unit->substr(unit->find('\n') + 1), "answers");
  told[0][2] = "kept";
  kept.write_unit(0, 0, xxh3_hex(told.dump()) + "\n" + told.dump());
  const auto resumed = answers();
  CHECK(resumed[0][0][0].said == "kept");
  CHECK(resumed[0][0][0].log_likelihood == plain[0][0][0].log_likelihood);
  CHECK(resumed[1][1][1].log_likelihood == plain[1][1][1].log_likelihood);
  for (const std::string& damaged : {std::string(), xxh3_hex("") + "\n", unit->substr(0, 40),
                                     "0123456789abcdef\n" + told.dump()}) {
    kept.write_unit(0, 0, damaged);
    CHECK(answers()[0][0][0].said == plain[0][0][0].said);
  }
}

TEST_CASE("On a CUDA device, answers have about the same likelihood as on the CPU", "[gpu]") {
  if (!has_cuda_device()) return skip("no CUDA device");
  const auto cuda = load_backend(Device::cuda, kTinyModel, 2);
  const std::vector<CacheConfig> configs{config("full", 1),      config("h2o", 30),
                                         config("window", 24),   config("h2o", 40),
                                         config("lru", 24, {1}), config("streaming_h2o", 30)};
  const auto prompts = some_prompts();
  const auto wanted = answer_tasks(tiny().batches(), tokenizer(), prompts, kModes, configs, {});
  for (const std::uint32_t rows : {3u, 64u}) {
    const auto answers = answer_tasks(cuda->batches(), tokenizer(), prompts, kModes, configs,
                                      {.max_new_tokens = 32, .max_rows = rows, .progress = {}});
    for (std::size_t p = 0; p < prompts.size(); ++p)
      for (std::size_t m = 0; m < kModes.size(); ++m)
        for (std::size_t c = 0; c < configs.size(); ++c) {
          const double cpu = wanted[p][m][c].log_likelihood, own = answers[p][m][c].log_likelihood;
          CAPTURE(rows, p, m, c, cpu, own);
          CHECK(std::abs(own - cpu) < 0.05 * std::abs(cpu));  // bf16 compared with float32
        }
  }
}

TEST_CASE("A run puts the full cache first, and refuses lengths beyond the trained context") {
  TaskRequest request{
      .spec = {.kind = TaskKind::recall}, .words = {12}, .configs = {config("h2o", 16)}};
  request.depths = {0, 1};
  request.samples = 2;
  request.answers.max_new_tokens = 4;
  const TaskRun run = run_task(tiny(), tokenizer(), request);
  REQUIRE(run.configs.size() == 2);
  CHECK(!run.configs[0].evicts());
  CHECK(run.points.size() == 4);
  CHECK(run.answers.size() == 4);
  // The files have a header, and a row for each answer or metric of 2 configurations in 2 modes.
  const auto lines = [](const std::string& text) { return std::ranges::count(text, '\n'); };
  std::string csv = task_answers_csv(run);
  CHECK(
      csv.starts_with("task,policy,params,budget,prefill,positions,seed,mode,words,depth,sample,"));
  const auto metrics = task_metrics(run.answers, run.points, run.modes);
  CHECK(lines(task_metrics_csv(run, metrics)) == 1 + static_cast<std::ptrdiff_t>(metrics.size()));

  request.words = {12, 3000};
  const std::string error =
      test::error_of<std::invalid_argument>([&] { run_task(tiny(), tokenizer(), request); });
  CHECK(error.starts_with("--words 3000: needs "));
  CHECK(error.find("was trained with a context of") != std::string::npos);
}

TEST_CASE("the memory of layers with a sliding window is a separate metric") {
  TaskRun run;
  run.configs = {CacheConfig{}};
  run.modes = {QueryMode::aware};
  run.prompts.resize(1);
  run.prompts[0].context.resize(20), run.prompts[0].answer.resize(2);
  const auto peak = [&](std::vector<std::uint32_t> windows) {
    run.memory = task_memory(run, {.layers = 2, .kv_heads = 1, .head_size = 4, .windows = windows});
    double bytes = -1;
    for (const TaskMetric& entry : memory_metrics(run))
      if (entry.metric == "window_bytes_peak") bytes = entry.value;
    return bytes;
  };
  CHECK(peak({8, 0}) == 8 * kv_bytes_per_token(4));
  CHECK(peak({}) == -1);
}

TEST_CASE("SmolLM2 finds a pass key, and fails once policy window has evicted it") {
  const std::filesystem::path directory = KVLAB_SOURCE_DIR "/engine/models/smollm2";
  if (!std::filesystem::exists(directory / "model.safetensors"))
    return skip("no SmolLM2, which ./dev model smollm2 fetches");
  const auto backend = load_backend(Device::cpu, directory, 2);
  TaskRequest request{.words = {100}, .configs = {config("window", 64)}};
  request.depths = {0};
  request.samples = 2;
  request.chat = read_chat_frame(directory);
  const TaskRun run = run_task(*backend, Tokenizer::load(directory / "tokenizer.json"), request);
  for (const auto& prompt_answers : run.answers)
    for (const auto& mode_answers : prompt_answers) {
      CHECK(mode_answers[0].right);
      CHECK(!mode_answers[1].right);
      CHECK(mode_answers[0].log_likelihood > mode_answers[1].log_likelihood + 5);
    }
}

}  // namespace
}  // namespace kvlab
