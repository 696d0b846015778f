// Common code of the fuzz targets. A target reads its input as a kvlab command would. It may refuse
// the input with an error that a command would print. A crash or another exception is a defect.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace kvlab::fuzz {

inline std::string_view text_of(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

/// Ends the process with an error message unless `holds` is true.
inline void require(bool holds, const char* what, std::string_view more = "") {
  if (holds) return;
  std::fprintf(stderr, "FUZZ: %s %.*s\n", what, static_cast<int>(more.size()), more.data());
  std::abort();
}

/// Whether `action` accepts its input. The action may refuse it with one of the exceptions that
/// commands print, and the message has to contain `place`. With KVLAB_FUZZ_SHOW in the environment,
/// these messages are printed. Other exceptions propagate and end the process.
template <class Action>
bool accepts(Action action, std::string_view place = "") {
  std::string refusal;
  try {
    action();
    return true;
  } catch (const std::runtime_error& error) {
    refusal = error.what();
  } catch (const std::invalid_argument& error) {
    refusal = error.what();
  }
  static const bool shows = std::getenv("KVLAB_FUZZ_SHOW") != nullptr;
  if (shows) std::fprintf(stderr, "refused: %s\n", refusal.c_str());
  require(!refusal.empty(), "a refusal without a word");
  require(refusal.find(place) != std::string::npos, "a refusal that does not say where:", refusal);
  return false;
}

/// The parts of an input by name. Each part follows a line `=== NAME`. Text before the first such
/// line is ignored. If two parts have the same name, the last one counts.
std::map<std::string, std::string> parts_of(std::string_view input);

/// A folder in memory with the parts of one input as files. Lengths and checksums that a reader
/// checks are corrected:
///   a part NAME.safetensors is a line (the JSON header), then data, which are truncated or filled
///   with zeros as the header's offsets require; a part that begins with '!' is used unchanged;
///   "@NAME" in any other part is replaced by the XXH3-64 of that file.
class Folder {
 public:
  explicit Folder(std::string_view input);
  ~Folder();
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  /// The folder's path, which is the same for every input of a process.
  static const std::filesystem::path& path();
  std::filesystem::path operator/(std::string_view name) const { return path() / name; }
  /// The text of a part that is not a file, because its name has no dot; "" if there is no such
  /// part.
  std::string word(const std::string& name) const;

 private:
  void write(const std::string& name, std::string_view bytes);

  std::map<std::string, std::string> parts_;
};

}  // namespace kvlab::fuzz
