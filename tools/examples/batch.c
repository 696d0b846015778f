/* A continuous batch in plain C. Requests join and leave at any step, and their prompts are
 * appended in chunks between decode steps; a decode step is one CUDA graph. One request is aborted
 * in the middle of its prompt, one is preempted and continued later, and two share a prefix. While
 * two requests run, their next tokens are drafted and verified (speculative decoding). The model
 * has two layers of attention with random weights: a table has q, k and v of each token, and the
 * index of the largest output is the next token. Every request is first served alone, without
 * drafts. The program exits with 1 if a request gets another text in the batch, or if no draft is
 * accepted, or none rejected. */
#include <kvlab.h>
#include <math.h>
#include <string.h>

#include "device.h"

enum { LAYERS = 2, QUERY_HEADS = 4, KV_HEADS = 2, DIM = 64, VOCAB = 97, BUDGET = 40, CHUNK = 16 };
enum { ROW = (QUERY_HEADS + 2 * KV_HEADS) * DIM, OUT = QUERY_HEADS * DIM };
enum { SEQUENCES = 4, SPARE = SEQUENCES - 1, PREFIX = 32, PROMPT = 80, GENERATED = 30 };
enum { LENGTH = PROMPT + GENERATED };
/* Steps evict only when BUDGET - 1 + EVERY tokens are live, so there is room for drafts. A
 * verification has at most VERIFIED tokens of a request: the last token of its text, then drafts.
 */
enum { EVERY = 8, VERIFIED = 4 };

typedef struct {
  int text[LENGTH]; /* the prompt, then what was generated */
  int tokens, fed;  /* number of tokens in `text`, and in the cache */
  int sequence;     /* its sequence in the cache */
  const int* guess; /* the text that its drafter expects */
} request;

static float* table;     /* device [token, layer, ROW] */
static float *qkv, *out; /* device [layer, row, ROW], [row, OUT]; a row is a sequence or a token */
static kvlab_kv_cache* cache;
static cudaStream_t stream;
static cudaGraphExec_t graph;
static int drafted, accepted_drafts;

static void make_cache(void) {
  static float inv_freq[DIM / 2];
  for (int i = 0; i < DIM / 2; ++i) inv_freq[i] = powf(10000.0f, -2.0f * (float)i / DIM);
  const kvlab_rope rope = {inv_freq, DIM, 1};
  const kvlab_layer layers[LAYERS] = {{.number = 0, .softmax_scale = 0.125f},
                                      {.number = 1, .softmax_scale = 0.125f}};
  kvlab_rule rules[LAYERS * SEQUENCES * KV_HEADS];
  for (int i = 0; i < LAYERS * SEQUENCES * KV_HEADS; ++i)
    rules[i] = (kvlab_rule){.budget = BUDGET, .sinks = 4, .recent = 16};
  kvlab_kv_cache_config config;
  memset(&config, 0, sizeof config);
  config.struct_size = sizeof config;
  config.type = KVLAB_F32;
  config.query_heads = QUERY_HEADS, config.kv_heads = KV_HEADS, config.head_size = DIM;
  config.sequences = SEQUENCES, config.layer_count = LAYERS, config.rope_count = 1;
  config.layers = layers, config.ropes = &rope, config.rules = rules;
  config.policy = kvlab_find_policy("h2o");
  config.threshold16 = 655;
  config.every = EVERY;
  config.draft_tokens = VERIFIED;
  config.longest = BUDGET + EVERY + PREFIX; /* so that appends allocate nothing */
  done(kvlab_kv_cache_create(&config, stream, &cache));
}

static void record_graph(void) {
  cudaGraph_t recorded;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int layer = 0; layer < LAYERS; ++layer)
    done(kvlab_kv_cache_step(cache, layer, qkv + layer * PROMPT * ROW, out, NULL, stream));
  check(cudaStreamEndCapture(stream, &recorded), "capture");
  check(cudaGraphInstantiate(&graph, recorded, 0), "graph");
  check(cudaGraphDestroy(recorded), "graph");
}

/* Puts q, k and v of a token into a row of each layer's input. */
static void embed(int token, int row) {
  for (int layer = 0; layer < LAYERS; ++layer)
    check(
        cudaMemcpyAsync(qkv + (layer * PROMPT + row) * ROW, table + (token * LAYERS + layer) * ROW,
                        ROW * sizeof(float), cudaMemcpyDeviceToDevice, stream),
        "embed");
}

/* Returns the token that follows the one of this row. */
static int choose(int row) {
  float logits[OUT];
  check(cudaStreamSynchronize(stream), "step");
  to_host(logits, out + row * OUT, sizeof logits);
  int best = 0;
  for (int i = 1; i < VOCAB; ++i)
    if (logits[i] > logits[best]) best = i;
  return best;
}

/* Appends `count` tokens of a prompt in one append. */
static void append(request* r, int count) {
  kvlab_append_chunk chunk = {.struct_size = sizeof chunk,
                              .sequence = r->sequence,
                              .fed = (uint32_t)r->fed,
                              .tokens = (uint32_t)count,
                              .count = (uint32_t)count,
                              .out = out};
  chunk.ends_prompt = r->fed + count == PROMPT;
  for (int i = 0; i < count; ++i) embed(r->text[r->fed + i], i);
  for (chunk.layer = 0; chunk.layer < LAYERS; ++chunk.layer) {
    chunk.qkv = qkv + chunk.layer * PROMPT * ROW;
    done(kvlab_kv_cache_append(cache, &chunk, stream));
  }
  r->fed += count;
  if (chunk.ends_prompt) r->text[r->tokens++] = choose(count - 1);
}

/* Appends the next chunk of the prompt. The first chunk is the prefix. */
static void append_next(request* r) { append(r, r->fed < PREFIX ? PREFIX : CHUNK); }

/* Decodes one token for each of these requests. */
static void step(request** requests, int count) {
  unsigned char decodes[SEQUENCES] = {0};
  for (int i = 0; i < count; ++i) {
    decodes[requests[i]->sequence] = 1;
    embed(requests[i]->text[requests[i]->fed++], requests[i]->sequence);
  }
  done(kvlab_kv_cache_begin_step(cache, decodes, stream));
  check(cudaGraphLaunch(graph, stream), "graph");
  for (int i = 0; i < count; ++i)
    requests[i]->text[requests[i]->tokens++] = choose(requests[i]->sequence);
}

static void steps(request** requests, int count, int times) {
  while (times-- > 0) step(requests, count);
}

/* Writes drafts after the text's last token. Returns the number of tokens to verify, which is 0 if
 * the text is complete. A verification evicts only at its end. So with at most until_eviction
 * tokens, its queries see the same tokens as in decode steps. */
static int draft(request* r) {
  kvlab_sequence_info info = {.struct_size = sizeof info};
  done(kvlab_kv_cache_sequence_info(cache, r->sequence, &info));
  int count = info.until_eviction < VERIFIED ? (int)info.until_eviction : VERIFIED;
  if (count > LENGTH - r->tokens) count = LENGTH - r->tokens;
  for (int t = r->tokens; t < r->fed + count; ++t) /* every third draft is wrong */
    r->text[t] = (r->guess[t] + (t % 3 == 0)) % VOCAB;
  return count;
}

/* Verifies drafts of these requests, which are in the order of their sequences. Each request gets
 * at least one token, unless its text is complete. */
static void verify(request** requests, int count) {
  uint32_t tokens[SEQUENCES] = {0}, accepted[SEQUENCES] = {0};
  int rows = 0;
  for (int i = 0; i < count; ++i) {
    request* const r = requests[i];
    tokens[r->sequence] = (uint32_t)draft(r);
    for (uint32_t t = 0; t < tokens[r->sequence]; ++t) embed(r->text[r->fed + (int)t], rows++);
  }
  done(kvlab_kv_cache_begin_drafts(cache, tokens, stream));
  for (int layer = 0; layer < LAYERS; ++layer)
    done(kvlab_kv_cache_verify_drafts(cache, layer, qkv + layer * PROMPT * ROW, out, NULL, stream));
  rows = 0;
  for (int i = 0; i < count; ++i) {
    request* const r = requests[i];
    const int verified = (int)tokens[r->sequence];
    if (verified == 0) continue;
    int right = 0, next; /* number of right tokens, and the token that follows them */
    do {
      next = choose(rows + right++);
    } while (right < verified && r->text[r->fed + right] == next);
    r->text[r->fed + right] = next;
    r->fed += right, r->tokens += right, rows += verified;
    accepted[r->sequence] = (uint32_t)right;
    drafted += verified - 1, accepted_drafts += right - 1;
  }
  done(kvlab_kv_cache_accept_drafts(cache, accepted, stream));
}

static void join(request* r, int sequence) {
  r->sequence = sequence, r->fed = 0, r->tokens = PROMPT;
  done(kvlab_kv_cache_start(cache, sequence, NULL, stream));
}

static void serve_alone(request* r) {
  join(r, 0);
  while (r->fed < PROMPT) append_next(r);
  steps(&r, 1, GENERATED - 1);
}

static void serve_together(request* a, request* b, request* c, request* aborted) {
  join(a, 0);
  while (a->fed < PROMPT) append_next(a);
  join(b, 1);
  append_next(b);                                      /* the prefix that b and c share */
  done(kvlab_kv_cache_copy(cache, 1, SPARE, stream));  /* the copy is for c */
  while (b->fed < PROMPT) append_next(b), step(&a, 1); /* chunks between steps of a */
  join(aborted, 2);
  append_next(aborted);
  for (int i = 0; i < 3; ++i) verify((request*[]){a, b}, 2);
  join(c, 2); /* takes the sequence of the aborted request */
  done(kvlab_kv_cache_copy(cache, SPARE, 2, stream));
  for (c->fed = PREFIX; c->fed < PROMPT;) append_next(c);
  steps((request*[]){a, b, c}, 3, 6);
  done(kvlab_kv_cache_copy(cache, 1, SPARE, stream)); /* b is preempted */
  done(kvlab_kv_cache_start(cache, 1, NULL, stream));
  while (a->tokens < LENGTH) verify((request*[]){a, c}, 2);
  done(kvlab_kv_cache_copy(cache, SPARE, 0, stream)); /* a is finished; b takes its sequence */
  b->sequence = 0;
  while (b->tokens < LENGTH || c->tokens < LENGTH) verify((request*[]){b, c}, 2);
}

int main(void) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    printf("skipped: no CUDA device\n");
    return 0;
  }
  srand(17); /* with these weights, no two tokens are so close that rounding could swap them */
  float* const values = malloc(sizeof(float) * VOCAB * LAYERS * ROW);
  for (int i = 0; i < VOCAB * LAYERS * ROW; ++i)
    values[i] = 4.0f * (float)rand() / (float)RAND_MAX - 2.0f;
  check(cudaStreamCreate(&stream), "stream");
  table = on_device(values, sizeof(float) * VOCAB * LAYERS * ROW);
  qkv = on_device(NULL, sizeof(float) * LAYERS * PROMPT * ROW);
  out = on_device(NULL, sizeof(float) * PROMPT * OUT);
  free(values);
  make_cache();
  record_graph();

  request requests[4], alone[3];
  for (int i = 0; i < 4; ++i)
    for (int t = 0; t < PROMPT; ++t) requests[i].text[t] = rand() % VOCAB;
  memcpy(requests[2].text, requests[1].text, PREFIX * sizeof(int));
  for (int i = 0; i < 3; ++i) {
    memcpy(alone[i].text, requests[i].text, PROMPT * sizeof(int));
    serve_alone(&alone[i]);
    requests[i].guess = alone[i].text; /* in place of a drafter, such as a smaller model */
  }
  serve_together(&requests[0], &requests[1], &requests[2], &requests[3]);
  int failed = 0;
  for (int i = 0; i < 3; ++i) {
    const int same = memcmp(alone[i].text, requests[i].text, sizeof alone[i].text) == 0;
    printf("request %d: %d tokens, %s as alone\n", i, requests[i].tokens - PROMPT,
           same ? "the same" : "NOT the same");
    failed += !same;
  }
  printf("%d of %d drafts were accepted\n", accepted_drafts, drafted);
  failed += accepted_drafts == 0 || accepted_drafts == drafted;
  kvlab_kv_cache_destroy(cache);
  return failed == 0 ? 0 : 1;
}
