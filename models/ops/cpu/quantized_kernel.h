/* Products with weights of 8 or 4 bits in vectors of WIDTH 32-bit numbers. Included once for each instruction set, with
 *
 *   NAME(x)   the names of this set's functions
 *   TARGET    the attribute by which they are compiled
 *   WIDTH     32-bit numbers of a vector
 *   ROWS      rows at a time, 4 or 8
 *   UNSIGNED  whether the includer's `dot_fours` reads weights as unsigned; MIDDLE_OF_8 is then added to weights of 8
 *             bits first */

typedef float NAME(floats) __attribute__((vector_size(WIDTH * 4)));
typedef int32_t NAME(ints) __attribute__((vector_size(WIDTH * 4)));
typedef long long NAME(any) __attribute__((vector_size(WIDTH * 4))); /* as the intrinsics return it */
typedef uint16_t NAME(shorts) __attribute__((vector_size(WIDTH * 2)));

TARGET INLINE NAME(floats) NAME(load_scales)(const bf16 *scales) {
    NAME(shorts) halves;
    memcpy(&halves, scales, sizeof halves);
    return (NAME(floats))(__builtin_convertvector(halves, NAME(ints)) << 16);
}

TARGET INLINE NAME(ints) NAME(repeat)(const int8_t *four) {
    int32_t value;
    memcpy(&value, four, sizeof value);
    return (NAME(ints)){0} + value;
}

TARGET INLINE NAME(ints) NAME(add)(NAME(ints) sum, NAME(ints) weight, NAME(ints) x) {
    return (NAME(ints))NAME(dot_fours)((NAME(any))sum, (NAME(any))weight, (NAME(any))x);
}

/* Positions of the outputs of a vector in a step. */
#define PLACE(v, bits) ((v) * WIDTH / LANES * BYTES_OF_TILE * (bits) / 8 + (v) * WIDTH % LANES * FOUR)

/* A step of some rows by 8 bits. The lines that are read next from memory are prefetched a few with each four inputs: a
 * step's lines at once would take all of the processor's miss buffers, and loads would wait for one. */
TARGET INLINE void NAME(add_step8)(const int8_t *x, const char *tiles, NAME(ints) sums[ROWS][AT_ONCE], int rows,
                                 struct lines *ahead, int step) {
#pragma GCC unroll 16
    for (int four = 0; four < STEP_INPUTS / FOUR; four++) {
        if (ahead) fetch(ahead, step * STEP_INPUTS / FOUR + four, BLOCK / FOUR);
        NAME(ints) weight[AT_ONCE];
        for (int v = 0; v < AT_ONCE; v++) {
            memcpy(&weight[v], tiles + PLACE(v, 8) + four * LINE, sizeof weight[v]);
            if (UNSIGNED) weight[v] ^= (int32_t)0x80808080;
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            NAME(ints) xs = NAME(repeat)(x + r * STEP_INPUTS + four * FOUR);
            for (int v = 0; v < AT_ONCE; v++) sums[r][v] = NAME(add)(sums[r][v], weight[v], xs);
        }
    }
}

/* The same by 4 bits. */
TARGET INLINE void NAME(add_step4)(const int8_t *x, const char *tiles, NAME(ints) sums[ROWS][AT_ONCE], int rows,
                                 struct lines *ahead, int step) {
#pragma GCC unroll 8
    for (int four = 0; four < STEP_INPUTS / FOUR; four += 2) {
        if (ahead) fetch(ahead, (step * STEP_INPUTS / FOUR + four) / 2, BLOCK / FOUR / 2);
        NAME(ints) low[AT_ONCE], high[AT_ONCE];
        for (int v = 0; v < AT_ONCE; v++) {
            NAME(ints) both;
            memcpy(&both, tiles + PLACE(v, 4) + four / 2 * LINE, sizeof both);
            low[v] = both & 0x0f0f0f0f, high[v] = (both >> 4) & 0x0f0f0f0f;
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            NAME(ints) xs = NAME(repeat)(x + r * STEP_INPUTS + four * FOUR);
            for (int v = 0; v < AT_ONCE; v++) sums[r][v] = NAME(add)(sums[r][v], low[v], xs);
            xs = NAME(repeat)(x + r * STEP_INPUTS + (four + 1) * FOUR);
            for (int v = 0; v < AT_ONCE; v++) sums[r][v] = NAME(add)(sums[r][v], high[v], xs);
        }
    }
}

/* One step of rows, so few that a block's integers stay in registers, times some vectors of outputs. With 8 bits the
 * integers of both steps are scaled after the second, with 4 bits those of each. */
TARGET SPECIALIZED void NAME(add_step)(const int8_t *x, const int32_t *offsets, const char *tiles, const bf16 *weight_scales,
                                  NAME(ints) i[ROWS][AT_ONCE], NAME(floats) f[ROWS][AT_ONCE], struct lines *ahead,
                                  int step, int rows, int bits) {
    x += step * BYTES_OF_TILE, offsets += step * LANES, tiles += step * 2 * BYTES_OF_TILE * bits / 8;
    if (bits == 4) weight_scales += step * PANEL;
    for (int r = 0; r < rows && (bits == 4 || step == 0); r++) {
        int32_t offset = bits == 4 || UNSIGNED ? offsets[r] : 0;
        for (int v = 0; v < AT_ONCE; v++) i[r][v] = (NAME(ints)){0} + offset;
    }
    if (bits == 8) NAME(add_step8)(x, tiles, i, rows, ahead, step);
    else NAME(add_step4)(x, tiles, i, rows, ahead, step);
    if (bits == 8 && step + 1 < STEPS) return;
    for (int v = 0; v < AT_ONCE; v++) {
        NAME(floats) by = NAME(load_scales)(weight_scales + v * WIDTH);
        for (int r = 0; r < rows; r++) {
            NAME(floats) found = __builtin_convertvector(i[r][v], NAME(floats));
            f[r][v] = bits == 4 && step > 0 ? found * by + f[r][v] : found * by;
        }
    }
}

/* Those rows times some vectors of a panel's outputs, from `first` on. Only with the most rows do the steps have code of
 * their own: products are 3 % faster then, but fewer rows, which wait for memory, would be up to 16 % slower. */
TARGET SPECIALIZED void NAME(add_outputs)(const int8_t *x, const float *scales, const int32_t *offsets,
                                     const struct quantized_panel *panel, int first, float *sums,
                                     struct lines *ahead, int rows, int bits) {
    NAME(floats) f[ROWS][AT_ONCE];
    NAME(ints) i[ROWS][AT_ONCE];
    sums += first * WIDTH;
    const char *at = panel->blocks;
    for (int64_t block = 0; block < panel->count; block++, at += panel->stride, scales += LANES) {
        const bf16 *weight_scales = (const bf16 *)at + first * WIDTH;
        const char *tiles = at + scales_of_block(bits) * sizeof(bf16) + PLACE(first, bits);
        if (rows == ROWS) {
            NAME(add_step)(x, offsets, tiles, weight_scales, i, f, ahead, 0, rows, bits);
            NAME(add_step)(x, offsets, tiles, weight_scales, i, f, ahead, 1, rows, bits);
        } else {
            for (int step = 0; step < STEPS; step++)
                NAME(add_step)(x, offsets, tiles, weight_scales, i, f, ahead, step, rows, bits);
        }
        x += STEPS * BYTES_OF_TILE, offsets += STEPS * LANES;
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < AT_ONCE; v++) {
                NAME(floats) sum;
                memcpy(&sum, sums + r * PANEL + v * WIDTH, sizeof sum);
                sum = f[r][v] * scales[r] + sum;
                memcpy(sums + r * PANEL + v * WIDTH, &sum, sizeof sum);
            }
    }
}

typedef void NAME(rows_adder)(const int8_t *x, const float *scales, const int32_t *offsets,
                              const struct quantized_panel *panel, float *sums, struct lines *ahead);

/* A function for each number of rows. The first outputs prefetch the next part. */
#define ADD_ROWS(BITS, COUNT)                                                                                       \
    TARGET static void NAME(add_rows##BITS##_##COUNT)(const int8_t *x, const float *scales, const int32_t *offsets, \
                                                      const struct quantized_panel *panel, float *sums,             \
                                                      struct lines *ahead) {                                        \
        NAME(add_outputs)(x, scales, offsets, panel, 0, sums, ahead, COUNT, BITS);                                  \
        for (int v = AT_ONCE; v < PANEL / WIDTH; v += AT_ONCE)                                                      \
            NAME(add_outputs)(x, scales, offsets, panel, v, sums, NULL, COUNT, BITS);                               \
    }
#define ADD_ROWS8(COUNT) ADD_ROWS(8, COUNT)
#define ADD_ROWS4(COUNT) ADD_ROWS(4, COUNT)
UP_TO(ROWS, ADD_ROWS8)
UP_TO(ROWS, ADD_ROWS4)
#define ADDER8(COUNT) NAME(add_rows8_##COUNT),
#define ADDER4(COUNT) NAME(add_rows4_##COUNT),

static void NAME(multiply)(const struct quantized_rows *rows, const struct quantized_panel *panel, float *sums,
                           int32_t *products, struct lines *ahead) {
    static NAME(rows_adder) *const adders[2][ROWS] = {{UP_TO(ROWS, ADDER8)}, {UP_TO(ROWS, ADDER4)}};
    (void)products;
    for (int64_t row = 0; row < rows->count; row += ROWS) {
        int64_t tile = row / LANES * rows->blocks, place = row % LANES, count = min64(ROWS, rows->count - row);
        adders[panel->bits == 4][count - 1](rows->values + tile * STEPS * BYTES_OF_TILE + place * STEP_INPUTS,
                                            rows->scales + tile * LANES + place,
                                            rows->offsets + tile * STEPS * LANES + place, panel, sums + row * PANEL,
                                            row % TWO_TILES == 0 ? ahead : NULL);
    }
}

#undef ADD_ROWS
#undef ADD_ROWS8
#undef ADD_ROWS4
#undef ADDER8
#undef ADDER4
#undef ROWS
#undef PLACE
#undef NAME
#undef TARGET
#undef WIDTH
#undef UNSIGNED
