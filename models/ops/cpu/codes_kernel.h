/* Rows times the numbers of codes, whose sums of a group stay in registers until they are scaled. Included once for each
 * instruction set, with
 *
 *   NAME(x)    the names of this set's functions
 *   TARGET     the attribute by which they are compiled
 *   WIDTH      float32 of a vector
 *   ROWS       rows at a time, of which LANES is a multiple
 *   CODE_ROWS  the same where codes are converted in registers, once for all rows; 0: they never are
 *   PANELS     panels that one row is multiplied by together, where a processor reads several streams fastest
 *   PAIRS      whether the processor multiplies pairs of bfloat16: `dot_pairs` is then defined
 *
 * and with CODE_ROWS `words_of`, which converts two adjacent lines of a tile to bfloat16, and without PAIRS `bytes_of`,
 * which widens a line's signed bytes to 16 bits. Each group's sum begins with 0 and runs over its inputs in order, for
 * any number of rows. */

#define VECTORS (PANEL / WIDTH) /* of a panel's sums */
#define OF_TILE (LANES / WIDTH)
#define AT_ONCE 2 /* vectors of a panel's sums that stored numbers are added to */
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
    float xs[2];
    memcpy(xs, x, sizeof xs);
    sum += xs[0] * line.even;
    return sum + xs[1] * line.odd;
#endif
}

/* The scales and zero points of a panel's outputs in a group. */
struct NAME(factors) {
    NAME(floats) scales[VECTORS], zeros[VECTORS];
};

TARGET INLINE void NAME(find_factors)(const struct coded_part *part, const char *header, struct NAME(factors) *by) {
    for (int tile = 0; tile < 2; tile++) {
        struct factors of = {{0}, {0}};
#if WIDTH == 16 /* The compiler would convert halves by many operations, and bytes one by one. */
        const char *from = header + tile * LANES * bytes_of_scale(part->codes->scales);
        if (part->codes->scales == SCALES_FLOAT16)
            of.scales = (vector)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)from));
        else if (part->codes->scales == SCALES_E8M0)
            of.scales = powers_of_two((bits)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)from)));
        else of.scales = load_scales(from, part->codes->scales);
        if (part->has_zeros)
            of.zeros = (vector)float_of_bytes(header + PANEL * bytes_of_scale(part->codes->scales) + tile * LANES);
#else
        of = factors_of(part->codes, header, tile);
#endif
        if (part->has_zeros) of.zeros += part->bias;
        memcpy(by->scales + tile * OF_TILE, &of.scales, sizeof of.scales);
        memcpy(by->zeros + tile * OF_TILE, &of.zeros, sizeof of.zeros);
    }
}

/* Scale a vector of a group's sums, and add it to all sums. */
TARGET INLINE void NAME(add_scaled)(NAME(floats) scales, NAME(floats) found, float *to) {
    NAME(floats) sum;
    memcpy(&sum, to, sizeof sum);
    sum += found * scales;
    memcpy(to, &sum, sizeof sum);
}

/* Rows times stored numbers, for some vectors of outputs from `first` on. `by`: of each group of the part. */
TARGET INLINE void NAME(add_outputs)(const struct coded_part *part, const struct NAME(factors) *by, const char *x,
                                     int64_t row, int64_t stride, int rows, int first) {
    const bf16 *weight = part->numbers + first * WIDTH / LANES * TILE + first * WIDTH % LANES * 2;
    const char *ahead = part->ahead;
    const int64_t groups = part->groups, in_group = part->codes->group / DEPTH;
    const float *totals = part->has_zeros ? part->totals + row * groups : NULL;
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
#pragma GCC unroll 2
                for (int v = 0; v < AT_ONCE; v++) {
                    const bf16 *from = weight + pair * LANES * 2 + v * WIDTH / LANES * TILE + v * WIDTH % LANES * 2;
                    NAME(words) words;
                    memcpy(&words, from, sizeof words);
                    NAME(operand) line = NAME(line_of)(words);
#pragma GCC unroll 8
                    for (int r = 0; r < rows; r++) s[r][v] = NAME(add_pair)(s[r][v], x, r, pair, line);
                }
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
        if (totals) {
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < AT_ONCE; v++) s[r][v] -= by->zeros[first + v] * totals[r * groups];
            totals++;
        }
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
TARGET INLINE void NAME(lines_of)(int kind, const char *tile, int two, NAME(operand) lines[2][OF_TILE]) {
    NAME(words) words[2][OF_TILE];
#if !PAIRS
    if (kind == INT8) {
        for (int i = 0; i < 2 * OF_TILE; i++) {
            NAME(words) both = NAME(bytes_of)(tile + (two * 2 * OF_TILE + i) * 2 * WIDTH);
            lines[i / OF_TILE][i % OF_TILE].even =
                __builtin_convertvector((NAME(ints))(both << 16) >> 16, NAME(floats));
            lines[i / OF_TILE][i % OF_TILE].odd = __builtin_convertvector((NAME(ints))both >> 16, NAME(floats));
        }
        return;
    }
#endif
    NAME(words_of)(kind, tile, two, words);
    for (int i = 0; i < 2 * OF_TILE; i++)
        lines[i / OF_TILE][i % OF_TILE] = NAME(line_of)(words[i / OF_TILE][i % OF_TILE]);
}

/* Rows times panels, both constants: all groups of these. */
TARGET INLINE void NAME(add_panels)(const struct coded_part *part, int rows, int panels, int kind) {
    const struct codes *codes = part->codes;
    const int64_t of_step = bytes_of_codes(kind), of_tile = of_step / 2, apart = part->apart;
    const char *header = part->header, *x = part->x, *end = header + apart;
    const float *totals = part->has_zeros ? part->totals : NULL;
    float *sums = part->sums;
    int64_t left = part->steps, in_group = codes->group / DEPTH, groups = part->groups;
    while (left > 0) {
        NAME(floats) s[CODE_ROWS][PANELS][VECTORS];
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < panels; p++)
                for (int v = 0; v < VECTORS; v++) s[r][p][v] = (NAME(floats)){0};
        const char *at = header + bytes_of_header(codes);
        int64_t some = min64(left, in_group);
        left -= some;
        for (; some > 0; some--, at += of_step, x += TILE * STAGED_BYTES(PAIRS)) {
            const char *ahead = at + part->distance;
            if (panels > 1 && ahead >= end) ahead += (panels - 1) * apart;
#pragma GCC unroll 8
            for (int two = 0; two < DEPTH / 4; two++)
#pragma GCC unroll 4
                for (int p = 0; p < panels; p++) {
                    for (int line = 0; line < of_step / LINE / (DEPTH / 4); line++)
                        __builtin_prefetch(ahead + p * apart + (two * of_step / LINE / (DEPTH / 4) + line) * LINE);
#pragma GCC unroll 2
                    for (int tile = 0; tile < 2; tile += TILES) {
                        NAME(operand) lines[TILES][2][OF_TILE];
                        for (int t = 0; t < TILES; t++)
                            NAME(lines_of)(kind, at + p * apart + (tile + t) * of_tile, two, lines[t]);
#pragma GCC unroll 2
                        for (int odd = 0; odd < 2; odd++)
#pragma GCC unroll 8
                            for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
                                for (int v = 0; v < TILES * OF_TILE; v++) {
                                    NAME(floats) *sum = &s[r][p][tile * OF_TILE + v];
                                    NAME(operand) line = lines[v / OF_TILE][odd][v % OF_TILE];
                                    *sum = NAME(add_pair)(*sum, x, r, 2 * two + odd, line);
                                }
                    }
                }
        }
        for (int p = 0; p < panels; p++) {
            struct NAME(factors) by;
            NAME(find_factors)(part, header + p * apart, &by);
            if (totals)
                for (int r = 0; r < rows; r++)
                    for (int v = 0; v < VECTORS; v++) s[r][p][v] -= by.zeros[v] * totals[r * groups];
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < VECTORS; v++)
                    NAME(add_scaled)(by.scales[v], s[r][p][v], sums + (p * rows + r) * PANEL + v * WIDTH);
        }
        if (totals) totals++;
        header = at;
    }
}

#define ADD_SOME(count) \
    if (rows == count && panels == 1) NAME(add_panels)(part, count, 1, kind);
TARGET INLINE void NAME(add_codes)(const struct coded_part *part, int64_t rows, int64_t panels, int kind) {
    if (panels == PANELS) NAME(add_panels)(part, 1, PANELS, kind);
    else if (panels == 2) NAME(add_panels)(part, 1, 2, kind);
    UP_TO(CODE_ROWS, ADD_SOME)
}

#define ADD_CODES(kind)                                                                              \
    TARGET static void NAME(add_##kind)(const struct coded_part *part, int64_t rows, int64_t panels) { \
        NAME(add_codes)(part, rows, panels, kind);                                                   \
    }
ADD_CODES(INT4)
ADD_CODES(FP4)
ADD_CODES(INT8)
ADD_CODES(FP8)
static codes_adder *const NAME(codes_adders)[] = {NAME(add_INT4), NAME(add_FP4), NAME(add_INT8), NAME(add_FP8)};
#undef ADD_CODES
#undef ADD_SOME
#endif

#undef VECTORS
#undef OF_TILE
#undef AT_ONCE
#undef TILES
#undef ADD_ROWS
#undef ADDER
#undef NAME
#undef TARGET
#undef WIDTH
#undef ROWS
#undef CODE_ROWS
#undef PANELS
#undef PAIRS
