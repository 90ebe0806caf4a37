/* y = x @ weight.T + bias with a weight of 8 or 4 bits, see quantized.h. */

#include "quantized.h"
#include "vectors.h"

#define STAGED_VALUES (1 << 20) /* of rows that are multiplied by a panel while it is near: 16 rows always fit */
#define AHEAD 8192              /* bytes between what is read of a weight and what is fetched */

/* A thread's scratch. */
struct quantized_bench {
    int8_t values[STAGED_VALUES];
    int8_t unpacked[BLOCKS_AT_ONCE * BYTES_OF_VALUES];
    float scales[STAGED_VALUES / BLOCK];
    int32_t totals[STAGED_VALUES / STEP_INPUTS];
    float sums[STAGED_ROWS * PANEL];
    int32_t products[BLOCKS_AT_ONCE * TWO_TILES * PANEL];
};
_Static_assert(sizeof(struct quantized_bench) <= SCRATCH, "a thread's scratch holds it");

static int64_t staged_rows(int64_t blocks) {
    return max64(LANES, min64(STAGED_ROWS, STAGED_VALUES / (blocks * BLOCK)) & -(int64_t)TWO_TILES);
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

/* A block of a row, rounded to the nearest of 255 values; its scale. What is not finite makes it NaN. */
INLINE float stage_block(int8_t *to, int32_t *totals, const bf16 *x, int64_t count) {
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    vector values[BLOCK / LANES];
    bits largest = {0};
    for (int i = 0; i < BLOCK / LANES; i++) {
        int64_t width = max64(0, min64(LANES, count - i * LANES));
        values[i] = width == LANES ? load_bf16(x + i * LANES) : load_some(x + i * LANES, width);
        bits size = (bits)values[i] & 0x7fffffff;
        largest = (bits)choose((integers)(size > largest), (vector)size, (vector)largest);
    }
    union {
        uint32_t bits;
        float value;
    } most = {(uint32_t)largest_of((integers)largest)};
    int is_finite = most.bits < 0x7f800000;
    float inverse = is_finite && most.value > 1e-30f ? LARGEST / most.value : 0;
    for (int step = 0; step < STEPS; step++) {
        integers total = {0};
        for (int i = 0; i < STEP_INPUTS / LANES; i++) {
            vector shifted = values[step * STEP_INPUTS / LANES + i] * inverse + 12582912.0f; /* The sum rounds. */
            integers whole = (integers)shifted - 0x4b400000;
            total += whole;
            bytes narrowed = __builtin_convertvector(whole, bytes);
            memcpy(to + step * BYTES_OF_TILE + i * LANES, &narrowed, sizeof narrowed);
        }
        totals[step * LANES] = total_of(total);
    }
    return is_finite ? most.value / LARGEST : __builtin_nanf("");
}

CLONES static void stage_row(struct quantized_bench *bench, int64_t row, const bf16 *x, int64_t inputs) {
    int64_t blocks = parts(inputs, BLOCK), tile = row / LANES * blocks, place = row % LANES;
    int8_t *to = bench->values + tile * STEPS * BYTES_OF_TILE + place * STEP_INPUTS;
    float *scales = bench->scales + tile * LANES + place;
    int32_t *totals = bench->totals + tile * STEPS * LANES + place;
    for (int64_t block = 0; block < blocks; block++)
        scales[block * LANES] =
            stage_block(to + block * STEPS * BYTES_OF_TILE, totals + block * STEPS * LANES, x + block * BLOCK,
                        min64(BLOCK, inputs - block * BLOCK));
}

/* Store the sums, with the panel's bias, to the output; lines of a large output past the caches. */
CLONES static void finish(const struct linear *op, const struct panel_products *products, const float *sums, int64_t row,
                          int64_t count, int64_t output, int is_large) {
    int64_t width = min64(PANEL, op->out_features - output), first = row * op->out_stride + output;
    ALIGNED float bias[PANEL] = {0};
    for (int64_t i = 0; op->bias && i < width; i++) bias[i] = widen(op->bias[output + i]);
    if (is_large && !op->is_float && width == PANEL) {
        for (; count > 0; count--, sums += PANEL, first += op->out_stride) {
            ALIGNED bf16 line[PANEL];
            for (int half = 0; half < PANEL; half += LANES) store_bf16(line + half, load(sums + half) + load(bias + half));
            products->put(line, 1, (bf16 *)op->out + first);
        }
        return;
    }
    for (; count > 0; count--, sums += PANEL, first += op->out_stride)
        for (int half = 0; half < PANEL; half += LANES) {
            int64_t left = min64(LANES, width - half);
            vector sum = load(sums + half) + load(bias + half);
            if (left <= 0) continue;
            if (op->is_float) memcpy((float *)op->out + first + half, &sum, left * sizeof(float));
            else if (left == LANES) store_bf16((bf16 *)op->out + first + half, sum);
            else store_some((bf16 *)op->out + first + half, sum, left);
        }
}

/* Lines that are about to be written, from memory into this core's cache. */
static void fetch_output(const struct linear *op, int64_t row, int64_t count, int64_t output) {
    int64_t size = op->is_float ? sizeof(float) : sizeof(bf16), bytes = min64(PANEL, op->out_features - output) * size;
    const char *line = (const char *)op->out + (row * op->out_stride + output) * size;
    for (; count > 0; count--, line += op->out_stride * size)
        for (int64_t byte = 0; byte < bytes; byte += LINE) __builtin_prefetch(line + byte, 1);
}

/* Where a thread is: the rows that are staged, -1 for none. */
struct place {
    struct quantized_bench *bench;
    enum isa isa;
    const int64_t *tokens; /* which row of x each row is, or NULL */
    int64_t first_row;
    int is_large; /* whether the output is too large to be read again from a cache */
};

/* Staged rows by one panel. With many, as many blocks at once as stay in the first cache from group to group. */
static void multiply_panel(const struct linear *op, int64_t bits, const struct place *at, int64_t rows,
                           int64_t output) {
    struct quantized_bench *bench = at->bench;
    const struct quantized_products *by = quantized_products(at->isa, rows, bits);
    int64_t blocks = parts(op->in_features, BLOCK), groups = parts(rows, TWO_TILES), size = bytes_of_block(bits);
    const char *weight = (const char *)op->weight + output / PANEL * blocks * size;
    int64_t lines = parts(size / LINE, groups);
    memset(bench->sums, 0, rows * PANEL * sizeof(float));
    for (int64_t block = 0; block < blocks; block += BLOCKS_AT_ONCE) {
        struct quantized_panel panel = {.blocks = weight + block * size, .stride = size, .bits = bits};
        panel.count = min64(BLOCKS_AT_ONCE, blocks - block);
        panel.values = (const int8_t *)panel.blocks + scales_of_block(bits) * sizeof(bf16);
        panel.values_stride = size;
        if (bits == 4 && by->unpacks) {
            unpack_values(&panel, bench->unpacked);
            panel.values = bench->unpacked, panel.values_stride = BYTES_OF_VALUES;
        }
        const char *later = panel.blocks + (groups == 1 ? AHEAD : panel.count * size);
        struct lines ahead = {later, (int)lines, groups == 1};
        for (int64_t group = 0; group < groups; group++) {
            int64_t tile = group * (TWO_TILES / LANES) * blocks + block, row = at->first_row + group * TWO_TILES;
            const struct quantized_rows here = {.values = bench->values + tile * STEPS * BYTES_OF_TILE,
                                                .scales = bench->scales + tile * LANES,
                                                .totals = bench->totals + tile * STEPS * LANES,
                                                .blocks = blocks,
                                                .count = min64(TWO_TILES, rows - group * TWO_TILES)};
            float *sums = bench->sums + group * TWO_TILES * PANEL;
            int is_last = block + panel.count == blocks;
            if (is_last && groups > 1 && !at->is_large) fetch_output(op, row, here.count, output);
            by->multiply(&here, &panel, sums, bench->products, &ahead);
            if (is_last) finish(op, panel_products(at->isa), sums, row, here.count, output, at->is_large);
        }
    }
}

static struct place prepare(struct worker *worker) {
    prepare_tiles(worker->isa);
    return (struct place){.bench = (struct quantized_bench *)worker->scratch, .isa = worker->isa, .first_row = -1};
}

/* `count` rows from `first` on by the panels from `panel` to `past`. */
static void multiply_panels(const struct linear *op, int64_t bits, struct place *at, int64_t first, int64_t count,
                            int64_t panel, int64_t past) {
    if (at->first_row != first)
        for (int64_t row = 0; row < count; row++) {
            int64_t token = at->tokens ? at->tokens[first + row] : first + row;
            stage_row(at->bench, row, op->x + token * op->x_stride, op->in_features);
        }
    at->first_row = first;
    prepare_rows(at->isa, count);
    for (; panel < past; panel++) multiply_panel(op, bits, at, count, panel * PANEL);
}

/* Tasks: blocks of rows, of each one share of the panels after the other. */
void quantized_linear(const void *arguments, const struct step *step, struct worker *worker) {
    const struct quantized_linear *quantized = arguments;
    const struct linear *op = &quantized->linear;
    int64_t blocks = parts(op->in_features, BLOCK), panels = parts(op->out_features, PANEL), rows = step->num_tokens;
    int64_t at_once = staged_rows(blocks);
    int64_t share = panels_of_task(rows, blocks * bytes_of_block(quantized->bits), panels, worker->threads);
    int64_t shares = parts(panels, share);
    struct place at = prepare(worker);
    at.is_large = rows > FEW_ROWS;
    for (int64_t task; (task = take_task(worker)) < parts(rows, at_once) * shares;) {
        int64_t first = task / shares * at_once, panel = task % shares * share;
        multiply_panels(op, quantized->bits, &at, first, min64(at_once, rows - first), panel,
                        min64(panels, panel + share));
    }
    if (at.is_large) settle_rounded();
}

/* Tasks: groups that have rows, of each one share of the panels after the other; then what is past the last run. */
void quantized_grouped_linear(const void *arguments, const struct step *step, struct worker *worker) {
    const struct quantized_grouped_linear *quantized = arguments;
    const struct grouped_linear *op = &quantized->grouped;
    int64_t blocks = parts(op->in_features, BLOCK), panels = op->out_features / PANEL, at_once = staged_rows(blocks);
    int64_t bytes = blocks * bytes_of_block(quantized->bits);
    int64_t share = panels_of_task(1, bytes, panels, worker->threads), shares = parts(panels, share);
    struct run run = {.number = -1, .group = -1};
    struct place at = prepare(worker);
    at.tokens = op->tokens;
    for (int64_t task; task = take_task(worker), find_run(op, &run, task / shares);) {
        const struct linear one = product_of_run(op, &run, panels * bytes);
        int64_t panel = task % shares * share, past = min64(panels, panel + share), end = run.start + run.count;
        for (int64_t first = run.start; first < end; first += at_once)
            multiply_panels(&one, quantized->bits, &at, first, min64(at_once, end - first), panel, past);
    }
    clear_past_runs(op, step, worker, run.start);
}
