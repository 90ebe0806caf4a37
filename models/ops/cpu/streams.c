/* Hyper-connections (Xie et al., 2026): see models/layers/hyper_connection.py. */

#include <math.h>

#include "lengths.h"
#include "operators.h"
#include "vectors.h"

#define COLUMNS 1024 /* of a task */

CLONES static float squares_of(const bf16 *x, int64_t size) {
    vector squares = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        vector v = load_some(x + i, min64(LANES, size - i));
        squares += v * v;
    }
    return sum_of(squares);
}

static float sigmoid(float x) { return 1 / (1 + expf(-x)); }

/* Divide each of `lines` by its sum. `step`: distance of the elements of a line; `next`: distance of lines. */
static void divide_by_sums(float *mix, int64_t lines, int64_t next, int64_t step, float eps) {
    for (int64_t line = 0; line < lines; line++, mix += next) {
        float sum = eps;
        for (int64_t i = 0; i < lines; i++) sum += mix[i * step];
        float by = 1 / sum;
        for (int64_t i = 0; i < lines; i++) mix[i * step] *= by;
    }
}

/* The matrix from its logits: softmax by row, then the iterations of Sinkhorn and Knopp. */
static void balance(const struct mix_streams *op, float *mix) {
    int64_t count = op->count;
    float eps = (float)op->eps;
    for (int64_t row = 0; row < count; row++) {
        float *line = mix + row * count, most = line[0], sum = 0;
        for (int64_t i = 1; i < count; i++) most = fmaxf(most, line[i]);
        for (int64_t i = 0; i < count; i++) sum += line[i] = expf(line[i] - most);
        for (int64_t i = 0; i < count; i++) line[i] = line[i] / sum + eps;
    }
    divide_by_sums(mix, count, 1, count, eps);
    for (int64_t i = 1; i < op->iterations; i++) {
        divide_by_sums(mix, count, count, 1, eps);
        divide_by_sums(mix, count, 1, count, eps);
    }
}

CLONES static void collapse(const struct mix_streams *op, const bf16 *streams, const float *weights, bf16 *out) {
    for (int64_t i = 0; i < op->size; i += LANES) {
        int64_t width = min64(LANES, op->size - i);
        vector sum = {0};
        for (int64_t stream = 0; stream < op->count; stream++)
            sum += load_some(streams + stream * op->size + i, width) * weights[stream];
        store_some(out + i, sum, width);
    }
}

/* Compute how much each stream contributes to the layer's input; store `post` and `mix` if they are wanted. */
static void weigh(const struct mix_streams *op, int64_t token, const bf16 *streams, float *weights) {
    int64_t count = op->count, squared = count * count, of_token = op->post ? 2 * count + squared : count;
    float found[(2 + MOST_STREAMS) * MOST_STREAMS];
    float factor = 1 / sqrtf(squares_of(streams, count * op->size) / (float)(count * op->size) + (float)op->norm_eps);
    for (int64_t i = 0; i < of_token; i++)
        found[i] = op->projected[token * of_token + i] * factor * op->scale[min64(i / count, 2)] + op->base[i];
    for (int64_t i = 0; i < count; i++) weights[i] = sigmoid(found[i]) + (float)op->eps;
    if (!op->post) return;
    for (int64_t i = 0; i < count; i++) op->post[token * count + i] = 2 * sigmoid(found[count + i]);
    balance(op, found + 2 * count);
    memcpy(op->mix + token * squared, found + 2 * count, squared * sizeof(float));
}

/* Tasks: tokens. */
OPERATOR(mix_streams) {
    const struct mix_streams *op = arguments;
    float weights[MOST_STREAMS];
    for (int64_t i = 0; i < op->count; i++) weights[i] = 1 / (float)op->count;
    for (int64_t token; (token = take_task(worker)) < step->num_tokens;) {
        const bf16 *streams = op->streams + token * op->count * op->size;
        if (op->projected) weigh(op, token, streams, weights);
        collapse(op, streams, weights, op->out + token * op->size);
    }
}

CLONES static void spread(const struct spread_streams *op, int64_t token, int64_t first, int64_t past) {
    int64_t count = op->count, width = count * op->size;
    const bf16 *x = op->x + token * op->x_stride, *streams = op->streams + token * width;
    const float *post = op->post + token * count, *mix = op->mix + token * count * count;
    bf16 *out = op->out + token * width;
    for (int64_t i = first; i < past; i += LANES) {
        int64_t lanes = min64(LANES, past - i);
        vector from[MOST_STREAMS], added = load_some(x + i, lanes);
        for (int64_t stream = 0; stream < count; stream++)
            from[stream] = load_some(streams + stream * op->size + i, lanes);
        for (int64_t to = 0; to < count; to++) {
            vector sum = added * post[to];
            for (int64_t stream = 0; stream < count; stream++) sum += from[stream] * mix[stream * count + to];
            store_some(out + to * op->size + i, sum, lanes);
        }
    }
}

static void repeat(const struct spread_streams *op, int64_t token, int64_t first, int64_t past) {
    bf16 *out = op->out + token * op->count * op->size + first;
    for (int64_t to = 0; to < op->count; to++)
        memcpy(out + to * op->size, op->x + token * op->x_stride + first, (past - first) * sizeof(bf16));
}

/* Tasks: parts of tokens. */
OPERATOR(spread_streams) {
    const struct spread_streams *op = arguments;
    int64_t shares = parts(op->size, COLUMNS);
    for (int64_t task; (task = take_task(worker)) < step->num_tokens * shares;) {
        int64_t first = task % shares * COLUMNS, past = min64(op->size, first + COLUMNS);
        if (op->streams) spread(op, task / shares, first, past);
        else repeat(op, task / shares, first, past);
    }
}
