#include "traces/base/json.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <vector>

namespace kvlab {
namespace {

using nlohmann::json;

constexpr std::size_t kLongestQuote = 80;

/// Builds a value from the parser's events. Refuses duplicate keys and too deep nesting. The
/// library's own builder accepts both; of duplicate keys, it uses the last one.
class Builder : public nlohmann::json_sax<json> {
 public:
  Builder(std::string_view text, std::string_view what) : text_(text), what_(what) {}

  json take() { return std::move(root_); }

  bool null() override { return put(nullptr); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(number_integer_t value) override { return put(value); }
  bool number_unsigned(number_unsigned_t value) override { return put(value); }
  bool number_float(number_float_t value, const string_t&) override { return put(value); }
  bool string(string_t& value) override { return put(std::move(value)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(json::object()); }
  bool start_array(std::size_t) override { return open(json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    const auto [place, fresh] = open_.back()->emplace(name, nullptr);
    if (!fresh)
      throw std::runtime_error(
          fmt::format("{}: key {} appears twice; give it once", what_, json_quoted(name)));
    member_ = &*place;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    const std::string_view rest = text_.substr(std::min(position - 1, text_.size()));
    for (const std::string_view name : {"Infinity", "NaN"})
      if (rest.starts_with(name))
        throw std::runtime_error(fmt::format(
            "{}: {} at byte {} is not JSON (Python writes it); a finite number or null is expected",
            what_, name, position));
    throw std::runtime_error(fmt::format("{}: is not valid JSON from byte {} on", what_, position));
  }

 private:
  /// The location of the next value.
  json& place() {
    if (open_.empty()) return root_;
    return open_.back()->is_object() ? *member_ : open_.back()->emplace_back();
  }
  bool put(json value) {
    place() = std::move(value);
    return true;
  }

  bool open(json container) {
    if (open_.size() == kMaxJsonDepth)
      throw std::runtime_error(
          fmt::format("{}: nested more than {} levels deep", what_, kMaxJsonDepth));
    json& container_place = place();
    container_place = std::move(container);
    open_.push_back(&container_place);
    return true;
  }

  bool close() {
    open_.pop_back();
    return true;
  }

  std::string_view text_, what_;
  json root_;
  std::vector<json*> open_;  // containers being filled, outermost first
  json* member_ = nullptr;   // location of the value of the last key
};

}  // namespace

json parse_json(std::string_view text, std::string_view what) {
  // The parser treats a NUL as the end of the text.
  if (const std::size_t nul = text.find('\0'); nul != std::string_view::npos)
    throw std::runtime_error(
        fmt::format("{}: is not valid JSON, because byte {} is NUL", what, nul));
  Builder builder(text, what);
  json::sax_parse(text.begin(), text.end(), &builder);
  return builder.take();
}

std::string json_quoted(std::string_view text) {
  const bool is_long = text.size() > kLongestQuote;
  const json value = std::string(text.substr(0, kLongestQuote));
  std::string shown = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (is_long) shown.insert(shown.size() - 1, "...");
  return shown;
}

nlohmann::ordered_json number_or_null(double value) {
  return std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json(nullptr);
}

std::string json_text(const json& value, int indent) {
  return value.dump(indent, ' ', false, json::error_handler_t::replace);
}
std::string json_text(const nlohmann::ordered_json& value, int indent) {
  return value.dump(indent, ' ', false, json::error_handler_t::replace);
}

const json* json_find(const json& object, std::string_view key) {
  if (!object.is_object()) return nullptr;
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

}  // namespace kvlab
