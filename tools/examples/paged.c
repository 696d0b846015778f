/* A paged cache, as in vLLM, that keeps BUDGET tokens of each KV head by H2O: one layer, two
 * sequences, random keys, values and queries. Each prompt takes blocks of one pool. After its
 * attention it is compacted in place and returns the blocks that it no longer needs. Without that,
 * the second prompt would not fit the pool. Then both sequences decode. It exits with 1 if an
 * output differs from attention over the kept tokens. */
#include <kvlab.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"

enum { SEQUENCES = 2, KV_HEADS = 2, GROUP = 4, QUERY_HEADS = KV_HEADS * GROUP, DIM = 64 };
enum { PAGE = 16, BUDGET = 44, STEPS = 100, MAX_SLOTS = 208, MAX_BLOCKS = MAX_SLOTS / PAGE };
enum { POOL_BLOCKS = 16, PAIRS = SEQUENCES * KV_HEADS, SLOTS = PAIRS * MAX_SLOTS };
enum { BLOCK = PAGE * KV_HEADS * DIM, POOL = POOL_BLOCKS * BLOCK }; /* elements */
enum { QKV = (QUERY_HEADS + 2 * KV_HEADS) * DIM, Q = QUERY_HEADS * DIM };
static const int prompts[SEQUENCES] = {200, 90};

static void to_device(const void* to, const void* from, size_t bytes) {
  check(cudaMemcpy((void*)to, from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
}

/* --- The engine's pool ----------------------------------------------------------------------- */

static int32_t tables[SEQUENCES][MAX_BLOCKS];
static int held[SEQUENCES], unused[POOL_BLOCKS], unused_count;

/* Gives a sequence exactly the blocks for `slots` slots. */
static void hold(int sequence, int slots) {
  const int blocks = (slots + PAGE - 1) / PAGE;
  while (held[sequence] > blocks) unused[unused_count++] = tables[sequence][--held[sequence]];
  while (held[sequence] < blocks) {
    if (unused_count == 0) {
      fprintf(stderr, "the pool has no block left\n");
      exit(1);
    }
    tables[sequence][held[sequence]++] = unused[--unused_count];
  }
}

/* --- The layer ------------------------------------------------------------------------------- */

typedef struct {
  const kvlab_policy* policy;
  kvlab_cache_view cache;
  kvlab_policy_state state;
  float* qkv; /* [token, QKV] */
  float* q;   /* [token, Q] */
  uint32_t* now;
  int32_t *sequences, *slots; /* [token] */
} Layer;

static Layer make_layer(void) {
  Layer layer;
  memset(&layer, 0, sizeof layer);
  layer.policy = kvlab_find_policy("h2o");
  int64_t first_slot[PAIRS];
  kvlab_rule rules[PAIRS];
  for (int pair = 0; pair < PAIRS; ++pair) {
    first_slot[pair] = pair * MAX_SLOTS;
    rules[pair] = (kvlab_rule){BUDGET, 0, BUDGET / 2, 0};
  }
  kvlab_cache_view* cache = &layer.cache;
  cache->type = KVLAB_F32;
  cache->sequences = SEQUENCES;
  cache->query_heads = QUERY_HEADS;
  cache->kv_heads = KV_HEADS;
  cache->head_size = DIM;
  cache->softmax_scale = 1.0f / sqrtf(DIM);
  cache->max_slots = MAX_SLOTS;
  cache->first_slot = on_device(first_slot, sizeof first_slot);
  cache->keys = on_device(NULL, POOL * sizeof(float));
  cache->values = on_device(NULL, POOL * sizeof(float));
  cache->positions = on_device(NULL, SLOTS * sizeof(uint32_t));
  cache->lengths = on_device(NULL, PAIRS * sizeof(int32_t));
  cache->next_slots = on_device(NULL, PAIRS * sizeof(int32_t));
  /* The pool is [block, slot, kv_head, dim]; one table serves all KV heads of a sequence. */
  cache->pages.blocks = on_device(NULL, sizeof tables);
  cache->pages.page = PAGE;
  cache->pages.max_blocks = MAX_BLOCKS;
  cache->pages.block_stride = BLOCK;
  cache->pages.slot_stride = KV_HEADS * DIM;
  cache->pages.head_stride = DIM;
  layer.state.states = on_device(NULL, SLOTS * kvlab_policy_slot_bytes(layer.policy));
  layer.state.rules = on_device(rules, sizeof rules);
  layer.state.seeds = on_device(NULL, SEQUENCES * sizeof(uint64_t));
  layer.state.sequence_ids = on_device(NULL, SEQUENCES * sizeof(uint32_t));
  layer.qkv = on_device(NULL, MAX_SLOTS * QKV * sizeof(float));
  layer.q = on_device(NULL, MAX_SLOTS * Q * sizeof(float));
  layer.now = on_device(NULL, SEQUENCES * sizeof(uint32_t));
  layer.sequences = on_device(NULL, MAX_SLOTS * sizeof(int32_t));
  layer.slots = on_device(NULL, MAX_SLOTS * sizeof(int32_t));
  return layer;
}

/* Fills qkv with random values. In a model, a layer would compute them from its input. */
static void sample_tokens(const Layer* layer, int tokens) {
  static float values[MAX_SLOTS * QKV];
  for (int i = 0; i < tokens * QKV; ++i) values[i] = 4.0f * (float)rand() / (float)RAND_MAX - 2.0f;
  to_device(layer->qkv, values, (size_t)(tokens * QKV) * sizeof(float));
}

/* Writes keys and values to the cache. This model has no RoPE, so `rotated` is 0. */
static void write_tokens(const Layer* layer, kvlab_cache_view cache, int tokens,
                         const uint32_t* now, const int32_t* slots) {
  kvlab_write_args write;
  memset(&write, 0, sizeof write);
  write.struct_size = sizeof write;
  write.cache = cache;
  write.tokens = tokens;
  write.qkv = layer->qkv;
  write.sequences = layer->sequences;
  write.slots = slots;
  write.now = now;
  write.q = layer->q;
  done(kvlab_write(&write, NULL));
}

/* A view of one sequence of the cache. */
static kvlab_cache_view sequence_of(const Layer* layer, int sequence) {
  kvlab_cache_view one = layer->cache;
  one.sequences = 1;
  one.first_slot += sequence * KV_HEADS;
  one.lengths += sequence * KV_HEADS;
  one.next_slots += sequence * KV_HEADS;
  one.pages.blocks += sequence * MAX_BLOCKS;
  return one;
}

/* Computes the attention of the prompt and how much of it each key received, then compacts the
 * cache to the budget. */
static void run_prompt(const Layer* layer, int sequence) {
  const int tokens = prompts[sequence];
  const kvlab_cache_view one = sequence_of(layer, sequence);
  hold(sequence, tokens);
  to_device(layer->cache.pages.blocks, tables, sizeof tables);
  int32_t slots[MAX_SLOTS];
  for (int t = 0; t < tokens; ++t) slots[t] = t;
  to_device(layer->slots, slots, (size_t)tokens * sizeof(int32_t));
  check(cudaMemset(layer->sequences, 0, MAX_SLOTS * sizeof(int32_t)), "cudaMemset");
  sample_tokens(layer, tokens);
  write_tokens(layer, one, tokens, NULL, layer->slots);

  kvlab_observe_args observe;
  memset(&observe, 0, sizeof observe);
  observe.struct_size = sizeof observe;
  kvlab_prefill_args* prefill = &observe.prefill;
  prefill->struct_size = sizeof *prefill;
  prefill->type = one.type;
  prefill->query_heads = QUERY_HEADS;
  prefill->kv_heads = KV_HEADS;
  prefill->head_size = DIM;
  prefill->softmax_scale = one.softmax_scale;
  prefill->queries = tokens;
  prefill->q = layer->q;
  prefill->keys = one.keys;
  prefill->values = one.values;
  prefill->first_slot = one.first_slot;
  prefill->out = on_device(NULL, (size_t)(tokens * Q) * sizeof(float));
  prefill->rows = on_device(NULL, (size_t)(tokens * QUERY_HEADS) * sizeof(kvlab_row_softmax));
  prefill->pages = one.pages;
  done(kvlab_prefill_attention(prefill, NULL));
  observe.needs = kvlab_policy_needs(layer->policy);
  observe.keys_end = tokens;
  observe.seen = on_device(NULL, SLOTS * sizeof(kvlab_observation));
  observe.workspace = on_device(NULL, kvlab_observe_workspace(&observe));
  done(kvlab_observe(&observe, NULL));

  const uint32_t appended = (uint32_t)tokens;
  kvlab_compact_args compact;
  memset(&compact, 0, sizeof compact);
  compact.struct_size = sizeof compact;
  compact.from = compact.to = one;
  compact.policy = layer->state;
  compact.policy.rules += sequence * KV_HEADS;
  compact.to_states = layer->state.states;
  compact.now = on_device(NULL, sizeof(uint32_t));
  compact.appended = on_device(&appended, sizeof appended);
  compact.seen = observe.seen;
  compact.workspace = on_device(NULL, kvlab_compact_workspace(&one));
  done(kvlab_compact(layer->policy, &compact, NULL));
  hold(sequence, BUDGET); /* decoding needs only the first BUDGET slots */
  printf("sequence %d: %d tokens in, %d blocks held, %d unused\n", sequence, tokens, held[sequence],
         unused_count);
}

/* The start of a slot's key, and of its value, in the pool. */
static int row_of(int sequence, int head, int slot) {
  return tables[sequence][slot / PAGE] * BLOCK + slot % PAGE * KV_HEADS * DIM + head * DIM;
}

/* The largest error of `out` against attention over the live slots, in float64. */
static double worst_error(const float* q, const float* keys, const float* values,
                          const int32_t* lengths, float scale, const float* out) {
  double worst = 0;
  for (int row = 0; row < SEQUENCES * QUERY_HEADS; ++row) {
    const int pair = row / GROUP, sequence = pair / KV_HEADS, head = pair % KV_HEADS;
    double weight[BUDGET], sum = 0, exact[DIM] = {0};
    for (int slot = 0; slot < lengths[pair]; ++slot) {
      const float* key = keys + row_of(sequence, head, slot);
      double product = 0;
      for (int d = 0; d < DIM; ++d) product += (double)q[row * DIM + d] * key[d];
      sum += weight[slot] = exp(product * scale);
    }
    for (int slot = 0; slot < lengths[pair]; ++slot)
      for (int d = 0; d < DIM; ++d)
        exact[d] += weight[slot] / sum * values[row_of(sequence, head, slot) + d];
    for (int d = 0; d < DIM; ++d) worst = fmax(worst, fabs(exact[d] - out[row * DIM + d]));
  }
  return worst;
}

/* Decodes both sequences step by step. Returns the largest error. */
static double decode(const Layer* layer) {
  kvlab_evicting_attention_args step;
  memset(&step, 0, sizeof step);
  step.struct_size = sizeof step;
  step.cache = layer->cache;
  step.policy = layer->state;
  step.now = layer->now;
  step.q = layer->q;
  step.out = on_device(NULL, SEQUENCES * Q * sizeof(float));
  step.workspace = on_device(NULL, kvlab_evicting_attention_workspace(layer->policy, &step.cache));
  to_device(layer->cache.pages.blocks, tables, sizeof tables);
  const int32_t sequences[SEQUENCES] = {0, 1};
  to_device(layer->sequences, sequences, sizeof sequences);
  static float keys[POOL], values[POOL];
  float q[SEQUENCES * Q], out[SEQUENCES * Q];
  int32_t lengths[PAIRS];
  double worst = 0;
  for (int t = 0; t < STEPS; ++t) {
    const uint32_t now[SEQUENCES] = {(uint32_t)(prompts[0] + t), (uint32_t)(prompts[1] + t)};
    to_device(layer->now, now, sizeof now);
    sample_tokens(layer, SEQUENCES);
    write_tokens(layer, layer->cache, SEQUENCES, layer->now, NULL);
    done(kvlab_evicting_attention(layer->policy, &step, NULL));
    to_host(q, layer->q, sizeof q);
    to_host(out, step.out, sizeof out);
    to_host(keys, layer->cache.keys, sizeof keys);
    to_host(values, layer->cache.values, sizeof values);
    to_host(lengths, layer->cache.lengths, sizeof lengths);
    worst = fmax(worst, worst_error(q, keys, values, lengths, step.cache.softmax_scale, out));
    for (int pair = 0; pair < PAIRS; ++pair)
      if (lengths[pair] != BUDGET) worst = INFINITY;
  }
  return worst;
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
  for (int block = 0; block < POOL_BLOCKS; ++block)
    unused[unused_count++] = block * 7 % POOL_BLOCKS;
  const Layer layer = make_layer();
  for (int sequence = 0; sequence < SEQUENCES; ++sequence) run_prompt(&layer, sequence);
  const double worst = decode(&layer);
  printf("%d steps, largest error of an output: %.1e\n", STEPS, worst);
  return worst < 1e-5 ? 0 : 1;
}
