#include "sim/lanes/feedback/whole_admission.hpp"

namespace kvlab {

void WholeAdmission::see(std::uint32_t query, Needs needs, GroupRows& rows) {
  if (query < next) return;
  next = query + 1;
  if (needs == Needs::mass) {
    const std::uint64_t* const given = rows.masses(query);
    for (std::uint32_t i = 0; i <= query; ++i) mass[i] += given[i];
  } else {
    const std::uint32_t* const asked = rows.asked(query);
    for (std::uint32_t i = 0; i <= query; ++i) {
      requests[i] += asked[i];
      last_request[i] = asked[i] ? query : last_request[i];
    }
  }
}

WholeAdmission& WholeAdmissions::at(const Admission& admission, Needs needs) {
  const std::uint32_t end = admission.first + admission.tokens;
  const auto [place, fresh] = all_.try_emplace({admission.first, end, needs});
  WholeAdmission& whole = place->second;
  if (fresh) {
    whole.next = admission.first;
    whole.mass.resize(needs == Needs::mass ? end : 0);
    whole.requests.resize(needs == Needs::requests ? end : 0);
    whole.last_request.resize(whole.requests.size());
  }
  return whole;
}

void WholeAdmissions::forget_before(std::uint32_t query) {
  std::erase_if(all_, [query](const auto& one) { return std::get<1>(one.first) <= query; });
}

}  // namespace kvlab
