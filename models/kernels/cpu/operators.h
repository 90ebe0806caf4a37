/* The operators, by number, and their arguments. Numbers and fields are mirrored in models/kernels/cpu/library.py. */

#ifndef OPERATORS_H
#define OPERATORS_H

#include "kaon.h"

#define MAX_THREADS 1024

enum { LINEAR, PACK, EMBED, RMS_NORM, ROPE_TABLE, ROPE_STORE, ATTENTION, GATED, GROUPED_LINEAR,
       GREEDY_HEAD, GREEDY_CHOICE, QUANTIZED_LINEAR, QUANTIZED_PACK, QUANTIZED_EMBED, QUANTIZED_GROUPED_LINEAR,
       OPERATORS };

struct operation {
    int64_t kind;
    const void *arguments;
};

/* Strides are in elements, from row to row; matrices have a row a token where nothing else is said. */
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
    int64_t first, count; /* rows of the whole weight that these are */
    int64_t in_features;
    bf16 *weight;
};

/* Rows of a packed weight, by token. */
struct embed {
    const bf16 *weight;
    bf16 *out; /* [tokens, in_features] */
    int64_t out_stride;
    int64_t in_features;
};

/* The norm of a row, after `residual` is added to it where there is one; `residual` then holds the sum. */
struct rms_norm {
    const bf16 *x;
    int64_t x_stride;
    bf16 *residual; /* or NULL */
    int64_t residual_stride;
    const bf16 *weight; /* [size], of which `offset` is added */
    bf16 *out;
    int64_t out_stride;
    int64_t size;
    double offset, eps;
};

struct rope_table {
    const float *frequencies; /* [pairs] radians a position */
    float *cos, *sin;         /* [tokens, 2 * pairs], each half of the sines with its sign */
    int64_t pairs;
    double factor;
};

/* Queries and keys normalised, where they are, and rotated; keys and values into the cache; queries stay in place. */
struct rope_store {
    bf16 *q;       /* [tokens, heads, dim] */
    const bf16 *k; /* [tokens, kv_heads, dim] */
    const bf16 *v;
    int64_t q_stride, k_stride, v_stride;
    int64_t heads, kv_heads, dim;
    const bf16 *q_norm, *k_norm; /* [dim], or NULL */
    double offset, eps;          /* of the norms */
    const float *cos, *sin;      /* as of rope_table */
    int64_t rotary_dim;          /* 0: nothing is rotated */
    bf16 *k_cache, *v_cache;     /* see attention.c */
    int64_t block_size;
};

struct attention {
    const bf16 *q; /* [tokens, heads, dim] */
    int64_t q_stride;
    bf16 *out; /* the same shape */
    int64_t out_stride;
    const bf16 *k_cache, *v_cache;
    int64_t heads, kv_heads, dim, block_size;
    double scale;
    int64_t window;  /* keys that a query sees, its own included; 0: all */
    double soft_cap; /* 0: none */
    const float *sinks; /* [heads], or NULL */
};

/* act(gate) * up of the two side by side. */
struct gated {
    const bf16 *gate_up; /* [tokens, 2 * size] */
    int64_t stride;
    bf16 *out; /* [tokens, size] */
    int64_t out_stride;
    int64_t size;
    int64_t activation; /* SILU or GELU_TANH */
};
enum { SILU, GELU_TANH };

/* Runs of rows, each by its own weight of a stack. */
struct grouped_linear {
    const bf16 *x; /* [rows, in_features] */
    int64_t x_stride;
    const bf16 *weight; /* packed, one after the other: out_features is a multiple of PANEL */
    const bf16 *bias;   /* [groups, out_features] or NULL */
    bf16 *out;          /* [rows, out_features]; rows past the last run are left as they are */
    int64_t out_stride;
    const int64_t *counts; /* [groups] rows of each run */
    int64_t groups, in_features, out_features;
};

/* The likeliest token of each row of the product; what each thread has seen of it, until they are compared. */
struct greedy_head {
    const bf16 *x; /* [tokens, in_features] */
    int64_t x_stride;
    const bf16 *weight; /* packed */
    const bf16 *bias;   /* [out_features] or NULL */
    int64_t in_features, out_features;
    float *peaks;    /* [threads, max_rows] */
    int64_t *tokens; /* [threads, max_rows] */
    int64_t max_rows;
};

/* The best of the threads', into the first one's. */
struct greedy_choice {
    const struct greedy_head *head;
};

operator greedy_head, greedy_choice;
/* The same by weights of 8 or 4 bits, packed as quantized.h says; `pack` rounds. */
struct quantized_linear {
    struct linear linear;
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

operator linear, pack, embed, rms_norm, rope_table, rope_store, attention, gated, grouped_linear;
operator quantized_linear, quantized_pack, quantized_embed, quantized_grouped_linear;

extern operator *const operators[OPERATORS];

/* The best instruction set that this processor has, this build knows, and the kernel grants. */
int kaon_isa(void);

/* What a thread does before it uses tiles for something else, or rests. */
void release_tiles(enum isa isa);

#endif
