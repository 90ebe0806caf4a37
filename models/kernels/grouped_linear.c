/* Runs of rows, each multiplied by its own expert's weight: out[r] = weight[expert of r] @ rows[r] + bias[expert of r],
 * all bfloat16, summed in float32. Called by models/kernels/native.py through ctypes.
 *
 * For few rows an expert: every weight is read from memory once, in order, and prefetched past the hardware's own
 * prefetcher, which starts anew on every page. The order of a sum depends on nothing but in_features. */

#include <stdint.h>

typedef uint16_t bfloat16;

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define OUTPUTS 4
#define AHEAD 8192 /* bytes; 2 KiB reads at four fifths of the speed, none at two thirds */

int kaon_grouped_linear_runs_here(void) {
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bf16");
}

static inline float widened(bfloat16 value) {
    union {
        uint32_t bits;
        float value;
    } as = {(uint32_t)value << 16};
    return as.value;
}

/* Four outputs of ROWS rows. */
#define BLOCK(ROWS)                                                                                          \
    TARGET static void block##ROWS(const bfloat16 *weight, const bfloat16 *bias, const bfloat16 *rows,       \
                                   bfloat16 *out, int64_t in_features, int64_t out_features) {               \
        __m512 sums[OUTPUTS][ROWS];                                                                          \
        for (int o = 0; o < OUTPUTS; o++)                                                                    \
            for (int r = 0; r < ROWS; r++) sums[o][r] = _mm512_setzero_ps();                                 \
        const char *ahead = (const char *)weight + AHEAD;                                                    \
        for (int64_t i = 0; i < in_features; i += 32) {                                                      \
            __m512bh x[ROWS];                                                                                \
            for (int r = 0; r < ROWS; r++) x[r] = (__m512bh)_mm512_loadu_si512(rows + r * in_features + i);  \
            for (int o = 0; o < OUTPUTS; o++, ahead += 64) {                                                 \
                _mm_prefetch(ahead, _MM_HINT_T0);                                                            \
                __m512bh w = (__m512bh)_mm512_loadu_si512(weight + o * in_features + i);                     \
                for (int r = 0; r < ROWS; r++) sums[o][r] = _mm512_dpbf16_ps(sums[o][r], w, x[r]);           \
            }                                                                                                \
        }                                                                                                    \
        for (int o = 0; o < OUTPUTS; o++)                                                                    \
            for (int r = 0; r < ROWS; r++) {                                                                 \
                float sum = _mm512_reduce_add_ps(sums[o][r]) + (bias ? widened(bias[o]) : 0.0f);             \
                __m128bh rounded = _mm_cvtneps_pbh(_mm_set_ss(sum));                                         \
                out[r * out_features + o] = (bfloat16)_mm_extract_epi16((__m128i)rounded, 0);                \
            }                                                                                                \
    }
BLOCK(1)
BLOCK(2)
BLOCK(3)
BLOCK(4)

/* counts[experts] rows an expert, one run after the other; in_features a multiple of 32, out_features of 4;
 * without a bias it is NULL. */
void kaon_grouped_linear(const bfloat16 *rows, const bfloat16 *weight, const bfloat16 *bias, bfloat16 *out,
                         const int64_t *counts, int64_t experts, int64_t in_features, int64_t out_features) {
    for (int64_t e = 0; e < experts; e++, weight += in_features * out_features) {
        int64_t count = counts[e];
        for (int64_t o = 0; count && o < out_features; o += OUTPUTS) {
            const bfloat16 *w = weight + o * in_features, *b = bias ? bias + o : 0, *x = rows;
            bfloat16 *y = out + o;
            int64_t left = count;
            for (; left >= 4; left -= 4, x += 4 * in_features, y += 4 * out_features)
                block4(w, b, x, y, in_features, out_features);
            if (left == 3) block3(w, b, x, y, in_features, out_features);
            if (left == 2) block2(w, b, x, y, in_features, out_features);
            if (left == 1) block1(w, b, x, y, in_features, out_features);
        }
        rows += count * in_features;
        out += count * out_features;
        bias = bias ? bias + out_features : 0;
    }
}
#else
int kaon_grouped_linear_runs_here(void) { return 0; }

void kaon_grouped_linear(const bfloat16 *rows, const bfloat16 *weight, const bfloat16 *bias, bfloat16 *out,
                         const int64_t *counts, int64_t experts, int64_t in_features, int64_t out_features) {
    (void)rows, (void)weight, (void)bias, (void)out;
    (void)counts, (void)experts, (void)in_features, (void)out_features;
}
#endif
