#include "engine/checkpoint/checkpoint.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <stdexcept>

#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kMaxIndexBytes = 64 << 20;
constexpr std::string_view kOneFile = "model.safetensors";
constexpr std::string_view kIndex = "model.safetensors.index.json";

using WeightMap = std::map<std::string, std::string>;  // tensor name to file name

/// Reads the weight map of an index. Every file must be a plain name, so that it is in the same
/// directory as the index.
WeightMap read_index(const std::filesystem::path& path) {
  const auto refuse = [&](const std::string& what) -> void {
    throw std::runtime_error(fmt::format("{}: {}", path.string(), what));
  };
  const nlohmann::json json = parse_json(read_text_file(path, kMaxIndexBytes), path.string());
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object() ||
      json["weight_map"].empty())
    refuse("weight_map is missing; it must be a JSON object of tensor names and file names");
  WeightMap map;
  for (const auto& [tensor, file] : json["weight_map"].items()) {
    if (!file.is_string())
      refuse(fmt::format("the file of {} is {}; it must be a string", json_quoted(tensor),
                         file.type_name()));
    const auto name = file.get<std::string>();
    const bool plain = name.ends_with(".safetensors") &&
                       name.find_first_of(std::string("/\\\n\0", 4)) == std::string::npos;
    if (!plain)
      refuse(fmt::format("the file of {} must be a safetensors file in the same directory",
                         json_quoted(tensor)));
    map.emplace(tensor, name);
  }
  return map;
}

}  // namespace

void refuse_other_files(const std::filesystem::path& directory, std::string_view wanted,
                        std::span<const std::string_view> endings) {
  std::error_code error;
  std::set<std::string> found;
  if (std::filesystem::is_regular_file(directory)) found.insert(directory.filename().string());
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    const std::string name = entry.path().filename().string();
    const auto is_end = [&](std::string_view ending) { return name.ends_with(ending); };
    if (std::ranges::any_of(endings, is_end)) found.insert(name);
  }
  if (found.empty()) return;
  const std::string& other = *found.begin();
  const std::string_view way =
      other.ends_with(".gguf") ? "tools/scripts/gguf_to_checkpoint.py converts it to a checkpoint"
      : other.starts_with("adapter_") ? "merge the adapter into its model first"
                                      : "save_pretrained() of transformers writes it";
  throw std::runtime_error(fmt::format("{}: has {}, but kvlab needs {}; {}", directory.string(),
                                       json_quoted(other), wanted, way));
}

Checkpoint Checkpoint::open(const std::filesystem::path& directory) {
  Checkpoint checkpoint;
  const std::filesystem::path one = directory / kOneFile, index = directory / kIndex;
  if (std::filesystem::exists(one) || !std::filesystem::exists(index)) {
    if (!std::filesystem::exists(one)) refuse_other_files(directory, kOneFile, kOtherWeights);
    checkpoint.where_ = one.string();
    checkpoint.files_.push_back(SafetensorsFile::open(one));
    for (const auto& [name, view] : checkpoint.files_[0].tensors())
      checkpoint.file_of_.emplace(name, 0);
    return checkpoint;
  }

  checkpoint.where_ = index.string();
  const WeightMap map = read_index(index);
  std::set<std::string> names;
  for (const auto& [tensor, file] : map) names.insert(file);
  for (const std::string& name : names) {
    checkpoint.files_.push_back(SafetensorsFile::open(directory / name));
    for (const auto& [tensor, view] : checkpoint.files_.back().tensors()) {
      const auto listed = map.find(tensor);
      if (listed == map.end() || listed->second != name)
        throw std::runtime_error(
            fmt::format("{}: tensor {} is in {}, but the index does not list it there",
                        index.string(), json_quoted(tensor), name));
      checkpoint.file_of_.emplace(tensor, checkpoint.files_.size() - 1);
    }
  }
  for (const auto& [tensor, file] : map)
    if (!checkpoint.contains(tensor))
      throw std::runtime_error(fmt::format("{}: tensor {} is missing, but {} lists it there",
                                           (directory / file).string(), json_quoted(tensor),
                                           kIndex));
  return checkpoint;
}

bool Checkpoint::contains(std::string_view name) const { return file_of_.contains(name); }

const std::filesystem::path& Checkpoint::file_of(std::string_view name) const {
  return files_[file_of_.find(name)->second].path();
}

const TensorView& Checkpoint::at(std::string_view name, std::span<const std::size_t> shape) const {
  const auto found = file_of_.find(name);
  const auto is_of_adapter = [](const auto& one) {
    return std::string_view(one.first).starts_with("base_model.model.");
  };
  if (found == file_of_.end() && std::ranges::any_of(file_of_, is_of_adapter))
    throw std::runtime_error(
        fmt::format("{}: tensors are named base_model.model.…, so PEFT saved it with an adapter "
                    "that is not merged; call merge_and_unload() before save_pretrained()",
                    where_));
  if (found == file_of_.end())
    throw std::runtime_error(fmt::format("{}: tensor {} is missing; its shape must be [{}]", where_,
                                         json_quoted(name), fmt::join(shape, ", ")));
  const SafetensorsFile& file = files_[found->second];
  const TensorView& view = file.at(name);
  if (view.dtype == Dtype::i32)
    throw std::runtime_error(fmt::format("{}: tensor {} is {}; it must be BF16, F16 or F32",
                                         file.path().string(), json_quoted(name),
                                         safetensors_name(view.dtype)));
  if (!std::equal(shape.begin(), shape.end(), view.shape.begin(), view.shape.end()))
    throw std::runtime_error(fmt::format("{}: tensor {} has shape [{}]; config.json requires [{}]",
                                         file.path().string(), json_quoted(name),
                                         fmt::join(view.shape, ", "), fmt::join(shape, ", ")));
  return view;
}

std::string Checkpoint::xxh3() const {
  if (files_.size() == 1) return xxh3_hex(files_[0].bytes());
  std::string hashes;  // files are in the order of their names
  for (const SafetensorsFile& file : files_) hashes += xxh3_hex(file.bytes());
  return xxh3_hex(hashes);
}

std::string tokenizer_xxh3(const std::filesystem::path& directory) {
  const std::filesystem::path path = directory / "tokenizer.json";
  return std::filesystem::exists(path) ? xxh3_hex(read_text_file(path, kMaxTokenizerBytes)) : "";
}

const TensorView& TensorReader::take(const std::string& name, std::span<const std::size_t> shape) {
  taken_.insert(name);
  return checkpoint_.at(name, shape);
}

void TensorReader::take_copy(const std::string& name, const std::string& original_name,
                             std::span<const std::size_t> shape) {
  if (!checkpoint_.contains(name)) return;
  const TensorView &copy = take(name, shape), &original = take(original_name, shape);
  if (copy.dtype != original.dtype || !std::ranges::equal(copy.data, original.data))
    throw std::runtime_error(fmt::format(
        "{}: tensor {} differs from {}, though config.json ties the two (tie_word_embeddings)",
        checkpoint_.file_of(name).string(), name, original_name));
}

void TensorReader::refuse_not_finite(const std::string& name, std::string_view in) const {
  throw std::runtime_error(fmt::format("{}: tensor {} holds values that are not finite{}",
                                       checkpoint_.file_of(name).string(), name, in));
}

void TensorReader::refuse_rest() const {
  for (const auto& [name, file] : checkpoint_.file_of_)
    if (!taken_.contains(name) && !name.ends_with(".rotary_emb.inv_freq"))
      throw std::runtime_error(
          fmt::format("{}: tensor {} is not part of the model that config.json describes",
                      checkpoint_.files_[file].path().string(), json_quoted(name)));
}

}  // namespace kvlab
