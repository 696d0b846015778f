// What `kvlab fidelity` leaves behind: a tidy table, a JSON object, and what policy files say of
// it.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>

#include "engine/loop/fidelity/fidelity.hpp"

namespace kvlab {

inline constexpr int kFidelityFormat = 2;
inline constexpr const char* kFidelityCsv = "fidelity.csv";
inline constexpr const char* kFidelityJson = "fidelity.json";

/// text,policy,params,budget,budget_tokens,prefill,positions,seed,metric,value: one figure a row;
/// `kl` is the truth.
std::string fidelity_csv(std::span<const CacheConfig> configs, std::span<const FidelityText> texts,
                         std::uint32_t head_size);

/// Adds `texts`, `tokens` and `prompt_tokens` by text, `metrics`, `default_metric` and `ceiling` to
/// what is there.
void add_fidelity(nlohmann::ordered_json& json, const Fidelity& fidelity,
                  std::span<const CacheConfig> configs, std::span<const FidelityText> texts);

/// How good a figure was when it was measured, from a fidelity.json: at the budget that is nearest
/// in tokens. Throws std::runtime_error that names the file: broken, of other weights, without this
/// metric, of shares of texts that differ in length.
nlohmann::json fidelity_evidence(const std::filesystem::path& file, const std::string& metric,
                                 std::uint32_t budget_tokens, const std::string& weights_xxh3);

/// One sentence of that evidence.
std::string evidence_text(const nlohmann::json& evidence);

}  // namespace kvlab
