/* y = x @ weight.T + bias with a weight of codes, see codes.h.
 *
 * Few rows meet a part of a panel that was made bfloat16 just before, in the first cache. For many a whole weight is
 * made bfloat16 first, once, and multiplied by as any other: `expand_codes` and `coded_linear` decide alike. */

#include "codes.h"
#include "vectors.h"

#define NEAR_STEPS 8  /* of a panel, 16 KiB, that few rows meet at once */
#define MORE_STEPS 64 /* 128 KiB for more rows, whose sums are then read and written less often */

/* A thread's scratch, before staged rows. */
struct codes_bench {
    float sums[STAGED_ROWS * PANEL];
    bf16 near[MORE_STEPS * STEP];
};

/* Where a thread is. */
struct place {
    struct codes_bench *bench;
    const struct panel_products *products;
    enum isa isa;
    struct staged staged;
    const int64_t *tokens; /* which row of x each row is, or NULL */
};

static struct place prepare(struct worker *worker) {
    prepare_tiles(worker->isa);
    struct codes_bench *bench = (struct codes_bench *)worker->scratch;
    const struct panel_products *products = panel_products(worker->isa);
    return (struct place){.bench = bench,
                          .products = products,
                          .isa = worker->isa,
                          .staged = {(char *)(bench + 1), -1, products->staged_bytes}};
}

/* Whether so many rows would have each panel made bfloat16 more than twice. */
static int expands(int64_t rows, int64_t inputs) { return rows > 2 * rows_to_stage(inputs); }

/* As `stage`, with inputs in another order. */
static void stage_in_order(const struct place *at, const struct linear *op, const int32_t *order, int64_t first,
                           int64_t count) {
    int64_t steps = parts(op->in_features, DEPTH), bytes = at->staged.bytes;
    for (int64_t row = 0; row < parts(count, LANES) * LANES; row++) {
        char *to = at->staged.rows + ((row & -LANES) * steps * DEPTH + row % LANES * DEPTH) * bytes;
        const bf16 *from = op->x;
        if (row < count) from += (at->tokens ? at->tokens[first + row] : first + row) * op->x_stride;
        for (int64_t i = 0; i < steps * DEPTH; i++) {
            bf16 value = row < count && i < op->in_features ? from[order[i]] : 0;
            char *here = to + (i / DEPTH * TILE + i % DEPTH) * bytes;
            if (bytes == sizeof(bf16)) memcpy(here, &value, sizeof value);
            else {
                float wide = widen(value);
                memcpy(here, &wide, sizeof wide);
            }
        }
    }
}

/* `count` rows from `first` on by the panels from `panel` to `past`. */
static void multiply_panels(const struct linear *op, const struct codes *codes, struct place *at, int64_t first,
                            int64_t count, int64_t panel, int64_t past) {
    int64_t steps = parts(op->in_features, DEPTH), at_once = count > GROUP ? MORE_STEPS : NEAR_STEPS;
    if (!codes->order) stage(&at->staged, op->x, op->x_stride, at->tokens, first, count, op->in_features);
    else if (at->staged.first != first) stage_in_order(at, op, codes->order, first, count);
    at->staged.first = first;
    for (; panel < past; panel++) {
        const char *weight = (const char *)op->weight + panel * bytes_of_panel(codes, op->in_features);
        float *sums = at->bench->sums;
        memset(sums, 0, parts(count, LANES) * LANES * PANEL * sizeof(float));
        for (int64_t done = 0; done < steps; done += at_once) {
            int64_t some = min64(at_once, steps - done);
            expand_steps(at->isa, codes, weight, done, some, at->bench->near);
            for (int64_t row = 0; row < count; row += GROUP)
                at->products->add(at->staged.rows + (row * steps * DEPTH + done * TILE) * at->staged.bytes,
                                  min64(GROUP, count - row), steps, at->bench->near, some, sums + row * PANEL);
        }
        finish_panel(op, at->products, sums, first, count, panel * PANEL, 0);
    }
}

/* Tasks: blocks of rows, of each one share of the panels after the other; or as `linear` by what was expanded. */
void coded_linear(const void *arguments, const struct step *step, struct worker *worker) {
    const struct coded_linear *coded = arguments;
    int64_t rows = step->num_tokens, inputs = coded->linear.in_features, panels = parts(coded->linear.out_features, PANEL);
    if (expands(rows, inputs) && !coded->codes.order) {
        struct linear dense = coded->linear;
        dense.weight = coded->expanded;
        linear(&dense, step, worker);
        return;
    }
    int64_t block = rows_to_stage(inputs), bytes = bytes_of_panel(&coded->codes, inputs);
    int64_t share = panels_of_task(rows, bytes, panels, worker->threads), shares = parts(panels, share);
    struct place at = prepare(worker);
    for (int64_t task; (task = take_task(worker)) < parts(rows, block) * shares;) {
        int64_t first = task / shares * block, panel = task % shares * share;
        multiply_panels(&coded->linear, &coded->codes, &at, first, min64(block, rows - first), panel,
                        min64(panels, panel + share));
    }
}

/* Tasks: panels. Nothing where the step's rows are few. */
void expand_codes(const void *arguments, const struct step *step, struct worker *worker) {
    const struct expand_codes *expand = arguments;
    const struct coded_linear *coded = &expand->coded;
    const struct linear *op = &coded->linear;
    int64_t steps = parts(op->in_features, DEPTH), bytes = bytes_of_panel(&coded->codes, op->in_features);
    if (!expands(step->num_tokens, op->in_features) || coded->codes.order) return;
    for (int64_t panel; (panel = take_task(worker)) < parts(op->out_features, PANEL);)
        expand_steps(worker->isa, &coded->codes, (const char *)op->weight + panel * bytes, 0, steps,
                     coded->expanded + panel * steps * STEP);
}

/* Tasks: groups that have rows, of each one share of the panels after the other; then what is past the last run. */
void coded_grouped_linear(const void *arguments, const struct step *step, struct worker *worker) {
    const struct coded_grouped_linear *coded = arguments;
    const struct grouped_linear *op = &coded->grouped;
    int64_t panels = op->out_features / PANEL, block = rows_to_stage(op->in_features);
    int64_t bytes = bytes_of_panel(&coded->codes, op->in_features);
    int64_t share = panels_of_task(1, bytes, panels, worker->threads), shares = parts(panels, share);
    struct run run = {.number = -1, .group = -1};
    struct place at = prepare(worker);
    at.tokens = op->tokens;
    for (int64_t task; task = take_task(worker), find_run(op, &run, task / shares);) {
        const struct linear one = product_of_run(op, &run, panels * bytes);
        int64_t panel = task % shares * share, past = min64(panels, panel + share), end = run.start + run.count;
        for (int64_t first = run.start; first < end; first += block)
            multiply_panels(&one, &coded->codes, &at, first, min64(block, end - first), panel, past);
    }
    clear_past_runs(op, step, worker, run.start);
}

/* A row's scales and zero points of one group to where they lie. */
static void pack_header(const struct coded_pack *op, int64_t row, int64_t group, char *to, int64_t output) {
    int64_t size = bytes_of_scale(op->codes.scales), groups = parts(op->in_features, op->codes.group);
    memcpy(to + output * size, op->row_scales + (row * groups + group) * size, size);
    if (has_zeros(op->codes.code_kind)) to[PANEL * size + output] = op->row_zeros[row * groups + group];
}

/* And its codes. */
static void pack_row(const struct coded_pack *op, int64_t row, char *panel, int64_t output) {
    const struct codes *codes = &op->codes;
    const uint8_t *from = op->rows + row * op->row_stride;
    int64_t of_step = bytes_of_codes(codes->code_kind), tile = output / LANES, output_of_tile = output % LANES;
    for (int64_t group = 0; group < parts(op->in_features, codes->group); group++, panel += bytes_of_group(codes)) {
        pack_header(op, row, group, panel, output);
        char *steps = panel + bytes_of_header(codes) + tile * of_step / 2;
        int64_t begin = group * codes->group, end = min64(op->in_features, begin + codes->group);
        for (int64_t i = begin; i < end; i += DEPTH, steps += of_step)
            for (int64_t j = 0; j < min64(DEPTH, end - i); j++) {
                int64_t line = j / 2, element = output_of_tile * 2 + j % 2;
                unsigned code = op->is_paired ? from[(i + j) / 2] >> (i + j) % 2 * 4 & 15 : from[i + j];
                if (codes->code_kind >= INT8) {
                    steps[line * 2 * LANES + element] = (char)code;
                    continue;
                }
                char *byte = steps + line / 4 * LINE + element % LANES * 4 + line % 4;
                *byte = (char)(element < LANES ? (*byte & 0xf0) | code : (*byte & 0x0f) | code << 4);
            }
    }
}

/* 16 rows of pairs of codes, of which rows 0 and 8, 1 and 9 ... share their bytes. */
static void pack_pairs(const struct coded_pack *op, int64_t row, char *panel, int64_t output) {
    const struct codes *codes = &op->codes;
    int64_t of_step = bytes_of_codes(codes->code_kind);
    for (int64_t group = 0; group < parts(op->in_features, codes->group); group++, panel += bytes_of_group(codes)) {
        int64_t begin = group * codes->group, end = min64(op->in_features, begin + codes->group);
        for (int64_t i = 0; i < LANES; i++) pack_header(op, row + i, group, panel, output + i);
        for (int64_t low = 0; low < LANES / 2; low++) {
            const uint8_t *first = op->rows + (row + low) * op->row_stride, *second = first + LANES / 2 * op->row_stride;
            char *to = panel + bytes_of_header(codes) + output / LANES * of_step / 2 + low * 8;
            for (int64_t i = begin; i < end; i += DEPTH, to += of_step)
                for (int64_t line = 0; line < 4; line++) { /* Eight inputs of both rows: the even ones, then the odd. */
                    uint32_t a, b, both[2];
                    memcpy(&a, first + i / 2 + line * 4, sizeof a);
                    memcpy(&b, second + i / 2 + line * 4, sizeof b);
                    both[0] = (a & 0x0f0f0f0f) | (b & 0x0f0f0f0f) << 4;
                    both[1] = (a >> 4 & 0x0f0f0f0f) | (b & 0xf0f0f0f0);
                    memcpy(to + line * LINE, both, sizeof both);
                }
        }
    }
}

/* Tasks: 16 rows each, as they lie in the packed weight. */
void coded_pack(const void *arguments, const struct step *step, struct worker *worker) {
    (void)step;
    const struct coded_pack *op = arguments;
    int64_t bytes = bytes_of_panel(&op->codes, op->in_features), last = op->first + op->count;
    for (int64_t task; (task = take_task(worker)) < parts(last, LANES) - op->first / LANES;) {
        int64_t tile = op->first / LANES + task, begin = max64(op->first, tile * LANES), end = min64(last, (tile + 1) * LANES);
        if (op->is_paired && end - begin == LANES && op->in_features % DEPTH == 0) {
            pack_pairs(op, begin - op->first, op->weight + begin / PANEL * bytes, begin % PANEL);
            continue;
        }
        for (int64_t row = begin; row < end; row++)
            pack_row(op, row - op->first, op->weight + row / PANEL * bytes, row % PANEL);
    }
}
