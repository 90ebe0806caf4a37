/* One row times panels of codes together, whose numbers stay in registers. Included once for each instruction set, with
 *
 *   NAME(x)   the names of this set's functions
 *   TARGET    the attribute by which they are compiled
 *   WIDTH     float32 of a vector
 *   PANELS    panels at once
 *   PAIRS     whether the processor multiplies pairs of bfloat16: `dot_pairs` is then defined
 *
 * and `words_of`, which returns a line of numbers as bfloat16, or without PAIRS `floats_of`, its even and its odd
 * inputs. A sum has the order of the products in panel_kernel.h. */

#define OF_TILE (LANES / WIDTH) /* vectors of its sums */

typedef float NAME(floats) __attribute__((vector_size(WIDTH * 4)));

TARGET INLINE void NAME(add_row)(const char *x, const struct row_of_codes *row, float *sums, int kind) {
    NAME(floats) s[PANELS][2][OF_TILE];
    int64_t of_step = bytes_of_codes(kind), of_tile = of_step / 2;
    const char *codes = row->codes, *ahead = row->ahead;
    for (int p = 0; p < PANELS; p++)
        for (int tile = 0; tile < 2; tile++)
            NAME(load_sums)(sums + p * PANEL + tile * LANES, s[p][tile], kind);
    for (int64_t step = 0; step < row->steps; step++, codes += of_step, x += TILE * STAGED_BYTES(PAIRS)) {
#pragma GCC unroll 16
        for (int pair = 0; pair < DEPTH / 2; pair++, ahead += of_step / (DEPTH / 2)) {
#if PAIRS
            uint32_t both;
            memcpy(&both, x + 2 * pair * sizeof(bf16), sizeof both);
#else
            const float *xs = (const float *)x + 2 * pair;
#endif
#pragma GCC unroll 4
            for (int p = 0; p < PANELS; p++) {
                if (kind >= INT8 || pair % 2 == 0) __builtin_prefetch(ahead + p * row->apart);
#pragma GCC unroll 2
                for (int tile = 0; tile < 2; tile++) {
                    const char *from = codes + p * row->apart + tile * of_tile;
#if PAIRS
                    s[p][tile][0] = NAME(dot_pairs)(s[p][tile][0], both, NAME(words_of)(kind, from, pair));
#else
                    NAME(floats) even[OF_TILE], odd[OF_TILE];
                    NAME(floats_of)(kind, from, pair, even, odd);
#pragma GCC unroll 2
                    for (int v = 0; v < OF_TILE; v++) s[p][tile][v] += xs[0] * even[v];
#pragma GCC unroll 2
                    for (int v = 0; v < OF_TILE; v++) s[p][tile][v] += xs[1] * odd[v];
#endif
                }
            }
        }
    }
    for (int p = 0; p < PANELS; p++)
        for (int tile = 0; tile < 2; tile++)
            NAME(store_sums)(sums + p * PANEL + tile * LANES, s[p][tile], kind);
}

TARGET static void NAME(row_int4)(const char *x, const struct row_of_codes *row, float *sums) {
    NAME(add_row)(x, row, sums, INT4);
}
TARGET static void NAME(row_fp4)(const char *x, const struct row_of_codes *row, float *sums) {
    NAME(add_row)(x, row, sums, FP4);
}
TARGET static void NAME(row_int8)(const char *x, const struct row_of_codes *row, float *sums) {
    NAME(add_row)(x, row, sums, INT8);
}
TARGET static void NAME(row_fp8)(const char *x, const struct row_of_codes *row, float *sums) {
    NAME(add_row)(x, row, sums, FP8);
}
static row_adder *const NAME(rows)[] = {NAME(row_int4), NAME(row_fp4), NAME(row_int8), NAME(row_fp8)};

#undef OF_TILE
#undef NAME
#undef TARGET
#undef WIDTH
#undef PANELS
#undef PAIRS
