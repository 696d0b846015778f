#include "tools/commands/benches.hpp"

#include <fmt/format.h>

#include <charconv>
#include <stdexcept>

#include "engine/attention_bench.hpp"
#include "policies/catalogue.hpp"
#include "tools/options.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;

constexpr std::int64_t kMostSlots = 1 << 20;

/// `standard` if the option was not given.
std::vector<std::uint32_t> numbers_from(const po::variables_map& options, const char* name,
                                        std::vector<std::uint32_t> standard, std::uint32_t most) {
  if (!options.count(name)) return standard;
  std::vector<std::uint32_t> numbers;
  for (const std::string& text : split_list(options[name].as<std::string>())) {
    std::uint32_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || end != text.data() + text.size() || number < 1 || number > most)
      throw std::invalid_argument(
          fmt::format("--{}: '{}' should be a number from 1 to {}", name, text, most));
    numbers.push_back(number);
  }
  return numbers;
}

double percent_over(const EvictingTime& evicting, const AttentionTime& plain) {
  return 100 * (evicting.microseconds / plain.microseconds - 1);
}

ordered_json to_json(const AttentionBench& bench) {
  ordered_json rows = ordered_json::array();
  for (const AttentionTime& time : bench.times) {
    ordered_json evicting = ordered_json::array();
    for (const EvictingTime& with : time.evicting)
      evicting.push_back({{"policy", with.policy},
                          {"positions", name_of(with.positions)},
                          {"microseconds", with.microseconds},
                          {"percent_over", percent_over(with, time)}});
    rows.push_back({{"kv_heads", 8},
                    {"head_size", time.head_size},
                    {"group", time.group},
                    {"batch", time.batch},
                    {"slots", time.slots},
                    {"bytes", time.bytes},
                    {"microseconds", time.microseconds},
                    {"bytes_per_second", time.bytes_per_second()},
                    {"share_of_read", time.bytes_per_second() / bench.read_bytes_per_second},
                    {"evicting", std::move(evicting)}});
  }
  return {{"bench", "attention"},
          {"dtype", "bfloat16"},
          {"device", bench.device},
          {"read_bytes_per_second", bench.read_bytes_per_second},
          {"rows", std::move(rows)}};
}

void print(const AttentionBench& bench) {
  fmt::print("decode attention in bfloat16 on {}, 8 KV heads; read bandwidth {:.0f} GB/s\n",
             bench.device, bench.read_bytes_per_second * 1e-9);
  fmt::print("with observation, state and victim on a branch: microseconds beyond it alone\n\n");
  fmt::print("{:>4}{:>6}{:>6}{:>7}{:>9}{:>8}{:>9}", "dim", "group", "batch", "slots", "MB", "us",
             "of read");
  if (!bench.times.empty())
    for (const EvictingTime& with : bench.times.front().evicting)
      fmt::print("{:>19}", with.policy.substr(0, with.policy.find(':')) +
                               (with.positions == Positions::cache ? ", cache" : ""));
  fmt::print("\n");
  for (const AttentionTime& time : bench.times) {
    fmt::print("{:>4}{:>6}{:>6}{:>7}{:>9.1f}{:>8.2f}{:>8.1f}%", time.head_size, time.group,
               time.batch, time.slots, static_cast<double>(time.bytes) * 1e-6, time.microseconds,
               100 * time.bytes_per_second() / bench.read_bytes_per_second);
    for (const EvictingTime& with : time.evicting)
      fmt::print("{:>+10.2f} {:>+7.1f}%", with.microseconds - time.microseconds,
                 percent_over(with, time));
    fmt::print("\n");
  }
}

}  // namespace

void add_attention_options(po::options_description& options) {
  auto add = options.add_options();
  add("head-size", po::value<std::string>()->value_name("LIST"), "attention: 64, 96, 128");
  add("group", po::value<std::string>()->value_name("LIST"),
      "attention: query heads for each of 8 KV heads");
  add("sequences", po::value<std::string>()->value_name("LIST"), "attention: sequences");
  add("slots", po::value<std::int64_t>()->value_name("N")->default_value(4096),
      "attention: live tokens of each sequence");
}

void run_attention_bench(const po::variables_map& options) {
  AttentionBenchOptions how;
  if (options.count("policy")) how.policies = split_list(options["policy"].as<std::string>());
  how.head_sizes = numbers_from(options, "head-size", how.head_sizes, 128);
  how.groups = numbers_from(options, "group", how.groups, 8);
  how.batches = numbers_from(options, "sequences", how.batches, 1024);
  how.slots = static_cast<std::uint32_t>(number_from(options, "slots", 1, kMostSlots));
  const AttentionBench bench = bench_attention(how);
  if (options["json"].as<bool>())
    fmt::print("{}\n", json_text(to_json(bench)));
  else
    print(bench);
}

}  // namespace kvlab
