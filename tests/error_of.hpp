// The message of an error, for tests that check it.
#pragma once

#include <stdexcept>
#include <string>

namespace kvlab::test {

/// The message of the `Error` that `action` throws; "" if it throws nothing. Other exceptions
/// propagate.
template <class Error = std::runtime_error, class Action>
std::string error_of(Action action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace kvlab::test
