/* y = x @ weight.T + bias, in bfloat16 with float32 sums.
 *
 * A packed weight is made of panels of 32 outputs; a panel of steps of 32 inputs; a step of two tiles of 16 outputs,
 * each [16 pairs of inputs][16 outputs][2], which is what AMX multiplies by and what a vector of pair products reads.
 * So a thread reads its panels in order, once for all rows of a step. Both sizes are filled up with zeros.
 *
 * A sum runs over the inputs in order, whatever the number of rows: a row's result does not depend on its company. */

#include "operators.h"
#include "panels.h"
#include "transpose.h"

#define TILE (LANES * DEPTH)         /* bfloat16 of a tile */
#define STEP (2 * TILE)              /* of a step of a panel */
#define STAGED_ROWS 512              /* rows at most that are multiplied by a panel while it is near */
#define STAGED (SCRATCH - (256 << 10)) /* bytes of the scratch for them; their sums take the rest */
#define FEW_ROWS 64                  /* up to here reading the weight is what takes time */
#define INPUTS_AT_ONCE 512           /* with more rows: what of a panel stays in the first cache */

static int64_t staged_rows(int64_t inputs) {
    return max64(LANES, min64(STAGED_ROWS, (1 << 20) / (2 * inputs)) & -(2 * LANES));
}

/* `count` rows for the products: by 16, as tiles [inputs / 32][16 rows][32] with AMX, else row after row. */
static void stage(bf16 *staged, const bf16 *x, int64_t stride, int64_t count, int64_t in_features, enum isa isa) {
    int64_t steps = parts(in_features, DEPTH), rounded = parts(count, LANES) * LANES;
    for (int64_t row = 0; row < rounded; row++) {
        bf16 *to = isa == WITH_AMX ? staged + (row & -LANES) * steps * DEPTH + (row % LANES) * DEPTH
                                   : staged + row * steps * DEPTH;
        int64_t apart = isa == WITH_AMX ? TILE : DEPTH;
        if (row >= count) {
            for (int64_t step = 0; step < steps; step++) memset(to + step * apart, 0, DEPTH * sizeof(bf16));
            continue;
        }
        const bf16 *from = x + row * stride;
        int64_t whole = in_features / DEPTH;
        for (int64_t step = 0; step < whole; step++) memcpy(to + step * apart, from + step * DEPTH, DEPTH * sizeof(bf16));
        if (whole < steps) {
            memset(to + whole * apart, 0, DEPTH * sizeof(bf16));
            memcpy(to + whole * apart, from + whole * DEPTH, (in_features % DEPTH) * sizeof(bf16));
        }
    }
}

/* The sums [rows][32] of a panel, with its bias, to where they belong. */
CLONES static void finish(const struct linear *op, const float *sums, int64_t first_row, int64_t count, int64_t output) {
    int64_t width = min64(PANEL, op->out_features - output);
    float bias[PANEL] = {0};
    for (int64_t i = 0; op->bias && i < width; i++) bias[i] = widen(op->bias[output + i]);
    for (int64_t row = 0; row < count; row++) {
        const float *from = sums + row * PANEL;
        int64_t at = (first_row + row) * op->out_stride + output;
        if (op->is_float) {
            float *to = (float *)op->out + at;
            for (int64_t i = 0; i < width; i++) to[i] = from[i] + bias[i];
        } else if (width == PANEL) {
            bf16 *to = (bf16 *)op->out + at;
            for (int64_t i = 0; i < PANEL; i++) to[i] = narrow(from[i] + bias[i]);
        } else {
            bf16 *to = (bf16 *)op->out + at;
            for (int64_t i = 0; i < width; i++) to[i] = narrow(from[i] + bias[i]);
        }
    }
}

/* Tasks: blocks of rows, of each one share of the panels after the other. */
void linear(const void *arguments, const struct step *step, struct worker *worker) {
    const struct linear *op = arguments;
    int64_t rows = op->rows < 0 ? step->num_tokens : op->rows;
    int64_t steps = parts(op->in_features, DEPTH), panels = parts(op->out_features, PANEL);
    int64_t block = staged_rows(steps * DEPTH), blocks = parts(rows, block);
    /* Shares large enough to be read in one go, and several a thread, in case one is held up. */
    int64_t share = max64(1, min64((128 << 10) / (steps * STEP * sizeof(bf16)), panels / (4 * worker->threads)));
    if (rows > FEW_ROWS) share = max64(share, min64(16, parts(panels, 2 * worker->threads)));
    int64_t shares = parts(panels, share);
    bf16 *staged = (bf16 *)worker->scratch;
    float *sums = (float *)(worker->scratch + STAGED);
    int64_t staged_block = -1;
    multiply_panel *multiply = panel_product(worker->isa);
    prepare_tiles(worker->isa);
    for (int64_t task; (task = take_task(worker)) < blocks * shares;) {
        int64_t first = task / shares * block, count = min64(block, rows - first);
        if (task / shares != staged_block) {
            stage(staged, op->x + first * op->x_stride, op->x_stride, count, op->in_features, worker->isa);
            staged_block = task / shares;
        }
        int64_t panel = task % shares * share, past = min64(panels, panel + share);
        int64_t at_once = rows > FEW_ROWS ? INPUTS_AT_ONCE / DEPTH : steps;
        for (; panel < past; panel++) {
            const bf16 *weight = op->weight + panel * steps * STEP;
            for (int64_t s = 0; s < steps; s += at_once)
                multiply(staged, count, steps, weight + s * STEP, s, min64(at_once, steps - s), sums);
            finish(op, sums, first, count, panel * PANEL);
        }
    }
}

/* Rows `from` to `past` of a tile of 16. */
static void pack_rows(const struct pack *op, int64_t from, int64_t past, bf16 *to) {
    for (int64_t row = from; row < past; row++) {
        const bf16 *values = op->rows + (row - op->first) * op->row_stride;
        bf16 *column = to + row % LANES * 2;
        for (int64_t i = 0; i < op->in_features; i++)
            column[i / DEPTH * STEP + i % DEPTH / 2 * LANES * 2 + i % 2] = values[i];
    }
}

#if HAS_AMX
/* All 16, for inputs in whole steps. */
AVX512 static void pack_tile(const struct pack *op, int64_t from, bf16 *to) {
    const bf16 *values = op->rows + (from - op->first) * op->row_stride;
    for (int64_t i = 0; i < op->in_features; i += DEPTH, to += STEP) {
        __m512i pairs[LANES];
        for (int row = 0; row < LANES; row++) pairs[row] = _mm512_loadu_si512(values + row * op->row_stride + i);
        transpose(pairs);
        for (int pair = 0; pair < LANES; pair++) _mm512_storeu_si512(to + pair * LANES * 2, pairs[pair]);
    }
}
#endif

/* Tasks: 16 rows each, as they lie in the packed weight. */
void pack(const void *arguments, const struct step *step, struct worker *worker) {
    (void)step;
    const struct pack *op = arguments;
    int64_t steps = parts(op->in_features, DEPTH), last = op->first + op->count;
    for (int64_t task; (task = take_task(worker)) < parts(last, LANES) - op->first / LANES;) {
        int64_t tile = op->first / LANES + task;
        bf16 *to = op->weight + tile / 2 * steps * STEP + tile % 2 * TILE;
        int64_t from = max64(op->first, tile * LANES), past = min64(last, (tile + 1) * LANES);
#if HAS_AMX
        if (worker->isa >= WITH_AVX512_BF16 && past - from == LANES && op->in_features % DEPTH == 0) {
            pack_tile(op, from, to);
            continue;
        }
#endif
        pack_rows(op, from, past, to);
    }
}

/* Tasks: tokens. A token's row is one column of a packed tile. */
void embed(const void *arguments, const struct step *step, struct worker *worker) {
    const struct embed *op = arguments;
    int64_t steps = parts(op->in_features, DEPTH);
    for (int64_t token; (token = take_task(worker)) < step->num_tokens;) {
        int64_t row = step->input_ids[token];
        const bf16 *column = op->weight + row / PANEL * steps * STEP + row % PANEL / LANES * TILE + row % LANES * 2;
        bf16 *to = op->out + token * op->out_stride;
        for (int64_t i = 0; i + 1 < op->in_features; i += 2)
            memcpy(to + i, column + i / DEPTH * STEP + i % DEPTH / 2 * LANES * 2, 2 * sizeof(bf16));
        if (op->in_features % 2) {
            int64_t i = op->in_features - 1;
            to[i] = column[i / DEPTH * STEP + i % DEPTH / 2 * LANES * 2];
        }
    }
}
