// Tests of checkpoints of one and of several files, and of the errors of broken checkpoints.
#include "engine/checkpoint/checkpoint.hpp"

#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>

#include "engine/checkpoint/model.hpp"
#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;

using nlohmann::json;

const std::filesystem::path kModels = std::filesystem::path(KVLAB_SOURCE_DIR) / "tests/data/models";

/// A tensor of a checkpoint. Tests change tensors and write them again.
struct Tensor {
  Dtype dtype;
  std::vector<std::size_t> shape;
  std::string bytes;
};
using Tensors = std::map<std::string, Tensor>;

Tensors tensors_of(const std::string& name) {
  const auto file = SafetensorsFile::open(kModels / name / "model.safetensors");
  Tensors tensors;
  for (const auto& [key, view] : file.tensors())
    tensors[key] = {view.dtype, view.shape,
                    std::string(reinterpret_cast<const char*>(view.data.data()), view.data.size())};
  return tensors;
}

void write(const std::filesystem::path& path, const Tensors& tensors) {
  std::vector<TensorToWrite> list;
  for (const auto& [key, t] : tensors)
    list.push_back({key, t.dtype, t.shape, std::as_bytes(std::span(t.bytes))});
  write_safetensors(path, list, {});
}

/// The error of loading a miniature model after a change to its tensors.
std::string error_after(const std::string& name, const std::function<void(Tensors&)>& change) {
  const test::TemporaryFolder folder;
  std::filesystem::copy_file(kModels / name / "config.json", folder / "config.json");
  Tensors tensors = tensors_of(name);
  change(tensors);
  write(folder / "model.safetensors", tensors);
  const std::string error = test::error_of([&] { Model::load(folder.path(), 2); });
  CAPTURE(error);
  CHECK((error.empty() || error.starts_with((folder / "model.safetensors").string())));
  CHECK(error.find('\n') == std::string::npos);
  return error;
}

TEST_CASE("an unchanged copy of a checkpoint loads") {
  CHECK(error_after("llama3", [](Tensors&) {}).empty());
  CHECK(error_after("qwen2", [](Tensors&) {}).empty());
}

TEST_CASE("each missing tensor is named") {
  for (const char* name : {"llama3", "llama_biases", "qwen2", "qwen3"})
    for (const auto& [key, tensor] : tensors_of(name)) {
      CAPTURE(name, key);
      CHECK_THAT(error_after(name, [&, k = key](Tensors& t) { t.erase(k); }),
                 ContainsSubstring("tensor " + json_quoted(key) + " is missing"));
    }
}

TEST_CASE("a checkpoint with an unmerged adapter is refused with the remedy") {
  const auto rename = [](Tensors& t) {
    Tensors renamed;
    for (const auto& [key, tensor] : t) renamed["base_model.model." + key] = tensor;
    t = renamed;
  };
  CHECK_THAT(error_after("llama3", rename), ContainsSubstring("merge_and_unload()"));
}

TEST_CASE("each tensor with a wrong shape or dtype is refused by name") {
  for (const auto& [key, tensor] : tensors_of("llama_biases")) {
    CAPTURE(key);
    const auto flat = [k = key](Tensors& t) { t[k].shape.push_back(1); };
    CHECK_THAT(error_after("llama_biases", flat),
               ContainsSubstring("tensor " + json_quoted(key) + " has shape ["));
    const auto integers = [k = key](Tensors& t) { t[k].dtype = Dtype::i32; };
    CHECK_THAT(error_after("llama_biases", integers),
               ContainsSubstring("tensor " + json_quoted(key) + " is I32"));
  }
  const auto transposed = [](Tensors& t) {
    std::swap(t["lm_head.weight"].shape[0], t["lm_head.weight"].shape[1]);
  };
  CHECK_THAT(error_after("llama3", transposed),
             ContainsSubstring("shape [32, 67]; config.json requires [67, 32]"));
}

TEST_CASE("a tensor that the model would not use is refused by name") {
  const auto extra = [](const std::string& key) {
    return error_after("llama3", [&](Tensors& t) { t[key] = t["model.norm.weight"]; });
  };
  for (const std::string key :
       {"model.layers.2.input_layernorm.weight", "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight"})
    CHECK_THAT(extra(key),
               ContainsSubstring("tensor " + json_quoted(key) + " is not part of the model"));
  // Older checkpoints contain this tensor, and it is ignored.
  CHECK(extra("model.layers.0.self_attn.rotary_emb.inv_freq").empty());
}

TEST_CASE("a deceptive name is shown escaped") {
  CHECK_THAT(error_after("llama_biases",
                         [](Tensors& tensors) {
                           Tensor extra = tensors.begin()->second;
                           tensors["evil\n\x1b[31mline"] = extra;
                         }),
             ContainsSubstring("tensor \"evil\\n\\u001b[31mline\" is not part of the model"));
}

TEST_CASE("a copy of a tied head must equal the embedding") {
  const auto copy = [](Tensors& t) { t["lm_head.weight"] = t["model.embed_tokens.weight"]; };
  CHECK(error_after("qwen2", copy).empty());
  const auto other = [&](Tensors& t) {
    copy(t);
    t["lm_head.weight"].bytes[3] ^= 1;
  };
  CHECK_THAT(error_after("qwen2", other), ContainsSubstring("lm_head.weight differs"));
}

TEST_CASE("weights that are not finite are refused by name") {
  for (const float value :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()})
    for (const std::string key : {"model.norm.weight", "model.layers.1.mlp.down_proj.weight"}) {
      const auto spoil = [&](Tensors& t) { std::memcpy(t[key].bytes.data() + 8, &value, 4); };
      CHECK_THAT(error_after("llama_biases", spoil),
                 ContainsSubstring("tensor " + key + " holds values that are not finite"));
    }
}

TEST_CASE("a file that is missing or cut off is refused by name") {
  const test::TemporaryFolder folder;
  std::filesystem::copy_file(kModels / "llama3/config.json", folder / "config.json");
  const std::string file = (folder / "model.safetensors").string();
  const auto error = [&] { return test::error_of([&] { Model::load(folder.path(), 1); }); };
  CHECK_THAT(error(), StartsWith(file));
  const std::string whole = test::read_bytes(kModels / "llama3/model.safetensors");
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{5}, std::size_t{300}, whole.size() / 2, whole.size() - 1}) {
    test::write_bytes(file, whole.substr(0, size));
    CHECK_THAT(error(), StartsWith(file));
    CHECK(error().find('\n') == std::string::npos);
  }
}

// --- several files ------------------------------------------------------------------------------

/// A copy of a checkpoint with several files, whose index tests may change.
struct Sharded {
  Sharded() {
    std::filesystem::copy(kModels / "mistral", folder.path());
    index = json::parse(test::read_bytes(folder / kIndex));
  }
  std::string error() {
    test::write_bytes(folder / kIndex, index.dump());
    const std::string message = test::error_of([&] { Model::load(folder.path(), 1); });
    CHECK(message.find('\n') == std::string::npos);
    return message;
  }

  static constexpr const char* kIndex = "model.safetensors.index.json";
  test::TemporaryFolder folder;
  json index;
};

TEST_CASE("a checkpoint of several files loads") {
  Sharded sharded;
  CHECK(sharded.error().empty());
  CHECK(Model::load(sharded.folder.path(), 1).weights_xxh3() ==
        Model::load(kModels / "mistral", 2).weights_xxh3());
}

TEST_CASE("the hash of a checkpoint changes with any of its files") {
  Sharded sharded;
  const std::string before = Model::load(sharded.folder.path(), 1).weights_xxh3();
  CHECK(before.size() == 16);
  const auto file = sharded.folder / "model-00003-of-00005.safetensors";
  std::string bytes = test::read_bytes(file);
  bytes.back() ^= 1;
  test::write_bytes(file, bytes);
  CHECK(Model::load(sharded.folder.path(), 1).weights_xxh3() != before);
}

TEST_CASE("a broken index is refused by name") {
  Sharded missing_file;
  missing_file.index["weight_map"]["lm_head.weight"] = "model-00009-of-00005.safetensors";
  CHECK_THAT(missing_file.error(), ContainsSubstring("model-00009-of-00005.safetensors"));

  Sharded wrong_file;
  wrong_file.index["weight_map"]["lm_head.weight"] = "model-00002-of-00005.safetensors";
  CHECK_THAT(wrong_file.error(), ContainsSubstring("lm_head.weight"));

  Sharded unlisted;
  unlisted.index["weight_map"].erase("lm_head.weight");
  CHECK_THAT(unlisted.error(), ContainsSubstring("lm_head.weight"));

  Sharded invented;
  invented.index["weight_map"]["other.weight"] = "model-00002-of-00005.safetensors";
  CHECK_THAT(invented.error(), ContainsSubstring("other.weight"));

  for (const json& file : {json("../model-00002-of-00005.safetensors"), json("/etc/passwd"),
                           json(3), json(""), json("weights.bin")}) {
    Sharded outside;
    outside.index["weight_map"]["lm_head.weight"] = file;
    CAPTURE(file.dump());
    CHECK_THAT(outside.error(), ContainsSubstring("lm_head.weight"));
  }
  for (const json& index : {json::object(), json::array(), json{{"weight_map", 3}},
                            json{{"weight_map", json::object()}}}) {
    Sharded empty;
    empty.index = index;
    CHECK_THAT(empty.error(), ContainsSubstring("weight_map"));
  }
  Sharded lost;
  std::filesystem::remove(lost.folder / "model-00003-of-00005.safetensors");
  CHECK_THAT(lost.error(), ContainsSubstring("model-00003-of-00005.safetensors"));
}

}  // namespace
}  // namespace kvlab
