#include "engine/evaluation/verify/float64_attention.hpp"

#include <algorithm>
#include <cmath>

#include "sim/cache/host_cache.hpp"
#include "traces/base/numeric/quantize.hpp"

namespace kvlab {

void round_all(Dtype dtype, std::span<float> values) {
  for (float& x : values) x = round_to(dtype, x);
}
void round_all(Dtype dtype, std::span<double> values) {
  for (double& x : values) x = static_cast<double>(round_to(dtype, static_cast<float>(x)));
}

AttendedRows AttendedRows::round_values(Dtype dtype) const {
  AttendedRows rows = *this;
  round_all(dtype, std::span(rows.keys));
  round_all(dtype, std::span(rows.values));
  return rows;
}

Float64Attention::Float64Attention(const RowSpec& row, std::uint32_t head_size, Positions positions)
    : rope_(row.rope),
      head_size_(head_size),
      window_(row.window),
      scale_(row.scale),
      softcap_(row.softcap),
      positions_(positions) {}

void Float64Attention::rotate(const float* x, std::uint32_t position, double* to) const {
  std::copy_n(x, head_size_, to);
  const std::size_t half = rope_.inv_freq.size();
  for (std::size_t i = 0; i < half; ++i) {
    const double angle = static_cast<double>(position) * static_cast<double>(rope_.inv_freq[i]);
    const double c = std::cos(angle) * rope_.factor, s = std::sin(angle) * rope_.factor;
    const double a = x[i], b = x[i + half];
    to[i] = a * c - b * s;
    to[i + half] = b * c + a * s;
  }
}

std::vector<double> Float64Attention::query(const float* x, std::uint32_t position,
                                            std::uint32_t age) const {
  std::vector<double> y(head_size_);
  rotate(x, positions_ == Positions::original ? position : age, y.data());
  return y;
}

std::size_t Float64Attention::first_visible(const LiveSet& live, std::uint32_t position) const {
  const auto positions = live.positions();
  const auto first = std::ranges::lower_bound(positions, first_seen(window_, position));
  return static_cast<std::size_t>(first - positions.begin());
}

AttentionRow Float64Attention::row(std::span<const double> query, const AttendedRows& rows,
                                   std::size_t first, std::size_t end, const float* sink,
                                   std::optional<Dtype> rounding) const {
  AttentionRow row{.out = std::vector<double>(rows.dim)};
  row.p.reserve(end - first);
  for (std::size_t age = first; age < end; ++age) {
    const double* const key = &rows.keys[age * rows.dim];
    double logit = 0;
    for (std::size_t d = 0; d < rows.dim; ++d) logit += query[d] * key[d];
    logit *= scale_;
    row.p.push_back(softcap_ > 0 ? softcap_ * std::tanh(logit / softcap_) : logit);
  }
  double largest = *std::ranges::max_element(row.p);
  if (sink) largest = std::max(largest, double{*sink});
  double sum = sink ? std::exp(*sink - largest) : 0;
  for (double& x : row.p) sum += x = std::exp(x - largest);
  for (double& x : row.p) x /= sum;

  std::vector<double> sizes(rows.dim);
  for (std::size_t age = first; age < end; ++age) {
    const double p = row.p[age - first];
    const double weight =
        rounding ? static_cast<double>(round_to(*rounding, static_cast<float>(p))) : p;
    const double* const value = &rows.values[age * rows.dim];
    for (std::size_t d = 0; d < rows.dim; ++d) {
      row.out[d] += weight * value[d];
      sizes[d] += p * std::fabs(value[d]);
    }
  }
  if (rounding) round_all(*rounding, std::span(row.out));
  row.scale = *std::ranges::max_element(sizes);
  return row;
}

void HeadTokens::append(const Tensors& layer, std::uint32_t kv_head) {
  const std::size_t dim = attention_.head_size(), before = k.size() / dim,
                    queries = layer.q.size() / layer.tokens, keys = layer.k.size() / layer.tokens;
  const auto add = [](std::vector<float>& to, const float* from, std::size_t count) {
    to.insert(to.end(), from, from + count);
  };
  rotated_.resize((before + layer.tokens) * dim);
  for (std::size_t i = 0; i < layer.tokens; ++i) {
    const float* const key = layer.k.data() + i * keys + kv_head * dim;
    add(q, layer.q.data() + i * queries + kv_head * group_ * dim, group_ * dim);
    add(k, key, dim);
    add(v, layer.v.data() + i * keys + kv_head * dim, dim);
    attention_.rotate(key, static_cast<std::uint32_t>(before + i), &rotated_[(before + i) * dim]);
  }
  rope_.covering(static_cast<std::uint32_t>(before + layer.tokens));
}

AttendedRows HeadTokens::attend(const LiveSet& live, const Append& append,
                                std::optional<Dtype> rounding) const {
  const std::size_t dim = attention_.head_size(), count = live.size();
  AttendedRows rows{.dim = dim,
                    .keys = std::vector<double>(count * dim),
                    .values = std::vector<double>(count * dim)};
  for (std::uint32_t age = 0; age < count; ++age) {
    const std::uint32_t position = live.positions()[age];
    double *const key = &rows.keys[age * dim], *const value = &rows.values[age * dim];
    // The tokens of a prompt are quantized after all its queries have attended.
    const bool waits = append.tokens > 1 && position >= append.first;
    if (!waits && !live.format(age).exact()) {
      quantize(live, age, rounding, key, value);
      continue;
    }
    std::copy_n(&v[position * dim], dim, value);
    if (attention_.positions() == Positions::cache)
      attention_.rotate(&k[position * dim], age, key);
    else
      std::copy_n(&rotated_[position * dim], dim, key);
  }
  return rows;
}

/// The dequantized key and value of the live token at `age`.
void HeadTokens::quantize(const LiveSet& live, std::size_t age, std::optional<Dtype> rounding,
                          double* key, double* value) const {
  const std::size_t dim = attention_.head_size();
  const std::uint32_t position = live.positions()[age];
  std::vector<float> own_key(dim), own_value(&v[position * dim], &v[position * dim] + dim);
  rope_.covering(position + 1).rotate(&k[position * dim], dim, position, own_key.data());
  if (rounding) round_all(*rounding, std::span(own_key));
  quantize_token(demotion_path(live.tier_plan(), -1, static_cast<int>(live.tier(age))), own_key,
                 own_value, RowState::plain);
  const auto read_back = [dim](const std::vector<float>& from, double* to) {
    std::ranges::copy(from, to);
    hadamard_rotate(std::span(to, dim));
    for (std::size_t d = 0; d < dim; ++d) to[d] /= kQuantBlock;
  };
  read_back(own_key, key);
  read_back(own_value, value);
}

}  // namespace kvlab
