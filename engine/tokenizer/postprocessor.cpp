#include "engine/tokenizer/postprocessor.hpp"

#include <fmt/format.h>

#include <stdexcept>
#include "traces/base/json.hpp"

namespace kvlab::tokenizer {
namespace {

void append_special(const Node& known, const Node& item, std::vector<std::int32_t>& ids) {
  const Node token = known.child(item.text("id"));
  for (const Json& id : token.list("ids")) ids.push_back(token_id(id, token.path("ids")));
}

// The template for one text: special tokens around $A.
PostProcessor read_template(const Node& node) {
  PostProcessor result;
  bool text_seen = false;
  for (const Node& item : node.children("single")) {
    if (item.find("SpecialToken") != nullptr) {
      append_special(node.child("special_tokens"), item.child("SpecialToken"),
                     text_seen ? result.after : result.before);
    } else if (item.child("Sequence").text("id") == "A" && !text_seen) {
      text_seen = true;
    } else {
      throw std::runtime_error(fmt::format(
          "{}: the text must appear once in the template, as sequence A", item.where()));
    }
  }
  if (!text_seen) {
    throw std::runtime_error(fmt::format("{} has no sequence A", node.path("single")));
  }
  return result;
}

}  // namespace

PostProcessor PostProcessor::from_file(const Node& file) {
  PostProcessor result;
  for (const Node& node : flatten_sequence(file, "post_processor", "processors")) {
    const std::string type = node.type();
    if (type == "TemplateProcessing") {
      // A later template goes around an earlier one.
      const PostProcessor outer = read_template(node);
      result.before.insert(result.before.begin(), outer.before.begin(), outer.before.end());
      result.after.insert(result.after.end(), outer.after.begin(), outer.after.end());
    } else if (type != "ByteLevel") {  // which moves offsets only
      throw std::runtime_error(
          fmt::format("{}: post-processor {} is not supported; "
                      "TemplateProcessing, ByteLevel and Sequence are",
                      node.where(), json_quoted(type)));
    }
  }
  return result;
}

}  // namespace kvlab::tokenizer
