/* A row from which a token is sampled: weights of its tokens, and their order. */

#ifndef DRAW_H
#define DRAW_H

#include <math.h>

#include "best.h"
#include "noise.h"
#include "operators.h"

/* Logits minus the largest, divided by the temperature: at most 0. */
struct scaling {
    float peak, temperature;
};

/* Loops are compiled for both cases: a division takes as long as all else of a key. */
INLINE vector scaled_of(vector logits, struct scaling by) {
    return by.temperature == 1 ? logits - by.peak : (logits - by.peak) / by.temperature;
}

/* A scaled logit without its sign: the integers of its bits are ordered as the numbers are, and -0 is 0. */
INLINE bits keys_of_scaled(vector scaled) { return (bits)scaled & 0x7fffffff; }

#define LEAST_LIKELY 0x7f800000u /* key of minus infinity */

/* Keys of up to WEIGHED tokens; those after the last have the least weight. */
INLINE void read_keys(const float *logits, int64_t count, struct scaling by, uint32_t *keys) {
    float padded[WEIGHED];
    if (count < WEIGHED) {
        for (int64_t i = 0; i < WEIGHED; i++) padded[i] = i < count ? logits[i] : -INFINITY;
        logits = padded;
    }
    for (int i = 0; i < WEIGHED; i += LANES) {
        bits some = keys_of_scaled(scaled_of(load(logits + i), by));
        memcpy(keys + i, &some, sizeof some);
    }
}

typedef double doubles __attribute__((vector_size(64)));
typedef uint64_t words __attribute__((vector_size(64)));
typedef float eight __attribute__((vector_size(32)));

/* e to the x for x of at most 0, within a unit in the last place; 0 below -708, where results are subnormal.
 *
 * The sum with a large number rounds x / ln 2, and its last bits are the exponent. The rest is less than 0.35: 1 + r +
 * r^2 q(r), q interpolated at Chebyshev's points, with an error of 1.6e-17. */
INLINE doubles exp_of_doubles(doubles x) {
    words is_tiny = (words)(x < -708.0); /* minus infinity too, whose remainder is no number */
    doubles shifted = x * 1.4426950408889634 + 6755399441055744.0, n = shifted - 6755399441055744.0;
    doubles r = x - n * 0x1.62e42feep-1 - n * 1.9082149292705877e-10;
    doubles q = 2.5100424157005067e-08 + (doubles){0};
    q = q * r + 2.7620138719733994e-07;
    q = q * r + 2.7557268378684192e-06;
    q = q * r + 2.480152119021773e-05;
    q = q * r + 0.00019841269863105968;
    q = q * r + 0.0013888888917281794;
    q = q * r + 0.008333333333330051;
    q = q * r + 0.04166666666662399;
    q = q * r + 0.16666666666666669;
    q = q * r + 0.5000000000000001;
    doubles e = 1.0 + (r + r * r * q);
    return (doubles)(((words)e + ((words)shifted << 52)) & ~is_tiny);
}

/* The sum of 8 in a fixed order. */
INLINE double sum_of_doubles(doubles v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }

/* The weights of 8 tokens by their keys; the argmax token's weight is 1. */
INLINE doubles weights_of_eight(const uint32_t *keys) {
    eight scaled;
    memcpy(&scaled, keys, sizeof scaled);
    return exp_of_doubles(-__builtin_convertvector(scaled, doubles));
}

/* Number of top tokens among which the end of the filtered prefix is searched first: a small top-k, or LOOKED_AT. */
static inline int64_t looked_at(int64_t top_k) { return top_k <= MAX_LARGEST ? top_k : LOOKED_AT; }

#define NARROW 8192 /* tokens of a row up to which its top tokens take longer to find than it takes to read it whole */

/* Whether a row with filters is read whole at once, and none of its pieces before. */
static inline int is_read_whole(const struct draw *op, int64_t which) {
    return op->filtered[which] && op->top_k[which] > MAX_LARGEST && op->width <= NARROW;
}

/* A whole row in a thread's scratch, for filters that may admit most of it. */
struct whole;
const struct whole *read_whole(const struct draw *op, int64_t which, char *scratch);

/* The tokens within a row's filters, which are a prefix of its order. */
struct kept {
    struct best best; /* top tokens of the row */
    int64_t count;    /* how many of these are all that pass; -1: they do not determine it */
    /* Only then: */
    const struct whole *whole;
    uint64_t last; /* entry of the last token that passes */
};

/* Computed for a row with filters whose pieces were examined, once, when the pieces are merged. */
struct kept filter_row(const struct draw *op, int64_t which, char *scratch);

/* The work of a task on a piece of a row: it finds the best token of it. */
void look_at_piece(const struct draw *op, int64_t task);

/* The token with the largest score, of a row whose pieces were examined. `kept`: for a row with filters. */
int64_t token_of(const struct draw *op, int64_t which, const struct kept *kept);

/* The last token within the filters, as an entry. */
uint64_t last_of_whole(const struct draw *op, int64_t which, const struct whole *row);

/* The weight of a token, 0 outside the filters, and the sum of all weights, where the top tokens determine these. */
float weigh_token(const struct kept *kept, int64_t token, double *sum);

/* The token with the largest score among those up to `last`. */
int64_t draw_from_whole(const struct draw *op, int64_t which, const struct whole *row, uint64_t last);

/* The weights of a row's tokens, 0 for those after `last`, and their sum. # [width] */
double weigh_whole(const struct whole *row, uint64_t last, float *weights);

/* Whether a number is below a token's probability within the filters, or not, as far as it is known without their end. */
enum verdict { BELOW, ABOVE, UNKNOWN };
enum verdict compare(const struct draw *op, int64_t which, int64_t token, double number);

/* The weights of a row's tokens, 0 for those outside the filters, and their sum. # [width] */
double weigh_some(const struct draw *op, int64_t which, const struct kept *kept, float *weights);

INLINE struct scaling scaling_of(const struct draw *op, int64_t which) {
    return (struct scaling){op->peaks[op->rows[which]], op->temperature[which]};
}

#endif
