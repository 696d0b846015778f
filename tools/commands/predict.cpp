#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <stdexcept>

#include "engine/evaluation/predict/predict.hpp"
#include "policies/catalogue.hpp"
#include "sim/refetch/selector.hpp"
#include "sim/report/recommendation.hpp"
#include "sim/report/text.hpp"
#include "sim/run/run.hpp"
#include "tools/command.hpp"
#include "tools/options.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

constexpr std::int64_t kMaxTokens = 1 << 28, kMaxBatch = 1 << 16;
constexpr double kMaxLayerMicroseconds = 1e6;

struct Request {
  std::string run, link, model;
  std::vector<std::uint32_t> batches{1, 8, 32};
  std::uint32_t context = 32768, buffer = 0;
  SelectionOptions selection;
  bool has_selected = false, has_page = false;  // whether the options are given
  double layer_microseconds = 0, device_bytes = 0, host_bytes = 0;
  bool json = false;
};

namespace fs = std::filesystem;

ModelConfig read_config(const std::string& path) {
  if (fs::is_directory(path)) return load_model_config(path);
  return read_model_config(path, printable(fs::path(path).stem().string()));
}

/// The config.json of --model.
std::string config_path(const std::string& model) {
  return fs::is_directory(model) ? (fs::path(model) / "config.json").string() : model;
}

/// Reads a size such as 40GiB, by the units of budgets in bytes.
double parse_size(const std::string& name, const std::string& text) {
  try {
    if (const Budget budget = parse_budget(text); budget.bytes > 0)
      return static_cast<double>(budget.bytes);
  } catch (const std::invalid_argument&) {
    // The error below says what is accepted here: a size, and not any budget.
  }
  throw std::invalid_argument(
      fmt::format("--{}: '{}' should be a size, such as 40GiB or 24000MiB", name, text));
}

auto size_parser(const std::string& name) {
  return [name](const std::string& text) { return parse_size(name, text); };
}

void check(Request& request, const GivenOptions& given) {
  given.require("link", "--link link.json, the output of `kvlab bench link --json`");
  given.require("model", "--model CONFIG, a model's config.json or the directory that has it");
  refuse_hub_name(request.model);
  if (request.run.empty() == request.selection.fetch_rates.empty())
    throw std::invalid_argument(
        "--fetch-rate: missing, or given beside RUN; give one of RUN, a directory of `kvlab replay "
        "--refetch`, and --fetch-rate 2%,5%,10%");
  request.has_selected = given.has("selected");
  request.has_page = given.has("page");
  if (!request.run.empty()) given.refuse({"buffer"}, "the buffers are the budgets of the run");
  given.refuse_without("device-memory", {"host-memory"});
  const double max_microseconds = kMaxLayerMicroseconds;
  if (!(request.layer_microseconds >= 0 && request.layer_microseconds <= max_microseconds))
    throw std::invalid_argument(fmt::format("--layer-us: {} should be between 0 and {}",
                                            request.layer_microseconds, max_microseconds));
}

void add_options(OptionTable& table, Request& request) {
  constexpr Range kTokens{1, kMaxTokens};
  table.text("run", "RUN", request.run, "a directory of `kvlab replay --refetch`");
  table.text("link", "FILE", request.link,
             "measured rates of a GPU and its link to the host: the output of `kvlab bench link "
             "--json`");
  table.text(
      "model", "CONFIG", request.model,
      "a model's config.json, such as those in engine/models/configs, or the directory of one");
  add_numbers_option(table, "batch", kMaxBatch, request.batches, "numbers of sequences");
  table.whole("context", "N", kTokens, request.context, "tokens of each sequence");
  add_selection_options(table, request.selection);
  table.whole("buffer", "B", kTokens, request.buffer,
              "without RUN: number of tokens of each sequence and KV head that the device holds "
              "(default: 2 times K)",
              "");
  table.number(
      "layer-us", "T", request.layer_microseconds,
      "extra time of each layer in microseconds, for selecting tokens and looking them up");
  table.parsed("device-memory", "BYTES", request.device_bytes, size_parser("device-memory"),
               "device memory for weights, keys and values, such as 40GiB: also predicts the "
               "largest batches that fit, and compares buffers at these batches");
  table.parsed("host-memory", "BYTES", request.host_bytes, size_parser("host-memory"),
               "with --device-memory: host memory for keys and values");
  add_json_option(table, request.json);
}

/// One buffer for each value of --fetch-rate.
std::vector<BufferChoice> given_buffers(const Request& request) {
  const std::uint32_t twice = 2 * request.selection.selected;
  std::vector<BufferChoice> buffers;
  for (const double fetch_rate : request.selection.fetch_rates)
    buffers.push_back({.policy = {},
                       .buffer = request.buffer > 0 ? request.buffer : twice,
                       .fetch_rate = fetch_rate});
  return buffers;
}

/// Adds the buffers of the run of --run. Uses the run's selection (how many tokens a query selects,
/// and the page size) unless the options give another one. If they do, each buffer is scaled, so
/// that its ratio to the selection stays that of the run.
void add_run(PredictRequest& made, const Request& request) {
  const Run run = load_run(request.run);
  if (run.info.refetch.empty())
    throw std::invalid_argument(fmt::format(
        "{}: the run has no fetch rates; replay its traces with a selection, such as `kvlab replay "
        "--refetch top:2048`",
        request.run));
  Selector selector = parse_selector(run.info.refetch);
  if (selector.kind == Selector::Kind::logged) selector.tokens = run.info.selected_tokens;
  if (selector.tokens == 0)
    throw std::runtime_error(fmt::format(
        "{}: run.json lacks the number of tokens that a query selects; replay again", request.run));
  if (!request.has_selected) made.setup.selected = selector.tokens;
  if (!request.has_page && selector.kind == Selector::Kind::page) made.setup.page = selector.page;
  made.replayed = {std::ranges::min(run.info.traces, {}, &RunTrace::tokens).tokens,
                   selector.tokens};
  made.buffers = buffers_of(run.rows);
  for (BufferChoice& buffer : made.buffers)
    buffer.buffer = static_cast<std::uint32_t>(std::uint64_t{buffer.buffer} * made.setup.selected /
                                               selector.tokens);
}

PredictRequest predict_request(const Request& request) {
  PredictRequest made{.setup = {.context = request.context,
                                .selected = request.selection.selected,
                                .page = request.selection.page,
                                .layer_seconds = request.layer_microseconds * 1e-6},
                      .batches = request.batches,
                      .buffers = {},
                      .device_bytes = request.device_bytes,
                      .host_bytes = request.host_bytes,
                      .replayed = {}};
  if (request.run.empty())
    made.buffers = given_buffers(request);
  else
    add_run(made, request);
  return made;
}

std::string percent_text(double share) { return fmt::format("{:.3g}%", 100 * share); }

/// "977 (1.34x)": a rate, and its ratio to the rate of the full cache.
std::string rate_cell(double rate, const FullPrediction* full) {
  if (!full) return number_text(rate);
  return fmt::format("{} ({:.2f}x)", number_text(rate), rate / full->rate);
}

class BufferTable {
 public:
  explicit BufferTable(const Prediction& prediction) {
    for (const BufferPrediction& buffer : prediction.buffers)
      width_ = std::max(width_, buffer.buffer.policy.size());
  }

  void print_head(bool shows_largest) const {
    fmt::print("{:<{}} {:>9} {:>7} {:>16} {:>16}{}\n", "policy", width_, "buffer", "fetched",
               "serial tok/s", "overlapped", shows_largest ? "  batch     in host" : "");
  }
  /// `full`: the full cache with which to compare; may be null.
  void print_row(const BufferChoice& buffer, const RefetchPrediction& at,
                 const FullPrediction* full, bool shows_largest) const {
    fmt::print("{:<{}} {:>9} {:>7} {:>16} {:>16}", buffer.policy.empty() ? "-" : buffer.policy,
               width_, count_text(buffer.buffer), percent_text(buffer.fetch_rate),
               rate_cell(at.serial, full), rate_cell(at.overlapped, full));
    if (shows_largest) fmt::print(" {:>6} {:>11}", count_text(at.batch), bytes_text(at.host_bytes));
    fmt::print("\n");
  }

 private:
  std::size_t width_ = 6;
};

/// The largest rate of a fetch, in bytes per second.
double peak_rate(const DecodeCost& cost) {
  double peak = 0;
  for (double rows = 1 << 10; rows <= 1 << 16; rows *= 2)
    peak =
        std::max(peak, rows * cost.row_bytes() / cost.link().fetch_seconds(rows, cost.row_bytes()));
  return peak;
}

void print_machine(const DecodeCost& cost, const RefetchSetup& setup) {
  const ModelConfig& config = cost.config();
  fmt::print("{} in {}: weights {}, keys and values {} a token\n", config.name,
             torch_name(config.weights_dtype), bytes_text(cost.weight_bytes()),
             bytes_text(cost.token_bytes()));
  fmt::print("{}: reads {:.3g} TB/s of device memory\n", cost.link().device,
             cost.link().read_bytes_per_second * 1e-12);
  fmt::print("fetches: rows of {} bytes at up to {:.3g} GB/s, {:.3g} us a launch\n",
             cost.row_bytes(), peak_rate(cost) * 1e-9,
             1e6 * cost.link().fetch_seconds(0, cost.row_bytes()));
  fmt::print("{} tokens of context, {} selected, index of pages of {} tokens\n",
             count_text(setup.context), count_text(setup.selected), count_text(setup.page));
}

std::string break_even_text(const FullPrediction& full) {
  if (!full.break_even) return "refetch is slower than that even if nothing is fetched";
  if (*full.break_even >= 1)
    return "refetch is faster than that even if every selected token is fetched";
  return fmt::format(
      "refetch is faster than that if less than {} of the selected tokens are fetched",
      percent_text(*full.break_even));
}

void print_batches(const Prediction& prediction) {
  const BufferTable table(prediction);
  for (std::size_t b = 0; b < prediction.full.size(); ++b) {
    const FullPrediction& full = prediction.full[b];
    fmt::print("\nbatch {}: full cache {} tok/s; {}\n", count_text(full.batch),
               number_text(full.rate), break_even_text(full));
    table.print_head(false);
    for (const BufferPrediction& buffer : prediction.buffers)
      table.print_row(buffer.buffer, buffer.batches[b], &full, false);
  }
}

void print_largest(const Prediction& prediction, const PredictRequest& request) {
  const BufferTable table(prediction);
  const FullPrediction* full = prediction.largest_full ? &*prediction.largest_full : nullptr;
  fmt::print("\nlargest batches in {} of device memory: full cache {}\n",
             bytes_text(request.device_bytes),
             full ? fmt::format("{}, {} tok/s", count_text(full->batch), number_text(full->rate))
                  : "does not fit");
  table.print_head(true);
  for (const BufferPrediction& buffer : prediction.buffers)
    if (buffer.largest) table.print_row(buffer.buffer, *buffer.largest, full, true);
}

/// The command that measures the chosen step.
std::string next_command(const Request& given, const PredictRequest& request,
                         const Prediction& prediction, const BufferRecommendation& made) {
  const BufferPrediction& choice = prediction.buffers[made.choice];
  const RefetchPrediction& at = choice.largest ? *choice.largest : choice.batches.back();
  const RefetchSetup& setup = request.setup;
  return fmt::format(
      "Next, to measure this step: kvlab bench link --random-weights {} --batch {} --context {} "
      "--selected {} --page {} --fetch-rate {}",
      config_path(given.model), at.batch, setup.context, setup.selected, setup.page,
      percent_text(choice.buffer.fetch_rate));
}

int run(const Request& given) {
  const DecodeCost cost(read_config(given.model), read_link_file(given.link));
  const PredictRequest request = predict_request(given);
  const Prediction prediction = predict(cost, request);
  if (given.json) {
    print_json(prediction_json(prediction, cost, request));
    return 0;
  }
  print_machine(cost, request.setup);
  print_batches(prediction);
  if (request.device_bytes > 0) print_largest(prediction, request);
  if (const auto made = recommend_buffer(prediction, request))
    fmt::print("\n{}{}\n", wrap_columns(made->text),
               next_command(given, request, prediction, *made));
  return 0;
}

}  // namespace

Command predict_command() {
  return {.name = "predict",
          .summary = "predicts decoding with keys and values in host memory, and when it pays",
          .usage = "[RUN] --link LINK.json --model CONFIG --batch LIST --context N [options]",
          .example =
              "kvlab predict --link link.json --model engine/models/configs/llama-3.1-8b.json "
              "--batch 1,8 --context 32768 --fetch-rate 2%,10%",
          .positional = "run",
          .prepare = make_prepare(add_options, check, run)};
}

}  // namespace kvlab
