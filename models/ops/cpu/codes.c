/* y = x @ weight.T + bias with a weight of codes, see codes.h.
 *
 * Few rows are multiplied by codes that are converted in registers, if the instruction set has such products, other rows by
 * a part of a panel right after its conversion to numbers, in the L1 cache. If numbers are scaled, many rows are
 * multiplied by the whole weight, which is first converted to bfloat16, like any other: `expand_codes`
 * and `coded_linear` make the same decision. */

#include "codes.h"
#include "vectors.h"

/* Where numbers are scaled: */
#define SIDE_STEPS 2     /* of each of several panels */
#define MORE_STEPS 64    /* 128 KiB for more rows, whose sums are then read and written less often */
#define APART 160        /* between panels: at a distance of 4 KiB loads would wait for stores to other panels */
#define AHEAD 4096       /* bytes between the codes that are read and those that are fetched */

/* A thread's scratch, before staged rows. */
struct codes_bench {
    float sums[STAGED_ROWS * PANEL], of_group[STAGED_ROWS * PANEL];
    bf16 near[MORE_STEPS * STEP]; /* what `expand_steps` makes */
};

/* A thread's position. */
struct place {
    struct codes_bench *bench;
    const struct panel_products *products;
    enum isa isa;
    struct numbers numbers;
    struct staged staged;
    int is_large;  /* whether the output is too large to be read again from a cache */
    bf16 *columns; /* [steps][16 pairs][rows][2], up to 16 rows as `add_columns` takes them; or NULL */
    float *scales; /* of staged integers, see `struct coded_part`; or NULL */
    const int64_t *tokens; /* row of x for each row, or NULL */
};

static struct place prepare(struct worker *worker, const struct codes *codes, int64_t inputs) {
    struct codes_bench *bench = (struct codes_bench *)worker->scratch;
    const struct panel_products *products = panel_products(worker->isa);
    struct place at = {.bench = bench,
                       .products = products,
                       .isa = worker->isa,
                       .numbers = numbers_of(worker->isa, codes),
                       .staged = {(char *)(bench + 1), -1, products->staged_bytes}};
    if (at.numbers.are_integers) at.staged.bytes = sizeof(int16_t);
    char *rest = at.staged.rows + rows_to_stage(inputs) * parts(inputs, DEPTH) * DEPTH * at.staged.bytes;
    if (at.numbers.are_integers) at.scales = (float *)(void *)rest;
    if (products->add_columns && codes->code_kind == INT4) at.columns = (bf16 *)rest;
    return at;
}

/* Whether so many rows would need each panel converted to bfloat16 more than twice. */
static int expands(enum isa isa, const struct codes *codes, int64_t rows, int64_t inputs) {
    return numbers_of(isa, codes).is_scaled && !codes->order && rows > 2 * rows_to_stage(inputs);
}

/* Some of the 32 inputs of a step as they are staged, the others 0. `order`: their places in a row, or NULL. */
static void get_step(const bf16 *from, const int32_t *order, int64_t some, bf16 values[DEPTH]) {
    if (!order) {
        memcpy(values, from, some * sizeof(bf16));
    } else if (some == DEPTH) {
        for (int i = 0; i < DEPTH; i++) values[i] = from[order[i]];
    } else {
        for (int64_t i = 0; i < some; i++) values[i] = from[order[i]];
    }
    for (int64_t i = some; i < DEPTH; i++) values[i] = 0;
}

/* Like `stage`, with inputs in another order, unless `order` is NULL, or as integers. */
static void stage_steps(const struct place *at, const struct linear *op, const struct codes *codes, int64_t first,
                        int64_t count) {
    int64_t steps = parts(op->in_features, DEPTH), bytes = at->staged.bytes;
    for (int64_t row = 0; row < parts(count, LANES) * LANES; row++) {
        char *to = at->staged.rows + ((row & -LANES) * steps * DEPTH + row % LANES * DEPTH) * bytes;
        const bf16 *from = op->x;
        if (row < count) from += (at->tokens ? at->tokens[first + row] : first + row) * op->x_stride;
        for (int64_t step = 0; step < steps; step++, to += TILE * bytes) {
            int64_t done = step * DEPTH, some = row < count ? min64(DEPTH, op->in_features - done) : 0;
            bf16 values[DEPTH];
            get_step(codes->order ? from : from + done, codes->order ? codes->order + done : NULL, some, values);
#if HAS_X86
            if (at->scales) {
                float *scale = at->scales + ((row & -LANES) * steps + step * LANES + row % LANES);
                stage_integers(values, (int)codes->code_kind, (int16_t *)(void *)to, scale);
                continue;
            }
#endif
            if (bytes == sizeof(bf16)) memcpy(to, values, sizeof values);
            else
                for (int i = 0; i < DEPTH; i += LANES) store((float *)to + i, load_bf16(values + i));
        }
    }
}

/* Memory for the converted steps of panels, and the lines that are prefetched while rows are multiplied by them. */
static struct near_panels part_of(const struct place *at, const struct codes *codes, const struct panels *panels,
                                  int64_t first, int64_t some) {
    int64_t later = first * panels->bytes / panels->steps + AHEAD;
    int64_t next = later < panels->bytes ? 0 : panels->count - 1;
    return (struct near_panels){.first = at->bench->near,
                                .apart = some * STEP + APART,
                                .count = panels->count,
                                .steps = some,
                                .ahead = panels->first + later + next * panels->bytes,
                                .ahead_apart = panels->bytes,
                                .stride = bytes_of_codes(codes->code_kind) / (DEPTH / 2)};
}

/* Multiply some steps of panels by staged rows, and add to their sums [panel][rows][32]. */
static void add_part(const struct place *at, const struct codes *codes, const struct panels *panels, int64_t first,
                     int64_t some, int64_t rows, float *sums) {
    int64_t steps = panels->steps;
    struct near_panels near = part_of(at, codes, panels, first, some);
    for (int64_t panel = 0; panel < panels->count; panel++)
        expand_steps(at->isa, codes, panels->first + panel * panels->bytes, first, some,
                     at->bench->near + panel * near.apart);
    for (int64_t row = 0; row < rows; row += GROUP, near.stride = 0)
        at->products->add(at->staged.rows + (row * steps * DEPTH + first * TILE) * at->staged.bytes,
                          min64(GROUP, rows - row), steps, &near, sums + row * PANEL);
}

/* Multiply staged rows by panels of scaled numbers; by several if rows are few. */
static void multiply_scaled(const struct place *at, const struct codes *codes, const struct panels *panels,
                            int64_t rows) {
    int64_t at_once = rows > GROUP ? MORE_STEPS : panels->count > 1 ? SIDE_STEPS : CODED_STEPS;
    for (int64_t done = 0; done < panels->steps; done += at_once)
        add_part(at, codes, panels, done, min64(at_once, panels->steps - done), rows, at->bench->sums);
}

/* The same where the sums of groups are scaled. */
static void multiply_unscaled(const struct place *at, const struct codes *codes, const struct panels *panels,
                              int64_t rows) {
    int64_t steps = panels->steps, in_group = codes->group / DEPTH;
    struct coded_part part = {.codes = codes,
                              .header = panels->first,
                              .x = at->staged.rows,
                              .scales = at->scales,
                              .all = steps,
                              .steps = steps,
                              .sums = at->bench->sums,
                              .apart = panels->bytes,
                              .distance = look_ahead(rows),
                              .numbers = at->bench->near,
                              .of_group = at->bench->of_group};
    if (rows <= at->numbers.code_rows) {
        at->numbers.add_codes(&part, rows, panels->count);
        return;
    }
    part.stride = bytes_of_codes(codes->code_kind) / (DEPTH / 2);
    for (int64_t done = 0; done < steps; done += part.steps) {
        int64_t group = done / in_group;
        part.header = panels->first + group * bytes_of_group(codes), part.begun = done % in_group;
        part.x = at->staged.rows + done * TILE * at->staged.bytes;
        if (at->scales) part.scales = at->scales + done * LANES;
        part.steps = min64(CODED_STEPS, steps - done), part.is_last = done + part.steps == steps;
        part.ahead = part.header + part.begun * bytes_of_codes(codes->code_kind) + part.distance;
        expand_steps(at->isa, codes, panels->first, done, part.steps, at->bench->near);
        at->numbers.add_numbers(&part, rows);
    }
}

/* Multiply staged rows by panels. */
static void multiply_near(const struct place *at, const struct codes *codes, const struct panels *panels,
                          int64_t rows) {
    int64_t count = panels->count * rows;
    memset(at->bench->sums, 0, (rows > LANES ? parts(rows, LANES) * LANES : count) * PANEL * sizeof(float));
    (at->numbers.is_scaled ? multiply_scaled : multiply_unscaled)(at, codes, panels, rows);
}

/* How many panels a number of rows is multiplied by together. */
static int64_t panels_at_once(const struct place *at, int64_t rows) {
    if (at->columns && rows <= LANES) return COLUMN_PANELS;
    if (at->numbers.is_scaled) return at->products->side_panels(rows);
    if (rows > 1 || !at->numbers.add_codes) return 1;
    return reads_one_stream() ? 1 : at->numbers.panels;
}

/* Staged rows, 16 at most, to columns. */
static void stage_columns(const struct place *at, int64_t count, int64_t steps) {
    for (int64_t i = 0; i < steps; i++)
        for (int64_t row = 0; row < count; row++)
            for (int64_t pair = 0; pair < DEPTH / 2; pair++)
                memcpy(at->columns + i * DEPTH * count + (pair * count + row) * 2,
                       (const bf16 *)at->staged.rows + i * TILE + row * DEPTH + pair * 2, 2 * sizeof(bf16));
}

/* Like `multiply_near`, for up to 16 rows as columns. */
static void multiply_columns(const struct place *at, const struct codes *codes, const struct panels *panels,
                             int64_t rows) {
    float *sums = at->bench->of_group; /* [panel][32][16] */
    memset(sums, 0, panels->count * PANEL * LANES * sizeof(float));
    for (int64_t done = 0, some; done < panels->steps; done += some) {
        some = min64(CODED_STEPS, panels->steps - done);
        const struct near_panels near = part_of(at, codes, panels, done, some);
        for (int64_t panel = 0; panel < panels->count; panel++)
            expand_rows(codes, panels->first + panel * panels->bytes, done, some, near.ahead + panel * near.ahead_apart,
                        at->bench->near + panel * near.apart);
        at->products->add_columns(at->columns + done * DEPTH * rows, rows, &near, sums);
    }
    for (int64_t output = 0; output < panels->count * PANEL; output++)
        for (int64_t row = 0; row < rows; row++)
            at->bench->sums[(output / PANEL * rows + row) * PANEL + output % PANEL] = sums[output * LANES + row];
}

/* Multiply `count` rows from `first` on by the panels from `panel` to `past`. */
static void multiply_panels(const struct linear *op, const struct codes *codes, struct place *at, int64_t first,
                            int64_t count, int64_t panel, int64_t past) {
    int64_t steps = parts(op->in_features, DEPTH);
    if (at->staged.first != first) {
        if (codes->order || at->scales) stage_steps(at, op, codes, first, count);
        else stage(&at->staged, op->x, op->x_stride, at->tokens, first, count, op->in_features);
        if (at->columns && count <= LANES) stage_columns(at, count, steps);
    }
    at->staged.first = first;
    int has_columns = at->columns && count <= LANES;
    int64_t at_once = panels_at_once(at, count);
    if (has_columns) prepare_columns(at->isa, count);
    else prepare_rows(at->isa, count);
    for (int64_t made; panel < past; panel += made) {
        struct panels panels = {.bytes = bytes_of_panel(codes, op->in_features), .steps = steps};
        made = panels.count = past - panel < at_once && at->numbers.add_codes ? 1 : min64(past - panel, at_once);
        panels.first = (const char *)op->weight + panel * panels.bytes;
        if (has_columns) multiply_columns(at, codes, &panels, count);
        else multiply_near(at, codes, &panels, count);
        for (int64_t i = 0; i < made; i++)
            finish_panel(op, at->products, at->bench->sums + i * count * PANEL, first, count, (panel + i) * PANEL,
                         at->is_large);
    }
}

/* Tasks: as `struct cut` says; or like `linear` with the expanded weight. */
void coded_linear(const void *arguments, const struct step *step, struct worker *worker) {
    const struct coded_linear *coded = arguments;
    int64_t rows = step->num_tokens, inputs = coded->linear.in_features, panels = parts(coded->linear.out_features, PANEL);
    if (expands(worker->isa, &coded->codes, rows, inputs)) {
        struct linear dense = coded->linear;
        dense.weight = coded->expanded;
        linear(&dense, step, worker);
        return;
    }
    const struct cut cut =
        cut_product(rows, rows_to_stage(inputs), bytes_of_panel(&coded->codes, inputs), panels, worker->threads);
    struct place at = prepare(worker, &coded->codes, inputs);
    at.is_large = rows > FEW_ROWS;
    for (struct share share; take_share(&cut, worker, &share);)
        multiply_panels(&coded->linear, &coded->codes, &at, share.first, share.count, share.panel, share.past);
    if (at.is_large) settle_rounded();
}

/* Tasks: panels. Nothing where the step's rows are few. */
void expand_codes(const void *arguments, const struct step *step, struct worker *worker) {
    const struct expand_codes *expand = arguments;
    const struct coded_linear *coded = &expand->coded;
    const struct linear *op = &coded->linear;
    int64_t steps = parts(op->in_features, DEPTH), bytes = bytes_of_panel(&coded->codes, op->in_features);
    if (!expands(worker->isa, &coded->codes, step->num_tokens, op->in_features)) return;
    for (int64_t panel; (panel = take_task(worker)) < parts(op->out_features, PANEL);)
        expand_steps(worker->isa, &coded->codes, (const char *)op->weight + panel * bytes, 0, steps,
                     coded->expanded + panel * steps * STEP);
}

/* Tasks: groups that have rows, each with one share of the panels after the other; then the rows after the last run. */
void coded_grouped_linear(const void *arguments, const struct step *step, struct worker *worker) {
    const struct coded_grouped_linear *coded = arguments;
    const struct grouped_linear *op = &coded->grouped;
    int64_t panels = parts(op->out_features, PANEL), block = rows_to_stage(op->in_features);
    int64_t bytes = bytes_of_panel(&coded->codes, op->in_features);
    int64_t share = panels_of_task(1, bytes, panels, worker->threads), shares = parts(panels, share);
    struct run run = {.number = -1, .group = -1};
    struct place at = prepare(worker, &coded->codes, op->in_features);
    at.tokens = op->tokens;
    for (int64_t task; task = take_task(worker), find_run(op, step, &run, task / shares);) {
        const struct linear one = product_of_run(op, &run, panels * bytes);
        int64_t panel = task % shares * share, past = min64(panels, panel + share), end = run.start + run.count;
        for (int64_t first = run.start; first < end; first += block)
            multiply_panels(&one, &coded->codes, &at, first, min64(block, end - first), panel, past);
    }
    clear_past_runs(op, step, worker, run.start);
}

/* Copy a row's scales and zero points of one group to their addresses. */
static void pack_header(const struct coded_pack *op, int64_t row, int64_t group, char *to, int64_t output) {
    int64_t size = bytes_of_scale(op->codes.scales), groups = parts(op->in_features, op->codes.group);
    memcpy(to + output * size, op->row_scales + (row * groups + group) * size, size);
    if (op->codes.has_zeros) to[PANEL * size + output] = op->row_zeros[row * groups + group];
}

/* Copy its codes. */
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
                char *byte = steps + line / 4 * LINE + element * 2 + line % 4 / 2;
                *byte = (char)(line % 2 == 0 ? (*byte & 0xf0) | code : (*byte & 0x0f) | code << 4);
            }
    }
}

/* A row of pairs of codes in whole steps. */
static void pack_pairs(const struct coded_pack *op, int64_t row, char *panel, int64_t output) {
    const struct codes *codes = &op->codes;
    int64_t of_step = bytes_of_codes(codes->code_kind);
    for (int64_t group = 0; group < parts(op->in_features, codes->group); group++, panel += bytes_of_group(codes)) {
        int64_t begin = group * codes->group, end = min64(op->in_features, begin + codes->group);
        const uint8_t *from = op->rows + row * op->row_stride + begin / 2;
        char *to = panel + bytes_of_header(codes) + output / LANES * of_step / 2 + output % LANES * 4;
        pack_header(op, row, group, panel, output);
        for (int64_t i = begin; i < end; i += DEPTH, to += of_step)
            for (int64_t line = 0; line < 4; line++, from += 4) { /* Eight inputs: the even ones, then the odd. */
                uint32_t both, even, odd;
                memcpy(&both, from, sizeof both);
                even = both & 0x0f0f0f0f, odd = both >> 4 & 0x0f0f0f0f;
                even |= even >> 4, odd |= odd >> 4;
                uint32_t words = (even & 0xff) | (even >> 8 & 0xff00) | (odd & 0xff) << 16 | (odd >> 16 & 0xff) << 24;
                memcpy(to + line * LINE, &words, sizeof words);
            }
    }
}

/* Tasks: 16 rows each, in the order of the packed weight. */
void coded_pack(const void *arguments, const struct step *step, struct worker *worker) {
    (void)step;
    const struct coded_pack *op = arguments;
    int64_t bytes = bytes_of_panel(&op->codes, op->in_features), last = op->first + op->count;
    for (int64_t task; (task = take_task(worker)) < parts(last, LANES) - op->first / LANES;) {
        int64_t tile = op->first / LANES + task, begin = max64(op->first, tile * LANES), end = min64(last, (tile + 1) * LANES);
        int in_words = op->is_paired && op->in_features % DEPTH == 0;
        for (int64_t row = begin; row < end; row++)
            (in_words ? pack_pairs : pack_row)(op, row - op->first, op->weight + row / PANEL * bytes, row % PANEL);
    }
}
