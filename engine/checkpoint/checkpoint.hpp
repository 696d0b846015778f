// The tensors of a Hugging Face checkpoint: one safetensors file, or several with an index.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "traces/base/safetensors.hpp"

namespace kvlab {

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
  /// Throws std::runtime_error that names a tensor for which `used` is false: a part of the model
  /// that nothing reads.
  void refuse_unless(const std::function<bool(std::string_view name)>& used) const;

  /// XXH3-64 of the file; of several files, that of their own hashes (hex digits, by file name).
  std::string xxh3() const;

 private:
  std::string where_;  ///< what an error about a missing tensor names
  std::vector<SafetensorsFile> files_;
  std::map<std::string, std::size_t, std::less<>> file_of_;  ///< tensor name to index in files_
};

}  // namespace kvlab
