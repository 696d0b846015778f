#include "tools/drafts.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <stdexcept>

#include "traces/base/json.hpp"
#include "traces/base/text.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;

constexpr double kMaxSeconds = 1e6;
constexpr std::size_t kMaxFileBytes = std::size_t{1} << 24;

std::optional<std::uint32_t> whole_number(const std::string& text) {
  std::uint32_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && at == end ? std::optional(value) : std::nullopt;
}

[[noreturn]] void refuse_file(const std::string& path, const std::string& why) {
  throw std::invalid_argument(
      fmt::format("--tree: {} {}; give the output of kvlab generate --draft-policy P --tree NODES "
                  "--json, or a number of nodes",
                  path, why));
}

/// The value of a key; null if there is none, or if `object` is not an object.
nlohmann::json field(const nlohmann::json& object, const char* key) {
  return object.is_object() ? object.value(key, nlohmann::json()) : nlohmann::json();
}

/// Returns the tree that is predicted to be fastest. The prediction uses the acceptance and the
/// times in the file `path`, which is the JSON output of an earlier command.
TreeShape tree_from(const std::string& path) {
  const nlohmann::json file = parse_json(read_text_file(path, kMaxFileBytes), path);
  const nlohmann::json draft = field(file, "draft");
  if (!draft.is_object()) refuse_file(path, "has no object \"draft\"");
  const auto number = [&](const nlohmann::json& value, const char* key, double min_value,
                          double max_value) {
    if (!value.is_number() || !(value.get<double>() >= min_value) ||
        value.get<double>() > max_value)
      refuse_file(path, fmt::format("should have {} from {} to {}", key, min_value, max_value));
    return value.get<double>();
  };
  const auto list = [&](const char* key) {
    const nlohmann::json found = field(draft, key);
    if (!found.is_array() || found.empty() || found.size() > kMaxTreeNodes)
      refuse_file(path,
                  fmt::format("should have a list {} of 1 to {} entries", key, kMaxTreeNodes));
    return found;
  };
  std::vector<double> acceptance;
  for (const auto& share : list("acceptance_by_child"))
    acceptance.push_back(number(share, "acceptance_by_child", 0, 1));
  DraftTimes times{.draft_step = number(field(draft, "draft_step_seconds"), "draft_step_seconds", 0,
                                        kMaxSeconds)};
  for (const auto& entry : list("verification"))
    times.verification.emplace_back(
        static_cast<std::uint32_t>(number(field(entry, "nodes"), "nodes", 2, kMaxTreeNodes)),
        number(field(entry, "seconds"), "seconds", 0, kMaxSeconds));
  return fastest_tree(acceptance, times);
}

ordered_json shares(const std::vector<DraftStats::Count>& counts) {
  ordered_json list = ordered_json::array();
  for (const DraftStats::Count& count : counts) list.push_back(count.share());
  return list;
}

}  // namespace

void add_draft_options(OptionTable& table, DraftRequest& request) {
  table.text("draft-policy", "P", request.policy,
             "draft tokens with this policy's cache and verify them with the full cache. The text "
             "has the same distribution as with the full cache alone. The other cache options "
             "describe the drafter's cache");
  table.text("draft-budget", "B", request.budget,
             "budget of --draft-policy, written as for --budget");
  table.whole("gamma", "G", {1, kMaxTreeNodes - 1}, request.gamma, "draft tokens per verification");
  table.text("tree", "NODES|FILE", request.tree,
             "draft a tree of tokens instead of --gamma tokens in a row. NODES: measure acceptance "
             "and times first, then use the fastest tree of up to NODES tokens. FILE: use the "
             "acceptance and times of such a run, from its --json output");
}

void take_drafter(const DraftRequest& request, const GivenOptions& given, CacheOptions& caches) {
  given.refuse_without("draft-policy", {"draft-budget", "gamma", "tree"});
  if (!given.has("draft-policy")) return;
  given.refuse({"policy", "budget", "policy-file"},
               "with --draft-policy the full cache determines the text");
  if (given.has("tree")) given.refuse({"gamma"}, "--tree sets the number of draft tokens");
  if (request.budget.empty() && request.policy != "full")
    throw std::invalid_argument(
        fmt::format("--draft-budget: policy {} needs one; give tokens or a share: --draft-budget "
                    "20%",
                    request.policy));
  caches.sweep.policies = {request.policy};
  caches.sweep.budgets.clear();
  if (!request.budget.empty()) caches.sweep.budgets = {request.budget};
}

DraftOptions draft_options(const DraftRequest& request) {
  if (request.tree.empty()) return {.shape = chain(request.gamma)};
  const auto nodes = whole_number(request.tree);
  if (!nodes) return {.shape = tree_from(request.tree)};
  check_range("tree", *nodes, {2, kMaxTreeNodes});
  return {.planned_nodes = *nodes};
}

ordered_json drafts_json(const DraftStats& stats) {
  ordered_json verification = ordered_json::array();
  for (const auto& [nodes, seconds] : stats.verification)
    verification.push_back({{"nodes", nodes}, {"seconds", seconds}});
  return {{"verifications", stats.verifications},
          {"tokens_per_verification", stats.tokens_per_verification()},
          {"accepted_length", stats.tokens_per_verification() - (stats.verifications > 0)},
          {"acceptance", stats.acceptance()},
          {"acceptance_by_depth", shares(stats.by_depth)},
          {"acceptance_by_child", shares(stats.by_child)},
          {"tree", stats.shape.parents},
          {"draft_step_seconds", stats.draft_step},
          {"verification", verification},
          {"full_step_seconds", stats.full_step},
          {"speedup", stats.speedup()}};
}

std::string acceptance_text(const DraftStats& stats) {
  if (stats.verifications == 0)
    return "nothing was drafted, because the first steps measure the full cache; raise "
           "--max-new-tokens";
  return fmt::format(
      "{:.2f} tokens per verification; accepted length {:.2f} of {}; acceptance {:.3f}",
      stats.tokens_per_verification(), stats.tokens_per_verification() - 1, stats.shape.depth(),
      stats.acceptance());
}

std::string speedup_text(const DraftStats& stats) {
  if (stats.speedup() == 0) return "";
  const double round = stats.drafting_seconds / static_cast<double>(stats.verifications);
  const std::string times = fmt::format(
      "drafts and a verification take {:.1f} ms, {:.2f} times as long as a step of the full cache "
      "({:.1f} ms)",
      round * 1e3, round / stats.full_step, stats.full_step * 1e3);
  if (stats.speedup() >= 1)
    return fmt::format("drafting is {:.2f}x as fast as decoding without drafts: {}",
                       stats.speedup(), times);
  return fmt::format("drafting does not pay here: {}, but bring only {:.2f} tokens", times,
                     stats.tokens_per_verification());
}

}  // namespace kvlab
