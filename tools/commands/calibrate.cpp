#include "engine/loop/calibrate/calibrate.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "engine/tokenizer/tokenizer.hpp"
#include "tools/loop_model.hpp"
#include "tools/options.hpp"
#include "tools/turns.hpp"
#include "traces/base/json.hpp"
#include "traces/base/output_claim.hpp"

namespace kvlab {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::int64_t kMostTokens = std::int64_t{1} << 24;
constexpr double kMostOff = 0.2;  // of what half the noise says, before a warning is given

void add_options(po::options_description& options) {
  auto add = options.add_options();
  add("model", text_option("DIR"), "checkpoint: config.json, safetensors files, tokenizer.json");
  add("text", po::value<std::vector<std::string>>()->value_name("FILE...")->multitoken(),
      "texts; the first --max-tokens of each are used, and one sequence each");
  add("max-tokens", number_option("T", 512), "tokens of each text");
  add("noise", text_option("R", "0.1"),
      "the noise's root mean square, as a share of the head's own output's");
  add("seed", number_option("S", 1), "of the noise");
  add("out", text_option("FILE"), "the calibration file; an older one is replaced");
  add_common_options(options);
}

double noise_from(const po::variables_map& options) {
  const std::string text = options["noise"].as<std::string>();
  double noise = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), noise);
  if (error != std::errc{} || end != text.data() + text.size() || !(noise > 0 && noise <= 1))
    throw std::invalid_argument(
        fmt::format("--noise: '{}' should be a number above 0 and at most 1", text));
  return noise;
}

json measured_json(const CalibrateResult& result, const std::vector<std::string>& texts,
                   double noise, std::uint64_t seed) {
  return {{"texts", text_names(texts)},
          {"tokens", result.tokens},
          {"blocks", result.blocks},
          {"noise", noise},
          {"seed", seed},
          {"half_noise_ratio", result.check.ratio},
          {"half_noise_worst", {{"ratio", result.check.worst}, {"layer", result.check.layer}}}};
}

void print_table(const CalibrateResult& result, const std::string& out) {
  const Calibration& calibration = result.calibration;
  fmt::print("{:<6} {:>11} {:>11} {:>11} {:>12}\n", "layer", "least", "mean", "most",
             "stderr of it");
  for (std::uint32_t layer = 0; layer < calibration.layers; ++layer) {
    const auto own = calibration.of_layer(layer);
    const auto most = std::max_element(own.begin(), own.end());
    double sum = 0;
    for (const double x : own) sum += x;
    const auto at = static_cast<std::size_t>(most - own.begin()) + layer * own.size();
    fmt::print("{:<6} {:>11.3g} {:>11.3g} {:>11.3g} {:>12.2g}\n", layer,
               *std::min_element(own.begin(), own.end()), sum / static_cast<double>(own.size()),
               *most, calibration.standard_error[at]);
  }
  fmt::print("\nhalf the noise says {:.3f} times as much; furthest off, {:.3f}, in layer {}\n",
             result.check.ratio, result.check.worst, result.check.layer);
  fmt::print("{}: {} heads over {} tokens; next: kvlab replay --trace TRACE --calibration {} …\n",
             out, calibration.sensitivity.size(), result.tokens, out);
}

int run(const po::variables_map& options) {
  check_device(options);
  const std::string directory = required(options, "model", "--model DIR, a checkpoint's directory");
  const std::string out = required(options, "out", "--out FILE, the calibration file");
  if (!options.count("text"))
    throw std::invalid_argument("--text: missing; give one or more files: --text FILE");
  refuse_unwritable(out, "--out");
  const OutputClaim claim(out);
  const auto texts = options["text"].as<std::vector<std::string>>();
  const unsigned threads = threads_from(options);
  const double noise = noise_from(options);
  const std::uint64_t seed = seed_from(options);
  const std::size_t tokens = count_from(options, "max-tokens", 128, kMostTokens);
  const Model model = Model::load(directory, threads);
  const Tokenizer tokenizer = tokenizer_of(directory, model.config());
  std::vector<std::vector<std::int32_t>> ids(texts.size());
  for (std::size_t t = 0; t < texts.size(); ++t) ids[t] = ids_of_text(texts[t], tokenizer, tokens);
  say_of_model(model.config(), tokenizer);
  CalibrateResult result = calibrate(
      model, ids,
      {.noise = noise, .seed = seed, .threads = threads, .progress = progress_bar("calibrate")});
  result.calibration.model = model.config().name;
  result.calibration.measured = measured_json(result, texts, noise, seed);
  const std::string text = calibration_text(result.calibration);
  write_file_atomically(out, text);
  if (std::abs(result.check.ratio - 1) > kMostOff)
    fmt::print(stderr,
               "kvlab calibrate: half the noise says {:.2f} times as much: the divergence is not "
               "quadratic at this size; a smaller --noise would be right\n",
               result.check.ratio);
  if (options["json"].as<bool>())
    print_json({{"calibration", out},
                {"xxh3", xxh3_hex(text)},
                {"measured", ordered_json(*result.calibration.measured)}});
  else
    print_table(result, out);
  return 0;
}

}  // namespace

Command calibrate_command() {
  return {.name = "calibrate",
          .summary = "how sensitive the model's predictions are to each head, for calibrated_error",
          .usage = "--model DIR --text FILE... --out FILE [options]",
          .example =
              "kvlab calibrate --model engine/models/tiny --text tools/demo/prompt.txt --out "
              "tiny.calibration.json",
          .add_options = add_options,
          .run = run};
}

}  // namespace kvlab
