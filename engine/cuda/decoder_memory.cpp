// The device memory that a CUDA decoder needs, checked before anything is allocated.
#include <fmt/format.h>

#include <stdexcept>

#include "engine/cuda/cache/evicting_cache.hpp"
#include "engine/cuda/cache/full_cache.hpp"
#include "engine/cuda/cuda_decoder.hpp"
#include "kernels/launch_plans.hpp"

namespace kvlab {
namespace {

/// Bytes that are left free: for the rounding of buffer sizes, for a prompt's ids, and for the code
/// and the graphs that CUDA loads later.
constexpr std::uint64_t kReserve = 256u << 20;

void check_options(const CudaDecoderOptions& options) {
  if (options.sequences < 1)
    throw std::invalid_argument("CUDA decoder: no sequences; give at least one");
  if (options.prefill_tokens < 1)
    throw std::invalid_argument("CUDA decoder: a prompt's chunk needs at least one token");
  if (options.capture && options.sequences != 1)
    throw std::invalid_argument("CUDA decoder: a trace is captured from one sequence; give one");
  if (options.slots == 0 && !options.evicts())
    throw std::invalid_argument("CUDA decoder: no slots; give at least one");
  if (options.evicts() && options.caches.size() != static_cast<std::size_t>(options.sequences))
    throw std::invalid_argument(
        fmt::format("CUDA decoder: {} caches are given for {} sequences; give one for each",
                    options.caches.size(), options.sequences));
}

CacheBytes memory_for(const DeviceModel& model, const CudaDecoderOptions& options) {
  const ModelConfig& config = model.config();
  const int rows = options.rows();
  CacheBytes bytes =
      options.evicts() ? EvictingCache::bytes(model, options) : FullCache::bytes(model, options);
  bytes.work += cuda::Placed<DecoderWork>::bytes(config, rows, options.sequences) +
                BatchState::bytes(options.sequences, config.vocab) +
                LayerOutputMemory::bytes(capture_shape(config, model.dtype()), output_rows(options),
                                         options.keeps_outputs()) +
                DeviceLayers::bytes(model, rows);
  // A prompt that is longer than the work buffers needs its own buffer for the hidden states of all
  // its tokens.
  if (options.longest_prompt > static_cast<unsigned>(rows))
    bytes.work +=
        cuda::Placed<DecoderWork>::bytes(config, static_cast<int>(options.longest_prompt), 0);
  return bytes;
}

/// Checks that the device can launch the model's kernels. Attention keeps a head's vectors in
/// shared memory, of which a device may have too little.
void check_launches(const DeviceModel& model, const CudaDecoderOptions& options) {
  const ModelConfig& config = model.config();
  kernels::DeviceLimits limits;
  cuda::check(kernels::device_limits(limits), "reading the device's limits");
  const auto head_size = static_cast<int>(config.head_size);
  std::string why = kernels::why_not_prefill(model.type(), head_size, limits);
  if (why.empty() && (!options.evicts() || config.has_windows())) {
    const kvlab_cache_view cache{.type = model.type(),
                                 .sequences = 1,
                                 .query_heads = static_cast<int>(config.query_heads),
                                 .kv_heads = static_cast<int>(config.kv_heads),
                                 .head_size = head_size,
                                 .max_slots = 1};
    why = kernels::why_not_attention(cache, KVLAB_ORIGINAL_POSITIONS, limits);
  }
  if (!why.empty())
    throw std::runtime_error(
        fmt::format("CUDA decoder of {}: {}; or use --device cpu", config.name, why));
}

bool fits(const CacheBytes& bytes, std::uint64_t free) {
  return bytes.storage + bytes.work + kReserve <= free;
}

/// The maximum number of slots per sequence that fit into memory. Work buffers grow with the slots,
/// too.
std::uint32_t slots_that_fit(const DeviceModel& model, CudaDecoderOptions options,
                             std::uint64_t free) {
  std::uint32_t max_slots = 0;
  for (std::uint32_t too_many = options.slots; too_many - max_slots > 1;) {
    options.slots = max_slots + (too_many - max_slots) / 2;
    (fits(memory_for(model, options), free) ? max_slots : too_many) = options.slots;
  }
  return max_slots;
}

}  // namespace

bool CudaDecoder::fits(const DeviceModel& model, const CudaDecoderOptions& options) {
  return kvlab::fits(memory_for(model, options), cuda::memory_info().free);
}

CudaDecoderOptions CudaDecoder::validate_options(const DeviceModel& model,
                                                 const CudaDecoderOptions& options) {
  check_options(options);
  check_launches(model, options);
  const CacheBytes needed = memory_for(model, options);
  const cuda::MemoryInfo memory = cuda::memory_info();
  if (kvlab::fits(needed, memory.free)) return options;
  if (options.evicts())
    throw std::runtime_error(
        fmt::format("device memory: the caches of {} sequence{} of {} need {}, and their work "
                    "buffers {}; only {} of {} are free; use smaller budgets or fewer sequences",
                    options.sequences, options.sequences == 1 ? "" : "s", model.config().name,
                    cuda::bytes_text(needed.storage), cuda::bytes_text(needed.work),
                    cuda::bytes_text(memory.free), cuda::bytes_text(memory.total)));
  throw std::runtime_error(fmt::format(
      "device memory: the cache of {} tokens by {} sequence{} of {} needs {}, and its work buffers "
      "{}; only {} of {} are free; sequences of at most {} tokens would fit",
      options.slots, options.sequences, options.sequences == 1 ? "" : "s", model.config().name,
      cuda::bytes_text(needed.storage), cuda::bytes_text(needed.work),
      cuda::bytes_text(memory.free), cuda::bytes_text(memory.total),
      slots_that_fit(model, options, memory.free)));
}

}  // namespace kvlab
