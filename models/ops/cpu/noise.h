/* Gumbel noise of tokens, as models/ops/counter_rng.py defines it, and the token with the largest score.
 *
 * The score of a token is its scaled logit plus its noise, in float64. Few tokens are scored: the high word of a token's
 * random bits bounds its noise from above by a conversion to float, whose exponent and mantissa approximate a logarithm
 * from below, and most bounds are less than the largest score so far. */

#ifndef NOISE_H
#define NOISE_H

#include <math.h>

#include "vectors.h"

/* A row key's words. */
struct noise {
    uint32_t first, second;
};

INLINE struct noise noise_of_key(uint64_t key) { return (struct noise){(uint32_t)key, (uint32_t)(key >> 32)}; }

/* SplitMix64 of a key, entered at a position. */
INLINE uint64_t key_of_row(uint64_t key, int64_t position) {
    key += ((uint64_t)position + 1) * 0x9e3779b97f4a7c15;
    key = (key ^ key >> 30) * 0xbf58476d1ce4e5b9;
    key = (key ^ key >> 27) * 0x94d049bb133111eb;
    return key ^ key >> 31;
}

/* On words, or on vectors of them. */
#define HIGH_WORD(x, by)                  \
    (x) += (by).first;                    \
    (x) = ((x) ^ (x) >> 17) * 0xed5ad4bb; \
    (x) ^= (by).second;                   \
    (x) = ((x) ^ (x) >> 11) * 0xac4c1b51; \
    (x) = ((x) ^ (x) >> 15) * 0x31848bab; \
    (x) ^= (x) >> 14

/* -log(-log(1 - v)) of a token's v in (0, 1), each end of which keeps its precision. */
static inline double noise_of(uint32_t id, struct noise by) {
    uint32_t high = id;
    HIGH_WORD(high, by);
    uint32_t low = high ^ by.first;
    low = (low ^ low >> 16) * 0x7feb352d;
    low = (low ^ low >> 15) * 0x846ca68b;
    low ^= low >> 16;
    double fraction = (low + 0.5) * 0x1p-32, below = (high + fraction) * 0x1p-32;
    double above = ((0xffffffff - high) + (1 - fraction)) * 0x1p-32;
    return -log(below < 0.5 ? -log1p(-below) : -log(above));
}

/* The best token so far, or none. */
struct winner {
    double score;
    int64_t token;
};

/* No sampled token has a lower score: the token with the largest logit has a scaled logit of 0, and noise of at least
 * -log(65 log 2). */
#define NO_WINNER ((struct winner){-3.9, -1})
#define MAX_NOISE 45.1 /* 65 log 2 */

static inline void offer_token(struct winner *best, float scaled, int64_t id, struct noise by) {
    double score = scaled + noise_of((uint32_t)id, by);
    if (score > best->score) *best = (struct winner){score, id};
}

#define BOUND_BIAS (127 << 23)
#define BOUND_SLACK 1e-3 /* more than roundings of scaled logits of at least -50 */

/* The threshold for bounds of tokens that can exceed the best score; bounds are multiplied by `temperature`. */
INLINE float limit_of(const struct winner *best, float temperature) {
    return (float)((best->score - BOUND_SLACK - 31 * M_LN2) * temperature);
}

/* Bounds of 16 tokens from `first` on; `gaps` are their logits less the largest. v is at least (high >> 1) * 2^-31, and
 * log2(1 + m) is at least m. */
INLINE vector bounds_of(vector gaps, uint32_t first, struct noise by, float temperature) {
    bits high = first + (bits){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    HIGH_WORD(high, by);
    vector half = __builtin_convertvector((integers)(high >> 1), vector);
    return gaps - (float)(M_LN2 * 0x1p-23) * temperature * __builtin_convertvector((integers)half - BOUND_BIAS, vector);
}

/* By the signs of differences, whose comparison some compilers would compute lane by lane. */
INLINE int any_above(const vector *bounds, int count, float limit) {
    bits above = (bits)(limit - bounds[0]);
    for (int i = 1; i < count; i++) above |= (bits)(limit - bounds[i]);
    return (any_bits(above) & 0x8000000080000000) != 0;
}

#endif
