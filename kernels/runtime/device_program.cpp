#include "kernels/runtime/device_program.hpp"

#include <dlfcn.h>
#include <fmt/format.h>
#include <nvrtc.h>
#include <stdlib.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <stdexcept>

namespace kvlab::kernels {
namespace {

/// The functions of libnvrtc. The library is loaded at run time and not linked, because it is large
/// and not installed on every machine.
class Nvrtc {
 public:
  Nvrtc() : handle_(open()) {
    find(create, "nvrtcCreateProgram");
    find(destroy, "nvrtcDestroyProgram");
    find(add_name, "nvrtcAddNameExpression");
    find(compile, "nvrtcCompileProgram");
    find(log_size, "nvrtcGetProgramLogSize");
    find(log, "nvrtcGetProgramLog");
    find(lowered_name, "nvrtcGetLoweredName");
    find(cubin_size, "nvrtcGetCUBINSize");
    find(cubin, "nvrtcGetCUBIN");
    find(ptx_size, "nvrtcGetPTXSize");
    find(ptx, "nvrtcGetPTX");
    find(target_count, "nvrtcGetNumSupportedArchs");
    find(targets, "nvrtcGetSupportedArchs");
    find(error_text, "nvrtcGetErrorString");
    find(version, "nvrtcVersion");
  }

  void check(nvrtcResult result, const char* what) const {
    if (result != NVRTC_SUCCESS)
      throw std::runtime_error(fmt::format("NVRTC: {}: {}", what, error_text(result)));
  }

  decltype(&nvrtcCreateProgram) create;
  decltype(&nvrtcDestroyProgram) destroy;
  decltype(&nvrtcAddNameExpression) add_name;
  decltype(&nvrtcCompileProgram) compile;
  decltype(&nvrtcGetProgramLogSize) log_size;
  decltype(&nvrtcGetProgramLog) log;
  decltype(&nvrtcGetLoweredName) lowered_name;
  decltype(&nvrtcGetCUBINSize) cubin_size;
  decltype(&nvrtcGetCUBIN) cubin;
  decltype(&nvrtcGetPTXSize) ptx_size;
  decltype(&nvrtcGetPTX) ptx;
  decltype(&nvrtcGetNumSupportedArchs) target_count;
  decltype(&nvrtcGetSupportedArchs) targets;
  decltype(&nvrtcGetErrorString) error_text;
  decltype(&nvrtcVersion) version;

 private:
  /// Searches the loader's path, the RUNPATH of this library (in a wheel, it contains the folders
  /// of NVIDIA's wheels), $CUDA_HOME, and the toolkit that built kvlab.
  static void* open() {
    const std::string name = fmt::format("libnvrtc.so.{}", CUDART_VERSION / 1000);
    std::vector<std::string> places{name};
    if (const char* home = getenv("CUDA_HOME"))
      places.push_back(fmt::format("{}/lib64/{}", home, name));
    places.push_back(fmt::format("{}/{}", KVLAB_CUDA_LIBRARIES, name));
    for (const std::string& place : places)
      if (void* const handle = dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
    throw std::runtime_error(fmt::format(
        "cannot compile a policy for a CUDA device, because NVRTC ({}) was not found; "
        "install the CUDA toolkit or NVIDIA's wheel nvidia-cuda-nvrtc, set CUDA_HOME to "
        "the toolkit, or use --device cpu",
        name));
  }
  template <class Function>
  void find(Function& function, const char* name) const {
    function = reinterpret_cast<Function>(dlsym(handle_, name));
    if (!function) throw std::runtime_error(fmt::format("NVRTC: {}", dlerror()));
  }

  void* handle_;  // never closed, because other libraries may use it
};

/// What to compile for a device: machine code or, if NVRTC does not know the device's architecture,
/// PTX of the newest older architecture that it knows. The driver then compiles the PTX.
struct Target {
  int architecture;
  bool is_machine_code;

  Target(const Nvrtc& nvrtc, int device) : architecture(device), is_machine_code(true) {
    int count = 0;
    nvrtc.check(nvrtc.target_count(&count), "architectures");
    std::vector<int> known(static_cast<std::size_t>(count));
    nvrtc.check(nvrtc.targets(known.data()), "architectures");
    if (std::ranges::find(known, device) != known.end()) return;
    for (const int older : known)
      if (older < device && (is_machine_code || older > architecture))
        architecture = older, is_machine_code = false;
  }
  std::string name() const {
    return fmt::format("{}_{}", is_machine_code ? "sm" : "compute", architecture);
  }
};

/// One NVRTC program, destroyed with this object.
class Program {
 public:
  Program(const Nvrtc& nvrtc, const DeviceProgram& program) : nvrtc_(nvrtc) {
    std::vector<const char*> names, texts;
    for (const DeviceHeader& header : program.headers) {
      names.push_back(header.name.c_str());
      texts.push_back(header.text.c_str());
    }
    nvrtc.check(nvrtc.create(&program_, program.text.c_str(), "policy.cu",
                             static_cast<int>(names.size()), texts.data(), names.data()),
                "create");
  }
  ~Program() { nvrtc_.destroy(&program_); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  nvrtcProgram get() const { return program_; }

  std::string log() const {
    std::size_t size = 0;
    nvrtc_.check(nvrtc_.log_size(program_, &size), "log");
    std::string text(size, '\0');
    nvrtc_.check(nvrtc_.log(program_, text.data()), "log");
    while (!text.empty() && (text.back() == '\0' || text.back() == '\n')) text.pop_back();
    return text;
  }

 private:
  const Nvrtc& nvrtc_;
  nvrtcProgram program_ = nullptr;
};

/// The last flag turns the policies' hooks, which are constexpr functions, into device functions.
constexpr std::array kFlags{"--std=c++20", "--fmad=false", "--device-as-default-execution-space"};

/// A hash of several texts. It also depends on where one text ends and the next begins.
class Hash {
 public:
  Hash() { XXH3_128bits_reset(&state_); }
  void add(std::string_view text) {
    const std::size_t size = text.size();
    XXH3_128bits_update(&state_, &size, sizeof size);
    XXH3_128bits_update(&state_, text.data(), size);
  }
  std::string digest() const {
    const XXH128_hash_t hash = XXH3_128bits_digest(&state_);
    return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
  }

 private:
  XXH3_state_t state_;
};

}  // namespace

std::string DeviceProgram::key() const {
  const Nvrtc nvrtc;
  int major = 0, minor = 0;
  nvrtc.check(nvrtc.version(&major, &minor), "version");
  Hash hash;
  hash.add(fmt::format("NVRTC {}.{} {}", major, minor, Target(nvrtc, architecture).name()));
  for (const char* flag : kFlags) hash.add(flag);
  hash.add(text);
  for (const DeviceHeader& header : headers) hash.add(header.name), hash.add(header.text);
  for (const std::string& kernel : kernels) hash.add(kernel);
  return hash.digest();
}

DeviceCode compile(const DeviceProgram& source) {
  const Nvrtc nvrtc;
  const Program program(nvrtc, source);
  for (const std::string& kernel : source.kernels)
    nvrtc.check(nvrtc.add_name(program.get(), kernel.c_str()), kernel.c_str());
  const Target target(nvrtc, source.architecture);
  const std::string architecture = "--gpu-architecture=" + target.name();
  std::vector<const char*> flags{architecture.c_str()};
  flags.insert(flags.end(), kFlags.begin(), kFlags.end());
  if (const nvrtcResult result =
          nvrtc.compile(program.get(), static_cast<int>(flags.size()), flags.data());
      result == NVRTC_ERROR_COMPILATION)
    throw std::invalid_argument("does not compile for the device\n" + program.log());
  else
    nvrtc.check(result, "compile");

  DeviceCode code;
  std::size_t size = 0;
  nvrtc.check((target.is_machine_code ? nvrtc.cubin_size : nvrtc.ptx_size)(program.get(), &size),
              "code");
  code.image.resize(size);
  nvrtc.check((target.is_machine_code ? nvrtc.cubin : nvrtc.ptx)(program.get(), code.image.data()),
              "code");
  for (const std::string& kernel : source.kernels) {
    const char* symbol = nullptr;
    nvrtc.check(nvrtc.lowered_name(program.get(), kernel.c_str(), &symbol), kernel.c_str());
    code.symbols[kernel] = symbol;
  }
  return code;
}

int current_architecture() {
  int device = 0, major = 0, minor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (error != cudaSuccess)
    throw std::runtime_error(fmt::format("CUDA: no device: {}", cudaGetErrorString(error)));
  return major * 10 + minor;
}

LoadedCode::LoadedCode(const DeviceCode& code) : symbols_(code.symbols) {
  const cudaError_t error =
      cudaLibraryLoadData(&library_, code.image.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (error != cudaSuccess)
    throw std::runtime_error(
        fmt::format("CUDA: cannot load a policy's code: {}", cudaGetErrorString(error)));
}

LoadedCode::~LoadedCode() { cudaLibraryUnload(library_); }

const void* LoadedCode::kernel(const std::string& name) const {
  const auto symbol = symbols_.find(name);
  cudaKernel_t kernel = nullptr;
  const cudaError_t error = symbol == symbols_.end()
                                ? cudaErrorSymbolNotFound
                                : cudaLibraryGetKernel(&kernel, library_, symbol->second.c_str());
  if (error != cudaSuccess)
    throw std::runtime_error(fmt::format("CUDA: kernel {}: {}", name, cudaGetErrorString(error)));
  return reinterpret_cast<const void*>(kernel);
}

void LoadedCode::read(const char* variable, void* to, std::size_t bytes) const {
  void* from = nullptr;
  std::size_t there = 0;
  cudaError_t error = cudaLibraryGetGlobal(&from, &there, library_, variable);
  if (error == cudaSuccess && there != bytes) error = cudaErrorInvalidSymbol;
  if (error == cudaSuccess) error = cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost);
  if (error != cudaSuccess)
    throw std::runtime_error(
        fmt::format("CUDA: variable {}: {}", variable, cudaGetErrorString(error)));
}

}  // namespace kvlab::kernels
