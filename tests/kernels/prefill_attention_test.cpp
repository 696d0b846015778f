#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/attention.hpp"
#include "tests/catch.hpp"
#include "tests/device.hpp"
#include "tests/kernels/attention_reference.hpp"
#include "tests/kernels/prefill_fixture.hpp"
#include "tests/skip.hpp"

using namespace kvlab;
using namespace kvlab::kernels;

namespace {

double max_product(const PrefillChunk& chunk, std::size_t row) {
  const auto query = chunk.query(row), keys = chunk.keys(row);
  double largest = -std::numeric_limits<double>::infinity();
  for (std::size_t j = 0; j * query.size() < keys.size(); ++j) {
    double product = 0;
    for (std::size_t d = 0; d < query.size(); ++d)
      product += double{query[d]} * keys[j * query.size() + d];
    largest = std::max(largest, product);
  }
  return largest;
}

void check(const PrefillChunk& chunk) {
  const std::vector<float> out = chunk.out(), lse = chunk.lse();
  const std::vector<RowSoftmax> softmax = chunk.softmax_rows();
  const PrefillSize& size = chunk.size();
  AttentionErrors errors(size.type);
  double lse2_error = 0, product_error = 0;
  for (std::size_t row = 0; row < chunk.rows(); ++row) {
    const auto exact = exact_row(chunk.query(row), chunk.keys(row), chunk.values(row), size.scale,
                                 chunk.sink(row));
    errors.add(std::span(&out[row * chunk.dim()], chunk.dim()), lse[row], exact,
               naive_row(size.type, chunk.query(row), chunk.keys(row), chunk.values(row),
                         size.scale, chunk.sink(row)));
    const double lse2 = exact.lse / std::log(2.0), product = max_product(chunk, row);
    lse2_error = std::max(lse2_error, std::abs(softmax[row].lse2 - lse2) / (1 + std::abs(lse2)));
    product_error = std::max(
        product_error, std::abs(softmax[row].max_product - product) / (1 + std::abs(product)));
  }
  INFO("error " << errors.out() << ", naive " << errors.naive_out());
  CHECK(errors.good());
  CHECK(lse2_error < 4e-6);
  CHECK(product_error < 1e-5);
  const auto guard = std::span(out).subspan(chunk.rows() * chunk.dim());
  CHECK(std::all_of(guard.begin(), guard.end(), [](float v) { return std::isnan(v); }));
  CHECK(std::isnan(lse[chunk.rows()]));
  CHECK(std::isnan(softmax[chunk.rows()].lse2));
}

void run_and_check(const PrefillSize& size) {
  INFO(size.text());
  const PrefillChunk chunk(size);
  const Stream stream;
  check_cuda(chunk.enqueue(stream.get()));
  check_cuda(cudaDeviceSynchronize());
  check(chunk);
}

}  // namespace

TEST_CASE("prefill attention agrees with float64 for every type, head size and group", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const int head_size : {64, 96, 128, 256})
      for (const int group : {1, 2, 3, 4, 7, 8, 13, 16})
        run_and_check(
            {.type = type, .head_size = head_size, .group = group, .first = 37, .queries = 67});
}

TEST_CASE("prefill attention shows a query only its sliding window", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const int head_size : {64, 128, 256})
      for (const int group : {1, 3, 8})
        for (const int window : {1, 5, 32, 63, 64, 65, 200, 1000})
          run_and_check({.type = type,
                         .head_size = head_size,
                         .group = group,
                         .first = window % 2 == 0 ? 150 : 0,
                         .queries = 131,
                         .ragged = window == 64,
                         .window = window});
}

TEST_CASE("prefill attention counts sink logits, with a window and without", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const int head_size : {64, 96, 128, 256})
      for (const int group : {1, 5, 8, 16})
        for (const int window : {0, 40})
          for (const float scale : {0.0f, 30 / std::sqrt(static_cast<float>(head_size))})
            run_and_check({.type = type,
                           .head_size = head_size,
                           .group = group,
                           .first = 30,
                           .queries = 131,
                           .scale = scale,
                           .ragged = group == 5,
                           .window = window,
                           .sinks = true});
}

TEST_CASE("prefill attention supports any first position and number of queries", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F32})
    for (const int first : {0, 1, 63, 64, 65, 500})
      for (const int queries : {1, 31, 32, 33, 64, 129, 200})
        run_and_check({.type = type, .kv_heads = 1, .first = first, .queries = queries});
}

TEST_CASE("prefill attention with keys in parts agrees with float64", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const int head_size : {64, 96, 128, 256})
      for (const int first : {0, 255, 700}) {
        PrefillSize size{.type = type,
                         .head_size = head_size,
                         .group = first == 255 ? 16 : 2,
                         .kv_heads = first == 700 ? 2 : 1,
                         .first = first,
                         .queries = first == 0 ? 270 : 5,
                         .ragged = first == 700,
                         .parts = true};
        run_and_check(size);
        size.scale = 30 / std::sqrt(static_cast<float>(head_size));
        if (first == 0) run_and_check(size);
      }
}

TEST_CASE("prefill attention supports KV heads of unequal length, wherever they begin", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F32})
    for (const int first : {0, 5})
      run_and_check({.type = type, .kv_heads = 3, .first = first, .queries = 100, .ragged = true});
}

TEST_CASE("prefill attention is correct for logits of +80 and -80, and for equal logits", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const int head_size : {128, 256})
      for (const int window : {0, 40}) {
        PrefillSize size{.type = type,
                         .head_size = head_size,
                         .first = 70,
                         .queries = 130,
                         .equal_keys = true,
                         .window = window};
        run_and_check(size);
        size.equal_keys = false;
        // With this scale, the largest of several hundred logits exceed 80.
        size.scale = 30 / std::sqrt(static_cast<float>(head_size));
        run_and_check(size);
      }
}

TEST_CASE("200 runs of prefill attention give equal bits, plain and in a captured graph", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32}) {
    const bool wide = type != KVLAB_F16;
    PrefillChunk chunk({.type = type,
                        .head_size = wide ? 256 : 128,
                        .first = 100,
                        .queries = 300,
                        .window = wide ? 130 : 0});
    const Stream stream;
    check_cuda(chunk.enqueue(stream.get()));
    const auto bits = chunk.bits();
    CapturedGraph graph([&](cudaStream_t captured) { return chunk.enqueue(captured); });
    int different = 0;
    for (int again = 0; again < 200; ++again) {
      chunk.poison();
      if (again % 2 == 0)
        check_cuda(chunk.enqueue(stream.get()));
      else
        graph.launch();
      different += chunk.bits() == bits ? 0 : 1;
    }
    CHECK(different == 0);
  }
}

TEST_CASE("prefill attention refuses unsupported arguments before any launch") {
  kvlab_prefill_args args{.type = KVLAB_BF16,
                          .query_heads = 32,
                          .kv_heads = 8,
                          .head_size = 128,
                          .softmax_scale = 1,
                          .queries = 1};
  CHECK(prefill_attention(args, {}, nullptr) == cudaErrorInvalidValue);  // null pointers
  args.head_size = 80;
  CHECK(prefill_attention(args, {}, nullptr) == cudaErrorInvalidValue);
  args.head_size = 128;
  args.queries = 0;
  CHECK(prefill_attention(args, {}, nullptr) == cudaErrorInvalidValue);
  args.queries = 3;
  args.keys_end = 257;  // requires two parts
  CHECK(prefill_workspace(args) == 3 * 32 * 2 * (128 + 4) * sizeof(float));
}
