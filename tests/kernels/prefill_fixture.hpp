// The queries of an append, with the keys and values that they see, on the host and on the device.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "kernels/attention.hpp"
#include "tests/device.hpp"
#include "tests/kernels/attention_reference.hpp"

namespace kvlab::kernels {

inline constexpr int kPoison = 0xFF;  // all ones is NaN in every type

struct PrefillSize {
  Type type = KVLAB_BF16;
  int head_size = 128, group = 4, kv_heads = 2, first = 0, queries = 64;
  float scale = 0;      ///< 0: 1 / sqrt(head_size)
  bool ragged = false;  ///< KV head h has 41 * h more older tokens, and its slots begin anywhere
  bool equal_keys = false;
  int window = 0;
  bool sinks = false;
  bool parts = false;  ///< keys are split into parts

  std::string text() const {
    const char* types[] = {"bf16", "f16", "f32"};
    return std::string(types[static_cast<int>(type)]) + " head size " + std::to_string(head_size) +
           " group " + std::to_string(group) + " first " + std::to_string(first) + " queries " +
           std::to_string(queries) + (ragged ? " ragged" : "") +
           (window > 0 ? " window " + std::to_string(window) : "") + (sinks ? " sinks" : "") +
           (parts ? " parts" : "");
  }
};

/// A chunk of a prompt. Slots that no query sees, and the rows after each output, are poisoned.
class PrefillChunk {
 public:
  explicit PrefillChunk(const PrefillSize& size) : size_(size) {
    if (size_.scale == 0) size_.scale = 1 / std::sqrt(static_cast<float>(size_.head_size));
    for (int h = 0; h < size_.kv_heads; ++h) {
      older_.push_back(size_.ragged ? 41 * h : 0);
      first_slot_.push_back(static_cast<std::int64_t>(all_slots_));
      all_slots_ += visible(h) + kUnusedSlots + (size_.ragged ? 3 * h : 0);
    }
    std::mt19937 random(23);
    q_ = random_values(size_.type, rows() * dim(), random);
    keys_ = random_values(size_.type, all_slots_ * dim(), random);
    values_ = random_values(size_.type, all_slots_ * dim(), random);
    if (size_.equal_keys)
      for (std::size_t i = dim(); i < keys_.size(); ++i) keys_[i] = keys_[i % dim()];
    for (int h = 0; h < size_.kv_heads; ++h) {
      const std::size_t end = h + 1 < size_.kv_heads ? begin(h + 1) : all_slots_;
      for (std::size_t i = (begin(h) + visible(h)) * dim(); i < end * dim(); ++i)
        keys_[i] = values_[i] = std::numeric_limits<float>::quiet_NaN();
    }
    device_older_ = std::make_unique<DeviceArray<std::int32_t>>(std::span(older_));
    device_first_slot_ = std::make_unique<DeviceArray<std::int64_t>>(std::span(first_slot_));
    sinks_ = sample_sinks(query_heads(), size_.sinks);
    if (size_.sinks) device_sinks_ = std::make_unique<DeviceArray<float>>(std::span(sinks_));
    device_q_ = upload(q_);
    device_keys_ = upload(keys_);
    device_values_ = upload(values_);
    out_ = std::make_unique<DeviceArray<std::byte>>((rows() + kGuardRows) * row_bytes());
    lse_ = std::make_unique<DeviceArray<float>>(rows() + kGuardRows);
    softmax_ = std::make_unique<DeviceArray<RowSoftmax>>(rows() + kGuardRows);
    kvlab_prefill_args args = this->args();
    args.keys_end = keys_end();
    workspace_ =
        std::make_unique<DeviceArray<std::byte>>(size_.parts ? prefill_workspace(args) : 0);
    poison();
  }

  void poison() {
    check_cuda(cudaMemset(out_->data(), kPoison, (rows() + kGuardRows) * row_bytes()));
    if (size_.parts) check_cuda(cudaMemset(workspace_->data(), kPoison, prefill_workspace(args())));
    check_cuda(cudaMemset(lse_->data(), kPoison, (rows() + kGuardRows) * sizeof(float)));
    check_cuda(cudaMemset(softmax_->data(), kPoison, (rows() + kGuardRows) * sizeof(RowSoftmax)));
    check_cuda(cudaDeviceSynchronize());
  }

  cudaError_t enqueue(cudaStream_t stream) const {
    const std::size_t stride = begin(size_.kv_heads > 1 ? 1 : 0) * dim();
    return prefill_attention(args(),
                             {.head_stride = size_.ragged ? 0 : static_cast<std::int64_t>(stride),
                              .sinks = device_sinks_ ? device_sinks_->data() : nullptr,
                              .window = size_.window},
                             stream);
  }
  kvlab_prefill_args args() const {
    return {.type = size_.type,
            .query_heads = size_.group * size_.kv_heads,
            .kv_heads = size_.kv_heads,
            .head_size = size_.head_size,
            .softmax_scale = size_.scale,
            .first = size_.first,
            .queries = size_.queries,
            .q = device_q_->data(),
            .keys = device_keys_->data(),
            .values = device_values_->data(),
            .first_slot = size_.ragged ? first_slot() : nullptr,
            .older = older(),
            .out = out_->data(),
            .lse = lse_->data(),
            .rows = softmax_->data(),
            .workspace = workspace_ ? workspace_->data() : nullptr,
            .keys_end = size_.parts ? keys_end() : 0};
  }

  const PrefillSize& size() const { return size_; }
  std::size_t dim() const { return size_.head_size; }
  std::size_t query_heads() const { return std::size_t(size_.group) * size_.kv_heads; }
  std::size_t rows() const { return query_heads() * size_.queries; }
  std::size_t row_bytes() const { return dim() * bytes_of(size_.type); }
  /// first(): the number of slots of a KV head before the slot of the first query. visible(): the
  /// number of slots that at least one query sees.
  std::size_t first(int kv_head) const { return std::size_t(size_.first) + older_[kv_head]; }
  std::size_t visible(int kv_head) const { return first(kv_head) + size_.queries; }
  std::size_t begin(int kv_head) const { return first_slot_[kv_head]; }
  std::size_t all_slots() const { return all_slots_; }

  float sink(std::size_t row) const { return size_.sinks ? sinks_[row % query_heads()] : kNoSink; }
  std::span<const float> query(std::size_t row) const { return {&q_[row * dim()], dim()}; }
  int kv_head(std::size_t row) const { return static_cast<int>(row % query_heads()) / size_.group; }
  /// The number of slots that a row sees. keys() and values(): their keys and values.
  std::size_t seen_by(std::size_t row) const {
    return first(kv_head(row)) + row / query_heads() + 1;
  }
  std::span<const float> keys(std::size_t row) const { return part(keys_, row); }
  std::span<const float> values(std::size_t row) const { return part(values_, row); }

  const void* device_q() const { return device_q_->data(); }
  const void* device_keys() const { return device_keys_->data(); }
  const std::int32_t* older() const { return size_.ragged ? device_older_->data() : nullptr; }
  const std::int64_t* first_slot() const { return device_first_slot_->data(); }
  const RowSoftmax* softmax() const { return softmax_->data(); }
  std::vector<std::byte> bits() const { return out_->to_host(); }
  std::vector<float> out() const { return kernels::decode(size_.type, out_->to_host()); }
  std::vector<float> lse() const { return lse_->to_host(); }
  std::vector<RowSoftmax> softmax_rows() const { return softmax_->to_host(); }

 private:
  static constexpr std::size_t kGuardRows = 2;
  static constexpr std::size_t kUnusedSlots = 5;

  std::span<const float> part(const std::vector<float>& all, std::size_t row) const {
    const std::size_t end = seen_by(row), window = size_.window;
    const std::size_t from = window > 0 && end > window ? end - window : 0;
    return {&all[(begin(kv_head(row)) + from) * dim()], (end - from) * dim()};
  }
  std::unique_ptr<DeviceArray<std::byte>> upload(const std::vector<float>& values) const {
    return std::make_unique<DeviceArray<std::byte>>(encode(size_.type, values));
  }

  PrefillSize size_;
  std::vector<std::int32_t> older_;       // [kv_head]
  std::vector<std::int64_t> first_slot_;  // [kv_head]
  std::size_t all_slots_ = 0;
  std::vector<float> q_, keys_, values_, sinks_;
  int keys_end() const {
    int end = 0;
    for (int h = 0; h < size_.kv_heads; ++h) end = std::max(end, static_cast<int>(visible(h)));
    return end;
  }
  std::unique_ptr<DeviceArray<std::byte>> device_q_, device_keys_, device_values_, out_, workspace_;
  std::unique_ptr<DeviceArray<float>> lse_, device_sinks_;
  std::unique_ptr<DeviceArray<RowSoftmax>> softmax_;
  std::unique_ptr<DeviceArray<std::int32_t>> device_older_;
  std::unique_ptr<DeviceArray<std::int64_t>> device_first_slot_;
};

}  // namespace kvlab::kernels
