/* The operators, by number, and their arguments. Numbers and fields are mirrored in models/ops/cpu/structures.py. */

#ifndef OPERATORS_H
#define OPERATORS_H

#include "kaon.h"

/* Called between two reads of memory that another thread writes. */
static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

#define MAX_THREADS 1024

enum {
    LINEAR, PACK, EMBED, RMS_NORM, ROPE_TABLE, ROPE_STORE, ATTENTION, GATED, GROUPED_LINEAR,
    FLOAT_LINEAR, ROUTE, SORT_PAIRS, COMBINE,
    HEADED_LINEAR, LATENT_STORE, LATENT_ATTENTION, GATE_HEADS, DELTA_NET,
    GREEDY_HEAD, GREEDY_CHOICE,
    QUANTIZED_LINEAR, QUANTIZED_PACK, QUANTIZED_EMBED, QUANTIZED_GROUPED_LINEAR,
    GATED_LINEAR,
    LARGEST, DRAW,
    ALL_REDUCE,
    COPY_ROWS, SHARE_TOKENS, AWAIT_ANSWERS, ON_STEP,
    READ_LIMIT, PRODUCT_LIMIT,
    CODED_LINEAR, EXPAND_CODES, CODED_PACK, CODED_GROUPED_LINEAR,
    TAKE_DRAFTS, ACCEPT_DRAFTS, POSITION_SCALES,
    SHORT_CONV, STATE_SPACE, GROUP_NORM, SCALE_ROWS,
    DELTA_RULE, SELECTIVE_SCAN,
    QUANTIZED_GATED_LINEAR,
    SAMPLE_TOKENS,
    ROTATE_HEADS, SELECT_KEYS,
    VERIFY_DRAFTS,
    NEXT_ROUND,
    MIX_STREAMS, SPREAD_STREAMS,
    STORE_VECTORS, COMPRESS, TOKENS_OF_POOLS,
    FIRST_ROUND,
    OPERATORS
};

struct operation {
    int64_t kind;
    const void *arguments;
};

/* Strides are in elements, from row to row; matrices have one row per token unless stated otherwise. */
struct linear {
    const bf16 *x;      /* [tokens, in_features] */
    int64_t x_stride;
    const bf16 *weight; /* packed, see linear.c */
    const bf16 *bias;   /* [out_features] or NULL */
    void *out;          /* [tokens, out_features] bf16, or float32 */
    int64_t out_stride;
    int64_t in_features, out_features;
    int64_t is_float; /* whether `out` is float32 */
};

/* Rows of a weight into its packed form. */
struct pack {
    const bf16 *rows; /* [count, in_features] */
    int64_t row_stride;
    int64_t first, count; /* indexes of these rows in the whole weight */
    int64_t in_features;
    bf16 *weight;
};

/* Rows of a packed weight, by token; 0 for tokens whose rows are on other ranks. */
struct embed {
    const bf16 *weight;
    bf16 *out; /* [tokens, in_features] */
    int64_t out_stride;
    int64_t in_features;
    double scale; /* of the rows */
    int64_t first_row, num_rows; /* rows of this rank, of a weight that is split over ranks */
};

/* The norm of each of a token's rows, which are adjacent: by root mean square, or of the distance to the mean with
 * `is_centred`. With `residual`, the row times `x_scale` is first added to it, which then holds the sum, and without
 * `out` nothing else is computed; or with `is_added` the norm is added to it, which then holds the result times
 * `sum_scale`, and `out` is not written. */
struct rms_norm {
    const bf16 *x;
    int64_t x_stride;
    bf16 *residual; /* or NULL */
    int64_t residual_stride;
    const bf16 *weight; /* [size], to which `offset` is added */
    const bf16 *bias;   /* [size], or NULL */
    bf16 *out;
    int64_t out_stride;
    int64_t size, heads;  /* rows of a token */
    int64_t weight_step;  /* from row to row of a token; 0: all have the same weight and bias */
    int64_t is_added, is_centred;
    double offset, eps, x_scale, sum_scale;
};

/* 1 + factor * log(1 + floor((position + first) / length)) */
struct position_scales {
    float *out; /* [tokens] */
    int64_t first, length;
    double factor;
};

/* A position's upper 32 bits are a length, or 0. With `further` and no `growth` its frequencies are `further` where there is
 * a length; with both they are multiplied by (growth * n / original - (growth - 1)) ^ further, n the largest of the length,
 * the tokens up to the position and `original`. */
struct rope_table {
    const float *frequencies; /* [pairs] radians a position */
    const float *further;     /* [pairs], or NULL */
    float *cos, *sin;         /* [tokens, 2 * pairs], each half of the sines with its sign */
    int64_t pairs, original;
    double growth, factor;
    int64_t base; /* if not 0: cosines are 1, and sines the digits of a position, whose units `frequencies` are */
};

/* Normalise queries and keys, if there are norms, and rotate them; store keys and values in the cache; queries stay in
 * place. With no `kv_heads` nothing is stored: another layer has stored them. */
struct rope_store {
    bf16 *q;       /* [tokens, heads, dim] */
    const bf16 *k; /* [tokens, kv_heads, dim] */
    const bf16 *v;
    int64_t q_stride, k_stride, v_stride;
    int64_t heads, kv_heads, dim, value_dim; /* elements of a query or key, and of a value */
    const bf16 *q_norm, *k_norm; /* [dim], or NULL */
    double offset, eps;          /* of the norms */
    const float *cos, *sin;      /* as of rope_table */
    int64_t rotary_dim;          /* 0: nothing is rotated */
    int64_t is_rotated_first;    /* whether the norms follow the rotation */
    const float *q_scales;       /* [tokens] factors of the queries, or NULL */
    bf16 *k_cache, *v_cache;     /* see attention.c */
    int64_t block_size, block_stride, value_stride; /* to the next block of keys, and of values */
    int64_t key_size, value_size; /* elements of a stored key, which zeros complete, and of a stored value */
};

struct attention {
    const bf16 *q; /* [tokens, heads, dim] */
    int64_t q_stride;
    bf16 *out; /* [tokens, heads, value_dim] */
    int64_t out_stride;
    const bf16 *k_cache, *v_cache;
    int64_t heads, kv_heads, dim, value_dim, block_size, block_stride, value_stride; /* as of rope_store */
    double scale;
    int64_t window;  /* keys to which a query attends, its own included; 0: all */
    int64_t is_chunked; /* whether it attends only to those of its own chunk of `window` positions */
    double soft_cap; /* 0: none */
    const float *sinks; /* [heads], or NULL */
    const int32_t *selected; /* [tokens, kv_heads, top_k] blocks of keys that are seen, ascending, -1 past the last; or
                              * NULL: all keys */
    int64_t top_k, block;    /* keys of such a block, a multiple of UNIT */
};

/* act(gate) * up. */
struct activation {
    int64_t activation; /* one of those below */
    double alpha, limit; /* of CLAMPED_SILU; the limit of CLIPPED_SILU, too */
};
enum { SILU, GELU_TANH, CLAMPED_SILU, GELU, RELU, RELU_SQUARED, CLIPPED_SILU };

/* The same for rows of gates, and of the values that they gate. */
struct gated {
    const bf16 *gate; /* [tokens * per_token, size] */
    int64_t stride;
    const bf16 *up; /* [tokens * per_token, size], or NULL: 1 */
    int64_t up_stride;
    bf16 *out; /* [tokens * per_token, size] */
    int64_t out_stride;
    int64_t size, per_token;
    struct activation by;
};

/* `gated` of `linear`, bit for bit, without writing the output of `linear`. */
struct gated_linear {
    struct linear linear; /* out: [tokens, out_features / 2] bf16; out_features is a multiple of 2 * PANEL */
    struct activation by;
};

/* Runs of rows, each times its own weight of a stack. */
struct grouped_linear {
    const bf16 *x; /* [rows, in_features]; with `tokens` [tokens, in_features] */
    int64_t x_stride;
    const int64_t *tokens; /* [rows] rows of x in this order, or NULL: as they are */
    const bf16 *weight; /* packed, one after the other, each padded to a multiple of PANEL outputs */
    const bf16 *bias;   /* [groups, out_features] or NULL */
    bf16 *out;          /* [rows, out_features], 0 past the last run */
    int64_t out_stride;
    const int64_t *counts; /* [groups] rows of each run; NULL: each group has its columns of all rows of x and of out */
    int64_t groups, in_features, out_features;
    int64_t per_token; /* number of rows */
};

/* Each head's part of a row times the head's weight. */
struct headed_linear {
    const bf16 *x; /* [tokens, heads, in_features] */
    int64_t x_stride, x_step; /* the second from head to head */
    const bf16 *weight; /* packed, one after the other, each padded to a multiple of PANEL outputs */
    bf16 *out;          /* [tokens, heads, out_features] */
    int64_t out_stride, out_step;
    int64_t heads, in_features, out_features;
};

/* Stores each token's latent, normalised, and its rotated key in the cache; rotates queries into `latent_q`. */
struct latent_store {
    const bf16 *q; /* [tokens, heads, nope + rope] */
    int64_t q_stride;
    bf16 *latent_q; /* [tokens, heads, size], of which those after the first `rank` are written */
    int64_t heads, nope, rank, rope;
    const bf16 *latent; /* [tokens, rank + rope] */
    int64_t latent_stride;
    const bf16 *norm; /* [rank] */
    double eps;
    const float *cos, *sin; /* as of rope_table */
    int64_t is_interleaved; /* whether adjacent dimensions are rotated together, and then stored in halves */
    bf16 *cache;            /* [blocks, block_size, size] */
    int64_t block_size, block_stride;
    int64_t size; /* rank + rope, and the zeros after them */
};

/* Cached vectors of a sequence, one for each `rate` tokens, in the block of the last of these tokens. */
struct paged {
    const bf16 *vectors; /* [blocks, vectors of a block, dim], or NULL */
    int64_t page_stride; /* from block to block */
    int64_t page_tokens; /* of a block */
    int64_t rate;
};

/* Attention of all heads to the same cached vectors, of which the first `rank` elements are also the values: to all of
 * `cache`, or with a window to the last of them, and to all or the selected ones of `entries`. */
struct latent_attention {
    const bf16 *q; /* [tokens, heads, dim] */
    int64_t q_stride;
    bf16 *out; /* [tokens, heads, rank] */
    int64_t out_stride;
    const bf16 *cache; /* [blocks, block_size, dim], or NULL */
    int64_t heads, rank, dim, block_size, block_stride;
    double scale;
    int64_t window; /* 0: all */
    struct paged entries;
    const int32_t *selected; /* [tokens, top_k] entries ascending, -1 past the last; or NULL: all that are complete */
    int64_t top_k;
    const float *sinks; /* [heads], or NULL */
};

/* Some dimensions of each head rotated, by adjacent pairs or by halves, after a norm if `eps` is not 0. */
struct rotate_heads {
    const bf16 *x; /* [tokens, heads, dim] */
    int64_t x_stride;
    const bf16 *norm; /* [dim], to which `offset` is added; NULL: 1 */
    double offset, eps;
    const float *cos, *sin; /* as of rope_table */
    int64_t rotary_dim, first; /* the rotated dimensions, and the index of the first of them */
    int64_t is_interleaved, is_back; /* `is_back`: by the negative angles */
    bf16 *out; /* [tokens, heads, dim]; with `block_size` [blocks, block_size, dim], by the tokens' slots */
    int64_t out_stride, block_size; /* to the next token, or block */
    int64_t heads, dim;
};

/* Indexes of the best of the cached keys to which a token attends, or of blocks of keys; all of them if they are few
 * enough. With weights a key's score is the sum over heads of weight * relu(q . k), and of equal ones the first is
 * taken. Without, each head selects blocks for itself, each scored by its best key, and always takes the last ones. */
struct select_keys {
    const bf16 *q; /* [tokens, heads, dim] */
    int64_t q_stride;
    const bf16 *weights; /* [tokens, heads], or NULL */
    int64_t weight_stride;
    double scale; /* of the weights */
    struct paged keys;
    int64_t heads, dim; /* at most INDEX_HEADS and MAX_INDEX_DIM */
    int64_t block, num_local; /* without weights: keys of a block, and blocks that are always taken */
    int32_t *selected; /* [tokens, heads or 1, top_k] ascending, -1 past the last */
    int64_t top_k;
};
#define INDEX_HEADS 128
#define MAX_INDEX_DIM 256
#define MAX_INDEXED (1 << 20) /* keys of a sequence */

/* Concatenates heads; each element is multiplied by the sigmoid of its gate if there are gates. */
struct gate_heads {
    const bf16 *x; /* [tokens, heads, dim] */
    int64_t x_stride, x_step; /* the second from head to head */
    const bf16 *gate; /* the same shape, or NULL */
    int64_t gate_stride, gate_step;
    bf16 *out; /* [tokens, heads, dim] */
    int64_t out_stride, out_step;
    int64_t heads, dim;
    int64_t is_of_head; /* whether each gate applies to a whole head: [tokens, heads] */
    int64_t zeros;      /* elements that are cleared after each head of the output */
};

/* Heads with states, of one row, which a thread takes as one task. */
struct states {
    int64_t row, first, past;
};

/* Take the next heads; 0 if there are none. In a decode they are several where threads have enough of them: their states
 * are consecutive in memory, and each one is prefetched while the one before is computed. */
static inline int take_states(const struct step *step, struct worker *worker, int64_t heads, struct states *states) {
    int64_t wanted = step->num_rows * heads / (8 * worker->threads);
    int64_t count = step->num_tokens > step->num_rows ? 1 : max64(1, min64(wanted, 8)), tasks = parts(heads, count);
    int64_t task = take_task(worker), first = task % tasks * count;
    *states = (struct states){task / tasks, first, min64(first + count, heads)};
    return task < step->num_rows * tasks;
}

/* A gated delta net between its projections. */
struct delta_net {
    const bf16 *x; /* [tokens, key_heads, 2 * (key_dim + group * value_dim)]: query, key, values, gates */
    int64_t x_stride;
    const bf16 *ba; /* [tokens, key_heads, 2 * group]: the inputs of beta, then of the decay, of each value head */
    int64_t ba_stride;
    const bf16 *conv;            /* [channels, kernel] */
    const bf16 *a_log, *dt_bias; /* [value heads] */
    const bf16 *norm;            /* [value_dim] */
    double eps;
    bf16 *inputs;  /* [slots, channels, kernel - 1] the last */
    float *states; /* [slots, value heads, key_dim, value_dim] */
    bf16 *out;     /* [tokens, value heads, value_dim] */
    int64_t out_stride;
    int64_t key_heads, group, key_dim, value_dim, kernel; /* value_dim: a multiple of 16 */
};

/* A product in float32, for weights that are not packed. */
struct float_linear {
    const bf16 *x; /* [tokens, in_features] */
    int64_t x_stride;
    const float *weight; /* [out_features, in_features] */
    float *out;          /* [tokens, out_features] */
    int64_t out_stride;
    int64_t in_features, out_features;
};

/* The best experts of a token, among the best groups of experts, and their weights. The first of equal ones is
 * taken. */
struct route {
    const float *logits; /* [tokens, experts] */
    int64_t stride;
    const float *correction; /* [experts], which counts in the choice but not in the weights, or NULL */
    float *weights;          /* [tokens, top_k] */
    int64_t *ids;            /* [tokens, top_k], the best first */
    int64_t experts, top_k, groups, top_groups;
    int64_t scoring;     /* SOFTMAX, SIGMOID or SQRT_SOFTPLUS */
    int64_t renormalize; /* whether a token's weights add up to 1, before they are scaled */
    double scaling_factor;
    const float *expert_scales; /* [experts] factors of the weights, or NULL */
    const int64_t *table;       /* [vocabulary, top_k] experts by token id, or NULL: the best */
};
enum { SOFTMAX, SIGMOID, SQRT_SOFTPLUS };

/* The pairs of a token and one of its experts, by expert. */
struct sort_pairs {
    const int64_t *ids; /* [tokens, top_k] */
    int64_t top_k, experts;
    int64_t first;   /* the expert of the first run; those before it follow the last */
    int64_t *counts; /* [experts] pairs, in that order */
    int64_t *tokens; /* [tokens * top_k] the token of each sorted pair */
    int64_t *places; /* [tokens, top_k] the position of each pair among the sorted ones */
};

/* The weighted sum of a token's experts, in the order in which they were chosen. */
struct combine {
    const bf16 *products; /* [tokens * top_k, size], sorted */
    int64_t products_stride;
    const float *weights;  /* [tokens, top_k] */
    const int64_t *places; /* [tokens, top_k] */
    const bf16 *shared;    /* [tokens, size] to be added, or NULL */
    int64_t shared_stride;
    const float *gate; /* [tokens] logits of the factor of `shared`, or NULL: 1 */
    bf16 *out; /* [tokens, size] */
    int64_t out_stride;
    int64_t size, top_k;
};

/* The argmax token of each row of the product: first that of each thread's columns, which are then compared. */
struct greedy_head {
    const bf16 *x; /* [tokens, in_features] */
    int64_t x_stride;
    const bf16 *weight; /* packed */
    const bf16 *bias;   /* [out_features] or NULL */
    int64_t in_features, out_features;
    float *peaks;    /* [threads, max_rows] */
    int64_t *tokens; /* [threads, max_rows] */
    int64_t max_rows;
    int64_t bits; /* of the weight: 16, or 8 or 4 as in quantized.h */
};

/* The best of the threads' tokens. */
struct greedy_choice {
    const struct greedy_head *head;
    float *peaks;    /* [tokens] */
    int64_t *tokens; /* [tokens] */
};

/* After a head has chosen a token at each of a step's tokens: which drafts of each row are accepted, and the rows that
 * draft further, in descending order of their drafts. */
struct accept_drafts {
    const float *peaks;            /* [tokens] as the head wrote them */
    const int64_t *tokens;         /* [tokens] */
    const struct step *verified; /* B rows, in which each token after the first is a draft */
    const int64_t *wanted;       /* [B] the most drafts that each row is to have */
    const int64_t *num_blocks;   /* [B] that each row has */
    const int64_t *rows;         /* [B] of `tables` */
    const int32_t *tables;       /* [slots, blocks] */
    int64_t blocks, block_size;
    int64_t max_len;        /* tokens of the longest sequence */
    struct step *next;      /* of the rows that draft further */
    int64_t *order;         /* [next rows] row of the verified step */
    int64_t *last;          /* [next rows] index of its last accepted token */
    int64_t *counts;        /* [next rows] drafts that it is to have */
    int64_t *slots;         /* [next rows] its entry of `rows` */
    const struct sampling *by; /* to whose tokens the last accepted token of each row is added; or NULL */
    int64_t *num_drafting;  /* [1] number of these rows */
    double *began;          /* [1] seconds of the monotonic clock, when the drafter's work begins */
};

/* Drafts that a head has chosen, as the tokens of the drafter's next pass: one of each row that drafts further. */
struct take_drafts {
    const float *peaks;    /* [rows] as the head wrote them */
    const int64_t *chosen; /* [rows] */
    struct step *next;     /* of that pass; before, of the rows that the head has chosen for */
    const int64_t *counts; /* [rows] drafts of each row, descending */
    int64_t depth;         /* drafts that each row had before */
    int64_t *drafts;       /* [rows] -1 where the logits had no largest number */
    int64_t block_size;
    const int64_t *slots;  /* [rows] */
    const struct sampling *by; /* to whose tokens the drafts are added; or NULL */
    int64_t ahead;         /* positions from an entry to its token */
};

/* After `accept_drafts` and the drafts of its rows: stores the accepted tokens, and prepares the step that verifies these
 * drafts. Rows that have ended are left out of it. */
struct next_round {
    const float *peaks;    /* [tokens] as the target's head wrote them */
    const int64_t *tokens; /* [tokens] */
    struct step *step;     /* B rows, as in `accept_drafts`; afterwards those of the next round */
    struct step *first;    /* of the drafter's first pass; afterwards the next round's, which reads `tokens` */
    struct step *buffers;  /* [2] arrays for the next rounds, which are used in turn */
    int64_t *rows;         /* [B] slot of each row */
    int64_t *row_of;       /* [B] index that each row had in the first round */
    int64_t *wanted, *num_blocks; /* [B] as in `accept_drafts` */
    int64_t *limits;       /* [B] tokens at which each row ends */
    const int64_t *ends;   /* [num_ends] tokens after which any row ends */
    int64_t num_ends;
    const int32_t *tables; /* [slots, blocks] */
    int64_t blocks, block_size;
    int64_t max_len;       /* tokens of the longest sequence */
    int64_t *order;        /* as `accept_drafts` wrote it; afterwards indexes of the first round's rows */
    const int64_t *counts, *num_drafting; /* as `accept_drafts` wrote them */
    const int64_t *drafts; /* [most][max_rows] as `take_drafts` wrote them */
    int64_t max_rows;
    const struct sampling *by; /* to whose tokens accepted ones and drafts are added */
    int64_t *slots;        /* [tokens] slot of each of the next step's tokens */
    int64_t *accepted;     /* [max_rows][capacity] accepted tokens of each row, by `row_of` */
    int64_t *num_accepted; /* [max_rows] number of them so far */
    int64_t capacity;
    int64_t *counted;      /* [rounds][2][max_rows] drafts that each row verified in a round, and the accepted ones */
    int64_t *round;        /* [1] number of this round, from 0; afterwards the next one's */
    int64_t *continues;    /* [1] whether the next round can be computed */
};

/* Prepares the step of the first round; later rounds have theirs from `next_round`. */
struct first_round {
    const struct next_round *round; /* whose `step` has the number of rows B and the states */
    const int64_t *positions;       /* [B] position of each row's last known token */
    const int64_t *counts;          /* [B] number of drafts that each row verifies */
    const int64_t *drafts;          /* the drafts of all rows, in order */
};

/* The same operators for weights of 8 or 4 bits, packed as in quantized.h; `pack` rounds. */
struct quantized_linear {
    struct linear linear;
    int64_t bits;
};
struct quantized_gated_linear {
    struct gated_linear gated;
    int64_t bits;
};
struct quantized_pack {
    struct pack pack;
    int64_t bits;
};
struct quantized_embed {
    struct embed embed;
    int64_t bits;
};
struct quantized_grouped_linear {
    struct grouped_linear grouped;
    int64_t bits;
};

/* The same for weights of a quantised checkpoint, packed as codes.h has it. */
struct codes {
    int64_t code_kind, scales;
    int64_t group;        /* inputs that share a scale: a multiple of DEPTH, or more than there are */
    int64_t has_zeros;    /* whether integers have stored zero points */
    const int32_t *order; /* [in_features] the input that each column of the weight multiplies, or NULL */
};
struct coded_linear {
    struct linear linear;
    struct codes codes;
    bf16 *expanded; /* room for the weight as bfloat16, which `expand_codes` fills in for many rows */
};
struct expand_codes {
    struct coded_linear coded;
};
struct coded_pack {
    const uint8_t *rows;   /* [count, in_features] codes, or two in a byte, the first in its low half */
    int64_t row_stride;    /* bytes */
    const char *row_scales; /* [count, groups] */
    const char *row_zeros;  /* [count, groups] int8, or NULL */
    int64_t first, count;   /* indexes of these rows in the whole weight */
    int64_t in_features;
    char *weight;
    struct codes codes;
    int64_t is_paired;
};
struct coded_grouped_linear {
    struct grouped_linear grouped;
    struct codes codes;
};

/* Indexes of the k largest values of each row, descending, equal ones by index. `pieces` is the number of tasks of a
 * row, here and below, and `ended` counts the completed ones. */
struct largest {
    const float *values; /* [rows, width] */
    int64_t stride, width, pieces;
    int64_t k;      /* at most MAX_LARGEST and `width` */
    uint64_t *best; /* [rows, pieces, k] */
    int64_t *found; /* [rows, pieces] of those */
    atomic_int *ended; /* [rows], 0 */
    int64_t *ids;      /* [rows, k] */
};
#define MAX_LARGEST 1024

/* For each of some rows the token with the largest score, which is its scaled logit plus its noise, among all tokens or
 * those within the filters. Weights are float64. */
struct draw {
    const float *logits; /* [rows of logits, width] */
    int64_t stride, width, pieces;
    const float *peaks;  /* [rows of logits] the largest, finite */
    const int64_t *rows; /* [rows] which of the logits' */
    const float *temperature;
    const int64_t *top_k;  /* at least 1; `width`: all */
    const double *top_p;   /* 1: all */
    const double *min_p;   /* at most 1 */
    const uint64_t *row_keys; /* that determine the noise */
    const char *filtered;  /* whether a row has filters */
    double *masses;    /* [rows, runs of WEIGHED tokens] */
    uint64_t *best;    /* [rows, pieces, most] of filtered rows */
    double *scores;    /* [rows, pieces] the largest, of others */
    int64_t *found;    /* [rows, pieces] the number of the best, or the token with the largest score */
    int64_t most;      /* LOOKED_AT, or any top_k of at most MAX_LARGEST that is more */
    atomic_int *ended; /* [rows], 0 */
    int64_t *tokens;   /* [rows] */
    float *probabilities; /* [rows, width] receives the distribution from which each token is sampled, or NULL */
};
#define WEIGHED 256
#define LOOKED_AT 64

#define MAX_DRAWN (480 << 10) /* tokens of a row, of which a thread's scratch holds a key and two weights each */

/* Rejection sampling: the drafts of sequences, each with some adjacent rows of `by`, in one piece each. After a
 * rejected draft the tokens of a sequence's rows stay unchanged. */
struct verify_drafts {
    struct draw by;
    const int64_t *firsts;                    /* [sequences + 1] rows */
    const int64_t *drafts;                    /* [rows] -1: none, the row's token is sampled */
    const float **probabilities_of_drafts;    /* [rows] [width] of the draft's distribution */
    const double *numbers;                    /* [rows] uniform, from 0 to 1 */
};

/* How sequences sample, by slot, and their tokens. */
struct sampling {
    const float *temperature;                       /* 0: the argmax */
    const int64_t *top_k;                           /* less than 1, or the vocabulary's size and more: all */
    const double *top_p, *min_p;                    /* 1 and 0: all */
    const uint64_t *keys;                           /* with a position, determine the noise */
    const float *repetition, *presence, *frequency; /* penalties; 1, 0 and 0: none */
    const int64_t *num_prompt_tokens;               /* which the last two leave out */
    int32_t *known;                                 /* [slots, known_stride] tokens by position, drafts included */
    int64_t known_stride;
};

/* The next token at each of the step's tokens, from its logits, which penalties change in place. */
struct sample_tokens {
    float *logits; /* [tokens, width] */
    int64_t width;
    const struct sampling *by;
    const int64_t *slots; /* [tokens] */
    int64_t ahead;        /* positions from one of the step's tokens to the sampled one */
    float *peaks;         /* [tokens] the largest logits */
    int64_t *tokens;      /* [tokens] where that is no finite number, any */
};

/* A rank of a group that shares memory; see group.c. */
struct group {
    char *memory;
    int64_t rank, size;
    int64_t next;     /* the number of the next collective */
    int64_t has_left; /* whether some rank, and so this one, has left the step */
};

/* The sum of all ranks' rows, in place. */
struct all_reduce {
    void *x; /* [tokens, columns] without gaps, bf16 or float32 */
    int64_t columns, is_float;
    struct group *group;
};

/* A replica of a group that divides experts; see exchange.c. */
struct exchange {
    char *memory;
    int64_t replica, replicas;
    int64_t meetings; /* so far */
    int64_t left_by;  /* 1 + the number of a replica that has left for good; 0: none */
};

/* Copies rows unchanged. */
struct copy_rows {
    const char *from; /* [tokens] */
    int64_t from_stride; /* bytes */
    const int64_t *places; /* [tokens] indexes of rows of `to`, or NULL: the first ones */
    char *to;
    int64_t row_bytes;
    const int64_t *sources; /* [tokens] indexes of rows of `from`, or NULL: the first ones */
};

/* The (token, expert) pairs of any replica that this one computes, and where results of its own tokens arrive. */
struct share_tokens {
    struct exchange *exchange;
    const int64_t *ids; /* [tokens, top_k] experts */
    int64_t top_k;
    int64_t *shared_ids; /* [replicas, most_tokens, top_k], of all */
    int64_t most_tokens; /* of a replica */
    int64_t first_asked, asked; /* experts of all replicas */
    int64_t first_local, local; /* those of this replica */
    int64_t *next;   /* [local] scratch for counting */
    int64_t *counts; /* [local] pairs by expert */
    int64_t *tokens; /* [pairs] by expert: the token, of [replicas * most_tokens] */
    int64_t *to;     /* [pairs] where their results go, of [replicas, most_tokens * top_k + 1], the last ones 0 */
    int64_t *places; /* [tokens, top_k] where the results of this replica's tokens arrive */
    struct step *pairs; /* the step of as many pairs */
};

/* Waits until all replicas have written their results. */
struct await_answers {
    struct exchange *exchange;
};

/* Runs an operator on another step than the program's. */
struct on_step {
    int64_t number;
    const void *arguments;
    const struct step *step;
};

/* A plain loop of reads. */
struct read_limit {
    const char *memory;
    int64_t bytes;
    int64_t *sums; /* [threads] unused results */
};

/* A plain loop of products. */
struct product_limit {
    int64_t rounds;
    int64_t *products; /* [threads] multiplications and additions that each made */
};

/* A causal depthwise convolution of each row's tokens and the last inputs of its sequence. */
struct short_conv {
    const bf16 *x; /* [tokens, channels] */
    int64_t x_stride;
    const bf16 *before, *after; /* [tokens, channels] what inputs and outputs are multiplied by, or both NULL */
    int64_t gate_stride;
    const bf16 *weight; /* [kernel, channels] */
    const bf16 *bias;   /* [channels], or NULL */
    bf16 *inputs;       /* [slots, kernel - 1, channels] the last */
    bf16 *out;          /* [tokens, channels] */
    int64_t out_stride;
    int64_t channels, kernel, has_silu;
};

/* The selective state space of Mamba-2: groups of consecutive heads share their keys and queries. */
struct state_space {
    const bf16 *x; /* [tokens, heads * dim + 2 * groups * state]: values, keys, queries */
    int64_t x_stride;
    const bf16 *dt; /* [tokens, heads] */
    int64_t dt_stride;
    const float *a_log, *d, *dt_bias; /* [heads] */
    float *states;                    /* [slots, heads, state, dim] */
    bf16 *out;                        /* [tokens, heads, dim] */
    int64_t out_stride;
    int64_t heads, dim, groups, state;
    double least, most; /* limits to which time steps are clamped */
};

/* The delta rule alone: a state decays, moves towards each token's value at its key, and is read by its query.
 * Queries and keys get unit length. */
struct delta_rule {
    const bf16 *x; /* [tokens, 2 * key_heads * key_dim + heads * value_dim]: all queries, all keys, all values */
    int64_t x_stride;
    const bf16 *a; /* [tokens, heads, decays]: the inputs of decays */
    int64_t a_stride;
    const bf16 *b; /* [tokens, heads]: the inputs of beta */
    int64_t b_stride;
    const float *a_log;   /* [heads] */
    const float *dt_bias; /* [heads, decays] */
    float *states;        /* [slots, heads, key_dim, value_dim] */
    bf16 *out;            /* [tokens, heads, value_dim] */
    int64_t out_stride;
    int64_t heads, group, key_dim, value_dim; /* value heads, and those of a key head */
    int64_t decays;                           /* of a head: 1, or one for each dimension of its key */
    double most;                              /* the largest beta, above 0 */
    double bound;                             /* of the decays' logarithms; 0: they have none. See rule_token. */
};

/* The selective state space of Mamba (Gu and Dao, 2023), in which each channel has a state and decays of its own. */
struct selective_scan {
    const bf16 *x; /* [tokens, channels] */
    int64_t x_stride;
    const bf16 *dt; /* [tokens, channels] */
    int64_t dt_stride;
    const bf16 *b, *c; /* [tokens, state]: keys, queries */
    int64_t b_stride, c_stride;
    const float *a_log;       /* [state, channels] */
    const float *d, *dt_bias; /* [channels] */
    float *states;            /* [slots, state, channels] */
    bf16 *out;                /* [tokens, channels] */
    int64_t out_stride;
    int64_t channels, state;
};

/* x times SiLU of the gate; with a weight, a root-mean-square norm of each group after it or before it. */
struct group_norm {
    const bf16 *x; /* [tokens, groups * size] */
    int64_t x_stride;
    const bf16 *gate; /* the same shape */
    int64_t gate_stride;
    const bf16 *weight; /* [groups * size], or NULL */
    bf16 *out;          /* [tokens, groups * size] */
    int64_t out_stride;
    int64_t groups, size, is_gated_first;
    double eps;
};

/* Each number times its column's factor, or times `scale`, plus a second matrix if there is one. */
struct scale_rows {
    const bf16 *x; /* [tokens * per_token, columns] */
    int64_t x_stride;
    const float *by; /* [columns], or NULL */
    double scale;
    const bf16 *added; /* the shape of x, or NULL */
    int64_t added_stride;
    bf16 *out; /* [tokens * per_token, columns] */
    int64_t out_stride;
    int64_t columns, per_token;
};

/* Hyper-connections (Xie et al., 2026): from a token's residual streams the input of a layer, the weight of the layer's
 * output in each stream, and the doubly stochastic matrix that mixes the streams. Without `post` only the input; without
 * `projected` the mean of the streams. */
struct mix_streams {
    const bf16 *streams; /* [tokens, count, size] */
    const float *projected; /* [tokens, (2 + count) * count], without `post` [tokens, count]; of streams before the norm */
    const float *base, *scale; /* as many as of a token's projections; and 3, without `post` 1 */
    int64_t count, size, iterations;
    double eps, norm_eps;
    bf16 *out;   /* [tokens, size] */
    float *post; /* [tokens, count] */
    float *mix;  /* [tokens, count, count] */
};
#define MOST_STREAMS 8

/* The next streams: the mixed ones, plus shares of a layer's output. Without `streams` each is `x`. */
struct spread_streams {
    const bf16 *x; /* [tokens, size] */
    int64_t x_stride;
    const bf16 *streams;     /* [tokens, count, size] */
    const float *post, *mix; /* of `mix_streams` */
    int64_t count, size;
    bf16 *out; /* [tokens, count, size] */
};

/* Each token's vector to its slot. */
struct store_vectors {
    const bf16 *x; /* [tokens, dim] */
    int64_t x_stride;
    bf16 *pages; /* [blocks, block_size, dim] */
    int64_t page_stride, block_size, dim;
};

/* Entries of the windows of `rate` tokens that end in the step. See models/ops/compression.py. */
struct compress {
    const bf16 *tokens; /* [blocks, page_tokens, 2 * series]: of a token its values, then its gates */
    int64_t token_stride; /* from block to block */
    const float *bias; /* [rate, series], added to the gates */
    int64_t series, dim, span; /* `span`: tokens that an entry is made of: `rate` of them, or twice as many */
    const bf16 *norm;          /* [dim], or NULL: entries are neither normalised nor rotated */
    double eps;
    const float *frequencies; /* [pairs], by which the last dimensions are rotated */
    int64_t pairs;
    double factor; /* of cosines and sines */
    struct paged entries; /* written */
};
#define MOST_COMPRESSED 1024 /* `span` */

/* Positions of the tokens of selected pools, then of those after the last complete pool. */
struct tokens_of_pools {
    const int32_t *pools; /* [tokens, top_k], -1 past the last */
    int64_t top_k, rate;
    int32_t *out; /* [tokens, top_k * rate + rate - 1], -1 past the last */
};

operator mix_streams, spread_streams, store_vectors, compress, tokens_of_pools;
operator read_limit, product_limit;
operator short_conv, state_space, group_norm, scale_rows;
operator delta_rule, selective_scan;
operator copy_rows, share_tokens, await_answers, on_step;
operator all_reduce;
operator greedy_head, greedy_choice, take_drafts, accept_drafts, first_round, next_round;
operator linear, pack, embed, rms_norm, rope_table, rope_store, attention, gated, grouped_linear, gated_linear;
operator position_scales;
operator quantized_linear, quantized_pack, quantized_embed, quantized_grouped_linear, quantized_gated_linear;
operator coded_linear, expand_codes, coded_pack, coded_grouped_linear;
operator float_linear, route, sort_pairs, combine;
operator largest, draw, sample_tokens, verify_drafts;
operator rotate_heads, select_keys;
operator headed_linear, latent_store, latent_attention, gate_heads, delta_net;

extern operator *const operators[OPERATORS];

/* Logits [rows][PANEL] from `token` on, of the rows from `row` on; they replace the thread's results of `greedy_head`
 * where they are better. */
void begin_greedy(const struct greedy_head *op, int64_t rows, int thread);
void keep_best(const struct greedy_head *op, float *logits, int64_t row, int64_t rows, int64_t token, int thread);

/* act(gate) * up of PANEL columns; rows of the gates are `stride` apart, those of the others PANEL. */
void gate_panel(enum isa isa, const struct activation *by, const bf16 *gates, int64_t stride, const bf16 *ups,
                int64_t rows, bf16 *out);

/* Whether this processor has an instruction set, this build contains it, and the kernel grants it. */
EXPORTED int kaon_runs(int isa);

/* Called by a thread before it reconfigures its tiles or sleeps. */
void release_tiles(enum isa isa);

#endif
