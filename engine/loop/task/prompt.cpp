#include "engine/loop/task/prompt.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <utility>

#include "engine/loop/conversation.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kMaxConfigBytes = std::size_t{64} << 20;
constexpr std::string_view kStart = "<|im_start|>", kEnd = "<|im_end|>";

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

/// What a template is, for the message that refuses it.
std::string_view name_of_template(std::string_view chat_template) {
  constexpr std::array<std::pair<std::string_view, std::string_view>, 4> kKnown{{
      {"<|start_header_id|>", "Llama 3's headers"},
      {"[INST]", "[INST], of Llama 2 and Mistral"},
      {"<start_of_turn>", "Gemma's turns"},
      {"<|user|>", "<|user|>, of Zephyr and Phi"},
  }};
  for (const auto& [mark, name] : kKnown)
    if (contains(chat_template, mark)) return name;
  return "of an unknown kind";
}

/// Line breaks may be escaped: within Jinja's quotes both forms stand for one.
std::string unescaped(std::string_view text) {
  std::string plain;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool line_break = text.substr(i).starts_with("\\n");
    plain += line_break ? '\n' : text[i];
    if (line_break) ++i;
  }
  return plain;
}

/// The first system message that stands in the template as a whole; "" if none does.
std::string default_system_message(std::string_view chat_template) {
  const std::string plain = unescaped(chat_template);
  const std::string opening = fmt::format("{}system\n", kStart);
  for (std::size_t at = plain.find(opening); at != std::string::npos;
       at = plain.find(opening, at + 1)) {
    const std::size_t begin = at + opening.size(), end = plain.find(kEnd, begin);
    if (end == std::string::npos) return "";
    std::string message = plain.substr(begin, end - begin);
    if (!message.empty() && message.find_first_of("'\"{}") == std::string::npos) return message;
  }
  return "";
}

/// The text of the first token, as a template may write it.
std::string bos_of(const nlohmann::json& config) {
  const nlohmann::json* entry = json_find(config, "bos_token");
  if (entry && entry->is_object()) entry = json_find(*entry, "content");
  return entry && entry->is_string() ? entry->get<std::string>() : "";
}

/// The template's text: a string, or the default of several.
std::string template_of(const nlohmann::json& config, const std::string& file) {
  const nlohmann::json* const entry = json_find(config, "chat_template");
  if (!entry) return "";
  if (entry->is_string()) return entry->get<std::string>();
  if (entry->is_array())
    for (const nlohmann::json& one : *entry)
      if (one.is_object() && JsonFields(one, file).raw("name") == "default")
        return JsonFields(one, file).raw("template");
  throw std::runtime_error(
      fmt::format("{}: chat_template should be a string, or a list with one named default", file));
}

}  // namespace

ChatFrame chat_frame(std::string_view chat_template, std::string_view file, std::string_view bos) {
  const bool chat_ml = contains(chat_template, kStart) && contains(chat_template, kEnd);
  if (!chat_ml)
    throw std::invalid_argument(
        fmt::format("{}: its chat template is {}; only ChatML is known, --no-chat asks without",
                    file, name_of_template(chat_template)));
  if (contains(chat_template, "<think>"))
    throw std::invalid_argument(fmt::format(
        "{}: its chat template begins answers with thoughts; --no-chat asks without", file));
  const std::string system = default_system_message(chat_template);
  const std::string turn =
      system.empty() ? "" : fmt::format("{}system\n{}{}\n", kStart, system, kEnd);
  return {.before = fmt::format("{}{}{}user\n", contains(chat_template, "bos_token") ? bos : "",
                                turn, kStart),
          .after = fmt::format("{}\n{}assistant\n", kEnd, kStart)};
}

std::optional<ChatFrame> read_chat_frame(const std::filesystem::path& directory) {
  const auto json_of = [&](const char* name) -> nlohmann::json {
    const std::filesystem::path file = directory / name;
    if (!std::filesystem::exists(file)) return {};
    return parse_json(read_text_file(file, kMaxConfigBytes), file.string());
  };
  const nlohmann::json config = json_of("tokenizer_config.json");
  const std::string bos = bos_of(config);
  const std::filesystem::path jinja = directory / "chat_template.jinja";
  if (std::filesystem::exists(jinja))
    return chat_frame(read_text_file(jinja, kMaxConfigBytes), jinja.string(), bos);
  for (const char* name : {"tokenizer_config.json", "chat_template.json"}) {
    const std::string file = (directory / name).string();
    const std::string text = template_of(json_of(name), file);
    if (!text.empty()) return chat_frame(text, file, bos);
  }
  return {};
}

std::string_view name_of(QueryMode mode) {
  return mode == QueryMode::aware ? "query-aware" : "query-agnostic";
}

std::vector<std::vector<std::int32_t>> TaskPrompt::segments(QueryMode mode) const {
  if (mode == QueryMode::agnostic) return {context, question};
  std::vector<std::int32_t> whole = context;
  whole.insert(whole.end(), question.begin(), question.end());
  return {std::move(whole)};
}

TaskPrompt encode_task(const Tokenizer& tokenizer, const std::optional<ChatFrame>& chat,
                       const TaskDraw& draw) {
  TaskPrompt prompt;
  // A chat template writes all special tokens itself.
  prompt.context = chat ? tokenizer.encode(chat->before + draw.context, false)
                        : encode_prompt(tokenizer, draw.context);
  const std::string question = draw.question + (chat ? chat->after : std::string("\n")) + draw.lead;
  // The border of the answer is where its text changes the ids.
  prompt.question = tokenizer.encode(question, false);
  const std::vector<std::int32_t> answered = tokenizer.encode(question + draw.answer(), false);
  const auto border = std::ranges::mismatch(prompt.question, answered);
  prompt.answer.assign(border.in2, answered.end());
  prompt.question.erase(border.in1, prompt.question.end());
  prompt.expected = draw.expected;
  prompt.evidence = draw.evidence;
  return prompt;
}

}  // namespace kvlab
