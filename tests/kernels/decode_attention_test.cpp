#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/attention.hpp"
#include "kernels/decode/pair_attention.hpp"
#include "kernels/launch_plans.hpp"
#include "kernels/loaded_code.hpp"
#include "kernels/pointwise.hpp"
#include "tests/catch.hpp"
#include "tests/device.hpp"
#include "tests/kernels/attention_reference.hpp"
#include "tests/skip.hpp"

using namespace kvlab;
using namespace kvlab::kernels;

namespace {

constexpr int kPoison = 0xFF;  // all ones is NaN in every type

struct Size {
  Type type = KVLAB_BF16;
  int head_size = 128, group = 4, kv_heads = 2, sequences = 1, slots = 64;
  float scale = 0;  ///< 0: 1 / sqrt(head_size)
  bool sinks = false;
};

/// A batch on the device with random queries and caches. Slots beyond a sequence's length are
/// poisoned.
class Batch {
 public:
  Batch(const Size& size, std::vector<std::int32_t> lengths, bool equal_keys = false)
      : size_(size), lengths_(std::move(lengths)) {
    if (size_.scale == 0) size_.scale = 1 / std::sqrt(static_cast<float>(size_.head_size));
    std::mt19937 random(17);
    const std::size_t slots = std::size_t(size_.sequences) * size_.kv_heads * size_.slots;
    q_ = random_values(size_.type, heads() * dim(), random);
    keys_ = random_values(size_.type, slots * dim(), random);
    values_ = random_values(size_.type, slots * dim(), random);
    if (equal_keys)
      for (std::size_t i = dim(); i < keys_.size(); ++i) keys_[i] = keys_[i % dim()];
    device_q_ = upload(q_);
    device_lengths_ = std::make_unique<DeviceArray<std::int32_t>>(lengths_);
    out_ = std::make_unique<DeviceArray<std::byte>>((heads() + kGuardRows) * row_bytes());
    lse_ = std::make_unique<DeviceArray<float>>(heads() + kGuardRows);
    workspace_ = std::make_unique<DeviceArray<std::byte>>(workspace_bytes());
    sinks_ = sample_sinks(query_heads(), size_.sinks);
    if (size_.sinks) device_sinks_ = std::make_unique<DeviceArray<float>>(sinks_);
    upload_cache(lengths_);
  }

  /// Sets new lengths, and poisons the cache beyond them.
  void set_lengths(const std::vector<std::int32_t>& lengths) {
    lengths_ = lengths;
    device_lengths_->assign(lengths_);
    upload_cache(lengths_);
  }

  DecodeAttentionArgs args() const {
    return {.shape = shape(),
            .sequences = size_.sequences,
            .slots = size_.slots,
            .q = device_q_->data(),
            .keys = device_keys_->data(),
            .values = device_values_->data(),
            .lengths = device_lengths_->data(),
            .out = out_->data(),
            .lse = lse_->data(),
            .workspace = workspace_->data()};
  }

  /// Poisons the newest tokens in the device's cache, which is a ring buffer. write_and_attend()
  /// then has to write them again before the attention.
  void take_out_newest() {
    std::vector<float> newest;
    std::vector<std::int32_t> slots, sequences;
    for (int s = 0; s < size_.sequences; ++s) {
      newest.insert(newest.end(), &q_[s * query_heads() * dim()],
                    &q_[(s + 1) * query_heads() * dim()]);
      sequences.push_back(s);
      slots.push_back(lengths_[s] - 1);
      for (auto* const cache : {&keys_, &values_})
        for (int h = 0; h < size_.kv_heads; ++h)
          newest.insert(newest.end(), row(*cache, s, h), row(*cache, s, h) + dim());
    }
    newest_ = upload(newest);
    newest_slots_ = std::make_unique<DeviceArray<std::int32_t>>(slots);
    sequences_ = std::make_unique<DeviceArray<std::int32_t>>(sequences);
    const std::vector<std::byte> spoiled(row_bytes(), std::byte{kPoison});
    for (int s = 0; s < size_.sequences; ++s)
      for (int h = 0; h < size_.kv_heads; ++h)
        for (const auto& cache : {device_keys_.get(), device_values_.get()})
          check_cuda(
              cudaMemcpy(cache->data() + (row(keys_, s, h) - keys_.data()) * bytes_of(size_.type),
                         spoiled.data(), spoiled.size(), cudaMemcpyHostToDevice));
  }
  cudaError_t write_and_attend(cudaStream_t stream) const {
    RopeWriteArgs write{};
    write.cache.type = size_.type;
    write.tokens = size_.sequences;
    write.cache.query_heads = static_cast<int>(query_heads());
    write.cache.kv_heads = size_.kv_heads;
    write.cache.head_size = size_.head_size;
    write.qkv = newest_->data();
    write.sequences = sequences_->data();
    write.slots = newest_slots_->data();
    write.ring = size_.slots;
    write.cache.keys = device_keys_->data();
    write.cache.values = device_values_->data();
    write.sequence_stride = shape().sequence_stride;
    write.head_stride = shape().head_stride;
    write.q = device_q_->data();
    DecodeAttentionArgs attend = args();
    attend.settled = true;
    const cudaError_t error = rope_write(write, stream);
    return error == cudaSuccess ? decode_attention(attend, stream) : error;
  }

  void poison() {
    check_cuda(cudaMemset(out_->data(), kPoison, (heads() + kGuardRows) * row_bytes()));
    check_cuda(cudaMemset(lse_->data(), kPoison, (heads() + kGuardRows) * 4));
    check_cuda(
        cudaMemset(workspace_->data() + kSignalBytes, kPoison, workspace_bytes() - kSignalBytes));
    check_cuda(cudaDeviceSynchronize());
  }

  /// Output and log-sum-exp, bit for bit.
  std::pair<std::vector<std::byte>, std::vector<float>> bits() const {
    return {out_->to_host(), lse_->to_host()};
  }

  /// Compares with the host, row by row.
  void check() const {
    const auto [bytes, lse] = bits();
    const std::vector<float> out = kernels::decode(size_.type, bytes);
    AttentionErrors errors(size_.type);
    // The kernel converts sinks to base 2 separately from the products q · k. This adds two
    // roundings of a logit of about 80.
    if (size_.sinks) errors.allow(0x1p-17);
    std::size_t touched = 0;
    for (std::size_t row = 0; row < heads() + kGuardRows; ++row) {
      const std::span<const float> row_out(&out[row * dim()], dim());
      if (row < heads() && lengths_[row / query_heads()] > 0)
        add(errors, row, row_out, lse[row]);
      else  // nothing may be written to these rows
        for (const float value : row_out) touched += std::isnan(value) ? 0 : 1;
    }
    INFO("error of the output " << errors.out() << ", of the naive output " << errors.naive_out()
                                << ", of the log-sum-exp " << errors.lse());
    CHECK(errors.good());
    CHECK(touched == 0);
  }

 private:
  static constexpr std::size_t kGuardRows = 2;

  /// The row of the newest token.
  const float* row(const std::vector<float>& cache, int sequence, int head) const {
    const std::size_t first = (std::size_t(sequence) * size_.kv_heads + head) * size_.slots;
    return &cache[(first + (lengths_[sequence] - 1) % size_.slots) * dim()];
  }

  std::size_t dim() const { return size_.head_size; }
  std::size_t query_heads() const { return std::size_t(size_.group) * size_.kv_heads; }
  std::size_t heads() const { return query_heads() * size_.sequences; }
  std::size_t row_bytes() const { return dim() * bytes_of(size_.type); }
  std::size_t workspace_bytes() const {
    return decode_attention_workspace(shape(), size_.sequences, size_.slots);
  }
  AttentionShape shape() const {
    const std::int64_t head_stride = std::int64_t{size_.slots} * size_.head_size;
    return {.type = size_.type,
            .query_heads = size_.group * size_.kv_heads,
            .kv_heads = size_.kv_heads,
            .head_size = size_.head_size,
            .softmax_scale = size_.scale,
            .sequence_stride = head_stride * size_.kv_heads,
            .head_stride = head_stride,
            .sinks = device_sinks_ ? device_sinks_->data() : nullptr};
  }

  std::unique_ptr<DeviceArray<std::byte>> upload(const std::vector<float>& values) const {
    return std::make_unique<DeviceArray<std::byte>>(encode(size_.type, values));
  }
  void upload_cache(const std::vector<std::int32_t>& lengths) {
    std::vector<float> keys = keys_, values = values_;
    for (std::size_t slot = 0; slot * dim() < keys.size(); ++slot) {
      const std::size_t sequence = slot / (std::size_t(size_.kv_heads) * size_.slots);
      if (static_cast<int>(slot % size_.slots) < lengths[sequence]) continue;
      std::fill_n(&keys[slot * dim()], dim(), std::numeric_limits<float>::quiet_NaN());
      std::fill_n(&values[slot * dim()], dim(), std::numeric_limits<float>::quiet_NaN());
    }
    if (!device_keys_) {
      device_keys_ = upload(keys);
      device_values_ = upload(values);
      return;
    }
    const auto key_bytes = encode(size_.type, keys), value_bytes = encode(size_.type, values);
    device_keys_->assign(key_bytes);
    device_values_->assign(value_bytes);
  }

  void add(AttentionErrors& errors, std::size_t row, std::span<const float> out, float lse) const {
    const std::size_t sequence = row / query_heads(), kv_head = row % query_heads() / size_.group;
    const std::size_t first = (sequence * size_.kv_heads + kv_head) * size_.slots * dim();
    const std::size_t count = std::min(lengths_[sequence], size_.slots) * dim();
    const std::span<const float> query(&q_[row * dim()], dim());
    const std::span<const float> keys(&keys_[first], count), values(&values_[first], count);
    const float sink = size_.sinks ? sinks_[row % query_heads()] : kNoSink;
    errors.add(out, lse, exact_row(query, keys, values, size_.scale, sink),
               naive_row(size_.type, query, keys, values, size_.scale, sink));
  }

  Size size_;
  std::vector<std::int32_t> lengths_;
  std::vector<float> q_, keys_, values_, sinks_;
  std::unique_ptr<DeviceArray<std::byte>> device_q_, device_keys_, device_values_, out_, workspace_;
  std::unique_ptr<DeviceArray<std::byte>> newest_;  // q, keys and values
  std::unique_ptr<DeviceArray<std::int32_t>> device_lengths_, newest_slots_, sequences_;
  std::unique_ptr<DeviceArray<float>> lse_, device_sinks_;
};

void run_and_check(const Size& size, const std::vector<std::int32_t>& lengths,
                   bool equal_keys = false) {
  Batch batch(size, lengths, equal_keys);
  batch.poison();
  const Stream stream;
  check_cuda(decode_attention(batch.args(), stream.get()));
  check_cuda(cudaDeviceSynchronize());
  batch.check();
}

std::string name(const Size& size) {
  const char* types[] = {"bf16", "f16", "f32"};
  return std::string(types[static_cast<int>(size.type)]) + " head size " +
         std::to_string(size.head_size) + " group " + std::to_string(size.group);
}

const std::vector<std::int32_t> kRagged = {1, 63, 0, 64, 65, 127, 128, 129, 300, 16, 15, 17};

}  // namespace

TEST_CASE("decode attention agrees with float64 for every type, head size and group", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const int head_size : {64, 96, 128, 256})
      for (const int group : {1, 2, 3, 4, 7, 8, 13, 16}) {
        const Size size{
            .type = type, .head_size = head_size, .group = group, .sequences = 12, .slots = 300};
        INFO(name(size));
        run_and_check(size, kRagged);
        Size one = size;
        one.kv_heads = 1;
        run_and_check(one, kRagged);
      }
}

TEST_CASE("decode attention agrees with float64 if CTAs process many tiles", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F32}) {
    INFO(name({.type = type}));
    for (const int kv_heads : {2, 8})
      run_and_check({.type = type, .group = 1, .kv_heads = kv_heads, .sequences = 4, .slots = 9000},
                    {9000, 1, 8999, 4097});
    for (const int kv_heads : {1, 8})
      run_and_check(
          {.type = type, .head_size = 64, .group = 2, .kv_heads = kv_heads, .slots = 40000},
          {39999});
    run_and_check(
        {.type = type, .head_size = 64, .group = 1, .kv_heads = 8, .sequences = 70, .slots = 200},
        std::vector<std::int32_t>(70, 200));
  }
}

/// Plans and runs on this GPU as if it had `shared_bytes` bytes of shared memory per thread block.
/// Checks all shapes that fit, and that at least `min_shapes` of them fit.
void check_smaller_gpu(int shared_bytes, Type type, int min_shapes) {
  if (!has_device()) return skip("no CUDA device");
  const SmallerGpu small(shared_bytes);
  DeviceLimits limits;
  check_cuda(device_limits(limits));
  REQUIRE(limits.shared_bytes == shared_bytes);
  int launched = 0;
  for (const int head_size : {64, 96, 128, 256})
    for (const int group : {1, 3, 8, 16}) {
      PairAttention pairs{.type = type, .group = group, .head_size = head_size};
      pairs.table.pairs = 1, pairs.table.max_slots = 64;
      if (!pair_attention_plan(pairs, limits).plan.fits()) continue;
      Size size{
          .type = type, .head_size = head_size, .group = group, .sequences = 12, .slots = 300};
      INFO(shared_bytes << " bytes: " << name(size));
      run_and_check(size, kRagged);
      size.kv_heads = 8, size.sequences = 1, size.slots = 4096;
      run_and_check(size, {4096});
      size.sequences = 8;
      run_and_check(size, {4096, 4095, 1, 0, 77, 2048, 2049, 4000});
      ++launched;
    }
  CHECK(launched >= min_shapes);
}

// 99 KB is the shared memory of GPUs of compute capability 8.6, 8.9 and 12.0. 64 KB is less than
// any supported GPU has.
TEST_CASE("decode attention agrees with float64 in 99 KB of shared memory, bf16", "[gpu]") {
  check_smaller_gpu(101'376, KVLAB_BF16, 15);
}
TEST_CASE("decode attention agrees with float64 in 99 KB of shared memory, fp16", "[gpu]") {
  check_smaller_gpu(101'376, KVLAB_F16, 15);
}
TEST_CASE("decode attention agrees with float64 in 99 KB of shared memory, float32", "[gpu]") {
  check_smaller_gpu(101'376, KVLAB_F32, 10);
}
TEST_CASE("decode attention agrees with float64 in 64 KB of shared memory, bf16", "[gpu]") {
  check_smaller_gpu(65'536, KVLAB_BF16, 9);
}
TEST_CASE("decode attention agrees with float64 in 64 KB of shared memory, fp16", "[gpu]") {
  check_smaller_gpu(65'536, KVLAB_F16, 9);
}
TEST_CASE("decode attention agrees with float64 in 64 KB of shared memory, float32", "[gpu]") {
  check_smaller_gpu(65'536, KVLAB_F32, 6);
}

/// The pairs have as many slots as fit in the shared memory of a cluster. The lengths are close to
/// the number of slots that one CTA gets.
TEST_CASE("decode attention agrees with float64 if few pairs have a cluster each", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const int head_size : {64, 96, 128, 256})
      for (const int group : {1, 3, 8, 16}) {
        const int max_tiles = head_size == 256 ? 2 : 384 / head_size;
        const int tiles = type == KVLAB_F32 ? (head_size == 256 ? 1 : 2) : max_tiles,
                  slots = tiles * 8 * 64;
        const Size size{
            .type = type, .head_size = head_size, .group = group, .sequences = 6, .slots = slots};
        INFO(name(size));
        run_and_check(size, {slots, 511, 0, 513, slots - 1, 1});
      }
}

TEST_CASE("decode attention over rings waits for the newest tokens", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F32})
    for (const int slots : {512, 500, 9000}) {
      Batch batch({.type = type, .head_size = 256, .sequences = 3, .slots = slots},
                  {slots + 300, 3 * slots + 70, slots - 1});
      batch.poison();
      batch.take_out_newest();
      CapturedGraph graph([&](cudaStream_t stream) { return batch.write_and_attend(stream); });
      graph.launch();
      check_cuda(cudaDeviceSynchronize());
      batch.check();
    }
}

TEST_CASE("decode attention of few pairs, small enough for a race checker", "[gpu][small]") {
  if (!has_device()) return skip("no CUDA device");
  for (const int head_size : {64, 96, 128, 256})
    run_and_check({.head_size = head_size, .group = 3, .kv_heads = 1, .sequences = 2, .slots = 700},
                  {700, 65});
}

TEST_CASE("decode attention is correct for logits of +80 and -80, and for equal logits", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const int kv_heads : {1, 2}) {
      const int head_size = kv_heads == 1 ? 256 : 128;
      Size size{.type = type,
                .head_size = head_size,
                .kv_heads = kv_heads,
                .sequences = 12,
                .slots = 300};
      INFO(name(size));
      run_and_check(size, kRagged, true);
      // With this scale, the largest of several hundred logits exceed 80.
      size.scale = 30 / std::sqrt(static_cast<float>(head_size));
      run_and_check(size, kRagged);
    }
}

TEST_CASE("decode attention counts sink logits: whole pairs, split pairs and clusters", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const int head_size : {64, 128, 256})
      for (const int group : {1, 5, 8, 16}) {
        Size size{.type = type,
                  .head_size = head_size,
                  .group = group,
                  .sequences = 12,
                  .slots = 300,
                  .sinks = true};
        INFO(name(size));
        run_and_check(size, kRagged);
        size.scale = 30 / std::sqrt(static_cast<float>(head_size));
        run_and_check(size, kRagged);
        size.sequences = 2, size.slots = 9000;
        run_and_check(size, {9000, 700});
        size.slots = 700;
        run_and_check(size, {700, 65});
        run_and_check(size, {1, 3000}, true);  // the cache is a ring buffer
      }
}

TEST_CASE("decode attention in a captured graph follows lengths that change", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Size& size : {Size{.kv_heads = 2, .sequences = 3, .slots = 1500},
                           Size{.kv_heads = 3, .sequences = 3, .slots = 1500},
                           Size{.kv_heads = 3, .sequences = 3, .slots = 1600},
                           Size{.head_size = 256, .kv_heads = 1, .sequences = 3, .slots = 1500},
                           Size{.type = KVLAB_F32, .sequences = 3, .slots = 1500}}) {
    Batch batch(size, {1, 1, 1});
    CapturedGraph graph(
        [&](cudaStream_t stream) { return decode_attention(batch.args(), stream); });
    const std::vector<std::vector<std::int32_t>> replays = {
        {1, 1, 1}, {64, 65, 63}, {1500, 1, 700}, {0, 1500, 0}, {0, 0, 0}, {1500, 1500, 1500}};
    for (const auto& lengths : replays) {
      batch.set_lengths(lengths);
      batch.poison();
      graph.launch();
      check_cuda(cudaDeviceSynchronize());
      batch.check();
    }
  }
}

TEST_CASE("200 runs of decode attention give equal bits", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Size& size : {Size{.group = 7, .sequences = 3, .slots = 5000},
                           Size{.head_size = 64, .group = 7, .sequences = 3, .slots = 3000},
                           Size{.head_size = 256, .group = 7, .sequences = 3, .slots = 5000},
                           Size{.group = 7, .kv_heads = 4, .sequences = 3, .slots = 5000},
                           Size{.type = KVLAB_F16, .group = 7, .sequences = 3, .slots = 5000},
                           Size{.type = KVLAB_F32, .group = 7, .sequences = 3, .slots = 5000}}) {
    Batch batch(size, {size.slots, 3, 2500});
    const Stream stream;
    batch.poison();
    check_cuda(decode_attention(batch.args(), stream.get()));
    const auto bits = batch.bits().first;
    int different = 0;
    for (int again = 0; again < 200; ++again) {
      batch.poison();
      check_cuda(decode_attention(batch.args(), stream.get()));
      different += batch.bits().first == bits ? 0 : 1;
    }
    CHECK(different == 0);
  }
}

TEST_CASE("decode attention refuses unsupported arguments before any launch") {
  DecodeAttentionArgs args{};
  args.shape = {.type = KVLAB_BF16,
                .query_heads = 32,
                .kv_heads = 8,
                .head_size = 128,
                .softmax_scale = 1,
                .sequence_stride = 8 * 64 * 128,
                .head_stride = 64 * 128};
  args.sequences = 1;
  args.slots = 64;
  CHECK(decode_attention(args, nullptr) == cudaErrorInvalidValue);  // null pointers
  args.shape.head_size = 80;
  CHECK(decode_attention_workspace(args.shape, 1, 64) == 0);
  CHECK(decode_attention(args, nullptr) == cudaErrorInvalidValue);
  args.shape.head_size = 128;
  args.shape.query_heads = 136;
  CHECK(decode_attention(args, nullptr) == cudaErrorInvalidValue);
}
