// The replay of a trace of the trained bundled model on English prose.
#include <cmath>

#include "engine/capture.hpp"
#include "engine/tokenizer/tokenizer.hpp"
#include "tests/catch.hpp"
#include "tests/sim/differential.hpp"
#include "tests/sim/random_trace.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

/// George Gissing, The Odd Women (1893), chapter I.
constexpr const char* kPassage =
    "It was the outcome of a long and intimate conversation. Alice Madden, aged nineteen, a "
    "plain, shy, gentle-mannered girl, short of stature, and in movement something less than "
    "graceful, wore a pleased look as she glanced at her father's face and then turned her "
    "eyes across the blue channel to the Welsh hills. She was flattered by the confidence "
    "reposed in her, for Dr. Madden, reticent by nature, had never been known to speak in the "
    "domestic circle about his pecuniary affairs. He seemed to be the kind of man who would "
    "inspire his children with affection: grave but benign, amiably diffident, with a hint of "
    "lurking mirthfulness about his eyes and lips. And to-day he was in the best of humours; "
    "professional prospects, as he had just explained to Alice, were more encouraging than "
    "hitherto; for twenty years he had practised medicine at Clevedon, but with such trifling "
    "emolument that the needs of his large family left him scarce a margin over expenditure; "
    "now, at the age of forty-nine it was 1872 he looked forward with a larger hope. Might he "
    "not reasonably count on ten or fifteen more years of activity? Clevedon was growing in "
    "repute as a seaside resort; new houses were rising; assuredly his practice would "
    "continue to extend.\n\n"
    "'I don't think girls ought to be troubled about this kind of thing,' he added "
    "apologetically. 'Let men grapple with the world; for, as the old hymn says, \"'tis their "
    "nature to.\" I should grieve indeed if I thought my girls would ever have to distress "
    "themselves about money matters. But I find I have got into the habit, Alice, of talking "
    "to you very much as I should talk with your dear mother if she were with us.'";

/// The passage after <s>, as two turns.
struct Captured {
  Captured() : trace(capture(folder / "trace")) {}

  static TraceReader capture(const std::filesystem::path& directory) {
    const std::filesystem::path model_directory(KVLAB_SOURCE_DIR "/engine/models/tiny");
    const Model model = Model::load(model_directory, 2);
    std::vector<std::int32_t> ids{0};
    for (const std::int32_t id :
         Tokenizer::load(model_directory / "tokenizer.json").encode(kPassage, false))
      ids.push_back(id);
    const auto all = std::span(ids).first(320);
    TraceWriter writer(directory, trace_header(model, {}));
    Capture capture(writer);
    Decoder decoder(model, {}, 2);
    decoder.watch(&capture);
    decoder.feed(all.first(150), SegmentKind::prompt);
    decoder.feed(all.subspan(150, 50), SegmentKind::decode);
    decoder.feed(all.subspan(200, 40), SegmentKind::prompt);
    decoder.feed(all.subspan(240), SegmentKind::decode);
    writer.finish();
    add_random_gradients(directory, 4, 9);
    return TraceReader::open(directory);
  }

  test::TemporaryFolder folder;
  TraceReader trace;
};

double recall(const TraceReader& trace, const Case& c) {
  const ReplayResult result = replay(trace, kSequence, replay_configs({c}), {.threads = 2});
  for (const Measurement& m : result.measurements)
    if (m.layer == -1 && m.metric == "recall") return m.value;
  return std::nan("");
}

TEST_CASE("a trained model's captured trace verifies and has sinks") {
  const Captured captured;
  CHECK(verify_trace(captured.trace, 2).ok);
  CHECK(captured.trace.tokens() == 320);
  const double window = recall(captured.trace, make_case("window", 64, 0, false));
  CHECK(recall(captured.trace, make_case("sink", 64, 0, false)) > window + 0.05);
}

TEST_CASE("replay agrees with the brute force on a captured trace") {
  const Captured captured;
  std::vector<Case> cases;
  for (const char* policy : {"full", "window", "sink", "lru", "h2o", "streaming_h2o", "random",
                             "oracle_attention", "oracle_topk"})
    for (const std::uint32_t budget : {24u, 96u})
      for (const std::uint32_t chunk : {0u, 1u, 7u, budget - 1})
        for (const bool cache_positions : {false, true})
          if (!cache_positions || std::string(policy).find("oracle") != 0)
            cases.push_back(make_case(policy, budget, chunk, cache_positions));
  check_agreement(captured.trace, cases, {.threads = 2}, 1e-3);
}

TEST_CASE("the size of prefill chunks hardly changes the recall of h2o and streaming_h2o") {
  const Captured captured;
  for (const char* policy : {"h2o", "streaming_h2o"})
    for (const bool cache_positions : {false, true})
      for (const std::uint32_t budget : {16u, 32u, 64u, 128u}) {
        const Case stream = make_case(policy, budget, 1, cache_positions);
        const double streamed = recall(captured.trace, stream);
        INFO(stream.text << ": " << streamed);
        for (const std::uint32_t chunk : {7u, budget / 2, budget - 1})
          CHECK(std::abs(recall(captured.trace, make_case(policy, budget, chunk, cache_positions)) -
                         streamed) < 0.02);
      }
}

}  // namespace
}  // namespace kvlab
