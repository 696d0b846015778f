#include "traces/base/files.hpp"

#include <atomic>
#include <chrono>
#include <fstream>
#include <set>
#include <thread>

#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/cancel.hpp"
#include "traces/base/process.hpp"

namespace kvlab {
namespace {

using Catch::Matchers::ContainsSubstring;
using test::read_bytes;
using test::TemporaryFolder;

TEST_CASE("A file that is being written has a new and unpredictable name") {
  const TemporaryFolder folder;
  write_file_atomically(folder / "theirs", "theirs");
  // kvlab once used this name. A link with a predictable name must not be followed.
  std::filesystem::create_symlink("theirs", folder / "t.part");
  std::set<std::string> names;
  for (int i = 0; i < 20; ++i) {
    const AtomicFile file(folder / "t");
    for (const std::string& name : test::names_in(folder.path()))
      if (name != "theirs" && name != "t.part") names.insert(name);
  }
  CHECK(names.size() == 20);
  for (const std::string& name : names) CHECK(finished_name(name) == "t");
  write_file_atomically(folder / "t", "new");
  CHECK(read_bytes(folder / "theirs") == "theirs");
  CHECK(std::filesystem::is_symlink(folder / "t.part"));
  CHECK(finished_name("t.part") == "t");
  CHECK(finished_name("t.0000000g.part") == "t.0000000g");
  CHECK(finished_name("t.01234567") == "t.01234567");
  CHECK(finished_name(".01234567.part") == ".01234567");
}

TEST_CASE("If many processes begin one folder, one continues and the others are refused",
          "[threads]") {
  constexpr int kRounds = 50, kAtOnce = 4;
  const TemporaryFolder folder;
  for (int round = 0; round < kRounds; ++round) {
    const auto path = folder / std::to_string(round);
    std::atomic<int> made{0}, refused{0}, ready{0};
    const auto begin = [&] {
      ++ready;
      while (ready < kAtOnce) continue;
      const std::string error = test::error_of([&] {
        AtomicFolder one(path);
        ++made;
        while (made + refused < kAtOnce) continue;  // holds the folder until all have tried
      });
      if (!error.empty()) ++refused;
    };
    std::vector<std::thread> threads;
    for (int i = 0; i < kAtOnce; ++i) threads.emplace_back(begin);
    for (std::thread& thread : threads) thread.join();
    CHECK(made == 1);
  }
  CHECK(test::names_in(folder.path()).empty());
}

TEST_CASE("One process at a time claims a file; the claim of a killed process is removed") {
  const TemporaryFolder folder;
  write_file_atomically(folder / "out.part", "theirs");
  std::filesystem::create_directories(folder / "out.00000001.part" / "in it");
  std::filesystem::create_symlink("out.part", folder / "out.00000002.part");
  write_file_atomically(folder / "out.00000000.part", "left");
  {
    const OutputClaim first(folder / "out"), other(folder / "out.html");
    CHECK_THAT(test::error_of([&] { OutputClaim(folder / "." / "out"); }),
               ContainsSubstring("out: another command is writing it"));
    write_file_atomically(folder / "out", "whole");
  }
  const OutputClaim again(folder / "out");
  CHECK(read_bytes(folder / "out") == "whole");
  CHECK(read_bytes(folder / "out.part") == "theirs");
  std::vector<std::string> names = test::names_in(folder.path());
  std::erase_if(names, [](const std::string& name) { return name.ends_with(".part"); });
  CHECK(names == std::vector<std::string>{"out"});
  // These four are out, out.part, the link (which does not belong to kvlab), and the claim.
  CHECK(test::names_in(folder.path()).size() == 4);
}

TEST_CASE("A folder that a killed process left does not block the next, and is removed") {
  const TemporaryFolder folder;
  std::filesystem::create_directories(folder / "out.part");
  std::filesystem::create_directories(folder / "out.0123abcd.part" / "traces");
  {
    AtomicFolder first(folder / "out");
    CHECK_THAT(test::error_of([&] { AtomicFolder(folder / "out"); }),
               ContainsSubstring("out: another command is writing it"));
    CHECK_THAT(test::error_of([&] { OutputClaim(folder / "out"); }),
               ContainsSubstring("out: another command is writing it"));
    write_file_atomically(first / "a", "whole");
    first.commit();
  }
  CHECK(test::names_in(folder.path()) == std::vector<std::string>{"out", "out.part"});
  CHECK_THAT(test::error_of([&] { AtomicFolder(folder / "out"); }), ContainsSubstring("exists"));
  { const AtomicFolder nested(folder / "a/b/c"); }
  CHECK(test::names_in(folder.path()).size() == 2);
}

TEST_CASE("A cancelled program ends at once, with its child processes", "[threads]") {
  const TemporaryFolder folder;
  std::atomic<bool> called_off = false;
  std::thread caller([&] {
    while (!std::filesystem::exists(folder / "started")) std::this_thread::yield();
    called_off = true;
  });
  const auto began = std::chrono::steady_clock::now();
  const Cancellable scope(&called_off);
  const std::string script = "cd " + folder.path().string() +
                             "; (sleep 60; touch late) & echo $! >pid; touch started; wait";
  CHECK_THROWS_AS(run_program({"sh", "-c", script}, folder / "log"), Cancelled);
  caller.join();
  CHECK(std::chrono::steady_clock::now() - began < std::chrono::seconds(30));
  const std::string pid = read_bytes(folder / "pid");
  std::string state;
  const auto ended = [&] {  // a killed process may take a moment to disappear
    std::ifstream status("/proc/" + pid.substr(0, pid.find('\n')) + "/stat");
    std::string number, name;
    if (!(status >> number >> name >> state)) state = "gone";
    return state == "gone" || state == "Z" || state == "X";
  };
  while (!ended() && std::chrono::steady_clock::now() - began < std::chrono::seconds(30))
    std::this_thread::yield();
  CHECK((state == "gone" || state == "Z" || state == "X"));
}

TEST_CASE("A scratch folder that a killed process left is removed when the next one is made") {
  const test::TemporaryFolder folder;
  const char* const before = ::getenv("TMPDIR");
  const std::string restored = before ? before : "";
  REQUIRE(::setenv("TMPDIR", folder.path().c_str(), 1) == 0);
  const auto entries = [&] {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
      names.insert(entry.path().filename().string());
    return names;
  };
  {
    std::filesystem::create_directory(folder / "kvlab-scratch-killed");
    test::write_bytes(folder / "kvlab-scratch-killed" / "trace", "x");
    std::filesystem::create_directory(folder / "other-scratch-others");
    std::filesystem::create_symlink(folder / "other-scratch-others",
                                    folder / "kvlab-scratch-linked");
    const kvlab::TemporaryFolder first;
    const kvlab::TemporaryFolder second;  // does not remove the first one
    CHECK(std::filesystem::is_directory(first.path()));
    CHECK(entries() == std::set<std::string>{"kvlab-scratch-linked", "other-scratch-others",
                                             first.path().filename().string(),
                                             second.path().filename().string()});
  }
  CHECK(entries().size() == 2);
  REQUIRE(::setenv("TMPDIR", "", 1) == 0);  // as if it were unset
  CHECK(kvlab::TemporaryFolder().path().parent_path() == "/tmp");
  if (before)
    ::setenv("TMPDIR", restored.c_str(), 1);
  else
    ::unsetenv("TMPDIR");
}

TEST_CASE("A program with too much output is ended, and its log stays small") {
  const test::TemporaryFolder folder;
  const auto log = folder / "log";
  CHECK(run_program({"sh", "-c", "echo short"}, log) == 0);
  CHECK(read_bytes(log) == "short\n");
  CHECK(run_program({"head", "-c", "100000000", "/dev/zero"}, log) != 0);
  CHECK(std::filesystem::file_size(log) <= std::uintmax_t{64} << 20);
}

}  // namespace
}  // namespace kvlab
