/* Products with quantised weights by AVX2, see quantized.h: sums of two products of bytes have 16 bits.
 *
 * At 4 bits the sums of a whole step fit 16 bits, as values without MIDDLE are -8 to 7: half of each four's inputs, 32 of
 * them, add up to at most 32 * 8 * 127, less than 2^15. Sums with MIDDLE wrap around, and begin with the offset of their
 * half, so that they end within that range. So a step takes 16 products, 16 additions, and one operation to widen the sum.
 * Loops are unrolled only as far as registers are reused, since code that leaves the cache of decoded instructions runs at
 * half the speed.
 *
 * Additions and conversions run on the units that multiply, too: a product and an addition take 0.6 cycles on Zen 3
 * instead of 0.5. So many rows are multiplied by bytes that 4 bits were expanded to once for all of them. */

#include "quantized.h"
#include "vectors.h"

#if HAS_X86

#define ROWS 4
#define MOST_VECTORS 4 /* of 8 outputs */
#define PART 8         /* fours of inputs, for which loops are unrolled */
#define PARTS (STEP_INPUTS / FOUR / PART) /* of a step */

AVX2 INLINE __m256i four_of(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm256_set1_epi32(four);
}

/* ---- rows ---- */

AVX2 INLINE __m256 widened(const bf16 *x) {
    return (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)x)), 16);
}

AVX2 INLINE __m128i folded(__m128i a, __m128i b, int is_sum) {
    return is_sum ? _mm_add_epi32(a, b) : _mm_max_epi32(a, b);
}

/* The sum or the largest of eight. */
AVX2 INLINE int32_t of_eight(__m256i v, int is_sum) {
    __m128i four = folded(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1), is_sum);
    four = folded(four, _mm_shuffle_epi32(four, 0x4e), is_sum);
    return _mm_cvtsi128_si32(folded(four, _mm_shuffle_epi32(four, 0xb1), is_sum));
}

/* The offsets of both halves of fours, in 16 bits each; `total`: of the inputs of two fours. */
AVX2 INLINE int32_t halves_offset(__m256i total) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1));
    return (-MIDDLE * _mm_cvtsi128_si32(four) & 0xffff) | (int32_t)((uint32_t)(-MIDDLE * _mm_extract_epi32(four, 2)) << 16);
}

AVX2 INLINE float stage_block(int8_t *to, int32_t *offsets, const bf16 *x, int64_t count, int64_t weight_bits,
                              int in_halves) {
    static const bf16 nothing[BLOCK];
    bf16 padded[BLOCK];
    if (count < BLOCK) {
        memset(padded, 0, sizeof padded);
        memcpy(padded, x, count * sizeof(bf16));
        x = padded;
    }
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i largest = _mm256_setzero_si256();
    for (int i = 0; i < BLOCK; i += 8)
        largest = _mm256_max_epi32(largest, _mm256_and_si256((__m256i)widened(x + i), magnitude));
    struct block_scale scale = scale_of_block((uint32_t)of_eight(largest, 0));
    if (scale.inverse == 0) x = nothing;
    const __m256 inverse = _mm256_set1_ps(scale.inverse), shift = _mm256_set1_ps(12582912.0f);
    const __m256i in_order_of_memory = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    int32_t totals[STEPS];
    for (int step = 0; step < STEPS; step++) {
        __m256i total = _mm256_setzero_si256();
        for (int i = 0; i < STEP_INPUTS; i += 32) {
            __m256i whole[4];
            for (int j = 0; j < 4; j++) {
                __m256 shifted = _mm256_fmadd_ps(widened(x + step * STEP_INPUTS + i + j * 8), inverse, shift);
                whole[j] = _mm256_sub_epi32((__m256i)shifted, _mm256_set1_epi32(0x4b400000)); /* The sum rounds. */
                total = _mm256_add_epi32(total, whole[j]);
            }
            __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]),
                                               _mm256_packs_epi32(whole[2], whole[3]));
            _mm256_storeu_si256((void *)(to + step * BYTES_OF_TILE + i),
                                _mm256_permutevar8x32_epi32(bytes, in_order_of_memory));
        }
        if (in_halves) offsets[step * LANES] = halves_offset(total);
        else totals[step] = of_eight(total, 1);
    }
    if (!in_halves) set_offsets(offsets, totals, weight_bits);
    return scale.of_values;
}

AVX2 void avx2_stage_blocks(int8_t *to, float *scales, int32_t *offsets, const bf16 *x, int64_t inputs,
                            int64_t weight_bits, int in_halves) {
    for (int64_t i = 0; i < inputs; i += BLOCK, to += STEPS * BYTES_OF_TILE, scales += LANES, offsets += STEPS * LANES)
        *scales = stage_block(to, offsets, x + i, min64(BLOCK, inputs - i), weight_bits, in_halves);
}

/* ---- products ---- */

/* Bytes from the first vector of outputs of a tile's line to another, `v`, which may be in the second tile. */
INLINE int64_t place_of(int v, int bits) { return v / 2 * (BYTES_OF_TILE * bits / 8) + v % 2 * (LINE / 2); }

/* Eight fours of rows by 4 bits. */
AVX2 INLINE void add_part4(const int8_t *x, const char *tiles, __m256i s[ROWS][MOST_VECTORS], int rows, int vectors) {
    const __m256i nibbles = _mm256_set1_epi8(15);
#pragma GCC unroll 4
    for (int line = 0; line < PART / 2; line++) {
        __m256i low[MOST_VECTORS], high[MOST_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            __m256i both = load_32_bytes(tiles + place_of(v, 4) + line * LINE);
            low[v] = _mm256_and_si256(both, nibbles), high[v] = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibbles);
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const int8_t *fours = x + r * STEP_INPUTS + line * 2 * FOUR;
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                s[r][v] = in_order(_mm256_add_epi16(s[r][v], _mm256_maddubs_epi16(low[v], four_of(fours))));
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                s[r][v] = in_order(_mm256_add_epi16(s[r][v], _mm256_maddubs_epi16(high[v], four_of(fours + FOUR))));
        }
    }
}

/* The same by 8 bits: two products of at most 127 * 127 fit 16 bits, no more. A weight's sign moves to the row. */
AVX2 INLINE void add_part8(const int8_t *x, const char *tiles, __m256i i[ROWS][MOST_VECTORS], int rows, int vectors) {
    const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
    for (int line = 0; line < PART; line++) {
        __m256i weight[MOST_VECTORS], size[MOST_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            weight[v] = load_32_bytes(tiles + place_of(v, 8) + line * LINE);
            size[v] = _mm256_abs_epi8(weight[v]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            __m256i four = four_of(x + r * STEP_INPUTS + line * FOUR);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) {
                __m256i twos = _mm256_maddubs_epi16(size[v], _mm256_sign_epi8(four, weight[v]));
                i[r][v] = in_order(_mm256_add_epi32(i[r][v], _mm256_madd_epi16(twos, ones)));
            }
        }
    }
}

/* Rows times some vectors of a panel's outputs, from `first` on; all counts are constants. */
AVX2 SPECIALIZED void add_vectors(const struct quantized_rows *rows_of, int64_t row, const struct quantized_panel *panel,
                                  float *sums, struct lines *ahead, int first, int rows, int vectors, int bits) {
    int64_t tile = row / LANES * rows_of->blocks, place = row % LANES;
    const int8_t *x = rows_of->values + tile * STEPS * BYTES_OF_TILE + place * STEP_INPUTS;
    const float *scales = rows_of->scales + tile * LANES + place;
    const int32_t *offsets = rows_of->offsets + tile * STEPS * LANES + place;
    const char *at = panel->blocks;
    const __m256i ones = _mm256_set1_epi16(1);
    sums += row * PANEL + first * 8;
    for (int64_t block = 0; block < panel->count; block++, at += panel->stride, scales += LANES) {
        const bf16 *weight_scales = (const bf16 *)at + first * 8;
        const char *tiles = at + scales_of_block(bits) * sizeof(bf16) + place_of(first, bits);
        __m256i i[ROWS][MOST_VECTORS];
        __m256 f[ROWS][MOST_VECTORS] = {0};
        for (int step = 0; step < STEPS; step++, x += BYTES_OF_TILE, offsets += LANES) {
            for (int r = 0; r < rows && (bits == 4 || step == 0); r++)
                for (int v = 0; v < vectors; v++) i[r][v] = _mm256_set1_epi32(bits == 4 ? offsets[r] : 0);
            for (int part = 0; part < PARTS; part++, tiles += PART * LINE * bits / 8) {
                const int8_t *of_part = x + part * PART * FOUR;
                if (ahead) fetch(ahead, step * PARTS + part, STEPS * PARTS);
                if (bits == 4) add_part4(of_part, tiles, i, rows, vectors);
                else add_part8(of_part, tiles, i, rows, vectors);
            }
            tiles += BYTES_OF_TILE * bits / 8;
            if (bits == 8 && step + 1 < STEPS) continue;
            for (int v = 0; v < vectors; v++) {
                __m256 by = widened(weight_scales + v * 8);
                for (int r = 0; r < rows && bits == 4; r++) i[r][v] = _mm256_madd_epi16(i[r][v], ones);
                for (int r = 0; r < rows; r++)
                    f[r][v] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(i[r][v]), by, f[r][v]);
            }
            weight_scales += PANEL;
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) {
                float *sum = sums + r * PANEL + v * 8;
                _mm256_storeu_ps(sum, _mm256_fmadd_ps(f[r][v], _mm256_set1_ps(scales[r]), _mm256_loadu_ps(sum)));
            }
    }
}

typedef void rows_adder(const struct quantized_rows *rows, int64_t row, const struct quantized_panel *panel, float *sums,
                        struct lines *ahead);

/* A function for each number of rows. The first outputs prefetch the next part. */
#define ADD_ROWS(BITS, COUNT)                                                                                          \
    AVX2 static void add_rows##BITS##_##COUNT(const struct quantized_rows *rows, int64_t row,                          \
                                              const struct quantized_panel *panel, float *sums, struct lines *ahead) { \
        enum { VECTORS = (COUNT) > 2 ? 2 : 4 };                                                                        \
        add_vectors(rows, row, panel, sums, ahead, 0, COUNT, VECTORS, BITS);                                           \
        if (VECTORS == 2) add_vectors(rows, row, panel, sums, NULL, 2, COUNT, VECTORS, BITS);                          \
    }
#define ADD_ROWS8(COUNT) ADD_ROWS(8, COUNT)
#define ADD_ROWS4(COUNT) ADD_ROWS(4, COUNT)
UP_TO(ROWS, ADD_ROWS8)
UP_TO(ROWS, ADD_ROWS4)
#define ADDER8(COUNT) add_rows8_##COUNT,
#define ADDER4(COUNT) add_rows4_##COUNT,

static void multiply_avx2(const struct quantized_rows *rows, const struct quantized_panel *panel, float *sums,
                          int32_t *products, struct lines *ahead) {
    static rows_adder *const adders[2][ROWS] = {{UP_TO(ROWS, ADDER8)}, {UP_TO(ROWS, ADDER4)}};
    (void)products;
    for (int64_t row = 0; row < rows->count; row += ROWS)
        adders[panel->bits == 4][min64(ROWS, rows->count - row) - 1](rows, row, panel, sums,
                                                                     row % TWO_TILES == 0 ? ahead : NULL);
}

/* ---- many rows by 4 bits: a panel is expanded once for all of them ----
 *
 * Expanded, a tile's block is [32 fours][16 outputs][4] bytes. */

#define TILE_OF_BLOCK (BYTES_OF_TILE * STEPS) /* bytes */

AVX2 static void expand(const struct quantized_panel *panel, int8_t *to) {
    const __m256i nibbles = _mm256_set1_epi8(15);
    for (int64_t block = 0; block < panel->count; block++) {
        const char *values = panel->blocks + block * panel->stride + scales_of_block(4) * sizeof(bf16);
        for (int tile = 0; tile < 2; tile++)
            for (int step = 0; step < STEPS; step++) {
                const char *from = values + (step * 2 + tile) * (BYTES_OF_TILE / 2);
                for (int byte = 0; byte < BYTES_OF_TILE / 2; byte += LINE, to += 2 * LINE)
                    for (int half = 0; half < LINE; half += LINE / 2) {
                        __m256i both = load_32_bytes(from + byte + half);
                        __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibbles);
                        _mm256_storeu_si256((void *)(to + half), _mm256_and_si256(both, nibbles));
                        _mm256_storeu_si256((void *)(to + LINE + half), high);
                    }
            }
    }
}

/* Rows times a tile of an expanded panel. */
AVX2 SPECIALIZED void add_tile(const struct quantized_rows *rows_of, int64_t row, const struct quantized_panel *panel,
                               float *sums, struct lines *ahead, int tile, int rows) {
    enum { OF_TILE = 2 };
    int64_t of_rows = row / LANES * rows_of->blocks, place = row % LANES;
    const int8_t *x = rows_of->values + of_rows * STEPS * BYTES_OF_TILE + place * STEP_INPUTS;
    const float *scales = rows_of->scales + of_rows * LANES + place;
    const int32_t *offsets = rows_of->offsets + of_rows * STEPS * LANES + place;
    const int8_t *line = panel->values + tile * TILE_OF_BLOCK;
    const char *at = panel->blocks;
    const __m256i ones = _mm256_set1_epi16(1);
    sums += row * PANEL + tile * LANES;
    for (int64_t block = 0; block < panel->count; block++, at += panel->stride, scales += LANES, line += TILE_OF_BLOCK) {
        const bf16 *weight_scales = (const bf16 *)at + tile * LANES;
        __m256 f[ROWS][OF_TILE];
        for (int step = 0; step < STEPS; step++, x += BYTES_OF_TILE, offsets += LANES, weight_scales += PANEL) {
            __m256i s[ROWS][OF_TILE];
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < OF_TILE; v++) s[r][v] = _mm256_set1_epi32(offsets[r]);
            for (int part = 0; part < PARTS; part++, line += PART * LINE) {
                if (ahead) fetch(ahead, step * PARTS + part, STEPS * PARTS);
#pragma GCC unroll 8
                for (int l = 0; l < PART; l++) {
                    __m256i weight[OF_TILE] = {load_32_bytes(line + l * LINE), load_32_bytes(line + l * LINE + LINE / 2)};
#pragma GCC unroll 4
                    for (int r = 0; r < rows; r++) {
                        __m256i four = four_of(x + r * STEP_INPUTS + (part * PART + l) * FOUR);
#pragma GCC unroll 2
                        for (int v = 0; v < OF_TILE; v++)
                            s[r][v] = in_order(_mm256_add_epi16(s[r][v], _mm256_maddubs_epi16(weight[v], four)));
                    }
                }
            }
            for (int v = 0; v < OF_TILE; v++) {
                __m256 by = widened(weight_scales + v * 8);
                for (int r = 0; r < rows; r++) {
                    __m256 found = _mm256_cvtepi32_ps(_mm256_madd_epi16(s[r][v], ones));
                    f[r][v] = step ? _mm256_fmadd_ps(found, by, f[r][v]) : _mm256_mul_ps(found, by);
                }
            }
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < OF_TILE; v++) {
                float *sum = sums + r * PANEL + v * 8;
                _mm256_storeu_ps(sum, _mm256_fmadd_ps(f[r][v], _mm256_set1_ps(scales[r]), _mm256_loadu_ps(sum)));
            }
    }
}

#define ADD_EXPANDED(COUNT)                                                                                         \
    AVX2 static void add_expanded_##COUNT(const struct quantized_rows *rows, int64_t row,                           \
                                          const struct quantized_panel *panel, float *sums, struct lines *ahead) { \
        add_tile(rows, row, panel, sums, ahead, 0, COUNT);                                                          \
        add_tile(rows, row, panel, sums, NULL, 1, COUNT);                                                           \
    }
UP_TO(ROWS, ADD_EXPANDED)
#define EXPANDED_ADDER(COUNT) add_expanded_##COUNT,

static void multiply_expanded(const struct quantized_rows *rows, const struct quantized_panel *panel, float *sums,
                              struct lines *ahead) {
    static rows_adder *const adders[ROWS] = {UP_TO(ROWS, EXPANDED_ADDER)};
    for (int64_t row = 0; row < rows->count; row += ROWS)
        adders[min64(ROWS, rows->count - row) - 1](rows, row, panel, sums, row % TWO_TILES == 0 ? ahead : NULL);
}

const struct quantized_products quantized_avx2 = {
    .multiply = multiply_avx2, .expand = expand, .multiply_expanded = multiply_expanded};

#endif
