#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <stdexcept>
#include <vector>

#include "engine/bench_limits.hpp"
#include "engine/cuda/bench/bench_tools.hpp"
#include "engine/cuda/fill.hpp"
#include "kernels/fetch_rows.hpp"
#include "kernels/host/transfer.hpp"

namespace kvlab {
namespace {

using kernels::FetchedRow;
using nlohmann::ordered_json;

constexpr const char* kMeasuring = "measuring the link";
constexpr int kFormat = 1;
constexpr int kLinkRepeats = 5;
constexpr std::uint64_t kCopies[] = {1u << 16, 1u << 20, 1u << 24, 1u << 28};  // bytes
constexpr std::uint32_t kRowBytes[] = {128, 256, 512, 1024, 2048, 4096, 8192};
constexpr std::uint32_t kRows[] = {64, 256, 1024, 4096, 16384, 65536};
constexpr std::uint32_t kMaxBatchedRows = 16384;
constexpr std::uint32_t kEmptyLaunches = 64;
// Number of rows that a graph fetches, if 4 to 32 launches suffice for it. A graph has several
// launches, so that one follows another directly, as in a captured decode step.
constexpr std::uint32_t kRowsOfGraph = 1 << 18;
constexpr std::uint64_t kReadBytes = std::uint64_t{4} << 30;  // device memory that steps read

int multiprocessors() {
  kernels::DeviceLimits limits;
  cuda::check(kernels::device_limits(limits), kMeasuring);
  return limits.multiprocessors;
}

double bytes_per_second(std::uint64_t bytes, double milliseconds) {
  return static_cast<double>(bytes) / (milliseconds * 1e-3);
}

/// Appends a list of `count` different rows to `lists`: one row of each of `count` equal parts of
/// the pool, in random order. The i-th row of the list goes to slot i.
void append_list(std::vector<FetchedRow>& lists, std::uint32_t count, std::uint64_t pool_rows,
                 std::mt19937_64& random) {
  std::vector<std::uint32_t> rows(count);
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t first = i * pool_rows / count, end = (i + 1) * pool_rows / count;
    rows[i] = static_cast<std::uint32_t>(first + random() % (end - first));
  }
  std::shuffle(rows.begin(), rows.end(), random);
  for (std::uint32_t i = 0; i < count; ++i) lists.push_back({rows[i], i});
}

/// Pinned host memory, and device memory for the rows that are fetched from it.
class Link {
 public:
  Link(const LinkBenchOptions& options, std::uint64_t device_bytes)
      : pool_(options.pool_bytes),
        keys_(device_bytes / 2, "fetched keys"),
        values_(device_bytes / 2, "fetched values") {
    std::memset(pool_.data(), 1, pool_.bytes());  // so that every page exists
  }

  /// Number of rows of the pool that a list can name.
  std::uint64_t pool_rows(std::uint32_t row_bytes) const {
    return std::min<std::uint64_t>(pool_.bytes() / row_bytes, 0xffff'ffffu);
  }
  std::byte* host() const { return pool_.data(); }
  std::byte* device() const { return keys_.data(); }

  void enqueue_fetch(const FetchedRow* list, const std::uint32_t* count, std::uint32_t max_count,
                     std::uint32_t row_bytes, int blocks, cudaStream_t stream) const {
    cuda::check(kernels::fetch_rows({.pool = pool_.data(),
                                     .list = list,
                                     .count = count,
                                     .max_count = max_count,
                                     .half_bytes = row_bytes / 2,
                                     .keys = keys_.data(),
                                     .values = values_.data()},
                                    blocks, stream),
                kMeasuring);
  }

 private:
  cuda::PinnedBuffer pool_;
  cuda::DeviceBuffer keys_, values_;
};

ordered_json time_copies(const Link& link) {
  const cuda::Stream stream;
  ordered_json copies = ordered_json::array();
  for (const std::uint64_t bytes : kCopies) {
    const auto rate_of = [&](void* to, const void* from, cudaMemcpyKind kind) {
      const auto enqueue = [&] {
        cuda::check(cudaMemcpyAsync(to, from, bytes, kind, stream.get()), kMeasuring);
      };
      return bytes_per_second(bytes, median_milliseconds(stream.get(), enqueue, kLinkRepeats));
    };
    copies.push_back({{"bytes", bytes},
                      {"to_device_bytes_per_second",
                       rate_of(link.device(), link.host(), cudaMemcpyHostToDevice)},
                      {"to_host_bytes_per_second",
                       rate_of(link.host(), link.device(), cudaMemcpyDeviceToHost)}});
  }
  return copies;
}

/// The highest rate of the copies from the host. Fetches are compared with it.
double copy_limit(const ordered_json& copies) {
  double limit = 0;
  for (const ordered_json& copy : copies)
    limit = std::max(limit, copy["to_device_bytes_per_second"].get<double>());
  return limit;
}

/// Consecutive fetches of `rows` rows each, as one graph. Each run fetches other rows than the
/// previous run, because those might still be in a cache.
class FetchSeries {
 public:
  FetchSeries(const Link& link, std::uint32_t rows, std::uint32_t row_bytes, std::uint32_t launches)
      : link_(link),
        rows_(rows),
        row_bytes_(row_bytes),
        launches_(launches),
        count_(cuda::upload(std::vector<std::uint32_t>{rows}, kMeasuring)) {
    std::vector<FetchedRow> lists;
    std::mt19937_64 random(rows + row_bytes);
    for (std::uint32_t i = 0; i < (kLinkRepeats + 1) * launches; ++i)
      append_list(lists, rows, link.pool_rows(row_bytes), random);
    all_ = cuda::upload(lists, kMeasuring);
    lists_ = {std::size_t{launches} * rows * sizeof(FetchedRow), kMeasuring};
  }

  double microseconds(int blocks) const {
    const cuda::Stream stream;
    const cuda::Graph graph(stream.get(), [&] { enqueue_all(blocks, stream.get()); });
    std::size_t run = 0;
    const auto next_lists = [&] {
      const std::size_t entries = std::size_t{launches_} * rows_;
      cuda::copy(lists_.as<FetchedRow>(), all_.as<FetchedRow>() + run++ * entries, entries,
                 stream.get());
    };
    const auto launch = [&] { graph.launch(stream.get()); };
    return median_milliseconds_after(stream.get(), next_lists, launch, kLinkRepeats) * 1e3 /
           launches_;
  }

 private:
  void enqueue_all(int blocks, cudaStream_t stream) const {
    for (std::uint32_t i = 0; i < launches_; ++i)
      link_.enqueue_fetch(lists_.as<FetchedRow>() + std::size_t{i} * rows_,
                          count_.as<std::uint32_t>(), rows_, row_bytes_, blocks, stream);
  }

  const Link& link_;
  std::uint32_t rows_, row_bytes_, launches_;
  cuda::DeviceBuffer count_, all_, lists_;
};

struct BestTime {
  double microseconds = std::numeric_limits<double>::infinity();
  int blocks = 0;
};

/// The numbers of thread blocks that are tried.
std::vector<int> grids() {
  const int all = multiprocessors();
  return {std::max(all / 16, 1), std::max(all / 4, 1), std::max(all / 2, 1), all, 2 * all};
}

BestTime best_fetch(const Link& link, std::uint32_t rows, std::uint32_t row_bytes) {
  const FetchSeries series(link, rows, row_bytes, std::clamp(kRowsOfGraph / rows, 4u, 32u));
  BestTime best;
  for (const int blocks : grids())
    if (const double time = series.microseconds(blocks); time < best.microseconds)
      best = {time, blocks};
  return best;
}

/// Microseconds of a launch that fetches nothing.
double empty_launch(const Link& link) {
  const cuda::DeviceBuffer none = cuda::upload(std::vector<std::uint32_t>{0}, kMeasuring),
                           list(sizeof(FetchedRow), kMeasuring);
  const cuda::Stream stream;
  const cuda::Graph graph(stream.get(), [&] {
    for (std::uint32_t i = 0; i < kEmptyLaunches; ++i)
      link.enqueue_fetch(list.as<FetchedRow>(), none.as<std::uint32_t>(), 1, kRowBytes[0],
                         multiprocessors(), stream.get());
  });
  const auto launch = [&] { graph.launch(stream.get()); };
  return median_milliseconds(stream.get(), launch, kLinkRepeats) * 1e3 / kEmptyLaunches;
}

/// Times copying rows one by one with cudaMemcpyBatchAsync(), as engines do that have no kernel for
/// it. A row's key and value are copied together to one place, so there is one copy for each row.
class BatchedCopies {
 public:
  BatchedCopies(const Link& link, std::uint32_t rows, std::uint32_t row_bytes)
      : sizes_(rows, row_bytes) {
    std::vector<FetchedRow> list;
    std::mt19937_64 random(rows);
    append_list(list, rows, link.pool_rows(row_bytes), random);
    for (const FetchedRow& row : list) {
      from_.push_back(link.host() + std::size_t{row.row} * row_bytes);
      to_.push_back(link.device() + std::size_t{row.slot} * row_bytes);
    }
  }

  double microseconds() {
    const cuda::Stream stream;
    return median_milliseconds(
               stream.get(), [&] { cuda::check(enqueue(stream.get()), kMeasuring); },
               kLinkRepeats) *
           1e3;
  }

 private:
  cudaError_t enqueue(cudaStream_t stream) {
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    std::size_t first = 0;
#if CUDART_VERSION >= 13000
    return cudaMemcpyBatchAsync(to_.data(), from_.data(), sizes_.data(), sizes_.size(), &attributes,
                                &first, 1, stream);
#else
    std::size_t failed = 0;
    return cudaMemcpyBatchAsync(to_.data(), from_.data(), sizes_.data(), sizes_.size(), &attributes,
                                &first, 1, &failed, stream);
#endif
  }

  std::vector<void*> from_, to_;
  std::vector<std::size_t> sizes_;
};

/// Null above kMaxBatchedRows, because preparing a copy for each row takes the host too long.
ordered_json batched_copies(const Link& link, std::uint32_t rows, std::uint32_t row_bytes) {
  if (rows > kMaxBatchedRows) return {};
  return BatchedCopies(link, rows, row_bytes).microseconds();
}

ordered_json time_fetches(const Link& link, double limit) {
  ordered_json fetches = ordered_json::array();
  for (const std::uint32_t row_bytes : kRowBytes)
    for (const std::uint32_t rows : kRows) {
      const BestTime best = best_fetch(link, rows, row_bytes);
      const double rate =
          bytes_per_second(std::uint64_t{rows} * row_bytes, best.microseconds * 1e-3);
      fetches.push_back(
          {{"row_bytes", row_bytes},
           {"rows", rows},
           {"microseconds", best.microseconds},
           {"blocks", best.blocks},
           {"bytes_per_second", rate},
           {"share_of_copy",
            share_of_limit(fmt::format("fetching {} rows of {} bytes", rows, row_bytes), rate,
                           limit, "bytes/s")},
           {"batched_copy_microseconds", batched_copies(link, rows, row_bytes)}});
    }
  return fetches;
}

/// Reads parts of a large array in turn, so that no part is in the L2 cache when it is read.
class Reader {
 public:
  Reader()
      : memory_(std::min<std::uint64_t>(kReadBytes, cuda::memory_info().free / 2) / 4096 * 4096,
                "the memory that steps read"),
        sink_(256, "a sum") {
    const cuda::Stream stream;
    cuda::check(cudaMemsetAsync(memory_.data(), 0, memory_.bytes(), stream.get()), kMeasuring);
    stream.synchronize(kMeasuring);
  }

  void enqueue(std::uint64_t bytes, cudaStream_t stream) {
    for (std::uint64_t left = bytes / 16 * 16; left > 0;) {
      if (next_ == memory_.bytes()) next_ = 0;
      const std::uint64_t part = std::min(left, memory_.bytes() - next_);
      cuda::check(cuda::read_all(memory_.data() + next_, part, cuda::Caching::stream,
                                 sink_.as<std::uint32_t>(), stream),
                  kMeasuring);
      next_ += part;
      left -= part;
    }
  }

 private:
  cuda::DeviceBuffer memory_, sink_;
  std::uint64_t next_ = 0;
};

ordered_json time_step(const Link& link, Reader& reader, const LinkStep& step) {
  const std::uint32_t rows = std::max(step.rows, 1u);
  std::vector<FetchedRow> lists;
  std::mt19937_64 random(rows);
  for (std::uint32_t layer = 0; layer < step.layers; ++layer)
    append_list(lists, rows, link.pool_rows(step.row_bytes), random);
  const cuda::DeviceBuffer list = cuda::upload(lists, kMeasuring),
                           count = cuda::upload(std::vector<std::uint32_t>{step.rows}, kMeasuring);
  const int blocks = best_fetch(link, rows, step.row_bytes).blocks;
  const cuda::Stream stream;
  const cuda::Graph graph(stream.get(), [&] {
    for (std::uint32_t layer = 0; layer < step.layers; ++layer) {
      link.enqueue_fetch(list.as<FetchedRow>() + std::size_t{layer} * rows,
                         count.as<std::uint32_t>(), rows, step.row_bytes, blocks, stream.get());
      reader.enqueue(step.read_bytes, stream.get());
    }
  });
  const auto launch = [&] { graph.launch(stream.get()); };
  return {{"layers", step.layers},
          {"rows", step.rows},
          {"row_bytes", step.row_bytes},
          {"read_bytes", step.read_bytes},
          {"milliseconds", median_milliseconds(stream.get(), launch, kLinkRepeats)}};
}

ordered_json time_steps(const Link& link, const std::vector<LinkStep>& steps) {
  ordered_json times = ordered_json::array();
  if (steps.empty()) return times;
  Reader reader;
  for (const LinkStep& step : steps) times.push_back(time_step(link, reader, step));
  return times;
}

/// Device memory for the largest fetch.
std::uint64_t fetched_bytes(const std::vector<LinkStep>& steps) {
  std::uint64_t bytes =
      std::max(kCopies[std::size(kCopies) - 1] * 2,
               std::uint64_t{std::ranges::max(kRows)} * std::ranges::max(kRowBytes));
  for (const LinkStep& step : steps)
    bytes = std::max(bytes, std::uint64_t{step.rows} * step.row_bytes);
  return bytes;
}

void refuse_large_steps(const LinkBenchOptions& options) {
  for (const LinkStep& step : options.steps)
    if (std::uint64_t{step.rows} * step.row_bytes > options.pool_bytes)
      throw std::invalid_argument(
          fmt::format("--pool-gib: a layer fetches {} of host memory, but the pool has only {}; "
                      "give a larger pool, or a smaller --batch",
                      cuda::bytes_text(std::uint64_t{step.rows} * step.row_bytes),
                      cuda::bytes_text(options.pool_bytes)));
}

}  // namespace

ordered_json bench_link(const LinkBenchOptions& options) {
  refuse_without_device();
  refuse_large_steps(options);
  const ReadLimits limits;
  const Link link(options, fetched_bytes(options.steps));
  const ordered_json copies = time_copies(link);
  const double limit = copy_limit(copies);
  return {{"bench", "link"},
          {"format", kFormat},
          {"device", cuda::device_name()},
          {"pool_bytes", options.pool_bytes},
          {"read_bytes_per_second", limits.memory()},
          {"copy_bytes_per_second", limit},
          {"launch_microseconds", empty_launch(link)},
          {"copies", copies},
          {"fetches", time_fetches(link, limit)},
          {"steps", time_steps(link, options.steps)}};
}

}  // namespace kvlab
