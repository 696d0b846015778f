#include "engine/cuda/model/device_model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>

#include "engine/checkpoint/checkpoint.hpp"
#include "engine/checkpoint/weight_bytes.hpp"
#include "engine/cuda/fill.hpp"
#include "engine/cuda/model/weight_plan.hpp"
#include "kernels/host/transfer.hpp"
#include "kernels/linear/experts.hpp"

namespace kvlab {
namespace {

constexpr float kDeviation =
    0.02f;  // standard deviation of random weights: initializer_range of transformers
constexpr std::size_t kConvertedAtOnce = 1 << 22;  // elements
constexpr std::size_t kRowsAtOnce = 64;            // rows gathered at once

/// Throws std::runtime_error for a model that kernels/ does not support.
void refuse_unsupported(const ModelConfig& config) {
  const auto refuse = [&](const std::string& what) {
    throw std::runtime_error(fmt::format("{}: {}; use --device cpu", config.name, what));
  };
  constexpr std::uint32_t max_group = 16;
  if (!kernels::is_head_size(static_cast<int>(config.head_size)))
    refuse(fmt::format("head size {}: the CUDA kernels support 64, 96, 128 and 256",
                       config.head_size));
  const std::uint32_t group = config.query_heads / config.kv_heads;
  if (group > max_group)
    refuse(fmt::format("{} query heads per KV head: the CUDA kernels support at most {}", group,
                       max_group));
  const Experts& experts = config.experts;
  if (experts.count > kernels::kMaxExperts || experts.chosen > kernels::kMaxChosen)
    refuse(fmt::format("{} experts of {}: the CUDA kernels support at most {} of {}",
                       experts.chosen, experts.count, kernels::kMaxChosen, kernels::kMaxExperts));
  for (const std::uint32_t width : {config.hidden, config.mlp, experts.mlp})
    if (width % 8 != 0)
      refuse(fmt::format("a width of {}: the CUDA kernels support multiples of 8", width));
}

/// Uploads the tensors of a checkpoint to the device.
class Upload {
 public:
  Upload(TensorReader& tensors, Dtype dtype) : tensors_(tensors), dtype_(dtype) {}

  void copy(const WeightPart& part, std::byte* to) {
    const TensorView& tensor = tensors_.take(part.name, part.shape);
    const std::size_t element = bytes_of(tensor.dtype), count = part.elements();
    if (!part.source) return put(tensor.dtype, tensor.data.data(), count, to);
    const std::size_t all = count / part.columns;
    for (std::size_t first = 0; first < all; first += kRowsAtOnce) {
      const std::size_t rows = std::min(kRowsAtOnce, all - first);
      gathered_.resize(rows * part.columns * element);
      gather(part, first, rows, tensor.data.data(), element);
      put(tensor.dtype, gathered_.data(), rows * part.columns,
          to + first * part.columns * bytes_of(dtype_));
    }
  }

 private:
  /// Gathers several rows together, because elements of neighbouring rows may be in the same cache
  /// line of the file.
  void gather(const WeightPart& part, std::size_t first, std::size_t rows, const std::byte* from,
              std::size_t element) {
    std::vector<RowSource> sources;
    for (std::size_t row = 0; row < rows; ++row) sources.push_back(part.source(first + row));
    for (std::size_t column = 0; column < part.columns; ++column)
      for (std::size_t row = 0; row < rows; ++row)
        std::memcpy(&gathered_[(row * part.columns + column) * element],
                    from + (sources[row].first + column * sources[row].step) * element, element);
  }

  void put(Dtype dtype, const std::byte* from, std::size_t count, std::byte* to) {
    const auto copy_bytes = [](std::byte* at, const std::byte* data, std::size_t bytes) {
      cuda::check(cudaMemcpy(at, data, bytes, cudaMemcpyHostToDevice), "copying weights");
    };
    if (dtype == dtype_) return copy_bytes(to, from, count * bytes_of(dtype));
    for (std::size_t first = 0; first < count; first += kConvertedAtOnce) {
      wide_.resize(std::min(kConvertedAtOnce, count - first));
      narrow_.resize(wide_.size() * bytes_of(dtype_));
      to_float(dtype, from + first * bytes_of(dtype), wide_.size(), wide_.data());
      from_float(dtype_, wide_.data(), wide_.size(), narrow_.data());
      copy_bytes(to + first * bytes_of(dtype_), narrow_.data(), narrow_.size());
    }
  }

  TensorReader& tensors_;
  Dtype dtype_;
  std::vector<float> wide_;
  std::vector<std::byte> narrow_, gathered_;
};

/// Throws std::runtime_error if a value is not finite, and names the first tensor with such a
/// value.
void check_finite(const TensorReader& tensors, const WeightPlan& plan, Dtype dtype,
                  const std::byte* base) {
  for (const auto& part : plan.parts) {
    bool found = false;
    cuda::check(cuda::has_not_finite(kernel_type(dtype), base + part.offset, part.elements(), found,
                                     nullptr),
                "checking the weights");
    if (found) tensors.refuse_not_finite(part.name, fmt::format(" in {}", torch_name(dtype)));
  }
}

/// Allocates memory for the weights. Throws std::runtime_error if they do not fit.
cuda::DeviceBuffer allocate(const ModelConfig& config, Dtype dtype, std::size_t bytes) {
  const cuda::MemoryInfo memory = cuda::memory_info();
  if (bytes > memory.free)
    throw std::runtime_error(
        fmt::format("device memory: the weights of {} need {} in {}, but only {} of {} are free; "
                    "use --device cpu, or a model of at most {:.1f} billion parameters",
                    config.name, cuda::bytes_text(bytes), torch_name(dtype),
                    cuda::bytes_text(memory.free), cuda::bytes_text(memory.total),
                    static_cast<double>(memory.free) / static_cast<double>(bytes_of(dtype)) / 1e9));
  return {bytes, "the weights of " + config.name};
}

}  // namespace

kernels::Type kernel_type(Dtype dtype) {
  if (dtype == Dtype::bf16) return KVLAB_BF16;
  return dtype == Dtype::f16 ? KVLAB_F16 : KVLAB_F32;
}

DeviceModel::DeviceModel(ModelConfig config, Dtype dtype) : DeviceShape(std::move(config), dtype) {
  refuse_unsupported(config_);
  block_ = allocate(config_, dtype_, plan_weights(config_, dtype_, nullptr).bytes);
  weights_ = plan_weights(config_, dtype_, block_.data()).weights;
}

DeviceModel DeviceModel::load(const std::filesystem::path& directory, std::optional<Dtype> dtype) {
  ModelConfig config = load_model_config(directory);
  const Checkpoint checkpoint = Checkpoint::open(directory);
  const std::array<std::size_t, 2> embedding{config.vocab, config.hidden};
  if (!dtype) dtype = checkpoint.at("model.embed_tokens.weight", embedding).dtype;

  DeviceModel model(std::move(config), *dtype);
  model.directory_ = directory;
  const WeightPlan plan = plan_weights(model.config_, model.dtype_, model.block_.data());
  TensorReader tensors(checkpoint);
  Upload upload(tensors, model.dtype_);
  for (const WeightPart& part : plan.parts) upload.copy(part, model.block_.data() + part.offset);
  if (model.config_.tied_head)
    tensors.take_copy("lm_head.weight", plan.parts.front().name, plan.parts.front().shape);
  tensors.refuse_rest();
  check_finite(tensors, plan, model.dtype_, model.block_.data());
  model.read_sinks();
  return model;
}

DeviceModel DeviceModel::random(ModelConfig config, std::uint64_t seed) {
  const Dtype dtype = config.weights_dtype;
  DeviceModel model(std::move(config), dtype);
  const WeightPlan plan = plan_weights(model.config_, dtype, model.block_.data());
  for (const WeightPart& part : plan.parts) {
    std::byte* const to = model.block_.data() + part.offset;
    const std::size_t count = part.elements();
    const cudaError_t error =
        part.initial == Initial::normal
            ? cuda::fill_normal(model.type(), to, count, kDeviation, seed ^ (part.offset << 8),
                                nullptr)
            : cuda::fill_value(model.type(), to, count, part.initial == Initial::ones ? 1.0f : 0.0f,
                               nullptr);
    cuda::check(error, "sampling " + part.name);
  }
  cuda::check(cudaDeviceSynchronize(), "sampling the weights");
  model.read_sinks();
  return model;
}

/// Copies the sink logits as float32, which attention and its checks need.
void DeviceModel::read_sinks() {
  if (!config_.sinks) return;
  std::vector<float> all;
  for (std::size_t layer = 0; layer < config_.layers; ++layer) {
    std::vector<float>& own = config_.rows[layer].sinks;
    own.resize(config_.query_heads);
    const auto stored =
        cuda::download(std::span(static_cast<const std::byte*>(weights_.layers[layer].sinks),
                                 own.size() * bytes_of(dtype_)));
    to_float(dtype_, stored.data(), own.size(), own.data());
    all.insert(all.end(), own.begin(), own.end());
  }
  sinks_ = cuda::upload(all, "sink logits");
}

const float* DeviceShape::sinks(std::uint32_t layer) const {
  return config_.sinks ? sinks_.as<float>() + std::size_t{layer} * config_.query_heads : nullptr;
}

std::uint64_t DeviceShape::cache_bytes(std::uint64_t tokens) const {
  std::uint64_t kept = 0;
  for (const RowSpec& row : config_.rows)
    kept += row.window > 0 ? std::min<std::uint64_t>(tokens, row.window) : tokens;
  return kept * 2 * config_.kv_heads * key_bytes();
}

kernels::AttentionShape DeviceShape::attention_shape(int slots, std::uint32_t layer) const {
  const std::int64_t head_stride = std::int64_t{slots} * config_.head_size;
  return {.type = type(),
          .query_heads = static_cast<int>(config_.query_heads),
          .kv_heads = static_cast<int>(config_.kv_heads),
          .head_size = static_cast<int>(config_.head_size),
          .softmax_scale = config_.rows[layer].scale,
          .sequence_stride = head_stride * config_.kv_heads,
          .head_stride = head_stride,
          .sinks = sinks(layer)};
}

std::uint64_t DeviceModel::step_bytes() const {
  return static_cast<std::uint64_t>(step_weight_bytes(config_, bytes_of(dtype_), 1));
}

std::shared_ptr<const OutputProjections> DeviceModel::output_projections() const {
  if (output_) return output_;
  const std::size_t inputs = std::size_t{config_.query_heads} * config_.head_size,
                    row_bytes = inputs * bytes_of(dtype_);
  auto all = std::make_shared<OutputProjections>(OutputProjections{
      config_.hidden, config_.query_heads / config_.kv_heads, config_.head_size, {}});
  for (const DeviceLayer& layer : weights_.layers) {
    const auto stored = cuda::download(
        std::span(static_cast<const std::byte*>(layer.output.weight), config_.hidden * row_bytes));
    all->add_layer(config_.query_heads, [&](std::size_t output, float* row) {
      to_float(dtype_, stored.data() + output * row_bytes, inputs, row);
    });
  }
  return output_ = std::move(all);
}

std::string DeviceModel::weights_xxh3() const {
  return directory_.empty() ? "" : Checkpoint::open(directory_).xxh3();
}

std::string DeviceModel::tokenizer_xxh3() const {
  return directory_.empty() ? "" : kvlab::tokenizer_xxh3(directory_);
}

}  // namespace kvlab
