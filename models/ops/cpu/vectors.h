/* Arithmetic on LANES float32 at once, in the compiler's vectors: on all processors the same operations in the same order,
 * so the same results, except for sums over the lanes of shorter vectors. */

#ifndef VECTORS_H
#define VECTORS_H

#include "kaon.h"

#if HAS_X86
#include <immintrin.h>
#elif HAS_NEON
#include <arm_neon.h>
#endif

typedef float vector __attribute__((vector_size(LANES * 4)));
typedef int32_t integers __attribute__((vector_size(LANES * 4)));
typedef uint32_t bits __attribute__((vector_size(LANES * 4)));
typedef bf16 halves __attribute__((vector_size(LANES * 2)));

#define INLINE static inline __attribute__((always_inline))

/* A function that is compiled for the constants of each of its callers. Builds for sanitizers do not optimise, so that
 * all copies would be the same code, and take most of the time to compile. */
#ifdef KAON_SANITIZE
#define SPECIALIZED static inline
#else
#define SPECIALIZED INLINE
#endif

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

/* The bitwise or of all lanes: of the even ones in the lower half of the word, of the odd ones in the upper half. Halves
 * are combined first, which takes fewer instructions than lane by lane. */
INLINE uint64_t any_bits(bits v) {
    typedef uint64_t four __attribute__((vector_size(32)));
    typedef uint64_t two __attribute__((vector_size(16)));
    four parts_of[LANES / 8];
    two quarters[2];
    memcpy(parts_of, &v, sizeof v);
    for (int i = 1; i < LANES / 8; i++) parts_of[0] |= parts_of[i];
    memcpy(quarters, parts_of, sizeof quarters);
    two last = quarters[0] | quarters[1];
    return last[0] | last[1];
}

INLINE vector load_bf16(const bf16 *from) {
    halves v;
    memcpy(&v, from, sizeof v);
    return (vector)(__builtin_convertvector(v, bits) << 16);
}

/* The nearest bfloat16, ties to even, as the upper half; a NaN stays one. */
INLINE bits rounded(vector v) {
    bits b = (bits)v, up = b + 0x7fff + ((b >> 16) & 1);
    bits is_nan = (bits)((0x7f800000 - ((integers)v & 0x7fffffff)) >> 31);
    return (up & ~is_nan) | (is_nan & 0x7fc00000);
}

INLINE void store_bf16(bf16 *to, vector v) {
    halves out = __builtin_convertvector(rounded(v) >> 16, halves);
    memcpy(to, &out, sizeof out);
}

/* The first `count` of LANES, the others 0. */
INLINE vector load_some(const bf16 *from, int64_t count) {
    if (count == LANES) return load_bf16(from);
    bf16 padded[LANES] = {0};
    memcpy(padded, from, count * sizeof(bf16));
    return load_bf16(padded);
}

INLINE void store_some(bf16 *to, vector v, int64_t count) {
    bf16 padded[LANES];
    if (count == LANES) {
        store_bf16(to, v);
        return;
    }
    store_bf16(padded, v);
    memcpy(to, padded, count * sizeof(bf16));
}

/* 32 bfloat16: the even elements and the odd ones, since halves of words are cheaper to separate than those of a row;
 * or of fewer the first 16 and the others. */
struct both {
    vector even, odd;
};

INLINE struct both load_both(const bf16 *from, int64_t count) {
    if (count < 2 * LANES) {
        vector rest = {0};
        if (count > LANES) rest = load_some(from + LANES, count - LANES);
        return (struct both){load_some(from, min64(count, LANES)), rest};
    }
    bits words;
    memcpy(&words, from, sizeof words);
    return (struct both){(vector)(words << 16), (vector)(words & 0xffff0000)};
}

INLINE void store_both(bf16 *to, struct both v, int64_t count) {
    if (count < 2 * LANES) {
        store_some(to, v.even, min64(count, LANES));
        if (count > LANES) store_some(to + LANES, v.odd, count - LANES);
        return;
    }
    bits words = rounded(v.even) >> 16 | (rounded(v.odd) & 0xffff0000);
    memcpy(to, &words, sizeof words);
}

/* Halves, then halves of these: a shorter chain than lane by lane, and the same pairs on every processor. */
INLINE float sum_of(vector v) {
    typedef float eight __attribute__((vector_size(32)));
    typedef float four __attribute__((vector_size(16)));
    eight parts_of[LANES / 8];
    four quarters[2];
    memcpy(parts_of, &v, sizeof v);
    for (int i = 1; i < LANES / 8; i++) parts_of[0] += parts_of[i];
    memcpy(quarters, parts_of, sizeof quarters);
    four last = quarters[0] + quarters[1];
    return (last[0] + last[2]) + (last[1] + last[3]);
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

/* 1 / x within 2e-7 of it, for x from 1 to 2^126: a division takes processors four times as long.
 *
 * The difference of the bits is within an eighth of it; each step cubes the error. */
INLINE vector reciprocal_of(vector x) {
    vector r = (vector)(0x7ef311c7 - (bits)x);
    for (int step = 0; step < 2; step++) {
        vector missing = 1.0f - x * r;
        r = r + r * (missing + missing * missing);
    }
    return r;
}

/* log(1 + e^x) within 2e-7 of it: of e^-|x|, by the series of the inverse hyperbolic tangent of u / (2 + u). */
INLINE vector softplus_of(vector x) {
    vector u = exp_of(-larger(x, -x)), s = u * reciprocal_of(2.0f + u), square = s * s, sum = all(1.0f / 15);
    for (int odd = 13; odd > 0; odd -= 2) sum = sum * square + 1.0f / odd;
    return larger(x, all(0)) + 2.0f * s * sum;
}

INLINE vector tanh_of(vector x) {
    integers is_negative = x < 0.0f;
    vector e = exp_of(-2.0f * choose(is_negative, -x, x)), t = (1.0f - e) * reciprocal_of(1.0f + e);
    return choose(is_negative, -t, t);
}

/* x * (1 + erf(x / sqrt(2))) / 2, within 2e-7 of x: Abramowitz and Stegun, 7.1.26. The difference from 1 is computed,
 * so that the tail is as exact as the rest. */
INLINE vector gelu_of(vector x) {
    integers is_negative = x < 0.0f;
    vector a = 0.7071067812f * choose(is_negative, -x, x), t = reciprocal_of(1.0f + 0.3275911f * a);
    vector p = all(1.061405429f);
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    vector missing = p * t * exp_of(-a * a);
    return 0.5f * x * choose(is_negative, missing, 2.0f - missing);
}

/* 0 below -87, where the reciprocal has no bits left. */
INLINE vector sigmoid_of(vector x) {
    integers is_shut = x < -87.0f;
    return choose(is_shut, all(0), reciprocal_of(1.0f + exp_of(-choose(is_shut, all(-87.0f), x))));
}

#if HAS_X86
AVX2 INLINE __m256i load_32_bytes(const void *from) { return _mm256_loadu_si256(from); }

/* A sum of which the next one begins. Integers may be added in any order, and the compiler would first compute all products
 * of an unrolled loop, more than registers hold, and then add them as a tree. */
AVX2 INLINE __m256i in_order(__m256i sum) {
    __asm__("" : "+x"(sum));
    return sum;
}
#endif

/* Add a pair of a row's inputs times pairs of bfloat16, one of each output: `dot_pairs` of the kernels with PAIRS. */
#if HAS_X86 && LANES == 16
AVX512_BF16 INLINE vector pairs_dot_pairs(vector sum, uint32_t both, bits w) {
    return (vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)both), (__m512bh)w);
}
#elif HAS_NEON
NEON_BF16 INLINE float32x4_t neon_bf16_dot_pairs(float32x4_t sum, uint32_t both, uint32x4_t w) {
    return vbfdotq_f32(sum, vreinterpretq_bf16_u32(w), vreinterpretq_bf16_u32(vdupq_n_u32(both)));
}
#endif

#endif
