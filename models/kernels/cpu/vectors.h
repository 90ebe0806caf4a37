/* Arithmetic on 16 float32 at once, in the compiler's vectors: whatever the processor, the same operations in the same
 * order, so the same results. */

#ifndef VECTORS_H
#define VECTORS_H

#include "kaon.h"

typedef float vector __attribute__((vector_size(LANES * 4)));
typedef int32_t integers __attribute__((vector_size(LANES * 4)));
typedef uint32_t bits __attribute__((vector_size(LANES * 4)));
typedef bf16 halves __attribute__((vector_size(LANES * 2)));

#define INLINE static inline __attribute__((always_inline))

INLINE vector all(float value) { return value - (vector){0}; }

INLINE vector choose(integers condition, vector yes, vector no) {
    return (vector)(((integers)yes & condition) | ((integers)no & ~condition));
}

INLINE vector larger(vector a, vector b) { return choose(a > b, a, b); }

INLINE vector load(const float *from) {
    vector v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE void store(float *to, vector v) { memcpy(to, &v, sizeof v); }

INLINE vector load_bf16(const bf16 *from) {
    halves v;
    memcpy(&v, from, sizeof v);
    return (vector)(__builtin_convertvector(v, bits) << 16);
}

/* To the nearest, ties to even; a NaN stays one. */
INLINE void store_bf16(bf16 *to, vector v) {
    bits b = (bits)v, rounded = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
    integers is_nan = v != v;
    halves out = __builtin_convertvector((rounded & ~(bits)is_nan) | (0x7fc0 & (bits)is_nan), halves);
    memcpy(to, &out, sizeof out);
}

/* The first `count` of 16, the others 0. */
INLINE vector load_some(const bf16 *from, int64_t count) {
    bf16 padded[LANES] = {0};
    memcpy(padded, from, count * sizeof(bf16));
    return load_bf16(padded);
}

INLINE void store_some(bf16 *to, vector v, int64_t count) {
    bf16 padded[LANES];
    store_bf16(padded, v);
    memcpy(to, padded, count * sizeof(bf16));
}

/* The first lane, then the others in order. */
INLINE float sum_of(vector v) {
    float sum = v[0];
    for (int lane = 1; lane < LANES; lane++) sum += v[lane];
    return sum;
}

#define LOG2_E 1.44269504f

/* 2 to the x, within 3e-6 of it; 0 below -126, for x of at most 127.
 *
 * The sum with a large number rounds x: its last bits are the exponent. The polynomial is the best for 2^r of its
 * degree between -1/2 and 1/2 that is 1 at 0. */
INLINE vector exp2_of(vector x) {
    integers is_tiny = x < -126.0f; /* a NaN is not */
    vector inside = choose(is_tiny, all(-126.0f), x), shifted = inside + 12582912.0f;
    vector r = inside - (shifted - 12582912.0f);
    vector p = all(9.58279e-3f);
    p = p * r + 5.590624e-2f;
    p = p * r + 2.4024099e-1f;
    p = p * r + 6.9312421e-1f;
    p = p * r + 1.0f;
    return (vector)(((integers)p + ((integers)shifted << 23)) & ~is_tiny);
}

INLINE vector exp_of(vector x) { return exp2_of(x * LOG2_E); }

INLINE vector tanh_of(vector x) {
    integers is_negative = x < 0.0f;
    vector e = exp_of(-2.0f * choose(is_negative, -x, x)), t = (1.0f - e) / (1.0f + e);
    return choose(is_negative, -t, t);
}

INLINE vector sigmoid_of(vector x) { return 1.0f / (1.0f + exp_of(-choose(x < -87.0f, all(-87.0f), x))); }

#endif
