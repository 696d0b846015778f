// Compares logits with those that transformers computed in float32. See
// tests/fixtures/make_model_fixtures.py.
#include <cstdlib>

#include "engine/checkpoint/model.hpp"
#include "tests/catch.hpp"
#include "tests/engine/expected_logits.hpp"
#include "tests/engine/plain_forward.hpp"
#include "tests/skip.hpp"

namespace kvlab {
namespace {

using test::relative_error;
using test::source_path;

struct Expected {
  std::vector<std::int32_t> ids, rows;
  std::vector<float> logits, inv_freq, rope_factor;
};

Expected expected(const std::string& name) {
  const SafetensorsFile file = test::expected_file(name, "expected.safetensors");
  return {test::values<std::int32_t>(file, "ids"), test::values<std::int32_t>(file, "rows"),
          test::values<float>(file, "logits"), test::values<float>(file, "inv_freq"),
          test::values<float>(file, "rope_factor")};
}

void compare(const std::string& name, const std::filesystem::path& directory) {
  const Expected wanted = expected(name);
  const Model model = Model::load(directory, 2);
  const std::size_t vocab = model.config().vocab;

  const std::size_t half = model.config().head_size / 2;
  REQUIRE(wanted.inv_freq.size() % half == 0);
  // inv_freq has the frequencies of the first layer only, or those of all layers one after another.
  for (std::size_t i = 0; i < wanted.inv_freq.size(); ++i)
    CHECK(model.config().rows[i / half].rope.inv_freq[i % half] ==
          Approx(wanted.inv_freq[i]).epsilon(5e-7).margin(0));
  CHECK(model.config().rows[0].rope.factor == Approx(wanted.rope_factor[0]).epsilon(1e-6));

  const std::vector<float> logits = test::plain_forward(model, wanted.ids, 2);
  REQUIRE(wanted.logits.size() == wanted.rows.size() * vocab);
  for (std::size_t r = 0; r < wanted.rows.size(); ++r) {
    const auto row = static_cast<std::size_t>(wanted.rows[r]);
    CAPTURE(name, row);
    const double error = relative_error(std::span(logits).subspan(row * vocab, vocab),
                                        std::span(wanted.logits).subspan(r * vocab, vocab));
    CAPTURE(error);
    CHECK(error <= 1e-5);
  }
}

TEST_CASE("miniature checkpoints give transformers' logits") {
  for (const char* name :
       {"llama3", "llama_biases", "mistral", "qwen2", "qwen3", "gemma3_mini", "mistral_windows",
        "qwen3_windows", "olmo2", "olmo3", "phi3", "qwen3_moe", "gpt_oss", "gemma3_mini_older",
        "llama3_64", "llama_biases_96", "mistral_128", "qwen2_64", "qwen3_128"})
    compare(name, source_path("tests/data/models") / name);
}

TEST_CASE("the bundled model gives the logits of transformers") {
  compare("tiny", source_path("engine/models/tiny"));
}

TEST_CASE("the small model gives the logits of transformers") {
  const char* directory = std::getenv("KVLAB_SMALL_MODEL");
  if (!directory) return skip("KVLAB_SMALL_MODEL is not set");
  compare("small", directory);
}

void compare_pretrained(const std::string& name) {
  const std::filesystem::path directory = source_path("engine/models") / name;
  if (!std::filesystem::exists(directory))
    return skip("engine/models/" + name + " is missing; ./dev model " + name + " makes it");
  const SafetensorsFile file = test::expected_file(name, "expected.safetensors");
  const auto ids = test::values<std::int32_t>(file, "ids"),
             rows = test::values<std::int32_t>(file, "rows"),
             columns = test::values<std::int32_t>(file, "columns");
  const auto wanted = test::values<float>(file, "logits");
  REQUIRE(wanted.size() == rows.size() * columns.size());
  const Model model = Model::load(directory, 2);
  REQUIRE(model.weights_xxh3() == file.metadata().at("weights_xxh3"));

  const std::vector<float> logits = test::plain_forward(model, ids, 2);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    std::vector<float> found;
    for (const std::int32_t column : columns)
      found.push_back(logits[static_cast<std::size_t>(rows[r]) * model.config().vocab +
                             static_cast<std::size_t>(column)]);
    const double error =
        relative_error(found, std::span(wanted).subspan(r * columns.size(), columns.size()));
    CAPTURE(rows[r], error);
    CHECK(error <= 1e-5);
  }
}

TEST_CASE("SmolLM2 gives the logits of transformers") { compare_pretrained("smollm2"); }
TEST_CASE("Gemma 3 gives the logits of transformers") { compare_pretrained("gemma3"); }
TEST_CASE("Qwen2.5 gives the logits of transformers") { compare_pretrained("qwen2.5"); }

// --- batch invariance ---------------------------------------------------------------------------

struct Rows {
  std::vector<float> x, q, k, v, logits;
};

/// Runs all blocks of layer 0 on n rows. The queries are used in place of the attention output.
Rows run_blocks(const Model& model, std::span<const std::int32_t> ids, unsigned threads) {
  const ModelConfig& c = model.config();
  const std::size_t n = ids.size(), q_size = std::size_t{c.query_heads} * c.head_size,
                    kv_size = std::size_t{c.kv_heads} * c.head_size;
  Rows rows{.x = std::vector<float>(n * c.hidden),
            .q = std::vector<float>(n * q_size),
            .k = std::vector<float>(n * kv_size),
            .v = std::vector<float>(n * kv_size),
            .logits = std::vector<float>(n * c.vocab)};
  model.embed(ids, rows.x.data());
  model.attention_inputs(0, rows.x.data(), n, rows.q.data(), rows.k.data(), rows.v.data(), threads);
  model.attention_output(0, rows.q.data(), n, rows.x.data(), threads);
  model.mlp(0, rows.x.data(), n, threads);
  model.logits(rows.x.data(), n, rows.logits.data(), threads);
  return rows;
}

bool equal_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

TEST_CASE("a row's bits do not depend on other rows or on threads", "[threads]") {
  for (const char* name :
       {"engine/models/tiny", "tests/data/models/qwen3", "tests/data/models/llama_biases",
        "tests/data/models/gpt_oss", "tests/data/models/phi3"}) {
    const Model model = Model::load(source_path(name), 2);
    std::vector<std::int32_t> ids(600);
    for (std::size_t i = 0; i < ids.size(); ++i)
      ids[i] = static_cast<std::int32_t>(i * 7919 % model.config().vocab);
    const Rows all = run_blocks(model, ids, 3);
    const auto part = [&](const std::vector<float>& whole, std::size_t first, std::size_t count) {
      const std::size_t width = whole.size() / ids.size();
      return std::span(whole).subspan(first * width, count * width);
    };
    for (const std::size_t count : {1u, 2u, 3u, 5u, 6u, 7u, 47u, 49u, 64u})
      for (const std::size_t first : {std::size_t{0}, std::size_t{509}}) {
        CAPTURE(name, count, first);
        const Rows some = run_blocks(model, std::span(ids).subspan(first, count), 1);
        CHECK(equal_bits(some.q, part(all.q, first, count)));
        CHECK(equal_bits(some.k, part(all.k, first, count)));
        CHECK(equal_bits(some.v, part(all.v, first, count)));
        CHECK(equal_bits(some.x, part(all.x, first, count)));
        CHECK(equal_bits(some.logits, part(all.logits, first, count)));
      }
  }
}

TEST_CASE("an id outside the vocabulary is refused") {
  const Model model = Model::load(source_path("tests/data/models/qwen2"), 1);
  std::vector<float> x(model.config().hidden);
  for (const std::int32_t id : {-1, 67, INT32_MAX})
    CHECK_THROWS_AS(model.embed(std::span(&id, 1), x.data()), std::out_of_range);
}

}  // namespace
}  // namespace kvlab
