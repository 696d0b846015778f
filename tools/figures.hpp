// What a bench found, for people: the names of its JSON, numbers shortened.
#pragma once

#include <nlohmann/json_fwd.hpp>

namespace kvlab {

/// One JSON object as lines on standard output. Lists of objects are tables, and so are objects in
/// a row that have the same members; of a list within a table's row, each object is a column under
/// its first member, which shows its last.
void print_figures(const nlohmann::ordered_json& figures);

}  // namespace kvlab
