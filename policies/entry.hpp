// A policy as data: what it says of itself, and how to make its states. One line of the registry,
// or a header that was compiled at run time.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "policies/bytes.hpp"
#include "policies/states.hpp"

namespace kvlab {

struct ParamInfo {
  std::string name, help;
  double standard, least, most;
};

/// The header of a policy that was compiled at run time.
struct PolicySource {
  std::string path;  ///< as asked for
  std::string text;
  std::string xxh3;  ///< of the text, 16 hex digits
  std::string type;  ///< qualified name of the struct: kvlab::Tova
};

/// `text` as a C++ literal: for #line.
inline std::string c_literal(const std::string& text) {
  std::string literal = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') literal += '\\';
    literal += c;
  }
  return literal + '"';
}

struct PolicyEntry {
  PolicyInfo info;
  std::vector<ParamInfo> params;
  std::size_t slot_bytes;    ///< of policy state
  std::size_t params_bytes;  ///< of Params
  /// Writes params_bytes: one value for each parameter.
  void (*write_params)(std::span<const double> values, std::byte* to);
  std::unique_ptr<PolicyStates> (*make_states)(std::span<const double> params);
  std::shared_ptr<const PolicySource> source;  ///< null: compiled with kvlab
};

template <Policy P>
std::unique_ptr<PolicyStates> make_states_of(std::span<const double> values) {
  return std::make_unique<PolicyStatesOf<P>>(params_from<P>(values.data()));
}

template <Policy P>
PolicyEntry make_entry() {
  PolicyEntry entry{.info = P::kInfo,
                    .params = {},
                    .slot_bytes = kSlotBytes<P>,
                    .params_bytes = kParamsBytes<P>,
                    .write_params = write_params<P>,
                    .make_states = make_states_of<P>,
                    .source = nullptr};
  if constexpr (!std::is_empty_v<typename P::Params>)
    for (const auto& param : P::kParams)
      entry.params.push_back({param.name, param.help, param.standard, param.least, param.most});
  return entry;
}

}  // namespace kvlab
