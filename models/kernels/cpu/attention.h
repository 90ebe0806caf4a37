/* The two products of attention, for each instruction set. Called by attention.c.
 *
 * 16 columns, each a head of a query, meet 64 keys in four units of 16, which lie wherever their blocks do. */

#ifndef ATTENTION_H
#define ATTENTION_H

#include "kaon.h"

#define UNIT LANES /* keys that lie together */
#define UNITS 4    /* of a step */
#define KEYS (UNIT * UNITS)

/* Where a step's keys or values are; NULL: no query sees these. */
struct units {
    const bf16 *at[UNITS];
};

/* scores[key][column] = key . query.
 * keys: unit [16][dim]; queries: [dim / 32][16 pairs][16 columns][2]. */
typedef void score_keys(const struct units *keys, const bf16 *queries, int64_t dim, int64_t columns,
                        float scores[KEYS][LANES]);

/* sums[column][dim] += the column's weights . values.
 * values: unit [8 pairs of keys][dim][2]; weights: [2][16 columns][32 keys]. */
typedef void add_values(const struct units *values, const bf16 *weights, int64_t dim, int64_t columns, float *sums);

/* weights [2][16 columns][32 keys] of probabilities [key][column]. */
typedef void turn_weights(float probabilities[KEYS][LANES], bf16 *weights);

struct attention_products {
    score_keys *score;
    add_values *add;
    turn_weights *turn;
    void (*prepare)(void);
};

const struct attention_products *attention_products(enum isa isa);

#endif
