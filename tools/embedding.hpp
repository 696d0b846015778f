// Lets another program, such as Python, run a command in its own process. An Embedding holds the
// policies and the progress function of that program, and receives the JSON result of the command
// instead of standard output.
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "policies/entry.hpp"

namespace kvlab {

/// While this object exists, commands that run in this thread use it.
class Embedding {
 public:
  Embedding(CompiledPolicies policies, std::function<void(double)> progress)
      : policies_(std::move(policies)),
        progress_(std::move(progress)),
        before_(std::exchange(current(), this)) {}
  ~Embedding() { current() = before_; }
  Embedding(const Embedding&) = delete;
  Embedding& operator=(const Embedding&) = delete;

  /// The program's policies, which commands have in addition to those of --policy-source.
  const CompiledPolicies& policies() const { return policies_; }
  /// Called with the fraction done, 0 to 1; may be empty.
  const std::function<void(double)>& progress() const { return progress_; }
  /// The text that --json would print.
  std::string json = "";

  /// The embedding of this thread. Null if the command runs in the `kvlab` program.
  static Embedding*& current() {
    static thread_local Embedding* own = nullptr;
    return own;
  }

 private:
  CompiledPolicies policies_;
  std::function<void(double)> progress_;
  Embedding* before_;
};

}  // namespace kvlab
