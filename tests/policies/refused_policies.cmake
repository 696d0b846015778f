# A policy with a missing or misspelt part does not compile, and the compiler's message says why. Each case
# changes one thing in a complete policy.

set(complete_policy [[
struct Example {
  static constexpr kvlab::PolicyInfo kInfo{.name = "example",
                                           .summary = "an example",
                                           .citation = "none",
                                           .needs = kvlab::Needs::mass,
                                           .order = kvlab::Order::feedback,
                                           .weighted = true};
  struct Params {
    double decay;
  };
  static constexpr kvlab::Param<Params> kParams[] = {
      {"decay", "of the mass", &Params::decay, 0.5, 0.0, 1.0}};
  struct Slot {
    std::uint64_t mass;
  };
  static constexpr float weight(std::uint32_t age, const Params&) { return age == 0 ? 1.0f : 0.0f; }
  static constexpr std::uint32_t tail(const Params&) { return 1; }
  static constexpr void append(Slot& slot, kvlab::Token, const Params&, const kvlab::Step&) {
    slot.mass = 0;
  }
  static constexpr void observe(Slot& slot, const kvlab::Observation& seen, const Params&,
                                const kvlab::Step&) {
    slot.mass += seen.mass;
  }
  static constexpr std::uint64_t rank(const Slot& slot, kvlab::Token, const Params&,
                                      const kvlab::Step&) {
    return slot.mass;
  }
};
using Registry = kvlab::PolicyList<Example>;
]])

# policy_case(<name> <old> <new> <message>) tests that the complete policy with <old> replaced by <new> is refused
# with <message>. If <message> is empty, that policy has to compile.
function(policy_case name old new message)
  string(FIND "${complete_policy}" "${old}" found)
  if(found EQUAL -1)
    message(FATAL_ERROR "${name}: the complete policy has no '${old}'")
  endif()
  string(REPLACE "${old}" "${new}" policy "${complete_policy}")
  string(MAKE_C_IDENTIFIER "${name}" file)
  set(source ${CMAKE_CURRENT_BINARY_DIR}/refused/${file}.cpp)
  file(CONFIGURE OUTPUT ${source} @ONLY CONTENT "// expect: ${message}
#include \"policies/policy_checks.hpp\"

${policy}
static_assert(kvlab::check_registry(Registry{}));
")
  add_test(NAME "policies/${name}"
           COMMAND ${CMAKE_COMMAND} -DCOMPILER=${CMAKE_CXX_COMPILER} -DINCLUDE=${PROJECT_SOURCE_DIR}
                   -DSOURCE=${source} -P ${CMAKE_CURRENT_SOURCE_DIR}/expect_message.cmake)
endfunction()

policy_case("a complete policy compiles" "double decay;" "double decay;" "")

policy_case("a policy without kInfo is refused" "PolicyInfo kInfo" "PolicyInfo info"
            "policy: needs `static constexpr PolicyInfo kInfo{...}`")
policy_case("a kInfo with a misspelt field is refused" ".order" ".ordr" "ordr")
policy_case("a policy without Slot is refused" "struct Slot" "struct State"
            "policy: needs trivially copyable types Params and Slot")
policy_case("a Slot that is not trivially copyable is refused" "std::uint64_t mass;"
            "std::uint64_t mass; ~Slot() {}" "policy: needs trivially copyable types Params and Slot")
policy_case("Params without kParams are refused" "kParams[]" "kParam[]"
            "policy: a Params with members needs `static constexpr Param<Params> kParams[]`")

policy_case("a misspelt append is refused" "void append" "void appendd"
            "policy: needs `static constexpr void append(Slot&, Token, const Params&, const Step&)`")
policy_case("an append with wrong arguments is refused" "append(Slot& slot, kvlab::Token, const Params&,"
            "append(Slot& slot, const Params&,"
            "policy: needs `static constexpr void append(Slot&, Token, const Params&, const Step&)`")
policy_case("a misspelt rank is refused" "std::uint64_t rank" "std::uint64_t ranks"
            "policy: needs `static constexpr std::uint64_t rank(const Slot&, Token, ")
policy_case("a rank of another type is refused" "std::uint64_t rank" "float rank"
            "policy: needs `static constexpr std::uint64_t rank(const Slot&, Token, ")
policy_case("a misspelt observe is refused" "void observe" "void obsrve"
            "policy: kInfo.needs requests observations, so it needs `static constexpr void observe(")
policy_case("an observe is refused if kInfo.needs is nothing" "Needs::mass" "Needs::nothing"
            "policy: has observe(), but kInfo.needs is nothing")
policy_case("a misspelt weight is refused" "float weight" "float wieght"
            "policy: kInfo.weighted needs `static constexpr float weight(std::uint32_t age, ")
policy_case("a weight without tail is refused" "tail(const" "tails(const"
            "policy: kInfo.weighted needs `static constexpr float weight(std::uint32_t age, ")
policy_case("an undeclared weight is refused" ".weighted = true" ".weighted = false"
            "policy: has weight() or tail(), but kInfo.weighted is false")
policy_case("a hook that is not constexpr is refused" "constexpr std::uint64_t rank"
            "std::uint64_t rank" "policy: rank() must be constexpr")
policy_case("an append that does not set the slot is refused" "slot.mass = 0;" ""
            "policy: append() must set every member of Slot that observe() and rank() read")
policy_case("an oldest_first policy whose rank is not the position is refused"
            ".order = kvlab::Order::feedback" ".oldest_first = true"
            "policy: kInfo.oldest_first is set, so rank() must return the token's position")

policy_case("two policies with one name are refused" "PolicyList<Example>" "PolicyList<Example, Example>"
            "registry: two policies have the same name")
