// How long a decode step takes if keys and values of past tokens are stored in host memory, and the
// device holds a buffer of some of them. The formulas are in docs/guides/predict.md.
#pragma once

#include <cstdint>
#include <optional>

#include "engine/checkpoint/model.hpp"
#include "engine/evaluation/predict/link_rates.hpp"

namespace kvlab {

/// A decode step in which each query selects some past tokens, and those that are not in the
/// device's buffer are fetched from host memory. Numbers of tokens are per sequence and KV head.
struct RefetchSetup {
  std::uint32_t context = 0;   ///< tokens of a sequence
  std::uint32_t selected = 0;  ///< tokens that a query selects and attends to; below `context`
  std::uint32_t page = 16;     ///< tokens for each entry of the index by which queries select
  double layer_seconds = 0;    ///< additional time of a layer, to select tokens and look them up
};

/// The parts of a refetch step's time.
struct RefetchTime {
  double read_seconds;   ///< to read weights, index and selected tokens from device memory
  double fetch_seconds;  ///< to fetch missing tokens over the link, with a launch in each layer
  double layer_seconds;  ///< additional time of the layers

  /// The time if fetching and reading do not overlap.
  double serial() const { return read_seconds + fetch_seconds + layer_seconds; }
  /// A lower bound: the time if fetching and reading overlap completely.
  double overlapped() const {
    return (read_seconds > fetch_seconds ? read_seconds : fetch_seconds) + layer_seconds;
  }
};

/// Predicts the times of decode steps from the bytes that they move. Weights, keys and values have
/// the dtype of the model's weights. Layers with a sliding window keep their window on the device.
/// Bytes are doubles, because a config may describe a model of more than 2^64 bytes.
class DecodeCost {
 public:
  DecodeCost(ModelConfig config, LinkRates link);

  const ModelConfig& config() const { return config_; }
  const LinkRates& link() const { return link_; }
  /// Number of layers without a sliding window, which are the layers that refetch.
  std::uint32_t full_layers() const { return full_layers_; }
  /// Bytes of the key and the value of a token in one KV head of one layer.
  std::uint32_t row_bytes() const;
  /// The same over all KV heads and all layers without a sliding window.
  double token_bytes() const;
  double weight_bytes() const;
  /// Device memory of one sequence's keys and values in the full cache.
  double full_sequence_bytes(std::uint32_t context) const;
  /// Device memory of one sequence with a buffer of `buffer` tokens, the index included.
  double refetch_sequence_bytes(const RefetchSetup& setup, std::uint32_t buffer) const;
  /// The largest batch of sequences of `sequence_bytes` that fits into device memory with the
  /// weights; 0: not even one sequence fits.
  std::uint32_t largest_batch(double device_bytes, double sequence_bytes) const;

  /// The time of a step with the full cache.
  double full_seconds(std::uint32_t batch, std::uint32_t context) const;
  /// Bytes that a refetch step reads from device memory.
  double refetch_read_bytes(std::uint32_t batch, const RefetchSetup& setup) const;
  /// Mean number of rows of row_bytes() that one layer fetches for the whole batch. `fetch_rate`:
  /// the share of the selected tokens that are fetched.
  double fetched_rows(std::uint32_t batch, const RefetchSetup& setup, double fetch_rate) const;
  RefetchTime refetch(std::uint32_t batch, const RefetchSetup& setup, double fetch_rate) const;
  /// The fetch rate at which a serial refetch step takes as long as a step with the full cache, at
  /// the same batch. 1 if refetch is faster at any rate; nullopt if it is slower even without
  /// misses.
  std::optional<double> break_even(std::uint32_t batch, const RefetchSetup& setup) const;

 private:
  double index_bytes(const RefetchSetup& setup) const;
  double window_bytes(std::uint32_t context) const;

  ModelConfig config_;
  LinkRates link_;
  std::size_t element_bytes_;
  std::uint32_t full_layers_ = 0;
};

}  // namespace kvlab
