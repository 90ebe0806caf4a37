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
#include "vector_math.h"

#define SPLIT 1024

/* What 16 columns have seen so far. */
struct seen {
    ALIGNED float most[LANES];  /* largest score */
    ALIGNED float total[LANES]; /* of the probabilities, relative to it */
    ALIGNED float sums[LANES * MAX_HEAD_DIM];
};

struct columns {
    int64_t count;
    ALIGNED int32_t last[LANES], first[LANES]; /* positions of the keys that each sees; the unused see what 0 does */
    int64_t least, past;                       /* of all */
    int64_t always_from, always_past;          /* what each of them sees */
};

static inline void begin(struct seen *seen, int64_t dim) {
    for (int lane = 0; lane < LANES; lane++) seen->most[lane] = -INFINITY, seen->total[lane] = 0;
    memset(seen->sums, 0, LANES * dim * sizeof(float));
}

/* Scores to probabilities relative to the largest so far; what was seen is made relative to it too. */
CLONES static void weigh(const struct attention *op, const struct columns *columns, int64_t first_key,
                         float scores[KEYS][LANES], struct seen *seen) {
    int hides = first_key < columns->always_from || first_key + KEYS > columns->always_past;
    float most[LANES], scale = (float)op->scale, cap = (float)op->soft_cap;
    memcpy(most, seen->most, sizeof most);
    for (int key = 0; key < KEYS; key++) {
        float *s = scores[key];
        for (int lane = 0; lane < LANES; lane++) s[lane] *= scale;
        if (cap > 0)
            for (int lane = 0; lane < LANES; lane++) s[lane] = cap * tanh_of(s[lane] / cap);
        if (hides) {
            int32_t at = (int32_t)first_key + key;
            for (int lane = 0; lane < LANES; lane++)
                s[lane] = at < columns->first[lane] || at > columns->last[lane] ? -INFINITY : s[lane];
        }
        for (int lane = 0; lane < LANES; lane++) most[lane] = s[lane] > most[lane] ? s[lane] : most[lane];
    }
    float base[LANES], fade[LANES], total[LANES];
    for (int lane = 0; lane < LANES; lane++) base[lane] = most[lane] == -INFINITY ? 0 : most[lane];
    for (int lane = 0; lane < LANES; lane++) fade[lane] = exp_of(seen->most[lane] - base[lane]);
    for (int lane = 0; lane < LANES; lane++) total[lane] = seen->total[lane] * fade[lane];
    for (int key = 0; key < KEYS; key++)
        for (int lane = 0; lane < LANES; lane++) {
            scores[key][lane] = exp_of(scores[key][lane] - base[lane]);
            total[lane] += scores[key][lane];
        }
    memcpy(seen->most, most, sizeof most);
    memcpy(seen->total, total, sizeof total);
    for (int64_t column = 0; column < columns->count; column++) {
        if (fade[column] == 1) continue;
        float *sums = seen->sums + column * op->dim;
        for (int64_t i = 0; i < op->dim; i++) sums[i] *= fade[column];
    }
}

/* Add what was seen of one split to what was seen of those before it. */
CLONES static void merge(struct seen *into, const struct seen *from, int64_t count, int64_t dim) {
    for (int64_t column = 0; column < count; column++) {
        float most = into->most[column] > from->most[column] ? into->most[column] : from->most[column];
        float base = most == -INFINITY ? 0 : most;
        float old = exp_of(into->most[column] - base), new = exp_of(from->most[column] - base);
        into->most[column] = most;
        into->total[column] = into->total[column] * old + from->total[column] * new;
        float *to = into->sums + column * dim;
        const float *add = from->sums + column * dim;
        for (int64_t i = 0; i < dim; i++) to[i] = to[i] * old + add[i] * new;
    }
}

/* A sink takes probability and adds no value. */
CLONES static void write_out(const struct attention *op, const struct seen *seen, int64_t column, int64_t head,
                             bf16 *to) {
    const float *sums = seen->sums + column * op->dim;
    float share = 1, total = seen->total[column];
    if (op->sinks) {
        float most = seen->most[column], sink = op->sinks[head], base = sink > most ? sink : most;
        share = exp_of(most - base);
        total = total * share + exp_of(sink - base);
    }
    for (int64_t i = 0; i < op->dim; i++) to[i] = narrow(sums[i] * share / total);
}

static struct columns see(const struct attention *op, int64_t first_column, int64_t columns, int64_t context,
                          int64_t group) {
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

struct walk {
    const struct attention *op;
    const int32_t *blocks;
    int64_t kv_head, least, past;
};

/* Where a step's keys and values are. */
static void locate(const struct walk *walk, int64_t first_key, struct units *keys, struct units *values) {
    const struct attention *op = walk->op;
    for (int unit = 0; unit < UNITS; unit++) {
        int64_t key = first_key + unit * UNIT;
        keys->at[unit] = values->at[unit] = NULL;
        if (key >= walk->past || key + UNIT <= walk->least) continue;
        int64_t block = walk->blocks[key / op->block_size];
        int64_t at = ((block * op->kv_heads + walk->kv_head) * op->block_size + key % op->block_size) * op->dim;
        keys->at[unit] = op->k_cache + at;
        values->at[unit] = op->v_cache + at;
    }
}

static void attend(const struct attention *op, const struct step *step, struct worker *worker, int64_t row,
                   int64_t kv_head, int64_t first_column) {
    const struct attention_products *products = attention_products(worker->isa);
    struct seen *all = (struct seen *)worker->scratch, *split = all + 1;
    bf16 *queries = (bf16 *)(split + 1), *weights = queries + LANES * MAX_HEAD_DIM;
    float(*scores)[LANES] = (float(*)[LANES])(weights + LANES * KEYS);
    int64_t group = op->heads / op->kv_heads, start = step->query_starts[row];
    int64_t query_len = step->query_starts[row + 1] - start, context = step->seq_lens[row] - query_len;
    struct columns columns = see(op, first_column, query_len * group, context, group);

    memset(queries, 0, LANES * op->dim * sizeof(bf16));
    for (int64_t column = 0; column < columns.count; column++) {
        int64_t query = (first_column + column) / group, head = kv_head * group + (first_column + column) % group;
        const bf16 *q = op->q + (start + query) * op->q_stride + head * op->dim;
        for (int64_t i = 0; i < op->dim; i += 2) memcpy(queries + i * LANES + 2 * column, q + i, 2 * sizeof(bf16));
    }

    struct walk walk = {op, step->block_tables + row * step->max_blocks, kv_head, columns.least, columns.past};
    struct units keys, values, next_keys, next_values;
    int64_t first_key = columns.least & -KEYS;
    locate(&walk, first_key, &next_keys, &next_values);
    begin(all, op->dim);
    while (first_key < columns.past) {
        int64_t past = min64(columns.past, (first_key / SPLIT + 1) * SPLIT);
        begin(split, op->dim);
        for (; first_key < past; first_key += KEYS) {
            keys = next_keys, values = next_values;
            locate(&walk, first_key + KEYS, &next_keys, &next_values);
            if (query_len == 1) {
                fetch_units(&next_keys, UNIT * op->dim * sizeof(bf16));
                fetch_units(&next_values, UNIT * op->dim * sizeof(bf16));
            }
            products->score(&keys, queries, op->dim, columns.count, scores);
            weigh(op, &columns, first_key, scores, split);
            products->turn(scores, weights);
            products->add(&values, weights, op->dim, columns.count, split->sums);
        }
        merge(all, split, columns.count, op->dim);
    }
    for (int64_t column = 0; column < columns.count; column++) {
        int64_t query = (first_column + column) / group, head = kv_head * group + (first_column + column) % group;
        write_out(op, all, column, head, op->out + (start + query) * op->out_stride + head * op->dim);
    }
}

/* Tasks: by row, its columns by 16, of each KV head. */
void attention(const void *arguments, const struct step *step, struct worker *worker) {
    const struct attention *op = arguments;
    int64_t group = op->heads / op->kv_heads, row = 0, before = 0;
    attention_products(worker->isa)->prepare();
    for (int64_t task; (task = take_task(worker)), row < step->num_rows;) {
        int64_t tasks;
        for (; row < step->num_rows; row++, before += tasks) {
            int64_t query_len = step->query_starts[row + 1] - step->query_starts[row];
            tasks = parts(query_len * group, LANES) * op->kv_heads;
            if (task < before + tasks) break;
        }
        if (row == step->num_rows) break;
        int64_t in_row = task - before;
        attend(op, step, worker, row, in_row % op->kv_heads, in_row / op->kv_heads * LANES);
    }
}
