#include "tools/command.hpp"

namespace kvlab {

std::vector<Command> all_commands() {
  return {
      demo_command(),     capture_command(),  trace_command(),   replay_command(),
      report_command(),   compare_command(),  deploy_command(),  generate_command(),
      eval_command(),     fidelity_command(), tune_command(),    task_command(),
      plan_command(),     export_command(),   predict_command(), verify_command(),
      policies_command(), bench_command(),    manual_command(),
  };
}

}  // namespace kvlab
