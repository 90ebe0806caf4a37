/* The cached keys to which each token attends: an indexer's scores, and the best of them (DeepSeek-V3.2, DeepSeek-V4,
 * MiniMax-M3). Each token is computed alone, so that its selection does not depend on the batch. */

#include <math.h>

#include "attention.h"
#include "panels.h"
#include "vectors.h"

#define DIGIT 11 /* bits of a key by which candidates are counted at a time */

/* A thread's memory for a token. */
struct index_room {
    ALIGNED float queries[INDEX_HEADS * MAX_INDEX_DIM]; /* tiles of columns; or bfloat16 */
    ALIGNED float scores[PAIR][KEYS][LANES];
    ALIGNED float sums[KEYS][LANES];         /* weighted scores, by the head's index in its tile */
    ALIGNED bf16 keys[KEYS * MAX_INDEX_DIM]; /* of units that are not adjacent, or padded */
    ALIGNED bf16 heads[LANES * MAX_INDEX_DIM]; /* padded queries */
    ALIGNED float weights[INDEX_HEADS];
    float best[INDEX_HEADS]; /* of the block that is not complete, by chooser */
    uint32_t counts[1 << DIGIT];
    ALIGNED uint32_t candidates[MAX_INDEXED]; /* lower for a larger score; [choosers][candidates] */
};
_Static_assert(sizeof(struct index_room) <= SCRATCH, "a thread's scratch holds a token");

/* A score as a number that is lower for a larger one, see largest.c: a NaN is the largest, both zeros are equal. */
static inline uint32_t ordered(float score) {
    union {
        float score;
        uint32_t bits;
    } as = {score + 0.0f};
    return as.bits ^ (as.bits >> 31 ? 0x7fffffffu : 0) ^ 0x7fffffffu;
}

/* The elements that products read of a key or a query: others than its own are zeros. */
static inline int64_t padded_size(const struct select_keys *op) { return max64(DEPTH, parts(op->dim, 8) * 8); }

static void copy_padded(const bf16 *from, int64_t count, bf16 *to, int64_t size) {
    memcpy(to, from, count * sizeof(bf16));
    memset(to + count, 0, (size - count) * sizeof(bf16));
}

/* Addresses of up to KEYS of a row's keys, from `first` on. */
static void locate(const struct select_keys *op, const int32_t *blocks, int64_t first, int64_t count,
                   struct index_room *room, struct units *units) {
    int64_t size = padded_size(op);
    for (int64_t unit = 0; unit < UNITS; unit++) {
        int64_t key = first + unit * UNIT, past = min64(UNIT, first + count - key);
        units->at[unit] = NULL;
        if (past <= 0) continue;
        const bf16 *begin = vector_at(&op->keys, blocks, key, op->dim);
        units->at[unit] = begin;
        if (past == UNIT && vector_at(&op->keys, blocks, key + UNIT - 1, op->dim) == begin + (UNIT - 1) * size)
            continue;
        bf16 *to = room->keys + unit * UNIT * size;
        units->at[unit] = to;
        for (int64_t i = 0; i < past; i++, to += size)
            copy_padded(vector_at(&op->keys, blocks, key + i, op->dim), op->dim, to, size);
        memset(to, 0, (UNIT - past) * size * sizeof(bf16));
    }
}

/* Add a tile's weighted scores, in which negative ones count as 0, to those of the tiles before. After the last head a
 * tile may contain any bits. */
CLONES static void add_heads(const float *weights, float scores[KEYS][LANES], int64_t count, int64_t heads,
                             int is_first, float sums[KEYS][LANES]) {
    vector by = load(weights);
    integers is_absent;
    for (int lane = 0; lane < LANES; lane++) is_absent[lane] = lane < heads ? 0 : -1;
    for (int64_t key = 0; key < count; key++) {
        vector v = load(scores[key]), weighted = choose(is_absent | (v < 0.0f), all(0), v) * by;
        store(sums[key], is_first ? weighted : load(sums[key]) + weighted);
    }
}

CLONES static void order_sums(float sums[KEYS][LANES], int64_t count, uint32_t *to) {
    for (int64_t key = 0; key < count; key++) to[key] = ordered(sum_of(load(sums[key])));
}

/* Scores of blocks of keys, each that of its best key: those of a step, of which the first may have begun before it and
 * the last may continue after it. Later steps overwrite a block's score. */
static void order_blocks(const struct select_keys *op, float scores[KEYS][LANES], int64_t head, int64_t first,
                         int64_t count, float *best, uint32_t *to) {
    for (int64_t i = 0; i < count;) {
        int64_t block = (first + i) / op->block, past = min64(count, (block + 1) * op->block - first);
        float most = (first + i) % op->block ? *best : -INFINITY;
        for (; i < past; i++) {
            float score = scores[i][head];
            most = score > most || score != score ? score : most;
        }
        *best = most;
        to[block] = ordered(most);
    }
}

/* The candidates of a step, of `all` that each chooser has. */
static void score_step(const struct select_keys *op, const struct attention_products *products,
                       const struct units *units, int64_t first, int64_t count, int64_t all_candidates,
                       struct index_room *room) {
    int64_t tiles = parts(op->heads, LANES);
    struct spans spans = {0, (int)parts(count, SPAN)};
    struct fetches none = {.units = 0};
    for (int64_t tile = 0; tile < tiles; tile += PAIR) {
        int both = (int)min64(PAIR, tiles - tile);
        struct columns columns[PAIR];
        for (int i = 0; i < both; i++) columns[i].count = min64(LANES, op->heads - (tile + i) * LANES);
        products->score(units, spans, (char *)room->queries + tile * LANES * query_size(op->dim) * products->bytes,
                        columns, both, padded_size(op), room->scores, &none);
        for (int i = 0; i < both; i++) {
            int64_t head = (tile + i) * LANES;
            if (op->weights)
                add_heads(room->weights + head, room->scores[i], count, columns[i].count, tile + i == 0, room->sums);
            for (int64_t lane = 0; !op->weights && lane < columns[i].count; lane++)
                order_blocks(op, room->scores[i], lane, first, count, &room->best[head + lane],
                             room->candidates + (head + lane) * all_candidates);
        }
    }
    if (op->weights) order_sums(room->sums, count, room->candidates + first);
}

/* The index of the count at which `k` is reached; the rest of `k` after the earlier counts is stored in it. */
static uint32_t reach(const uint32_t *counts, uint32_t *k) {
    uint32_t at = 0;
    for (; counts[at] < *k; at++) *k -= counts[at];
    return at;
}

/* The indexes of the k lowest numbers, ascending; of equal ones the first. The k-th lowest is found digit by digit. */
static void take_lowest(const uint32_t *numbers, int64_t count, uint32_t k, uint32_t *counts, int32_t *to) {
    uint32_t prefix = 0;
    for (int known = 0, bits = DIGIT; known < 32; known += bits, bits = 32 - known < DIGIT ? 32 - known : DIGIT) {
        int shift = 32 - known - bits;
        memset(counts, 0, sizeof(uint32_t) << bits);
        for (int64_t i = 0; i < count; i++)
            if (known == 0 || numbers[i] >> (32 - known) == prefix) counts[numbers[i] >> shift & ((1u << bits) - 1)]++;
        prefix = prefix << bits | reach(counts, &k);
    }
    /* Now `prefix` is the k-th lowest number, and k how many of those that equal it are taken. */
    for (int64_t i = 0; i < count; i++)
        if (numbers[i] < prefix || (numbers[i] == prefix && k > 0)) {
            k -= numbers[i] == prefix;
            *to++ = (int32_t)i;
        }
}

static void stage_token(const struct select_keys *op, const struct attention_products *products, int64_t token,
                  struct index_room *room) {
    int64_t size = padded_size(op);
    for (int64_t first = 0; first < op->heads; first += LANES) {
        const bf16 *columns[LANES] = {NULL};
        for (int64_t lane = 0; lane < min64(LANES, op->heads - first); lane++) {
            columns[lane] = op->q + token * op->q_stride + (first + lane) * op->dim;
            if (size == op->dim) continue;
            copy_padded(columns[lane], op->dim, room->heads + lane * size, size);
            columns[lane] = room->heads + lane * size;
        }
        products->turn(columns, size, (char *)room->queries + first * query_size(op->dim) * products->bytes);
    }
    memset(room->weights, 0, sizeof room->weights);
    for (int64_t head = 0; op->weights && head < op->heads; head++)
        room->weights[head] = widen(op->weights[token * op->weight_stride + head]) * (float)op->scale;
}

static void select_token(const struct select_keys *op, const struct attention_products *products,
                         const struct step *step, int64_t row, int64_t token, struct index_room *room) {
    int64_t position = step->seq_lens[row] - step->query_starts[row + 1] + token;
    int64_t choosers = op->weights ? 1 : op->heads, keys = (position + 1) / op->keys.rate;
    int64_t candidates = op->weights ? keys : parts(keys, op->block);
    int32_t *to = op->selected + token * choosers * op->top_k;
    if (candidates <= op->top_k) {
        for (int64_t i = 0; i < choosers * op->top_k; i++)
            to[i] = i % op->top_k < candidates ? (int32_t)(i % op->top_k) : -1;
        return;
    }
    stage_token(op, products, token, room);
    for (int64_t first = 0; first < keys; first += KEYS) {
        int64_t count = min64(KEYS, keys - first);
        struct units units;
        locate(op, step->block_tables + row * step->max_blocks, first, count, room, &units);
        score_step(op, products, &units, first, count, candidates, room);
    }
    for (int64_t chooser = 0; chooser < choosers; chooser++) {
        uint32_t *numbers = room->candidates + chooser * candidates;
        /* Less than all scores that are numbers. */
        for (int64_t i = 0; !op->weights && i < op->num_local; i++) numbers[candidates - 1 - i] = ordered(INFINITY);
        take_lowest(numbers, candidates, (uint32_t)op->top_k, room->counts, to + chooser * op->top_k);
    }
}

/* Tasks: tokens, the last first, which have the most keys. */
void select_keys(const void *arguments, const struct step *step, struct worker *worker) {
    const struct select_keys *op = arguments;
    const struct attention_products *products = attention_products(worker->isa);
    int64_t row = step->num_rows - 1;
    prepare_tiles(worker->isa);
    for (int64_t task; (task = take_task(worker)) < step->num_tokens;) {
        int64_t token = step->num_tokens - 1 - task;
        while (row > 0 && step->query_starts[row] > token) row--;
        select_token(op, products, step, row, token, (struct index_room *)worker->scratch);
    }
}
