#include "tests/kernels/attention_reference.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace kvlab::kernels {
namespace {

template <class T>
std::vector<std::byte> bytes_of_all(std::span<const float> values, T (*convert)(float)) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const T element = convert(values[i]);
    std::memcpy(&bytes[i * sizeof(T)], &element, sizeof(T));
  }
  return bytes;
}

template <class T>
std::vector<float> values_of_all(std::span<const std::byte> bytes, float (*convert)(T)) {
  std::vector<float> values(bytes.size() / sizeof(T));
  for (std::size_t i = 0; i < values.size(); ++i) {
    T element;
    std::memcpy(static_cast<void*>(&element), &bytes[i * sizeof(T)], sizeof(T));
    values[i] = convert(element);
  }
  return values;
}

double epsilon(Type type) {
  switch (type) {
    case KVLAB_BF16:
      return std::ldexp(1.0, -8);
    case KVLAB_F16:
      return std::ldexp(1.0, -11);
    case KVLAB_F32:
      break;
  }
  return std::ldexp(1.0, -23);
}

}  // namespace

float round_to(Type type, float value) {
  switch (type) {
    case KVLAB_BF16:
      return __bfloat162float(__float2bfloat16(value));
    case KVLAB_F16:
      return __half2float(__float2half(value));
    case KVLAB_F32:
      break;
  }
  return value;
}

std::vector<std::byte> encode(Type type, std::span<const float> values) {
  switch (type) {
    case KVLAB_BF16:
      return bytes_of_all<__nv_bfloat16>(values, [](float v) { return __float2bfloat16(v); });
    case KVLAB_F16:
      return bytes_of_all<__half>(values, [](float v) { return __float2half(v); });
    case KVLAB_F32:
      break;
  }
  return bytes_of_all<float>(values, [](float v) { return v; });
}

std::vector<float> decode(Type type, std::span<const std::byte> bytes) {
  switch (type) {
    case KVLAB_BF16:
      return values_of_all<__nv_bfloat16>(bytes,
                                          [](__nv_bfloat16 v) { return __bfloat162float(v); });
    case KVLAB_F16:
      return values_of_all<__half>(bytes, [](__half v) { return __half2float(v); });
    case KVLAB_F32:
      break;
  }
  return values_of_all<float>(bytes, [](float v) { return v; });
}

std::vector<float> random_values(Type type, std::size_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = round_to(type, normal(random));
  return values;
}

AttentionRow exact_row(std::span<const float> query, std::span<const float> keys,
                       std::span<const float> values, float scale, float sink) {
  const std::size_t dim = query.size(), count = keys.size() / dim;
  std::vector<double> weights(count);
  double max = sink;
  for (std::size_t j = 0; j < count; ++j) {
    double dot = 0;
    for (std::size_t d = 0; d < dim; ++d) dot += double{query[d]} * keys[j * dim + d];
    weights[j] = dot * scale;
    max = std::max(max, weights[j]);
  }
  AttentionRow row{std::vector<double>(dim), 0};
  double sum = std::exp(sink - max);
  for (std::size_t j = 0; j < count; ++j) {
    const double weight = std::exp(weights[j] - max);
    sum += weight;
    for (std::size_t d = 0; d < dim; ++d) row.out[d] += weight * values[j * dim + d];
  }
  for (double& out : row.out) out /= sum;
  row.lse = max + std::log(sum);
  return row;
}

AttentionRow naive_row(Type type, std::span<const float> query, std::span<const float> keys,
                       std::span<const float> values, float scale, float sink) {
  const std::size_t dim = query.size(), count = keys.size() / dim;
  std::vector<float> weights(count);
  float max = sink;
  for (std::size_t j = 0; j < count; ++j) {
    float dot = 0;
    for (std::size_t d = 0; d < dim; ++d) dot += query[d] * keys[j * dim + d];
    weights[j] = dot * scale;
    max = std::max(max, weights[j]);
  }
  std::vector<float> out(dim);
  float sum = std::exp(sink - max);
  for (std::size_t j = 0; j < count; ++j) {
    const float weight = std::exp(weights[j] - max);
    sum += weight;
    const float stored = round_to(type, weight);
    for (std::size_t d = 0; d < dim; ++d) out[d] += stored * values[j * dim + d];
  }
  AttentionRow row{std::vector<double>(dim), double{max} + std::log(sum)};
  for (std::size_t d = 0; d < dim; ++d) row.out[d] = round_to(type, out[d] / sum);
  return row;
}

std::vector<float> sample_sinks(std::size_t heads, bool some) {
  std::vector<float> sinks;
  for (std::size_t head = 0; some && head < heads; ++head)
    sinks.push_back(head % 5 == 3   ? 80
                    : head % 5 == 4 ? -80
                    : head % 7 == 6 ? kNoSink
                                    : static_cast<float>(head % 7) - 2);
  return sinks;
}

void AttentionErrors::add(std::span<const float> out, float lse, const AttentionRow& exact,
                          const AttentionRow& naive) {
  finite_ = finite_ && std::isfinite(lse);
  for (std::size_t d = 0; d < out.size(); ++d) {
    finite_ = finite_ && std::isfinite(out[d]);
    out_ = std::max(out_, std::abs(out[d] - exact.out[d]));
    naive_out_ = std::max(naive_out_, std::abs(naive.out[d] - exact.out[d]));
    largest_out_ = std::max(largest_out_, std::abs(exact.out[d]));
  }
  lse_ = std::max(lse_, std::abs(lse - exact.lse));
  naive_lse_ = std::max(naive_lse_, std::abs(naive.lse - exact.lse));
  largest_lse_ = std::max(largest_lse_, std::abs(exact.lse));
}

bool AttentionErrors::good() const {
  // If each logit has an error of at most e, the numerator and the denominator of each softmax
  // weight have a relative error of at most e. The weight then has a relative error of at most 2 e,
  // so the output has an error of at most 2 e times the largest value.
  return finite_ && out_ <= 2 * naive_out_ + (epsilon(type_) + 2 * logit_error_) * largest_out_ &&
         lse_ <= 2 * naive_lse_ + epsilon(KVLAB_F32) * largest_lse_ + logit_error_;
}

}  // namespace kvlab::kernels
