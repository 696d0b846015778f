#include <fmt/core.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

#include "engine/backend.hpp"
#include "policies/catalogue.hpp"
#include "policies/old_names.hpp"
#include "sim/processes/process_group.hpp"
#include "sim/source/policy_source.hpp"
#include "tools/command.hpp"
#include "tools/terminal.hpp"
#include "traces/base/cancel.hpp"
#include "traces/base/text.hpp"

namespace kvlab {
namespace {

void print_welcome() {
  fmt::print(
      "kvlab: design KV-cache eviction policies offline, deploy them online.\n\n"
      "New here?  kvlab demo          every step on the bundled model (about a minute)\n"
      "Then       kvlab capture       a trace from your own model\n"
      "           kvlab replay        many policies and budgets over it\n"
      "           kvlab report        a page of the results, for a browser\n\n");
  fmt::print("Commands (`kvlab help COMMAND` shows the options of each):\n");
  for (const Command& command : all_commands())
    fmt::print("  {:<10} {}\n", command.name, command.summary);
}

/// If the command in `words` has an old name, replaces it by the current name and warns about the
/// old one. Returns `words`.
std::vector<std::string> with_current_command(std::vector<std::string> words) {
  const std::string before = words[0];
  const std::string now(current_name(kOldCommands, before));
  if (now == before) return words;
  if (leads_command_line())
    fmt::print(stderr, "kvlab: {0} is called {1} now; the next release will refuse {0}\n", before,
               now);
  const std::vector<std::string> current = split_list(now, ' ');
  words.erase(words.begin());
  words.insert(words.begin(), current.begin(), current.end());
  return words;
}

int run(const std::vector<std::string>& given) {
  const std::vector<std::string> words = given.empty() ? given : with_current_command(given);
  const auto asks_for_help = [](const std::string& word) {
    return word == "--help" || word == "-h" || word == "help";
  };
  const bool asks = !words.empty() && asks_for_help(words[0]);
  if (words.empty() || (asks && (words.size() == 1 || asks_for_help(words[1])))) {
    print_welcome();
    return 0;
  }
  if (asks) return run({words[1], "--help"});
  if (words[0] == "--version") {
    fmt::print("kvlab {}\n{}", KVLAB_RELEASE, cuda_description());
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

/// Prints `lines`, the text of an error. Messages that still wait to be printed are dropped.
void complain(Terminal& terminal, const std::vector<std::string>& words,
              const std::vector<std::string>& lines) {
  terminal.drop_lines();
  std::string begin = words.empty() ? "kvlab: " : "kvlab " + words[0].substr(0, 80) + ": ";
  for (const std::string& line : lines)
    fmt::print(stderr, "{}{}\n", std::exchange(begin, ""), line);
}

constexpr std::string_view kOutOfMemoryAtOnce =
    "kvlab: out of memory; a shorter input or fewer configurations may fit; "
    "unfinished results are kept, as *.part\n";

/// Prints a line without allocating memory, so that signal handlers may call it.
void say_as_it_is(std::string_view line) {
  [[maybe_unused]] const auto said = ::write(STDERR_FILENO, line.data(), line.size());
}

/// Called if memory runs out in code that may not throw, such as the destructor of JSON. The
/// process ends at once, and unfinished files stay.
[[noreturn]] void end_without_memory() {
  try {
    if (const auto error = std::current_exception()) std::rethrow_exception(error);
  } catch (const std::bad_alloc&) {
    say_as_it_is(kOutOfMemoryAtOnce);
    ::_exit(kBadInput);
  } catch (...) {  // a bug in kvlab, which a core dump shows
  }
  std::abort();
}

/// Signals that cancel a command, with their names.
constexpr std::pair<int, const char*> kCallers[] = {
    {SIGINT, "SIGINT"}, {SIGTERM, "SIGTERM"}, {SIGHUP, "SIGHUP"}, {SIGXCPU, "SIGXCPU"}};

/// Set by one of these signals. Work ends at its next item and removes incomplete files. A second
/// signal ends the process at once, and so does check_deadline().
std::atomic<bool> called_off = false;
volatile std::sig_atomic_t caller = 0;

double seconds_of(clockid_t clock) {
  timespec now{};
  ::clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// When the command was cancelled, by the wall clock and by this process's CPU time.
struct CalledOff {
  double wall, work;
};
CalledOff called_off_at{};

/// Ends a process that goes on after it was cancelled, because a long step does not check for
/// cancellation. It ends about 1 s after the signal, or up to 5 s if it got little CPU time in that
/// second. Its unfinished files stay, as after `kill -9`. This runs in a signal handler, so it must
/// not allocate memory or lock.
void check_deadline(int) {
  constexpr double kWall = 0.85, kWork = 0.3, kLongest = 5;
  const double wall = seconds_of(CLOCK_MONOTONIC) - called_off_at.wall;
  const double work = seconds_of(CLOCK_PROCESS_CPUTIME_ID) - called_off_at.work;
  if (wall < kWall || (work < kWork && wall < kLongest)) return;
  for (const auto& [signal, name] : kCallers)
    if (signal == caller) {
      say_as_it_is("kvlab: stopped by ");
      say_as_it_is(name);
    }
  say_as_it_is(
      " in the middle of a long step; unfinished files stay, as *.part; run the same command "
      "again: replay and task continue, other commands start from the beginning\n");
  ::_exit(128 + caller);
}

void call_off(int signal) {
  caller = signal;
  called_off_at = {seconds_of(CLOCK_MONOTONIC), seconds_of(CLOCK_PROCESS_CPUTIME_ID)};
  called_off = true;
  std::signal(signal, SIG_DFL);
  std::signal(SIGALRM, check_deadline);
  constexpr timeval kTick{.tv_sec = 0, .tv_usec = 50'000};
  const itimerval ticks{.it_interval = kTick, .it_value = kTick};
  ::setitimer(ITIMER_REAL, &ticks, nullptr);
}

/// Handles a signal, unless the parent process has set it to be ignored, as `nohup` does.
void listen_to(int signal) {
  if (std::signal(signal, call_off) == SIG_IGN) std::signal(signal, SIG_IGN);
}

/// Prints what a cancelled command leaves, and how to continue. Returns the exit code.
int say_called_off(Terminal& terminal, const std::vector<std::string>& words,
                   std::string_view error) {
  const Cancelled plain;
  const std::string_view begin = plain.what();
  const bool says_more = error.starts_with(begin) && error.size() > begin.size();
  const std::string_view rest =
      says_more ? error.substr(begin.size())
                : "; nothing was kept, and the same command starts from the beginning";
  const auto* const by =
      std::ranges::find(kCallers, int{caller}, &std::pair<int, const char*>::first);
  complain(terminal, words, {fmt::format("stopped by {}{}", by->second, rest)});
  return 128 + caller;
}

/// Reports that output could not be printed, because of a full disk or a closed pipe. If
/// `ends_quietly`, a closed pipe ends the process by SIGPIPE without a message.
int say_unprinted(Terminal& terminal, const std::vector<std::string>& words,
                  const std::error_code& error, bool ends_quietly) {
  if (error.value() == EPIPE && ends_quietly) {
    std::signal(SIGPIPE, SIG_DFL);
    std::raise(SIGPIPE);
  }
  complain(terminal, words, {"standard output: cannot write: " + error.message()});
  return kBadInput;
}

/// Refuses a small stack, because a stack overflow would print no message.
void refuse_small_stack() {
  constexpr rlim_t kMin = 256 << 10;
  rlimit stack{};
  if (::getrlimit(RLIMIT_STACK, &stack) != 0 || stack.rlim_cur >= kMin) return;
  throw std::runtime_error(
      fmt::format("the stack is limited to {} KiB, and {} KiB are needed; run: ulimit -s {}",
                  stack.rlim_cur >> 10, kMin >> 10, kMin >> 10));
}

/// Handles SIGBUS, which a mapped file raises if it is truncated while it is read. The read cannot
/// continue, so the process ends with a message.
void report_truncated_file(int) {
  say_as_it_is(
      "kvlab: a file became shorter while it was read; do not change input files while kvlab "
      "runs\n");
  ::_exit(kBadInput);
}

}  // namespace

int kvlab_main(int argc, char** argv) {
  std::set_terminate(end_without_memory);
  std::signal(SIGBUS, report_truncated_file);
  std::signal(SIGXFSZ, SIG_IGN);  // the call that writes too much then fails
  const bool ends_by_pipe = std::signal(SIGPIPE, SIG_IGN) != SIG_IGN;
  for (const auto& [signal, name] : kCallers) listen_to(signal);
  const Cancellable scope(&called_off);
  Terminal terminal;
  std::vector<std::string> words;
  try {
    words.assign(argv + 1, argv + argc);
    refuse_small_stack();
    return run(words);
  } catch (const std::bad_alloc&) {
    complain(terminal, words, {"out of memory; a shorter input or fewer configurations may fit"});
  } catch (const DoesNotCompile& error) {
    complain(terminal, words, split_list(error.what(), '\n'));
  } catch (const std::filesystem::filesystem_error& error) {
    complain(terminal, words,
             {fmt::format("{}: {}", error.path1().string(), error.code().message())});
  } catch (const std::exception& error) {
    if (called_off) return say_called_off(terminal, words, error.what());
    const auto* const code = dynamic_cast<const std::system_error*>(&error);
    if (code && std::ferror(stdout))
      return say_unprinted(terminal, words, code->code(), ends_by_pipe);
    complain(terminal, words, {error.what()});
  }
  return kBadInput;
}

}  // namespace kvlab
