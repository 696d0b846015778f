// The functions of the CUDA backend for a build without CUDA. They report that CUDA is missing.
#include <stdexcept>

#include "engine/backend.hpp"
#include "engine/bench.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

[[noreturn]] void refuse_bench() {
  throw std::invalid_argument(
      "this command measures the CUDA decoder, which is not in this build; `cmake --preset cuda` "
      "builds it");
}

}  // namespace

bool cuda_in_build() { return false; }
bool has_cuda_device() { return false; }
std::string cuda_description() {
  return "CUDA: not in this build; `cmake --preset cuda` builds it\n";
}

std::unique_ptr<Backend> load_cuda_backend(const std::filesystem::path&) {
  throw std::invalid_argument("--device: cuda is not in this build; use --device cpu");
}

nlohmann::ordered_json bench_decode(const DecodeBenchOptions&) { refuse_bench(); }
nlohmann::ordered_json bench_prefill(const PrefillBenchOptions&) { refuse_bench(); }
nlohmann::ordered_json bench_stream(const StreamBenchOptions&) { refuse_bench(); }
nlohmann::ordered_json bench_evict(const EvictBenchOptions&) { refuse_bench(); }
nlohmann::ordered_json bench_attention(const AttentionBenchOptions&) { refuse_bench(); }
nlohmann::ordered_json bench_link(const LinkBenchOptions&) { refuse_bench(); }

}  // namespace kvlab
