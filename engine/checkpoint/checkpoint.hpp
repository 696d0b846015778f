// The tensors of a Hugging Face checkpoint: one safetensors file, or several with an index.
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

/// How the files end that hold weights as other programs keep them.
inline constexpr std::string_view kOtherWeights[] = {
    ".safetensors", ".bin", ".gguf", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx"};
/// For a folder that lacks the file `wanted`: throws std::runtime_error that names a file there
/// with one of the `endings`, and the way from it to what is read.
void refuse_other_files(const std::filesystem::path& directory, std::string_view wanted,
                        std::span<const std::string_view> endings);

/// All tensors of a checkpoint by name, as views into the mapped files.
class Checkpoint {
 public:
  /// Opens model.safetensors or, where there is none, the files that model.safetensors.index.json
  /// names. Throws std::runtime_error that names the file: missing, broken, a tensor that the index
  /// puts into a file that does not hold it, a tensor in two files.
  static Checkpoint open(const std::filesystem::path& directory);

  bool contains(std::string_view name) const;
  /// A floating-point tensor of this shape. Throws std::runtime_error that names file and tensor
  /// otherwise.
  const TensorView& at(std::string_view name, std::span<const std::size_t> shape) const;
  /// The file that holds a tensor.
  const std::filesystem::path& file_of(std::string_view name) const;
  /// XXH3-64 of the file; of several files, that of their own hashes (hex digits, by file name).
  std::string xxh3() const;

 private:
  std::string where_;  ///< what an error about a missing tensor names
  std::vector<SafetensorsFile> files_;
  std::map<std::string, std::size_t, std::less<>> file_of_;  ///< tensor name to index in files_
  friend class TensorReader;
};

/// A tokenizer.json that is longer is refused before it is read: the largest known have half of it.
constexpr std::size_t kMaxTokenizerBytes = std::size_t{64} << 20;
/// XXH3-64 of a model's tokenizer.json; empty if there is none.
std::string tokenizer_xxh3(const std::filesystem::path& directory);

/// Takes a model's tensors out of a checkpoint, and notes which it took.
class TensorReader {
 public:
  /// `checkpoint` must outlive the reader.
  explicit TensorReader(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  /// As Checkpoint::at().
  const TensorView& take(const std::string& name, std::span<const std::size_t> shape);
  /// Takes a head that is tied to the tensor `of`, if it is stored once more. Throws
  /// std::runtime_error unless it is the same then.
  void take_copy(const std::string& name, const std::string& of,
                 std::span<const std::size_t> shape);
  /// Throws std::runtime_error that names the file and the tensor: a value is not finite.
  [[noreturn]] void refuse_not_finite(const std::string& name, std::string_view in = "") const;
  /// Throws std::runtime_error that names a tensor that was not taken, but for what older files
  /// store of RoPE.
  void refuse_rest() const;

 private:
  const Checkpoint& checkpoint_;
  std::set<std::string, std::less<>> taken_;
};

}  // namespace kvlab
