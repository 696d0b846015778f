// Tests the kernel that fetches rows of host memory by a list.
#include "kernels/fetch_rows.hpp"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "kernels/host/memory.hpp"
#include "tests/catch.hpp"
#include "tests/device.hpp"
#include "tests/skip.hpp"

using namespace kvlab;
using namespace kvlab::kernels;

namespace {

using Bytes = std::vector<std::byte>;

constexpr std::uint32_t kPoolRows = 3000, kSlots = 1500;
constexpr std::byte kPoison{0xFF};

Bytes random_bytes(std::size_t count, std::mt19937& random) {
  Bytes bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() & 0x7f);  // never kPoison
  return bytes;
}

/// Random rows of the pool, of which some repeat, for different slots.
std::vector<FetchedRow> random_list(std::uint32_t count, std::mt19937& random) {
  std::vector<std::uint32_t> slots(kSlots);
  std::iota(slots.begin(), slots.end(), 0u);
  std::shuffle(slots.begin(), slots.end(), random);
  std::vector<FetchedRow> list;
  for (std::uint32_t i = 0; i < count; ++i)
    list.push_back({static_cast<std::uint32_t>(random() % kPoolRows), slots[i]});
  return list;
}

/// The keys (part 0) or the values (part 1) after the rows of the list were fetched.
Bytes expected_part(const Bytes& pool, std::span<const FetchedRow> list, std::size_t half_bytes,
                    std::size_t part) {
  Bytes expected((kSlots + 1) * half_bytes, kPoison);
  for (const FetchedRow& fetched : list)
    std::copy_n(pool.begin() + static_cast<std::ptrdiff_t>((2 * fetched.row + part) * half_bytes),
                half_bytes,
                expected.begin() + static_cast<std::ptrdiff_t>(fetched.slot * half_bytes));
  return expected;
}

}  // namespace

TEST_CASE("fetch_rows refuses unsupported arguments before any launch") {
  alignas(16) std::byte memory[64] = {};
  FetchedRow list[1] = {};
  std::uint32_t count = 0;
  const FetchRowsArgs good{.pool = memory,
                           .list = list,
                           .count = &count,
                           .max_count = 1,
                           .half_bytes = 16,
                           .keys = memory,
                           .values = memory};
  const auto refused = [&](auto change, int blocks = 1) {
    FetchRowsArgs args = good;
    change(args);
    return fetch_rows(args, blocks, nullptr) == cudaErrorInvalidValue;
  };
  CHECK(refused([](FetchRowsArgs&) {}, 0));
  CHECK(refused([](FetchRowsArgs& args) { args.pool = nullptr; }));
  CHECK(refused([](FetchRowsArgs& args) { args.count = nullptr; }));
  CHECK(refused([](FetchRowsArgs& args) { args.max_count = 0; }));
  CHECK(refused([](FetchRowsArgs& args) { args.half_bytes = 0; }));
  CHECK(refused([](FetchRowsArgs& args) { args.half_bytes = 24; }));
  CHECK(refused([&](FetchRowsArgs& args) { args.keys = memory + 8; }));
  CHECK(refused([](FetchRowsArgs& args) { args.max_count = 1u << 31; }));
}

TEST_CASE("fetch_rows copies exactly the rows of the list, plain and captured", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  std::mt19937 random(1);
  for (const std::uint32_t half_bytes : {16u, 48u, 64u, 192u, 256u, 1024u, 4096u}) {
    const Bytes pool = random_bytes(std::size_t{kPoolRows} * 2 * half_bytes, random);
    const kvlab::cuda::PinnedBuffer pinned(pool.size());
    std::ranges::copy(pool, pinned.data());
    for (const std::uint32_t count : {0u, 1u, 2u, 31u, 33u, 1000u, kSlots}) {
      const std::vector<FetchedRow> list = random_list(count, random);
      std::vector<FetchedRow> padded = list;  // entries beyond the count, which must not be read
      padded.resize(kSlots + 1, {0xffff'ffffu, 0xffff'ffffu});
      const DeviceArray<FetchedRow> device_list{std::span<const FetchedRow>(padded)};
      const DeviceArray<std::uint32_t> device_count(std::vector<std::uint32_t>{count});
      // One more slot than the list can name. It must not change.
      const DeviceArray<std::byte> keys((kSlots + 1) * half_bytes),
          values((kSlots + 1) * half_bytes);
      const auto poison = [&] {
        for (const DeviceArray<std::byte>* array : {&keys, &values})
          check_cuda(cudaMemset(array->data(), 0xFF, (kSlots + 1) * half_bytes));
        check_cuda(cudaDeviceSynchronize());
      };
      const auto check = [&] {
        CHECK((keys.to_host() == expected_part(pool, list, half_bytes, 0)));
        CHECK((values.to_host() == expected_part(pool, list, half_bytes, 1)));
      };
      for (const int blocks : {1, 3, 264}) {
        CAPTURE(half_bytes, count, blocks);
        const auto fetch = [&](cudaStream_t stream) {
          const FetchRowsArgs args{.pool = pinned.data(),
                                   .list = device_list.data(),
                                   .count = device_count.data(),
                                   .max_count = kSlots,
                                   .half_bytes = half_bytes,
                                   .keys = keys.data(),
                                   .values = values.data()};
          return fetch_rows(args, blocks, stream);
        };
        poison();
        check_cuda(fetch(nullptr));
        check();
        poison();
        CapturedGraph graph(fetch);
        graph.launch();
        check();
      }
    }
  }
}
