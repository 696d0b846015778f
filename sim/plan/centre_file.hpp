// Centre files: the centres of a model's KV heads, for `centre=@FILE`.
//
// A centre file is a safetensors file with one tensor `layers.N.centre` for each layer, where N is
// the model's number of the layer. A tensor is F32 [kv_head, dim], for keys after RoPE.
#pragma once

#include <filesystem>

#include "policies/tiers/centre_setting.hpp"

namespace kvlab {

/// Reads a centre file. Throws std::runtime_error that names the file, the tensor and what is
/// expected for a file that is not a centre file, for tensors of different shapes, and for a number
/// that is not finite.
CentreConstants read_centre_file(const std::filesystem::path& path);

/// Reads the file of a setting `@FILE`, if it has not been read yet. Other settings do not change.
void load_centre(CentreSetting& centre);

/// Writes a centre file: first a temporary file, which is then renamed. Throws std::runtime_error
/// if it cannot be written.
void write_centre_file(const std::filesystem::path& path, const CentreConstants& centre);

}  // namespace kvlab
