/* Products with quantised weights on x86, see quantized.h. */

#include "quantized.h"
#include "vectors.h"

#if HAS_X86
#include <immintrin.h>

/* Some lines of what is multiplied next. */
static inline void fetch(struct lines *ahead) {
    if (ahead->is_near)
        for (int line = 0; line < ahead->lines; line++) _mm_prefetch(ahead->at + line * LINE, _MM_HINT_T0);
    else
        for (int line = 0; line < ahead->lines; line++) _mm_prefetch(ahead->at + line * LINE, _MM_HINT_T1);
    ahead->at += ahead->lines * LINE;
}

#define ROWS 4    /* at a time, in registers */
#define AT_ONCE 2 /* vectors of outputs */

/* ---- Vectors. A product of fours adds, to each 32-bit sum, four bytes of the weight, to which OFFSET was added, times
 * four bytes of a row. ---- */

AVX512 INLINE __m512i avx512_dot_fours(__m512i sum, __m512i weight, __m512i x) {
    return _mm512_dpbusd_epi32(sum, weight, x);
}
#define NAME(x) avx512_##x
#define TARGET AVX512
#define WIDTH 16
#define OFFSET 128
#include "quantized_kernel.h"

AVX_VNNI INLINE __m256i avx_vnni_dot_fours(__m256i sum, __m256i weight, __m256i x) {
    return _mm256_dpbusd_avx_epi32(sum, weight, x);
}
#define NAME(x) avx_vnni_##x
#define TARGET AVX_VNNI
#define WIDTH 8
#define OFFSET 128
#include "quantized_kernel.h"

/* Sums of two products are of 16 bits, which those of values without an offset fit: at most 2 * 127 * 127. */
AVX2 INLINE __m256i avx2_dot_fours(__m256i sum, __m256i weight, __m256i x) {
    __m256i twos = _mm256_maddubs_epi16(_mm256_abs_epi8(weight), _mm256_sign_epi8(x, weight));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(twos, _mm256_set1_epi16(1)));
}
#define NAME(x) avx2_##x
#define TARGET AVX2
#define WIDTH 8
#define OFFSET 0
#include "quantized_kernel.h"

const struct quantized_products quantized_avx512 = {0, avx512_multiply}, quantized_avx_vnni = {0, avx_vnni_multiply},
                                quantized_avx2 = {0, avx2_multiply};

AVX512 INLINE __m512 load_scales(const bf16 *scales) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)scales)), 16);
}

/* ---- AMX: a step's two tiles by one or two tiles of rows, in tiles 0 to 3 ---- */

AMX static inline void zero_tiles(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

AMX static inline void add_tiles(const int8_t *x0, const int8_t *x1, const int8_t *weight) {
    _tile_loadd(4, x0, LINE);
    _tile_loadd(6, weight, LINE);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, weight + BYTES_OF_TILE, LINE);
    _tile_dpbssd(1, 4, 7);
    if (!x1) return;
    _tile_loadd(5, x1, LINE);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
}

AMX static inline void store_tiles(int32_t *products, int two) {
    _tile_stored(0, products, PANEL * sizeof(int32_t));
    _tile_stored(1, products + LANES, PANEL * sizeof(int32_t));
    if (!two) return;
    _tile_stored(2, products + LANES * PANEL, PANEL * sizeof(int32_t));
    _tile_stored(3, products + LANES * PANEL + LANES, PANEL * sizeof(int32_t));
}

#define SCALED_AT_ONCE(bits) (BLOCKS_AT_ONCE * (bits) / 8) /* blocks, whose integers the first cache holds */

/* Integers of some blocks, by the scales, to the sums. */
AVX512 INLINE void scale_blocks(const int32_t *products, const char *weight, int64_t stride, int64_t blocks,
                                const float *scales, int64_t count, float *sums, int bits) {
    for (int half = 0; half < PANEL; half += LANES) {
        __m512 first[BLOCKS_AT_ONCE], second[BLOCKS_AT_ONCE];
        for (int64_t block = 0; block < blocks; block++) {
            const bf16 *weight_scales = (const bf16 *)(weight + block * stride) + half;
            first[block] = load_scales(weight_scales);
            if (bits == 4) second[block] = load_scales(weight_scales + PANEL);
        }
        for (int64_t row = 0; row < count; row++) {
            const int32_t *found = products + row * PANEL + half;
            __m512 sum = _mm512_loadu_ps(sums + row * PANEL + half);
            for (int64_t block = 0; block < blocks; block++, found += TWO_TILES * PANEL) {
                __m512 f = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(found)), first[block]);
                if (bits == 4) {
                    found += TWO_TILES * PANEL;
                    f = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(found)), second[block], f);
                }
                sum = _mm512_fmadd_ps(f, _mm512_set1_ps(scales[block * LANES + row]), sum);
            }
            _mm512_storeu_ps(sums + row * PANEL + half, sum);
        }
    }
}

/* The integers of `blocks` of a panel, one after the other, or with 4 bits of their steps. */
AMX static const int8_t *multiply_blocks(const int8_t *x0, const int8_t *x1, const struct quantized_panel *panel,
                                         int64_t first, int64_t blocks, int32_t *products, struct lines *ahead) {
    const int8_t *values = panel->values + first * panel->values_stride;
    for (int64_t block = 0; block < blocks; block++, values += panel->values_stride) {
        fetch(ahead);
        zero_tiles();
        for (int step = 0; step < STEPS; step++) {
            add_tiles(x0, x1, values + step * 2 * BYTES_OF_TILE);
            x0 += BYTES_OF_TILE;
            if (x1) x1 += BYTES_OF_TILE;
            if (panel->bits == 8 && step + 1 < STEPS) continue;
            store_tiles(products, x1 != NULL);
            products += TWO_TILES * PANEL;
            if (step + 1 < STEPS) zero_tiles();
        }
    }
    return x0;
}

AVX512 static void scale_blocks8(const int32_t *products, const char *weight, int64_t blocks, const float *scales,
                                 int64_t count, float *sums) {
    scale_blocks(products, weight, bytes_of_block(8), blocks, scales, count, sums, 8);
}

AVX512 static void scale_blocks4(const int32_t *products, const char *weight, int64_t blocks, const float *scales,
                                 int64_t count, float *sums) {
    scale_blocks(products, weight, bytes_of_block(4), blocks, scales, count, sums, 4);
}

static void multiply_amx(const struct quantized_rows *rows, const struct quantized_panel *panel, float *sums,
                         int32_t *products, struct lines *ahead) {
    int64_t all = rows->blocks, above = min64(LANES, rows->count), below = rows->count - above;
    int64_t at_once = SCALED_AT_ONCE(panel->bits);
    const int8_t *x = rows->values;
    for (int64_t first = 0; first < panel->count; first += at_once) {
        int64_t blocks = min64(at_once, panel->count - first);
        const char *weight = panel->blocks + first * panel->stride;
        const float *scales = rows->scales + first * LANES;
        const int8_t *x_below = below ? x + all * STEPS * BYTES_OF_TILE : NULL;
        x = multiply_blocks(x, x_below, panel, first, blocks, products, ahead);
        void (*const scale)(const int32_t *, const char *, int64_t, const float *, int64_t, float *) =
            panel->bits == 8 ? scale_blocks8 : scale_blocks4;
        scale(products, weight, blocks, scales, above, sums);
        scale(products + LANES * PANEL, weight, blocks, scales + all * LANES, below, sums + LANES * PANEL);
    }
}

const struct quantized_products quantized_amx = {1, multiply_amx};
#endif
