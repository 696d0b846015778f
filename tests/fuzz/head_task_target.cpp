// Input: the file of a finished head task, as a killed replay leaves it. The target adds the
// checksum. An accepted input must be packed to the same bytes again.
#include "sim/run/run_folder.hpp"
#include "tests/fuzz/fuzz.hpp"
#include "traces/base/files.hpp"

using namespace kvlab;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const HeadTaskId id{1, 0, 2};
  std::string bytes =
      pack_head_task(id, {}).substr(0, 32);  // magic and id, before the number of outcomes
  bytes += fuzz::text_of(data, size);
  bytes += xxh3_hex(bytes);
  fuzz::accepts(
      [&] {
        fuzz::require(pack_head_task(id, unpack_head_task(id, bytes, "x.unit")) == bytes,
                      "other bytes");
      },
      "x.unit");
  return 0;
}
