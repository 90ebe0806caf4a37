/* y = x @ weight.T + bias, in bfloat16 with float32 sums.
 *
 * A packed weight consists of panels of 32 outputs; a panel of steps of 32 inputs; a step of two tiles of 16 outputs,
 * each [16 pairs of inputs][16 outputs][2], the operand of AMX and of vectors of pair products. So a thread reads its
 * panels in order, once for all rows of a step. Both sizes are padded with zeros.
 *
 * A sum runs over the inputs in order, for any number of rows: a row's result does not depend on the batch. */

#include "operators.h"
#include "panels.h"
#include "transpose.h"

#define STAGED (768 << 10)   /* bytes of rows that are multiplied by panels while they are in the cache */
#define AHEAD 8192           /* with one group: bytes between the weight's read and prefetched addresses */
#define AHEAD_OF_FEW 3072    /* and with up to FEWEST_ROWS rows, which are multiplied at once */
#define AHEAD_OF_ONE 512     /* where panels are read one after the other, see `reads_one_stream` */
#define FEWEST_ROWS 8

/* Whole groups, or whole tiles if rows are that long. */
int64_t rows_to_stage(int64_t inputs) {
    int64_t rows = min64(STAGED_ROWS, STAGED / (int64_t)(inputs * sizeof(bf16))), whole = rows < GROUP ? LANES : GROUP;
    return max64(LANES, rows / whole * whole);
}

/* Inputs as float32. */
CLONES static void widen_inputs(float *to, const bf16 *from, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = widen(from[i]);
}

static void stage_rows(const struct staged *staged, const bf16 *x, int64_t stride, const int64_t *tokens, int64_t count,
                       int64_t in_features) {
    int64_t steps = parts(in_features, DEPTH), rounded = parts(count, LANES) * LANES, whole = in_features / DEPTH;
    for (int64_t row = 0; row < rounded; row++) {
        char *to = staged->rows + ((row & -LANES) * steps * DEPTH + row % LANES * DEPTH) * staged->bytes;
        const bf16 *from = x + (tokens && row < count ? tokens[row] : row) * stride;
        int64_t step = 0;
        if (staged->bytes == sizeof(bf16) && row < count)
            for (; step < whole; step++) memcpy(to + step * TILE * sizeof(bf16), from + step * DEPTH, DEPTH * sizeof(bf16));
        for (; step < steps; step++) {
            int64_t inputs = row >= count ? 0 : step < whole ? DEPTH : in_features % DEPTH;
            char *here = to + step * TILE * staged->bytes;
            if (inputs < DEPTH) memset(here, 0, DEPTH * staged->bytes);
            if (staged->bytes == sizeof(bf16)) memcpy(here, from + step * DEPTH, inputs * sizeof(bf16));
            else widen_inputs((float *)here, from + step * DEPTH, inputs);
        }
    }
}

void stage(struct staged *staged, const bf16 *x, int64_t stride, const int64_t *tokens, int64_t first, int64_t count,
           int64_t in_features) {
    if (staged->first == first) return;
    staged->first = first;
    if (tokens) stage_rows(staged, x, stride, tokens + first, count, in_features);
    else stage_rows(staged, x + first * stride, stride, NULL, count, in_features);
}

/* A thread's memory for a product. */
struct bench {
    const struct panel_products *products;
    float *sums; /* `bytes_of_waiting` */
    struct staged staged;
    const int64_t *tokens; /* row of x for each row, or NULL */
    int is_large;          /* whether the output is too large to be read again from a cache */
};

static struct bench prepare(struct worker *worker, int is_large) {
    prepare_tiles(worker->isa);
    const struct panel_products *products = panel_products(worker->isa);
    return (struct bench){.products = products,
                          .sums = (float *)worker->scratch,
                          .staged = {worker->scratch + bytes_of_waiting(), -1, products->staged_bytes},
                          .is_large = is_large};
}

CLONES void finish_panel(const struct linear *op, const struct panel_products *products, const float *sums, int64_t row,
                         int64_t count, int64_t output, int is_large) {
    int64_t width = min64(PANEL, op->out_features - output), first = row * op->out_stride + output;
    ALIGNED float bias[PANEL] = {0};
    for (int64_t i = 0; op->bias && i < width; i++) bias[i] = widen(op->bias[output + i]);
    if (!op->is_float && width == PANEL) {
        products->round(sums, bias, count, is_large, (bf16 *)op->out + first, op->out_stride);
        return;
    }
    for (int64_t done = 0; done < count; done++, first += op->out_stride)
        for (int64_t i = 0; i < width; i++) {
            float sum = sums[done * PANEL + i] + bias[i];
            if (op->is_float) ((float *)op->out)[first + i] = sum;
            else ((bf16 *)op->out)[first + i] = narrow(sum);
        }
}

int64_t look_ahead(int64_t rows) {
    if (rows > FEWEST_ROWS || fetches_far()) return AHEAD;
    return reads_one_stream() ? AHEAD_OF_ONE : AHEAD_OF_FEW;
}

int64_t multiply_first(const struct panel_products *products, const char *staged, int64_t count, const bf16 *weight,
                       int64_t panels, int64_t steps, int64_t ahead, float *sums) {
    int64_t made = 0;
    if (ahead && products->multiply_side && !reads_one_stream())
        made = products->multiply_side(staged, count, weight, panels, steps, sums);
    if (made) return made;
    products->multiply(staged, count, weight, steps, ahead, sums);
    return 1;
}

/* Multiply `count` rows from `first` on by the panels from `panel` to `past`. */
static void multiply_panels(const struct linear *op, struct bench *bench, int64_t first, int64_t count, int64_t panel,
                            int64_t past) {
    int64_t steps = parts(op->in_features, DEPTH);
    stage(&bench->staged, op->x, op->x_stride, bench->tokens, first, count, op->in_features);
    if (count > GROUP) {
        const struct many many = {.op = op,
                                  .products = bench->products,
                                  .staged = &bench->staged,
                                  .first = first,
                                  .count = count,
                                  .sums = bench->sums,
                                  .is_large = bench->is_large};
        multiply_many(&many, panel, past);
        return;
    }
    for (int64_t made; panel < past; panel += made) {
        made = multiply_first(bench->products, bench->staged.rows, count, op->weight + panel * steps * STEP,
                              past - panel, steps, look_ahead(count), bench->sums);
        for (int64_t i = 0; i < made; i++)
            finish_panel(op, bench->products, bench->sums + i * count * PANEL, first, count, (panel + i) * PANEL,
                         bench->is_large);
    }
}

/* Enough to be read in one go, and several tasks per thread, in case one is delayed. */
int64_t panels_of_task(int64_t rows, int64_t bytes, int64_t panels, int threads) {
    int64_t share = max64(1, min64(max64(4, (512 << 10) / bytes), panels / (4 * threads)));
    return rows > FEW_ROWS ? max64(share, min64(16, parts(panels, 2 * threads))) : share;
}

struct cut cut_product(int64_t rows, int64_t block, int64_t bytes, int64_t panels, int threads) {
    int64_t blocks = parts(rows, block), whole = max64(0, blocks - threads);
    int64_t share = panels_of_task(rows, bytes, panels, threads), shares = parts(panels, share);
    return (struct cut){.rows = rows,
                        .panels = panels,
                        .block = block,
                        .whole = whole,
                        .share = share,
                        .shares = shares,
                        .tasks = whole + (blocks - whole) * shares};
}

struct cut cut_dense(int64_t rows, int64_t in_features, int64_t panels, int threads) {
    int64_t steps = parts(in_features, DEPTH);
    return cut_product(rows, rows_of_block(steps * DEPTH), steps * STEP * sizeof(bf16), panels, threads);
}

int take_share(const struct cut *cut, struct worker *worker, struct share *share) {
    int64_t task = take_task(worker), past = task - cut->whole;
    if (task >= cut->tasks) return 0;
    share->first = (past < 0 ? task : cut->whole + past / cut->shares) * cut->block;
    share->count = min64(cut->block, cut->rows - share->first);
    share->panel = past < 0 ? 0 : past % cut->shares * cut->share;
    share->past = past < 0 ? cut->panels : min64(cut->panels, share->panel + cut->share);
    return 1;
}

/* Tasks: as `struct cut` says. */
void linear(const void *arguments, const struct step *step, struct worker *worker) {
    const struct linear *op = arguments;
    int64_t rows = step->num_tokens;
    const struct cut cut = cut_dense(rows, op->in_features, parts(op->out_features, PANEL), worker->threads);
    struct bench bench = prepare(worker, rows > FEW_ROWS);
    prepare_rows(worker->isa, rows);
    for (struct share share; take_share(&cut, worker, &share);)
        multiply_panels(op, &bench, share.first, share.count, share.panel, share.past);
    if (bench.is_large) settle_rounded();
}

int find_run(const struct grouped_linear *op, const struct step *step, struct run *run, int64_t number) {
    while (run->number < number) {
        run->start += run->count, run->count = 0;
        while (run->count == 0) {
            if (++run->group == op->groups) return 0;
            run->count = op->counts ? op->counts[run->group] : step->num_tokens;
        }
        run->number++;
    }
    return 1;
}

struct linear product_of_run(const struct grouped_linear *op, const struct run *run, int64_t bytes) {
    /* Without counts, the run's first row is that of the group's columns. */
    int64_t columns = op->counts ? 0 : run->group, rows = op->counts ? 0 : run->start;
    return (struct linear){.x = op->x + columns * op->in_features - rows * op->x_stride,
                           .x_stride = op->x_stride,
                           .weight = (const bf16 *)((const char *)op->weight + run->group * bytes),
                           .bias = op->bias ? op->bias + run->group * op->out_features : NULL,
                           .out = (bf16 *)op->out + columns * op->out_features - rows * op->out_stride,
                           .out_stride = op->out_stride,
                           .in_features = op->in_features,
                           .out_features = op->out_features};
}

void clear_past_runs(const struct grouped_linear *op, const struct step *step, struct worker *worker, int64_t from) {
    int64_t rows = step->num_tokens * op->per_token;
    for (int64_t row = from; worker->thread == 0 && row < rows; row++)
        memset(op->out + row * op->out_stride, 0, op->out_features * sizeof(bf16));
}

/* Tasks: groups that have rows, each with one share of the panels after the other; then the rows after the last run. */
void grouped_linear(const void *arguments, const struct step *step, struct worker *worker) {
    const struct grouped_linear *op = arguments;
    int64_t steps = parts(op->in_features, DEPTH), panels = parts(op->out_features, PANEL);
    int64_t block = rows_of_block(steps * DEPTH), bytes = steps * STEP * sizeof(bf16);
    int64_t share = panels_of_task(1, bytes, panels, worker->threads), shares = parts(panels, share);
    struct run run = {.number = -1, .group = -1};
    struct bench bench = prepare(worker, 0);
    bench.tokens = op->tokens;
    for (int64_t task; task = take_task(worker), find_run(op, step, &run, task / shares);) {
        const struct linear one = product_of_run(op, &run, panels * bytes);
        int64_t panel = task % shares * share, past = min64(panels, panel + share), end = run.start + run.count;
        for (int64_t first = run.start; first < end; first += block)
            multiply_panels(&one, &bench, first, min64(block, end - first), panel, past);
    }
    clear_past_runs(op, step, worker, run.start);
}

/* Tasks: heads, each with blocks of rows, each with one share of the panels after the other. */
void headed_linear(const void *arguments, const struct step *step, struct worker *worker) {
    const struct headed_linear *op = arguments;
    int64_t rows = step->num_tokens;
    int64_t steps = parts(op->in_features, DEPTH), panels = parts(op->out_features, PANEL);
    int64_t block = rows_of_block(steps * DEPTH), blocks = parts(rows, block), share = panels;
    if (op->heads < 2 * worker->threads)
        share = panels_of_task(rows, steps * STEP * sizeof(bf16), panels, worker->threads);
    int64_t shares = parts(panels, share), of_head = blocks * shares, last_head = -1;
    struct bench bench = prepare(worker, 0);
    for (int64_t task; (task = take_task(worker)) < op->heads * of_head;) {
        int64_t head = task / of_head, first = task % of_head / shares * block, panel = task % shares * share;
        const struct linear one = {.x = op->x + head * op->x_step,
                                   .x_stride = op->x_stride,
                                   .weight = op->weight + head * panels * steps * STEP,
                                   .out = op->out + head * op->out_step,
                                   .out_stride = op->out_stride,
                                   .in_features = op->in_features,
                                   .out_features = op->out_features};
        if (head != last_head) bench.staged.first = -1;
        last_head = head;
        multiply_panels(&one, &bench, first, min64(block, rows - first), panel, min64(panels, panel + share));
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

#if HAS_X86
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

/* Tasks: 16 rows each, in the order of the packed weight. */
void pack(const void *arguments, const struct step *step, struct worker *worker) {
    (void)step;
    const struct pack *op = arguments;
    int64_t steps = parts(op->in_features, DEPTH), last = op->first + op->count;
    for (int64_t task; (task = take_task(worker)) < parts(last, LANES) - op->first / LANES;) {
        int64_t tile = op->first / LANES + task;
        bf16 *to = op->weight + tile / 2 * steps * STEP + tile % 2 * TILE;
        int64_t from = max64(op->first, tile * LANES), past = min64(last, (tile + 1) * LANES);
#if HAS_X86
        if (worker->isa >= WITH_AVX512 && past - from == LANES && op->in_features % DEPTH == 0) {
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
        int64_t row = step->input_ids[token] - op->first_row;
        if (row < 0 || row >= op->num_rows) {
            memset(op->out + token * op->out_stride, 0, op->in_features * sizeof(bf16));
            continue;
        }
        const bf16 *column = op->weight + row / PANEL * steps * STEP + row % PANEL / LANES * TILE + row % LANES * 2;
        bf16 *to = op->out + token * op->out_stride;
        for (int64_t i = 0; i + 1 < op->in_features; i += 2)
            memcpy(to + i, column + i / DEPTH * STEP + i % DEPTH / 2 * LANES * 2, 2 * sizeof(bf16));
        if (op->in_features % 2) {
            int64_t i = op->in_features - 1;
            to[i] = column[i / DEPTH * STEP + i % DEPTH / 2 * LANES * 2];
        }
        if (op->scale != 1)
            for (int64_t i = 0; i < op->in_features; i++) to[i] = narrow(widen(to[i]) * (float)op->scale);
    }
}
