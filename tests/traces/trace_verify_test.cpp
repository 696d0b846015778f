// Tests of the traces that `kvlab trace verify` accepts, and of those that it refuses.
#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/traces/sample_trace.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/files.hpp"
#include "traces/trace.hpp"

namespace kvlab {
namespace {

using Catch::Matchers::ContainsSubstring;
using test::error_of;
using test::make_sample;
using test::Mistake;
using test::read_bytes;
using test::TemporaryFolder;
using test::write_bytes;
using test::write_trace;

struct Numbers {
  Dtype dtype;
  Rounding rounding;
};
const std::vector<Numbers> kNumbers{{Dtype::f32, Rounding::none},
                                    {Dtype::f32, Rounding::model_dtype},
                                    {Dtype::bf16, Rounding::model_dtype},
                                    {Dtype::f16, Rounding::model_dtype}};

TraceCheck check_of(const Numbers& numbers, Mistake mistake, std::uint32_t tokens,
                    float magnitude = 1.3f) {
  const TemporaryFolder folder;
  write_trace(folder / "t",
              make_sample(tokens, numbers.dtype, numbers.rounding, mistake, magnitude), tokens);
  return verify_trace(TraceReader::open(folder / "t"), 2);
}

TEST_CASE("A correct trace verifies, with errors far below the tolerance") {
  for (const Numbers& numbers : kNumbers) {
    const TraceCheck check = check_of(numbers, Mistake::none, 1100);
    INFO(torch_name(numbers.dtype));
    CHECK(check.ok);
    CHECK(check.problems.empty());
    CHECK(check.rows == 2 * 16 * 6 * 2);
    CHECK(check.worst_out < (numbers.dtype == Dtype::f32 ? 1e-5 : 5e-3));
    CHECK(check.worst_lse < (numbers.dtype == Dtype::f32 ? 1e-5 : 5e-3));
  }
}

const std::vector<Mistake> kMistakes{
    Mistake::no_rope,   Mistake::interleaved_rope, Mistake::later_positions, Mistake::heads_in_turn,
    Mistake::scale,     Mistake::not_causal,       Mistake::no_first_key,    Mistake::lse_base_two,
    Mistake::nan_output};

TEST_CASE("Correct scores in the thousands verify, although float32 is less precise there") {
  for (const float magnitude : {8.0f, 30.0f})
    for (const Rounding rounding : {Rounding::none, Rounding::model_dtype}) {
      INFO(magnitude);
      const TraceCheck check = check_of({Dtype::f32, rounding}, Mistake::none, 300, magnitude);
      CHECK(check.ok);
      CHECK(check.worst_lse < 0.5 * check.tolerance);
    }
  for (const Mistake mistake : kMistakes) {
    INFO(static_cast<int>(mistake));
    CHECK(!check_of({Dtype::f32, Rounding::none}, mistake, 300, 8.0f).ok);
  }
}

TEST_CASE("A trace with a decoder's mistake does not verify, for every dtype") {
  for (const Numbers& numbers : kNumbers)
    for (const Mistake mistake : kMistakes) {
      const TraceCheck check = check_of(numbers, mistake, 300);
      INFO(torch_name(numbers.dtype) << " " << static_cast<int>(mistake));
      CHECK(!check.ok);
      REQUIRE(!check.problems.empty());
      CHECK_THAT(check.problems[0], ContainsSubstring("shard-0000") &&
                                        ContainsSubstring(": layer ") &&
                                        ContainsSubstring("query head"));
    }
}

TEST_CASE("A trace with other rounding than its manifest says does not verify in float32") {
  // The keys are rounded to bf16 after RoPE, but the trace claims that nothing was rounded.
  const TemporaryFolder folder;
  auto sample = make_sample(300, Dtype::bf16, Rounding::model_dtype);
  sample.header.shape.dtype = Dtype::f32;
  sample.header.rounding = Rounding::none;
  write_trace(folder / "t", sample, 300);
  CHECK(!verify_trace(TraceReader::open(folder / "t"), 1).ok);
}

/// Replaces the value `marker`, which occurs once in the first shard, by `bad`, and corrects the
/// checksum in the manifest.
void replace_value(const std::filesystem::path& trace, float marker, float bad) {
  const auto bytes_of_float = [](float x) { return std::string(reinterpret_cast<char*>(&x), 4); };
  std::string shard = read_bytes(trace / "shard-00000.safetensors");
  const auto hash = [&] { return xxh3_hex(std::as_bytes(std::span(shard))); };
  std::string manifest = read_bytes(trace / "manifest.json");
  const std::size_t at = shard.find(bytes_of_float(marker)), said = manifest.find(hash());
  REQUIRE(at != std::string::npos);
  REQUIRE(said != std::string::npos);
  shard.replace(at, 4, bytes_of_float(bad));
  write_bytes(trace / "shard-00000.safetensors", shard);
  write_bytes(trace / "manifest.json", manifest.replace(said, 16, hash()));
}

TEST_CASE("A value that is not finite or too large does not verify in any row") {
  constexpr float kMarker = 2.71875f, kInfinity = std::numeric_limits<float>::infinity();
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -kInfinity, 1e20f, 1e38f})
    for (const int which : {0, 1, 2}) {
      const TemporaryFolder folder;
      auto sample = make_sample(50, Dtype::f32, Rounding::none);
      const std::size_t row = which == 0 ? 6 * 8 : 2 * 8;
      (which == 0 ? sample.q : which == 1 ? sample.k : sample.v)[1][row] = kMarker;
      write_trace(folder / "t", sample, 50);
      replace_value(folder / "t", kMarker, bad);
      const TraceCheck check = verify_trace(TraceReader::open(folder / "t"), 1);
      INFO(bad << " " << which);
      CHECK(!check.ok);
      REQUIRE(!check.problems.empty());
      CHECK_THAT(check.problems[0], ContainsSubstring("layer 1, ") &&
                                        ContainsSubstring("the value at position 1 is not finite"));
    }
}

TEST_CASE("A value that is not finite is not written") {
  for (const int which : {0, 1, 2}) {
    const TemporaryFolder folder;
    auto sample = make_sample(50, Dtype::f16, Rounding::none);
    // This value overflows float16.
    (which == 0 ? sample.q : which == 1 ? sample.k : sample.v)[0].back() = 1e5f;
    CHECK_THAT(error_of([&] { write_trace(folder / "t", sample, 50); }),
               ContainsSubstring("at position 49 is not finite"));
    CHECK(!std::filesystem::exists(folder / "t"));
  }
}

TEST_CASE("The check does not depend on the number of threads", "[threads]") {
  const TemporaryFolder folder;
  write_trace(folder / "t", make_sample(1100, Dtype::bf16, Rounding::model_dtype, Mistake::scale),
              900);
  const auto trace = TraceReader::open(folder / "t");
  const TraceCheck one = verify_trace(trace, 1), three = verify_trace(trace, 3);
  CHECK(one.problems == three.problems);
  CHECK(one.worst_out == three.worst_out);
  CHECK(one.problems.size() == 21);  // further problems are only counted
}

TEST_CASE("A flipped bit anywhere in a shard or in the ids is found and named") {
  const TemporaryFolder folder;
  write_trace(folder / "t", make_sample(1100, Dtype::f32, Rounding::none), 900);
  CHECK_NOTHROW(open_verified_trace(folder / "t", 1));
  for (const char* name :
       {"shard-00000.safetensors", "shard-00001.safetensors", "tokens.safetensors"}) {
    const auto path = folder.path() / "t" / name;
    const std::string whole = read_bytes(path);
    std::string flipped = whole;
    flipped[flipped.size() - 9] = static_cast<char>(flipped[flipped.size() - 9] ^ 1);
    write_bytes(path, flipped);
    const TraceCheck check = verify_trace(TraceReader::open(folder / "t"), 1);
    CHECK(!check.ok);
    REQUIRE(check.problems.size() == 1);
    CHECK(check.problems[0].starts_with(std::string(name) + ": is damaged: its XXH3-64 is "));
    CHECK_THAT(error_of([&] { open_verified_trace(folder / "t", 1); }),
               ContainsSubstring("fails verification: ") && ContainsSubstring(name));
    write_bytes(path, whole);
  }
}

}  // namespace
}  // namespace kvlab
