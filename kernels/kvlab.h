/* kvlab's CUDA kernels for any engine, as a C interface: attention over caches that evict, and
 * eviction by the policies that kvlab's simulator replays. Given the same attention statistics, the
 * library evicts exactly the tokens that the simulator evicts.
 *
 * There are two ways to use it. kvlab_kv_cache owns the caches of all layers and makes all calls in
 * the right order. Its keys and values may be in the blocks of a paged engine. The single calls
 * (kvlab_write, kvlab_evicting_attention, ...) work on one layer, in memory that the caller owns.
 * They are needed, for example, if prompts share the blocks of a prefix. docs/reference/c-api.md
 * explains both, with an example; docs/guides/deploy-in-an-engine.md has tables of memory, calls,
 * states and costs.
 *
 * Conventions
 *
 *   Shapes    are in brackets: [token, query_head, head_size]. The last dimension is contiguous.
 *             A pair is one KV head of one sequence: pair = sequence * kv_heads + kv_head.
 *   Memory    Pointers in structs point to device memory, unless the comment says host.
 *   Streams   Calls that take a stream only enqueue work on it. They neither synchronize nor
 *             allocate, and a CUDA graph can hold them. Exceptions say so.
 *   Values    Lengths, positions and other values that change from step to step are read from
 *             device memory when the kernels run. So a captured graph stays valid while sequences
 *             grow.
 *   Results   are deterministic: equal inputs give equal bits.
 *   Errors    A call with invalid arguments returns cudaErrorInvalidValue before it enqueues
 *             anything, and cudaErrorNotSupported where the device cannot run it.
 *             kvlab_last_error() explains both. Head sizes are 64, 96, 128 or 256, with at most 8
 *             query heads for each KV head (16 in kvlab_kv_cache without the caller's blocks).
 *   Structs   Zero a struct before you fill it in, and set struct_size to its sizeof. */
#ifndef KVLAB_H
#define KVLAB_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#define KVLAB_VERSION_MAJOR 0
#define KVLAB_VERSION_MINOR 6
/** 100 * major + minor of this header. kvlab_version() returns the library's number. */
#define KVLAB_VERSION (KVLAB_VERSION_MAJOR * 100 + KVLAB_VERSION_MINOR)

#ifdef __cplusplus
extern "C" {
#endif

/** Returns the version of the library. It must equal the KVLAB_VERSION that the program was
 * compiled with. */
int kvlab_version(void);

/** Explains in one line why this thread's last call failed: what is wrong, where, and what is
 * expected. Empty if the last call succeeded. Calls that return cudaError_t set it. The text stays
 * valid until the thread's next such call. */
const char* kvlab_last_error(void);

/** Element type of queries, keys, values and outputs. Sums are computed in float32. */
typedef enum { KVLAB_BF16 = 0, KVLAB_F16 = 1, KVLAB_F32 = 2 } kvlab_type;

/* --- Policies ------------------------------------------------------------------------------- */

/** Which attention statistics a policy reads: none, the sum of probabilities, the number of
 * requests (queries that gave a token a large probability), or both. */
typedef enum { KVLAB_NOTHING = 0, KVLAB_MASS = 1, KVLAB_REQUESTS = 2, KVLAB_BOTH = 3 } kvlab_needs;

/** A policy of the registry or from a header. It lives as long as the process. */
typedef struct kvlab_policy kvlab_policy;

/** Finds a registered policy by the name that `kvlab policies` prints. Returns NULL if there is
 * none. Also returns NULL for clock, sieve and hisparse, because they run on the CPU only. */
const kvlab_policy* kvlab_find_policy(const char* name);
/** Returns the name of the registered policy at `index`, from 0 on; NULL after the last one. */
const char* kvlab_policy_name(int index);

/** Compiles a policy header such as those in policies/ (docs/guides/write-a-policy.md) for the
 * current device. It loads NVRTC. If an equal text was compiled before, it reuses that code from
 * the user's cache folder. Synchronizes.
 *
 * `log`: host memory of log_bytes for the compiler's messages, with the header's line numbers;
 * empty on success. It may be NULL if log_bytes is 0.
 * Errors: cudaErrorFileNotFound: the file cannot be read. cudaErrorInvalidSource: the file is not
 * a policy, or does not compile. cudaErrorNotSupported: NVRTC cannot be loaded, or the device
 * cannot run the code. If there is no device, the call still compiles the header, and then returns
 * CUDA's error. */
cudaError_t kvlab_compile_policy(const char* path, const kvlab_policy** policy, char* log,
                                 size_t log_bytes);

/** Returns which attention statistics the policy reads. */
kvlab_needs kvlab_policy_needs(const kvlab_policy* policy);
/** Returns the bytes of state that the policy keeps for each slot; 0 if it keeps none. */
size_t kvlab_policy_slot_bytes(const kvlab_policy* policy);
/** Returns the bytes of parameters that the policy reads for each sequence; 0 if it has none. */
size_t kvlab_policy_params_bytes(const kvlab_policy* policy);
/** Writes a sequence's parameters to `to`, host memory of kvlab_policy_params_bytes; the caller
 * copies them to the device. `values`: one number for each parameter, in the order of
 * kvlab_policy_parameter. Returns cudaErrorInvalidValue if `count` is not the number of
 * parameters, or if a value is out of range (docs/reference/policies.md). */
cudaError_t kvlab_policy_params(const kvlab_policy* policy, const double* values, int count,
                                void* to);
/** Returns the name of the parameter at `index`, from 0 on; NULL after the last one. A policy from
 * a header has no parameter names. */
const char* kvlab_policy_parameter(const kvlab_policy* policy, int index);
/** Returns the default of the parameter at `index`. Returns NaN after the last one, and for a
 * policy from a header. */
double kvlab_policy_default(const kvlab_policy* policy, int index);

/** Returns 1 if the policy gives each query of a prompt a weight that depends on the number of
 * later queries of the prompt, as SnapKV does; else 0. */
int kvlab_policy_weighted(const kvlab_policy* policy);
/** Writes the weights of a prompt's queries to `to`, host memory for `queries` numbers: to[age] is
 * the weight of a query that is followed by `age` later queries of the prompt. The weights from
 * `*tail` on are 0. If a chunk is a separate append, `queries` is the number of the chunk's
 * queries. `params`: as kvlab_policy_params wrote them. For a policy from a header the device
 * computes them, and the call synchronizes. */
cudaError_t kvlab_policy_weights(const kvlab_policy* policy, const void* params, uint32_t queries,
                                 float* to, uint32_t* tail);

/** Returns the name of the token feature at `index` that the policy reads
 * (docs/reference/configurations.md), from 0 on; NULL after the last one. If the name is `feature`,
 * the caller may provide any feature. Features are passed in kvlab_policy_state.features. */
const char* kvlab_policy_feature(const kvlab_policy* policy, int index);

/* --- One layer's cache ---------------------------------------------------------------------- */

/** Keys and values in blocks of slots, as paged engines store them. If the struct is zeroed, the
 * cache has no blocks. In both keys and values, slot s of a pair begins at the element
 *
 *    blocks[row][s / page] * block_stride + s % page * slot_stride + kv_head * head_stride
 *
 * where `row` is the index of the sequence or, if by_pair is set, of the pair. Only keys and
 * values are in blocks; other arrays [slot] are still indexed by first_slot[pair] + s. When the
 * kernels run, they read the block table only up to the block of the last live token or, while
 * drafts are verified, of the last draft. */
typedef struct {
  const int32_t* blocks; /**< [row, max_blocks]; NULL: no blocks */
  int page;              /**< slots of a block: a power of two from 16 to 2^20 */
  int max_blocks;        /**< number of blocks in a row of the table; enough for max_slots */
  int by_pair;           /**< 1: the table has a row for each pair instead of each sequence */
  /** In elements; each stride is a multiple of 16 bytes. slot_stride must be at least head_size,
   * and head_stride too, unless by_pair is set. */
  int64_t block_stride, slot_stride, head_stride;
} kvlab_pages;

/** A view of one layer's cache in the caller's memory. The slots of a pair begin at
 * first_slot[pair]. The pair's first lengths[pair] slots hold live tokens, in any order. Pairs may
 * have different budgets, and so different numbers of slots; a pair that decodes needs `budget`
 * slots. */
typedef struct {
  kvlab_type type;
  int sequences, query_heads, kv_heads, head_size;
  float softmax_scale;
  int max_slots;             /**< the largest number of slots of a pair */
  const int64_t* first_slot; /**< [pair] */
  void* keys;                /**< [slot, head_size]: rotated by RoPE at their positions or, with
                                KVLAB_CACHE_POSITIONS, not rotated */
  void* values;              /**< [slot, head_size] */
  uint32_t* positions;       /**< [slot]: the position of the slot's token */
  int32_t* lengths;          /**< [pair]: number of live tokens */
  int32_t* next_slots;       /**< [pair]: the slot of the next token, counted from first_slot */
  uint32_t* ages;            /**< [slot]: how many live tokens of the pair are older. Only with
                                  KVLAB_CACHE_POSITIONS, else NULL. kvlab_compute_ages sets them,
                                  kvlab_evicting_attention keeps them up to date */
  kvlab_pages pages;         /**< the blocks of keys and values, if they are in blocks */
} kvlab_cache_view;

/** Which positions RoPE uses.
 * ORIGINAL_POSITIONS: a token's position in the text.
 * CACHE_POSITIONS: live tokens are numbered 0, 1, 2, ... from the oldest (StreamingLLM). Keys and
 *    queries are given before RoPE, and the kernels rotate them.
 * CACHE_POSITIONS_ROTATED: the same positions, at no extra cost, for keys and queries that are
 *    given rotated at their original positions. Only for `window` and `sink`, whose live tokens are
 *    the sinks and the newest tokens without a gap. The token at position i < sinks must be in
 *    slot i. */
typedef enum {
  KVLAB_ORIGINAL_POSITIONS = 0,
  KVLAB_CACHE_POSITIONS = 1,
  KVLAB_CACHE_POSITIONS_ROTATED = 2
} kvlab_numbering;

/** The size in bytes of each array of one layer; 0: the array is not needed. Each comment
 * gives the shape of the arrays in its line. */
typedef struct {
  size_t struct_size; /**< sizeof(kvlab_memory), set by the caller */
  size_t keys, values, positions, ages, states, features;  /**< [slot] */
  size_t seen;                                             /**< [slot], for prompts only */
  size_t first_slot, lengths, next_slots, rules, evict_at; /**< [pair] */
  size_t unit_keys; /**< [pair, head_size]; for the feature key_cosine */
  size_t params, threshold16, seeds, sequence_ids; /**< [sequence] */
  size_t blocks; /**< the block table, if pages.page > 0. `keys` and `values` are then the bytes of
                    whole blocks, enough for max_slots of each pair */
  size_t attention_workspace; /**< SIZE_MAX: not known, because there is no device */
  size_t compact_workspace;
} kvlab_memory;
/** Computes the memory of one layer's cache under a policy. It reads the shape of `cache` and no
 * pointers. `slots`: number of slots of all pairs together; a prompt's cache has one for each KV
 * head and token. Arrays [sequence] and workspaces can serve all layers, one after another.
 * Returns cudaErrorNotSupported if a thread block would need more shared memory than the device
 * has. */
cudaError_t kvlab_cache_memory(const kvlab_policy* policy, const kvlab_cache_view* cache,
                               int64_t slots, kvlab_numbering numbering, kvlab_memory* bytes);

/** Sets cache->ages from positions and lengths. Call it after a prompt. */
cudaError_t kvlab_compute_ages(const kvlab_cache_view* cache, cudaStream_t stream);

/** The budget and protected tokens of one pair. sinks + recent <= budget, and sinks < budget. */
typedef struct {
  uint32_t budget;    /**< tokens that a query may see, its own included; UINT32_MAX: no eviction.
                         The policy `full` never evicts, so it needs UINT32_MAX */
  uint32_t sinks;     /**< number of first positions of the text, which are evicted last */
  uint32_t recent;    /**< number of newest positions, which are evicted after all other tokens and
                         before the sinks */
  uint32_t group_max; /**< 0: a token's mass from a query is the sum of the probabilities over the
                         group's query heads; 1: it is the largest of them */
} kvlab_rule;

/** The attention that one token received from the queries of one step or prompt. */
typedef struct {
  uint64_t mass;         /**< sum of probabilities, in units of 2^-32 */
  uint32_t requests;     /**< number of queries that gave the token at least tau times their largest
                            probability */
  uint32_t last_request; /**< position of the last such query; valid if requests > 0 */
  uint32_t queries;      /**< number of queries that could see the token */
} kvlab_observation;

/** What a policy reads and writes, in addition to the cache. rules, seeds and sequence_ids are
 * required; the others may be NULL if the policy does not need them. */
typedef struct {
  void* states;                 /**< [slot, slot_bytes] */
  const kvlab_rule* rules;      /**< [pair] */
  const void* params;           /**< [sequence, params_bytes] */
  const uint32_t* threshold16;  /**< [sequence]: tau * 65536, for requests; kvlab uses 655 (1%) */
  const uint64_t* seeds;        /**< [sequence]: random seed */
  const uint32_t* sequence_ids; /**< [sequence]: an id that selects the sequence's random numbers; a
                                   replay uses the index of the trace */
  uint32_t layer;               /**< the model's index of the layer; selects random numbers too */
  uint32_t first_head;     /**< the model's index of the first KV head on this device; above 0 under
                                tensor parallelism */
  kvlab_observation* seen; /**< [slot], out: the attention that each token received; or NULL */
  const float* features;   /**< [slot, feature]: token features, in the order of
                                kvlab_policy_feature. The features of new tokens must be set before
                                the call, like their keys */
  /** [pair]: steps and compactions evict only if at least this many tokens are live; UINT32_MAX:
   * they never evict. NULL: the budget is used. For the modifier `every=W`, give UINT32_MAX in
   * steps, and budget - 1 + W in kvlab_compact. */
  const uint32_t* evict_at;
} kvlab_policy_state;

/** A value of `now`: the sequence is idle in this call. */
#define KVLAB_IDLE UINT32_MAX

#define KVLAB_MAX_PARAMS 16
/** The contents of a policy.json that `kvlab deploy` or `kvlab tune` wrote, for one model. */
typedef struct {
  /* Set by the caller: */
  size_t struct_size;   /**< sizeof(kvlab_policy_file) */
  int layers, kv_heads; /**< number of layers whose queries see all tokens, and number of KV heads
                           of each layer */
  uint32_t tokens; /**< maximum length of a sequence; `pyramid(N)` gives no head a larger budget */
  kvlab_rule* rules; /**< out, host: [layer, kv_head], in tokens */
  /* Set from the file: */
  const kvlab_policy* policy;
  double params[KVLAB_MAX_PARAMS]; /**< for kvlab_policy_params */
  int param_count;
  char feature[64];          /**< the feature that the policy reads as `feature`; else empty */
  kvlab_numbering numbering; /**< if it is KVLAB_CACHE_POSITIONS, KVLAB_CACHE_POSITIONS_ROTATED may
                                be used instead where it is supported */
  uint32_t prefill_chunk;    /**< tokens of a prompt to append at a time; 0: all */
  uint32_t threshold16;
  uint64_t seed;
  uint32_t every; /**< 1: tokens are evicted in each step; otherwise see evict_at */
  int once;       /**< 1: tokens are evicted after a prompt only */
  int by_layer;   /**< as in kvlab_compact_args; so are the next two */
  uint32_t smooth;
  int pool_max;
} kvlab_policy_file;
/** Reads a policy.json. Returns cudaErrorInvalidValue if the file is not a policy.json, or if it
 * requires something that these calls do not support: tiers, `ada()`, budgets in bytes, the
 * protection `prompt`, or a policy from a header (use kvlab_compile_policy). After an error only
 * `rules` may have changed. */
cudaError_t kvlab_read_policy_file(const char* path, kvlab_policy_file* file);

/* --- New tokens ----------------------------------------------------------------------------- */

/** Writes new tokens into a cache. q and k are rotated in float32 and then rounded once, to the
 * cache's type. The queries are written to `q`, keys and values to the slots from next_slots on. */
typedef struct {
  size_t struct_size;     /**< sizeof(kvlab_write_args) */
  kvlab_cache_view cache; /**< its positions are written too if `now` is given */
  int tokens;
  const void* qkv; /**< [token, query_heads + 2 * kv_heads, head_size], before RoPE */
  int rotated;     /**< number of dimensions that RoPE rotates, in pairs (d, d + rotated / 2). 0: no
                      rotation, as for KVLAB_CACHE_POSITIONS */
  const float*
      rope; /**< [row, rotated / 2, 2]: each row has the cosines and sines of one position */
  const int32_t* rope_rows; /**< [token]: the token's row of `rope`; not read for idle sequences */
  const int32_t* sequences; /**< [token]: the token's sequence */
  const int32_t* slots;     /**< [token]: the token's slot, counted from next_slots; NULL: all 0 */
  const uint32_t* now; /**< [sequence]: position of the sequence's one new token. For a KVLAB_IDLE
                            sequence nothing is written, not even q. NULL: positions are not written
                            */
  void* q;             /**< out: [token, query_head, head_size] */
} kvlab_write_args;
cudaError_t kvlab_write(const kvlab_write_args* args, cudaStream_t stream);

/** Token features that kvlab_compute_features can compute. kvlab_policy_feature returns these names
 * in lower case, without the prefix (docs/reference/configurations.md has their formulas). */
typedef enum {
  KVLAB_KEY_NORM = 0,
  KVLAB_VALUE_NORM = 1,
  KVLAB_VALUE_NORM1 = 2,
  KVLAB_KEY_COSINE = 3,
  KVLAB_VALUE_OUT_NORM1 = 4
} kvlab_feature;
/** Finds a feature by the name that kvlab_policy_feature returns, and writes it to `*feature`.
 * Returns cudaErrorInvalidValue if this library does not compute the feature. */
cudaError_t kvlab_find_feature(const char* name, kvlab_feature* feature);

/** Computes features of new tokens, whose values must already be in the cache. */
typedef struct {
  size_t struct_size; /**< sizeof(kvlab_feature_args) */
  kvlab_cache_view cache;
  int count; /**< number of features */
  kvlab_feature features[4];
  const int32_t* slots; /**< [pair], counted from first_slot: the slot of the first new token; the
                             others follow it */
  int tokens;           /**< new tokens of each sequence */
  const uint32_t* now;  /**< [sequence]: a sequence with KVLAB_IDLE is skipped; other values have no
                           effect. NULL: no sequence is skipped */
  const void* keys;     /**< [sequence, token]: rows of [kv_head, head_size], before RoPE */
  int64_t key_row;      /**< elements from one token's row to the next */
  float* unit_keys;   /**< [pair, head_size], for KVLAB_KEY_COSINE: the sum of normalized keys. Zero
                           it before a sequence begins */
  float* to;          /**< out: [slot, feature] */
  const void* output; /**< for KVLAB_VALUE_OUT_NORM1: W_o [hidden, query_head, head_size], of the
                           cache's type */
  int hidden;
  const uint32_t* appended; /**< [sequence]: number of new tokens of the sequence, at most `tokens`;
                                 NULL: `tokens` for all */
} kvlab_feature_args;
cudaError_t kvlab_compute_features(const kvlab_feature_args* args, cudaStream_t stream);

/* --- Decoding ------------------------------------------------------------------------------- */

/** One new token for each sequence. kvlab_write has put its key, value and position in the slot
 * next_slots of each pair. */
typedef struct {
  size_t struct_size; /**< sizeof(kvlab_evicting_attention_args) */
  kvlab_cache_view cache;
  kvlab_policy_state policy;
  kvlab_numbering numbering;
  const uint32_t* now; /**< [sequence]: position of the new token. For a KVLAB_IDLE sequence nothing
                            is written, not even `out` */
  const void* q;       /**< [sequence, query_head, head_size] */
  const float* inv_freq; /**< [rotated / 2]: RoPE's frequencies. This and the next two members are
                              used at cache positions only */
  int rotated;           /**< dimensions that RoPE rotates: must be head_size */
  float rope_factor;     /**< a factor on cosine and sine; 1 except for YaRN */
  void* out;             /**< out: [sequence, query_head, head_size] */
  float* lse;            /**< out: [sequence, query_head], the natural logarithm of the sum of
                              exponentials; or NULL */
  void* workspace; /**< kvlab_evicting_attention_workspace() bytes. Zero it before its first use;
                        calls that run at the same time must not share it */
  int settled; /**< 1: of the data that this call reads, kernels that still run may write only q and
                  each pair's newest token. The call then loads the rest of the cache while they
                  run. 0 is always correct */
} kvlab_evicting_attention_args;

/** Returns the bytes of the workspace. 0: the shape is not supported on the current device.
 * SIZE_MAX: the shape is supported, but the size is not known, because there is no device. */
size_t kvlab_evicting_attention_workspace(const kvlab_policy* policy,
                                          const kvlab_cache_view* cache);
/** Attends over the live tokens, updates the policy's states with the attention that each token
 * received, and sets lengths and next_slots. next_slots is the first free slot until the budget is
 * reached, and then the slot of the victim: the token that is evicted next. */
cudaError_t kvlab_evicting_attention(const kvlab_policy* policy,
                                     const kvlab_evicting_attention_args* args,
                                     cudaStream_t stream);

/** The first half of kvlab_evicting_attention: attention only. If the second half runs on another
 * stream, the engine's next kernels do not have to wait for it. */
cudaError_t kvlab_attend(const kvlab_policy* policy, const kvlab_evicting_attention_args* args,
                         cudaStream_t stream);
/** The second half, for up to 8 layers at once: updates states, lengths and next_slots. `layers`:
 * the arguments of kvlab_attend, each with its own workspace; they differ only in arrays and
 * policy.layer. If this call runs on another stream than the attention, it must wait for the
 * attention of all these layers. Later work that writes to these layers, attends over them or
 * reuses one of their workspaces must wait for this call's work. */
cudaError_t kvlab_choose_victims(const kvlab_policy* policy,
                                 const kvlab_evicting_attention_args* layers, int count,
                                 cudaStream_t stream);

/* --- Prompts -------------------------------------------------------------------------------- */

/** The softmax of one query: its largest q · k before scaling, and the base-2 logarithm of the sum
 * of e^(softmax_scale * q · k) over its keys. An engine with its own attention sets `lse2` to its
 * log-sum-exp times log2(e); `max_product` is read only if requests are counted. */
typedef struct {
  float max_product, lse2;
} kvlab_row_softmax;

/** Causal attention of a prompt's queries. Query i is at slot first + older[kv_head] + i of its
 * head, and sees that slot and all slots before it.
 *
 * The call can also process a batch of sequences. Then q, out, lse and rows contain the queries of
 * all sequences, one sequence after another, and `queries` is the largest number of queries of any
 * sequence. Arrays that are [kv_head] for one sequence are [pair], and the block table has a row
 * for each sequence or pair. Outputs are bit-identical to one call for each sequence. */
typedef struct {
  size_t struct_size; /**< sizeof(kvlab_prefill_args) */
  kvlab_type type;
  int query_heads, kv_heads, head_size;
  float softmax_scale;
  int first, queries;
  const void* q;             /**< [query, query_head, head_size], rotated */
  const void* keys;          /**< [slot, head_size], rotated */
  const void* values;        /**< [slot, head_size] */
  const int64_t* first_slot; /**< [kv_head]: the first slot of each head */
  const int32_t* older;    /**< [kv_head]: number of tokens before the first query, not counting the
                              `first` tokens, which all heads have; NULL: all 0 */
  void* out;               /**< out: [query, query_head, head_size] */
  float* lse;              /**< out: [query, query_head], natural logarithm; or NULL */
  kvlab_row_softmax* rows; /**< out: [query, query_head], for kvlab_observe; or NULL */
  kvlab_pages pages;       /**< the blocks of keys and values; the table is [1, max_blocks] or, with
                              by_pair, [kv_head, max_blocks] */
  int sequences;           /**< number of sequences of a batch, at most 65,535. 0: not a batch but
                                one sequence; the next two members are then 0 and NULL */
  int all_queries;         /**< number of rows of q; at least first_query[sequences] */
  const int32_t* first_query; /**< [sequences + 1]: sequence s has the queries first_query[s] to
                                   first_query[s + 1] - 1; it may have none */
  /** kvlab_prefill_workspace() bytes, or NULL. With a workspace the keys are split among thread
   * blocks, so that few queries, such as a draft, use the whole device. The bits of the output
   * then differ from those without a workspace. Calls that run at the same time must not share it.
   */
  void* workspace;
  int keys_end; /**< with a workspace: no query of any sequence sees this slot or a later one */
} kvlab_prefill_args;
/** Returns the bytes of the workspace; args->workspace may still be NULL. 0: the shape is not
 * supported. */
size_t kvlab_prefill_workspace(const kvlab_prefill_args* args);
cudaError_t kvlab_prefill_attention(const kvlab_prefill_args* args, cudaStream_t stream);

/** Computes the attention that each key received from the queries of kvlab_prefill_attention, or of
 * another attention that sets `prefill.rows`. Required if kvlab_policy_needs is not KVLAB_NOTHING.
 */
typedef struct {
  size_t struct_size;          /**< sizeof(kvlab_observe_args) */
  kvlab_prefill_args prefill;  /**< as for the attention, except that `rows` is read, and `values`,
                                    `out` and `lse` are not used */
  kvlab_needs needs;           /**< KVLAB_MASS, KVLAB_REQUESTS or KVLAB_BOTH */
  int keys_end;                /**< no query of any sequence sees this slot or a later one */
  uint32_t position;           /**< position of the first query */
  const uint32_t* threshold16; /**< tau * 65536, for requests: one number; for a batch [sequence] */
  kvlab_observation* seen;     /**< in and out, indexed like keys: the call adds to it. Zero it
                                    before the first part of a prompt */
  void* workspace;             /**< kvlab_observe_workspace() bytes */
  int group_max;               /**< as in kvlab_rule */
  const float* weights;        /**< [age]: kvlab_policy_weights, if the policy weighs queries; NULL:
                                    every query counts once */
  uint32_t tail; /**< queries of this age or older have weight 0; if tail is 0, there are no such
                    queries */
  int younger;   /**< number of the prompt's queries that come after these queries */
  const uint32_t* positions; /**< for a batch, [sequence]; NULL: `position` for all */
  const int32_t* youngers;   /**< for a batch, [sequence]; NULL: `younger` for all */
  const uint32_t* appended;  /**< for a batch, [sequence]: only this many of the sequence's first
                                  queries count, for example those of the accepted tokens of a
                                  draft; NULL: all */
} kvlab_observe_args;
size_t kvlab_observe_workspace(const kvlab_observe_args* args);
cudaError_t kvlab_observe(const kvlab_observe_args* args, cudaStream_t stream);

/** Shares the observations and features of a prefix among several prompts. Before this call, the
 * prefix's keys and values must have been written, attended and observed once, and each prompt's
 * block table must begin with the prefix's blocks. The call copies the observations that the
 * prefix's tokens received from each other, and their features, to each prompt. The prompts then
 * continue with `first` set to the slot after the prefix. */
typedef struct {
  size_t struct_size; /**< sizeof(kvlab_prefix_args) */
  int sequences, kv_heads;
  int tokens;                    /**< number of tokens of the prefix */
  const int64_t* first_slot;     /**< [kv_head]: first slots of the prefix */
  const int64_t* to_first_slot;  /**< [pair]: first slots of the prompts */
  const kvlab_observation* seen; /**< [slot]; NULL if the policy reads no attention statistics */
  kvlab_observation* to_seen;
  const float* features; /**< [slot, feature]; NULL if the policy reads none */
  float* to_features;
} kvlab_prefix_args;
/** Returns cudaErrorNotSupported if the observations or features of the prefix's tokens depend on
 * later tokens: if the policy weighs queries, or reads key_cosine. */
cudaError_t kvlab_copy_prefix(const kvlab_policy* policy, const kvlab_prefix_args* args,
                              cudaStream_t stream);

/** Ends a prompt, or one append of it: passes the new tokens and the attention they received to the
 * policy, and keeps the budget - 1 tokens that the policy would evict last.
 *
 * Each pair of `from` has lengths[pair] older tokens, followed by appended[sequence] new tokens.
 * The caller has written the keys and values of the new tokens, but not their positions. The kept
 * tokens move to `to`, which must be `from` itself or must not overlap it (in blocks: the same
 * blocks or disjoint ones). The call overwrites the states and positions of `from`, and
 * seen[].queries, so call it only once for each append. If no token is appended and `seen` is
 * NULL, it evicts to the budget between decode steps; `now` is then the position of the next
 * token.
 *
 * Returns cudaErrorNotSupported if the policy weighs queries and `weighted` is 0. */
typedef struct {
  size_t struct_size; /**< sizeof(kvlab_compact_args) */
  kvlab_cache_view from, to;
  kvlab_policy_state policy; /**< states and features: those of from */
  void* to_states;           /**< [slot of to, slot_bytes] */
  const uint32_t* now;       /**< [sequence]: position of the first new token, or KVLAB_IDLE */
  const uint32_t* appended;  /**< [sequence]: number of new tokens, possibly 0 */
  kvlab_observation* seen;   /**< [slot of from], from kvlab_observe; NULL if the policy reads no
                                  attention statistics */
  void* workspace;           /**< kvlab_compact_workspace() bytes */
  float* to_features;        /**< [slot of to, feature] */
  /** Modifiers of ranks (docs/reference/configurations.md). by_layer: a token's rank is the sum of
   * its ranks over the sequence's KV heads, which hold the same tokens. smooth: after that, each
   * rank becomes the mean (with pool_max: the maximum) of the ranks of the live tokens that are at
   * most `smooth` places away in the order of age. */
  int by_layer;
  uint32_t smooth;
  int pool_max;
  int weighted; /**< 1: `seen` was computed with the policy's weights */
} kvlab_compact_args;
size_t kvlab_compact_workspace(const kvlab_cache_view* from);
cudaError_t kvlab_compact(const kvlab_policy* policy, const kvlab_compact_args* args,
                          cudaStream_t stream);

/** The first of two halves of kvlab_compact. Use the halves for by_layer under tensor parallelism,
 * where each of several devices has the same number of a sequence's KV heads. The first half does
 * everything except choosing and moving the tokens. The caller then gathers the `ranks` of all
 * devices, in the order of their heads. */
cudaError_t kvlab_compute_ranks(const kvlab_policy* policy, const kvlab_compact_args* args,
                                uint64_t* ranks, /* out: [pair, max_slots of from], by age */
                                cudaStream_t stream);
/** The second half adds the ranks of all devices, chooses the tokens and moves them. `args`: those
 * of the first half, with an unchanged workspace. `ranks`: [device, pair, max_slots of from]. */
cudaError_t kvlab_compact_ranked(const kvlab_policy* policy, const kvlab_compact_args* args,
                                 const uint64_t* ranks, int devices, cudaStream_t stream);

/* --- All layers as one object --------------------------------------------------------------- */

/** The caches of some sequences in all layers that a policy acts on. It owns their memory, except
 * for keys and values in the caller's blocks. It counts their tokens on the host, and makes the
 * calls above in the right order. It also supports tiers.
 *
 * A prompt is one or more appends. A decode step is kvlab_kv_cache_begin_step and then
 * kvlab_kv_cache_step for each layer. Steps only launch kernels, so a CUDA graph can hold them;
 * all other calls keep counts on the host and are refused while their stream is being captured.
 *
 * Use a cache from one thread at a time, on one stream or on streams that wait for each other. A
 * cache allocates memory when it is created, and in the calls that the comment at `longest` names.
 * If an allocation fails, the call returns cudaErrorMemoryAllocation and has changed nothing. */
typedef struct kvlab_kv_cache kvlab_kv_cache;

/** The format of a token's key and value: the cache's type, or quantized
 * (docs/guides/precision-tiers.md). */
typedef enum {
  KVLAB_FORMAT_16 = 0,
  KVLAB_FORMAT_FP8 = 1,
  KVLAB_FORMAT_8 = 2,
  KVLAB_FORMAT_4 = 3,
  KVLAB_FORMAT_K4V2 = 4,
  KVLAB_FORMAT_2 = 5
} kvlab_kv_format;
/** One tier of a pair's tier plan. When the tier is full, one of its tokens is demoted to the next
 * tier. */
typedef struct {
  kvlab_kv_format format;
  uint32_t slots;
} kvlab_tier;

/** Frequencies of RoPE. For layers without RoPE, set all frequencies to 0 and `factor` to 1,
 * because a rotation by 0 changes nothing. */
typedef struct {
  const float* inv_freq; /**< host: [rotated / 2] */
  int rotated;           /**< number of dimensions that RoPE rotates: even and at least 2 */
  float factor;          /**< a factor on cosine and sine; 1 except for YaRN */
} kvlab_rope;

typedef struct {
  uint32_t number; /**< the model's index of the layer; selects random numbers */
  float softmax_scale;
  int rope;           /**< index of its kvlab_rope */
  const void* output; /**< W_o, for the feature value_out_norm1: device memory that is read in every
                           append and step, so it must outlive the cache; else NULL */
  const float* sinks; /**< [query_head]: sink logits, one more term of each softmax's denominator
                           (gpt-oss); device memory that must outlive the cache; NULL: none */
  void *keys, *values; /**< with kvlab_kv_cache_config.pages: the layer's pools of blocks; else
                            NULL */
} kvlab_layer;

/** An all-gather, for by_layer under tensor parallelism. It enqueues on the stream: write the
 * `count` numbers at `own` of every device to `all`, device [device, count], in the order of the
 * devices' heads. Every device calls it for the same layers in the same order. If it returns an
 * error, the call of the cache returns this error, and the cache must be cleared. */
typedef cudaError_t (*kvlab_gather)(void* context, const uint64_t* own, uint64_t* all, size_t count,
                                    cudaStream_t stream);

/** Pointers are to host memory, and are read during the call only, except where kvlab_layer or a
 * comment says otherwise. docs/reference/c-api.md has a filled example. */
typedef struct {
  size_t struct_size; /**< sizeof(kvlab_kv_cache_config) */
  kvlab_type type;
  int query_heads, kv_heads, head_size;
  int sequences, layer_count, rope_count, tier_count, feature_count; /**< the last two may be 0 */
  const kvlab_layer* layers;
  const kvlab_rope* ropes;
  const kvlab_policy* policy;
  const kvlab_rule* rules; /**< [layer, sequence, kv_head]; group_max must be the same in all */
  const kvlab_tier*
      tiers; /**< [layer, sequence, kv_head, tier], in order of decreasing precision. The slots of a
                pair's tiers add up to the pair's budget; without a budget the first tier holds all
                tokens. tier_count 0: all tokens stay in `type` */
  const void* params;            /**< one set for all sequences, as kvlab_policy_params writes it;
                                      NULL if kvlab_policy_params_bytes is 0 */
  const uint64_t* seeds;         /**< [sequence]; NULL: all 0 */
  const kvlab_feature* features; /**< the features that the policy reads, in the policy's order */
  int hidden;                    /**< number of rows of kvlab_layer.output */
  kvlab_numbering numbering;     /**< KVLAB_ORIGINAL_POSITIONS or KVLAB_CACHE_POSITIONS */
  uint32_t threshold16; /**< as in kvlab_policy_state; ignored if the policy reads no requests */
  uint32_t tokens;  /**< maximum length of a sequence; 0: no limit, if all rules have budgets and
                         `once` is 0 */
  uint32_t part;    /**< maximum number of a chunk's tokens that go through a layer at a time; the
                         cache splits larger chunks; 0: 2,048 */
  uint32_t longest; /**< maximum number of tokens of an append plus the tokens that are live before
                         it. Memory for them is allocated when the cache is created. 0: memory is
                         allocated when an append needs it, or before the first step that has to
                         compact */
  uint32_t every;   /**< modifiers, as in kvlab_policy_file. every: up to budget - 1 + every tokens
                         are live; 0 and 1: tokens are evicted in each step */
  uint32_t smooth;
  int once, by_layer, pool_max;
  int interleaves_appends; /**< 1: an append's chunks may go through the layers in any order, with
                                steps and drafts of other sequences between them, as schedulers
                                do. This takes append memory for every layer. 0: see
                                kvlab_append_chunk */
  uint32_t first_head;     /**< the model's index of the first KV head on this device; above 0 under
                                tensor parallelism */
  int devices;             /**< with `gather`: number of devices. Their configs must be equal except
                                for first_head, gather_context and device pointers. Without
                                `gather`: 0 */
  kvlab_gather gather;     /**< gathers the ranks of all devices. NULL: by_layer sums over this
                                device's heads only */
  void* gather_context;    /**< passed to `gather`; must outlive the cache */
  kvlab_pages pages;     /**< the caller's blocks for keys and values: page * max_blocks must be at
                              least kvlab_kv_cache_slots. The pools are in kvlab_layer. All layers
                              use the same block table. Table and pools are device memory that
                              must outlive the cache. Not with quantized tiers. Zeroed: the cache
                              allocates keys and values */
  uint32_t draft_tokens; /**< maximum number of tokens of a sequence in a verification of drafts:
                              the last token of the text, then the drafts. Each pair gets
                              draft_tokens - 1 more slots. Only with original positions and
                              without quantized tiers. 0: no drafts */
} kvlab_kv_cache_config;

/** Computes the device memory that a cache takes, in bytes. This call and kvlab_kv_cache_create
 * refuse a shape that no kernel supports on this device. Without a device, the attention workspace
 * is not counted. */
cudaError_t kvlab_kv_cache_memory(const kvlab_kv_cache_config* config, size_t* bytes);
/** Computes the number of slots of the largest pair. Each row of the caller's block table (a
 * sequence or, with by_pair, a pair) must have room for blocks of that many slots. Does not read
 * `pages`. */
cudaError_t kvlab_kv_cache_slots(const kvlab_kv_cache_config* config, int* slots);
/** Creates a cache without tokens. Allocates and synchronizes. */
cudaError_t kvlab_kv_cache_create(const kvlab_kv_cache_config* config, cudaStream_t stream,
                                  kvlab_kv_cache** cache);
/** Frees a cache. No-op if NULL. */
void kvlab_kv_cache_destroy(kvlab_kv_cache* cache);
/** Drops the tokens of all sequences, which keep their settings. Buffers keep their addresses, so
 * captured CUDA graphs stay valid. Synchronizes. */
cudaError_t kvlab_kv_cache_clear(kvlab_kv_cache* cache, cudaStream_t stream);

/** The settings of one sequence. If a member is NULL, that setting does not change. */
typedef struct {
  size_t struct_size;      /**< sizeof(kvlab_sequence_settings) */
  const kvlab_rule* rules; /**< host: [layer, kv_head]. A budget must be at most the pair's budget
                              in the config. For a pair with tiers, or without a budget in the
                              config, it must be equal to that */
  const void* params;      /**< host: as kvlab_policy_params writes them */
  const uint64_t* seed;    /**< host */
  const uint32_t* sequence_id; /**< host: selects random numbers; at first the sequence's index */
  const uint32_t* threshold16; /**< host */
} kvlab_sequence_settings;
/** Starts a new sequence at the index of an old one: drops the tokens of the old sequence, even in
 * the middle of an append or a step, and applies `settings` (NULL: none change). Other
 * sequences are not affected, so a request can leave a running batch, or be aborted, and another
 * can join. Stream-ordered: captured CUDA graphs stay valid. */
cudaError_t kvlab_kv_cache_start(kvlab_kv_cache* cache, int sequence,
                                 const kvlab_sequence_settings* settings, cudaStream_t stream);
/** Makes sequence `to` a copy of sequence `from`: tokens, states and settings. Both sequences must
 * have been created with the same budgets and tiers. Use it to prefill a common prefix once, or to
 * move a sequence to another index. The old tokens of `to` are dropped, even in the middle of an
 * append; `from` does not change. The settings include seed and sequence_id, so both sequences make
 * equal random choices. Refused while `from` is in the middle of an append, and while drafts are
 * verified. Does not copy keys and values in the caller's blocks: copy the blocks yourself or, if
 * `from` is no longer needed, swap the rows of the block table. Stream-ordered. */
cudaError_t kvlab_kv_cache_copy(kvlab_kv_cache* cache, int from, int to, cudaStream_t stream);

/** Some tokens of one append, for one layer. An append adds `tokens` tokens to one sequence after
 * the `fed` tokens that each layer was fed before. Tokens are evicted once, at the end of the
 * append.
 *
 * Without interleaves_appends, all chunks of an append go through a layer before the first of them
 * goes through the next layer. Between two layers, other sequences may append and decode. With
 * interleaves_appends, the chunks may go through the layers in any order, but an append must be
 * complete in all layers before the next one begins, also for another sequence.
 * docs/reference/c-api.md lists all calls that may come between chunks.
 *
 * An engine that runs each chunk through all layers sets interleaves_appends, or makes each chunk
 * an append (fed 0, tokens 512; fed 512, tokens 512; ...). In the second case, tokens are evicted
 * after each chunk, as in the prefill mode `chunk:512` of kvlab's simulator. */
typedef struct {
  size_t struct_size; /**< sizeof(kvlab_append_chunk) */
  int sequence, layer;
  uint32_t fed, tokens;
  int ends_prompt;       /**< 1: a prompt ends with this append. Matters only with `once`, under
                              which only such an append evicts, and with `smooth` */
  uint32_t first, count; /**< this chunk's tokens within the append; chunks must come in order */
  const void* qkv; /**< device: [count, query_heads + 2 * kv_heads, head_size], before RoPE. This
                      and the next two arrays have rows for the chunk's tokens only */
  void* out;       /**< out, device: [count, query_head, head_size] */
  float* lse;      /**< out, device: [count, query_head], natural logarithm; or NULL */
} kvlab_append_chunk;
/** Writes the chunk's tokens and attends with their queries. The append's last chunk of a layer
 * compacts the layer's cache. May allocate and then synchronize, unless the append is within
 * `longest`. May also synchronize for a policy from a header that weighs queries
 * (kvlab_policy_weights). */
cudaError_t kvlab_kv_cache_append(kvlab_kv_cache* cache, const kvlab_append_chunk* chunk,
                                  cudaStream_t stream);

/** Begins a decode step, and does the step's work on the host. `decodes`: host [sequence], 1 if the
 * sequence decodes a token in this step, which may be its first token; NULL: all do. If all entries
 * are 0, no sequence gets a token. The step must then run through all layers before any other call
 * for these sequences, except kvlab_kv_cache_start, and before the next kvlab_kv_cache_begin_step.
 *
 * An append that is not complete in all layers can go on after this call. Refused if the sequence
 * of this append decodes. Without interleaves_appends, also refused while a layer has had some of
 * the append's chunks but not all. */
cudaError_t kvlab_kv_cache_begin_step(kvlab_kv_cache* cache, const unsigned char* decodes,
                                      cudaStream_t stream);
/** Runs one layer of the step. Call it for all layers in order, from the first to the last. It only
 * launches kernels. `qkv`: device [sequence, query_heads + 2 * kv_heads, head_size], before RoPE.
 * `out`: device [sequence, query_head, head_size]. `lse`: device [sequence, query_head], or NULL.
 * The rows of a sequence that does not decode are neither read nor written. A graph of all layers
 * can be captured before the first step. It serves any `decodes`, and stays valid after all other
 * calls except kvlab_kv_cache_destroy. */
cudaError_t kvlab_kv_cache_step(kvlab_kv_cache* cache, int layer, const void* qkv, void* out,
                                float* lse, cudaStream_t stream);

/** Begins the verification of drafts. The tokens of a sequence in it are the last token of its text
 * and its draft tokens. `tokens`: host [sequence], their number, at most draft_tokens; 0: the
 * sequence takes no part. Then call kvlab_kv_cache_verify_drafts for each layer, and
 * kvlab_kv_cache_accept_drafts.
 * Until then, appends, copies and kvlab_kv_cache_begin_step are refused, but a step of other
 * sequences that was begun before may still run its layers. kvlab_kv_cache_start takes a sequence
 * out of the verification. The three calls are refused while their stream is being captured. */
cudaError_t kvlab_kv_cache_begin_drafts(kvlab_kv_cache* cache, const uint32_t* tokens,
                                        cudaStream_t stream);
/** Writes the tokens in one layer, and attends: each query sees its sequence's live tokens and the
 * tokens up to its own. Call it for all layers in order. `qkv`, `out`, `lse`: as in
 * kvlab_kv_cache_step, with a row for each token, the tokens of the first sequence first. */
cudaError_t kvlab_kv_cache_verify_drafts(kvlab_kv_cache* cache, int layer, const void* qkv,
                                         void* out, float* lse, cudaStream_t stream);
/** Ends the verification. `accepted`: host [sequence], how many of the sequence's tokens are
 * accepted, the last token of the text included. They become one append. The others are dropped, as
 * if they had never been there. An append evicts only at its end, so drafts may see tokens that
 * decode steps would have evicted before (kvlab_sequence_info.until_eviction). May synchronize for
 * a policy from a header that weighs queries (kvlab_policy_weights). */
cudaError_t kvlab_kv_cache_accept_drafts(kvlab_kv_cache* cache, const uint32_t* accepted,
                                         cudaStream_t stream);

/** What a cache holds for one sequence, according to counters on the host. */
typedef struct {
  size_t struct_size; /**< sizeof(kvlab_sequence_info) */
  uint32_t tokens;    /**< number of tokens that the sequence was fed, evicted ones included */
  uint64_t evictions; /**< tokens evicted in all layers and KV heads before the tokens of the last
                         append or step were added */
  uint64_t kv_bytes;  /**< bytes of live keys and values */
  uint64_t allocated; /**< bytes allocated for keys and values of all sequences, free slots
                         included; 0 if they are in the caller's blocks */
  uint32_t until_eviction; /**< number of tokens that a verification can append before a pair evicts
                                a token. With that many or fewer, drafts see the same tokens as
                                decode steps would. UINT32_MAX: no limit */
} kvlab_sequence_info;
cudaError_t kvlab_kv_cache_sequence_info(const kvlab_kv_cache* cache, int sequence,
                                         kvlab_sequence_info* info);
/** Writes the positions of a pair's live tokens, ascending, to `positions`, host memory for
 * `capacity` numbers. Writes their number to `*count`. A capacity of kvlab_kv_cache_slots always
 * suffices; if it is too small, the call returns cudaErrorInvalidValue and writes nothing.
 * Synchronizes. */
cudaError_t kvlab_kv_cache_positions(kvlab_kv_cache* cache, int sequence, int layer, int kv_head,
                                     uint32_t* positions, uint32_t capacity, uint32_t* count,
                                     cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif /* KVLAB_H */
