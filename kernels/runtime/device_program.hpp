// Device code that is compiled while the program runs, by NVRTC, which is loaded when it is needed.
#pragma once

#include <cuda_runtime_api.h>

#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace kvlab::kernels {

/// A file that a program may include.
struct DeviceHeader {
  std::string name, text;
};

/// Compiled code for one architecture.
struct DeviceCode {
  std::vector<char> cubin;
  std::unordered_map<std::string, std::string> symbols;  ///< kernel as written -> its symbol
};

/// Compiles `text`, which includes `headers`, for sm_`architecture` (90, say) with the flags that
/// kvlab's own device code has. `kernels`: template instances such as
/// kvlab::run_states<kvlab::Lru>. Needs no device. Throws std::invalid_argument with the compiler's
/// log if it does not compile, std::runtime_error if NVRTC is not there.
DeviceCode compile_device_code(const std::string& text, std::span<const DeviceHeader> headers,
                               std::span<const std::string> kernels, int architecture);

/// Code on the current device; unloaded with this object.
class LoadedCode {
 public:
  /// Throws std::runtime_error if the device does not take it.
  explicit LoadedCode(const DeviceCode& code);
  ~LoadedCode();
  LoadedCode(const LoadedCode&) = delete;
  LoadedCode& operator=(const LoadedCode&) = delete;

  /// For cudaLaunchKernel. Throws std::runtime_error if it was not asked for.
  const void* kernel(const std::string& name) const;

 private:
  cudaLibrary_t library_ = nullptr;
  std::unordered_map<std::string, std::string> symbols_;
};

}  // namespace kvlab::kernels
