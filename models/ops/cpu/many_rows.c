/* Products of more rows than a group of tiles, and the gated ones: see `multiply_many` in panels.h.
 *
 * All groups of rows are multiplied by one part of a panel before the next part. So a weight is read from memory once for
 * hundreds of rows, and while one part is multiplied, the next is fetched into the L2 cache. Inputs are cut so that the
 * rows' part stays in that cache too; sums wait in memory for the next part, and are added in the same order.
 *
 * A panel's sums are rounded or gated between the steps of the products that follow, because tile products leave the
 * vector units idle. */

#include "operators.h"
#include "panels.h"

#define PART_STEPS 40 /* the most steps of a panel that rows are multiplied by at once */
#define GATED_ROWS 16 /* that are gated together, while they are in the L1 cache */
#define WAITING 32    /* panels whose sums wait for the next part of the inputs */

int64_t rows_of_block(int64_t inputs) {
    int64_t rows = min64(BLOCK_ROWS, STAGED_BLOCK / (inputs * (int64_t)sizeof(bf16)));
    return max64(LANES, rows / (rows < GROUP ? LANES : GROUP) * (rows < GROUP ? LANES : GROUP));
}

int64_t bytes_of_waiting(void) { return WAITING * BLOCK_ROWS * PANEL * (int64_t)sizeof(float); }

/* A panel, or a panel of gates and the panel that it gates, whose sums are complete. */
struct made {
    const struct many *many;
    const float *sums[2];
    ALIGNED float bias[2][PANEL];
    int64_t output;
    int is_simple; /* whether rows of 32 bfloat16 are written */
    int64_t rows;  /* rows that are not finished yet */
};

static void get_bias(const struct linear *op, int64_t output, float *bias) {
    for (int64_t i = 0; i < PANEL; i++) bias[i] = op->bias && output + i < op->out_features ? widen(op->bias[output + i]) : 0;
}

static void gate_rows(const struct made *made, int64_t first, int64_t past) {
    const struct many *many = made->many;
    const struct linear *op = many->op;
    ALIGNED bf16 both[2][GATED_ROWS * PANEL], gated[GATED_ROWS * PANEL];
    for (int64_t row = first, count; row < past; row += count) {
        bf16 *out = (bf16 *)op->out + (many->first + row) * op->out_stride + made->output;
        count = min64(GATED_ROWS, past - row);
        for (int half = 0; half < 2; half++)
            many->products->round(made->sums[half] + row * PANEL, made->bias[half], count, 0, both[half], PANEL);
        gate_panel(many->isa, many->by, both[0], PANEL, both[1], count, gated);
        many->products->put(gated, count, many->is_large, out, op->out_stride);
    }
}

static void finish_rows(const void *what, int64_t first, int64_t past) {
    const struct made *made = what;
    const struct many *many = made->many;
    const struct linear *op = many->op;
    const float *sums = made->sums[0] + first * PANEL;
    int64_t row = many->first + first, count = past - first;
    if (!made->is_simple) finish_panel(op, many->products, sums, row, count, made->output, many->is_large);
    else if (many->by) gate_rows(made, first, past);
    else
        many->products->round(sums, made->bias[0], count, many->is_large,
                              (bf16 *)op->out + row * op->out_stride + made->output, op->out_stride);
}

/* A position in the work: a part of the inputs, of panel `half` of a unit. A unit is a panel, or a panel of gates and the
 * panel that it gates. */
struct part {
    int64_t unit, half, step, steps;
};

static const bf16 *weight_of(const struct many *many, const struct part *part) {
    int64_t panel = part->unit + part->half * (many->op->out_features / PANEL / 2);
    return many->op->weight + (panel * parts(many->op->in_features, DEPTH) + part->step) * STEP;
}

/* Multiply all rows by a part of a panel, and finish share `which` of `of` shares of the rows of `made`. */
static void multiply_all(const struct many *many, const struct part *part, const bf16 *next, float *sums,
                         const struct made *made, int64_t which, int64_t of) {
    int64_t all = parts(many->op->in_features, DEPTH), groups = 0, bytes = many->staged->bytes;
    for (int64_t done = 0; done < many->count; done += rows_of_group(many->count - done, many->count)) groups++;
    struct side_work side = {.do_rows = finish_rows, .what = made, .soon = (const char *)next};
    side.lines = next ? parts(STEP * (int64_t)sizeof(bf16) / LINE, groups) : 0;
    for (int64_t done = 0, group = 0, count; done < many->count; done += count, group++) {
        count = rows_of_group(many->count - done, many->count);
        int64_t at = which * groups + group, times = of * groups;
        side.first = made->rows * at / times, side.past = made->rows * (at + 1) / times;
        many->products->multiply_part(many->staged->rows + (done * all * DEPTH + part->step * TILE) * bytes, count, all,
                                      weight_of(many, part), part->steps, part->step == 0, sums + done * PANEL, &side);
        side.soon += side.lines * part->steps * LINE;
    }
}

void multiply_many(const struct many *many, int64_t first, int64_t past) {
    const struct linear *op = many->op;
    int64_t steps = parts(op->in_features, DEPTH), cuts = parts(steps, PART_STEPS), each = parts(steps, cuts);
    int64_t halves = many->by ? 2 : 1, at_once = cuts > 1 ? WAITING / halves : 1, slots = max64(2, at_once);
    int64_t rounded = parts(many->count, LANES) * LANES * PANEL;
    struct made made = {.many = many};
    for (int64_t unit = first; unit < past; unit += at_once) {
        int64_t end = min64(past, unit + at_once);
        for (int64_t step = 0; step < steps; step += each)
            for (int64_t one = unit; one < end; one++) {
                float *sums = many->sums + (one - first) % slots * halves * rounded;
                int is_last = step + each >= steps;
                for (int64_t half = 0; half < halves; half++) {
                    struct part here = {one, half, step, min64(each, steps - step)}, next = here;
                    if (half + 1 < halves) next.half++;
                    else if (one + 1 < end) next.unit++, next.half = 0;
                    else if (!is_last) next.unit = unit, next.half = 0, next.step += each;
                    else next.unit = end, next.half = 0, next.step = 0;
                    multiply_all(many, &here, next.unit < past ? weight_of(many, &next) : NULL, sums + half * rounded,
                                 &made, half, halves);
                }
                made.rows = 0;
                if (!is_last) continue;
                made.output = one * PANEL, made.rows = many->count;
                made.is_simple = !op->is_float && made.output + PANEL <= op->out_features;
                for (int64_t half = 0; half < halves; half++) {
                    made.sums[half] = sums + half * rounded;
                    get_bias(op, made.output + half * (op->out_features / 2), made.bias[half]);
                }
            }
    }
    if (made.rows) finish_rows(&made, 0, made.rows);
}
