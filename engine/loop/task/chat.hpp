// How a model's chat template dresses one message of a user.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace kvlab {

/// The text before a user's message, and behind it, up to where the answer begins.
struct ChatFrame {
  std::string before, after;
};

/// Of a template as tokenizer_config.json holds it, in Jinja, which is not interpreted: ChatML is
/// recognised, with its own system message where it has one, behind `bos` where it says bos_token.
/// Throws std::invalid_argument for any
/// other, and for one whose answers begin with thoughts; `file` is named.
ChatFrame chat_frame(std::string_view chat_template, std::string_view file,
                     std::string_view bos = "");

/// Of the model in `directory`, by chat_template.jinja, tokenizer_config.json or
/// chat_template.json, whichever has one first; none where it has no template. Throws as
/// chat_frame() does, and std::runtime_error for a broken file.
std::optional<ChatFrame> read_chat_frame(const std::filesystem::path& directory);

}  // namespace kvlab
