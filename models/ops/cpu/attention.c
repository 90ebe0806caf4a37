/* Causal attention over the paged cache, for decodes and prompts (Dao et al., 2022, over pages; Milakov and Gimelshein,
 * 2018, for the softmax in one pass).
 *
 * Keys are stored as [block, kv head, key, dim], values as [block, kv head, pair of keys, dim, 2]: both in the order in
 * which they are multiplied. Queries are processed in tiles of 16 columns; a column is a head of a query, and heads
 * that share a key are in the same tile. Keys are processed 256 at a time from position 0, and the softmax restarts
 * every SPLIT keys: the terms of a query's sums, and their order, depend on its position alone. Keys to which a query
 * does not attend have weight 0. */

#include <math.h>

#include "attention_tasks.h"
#include "operators.h"
#include "panels.h"
#include "vectors.h"

#define OF_PAIR 4 /* lines that are prefetched while a pair of keys' values is copied */

void begin(struct seen *seen, int64_t count, int64_t dim) {
    for (int lane = 0; lane < LANES; lane++) seen->most[lane] = -INFINITY, seen->total[lane] = 0;
    memset(seen->sums, 0, count * value_size(dim) * sizeof(float));
}

/* Functions that are compiled for several processors are static, here and elsewhere: otherwise the library would export
 * them. */
CLONES static void add_seen(struct seen *into, const struct seen *from, int64_t count, int64_t dim) {
    vector most = larger(load(into->most), load(from->most)), base = choose(most == -INFINITY, all(0), most);
    vector old = exp2_of(load(into->most) - base), new = exp2_of(load(from->most) - base);
    store(into->most, most);
    store(into->total, load(into->total) * old + load(from->total) * new);
    int64_t size = value_size(dim);
    for (int64_t column = 0; column < count; column++) {
        float *to = into->sums + column * size;
        const float *add = from->sums + column * size;
        for (int64_t i = 0; i < size; i += LANES)
            store(to + i, load(to + i) * old[column] + load(add + i) * new[column]);
    }
}

void merge(struct seen *into, const struct seen *from, int64_t count, int64_t dim) {
    add_seen(into, from, count, dim);
}

/* A sink takes probability and adds no value. */
CLONES static void divide_sums(const struct attention *op, const struct seen *seen, int64_t column, int64_t head,
                               bf16 *to) {
    const float *sums = seen->sums + column * value_size(op->value_dim);
    float share = 1, total = seen->total[column];
    if (op->sinks) {
        float most = seen->most[column], sink = op->sinks[head] * LOG2_E, base = sink > most ? sink : most;
        share = exp2_of(all(most - base))[0];
        total = total * share + exp2_of(all(sink - base))[0];
    }
    float part = share / total;
    for (int64_t i = 0; i < op->value_dim; i += LANES)
        store_bf16(to + min64(i, op->value_dim - LANES), load(sums + i) * part);
}

void write_out(const struct attention *op, const struct seen *seen, int64_t column, int64_t head, bf16 *to) {
    divide_sums(op, seen, column, head, to);
}

/* A thread's memory: for a task, and for one more tile, of one of the rows that share keys. */
struct room {
    struct seen all[TILES + 1], split[TILES + 1];
    ALIGNED float queries[(TILES + 1) * LANES * MAX_HEAD_DIM]; /* or bfloat16 */
    ALIGNED bf16 values[KEYS * MAX_HEAD_DIM];
    ALIGNED float scores[PAIR][KEYS][LANES];
    ALIGNED float weights[PAIR * KEYS * LANES]; /* or bfloat16 */
};
_Static_assert(sizeof(struct room) <= SCRATCH, "a thread's scratch holds a task");

struct values values_of_tiles(const bf16 *tiles, const struct units *units, int64_t dim) {
    int64_t size = value_size(dim);
    struct values made = {.tiles = tiles, .pair_stride = 2 * LANES, .block_stride = SPAN * LANES};
    made.last_block = SPAN * (size - LANES);
    for (int unit = 0; unit < UNITS; unit++)
        if (units->at[unit]) made.at[unit] = tiles + unit / 2 * SPAN * size + unit % 2 * UNIT * LANES;
    return made;
}

/* In the order of the cache. */
static struct values values_in_place(const struct units *units, int64_t dim) {
    struct values made = {.pair_stride = 2 * dim, .block_stride = 2 * LANES, .last_block = 2 * (dim - LANES)};
    memcpy(made.at, units->at, sizeof made.at);
    return made;
}

/* Values of some units, from [pair][dim][2] to the tiles [span][dim / 16][16 pairs][16][2]. */
CLONES static void gather(const struct units *values, int64_t dim, bf16 *tiles, struct fetches *ahead) {
    for (int unit = 0; unit < UNITS; unit++) {
        bf16 *to = tiles + unit / 2 * SPAN * value_size(dim) + unit % 2 * UNIT * LANES;
        if (!values->at[unit] && !values->at[unit ^ 1]) continue; /* no column attends to the span */
        for (int pair = 0; pair < UNIT / 2; pair++, to += 2 * LANES) {
            if (values->at[unit]) fetch_lines(ahead, OF_PAIR);
            for (int64_t i = 0; i < dim; i += LANES) {
                const bf16 *from = values->at[unit] + (pair * dim + min64(i, dim - LANES)) * 2;
                if (values->at[unit]) memcpy(to + i * SPAN, from, LINE);
                else memset(to + i * SPAN, 0, LINE);
            }
        }
    }
}

/* A tile's first column among those of its KV head. With several of these, each has one tile. */
static inline int64_t first_of(const struct task *task, int64_t tile) {
    return task->kv_heads > 1 ? 0 : task->first_column + tile * LANES;
}

/* Query and head of a column. */
static inline int64_t query_of(const struct task *task, int64_t tile, int64_t lane) {
    return task->start + (first_of(task, tile) + lane) / task->group;
}
static inline int64_t head_of(const struct task *task, int64_t tile, int64_t lane) {
    int64_t kv_head = task->kv_head + (task->kv_heads > 1 ? tile : 0);
    return kv_head * task->group + (first_of(task, tile) + lane) % task->group;
}

static char *queries_of(const struct task *task, const struct attention_products *products, int64_t tile) {
    return task->queries + tile * LANES * query_size(task->op->dim) * products->bytes;
}

static void stage_queries(const struct task *task, const struct attention_products *products, int64_t tile) {
    const struct attention *op = task->op;
    const bf16 *columns[LANES] = {NULL};
    for (int64_t lane = 0; lane < task->columns[tile].count; lane++)
        columns[lane] = op->q + query_of(task, tile, lane) * op->q_stride + head_of(task, tile, lane) * op->dim;
    products->turn(columns, op->dim, queries_of(task, products, tile));
}

#define SPANS_IN_TURN 2 /* by one head, then by the next: four blocks, each of which is read in order */

/* The same units of a later head: a block has its heads one after the other. */
static struct units units_of(const struct units *of_first, int64_t apart) {
    struct units made;
    for (int unit = 0; unit < UNITS; unit++) made.at[unit] = of_first->at[unit] ? of_first->at[unit] + apart : NULL;
    return made;
}

/* Multiply the few columns of each of several KV heads by the keys of a step. The scores and the weights of some heads
 * are side by side in a tile. */
static void take_heads(const struct task *task, const struct attention_products *products, int64_t first_key,
                       const struct units *keys, const struct units *values, struct fetches *ahead, struct room *room) {
    const struct attention *op = task->op;
    const struct columns *columns = task->columns;
    struct spans all = in_sight(first_key, task->least, task->past), some;
    struct fetches none = {.units = 0};
    float *scores[MOST_HEADS];
    bf16 *weights[MOST_HEADS];
    struct units keys_of[MOST_HEADS];
    struct values values_of[MOST_HEADS];
    for (int64_t head = 0; head < task->kv_heads; head++) {
        int64_t tile = head / HEADS_OF_TILE, column = head % HEADS_OF_TILE * FEW_COLUMNS;
        struct units own = units_of(values, head * UNIT * op->value_dim);
        scores[head] = room->scores[tile][0] + column;
        weights[head] = (bf16 *)room->weights + tile * KEYS * LANES + column * SPAN;
        keys_of[head] = units_of(keys, head * UNIT * op->dim);
        values_of[head] = values_in_place(&own, op->value_dim);
    }
    for (some.from = all.from; some.from < all.past; some.from = some.past) {
        some.past = (int)min64(some.from + SPANS_IN_TURN, all.past);
        for (int64_t head = 0; head < task->kv_heads; head++)
            products->score(&keys_of[head], some, queries_of(task, products, head), columns, 1, op->dim,
                            (float(*)[KEYS][LANES])scores[head], ahead);
    }
    for (int64_t head = 0; head < task->kv_heads; head++)
        products->weigh(op, columns, first_key, all, (float(*)[LANES])scores[head], &task->split[head], weights[head],
                        &none);
    for (some.from = all.from; some.from < all.past; some.from = some.past) {
        some.past = (int)min64(some.from + SPANS_IN_TURN, all.past);
        for (int64_t head = 0; head < task->kv_heads; head++)
            products->add(&values_of[head], some, weights[head], columns, 1, op->value_dim, &task->split[head], ahead);
    }
}

/* Multiply every column of a task by the keys of a step. */
static void take_step(const struct task *task, const struct attention_products *products, int64_t first_key,
                      const struct units *keys, const struct units *values, struct fetches *ahead,
                      struct room *room) {
    int64_t dim = task->op->dim, value_dim = task->op->value_dim;
    if (task->kv_heads > 1) {
        take_heads(task, products, first_key, keys, values, ahead, room);
        return;
    }
    /* The few columns of a decode read values from the cache itself. */
    int is_gathered = task->tiles > products->tiles_in_place;
    struct values from = is_gathered ? values_of_tiles(room->values, values, value_dim) : values_in_place(values, value_dim);
    for (int64_t tile = 0; tile < task->tiles; tile += PAIR) {
        int tiles = (int)min64(PAIR, task->tiles - tile);
        const struct columns *columns = &task->columns[tile];
        struct spans spans = in_sight(first_key, columns[0].least, min64(task->past, columns[tiles - 1].past));
        products->score(keys, spans, queries_of(task, products, tile), columns, tiles, dim, room->scores, ahead);
        for (int i = 0; i < tiles; i++)
            products->weigh(task->op, &columns[i], first_key, spans, room->scores[i], &task->split[tile + i],
                            (char *)room->weights + i * KEYS * LANES * products->bytes, ahead);
        if (tile == 0 && is_gathered) gather(values, value_dim, room->values, ahead);
        products->add(&from, spans, room->weights, columns, tiles, value_dim, &task->split[tile], ahead);
    }
}

/* The columns, the first of which attends to the keys before `context`, in tiles from an offset of the memory on. */
static void place_columns(struct task *task, const struct attention_products *products, int64_t context,
                          struct room *room, int64_t place) {
    const struct attention *op = task->op;
    task->all = &room->all[place], task->split = &room->split[place];
    task->queries = (char *)room->queries + place * LANES * query_size(op->dim) * products->bytes;
    for (int64_t tile = 0; tile < task->tiles; tile++) {
        task->columns[tile] = see(op, first_of(task, tile), task->query_len * task->group, context, task->group);
        stage_queries(task, products, tile);
    }
    task->least = task->columns[0].least, task->past = task->columns[task->tiles - 1].past;
}

/* Multiply the columns by the keys from `first_key` on, the first of a step. A split that is not complete stays
 * open. */
static void meet_keys(const struct task *task, const struct attention_products *products, int64_t first_key,
                      const struct task *after, struct ahead *ahead, struct room *room) {
    struct units keys, values;
    begin_task(ahead, task, first_key);
    for (; first_key < task->past; first_key += KEYS) {
        look_further(ahead, after);
        locate(task, first_key, &keys, &values);
        take_step(task, products, first_key, &keys, &values, &ahead->soon, room);
        go_on(ahead);
        if ((first_key + KEYS) % SPLIT) continue;
        for (int64_t tile = 0; tile < task->tiles; tile++) {
            merge(&task->all[tile], &task->split[tile], task->columns[tile].count, task->op->value_dim);
            begin(&task->split[tile], task->columns[tile].count, task->op->value_dim);
        }
    }
}

/* Write the columns' results to the output. */
static void finish(const struct task *task) {
    const struct attention *op = task->op;
    for (int64_t tile = 0; tile < task->tiles; tile++) {
        if (task->past % SPLIT) merge(&task->all[tile], &task->split[tile], task->columns[tile].count, op->value_dim);
        for (int64_t lane = 0; lane < task->columns[tile].count; lane++) {
            int64_t head = head_of(task, tile, lane);
            bf16 *out = op->out + query_of(task, tile, lane) * op->out_stride + head * op->value_dim;
            write_out(op, &task->all[tile], lane, head, out);
        }
    }
}

static void begin_tiles(const struct task *task) {
    for (int64_t tile = 0; tile < task->tiles; tile++) {
        begin(&task->all[tile], task->columns[tile].count, task->op->value_dim);
        begin(&task->split[tile], task->columns[tile].count, task->op->value_dim);
    }
}

static void attend(struct task *task, const struct task *after, struct ahead *ahead, struct worker *worker) {
    const struct attention_products *products = attention_products(worker->isa);
    struct room *room = (struct room *)worker->scratch;
    place_columns(task, products, task->context, room, 0);
    begin_tiles(task);
    meet_keys(task, products, task->least & -KEYS, after, ahead, room);
    finish(task);
}

/* The result of one column. */
CLONES static void copy_seen(const struct seen *from, int64_t column, struct seen *to, int64_t place, int64_t dim) {
    to->most[place] = from->most[column], to->total[place] = from->total[column];
    int64_t size = value_size(dim);
    memcpy(to->sums + place * size, from->sums + column * size, size * sizeof(float));
}

/* Rows of one token each whose first `shared` keys are the same: the columns of all rows are multiplied by these, then
 * each row continues. A column's sums have the same order as alone. */
static void attend_together(struct task *task, const struct step *step, struct worker *worker) {
    const struct attention_products *products = attention_products(worker->isa);
    int64_t row = task->row, rows = task->rows, shared = task->shared;
    struct ahead ahead = {.task = NULL};
    struct room *room = (struct room *)worker->scratch;
    int64_t dim = task->op->value_dim;
    task->query_len = rows, task->first_column = 0, task->tiles = parts(rows * task->group, LANES);
    place_columns(task, products, shared, room, 0);
    task->past = shared;
    begin_tiles(task);
    meet_keys(task, products, 0, NULL, &ahead, room);
    struct task own = {
        .op = task->op, .kv_head = task->kv_head, .group = task->group, .kv_heads = 1, .query_len = 1, .tiles = 1};
    for (int64_t i = 0; i < rows; i++) {
        own.blocks = step->block_tables + (row + i) * step->max_blocks, own.start = task->start + i;
        place_columns(&own, products, step->seq_lens[row + i] - 1, room, TILES);
        begin_tiles(&own); /* the unused lanes */
        for (int64_t head = 0; head < task->group; head++) {
            int64_t column = i * task->group + head, tile = column / LANES;
            copy_seen(&task->all[tile], column % LANES, own.all, head, dim);
            copy_seen(&task->split[tile], column % LANES, own.split, head, dim);
        }
        meet_keys(&own, products, shared, NULL, &ahead, room);
        finish(&own);
    }
}

/* Tasks: for each row, or rows that share their first keys, and for each KV head, whose keys then stay in the cache,
 * some columns; or a row's only token and several KV heads. The keys of a thread's next task are prefetched meanwhile.
 * The task is taken early if many are left; for the last tasks, which another thread may take first, it is the one that
 * this thread gets if all take turns. */
void attention(const void *arguments, const struct step *step, struct worker *worker) {
    const struct attention *op = arguments;
    struct cursor at = {.heads = heads_together(op, step, worker)}, later_at = at;
    struct task tasks[2], *task = &tasks[0], *next = &tasks[1];
    struct ahead ahead = {.task = NULL};
    prepare_tiles(worker->isa);
    long number = take_task(worker);
    int is_there = step->num_rows > 0 && find_task(op, step, worker->threads, number, &at, task);
    while (is_there) {
        struct cursor next_at = at;
        int is_taken = reach_task(op, step, worker->threads, number + 2 * worker->threads, &later_at);
        long expected = is_taken ? take_task(worker) : number + worker->threads;
        int is_known = find_task(op, step, worker->threads, expected, &next_at, next);
        if (task->rows > 1) attend_together(task, step, worker);
        else attend(task, is_known ? next : NULL, &ahead, worker);
        if (task->rows > 1) ahead.task = NULL;
        number = is_taken ? expected : take_task(worker);
        if (is_known && number == expected) {
            struct task *done = task;
            task = next, next = done, at = next_at;
            continue;
        }
        ahead.task = NULL;
        is_there = find_task(op, step, worker->threads, number, &at, task);
    }
}
