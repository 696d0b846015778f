#include "traces/base/parallel.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tests/catch.hpp"
#include "traces/base/cancel.hpp"

namespace kvlab {
namespace {

TEST_CASE("every item of a loop is processed once, for any number of threads", "[threads]") {
  for (const unsigned threads : {0u, 1u, 2u, 5u, 40u})
    for (const std::size_t count : {0u, 1u, 3u, 1000u}) {
      std::vector<std::atomic<int>> done(count);
      parallel_for(count, threads, [&](std::size_t i) { ++done[i]; });
      for (const auto& times : done) REQUIRE(times == 1);
    }
}

TEST_CASE("loops may be nested", "[threads]") {
  std::atomic<int> done{0};
  parallel_for(8, 4, [&](std::size_t) {
    parallel_for(8, 4, [&](std::size_t) { parallel_for(8, 4, [&](std::size_t) { ++done; }); });
  });
  CHECK(done == 512);
}

TEST_CASE("loops may be started from several threads at once", "[threads]") {
  std::atomic<int> done{0};
  {
    std::vector<std::jthread> callers;
    for (int c = 0; c < 4; ++c)
      callers.emplace_back([&] {
        for (int round = 0; round < 200; ++round) parallel_for(10, 3, [&](std::size_t) { ++done; });
      });
  }
  CHECK(done == 4 * 200 * 10);
}

TEST_CASE(
    "the first exception of a loop is thrown, no item is still running then, and other loops "
    "continue",
    "[threads]") {
  std::atomic<int> running{0};
  const auto loop = [&] {
    parallel_for(1000, 4, [&](std::size_t i) {
      ++running;
      if (i == 17) {
        --running;
        throw std::runtime_error("seventeen");
      }
      --running;
    });
  };
  for (int round = 0; round < 50; ++round) {
    CHECK_THROWS_WITH(loop(), "seventeen");
    CHECK(running == 0);
  }
  std::atomic<int> done{0};
  parallel_for(100, 4, [&](std::size_t) { ++done; });
  CHECK(done == 100);
}

TEST_CASE("a cancelled loop drops the items that it has not started, also in nested loops",
          "[threads]") {
  std::atomic<bool> off{false};
  std::atomic<int> done{0};
  const auto loop = [&](unsigned threads) {
    parallel_for(100, threads, [&](std::size_t) {
      parallel_for(100, threads, [&](std::size_t i) {
        ++done;
        if (i == 17) off = true;
      });
    });
  };
  for (const unsigned threads : {1u, 4u}) {
    const Cancellable scope(&off);
    CHECK_THROWS_AS(loop(threads), Cancelled);
    CHECK(done < 1000);
    off = false;
    done = 0;
  }
  loop(4);  // this loop is outside the scope of the cancellation
  CHECK(done == 10'000);
  done = 0;
  off = true;
  loop(4);
  CHECK(done == 10'000);
}

// (Not tagged [threads], because ThreadSanitizer cannot follow a child that starts threads.)
TEST_CASE("a forked child gets new threads") {
  parallel_for(100, 4, [](std::size_t) {});
  const pid_t child = ::fork();
  if (child == 0) {
    std::atomic<int> done{0};
    parallel_for(1000, 4, [&](std::size_t) { ++done; });
    std::exit(done == 1000 ? 0 : 1);  // a normal exit, which also runs the destructors of statics
  }
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

}  // namespace
}  // namespace kvlab
