// A model's folder: config.json, the index of its tensor files, its chat template.
#include "engine/checkpoint/checkpoint.hpp"
#include "engine/checkpoint/model.hpp"
#include "engine/loop/task/chat.hpp"
#include "tests/fuzz/fuzz.hpp"

using namespace kvlab;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const fuzz::Folder folder(fuzz::text_of(data, size));
  const std::string place = folder.path().string();
  fuzz::accepts([&] { load_model_config(folder.path()); }, place);
  fuzz::accepts([&] { read_chat_frame(folder.path()); }, place);
  fuzz::accepts(
      [&] {
        const Checkpoint checkpoint = Checkpoint::open(folder.path());
        checkpoint.xxh3();
        const std::size_t shape[] = {2, 2};
        checkpoint.at("w", shape);
      },
      place);
  return 0;
}
