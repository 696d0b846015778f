#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <system_error>

#include "engine/backend.hpp"
#include "engine/evaluation/policy_file.hpp"
#include "tools/command.hpp"
#include "tools/options.hpp"
#include "traces/base/cancel.hpp"
#include "traces/base/process.hpp"
#include "traces/base/safetensors.hpp"

namespace kvlab {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

constexpr const char* kMarker = ".kvlab-demo";
constexpr const char* kDeployedBudget = "64";

struct Request {
  std::string out = "demo", model;
  bool real = false;
};

void add_options(OptionTable& table, Request& request) {
  table.text("out", "DIR", request.out, "directory of all results; an older demo is replaced");
  table.text("model", "DIR", request.model,
             "checkpoint to run (default: $KVLAB_MODEL, or the bundled model)");
  table.flag("real", request.real,
             "use a real model, and also tune the policy and evaluate a pass-key task; takes "
             "minutes on a CPU (default model: SmolLM2, which `./dev model smollm2` fetches)");
}

/// The path of a file that comes with kvlab: the installed file or, if there is none, the one in
/// the source tree. It is relative to the current directory if that is shorter.
std::string find_shipped(const char* file) {
  const fs::path absolute = installed_file(file).value_or(fs::path(KVLAB_SOURCE_DIR) / file);
  std::error_code error;
  const fs::path relative = fs::proximate(absolute, error);
  const bool shorter = !error && relative.native().size() < absolute.native().size();
  return shorter ? relative.string() : absolute.string();
}

std::string model_directory(const Request& request) {
  if (!request.model.empty()) return request.model;
  if (const char* model = std::getenv("KVLAB_MODEL")) return model;
  return find_shipped(request.real ? "engine/models/smollm2" : "engine/models/tiny");
}

/// Makes an empty directory. Replaces an existing directory only if an earlier demo made it.
void make_directory(const fs::path& directory) {
  if (fs::exists(fs::symlink_status(directory))) {
    if (!fs::exists(directory / kMarker))
      throw std::runtime_error(
          fmt::format("--out: {} exists and was not made by kvlab demo; give another directory",
                      directory.string()));
    fs::remove_all(directory);
  }
  fs::create_directories(directory);
  write_file_atomically(directory / kMarker,
                        "Made by kvlab demo, which may replace this directory.\n");
}

/// Removes the files of a tour that does not reach its end.
struct UnlessWhole {
  fs::path folder;
  bool whole = false;
  ~UnlessWhole() {
    std::error_code ignored;
    if (!whole) fs::remove_all(folder, ignored);
  }
};

/// A word as it would be typed in a shell.
std::string quote_word(const std::string& word) {
  const bool plain = !word.empty() && word.find_first_of(" '\"$&;|<>()*?!\\`") == std::string::npos;
  return plain ? word : fmt::format("'{}'", word);
}

/// Runs steps, and prints the command line of each.
class Tour {
 public:
  void step(const char* title, const char* text) {
    fmt::print("\n== {}. {} ==\n{}\n", ++number_, title, text);
  }

  void run(const Command& command, const Words& words) {
    std::string line = "kvlab " + command.name;
    for (const std::string& word : words) line.append(" ").append(quote_word(word));
    fmt::print("\n$ {}\n", line);
    std::fflush(stdout);
    const auto start = std::chrono::steady_clock::now();
    if (run_command(command, words) != 0)
      throw std::runtime_error(fmt::format("the step `{}` failed", line));
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    seconds_ += took.count();
    fmt::print("({:.1f} s)\n", took.count());
  }

  double seconds() const { return seconds_; }

 private:
  int number_ = 0;
  double seconds_ = 0;
};

/// Where the tour's files are.
struct Paths {
  std::string model, prompt, trace, run, page, policy;
};

void capture_and_replay(Tour& tour, const Paths& paths) {
  tour.step("Capture",
            "The model reads a story and continues it with the full cache. A trace records the "
            "queries,\nkeys and values of every layer.");
  tour.run(capture_command(),
           {"--model", paths.model, "--prompt-file", paths.prompt, "--max-new-tokens", "440",
            "--temperature", "0.8", "--seed", "7", "--out", paths.trace});

  tour.step(
      "Replay",
      "Six eviction policies at eight budgets are replayed over the trace, beside two oracles and "
      "the\nfull cache: how much of the attention falls on tokens that each policy still holds?");
  tour.run(replay_command(),
           {"--trace", paths.trace, "--policy", "window,sink,lru,h2o,streaming_h2o,random",
            "--budget", "24,32,48,64,96,128,192,256", "--out", paths.run});
}

void report_and_deploy(Tour& tour, const Paths& paths) {
  tour.step("Report",
            "One page shows the recommendation, the curves behind it and how they were made.");
  tour.run(report_command(), {paths.run, "--model", paths.model, "--out", paths.page});

  tour.step("Deploy",
            "A file holds the best policy at one budget, the evidence for it and the policies that "
            "do\nnot differ significantly from it.");
  tour.run(deploy_command(), {paths.run, "--budget", kDeployedBudget, "--out", paths.policy});
}

Words tune_words(const std::string& model, std::initializer_list<const char*> texts) {
  Words words{"--model", model, "--text"};
  for (const char* text : texts) words.push_back(find_shipped(text));
  return words;
}

void tune_tiny(Tour& tour, const std::string& model, const std::string& out) {
  tour.step("Tune",
            "The same comparison on five texts, with real evictions. A replay orders variants of "
            "every\npolicy; then successive halving evaluates the first of them end to end, where "
            "an eviction\nchanges what later layers see. The table marks differences that are not "
            "significant.");
  Words words =
      tune_words(model, {"tools/texts/carroll-alice.txt", "tools/texts/austen-emma.txt",
                         "tools/texts/melville-moby-dick.txt",
                         "tools/texts/milton-paradise-lost.txt", "tools/demo/prompt.txt"});
  words.insert(words.end(), {"--prompt-tokens", "128", "--max-tokens", "512", "--budget",
                             kDeployedBudget, "--out", out + "/tuned.json"});
  tour.run(tune_command(), words);
}

/// The tour with a real model: tunes a policy on four texts, then evaluates it on a pass-key task.
void real_tour(Tour& tour, const std::string& model, const std::string& out) {
  const std::string policy = out + "/policy.json";
  tour.step("Tune",
            "Four texts by four authors, a quarter of the memory. A replay orders variants of "
            "every policy;\nthen successive halving evaluates the first of them end to end. Among "
            "the policies that do not\ndiffer significantly in KL, the one with the best accuracy "
            "in a pass-key task is chosen.");
  Words words = tune_words(
      model, {"tools/texts/austen-emma.txt", "tools/texts/carroll-alice.txt",
              "tools/texts/melville-moby-dick.txt", "tools/texts/milton-paradise-lost.txt"});
  words.insert(words.end(),
               {"--prompt-tokens", "256", "--max-tokens", "768", "--budget", "25%", "--policy",
                "window,sink,lru,h2o", "--task", "passkey", "--samples", "1", "--out", policy});
  tour.run(tune_command(), words);

  const std::string winner = read_policy_file(policy).cache.policy.text();
  tour.step("Ask",
            "New samples of the same task: the full cache, the chosen policy with a quarter of the "
            "memory,\nand `window`, which keeps the newest tokens only.");
  tour.run(task_command(), {"passkey", "--model", model, "--policy", winner + ",window", "--budget",
                            "25%", "--words", "250", "--depth", "10%,50%", "--samples", "3",
                            "--seed", "1", "--query-aware"});

  tour.step("Generate", "The model generates text with that policy.");
  tour.run(generate_command(), {"--model", model, "--prompt", "The capital of France is",
                                "--max-new-tokens", "24", "--policy-file", policy});
}

void generate_twice(Tour& tour, const Paths& paths) {
  tour.step("Generate",
            "The same prompt with the full cache, then with the deployed policy and a fraction of "
            "the memory.\nThe random samples are the same; the texts differ from where the "
            "evictions change the output.");
  Words generate{"--model", paths.model,     "--prompt-file", paths.prompt, "--max-new-tokens",
                 "80",      "--temperature", "0.8",           "--seed",     "7"};
  // Both commands use the decoder that evicts, so that they differ only in the cache.
  if (has_cuda_device()) generate.insert(generate.end(), {"--device", "cpu"});
  tour.run(generate_command(), generate);
  Words deployed = generate;
  deployed.insert(deployed.end(), {"--policy-file", paths.policy});
  tour.run(generate_command(), deployed);
}

void take_tour(const Request& request, const Paths& paths) {
  Tour tour;
  if (request.real) {
    real_tour(tour, paths.model, request.out);
    fmt::print("\nThe demo took {:.1f} s.\n", tour.seconds());
    return;
  }
  capture_and_replay(tour, paths);
  report_and_deploy(tour, paths);
  tune_tiny(tour, paths.model, request.out);
  generate_twice(tour, paths);
  fmt::print(
      "\nThe demo took {:.1f} s. Open {} in a browser.\n"
      "Next: kvlab policies          what each policy does\n"
      "      kvlab eval --help       policies with real evictions: perplexity and KL\n"
      "      kvlab capture --help    a trace of your own model and text\n",
      tour.seconds(), paths.page);
}

int run(const Request& request) {
  const std::string& out = request.out;
  const Paths paths{.model = model_directory(request),
                    .prompt = find_shipped("tools/demo/prompt.txt"),
                    .trace = out + "/trace",
                    .run = out + "/run",
                    .page = out + "/report.html",
                    .policy = out + "/policy.json"};
  if (!fs::exists(fs::path(paths.model) / "config.json"))
    throw std::runtime_error(
        fmt::format("{}: holds no model; give --model DIR, the directory of a checkpoint{}",
                    paths.model, request.real ? ", or fetch one: ./dev model smollm2" : ""));
  make_directory(out);
  UnlessWhole made{out};
  try {
    take_tour(request, paths);
    made.whole = true;
    return 0;
  } catch (const std::system_error&) {  // standard output failed
    throw;
  } catch (const std::runtime_error& error) {
    throw_if_cancelled();
    throw std::runtime_error(fmt::format("{}; {} has been removed", error.what(), out));
  }
}

}  // namespace

Command demo_command() {
  return {.name = "demo",
          .summary = "runs all steps on the bundled model: capture, replay, report, tune",
          .usage = "[--out demo] [--model DIR] [--real]",
          .example = "kvlab demo",
          .prepare = make_prepare<Request>(add_options, nullptr, run)};
}

}  // namespace kvlab
