/* A decode loop in plain C that keeps at most BUDGET tokens: one layer, one sequence, random keys,
 * values and queries. One handle holds the whole cache. It runs H2O, which observes attention;
 * knorm, which reads a feature; and H2O with a tier plan of the same bytes, in which most tokens
 * have 4 bits. It prints the kept tokens. It exits with 1 if an output differs from
 * attention over the kept tokens, or if knorm evicts any token but the one with the longest key
 * among the unprotected ones. */
#include <kvlab.h>
#include <math.h>
#include <string.h>

#include "device.h"

enum { STEPS = 200, BUDGET = 32, QUERY_HEADS = 8, KV_HEADS = 2, DIM = 64, RECENT = BUDGET / 2 };
static const float SCALE = 0.125f; /* 1 / sqrt(DIM) */
enum { GROUP = QUERY_HEADS / KV_HEADS, ROW = (QUERY_HEADS + 2 * KV_HEADS) * DIM };

/* [token]: its query heads, key heads and value heads. */
static float rows[STEPS][ROW];
static const float* key(uint32_t token, int head) {
  return rows[token] + (QUERY_HEADS + head) * DIM;
}
static const float* value(uint32_t token, int head) { return key(token, head) + KV_HEADS * DIM; }

static double product(const float* a, const float* b) {
  double sum = 0;
  for (int d = 0; d < DIM; ++d) sum += (double)a[d] * b[d];
  return sum;
}

/* The largest error of a query head's output against attention over the kept tokens, in float64. */
static double error_of(uint32_t token, int head, const uint32_t* kept, uint32_t count,
                       const float* out) {
  double worst = 0, sum = 0, exact[DIM] = {0};
  for (uint32_t i = 0; i < count; ++i) {
    const double weight =
        exp(SCALE * product(rows[token] + head * DIM, key(kept[i], head / GROUP)));
    sum += weight;
    for (int d = 0; d < DIM; ++d) exact[d] += weight * value(kept[i], head / GROUP)[d];
  }
  for (int d = 0; d < DIM; ++d) worst = fmax(worst, fabs(exact[d] / sum - out[d]));
  return worst;
}

/* The token with the longest key, among those that may be evicted before token `next`. */
static uint32_t longest_of(const uint32_t* kept, uint32_t count, uint32_t next, int head) {
  uint32_t longest = kept[0];
  for (uint32_t i = 0; i < count && kept[i] + RECENT <= next; ++i)
    if (product(key(kept[i], head), key(kept[i], head)) >
        product(key(longest, head), key(longest, head)))
      longest = kept[i];
  return longest;
}

/* Makes the caches. Each has BUDGET slots or, if `tiers` is not 0, the tiers of `tier_plan`. */
static kvlab_kv_cache* make(const kvlab_policy* policy, const kvlab_tier* tier_plan, int tiers) {
  static const float still[DIM / 2]; /* frequencies of 0, so RoPE rotates nothing */
  const kvlab_rope rope = {still, DIM, 1};
  const kvlab_layer layer = {.number = 0, .softmax_scale = 0.125f};
  const uint32_t tokens = tiers ? tier_plan[0].slots + tier_plan[1].slots : BUDGET;
  const kvlab_rule rules[KV_HEADS] = {{tokens, 0, RECENT, 0}, {tokens, 0, RECENT, 0}};
  const kvlab_feature norm = KVLAB_KEY_NORM;
  kvlab_kv_cache_config config;
  memset(&config, 0, sizeof config);
  config.struct_size = sizeof config;
  config.type = KVLAB_F32;
  config.query_heads = QUERY_HEADS;
  config.kv_heads = KV_HEADS;
  config.head_size = DIM;
  config.sequences = config.layer_count = config.rope_count = 1;
  config.layers = &layer;
  config.ropes = &rope;
  config.policy = policy;
  config.rules = rules;
  config.tier_count = tiers;
  config.tiers = tier_plan;
  config.feature_count = kvlab_policy_feature(policy, 0) != NULL;
  config.features = &norm;
  config.threshold16 = 655;
  kvlab_kv_cache* slots = NULL;
  done(kvlab_kv_cache_create(&config, NULL, &slots));
  return slots;
}

/* Runs the decode loop. Returns whether all checks pass. `tier_plan`: the tiers of each KV head.
 * `max_error`: outputs must have a smaller error than this. */
static int decode(const char* name, const kvlab_tier* tier_plan, int tiers, double max_error) {
  kvlab_kv_cache* const slots = make(kvlab_find_policy(name), tier_plan, tiers);
  float* const qkv = on_device(NULL, sizeof rows[0]);
  float* const device_out = on_device(NULL, QUERY_HEADS * DIM * sizeof(float));
  float out[QUERY_HEADS * DIM];
  uint32_t kept[KV_HEADS][STEPS], count[KV_HEADS] = {0}, victims[KV_HEADS];
  const int by_norm = strcmp(name, "knorm") == 0;
  int wrong_victims = 0;
  double worst = 0;
  for (uint32_t t = 0; t < STEPS; ++t) {
    for (int i = 0; i < ROW; ++i) rows[t][i] = 4.0f * (float)rand() / (float)RAND_MAX - 2.0f;
    check(cudaMemcpy(qkv, rows[t], sizeof rows[t], cudaMemcpyHostToDevice), "qkv");
    for (int head = 0; head < KV_HEADS; ++head)
      victims[head] = longest_of(kept[head], count[head], t, head);
    done(kvlab_kv_cache_begin_step(slots, NULL, NULL));
    done(kvlab_kv_cache_step(slots, 0, qkv, device_out, NULL, NULL));
    to_host(out, device_out, sizeof out);
    for (int head = 0; head < KV_HEADS; ++head) {
      const int full = count[head] == BUDGET;
      done(kvlab_kv_cache_positions(slots, 0, 0, head, kept[head], STEPS, &count[head], NULL));
      for (uint32_t i = 0; by_norm && full && i < count[head]; ++i)
        wrong_victims += kept[head][i] == victims[head];
    }
    for (int head = 0; head < QUERY_HEADS; ++head)
      worst =
          fmax(worst, error_of(t, head, kept[head / GROUP], count[head / GROUP], out + head * DIM));
  }
  for (int head = 0; head < KV_HEADS; ++head) {
    printf("%s: KV head %d keeps %u of %d tokens:", name, head, count[head], STEPS);
    for (uint32_t i = 0; i < count[head]; ++i) printf(" %u", kept[head][i]);
    printf("\n");
  }
  printf("largest error of an output: %.1e\n", worst);
  kvlab_kv_cache_destroy(slots);
  return worst < max_error && wrong_victims == 0 && count[0] >= BUDGET && count[0] == count[1];
}

int main(void) {
  if (kvlab_version() != KVLAB_VERSION) {
    fprintf(stderr, "kvlab.h has version %d and the library %d; rebuild this program\n",
            KVLAB_VERSION, kvlab_version());
    return 2;
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    printf("skipped: no CUDA device\n");
    return 0;
  }
  /* Tiers of 16 and 4 bits, whose rows have 256 and 80 bytes. */
  const kvlab_tier tier_plan[] = {
      {KVLAB_FORMAT_16, 8}, {KVLAB_FORMAT_4, 76}, {KVLAB_FORMAT_16, 8}, {KVLAB_FORMAT_4, 76}};
  const int by_mass = decode("h2o", NULL, 0, 1e-5), by_feature = decode("knorm", NULL, 0, 1e-5);
  return by_mass && by_feature && decode("h2o", tier_plan, 2, 0.5) ? 0 : 1;
}
