// Reads policy.json for users of kvlab.h, as integers that the library's calls take. It is compiled
// into the library, which contains the registered policies but no catalogue.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <vector>

#include "kernels/kvlab.h"
#include "kernels/why_not.hpp"
#include "policies/budgets/budget.hpp"
#include "policies/observation.hpp"
#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"
#include "traces/base/old_keys.hpp"

namespace kvlab {
namespace {

using nlohmann::json;

constexpr std::streamsize kMaxBytes = std::streamsize{1} << 24;

std::string text_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file.is_open()) throw std::runtime_error(path + ": cannot be read");
  if (static_cast<std::streamsize>(text.size()) > kMaxBytes)
    throw std::runtime_error(path + ": is larger than 16 MiB, so it is not a policy.json");
  return text;
}

/// Reads tokens, or a share as text ("50%").
Extent extent_from(const JsonFields& protected_tokens, const char* key) {
  if (protected_tokens.any(key).is_number()) return tokens(protected_tokens.whole32(key));
  const std::string text = protected_tokens.text(key);
  char* end = nullptr;
  const double share = std::strtod(text.c_str(), &end);
  if (end == text.c_str() || std::string_view(end) != "%" || !(share >= 0 && share <= 100))
    protected_tokens.refuse(key, "tokens, or a share such as \"50%\", are expected");
  return {.share_ppm = static_cast<std::uint32_t>(std::lround(share * 1e4)), .is_share = true};
}

/// Reads a modifier with two possible words. Returns whether it is the second.
bool is_second(const JsonFields& fields, const char* key, const char* first, const char* second) {
  if (!fields.has(key)) return false;
  const std::string word = fields.text(key);
  if (word != first && word != second)
    fields.refuse(key, fmt::format("{} or {} is expected", first, second));
  return word == second;
}

void read_modifiers(const JsonFields& top, kvlab_policy_file& file, bool& group_max) {
  file.every = 1;
  if (!top.has("modifiers")) return;
  const JsonFields fields = top.object("modifiers");
  fields.allow_only({"every", "once", "smooth", "pool", "scope", "group"});
  if (fields.has("every")) file.every = fields.size("every", 0x7fff'ffff);
  file.once = fields.flag("once", false) ? 1 : 0;
  if (fields.has("smooth")) file.smooth = fields.whole32("smooth");
  file.pool_max = is_second(fields, "pool", "mean", "max") ? 1 : 0;
  file.by_layer = is_second(fields, "scope", "head", "layer") ? 1 : 0;
  group_max = is_second(fields, "group", "sum", "max");
}

void read_policy(const JsonFields& top, kvlab_policy_file& file) {
  const std::string name = top.text("policy");
  if (top.has("source"))
    top.refuse("source",
               "a policy of the library is expected; for others use kvlab_compile_policy");
  file.policy = kvlab_find_policy(name.c_str());
  if (file.policy == nullptr || name == "full")
    top.refuse("policy", "a policy of the library that evicts is expected");
  const JsonFields params = top.object("params");
  std::size_t known = 0;
  if (params.has("name")) {
    const std::string feature = params.text("name");
    if (name != "feature" || feature.size() >= sizeof file.feature)
      params.refuse(
          "name",
          "a feature name of fewer than 64 letters, and the policy 'feature', are expected");
    feature.copy(file.feature, sizeof file.feature - 1);
    ++known;
  }
  for (; const char* param = kvlab_policy_parameter(file.policy, file.param_count); ++known) {
    if (file.param_count == KVLAB_MAX_PARAMS)
      top.refuse("policy", fmt::format("at most {} parameters are expected", KVLAB_MAX_PARAMS));
    file.params[file.param_count++] = params.number(param);
  }
  if (params.json().size() != known)
    top.refuse("params", fmt::format("exactly the {} parameters of {} are expected", known, name));
  std::vector<std::byte> unused(kvlab_policy_params_bytes(file.policy));
  if (kvlab_policy_params(file.policy, file.params, file.param_count, unused.data()))
    top.refuse("params", "numbers in the ranges of `kvlab policies` are expected");
}

/// Reads a layer's budgets: one number, or one for each head; null: all tokens stay.
std::vector<std::uint32_t> layer_from(const json& layer, std::size_t heads,
                                      std::string_view where) {
  if (layer.is_null()) return std::vector<std::uint32_t>(heads, kNoBudget);
  if (!layer.is_array()) return std::vector<std::uint32_t>(heads, whole_number(layer, where));
  std::vector<std::uint32_t> own;
  for (const json& head : layer) own.push_back(whole_number(head, where));
  return own;
}

/// The mean of "pyramid(128)"; 0 if the budget is not a pyramid.
std::uint32_t pyramid_from(const json& budget) {
  const std::string text = budget.is_string() ? budget.get<std::string>() : "";
  unsigned mean = 0;
  int end = 0;
  const bool found = std::sscanf(text.c_str(), "pyramid(%9u)%n", &mean, &end) == 1;
  return found && static_cast<std::size_t>(end) == text.size() ? mean : 0;
}

HeadBudgets budgets_from(const JsonFields& top, const kvlab_policy_file& file,
                         std::uint32_t least) {
  const auto layers = static_cast<std::size_t>(file.layers),
             heads = static_cast<std::size_t>(file.kv_heads);
  const json& budget = top.any("budget");
  HeadBudgets all;
  if (const std::uint32_t mean = pyramid_from(budget); mean > 0) {
    for (const std::uint32_t own :
         pyramid_budgets(mean, file.tokens, least, static_cast<std::uint32_t>(layers)))
      all.emplace_back(heads, own);
  } else if (budget.is_array()) {
    for (const json& layer : budget)
      all.push_back(layer_from(layer, heads, top.where() + ": budget"));
  } else if (budget.is_number()) {
    all.assign(layers, layer_from(budget, heads, top.where() + ": budget"));
  } else {
    top.refuse("budget", "tokens, a list of them, or pyramid(TOKENS) are expected");
  }
  const CacheShape model{static_cast<std::uint32_t>(layers), static_cast<std::uint32_t>(heads)};
  check_shape(all, model, top.where() + ": budget");
  return all;
}

void read_rules(const JsonFields& top, kvlab_policy_file& file, bool group_max) {
  const JsonFields protected_tokens = top.object("protected");
  protected_tokens.allow_only({"sinks", "recent"});
  const Extent sinks = extent_from(protected_tokens, "sinks"),
               recent = extent_from(protected_tokens, "recent");
  const std::uint32_t first = sinks.is_share ? 0 : sinks.tokens;
  const std::uint32_t least =
      std::max({1u, first + 1, first + (recent.is_share ? 0 : recent.tokens)});
  kvlab_rule* rule = file.rules;
  for (const auto& layer : budgets_from(top, file, least))
    for (const std::uint32_t budget : layer) {
      const bool stays = budget == kNoBudget;
      *rule = {budget, stays ? 0 : sinks.resolve(budget), stays ? 0 : recent.resolve(budget),
               group_max ? 1u : 0u};
      if (budget < 1 || (!stays && budget > 0x7fff'ffff) || rule->sinks >= budget ||
          rule->recent > budget - rule->sinks)
        top.refuse(
            "budget",
            fmt::format("at least {} tokens, for the protected tokens, are expected", least));
      ++rule;
    }
}

void read(const JsonFields& top, kvlab_policy_file& file) {
  top.check_format(1);
  top.allow_only({"format", "policy", "params", "protected", "modifiers", "budget", "positions",
                  "prefill", "threshold", "seed", "model", "run", "source"});
  bool group_max = false;
  read_policy(top, file);
  read_modifiers(top, file, group_max);
  read_rules(top, file, group_max);
  file.numbering = is_second(top, "positions", "original", "cache") ? KVLAB_CACHE_POSITIONS
                                                                    : KVLAB_ORIGINAL_POSITIONS;
  const std::string prefill = top.text("prefill");
  int end = 0;
  if (prefill == "stream")
    file.prefill_chunk = 1;
  else if (prefill != "dense" &&
           (std::sscanf(prefill.c_str(), "chunk:%9u%n", &file.prefill_chunk, &end) != 1 ||
            static_cast<std::size_t>(end) != prefill.size() || file.prefill_chunk == 0))
    top.refuse("prefill", "dense, stream or chunk:N is expected");
  file.threshold16 = request_threshold16(top.number("threshold", 0, 1));
  if (top.has("seed")) file.seed = top.whole("seed");
}

}  // namespace
}  // namespace kvlab

extern "C" cudaError_t kvlab_read_policy_file(const char* path, kvlab_policy_file* file) {
  using namespace kvlab;
  const auto refused = [](const std::string& why) {
    return kernels::record_error("kvlab_read_policy_file", cudaErrorInvalidValue, why);
  };
  if (path == nullptr || file == nullptr) return refused("an argument is NULL");
  if (const std::string why = kernels::why_not_size(*file); !why.empty()) return refused(why);
  if (file->layers < 1 || file->kv_heads < 1 || file->tokens < 1 || file->rules == nullptr)
    return refused("layers, kv_heads, tokens or rules is 0; those of the model are expected");
  try {
    kvlab_policy_file found{.struct_size = sizeof found,
                            .layers = file->layers,
                            .kv_heads = file->kv_heads,
                            .tokens = file->tokens,
                            .rules = file->rules};
    const json top = parse_result_json(text_of(path), path);
    read(JsonFields(top, path), found);
    *file = found;
    return kernels::record_error("kvlab_read_policy_file", cudaSuccess);
  } catch (const std::exception& error) {
    return refused(error.what());
  }
}
