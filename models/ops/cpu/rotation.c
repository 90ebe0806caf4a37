/* Rotations that `rope_store` does not support: of a head's last dimensions, by adjacent pairs, backwards, or into a
 * cache of vectors. */

#include <math.h>

#include "operators.h"
#include "vectors.h"

/* A head as float32, normalised. */
CLONES static void widen_head(const struct rotate_heads *op, const bf16 *x, float *to) {
    vector squares = {0};
    for (int64_t i = 0; i < op->dim; i += LANES) {
        vector v = load_some(x + i, min64(LANES, op->dim - i));
        squares += v * v;
        store(to + i, v);
    }
    if (op->eps == 0) return;
    float scale = 1.0f / sqrtf(sum_of(squares) / (float)op->dim + (float)op->eps), offset = (float)op->offset;
    for (int64_t i = 0; i < op->dim; i += LANES) {
        vector by = all(scale);
        if (op->norm) by = (load_some(op->norm + i, min64(LANES, op->dim - i)) + offset) * scale;
        store(to + i, load(to + i) * by);
    }
}

/* Rotate the dimensions by the angles of pairs, whose sines are in the second half. */
CLONES static void rotate(const struct rotate_heads *op, const float *cos, const float *sin, float *x) {
    int64_t pairs = op->rotary_dim / 2, step = op->is_interleaved ? 2 : 1, other = op->is_interleaved ? 1 : pairs;
    float sign = op->is_back ? -1 : 1;
    for (int64_t pair = 0; pair < pairs; pair++) {
        float *a = x + pair * step, *b = a + other, s = sign * sin[pairs + pair], low = *a, high = *b;
        *a = low * cos[pair] - high * s;
        *b = high * cos[pair] + low * s;
    }
}

CLONES static void narrow_head(const float *x, int64_t dim, bf16 *to) {
    for (int64_t i = 0; i < dim; i += LANES) store_some(to + i, load(x + i), min64(LANES, dim - i));
}

/* Tasks: tokens. */
void rotate_heads(const void *arguments, const struct step *step, struct worker *worker) {
    const struct rotate_heads *op = arguments;
    ALIGNED float head[MAX_LATENT_DIM];
    for (int64_t token; (token = take_task(worker)) < step->num_tokens;) {
        const bf16 *x = op->x + token * op->x_stride;
        int64_t slot = op->block_size ? step->slots[token] : 0;
        bf16 *to = op->out + token * op->out_stride;
        if (slot < 0) continue; /* a token that is not stored */
        if (op->block_size) to = op->out + slot / op->block_size * op->out_stride + slot % op->block_size * op->dim;
        for (int64_t i = 0; i < op->heads; i++) {
            widen_head(op, x + i * op->dim, head);
            rotate(op, op->cos + token * op->rotary_dim, op->sin + token * op->rotary_dim, head + op->first);
            narrow_head(head, op->dim, to + i * op->dim);
        }
    }
}
