#include "engine/evaluation/predict/predict.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "sim/report/text.hpp"
#include "sim/run/ranking.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;

void check(const DecodeCost& cost, const PredictRequest& request) {
  const RefetchSetup& setup = request.setup;
  if (setup.selected >= setup.context)
    throw std::invalid_argument(
        fmt::format("--selected: {} should be less than --context {}; otherwise every token is "
                    "read, as with the full cache",
                    setup.selected, setup.context));
  for (const BufferChoice& buffer : request.buffers)
    if (buffer.buffer <= setup.selected)
      throw std::invalid_argument(
          fmt::format("a buffer of {} tokens does not hold the {} selected tokens and the newest "
                      "one; give larger buffers or a smaller --selected",
                      buffer.buffer, setup.selected));
  if (request.device_bytes > 0 && request.device_bytes < cost.weight_bytes())
    throw std::invalid_argument(
        fmt::format("--device-memory: {} is too small, because the weights take {}; give more",
                    bytes_text(request.device_bytes), bytes_text(cost.weight_bytes())));
}

double rate_of(std::uint32_t batch, double seconds) { return batch / seconds; }

FullPrediction predict_full(const DecodeCost& cost, const RefetchSetup& setup,
                            std::uint32_t batch) {
  return {.batch = batch,
          .rate = rate_of(batch, cost.full_seconds(batch, setup.context)),
          .break_even = cost.break_even(batch, setup)};
}

/// Host memory of one sequence: the keys and values of all tokens in the layers that refetch.
double host_sequence_bytes(const DecodeCost& cost, const RefetchSetup& setup) {
  return setup.context * cost.token_bytes();
}

RefetchPrediction predict_refetch(const DecodeCost& cost, const RefetchSetup& setup,
                                  const BufferChoice& buffer, std::uint32_t batch) {
  const auto serial_at = [&](double fetch_rate) {
    return std::isnan(fetch_rate) ? fetch_rate
                                  : rate_of(batch, cost.refetch(batch, setup, fetch_rate).serial());
  };
  return {.batch = batch,
          .serial = serial_at(buffer.fetch_rate),
          .overlapped = rate_of(batch, cost.refetch(batch, setup, buffer.fetch_rate).overlapped()),
          .low = serial_at(buffer.high),  // more misses, fewer tokens per second
          .high = serial_at(buffer.low),
          .host_bytes = batch * host_sequence_bytes(cost, setup)};
}

/// The largest batch of sequences with this buffer that fits device and host memory.
std::uint32_t largest_batch(const DecodeCost& cost, const PredictRequest& request,
                            std::uint32_t buffer) {
  const std::uint32_t batch =
      cost.largest_batch(request.device_bytes, cost.refetch_sequence_bytes(request.setup, buffer));
  if (request.host_bytes == 0) return batch;
  const double host_batch = request.host_bytes / host_sequence_bytes(cost, request.setup);
  return static_cast<std::uint32_t>(std::min<double>(batch, std::floor(host_batch)));
}

BufferPrediction predict_buffer(const DecodeCost& cost, const PredictRequest& request,
                                const BufferChoice& buffer) {
  BufferPrediction prediction{.buffer = buffer, .batches = {}};
  for (const std::uint32_t batch : request.batches)
    prediction.batches.push_back(predict_refetch(cost, request.setup, buffer, batch));
  if (request.device_bytes == 0) return prediction;
  if (const std::uint32_t batch = largest_batch(cost, request, buffer.buffer); batch > 0)
    prediction.largest = predict_refetch(cost, request.setup, buffer, batch);
  return prediction;
}

void refuse_too_little_memory(const DecodeCost& cost, const PredictRequest& request) {
  std::uint32_t smallest = request.setup.context;
  for (const BufferChoice& buffer : request.buffers) smallest = std::min(smallest, buffer.buffer);
  throw std::invalid_argument(fmt::format(
      "--device-memory and --host-memory: no sequence fits; the weights take {} of device memory, "
      "and a sequence takes {} of it and {} of host memory; give more, or a smaller --context",
      bytes_text(cost.weight_bytes()),
      bytes_text(cost.refetch_sequence_bytes(request.setup, smallest)),
      bytes_text(host_sequence_bytes(cost, request.setup))));
}

/// The prediction by which buffers are compared; null if no sequence fits.
const RefetchPrediction* find_compared(const BufferPrediction& buffer,
                                       const PredictRequest& request) {
  if (request.device_bytes > 0) return buffer.largest ? &*buffer.largest : nullptr;
  return &*std::ranges::max_element(buffer.batches, {}, &RefetchPrediction::batch);
}

/// The full cache with which the choice is compared; null if no sequence fits.
const FullPrediction* compared_full(const Prediction& prediction, const PredictRequest& request) {
  if (request.device_bytes > 0)
    return prediction.largest_full ? &*prediction.largest_full : nullptr;
  return &*std::ranges::max_element(prediction.full, {}, &FullPrediction::batch);
}

std::string name_of(const BufferChoice& buffer) {
  const std::string tokens = fmt::format("a buffer of {} tokens", count_text(buffer.buffer));
  return buffer.policy.empty() ? tokens : fmt::format("{} with {}", buffer.policy, tokens);
}

std::string rate_text(double rate) { return fmt::format("{} tokens/s", number_text(rate)); }

/// The index of the fastest buffer that can be deployed, fits, and satisfies `is_eligible`.
template <class Eligible>
std::optional<std::size_t> fastest(const Prediction& prediction, const PredictRequest& request,
                                   Eligible is_eligible) {
  std::optional<std::size_t> best;
  for (std::size_t i = 0; i < prediction.buffers.size(); ++i) {
    const BufferPrediction& buffer = prediction.buffers[i];
    const RefetchPrediction* at = find_compared(buffer, request);
    if (!at || buffer.buffer.is_oracle || !is_eligible(buffer.buffer)) continue;
    if (!best || at->serial > find_compared(prediction.buffers[*best], request)->serial) best = i;
  }
  return best;
}

/// "1.34x the full cache's 729 tokens/s at batch 8", or that the full cache does not fit.
std::string full_text(const FullPrediction* full, double rate) {
  if (!full) return "and the full cache does not fit at any batch";
  return fmt::format("{:.2f}x the full cache's {} at batch {}", rate / full->rate,
                     rate_text(full->rate), count_text(full->batch));
}

std::string sureness_text(const BufferRecommendation& made) {
  const int percent = static_cast<int>(100 * kPredictionError);
  if (made.is_sure)
    return fmt::format("That holds even if the prediction is wrong by {}%.", percent);
  return fmt::format(
      "The difference is within the prediction's error of {}% and the interval of the fetch rate, "
      "so measure it before you rely on it.",
      percent);
}

std::string runner_up_text(const Prediction& prediction, const PredictRequest& request,
                           const BufferRecommendation& made) {
  const RefetchPrediction& choice = *find_compared(prediction.buffers[made.choice], request);
  const BufferPrediction& other = prediction.buffers[*made.runner_up];
  const double rate = find_compared(other, request)->serial;
  const bool is_close = rate > (1 - kPredictionError) * choice.serial;
  return fmt::format(
      " The best buffer of another size, {}, gets {}, which is {} the error of the "
      "prediction.",
      name_of(other.buffer), rate_text(rate),
      is_close ? "a difference within" : "less by more than");
}

std::string limits_text(const PredictRequest& request) {
  const ReplayedSelection& replayed = request.replayed;
  const RefetchSetup& setup = request.setup;
  std::string text;
  if (replayed.tokens > 0 &&
      (replayed.tokens < setup.context || replayed.selected != setup.selected))
    text = fmt::format(
        " The fetch rates are those of {} selected tokens in traces of {}; they were not measured "
        "for {} in {}.",
        count_text(replayed.selected), count_text(replayed.tokens), count_text(setup.selected),
        count_text(setup.context));
  return text + " This prediction does not cover how a selection changes the model's output.";
}

std::string recommendation_sentences(const Prediction& prediction, const PredictRequest& request,
                                     const BufferRecommendation& made) {
  const BufferPrediction& choice = prediction.buffers[made.choice];
  const RefetchPrediction& at = *find_compared(choice, request);
  const std::string interval = std::isnan(at.low) || at.low == at.high
                                   ? ""
                                   : fmt::format(" ({} to {} over the 95% CI of its fetch rate)",
                                                 number_text(at.low), number_text(at.high));
  std::string text = fmt::format(
      "{}: {} gets {} at batch {}{}, {}. ", made.pays ? "Choice" : "Refetch does not pay",
      name_of(choice.buffer), rate_text(at.serial), count_text(at.batch), interval,
      full_text(compared_full(prediction, request), at.serial));
  text += sureness_text(made);
  if (made.runner_up) text += runner_up_text(prediction, request, made);
  return text + limits_text(request);
}

ordered_json full_json(const FullPrediction& full) {
  return {
      {"batch", full.batch},
      {"tokens_per_second", full.rate},
      {"break_even_fetch_rate", full.break_even ? ordered_json(*full.break_even) : ordered_json()}};
}

ordered_json refetch_json(const RefetchPrediction& refetch) {
  return {{"batch", refetch.batch},
          {"serial_tokens_per_second", refetch.serial},
          {"serial_low", number_or_null(refetch.low)},
          {"serial_high", number_or_null(refetch.high)},
          {"overlapped_tokens_per_second", refetch.overlapped},
          {"host_bytes", refetch.host_bytes}};
}

template <class T, class ToJson>
ordered_json list_json(const std::vector<T>& list, ToJson to_json) {
  ordered_json all = ordered_json::array();
  for (const T& one : list) all.push_back(to_json(one));
  return all;
}

template <class T, class ToJson>
ordered_json json_or_null(const std::optional<T>& one, ToJson to_json) {
  return one ? to_json(*one) : ordered_json();
}

ordered_json buffer_json(const BufferPrediction& prediction) {
  const BufferChoice& buffer = prediction.buffer;
  return {{"policy", buffer.policy.empty() ? ordered_json() : ordered_json(buffer.policy)},
          {"oracle", buffer.is_oracle},
          {"buffer_tokens", buffer.buffer},
          {"fetch_rate", buffer.fetch_rate},
          {"fetch_rate_low", number_or_null(buffer.low)},
          {"fetch_rate_high", number_or_null(buffer.high)},
          {"batches", list_json(prediction.batches, refetch_json)},
          {"largest", json_or_null(prediction.largest, refetch_json)}};
}

ordered_json recommended_json(const BufferRecommendation& made) {
  return {{"buffer", made.choice},
          {"runner_up", made.runner_up ? ordered_json(*made.runner_up) : ordered_json()},
          {"pays", made.pays},
          {"sure", made.is_sure},
          {"text", made.text}};
}

}  // namespace

std::string count_text(std::uint32_t count) {
  return count < 1000 ? fmt::format("{}", count) : number_text(count);
}

std::vector<BufferChoice> buffers_of(std::span<const ResultRow> rows) {
  constexpr std::string_view metric = "fetch_rate";
  const MetricTable table(rows);
  std::vector<BufferChoice> buffers;
  for (std::size_t s = 0; s < table.series().size(); ++s) {
    if (table.series()[s].is_full()) continue;  // it holds all tokens, whatever the budget
    for (const BudgetColumn& budget : table.budgets())
      // A share of the length stands for other numbers of tokens in other traces. The largest
      // number is used, because a smaller buffer would fetch more than the mean over the traces.
      if (const auto average = table.average(s, budget.text, metric))
        buffers.push_back({.policy = table.series()[s].label,
                           .buffer = budget.max_tokens,
                           .fetch_rate = average->mean,
                           .low = std::max(average->interval.low, 0.0),
                           .high = std::min(average->interval.high, 1.0),
                           .is_oracle = table.series()[s].is_oracle()});
  }
  if (buffers.empty())
    throw std::invalid_argument(
        "the run has no fetch rates; replay it with a selection, such as --refetch top:2048");
  return buffers;
}

Prediction predict(const DecodeCost& cost, const PredictRequest& request) {
  check(cost, request);
  const RefetchSetup& setup = request.setup;
  Prediction prediction;
  for (const std::uint32_t batch : request.batches)
    prediction.full.push_back(predict_full(cost, setup, batch));
  for (const BufferChoice& buffer : request.buffers)
    prediction.buffers.push_back(predict_buffer(cost, request, buffer));
  if (request.device_bytes == 0) return prediction;
  const std::uint32_t batch =
      cost.largest_batch(request.device_bytes, cost.full_sequence_bytes(setup.context));
  if (batch > 0) prediction.largest_full = predict_full(cost, setup, batch);
  const bool fits = std::ranges::any_of(prediction.buffers, [](const BufferPrediction& buffer) {
    return buffer.largest.has_value();
  });
  if (!fits && !prediction.largest_full) refuse_too_little_memory(cost, request);
  return prediction;
}

std::optional<BufferRecommendation> recommend_buffer(const Prediction& prediction,
                                                     const PredictRequest& request) {
  const auto best = fastest(prediction, request, [](const BufferChoice&) { return true; });
  if (!best) return std::nullopt;
  const std::uint32_t size = prediction.buffers[*best].buffer.buffer;
  BufferRecommendation made{.choice = *best, .runner_up = {}, .text = {}};
  made.runner_up = fastest(prediction, request,
                           [&](const BufferChoice& buffer) { return buffer.buffer != size; });
  const RefetchPrediction& at = *find_compared(prediction.buffers[*best], request);
  const FullPrediction* full = compared_full(prediction, request);
  made.pays = !full || at.serial > full->rate;
  const double low = std::isnan(at.low) ? at.serial : at.low,
               high = std::isnan(at.high) ? at.serial : at.high;
  made.is_sure = !full || (made.pays ? low * (1 - kPredictionError) > full->rate
                                     : high * (1 + kPredictionError) < full->rate);
  made.text = recommendation_sentences(prediction, request, made);
  return made;
}

ordered_json prediction_json(const Prediction& prediction, const DecodeCost& cost,
                             const PredictRequest& request) {
  const RefetchSetup& setup = request.setup;
  const auto recommended = recommend_buffer(prediction, request);
  return {{"model", cost.config().name},
          {"dtype", torch_name(cost.config().weights_dtype)},
          {"device", cost.link().device},
          {"read_bytes_per_second", cost.link().read_bytes_per_second},
          {"weight_bytes", cost.weight_bytes()},
          {"token_bytes", cost.token_bytes()},
          {"row_bytes", cost.row_bytes()},
          {"refetching_layers", cost.full_layers()},
          {"context", setup.context},
          {"selected", setup.selected},
          {"page", setup.page},
          {"layer_microseconds", setup.layer_seconds * 1e6},
          {"replayed_tokens", request.replayed.tokens},
          {"replayed_selected", request.replayed.selected},
          {"device_bytes", request.device_bytes},
          {"host_bytes", request.host_bytes},
          {"full", list_json(prediction.full, full_json)},
          {"largest_full", json_or_null(prediction.largest_full, full_json)},
          {"buffers", list_json(prediction.buffers, buffer_json)},
          {"recommendation", json_or_null(recommended, recommended_json)}};
}

}  // namespace kvlab
