#include <fmt/format.h>

#include "sim/plan/engine_options.hpp"
#include "tools/command.hpp"
#include "tools/options.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

struct Request {
  std::string plan, engine;
  bool json = false;
};

void check(Request&, const GivenOptions& given) {
  given.require("plan", "kvlab export plan.json, a file of `kvlab plan`");
  given.require("for", "--for vllm, llama.cpp, tensorrt-llm or transformers");
}

void add_options(OptionTable& table, Request& request) {
  table.text("plan", "FILE", request.plan, "a file of `kvlab plan`");
  table.text("for", "ENGINE", request.engine, "vllm, llama.cpp, tensorrt-llm or transformers");
  add_json_option(table, request.json);
}

int run(const Request& request) {
  const std::string options = engine_options(read_plan_file(request.plan), request.engine);
  if (request.json)
    print_json(nlohmann::ordered_json{{"engine", request.engine}, {"options", options}});
  else
    fmt::print("{}\n", options);
  return 0;
}

}  // namespace

Command export_command() {
  return {.name = "export",
          .summary = "prints a plan as the options of a serving engine",
          .usage = "plan.json --for vllm|llama.cpp|tensorrt-llm|transformers",
          .example = "kvlab export plan.json --for vllm",
          .positional = "plan",
          .prepare = make_prepare(add_options, check, run)};
}

}  // namespace kvlab
