// Tests a device that is lost in the middle of a capture. This is a separate executable, because
// its process cannot use the device afterwards.
#include "engine/backend.hpp"
#include "engine/cuda/cuda_sequence.hpp"
#include "engine/cuda/fill.hpp"
#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/skip.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/json.hpp"

using namespace kvlab;
using Catch::Matchers::ContainsSubstring;
using test::error_of;

namespace {

const std::string kTiny = KVLAB_SOURCE_DIR "/engine/models/tiny";

std::vector<std::int32_t> some_ids(std::size_t count) {
  std::vector<std::int32_t> ids(count);
  for (std::size_t i = 0; i < count; ++i) ids[i] = static_cast<std::int32_t>(i * 7919 % 8192);
  return ids;
}

/// Launches a kernel that writes to an invalid address, which looks like a hardware fault.
void lose_device() {
  constexpr std::uintptr_t nowhere = 256;
  cuda::check(cuda::fill_value(KVLAB_F32, reinterpret_cast<void*>(nowhere), 1024, 1, nullptr),
              "launching");
}

/// A trace in progress.
struct Capture {
  Capture(const DeviceModel& model, const std::filesystem::path& path, std::size_t prompt)
      : writer(path, cuda_trace_header(model, {})),
        sequence(model, {.tokens = static_cast<std::uint32_t>(prompt) + 200, .writer = &writer}) {
    sequence.feed(some_ids(prompt), SegmentKind::prompt);
    sequence.flush();
  }
  /// Decodes, and loses the device after 20 tokens.
  void decode() {
    Sampler sampler({});
    sequence.extend(sampler, 200, [&](std::int32_t) {
      if (++seen == 20) lose_device();
      return true;
    });
    sequence.flush();
  }
  TraceWriter writer;
  CudaSequence sequence;
  int seen = 0;
};

}  // namespace

TEST_CASE("Errors that leave the device unusable say that it was lost") {
  for (const cudaError_t error :
       {cudaErrorIllegalAddress, cudaErrorLaunchFailure, cudaErrorECCUncorrectable,
        cudaErrorIllegalInstruction, cudaErrorLaunchTimeout, cudaErrorUnknown})
    CHECK_THAT(error_of([&] { cuda::check(error, "a step"); }),
               ContainsSubstring("a step failed, because the device was lost") &&
                   ContainsSubstring(cudaGetErrorName(error)));
  CHECK_THAT(error_of([&] { cuda::check(cudaErrorInvalidValue, "a step"); }),
             !ContainsSubstring("lost"));
}

TEST_CASE("A lost device ends captures with an error, and their traces do not look complete",
          "[gpu]") {
  if (!has_cuda_device()) return skip("no CUDA device");
  const test::TemporaryFolder folder;
  const DeviceModel model = DeviceModel::load(kTiny);
  {
    Capture longer(model, folder / "longer", 1100), shorter(model, folder / "shorter", 100);
    CHECK_THAT(error_of([&] { longer.decode(); }), ContainsSubstring("the device was lost"));
    CHECK(longer.seen < 200);
    CHECK_THAT(error_of([&] { shorter.decode(); }), ContainsSubstring("the device was lost"));
  }
  CHECK_FALSE(std::filesystem::exists(folder / "longer" / "manifest.json"));
  CHECK_THAT(error_of([&] { TraceReader::open(folder / "longer"); }),
             ContainsSubstring("trace seal"));
  CHECK(seal_trace(folder / "longer") == kShardTokens);
  CHECK(verify_trace(TraceReader::open(folder / "longer"), 2).ok);
  CHECK_FALSE(std::filesystem::exists(folder / "shorter"));
  CHECK_THAT(error_of([&] { DeviceModel::load(kTiny); }), ContainsSubstring("the device was lost"));
}
