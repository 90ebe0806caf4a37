/* The products of panels.h in vectors of WIDTH float32. Included once for each instruction set, with
 *
 *   NAME(x)   the names of this set's functions
 *   TARGET    the attribute by which they are compiled
 *   WIDTH     float32 of a vector
 *   ROWS      rows at a time
 *   SUMS      vectors of sums that stay in registers
 *   NEAR      steps of a weight that comes from memory, on which `blocks` blocks of rows take turns
 *   NEAR_PART the same of a weight that is in the L2 cache already
 *   LEAST_AHEAD bytes by which a single block prefetches ahead, at least. These three are defined where they differ.
 *   PAIRS     whether the processor multiplies pairs of bfloat16: `dot_pairs` and `narrow`, or with the longest vectors
 *             `narrow_line`, are then defined
 *
 * Where it does not, staged rows are float32 and the weight is widened in registers: the even inputs of pairs by a
 * shift, the odd ones by a mask. A sum runs over the inputs in order either way. */

#define VECTORS (PANEL / WIDTH) /* of a panel's sums */
#ifndef NEAR
#define NEAR NEAR_STEPS
#define NEAR_PART NEAR_PART_STEPS
#define LEAST_AHEAD 0
#endif

typedef float NAME(floats) __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t NAME(words) __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t NAME(shorts) __attribute__((vector_size(WIDTH * 2)));

/* The lines of a weight that are next read from memory, and how many of them are prefetched with four pairs. */
struct NAME(stream) {
    const char *at;
    int64_t lines;
};

TARGET INLINE void NAME(fetch)(struct NAME(stream) *stream) {
    for (int64_t line = 0; line < stream->lines; line++) __builtin_prefetch(stream->at + line * LINE);
    stream->at += stream->lines * LINE;
}

/* `steps` steps of `rows` rows times `vectors` vectors of outputs, added to their sums, or with `is_first` instead of
 * them. All loops except the outermost are unrolled, as both numbers are compile-time constants. */
TARGET INLINE void NAME(add_steps)(const char *x, const bf16 *weight, int64_t steps, int is_first, float *sums, int rows,
                                   int vectors, struct NAME(stream) *stream) {
    NAME(floats) s[ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            s[r][v] = (NAME(floats)){0};
            if (!is_first) memcpy(&s[r][v], sums + r * PANEL + v * WIDTH, sizeof s[r][v]);
        }
    for (int64_t step = 0; step < steps; step++, weight += STEP, x += TILE * STAGED_BYTES(PAIRS)) {
#pragma GCC unroll 16
        for (int pair = 0; pair < DEPTH / 2; pair++) {
            const bf16 *line = weight + pair * LANES * 2;
            if (pair % 4 == 0) NAME(fetch)(stream);
#if PAIRS
            NAME(words) w[VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++)
                memcpy(&w[v], line + v * WIDTH / LANES * TILE + v * WIDTH % LANES * 2, sizeof w[v]);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                uint32_t both;
                memcpy(&both, x + (r * DEPTH + 2 * pair) * sizeof(bf16), sizeof both);
#pragma GCC unroll 8
                for (int v = 0; v < vectors; v++) s[r][v] = NAME(dot_pairs)(s[r][v], both, w[v]);
            }
#else
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; odd++) {
                const float *xs = (const float *)x + 2 * pair + odd;
                /* Of rows and vectors of the weight the fewer are held in registers, and each of the others is used at
                 * once: otherwise six rows do not fit. */
                NAME(floats) held[ROWS > VECTORS ? ROWS : VECTORS];
                const int held_rows = rows < vectors ? rows : 0, other_rows = rows - held_rows;
#pragma GCC unroll 16
                for (int r = 0; r < held_rows; r++) held[r] = xs[r * DEPTH] - (NAME(floats)){0};
#pragma GCC unroll 8
                for (int v = 0; v < vectors; v++) {
                    NAME(words) w;
                    memcpy(&w, line + v * WIDTH / LANES * TILE + v * WIDTH % LANES * 2, sizeof w);
                    w = odd ? w & 0xffff0000u : w << 16;
                    if (other_rows) held[v] = (NAME(floats))w;
#pragma GCC unroll 16
                    for (int r = 0; r < held_rows; r++) s[r][v] += held[r] * (NAME(floats))w;
                }
#pragma GCC unroll 16
                for (int r = 0; r < other_rows; r++) {
                    NAME(floats) one = xs[r * DEPTH] - (NAME(floats)){0};
#pragma GCC unroll 8
                    for (int v = 0; v < vectors; v++) s[r][v] += one * held[v];
                }
            }
#endif
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) memcpy(sums + r * PANEL + v * WIDTH, &s[r][v], sizeof s[r][v]);
}

/* All of a panel's outputs, as many at once as registers hold. A function for each number of rows. */
#define VECTORS_AT_ONCE(rows) ((rows) * VECTORS <= SUMS ? VECTORS : SUMS / ROWS)
#define ADD_ROWS(rows)                                                                                          \
    TARGET static void NAME(add_rows##rows)(const char *x, const bf16 *weight, int64_t steps, int is_first,     \
                                            float *sums, struct NAME(stream) *stream) {                         \
        enum { AT_ONCE = VECTORS_AT_ONCE(rows) };                                                               \
        for (int v = 0; v < VECTORS; v += AT_ONCE)                                                              \
            NAME(add_steps)(x, weight + v * WIDTH / LANES * TILE + v * WIDTH % LANES * 2, steps, is_first,      \
                            sums + v * WIDTH, rows, AT_ONCE, stream);                                           \
    }
UP_TO(ROWS, ADD_ROWS)

typedef void NAME(rows_adder)(const char *x, const bf16 *weight, int64_t steps, int is_first, float *sums,
                              struct NAME(stream) *stream);
#define ADDER(rows) NAME(add_rows##rows),
static NAME(rows_adder) *const NAME(adders)[ROWS] = {UP_TO(ROWS, ADDER)};

/* Several blocks of rows, or vectors of outputs, take turns on a few steps of the weight while these are in the L1 cache,
 * and each prefetches a part of the next few; a single block goes through the whole panel. With a cached weight, the
 * first block prefetches the next weight, of `side`; NULL: there is none. */
static void NAME(add_blocks)(const char *staged, int64_t count, int64_t all, const bf16 *weight, int64_t steps,
                             int64_t ahead, int is_first, const struct side_work *side, float *sums) {
    int64_t blocks = 0, passes = 0; /* of all blocks */
    for (int64_t row = 0, rows; row < count; row += rows, blocks++) {
        rows = rows_at_once(row, count, ROWS);
        passes += VECTORS / VECTORS_AT_ONCE(rows);
    }
    const int64_t of_first = VECTORS / VECTORS_AT_ONCE(rows_at_once(0, count, ROWS));
    int64_t at_once = passes == 1 ? steps : side ? NEAR_PART : NEAR;
    if (ahead) ahead = max64(ahead, passes == 1 ? LEAST_AHEAD : at_once * STEP * (int64_t)sizeof(bf16));
    for (int64_t done = 0; done < steps; done += at_once, weight += at_once * STEP) {
        int64_t some = min64(at_once, steps - done);
        struct NAME(stream) stream = {(const char *)weight + ahead, 0};
        if (ahead) stream.lines = parts(STEP_LINES / 4, passes);
        if (side && side->lines)
            stream = (struct NAME(stream)){side->soon + done * side->lines * LINE, parts(side->lines, 4 * of_first)};
        for (int64_t row = 0, rows; row < count; row += rows) {
            rows = rows_at_once(row, count, ROWS);
            NAME(adders)[rows - 1](
                staged + (row / LANES * all * TILE + done * TILE + row % LANES * DEPTH) * STAGED_BYTES(PAIRS),
                weight, some, is_first && done == 0, sums + row * PANEL, &stream);
            if (side) stream.lines = 0;
        }
    }
}

static void NAME(multiply)(const char *staged, int64_t count, const bf16 *weight, int64_t steps, int64_t ahead,
                           float *sums) {
    NAME(add_blocks)(staged, count, steps, weight, steps, ahead, 1, NULL, sums);
}

/* `rows` rows times `panels` panels together, both constants. Those are prefetched a few steps ahead, and after their last
 * steps the panels that are read next. */
TARGET INLINE void NAME(multiply_rows)(const char *x, const bf16 *weight, int64_t steps, float *sums, int rows,
                                       int panels) {
    int64_t apart = steps * STEP;
    NAME(floats) s[SIDE_ROWS][SIDE_PANELS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++)
            for (int v = 0; v < VECTORS; v++) s[r][p][v] = (NAME(floats)){0};
    for (; steps > 0; steps--, weight += STEP, x += TILE * STAGED_BYTES(PAIRS)) {
        const bf16 *soon = weight + SIDE_AHEAD * STEP + (steps > SIDE_AHEAD ? 0 : (panels - 1) * apart);
#pragma GCC unroll 16
        for (int pair = 0; pair < DEPTH / 2; pair++) {
            const bf16 *line = weight + pair * LANES * 2;
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) {
                __builtin_prefetch(soon + p * apart + pair * LANES * 2);
                __builtin_prefetch(soon + p * apart + pair * LANES * 2 + TILE);
            }
#pragma GCC unroll 2
            for (int odd = 0; odd < 2 - PAIRS; odd++)
#pragma GCC unroll 4
                for (int p = 0; p < panels; p++)
#pragma GCC unroll 8
                    for (int v = 0; v < VECTORS; v++) {
                        NAME(words) w;
                        memcpy(&w, line + p * apart + v * WIDTH / LANES * TILE + v * WIDTH % LANES * 2, sizeof w);
#if !PAIRS
                        w = odd ? w & 0xffff0000u : w << 16;
#endif
#pragma GCC unroll 4
                        for (int r = 0; r < rows; r++) {
#if PAIRS
                            uint32_t both;
                            memcpy(&both, x + (r * DEPTH + 2 * pair) * sizeof(bf16), sizeof both);
                            s[r][p][v] = NAME(dot_pairs)(s[r][p][v], both, w);
#else
                            s[r][p][v] += ((const float *)x)[r * DEPTH + 2 * pair + odd] * (NAME(floats))w;
#endif
                        }
                    }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++)
            for (int v = 0; v < VECTORS; v++)
                memcpy(sums + (p * rows + r) * PANEL + v * WIDTH, &s[r][p][v], sizeof s[r][p][v]);
}

/* As many panels as have their sums in registers. A function for each number of rows. */
#define FITTING(rows) (SUMS / VECTORS / (rows) > SIDE_PANELS ? SIDE_PANELS : SUMS / VECTORS / (rows))
#define PANELS_AT_ONCE(rows) (FITTING(rows) > 1 ? FITTING(rows) : 1)
#define MULTIPLY_ROWS(rows)                                                                                         \
    TARGET static void NAME(multiply_rows##rows)(const char *x, const bf16 *weight, int64_t steps, float *sums) { \
        NAME(multiply_rows)(x, weight, steps, sums, rows, PANELS_AT_ONCE(rows));                                    \
    }
UP_TO(SIDE_ROWS, MULTIPLY_ROWS)

typedef void NAME(rows_multiplier)(const char *x, const bf16 *weight, int64_t steps, float *sums);
#define MULTIPLIER(rows) NAME(multiply_rows##rows),

static int64_t NAME(multiply_side)(const char *staged, int64_t count, const bf16 *weight, int64_t panels, int64_t steps,
                                   float *sums) {
    static NAME(rows_multiplier) *const multipliers[SIDE_ROWS] = {UP_TO(SIDE_ROWS, MULTIPLIER)};
    int64_t at_once = count > SIDE_ROWS ? 1 : PANELS_AT_ONCE(count);
    if (at_once < 2 || at_once > panels) return 0;
    multipliers[count - 1](staged, weight, steps, sums);
    return at_once;
}

static void NAME(multiply_part)(const char *staged, int64_t count, int64_t all, const bf16 *weight, int64_t steps,
                                int is_first, float *sums, const struct side_work *side) {
    NAME(add_blocks)(staged, count, all, weight, steps, 0, is_first, side, sums);
    if (side->first < side->past) side->do_rows(side->what, side->first, side->past);
}

#if !PAIRS
/* To the nearest bfloat16, ties to even, as the upper halves; a NaN stays one. */
TARGET INLINE NAME(shorts) NAME(narrow)(NAME(floats) v) {
    NAME(words) b = (NAME(words))v, up = b + 0x7fff + ((b >> 16) & 1), is_nan = (NAME(words))(v != v);
    return __builtin_convertvector(((up & ~is_nan) | (is_nan & 0x7fc00000)) >> 16, NAME(shorts));
}
#endif

#if !PAIRS || WIDTH < LANES
/* Sums and a bias, 32 each. */
TARGET INLINE void NAME(narrow_line)(const float *sums, const float *bias, bf16 *line) {
    for (int v = 0; v < PANEL; v += WIDTH) {
        NAME(floats) sum, add;
        memcpy(&sum, sums + v, sizeof sum);
        memcpy(&add, bias + v, sizeof add);
        NAME(shorts) half = NAME(narrow)(sum + add);
        memcpy(line + v, &half, sizeof half);
    }
}
#endif

TARGET INLINE void NAME(put_line)(const bf16 *line, int is_streamed, bf16 *out) {
    if (is_streamed) stream_line(out, line);
    else memcpy(out, line, PANEL * sizeof(bf16));
}

TARGET static void NAME(put)(const bf16 *rows, int64_t count, int is_large, bf16 *out, int64_t out_stride) {
    int is_streamed = is_large && is_whole_lines(out, out_stride);
    for (int64_t row = 0; row < count; row++) NAME(put_line)(rows + row * PANEL, is_streamed, out + row * out_stride);
}

TARGET static void NAME(round)(const float *sums, const float *bias, int64_t count, int is_large, bf16 *out,
                               int64_t out_stride) {
    int is_streamed = is_large && is_whole_lines(out, out_stride);
    for (int64_t row = 0; row < count; row++, sums += PANEL, out += out_stride) {
        ALIGNED bf16 line[PANEL];
        NAME(narrow_line)(sums, bias, line);
        NAME(put_line)(line, is_streamed, out);
    }
}

/* Without loads, and with so many sums that none waits for the previous one. The factors are no powers of two: a
 * processor that multiplies by zeros or ones takes less power, and may run faster than with any model's numbers. */
TARGET static int64_t NAME(spin)(int64_t rounds, float *sums) {
    enum { CHAINS = SUMS > 12 ? 16 : 12 }; /* as registers hold */
    NAME(floats) s[CHAINS];
    NAME(words) x = (NAME(words)){0} + 0x3f9d3faeu, w = (NAME(words)){0} + 0xbf8b3fc7u;
    for (int i = 0; i < CHAINS; i++) s[i] = (NAME(floats)){0};
    __asm__ volatile("" : "+" REGISTER(x), "+" REGISTER(w));
    for (int64_t round = 0; round < rounds; round++)
#pragma GCC unroll 16
        for (int i = 0; i < CHAINS; i++)
#if PAIRS
            s[i] = NAME(dot_pairs)(s[i], x[0], w);
#else
            s[i] += (NAME(floats))x * (NAME(floats))w;
#endif
    for (int i = 0; i < CHAINS; i++) memcpy(sums + i * WIDTH, &s[i], sizeof s[i]);
    return rounds * CHAINS * WIDTH * (PAIRS ? 4 : 2);
}

static const struct panel_products NAME(products) = {.staged_bytes = STAGED_BYTES(PAIRS),
                                                     .multiply = NAME(multiply),
                                                     .multiply_part = NAME(multiply_part),
                                                     .round = NAME(round),
                                                     .put = NAME(put),
                                                     .spin = NAME(spin),
                                                     .multiply_side = NAME(multiply_side)};

#undef ADD_ROWS
#undef ADDER
#undef MULTIPLY_ROWS
#undef MULTIPLIER
#undef FITTING
#undef PANELS_AT_ONCE
#undef VECTORS_AT_ONCE
#undef VECTORS
#undef NAME
#undef TARGET
#undef WIDTH
#undef ROWS
#undef SUMS
#undef NEAR
#undef NEAR_PART
#undef LEAST_AHEAD
#undef PAIRS
