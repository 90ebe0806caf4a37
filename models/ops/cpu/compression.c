/* Entries of compressed attention (DeepSeek-V4, 2026), pools of tokens (GLM-5.3-Flash, 2026), and the storage of what
 * both are made of: see models/ops/compression.py. */

#include <math.h>

#include "attention.h"
#include "lengths.h"
#include "operators.h"
#include "vectors.h"

/* Tasks: tokens. */
OPERATOR(store_vectors) {
    const struct store_vectors *op = arguments;
    for (int64_t token; (token = take_task(worker)) < step->num_tokens;) {
        int64_t slot = step->slots[token];
        if (slot < 0) continue; /* a token that is not stored */
        bf16 *to = op->pages + slot / op->block_size * op->page_stride + slot % op->block_size * op->dim;
        memcpy(to, op->x + token * op->x_stride, op->dim * sizeof(bf16));
    }
}

/* The token's row, which is not before `row`, and its position. */
static int64_t row_of(const struct step *step, int64_t token, int64_t row, int64_t *position) {
    while (row + 1 < step->num_rows && step->query_starts[row + 1] <= token) row++;
    *position = step->seq_lens[row] - step->query_starts[row + 1] + token;
    return row;
}

/* The tokens of a window: of each the values of the entry's dimensions, its gates and their bias. */
struct window {
    int64_t count;
    const bf16 *values[MOST_COMPRESSED];
    const float *bias[MOST_COMPRESSED];
};

static void find_tokens(const struct compress *op, const int32_t *blocks, int64_t last, struct window *window) {
    const struct paged tokens = {op->tokens, op->token_stride, op->entries.page_tokens, 1};
    int64_t rate = op->entries.rate, first = last + 1 - op->span;
    window->count = 0;
    for (int64_t i = 0; i < op->span; i++) {
        if (first + i < 0) continue; /* before the sequence */
        int64_t series = i / rate * op->dim; /* the first series of the previous window, the second of this one */
        window->values[window->count] = vector_at(&tokens, blocks, first + i, 2 * op->series) + series;
        window->bias[window->count++] = op->bias + i % rate * op->series + series;
    }
}

INLINE vector gate_at(const struct window *window, int64_t token, int64_t series, int64_t i, int64_t width) {
    float bias[LANES] = {0};
    if (width == LANES) return load_bf16(window->values[token] + series + i) + load(window->bias[token] + i);
    memcpy(bias, window->bias[token] + i, width * sizeof(float));
    return load_some(window->values[token] + series + i, width) + load(bias);
}

INLINE vector combine_some(const struct window *window, int64_t series, int64_t i, int64_t width) {
    vector most = all(-INFINITY), sum = {0}, values = {0};
    for (int64_t token = 0; token < window->count; token++)
        most = larger(gate_at(window, token, series, i, width), most);
    for (int64_t token = 0; token < window->count; token++) {
        vector share = exp_of(gate_at(window, token, series, i, width) - most);
        sum += share;
        values += share * load_some(window->values[token] + i, width);
    }
    return values / sum;
}

/* The mean of the values, weighted in each dimension by the softmax of the gates. `out` has room for whole vectors. */
CLONES static void combine_tokens(const struct window *window, int64_t series, int64_t dim, float *out) {
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) store(out + i, combine_some(window, series, i, LANES));
    if (i < dim) store(out + i, combine_some(window, series, i, dim - i));
}

CLONES static void norm_entry(const struct compress *op, float *entry) {
    float squares = 0;
    for (int64_t i = 0; i < op->dim; i++) squares += entry[i] * entry[i];
    float scale = 1.0f / sqrtf(squares / (float)op->dim + (float)op->eps);
    for (int64_t i = 0; i < op->dim; i++) entry[i] *= scale * widen(op->norm[i]);
}

static void rotate_entry(const struct compress *op, int64_t position, float *entry) {
    float *pairs = entry + op->dim - 2 * op->pairs;
    for (int64_t pair = 0; pair < op->pairs; pair++, pairs += 2) {
        float angle = (float)position * op->frequencies[pair], a = pairs[0], b = pairs[1];
        float c = cosf(angle) * (float)op->factor, s = sinf(angle) * (float)op->factor;
        pairs[0] = a * c - b * s;
        pairs[1] = b * c + a * s;
    }
}

/* Tasks: tokens, of which some are the last of a window. */
OPERATOR(compress) {
    const struct compress *op = arguments;
    struct window *window = (struct window *)worker->scratch;
    float *entry = (float *)(window + 1);
    int64_t rate = op->entries.rate, row = 0, position;
    for (int64_t token; (token = take_task(worker)) < step->num_tokens;) {
        row = row_of(step, token, row, &position);
        if ((position + 1) % rate || step->slots[token] < 0) continue;
        int64_t number = position / rate;
        const int32_t *blocks = step->block_tables + row * step->max_blocks;
        find_tokens(op, blocks, position, window);
        combine_tokens(window, op->series, op->dim, entry);
        if (op->norm) {
            norm_entry(op, entry);
            rotate_entry(op, number * rate, entry);
        }
        bf16 *to = (bf16 *)vector_at(&op->entries, blocks, number, op->dim);
        for (int64_t i = 0; i < op->dim; i++) to[i] = narrow(entry[i]);
    }
}

/* Tasks: tokens. */
OPERATOR(tokens_of_pools) {
    const struct tokens_of_pools *op = arguments;
    int64_t rate = op->rate, most = op->top_k * rate + rate - 1, row = 0, position;
    for (int64_t token; (token = take_task(worker)) < step->num_tokens;) {
        const int32_t *pools = op->pools + token * op->top_k;
        int32_t *out = op->out + token * most, *past = out + most;
        row = row_of(step, token, row, &position);
        for (int64_t i = 0; i < op->top_k && pools[i] >= 0; i++)
            for (int64_t at = 0; at < rate; at++) *out++ = (int32_t)(pools[i] * rate + at);
        for (int64_t at = (position + 1) / rate * rate; at <= position; at++) *out++ = (int32_t)at;
        while (out < past) *out++ = -1;
    }
}
