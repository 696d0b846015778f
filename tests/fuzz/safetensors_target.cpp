// Input: a tensor file with its header, ranges and metadata. Accepted input is written again and
// read back.
#include "tests/fuzz/fuzz.hpp"
#include "traces/base/safetensors.hpp"

using namespace kvlab;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const fuzz::Folder folder(fuzz::text_of(data, size));
  const auto path = folder / "a.safetensors";
  fuzz::accepts(
      [&] {
        const auto file = SafetensorsFile::open(path);
        std::size_t bytes = 0;
        for (const auto& [name, tensor] : file.tensors()) {
          bytes += tensor.data.size();
          fuzz::require(&file.at(name, tensor.dtype, tensor.shape) == &tensor, "another tensor");
          first_not_finite(tensor.dtype, tensor.data);
        }
        fuzz::require(bytes <= file.bytes().size(), "more bytes than the file has");
      },
      path.string());
  return 0;
}
