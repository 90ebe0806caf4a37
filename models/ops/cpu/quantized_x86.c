/* Products with quantised weights on x86, see quantized.h. */

#include "quantized.h"
#include "vectors.h"

#if HAS_X86
#include <immintrin.h>

#define VECTOR_ROWS 4 /* at a time, in registers */

/* ---- AVX-512 with products of fours of bytes ---- */

AVX512 static inline void fetch(struct lines *ahead) {
    if (ahead->is_near)
        for (int line = 0; line < ahead->lines; line++) _mm_prefetch(ahead->at + line * LINE, _MM_HINT_T0);
    else
        for (int line = 0; line < ahead->lines; line++) _mm_prefetch(ahead->at + line * LINE, _MM_HINT_T1);
    ahead->at += ahead->lines * LINE;
}

AVX512 static inline __m512 load_scales(const bf16 *scales) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)scales)), 16);
}

/* A step of some rows by 8 bits. The instruction wants values of the weight that are not negative: 128 is added. */
AVX512 INLINE void add_step8(const int8_t *x, const char *tiles, __m512i i0[], __m512i i1[], int rows) {
    const __m512i sign = _mm512_set1_epi8(-128);
    for (int four = 0; four < STEP_INPUTS / FOUR; four++) {
        const char *v = tiles + four * LINE;
        __m512i v0 = _mm512_xor_si512(_mm512_loadu_si512(v), sign);
        __m512i v1 = _mm512_xor_si512(_mm512_loadu_si512(v + BYTES_OF_TILE), sign);
        for (int r = 0; r < rows; r++) {
            int xs;
            memcpy(&xs, x + r * STEP_INPUTS + four * FOUR, sizeof xs);
            i0[r] = _mm512_dpbusd_epi32(i0[r], v0, _mm512_set1_epi32(xs));
            i1[r] = _mm512_dpbusd_epi32(i1[r], v1, _mm512_set1_epi32(xs));
        }
    }
}

/* And by 4 bits, to which 8 was added when they were packed. */
AVX512 INLINE void add_step4(const int8_t *x, const char *tiles, __m512i i0[], __m512i i1[], int rows) {
    const __m512i low = _mm512_set1_epi8(15);
    for (int four = 0; four < STEP_INPUTS / FOUR; four += 2) {
        const char *both = tiles + four / 2 * LINE;
        __m512i b0 = _mm512_loadu_si512(both), b1 = _mm512_loadu_si512(both + BYTES_OF_TILE / 2);
        __m512i v0 = _mm512_and_si512(b0, low), next0 = _mm512_and_si512(_mm512_srli_epi16(b0, 4), low);
        __m512i v1 = _mm512_and_si512(b1, low), next1 = _mm512_and_si512(_mm512_srli_epi16(b1, 4), low);
        for (int r = 0; r < rows; r++) {
            int xs[2];
            memcpy(xs, x + r * STEP_INPUTS + four * FOUR, sizeof xs);
            i0[r] = _mm512_dpbusd_epi32(i0[r], v0, _mm512_set1_epi32(xs[0]));
            i1[r] = _mm512_dpbusd_epi32(i1[r], v1, _mm512_set1_epi32(xs[0]));
            i0[r] = _mm512_dpbusd_epi32(i0[r], next0, _mm512_set1_epi32(xs[1]));
            i1[r] = _mm512_dpbusd_epi32(i1[r], next1, _mm512_set1_epi32(xs[1]));
        }
    }
}

/* Rows, so few that their sums stay in registers. Sums of integers begin with what was added to the weight. */
AVX512 INLINE void add_rows(const int8_t *x, const float *scales, const int32_t *totals,
                          const struct quantized_panel *panel, float *sums, struct lines *ahead, int rows, int bits) {
    __m512 s0[VECTOR_ROWS], s1[VECTOR_ROWS], f0[VECTOR_ROWS], f1[VECTOR_ROWS];
    __m512i i0[VECTOR_ROWS], i1[VECTOR_ROWS];
    for (int r = 0; r < rows; r++) {
        s0[r] = _mm512_loadu_ps(sums + r * PANEL);
        s1[r] = _mm512_loadu_ps(sums + r * PANEL + LANES);
    }
    const char *at = panel->blocks;
    for (int64_t block = 0; block < panel->count; block++, at += panel->stride) {
        const bf16 *weight_scales = (const bf16 *)at;
        const char *tiles = at + scales_of_block(bits) * sizeof(bf16);
        if (ahead) fetch(ahead);
        for (int step = 0; step < STEPS; step++, x += BYTES_OF_TILE, totals += LANES) {
            for (int r = 0; r < rows && (bits == 4 || step == 0); r++)
                i0[r] = i1[r] =
                    _mm512_set1_epi32(bits == 4 ? -MIDDLE * totals[r] : -128 * (totals[r] + totals[LANES + r]));
            if (bits == 8) add_step8(x, tiles + step * 2 * BYTES_OF_TILE, i0, i1, rows);
            else add_step4(x, tiles + step * BYTES_OF_TILE, i0, i1, rows);
            if (bits == 8 && step + 1 < STEPS) continue;
            __m512 w0 = load_scales(weight_scales), w1 = load_scales(weight_scales + LANES);
            weight_scales += PANEL;
            for (int r = 0; r < rows; r++) {
                __m512 c0 = _mm512_cvtepi32_ps(i0[r]), c1 = _mm512_cvtepi32_ps(i1[r]);
                int is_second = bits == 4 && step > 0;
                f0[r] = is_second ? _mm512_fmadd_ps(c0, w0, f0[r]) : _mm512_mul_ps(c0, w0);
                f1[r] = is_second ? _mm512_fmadd_ps(c1, w1, f1[r]) : _mm512_mul_ps(c1, w1);
            }
        }
        for (int r = 0; r < rows; r++) {
            __m512 scale = _mm512_set1_ps(scales[r]);
            s0[r] = _mm512_fmadd_ps(f0[r], scale, s0[r]);
            s1[r] = _mm512_fmadd_ps(f1[r], scale, s1[r]);
        }
        scales += LANES;
    }
    for (int r = 0; r < rows; r++) {
        _mm512_storeu_ps(sums + r * PANEL, s0[r]);
        _mm512_storeu_ps(sums + r * PANEL + LANES, s1[r]);
    }
}

/* A function for each number of rows. */
#define ADD_ROWS(BITS, ROWS)                                                                                      \
    AVX512 static void add_rows##BITS##_##ROWS(const int8_t *x, const float *scales, const int32_t *totals,         \
                                             const struct quantized_panel *panel, float *sums, struct lines *ahead) { \
        add_rows(x, scales, totals, panel, sums, ahead, ROWS, BITS);                                              \
    }
ADD_ROWS(8, 1)
ADD_ROWS(8, 2)
ADD_ROWS(8, 3)
ADD_ROWS(8, 4)
ADD_ROWS(4, 1)
ADD_ROWS(4, 2)
ADD_ROWS(4, 3)
ADD_ROWS(4, 4)

typedef void rows_adder(const int8_t *x, const float *scales, const int32_t *totals,
                        const struct quantized_panel *panel, float *sums, struct lines *ahead);

static void multiply_vnni(const struct quantized_rows *rows, const struct quantized_panel *panel, float *sums,
                          int32_t *products, struct lines *ahead) {
    static rows_adder *const adders[2][VECTOR_ROWS] = {{add_rows8_1, add_rows8_2, add_rows8_3, add_rows8_4},
                                                       {add_rows4_1, add_rows4_2, add_rows4_3, add_rows4_4}};
    (void)products;
    for (int64_t row = 0; row < rows->count; row += VECTOR_ROWS) {
        int64_t tile = row / LANES * rows->blocks, place = row % LANES, count = min64(VECTOR_ROWS, rows->count - row);
        adders[panel->bits == 4][count - 1](rows->values + tile * STEPS * BYTES_OF_TILE + place * STEP_INPUTS,
                                            rows->scales + tile * LANES + place,
                                            rows->totals + tile * STEPS * LANES + place, panel, sums + row * PANEL,
                                            row == 0 ? ahead : NULL);
    }
}

const struct quantized_products quantized_vnni = {0, multiply_vnni};

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
