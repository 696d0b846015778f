// Fetches rows of host memory through the mapping into the device's address space.
//
// Memory traffic: 2 * half_bytes for a row, which are read once over the link to host memory and
// written once to device memory, and 8 bytes of the list. The lower bound is the bytes of the rows
// at the link's rate, plus one round trip of the link and a launch: 4,096 rows of 512 bytes are 2.1
// MB, 38 us at 55 GB/s. The link needs about 100 KB in flight (55 GB/s times 2 us), so each thread
// requests several pieces of 16 bytes before it stores the first.
#include <limits>

#include "kernels/fetch_rows.hpp"

namespace kvlab::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kPieces = 4;  // pieces that a thread has in flight
constexpr std::uint32_t kPieceBytes = 16;

/// A piece of a row: where it is in the pool and where it goes.
struct Piece {
  const uint4* from;
  uint4* to;
};

/// The rows of the list form one sequence of pieces. Neighbouring threads copy neighbouring pieces,
/// so the requests of a warp are contiguous for any row size.
__device__ Piece piece_at(const FetchRowsArgs& args, std::uint32_t half, std::uint32_t at) {
  const std::uint32_t entry = at / (2 * half), piece = at % (2 * half);
  const FetchedRow fetched = args.list[entry];
  const bool is_key = piece < half;
  void* const to = is_key ? args.keys : args.values;
  return {static_cast<const uint4*>(args.pool) + std::size_t{fetched.row} * 2 * half + piece,
          static_cast<uint4*>(to) + std::size_t{fetched.slot} * half + piece - (is_key ? 0 : half)};
}

__global__ void __launch_bounds__(kThreads)
    fetch_rows_kernel(const __grid_constant__ FetchRowsArgs args) {
  const std::uint32_t half = args.half_bytes / kPieceBytes, pieces = *args.count * 2 * half,
                      stride = gridDim.x * kThreads;
  for (std::uint32_t first = blockIdx.x * kThreads + threadIdx.x; first < pieces;
       first += kPieces * stride) {
    Piece piece[kPieces];
    uint4 value[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const std::uint32_t at = first + static_cast<std::uint32_t>(i) * stride;
      if (at >= pieces) break;
      piece[i] = piece_at(args, half, at);
      value[i] = __ldcs(piece[i].from);
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (first + static_cast<std::uint32_t>(i) * stride >= pieces) break;
      *piece[i].to = value[i];
    }
  }
}

bool is_aligned(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % kPieceBytes == 0;
}

/// Whether every index of a piece, and the last step of the kernel's loop, is below 2^32.
bool is_countable(const FetchRowsArgs& args, int blocks) {
  const std::uint64_t pieces = std::uint64_t{args.max_count} * 2 * (args.half_bytes / kPieceBytes);
  const std::uint64_t step = std::uint64_t{kPieces} * kThreads * static_cast<std::uint64_t>(blocks);
  return pieces + step <= std::numeric_limits<std::uint32_t>::max();
}

}  // namespace

cudaError_t fetch_rows(const FetchRowsArgs& args, int blocks, cudaStream_t stream) {
  if (blocks < 1 || !args.pool || !args.list || !args.count || !args.keys || !args.values ||
      args.max_count == 0 || args.half_bytes == 0 || args.half_bytes % kPieceBytes != 0 ||
      !is_aligned(args.pool) || !is_aligned(args.keys) || !is_aligned(args.values) ||
      !is_countable(args, blocks))
    return cudaErrorInvalidValue;
  fetch_rows_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace kvlab::kernels
