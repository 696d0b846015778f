// Runs a command inside another program, such as Python. Embedding is what that program provides,
// and where it gets the result instead of printed output.
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "policies/entry.hpp"

namespace kvlab {

/// While this object exists, commands of this thread use it.
class Embedding {
 public:
  Embedding(CompiledPolicies policies, std::function<void(double)> progress)
      : policies_(std::move(policies)),
        progress_(std::move(progress)),
        before_(std::exchange(of_thread(), this)) {}
  ~Embedding() { of_thread() = before_; }
  Embedding(const Embedding&) = delete;
  Embedding& operator=(const Embedding&) = delete;

  /// Policies in addition to those of --policy-source.
  const CompiledPolicies& policies() const { return policies_; }
  /// Called with the fraction done, 0 to 1; may be empty.
  const std::function<void(double)>& progress() const { return progress_; }
  /// The text that --json would print.
  std::string json = "";

  /// The embedding of this thread. Null if the command runs as a process.
  static Embedding*& of_thread() {
    static thread_local Embedding* own = nullptr;
    return own;
  }

 private:
  CompiledPolicies policies_;
  std::function<void(double)> progress_;
  Embedding* before_;
};

}  // namespace kvlab
