/* kvlab's CUDA kernels for any engine, from C: attention over a cache of slots, and eviction by the
 * policies that kvlab's simulator replays. docs/reference/c-api.md tells the story.
 *
 * All pointers in structs are device memory; shapes stand behind them, the last one contiguous.
 * Calls are stream-ordered: no host synchronisation, no allocation, capturable in a CUDA graph, and
 * deterministic; of kvlab_slots its steps are, and it says what waits and allocates. What changes
 * from step to step is read from device memory, so that a captured graph serves growing sequences.
 * They return cudaErrorInvalidValue, before any launch, for what is not supported: head sizes other
 * than 64, 96, 128 and 256, more than 8 query heads for a KV head (of kvlab_slots, 16). Structs
 * must be zeroed before they are filled in, and struct_size be what sizeof gives: a call whose
 * caller was compiled with another version's struct is refused. */
#ifndef KVLAB_H
#define KVLAB_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#define KVLAB_VERSION_MAJOR 0
#define KVLAB_VERSION_MINOR 6
/** 100 * major + minor of the header; kvlab_version() is that of the library. */
#define KVLAB_VERSION (KVLAB_VERSION_MAJOR * 100 + KVLAB_VERSION_MINOR)

#ifdef __cplusplus
extern "C" {
#endif

/** Binary interfaces are the same where this equals KVLAB_VERSION. */
int kvlab_version(void);

/** Why the last call of this thread that takes a stream or a struct_size was refused, in one line:
 * what, where, and what would be right. Empty if it was not. It holds until the thread's next such
 * call. */
const char* kvlab_last_error(void);

/** Element type of queries, keys, values and outputs. Sums are float32. */
typedef enum { KVLAB_BF16 = 0, KVLAB_F16 = 1, KVLAB_F32 = 2 } kvlab_type;

/* --- Policies ------------------------------------------------------------------------------- */

/** What a policy looks at. */
typedef enum { KVLAB_NOTHING = 0, KVLAB_MASS = 1, KVLAB_REQUESTS = 2, KVLAB_BOTH = 3 } kvlab_needs;

/** A policy of the registry, or of a header of yours. */
typedef struct kvlab_policy kvlab_policy;

/** By the name that `kvlab policies` shows; NULL if there is none. It lives as long as the process.
 */
const kvlab_policy* kvlab_find_policy(const char* name);
/** The names, from 0 on; NULL behind the last. */
const char* kvlab_policy_name(int index);
/** Compiles a header such as those in policies/ (docs/guides/write-a-policy.md), for the current
 * device, or takes what was made of the same text before: by NVRTC, which is loaded then. The
 * policy lives as long as the process. `log`: what is wrong, with the header's own lines, cut to
 * log_bytes; empty on success; may be NULL where log_bytes is 0. cudaErrorFileNotFound;
 * cudaErrorInvalidSource: no policy, or it does not compile; cudaErrorNotSupported: there is no
 * NVRTC, or the device does not take the code. Without a device the header is compiled all the same
 * before the error is. */
cudaError_t kvlab_compile_policy(const char* path, const kvlab_policy** policy, char* log,
                                 size_t log_bytes);
kvlab_needs kvlab_policy_needs(const kvlab_policy* policy);
/** Bytes of state for each slot; 0: none. */
size_t kvlab_policy_slot_bytes(const kvlab_policy* policy);
/** Bytes of parameters for each sequence; 0: none. */
size_t kvlab_policy_params_bytes(const kvlab_policy* policy);
/** Writes them to host memory `to`, for the caller to copy to the device: `values` holds one number
 *  for each parameter, in the order of `kvlab policies`. cudaErrorInvalidValue if `count` differs,
 * or a number is out of its range there. */
cudaError_t kvlab_policy_params(const kvlab_policy* policy, const double* values, int count,
                                void* to);
/** Their names, in that order, from 0 on; NULL behind the last, and of a compiled policy. */
const char* kvlab_policy_parameter(const kvlab_policy* policy, int index);

/** Whether it weighs a prompt's queries by how many of the prompt are younger. */
int kvlab_policy_weighted(const kvlab_policy* policy);
/** Those weights, for kvlab_observe: of the query that `age` others are younger than, to host
 * memory to[age], `queries` numbers, for the caller to copy; a chunk that is appended by itself has
 * its own length. From `*tail` on they are 0. `params`: as kvlab_policy_params wrote them. Of a
 * compiled policy the device is asked, and waited for.
 */
cudaError_t kvlab_policy_weights(const kvlab_policy* policy, const void* params, uint32_t queries,
                                 float* to, uint32_t* tail);

/** The features that it reads (docs/reference/configurations.md), from 0 on; NULL behind the last.
 * You bring them: kvlab_policy_state.features. Of `feature` any will do. */
const char* kvlab_policy_column(const kvlab_policy* policy, int index);

/* --- One layer's cache ---------------------------------------------------------------------- */

/** Keys and values in blocks of slots, as engines with paged caches keep them; zeroed: slot by
 *  slot. Slots of a pair count from 0, and slot s begins at this element, of keys and of values:
 *
 *    blocks[row][s / page] * block_stride + s % page * slot_stride + kv_head * head_stride
 *
 *  where row is the sequence, or the pair. Only keys and values lie in blocks: what else is [slot]
 *  stays at first_slot[pair] + s. Blocks are read where the kernels run, as far as tokens live. */
typedef struct {
  const int32_t* blocks; /**< [row, max_blocks]; NULL: no blocks */
  int page;              /**< slots of a block: a power of two from 16 to 2^20 */
  int max_blocks;       /**< enough for the cache's max_slots */
  int by_pair;           /**< 1: a row of blocks for each pair, not for each sequence */
  /** In elements. Of 16 bytes or multiples of them; slots no nearer than head_size, and, unless
   *  by_pair, KV heads neither. */
  int64_t block_stride, slot_stride, head_stride;
} kvlab_pages;

/** A pair is one KV head of one sequence: pair = sequence * kv_heads + kv_head. Its slots begin at
 *  first_slot[pair]; the first lengths[pair] of them hold live tokens, in any order. Pairs may have
 *  different budgets, hence different numbers of slots: a pair that decodes needs `budget` slots.
 */
typedef struct {
  kvlab_type type;
  int sequences, query_heads, kv_heads, head_size;
  float softmax_scale;
  int max_slots;            /**< the largest number of slots of a pair */
  const int64_t* first_slot; /**< [pair] */
  void* keys;                /**< [slot, head_size]; rotated (RoPE) at their positions, or plain
                                  where KVLAB_SQUEEZED */
  void* values;              /**< [slot, head_size] */
  uint32_t* positions;       /**< [slot]: of the token that it holds */
  int32_t* lengths;          /**< [pair]: live tokens */
  int32_t* next_slots;       /**< [pair], from first_slot: where the next token goes */
  uint32_t* ages;            /**< [slot]: how many of the pair's live tokens are older; where
                                KVLAB_SQUEEZED, else NULL. Kept by kvlab_evicting_attention, set by
                                kvlab_number_by_age */
  kvlab_pages pages;         /**< where keys and values lie in blocks */
} kvlab_cache;

/** Cache positions: live tokens count as 0, 1, 2, ... by age. Keys and q come plain and are rotated here.
 *  With rotated keys: at cache positions too, but keys and q come rotated at their positions, and reading them costs
 *  no more than where they are original. For `window` and `sink` alone, whose live tokens are the
 *  rule's sinks and a run of the newest; the token at position i < sinks must be in slot i. */
typedef enum { KVLAB_ORIGINAL = 0, KVLAB_SQUEEZED = 1, KVLAB_TWO_FRAMES = 2 } kvlab_positions;

/** Bytes of one layer's arrays, each as long as its shape says; 0: there is none. */
typedef struct {
  size_t struct_size; /**< sizeof(kvlab_memory), set by the caller */
  size_t keys, values, positions, ages, states, features; /**< [slot] */
  size_t seen; /**< [slot], of a prompt alone; 0 where the policy needs nothing */
  size_t first_slot, lengths, next_slots, rules, evict_at; /**< [pair] */
  size_t unit_keys; /**< [pair, head_size]; 0 unless the policy reads key_cosine by default */
  size_t params, threshold16, seeds, sequence_ids; /**< [sequence] */
  size_t blocks; /**< the table, where pages.page > 0: then keys and values are those of whole
                    blocks, as many as max_slots take */
  size_t attention_workspace; /**< SIZE_MAX: there is no device to ask */
  size_t compact_workspace;
} kvlab_memory;
/** What a cache takes under a policy, from its shape alone: no pointer is read. `slots`: of all
 * pairs together; a prompt's cache has one for each KV head and token. What is [sequence] and the
 * workspaces serve all layers, one after another. cudaErrorNotSupported where a thread block would
 * need more shared memory than the current device has; kvlab_last_error names both. */
cudaError_t kvlab_cache_memory(const kvlab_policy* policy, const kvlab_cache* cache, int64_t slots,
                               kvlab_positions numbering, kvlab_memory* bytes);

/** Sets cache->ages from positions and lengths: after a prompt. */
cudaError_t kvlab_number_by_age(const kvlab_cache* cache, cudaStream_t stream);

/** The rule's numbers for one pair, in tokens. sinks + recent <= budget, sinks < budget. */
typedef struct {
  uint32_t budget; /**< tokens that a query may span, itself included; UINT32_MAX: no eviction */
  uint32_t sinks;  /**< positions below are evicted last */
  uint32_t recent; /**< the last ones are evicted before sinks and after all others */
  uint32_t
      group_max; /**< 1: a query gives a token the largest of its group's masses, not the sum */
} kvlab_rule;

/** What one token received from the queries of one step or prompt. */
typedef struct {
  uint64_t mass;         /**< sum of probabilities, in units of 2^-32 */
  uint32_t requests;     /**< queries that gave it at least tau of their largest probability */
  uint32_t last_request; /**< position of the last such query; meaningful where requests > 0 */
  uint32_t queries;      /**< queries that could see it */
} kvlab_observation;

/** What a policy works on, beside the cache. Rules, seeds and sequence_ids are always there; other
 *  members that it does not need may be NULL. */
typedef struct {
  void* states;                 /**< [slot, slot_bytes] */
  const kvlab_rule* rules;      /**< [pair] */
  const void* params;           /**< [sequence, params_bytes] */
  const uint32_t* threshold16;  /**< [sequence]: tau * 65536; kvlab uses 655 (1%) */
  const uint64_t* seeds;        /**< [sequence] */
  const uint32_t* sequence_ids; /**< [sequence]: tell the caches of a random policy apart; 0, 1, …
                                   in a replay's traces */
  uint32_t layer;
  uint32_t first_head;     /**< of the model's KV heads that of the first pair; random samples are by it */
  kvlab_observation* seen; /**< [slot], out: what each token received; or NULL */
  const float* features;    /**< [slot, feature]: what each token brought, kvlab_policy_column by
                                kvlab_policy_column; those of new tokens are there as their keys are */
  /** [pair]: tokens are evicted only when so many tokens are live; UINT32_MAX: never. NULL: at the
   * budget. For bursts (every=W): UINT32_MAX in decode steps, budget - 1 + W in kvlab_shrink. */
  const uint32_t* evict_at;
} kvlab_policy_state;

/** The sequence sits out: a value of `now`. */
#define KVLAB_IDLE UINT32_MAX

#define KVLAB_MOST_PARAMS 16
/** A policy.json that `kvlab deploy` or `kvlab tune` has written, for one model: what is set by the
 *  caller, then what the file says. Of its rules, which are in host memory, tokens are counted. */
typedef struct {
  size_t struct_size;   /**< sizeof(kvlab_policy_file) */
  int layers, kv_heads; /**< of the layers whose queries see all tokens */
  uint32_t tokens;      /**< that a sequence may have: `pyramid(N)` gives no head more */
  kvlab_rule* rules;    /**< out: [layer, kv_head] */

  const kvlab_policy* policy;
  double params[KVLAB_MOST_PARAMS]; /**< as kvlab_policy_params takes them */
  int param_count;
  char feature[64];           /**< that `feature` reads; else empty */
  kvlab_positions numbering; /**< or KVLAB_TWO_FRAMES where this is KVLAB_SQUEEZED */
  uint32_t prefill_chunk;    /**< tokens of a prompt that are appended together; 0: all */
  uint32_t threshold16;
  uint64_t seed;
  uint32_t every; /**< 1: tokens are evicted in each step; else see evict_at */
  int once;       /**< 1: after a prompt alone */
  int by_layer;   /**< as kvlab_shrink_args has these */
  uint32_t smooth;
  int pool_max;
} kvlab_policy_file;
/** Reads it. cudaErrorInvalidValue, and kvlab_last_error says why: it is no such file, or requests
 *  what the library does not have: a tier plan, `ada()`, bytes, a prompt that stays, a policy from a
 *  header (kvlab_compile_policy). `file` is as it was then, but for its rules. */
cudaError_t kvlab_read_policy_file(const char* path, kvlab_policy_file* file);

/* --- New tokens ----------------------------------------------------------------------------- */

/** New tokens on their way into a cache, from the projection of q, k and v: q and k are rotated in
 *  float32 and rounded once; q is put to `q`, keys and values to their slots, which are next_slots
 *  and behind. */
typedef struct {
  size_t struct_size; /**< sizeof(kvlab_write_args) */
  kvlab_cache cache;  /**< positions are written where `now` is given */
  int tokens;
  const void* qkv;   /**< [token, query_heads + 2 * kv_heads, head_size], before RoPE */
  int rotated;       /**< dimensions that RoPE rotates, d with d + rotated / 2; 0: none, as for
                          KVLAB_SQUEEZED */
  const float* rope; /**< [row, rotated / 2, 2]: cosines and sines of some positions */
  const int32_t*
      rope_rows; /**< [token]: its row there; what an idle sequence's is does not matter */
  const int32_t* sequences; /**< [token] */
  const int32_t* slots;     /**< [token]: which slot, from next_slots on; NULL: that itself */
  const uint32_t* now; /**< [sequence]: position of its one token, or KVLAB_IDLE: of that sequence
                            nothing is written, nor its q; or NULL */
  void* q;             /**< [token, query_head, head_size] */
} kvlab_write_args;
cudaError_t kvlab_write(const kvlab_write_args* args, cudaStream_t stream);

/** Features that are computed from keys, values and output projections
 * (docs/reference/configurations.md), by these names in lower case. */
typedef enum {
  KVLAB_KEY_NORM = 0,
  KVLAB_VALUE_NORM = 1,
  KVLAB_VALUE_NORM1 = 2,
  KVLAB_KEY_COSINE = 3,
  KVLAB_VALUE_OUT_NORM1 = 4
} kvlab_column;

/** Some features of new tokens, whose values are in the cache already. */
typedef struct {
  size_t struct_size; /**< sizeof(kvlab_columns_args) */
  kvlab_cache cache;
  int count; /**< of features */
  kvlab_column features[4];
  const int32_t* slots; /**< [pair], from first_slot: of the first new token; others follow */
  int tokens;           /**< of each sequence */
  const uint32_t* now;  /**< [sequence]: KVLAB_IDLE sits out; or NULL */
  const void* keys;     /**< before RoPE: [sequence, token] rows of [kv_head, head_size] */
  int64_t key_row;      /**< elements from one token to the next */
  float* unit_keys;     /**< [pair, head_size], zeroed before a sequence begins; for key_cosine */
  float* to;            /**< [slot, feature] */
  const void* output;   /**< W_o [hidden, query_head, head_size], of the cache's type; for
                             value_out_norm1 */
  int hidden;
  const uint32_t*
      appended; /**< [sequence]: only so many of its tokens, at most `tokens`; or NULL */
} kvlab_columns_args;
cudaError_t kvlab_columns(const kvlab_columns_args* args, cudaStream_t stream);

/* --- Decoding ------------------------------------------------------------------------------- */

/** One decoded token for each sequence. Its key, value and position are in its slot already, which
 *  is next_slots of each pair; its state is not. */
typedef struct {
  size_t struct_size; /**< sizeof(kvlab_evicting_attention_args) */
  kvlab_cache cache;
  kvlab_policy_state policy;
  kvlab_positions numbering;
  const uint32_t* now; /**< [sequence]: position of the token, or KVLAB_IDLE: of that row nothing is
                            written, `out` neither */
  const void* q;       /**< [sequence, query_head, head_size] */
  const float* inv_freq; /**< [rotated / 2], where at cache positions */
  int rotated;           /**< dimensions that RoPE rotates, where at cache positions: all, head_size */
  float rope_factor;     /**< on cos and sin, where at cache positions; 1 but for YaRN */
  void* out;             /**< [sequence, query_head, head_size] */
  float* lse;            /**< [sequence, query_head], natural logarithm; or NULL */
  void* workspace;       /**< zeroed before its first use; not shared by calls at one time */
  int settled; /**< 1: no kernel that may still run writes what this reads, but for q and each
                    pair's newest token; then the cache is fetched while they still run. 0 is safe
                */
} kvlab_evicting_attention_args;

/** Bytes of workspace; 0 for a shape that is not supported, or not on the current device; SIZE_MAX
 * where the shape is, and there is no device to ask. */
size_t kvlab_evicting_attention_workspace(const kvlab_policy* policy, const kvlab_cache* cache);
/** Attends over the live slots, shows the policy what each received, updates its states, and leaves
 *  in next_slots where the next token goes: behind the others, or, once the budget is reached, in
 *  the victim's slot. Sets lengths. */
cudaError_t kvlab_evicting_attention(const kvlab_policy* policy,
                                     const kvlab_evicting_attention_args* args,
                                     cudaStream_t stream);

/** The two halves of kvlab_evicting_attention, for an engine that runs the second beside its next
 *  kernels: attention. */
cudaError_t kvlab_attend(const kvlab_policy* policy, const kvlab_evicting_attention_args* args,
                         cudaStream_t stream);
/** And what the policy makes of it, of up to 8 layers that differ in arrays and `layer` alone:
 * their states, next_slots and lengths. `layers`: as given to kvlab_attend, each with a workspace
 * of its own. On another stream it comes behind their attention; and whatever next writes such a
 * layer, attends over it or takes such a workspace comes behind it. */
cudaError_t kvlab_choose_victims(const kvlab_policy* policy,
                                 const kvlab_evicting_attention_args* layers, int count,
                                 cudaStream_t stream);

/* --- Prompts -------------------------------------------------------------------------------- */

/** A row of logits and its softmax, kept for kvlab_observe. */
typedef struct {
  float max_product, lse2;
} kvlab_row_softmax;

/** Queries of one sequence, causal: query i lies at slot first + older[kv_head] + i of its head and
 *  sees that slot and all before it. Or of several sequences, one's behind the other's in q, out,
 *  lse and rows: then `queries` is the most of one, what is [kv_head] is [pair], by pair =
 *  sequence * kv_heads + kv_head, and pages have a row for each sequence, or pair. Outputs are the
 *  bits of a call for each. */
typedef struct {
  size_t struct_size; /**< sizeof(kvlab_prefill_args) */
  kvlab_type type;
  int query_heads, kv_heads, head_size;
  float softmax_scale;
  int first, queries;
  const void* q;             /**< [query, query_head, head_size], rotated */
  const void* keys;          /**< of one sequence, rotated; [slot, head_size] */
  const void* values;        /**< as keys */
  const int64_t* first_slot; /**< [kv_head]: where a head's slots begin */
  const int32_t* older;      /**< [kv_head], or NULL: 0 */
  void* out;                 /**< [query, query_head, head_size] */
  float* lse;                /**< [query, query_head], natural logarithm; or NULL */
  kvlab_row_softmax* rows;   /**< [query, query_head], out; or NULL */
  kvlab_pages pages; /**< of keys and values: [1, max_blocks], or by_pair [kv_head, max_blocks] */
  int sequences;     /**< of a batch, at most 65535; 0: one sequence, and the next two are 0 too */
  int all_queries;   /**< that q has; no less than first_query[sequences] */
  const int32_t* first_query; /**< [sequences + 1]: those of sequence s are first_query[s] to
                                   first_query[s + 1] - 1 of all; it may have none */
  /** kvlab_prefill_workspace bytes, not shared by calls at one time: keys are cut into parts, so
   *  that few queries of few pairs, drafts, put more of the device to work. Bits are others. NULL:
   *  they are not. */
  void* workspace;
  int keys_end; /**< with a workspace: no query sees a slot from here on, of any sequence */
} kvlab_prefill_args;
/** What `workspace` takes; it need not be there. 0: the shape is not supported. */
size_t kvlab_prefill_workspace(const kvlab_prefill_args* args);
cudaError_t kvlab_prefill_attention(const kvlab_prefill_args* args, cudaStream_t stream);

/** What the queries of a kvlab_prefill_attention give to each key. */
typedef struct {
  size_t struct_size;          /**< sizeof(kvlab_observe_args) */
  kvlab_prefill_args prefill;  /**< as given there; rows are read, values, out and lse are not */
  kvlab_needs needs;           /**< KVLAB_MASS, KVLAB_REQUESTS or KVLAB_BOTH */
  int keys_end;                /**< no query sees a slot from here on, of any sequence */
  uint32_t position;           /**< of the first query */
  const uint32_t* threshold16; /**< one number, for requests; of a batch [sequence] */
  kvlab_observation* seen;     /**< indexed like keys; added to: zeroed before the first part */
  void* workspace;
  int group_max; /**< 1: as kvlab_rule.group_max */
  /** Of a policy that weighs queries, kvlab_policy_weights: */
  const float* weights; /**< [age]; NULL: each query counts once */
  uint32_t tail;        /**< 0: they never end */
  int younger;          /**< queries of the prompt after these */
  /** Of a batch: */
  const uint32_t* positions; /**< [sequence]; NULL: `position` for all */
  const int32_t* youngers;   /**< [sequence]; NULL: `younger` for all */
  /** [sequence]: only its first so many queries count, as if the others had not been; NULL: all.
   *  Of drafted tokens: those that were accepted, as kvlab_shrink_args has it. */
  const uint32_t* appended;
} kvlab_observe_args;
size_t kvlab_observe_workspace(const kvlab_observe_args* args);
cudaError_t kvlab_observe(const kvlab_observe_args* args, cudaStream_t stream);

/** A prefix that prompts share: its keys and values were written, attended and observed once, and
 *  their blocks begin with its blocks. What its tokens received from each other, and their features,
 *  go to where those prompts count on, with `first` behind the prefix. */
typedef struct {
  size_t struct_size; /**< sizeof(kvlab_prefix_args) */
  int sequences, kv_heads;
  int tokens;                    /**< of the prefix */
  const int64_t* first_slot;     /**< [kv_head]: of the prefix */
  const int64_t* to_first_slot;  /**< [pair]: of the prompts */
  const kvlab_observation* seen; /**< [slot]; where the policy needs something, as to_seen */
  kvlab_observation* to_seen;
  const float* features; /**< [slot, feature]; where it reads features, as to_features */
  float* to_features;
} kvlab_prefix_args;
/** cudaErrorNotSupported where what the prefix's tokens received or bring depends on what follows
 *  them: the policy weighs queries, or reads key_cosine. */
cudaError_t kvlab_copy_prefix(const kvlab_policy* policy, const kvlab_prefix_args* args,
                              cudaStream_t stream);

/** The end of a prompt: appends its tokens to the policy, shows it what they received, and keeps the
 *  budget - 1 tokens that are evicted last. Tokens lie in `from`: lengths[pair] older ones, then
 *  appended[sequence] new ones, whose keys and values are written and whose positions are not.
 * Those that stay go to `to`, which is disjoint from `from`, or the same memory (of caches in
 * blocks: the same blocks). With nothing appended and `seen` NULL it evicts to the budget between decode
 * steps, `now` being the next token's position. States and new positions of `from` are written, and
 * of `seen` how many queries: where there are older tokens it is called once for an append.
 * cudaErrorNotSupported where a policy weighs queries and `weighted` does not say
 * that they were.
 */
typedef struct {
  size_t struct_size; /**< sizeof(kvlab_shrink_args) */
  kvlab_cache from, to;
  kvlab_policy_state policy; /**< states: of from */
  void* to_states;           /**< [slot of to, slot_bytes] */
  const uint32_t* now;       /**< [sequence]: position of the first new token, or KVLAB_IDLE */
  const uint32_t* appended;  /**< [sequence]; zeros: nothing */
  kvlab_observation* seen;   /**< [slot of from], from kvlab_observe; NULL if it needs nothing */
  void* workspace;
  float* to_features; /**< [slot of to, feature]; those of from are policy.features */
  /** What becomes of ranks before tokens are ordered. by_layer: a token's rank is the sum, as
   *  numbers in their order, over the sequence's KV heads, which hold the same tokens. Then each
   * rank becomes the mean, or with pool_max the largest, of those of the live tokens at most
   * `smooth` tokens away by age. */
  int by_layer;
  uint32_t smooth;
  int pool_max;
  int weighted; /**< 1: `seen` was counted with the policy's weights */
} kvlab_shrink_args;
size_t kvlab_shrink_workspace(const kvlab_cache* from);
cudaError_t kvlab_shrink(const kvlab_policy* policy, const kvlab_shrink_args* args,
                         cudaStream_t stream);

/** Its halves, for by_layer where several devices have a sequence's KV heads, equally many each.
 *  The first does all but choose: `ranks` [pair, max_slots of from], out: by age. The caller
 *  gathers those of all devices in the order of their heads: [device, pair, max_slots]. */
cudaError_t kvlab_rank(const kvlab_policy* policy, const kvlab_shrink_args* args, uint64_t* ranks,
                       cudaStream_t stream);
/** The second adds them up, chooses and moves. `args`: the same, the workspace as it was left. */
cudaError_t kvlab_keep(const kvlab_policy* policy, const kvlab_shrink_args* args,
                       const uint64_t* ranks, int devices, cudaStream_t stream);

/* --- All layers' caches, as one object ------------------------------------------------------ */

/** The caches of some sequences in all layers that a policy acts on: memory, who has room, and the
 *  order of the calls below, which it makes itself. One thread at a time, and one stream,
 *  or streams that wait for each other. It allocates when it is made, and where `longest` says:
 *  cudaErrorMemoryAllocation where there is no memory, and the call has then done nothing. */
typedef struct kvlab_slots kvlab_slots;

/** How a token's key and value are kept: of the cache's type, or quantized
 * (docs/guides/precision-tiers.md). */
typedef enum {
  KVLAB_FORM_16 = 0,
  KVLAB_FORM_FP8 = 1,
  KVLAB_FORM_8 = 2,
  KVLAB_FORM_4 = 3,
  KVLAB_FORM_K4V2 = 4,
  KVLAB_FORM_2 = 5
} kvlab_form;
/** A tier of a pair's tier plan: a token that leaves it is demoted to the next. */
typedef struct {
  kvlab_form format;
  uint32_t slots;
} kvlab_rung;

/** A table of RoPE: frequencies, in host memory. */
typedef struct {
  const float* inv_freq; /**< [rotated / 2] */
  int rotated;
  float factor; /**< on cos and sin; 1 but for YaRN */
} kvlab_rope;

typedef struct {
  uint32_t number; /**< as the model counts: random samples are by it */
  float softmax_scale;
  int rope;           /**< which table */
  const void* output; /**< W_o, as kvlab_columns_args has it */
} kvlab_slots_layer;

/** In host memory, all of it, and needed during the call alone. */
typedef struct {
  size_t struct_size; /**< sizeof(kvlab_slots_config) */
  kvlab_type type;
  int query_heads, kv_heads, head_size;
  int sequences, layer_count, rope_count, tier_count, feature_count;
  const kvlab_slots_layer* layers;
  const kvlab_rope* ropes;
  const kvlab_policy* policy;
  const kvlab_rule* rules; /**< [layer, sequence, kv_head]; group_max the same in all */
  const kvlab_rung* tiers; /**< [pair as rules, tier], of rule.budget slots together, from the most
                                exact down; without a budget the first holds all. Where tier_count
                                is 0 all tokens stay in `type` */
  const void* params;      /**< as kvlab_policy_params writes them, for all sequences */
  const uint64_t* seeds;   /**< [sequence]; NULL: zeros */
  const kvlab_column* features; /**< the policy's, in its order */
  int hidden;                  /**< of kvlab_slots_layer.output */
  kvlab_positions numbering;   /**< KVLAB_ORIGINAL or KVLAB_SQUEEZED */
  uint32_t threshold16;
  uint32_t tokens;  /**< that a sequence may have; 0: no limit, where rules have budgets */
  uint32_t part;    /**< tokens that go through a layer together, at most; 0: 2048 */
  uint32_t longest; /**< of appends, with the tokens that are live then; 0: their memory is taken
                         when they come, or before the first step where steps make no room */
  uint32_t every;   /**< 0 and 1: tokens are evicted in each step; modifiers, as kvlab_policy_file says */
  uint32_t smooth;
  int once, by_layer, pool_max;
} kvlab_slots_config;

/** Device memory that it takes, in bytes. No device is needed but for attention's workspace. A
 *  shape that no kernel can serve on the current device is refused here and by kvlab_slots_create.
 */
cudaError_t kvlab_slots_memory(const kvlab_slots_config* config, size_t* bytes);
cudaError_t kvlab_slots_create(const kvlab_slots_config* config, cudaStream_t stream,
                               kvlab_slots** slots);
/** Of NULL nothing. */
void kvlab_slots_destroy(kvlab_slots* slots);
/** Forgets all tokens, and waits. Memory stays where it is, so that a graph goes on serving. */
cudaError_t kvlab_slots_clear(kvlab_slots* slots, cudaStream_t stream);

/** Tokens of one sequence that go through one layer: of an append of `tokens`, which comes
 *  behind the `fed` that the layer has had, `count` from `first` on, in order. A chunk of a prompt
 *  that is appended by itself is an append. Each layer gets all of them, one layer or one
 *  append after the other. */
typedef struct {
  size_t struct_size; /**< sizeof(kvlab_slots_part) */
  int sequence, layer;
  uint32_t fed, tokens;
  int ends_prompt; /**< 1: a prompt ends with it */
  uint32_t first, count;
  const void* qkv; /**< [token, query_heads + 2 * kv_heads, head_size], before RoPE */
  void* out;       /**< [token, query_head, head_size] */
  float* lse;      /**< [token, query_head]; or NULL */
} kvlab_slots_part;
cudaError_t kvlab_slots_admit(kvlab_slots* slots, const kvlab_slots_part* part,
                              cudaStream_t stream);

/** Before a step: which sequences decode a token, [sequence] in host memory; NULL: all. Those go
 *  through all layers, once, before anything else comes for them. */
cudaError_t kvlab_slots_before_step(kvlab_slots* slots, const unsigned char* decodes,
                                    cudaStream_t stream);
/** One layer of it, from the first to the last: launches alone, for a graph to hold. `qkv`
 * [sequence, …], as above; of who sits out neither `out` nor `lse` is written. */
cudaError_t kvlab_slots_step(kvlab_slots* slots, int layer, const void* qkv, void* out, float* lse,
                             cudaStream_t stream);

/** What is held of a sequence, by the host's counts. */
typedef struct {
  size_t struct_size; /**< sizeof(kvlab_slots_held) */
  uint32_t tokens;    /**< that it has had */
  uint64_t evictions; /**< how many have left, of all pairs, when the last one came */
  uint64_t kv_bytes;  /**< of keys and values that are live */
  uint64_t allocated; /**< of those of all sequences, room for others among them */
} kvlab_slots_held;
cudaError_t kvlab_slots_ask(const kvlab_slots* slots, int sequence, kvlab_slots_held* held);
/** Positions that a pair holds, ascending, to host memory for `most`, and how many. Waits. */
cudaError_t kvlab_slots_kept(kvlab_slots* slots, int sequence, int layer, int kv_head,
                             uint32_t* positions, uint32_t most, uint32_t* count,
                             cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif /* KVLAB_H */
