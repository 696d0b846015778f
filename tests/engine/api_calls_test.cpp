// Counts the CUDA runtime calls of a decode step with CUPTI: a step launches a graph, allocates
// nothing and waits for nothing.
#include <cupti.h>

#include <map>
#include <stdexcept>
#include <string>

#include "engine/backend.hpp"
#include "engine/cuda/cuda_decoder.hpp"
#include "tests/catch.hpp"
#include "tests/skip.hpp"

using namespace kvlab;

namespace {

/// Counts the calls of the CUDA runtime by name while this object exists.
class ApiTrace {
 public:
  ApiTrace() {
    check(cuptiSubscribe(&subscriber_, &ApiTrace::called, this));
    check(cuptiEnableDomain(1, subscriber_, CUPTI_CB_DOMAIN_RUNTIME_API));
  }
  ApiTrace(const ApiTrace&) = delete;
  ApiTrace& operator=(const ApiTrace&) = delete;
  ~ApiTrace() { cuptiUnsubscribe(subscriber_); }

  const std::map<std::string, int>& calls() const { return calls_; }

 private:
  static void check(CUptiResult result) {
    if (result == CUPTI_SUCCESS) return;
    const char* text = nullptr;
    cuptiGetResultString(result, &text);
    throw std::runtime_error(std::string("CUPTI: ") + (text ? text : "unknown error"));
  }

  static void CUPTIAPI called(void* self, CUpti_CallbackDomain, CUpti_CallbackId,
                              const void* data) {
    const auto& call = *static_cast<const CUpti_CallbackData*>(data);
    if (call.callbackSite != CUPTI_API_ENTER) return;
    const std::string name = call.functionName;
    ++static_cast<ApiTrace*>(self)->calls_[name.substr(0, name.rfind("_v"))];
  }

  CUpti_SubscriberHandle subscriber_{};
  std::map<std::string, int> calls_;
};

std::string text_of(const std::map<std::string, int>& calls) {
  std::string text;
  for (const auto& [name, count] : calls) text += name + ": " + std::to_string(count) + "\n";
  return text;
}

}  // namespace

TEST_CASE("A step launches a graph and records an event, without allocation or waiting", "[gpu]") {
  if (!has_cuda_device()) return skip("no CUDA device");
  const DeviceModel model = DeviceModel::load(KVLAB_SOURCE_DIR "/engine/models/tiny");
  constexpr int kSequences = 4, kSteps = 100;
  for (const char* policy : {"full", "window", "sink", "lru", "h2o", "streaming_h2o", "random"}) {
    CAPTURE(policy);
    CudaDecoderOptions options{.sequences = kSequences, .slots = 256, .prefill_tokens = 32};
    const PolicySpec spec = parse_policy(policy);
    for (std::uint32_t s = 0; s < kSequences && spec.entry->info.evicts; ++s)
      options.caches.push_back(
          resolve({.policy = spec, .budget = {.extent = tokens(24 + 8 * s)}}, 256, s));
    CudaDecoder decoder(model, options);
    for (int s = 0; s < kSequences; ++s) {
      std::vector<std::int32_t> ids(static_cast<std::size_t>(20 + 10 * s), 300 + s);
      decoder.prefill(s, ids);
    }
    decoder.choose(kSequences);
    decoder.step(kSequences);  // captures the graph
    decoder.synchronize();
    std::map<std::string, int> calls;
    {
      const ApiTrace trace;
      for (int i = 0; i < kSteps; ++i) decoder.step(kSequences);
      calls = trace.calls();
    }
    decoder.synchronize();
    INFO(text_of(calls));
    CHECK(calls ==
          std::map<std::string, int>{{"cudaEventRecord", kSteps}, {"cudaGraphLaunch", kSteps}});
  }
}
