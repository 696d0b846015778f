#include "sim/processes/process_group.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>

namespace kvlab {
namespace {

constexpr const char* kModule = "kvlab_mpi.so";

/// Open MPI's mpirun sets the first, any launcher that speaks PMIx the second.
bool started_with_others() {
  const char* size = std::getenv("OMPI_COMM_WORLD_SIZE");
  return size ? std::string(size) != "1" : std::getenv("PMIX_RANK") != nullptr;
}

}  // namespace

std::unique_ptr<ProcessGroup> join_process_group() {
  if (!started_with_others()) return std::make_unique<ProcessGroup>();
  std::error_code error;
  const auto module =
      std::filesystem::read_symlink("/proc/self/exe", error).parent_path() / kModule;
  if (!std::filesystem::exists(module))
    throw std::runtime_error(
        "several processes were started, but this build has no MPI; install libopenmpi-dev, "
        "configure and build again, or run one process");
  // Open MPI loads parts of its own, which look for its symbols among the global ones. Never
  // closed: MPI leaves threads and handlers behind.
  void* const library = ::dlopen(module.c_str(), RTLD_NOW | RTLD_GLOBAL);
  void* const join = library ? ::dlsym(library, "kvlab_join_mpi") : nullptr;
  if (!join) throw std::runtime_error(fmt::format("MPI cannot be loaded: {}", ::dlerror()));
  return std::unique_ptr<ProcessGroup>(reinterpret_cast<ProcessGroup* (*)()>(join)());
}

bool do_together(ProcessGroup& group, const std::function<void()>& action) {
  std::string problem;
  try {
    action();
  } catch (const std::exception& error) {
    if (group.size() == 1) throw;
    problem = *error.what() ? error.what() : "an error without a name";
  }
  const auto said = group.exchange(problem);
  const auto first =
      std::find_if(said.begin(), said.end(), [](const auto& text) { return !text.empty(); });
  if (first == said.end()) return true;
  if (!group.leads()) return false;
  throw std::runtime_error(
      first == said.begin()
          ? *first
          : fmt::format("process {} of {}: {}", first - said.begin(), said.size(), *first));
}

}  // namespace kvlab
