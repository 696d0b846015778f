/* A decode loop that keeps at most BUDGET tokens, in plain C: one layer, one sequence, keys, values
 * and queries drawn at random. By H2O, which looks at attention, and by knorm, which reads a column
 * that this program brings. Prints what is kept; exits with 1 if an output is not what attention
 * over the kept tokens gives, or knorm evicts another token than the one with the longest key among
 * those that are old enough to leave. */
#include <kvlab.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"

enum { STEPS = 200, BUDGET = 32, QUERY_HEADS = 8, KV_HEADS = 2, DIM = 64, PAIRS = KV_HEADS };
enum { GROUP = QUERY_HEADS / KV_HEADS, SLOTS = PAIRS * BUDGET, RECENT = BUDGET / 2 };

static void draw(float* values, int count) {
  for (int i = 0; i < count; ++i) values[i] = 4.0f * (float)rand() / (float)RAND_MAX - 2.0f;
}

/* The largest error of `out` against attention over the live slots, in float64. */
static double worst_error(const float* q, const float* keys, const float* values,
                          const int32_t* lengths, float scale, const float* out) {
  double worst = 0;
  for (int head = 0; head < QUERY_HEADS; ++head) {
    const int pair = head / GROUP;
    double weight[BUDGET], sum = 0, exact[DIM] = {0};
    for (int slot = 0; slot < lengths[pair]; ++slot) {
      double product = 0;
      for (int d = 0; d < DIM; ++d)
        product += (double)q[head * DIM + d] * keys[(pair * BUDGET + slot) * DIM + d];
      sum += weight[slot] = exp(product * scale);
    }
    for (int slot = 0; slot < lengths[pair]; ++slot)
      for (int d = 0; d < DIM; ++d)
        exact[d] += weight[slot] / sum * values[(pair * BUDGET + slot) * DIM + d];
    for (int d = 0; d < DIM; ++d) worst = fmax(worst, fabs(exact[d] - out[head * DIM + d]));
  }
  return worst;
}

static float norm_of(const float* x) {
  float squares = 0;
  for (int d = 0; d < DIM; ++d) squares += x[d] * x[d];
  return sqrtf(squares);
}

/* The slot with the largest number, of those that leave before the last RECENT tokens, `next` the
 * youngest of them. */
static int largest_of(const float* numbers, const uint32_t* positions, uint32_t next) {
  int largest = -1;
  for (int slot = 0; slot < BUDGET; ++slot)
    if (positions[slot] + RECENT <= next && (largest < 0 || numbers[slot] > numbers[largest]))
      largest = slot;
  return largest;
}

/* Whether all went as it should. */
static int decode(const char* name) {
  const kvlab_policy* policy = kvlab_find_policy(name);
  const char* column = kvlab_policy_column(policy, 0);
  const int by_norm = column != NULL && strcmp(column, "key_norm") == 0;
  /* The layer's cache: BUDGET slots for each pair. */
  const int64_t first_slot[PAIRS] = {0, BUDGET};
  kvlab_evicting_attention_args step;
  memset(&step, 0, sizeof step);
  step.struct_size = sizeof step;
  step.cache.type = KVLAB_F32;
  step.cache.sequences = 1;
  step.cache.query_heads = QUERY_HEADS;
  step.cache.kv_heads = KV_HEADS;
  step.cache.head_size = DIM;
  step.cache.softmax_scale = 1.0f / sqrtf(DIM);
  step.cache.most_slots = BUDGET;
  step.cache.first_slot = on_device(first_slot, sizeof first_slot);
  step.cache.keys = on_device(NULL, SLOTS * DIM * sizeof(float));
  step.cache.values = on_device(NULL, SLOTS * DIM * sizeof(float));
  step.cache.positions = on_device(NULL, SLOTS * sizeof(uint32_t));
  step.cache.lengths = on_device(NULL, PAIRS * sizeof(int32_t));
  step.cache.next_slots = on_device(NULL, PAIRS * sizeof(int32_t));

  /* What the policy works on. */
  const kvlab_rule rules[PAIRS] = {{BUDGET, 0, RECENT, 0}, {BUDGET, 0, RECENT, 0}};
  step.policy.states = on_device(NULL, SLOTS * kvlab_policy_slot_bytes(policy));
  step.policy.rules = on_device(rules, sizeof rules);
  step.policy.seeds = on_device(NULL, sizeof(uint64_t));
  step.policy.sequence_ids = on_device(NULL, sizeof(uint32_t));

  float* columns = on_device(NULL, SLOTS * sizeof(float));
  if (by_norm) step.policy.columns = columns;

  float q[QUERY_HEADS * DIM], new_key[DIM], new_value[DIM], out[QUERY_HEADS * DIM];
  static float keys[SLOTS * DIM], values[SLOTS * DIM];
  uint32_t* now = on_device(NULL, sizeof(uint32_t));
  void* device_q = on_device(NULL, sizeof q);
  step.now = now;
  step.q = device_q;
  step.out = on_device(NULL, sizeof out);
  const size_t workspace = kvlab_evicting_attention_workspace(policy, &step.cache);
  step.workspace = on_device(NULL, workspace);

  double worst = 0;
  int wrong_victims = 0;
  int32_t next[PAIRS], lengths[PAIRS];
  uint32_t positions[SLOTS];
  float norms[SLOTS] = {0};
  for (uint32_t t = 0; t < STEPS; ++t) {
    /* The token's key and value go where the step before said. An engine does that in a kernel. */
    to_host(next, step.cache.next_slots, sizeof next);
    for (int pair = 0; pair < PAIRS; ++pair) {
      const int slot = pair * BUDGET + next[pair];
      draw(new_key, DIM);
      draw(new_value, DIM);
      check(cudaMemcpy((float*)step.cache.keys + slot * DIM, new_key, sizeof new_key,
                       cudaMemcpyHostToDevice), "key");
      check(cudaMemcpy((float*)step.cache.values + slot * DIM, new_value, sizeof new_value,
                       cudaMemcpyHostToDevice), "value");
      norms[slot] = norm_of(new_key);
      check(cudaMemcpy(columns + slot, norms + slot, sizeof(float), cudaMemcpyHostToDevice), "column");
      check(cudaMemcpy(step.cache.positions + slot, &t, sizeof t, cudaMemcpyHostToDevice), "position");
    }
    draw(q, QUERY_HEADS * DIM);
    check(cudaMemcpy(device_q, q, sizeof q, cudaMemcpyHostToDevice), "q");
    check(cudaMemcpy(now, &t, sizeof t, cudaMemcpyHostToDevice), "now");
    done(kvlab_evicting_attention(policy, &step, NULL));

    to_host(out, step.out, sizeof out);
    to_host(keys, step.cache.keys, sizeof keys);
    to_host(values, step.cache.values, sizeof values);
    to_host(lengths, step.cache.lengths, sizeof lengths);
    worst = fmax(worst, worst_error(q, keys, values, lengths, step.cache.softmax_scale, out));
    to_host(next, step.cache.next_slots, sizeof next);
    to_host(positions, step.cache.positions, sizeof positions);
    for (int pair = 0; pair < PAIRS; ++pair)
      if (by_norm && lengths[pair] == BUDGET)
        wrong_victims +=
            next[pair] != largest_of(norms + pair * BUDGET, positions + pair * BUDGET, t + 1);
  }

  for (int pair = 0; pair < PAIRS; ++pair) {
    printf("%s: KV head %d keeps %d of %d tokens:", name, pair, lengths[pair], STEPS);
    for (int slot = 0; slot < lengths[pair]; ++slot) printf(" %u", positions[pair * BUDGET + slot]);
    printf("\n");
  }
  printf("largest error of an output: %.1e\n", worst);
  return worst < 1e-5 && wrong_victims == 0 && lengths[0] == BUDGET && lengths[1] == BUDGET;
}

int main(void) {
  if (kvlab_version() != KVLAB_VERSION) {
    fprintf(stderr, "kvlab.h %d, library %d: rebuild\n", KVLAB_VERSION, kvlab_version());
    return 2;
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    printf("skipped: no CUDA device\n");
    return 0;
  }
  const int by_mass = decode("h2o"), by_column = decode("knorm");
  return by_mass && by_column ? 0 : 1;
}
