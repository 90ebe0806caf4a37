/* y = x @ weight.T + bias with a weight of 8 or 4 bits, see quantized.h. */

#include "quantized.h"
#include "vectors.h"

#define STAGED_VALUES (1 << 20) /* of rows that a cached panel is multiplied by: 16 rows always fit */
#define FEWER_VALUES (256 << 10) /* of these by AVX2, whose processors have smaller L2 caches and compute more slowly */
#define WHOLE_PANEL (128 << 10) /* bytes of a panel that may be read again for each few rows */
#define MOST_HELD 16            /* panels of gates that wait for those of the other half, if rows are few */
#define AHEAD 8192              /* bytes between the read and the prefetched addresses of a weight */

/* The same on processors that read one stream fastest: rows that vectors multiply at once fetch into the first cache, more
 * rows, which meet a block several times, into the second. */
#define ROWS_AT_ONCE 4
#define NEAR_AHEAD 1024
#define FAR_AHEAD 4096

/* From this number of rows on, with one group, a weight is prefetched PAGES_IN_TURN further ahead, pages in turn. AMX
 * multiplies a tile of rows by 8 bits fast enough for the order of memory. */
static int64_t rows_in_turn(enum isa isa, int64_t bits) { return isa == WITH_AMX && bits == 8 ? LANES + 1 : 8; }

/* The part of a weight that is prefetched while one group of rows is multiplied, with each block. */
static struct lines lines_ahead(enum isa isa, int64_t bits, int64_t rows, const char *blocks, int64_t size) {
    unsigned lines = (unsigned)(size / LINE);
    if (fetches_far()) return (struct lines){blocks + AHEAD, lines, 1, 0};
    if (reads_one_stream()) {
        int is_near = rows <= ROWS_AT_ONCE;
        return (struct lines){blocks + (is_near ? NEAR_AHEAD : FAR_AHEAD), lines, is_near, 0};
    }
    int in_turn = rows >= rows_in_turn(isa, bits);
    return (struct lines){blocks + AHEAD + in_turn * PAGES_IN_TURN, lines, 1, in_turn};
}

/* A thread's scratch. */
struct quantized_bench {
    int8_t values[STAGED_VALUES];
    int8_t unpacked[BLOCKS_AT_ONCE * BYTES_OF_VALUES]; /* or expanded */
    float scales[STAGED_VALUES / BLOCK];
    int32_t offsets[STAGED_VALUES / STEP_INPUTS];
    float sums[STAGED_ROWS * PANEL];
    int32_t products[BLOCKS_AT_ONCE * TWO_TILES * PANEL];
    bf16 gates[2 * STAGED_ROWS * PANEL]; /* of one panel, or [FEW_ROWS][MOST_HELD * PANEL] */
    bf16 ups[STAGED_ROWS * PANEL], gated[STAGED_ROWS * PANEL];
};
_Static_assert(FEW_ROWS * MOST_HELD <= STAGED_ROWS * 2, "gates that wait have room");
_Static_assert(sizeof(struct quantized_bench) <= SCRATCH, "a thread's scratch holds it");

static int64_t staged_rows(enum isa isa, int64_t blocks) {
    int64_t values = isa == WITH_AVX2 ? FEWER_VALUES : STAGED_VALUES;
    return max64(LANES, min64(STAGED_ROWS, values / (blocks * BLOCK)) & -(int64_t)TWO_TILES);
}

typedef int32_t eight __attribute__((vector_size(LANES * 2)));
typedef int32_t four __attribute__((vector_size(LANES)));

INLINE int32_t larger_of(int32_t a, int32_t b) { return a > b ? a : b; }

/* Add halves, then halves of these: the order of integer additions does not matter. */
INLINE int32_t largest_of(integers v) {
    eight halves_of[2];
    four quarters[2];
    memcpy(halves_of, &v, sizeof v);
    eight is_first = halves_of[0] > halves_of[1], largest = (halves_of[0] & is_first) | (halves_of[1] & ~is_first);
    memcpy(quarters, &largest, sizeof quarters);
    four first = quarters[0] > quarters[1], last = (quarters[0] & first) | (quarters[1] & ~first);
    return larger_of(larger_of(last[0], last[2]), larger_of(last[1], last[3]));
}

INLINE int32_t total_of(integers v) {
    eight halves_of[2];
    four quarters[2];
    memcpy(halves_of, &v, sizeof v);
    halves_of[0] += halves_of[1];
    memcpy(quarters, halves_of, sizeof quarters);
    four last = quarters[0] + quarters[1];
    return (last[0] + last[2]) + (last[1] + last[3]);
}

/* Round a block of a row to the nearest of 255 values; returns its scale. A value that is not finite makes it NaN.
 * `offsets`: see `struct quantized_rows`. */
INLINE float stage_block(int8_t *to, int32_t *offsets, const bf16 *x, int64_t count, int64_t weight_bits) {
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    vector values[BLOCK / LANES];
    bits largest = {0};
    for (int i = 0; i < BLOCK / LANES; i++) {
        int64_t width = max64(0, min64(LANES, count - i * LANES));
        values[i] = width == LANES ? load_bf16(x + i * LANES) : load_some(x + i * LANES, width);
        bits size = (bits)values[i] & 0x7fffffff;
        largest = (bits)choose((integers)(size > largest), (vector)size, (vector)largest);
    }
    struct block_scale scale = scale_of_block((uint32_t)largest_of((integers)largest));
    if (scale.inverse == 0) memset(values, 0, sizeof values);
    int32_t totals[STEPS];
    for (int step = 0; step < STEPS; step++) {
        integers total = {0};
        for (int i = 0; i < STEP_INPUTS / LANES; i++) {
            vector shifted = values[step * STEP_INPUTS / LANES + i] * scale.inverse + 12582912.0f; /* The sum rounds. */
            integers whole = (integers)shifted - 0x4b400000;
            total += whole;
            bytes narrowed = __builtin_convertvector(whole, bytes);
            memcpy(to + step * BYTES_OF_TILE + i * LANES, &narrowed, sizeof narrowed);
        }
        totals[step] = total_of(total);
    }
    set_offsets(offsets, totals, weight_bits);
    return scale.of_values;
}

/* The blocks of a row. */
CLONES static void stage_blocks(int8_t *to, float *scales, int32_t *offsets, const bf16 *x, int64_t inputs,
                                int64_t weight_bits) {
    for (int64_t i = 0; i < inputs; i += BLOCK, to += STEPS * BYTES_OF_TILE, scales += LANES, offsets += STEPS * LANES)
        *scales = stage_block(to, offsets, x + i, min64(BLOCK, inputs - i), weight_bits);
}

static void stage_row(struct quantized_bench *bench, enum isa isa, int64_t row, const bf16 *x, int64_t inputs,
                      int64_t weight_bits) {
    int64_t tile = row / LANES * parts(inputs, BLOCK), place = row % LANES;
    int8_t *to = bench->values + tile * STEPS * BYTES_OF_TILE + place * STEP_INPUTS;
    float *scales = bench->scales + tile * LANES + place;
    int32_t *offsets = bench->offsets + tile * STEPS * LANES + place;
#if HAS_X86
    if (isa == WITH_AVX2 || isa == WITH_AVX_VNNI) {
        avx2_stage_blocks(to, scales, offsets, x, inputs, weight_bits, isa == WITH_AVX2 && weight_bits == 4);
        return;
    }
#endif
    (void)isa;
    stage_blocks(to, scales, offsets, x, inputs, weight_bits);
}

/* Where a thread is: the rows that are staged, -1 for none. */
struct place {
    struct quantized_bench *bench;
    const struct panel_products *products; /* by which sums are rounded */
    enum isa isa;
    int64_t bits;          /* of the weight */
    const int64_t *tokens; /* row of x for each row, or NULL */
    int64_t first_row;
    int expands;  /* whether the staged rows are multiplied by expanded panels */
    int is_large; /* whether the output is too large to be read again from a cache */
};

static struct place prepare(struct worker *worker, int64_t bits) {
    prepare_tiles(worker->isa);
    return (struct place){.bench = (struct quantized_bench *)worker->scratch,
                          .products = panel_products(worker->isa),
                          .isa = worker->isa,
                          .bits = bits,
                          .first_row = -1};
}

/* Stage `count` rows from `first` on unless they are staged. */
static void stage_rows(const struct linear *op, struct place *at, int64_t first, int64_t count) {
    at->expands = at->bits == 4 && count >= EXPANDED_ROWS && quantized_products(at->isa, count, at->bits)->expand;
    for (int64_t row = 0; at->first_row != first && row < count; row++) {
        int64_t token = at->tokens ? at->tokens[first + row] : first + row;
        stage_row(at->bench, at->isa, row, op->x + token * op->x_stride, op->in_features, at->bits);
    }
    at->first_row = first;
    prepare_rows(at->isa, count);
}

/* For so few values a compiler or library uses REP STOS, which takes as long to begin as dozens of products. */
static void clear(float *sums, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        store(sums + i, (vector){0});
        __asm__ volatile("" ::: "memory");
    }
}

/* How many of `rows` staged rows are multiplied by a whole panel before the next ones. If AVX-512 multiplies many rows by a
 * small panel, so few that their sums stay in the first cache until they are rounded, otherwise all. */
static int64_t rows_at_once(const struct place *at, int64_t rows, int64_t inputs) {
    int64_t bytes = parts(inputs, BLOCK) * bytes_of_block(at->bits);
    int is_whole = rows > FEW_ROWS && bytes <= WHOLE_PANEL && !quantized_products(at->isa, rows, at->bits)->unpacks;
    return is_whole && at->isa != WITH_AVX2 ? LANES : rows;
}

/* Sums of `rows` staged rows from `first` on, of `all` staged ones, times one panel. If these are all, as many blocks at
 * once as stay in the first cache from row to row. */
static void multiply_panel(const struct linear *op, struct place *at, int64_t first, int64_t rows, int64_t all,
                           int64_t number) {
    struct quantized_bench *bench = at->bench;
    int64_t bits = at->bits;
    const struct quantized_products *by = quantized_products(at->isa, rows, bits);
    int64_t blocks = parts(op->in_features, BLOCK), size = bytes_of_block(bits), before = first / LANES * blocks;
    int64_t groups = parts(all, rows < all ? LANES : TWO_TILES), at_once = rows < all ? blocks : BLOCKS_AT_ONCE;
    const char *weight = (const char *)op->weight + number * blocks * size;
    clear(bench->sums, rows * PANEL);
    for (int64_t block = 0; block < blocks; block += at_once) {
        struct quantized_panel panel = {.blocks = weight + block * size, .stride = size, .bits = bits};
        panel.count = min64(at_once, blocks - block);
        panel.values = (const int8_t *)panel.blocks + scales_of_block(bits) * sizeof(bf16);
        panel.values_stride = size;
        if (bits == 4 && by->unpacks) {
            unpack_values(&panel, bench->unpacked);
            panel.values = bench->unpacked, panel.values_stride = BYTES_OF_VALUES;
        }
        /* The next part, of which each group of rows fetches a share. */
        struct lines ahead = {panel.blocks + panel.count * size, (unsigned)parts(size / LINE, groups), 0, 0};
        ahead.at += before * ahead.lines * LINE;
        if (groups == 1 && !at->expands) ahead = lines_ahead(at->isa, bits, rows, panel.blocks, size);
        const struct quantized_rows here = {.values = bench->values + (before + block) * STEPS * BYTES_OF_TILE,
                                            .scales = bench->scales + (before + block) * LANES,
                                            .offsets = bench->offsets + (before + block) * STEPS * LANES,
                                            .blocks = blocks,
                                            .count = rows};
        if (!at->expands) {
            by->multiply(&here, &panel, bench->sums, bench->products, &ahead);
            continue;
        }
        by->expand(&panel, bench->unpacked);
        panel.values = bench->unpacked;
        by->multiply_expanded(&here, &panel, bench->sums, &ahead);
    }
}

/* Multiply `count` rows from `first` on by the panels from `panel` to `past`. */
static void multiply_panels(const struct linear *op, struct place *at, int64_t first, int64_t count, int64_t panel,
                            int64_t past) {
    stage_rows(op, at, first, count);
    int64_t at_once = rows_at_once(at, count, op->in_features);
    for (; panel < past; panel++)
        for (int64_t row = 0, some; row < count; row += some) {
            some = min64(at_once, count - row);
            multiply_panel(op, at, row, some, count, panel);
            finish_panel(op, at->products, at->bench->sums, first + row, some, panel * PANEL, at->is_large);
        }
}

static struct cut cut_rounded(const struct linear *op, int64_t bits, int64_t rows, int64_t panels,
                              const struct worker *worker) {
    int64_t blocks = parts(op->in_features, BLOCK);
    return cut_product(rows, staged_rows(worker->isa, blocks), blocks * bytes_of_block(bits), panels, worker->threads);
}

/* Tasks: as `struct cut` says. */
void quantized_linear(const void *arguments, const struct step *step, struct worker *worker) {
    const struct quantized_linear *quantized = arguments;
    const struct linear *op = &quantized->linear;
    int64_t rows = step->num_tokens, panels = parts(op->out_features, PANEL);
    const struct cut cut = cut_rounded(op, quantized->bits, rows, panels, worker);
    struct place at = prepare(worker, quantized->bits);
    at.is_large = rows > FEW_ROWS;
    for (struct share share; take_share(&cut, worker, &share);)
        multiply_panels(op, &at, share.first, share.count, share.panel, share.past);
    if (at.is_large) settle_rounded();
}

/* The sums of the panel of that number, rounded. */
static void round_panel(const struct linear *op, const struct place *at, int64_t count, int64_t number, bf16 *out,
                        int64_t out_stride) {
    ALIGNED float bias[PANEL];
    for (int64_t i = 0; i < PANEL; i++) bias[i] = op->bias ? widen(op->bias[number * PANEL + i]) : 0;
    at->products->round(at->bench->sums, bias, count, 0, out, out_stride);
}

/* Rows of a share times some panels of gates, and times those of the other half. */
static void gate_panels(const struct quantized_gated_linear *quantized, struct place *at, const struct share *share,
                        int64_t panel, int64_t panels) {
    const struct linear *op = &quantized->gated.linear;
    struct quantized_bench *bench = at->bench;
    int64_t half = op->out_features / PANEL / 2, stride = panels * PANEL, rows = share->count;
    int64_t at_once = rows_at_once(at, rows, op->in_features);
    for (int64_t i = 0; i < panels; i++)
        for (int64_t row = 0, some; row < rows; row += some) {
            some = min64(at_once, rows - row);
            multiply_panel(op, at, row, some, rows, panel + i);
            round_panel(op, at, some, panel + i, bench->gates + row * stride + i * PANEL, stride);
        }
    for (int64_t i = 0; i < panels; i++)
        for (int64_t row = 0, some; row < rows; row += some) {
            bf16 *out = (bf16 *)op->out + (share->first + row) * op->out_stride + (panel + i) * PANEL;
            some = min64(at_once, rows - row);
            multiply_panel(op, at, row, some, rows, half + panel + i);
            round_panel(op, at, some, half + panel + i, bench->ups, PANEL);
            const bf16 *gates = bench->gates + row * stride + i * PANEL;
            gate_panel(at->isa, &quantized->gated.by, gates, stride, bench->ups, some, bench->gated);
            at->products->put(bench->gated, some, at->is_large, out, op->out_stride);
        }
}

/* Tasks: as `struct cut` says of the gates' panels. With few rows the gates of several panels wait, so that a thread
 * reads the weight in the order of memory. */
void quantized_gated_linear(const void *arguments, const struct step *step, struct worker *worker) {
    const struct quantized_gated_linear *quantized = arguments;
    const struct linear *op = &quantized->gated.linear;
    int64_t rows = step->num_tokens, panels = op->out_features / PANEL / 2;
    const struct cut cut = cut_rounded(op, quantized->bits, rows, panels, worker);
    struct place at = prepare(worker, quantized->bits);
    at.is_large = rows > FEW_ROWS;
    for (struct share share; take_share(&cut, worker, &share);) {
        int64_t held = share.count <= FEW_ROWS ? MOST_HELD : 1;
        stage_rows(op, &at, share.first, share.count);
        for (int64_t panel = share.panel; panel < share.past; panel += held)
            gate_panels(quantized, &at, &share, panel, min64(held, share.past - panel));
    }
    if (at.is_large) settle_rounded();
}

/* Tasks: as `struct cut` says. A thread's panels come in order. */
void quantized_greedy_head(const struct greedy_head *op, const struct step *step, struct worker *worker) {
    const struct linear product = {.x = op->x,
                                   .x_stride = op->x_stride,
                                   .weight = op->weight,
                                   .in_features = op->in_features,
                                   .out_features = op->out_features};
    int64_t panels = parts(op->out_features, PANEL);
    const struct cut cut = cut_rounded(&product, op->bits, step->num_tokens, panels, worker);
    struct place at = prepare(worker, op->bits);
    for (struct share share; take_share(&cut, worker, &share);) {
        int64_t at_once = rows_at_once(&at, share.count, product.in_features);
        stage_rows(&product, &at, share.first, share.count);
        for (int64_t panel = share.panel; panel < share.past; panel++)
            for (int64_t row = 0, some; row < share.count; row += some) {
                some = min64(at_once, share.count - row);
                multiply_panel(&product, &at, row, some, share.count, panel);
                keep_best(op, at.bench->sums, share.first + row, some, panel * PANEL, worker->thread);
            }
    }
}

/* Tasks: groups that have rows, each with one share of the panels after the other; then the rows after the last run. */
void quantized_grouped_linear(const void *arguments, const struct step *step, struct worker *worker) {
    const struct quantized_grouped_linear *quantized = arguments;
    const struct grouped_linear *op = &quantized->grouped;
    int64_t blocks = parts(op->in_features, BLOCK), panels = parts(op->out_features, PANEL);
    int64_t at_once = staged_rows(worker->isa, blocks);
    int64_t bytes = blocks * bytes_of_block(quantized->bits);
    int64_t share = panels_of_task(1, bytes, panels, worker->threads), shares = parts(panels, share);
    struct run run = {.number = -1, .group = -1};
    struct place at = prepare(worker, quantized->bits);
    at.tokens = op->tokens;
    for (int64_t task; task = take_task(worker), find_run(op, step, &run, task / shares);) {
        const struct linear one = product_of_run(op, &run, panels * bytes);
        int64_t panel = task % shares * share, past = min64(panels, panel + share), end = run.start + run.count;
        for (int64_t first = run.start; first < end; first += at_once)
            multiply_panels(&one, &at, first, min64(at_once, end - first), panel, past);
    }
    clear_past_runs(op, step, worker, run.start);
}
