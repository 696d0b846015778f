// What the queries of an admission of several give its tokens, where a cache still has all of them:
// the same for every configuration, so it is summed once.
#pragma once

#include <map>
#include <vector>

#include "sim/lanes/lane.hpp"

namespace kvlab {

class WholeAdmission {
 public:
  /// Adds a query's row, unless it has been added: those of an admission come in order.
  void see(std::uint32_t query, Needs needs, GroupRows& rows);
  std::uint32_t next = 0;                             ///< query that comes next
  std::vector<std::uint64_t> mass;                    // [token]
  std::vector<std::uint32_t> requests, last_request;  // [token]
};

/// Those in progress, by first token, end and need.
class WholeAdmissions {
 public:
  WholeAdmission& at(const Admission& admission, Needs needs);
  /// No query before `query` will come.
  void forget_before(std::uint32_t query);

 private:
  std::map<std::tuple<std::uint32_t, std::uint32_t, Needs>, WholeAdmission> all_;
};

}  // namespace kvlab
