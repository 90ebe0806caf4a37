/* Causal attention over the paged cache, decodes and prompts alike (Dao et al., 2022, over pages; Milakov and
 * Gimelshein, 2018, for the softmax in one pass).
 *
 * Keys lie as [block, kv head, key, dim], values as [block, kv head, pair of keys, dim, 2]: both as they are
 * multiplied. Queries are taken by 16 columns, a column a head of a query, with the heads that share a key together.
 * Keys are taken 256 at a time from position 0, and the softmax begins anew every SPLIT keys: what a query adds up,
 * and in which order, depends on its position alone. Keys that it does not see have weight 0. */

#include <math.h>

#include "attention.h"
#include "operators.h"
#include "panels.h"
#include "vectors.h"

#define TILES 16   /* of columns that meet keys while these are near */
#define QUARTER 4  /* units that are fetched while others are multiplied */

void begin(struct seen *seen, int64_t dim) {
    for (int lane = 0; lane < LANES; lane++) seen->most[lane] = -INFINITY, seen->total[lane] = 0;
    memset(seen->sums, 0, LANES * dim * sizeof(float));
}

CLONES void merge(struct seen *into, const struct seen *from, int64_t count, int64_t dim) {
    vector most = larger(load(into->most), load(from->most)), base = choose(most == -INFINITY, all(0), most);
    vector old = exp2_of(load(into->most) - base), new = exp2_of(load(from->most) - base);
    store(into->most, most);
    store(into->total, load(into->total) * old + load(from->total) * new);
    for (int64_t column = 0; column < count; column++) {
        float *to = into->sums + column * dim;
        const float *add = from->sums + column * dim;
        for (int64_t i = 0; i < dim; i += LANES)
            store(to + i, load(to + i) * old[column] + load(add + i) * new[column]);
    }
}

/* A sink takes probability and adds no value. */
CLONES void write_out(const struct attention *op, const struct seen *seen, int64_t column, int64_t head, bf16 *to) {
    const float *sums = seen->sums + column * op->dim;
    float share = 1, total = seen->total[column];
    if (op->sinks) {
        float most = seen->most[column], sink = op->sinks[head] * LOG2_E, base = sink > most ? sink : most;
        share = exp2_of(all(most - base))[0];
        total = total * share + exp2_of(all(sink - base))[0];
    }
    float part = share / total;
    for (int64_t i = 0; i < op->dim; i += LANES) store_bf16(to + i, load(sums + i) * part);
}

struct columns see(const struct attention *op, int64_t first_column, int64_t columns, int64_t context, int64_t group) {
    struct columns made = {.count = min64(LANES, columns - first_column)};
    for (int lane = 0; lane < LANES; lane++) {
        int64_t query = (first_column + (lane < made.count ? lane : 0)) / group, position = context + query;
        made.last[lane] = (int32_t)position;
        made.first[lane] = op->window ? (int32_t)max64(0, position - op->window + 1) : 0;
    }
    int64_t final = made.last[made.count - 1];
    made.least = made.first[0], made.past = final + 1;
    made.always_from = made.first[made.count - 1], made.always_past = made.last[0] + 1;
    return made;
}

static void fetch_quarter(const struct units *units, int first, int64_t dim) {
    for (int unit = first; unit < first + QUARTER; unit++)
        for (int64_t byte = 0; units->at[unit] && byte < UNIT * dim * (int64_t)sizeof(bf16); byte += LINE)
            __builtin_prefetch((const char *)units->at[unit] + byte, 0, 2);
}

/* Some columns of one row, or of rows that share what they see here, and one KV head. */
struct task {
    const struct attention *op;
    int64_t kv_head, group;    /* query heads that share it */
    const int32_t *blocks;     /* of the row */
    int64_t start, query_len;  /* its tokens in the step */
    int64_t first_column, tiles;
    int64_t least, past;       /* keys that any of the columns sees */
    struct columns columns[TILES];
    struct seen *all, *split; /* [tiles], of all splits before this one, and of this one */
    bf16 *queries;
};

/* What a thread needs: for a task, and for one more tile, of one of the rows that share. */
struct room {
    struct seen all[TILES + 1], split[TILES + 1];
    ALIGNED bf16 queries[(TILES + 1) * LANES * MAX_HEAD_DIM];
    ALIGNED bf16 values[KEYS * MAX_HEAD_DIM];
    ALIGNED float scores[PAIR][KEYS][LANES];
    ALIGNED bf16 weights[PAIR][KEYS * LANES];
};
_Static_assert(sizeof(struct room) <= SCRATCH, "a thread's scratch holds a task");

/* Where a step's keys and values are. */
static void locate(const struct task *task, int64_t first_key, struct units *keys, struct units *values) {
    const struct attention *op = task->op;
    for (int unit = 0; unit < UNITS; unit++) {
        int64_t key = first_key + unit * UNIT;
        keys->at[unit] = values->at[unit] = NULL;
        if (key >= task->past || key + UNIT <= task->least) continue;
        int64_t block = task->blocks[key / op->block_size], row = task->kv_head * op->block_size + key % op->block_size;
        int64_t at = block * op->block_stride + row * op->dim;
        keys->at[unit] = op->k_cache + at;
        values->at[unit] = op->v_cache + at;
    }
}

/* Values of some units, from [pair][dim][2] to the tiles [span][dim / 16][16 pairs][16][2]. */
CLONES static void gather(const struct units *values, int first, int past, int64_t dim, bf16 *tiles) {
    for (int unit = first; unit < past; unit++) {
        bf16 *to = tiles + unit / 2 * SPAN * dim + unit % 2 * UNIT * LANES;
        for (int pair = 0; pair < UNIT / 2; pair++, to += 2 * LANES)
            for (int64_t i = 0; i < dim; i += LANES) {
                const bf16 *from = values->at[unit] + (pair * dim + i) * 2;
                if (values->at[unit]) memcpy(to + i * SPAN, from, LINE);
                else memset(to + i * SPAN, 0, LINE);
            }
    }
}

/* Query and head of a column. */
static inline int64_t query_of(const struct task *task, int64_t column) { return task->start + column / task->group; }
static inline int64_t head_of(const struct task *task, int64_t column) {
    return task->kv_head * task->group + column % task->group;
}

static void stage_queries(const struct task *task, const struct attention_products *products, int64_t first,
                          int64_t count, bf16 *staged) {
    const bf16 *columns[LANES] = {NULL};
    for (int64_t lane = 0; lane < count; lane++)
        columns[lane] = task->op->q + query_of(task, first + lane) * task->op->q_stride +
                        head_of(task, first + lane) * task->op->dim;
    products->turn(columns, task->op->dim, staged);
}

struct spans in_sight(int64_t first_key, int64_t least, int64_t past) {
    int64_t from = max64(0, least - first_key) / SPAN;
    return (struct spans){(int)from, (int)max64(from, parts(min64(KEYS, past - first_key), SPAN))};
}

/* Every column of a task meets the keys of a step. */
static void take_step(const struct task *task, const struct attention_products *products, int64_t first_key,
                      const struct units *keys, const struct units *values, const struct units *next_keys,
                      struct room *room) {
    int64_t dim = task->op->dim;
    for (int64_t tile = 0; tile < task->tiles; tile += PAIR) {
        int tiles = (int)min64(PAIR, task->tiles - tile);
        const struct columns *columns = &task->columns[tile];
        struct spans spans = in_sight(first_key, columns[0].least, min64(task->past, columns[tiles - 1].past));
        for (int first = 0; first < UNITS; first += QUARTER) {
            int from = first * UNIT / SPAN, past = (first + QUARTER) * UNIT / SPAN;
            struct spans here = {spans.from > from ? spans.from : from, spans.past < past ? spans.past : past};
            if (tile == 0) fetch_quarter(values, first, dim);
            products->score(keys, here, task->queries + tile * LANES * dim, tiles, dim, room->scores);
        }
        for (int i = 0; i < tiles; i++)
            products->weigh(task->op, &columns[i], first_key, spans, room->scores[i], &task->split[tile + i],
                            room->weights[i]);
        for (int first = 0; tile == 0 && first < UNITS; first += QUARTER) {
            fetch_quarter(next_keys, first, dim);
            gather(values, first, first + QUARTER, dim, room->values);
        }
        products->add(room->values, spans, room->weights[0], columns, tiles, dim, &task->split[tile]);
    }
}

/* Columns of which the first sees the keys before `context`, in tiles from a place of the room on. */
static void place_columns(struct task *task, const struct attention_products *products, int64_t context,
                          struct room *room, int64_t place) {
    const struct attention *op = task->op;
    task->all = &room->all[place], task->split = &room->split[place];
    task->queries = room->queries + place * LANES * op->dim;
    for (int64_t tile = 0; tile < task->tiles; tile++) {
        int64_t first = task->first_column + tile * LANES;
        task->columns[tile] = see(op, first, task->query_len * task->group, context, task->group);
        stage_queries(task, products, first, task->columns[tile].count, task->queries + tile * LANES * op->dim);
    }
    task->least = task->columns[0].least, task->past = task->columns[task->tiles - 1].past;
}

/* The columns meet the keys from `first_key` on, the first of a step. A split that is not at its end is left open. */
static void meet_keys(const struct task *task, const struct attention_products *products, int64_t first_key,
                      struct room *room) {
    struct units keys, values, next_keys, next_values;
    locate(task, first_key, &next_keys, &next_values);
    for (; first_key < task->past; first_key += KEYS) {
        keys = next_keys, values = next_values;
        locate(task, first_key + KEYS, &next_keys, &next_values);
        take_step(task, products, first_key, &keys, &values, &next_keys, room);
        if ((first_key + KEYS) % SPLIT) continue;
        for (int64_t tile = 0; tile < task->tiles; tile++) {
            merge(&task->all[tile], &task->split[tile], task->columns[tile].count, task->op->dim);
            begin(&task->split[tile], task->op->dim);
        }
    }
}

/* What the columns saw, to the output. */
static void finish(const struct task *task) {
    const struct attention *op = task->op;
    for (int64_t tile = 0; tile < task->tiles; tile++) {
        if (task->past % SPLIT) merge(&task->all[tile], &task->split[tile], task->columns[tile].count, op->dim);
        for (int64_t lane = 0; lane < task->columns[tile].count; lane++) {
            int64_t column = task->first_column + tile * LANES + lane, head = head_of(task, column);
            bf16 *out = op->out + query_of(task, column) * op->out_stride + head * op->dim;
            write_out(op, &task->all[tile], lane, head, out);
        }
    }
}

static void begin_tiles(const struct task *task) {
    for (int64_t tile = 0; tile < task->tiles; tile++) {
        begin(&task->all[tile], task->op->dim);
        begin(&task->split[tile], task->op->dim);
    }
}

static void attend(struct task *task, int64_t context, struct worker *worker) {
    const struct attention_products *products = attention_products(worker->isa);
    struct room *room = (struct room *)worker->scratch;
    place_columns(task, products, context, room, 0);
    begin_tiles(task);
    meet_keys(task, products, task->least & -KEYS, room);
    finish(task);
}

/* What one column has seen. */
CLONES static void copy_seen(const struct seen *from, int64_t column, struct seen *to, int64_t place, int64_t dim) {
    to->most[place] = from->most[column], to->total[place] = from->total[column];
    memcpy(to->sums + place * dim, from->sums + column * dim, dim * sizeof(float));
}

/* Rows of one token each whose first `shared` keys are the same: these meet the columns of all, then each row goes on.
 * A column adds up the same in the same order as alone. */
static void attend_together(struct task *task, const struct step *step, int64_t row, int64_t rows, int64_t shared,
                            struct worker *worker) {
    const struct attention_products *products = attention_products(worker->isa);
    struct room *room = (struct room *)worker->scratch;
    int64_t dim = task->op->dim;
    task->query_len = rows, task->first_column = 0, task->tiles = parts(rows * task->group, LANES);
    place_columns(task, products, shared, room, 0);
    task->past = shared;
    begin_tiles(task);
    meet_keys(task, products, 0, room);
    struct task own = {.op = task->op, .kv_head = task->kv_head, .group = task->group, .query_len = 1, .tiles = 1};
    for (int64_t i = 0; i < rows; i++) {
        own.blocks = step->block_tables + (row + i) * step->max_blocks, own.start = task->start + i;
        place_columns(&own, products, step->seq_lens[row + i] - 1, room, TILES);
        begin_tiles(&own); /* the lanes without a column */
        for (int64_t head = 0; head < task->group; head++) {
            int64_t column = i * task->group + head, tile = column / LANES;
            copy_seen(&task->all[tile], column % LANES, own.all, head, dim);
            copy_seen(&task->split[tile], column % LANES, own.split, head, dim);
        }
        meet_keys(&own, products, shared, room);
        finish(&own);
    }
}

/* Keys, in whole steps, that two rows have in the same blocks and that all their queries see. */
static int64_t common_keys(const struct attention *op, const struct step *step, int64_t row, int64_t other) {
    const int32_t *a = step->block_tables + row * step->max_blocks, *b = step->block_tables + other * step->max_blocks;
    int64_t most = (min64(step->seq_lens[row], step->seq_lens[other]) - 1) / op->block_size, blocks = 0;
    while (blocks < most && a[blocks] == b[blocks]) blocks++;
    return blocks * op->block_size & -KEYS;
}

/* Rows from there on that attend together, at least 1, and to how many keys. Every thread is to have a task. */
static int64_t count_together(const struct attention *op, const struct step *step, int64_t row, int threads,
                              int64_t *shared) {
    int64_t group = op->heads / op->kv_heads, rows = 1;
    int64_t most = min64(step->num_rows - row, min64(TILES * LANES / group, step->num_rows * op->kv_heads / threads));
    if (op->window || group > LANES || most < 2) return 1;
    for (; rows < most; rows++) {
        int64_t next = row + rows;
        if (step->query_starts[next] - step->query_starts[next - 1] != 1) break;
        if (step->query_starts[next + 1] - step->query_starts[next] != 1) break;
        int64_t common = common_keys(op, step, row, next);
        if (rows == 1) *shared = common;
        if (common < KEYS || common < *shared) break;
    }
    return rows;
}

/* Tasks: by row, or rows that share their first keys, and by KV head, whose keys then stay near, some columns each. */
void attention(const void *arguments, const struct step *step, struct worker *worker) {
    const struct attention *op = arguments;
    struct task task = {.op = op, .group = op->heads / op->kv_heads};
    int64_t row = -1, rows = 1, shared = 0, before = 0, of_row = 0, tiles = 0;
    prepare_tiles(worker->isa);
    for (int64_t number; number = take_task(worker), row < step->num_rows;) {
        while (row < step->num_rows && number >= before + of_row) {
            before += of_row, row += row < 0 ? 1 : rows;
            if (row == step->num_rows) break;
            rows = count_together(op, step, row, worker->threads, &shared);
            tiles = parts((step->query_starts[row + 1] - step->query_starts[row]) * task.group, LANES);
            of_row = (rows > 1 ? 1 : parts(tiles, TILES)) * op->kv_heads;
        }
        if (row == step->num_rows) break;
        task.start = step->query_starts[row], task.blocks = step->block_tables + row * step->max_blocks;
        if (rows > 1) {
            task.kv_head = number - before;
            attend_together(&task, step, row, rows, shared, worker);
            continue;
        }
        int64_t of_head = of_row / op->kv_heads, first_tile = (number - before) % of_head * TILES;
        task.kv_head = (number - before) / of_head;
        task.first_column = first_tile * LANES, task.tiles = min64(TILES, tiles - first_tile);
        task.query_len = step->query_starts[row + 1] - task.start;
        attend(&task, step->seq_lens[row] - task.query_len, worker);
    }
}
