/* Causal attention over the paged cache, decodes and prompts alike (Dao et al., 2022, over pages; Milakov and
 * Gimelshein, 2018, for the softmax in one pass).
 *
 * Keys lie as [block, kv head, key, dim], values as [block, kv head, pair of keys, dim, 2]: both as they are
 * multiplied. Queries are taken by 16 columns, a column a head of a query, with the heads that share a key together.
 * Keys are taken 64 at a time from position 0, and the softmax begins anew every SPLIT keys: what a query adds up, and
 * in which order, depends on its position alone. Keys that it does not see have weight 0. */

#include <math.h>

#include "attention.h"
#include "operators.h"
#include "panels.h"
#include "vectors.h"

#define TILES 8 /* of columns that meet keys together */

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
        for (int64_t i = 0; i < dim; i += LANES) store(to + i, load(to + i) * old[column] + load(add + i) * new[column]);
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
    for (int64_t i = 0; i < op->dim; i += LANES) store_bf16(to + i, load(sums + i) * share / total);
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

static void fetch_units(const struct units *units, int64_t bytes) {
    for (int unit = 0; unit < UNITS; unit++)
        if (units->at[unit])
            for (int64_t line = 0; line < bytes; line += LINE)
                __builtin_prefetch((const char *)units->at[unit] + line);
}

/* A part of one row: some of its columns, and one KV head. */
struct task {
    const struct attention *op;
    int64_t kv_head, group;    /* query heads that share it */
    const int32_t *blocks;     /* of the row */
    int64_t start, query_len;  /* its tokens in the step */
    int64_t first_column, tiles;
    int64_t least, past;       /* keys that any of the columns sees */
};

/* What a thread needs for one. */
struct room {
    struct seen all[TILES], split[TILES];
    ALIGNED bf16 queries[TILES][LANES * MAX_HEAD_DIM];
    ALIGNED bf16 values[KEYS * MAX_HEAD_DIM];
    ALIGNED float scores[TILES][KEYS][LANES];
    ALIGNED bf16 weights[TILES][KEYS * LANES];
};
_Static_assert(sizeof(struct room) <= SCRATCH, "a thread's scratch holds a task");

/* Where a step's keys and values are. */
static void locate(const struct task *task, int64_t first_key, struct units *keys, struct units *values) {
    const struct attention *op = task->op;
    for (int unit = 0; unit < UNITS; unit++) {
        int64_t key = first_key + unit * UNIT;
        keys->at[unit] = values->at[unit] = NULL;
        if (key >= task->past || key + UNIT <= task->least) continue;
        int64_t block = task->blocks[key / op->block_size];
        int64_t at = ((block * op->kv_heads + task->kv_head) * op->block_size + key % op->block_size) * op->dim;
        keys->at[unit] = op->k_cache + at;
        values->at[unit] = op->v_cache + at;
    }
}

static void gather(const struct units *values, int64_t dim, bf16 *together) {
    for (int unit = 0; unit < UNITS; unit++, together += UNIT * dim) {
        if (values->at[unit]) memcpy(together, values->at[unit], UNIT * dim * sizeof(bf16));
        else memset(together, 0, UNIT * dim * sizeof(bf16));
    }
}

/* Query and head of a column. */
static inline int64_t query_of(const struct task *task, int64_t column) { return task->start + column / task->group; }
static inline int64_t head_of(const struct task *task, int64_t column) {
    return task->kv_head * task->group + column % task->group;
}

static void stage_queries(const struct task *task, int64_t first, int64_t count, bf16 *staged) {
    memset(staged, 0, LANES * task->op->dim * sizeof(bf16));
    for (int64_t lane = 0; lane < count; lane++) {
        const bf16 *q = task->op->q + query_of(task, first + lane) * task->op->q_stride +
                        head_of(task, first + lane) * task->op->dim;
        for (int64_t i = 0; i < task->op->dim; i += 2) memcpy(staged + i * LANES + 2 * lane, q + i, 2 * sizeof(bf16));
    }
}

static void attend(struct task *task, int64_t context, struct worker *worker) {
    const struct attention *op = task->op;
    const struct attention_products *products = attention_products(worker->isa);
    struct room *room = (struct room *)worker->scratch;
    struct columns columns[TILES];
    for (int64_t tile = 0; tile < task->tiles; tile++) {
        int64_t first = task->first_column + tile * LANES;
        columns[tile] = see(op, first, task->query_len * task->group, context, task->group);
        stage_queries(task, first, columns[tile].count, room->queries[tile]);
        begin(&room->all[tile], op->dim);
    }
    task->least = columns[0].least, task->past = columns[task->tiles - 1].past;

    struct units keys, values, next_keys, next_values;
    int64_t first_key = task->least & -KEYS;
    locate(task, first_key, &next_keys, &next_values);
    while (first_key < task->past) {
        int64_t past = min64(task->past, (first_key / SPLIT + 1) * SPLIT);
        for (int64_t tile = 0; tile < task->tiles; tile++) begin(&room->split[tile], op->dim);
        for (; first_key < past; first_key += KEYS) {
            keys = next_keys, values = next_values;
            locate(task, first_key + KEYS, &next_keys, &next_values);
            if (task->query_len == 1) {
                fetch_units(&next_keys, UNIT * op->dim * sizeof(bf16));
                fetch_units(&next_values, UNIT * op->dim * sizeof(bf16));
            }
            gather(&values, op->dim, room->values);
            /* Of keys that none of a tile's columns sees, they would remember nothing. */
            int64_t from = 0, to = task->tiles;
            while (first_key >= columns[from].past) from++;
            while (first_key + KEYS <= columns[to - 1].least) to--;
            /* One thing for all after the other: what tiles stored is then there when vectors read it, and back. */
            for (int64_t tile = from; tile < to; tile++)
                products->score(&keys, room->queries[tile], op->dim, room->scores[tile]);
            for (int64_t tile = from; tile < to; tile++)
                products->weigh(op, &columns[tile], first_key, room->scores[tile], &room->split[tile],
                                room->weights[tile]);
            for (int64_t tile = from; tile < to; tile++)
                products->add(room->values, room->weights[tile], op->dim, columns[tile].count, room->split[tile].sums);
        }
        for (int64_t tile = 0; tile < task->tiles; tile++)
            merge(&room->all[tile], &room->split[tile], columns[tile].count, op->dim);
    }
    for (int64_t tile = 0; tile < task->tiles; tile++)
        for (int64_t lane = 0; lane < columns[tile].count; lane++) {
            int64_t column = task->first_column + tile * LANES + lane, head = head_of(task, column);
            bf16 *out = op->out + query_of(task, column) * op->out_stride + head * op->dim;
            write_out(op, &room->all[tile], lane, head, out);
        }
}

/* Tasks: by row and KV head, whose keys then stay near, the columns by 64. */
void attention(const void *arguments, const struct step *step, struct worker *worker) {
    const struct attention *op = arguments;
    struct task task = {.op = op, .group = op->heads / op->kv_heads};
    int64_t row = 0, before = 0, of_row = 0, tiles = 0;
    prepare_tiles(worker->isa);
    for (int64_t number; number = take_task(worker), row < step->num_rows;) {
        for (; row < step->num_rows; row++, before += of_row) {
            tiles = parts((step->query_starts[row + 1] - step->query_starts[row]) * task.group, LANES);
            of_row = parts(tiles, TILES) * op->kv_heads;
            if (number < before + of_row) break;
        }
        if (row == step->num_rows) break;
        int64_t of_head = of_row / op->kv_heads, first_tile = (number - before) % of_head * TILES;
        task.kv_head = (number - before) / of_head;
        task.first_column = first_tile * LANES, task.tiles = min64(TILES, tiles - first_tile);
        task.start = step->query_starts[row], task.query_len = step->query_starts[row + 1] - task.start;
        task.blocks = step->block_tables + row * step->max_blocks;
        attend(&task, step->seq_lens[row] - task.query_len, worker);
    }
}
