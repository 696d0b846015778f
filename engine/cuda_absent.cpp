// The CUDA backend of a build without it.
#include <stdexcept>

#include "engine/attention_bench.hpp"
#include "engine/backend.hpp"
#include "engine/bench.hpp"

namespace kvlab {
namespace {

[[noreturn]] void refuse_bench() {
  throw std::invalid_argument("it measures the CUDA decoder, which is not in this build");
}

}  // namespace

bool cuda_in_build() { return false; }
bool has_cuda_device() { return false; }

std::unique_ptr<Backend> load_cuda_backend(const std::filesystem::path&) {
  throw std::invalid_argument("--device: cuda is not in this build; use --device cpu");
}

DecodeBench bench_decode(const DecodeBenchOptions&) { refuse_bench(); }
PrefillBench bench_prefill(const PrefillBenchOptions&) { refuse_bench(); }
AttentionBench bench_attention(const AttentionBenchOptions&) { refuse_bench(); }
StreamBench bench_stream(const StreamBenchOptions&) { refuse_bench(); }
EvictBench bench_evict(const EvictBenchOptions&) { refuse_bench(); }

}  // namespace kvlab
