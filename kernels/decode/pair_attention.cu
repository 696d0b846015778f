// Decode attention for pairs whose slots are consecutive: see pair_attention.cuh.
//
// Instantiated for 3 types x 4 head sizes x 3 position numberings, with tiles requested one by one
// (36 kernels). If neither keys nor the query are rotated here, there are two more variants: all
// tiles requested at once (12 kernels), and clusters, which need sm_90 (12 kernels). Type and head
// size are template parameters because they determine the registers, and the numbering because it
// determines the inner loop. The group, the number of stages of the ring, and whether the output
// for the observer is written are chosen at run time.
#include "kernels/decode/pair_attention.cuh"

namespace kvlab::kernels {

bool is_pair_attention(const PairAttention& args, const kvlab_pages& paged) {
  const PairTable& table = args.table;
  if (!is_head_size(args.head_size)) return false;
  if (args.group < 1 || args.group > kMaxGroup) return false;
  const std::int64_t per_16_bytes = 16 / static_cast<std::int64_t>(bytes_of(args.type));
  if (table.head_stride % per_16_bytes != 0 || table.sequence_stride % per_16_bytes != 0)
    return false;
  if (table.pairs < 1 || table.pairs > kMaxPairs || table.kv_heads < 1 || table.max_slots < 1)
    return false;
  if (paged.blocks != nullptr && (table.next_slots == nullptr || args.group > kMaxPagedGroup))
    return false;
  return table.pairs * row_slots(table.max_slots) / kSlotsPerTile < 1 << 30;
}

std::size_t pair_attention_workspace(const PairAttention& args, const kvlab_pages& paged) {
  DeviceLimits limits;
  if (!is_pair_attention(args, paged)) return 0;
  if (device_limits(limits) != cudaSuccess) return kNoDevice;
  const auto bytes = [&]<class Warp>() {
    const int ctas = max_ctas<Warp>(limits, args);
    if (ctas == 0) return std::size_t{0};
    return sizeof(Signals) +
           part_rows(args, ctas) * (Warp::kHeadSize * sizeof(float) + sizeof(float2));
  };
  return args.group > kMaxPagedGroup ? with_warp<16>(args, bytes) : with_warp<8>(args, bytes);
}

cudaError_t pair_attention(const PairAttention& args, const kvlab_pages& paged,
                           cudaStream_t stream) {
  const PairTable& table = args.table;
  if (!is_pair_attention(args, paged)) return cudaErrorInvalidValue;
  for (const void* pointer : {args.q, args.keys, args.values, static_cast<const void*>(args.out),
                              static_cast<const void*>(args.workspace)})
    if (pointer == nullptr || !aligned16(pointer)) return cudaErrorInvalidValue;
  if (table.lengths == nullptr || (table.next_slots != nullptr && table.first_slot == nullptr) ||
      ((args.ages != nullptr || args.rules != nullptr) && args.inv_freq == nullptr) ||
      (args.rules != nullptr && args.table.now == nullptr))
    return cudaErrorInvalidValue;
  if (paged.blocks != nullptr) return paged_pair_attention(args, paged, stream);
  if (args.group > kMaxPagedGroup) return wide_pair_attention(args, stream);
  return with_warp<8>(
      args, [&]<class Warp>() { return launch_attention<Warp, false>(args, paged, stream); });
}

}  // namespace kvlab::kernels
