#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <iostream>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include "policies/catalogue.hpp"
#include "sim/source/complaint.hpp"
#include "tools/command.hpp"
#include "traces/base/cancel.hpp"
#include "traces/base/text.hpp"

namespace kvlab {
namespace {

constexpr int kBadInput = 2;

void print_welcome() {
  fmt::print(
      "kvlab: design KV-cache eviction policies offline, deploy them online.\n\n"
      "New here?  kvlab demo          the whole loop on the bundled model, a minute or two\n"
      "Then       kvlab capture       a trace from your own model\n"
      "           kvlab replay        many policies and budgets over it\n"
      "           kvlab report        a page to look at\n\n");
  fmt::print("Commands (`kvlab help COMMAND` says more of each):\n");
  for (const Command& command : all_commands())
    fmt::print("  {:<10} {}\n", command.name, command.summary);
}

/// A full disk shows only here: what was printed last is still in a buffer.
void flush_output() {
  std::cout.flush();
  if (std::fflush(stdout) == 0 && !std::ferror(stdout)) return;
  throw std::runtime_error(
      fmt::format("standard output: cannot write: {}", std::generic_category().message(errno)));
}

int run(const std::vector<std::string>& words) {
  const bool asks =
      !words.empty() && (words[0] == "--help" || words[0] == "-h" || words[0] == "help");
  if (words.empty() || (asks && words.size() == 1)) {
    print_welcome();
    return 0;
  }
  if (asks) return run({words[1], "--help"});
  if (words[0] == "--version") {
    fmt::print("kvlab {}\n", KVLAB_VERSION);
    return 0;
  }
  const auto commands = all_commands();
  const auto command = std::find_if(commands.begin(), commands.end(),
                                    [&](const Command& c) { return c.name == words[0]; });
  if (command == commands.end()) {
    std::vector<std::string> names;
    for (const Command& c : commands) names.push_back(c.name);
    const auto near = nearest_name(words[0], names);
    throw std::invalid_argument(
        fmt::format("unknown command '{}'; {}", words[0],
                    near ? "did you mean '" + *near + "'?" : "`kvlab --help` lists them"));
  }
  return run_command(*command, {words.begin() + 1, words.end()});
}

/// What went wrong, a terminal's line for each of `lines`, whatever the files, names and libraries
/// that they quote hold.
void complain(const std::vector<std::string>& words, const std::vector<std::string>& lines) {
  constexpr std::size_t kLongest = 4096;
  std::string text = words.empty() ? "kvlab: " : "kvlab " + words[0] + ": ";
  for (const std::string& line : lines) {
    text = printable(text + line);
    if (text.size() > kLongest)  // of a long path, too, the reason is said: it is at the end
      text = text.substr(0, kLongest / 2) + " ... " + text.substr(text.size() - kLongest / 2);
    fmt::print(stderr, "{}\n", text);
    text.clear();
  }
}

constexpr std::string_view kOutOfMemoryAtOnce =
    "kvlab: out of memory; a shorter input or fewer configurations would fit; "
    "what was unfinished is left, as *.part\n";

/// Where memory ends in what may not throw, as the destructor of JSON: nothing more can be undone.
[[noreturn]] void end_without_memory() {
  try {
    if (const auto error = std::current_exception()) std::rethrow_exception(error);
  } catch (const std::bad_alloc&) {
    [[maybe_unused]] const auto said =
        ::write(STDERR_FILENO, kOutOfMemoryAtOnce.data(), kOutOfMemoryAtOnce.size());
    ::_exit(kBadInput);
  } catch (...) {  // a mistake of ours, which a core shows
  }
  std::abort();
}

/// SIGINT or SIGTERM: what is at work ends at its next item and takes away what is not whole. A
/// second one ends the process at once.
std::atomic<bool> called_off = false;
volatile std::sig_atomic_t caller = 0;
void call_off(int signal) {
  caller = signal;
  called_off = true;
  std::signal(signal, SIG_DFL);
}

/// Signals that whoever began this process ignores, as `nohup` does, stay so.
void listen_to(int signal) {
  if (std::signal(signal, call_off) == SIG_IGN) std::signal(signal, SIG_IGN);
}

/// Says what is left of work that was called off, and how it goes on. Returns the exit code.
int say_called_off(const std::vector<std::string>& words, std::string_view error) {
  const Cancelled plain;
  const std::string_view begin = plain.what();
  const bool says_more = error.starts_with(begin) && error.size() > begin.size();
  const std::string_view rest = says_more ? error.substr(begin.size())
                                          : "; nothing is left, and the same command begins again";
  complain(words,
           {fmt::format("{} by {}{}", begin, caller == SIGINT ? "SIGINT" : "SIGTERM", rest)});
  return 128 + caller;
}

/// A mapped file that shrinks while it is read raises SIGBUS, where nothing but this can be done.
void say_that_a_file_shrank(int) {
  constexpr std::string_view kLine =
      "kvlab: a file became shorter while it was read; leave inputs as they are until it is done\n";
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, kLine.data(), kLine.size());
  ::_exit(kBadInput);
}

}  // namespace
}  // namespace kvlab

int main(int argc, char** argv) {
  std::set_terminate(kvlab::end_without_memory);
  std::signal(SIGBUS, kvlab::say_that_a_file_shrank);
  kvlab::listen_to(SIGINT);
  kvlab::listen_to(SIGTERM);
  const kvlab::Cancellable scope(&kvlab::called_off);
  std::vector<std::string> words;
  try {
    words.assign(argv + 1, argv + argc);
    const int code = kvlab::run(words);
    kvlab::flush_output();
    return code;
  } catch (const std::bad_alloc&) {
    kvlab::complain(words, {"out of memory; a shorter input or fewer configurations would fit"});
  } catch (const kvlab::DoesNotCompile& error) {
    kvlab::complain(words, kvlab::split_list(error.what(), '\n'));
  } catch (const std::filesystem::filesystem_error& error) {
    kvlab::complain(words, {fmt::format("{}: {}", error.path1().string(), error.code().message())});
  } catch (const std::exception& error) {
    if (kvlab::called_off) return kvlab::say_called_off(words, error.what());
    kvlab::complain(words, {error.what()});
  }
  return kvlab::kBadInput;
}
