/* Latent attention (DeepSeek-V2, 2024) over the paged cache: all heads attend to the same vectors, whose first elements
 * are also the values. Queries are in the latents' space already, in decodes and prompts, so that a row's result does
 * not depend on the batch. Otherwise as in attention.c. */

#include <math.h>

#include "attention.h"
#include "operators.h"
#include "panels.h"
#include "vectors.h"

#define TILES 16 /* of columns that are multiplied by keys together */

INLINE vector some(const bf16 *from, int64_t width) { return width == LANES ? load_bf16(from) : load_some(from, width); }

CLONES static void norm_latent(const struct latent_store *op, const bf16 *x, bf16 *out) {
    vector squares = {0};
    for (int64_t i = 0; i < op->rank; i += LANES) {
        vector v = some(x + i, min64(LANES, op->rank - i));
        squares += v * v;
    }
    float scale = 1.0f / sqrtf(sum_of(squares) / (float)op->rank + (float)op->eps);
    for (int64_t i = 0; i < op->rank; i++) out[i] = narrow(widen(x[i]) * scale * widen(op->norm[i]));
}

CLONES static void rotate(const struct latent_store *op, int64_t token, const bf16 *x, bf16 *out) {
    const float *cos = op->cos + token * op->rope, *sin = op->sin + token * op->rope;
    int64_t pairs = op->rope / 2;
    for (int64_t i = 0; i < pairs; i++) {
        float a = widen(x[op->is_interleaved ? 2 * i : i]), b = widen(x[op->is_interleaved ? 2 * i + 1 : i + pairs]);
        out[i] = narrow(a * cos[i] + b * sin[i]);
        out[i + pairs] = narrow(b * cos[i + pairs] + a * sin[i + pairs]);
    }
}

/* A token's vector. */
static bf16 *cached_at(const struct latent_store *op, int64_t slot) {
    return op->cache + slot / op->block_size * op->block_stride + slot % op->block_size * op->size;
}

static void store_token(const struct latent_store *op, const struct step *step, int64_t token) {
    int64_t q_dim = op->nope + op->rope, zeros = (op->size - op->rank - op->rope) * sizeof(bf16);
    const bf16 *q = op->q + token * op->q_stride + op->nope, *latent = op->latent + token * op->latent_stride;
    bf16 *latent_q = op->latent_q + token * op->heads * op->size + op->rank, *cached = cached_at(op, step->slots[token]);
    for (int64_t head = 0; head < op->heads; head++, latent_q += op->size) {
        rotate(op, token, q + head * q_dim, latent_q);
        if (zeros) memset(latent_q + op->rope, 0, zeros);
    }
    norm_latent(op, latent, cached);
    rotate(op, token, latent + op->rank, cached + op->rank);
    memset(cached + op->rank + op->rope, 0, zeros);
}

/* Values of an earlier owner after a block's last token may not be finite, and are multiplied by 0. */
static void clear_rest(const struct latent_store *op, const struct step *step, int64_t row) {
    int64_t query_len = step->query_starts[row + 1] - step->query_starts[row];
    int64_t offset = (step->seq_lens[row] - 1) % op->block_size, rest = op->block_size - 1 - offset;
    if (query_len == 0 || offset > query_len - 1) return; /* cleared by the step that began the block */
    bf16 *last = cached_at(op, step->slots[step->query_starts[row + 1] - 1]);
    memset(last + op->size, 0, rest * op->size * sizeof(bf16));
}

/* Tasks: tokens, then rows. */
void latent_store(const void *arguments, const struct step *step, struct worker *worker) {
    const struct latent_store *op = arguments;
    for (int64_t task; (task = take_task(worker)) < step->num_tokens + step->num_rows;) {
        if (task < step->num_tokens) store_token(op, step, task);
        else clear_rest(op, step, task - step->num_tokens);
    }
}

/* Some columns of one row. */
struct latent_task {
    const struct latent_attention *op;
    struct attention as; /* the row in the form that the products use */
    const int32_t *blocks;
    int64_t start, query_len; /* the row's tokens in the step; or one of them, with a window or entries */
    int64_t first_column, tiles, past;
    int64_t first_recent, num_recent; /* of that token's vectors, which are numbered from 0, the first ones */
    const int32_t *selected;          /* then these entries, or all */
};

/* A thread's memory for one. */
struct latent_room {
    struct seen all[TILES], split[TILES];
    ALIGNED float queries[TILES * LANES * MAX_LATENT_DIM]; /* or bfloat16 */
    ALIGNED bf16 values[KEYS * MAX_VALUE_DIM];
    ALIGNED float scores[PAIR][KEYS][LANES];
    ALIGNED float weights[PAIR * KEYS * LANES]; /* or bfloat16 */
    ALIGNED bf16 keys[KEYS * MAX_LATENT_DIM];   /* of vectors that are not adjacent */
};
_Static_assert(sizeof(struct latent_room) <= SCRATCH, "a thread's scratch holds a task");

/* Addresses of a step's keys. */
static void locate(const struct latent_task *task, int64_t first_key, struct units *keys) {
    const struct latent_attention *op = task->op;
    for (int unit = 0; unit < UNITS; unit++) {
        int64_t key = first_key + unit * UNIT;
        keys->at[unit] = NULL;
        if (key >= task->past) continue;
        int64_t block = task->blocks[key / op->block_size];
        keys->at[unit] = op->cache + block * op->block_stride + key % op->block_size * op->dim;
    }
}

/* The same of a token with a window or entries: copies, and zeros after the last. */
static void copy_together(const struct latent_task *task, int64_t first_key, bf16 *to, struct units *keys) {
    const struct latent_attention *op = task->op;
    const struct paged recent = {op->cache, op->block_stride, op->block_size, 1};
    int64_t count = min64(KEYS, task->past - first_key);
    for (int unit = 0; unit < UNITS; unit++) keys->at[unit] = unit * UNIT < count ? to + unit * UNIT * op->dim : NULL;
    for (int64_t i = 0; i < count; i++) {
        int64_t number = first_key + i, entry = number - task->num_recent;
        const bf16 *from;
        if (entry < 0) from = vector_at(&recent, task->blocks, task->first_recent + number, op->dim);
        else from = vector_at(&op->entries, task->blocks, task->selected ? task->selected[entry] : entry, op->dim);
        memcpy(to + i * op->dim, from, op->dim * sizeof(bf16));
    }
    memset(to + count * op->dim, 0, (-count & (UNIT - 1)) * op->dim * sizeof(bf16));
}

static inline int is_by_token(const struct latent_attention *op) { return op->window || op->entries.vectors; }

/* The first elements of keys, to the tiles [span][rank / 16][16 pairs of keys][16][2]. */
CLONES static void pair_values(const struct units *keys, int64_t rank, int64_t dim, bf16 *tiles) {
    for (int unit = 0; unit < UNITS; unit++) {
        bf16 *to = tiles + unit / 2 * SPAN * rank + unit % 2 * UNIT * LANES;
        for (int pair = 0; pair < UNIT / 2; pair++, to += 2 * LANES)
            for (int64_t i = 0; i < rank; i += LANES) {
                const bf16 *a = keys->at[unit] + 2 * pair * dim + i, *b = a + dim;
                if (!keys->at[unit]) memset(to + i * SPAN, 0, LINE);
                else
                    for (int lane = 0; lane < LANES; lane++)
                        to[i * SPAN + 2 * lane] = a[lane], to[i * SPAN + 2 * lane + 1] = b[lane];
            }
    }
}

static void stage_queries(const struct latent_task *task, const struct attention_products *products, int64_t first,
                          int64_t count, char *staged) {
    const struct latent_attention *op = task->op;
    const bf16 *columns[LANES] = {NULL};
    for (int64_t lane = 0; lane < count; lane++) {
        int64_t column = first + lane;
        columns[lane] = op->q + (task->start + column / op->heads) * op->q_stride + column % op->heads * op->dim;
    }
    products->turn(columns, op->dim, staged);
}

/* Multiply every column of a task by the keys of a step. */
static void take_step(const struct latent_task *task, const struct attention_products *products,
                      struct columns *columns, int64_t first_key, struct latent_room *room) {
    const struct latent_attention *op = task->op;
    struct units keys;
    struct fetches none = {.units = 0};
    if (is_by_token(op)) copy_together(task, first_key, room->keys, &keys);
    else locate(task, first_key, &keys);
    pair_values(&keys, op->rank, op->dim, room->values);
    const struct values values = values_of_tiles(room->values, &keys, op->rank);
    for (int64_t tile = 0; tile < task->tiles; tile += PAIR) {
        int tiles = (int)min64(PAIR, task->tiles - tile);
        struct spans spans = in_sight(first_key, columns[tile].least, columns[tile + tiles - 1].past);
        products->score(&keys, spans, (char *)room->queries + tile * LANES * op->dim * products->bytes, &columns[tile],
                        tiles, op->dim, room->scores, &none);
        for (int i = 0; i < tiles; i++)
            products->weigh(&task->as, &columns[tile + i], first_key, spans, room->scores[i], &room->split[tile + i],
                            (char *)room->weights + i * KEYS * LANES * products->bytes, &none);
        products->add(&values, spans, room->weights, &columns[tile], tiles, op->rank, &room->split[tile], &none);
    }
}

static void attend(struct latent_task *task, int64_t context, struct worker *worker) {
    const struct latent_attention *op = task->op;
    const struct attention_products *products = attention_products(worker->isa);
    struct latent_room *room = (struct latent_room *)worker->scratch;
    struct columns columns[TILES];
    for (int64_t tile = 0; tile < task->tiles; tile++) {
        int64_t first = task->first_column + tile * LANES;
        columns[tile] = see(&task->as, first, task->query_len * op->heads, context, op->heads);
        stage_queries(task, products, first, columns[tile].count,
                      (char *)room->queries + tile * LANES * op->dim * products->bytes);
        begin(&room->all[tile], columns[tile].count, op->rank);
    }
    task->past = columns[task->tiles - 1].past;
    for (int64_t first_key = 0; first_key < task->past;) {
        int64_t past = min64(task->past, first_key + SPLIT);
        for (int64_t tile = 0; tile < task->tiles; tile++) begin(&room->split[tile], columns[tile].count, op->rank);
        for (; first_key < past; first_key += KEYS) take_step(task, products, columns, first_key, room);
        for (int64_t tile = 0; tile < task->tiles; tile++)
            merge(&room->all[tile], &room->split[tile], columns[tile].count, op->rank);
    }
    for (int64_t tile = 0; tile < task->tiles; tile++)
        for (int64_t lane = 0; lane < columns[tile].count; lane++) {
            int64_t column = task->first_column + tile * LANES + lane, head = column % op->heads;
            bf16 *out = op->out + (task->start + column / op->heads) * op->out_stride + head * op->rank;
            write_out(&task->as, &room->all[tile], lane, head, out);
        }
}

/* The tasks of a token with a window or entries. */
static void attend_by_token(const struct latent_attention *op, const struct step *step, struct worker *worker,
                            struct latent_task *task) {
    int64_t tiles = parts(op->heads, LANES), row = step->num_rows - 1;
    int64_t at_once = min64(TILES, max64(PAIR, parts(tiles * step->num_tokens, 2 * worker->threads)));
    int64_t of_token = parts(tiles, at_once);
    for (int64_t number; (number = take_task(worker)) < step->num_tokens * of_token;) {
        int64_t token = step->num_tokens - 1 - number / of_token, first_tile = number % of_token * at_once;
        while (row > 0 && step->query_starts[row] > token) row--;
        int64_t position = step->seq_lens[row] - step->query_starts[row + 1] + token, count = 0;
        task->start = token, task->query_len = 1;
        task->blocks = step->block_tables + row * step->max_blocks;
        task->first_column = first_tile * LANES, task->tiles = min64(at_once, tiles - first_tile);
        task->num_recent = op->cache ? min64(op->window, position + 1) : 0;
        task->first_recent = position + 1 - task->num_recent;
        task->selected = op->selected ? op->selected + token * op->top_k : NULL;
        if (op->selected)
            while (count < op->top_k && task->selected[count] >= 0) count++;
        else if (op->entries.vectors) count = (position + 1) / op->entries.rate;
        attend(task, task->num_recent + count - 1, worker);
    }
}

/* Tiles of a task: as many as fit in memory, fewer if threads would have no task. */
static int64_t tiles_of_task(const struct latent_attention *op, const struct step *step, int threads) {
    return max64(1, min64(TILES, parts(step->num_tokens * op->heads, LANES * 2 * threads)));
}

/* Tasks: for each row its columns, some tiles at a time; or for each token, the last first, which has the most keys. */
void latent_attention(const void *arguments, const struct step *step, struct worker *worker) {
    const struct latent_attention *op = arguments;
    struct latent_task task = {.op = op};
    task.as = (struct attention){.heads = op->heads, .kv_heads = 1, .value_dim = op->rank, .scale = op->scale};
    task.as.sinks = op->sinks;
    if (is_by_token(op)) {
        prepare_tiles(worker->isa);
        attend_by_token(op, step, worker, &task);
        return;
    }
    int64_t row = 0, before = 0, of_row = 0, tiles = 0, at_once = tiles_of_task(op, step, worker->threads);
    prepare_tiles(worker->isa);
    for (int64_t number; number = take_task(worker), row < step->num_rows;) {
        for (; row < step->num_rows; row++, before += of_row) {
            tiles = parts((step->query_starts[row + 1] - step->query_starts[row]) * op->heads, LANES);
            of_row = parts(tiles, at_once);
            if (number < before + of_row) break;
        }
        if (row == step->num_rows) break;
        int64_t first_tile = (number - before) * at_once;
        task.first_column = first_tile * LANES, task.tiles = min64(at_once, tiles - first_tile);
        task.start = step->query_starts[row], task.query_len = step->query_starts[row + 1] - task.start;
        task.blocks = step->block_tables + row * step->max_blocks;
        attend(&task, step->seq_lens[row] - task.query_len, worker);
    }
}
