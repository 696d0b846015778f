// Input: a model's folder. The target reads config.json and the chat template, and opens the tensor
// files with their index. Then it loads the model, which looks up every tensor that it needs.
#include "engine/checkpoint/checkpoint.hpp"
#include "engine/checkpoint/model.hpp"
#include "engine/evaluation/task/sample.hpp"
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
  fuzz::accepts(
      [&] {
        const Model model = Model::load(folder.path(), 1);
        std::vector<float> x(model.config().hidden);
        const std::int32_t first = 0;
        model.embed({&first, 1}, x.data());
      },
      place);
  return 0;
}
