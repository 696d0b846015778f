// Reads the tensors of a Hugging Face checkpoint: one safetensors file, or several with an index.
#pragma once

#include <filesystem>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "traces/base/safetensors.hpp"

namespace kvlab {

/// File name endings of weights, in the formats of kvlab and of other programs.
inline constexpr std::string_view kOtherWeights[] = {
    ".safetensors", ".bin", ".gguf", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx"};
/// Call this if a folder lacks the file `wanted`. If the folder has a file with one of `endings`
/// instead, throws std::runtime_error that names this other file and says how to convert it.
void refuse_other_files(const std::filesystem::path& directory, std::string_view wanted,
                        std::span<const std::string_view> endings);

/// The tensors of a checkpoint by name, as views into the mapped files.
class Checkpoint {
 public:
  /// Opens model.safetensors or, if there is none, the files that model.safetensors.index.json
  /// names. Throws std::runtime_error that names the file if a file is missing or broken, if a
  /// tensor is not in the file that the index names, or if a tensor is in two files.
  static Checkpoint open(const std::filesystem::path& directory);

  bool contains(std::string_view name) const;
  /// Returns a floating-point tensor. Throws std::runtime_error that names file and tensor if the
  /// checkpoint has no such tensor, or if the tensor has another shape.
  const TensorView& at(std::string_view name, std::span<const std::size_t> shape) const;
  /// The file that contains a tensor.
  const std::filesystem::path& file_of(std::string_view name) const;
  /// XXH3-64 of the file. For several files, the hash of their hashes (hex digits, in the order of
  /// file names).
  std::string xxh3() const;

 private:
  std::string where_;  ///< the file or folder that an error about a missing tensor names
  std::vector<SafetensorsFile> files_;
  std::map<std::string, std::size_t, std::less<>> file_of_;  ///< tensor name to index in files_
  friend class TensorReader;
};

/// A larger tokenizer.json is refused before it is read. The largest known files are half as large.
constexpr std::size_t kMaxTokenizerBytes = std::size_t{64} << 20;
/// XXH3-64 of a model's tokenizer.json; empty if there is none.
std::string tokenizer_xxh3(const std::filesystem::path& directory);

/// Reads a model's tensors from a checkpoint and records which it read.
class TensorReader {
 public:
  /// `checkpoint` must outlive the reader.
  explicit TensorReader(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  /// See Checkpoint::at().
  const TensorView& take(const std::string& name, std::span<const std::size_t> shape);
  /// Reads tensor `name`, if the checkpoint contains it, and marks it as read. Use this for an
  /// output head that config.json ties to the tensor `original_name`. Throws std::runtime_error if
  /// the two tensors differ.
  void take_copy(const std::string& name, const std::string& original_name,
                 std::span<const std::size_t> shape);
  /// Throws std::runtime_error that names the file and the tensor with a value that is not finite.
  /// `in` is appended to the message.
  [[noreturn]] void refuse_not_finite(const std::string& name, std::string_view in = "") const;
  /// Throws std::runtime_error if the checkpoint contains a tensor that was not read, and names
  /// this tensor. Ignores the tensors of RoPE frequencies that older checkpoints contain.
  void refuse_rest() const;

 private:
  const Checkpoint& checkpoint_;
  std::set<std::string, std::less<>> taken_;
};

}  // namespace kvlab
