#include "kernels/device_limits.hpp"

#include <fmt/format.h>

#include "kernels/loaded_code.hpp"

namespace kvlab::kernels {
namespace {

constexpr int kOldestMajor = 8;  // minimum for cp.async and bf16 tensor core products

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, which, device) != cudaSuccess) cudaGetLastError();
  return value;
}

/// The number of devices. Without a driver the number is 0, and `why` receives CUDA's message.
int device_count(std::string& why) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess) return count;
  cudaGetLastError();
  why = cudaGetErrorString(error);
  return 0;
}

/// Makes another device current during its lifetime.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    ok_ = cudaGetDevice(&before_) == cudaSuccess && cudaSetDevice(device) == cudaSuccess;
  }
  ~DeviceScope() {
    if (ok_) cudaSetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  bool ok() const { return ok_; }

 private:
  int before_ = 0;
  bool ok_ = false;
};

cudaError_t load(int& architecture) {
  const cudaError_t error = loaded_architecture(architecture);
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

/// "runs code of sm_90", or why the device cannot run kvlab.
std::string code_text(int device, int major, int minor) {
  const DeviceScope scope(device);
  int architecture = 0;
  const cudaError_t loaded = scope.ok() ? load(architecture) : cudaErrorDevicesUnavailable;
  const std::string why = why_not_device(major, minor, loaded);
  return why.empty() ? fmt::format("runs code of sm_{}", architecture) : why;
}

}  // namespace

std::string_view built_architectures() { return KVLAB_CUDA_ARCHITECTURES; }

bool is_without_code(cudaError_t error) {
  return error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
         error == cudaErrorUnsupportedPtxVersion;
}

std::string why_not_device(int major, int minor, cudaError_t loaded) {
  if (major < kOldestMajor)
    return fmt::format("compute capability {}.{} is not supported; {}.0 or newer is", major, minor,
                       kOldestMajor);
  if (!is_without_code(loaded)) return loaded == cudaSuccess ? "" : cudaGetErrorString(loaded);
  return fmt::format(
      "this build has no code for compute capability {}.{} ({}); it was built for "
      "CMAKE_CUDA_ARCHITECTURES={}; add {}{} to these, or update the driver",
      major, minor, cudaGetErrorString(loaded), built_architectures(), major, minor);
}

std::string why_not_device() {
  std::string why;
  if (device_count(why) == 0) return "no CUDA device" + (why.empty() ? "" : ": " + why);
  int device = 0, architecture = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return cudaGetErrorString(error);
  return why_not_device(attribute(cudaDevAttrComputeCapabilityMajor, device),
                        attribute(cudaDevAttrComputeCapabilityMinor, device), load(architecture));
}

std::string cuda_description() {
  std::string text = fmt::format("CUDA: in this build, for architectures {}; runtime {}\n",
                                 built_architectures(), version_text(CUDART_VERSION));
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) cudaGetLastError();
  text += driver == 0 ? "Driver: none\n"
                      : fmt::format("Driver: supports CUDA {} at most\n", version_text(driver));
  std::string why;
  const int count = device_count(why);
  if (count == 0)
    text += fmt::format("GPU: none{}\n", driver == 0 || why.empty() ? "" : ": " + why);
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties{};
    if (const cudaError_t error = cudaGetDeviceProperties(&properties, device)) {
      cudaGetLastError();
      text += fmt::format("GPU {}: {}\n", device, cudaGetErrorString(error));
      continue;
    }
    text += fmt::format(
        "GPU {}: {}, compute capability {}.{}, {} multiprocessors, {} bytes of shared memory in a "
        "thread block, {:.1f} GiB of memory; {}\n",
        device, properties.name, properties.major, properties.minor, properties.multiProcessorCount,
        properties.sharedMemPerBlockOptin, static_cast<double>(properties.totalGlobalMem) / 0x1p30,
        code_text(device, properties.major, properties.minor));
  }
  return text;
}

}  // namespace kvlab::kernels
