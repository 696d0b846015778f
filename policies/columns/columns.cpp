#include "policies/columns/columns.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "policies/columns/column_sums.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kLongestName = 64;

constexpr std::pair<std::string_view, BuiltInColumn> kBuiltIn[] = {
    {"key_norm", BuiltInColumn::key_norm},
    {"value_norm", BuiltInColumn::value_norm},
    {"value_norm1", BuiltInColumn::value_norm1},
    {"key_cosine", BuiltInColumn::key_cosine},
    {"value_out_norm1", BuiltInColumn::value_out_norm1}};

/// A vector as policies/columns/column_sums.hpp reads it.
auto reader(const float* x) {
  return [x](std::uint32_t d) { return x[d]; };
}

float norm(const float* x, std::uint32_t size) {
  return std::sqrt(sum_of_squares(size, reader(x)));
}

}  // namespace

std::optional<BuiltInColumn> built_in_column(std::string_view name) {
  for (const auto& [known, column] : kBuiltIn)
    if (name == known) return column;
  return std::nullopt;
}

std::vector<std::string> built_in_columns() {
  std::vector<std::string> names;
  for (const auto& [name, column] : kBuiltIn) names.emplace_back(name);
  return names;
}

std::string computed_column_names() {
  return fmt::format("{}, {}", fmt::join(built_in_columns(), ", "),
                     fmt::join(scored_columns(), ", "));
}

bool is_computed(std::string_view name, bool knows_projections) {
  if (scored_column(name)) return true;
  const auto column = built_in_column(name);
  return column && (knows_projections || column != BuiltInColumn::value_out_norm1);
}

bool wants_projections(std::span<const std::string> names) {
  return std::ranges::any_of(names, [](const std::string& name) {
    return built_in_column(name) == BuiltInColumn::value_out_norm1;
  });
}

bool is_column_name(std::string_view name) {
  const auto fits = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '.';
  };
  return !name.empty() && name.size() <= kLongestName && std::ranges::all_of(name, fits);
}

ColumnMaker::ColumnMaker(std::vector<std::string> names, std::uint32_t head_size,
                         OutputWeights output, ScoreSettings settings)
    : names_(std::move(names)), head_size_(head_size), output_(output) {
  for (const std::string& name : names_) {
    wants_direction_ |= built_in_column(name) == BuiltInColumn::key_cosine;
    if (scored_column(name) && !scored_) scored_.emplace(head_size_, settings);
  }
  if (wants_direction_) unit_keys_.resize(head_size_);
}

const float* ColumnMaker::admit(const KeyValueRows& rows, const BroughtColumns* brought,
                                std::size_t first) {
  if (names_.empty()) return nullptr;
  if (wants_direction_) add_unit_keys(rows);
  if (scored_) scored_->add(rows);
  const std::size_t width = names_.size();
  columns_.resize(rows.tokens * width);
  for (std::size_t c = 0; c < width; ++c) {
    const auto column =
        is_computed(names_[c], output_.by_input) ? built_in_column(names_[c]) : std::nullopt;
    const float* const brings =
        column ? nullptr : find_brought(names_[c], brought, first + rows.tokens);
    if (!column && !brings) {
      scored_->write(scored_column(names_[c]).value(), rows, columns_.data() + c, width);
      continue;
    }
    for (std::size_t i = 0; i < rows.tokens; ++i)
      columns_[i * width + c] =
          column ? compute(*column, rows.k + i * rows.stride, rows.v + i * rows.stride)
                 : brings[first + i];
  }
  return columns_.data();
}

/// Of the first `end` tokens; null of a scored column that is not there.
const float* ColumnMaker::find_brought(const std::string& name, const BroughtColumns* brought,
                                       std::size_t end) const {
  const auto found = brought ? brought->find(name) : BroughtColumns::const_iterator{};
  if (brought && found != brought->end() && found->second.size() >= end)
    return found->second.data();
  if (scored_column(name)) return nullptr;
  throw std::logic_error(fmt::format("column {}: nobody brings it", name));
}

/// The mean's length does not matter to a cosine: their sum serves.
void ColumnMaker::add_unit_keys(const KeyValueRows& rows) {
  for (std::size_t i = 0; i < rows.tokens; ++i) {
    const float* const key = rows.k + i * rows.stride;
    const float length = norm(key, head_size_);
    for (std::uint32_t d = 0; length > 0 && d < head_size_; ++d) unit_keys_[d] += key[d] / length;
  }
  unit_keys_norm_ = norm(unit_keys_.data(), head_size_);
}

float ColumnMaker::compute(BuiltInColumn column, const float* key, const float* value) {
  switch (column) {
    case BuiltInColumn::key_norm:
      return norm(key, head_size_);
    case BuiltInColumn::value_norm:
      return norm(value, head_size_);
    case BuiltInColumn::value_norm1:
      return sum_of_magnitudes(head_size_, reader(value));
    case BuiltInColumn::key_cosine:
      return cosine_from(sum_of_products(head_size_, reader(key), reader(unit_keys_.data())),
                         norm(key, head_size_), unit_keys_norm_);
    case BuiltInColumn::value_out_norm1:
      return output_norm(value);
  }
  throw std::logic_error("a column that is not known");
}

/// All outputs side by side; each is summed in index order, as sum_of_products() would.
float ColumnMaker::output_norm(const float* value) {
  const std::size_t hidden = output_.hidden;
  const float* weights = output_.by_input;
  float sum = 0;
  for (std::uint32_t head = 0; head < output_.group; ++head) {
    products_.assign(hidden, 0.0f);
    for (std::uint32_t d = 0; d < head_size_; ++d, weights += hidden)
      for (std::size_t i = 0; i < hidden; ++i) products_[i] += weights[i] * value[d];
    sum += sum_of_magnitudes(output_.hidden, reader(products_.data()));
  }
  return sum;
}

}  // namespace kvlab
