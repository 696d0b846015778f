// Recognizes chat templates by the expressions that print a message, without interpreting Jinja.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <span>
#include <stdexcept>
#include <utility>

#include "engine/evaluation/task/sample.hpp"
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

/// The name of a template's kind, for the message that refuses the template.
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

/// Replaces the escape sequence \n by a line break, because both mean the same in Jinja's quotes.
std::string unescape(std::string_view text) {
  std::string plain;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool line_break = text.substr(i).starts_with("\\n");
    plain += line_break ? '\n' : text[i];
    if (line_break) ++i;
  }
  return plain;
}

void replace_in(std::string& text, std::string_view from, std::string_view to) {
  for (std::size_t at = text.find(from); at != std::string::npos;
       at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
}

/// The first complete system message in the template; "" if there is none.
std::string default_system_message(std::string_view chat_template) {
  const std::string plain = unescape(chat_template);
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

/// The expressions with which a family's templates print messages, in the form of
/// normalize_template().
struct KnownTemplate {
  std::string_view mark;                        ///< begins each message
  std::span<const std::string_view> printed;    ///< for a user's message; all must be there
  std::span<const std::string_view> unprinted;  ///< for other messages; may be there
  std::string_view before, after;               ///< ChatFrame, without BOS
};

// Llama 3, and 3.1 and 3.3, whose system message has a fixed date.
constexpr std::string_view kLlamaMark = "<|start_header_id|>";
constexpr std::string_view kLlamaUser = "<|start_header_id|>user<|end_header_id|>\n\n";
constexpr std::string_view kLlamaAfter =
    "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n";
constexpr std::string_view kLlama3[] = {
    "'<|start_header_id|>'+message['role']+'<|end_header_id|>\n\n'+message['content']|trim+"
    "'<|eot_id|>'",
    "'<|start_header_id|>assistant<|end_header_id|>\n\n'"};
constexpr std::string_view kLlama31[] = {
    kLlama3[0],
    kLlama3[1],
    "{%setdate_string='26 Jul 2024'%}",
    "{%setsystem_message=''%}",
    "{{'<|start_header_id|>system<|end_header_id|>\n\n'}}",
    "{{'Cutting Knowledge Date: December 2023\n'}}{{'Today Date: '+date_string+'\n\n'}}",
    "{{system_message}}{{'<|eot_id|>'}}"};
constexpr std::string_view kLlama31Unprinted[] = {
    "'<|start_header_id|>user<|end_header_id|>\n\n'",
    "'<|start_header_id|>ipython<|end_header_id|>\n\n'"};

constexpr std::string_view kGemma[] = {"'<start_of_turn>'+role+'\n'", "<end_of_turn>\n'",
                                       "'<start_of_turn>model\n'"};
constexpr std::string_view kPhi3[] = {"'<|user|>\n'+message['content']+'<|end|>\n",
                                      "<|assistant|>\n'"};
constexpr std::string_view kPhi4[] = {
    "'<|im_start|>user<|im_sep|>'+message['content']+'<|im_end|>'",
    "'<|im_start|>assistant<|im_sep|>'"};
constexpr std::string_view kPhi4Unprinted[] = {"'<|im_start|>system<|im_sep|>'"};
constexpr std::string_view kOlmo2[] = {"'<|user|>\n'+message['content']+'\n'", "'<|assistant|>\n'"};

// Mistral's templates differ in their spaces.
constexpr std::string_view kMistral1[] = {"'[INST] '+message['content']+' [/INST]'"};
constexpr std::string_view kMistral3[] = {"'[INST] '+message['content']+'[/INST]'"};
constexpr std::string_view kMistral3Unprinted[] = {
    "'[INST] '+system_message+'\n\n'+message['content']+'[/INST]'"};
constexpr std::string_view kNemo[] = {"'[INST]'+message['content']+'[/INST]'"};
constexpr std::string_view kNemoUnprinted[] = {
    "'[INST]'+system_message+'\n\n'+message['content']+'[/INST]'"};

constexpr KnownTemplate kKnownTemplates[] = {
    {kLlamaMark, kLlama3, {}, kLlamaUser, kLlamaAfter},
    {kLlamaMark, kLlama31, kLlama31Unprinted,
     "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday "
     "Date: 26 Jul 2024\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n",
     kLlamaAfter},
    {"<start_of_turn>",
     kGemma,
     {},
     "<start_of_turn>user\n",
     "<end_of_turn>\n<start_of_turn>model\n"},
    {"<|user|>", kPhi3, {}, "<|user|>\n", "<|end|>\n<|assistant|>\n"},
    {"<|im_sep|>", kPhi4, kPhi4Unprinted, "<|im_start|>user<|im_sep|>",
     "<|im_end|><|im_start|>assistant<|im_sep|>"},
    {"<|user|>", kOlmo2, {}, "<|user|>\n", "\n<|assistant|>\n"},
    {"[INST]", kMistral1, {}, "[INST] ", " [/INST]"},
    {"[INST]", kMistral3, kMistral3Unprinted, "[INST] ", "[/INST]"},
    {"[INST]", kNemo, kNemoUnprinted, "[INST]", "[/INST]"},
};

/// What Jinja prints of the white space between two tags, with transformers' trim_blocks and
/// lstrip_blocks. `left`, `right`: the tags, or empty at the ends of the template.
std::string_view printed_space(std::string_view space, std::string_view left,
                               std::string_view right) {
  if (left.ends_with("-}}") || left.ends_with("-%}") || right.starts_with("{{-") ||
      right.starts_with("{%-"))
    return "";
  if (left.ends_with("%}") && space.starts_with('\n')) space.remove_prefix(1);
  if (right.empty() && space == "\n") return "";
  if (right.starts_with("{%"))
    while (space.ends_with(' ') || space.ends_with('\t')) space.remove_suffix(1);
  return space;
}

/// Normalizes a tag: removes hyphens and white space outside of literals, puts literals in single
/// quotes, and joins adjacent literals.
std::string normalize_tag(std::string_view tag) {
  std::string plain;
  char quote = 0;
  const std::string unescaped_tag = unescape(tag);
  for (const char letter : unescaped_tag) {
    const bool is_quote = quote ? letter == quote : letter == '\'' || letter == '"';
    if (is_quote) quote = quote ? 0 : letter;
    if (is_quote)
      plain += '\'';
    else if (quote || (letter != ' ' && letter != '\n' && letter != '\t'))
      plain += letter;
  }
  for (const auto& [from, to] :
       {std::pair("'+'", ""), std::pair("{{-", "{{"), std::pair("-}}", "}}"),
        std::pair("{%-", "{%"), std::pair("-%}", "%}")})
    replace_in(plain, from, to);
  return plain;
}

/// The end of the tag that begins at `open`; npos if it is not closed. A literal may contain
/// braces.
std::size_t tag_end(std::string_view text, std::size_t open) {
  const std::string_view close = text[open + 1] == '{' ? "}}" : text[open + 1] == '%' ? "%}" : "#}";
  const bool has_literals = close != "#}";
  char quote = 0;
  for (std::size_t at = open + 2; at < text.size(); ++at) {
    if (quote == 0 && text.substr(at).starts_with(close)) return at + close.size();
    if (has_literals && (quote ? text[at] == quote : text[at] == '\'' || text[at] == '"'))
      quote = quote ? 0 : text[at];
  }
  return std::string_view::npos;
}

/// The tags of a template, normalized; nullopt if text between them is printed, or if a tag is not
/// closed.
std::optional<std::string> normalize_template(std::string_view chat_template) {
  std::string plain, last;
  for (std::size_t at = 0; at < chat_template.size();) {
    const std::size_t open =
        std::min(std::min(chat_template.find("{{", at), chat_template.find("{%", at)),
                 std::min(chat_template.find("{#", at), chat_template.size()));
    const std::string_view between = chat_template.substr(at, open - at);
    std::string_view tag;
    if (open < chat_template.size()) {
      const std::size_t end = tag_end(chat_template, open);
      if (end == std::string_view::npos) return std::nullopt;
      tag = chat_template.substr(open, end - open);
    }
    if (between.find_first_not_of(" \t\r\n") != std::string_view::npos ||
        !printed_space(between, last, tag).empty())
      return std::nullopt;
    if (!tag.starts_with("{#")) plain += normalize_tag(tag);
    last = tag;
    at = open + std::max<std::size_t>(tag.size(), 1);
  }
  return plain;
}

/// The known template that matches: all its printed expressions are in this template, and without
/// its expressions the mark of its family does not occur. nullptr if there is none.
const KnownTemplate* find_known(std::string_view chat_template) {
  const auto plain = normalize_template(chat_template);
  if (!plain || contains(*plain, "[SYSTEM_PROMPT]")) return nullptr;
  for (const KnownTemplate& known : kKnownTemplates) {
    const bool all = std::ranges::all_of(
        known.printed, [&](std::string_view expression) { return contains(*plain, expression); });
    if (!all) continue;
    std::string rest = *plain;
    for (const auto& expressions : {known.printed, known.unprinted})
      for (const std::string_view expression : expressions) replace_in(rest, expression, "");
    if (!contains(rest, known.mark)) return &known;
  }
  return nullptr;
}

/// The BOS token as text, as a template writes it.
std::string bos_of(const nlohmann::json& config) {
  const nlohmann::json* entry = json_find(config, "bos_token");
  if (entry && entry->is_object()) entry = json_find(*entry, "content");
  return entry && entry->is_string() ? entry->get<std::string>() : "";
}

/// The template: a string, or the default template of several.
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
  const std::string_view first = contains(chat_template, "bos_token") ? bos : "";
  if (contains(chat_template, "strftime_now"))
    throw std::invalid_argument(fmt::format(
        "{}: its chat template writes today's date, so that prompts would change from day to day; "
        "--no-chat runs without it",
        file));
  if (const KnownTemplate* known = find_known(chat_template))
    return {.before = fmt::format("{}{}", first, known->before),
            .after = std::string(known->after)};
  const bool chat_ml = contains(chat_template, kStart) && contains(chat_template, kEnd) &&
                       !contains(chat_template, "<|im_sep|>");
  if (!chat_ml)
    throw std::invalid_argument(
        fmt::format("{}: its chat template is {}, in a form that is not supported; --no-chat runs "
                    "without it",
                    file, name_of_template(chat_template)));
  if (contains(chat_template, "<think>"))
    throw std::invalid_argument(
        fmt::format("{}: its chat template starts answers with <think>, which is not supported; "
                    "--no-chat runs without the template",
                    file));
  const std::string system = default_system_message(chat_template);
  const std::string turn =
      system.empty() ? "" : fmt::format("{}system\n{}{}\n", kStart, system, kEnd);
  return {.before = fmt::format("{}{}{}user\n", first, turn, kStart),
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

}  // namespace kvlab
