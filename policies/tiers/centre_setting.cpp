#include "policies/tiers/centre_setting.hpp"

#include <fmt/format.h>

#include <stdexcept>

namespace kvlab {

std::span<const float> CentreConstants::centre(std::uint32_t layer, std::uint32_t kv_head) const {
  const auto found = layers.find(layer);
  if (found == layers.end() || kv_head >= kv_heads)
    throw std::logic_error(
        fmt::format("centre: no constants of layer {}, head {}", layer, kv_head));
  return std::span(found->second).subspan(std::size_t{kv_head} * head_size, head_size);
}

std::string CentreSetting::text() const {
  if (kind == KeyCentre::constants) return "@" + file;
  return kind == KeyCentre::none ? "none" : "prompt";
}

std::string CentreSetting::text_in(const std::filesystem::path& folder) const {
  if (kind != KeyCentre::constants) return text();
  return "@" + std::filesystem::proximate(file, folder.empty() ? "." : folder).string();
}

CentreSetting parse_key_centre(std::string_view text) {
  if (text == "none") return KeyCentre::none;
  if (text == "prompt") return KeyCentre::prompt;
  if (!text.starts_with('@') || text.size() == 1)
    throw std::invalid_argument(fmt::format("centre: '{}' should be none, prompt or @FILE", text));
  // The texts of policies separate settings by colons, and lists of policies by commas.
  if (text.find_first_of(":,") != std::string_view::npos)
    throw std::invalid_argument(fmt::format(
        "centre: '{}': the path cannot contain ':' or ','; rename the file or its folder", text));
  CentreSetting setting = KeyCentre::constants;
  setting.file = text.substr(1);
  return setting;
}

CentreSetting parse_key_centre_in(const std::filesystem::path& folder, std::string_view text) {
  CentreSetting written = parse_key_centre(text);
  if (written.kind != KeyCentre::constants) return written;
  if (std::filesystem::path(written.file).is_absolute())
    throw std::invalid_argument(
        fmt::format("centre: '{}': a path relative to this file's folder is expected", text));
  return parse_key_centre("@" + (folder / written.file).string());
}

void check_centre(bool has_softcap, bool has_sink_logits) {
  if (!has_softcap && !has_sink_logits) return;
  throw std::invalid_argument(
      fmt::format("centre: the model has {}, so a centre would change attention; use centre=none",
                  has_softcap ? "a soft cap on attention scores" : "sink logits"));
}

}  // namespace kvlab
