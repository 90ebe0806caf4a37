/* Functions that compilers vectorise when they stand in a loop over lanes; the same results wherever they do. */

#ifndef VECTOR_MATH_H
#define VECTOR_MATH_H

#include <stdint.h>
#include <string.h>

/* e to the x, within 2 units in the last place; 0 below -87, x at most 88 (polynomial of Cephes' expf). */
static inline __attribute__((always_inline)) float exp_of(float x) {
    const float log2_e = 1.44269504f, ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f, rounder = 12582912.0f;
    float inside = x < -87.0f ? -87.0f : x;
    float n = inside * log2_e + rounder - rounder;
    float r = inside - n * ln2_high - n * ln2_low;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t exponent = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &exponent, sizeof power);
    return x < -87.0f ? 0.0f : p * power;
}

static inline __attribute__((always_inline)) float tanh_of(float x) {
    float away = x < 0 ? -x : x;
    float e = exp_of(-2.0f * away), t = (1.0f - e) / (1.0f + e);
    return x < 0 ? -t : t;
}

static inline __attribute__((always_inline)) float sigmoid_of(float x) {
    float inside = x < -87.0f ? -87.0f : x;
    return 1.0f / (1.0f + exp_of(-inside));
}

#endif
