/* What lies between the products of a decoder layer, in float32, rounded once. */

#include <math.h>

#include "operators.h"
#include "vectors.h"

/* `width` of 16 in the last part of a row. */
#define FOR_PARTS(i, width, size) \
    for (int64_t i = 0, width; width = min64(LANES, (size) - i), i < (size); i += LANES)

INLINE vector part(const bf16 *from, int64_t width) {
    return width == LANES ? load_bf16(from) : load_some(from, width);
}

INLINE void put(bf16 *to, vector v, int64_t width) {
    if (width == LANES) store_bf16(to, v);
    else store_some(to, v, width);
}

INLINE float scale_of(const bf16 *x, int64_t size, float eps) {
    vector squares = {0};
    FOR_PARTS(i, width, size) {
        vector v = part(x + i, width);
        squares += v * v;
    }
    return 1.0f / sqrtf(sum_of(squares) / (float)size + eps);
}

CLONES static void norm_row(const struct rms_norm *op, const bf16 *x, bf16 *residual, bf16 *out) {
    int64_t size = op->size;
    if (residual && !op->is_added) {
        FOR_PARTS(i, width, size) put(residual + i, part(x + i, width) + part(residual + i, width), width);
        x = residual;
    }
    float scale = scale_of(x, size, (float)op->eps), offset = (float)op->offset;
    FOR_PARTS(i, width, size) {
        vector normed = part(x + i, width) * scale * (part(op->weight + i, width) + offset);
        if (op->is_added) put(residual + i, part(residual + i, width) + normed, width);
        else put(out + i, normed, width);
    }
}

/* Tasks: tokens. */
void rms_norm(const void *arguments, const struct step *step, struct worker *worker) {
    const struct rms_norm *op = arguments;
    for (int64_t token; (token = take_task(worker)) < step->num_tokens;)
        norm_row(op, op->x + token * op->x_stride, op->residual ? op->residual + token * op->residual_stride : NULL,
                 op->out + token * op->out_stride);
}

/* Tasks: tokens. */
void rope_table(const void *arguments, const struct step *step, struct worker *worker) {
    const struct rope_table *op = arguments;
    for (int64_t token; (token = take_task(worker)) < step->num_tokens;) {
        float *cos = op->cos + token * 2 * op->pairs, *sin = op->sin + token * 2 * op->pairs;
        for (int64_t pair = 0; pair < op->pairs; pair++) {
            float angle = (float)step->positions[token] * op->frequencies[pair];
            cos[pair] = cos[pair + op->pairs] = cosf(angle) * (float)op->factor;
            sin[pair + op->pairs] = sinf(angle) * (float)op->factor;
            sin[pair] = -sin[pair + op->pairs];
        }
    }
}

struct turn {
    const float *cos, *sin;
    int64_t pairs, dim;
    float offset, eps;
};

/* A head's vector, normalised where there is a weight, its first dimensions rotated by pairs (i, i + pairs). */
CLONES static void turn_head(const struct turn *turn, const bf16 *x, const bf16 *weight, bf16 *out) {
    float v[MAX_HEAD_DIM];
    int64_t dim = turn->dim, pairs = turn->pairs;
    for (int64_t i = 0; i < dim; i++) v[i] = widen(x[i]);
    if (weight) {
        float scale = scale_of(x, dim, turn->eps);
        for (int64_t i = 0; i < dim; i++) v[i] *= scale * (widen(weight[i]) + turn->offset);
    }
    for (int64_t i = 0; i < pairs; i++) {
        float a = v[i], b = v[i + pairs];
        v[i] = a * turn->cos[i] + b * turn->sin[i];
        v[i + pairs] = b * turn->cos[i + pairs] + a * turn->sin[i + pairs];
    }
    for (int64_t i = 0; i < dim; i++) out[i] = narrow(v[i]);
}

static void store_token(const struct rope_store *op, const struct step *step, int64_t token) {
    int64_t dim = op->dim;
    const struct turn turn = {.cos = op->cos + token * op->rotary_dim,
                              .sin = op->sin + token * op->rotary_dim,
                              .pairs = op->rotary_dim / 2,
                              .dim = dim,
                              .offset = (float)op->offset,
                              .eps = (float)op->eps};
    bf16 *q = op->q + token * op->q_stride;
    if (op->q_norm || op->rotary_dim)
        for (int64_t head = 0; head < op->heads; head++, q += dim) turn_head(&turn, q, op->q_norm, q);
    int64_t block = step->slots[token] / op->block_size, offset = step->slots[token] % op->block_size;
    const bf16 *k = op->k + token * op->k_stride, *v = op->v + token * op->v_stride;
    for (int64_t head = 0; head < op->kv_heads; head++, k += dim, v += dim) {
        int64_t at = block * op->block_stride + head * op->block_size * dim;
        turn_head(&turn, k, op->k_norm, op->k_cache + at + offset * dim);
        bf16 *to = op->v_cache + at + offset / 2 * dim * 2 + offset % 2;
        for (int64_t i = 0; i < dim; i++) to[2 * i] = v[i];
    }
}

/* What an earlier owner left behind a block's last token may not be finite, and is multiplied by 0. */
static void clear_rest(const struct rope_store *op, const struct step *step, int64_t row) {
    int64_t query_len = step->query_starts[row + 1] - step->query_starts[row];
    int64_t last = step->seq_lens[row] - 1, offset = last % op->block_size;
    if (query_len == 0 || offset > query_len - 1) return; /* cleared by the step that began the block */
    int64_t block = step->slots[step->query_starts[row + 1] - 1] / op->block_size;
    for (int64_t head = 0; head < op->kv_heads; head++) {
        bf16 *values = op->v_cache + block * op->block_stride + head * op->block_size * op->dim;
        int64_t from = offset + 1;
        if (from % 2) {
            bf16 *other = values + from / 2 * op->dim * 2 + 1;
            for (int64_t i = 0; i < op->dim; i++) other[2 * i] = 0;
            from++;
        }
        memset(values + from * op->dim, 0, (op->block_size - from) * op->dim * sizeof(bf16));
    }
}

/* Tasks: tokens, then rows. */
void rope_store(const void *arguments, const struct step *step, struct worker *worker) {
    const struct rope_store *op = arguments;
    for (int64_t task; (task = take_task(worker)) < step->num_tokens + step->num_rows;) {
        if (task < step->num_tokens) store_token(op, step, task);
        else clear_rest(op, step, task - step->num_tokens);
    }
}

/* (up + 1) * gate * sigmoid(alpha * gate), both clamped first; a NaN stays one. */
INLINE vector gate_clamped(const struct gated *op, vector gate, vector up) {
    vector limit = all((float)op->limit);
    gate = choose(gate > limit, limit, gate);
    up = choose(up > limit, limit, choose(up < -limit, -limit, up));
    return (up + 1.0f) * gate * sigmoid_of((float)op->alpha * gate);
}

CLONES static void gate_row(const struct gated *op, const bf16 *gate, bf16 *out) {
    const bf16 *up = gate + op->size;
    FOR_PARTS(i, width, op->size) {
        vector x = part(gate + i, width), y = part(up + i, width);
        if (op->activation == SILU) y *= x * sigmoid_of(x);
        else if (op->activation == GELU_TANH)
            y *= 0.5f * x * (1.0f + tanh_of(0.7978845608f * (x + 0.044715f * x * x * x)));
        else y = gate_clamped(op, x, y);
        put(out + i, y, width);
    }
}

/* Tasks: rows. */
void gated(const void *arguments, const struct step *step, struct worker *worker) {
    const struct gated *op = arguments;
    for (int64_t row; (row = take_task(worker)) < step->num_tokens * op->per_token;)
        gate_row(op, op->gate_up + row * op->stride, op->out + row * op->out_stride);
}

CLONES static void gate_head(const bf16 *x, const bf16 *gate, bf16 *out, int64_t dim) {
    FOR_PARTS(i, width, dim) {
        vector v = part(x + i, width);
        put(out + i, gate ? v * sigmoid_of(part(gate + i, width)) : v, width);
    }
}

/* Tasks: tokens. */
void gate_heads(const void *arguments, const struct step *step, struct worker *worker) {
    const struct gate_heads *op = arguments;
    for (int64_t token; (token = take_task(worker)) < step->num_tokens;)
        for (int64_t head = 0; head < op->heads; head++)
            gate_head(op->x + token * op->x_stride + head * op->x_step,
                      op->gate ? op->gate + token * op->gate_stride + head * op->gate_step : NULL,
                      op->out + token * op->out_stride + head * op->dim, op->dim);
}
