/* Rows times the numbers of codes, whose sums of a group stay in registers until they are scaled. Included once for each
 * instruction set, with
 *
 *   NAME(x)    the names of this set's functions
 *   TARGET     the attribute by which they are compiled
 *   WIDTH      float32 of a vector
 *   ROWS       rows at a time, of which LANES is a multiple
 *   CODE_ROWS  the same where codes are converted in registers, once for all rows; 0: they never are
 *   GROUPS     groups of 4 bits of one panel that one row is multiplied by together, so that sums do not wait for each
 *              other
 *   PANELS     panels that one row is multiplied by together, where a processor reads several streams fastest
 *   PAIRS      whether the processor multiplies pairs of bfloat16: `dot_pairs` is then defined
 *   FACTOR     of the numbers that are stored, by which scales are multiplied; 1 if undefined
 *   FUSED(a, b, c)  a * b + c, rounded once, of a vector or number and two vectors, where sums of another file must have
 *                   the same bits; if undefined, the compiler decides
 *
 * and with CODE_ROWS `zeros_of`, which loads a tile's zero points; `held_of`, which loads or converts LINES(kind) lines of
 * a tile, and `words_of`, which makes one of them bfloat16; and without PAIRS `bytes_of`, which widens a line's signed
 * bytes to 16 bits, and `less`, which subtracts such. Each group's sum begins with 0 and runs over its inputs in order,
 * for any number of rows. */

#ifndef FUSED
#define FUSED(a, b, c) ((c) + (a) * (b))
#endif
#define VECTORS (PANEL / WIDTH) /* of a panel's sums */
#define OF_TILE (LANES / WIDTH)
#define AT_ONCE 2 /* vectors of a panel's sums that stored numbers are added to */
/* Lines converted together: with the longest vectors those of a cache line, which is then loaded once. */
#define LINES(kind) (WIDTH == LANES && (kind) < INT8 ? 4 : 2)
#define STREAMS (PANELS > GROUPS ? PANELS : GROUPS) /* of panels and groups together */
#define TILES (WIDTH == LANES ? 2 : 1) /* converted together; an input of a row is then loaded once for both */

typedef float NAME(floats) __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t NAME(words) __attribute__((vector_size(WIDTH * 4)));
typedef int32_t NAME(ints) __attribute__((vector_size(WIDTH * 4)));

#if PAIRS
typedef NAME(words) NAME(operand); /* pairs of bfloat16 of a vector of outputs */
#else
typedef struct {
    NAME(floats) even, odd; /* inputs of these pairs */
} NAME(operand);
#endif

TARGET INLINE NAME(operand) NAME(line_of)(NAME(words) words) {
#if PAIRS
    return words;
#else
    return (NAME(operand)){(NAME(floats))(words << 16), (NAME(floats))(words & 0xffff0000u)};
#endif
}

/* Add the products of a pair of a row's inputs and a line. */
TARGET INLINE NAME(floats) NAME(add_pair)(NAME(floats) sum, const char *x, int row, int pair, NAME(operand) line) {
    x += (row * DEPTH + 2 * pair) * STAGED_BYTES(PAIRS);
#if PAIRS
    uint32_t both;
    memcpy(&both, x, sizeof both);
    return NAME(dot_pairs)(sum, both, line);
#else
    const float *xs = (const float *)(const void *)x;
    sum = FUSED(xs[0], line.even, sum);
    return FUSED(xs[1], line.odd, sum);
#endif
}

/* The scales of a panel's outputs in a group. */
struct NAME(factors) {
    NAME(floats) scales[VECTORS];
};

TARGET INLINE void NAME(find_factors)(const struct coded_part *part, const char *header, struct NAME(factors) *by) {
    for (int tile = 0; tile < 2; tile++) {
        const char *from = header + tile * LANES * bytes_of_scale(part->codes->scales);
        vector scales;
#if WIDTH == 16 /* The compiler would convert halves by many operations, and bytes one by one. */
        if (part->codes->scales == SCALES_FLOAT16)
            scales = (vector)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)from));
        else if (part->codes->scales == SCALES_E8M0)
            scales = powers_of_two((bits)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)from)));
        else
#endif
            scales = load_scales(from, part->codes->scales);
#ifdef FACTOR
        scales *= FACTOR;
#endif
        memcpy(by->scales + tile * OF_TILE, &scales, sizeof scales);
    }
}

/* Scale a vector of a group's sums, and add it to all sums. */
TARGET INLINE void NAME(add_scaled)(NAME(floats) scales, NAME(floats) found, float *to) {
    NAME(floats) sum;
    memcpy(&sum, to, sizeof sum);
    sum = FUSED(found, scales, sum);
    memcpy(to, &sum, sizeof sum);
}

/* Rows times stored numbers, for some vectors of outputs from `first` on. `by`: of each group of the part. */
TARGET SPECIALIZED void NAME(add_outputs)(const struct coded_part *part, const struct NAME(factors) *by, const char *x,
                                     int64_t row, int64_t stride, int rows, int first) {
    const bf16 *weight = part->numbers + first * WIDTH / LANES * TILE + first * WIDTH % LANES * 2;
    const char *ahead = part->ahead;
    const int64_t in_group = part->codes->group / DEPTH;
    float *sums = part->sums + row * PANEL + first * WIDTH, *of_group = part->of_group + row * PANEL;
    int64_t left = part->steps, begun = part->begun;
    NAME(floats) s[ROWS][AT_ONCE];
    while (left > 0) {
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < AT_ONCE; v++)
                if (begun) memcpy(&s[r][v], of_group + r * PANEL + (first + v) * WIDTH, sizeof s[r][v]);
                else s[r][v] = (NAME(floats)){0};
        int64_t some = min64(left, in_group - begun);
        for (int64_t step = 0; step < some; step++, weight += STEP, x += TILE * STAGED_BYTES(PAIRS)) {
#pragma GCC unroll 16
            for (int pair = 0; pair < DEPTH / 2; pair++, ahead += stride) {
                __builtin_prefetch(ahead);
                const bf16 *line = weight + pair * LANES * 2;
#if PAIRS
#pragma GCC unroll 2
                for (int v = 0; v < AT_ONCE; v++) {
                    NAME(words) words;
                    memcpy(&words, line + v * WIDTH / LANES * TILE + v * WIDTH % LANES * 2, sizeof words);
#pragma GCC unroll 8
                    for (int r = 0; r < rows; r++) s[r][v] = NAME(add_pair)(s[r][v], x, r, pair, words);
                }
#else /* One input of the pair after the other, so that registers hold it for all rows. */
#pragma GCC unroll 2
                for (int odd = 0; odd < 2; odd++) {
                    float xs[ROWS];
#pragma GCC unroll 8
                    for (int r = 0; r < rows; r++) xs[r] = ((const float *)(const void *)x)[r * DEPTH + 2 * pair + odd];
#pragma GCC unroll 2
                    for (int v = 0; v < AT_ONCE; v++) {
                        NAME(words) words;
                        memcpy(&words, line + v * WIDTH / LANES * TILE + v * WIDTH % LANES * 2, sizeof words);
                        words = odd ? words & 0xffff0000u : words << 16;
#pragma GCC unroll 8
                        for (int r = 0; r < rows; r++) s[r][v] = FUSED(xs[r], (NAME(floats))words, s[r][v]);
                    }
                }
#endif
            }
        }
        left -= some, begun += some;
        if (begun < in_group && !(left == 0 && part->is_last)) {
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < AT_ONCE; v++)
                    memcpy(of_group + r * PANEL + (first + v) * WIDTH, &s[r][v], sizeof s[r][v]);
            continue;
        }
        NAME(floats) scales[AT_ONCE];
        memcpy(scales, by->scales + first, sizeof scales);
        float *to = sums;
        __asm__("" : "+r"(to)); /* The compiler would keep the addresses of all sums in memory. */
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < AT_ONCE; v++) NAME(add_scaled)(scales[v], s[r][v], to + r * PANEL + v * WIDTH);
        by++, begun = 0;
    }
}

/* A function for each number of rows, whose outputs are compile-time constants. */
#define ADD_ROWS(rows)                                                                                            \
    TARGET static void NAME(add_rows##rows)(const struct coded_part *part, const struct NAME(factors) *by,        \
                                            const char *x, int64_t row, int64_t stride) {                         \
        for (int first = 0; first < VECTORS; first += AT_ONCE)                                                    \
            NAME(add_outputs)(part, by, x, row, first ? 0 : stride, rows, first);                                 \
    }
UP_TO(ROWS, ADD_ROWS)
#define ADDER(rows) NAME(add_rows##rows),

typedef void NAME(rows_adder)(const struct coded_part *part, const struct NAME(factors) *by, const char *x, int64_t row,
                              int64_t stride);

TARGET static void NAME(add_numbers)(const struct coded_part *part, int64_t rows) {
    static NAME(rows_adder) *const adders[ROWS] = {UP_TO(ROWS, ADDER)};
    /* A group has at least one step, so that a part has at most as many groups as steps. */
    struct NAME(factors) by[CODED_STEPS];
    int64_t groups = parts(part->begun + part->steps, part->codes->group / DEPTH);
    for (int64_t group = 0; group < groups; group++)
        NAME(find_factors)(part, part->header + group * bytes_of_group(part->codes), &by[group]);
    for (int64_t row = 0; row < rows; row += ROWS)
        adders[min64(ROWS, rows - row) - 1](part, by,
                                            part->x + (row / LANES * part->all * TILE + row % LANES * DEPTH) *
                                                          STAGED_BYTES(PAIRS),
                                            row, row ? 0 : part->stride);
}

#if CODE_ROWS
/* What is kept in registers of LINES(kind) lines of a tile. */
typedef NAME(words) NAME(held)[2][OF_TILE];

TARGET INLINE void NAME(hold)(int kind, const char *tile, int first, const NAME(words) *zeros, NAME(held) held) {
#if !PAIRS
    if (kind == INT8) {
        for (int i = 0; i < 2 * OF_TILE; i++) {
            NAME(words) both = NAME(bytes_of)(tile + (first * OF_TILE + i) * 2 * WIDTH);
            held[i / OF_TILE][i % OF_TILE] = zeros ? NAME(less)(both, zeros[i % OF_TILE]) : both;
        }
        return;
    }
#endif
    NAME(held_of)(kind, tile, first, zeros, held);
}

/* A vector of one of these lines. */
TARGET INLINE NAME(operand) NAME(operand_of)(int kind, const NAME(held) held, int line, int v, const NAME(words) *zeros) {
#if !PAIRS
    if (kind == INT8) {
        NAME(ints) both = (NAME(ints))held[line][v];
        return (NAME(operand)){__builtin_convertvector(both << 16 >> 16, NAME(floats)),
                               __builtin_convertvector(both >> 16, NAME(floats))};
    }
#endif
    return NAME(line_of)(NAME(words_of)(kind, held, line, v, zeros != NULL));
}

/* `groups` groups of as many steps times rows and panels, all three constants. */
TARGET SPECIALIZED void NAME(add_groups)(const struct coded_part *part, const char *header, const char *x, int64_t steps,
                                    int rows, int panels, int groups, int kind, int has_zeros) {
    const struct codes *codes = part->codes;
    const int64_t of_step = bytes_of_codes(kind), of_tile = of_step / 2, apart = part->apart;
    const int64_t of_group = bytes_of_group(codes), of_inputs = steps * TILE * STAGED_BYTES(PAIRS);
    const char *at = header + bytes_of_header(codes), *end = part->header + apart;
    const int together = WIDTH == LANES ? groups * panels : 1; /* whose lines registers hold */
    NAME(floats) s[CODE_ROWS][STREAMS][VECTORS];
    NAME(words) zeros[STREAMS][2][OF_TILE > 1 ? OF_TILE : 2];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < groups * panels; p++)
            for (int v = 0; v < VECTORS; v++) s[r][p][v] = (NAME(floats)){0};
    for (int p = 0; has_zeros && p < groups * panels; p++)
        for (int tile = 0; tile < 2; tile++)
            NAME(zeros_of)(kind, header + p % panels * apart + p / panels * of_group +
                                     PANEL * bytes_of_scale(codes->scales) + tile * LANES, zeros[p][tile]);
    const char *ahead = header + part->distance + (groups - 1) * of_group;
    for (int64_t byte = 0; byte < groups * bytes_of_header(codes); byte += LINE, ahead += LINE)
        for (int p = 0; p < panels; p++) __builtin_prefetch(ahead + p * apart);
    for (; steps > 0; steps--, at += of_step, ahead += groups * of_step, x += TILE * STAGED_BYTES(PAIRS)) {
        const char *soon = panels > 1 && ahead >= end ? ahead + (panels - 1) * apart : ahead;
#pragma GCC unroll 8
        for (int first = 0; first < DEPTH / 2; first += LINES(kind)) {
            const int64_t fetched = of_step * LINES(kind) / (DEPTH / 2); /* of each panel and group, in order */
#pragma GCC unroll 8
            for (int p = 0; p < groups * panels; p += together) {
                for (int q = p; q < p + together; q++)
                    for (int64_t byte = 0; byte < fetched; byte += LINE)
                        __builtin_prefetch(soon + q % panels * apart + q / panels * fetched + byte);
#pragma GCC unroll 2
                for (int tile = 0; tile < 2; tile += TILES) {
                    NAME(held) held[STREAMS][TILES];
                    for (int q = p; q < p + together; q++) {
                        const int64_t off = q % panels * apart + q / panels * of_group;
                        for (int t = 0; t < TILES; t++)
                            NAME(hold)(kind, at + off + (tile + t) * of_tile, first,
                                       has_zeros ? zeros[q][tile + t] : NULL, held[q][t]);
                    }
                    /* Products that follow each other are added to different sums. */
#pragma GCC unroll 4
                    for (int line = 0; line < 4; line++) {
                        if (line >= LINES(kind)) continue;
#pragma GCC unroll 8
                        for (int q = p; q < p + together; q++)
#pragma GCC unroll 2
                            for (int v = 0; v < TILES * OF_TILE; v++) {
                                int t = v / OF_TILE, of = v % OF_TILE;
                                NAME(operand) made = NAME(operand_of)(kind, held[q][t], line, of,
                                                                      has_zeros ? zeros[q][tile + t] : NULL);
#pragma GCC unroll 8
                                for (int r = 0; r < rows; r++) {
                                    NAME(floats) *sum = &s[r][q][tile * OF_TILE + v];
                                    *sum = NAME(add_pair)(*sum, x + q / panels * of_inputs, r, first + line, made);
                                }
                            }
                    }
                }
            }
            soon += groups * fetched;
        }
    }
    for (int p = 0; p < groups * panels; p++) {
        struct NAME(factors) by;
        NAME(find_factors)(part, header + p % panels * apart + p / panels * of_group, &by);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < VECTORS; v++)
                NAME(add_scaled)(by.scales[v], s[r][p][v], part->sums + (p % panels * rows + r) * PANEL + v * WIDTH);
    }
}

/* Rows times panels, both constants: all groups of these. */
TARGET SPECIALIZED void NAME(add_panels)(const struct coded_part *part, int rows, int panels, int kind, int has_zeros) {
    const char *header = part->header, *x = part->x;
    int64_t in_group = part->codes->group / DEPTH, left = part->steps;
    const int groups = rows == 1 && panels == 1 && kind < INT8 ? GROUPS : 1;
    for (int64_t most = groups * in_group; groups > 1 && left >= most; left -= most) {
        NAME(add_groups)(part, header, x, in_group, rows, panels, groups, kind, has_zeros);
        header += groups * bytes_of_group(part->codes), x += most * TILE * STAGED_BYTES(PAIRS);
    }
    for (int64_t some; left > 0; left -= some) {
        some = min64(left, in_group);
        NAME(add_groups)(part, header, x, some, rows, panels, 1, kind, has_zeros);
        header += bytes_of_group(part->codes), x += some * TILE * STAGED_BYTES(PAIRS);
    }
}

#define ADD_SOME(count) \
    if (rows == count && panels == 1) NAME(add_panels)(part, count, 1, kind, has_zeros);
TARGET SPECIALIZED void NAME(add_codes)(const struct coded_part *part, int64_t rows, int64_t panels, int kind,
                                   int has_zeros) {
    if (panels == PANELS) NAME(add_panels)(part, 1, PANELS, kind, has_zeros);
    UP_TO(CODE_ROWS, ADD_SOME)
}

#define ADD_CODES(name, kind, has_zeros)                                                             \
    TARGET static void NAME(add_##name)(const struct coded_part *part, int64_t rows, int64_t panels) { \
        NAME(add_codes)(part, rows, panels, kind, has_zeros);                                        \
    }
ADD_CODES(fp8, FP8, 0)
ADD_CODES(int4, INT4, 0)
ADD_CODES(fp4, FP4, 0)
ADD_CODES(int8, INT8, 0)
ADD_CODES(shifted_int4, INT4, 1)
ADD_CODES(shifted_int8, INT8, 1)
/* [whether zero points are stored][kind] */
static codes_adder *const NAME(codes_adders)[2][4] = {
    {NAME(add_int4), NAME(add_fp4), NAME(add_int8), NAME(add_fp8)},
    {NAME(add_shifted_int4), NULL, NAME(add_shifted_int8), NULL}};
#undef ADD_CODES
#undef ADD_SOME
#endif

#undef VECTORS
#undef OF_TILE
#undef AT_ONCE
#undef TILES
#undef LINES
#undef STREAMS
#undef ADD_ROWS
#undef ADDER
#undef NAME
#undef TARGET
#undef WIDTH
#undef ROWS
#undef CODE_ROWS
#undef PANELS
#undef GROUPS
#undef PAIRS
#undef FACTOR
#undef FUSED
