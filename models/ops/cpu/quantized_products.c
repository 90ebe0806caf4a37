/* See quantized.h. */

#include "quantized.h"
#include "vectors.h"

#define ROWS_OF_VECTORS(bits) ((bits) == 8 ? 2 : 7) /* up to here faster without AMX, for which 4 bits are unpacked */

CLONES static void unpack_blocks(const struct quantized_panel *panel, int8_t *values) {
    enum { HALF = BYTES_OF_VALUES / 2 };
    for (int64_t block = 0; block < panel->count; block++, values += BYTES_OF_VALUES) {
        const uint8_t *from =
            (const uint8_t *)panel->blocks + block * panel->stride + scales_of_block(4) * sizeof(bf16);
        for (int line = 0; line < HALF / LINE; line++)
            for (int i = 0; i < LINE; i++) {
                uint8_t both = from[line * LINE + i];
                values[2 * line * LINE + i] = (int8_t)((both & 15) - MIDDLE);
                values[(2 * line + 1) * LINE + i] = (int8_t)((both >> 4) - MIDDLE);
            }
    }
}

void unpack_values(const struct quantized_panel *panel, int8_t *values) {
    unpack_blocks(panel, values);
    __asm__ volatile("" ::: "memory"); /* gcc 12 assumes that loading a tile reads no memory. */
}

/* ---- any processor ---- */

typedef int8_t bytes __attribute__((vector_size(LANES)));
typedef int16_t shorts __attribute__((vector_size(LANES * 2)));

#define VECTORS (PANEL * FOUR / LANES) /* of a panel's sums by input of a four */

INLINE shorts load_bytes(const int8_t *from) {
    bytes v;
    memcpy(&v, from, sizeof v);
    return __builtin_convertvector(v, shorts);
}

/* Four values, repeated four times. */
INLINE shorts repeat(const int8_t *x) {
    int8_t four[LANES];
    for (int i = 0; i < LANES; i += FOUR) memcpy(four + i, x, FOUR);
    return load_bytes(four);
}

/* One step of one row. Two products of 8 bits fit 16. */
INLINE void add_step(const int8_t *x, const int8_t *tiles, integers sums[VECTORS]) {
    for (int four = 0; four < STEP_INPUTS / FOUR; four += 2) {
        shorts x0 = repeat(x + four * FOUR), x1 = repeat(x + (four + 1) * FOUR);
        for (int i = 0; i < VECTORS; i++) {
            const int8_t *w = tiles + i / FOUR * BYTES_OF_TILE + four * LINE + i % FOUR * LANES;
            sums[i] += __builtin_convertvector(load_bytes(w) * x0 + load_bytes(w + LINE) * x1, integers);
        }
    }
}

INLINE float output_of(const integers sums[VECTORS], int output) {
    const integers v = sums[output / FOUR];
    int lane = output % FOUR * FOUR;
    return (float)(v[lane] + v[lane + 1] + v[lane + 2] + v[lane + 3]);
}

CLONES static void add_row_portable(const int8_t *x, const float *scales, const struct quantized_panel *panel,
                                    float *sums) {
    for (int64_t block = 0; block < panel->count; block++, x += STEPS * BYTES_OF_TILE, scales += LANES) {
        const bf16 *weight_scales = (const bf16 *)(panel->blocks + block * panel->stride);
        const int8_t *tiles = panel->values + block * panel->values_stride;
        float found[PANEL] = {0};
        integers products[VECTORS] = {0};
        for (int step = 0; step < STEPS; step++, tiles += 2 * BYTES_OF_TILE) {
            add_step(x + step * BYTES_OF_TILE, tiles, products);
            if (panel->bits == 8 && step + 1 < STEPS) continue;
            for (int i = 0; i < PANEL; i++) found[i] += output_of(products, i) * widen(weight_scales[i]);
            memset(products, 0, sizeof products);
            weight_scales += PANEL;
        }
        for (int i = 0; i < PANEL; i++) sums[i] += found[i] * *scales;
    }
}

static void multiply_portable(const struct quantized_rows *rows, const struct quantized_panel *panel, float *sums,
                              int32_t *products, struct lines *ahead) {
    (void)products, (void)ahead;
    for (int64_t row = 0; row < rows->count; row++, sums += PANEL) {
        int64_t tile = row / LANES * rows->blocks, place = row % LANES;
        add_row_portable(rows->values + tile * STEPS * BYTES_OF_TILE + place * STEP_INPUTS,
                         rows->scales + tile * LANES + place, panel, sums);
    }
}

static const struct quantized_products portable = {.unpacks = 1, .multiply = multiply_portable};

const struct quantized_products *quantized_products(enum isa isa, int64_t rows, int64_t bits) {
#if HAS_X86
    if (isa == WITH_AMX && rows > ROWS_OF_VECTORS(bits)) return &quantized_amx;
    if (isa >= WITH_AVX512) return &quantized_avx512;
    if (isa == WITH_AVX_VNNI) return &quantized_avx_vnni;
    if (isa == WITH_AVX2) return &quantized_avx2;
#elif HAS_NEON
    if (isa >= WITH_NEON) return &quantized_neon;
#endif
    (void)isa, (void)rows, (void)bits;
    return &portable;
}
