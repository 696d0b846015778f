#include "kernels/launch_plans.hpp"

#include <fmt/format.h>

#include "kernels/linear/linear.hpp"
#include "kernels/quantized/tier_attention.hpp"

namespace kvlab::kernels {
namespace {

const char* type_text(Type type) {
  return type == KVLAB_F32 ? "float32" : type == KVLAB_BF16 ? "bf16" : "fp16";
}

/// Appends the advice to use a 2-byte type, which needs half the memory of float32.
std::string add_advice(const std::string& why, Type type) {
  return why.empty() || type != KVLAB_F32 ? why : why + "; bf16 and fp16 need half of it";
}

std::string shape_text(const char* what, Type type, int head_size) {
  return fmt::format("{} with head size {} in {}", what, head_size, type_text(type));
}

std::string describe_group(const PairAttention& args, const char* what) {
  return fmt::format("{} and {} query heads for each KV head",
                     shape_text(what, args.type, args.head_size), args.group);
}

}  // namespace

std::string why_no_plan(const std::string& what, const LaunchPlan& plan,
                        const DeviceLimits& limits) {
  if (plan.fits()) return "";
  return fmt::format("{} needs {} bytes of shared memory in a thread block, but this GPU has {}",
                     what, plan.shared_bytes, limits.shared_bytes);
}

std::string why_not_pair_attention(const PairAttention& args, const DeviceLimits& limits) {
  const bool by_cache = args.ages != nullptr || args.rules != nullptr;
  return add_advice(
      why_no_plan(describe_group(
                      args, by_cache ? "decode attention at cache positions" : "decode attention"),
                  pair_attention_plan(args, limits).plan, limits),
      args.type);
}

std::string why_not_tier_attention(const PairAttention& args, int max_row_bytes,
                                   const DeviceLimits& limits) {
  return why_no_plan(describe_group(args, "decode attention over tiers"),
                     tier_attention_plan(args, max_row_bytes, limits), limits);
}

std::string why_not_prefill(Type type, int head_size, const DeviceLimits& limits) {
  const std::string why = why_no_plan(shape_text("prefill attention", type, head_size),
                                      prefill_plan(type, head_size, limits), limits);
  if (!why.empty()) return why;
  return why_no_plan(shape_text("observing a prompt's attention", type, head_size),
                     observe_plan(type, head_size, limits), limits);
}

std::string why_not_linear(Type type, Form form, int k, const DeviceLimits& limits) {
  return add_advice(
      why_no_plan(fmt::format("a {}product over {} inputs in {}",
                              form == Form::plain ? "" : "normed ", k, type_text(type)),
                  linear_plan(type, form, 1, 1, k, limits), limits),
      type);
}

}  // namespace kvlab::kernels
