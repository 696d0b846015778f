// safetensors files: a validating, memory-mapped reader and an atomic writer.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "traces/base/files.hpp"
#include "traces/base/numeric/dtype.hpp"

namespace kvlab {

/// One tensor of a file. Its bytes are a view into the mapping and may be unaligned.
struct TensorView {
  Dtype dtype;
  std::vector<std::size_t> shape;
  std::span<const std::byte> data;

  std::size_t elements() const;
};

/// A memory-mapped file. open() checks the whole header: its length and JSON, the dtypes, the
/// shapes against the byte ranges (without overflow), and that the ranges neither overlap, nor
/// leave a gap, nor exceed the file. It refuses a file with any tensor, used or not, whose dtype is
/// not in `Dtype`. It throws std::runtime_error with a message that says which file, what is wrong
/// and what is expected.
class SafetensorsFile {
 public:
  static SafetensorsFile open(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  const std::map<std::string, TensorView>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  bool contains(std::string_view name) const;
  /// Throws std::runtime_error if there is no such tensor.
  const TensorView& at(std::string_view name) const;
  /// The tensor of this name. Also throws if dtype or shape differ.
  const TensorView& at(std::string_view name, Dtype dtype,
                       std::span<const std::size_t> shape) const;
  /// The whole mapped file, including the header; checksums are computed over it.
  std::span<const std::byte> bytes() const { return mapping_->bytes(); }
  /// See MappedFile::release.
  void release() const { mapping_->release(); }

 private:
  std::shared_ptr<const MappedFile> mapping_;
  std::filesystem::path path_;
  std::map<std::string, TensorView> tensors_;
  std::map<std::string, std::string> metadata_;
};

/// A tensor to write.
struct TensorToWrite {
  std::string name;
  Dtype dtype;
  std::vector<std::size_t> shape;
  std::span<const std::byte> data;
};

/// Writes PATH through an AtomicFile. Pads the header so that the data begin at a multiple of 64
/// bytes, and puts wider dtypes first, so every tensor is aligned. Returns the XXH3-64 of the file
/// as 16 hex digits. Throws std::runtime_error on a write error; PATH is then unchanged and no
/// .part file is left. Throws std::invalid_argument for two tensors of one name, or data that do
/// not fit their shape.
std::string write_safetensors(const std::filesystem::path& path,
                              std::span<const TensorToWrite> tensors,
                              const std::map<std::string, std::string>& metadata);

}  // namespace kvlab
