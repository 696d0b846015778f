// Device code that is compiled while the program runs, by NVRTC, which is loaded when it is needed.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace kvlab::kernels {

/// A file that a program may include.
struct DeviceHeader {
  std::string name, text;
};

/// What is to be compiled. `kernels`: template instances such as kvlab::run_states<kvlab::Lru>.
struct DeviceProgram {
  std::string text;
  std::vector<DeviceHeader> headers;
  std::vector<std::string> kernels;
  int architecture;  ///< sm_90: 90

  /// 32 hex digits, of all of this, the flags and NVRTC's version. Throws as compile() does where
  /// NVRTC is missing.
  std::string key() const;
};

/// Compiled code for one architecture, or PTX where NVRTC does not know a device as new.
struct DeviceCode {
  std::vector<char> image;
  std::unordered_map<std::string, std::string> symbols;  ///< kernel as written -> its symbol
};

/// Compiles with the flags that kvlab's own device code has. Needs no device; may be called from
/// several threads at once. Throws std::invalid_argument with the compiler's log if the program
/// does not compile, std::runtime_error if NVRTC is not there.
DeviceCode compile(const DeviceProgram& program);

/// The architecture of the current device. Throws std::runtime_error if there is none.
int current_architecture();

/// Code on the current device; unloaded with this object.
class LoadedCode {
 public:
  /// Throws std::runtime_error if the device does not take it.
  explicit LoadedCode(const DeviceCode& code);
  ~LoadedCode();
  LoadedCode(const LoadedCode&) = delete;
  LoadedCode& operator=(const LoadedCode&) = delete;

  /// For cudaLaunchKernel. Throws std::runtime_error if it was not requested.
  const void* kernel(const std::string& name) const;
  /// Copies a variable, extern "C". Throws std::runtime_error if there is none of that size.
  void read(const char* variable, void* to, std::size_t bytes) const;

 private:
  cudaLibrary_t library_ = nullptr;
  std::unordered_map<std::string, std::string> symbols_;
};

}  // namespace kvlab::kernels
