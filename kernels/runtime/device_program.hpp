// Device code that NVRTC compiles at run time. NVRTC is loaded when it is first needed.
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

/// A program to compile. `kernels`: template instances such as kvlab::run_states<kvlab::Lru>.
struct DeviceProgram {
  std::string text;
  std::vector<DeviceHeader> headers;
  std::vector<std::string> kernels;
  int architecture;  ///< 90 for sm_90

  /// 32 hex digits: a hash of all members, the compiler flags and NVRTC's version. Throws
  /// std::runtime_error if NVRTC is missing.
  std::string key() const;
};

/// Compiled code for one architecture, or PTX if NVRTC does not know the device's architecture.
struct DeviceCode {
  std::vector<char> image;
  /// maps a kernel's name in `kernels` to its symbol
  std::unordered_map<std::string, std::string> symbols;
};

/// Compiles with the same flags as kvlab's other device code. Does not need a device, and is
/// thread-safe. Throws std::invalid_argument with the compiler's log if the program does not
/// compile, and std::runtime_error if NVRTC is missing.
DeviceCode compile(const DeviceProgram& program);

/// The architecture of the current device. Throws std::runtime_error if there is none.
int current_architecture();

/// Code loaded on the current device. It is unloaded when this object is destroyed.
class LoadedCode {
 public:
  /// Throws std::runtime_error if the device cannot load the code.
  explicit LoadedCode(const DeviceCode& code);
  ~LoadedCode();
  LoadedCode(const LoadedCode&) = delete;
  LoadedCode& operator=(const LoadedCode&) = delete;

  /// Returns a kernel for cudaLaunchKernel. Throws std::runtime_error if `kernels` of the program
  /// did not contain it.
  const void* kernel(const std::string& name) const;
  /// Copies an extern "C" variable. Throws std::runtime_error if there is no variable of that size.
  void read(const char* variable, void* to, std::size_t bytes) const;

 private:
  cudaLibrary_t library_ = nullptr;
  std::unordered_map<std::string, std::string> symbols_;
};

}  // namespace kvlab::kernels
