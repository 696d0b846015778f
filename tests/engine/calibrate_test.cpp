// `kvlab calibrate` and what a replay makes of it: a head's sensitivity against one computed
// plainly, and files that are refused.
#include "engine/loop/calibrate/calibrate.hpp"

#include <cmath>

#include "engine/tokenizer/tokenizer.hpp"
#include "sim/run/run.hpp"
#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "tools/command.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using namespace test;
using Catch::Matchers::ContainsSubstring;
using nlohmann::json;
using Words = std::vector<std::string>;

const std::string kModel = KVLAB_SOURCE_DIR "/engine/models/tiny";
const std::string kText = KVLAB_SOURCE_DIR "/tools/demo/prompt.txt";
constexpr std::size_t kTokens = 128;

std::string refusal(const Command& command, const Words& words) {
  return error_of<std::exception>([&] { run_command(command, words); });
}

Words calibrate_words(const std::filesystem::path& out, const std::string& threads = "2") {
  return {"--model",   kModel,  "--text", kText,       "--max-tokens", std::to_string(kTokens),
          "--threads", threads, "--out",  out.string()};
}

std::vector<std::int32_t> some_ids(const Model& model) {
  std::vector<std::int32_t> ids{model.config().bos};
  for (const std::int32_t id :
       Tokenizer::load(kModel + "/tokenizer.json").encode(read_bytes(kText), false))
    if (ids.size() < kTokens) ids.push_back(id);
  return ids;
}

/// Attention by its definition, in double: [token, query head, dim].
std::vector<float> plain_attention(const Model& model, std::uint32_t layer,
                                   const std::vector<float>& x) {
  const ModelShape shape = model.config().shape();
  const std::size_t dim = shape.head_size, width = shape.query_heads * dim,
                    kv_width = shape.kv_heads * dim;
  std::vector<float> q(kTokens * width), k(kTokens * kv_width), v(k.size()), out(q.size());
  model.attention_inputs(layer, x.data(), kTokens, q.data(), k.data(), v.data(), 1);
  const RopeTable rope(model.config().rope, kTokens);
  const auto rotated = [&](const std::vector<float>& all, std::size_t at, std::size_t position) {
    std::vector<float> y(dim);
    rope.rotate(all.data() + at, dim, static_cast<std::uint32_t>(position), y.data());
    return y;
  };
  for (std::size_t h = 0; h < shape.query_heads; ++h) {
    const std::size_t kv = h / shape.group() * dim;
    for (std::size_t t = 0; t < kTokens; ++t) {
      const auto query = rotated(q, t * width + h * dim, t);
      std::vector<double> p;
      double sum = 0;
      for (std::size_t j = 0; j <= t; ++j) {
        const auto key = rotated(k, j * kv_width + kv, j);
        double logit = 0;
        for (std::size_t d = 0; d < dim; ++d) logit += static_cast<double>(query[d]) * key[d];
        sum += p.emplace_back(std::exp(logit * model.config().softmax_scale()));
      }
      for (std::size_t d = 0; d < dim; ++d) {
        double y = 0;
        for (std::size_t j = 0; j <= t; ++j) y += p[j] / sum * v[j * kv_width + kv + d];
        out[t * width + h * dim + d] = static_cast<float>(y);
      }
    }
  }
  return out;
}

/// Natural logarithms of the next token's probabilities; with `noise` of that size in one head.
std::vector<double> log_probabilities(const Model& model, std::uint32_t layer, std::size_t head,
                                      double noise, double& noise2) {
  const ModelShape shape = model.config().shape();
  const std::size_t dim = shape.head_size, width = shape.query_heads * dim,
                    vocab = model.config().vocab;
  std::vector<float> x(kTokens * model.config().hidden);
  model.embed(some_ids(model), x.data());
  for (std::uint32_t l = 0; l < shape.layers; ++l) {
    std::vector<float> out = plain_attention(model, l, x);
    if (l == layer) {
      double norm2 = 0;
      for (std::size_t i = 0; i < kTokens * dim; ++i)
        norm2 += std::pow(out[i / dim * width + head * dim + i % dim], 2);
      noise2 = 0;
      for (std::size_t i = 0; i < kTokens * dim; ++i) {
        const double added =
            noise * std::sqrt(norm2 / (kTokens * dim)) *
            sketch_normal(1, (layer * shape.query_heads + head) * kTokens * dim + i);
        out[i / dim * width + head * dim + i % dim] += static_cast<float>(added);
        noise2 += added * added;
      }
    }
    model.attention_output(l, out.data(), kTokens, x.data(), 1);
    model.mlp(l, x.data(), kTokens, 1);
  }
  std::vector<float> logits(kTokens * vocab);
  model.logits(x.data(), kTokens, logits.data(), 1);
  std::vector<double> logs(logits.begin(), logits.end());
  for (std::size_t t = 0; t < kTokens; ++t) {
    double sum = 0;
    for (std::size_t i = 0; i < vocab; ++i) sum += std::exp(logs[t * vocab + i]);
    for (std::size_t i = 0; i < vocab; ++i) logs[t * vocab + i] -= std::log(sum);
  }
  return logs;
}

TEST_CASE("A head's sensitivity is twice the divergence over the noise, computed plainly") {
  const Model model = Model::load(kModel, 2);
  const CalibrateResult result = calibrate(model, {some_ids(model)}, {.noise = 0.1, .threads = 2});
  REQUIRE(result.calibration.layers == model.config().shape().layers);
  CHECK(result.blocks == kTokens / 64);
  double noise2 = 0;
  const auto full = log_probabilities(model, 0, 0, 0, noise2);
  for (const auto& [layer, head] : {std::pair{0u, 2u}, std::pair{2u, 1u}, std::pair{3u, 3u}}) {
    const auto noisy = log_probabilities(model, layer, head, 0.1, noise2);
    double kl = 0;
    for (std::size_t i = 0; i < full.size(); ++i) kl += std::exp(full[i]) * (full[i] - noisy[i]);
    INFO("layer " << layer << ", head " << head);
    CHECK(result.calibration.of_layer(layer)[head] == Approx(2 * kl / noise2).epsilon(0.01));
  }
  CHECK(result.check.ratio == Approx(1).epsilon(0.05));
  for (const double error : result.calibration.standard_error) CHECK(error > 0);
}

TEST_CASE("A calibration has the same bytes for any number of threads, and a replay takes it") {
  const TemporaryFolder folder;
  REQUIRE(run_command(calibrate_command(), calibrate_words(folder / "a.json", "1")) == 0);
  REQUIRE(run_command(calibrate_command(), calibrate_words(folder / "b.json", "3")) == 0);
  CHECK(read_bytes(folder / "a.json") == read_bytes(folder / "b.json"));

  const std::string trace = (folder / "trace").string(), out = (folder / "run").string();
  REQUIRE(run_command(capture_command(),
                      {"--model", kModel, "--prompt-file", kText, "--teacher-forced",
                       "--prompt-tokens", "64", "--max-tokens", "128", "--out", trace}) == 0);
  const auto replay_words = [&](const std::filesystem::path& calibration) {
    return Words{"--trace", trace,   "--policy", "window,h2o",    "--budget",
                 "16",      "--out", out,        "--calibration", calibration.string()};
  };
  json other = json::parse(read_bytes(folder / "a.json"));
  other["weights_xxh3"] = "0123456789abcdef";
  write_bytes(folder / "other.json", other.dump());
  CHECK_THAT(refusal(replay_command(), replay_words(folder / "other.json")),
             ContainsSubstring("--calibration") && ContainsSubstring("other.json") &&
                 ContainsSubstring("weights 0123456789abcdef"));
  CHECK_FALSE(std::filesystem::exists(out));
  REQUIRE(run_command(replay_command(), replay_words(folder / "a.json")) == 0);
  const Run run = load_run(out);
  REQUIRE(run.info.calibration);
  CHECK(run.info.calibration->xxh3 == xxh3_hex(read_bytes(folder / "a.json")));
  const auto rows = std::count_if(run.rows.begin(), run.rows.end(), [](const ResultRow& row) {
    return row.metric == "calibrated_error" && row.layer < 0 && row.value > 0;
  });
  CHECK(rows == 3);  // window, h2o, oracle_mass
}

TEST_CASE("A calibration that is none is refused by name") {
  const TemporaryFolder folder;
  const Calibration good{.model = "m",
                         .weights_xxh3 = "0123456789abcdef",
                         .layers = 2,
                         .query_heads = 2,
                         .sensitivity = {1, 2, 3, 4},
                         .standard_error = {0, 0, 0, 0.5},
                         .measured = json::object()};
  const std::string text = calibration_text(good);
  write_bytes(folder / "c.json", text);
  const Calibration read = read_calibration(folder / "c.json");
  CHECK(read.sensitivity == good.sensitivity);
  CHECK(read.standard_error == good.standard_error);
  const auto error_with = [&](auto change) {
    json changed = json::parse(text);
    change(changed);
    write_bytes(folder / "c.json", changed.dump());
    return error_of([&] { read_calibration(folder / "c.json"); });
  };
  CHECK_THAT(error_with([](json& c) { c["format"] = 2; }), ContainsSubstring("format"));
  CHECK_THAT(error_with([](json& c) { c["novel"] = 2; }), ContainsSubstring("novel"));
  CHECK_THAT(error_with([](json& c) { c["sensitivity"][1][0] = -1; }),
             ContainsSubstring("\"sensitivity\": 2 lists of 2 numbers from 0 to 1e+30"));
  CHECK_THAT(error_with([](json& c) { c["sensitivity"][1][0] = nullptr; }),
             ContainsSubstring("\"sensitivity\""));
  CHECK_THAT(error_with([](json& c) { c["stderr"].erase(0); }), ContainsSubstring("\"stderr\""));
  CHECK_THAT(error_with([](json& c) { c["sensitivity"][0].push_back(1); }),
             ContainsSubstring("\"sensitivity\""));
  CHECK_THAT(error_with([](json& c) { c["layers"] = 0; }), ContainsSubstring("layers"));
  CHECK_THAT(refusal(calibrate_command(), {"--model", kModel, "--text", kText, "--noise", "2",
                                           "--out", (folder / "d.json").string()}),
             ContainsSubstring("--noise"));
  CHECK_THAT(refusal(calibrate_command(), {"--model", kModel, "--text", kText, "--max-tokens",
                                           "1000000", "--out", (folder / "d.json").string()}),
             ContainsSubstring("--text"));
  CHECK_FALSE(std::filesystem::exists(folder / "d.json"));
  CHECK_THAT(refusal(calibrate_command(), calibrate_words(folder / "none" / "d.json")),
             ContainsSubstring("--out"));
}

}  // namespace
}  // namespace kvlab
