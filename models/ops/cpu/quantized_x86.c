/* Products with quantised weights on x86, see quantized.h. */

#include "quantized.h"
#include "vectors.h"

#if HAS_X86
#include <immintrin.h>

#define AT_ONCE 2 /* vectors of outputs */

/* ---- Vectors. A product of fours adds to each 32-bit sum four bytes of the weight times four bytes of a row. ---- */

AVX512 INLINE __m512i avx512_dot_fours(__m512i sum, __m512i weight, __m512i x) {
    return _mm512_dpbusd_epi32(sum, weight, x);
}
#define NAME(x) avx512_##x
#define TARGET AVX512
#define WIDTH 16
#define ROWS 8
#define UNSIGNED 1
#include "quantized_kernel.h"

AVX_VNNI INLINE __m256i avx_vnni_dot_fours(__m256i sum, __m256i weight, __m256i x) {
    return _mm256_dpbusd_avx_epi32(sum, weight, x);
}
#define NAME(x) avx_vnni_##x
#define TARGET AVX_VNNI
#define WIDTH 8
#define ROWS 4
#define UNSIGNED 1
#include "quantized_kernel.h"

const struct quantized_products quantized_avx512 = {.multiply = avx512_multiply};
const struct quantized_products quantized_avx_vnni = {.multiply = avx_vnni_multiply};

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

/* Rows are read past the L1 cache, which keeps the weight. With one tile of rows, which may have fewer than 16, the
 * weight is in tile 7, which always has 16. */
AMX static inline void add_tiles(const int8_t *x0, const int8_t *x1, const int8_t *weight) {
    _tile_stream_loadd(4, x0, LINE);
    if (!x1) {
        _tile_loadd(7, weight, LINE);
        _tile_dpbssd(0, 4, 7);
        _tile_loadd(7, weight + BYTES_OF_TILE, LINE);
        _tile_dpbssd(1, 4, 7);
        return;
    }
    _tile_loadd(6, weight, LINE);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, weight + BYTES_OF_TILE, LINE);
    _tile_dpbssd(1, 4, 7);
    _tile_stream_loadd(5, x1, LINE);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
}

/* In order, so that the lines of a tile are adjacent. */
AMX static inline void store_tiles(int32_t *products, int two) {
    _tile_stored(0, products, LINE);
    _tile_stored(1, products + LANES * LANES, LINE);
    if (!two) return;
    _tile_stored(2, products + 2 * LANES * LANES, LINE);
    _tile_stored(3, products + 3 * LANES * LANES, LINE);
}

#define UNITS 2 /* scaled while the next ones are multiplied; a unit is a block, or with 4 bits a step of a block */

/* Integer products of some rows and some blocks of a weight, which are not yet scaled and added to the sums. */
struct waiting {
    const int32_t *products; /* [UNITS][tile of rows][half of the outputs][16][16] */
    const char *weight;
    int64_t stride, blocks;
    const float *scales[2]; /* of each tile of rows */
    int64_t rows[2];
    float *sums;
};

/* Scale and add half of the outputs of one tile of rows. */
AMX INLINE void scale_half(const struct waiting *waiting, int tile, int half, int bits) {
    const bf16 *first = (const bf16 *)waiting->weight + half * LANES, *second = first + PANEL;
    int has_second = bits == 4 || waiting->blocks > 1;
    if (bits == 8) second = (const bf16 *)(waiting->weight + waiting->stride) + half * LANES;
    __m512 by = load_scales(first), by_second = load_scales(has_second ? second : first);
    const int32_t *found = waiting->products + (tile * 2 + half) * LANES * LANES;
    float *sums = waiting->sums + tile * LANES * PANEL + half * LANES;
    const float *scales = waiting->scales[tile];
    for (int64_t row = 0; row < waiting->rows[tile]; row++, found += LANES, sums += PANEL) {
        __m512 sum = _mm512_loadu_ps(sums);
        __m512 f = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(found)), by);
        if (bits == 4)
            f = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(found + TWO_TILES * PANEL)), by_second, f);
        sum = _mm512_fmadd_ps(f, _mm512_set1_ps(scales[row]), sum);
        if (bits == 8 && has_second) {
            f = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(found + TWO_TILES * PANEL)), by_second);
            sum = _mm512_fmadd_ps(f, _mm512_set1_ps(scales[LANES + row]), sum);
        }
        _mm512_storeu_ps(sums, sum);
    }
}

/* Scale and add part `part` of `of` equal parts. */
AMX INLINE void scale_part(const struct waiting *waiting, int part, int of, int bits) {
    for (int i = part * 4 / of; i < (part + 1) * 4 / of; i++) scale_half(waiting, i / 2, i % 2, bits);
}

/* Multiply some blocks; after each step, scale a part of the pending products. */
AMX INLINE void multiply_blocks(const int8_t *x0, const int8_t *x1, const struct quantized_panel *panel, int64_t first,
                                int64_t blocks, int32_t *products, const struct waiting *waiting, struct lines *ahead,
                                int bits) {
    const int8_t *values = panel->values + first * panel->values_stride;
    int part = 0, all = (int)blocks * STEPS;
    for (int64_t block = 0; block < blocks; block++, values += panel->values_stride) {
        for (int step = 0; step < STEPS; step++) {
            fetch(ahead, step, STEPS);
            if (bits == 4 || step == 0) zero_tiles();
            add_tiles(x0, x1, values + step * 2 * BYTES_OF_TILE);
            x0 += BYTES_OF_TILE;
            if (x1) x1 += BYTES_OF_TILE;
            if (waiting->blocks) scale_part(waiting, part, all, bits);
            part++;
            if (bits == 8 && step + 1 < STEPS) continue;
            store_tiles(products, x1 != NULL);
            products += TWO_TILES * PANEL;
        }
    }
}

/* Multiply by all rows, two tiles at a time. Pending products are also scaled between the products of the next rows. */
AMX INLINE void multiply_by_bits(const struct quantized_rows *rows, const struct quantized_panel *panel, float *sums,
                                 int32_t *products, struct lines *ahead, int bits) {
    int64_t all = rows->blocks, at_once = bits == 8 ? UNITS : 1, units = 0;
    struct waiting waiting = {.stride = panel->stride};
    for (int64_t row = 0; row < rows->count; row += TWO_TILES) {
        int64_t above = min64(LANES, rows->count - row), below = min64(LANES, rows->count - row - above);
        for (int64_t first = 0; first < panel->count; first += at_once, units++) {
            int64_t blocks = min64(at_once, panel->count - first), tile = row / LANES * all + first;
            const int8_t *x = rows->values + tile * STEPS * BYTES_OF_TILE;
            const int8_t *x_below = below ? x + all * STEPS * BYTES_OF_TILE : NULL;
            int32_t *made = products + units % 2 * UNITS * TWO_TILES * PANEL;
            multiply_blocks(x, x_below, panel, first, blocks, made, &waiting, ahead, bits);
            waiting.products = made, waiting.blocks = blocks;
            waiting.weight = panel->blocks + first * panel->stride;
            waiting.scales[0] = rows->scales + tile * LANES, waiting.scales[1] = waiting.scales[0] + all * LANES;
            waiting.rows[0] = above, waiting.rows[1] = below, waiting.sums = sums + row * PANEL;
        }
    }
    scale_part(&waiting, 0, 1, bits);
}

AMX static void multiply_amx8(const struct quantized_rows *rows, const struct quantized_panel *panel, float *sums,
                              int32_t *products, struct lines *ahead) {
    multiply_by_bits(rows, panel, sums, products, ahead, 8);
}

AMX static void multiply_amx4(const struct quantized_rows *rows, const struct quantized_panel *panel, float *sums,
                              int32_t *products, struct lines *ahead) {
    multiply_by_bits(rows, panel, sums, products, ahead, 4);
}

static void multiply_amx(const struct quantized_rows *rows, const struct quantized_panel *panel, float *sums,
                         int32_t *products, struct lines *ahead) {
    (panel->bits == 8 ? multiply_amx8 : multiply_amx4)(rows, panel, sums, products, ahead);
}

const struct quantized_products quantized_amx = {.unpacks = 1, .multiply = multiply_amx};
#endif
