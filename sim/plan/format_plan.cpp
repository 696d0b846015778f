#include "sim/plan/format_plan.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "policies/parse_number.hpp"
#include "sim/plan/plan_traces.hpp"
#include "sim/replay.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"
#include "traces/base/text.hpp"

namespace kvlab {
namespace {

constexpr int kPlanFormat = 1;
constexpr std::size_t kMaxPlanBytes = std::size_t{16} << 20;
constexpr double kFrontierStep = 0.25;  // bits
constexpr std::string_view kLossMetrics[] = {"kl_estimate", "residual_error"};

constexpr std::uint32_t bytes_per_bit() { return kQuantBlock / 8; }

bool has_metric(const TraceReader& trace, std::string_view metric, Queries queries) {
  return metric == kLossMetrics[0] ? trace.gradient_samples(queries) > 0 : trace.has_residuals();
}

/// The metric in which losses are measured. Throws unless all traces have it.
std::string metric_of(std::span<const TraceReader* const> traces, const PlanRequest& request) {
  if (!request.metric.empty() &&
      std::ranges::find(kLossMetrics, request.metric) == std::end(kLossMetrics))
    throw std::invalid_argument(fmt::format("--metric: '{}' should be one of {}", request.metric,
                                            fmt::join(kLossMetrics, ", ")));
  for (const std::string_view metric : kLossMetrics)
    if ((request.metric.empty() || request.metric == metric) &&
        std::ranges::all_of(traces, [&](const TraceReader* trace) {
          return has_metric(*trace, metric, request.queries);
        }))
      return std::string(metric);
  throw std::invalid_argument(
      fmt::format("the traces have no {}; give traces with {}",
                  request.metric.empty() ? fmt::format("{}", fmt::join(kLossMetrics, " and no "))
                                         : request.metric,
                  request.metric == kLossMetrics[0]
                      ? "gradients of the measured queries (python -m kvlab.hf sensitivities)"
                      : "residual norms and a sketch (`kvlab capture` writes both)"));
}

/// The mean of one loss over traces, with its standard error over the traces.
PlanLoss mean_of(std::span<const PlanLoss> traces) {
  if (traces.size() == 1) return traces.front();
  const auto count = static_cast<double>(traces.size());
  PlanLoss mean;
  for (const PlanLoss& own : traces) mean.value += own.value / count;
  double squares = 0;
  for (const PlanLoss& own : traces) squares += std::pow(own.value - mean.value, 2);
  mean.standard_error = std::sqrt(squares / (count - 1) / count);
  return mean;
}

/// The losses of several tier plans. They come from replays of the full cache under each tier plan.
class Losses {
 public:
  Losses(std::span<const TraceReader* const> traces, const PlanRequest& request,
         std::span<const TierPlan> tier_plans, double first, double last)
      : traces_(traces) {
    std::vector<CacheConfig> sweep;
    for (const TierPlan& tier_plan : tier_plans) {
      CacheConfig& config = sweep.emplace_back();
      config.policy.tier_plan = tier_plan;
      if (tier_plan.is_quantized()) config.policy.centre = request.centre;
    }
    ReplayOptions options;
    options.queries = request.queries;
    options.threads = request.threads;
    for (std::size_t t = 0; t < traces.size(); ++t) {
      options.progress = [&](double done) {
        const double share = (static_cast<double>(t) + done) / static_cast<double>(traces.size());
        if (request.progress) request.progress(first + (last - first) * share);
      };
      results_.push_back(replay(*traces[t], 0, sweep, options));
    }
  }

  /// The loss of a tier plan in one layer or, if `layer` is -1, in all layers together.
  PlanLoss loss(std::size_t tier_plan, std::string_view metric, std::int32_t layer = -1) const {
    std::vector<PlanLoss> losses;
    for (std::size_t t = 0; t < traces_.size(); ++t) {
      PlanLoss loss{std::nan(""), std::nan("")};
      for (const Measurement& own : results_[t].measurements)
        if (own.config == tier_plan && own.layer == layer && own.head < 0 && own.metric == metric)
          loss = {own.value, own.standard_error};
      // The loss of a layer may be missing or infinite: a layer has no residual_error if all its
      // residual norms are 0, and very large numbers overflow.
      if (!std::isfinite(loss.value))
        throw std::invalid_argument(fmt::format(
            "{}: {} has no finite {}; leave out the trace", traces_[t]->directory().string(),
            layer < 0 ? "the model" : fmt::format("layer {}", layer), metric));
      losses.push_back(loss);
    }
    return mean_of(losses);
  }

 private:
  std::span<const TraceReader* const> traces_;
  std::vector<ReplayResult> results_;
};

/// Converts measured losses to the parts of a knapsack problem, and its solution to a choice of
/// formats.
class Planner {
 public:
  Planner(FormatPlan& plan, PlanFreedom freedom) : plan_(plan), freedom_(freedom) {
    for (std::size_t key = 0; key < plan.formats.size(); ++key)
      for (std::size_t value = 0; value < plan.formats.size(); ++value)
        if (may_pair(key, value)) pairs_.push_back({key, value});
    const std::size_t groups = freedom.by_layer ? plan.layers.size() : 1;
    for (std::size_t group = 0; group < groups; ++group) {
      const std::size_t begin = freedom.by_layer ? group : 0,
                        end = freedom.by_layer ? group + 1 : plan.layers.size();
      if (is_free())
        parts_.insert(parts_.end(), {part(begin, end, 0), part(begin, end, 1)});
      else
        parts_.push_back(part_of_pairs(begin, end));
    }
  }

  std::span<const PlanPart> parts() const { return parts_; }

  /// The choice in which part i has the format (or the pair of formats) with index formats[i].
  FormatChoice choice(std::span<const std::size_t> formats) const {
    FormatChoice choice;
    std::vector<KvFormat> layers;
    for (std::size_t layer = 0; layer < plan_.layers.size(); ++layer) {
      const std::size_t group = freedom_.by_layer ? layer : 0;
      const auto [key, value] =
          is_free() ? Pair{formats[2 * group], formats[2 * group + 1]} : pairs_[formats[group]];
      layers.push_back({plan_.formats[key], plan_.formats[value]});
      choice.bits += layers.back().bits();
      choice.added += plan_.losses[layer][0][key] + plan_.losses[layer][1][value];
    }
    choice.bits /= static_cast<double>(layers.size());
    choice.tier_plan.tiers = {{layers.front()}};
    if (std::ranges::any_of(layers, [&](const KvFormat& own) { return !(own == layers.front()); }))
      choice.tier_plan.layers = std::move(layers);
    return choice;
  }

 private:
  using Pair = std::pair<std::size_t, std::size_t>;  // indices of the formats of keys and values

  bool is_free() const { return freedom_.pairs == FormatPairs::all; }
  bool may_pair(std::size_t key, std::size_t value) const {
    if (freedom_.pairs == FormatPairs::equal) return key == value;
    const KvFormat format{plan_.formats[key], plan_.formats[value]};
    return is_free() || kernel_format(format).has_value();
  }

  /// The part that consists of the keys (kv 0) or the values (kv 1) of layers [begin, end).
  PlanPart part(std::size_t begin, std::size_t end, std::size_t kv) const {
    PlanPart part;
    for (std::size_t f = 0; f < plan_.formats.size(); ++f) {
      part.losses.push_back(0);
      for (std::size_t layer = begin; layer < end; ++layer)
        part.losses.back() += plan_.losses[layer][kv][f];
      part.bytes.push_back(plan_.formats[f]->block_bytes() *
                           static_cast<std::uint32_t>(end - begin));
    }
    return part;
  }
  /// The part that consists of the keys and the values of layers [begin, end). Its formats are
  /// those in pairs_.
  PlanPart part_of_pairs(std::size_t begin, std::size_t end) const {
    const PlanPart keys = part(begin, end, 0), values = part(begin, end, 1);
    PlanPart part;
    for (const auto& [key, value] : pairs_) {
      part.losses.push_back(keys.losses[key] + values.losses[value]);
      part.bytes.push_back(keys.bytes[key] + values.bytes[value]);
    }
    return part;
  }

  const FormatPlan& plan_;
  PlanFreedom freedom_;
  std::vector<Pair> pairs_;  // the pairs of formats that a layer may have
  std::vector<PlanPart> parts_;
};

/// Measures two losses of each layer for each format: the loss if only the keys of all layers have
/// the format, and the loss if only the values have it.
void measure_losses(std::span<const TraceReader* const> traces, const PlanRequest& request,
                    FormatPlan& plan) {
  std::vector<TierPlan> alone;
  const KvFormat exact;
  for (const RowFormat* format : plan.formats)
    for (const KvFormat& own : {KvFormat{format, exact.value}, KvFormat{exact.key, format}})
      alone.push_back({.tiers = {{own}}});
  const Losses losses(traces, request, alone, 0, 0.85);
  for (const std::uint32_t layer : plan.layers) {
    auto& own = plan.losses.emplace_back();
    for (std::size_t part = 0; part < 2; ++part)
      for (std::size_t f = 0; f < plan.formats.size(); ++f)
        own[part].push_back(
            plan.formats[f]->exact()
                ? 0
                : losses.loss(2 * f + part, plan.metric, static_cast<std::int32_t>(layer)).value);
  }
}

/// The plan with the fewest bits, and then plans with more and more bits, in steps of
/// kFrontierStep.
std::vector<FormatChoice> frontier_of(const FormatKnapsack& knapsack, const Planner& planner,
                                      std::uint32_t max_bytes, std::size_t layers) {
  std::vector<FormatChoice> frontier;
  const auto per_bit = static_cast<double>(bytes_per_bit() * 2 * layers);
  std::uint32_t bytes = 0;
  while (bytes < max_bytes && !knapsack.fits(bytes)) ++bytes;
  for (double bits = bytes / per_bit; bits * per_bit <= max_bytes;
       bits = (std::floor(bits / kFrontierStep + 1e-9) + 1) * kFrontierStep) {
    FormatChoice choice = planner.choice(
        knapsack.formats(static_cast<std::uint32_t>(std::floor(bits * per_bit + 1e-6))));
    if (frontier.empty() || choice.added < frontier.back().added)
      frontier.push_back(std::move(choice));
  }
  return frontier;
}

nlohmann::ordered_json json_of(const FormatChoice& choice) {
  return {
      {"tiers", choice.tier_plan.text()}, {"bits", choice.bits}, {"sum_of_losses", choice.added}};
}

nlohmann::ordered_json measured_json(const FormatChoice& choice) {
  nlohmann::ordered_json json = json_of(choice);
  json["loss"] = choice.joint.value;
  json["stderr"] = number_or_null(choice.joint.standard_error);
  if (const PlanLoss& kl = choice.measured; !std::isnan(kl.value)) {
    json["measured_kl"] = kl.value;
    json["measured_kl_stderr"] = number_or_null(kl.standard_error);
  }
  return json;
}

}  // namespace

std::span<const FormatSet> format_sets() {
  static const FormatSet sets[] = {
      {"kvlab", {"16", "fp8", "8", "4", "3", "2"}, {}},
      {"cuda", {"16", "fp8", "8", "4", "2"}, {.pairs = FormatPairs::kernels}},
      // vLLM has one dtype for the whole cache, and can exempt layers from it.
      {"vllm", {"16", "fp8_e4m3"}, {.pairs = FormatPairs::equal}},
      // The options -ctk and -ctv apply to all layers.
      {"llama.cpp",
       {"16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"},
       {.by_layer = false},
       true,
       true},
      {"tensorrt-llm",
       {"16", "fp8_e4m3", "nvfp4"},
       {.by_layer = false, .pairs = FormatPairs::equal},
       true},
      // QuantizedCache has one number of bits.
      {"transformers",
       {"16", "int4_g64", "int2_g64"},
       {.by_layer = false, .pairs = FormatPairs::equal},
       true},
  };
  return sets;
}

FormatSet parse_format_set(const std::string& text) {
  std::vector<std::string_view> names;
  for (const FormatSet& set : format_sets()) {
    if (text == set.name) return set;
    names.push_back(set.name);
  }
  FormatSet own{.name = "", .formats = {}, .freedom = {}};
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string_view name = std::string_view(text).substr(begin, end - begin);
    const RowFormat* const format = find_row_format(name);
    if (!format || std::ranges::find(own.formats, format->name) != own.formats.end())
      throw std::invalid_argument(
          fmt::format("--formats: '{}' should be one of {}, or different formats of {}",
                      printable(name.substr(0, 40)), fmt::join(names, ", "), row_format_names()));
    own.formats.push_back(format->name);
    begin = end + 1;
  }
  return own;
}

double parse_plan_bits(std::string_view text) {
  constexpr std::string_view kBits = "bits", kShare = "%bytes";
  constexpr std::string_view kExpected =
      "a mean per element such as 4.5bits, or a share of the bytes in 16 bit such as 25%bytes";
  const bool share = text.ends_with(kShare);
  const std::string shown = printable(text.substr(0, 40));
  const std::string_view unit = share ? kShare : kBits;
  double bits = 0;
  if (text.ends_with(unit))
    bits = parse_number(text.substr(0, text.size() - unit.size()), "--budget", kExpected);
  if (share) bits *= 0.16;
  if (!(bits > 0 && bits <= 16))
    throw std::invalid_argument(fmt::format("--budget: '{}' should be {}", shown, kExpected));
  return bits;
}

FormatKnapsack::FormatKnapsack(std::span<const PlanPart> parts, std::uint32_t max_bytes)
    : parts_(parts.begin(), parts.end()),
      width_(std::size_t{max_bytes} + 1),
      loss_(width_),
      chosen_(width_ * parts.size()) {
  for (std::size_t p = 0; p < parts_.size(); ++p) {
    const std::vector<double> before = std::move(loss_);
    loss_.assign(width_, std::numeric_limits<double>::infinity());
    for (std::size_t bytes = 0; bytes < width_; ++bytes)
      for (std::size_t f = 0; f < parts_[p].losses.size(); ++f) {
        if (parts_[p].bytes[f] > bytes) continue;
        const double sum = before[bytes - parts_[p].bytes[f]] + parts_[p].losses[f];
        if (!(sum < loss_[bytes])) continue;
        loss_[bytes] = sum;
        chosen_[p * width_ + bytes] = static_cast<std::uint8_t>(f);
      }
  }
}

double FormatKnapsack::loss(std::uint32_t bytes) const {
  return loss_[std::min<std::size_t>(bytes, width_ - 1)];
}

bool FormatKnapsack::fits(std::uint32_t bytes) const { return std::isfinite(loss(bytes)); }

std::vector<std::size_t> FormatKnapsack::formats(std::uint32_t bytes) const {
  std::vector<std::size_t> formats(parts_.size());
  std::size_t left = std::min<std::size_t>(bytes, width_ - 1);
  for (std::size_t p = parts_.size(); p-- > 0;) {
    formats[p] = chosen_[p * width_ + left];
    left -= parts_[p].bytes[formats[p]];
  }
  return formats;
}

std::vector<const RowFormat*> row_formats(const FormatSet& set, std::uint32_t head_size) {
  const bool rotates = set.rotates && head_size % kLlamaRotation == 0;
  std::vector<std::string> names;
  for (const std::string_view name : set.formats) {
    const std::string rotated = std::string(name) + "_rot";
    names.push_back(rotates && find_row_format(rotated) ? rotated : std::string(name));
  }
  std::vector<const RowFormat*> formats;
  for (const RowFormat& format : kRowFormats)
    if (std::ranges::find(names, format.name) != names.end()) formats.push_back(&format);
  return formats;
}

FormatPlan plan_formats(std::span<const TraceReader* const> traces, const PlanRequest& request) {
  if (traces.empty()) throw std::invalid_argument("--trace: name at least one trace directory");
  FormatPlan plan{.metric = metric_of(traces, request),
                  .model = traces.front()->header().model,
                  .weights_xxh3 = traces.front()->header().weights_xxh3,
                  .has_windows = !traces.front()->layers_with_window(true).empty(),
                  .layers = planned_layers(traces)};
  if (plan.has_windows && request.set.quantizes_windows)
    throw std::invalid_argument(
        fmt::format("--formats: {} also quantizes the model's layers with a sliding window, and "
                    "kvlab keeps those in 16 bit; use --formats vllm or kvlab",
                    request.set.name));
  plan.formats = row_formats(request.set, traces.front()->shape().head_size);
  measure_losses(traces, request, plan);

  const auto per_bit = static_cast<double>(bytes_per_bit() * 2 * plan.layers.size());
  const auto all = static_cast<std::uint32_t>(std::lround(16 * per_bit));
  const auto bytes = static_cast<std::uint32_t>(std::floor(request.bits * per_bit + 1e-6));
  const Planner planner(plan, request.set.freedom);
  const FormatKnapsack knapsack(planner.parts(), all);
  plan.frontier = frontier_of(knapsack, planner, all, plan.layers.size());
  if (!knapsack.fits(bytes))
    throw std::invalid_argument(fmt::format(
        "--budget: {:.4g} bits are too few; the smallest of these formats take {:.4g} bits "
        "with their scales and minima",
        request.bits, plan.frontier.front().bits));
  plan.plan = planner.choice(knapsack.formats(bytes));
  const Planner even(plan, {.by_layer = false, .pairs = request.set.freedom.pairs});
  plan.uniform = even.choice(FormatKnapsack(even.parts(), bytes).formats(bytes));

  const TierPlan whole[] = {plan.plan.tier_plan, plan.uniform.tier_plan};
  const std::string joint = plan.metric == kLossMetrics[0] ? "kl_estimate_joint" : plan.metric;
  const Losses losses(traces, request, whole, 0.85, 1);
  plan.plan.joint = losses.loss(0, joint);
  plan.uniform.joint = losses.loss(1, joint);
  return plan;
}

std::string plan_text(const FormatPlan& plan, const PlanRequest& request,
                      const std::filesystem::path& folder) {
  nlohmann::ordered_json json{
      {"format", kPlanFormat},
      {"tiers", plan.chosen().tier_plan.text()},
      {"centre", request.centre.text_in(folder)},
      {"model", {{"name", plan.model}, {"weights_xxh3", plan.weights_xxh3}}},
      {"layers", plan.layers},
      {"has_windows", plan.has_windows},
      {"metric", plan.metric},
      {"plan", measured_json(plan.plan)},
      {"uniform", measured_json(plan.uniform)}};
  for (const FormatChoice& choice : plan.frontier) json["frontier"].push_back(json_of(choice));
  for (std::size_t layer = 0; layer < plan.layers.size(); ++layer) {
    nlohmann::ordered_json own{{"layer", plan.layers[layer]}};
    for (std::size_t f = 0; f < plan.formats.size(); ++f) {
      own["keys"][std::string(plan.formats[f]->name)] = plan.losses[layer][0][f];
      own["values"][std::string(plan.formats[f]->name)] = plan.losses[layer][1][f];
    }
    json["losses"].push_back(std::move(own));
  }
  return json_text(json) + "\n";
}

PlanFile read_plan_file(const std::string& path) {
  return plan_file_of(parse_json(read_text_file(path, kMaxPlanBytes), path), path);
}

PlanFile plan_file_of(const nlohmann::json& top, const std::string& path) {
  const JsonFields fields(top, path);
  fields.check_format(kPlanFormat);
  try {
    PlanFile file{.tier_plan = parse_tier_plan(fields.text("tiers"))};
    if (file.tier_plan.tiers.size() > 1 || file.tier_plan.is_kivi())
      fields.refuse("tiers", "one format, or formats by layer, is expected");
    if (fields.has("centre"))
      file.centre =
          parse_key_centre_in(std::filesystem::path(path).parent_path(), fields.text("centre"));
    file.has_windows = fields.flag("has_windows", false);
    if (fields.list("layers").size() > kMaxPlanLayers)
      fields.refuse("layers", fmt::format("at most {} layers are expected", kMaxPlanLayers));
    for (const auto& layer : fields.list("layers"))
      file.layers.push_back(whole_number(layer, path + ": layers"));
    if (file.layers.empty() ||
        std::ranges::adjacent_find(file.layers, std::ranges::greater_equal{}) !=
            file.layers.end() ||
        (file.tier_plan.is_by_layer() && file.layers.size() != file.tier_plan.layers.size()))
      fields.refuse("layers", "the number of each layer of the plan is expected, ascending");
    return file;
  } catch (const std::invalid_argument& error) {
    throw std::runtime_error(fmt::format("{}: {}", path, error.what()));
  }
}

}  // namespace kvlab
