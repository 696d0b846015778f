// Tests the predicted times of decode steps that fetch keys and values from host memory. They are
// compared with closed formulas and with numbers that were computed by hand.
#include "engine/evaluation/predict/predict.hpp"

#include <algorithm>
#include <cmath>
#include <optional>

#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;
using nlohmann::json;

const std::string kConfigs = KVLAB_SOURCE_DIR "/engine/models/configs/";
constexpr double kRead = 4.5e12, kCopy = 55e9;  // bytes per second
constexpr double kGiB = 1 << 30;

ModelConfig config_of(const std::string& name) {
  return read_model_config(kConfigs + name + ".json", name);
}

/// A link whose fetches take a fixed time and then run at a fixed rate.
LinkRates straight_link(double launch_seconds = 0) {
  LinkRates link{.device = "a GPU",
                 .read_bytes_per_second = kRead,
                 .copy_bytes_per_second = kCopy,
                 .curves = {}};
  for (const double row_bytes : {128.0, 8192.0})
    link.curves.push_back(
        {row_bytes, {{0, launch_seconds}, {1e6, launch_seconds + 1e6 * row_bytes / kCopy}}});
  return link;
}

json link_json() {
  return {{"bench", "link"},
          {"format", 1},
          {"device", "NVIDIA H200"},
          {"read_bytes_per_second", 4.5e12},
          {"copy_bytes_per_second", 55e9},
          {"launch_microseconds", 3.0},
          {"fetches",
           {{{"row_bytes", 256}, {"rows", 64}, {"microseconds", 6.0}},
            {{"row_bytes", 256}, {"rows", 1024}, {"microseconds", 12.0}},
            {{"row_bytes", 512}, {"rows", 64}, {"microseconds", 8.0}},
            {{"row_bytes", 512}, {"rows", 1024}, {"microseconds", 18.0}},
            {{"row_bytes", 512}, {"rows", 4096}, {"microseconds", 48.0}}}}};
}

LinkRates read(const json& link) {
  const test::TemporaryFolder folder;
  test::write_bytes(folder / "link.json", link.dump());
  return read_link_file((folder / "link.json").string());
}

/// The error of a link file. Checks that it is one line that names the file.
std::string error_of(const json& link) {
  const std::string error = test::error_of([&] { read(link); });
  CAPTURE(error);
  CHECK(error.find("link.json: ") != std::string::npos);
  CHECK(error.find('\n') == std::string::npos);
  return error;
}

json with(json link, const json& changes) {
  link.merge_patch(changes);  // null removes a key
  return link;
}

PredictRequest request_of(std::vector<BufferChoice> buffers) {
  return {.setup = {.context = 32768, .selected = 2048},
          .batches = {1, 8},
          .buffers = std::move(buffers)};
}

BufferChoice buffer_of(std::uint32_t tokens, double fetch_rate, double margin = 0) {
  return {.policy = "lru",
          .buffer = tokens,
          .fetch_rate = fetch_rate,
          .low = fetch_rate - margin,
          .high = fetch_rate + margin};
}

TEST_CASE("times of fetches are interpolated between the measured ones") {
  const LinkRates link = read(link_json());
  CHECK(link.device == "NVIDIA H200");
  CHECK(link.fetch_seconds(0, 512) == Approx(3e-6));
  CHECK(link.fetch_seconds(32, 512) == Approx(5.5e-6));
  CHECK(link.fetch_seconds(64, 512) == Approx(8e-6));
  CHECK(link.fetch_seconds(544, 512) == Approx(13e-6));
  CHECK(link.fetch_seconds(1024, 256) == Approx(12e-6));
  CHECK(link.fetch_seconds(1024, 384) == Approx(15e-6));
  // These numbers of rows and row sizes are outside of the measured ranges.
  CHECK(link.fetch_seconds(8192, 512) == Approx(88e-6));
  CHECK(link.fetch_seconds(64, 128) == Approx(6e-6));
  CHECK(link.fetch_seconds(512, 1024) == Approx(18e-6));
}

TEST_CASE("a larger number of rows never takes less time") {
  json link = link_json();
  link["fetches"][3]["microseconds"] = 7.0;  // 1,024 rows now take less time than 64 rows
  CHECK(read(link).fetch_seconds(1024, 512) == Approx(8e-6));
  link["launch_microseconds"] = 10.0;
  CHECK(read(link).fetch_seconds(64, 512) == Approx(10e-6));
}

TEST_CASE("a wrong link file is refused with its name and key") {
  CHECK_THAT(error_of(with(link_json(), {{"bench", "decode"}})), ContainsSubstring("\"bench\""));
  CHECK_THAT(error_of(json::array()), ContainsSubstring("link.json"));
  CHECK_THAT(error_of(with(link_json(), {{"format", 2}})), ContainsSubstring("format 2"));
  for (const char* key : {"read_bytes_per_second", "copy_bytes_per_second"})
    for (const double wrong : {0.0, -1.0, 1e30})
      CHECK_THAT(error_of(with(link_json(), {{key, wrong}})), ContainsSubstring(key));
  for (const char* key : {"format", "device", "read_bytes_per_second", "copy_bytes_per_second",
                          "launch_microseconds", "fetches"})
    CHECK_THAT(error_of(with(link_json(), {{key, nullptr}})), ContainsSubstring(key));
  CHECK_THAT(error_of(with(link_json(), {{"fetches", json::array()}})),
             ContainsSubstring("fetches"));
  json twice = link_json();
  twice["fetches"].push_back(twice["fetches"][0]);
  CHECK_THAT(error_of(twice), ContainsSubstring("listed twice"));
  for (const auto& [key, wrong] : {std::pair<const char*, json>{"rows", 0},
                                   {"rows", 1.5},
                                   {"rows", "64"},
                                   {"rows", 1e12},
                                   {"row_bytes", 0},
                                   {"row_bytes", -4},
                                   {"microseconds", -1},
                                   {"microseconds", "1"}}) {
    json link = link_json();
    link["fetches"][1][key] = wrong;
    CHECK_THAT(error_of(link), ContainsSubstring("fetches[1]") && ContainsSubstring(key));
  }
  CHECK_THAT(test::error_of([] { read_link_file("none.json"); }), StartsWith("none.json: "));
}

TEST_CASE("rates of Llama 3.1 8B on a GPU of 4.5 TB/s are those computed by hand") {
  // The numbers follow from t = (W + b (k + n/16) kappa) / 4.5 TB/s + b m k kappa / 55 GB/s.
  // The weights have W = 15.0 GB, a token has kappa = 131,072 bytes, and k = 2,048 tokens are
  // selected. b is the batch, n the context length, and m the share of the selected tokens that is
  // fetched.
  struct Row {
    std::uint32_t context, batch;
    double full;
    std::vector<double> by_rate;  // 0, 2, 5, 10 and 20% of the selected tokens are fetched
  };
  const std::vector<Row> rows{{32768, 1, 233, {290, 282, 271, 254, 226}},
                              {32768, 8, 729, {1866, 1578, 1282, 977, 661}},
                              {131072, 1, 140, {275, 268, 258, 243, 217}},
                              {131072, 8, 236, {1399, 1231, 1043, 831, 591}}};
  const DecodeCost cost(config_of("llama-3.1-8b"), straight_link());
  CHECK(cost.token_bytes() == 131072);
  CHECK(cost.row_bytes() == 512);
  for (const Row& row : rows) {
    const RefetchSetup setup{.context = row.context, .selected = 2048};
    CHECK(row.batch / cost.full_seconds(row.batch, row.context) == Approx(row.full).epsilon(0.003));
    const double rates[] = {0, 0.02, 0.05, 0.1, 0.2};
    for (std::size_t i = 0; i < std::size(rates); ++i)
      CHECK(row.batch / cost.refetch(row.batch, setup, rates[i]).serial() ==
            Approx(row.by_rate[i]).epsilon(0.003));
  }
}

TEST_CASE("without a fixed cost, the break-even rate is the closed form for every batch") {
  const DecodeCost cost(config_of("llama-3.1-8b"), straight_link());
  for (const std::uint32_t context : {16384u, 32768u, 65536u})
    for (const std::uint32_t selected : {1024u, 2048u})
      for (const std::uint32_t page : {16u, 64u}) {
        const RefetchSetup setup{.context = context, .selected = selected, .page = page};
        const double expected = kCopy / kRead * (context - selected - context / page) / selected;
        for (const std::uint32_t batch : {1u, 8u, 64u}) {
          CAPTURE(context, selected, page, batch);
          const auto found = cost.break_even(batch, setup);
          REQUIRE(found.has_value());
          CHECK(*found == Approx(std::min(expected, 1.0)).epsilon(1e-9));
        }
      }
}

TEST_CASE("at the break-even rate the two curves cross, with a fixed cost too") {
  const DecodeCost cost(config_of("llama-3.1-8b"), straight_link(6e-6));
  RefetchSetup setup{.context = 32768, .selected = 2048, .layer_seconds = 4e-6};
  for (const std::uint32_t batch : {2u, 8u, 32u}) {
    const double full = cost.full_seconds(batch, setup.context);
    const double at = cost.break_even(batch, setup).value();
    CHECK(cost.refetch(batch, setup, at).serial() == Approx(full).epsilon(1e-9));
    CHECK(cost.refetch(batch, setup, at - 0.001).serial() < full);
    CHECK(cost.refetch(batch, setup, at + 0.001).serial() > full);
  }
  // A fixed cost of 30 us in each of 32 layers is more than refetch can save for one sequence of
  // 32k tokens.
  setup.layer_seconds = 30e-6;
  CHECK_FALSE(cost.break_even(1, setup).has_value());
  CHECK(cost.break_even(8, setup).has_value());
}

TEST_CASE("a step takes longer the more is fetched, and overlapping never takes longer") {
  const DecodeCost cost(config_of("qwen3-8b"), straight_link(6e-6));
  const RefetchSetup setup{.context = 32768, .selected = 2048};
  double before = 0;
  for (double rate = 0; rate <= 1; rate += 0.05) {
    const RefetchTime time = cost.refetch(8, setup, rate);
    CHECK(time.serial() > before);
    CHECK(time.overlapped() <= time.serial());
    CHECK(time.overlapped() >= std::max(time.read_seconds, time.fetch_seconds));
    before = time.serial();
  }
}

TEST_CASE("layers with a sliding window keep their window on the device and fetch nothing") {
  const DecodeCost cost(config_of("gpt-oss-20b"), straight_link(1e-6));
  CHECK(cost.full_layers() == 12);
  CHECK(cost.row_bytes() == 2 * 64 * 2);
  CHECK(cost.token_bytes() == 12 * 8 * 256);
  const double windows = 12.0 * 128 * 8 * 256;
  CHECK(cost.full_sequence_bytes(32768) == 32768 * cost.token_bytes() + windows);
  const RefetchSetup setup{.context = 32768, .selected = 2048};
  CHECK(cost.refetch_sequence_bytes(setup, 4096) == (4096 + 2048) * cost.token_bytes() + windows);
  CHECK(cost.refetch(1, setup, 0).fetch_seconds == Approx(12e-6));
  CHECK(cost.full_sequence_bytes(100) == 100 * 24 * 8 * 256.0);

  ModelConfig windowed = config_of("gpt-oss-20b");
  for (RowSpec& row : windowed.rows) row.window = 128;
  CHECK_THROWS_WITH(DecodeCost(windowed, straight_link()),
                    ContainsSubstring("every layer has a sliding window"));
}

TEST_CASE("the largest batch is the number of sequences that fit beside the weights") {
  const DecodeCost cost(config_of("llama-3.1-8b"), straight_link());
  PredictRequest request = request_of({buffer_of(4096, 0.05)});
  request.device_bytes = 40 * kGiB;
  const Prediction prediction = predict(cost, request);
  // The weights take 14.96 GiB. A sequence takes 4 GiB with the full cache, and (4096 + 2048) x 128
  // KiB with a buffer.
  REQUIRE(prediction.largest_full.has_value());
  CHECK(prediction.largest_full->batch == 6);
  REQUIRE(prediction.buffers[0].largest.has_value());
  CHECK(prediction.buffers[0].largest->batch == 33);
  CHECK(prediction.buffers[0].largest->host_bytes == 33 * 4 * kGiB);
  request.host_bytes = 100 * kGiB;
  CHECK(predict(cost, request).buffers[0].largest->batch == 25);
  request.device_bytes = 15 * kGiB;
  CHECK_THROWS_WITH(predict(cost, request), ContainsSubstring("no sequence fits"));
  request.device_bytes = 14 * kGiB;
  CHECK_THROWS_WITH(predict(cost, request),
                    ContainsSubstring("is too small, because the weights take"));
}

TEST_CASE("a selection or a buffer that makes no sense is refused") {
  const DecodeCost cost(config_of("llama-3.1-8b"), straight_link());
  PredictRequest request = request_of({buffer_of(2048, 0.05)});
  CHECK_THROWS_WITH(predict(cost, request), ContainsSubstring("a buffer of 2048 tokens"));
  request = request_of({buffer_of(4096, 0.05)});
  request.setup.context = 2048;
  CHECK_THROWS_WITH(predict(cost, request), ContainsSubstring("less than --context 2048"));
}

ResultRow rate_row(const std::string& trace, const std::string& policy, const std::string& budget,
                   double rate) {
  ResultRow row;
  row.trace = trace;
  row.policy = policy;
  row.budget = budget;
  row.budget_tokens = budget == "all" ? 1000 : static_cast<std::uint32_t>(std::stoul(budget));
  row.prefill = "dense";
  row.positions = "original";
  row.queries = "decode";
  row.metric = "fetch_rate";
  row.value = rate;
  row.standard_error = std::numeric_limits<double>::quiet_NaN();
  row.count = 100;
  return row;
}

TEST_CASE("the buffers of a run are its policies and budgets, without the full cache") {
  const std::vector<ResultRow> rows{
      rate_row("a", "full", "all", 0), rate_row("a", "lru", "64", 0.2),
      rate_row("b", "lru", "64", 0.4), rate_row("a", "belady", "64", 0.1),
      rate_row("a", "lru", "128", 0.05)};
  const std::vector<BufferChoice> buffers = buffers_of(rows);
  REQUIRE(buffers.size() == 3);
  CHECK(buffers[0].policy == "lru");
  CHECK(buffers[0].buffer == 64);
  CHECK(buffers[0].fetch_rate == Approx(0.3));
  CHECK_FALSE(buffers[0].is_oracle);
  CHECK(buffers[1].buffer == 128);
  CHECK(buffers[2].policy == "belady");
  CHECK(buffers[2].is_oracle);
  CHECK_THROWS_WITH(buffers_of(std::vector{rows[0]}), ContainsSubstring("--refetch"));
}

TEST_CASE("a share of the length is a buffer of the longest trace's tokens") {
  std::vector<ResultRow> rows{rate_row("short", "lru", "64", 0.04),
                              rate_row("long", "lru", "64", 0.01)};
  rows[0].budget = rows[1].budget = "20%";
  rows[0].budget_tokens = 40, rows[1].budget_tokens = 160;
  const std::vector<BufferChoice> buffers = buffers_of(rows);
  REQUIRE(buffers.size() == 1);
  CHECK(buffers[0].buffer == 160);
  CHECK(buffers[0].fetch_rate == Approx(0.025));
}

TEST_CASE("the recommended buffer is the fastest one that fits and can be deployed") {
  const DecodeCost cost(config_of("llama-3.1-8b"), straight_link(6e-6));
  BufferChoice oracle = buffer_of(4096, 0.01);
  oracle.policy = "belady";
  oracle.is_oracle = true;
  PredictRequest request =
      request_of({oracle, buffer_of(4096, 0.15), buffer_of(8192, 0.02), buffer_of(16384, 0.01)});
  request.device_bytes = 40 * kGiB;
  const Prediction prediction = predict(cost, request);
  const auto made = recommend_buffer(prediction, request);
  REQUIRE(made.has_value());
  for (std::size_t i = 1; i < prediction.buffers.size(); ++i)
    CHECK(prediction.buffers[i].largest->serial <=
          prediction.buffers[made->choice].largest->serial);
  CHECK(made->choice == 2);
  CHECK(made->pays);
  CHECK(made->is_sure);
  REQUIRE(made->runner_up.has_value());
  CHECK(prediction.buffers[*made->runner_up].buffer.buffer != 8192);
  CHECK_THAT(made->text, StartsWith("Choice: lru with a buffer of 8,192 tokens gets "));
}

TEST_CASE("a recommendation says whether refetch pays, and how sure that is") {
  const DecodeCost cost(config_of("llama-3.1-8b"), straight_link());
  const auto recommended = [&](const BufferChoice& buffer) {
    const PredictRequest request = request_of({buffer});
    return recommend_buffer(predict(cost, request), request).value();
  };
  CHECK(recommended(buffer_of(4096, 0.05)).is_sure);
  const BufferRecommendation slow = recommended(buffer_of(4096, 0.5));
  CHECK_FALSE(slow.pays);
  CHECK(slow.is_sure);
  CHECK_THAT(slow.text,
             StartsWith("Refetch does not pay: lru with a buffer of 4,096 tokens gets "));
  // 16% is just below the break-even rate of 17.1%.
  const BufferRecommendation close = recommended(buffer_of(4096, 0.16));
  CHECK(close.pays);
  CHECK_FALSE(close.is_sure);
  CHECK_THAT(close.text, ContainsSubstring("measure it"));
  // A low mean fetch rate with a wide interval is not sure either.
  CHECK_FALSE(recommended(buffer_of(4096, 0.1, 0.1)).is_sure);
}

TEST_CASE("without a runner-up or an interval, JSON has nulls") {
  const DecodeCost cost(config_of("llama-3.1-8b"), straight_link());
  const PredictRequest request = request_of({{.policy = {}, .buffer = 4096, .fetch_rate = 0.05}});
  const auto made = prediction_json(predict(cost, request), cost, request);
  CHECK(made["buffers"][0]["policy"].is_null());
  CHECK(made["buffers"][0]["fetch_rate_low"].is_null());
  CHECK(made["buffers"][0]["batches"][1]["serial_low"].is_null());
  CHECK(made["largest_full"].is_null());
  CHECK(made["recommendation"]["runner_up"].is_null());
  CHECK(made["recommendation"]["sure"] == true);
  CHECK(made["full"][1]["break_even_fetch_rate"].get<double>() == Approx(0.1711).epsilon(0.001));
}

}  // namespace
}  // namespace kvlab
