// A command within another program, as Python's: what that gives to it, and takes in place of what
// would be printed.
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "policies/entry.hpp"

namespace kvlab {

/// While it lives, commands that this thread runs are within it.
class Embedding {
 public:
  Embedding(CompiledPolicies policies, std::function<void(double)> progress)
      : policies_(std::move(policies)),
        progress_(std::move(progress)),
        before_(std::exchange(of_thread(), this)) {}
  ~Embedding() { of_thread() = before_; }
  Embedding(const Embedding&) = delete;
  Embedding& operator=(const Embedding&) = delete;

  /// Beside those of --policy-source.
  const CompiledPolicies& policies() const { return policies_; }
  /// Gets the fraction done; may be empty.
  const std::function<void(double)>& progress() const { return progress_; }
  /// What --json prints.
  std::string json = "";

  /// Null: the command is a process of its own.
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
