// Input: a trace's folder with extras. It is opened and verified. A trace without a manifest is
// sealed first. A trace that verifies is replayed with the configuration in the part `ask`.
// Manifest and sketch are written and read back unchanged.
#include "sim/replay.hpp"
#include "tests/fuzz/fuzz.hpp"
#include "traces/base/files.hpp"
#include "traces/base/text.hpp"
#include "traces/manifest.hpp"
#include "traces/shard.hpp"
#include "traces/trace.hpp"

using namespace kvlab;

namespace {

constexpr std::uint32_t kMaxTokens = 64, kMaxHeads = 8;

/// Parses `POLICY BUDGET PREFILL POSITIONS QUERIES`. Words that are missing have their defaults.
CacheConfig config_of(std::string_view ask, ReplayOptions& options) {
  std::vector<std::string> words = split_list(ask, ' ');
  words.resize(5);
  CacheConfig config;
  config.policy = parse_policy(words[0].empty() ? "h2o" : words[0], replay_oracles());
  config.budget = parse_budget(words[1].empty() ? "2" : words[1]);
  if (!words[2].empty()) config.prefill = parse_prefill(words[2]);
  if (!words[3].empty()) config.positions = parse_positions(words[3]);
  options.queries = words[4] == "decode" ? Queries::decode : Queries::all;
  return config;
}

void rewrite(const TraceReader& trace) {
  const std::string manifest = manifest_text(
      parse_manifest(read_text_file(trace.directory() / kManifestFile, 1 << 20), "copy"));
  fuzz::require(manifest_text(parse_manifest(manifest, "copy")) == manifest,
                "it changed:", manifest);
  if (!trace.sketch_file()) return;
  OutputSketch sketch{.seed = trace.extras().sketch->seed};
  const auto layer_data = [](const SafetensorsFile& file, std::uint32_t layer) {
    return file.at(layer_tensor(layer, "sketch")).data;
  };
  for (std::uint32_t layer = 0; layer < trace.shape().layers; ++layer) {
    const auto data = layer_data(*trace.sketch_file(), layer);
    const std::size_t at = sketch.values.size(), count = data.size() / bytes_of(Dtype::bf16);
    sketch.values.resize(at + count);
    to_float(Dtype::bf16, data.data(), count, sketch.values.data() + at);
  }
  const auto directory = trace.directory() / "copy";
  std::filesystem::create_directory(directory);
  write_sketch(directory, trace.shape(), sketch);
  const auto again = SafetensorsFile::open(directory / kSketchFile);
  fuzz::require(check_sketch(again, trace.shape()) == sketch.seed, "another seed");
  for (std::uint32_t layer = 0; layer < trace.shape().layers; ++layer)
    fuzz::require(
        std::ranges::equal(layer_data(again, layer), layer_data(*trace.sketch_file(), layer)),
        "another sketch");
}

void replay_once(const TraceReader& trace, std::string_view ask) {
  const ModelShape& shape = trace.shape();
  if (trace.tokens() > kMaxTokens || shape.layers * shape.query_heads > kMaxHeads) return;
  ReplayOptions options;
  const CacheConfig config = config_of(ask, options);
  replay(trace, 0, {&config, 1}, options);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const fuzz::Folder folder(fuzz::text_of(data, size));
  const std::string place = folder.path().string();
  std::error_code ignored;
  if (!std::filesystem::exists(folder / kManifestFile, ignored))
    fuzz::accepts([&] { seal_trace(folder.path()); }, place);
  std::optional<TraceReader> trace;
  bool verifies = false;
  fuzz::accepts(
      [&] {
        trace = TraceReader::open(folder.path());
        const TraceCheck check = verify_trace(*trace, 1);
        fuzz::require(check.ok == check.problems.empty(), "a problem that is not said");
        verifies = check.ok;
      },
      place);
  if (verifies) rewrite(*trace);
  if (verifies) fuzz::accepts([&] { replay_once(*trace, folder.word("ask")); });
  trace.reset();
  std::filesystem::remove(folder / kManifestFile, ignored);
  return 0;
}
