// Attention beside the card's limits: decode by bytes, prefill by operations.
//
// attention_bench [decode|prefill]
#include <cstring>
#include <string>

#include "kernels/attention.hpp"
#include "kernels/bench/limits.cuh"

namespace {

using namespace kvlab::kernels;
using kvlab::bench::check;
using kvlab::bench::DeviceBuffer;
using kvlab::bench::median_ms;
using Element = __nv_bfloat16;

constexpr std::size_t kPool = std::size_t{1} << 30;  // elements: 2 GiB of keys, as much of values

struct Memory {
  DeviceBuffer<Element> keys{kPool}, values{kPool};
  DeviceBuffer<Element> q{std::size_t{32768} * 32 * 128}, out{q.size()};
  DeviceBuffer<float> lse{std::size_t{32768} * 32};
  DeviceBuffer<std::byte> workspace{64 << 20};
  kvlab::bench::Reader reader;

  Memory() { check(cudaMemset(workspace.data(), 0, kSignalBytes)); }
};

AttentionShape shape(int query_heads, int kv_heads, int head_size, int slots) {
  const std::int64_t head_stride = std::int64_t{slots} * head_size;
  return {.type = Type::bf16,
          .query_heads = query_heads,
          .kv_heads = kv_heads,
          .head_size = head_size,
          .softmax_scale = 0.125f,
          .sequence_stride = head_stride * kv_heads,
          .head_stride = head_stride};
}

/// Milliseconds of a kernel that reads as many elements, at another place of the pool each time.
double read_ms(const Memory& memory, std::size_t elements) {
  const std::size_t at_once = std::min(elements, kPool);
  const std::size_t places = std::min<std::size_t>(kPool / at_once, 64);
  const int launches = static_cast<int>(std::max<std::size_t>(places, 4));
  const auto enqueue = [&](cudaStream_t stream) {
    for (int i = 0; i < launches; ++i)
      memory.reader.enqueue(memory.keys.data() + i % places * at_once, at_once, stream);
  };
  return median_ms(enqueue) / launches * elements / at_once;
}

/// Launches over many places of the pool, so that none is in the cache when its turn comes again.
void bench_decode(const Memory& memory, const char* name, const AttentionShape& s, int sequences,
                  int length, double read_bandwidth) {
  const std::size_t elements = sequences * s.sequence_stride;
  if (elements > kPool) return;
  const int places = static_cast<int>(std::min<std::size_t>(kPool / elements, 64));
  const std::vector<std::int32_t> host(sequences, length);
  const DeviceBuffer<std::int32_t> lengths(sequences);
  check(cudaMemcpy(lengths.data(), host.data(), host.size() * 4, cudaMemcpyHostToDevice));
  const int launches = std::max(places, 4);
  const double ms = median_ms([&](cudaStream_t stream) {
    for (int i = 0; i < launches; ++i) {
      const std::size_t place = i % places * elements;
      check(decode_attention({.shape = s,
                              .sequences = sequences,
                              .slots = length,
                              .q = memory.q.data(),
                              .keys = memory.keys.data() + place,
                              .values = memory.values.data() + place,
                              .lengths = lengths.data(),
                              .out = memory.out.data(),
                              .lse = nullptr,
                              .workspace = memory.workspace.data(),
                              .settled = true},
                             stream));
    }
  });
  const double seconds = ms * 1e-3 / launches;
  const double read_seconds = read_ms(memory, 2 * elements) * 1e-3;
  const double bytes = 2.0 * sizeof(Element) * elements;
  std::printf("%-22s %5d %7d %9.1f %9.2f %8.0f %6.1f%% %8.1f%%\n", name, sequences, length,
              bytes * 1e-6, seconds * 1e6, bytes / seconds * 1e-9,
              100 * bytes / seconds / read_bandwidth, 100 * read_seconds / seconds);
}

void bench_decode(const Memory& memory) {
  const double read_bandwidth = kvlab::bench::read_bandwidth(memory.keys);
  std::printf("read bandwidth %.0f GB/s\n\n", read_bandwidth * 1e-9);
  // The last column: the time of a kernel that only reads as much, launch and all, beside ours.
  std::printf("%-22s %5s %7s %9s %9s %8s %7s %9s\n", "decode, bf16", "batch", "length", "MB of K+V",
              "us", "GB/s", "of read", "of such");
  for (const int sequences : {1, 2, 4, 8, 16, 32})
    for (const int length : {1024, 4096, 8192, 32768})
      bench_decode(memory, "32/8 heads of 128", shape(32, 8, 128, length), sequences, length,
                   read_bandwidth);
  for (const int sequences : {1, 8, 32})
    for (const int length : {1024, 8192, 32768}) {
      bench_decode(memory, "32/8 heads of 64", shape(32, 8, 64, length), sequences, length,
                   read_bandwidth);
      bench_decode(memory, "8/8 heads of 128", shape(8, 8, 128, length), sequences, length,
                   read_bandwidth);
      bench_decode(memory, "64/8 heads of 128", shape(64, 8, 128, length), sequences, length,
                   read_bandwidth);
    }
}

void bench_prefill(const Memory& memory, const AttentionShape& s, int first, int queries,
                   double matrix_rate) {
  const double ms = median_ms(
      [&](cudaStream_t stream) {
        check(prefill_attention({.shape = s,
                                 .first = first,
                                 .queries = queries,
                                 .q = memory.q.data(),
                                 .keys = memory.keys.data(),
                                 .values = memory.values.data(),
                                 .out = memory.out.data(),
                                 .lse = memory.lse.data()},
                                stream));
      },
      7);
  const double seen = queries * (first + (queries + 1) / 2.0);  // keys, over all queries
  const double operations = 4.0 * s.head_size * s.query_heads * seen;
  std::printf("%3d/%d heads of %-8d %7d %7d %10.3f %8.0f %6.1f%%\n", s.query_heads, s.kv_heads,
              s.head_size, first, queries, ms, operations / ms * 1e-9,
              100 * operations / (ms * 1e-3) / matrix_rate);
}

void bench_prefill(const Memory& memory) {
  const double matrix_rate = kvlab::bench::matrix_rate(memory.keys);
  std::printf("bf16 matrix rate %.0f TFLOP/s\n\n", matrix_rate * 1e-12);
  std::printf("%-22s %7s %7s %10s %8s %7s\n", "prefill, bf16", "first", "queries", "ms", "TFLOP/s",
              "of rate");
  for (const int queries : {1024, 4096, 8192, 32768})
    bench_prefill(memory, shape(32, 8, 128, queries), 0, queries, matrix_rate);
  bench_prefill(memory, shape(32, 8, 128, 32768), 28672, 4096, matrix_rate);
  for (const int queries : {4096, 32768})
    bench_prefill(memory, shape(32, 8, 64, queries), 0, queries, matrix_rate);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string which = argc > 1 ? argv[1] : "";
  const Memory memory;
  for (const auto* buffer : {&memory.keys, &memory.values, &memory.q}) kvlab::bench::fill(*buffer);
  if (which != "prefill") bench_decode(memory);
  if (which.empty()) std::printf("\n");
  if (which != "decode") bench_prefill(memory);
}
