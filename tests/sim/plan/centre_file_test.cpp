// Tests of centre files: their values, and how malicious files are refused.
#include "sim/plan/centre_file.hpp"

#include <cmath>
#include <limits>

#include "sim/plan/plan_traces.hpp"
#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/sim/random_trace.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/safetensors.hpp"

namespace kvlab {
namespace {

using test::error_of;
using test::TemporaryFolder;

TraceReader trace_of(const TemporaryFolder& folder, const char* name, std::uint64_t seed,
                     std::vector<Segment> segments) {
  return write_random_trace(folder.path() / name, {.query_heads = 4,
                                                   .kv_heads = 2,
                                                   .head_size = 32,
                                                   .segments = std::move(segments),
                                                   .gradient_samples = 0,
                                                   .numbers = {3, 7},
                                                   .seed = seed});
}

TEST_CASE("a centre file has the same values after it was written and read") {
  const TemporaryFolder folder;
  const std::string path = (folder.path() / "c.safetensors").string();
  const CentreConstants written{
      2, 3, {{0, {1, -2, 3, 4, 5, 6}}, {11, {0, 0, 1e-40f, 8, 9, -1e30f}}}};
  write_centre_file(path, written);
  const CentreConstants read = read_centre_file(path);
  CHECK(read.kv_heads == 2);
  CHECK(read.head_size == 3);
  CHECK(read.layers == written.layers);
  CHECK(read.centre(11, 1)[2] == -1e30f);
  CHECK_THROWS_AS(read.centre(1, 0), std::logic_error);

  CentreSetting setting = parse_key_centre("@" + path);
  load_centre(setting);
  REQUIRE(setting.constants);
  CHECK(setting.constants->layers == written.layers);
  CentreSetting prompt = KeyCentre::prompt;
  load_centre(prompt);
  CHECK(!prompt.constants);
}

TEST_CASE("the centre of several traces is the mean of their prompts' means") {
  const TemporaryFolder folder;
  const auto long_prompt = [](std::uint32_t tokens) {
    return std::vector<Segment>{{0, tokens, SegmentKind::prompt}, {tokens, 9, SegmentKind::decode}};
  };
  const TraceReader a = trace_of(folder, "a", 1, long_prompt(200)),
                    b = trace_of(folder, "b", 2, long_prompt(40));
  const auto mean_of = [](std::vector<const TraceReader*> traces) { return mean_centres(traces); };
  const CentreConstants first = mean_of({&a}), second = mean_of({&b}), both = mean_of({&a, &b});
  REQUIRE(both.layers.size() == 2);
  for (const std::uint32_t layer : {3u, 7u})
    for (std::size_t i = 0; i < 64; ++i)
      CHECK(both.layers.at(layer)[i] ==
            (first.layers.at(layer)[i] + second.layers.at(layer)[i]) / 2);
  // Compares the centres with a sum in float64. Of a trace's 200 keys, only the first 128 count.
  for (const auto& [trace, keys] : {std::pair(&a, 128u), std::pair(&b, 40u)}) {
    const RopeTable rope(trace->row(1).rope, keys);
    std::vector<float> key(32), rotated(32);
    std::vector<double> sum(32);
    for (std::uint32_t i = 0; i < keys; ++i) {
      trace->read(Part::k, 1, 1, i, 1, key.data());
      rope.rotate(key.data(), 32, i, rotated.data());
      for (std::size_t d = 0; d < 32; ++d) sum[d] += rotated[d];
    }
    const auto centre = (trace == &a ? first : second).centre(7, 1);
    for (std::size_t d = 0; d < 32; ++d)
      CHECK(centre[d] == Approx(sum[d] / keys).epsilon(1e-4).margin(1e-5));
  }
  const TraceReader decoded = trace_of(folder, "d", 3, {{0, 50, SegmentKind::decode}}),
                    one = trace_of(folder, "o", 3, long_prompt(1));
  for (const TraceReader* trace : {&decoded, &one})
    CHECK(error_of<std::invalid_argument>([&] {
            mean_of({trace});
          }).find("does not begin with a prompt of at least two tokens") != std::string::npos);
}

TEST_CASE("a hostile centre file is refused, with its name, the layer and the expected shape") {
  const TemporaryFolder folder;
  const std::string path = (folder.path() / "c.safetensors").string();
  const auto refusal_of = [&] {
    const std::string why = error_of<std::runtime_error>([&] { read_centre_file(path); });
    CHECK(why.find("c.safetensors") != std::string::npos);
    return why;
  };
  const auto has = [](const std::string& text, const char* part) {
    INFO(text);
    CHECK(text.find(part) != std::string::npos);
  };
  const auto refused = [&](std::vector<TensorToWrite> tensors, const char* why) {
    write_safetensors(path, tensors, {});
    has(refusal_of(), why);
  };
  const std::vector<float> zeros(1 << 17);
  const auto tensor = [&](const char* name, std::vector<std::size_t> shape,
                          Dtype dtype = Dtype::f32) {
    std::size_t bytes = bytes_of(dtype);
    for (const std::size_t size : shape) bytes *= size;
    return TensorToWrite{name, dtype, std::move(shape),
                         std::as_bytes(std::span(zeros)).first(bytes)};
  };
  has(refusal_of(), "cannot open");
  refused({}, "has 0 tensors");
  for (const char* name :
       {"x", "layers.0", "layers..centre", "layers.-1.centre", "layers.01.centre",
        "layers.65536.centre", "layers.99999999999999999999.centre", "layers.0.centre.",
        "layers.0x.centre", "layers. 0.centre"})
    refused({tensor(name, {2, 32})}, "is not of a centre file");
  refused({tensor("layers.0.centre", {2, 32}, Dtype::f16)},
          "layers.0.centre is F16 [2, 32]; F32 [KV heads, head size] is expected");
  for (const auto& shape : std::vector<std::vector<std::size_t>>{
           {}, {64}, {1, 2, 32}, {0, 32}, {2, 0}, {65537, 1}, {1, 65537}})
    refused({tensor("layers.0.centre", shape)}, "F32 [KV heads, head size] is expected");
  refused({tensor("layers.0.centre", {2, 32}), tensor("layers.5.centre", {2, 64})},
          "layers.5.centre has shape [2, 64]; [2, 32] is expected, which another layer has");
  std::vector<std::string> names;
  for (std::size_t layer = 0; layer < 1025; ++layer)
    names.push_back("layers." + std::to_string(layer) + ".centre");
  std::vector<TensorToWrite> many;
  for (const std::string& name : names) many.push_back(tensor(name.c_str(), {1, 1}));
  refused(many, "has 1025 tensors; one for each layer, at most 1024");
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    std::vector<float> values(64);
    values[40] = bad;
    refused({{"layers.2.centre", Dtype::f32, {2, 32}, std::as_bytes(std::span(values))}},
            "layers.2.centre has");
    has(refusal_of(), "at [1, 8]; finite numbers are expected");
  }
  test::write_bytes(path, std::string(100, '\xff'));  // a header of 2^64 - 1 bytes
  has(refusal_of(), "the header has 18446744073709551615 bytes");
  std::filesystem::resize_file(path, (std::uintmax_t{64} << 20) + 1);
  has(refusal_of(), "is larger than 64 MiB");
  std::filesystem::remove(path);
  std::filesystem::create_directory(path);
  has(refusal_of(), "is not a regular file");
}

}  // namespace
}  // namespace kvlab
