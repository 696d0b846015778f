// Tests of the chat templates that kvlab supports, and of those that it refuses.

#include <stdexcept>

#include "engine/evaluation/task/sample.hpp"
#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/skip.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using test::error_of;

constexpr const char* kSmolLm =
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
    "Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}";

TEST_CASE("ChatML is recognized, with its default system message") {
  const ChatFrame frame = chat_frame(kSmolLm, "f");
  CHECK(frame.before ==
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>\n<|im_start|>user\n");
  CHECK(frame.after == "<|im_end|>\n<|im_start|>assistant\n");
}

TEST_CASE(
    "A system message is taken only if it is one literal, and not from a branch that composes it") {
  // As in Qwen2.5's template, line breaks are written in Jinja, and a branch for tools comes first.
  const ChatFrame qwen = chat_frame(
      R"({%- if tools %}{{- '<|im_start|>system\n' }}{{- messages[0]['content'] }}{{- '<|im_end|>\n' }})"
      R"({%- else %}{{- '<|im_start|>system\nYou are Qwen.<|im_end|>\n' }}{%- endif %})"
      R"({{- '<|im_start|>assistant\n' }})",
      "f");
  CHECK(qwen.before == "<|im_start|>system\nYou are Qwen.<|im_end|>\n<|im_start|>user\n");
  const ChatFrame plain = chat_frame("{{'<|im_start|>' + role + '<|im_end|>'}}", "f");
  CHECK(plain.before == "<|im_start|>user\n");
}

TEST_CASE("Templates of other families are recognized by what they print") {
  // tests/python/test_chat_templates.py compares these frames with transformers.
  const std::string file = KVLAB_SOURCE_DIR "/tests/data/chat_templates.json";
  for (const auto& known : parse_json(read_text_file(file, 1 << 20), file)) {
    INFO(known.at("name"));
    const auto text = [&](const char* key) { return known.at(key).get<std::string>(); };
    const ChatFrame frame = chat_frame(text("template"), "f", text("bos"));
    CHECK(frame.before == text("before"));
    CHECK(frame.after == text("after"));
    // If a template prints more text, it is another template, which kvlab refuses.
    if (text("name") != "SmolLM2")
      CHECK_THROWS_AS(chat_frame("Hello. " + text("template"), "f"), std::invalid_argument);
  }
}

TEST_CASE("Other templates are refused by name") {
  const auto refusal = [](const char* text) {
    return error_of<std::invalid_argument>([&] { chat_frame(text, "dir/tokenizer_config.json"); });
  };
  CHECK(refusal("<|start_header_id|>") ==
        "dir/tokenizer_config.json: its chat template is Llama 3's headers, in a form that is not "
        "supported; --no-chat runs without it");
  CHECK(refusal("{{ '[INST] ' }}").find("Llama 2 and Mistral") != std::string::npos);
  CHECK(refusal("hello").find("of an unknown kind") != std::string::npos);
  CHECK(refusal("{{ strftime_now('%d') }}").find("writes today's date") != std::string::npos);
  CHECK(refusal("{{ '<|im_start|>user<|im_sep|><|im_end|>' }}").find("not supported") !=
        std::string::npos);
  CHECK(refusal("{{ '<|im_start|>").find("not supported") != std::string::npos);
  CHECK(refusal("<|im_start|> <|im_end|> <think>").find("<think>") != std::string::npos);
  // Llama 3's frame has no fixed system message, so a template that always prints one is refused.
  CHECK(refusal("{{ '<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>' }}{{ "
                "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + "
                "message['content'] | trim + '<|eot_id|>' }}{{ "
                "'<|start_header_id|>assistant<|end_header_id|>\n\n' }}")
            .find("not supported") != std::string::npos);
}

TEST_CASE("The chat template is found in each file in which a model may have it") {
  const test::TemporaryFolder folder;
  const auto write = [&](const char* name, const std::string& text) {
    std::ofstream(folder / name) << text;
  };
  CHECK(!read_chat_frame(folder.path()));
  write("tokenizer_config.json", "{\"bos_token\": \"<s>\"}");
  CHECK(!read_chat_frame(folder.path()));
  const std::string chat_ml = "\"<|im_start|>\\n<|im_end|>\"";
  write("tokenizer_config.json", "{\"chat_template\": " + chat_ml + "}");
  CHECK(read_chat_frame(folder.path())->before == "<|im_start|>user\n");
  write("tokenizer_config.json",
        "{\"chat_template\": [{\"name\": \"tools\", \"template\": \"[INST]\"}, {\"name\": "
        "\"default\", \"template\": " +
            chat_ml + "}]}");
  CHECK(read_chat_frame(folder.path()));
  write("tokenizer_config.json", "{\"chat_template\": 7}");
  CHECK_THROWS_AS(read_chat_frame(folder.path()), std::runtime_error);
  write("tokenizer_config.json", "{}");
  write("chat_template.json", "{\"chat_template\": " + chat_ml + "}");
  CHECK(read_chat_frame(folder.path()));
  write("chat_template.jinja", "[INST]");
  CHECK_THROWS_AS(read_chat_frame(folder.path()), std::invalid_argument);
}

TEST_CASE("A template that writes the first token does not get it twice") {
  const test::TemporaryFolder folder;
  const auto write = [&](const char* name, const std::string& text) {
    std::ofstream(folder / name) << text;
  };
  write("chat_template.jinja", "{{ bos_token }}{{'<|im_start|>' + role + '<|im_end|>'}}");
  CHECK(read_chat_frame(folder.path())->before == "<|im_start|>user\n");
  write("tokenizer_config.json", "{\"bos_token\": {\"content\": \"<s>\"}}");
  CHECK(read_chat_frame(folder.path())->before == "<s><|im_start|>user\n");
  write("tokenizer_config.json", "{\"bos_token\": \"<s>\"}");
  const Tokenizer tokenizer =
      Tokenizer::load(KVLAB_SOURCE_DIR "/engine/models/tiny/tokenizer.json");
  const TaskSample sample = sample_task({}, Haystack(bundled_haystack()), {20, 0.5}, 0, 0);
  const auto ids = encode_task(tokenizer, read_chat_frame(folder.path()), sample).context;
  CHECK(std::count(ids.begin(), ids.end(), 0) == 1);
  CHECK(ids.front() == 0);
}

TEST_CASE("SmolLM2's template marks are single tokens, and the ids equal those of the text") {
  const std::filesystem::path directory = KVLAB_SOURCE_DIR "/engine/models/smollm2";
  if (!std::filesystem::exists(directory / "model.safetensors"))
    return skip("no SmolLM2, which ./dev model smollm2 fetches");
  const Tokenizer tokenizer = Tokenizer::load(directory / "tokenizer.json");
  const auto frame = read_chat_frame(directory);
  REQUIRE(frame);
  CHECK(frame->before == chat_frame(kSmolLm, "f").before);
  const TaskSample sample = sample_task({}, Haystack(bundled_haystack()), {100, 0.5}, 0, 0);
  const TaskPrompt prompt = encode_task(tokenizer, frame, sample);
  std::vector<std::int32_t> whole = prompt.context;
  whole.insert(whole.end(), prompt.question.begin(), prompt.question.end());
  whole.insert(whole.end(), prompt.answer.begin(), prompt.answer.end());
  CHECK(std::count(whole.begin(), whole.end(), *tokenizer.id_of("<|im_start|>")) == 3);
  CHECK(std::count(whole.begin(), whole.end(), *tokenizer.id_of("<|im_end|>")) == 2);
  CHECK(tokenizer.decode(whole, false) == frame->before + sample.context + sample.question +
                                              frame->after + sample.lead + sample.answer());
  CHECK(tokenizer.decode(prompt.answer) == sample.answer());
}

}  // namespace
}  // namespace kvlab
