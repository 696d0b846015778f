#include "tests/policies/papers/scores.hpp"

#include <algorithm>
#include <cmath>

namespace kvlab::papers {
namespace {

using Wide = unsigned __int128;

/// The appends whose queries saw the token.
std::vector<Done> appends_of(const History& history, std::uint32_t token) {
  std::vector<Done> own;
  for (const Done& done : history.appends)
    if (done.last() >= token) own.push_back(done);
  return own;
}

/// The queries of an append that saw the token.
std::vector<std::uint32_t> queries_of(const Done& done, std::uint32_t token) {
  std::vector<std::uint32_t> own;
  for (std::uint32_t q = std::max(done.first, token); q <= done.last(); ++q) own.push_back(q);
  return own;
}

std::vector<std::uint32_t> requests_of(const History& history, const Done& done,
                                       std::uint32_t token) {
  std::vector<std::uint32_t> own;
  for (const std::uint32_t q : queries_of(done, token))
    if (history.queries[q].requested[token]) own.push_back(q);
  return own;
}

/// A share of a mass, in units of 2^-32, rounded down.
std::uint64_t share_of(std::uint64_t mass, double share) {
  const auto units = static_cast<Wide>(std::floor(share * 4294967296.0 + 0.5));
  return static_cast<std::uint64_t>(Wide{mass} * units >> 32);
}

/// An estimate of the mass that a token received from the last `window` queries. It is updated
/// after each append, of which only the last `window` queries count. If an append has fewer queries
/// than the window, the estimate before it is kept in part: it is multiplied by the share of the
/// window that the append does not fill.
std::uint64_t last_queries(const History& history, std::uint32_t token, std::uint32_t window) {
  std::uint64_t mass = 0;
  for (const Done& done : appends_of(history, token)) {
    const double left = done.count < window ? window - done.count : 0;
    mass = share_of(mass, left / window);
    for (const std::uint32_t q : queries_of(done, token))
      if (done.age(q) < window) mass += history.queries[q].mass(token);
  }
  return mass;
}

std::uint64_t scramble(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

Formula tova() {
  return [](const History& history, std::uint32_t token, const Moment&) -> Worth {
    return {0, static_cast<double>(history.queries.back().mass(token))};
  };
}

Formula lfu() {
  return [](const History& history, std::uint32_t token, const Moment&) -> Worth {
    std::size_t requests = 0;
    for (const Done& done : appends_of(history, token))
      requests += requests_of(history, done, token).size();
    return {0, static_cast<double>(requests)};
  };
}

Formula a2sf(double keep) {
  return [keep](const History& history, std::uint32_t token, const Moment&) -> Worth {
    std::uint64_t mass = 0;
    for (const Done& done : appends_of(history, token)) {
      mass = share_of(mass, std::pow(keep, done.count));
      for (const std::uint32_t q : queries_of(done, token))
        mass += history.queries[q].mass(token, static_cast<float>(std::pow(keep, done.age(q))));
    }
    return {0, static_cast<double>(mass)};
  };
}

double forgetting_sum(const History& history, std::uint32_t token, double keep) {
  double sum = 0;
  const auto n = static_cast<std::uint32_t>(history.queries.size()) - 1;
  for (std::uint32_t q = token; q <= n; ++q)
    for (const auto& row : history.queries[q].p)
      sum += std::pow(keep, n - q) * static_cast<double>(row[token]);
  return sum;
}

Formula leaky(double keep, double slope, std::uint32_t span) {
  return [=](const History& history, std::uint32_t token, const Moment& at) -> Worth {
    double mass = 0, requests = 0, queries = 0;
    for (const Done& done : appends_of(history, token)) {
      mass = std::floor(mass * keep);
      for (const std::uint32_t q : queries_of(done, token)) {
        const double age = done.age(q);
        const auto weight = age < span ? static_cast<float>(1 / (1 + slope * age)) : 0.0f;
        mass += static_cast<double>(history.queries[q].mass(token, weight));
        ++queries;
      }
      requests += static_cast<double>(requests_of(history, done, token).size());
    }
    const double mean = mass / (queries + 1);
    return {0, std::floor(mean * keep + requests * (1.0 / 3) + at.budget)};
  };
}

Formula h2o_mean() {
  return [](const History& history, std::uint32_t token, const Moment&) -> Worth {
    double sum = 0, count = 0;
    for (std::uint32_t q = token; q < history.queries.size(); ++q) {
      sum += static_cast<double>(history.queries[q].mass(token));
      ++count;
    }
    return {0, sum / count};
  };
}

Formula roco(double spread) {
  return [spread](const History& history, std::uint32_t token, const Moment&) -> Worth {
    // [query]: the token's attention. Each query of an append has the mean over the queries of that
    // append.
    std::vector<double> given;
    for (const Done& done : appends_of(history, token)) {
      const auto own = queries_of(done, token);
      double sum = 0;
      for (const std::uint32_t q : own)
        sum += static_cast<double>(history.queries[q].mass(token)) / 4294967296.0;
      given.insert(given.end(), own.size(), sum / static_cast<double>(own.size()));
    }
    double mean = 0, variance = 0;
    for (const double x : given) mean += x / static_cast<double>(given.size());
    for (const double x : given)
      variance += (x - mean) * (x - mean) / static_cast<double>(given.size());
    return {0, std::floor((mean * mean + spread * variance) * 0x1p44)};
  };
}

Formula scissorhands(std::uint32_t window) {
  return [window](const History& history, std::uint32_t token, const Moment& at) -> Worth {
    const std::uint32_t quarter = window / 4;
    double count = 0;
    for (const Done& done : appends_of(history, token)) {
      if ((at.now - 1) / quarter - done.last() / quarter >= 4) continue;  // out of the window
      const auto requests = static_cast<double>(requests_of(history, done, token).size());
      count += done.count > window ? std::floor(requests * window / done.count) : requests;
    }
    return {0, count};
  };
}

Formula lazy_eviction() {
  return [](const History& history, std::uint32_t token, const Moment& at) -> Worth {
    double last = token, interval = 0;
    for (const Done& done : appends_of(history, token)) {
      const auto requests = requests_of(history, done, token);
      if (requests.empty()) continue;
      const double mean = (requests.back() - last) / static_cast<double>(requests.size());
      interval = std::max(interval, std::ceil(mean));
      last = requests.back();
    }
    if (interval == 0) return {0, 0};
    return {0, interval / (interval + (at.now - 1 - last)) + 1 / interval};
  };
}

Formula snapkv(std::uint32_t window) {
  return [window](const History& history, std::uint32_t token, const Moment&) -> Worth {
    return {0, static_cast<double>(last_queries(history, token, window))};
  };
}

Formula nacl(std::uint32_t proxies, double random) {
  return [proxies, random](const History& history, std::uint32_t token, const Moment& at) -> Worth {
    const std::uint64_t cache = scramble(scramble(at.seed) ^ at.sequence);
    const std::uint64_t head = scramble(cache ^ ((std::uint64_t{at.layer} << 32) + at.kv_head));
    const std::uint64_t hash = scramble(head ^ ((std::uint64_t{token} << 32) + at.now));
    // The policy keeps `budget` of the live tokens. It chooses a part of these at random; the share
    // of this part is `random`.
    const double share = random * std::min(at.budget, at.live) / at.live;
    const bool spared = static_cast<double>(hash >> 32) < std::floor(share * 4294967296.0 + 0.5);
    return {spared ? 1 : 0, static_cast<double>(last_queries(history, token, proxies))};
  };
}

}  // namespace kvlab::papers
