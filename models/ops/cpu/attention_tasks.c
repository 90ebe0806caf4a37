/* See attention_tasks.h. */

#include "attention_tasks.h"
#include "panels.h"

#define TOGETHER 16    /* units whose lines are prefetched in turn */
#define FEW_TOGETHER 4 /* the same on Zen 5: with 16 one core read 18 GB/s instead of 25 */
#define LINES_AHEAD 512 /* of several heads, from the reads to the prefetches: with 256 a fifth slower */

static int64_t first_key_of(const struct attention *op, int64_t position) {
    if (op->window == 0) return 0;
    return op->is_chunked ? position / op->window * op->window : max64(0, position - op->window + 1);
}

struct columns see(const struct attention *op, int64_t first_column, int64_t columns, int64_t context, int64_t group) {
    struct columns made = {.count = min64(LANES, columns - first_column)};
    for (int lane = 0; lane < LANES; lane++) {
        int64_t query = (first_column + (lane < made.count ? lane : 0)) / group, position = context + query;
        made.last[lane] = (int32_t)position;
        made.first[lane] = (int32_t)first_key_of(op, position);
    }
    int64_t final = made.last[made.count - 1];
    made.least = made.first[0], made.past = final + 1;
    made.always_from = made.first[made.count - 1], made.always_past = made.last[0] + 1;
    return made;
}

struct spans in_sight(int64_t first_key, int64_t least, int64_t past) {
    int64_t from = max64(0, least - first_key) / SPAN;
    return (struct spans){(int)from, (int)max64(from, parts(min64(KEYS, past - first_key), SPAN))};
}

/* Number of keys, in whole steps, that two rows have in the same blocks and to which all their queries attend. */
static int64_t common_keys(const struct attention *op, const struct step *step, int64_t row, int64_t other) {
    const int32_t *a = step->block_tables + row * step->max_blocks, *b = step->block_tables + other * step->max_blocks;
    int64_t most = (min64(step->seq_lens[row], step->seq_lens[other]) - 1) / op->block_size, blocks = 0;
    while (blocks < most && a[blocks] == b[blocks]) blocks++;
    return blocks * op->block_size & -KEYS;
}

/* Number of rows from there on that attend together, at least 1, and to how many keys. Every thread is to have a
 * task. */
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

static int is_decode(const struct step *step, int64_t row) {
    return step->query_starts[row + 1] - step->query_starts[row] == 1;
}

/* A block's heads are adjacent in memory, and AMD's processors read fastest in order. But no task may take longer than
 * a thread's share of all of them. */
int64_t heads_together(const struct attention *op, const struct step *step, const struct worker *worker) {
    int64_t total = 0, longest = 0, heads = MOST_HEADS;
    if (!reads_one_stream() || !attention_products(worker->isa)->has_few || op->heads > FEW_COLUMNS * op->kv_heads ||
        op->soft_cap > 0 || op->selected || op->block_size != UNIT)
        return 1;
    for (int64_t row = 0; row < step->num_rows; row++)
        if (is_decode(step, row)) total += step->seq_lens[row], longest = max64(longest, step->seq_lens[row]);
    while (heads > 1 && (op->kv_heads % heads || heads * longest * worker->threads > total * op->kv_heads)) heads /= 2;
    return heads;
}

int reach_task(const struct attention *op, const struct step *step, int threads, long number, struct cursor *at) {
    int64_t group = op->heads / op->kv_heads;
    while (number >= at->before + at->of_row) {
        at->before += at->of_row, at->row += at->rows;
        at->of_row = at->rows = 0, at->kv_heads = 1;
        if (at->row == step->num_rows) return 0;
        at->rows = op->selected ? 1 : count_together(op, step, at->row, threads, &at->shared);
        if (op->selected) {
            at->of_row = (step->query_starts[at->row + 1] - step->query_starts[at->row]) * op->kv_heads;
            continue;
        }
        at->tiles = parts((step->query_starts[at->row + 1] - step->query_starts[at->row]) * group, LANES);
        if (at->rows == 1 && is_decode(step, at->row)) at->kv_heads = at->heads;
        at->of_row = (at->rows > 1 ? 1 : parts(at->tiles, TILES)) * op->kv_heads / at->kv_heads;
    }
    return 1;
}

/* One token and KV head, whose keys are those of the selected blocks up to the token's position. */
static void find_selected(const struct attention *op, const struct step *step, int64_t index, const struct cursor *at,
                          struct task *task) {
    int64_t tokens = at->of_row / op->kv_heads, token = index % tokens, count = 0;
    int64_t group = op->heads / op->kv_heads, position = step->seq_lens[at->row] - tokens + token;
    *task = (struct task){.op = op, .group = group, .kv_heads = 1, .row = at->row, .rows = 1, .query_len = 1};
    task->kv_head = index / tokens, task->start = step->query_starts[at->row] + token;
    task->blocks = step->block_tables + at->row * step->max_blocks;
    task->selected = op->selected + (task->start * op->kv_heads + task->kv_head) * op->top_k;
    while (count < op->top_k && task->selected[count] >= 0) count++;
    if (count) task->past = (count - 1) * op->block + min64(op->block, position + 1 - task->selected[count - 1] * op->block);
    task->context = task->past - 1, task->tiles = parts(group, LANES);
}

int find_task(const struct attention *op, const struct step *step, int threads, long number, struct cursor *at,
              struct task *task) {
    if (!reach_task(op, step, threads, number, at)) return 0;
    if (op->selected) {
        find_selected(op, step, number - at->before, at, task);
        return 1;
    }
    task->selected = NULL;
    int64_t group = op->heads / op->kv_heads;
    int64_t of_head = at->of_row / (op->kv_heads / at->kv_heads), first_tile = (number - at->before) % of_head * TILES;
    task->op = op, task->group = group, task->row = at->row, task->rows = at->rows, task->shared = at->shared;
    task->kv_head = (number - at->before) / of_head * at->kv_heads, task->kv_heads = at->kv_heads;
    task->blocks = step->block_tables + at->row * step->max_blocks;
    task->start = step->query_starts[at->row], task->query_len = step->query_starts[at->row + 1] - task->start;
    task->context = step->seq_lens[at->row] - task->query_len;
    task->first_column = first_tile * LANES, task->tiles = min64(TILES, at->tiles - first_tile);
    if (task->kv_heads > 1) task->tiles = task->kv_heads;
    /* The part of it that is prefetched first. */
    task->least = 0, task->past = task->shared;
    if (task->rows > 1) return 1;
    int64_t columns = task->query_len * group;
    struct columns first = see(op, task->first_column, columns, task->context, group);
    struct columns last = first;
    if (task->tiles > 1 && task->kv_heads == 1)
        last = see(op, task->first_column + (task->tiles - 1) * LANES, columns, task->context, group);
    task->least = first.least, task->past = last.past;
    return 1;
}

void locate(const struct task *task, int64_t first_key, struct units *keys, struct units *values) {
    const struct attention *op = task->op;
    for (int unit = 0; unit < UNITS; unit++) {
        int64_t key = first_key + unit * UNIT;
        keys->at[unit] = values->at[unit] = NULL;
        if (key >= task->past || key + UNIT <= task->least) continue;
        if (task->selected) key = task->selected[key / op->block] * op->block + key % op->block;
        int64_t block = task->blocks[key / op->block_size], row = task->kv_head * op->block_size + key % op->block_size;
        keys->at[unit] = op->k_cache + block * op->block_stride + row * op->dim;
        values->at[unit] = op->v_cache + block * op->value_stride + row * op->value_dim;
    }
}

/* Units of keys and of values, alternating, up to the smaller number of both. */
static struct fetches to_fetch(const struct task *task, const struct units *keys, const struct units *values) {
    int64_t dim = min64(task->op->dim, task->op->value_dim);
    struct fetches made = {.bytes = task->kv_heads * UNIT * dim * (int64_t)sizeof(bf16),
                           .together = task->kv_heads > 1 || fetches_far() ? FEW_TOGETHER : TOGETHER};
    for (int unit = 0; unit < UNITS; unit++)
        if (keys->at[unit]) made.at[made.units++] = (const char *)keys->at[unit];
    for (int unit = 0; unit < UNITS; unit++)
        if (values->at[unit]) made.at[made.units++] = (const char *)values->at[unit];
    for (int unit = made.units; unit % AT_ONCE; unit++) made.at[unit] = made.at[unit - 1];
    return made;
}

/* The next known step; no units if there is none. */
static struct fetches look_on(struct ahead *ahead, const struct task *after) {
    if (ahead->task && ahead->first_key >= ahead->task->past) {
        ahead->task = ahead->task == after ? NULL : after;
        if (ahead->task) ahead->first_key = ahead->task->least & -KEYS;
    }
    if (!ahead->task) return (struct fetches){.units = 0};
    struct units keys, values;
    locate(ahead->task, ahead->first_key, &keys, &values);
    ahead->first_key += KEYS;
    return to_fetch(ahead->task, &keys, &values);
}

void begin_task(struct ahead *ahead, const struct task *task, int64_t first_key) {
    if (ahead->task == task) return;
    *ahead = (struct ahead){.task = task, .first_key = first_key};
    if (task->kv_heads == 1) {
        ahead->first_key += KEYS;
        return;
    }
    /* Several heads of a step would fill the second cache: they are fetched a few lines before they are read. */
    ahead->soon = look_on(ahead, NULL);
    fetch_lines(&ahead->soon, LINES_AHEAD);
}

void look_further(struct ahead *ahead, const struct task *after) {
    if (ahead->soon.units == 0) ahead->soon = look_on(ahead, after);
    if (ahead->later.units == 0) ahead->later = look_on(ahead, after);
    ahead->soon.then = &ahead->later, ahead->later.then = NULL;
}

void go_on(struct ahead *ahead) {
    ahead->soon.then = NULL;
    fetch_lines(&ahead->soon, 2 * UNITS * UNIT * MAX_HEAD_DIM);
    ahead->soon = ahead->later, ahead->later = (struct fetches){.units = 0};
}
