// The C library links this file too.
#include "sim/budgets/budget_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"

namespace kvlab {
namespace {

using nlohmann::json;

std::uint32_t tokens_from(const json& value, const std::string& where) {
  const std::uint32_t tokens = whole_number(value, where);
  if (tokens == 0 || tokens > 0x7fff'ffffu)
    throw std::runtime_error(where + ": should be a number of tokens, at least 1");
  return tokens;
}

}  // namespace

Budget budget_from_json(const json& value, const std::string& where, std::string file) {
  if (!value.is_array())
    return {.extent = tokens(tokens_from(value, where)), .file = std::move(file)};
  HeadBudgets heads;
  const auto first = std::ranges::find_if(value, [](const json& v) { return !v.is_null(); });
  const bool by_head = first != value.end() && first->is_array();
  for (const json& layer : value) {
    const std::string at = fmt::format("{}[{}]", where, heads.size());
    if (layer.is_null()) {
      heads.emplace_back(by_head ? first->size() : 1, kNoBudget);
      continue;
    }
    if (layer.is_array() != by_head)
      throw std::runtime_error(at + (by_head
                                         ? ": should be a list of numbers of tokens, one for each "
                                           "KV head, as in earlier layers"
                                         : ": should be a number of tokens, as in earlier layers"));
    auto& own = heads.emplace_back();
    if (!by_head) own.push_back(tokens_from(layer, at));
    if (by_head)
      for (const json& head : layer)
        own.push_back(tokens_from(head, fmt::format("{}[{}]", at, own.size())));
  }
  try {
    return budget_of_heads(std::move(heads), std::move(file));
  } catch (const std::invalid_argument& error) {
    throw std::runtime_error(fmt::format("{}{}", where, error.what()));
  }
}

}  // namespace kvlab
