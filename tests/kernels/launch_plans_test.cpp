// Tests the plan of every launcher for the limits of seven GPUs. Plans depend only on a shape and
// on these limits, so the tests need no GPU.
#include "kernels/launch_plans.hpp"

#include <algorithm>
#include <array>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/cache/kv_cache_config.hpp"
#include "kernels/decode/pair_attention.hpp"
#include "kernels/linear/experts.hpp"
#include "kernels/linear/linear.hpp"
#include "kernels/replay/replay.hpp"
#include "tests/catch.hpp"
#include "tests/device.hpp"
#include "tests/skip.hpp"

using namespace kvlab;
using namespace kvlab::kernels;

namespace {

struct Gpu {
  const char* name;
  DeviceLimits limits;
};

/// The largest GPU of each architecture, with its multiprocessors and its shared memory per thread
/// block.
constexpr std::array kGpus{
    Gpu{"sm_80", {.multiprocessors = 108, .shared_bytes = 166'912}},
    Gpu{"sm_86", {.multiprocessors = 84, .shared_bytes = 101'376}},
    Gpu{"sm_89", {.multiprocessors = 128, .shared_bytes = 101'376}},
    Gpu{"sm_90", {.multiprocessors = 132, .shared_bytes = 232'448, .early_start = true}},
    Gpu{"sm_100", {.multiprocessors = 148, .shared_bytes = 232'448, .early_start = true}},
    Gpu{"sm_120", {.multiprocessors = 170, .shared_bytes = 101'376, .early_start = true}},
    Gpu{"64 KB", {.multiprocessors = 40, .shared_bytes = 65'536}},
};
constexpr DeviceLimits kH100 = kGpus[3].limits;
constexpr std::array kTypes{KVLAB_BF16, KVLAB_F16, KVLAB_F32};
constexpr std::array kHeadSizes{64, 96, 128, 256};
constexpr std::array kSlots{64, 100, 512, 1024, 2048, 4096, 16'384, 32'768, 131'072};
constexpr std::array kPositions{KVLAB_ORIGINAL_POSITIONS, KVLAB_CACHE_POSITIONS,
                                KVLAB_CACHE_POSITIONS_ROTATED};

/// Collects the first few errors.
class Wrong {
 public:
  template <class... Parts>
  void note(bool holds, const Parts&... parts) {
    if (holds || ++count_ > 5) return;
    std::ostringstream text;
    ((text << parts << ' '), ...);
    text_ += text.str() + "\n";
  }
  std::string text() const {
    return count_ > 5 ? text_ + std::to_string(count_) + " in all" : text_;
  }

 private:
  int count_ = 0;
  std::string text_;
};

/// Checks that a plan does not exceed the GPU's limits. If there is no plan, the refusal must state
/// the shared memory that is needed and the limit, and the needed amount must exceed the limit.
template <class... Parts>
void check_plan(Wrong& wrong, const Gpu& gpu, const LaunchPlan& plan, const std::string& why,
                const Parts&... parts) {
  const auto limit = static_cast<std::size_t>(gpu.limits.shared_bytes);
  if (plan.fits()) {
    wrong.note(plan.shared_bytes <= limit, gpu.name, parts..., "requests", plan.shared_bytes);
    wrong.note(why.empty(), gpu.name, parts..., "is refused though it fits:", why);
    return;
  }
  const bool names = why.find(std::to_string(plan.shared_bytes)) != std::string::npos &&
                     why.find(std::to_string(limit)) != std::string::npos;
  wrong.note(names && plan.shared_bytes > limit, gpu.name, parts...,
             "has no plan, and no reason:", why);
}

/// Arguments of decode attention with a given shape.
struct Decode {
  PairAttention args{};
  std::uint32_t age = 0;
  kvlab_rule rule{};
  float logit = 0;

  Decode(Type type, int head_size, int group, kvlab_numbering numbering, bool observes) {
    args.type = type;
    args.head_size = head_size;
    args.group = group;
    if (numbering == KVLAB_CACHE_POSITIONS) args.ages = &age;
    if (numbering == KVLAB_CACHE_POSITIONS_ROTATED) args.rules = &rule;
    if (observes) args.rows.logits = &logit;
    args.table.kv_heads = 1;
  }
  Decode(const Decode&) = delete;
  Decode& operator=(const Decode&) = delete;
};

/// Calls visit(decode) for all shapes.
template <class Visit>
void for_decodes(Visit visit) {
  for (const Type type : kTypes)
    for (const int head_size : kHeadSizes)
      for (int group = 1; group <= kMaxGroup; ++group)
        for (const kvlab_numbering numbering : kPositions)
          for (const bool observes : {false, true}) {
            Decode decode(type, head_size, group, numbering, observes);
            visit(decode);
          }
}

}  // namespace

TEST_CASE(
    "decode attention has a plan within each GPU's limits, or a refusal that names the "
    "limits") {
  Wrong wrong;
  int plans = 0;
  for (const Gpu& gpu : kGpus)
    for_decodes([&](Decode& decode) {
      PairAttention& args = decode.args;
      for (const int slots : kSlots)
        for (const int batch : {1, 2, 7, 16, 64})
          for (const int kv_heads : {1, 8}) {
            args.table.pairs = batch * kv_heads;
            args.table.max_slots = slots;
            const PairLaunch launch = pair_attention_plan(args, gpu.limits);
            const LaunchPlan& plan = launch.plan;
            // Whether a shape is refused does not depend on these sizes, so the reason is checked
            // once.
            const bool first = slots == kSlots[0] && batch == 1 && kv_heads == 1;
            const auto why = first || !plan.fits() ? why_not_pair_attention(args, gpu.limits) : "";
            check_plan(wrong, gpu, plan, why, "type", args.type, "head size", args.head_size,
                       "group", args.group, "pairs", args.table.pairs, "slots", slots);
            if (!plan.fits()) continue;
            const bool clusters = launch.kernel == PairKernel::clusters;
            const int max_blocks = clusters ? gpu.limits.multiprocessors : kMaxCtas;
            wrong.note(plan.blocks <= max_blocks && plan.stages >= 1, gpu.name, "blocks",
                       plan.blocks, "stages", plan.stages);
            wrong.note(!clusters || (gpu.limits.early_start && plan.cluster == 8), gpu.name,
                       "has no clusters");
            ++plans;
          }
    });
  CHECK(wrong.text() == "");
  CHECK(plans > 100'000);
}

TEST_CASE("16-bit types and groups of up to eight decode on every GPU with 99 KB or more") {
  Wrong wrong;
  for (const Gpu& gpu : kGpus)
    for_decodes([&](Decode& decode) {
      PairAttention& args = decode.args;
      args.table.pairs = 8;
      args.table.max_slots = 4096;
      const bool original = args.ages == nullptr && args.rules == nullptr;
      const bool narrow = args.type != KVLAB_F32 && args.group <= 8;
      const bool small = args.head_size <= 128;
      const bool large_gpu = gpu.limits.shared_bytes > 200'000;
      if (!(large_gpu || (gpu.limits.shared_bytes > 100'000 && narrow && (original || small))))
        return;
      wrong.note(pair_attention_plan(args, gpu.limits).plan.fits(), gpu.name, "type", args.type,
                 "head size", args.head_size, "group", args.group);
    });
  CHECK(wrong.text() == "");
}

TEST_CASE("decode attention over tiers has a plan within each GPU's limits, or a refusal") {
  Wrong wrong;
  for (const Gpu& gpu : kGpus)
    for (const int head_size : kHeadSizes)
      for (int group = 1; group <= kMaxTierGroup; ++group)
        for (const DeviceFormat form :
             {DeviceFormat{}, DeviceFormat{8, 8, false}, DeviceFormat{4, 2, false},
              DeviceFormat{2, 2, false}, DeviceFormat{8, 8, true}})
          for (const int rows : kSlots)
            for (const int pairs : {1, 8, 64, 512}) {
              PairAttention args{};
              args.type = KVLAB_BF16;
              args.head_size = head_size;
              args.group = group;
              args.table.pairs = pairs;
              args.table.max_slots = rows;
              const int bytes = static_cast<int>(row_bytes(form, head_size, 2));
              check_plan(wrong, gpu, tier_attention_plan(args, bytes, gpu.limits),
                         why_not_tier_attention(args, bytes, gpu.limits), "head size", head_size,
                         "group", group, "row bytes", bytes);
            }
  CHECK(wrong.text() == "");
}

TEST_CASE("a cache of slots uses plain kernels if the fast ones do not fit, or is refused") {
  const auto config_of = [](Type type, int head_size, bool quantized) {
    KvCacheConfig config{.type = type, .query_heads = 8, .kv_heads = 1, .head_size = head_size};
    config.layers = {{}};
    config.ropes = {{std::vector<float>(static_cast<std::size_t>(head_size / 2))}};
    config.pairs = {{.budget = 64}};
    if (quantized) config.pairs[0].tiers = {{kKvFormats[0], 32}, {kKvFormats[2], 32}};
    return config;
  };
  const auto is_plain = [&](const Gpu& gpu, Type type, int head_size, bool quantized) {
    const KvCacheConfig config = config_of(type, head_size, quantized);
    return kernels_for(config, {}, PlainKernels::present, gpu.limits).attend ==
           plain_kernels({}).attend;
  };
  const Gpu &a100 = kGpus[0], &rtx3090 = kGpus[1], &h100 = kGpus[3], &smallest = kGpus[6];
  for (const int head_size : kHeadSizes)
    for (const bool quantized : {false, true}) {
      CHECK_FALSE(is_plain(h100, KVLAB_BF16, head_size, quantized));
      CHECK_FALSE(is_plain(a100, KVLAB_BF16, head_size, quantized));
      CHECK(is_plain(rtx3090, KVLAB_BF16, head_size, quantized) == (quantized && head_size == 256));
      CHECK(is_plain(rtx3090, KVLAB_F32, head_size, false) == (head_size == 256));
    }
  const KvCacheConfig large = config_of(KVLAB_F32, 256, false);
  CHECK_THROWS_WITH(kernels_for(large, {}, PlainKernels::absent, rtx3090.limits),
                    Catch::Matchers::ContainsSubstring("this GPU has 101376"));
  CHECK_THROWS_WITH(
      kernels_for(config_of(KVLAB_BF16, 128, false), {}, PlainKernels::present, smallest.limits),
      Catch::Matchers::ContainsSubstring("prefill attention with head size 128 in bf16 needs"));
}

TEST_CASE("prefill attention and its second pass fit each GPU with 99 KB or more, or are refused") {
  Wrong wrong;
  for (const Gpu& gpu : kGpus)
    for (const Type type : kTypes)
      for (const int head_size : kHeadSizes) {
        const LaunchPlan attends = prefill_plan(type, head_size, gpu.limits),
                         observes = observe_plan(type, head_size, gpu.limits);
        const std::string why = why_not_prefill(type, head_size, gpu.limits);
        check_plan(wrong, gpu, attends.fits() ? observes : attends, why, "type", type, "head size",
                   head_size);
        wrong.note(why.empty() || gpu.limits.shared_bytes < 100'000, gpu.name, why);
      }
  CHECK(wrong.text() == "");
}

TEST_CASE("products of a decode step have a plan within each GPU's limits, or a refusal") {
  Wrong wrong;
  for (const Gpu& gpu : kGpus)
    for (const Type type : kTypes)
      for (const Form form : {Form::plain, Form::normed, Form::gated, Form::rotated})
        for (const int k : {64, 576, 2048, 4096, 5120, 8192, 14'336, 28'672, 65'536})
          for (const int n : {16, 4096, 128'256})
            for (int rows = 1; rows <= kMaxLinearRows; ++rows) {
              const LaunchPlan plan = linear_plan(type, form, rows, n, k, gpu.limits);
              check_plan(wrong, gpu, plan, why_not_linear(type, form, k, gpu.limits), "type", type,
                         "form", static_cast<int>(form), "k", k, "n", n, "rows", rows);
              wrong.note(!plan.fits() || (plan.rows >= 1 && plan.rows <= rows), gpu.name, "takes",
                         plan.rows, "rows of", rows);
              const bool small = k <= (type == KVLAB_F32 ? 8192 : 9000);
              wrong.note(plan.fits() || gpu.limits.shared_bytes < 100'000 || !small, gpu.name,
                         "refuses k", k);
            }
  CHECK(wrong.text() == "");
}

TEST_CASE("products of experts have a plan within each GPU's limits") {
  Wrong wrong;
  for (const Gpu& gpu : kGpus)
    for (const int tokens : {1, 64, 4096})
      for (const int experts : {8, 128}) {
        const Routes routes{.tokens = tokens, .experts = experts, .chosen = 8};
        check_plan(wrong, gpu, expert_product_plan(routes, 2048, gpu.limits), "", "tokens", tokens);
      }
  CHECK(wrong.text() == "");
}

namespace {

/// An upper bound of the static shared memory of the kernel that walks through a replay:
/// ReplayShared and the data of tiers.
constexpr std::size_t kStaticOfWalk = 24 << 10;

/// Checks the plan for the walk through a replay with one configuration of `slots` slots.
void check_walk(Wrong& wrong, const Gpu& gpu, int tokens, std::uint32_t slots, ReplayTokens kind) {
  ReplayWalkArgs args{};
  args.shape = {.tasks = 8,
                .tokens = tokens,
                .group = 4,
                .head_size = 128,
                .rotated = 128,
                .type = KVLAB_BF16};
  args.rows.block = kMaxReplayQueries;
  args.max_slots = slots;
  const ReplayMembers members{.count = 1,
                              .tokens = kind,
                              .largest = false,
                              .slot_bytes = 8,
                              .max_tiers = kind == ReplayTokens::tiered ? 4 : 0};
  ReplayWalkPlan plan{};
  const cudaError_t error = plan_walk(args, members, gpu.limits, plan);
  const bool fits = walk_fits(args.shape, kind, members.max_tiers, gpu.limits);
  wrong.note((error == cudaSuccess) == fits, gpu.name, "tokens", tokens, "plan", error);
  if (!fits) {
    wrong.note(tokens > 32'768 || gpu.limits.shared_bytes < 100'000, gpu.name, "refuses", tokens);
    return;
  }
  wrong.note(plan.shared_bytes <= plan.max_shared_bytes &&
                 plan.max_shared_bytes < static_cast<std::size_t>(gpu.limits.shared_bytes),
             gpu.name, "tokens", tokens, "slots", slots, "requests", plan.shared_bytes, "of",
             plan.max_shared_bytes);
  wrong.note(plan.threads >= 32 && plan.threads <= 1024, gpu.name, "threads", plan.threads);
}

}  // namespace

TEST_CASE("a replay's launches fit each GPU, or the refusal says that the text is too long") {
  Wrong wrong;
  for (const Gpu& gpu : kGpus) {
    const auto limit = static_cast<std::size_t>(gpu.limits.shared_bytes);
    for (const int tokens : {64, 1024, 8192, 32'768, 131'072, 524'288})
      for (const std::uint32_t slots : {1u, 64u, 1024u, 16'384u, 131'072u})
        for (const ReplayTokens kind :
             {ReplayTokens::exact, ReplayTokens::cache_positions, ReplayTokens::tiered})
          check_walk(wrong, gpu, tokens, slots, kind);
    for (const int tokens : {1, 1000, 131'072}) {
      const int cached = replay_cached_tokens(tokens, gpu.limits);
      wrong.note(cached >= 1 && static_cast<std::size_t>(cached) * 16 + 1024 <= limit, gpu.name,
                 "keeps", cached);
    }
    for (const Type type : kTypes) {
      const LaunchPlan plan = replay_outputs_plan(type, gpu.limits);
      wrong.note(plan.fits() == (plan.shared_bytes <= limit), gpu.name, "outputs",
                 plan.shared_bytes);
      wrong.note(plan.fits() || limit < 100'000, gpu.name, "has no plan for outputs");
      wrong.note(type != KVLAB_BF16 || plan.stages == 3, gpu.name, "has other stages of bf16");
    }
  }
  CHECK(wrong.text() == "");
}

namespace {

/// A row of plans/h100.csv.
class Recorded {
 public:
  explicit Recorded(const std::string& line) {
    std::istringstream text(line);
    for (std::string word; std::getline(text, word, ',');) words_.push_back(word);
  }
  const std::string& word(std::size_t at) const { return words_.at(at); }
  int number(std::size_t at) const { return std::stoi(words_.at(at)); }
  std::vector<std::string> from(std::size_t at) const {
    return {words_.begin() + static_cast<std::ptrdiff_t>(at), words_.end()};
  }

 private:
  std::vector<std::string> words_;
};

std::vector<std::string> texts(std::initializer_list<std::size_t> numbers) {
  std::vector<std::string> all;
  for (const std::size_t number : numbers) all.push_back(std::to_string(number));
  return all;
}

/// The plan that the code makes now, in the format of the row.
std::vector<std::string> planned_decode(const Recorded& row) {
  const Type type = row.word(1) == "bf16" ? KVLAB_BF16 : KVLAB_F32;
  Decode decode(type, row.number(2), row.number(3),
                kPositions.at(static_cast<std::size_t>(row.number(4))), row.number(7) != 0);
  decode.args.table.pairs = row.number(5);
  decode.args.table.max_slots = row.number(6);
  const auto [kernel, plan] = pair_attention_plan(decode.args, kH100);
  std::vector<std::string> found =
      texts({static_cast<std::size_t>(plan.blocks), static_cast<std::size_t>(plan.stages),
             plan.shared_bytes});
  constexpr std::array kNames{"one", "all", "clusters"};
  found.insert(found.begin(), kNames.at(static_cast<std::size_t>(kernel)));
  return found;
}

std::vector<std::string> planned_linear(const Recorded& row) {
  const LaunchPlan plan = linear_plan(KVLAB_F16, static_cast<Form>(row.number(1)), row.number(2),
                                      row.number(3), row.number(4), kH100);
  return texts({static_cast<std::size_t>(plan.blocks), static_cast<std::size_t>(plan.rows),
                static_cast<std::size_t>(plan.stages), plan.shared_bytes});
}

std::vector<std::string> planned_tiers(const Recorded& row) {
  PairAttention args{};
  args.type = KVLAB_BF16;
  args.head_size = row.number(1);
  args.group = row.number(2);
  args.table.pairs = row.number(3);
  args.table.max_slots = row.number(4);
  const LaunchPlan plan = tier_attention_plan(args, row.number(5), kH100);
  return texts({static_cast<std::size_t>(plan.blocks), static_cast<std::size_t>(plan.stages),
                plan.shared_bytes});
}

}  // namespace

/// plans/h100.csv was recorded before plans depended on a GPU's shared memory. A product that had
/// no plan then (0 blocks) may have one now.
TEST_CASE("an H100's plans are unchanged since its measurements") {
  std::ifstream file(KVLAB_SOURCE_DIR "/tests/kernels/plans/h100.csv");
  int rows = 0;
  for (std::string line; std::getline(file, line); ++rows) {
    if (line.starts_with("#")) continue;
    INFO(line);
    const Recorded row(line);
    if (row.word(0) == "decode") CHECK(planned_decode(row) == row.from(8));
    if (row.word(0) == "tiers") CHECK(planned_tiers(row) == row.from(6));
    if (row.word(0) == "linear" && row.number(5) > 0) CHECK(planned_linear(row) == row.from(5));
  }
  CHECK(rows > 600);
}

TEST_CASE("a GPU that is too old, or without code in this build, is refused with the reason") {
  CHECK(why_not_device(9, 0, cudaSuccess) == "");
  CHECK(why_not_device(7, 5, cudaErrorNoKernelImageForDevice) ==
        "compute capability 7.5 is not supported; 8.0 or newer is");
  CHECK_THAT(why_not_device(8, 6, cudaErrorNoKernelImageForDevice),
             Catch::Matchers::ContainsSubstring("no code for compute capability 8.6"));
  CHECK_THAT(cuda_description(), Catch::Matchers::ContainsSubstring("CUDA: in this build") &&
                                     Catch::Matchers::ContainsSubstring("GPU"));
}

/// A build has code for several architectures. The driver loads the newest code that the device can
/// run. Features of sm_90 may be used only if this code is for sm_90 or newer.
TEST_CASE("a device uses sm_90 features if the build has sm_90 code for it", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  int major = 0, minor = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
  int newest = 0;
  std::istringstream text{std::string(built_architectures())};
  for (std::string one; text >> one;) {
    const int number = std::stoi(one);
    if (number <= 10 * major + minor) newest = std::max(newest, number);
  }
  DeviceLimits limits;
  check_cuda(device_limits(limits));
  CAPTURE(cuda_description());
  CHECK(limits.early_start == (newest >= 90));
  CHECK(why_not_device() == "");
}
