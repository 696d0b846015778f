#include "engine/tokenizer/normalizer.hpp"

#include <fmt/format.h>

#include <stdexcept>

#include "engine/tokenizer/text.hpp"
#include "traces/base/text.hpp"

namespace kvlab::tokenizer {
namespace {

constexpr std::size_t kMaxGrowth = 64;

}  // namespace

Normalizer Normalizer::from_file(const Node& file) {
  Normalizer normalizer;
  for (const Node& node : flatten_sequence(file, "normalizer", "normalizers")) {
    normalizer.steps_.push_back(read_step(node));
  }
  return normalizer;
}

Normalizer::Step Normalizer::read_step(const Node& node) {
  const std::string type = node.type();
  if (type == "NFC") return Nfc{};
  if (type == "Prepend") return Prepend{node.content("prepend")};
  if (type == "Replace") return Replace{string_pattern(node), node.content("content")};
  throw std::runtime_error(
      fmt::format("{}: normalizer {} is not supported; NFC, Prepend, Replace and Sequence are",
                  node.where(), json_quoted(type)));
}

std::string_view Normalizer::apply(std::string_view text, std::string& result) const {
  std::string_view done = text;
  for (const Step& step : steps_) {
    done = result = std::visit([&](const auto& known) { return run(known, done); }, step);
    if (result.size() / kMaxGrowth > text.size() + kMaxContentBytes) {
      throw std::runtime_error(fmt::format(
          "the tokenizer's normalizer makes the text more than {} times as long", kMaxGrowth));
    }
  }
  return done;
}

std::string Normalizer::run(const Nfc&, std::string_view text) { return nfc(text); }

std::string Normalizer::run(const Prepend& step, std::string_view text) {
  if (text.empty()) return {};
  return step.text + std::string(text);
}

std::string Normalizer::run(const Replace& step, std::string_view text) {
  return replace_all(text, step.from, step.to);
}

}  // namespace kvlab::tokenizer
