/* The operations between the products of a decoder layer, in float32, rounded once. */

#include <math.h>

#include "lengths.h"
#include "vectors.h"

/* For each 2 * LANES of a row, and for the rest of it, which is `width`. */
#define FOR_PARTS(i, width, size, ...)                                                             \
    do {                                                                                           \
        int64_t i = 0;                                                                             \
        for (const int64_t width = 2 * LANES; i + width <= (size); i += width) __VA_ARGS__         \
        if (i < (size)) {                                                                          \
            const int64_t width = (size) - i;                                                      \
            __VA_ARGS__                                                                            \
        }                                                                                          \
    } while (0)

INLINE struct both plus(struct both a, struct both b) { return (struct both){a.even + b.even, a.odd + b.odd}; }

INLINE struct both minus(struct both a, struct both b) { return (struct both){a.even - b.even, a.odd - b.odd}; }

INLINE struct both times(struct both a, struct both b) { return (struct both){a.even * b.even, a.odd * b.odd}; }

INLINE struct both scaled(struct both v, float by) { return (struct both){v.even * by, v.odd * by}; }

INLINE struct both shifted(struct both v, float by) { return (struct both){v.even + by, v.odd + by}; }

/* Number of tokens of a task, small enough that all threads have some, and even, like the values' pairs. */
static int64_t tokens_of_task(int64_t tokens, int threads) {
    return tokens < 8 * threads ? 1 : min64(16, tokens / (4 * threads) & -2);
}

/* The factor of a row with this sum of squares. */
INLINE float scale_of(struct both squares, int64_t size, float eps) {
    return 1.0f / sqrtf(sum_of(squares.even + squares.odd) / (float)size + eps);
}

INLINE struct both squares_of(const bf16 *x, int64_t size) {
    struct both squares = {{0}, {0}};
    FOR_PARTS(i, width, size, {
        struct both v = load_both(x + i, width);
        squares = plus(squares, times(v, v));
    });
    return squares;
}

INLINE vector as_bf16(vector v) { return (vector)(rounded(v) & 0xffff0000); }

/* Scale the row, add it to its residual, and return the sum of squares. */
INLINE struct both add_residual(const bf16 *x, bf16 *residual, int64_t size, float by) {
    struct both squares = {{0}, {0}};
    FOR_PARTS(i, width, size, {
        struct both sum = plus(scaled(load_both(x + i, width), by), load_both(residual + i, width));
        struct both v = {as_bf16(sum.even), as_bf16(sum.odd)};
        store_both(residual + i, v, width);
        squares = plus(squares, times(v, v));
    });
    return squares;
}

INLINE float mean_of(const bf16 *x, int64_t size) {
    struct both sums = {{0}, {0}};
    FOR_PARTS(i, width, size, { sums = plus(sums, load_both(x + i, width)); });
    return sum_of(sums.even + sums.odd) / (float)size;
}

/* Of the distances to the mean. */
INLINE struct both centred_squares(const bf16 *x, int64_t size, float mean) {
    struct both squares = {{0}, {0}};
    FOR_PARTS(i, width, size, {
        struct both v = shifted(load_both(x + i, width), -mean);
        squares = plus(squares, times(v, v));
    });
    /* In the last part, elements after the row's end had the distance of 0 to the mean. */
    squares.even[0] -= (float)(-size & (2 * LANES - 1)) * mean * mean;
    return squares;
}

CLONES static void norm_row(const struct rms_norm *op, const bf16 *x, const bf16 *weights, const bf16 *bias,
                            bf16 *residual, bf16 *out) {
    int64_t size = op->size;
    int is_first = residual && !op->is_added; /* whether the residual is added before */
    struct both squares = is_first ? add_residual(x, residual, size, (float)op->x_scale) : squares_of(x, size);
    if (is_first) x = residual;
    if (!op->is_added && !out) return;
    float mean = op->is_centred ? mean_of(x, size) : 0;
    if (op->is_centred) squares = centred_squares(x, size, mean);
    float scale = scale_of(squares, size, (float)op->eps), offset = (float)op->offset;
    FOR_PARTS(i, width, size, {
        struct both v = load_both(x + i, width);
        if (op->is_centred) v = shifted(v, -mean);
        v = scaled(v, scale);
        v = times(v, shifted(load_both(weights + i, width), offset));
        if (bias) v = plus(v, load_both(bias + i, width));
        if (op->is_added)
            store_both(residual + i, scaled(plus(load_both(residual + i, width), v), (float)op->sum_scale), width);
        else store_both(out + i, v, width);
    });
}

static void norm_token(const struct rms_norm *op, int64_t token) {
    for (int64_t head = 0; head < op->heads; head++) {
        int64_t at = head * op->size, step = head * op->weight_step;
        norm_row(op, op->x + token * op->x_stride + at, op->weight + step,
                 op->bias ? op->bias + step : NULL,
                 op->residual ? op->residual + token * op->residual_stride + at : NULL,
                 op->out ? op->out + token * op->out_stride + at : NULL);
    }
}

/* Tasks: runs of tokens. */
OPERATOR(rms_norm) {
    const struct rms_norm *op = arguments;
    int64_t run = tokens_of_task(step->num_tokens, worker->threads);
    for (int64_t task; (task = take_task(worker)) < parts(step->num_tokens, run);)
        for (int64_t token = task * run; token < min64(step->num_tokens, task * run + run); token++)
            norm_token(op, token);
}

/* Tasks: one, as there is little work. */
OPERATOR(position_scales) {
    const struct position_scales *op = arguments;
    if (take_task(worker) != 0) return;
    for (int64_t token = 0; token < step->num_tokens; token++) {
        int64_t spans = ((int32_t)step->positions[token] + op->first) / op->length;
        op->out[token] = (float)(1 + op->factor * log1p((double)spans));
    }
}

/* Tasks: tokens. */
OPERATOR(rope_table) {
    const struct rope_table *op = arguments;
    for (int64_t token; (token = take_task(worker)) < step->num_tokens;) {
        float *cos = op->cos + token * 2 * op->pairs, *sin = op->sin + token * 2 * op->pairs;
        int64_t position = (int32_t)step->positions[token], length = step->positions[token] >> 32;
        for (int64_t pair = 0; op->base && pair < op->pairs; pair++) {
            cos[pair] = cos[pair + op->pairs] = 1;
            sin[pair + op->pairs] = (float)(position / (int64_t)op->frequencies[pair] % op->base);
            sin[pair] = -sin[pair + op->pairs];
        }
        if (op->base) continue;
        const float *frequencies = op->further && !op->growth && length ? op->further : op->frequencies;
        float growth = 0;
        if (op->growth) {
            double tokens = (double)max64(max64(length, position + 1), op->original);
            growth = (float)log(op->growth * tokens / (double)op->original - (op->growth - 1));
        }
        for (int64_t pair = 0; pair < op->pairs; pair++) {
            float angle = (float)position * frequencies[pair];
            if (growth != 0) angle *= expf(growth * op->further[pair]);
            cos[pair] = cos[pair + op->pairs] = cosf(angle) * (float)op->factor;
            sin[pair + op->pairs] = sinf(angle) * (float)op->factor;
            sin[pair] = -sin[pair + op->pairs];
        }
    }
}

/* Values that are the same for all heads of a token. */
struct turn {
    int64_t pairs, dim;
    float offset, eps;
    float by;             /* a factor of the result */
    int is_rotated_first; /* whether the norm follows the rotation */
    float stretch;        /* factor of the rotation, squared */
    float cos[MAX_HEAD_DIM / 2], sin[MAX_HEAD_DIM / 2]; /* by pair */
};

/* In the order of `struct both`. */
static void set_angles(struct turn *turn, const float *cos, const float *sin) {
    int64_t pairs = turn->pairs, whole = pairs & -2 * LANES;
    for (int64_t pair = 0; pair < pairs; pair++) {
        int64_t at = pair < whole ? (pair & -2 * LANES) + pair % 2 * LANES + pair % (2 * LANES) / 2 : pair;
        turn->cos[at] = cos[pair], turn->sin[at] = sin[pairs + pair];
    }
}

INLINE struct both load_angles(const float *from) { return (struct both){load(from), load(from + LANES)}; }

INLINE struct both normed(const struct turn *turn, const bf16 *x, const bf16 *weight, float scale, int64_t width) {
    struct both v = load_both(x, width);
    if (!weight) return v;
    if (turn->is_rotated_first) return scaled(v, scale);
    return times(v, scaled(shifted(load_both(weight, width), turn->offset), scale));
}

/* Multiply the rotated vector by the norm's weight, if that is still due. */
INLINE struct both finished(const struct turn *turn, struct both v, const bf16 *weight, int64_t width) {
    if (weight && turn->is_rotated_first) v = times(v, shifted(load_both(weight, width), turn->offset));
    return scaled(v, turn->by);
}

/* Normalise a head's vector, if there is a weight, and rotate its first dimensions by pairs (i, i + pairs). */
INLINE void turn_head(const struct turn *turn, const bf16 *x, const bf16 *weight, float scale, bf16 *out) {
    int64_t pairs = turn->pairs;
    FOR_PARTS(i, width, pairs, {
        int64_t j = i + pairs;
        struct both cos = load_angles(turn->cos + i), sin = load_angles(turn->sin + i);
        struct both a = normed(turn, x + i, weight ? weight + i : NULL, scale, width);
        struct both b = normed(turn, x + j, weight ? weight + j : NULL, scale, width);
        struct both low = minus(times(a, cos), times(b, sin)), high = plus(times(b, cos), times(a, sin));
        store_both(out + i, finished(turn, low, weight ? weight + i : NULL, width), width);
        store_both(out + j, finished(turn, high, weight ? weight + j : NULL, width), width);
    });
    FOR_PARTS(rest, width, turn->dim - 2 * pairs, {
        int64_t i = 2 * pairs + rest;
        struct both v = normed(turn, x + i, weight ? weight + i : NULL, scale, width);
        store_both(out + i, finished(turn, v, weight ? weight + i : NULL, width), width);
    });
}

#define HEADS_TOGETHER 8

/* Of what the norm reads: a rotation changes no sum of squares but by its factor. */
INLINE struct both squares_of_head(const struct turn *turn, const bf16 *x) {
    if (!turn->is_rotated_first) return squares_of(x, turn->dim);
    int64_t rotated = 2 * turn->pairs;
    struct both rest = squares_of(x + rotated, turn->dim - rotated);
    return plus(scaled(squares_of(x, rotated), turn->stretch), rest);
}

/* Scales of several heads first, since each waits for a chain of sums and roots. */
CLONES static void turn_heads(const struct turn *turn, const bf16 *x, const bf16 *weight, int64_t heads, bf16 *out,
                              int64_t out_step) {
    float scales[HEADS_TOGETHER];
    for (int64_t first = 0; first < heads; first += HEADS_TOGETHER) {
        int64_t count = min64(HEADS_TOGETHER, heads - first);
        for (int64_t i = 0; weight && i < count; i++)
            scales[i] = scale_of(squares_of_head(turn, x + i * turn->dim), turn->dim, turn->eps);
        for (int64_t i = 0; i < count; i++, x += turn->dim, out += out_step)
            turn_head(turn, x, weight, weight ? scales[i] : 1, out);
    }
}

/* The values of a pair's first and second token, interleaved. */
CLONES static void store_pair(const bf16 *first, const bf16 *second, int64_t dim, bf16 *to) {
    for (int64_t i = 0; i < dim; i += LANES) {
        int64_t from = min64(i, dim - LANES); /* the last 16 if the size is no multiple of 16 */
        halves low, high;
        memcpy(&low, first + from, sizeof low);
        memcpy(&high, second + from, sizeof high);
        bits both = __builtin_convertvector(low, bits) | __builtin_convertvector(high, bits) << 16;
        memcpy(to + 2 * from, &both, sizeof both);
    }
}

/* A token's values, and the next one's if it is in the same pair. The other half of a pair may be written by another
 * thread: a single token's values are written one by one. */
static void store_values(const struct rope_store *op, int64_t slot, int64_t token, int with_next) {
    int64_t dim = op->value_dim, step = op->block_size * op->value_size, offset = slot % op->block_size;
    bf16 *to = op->v_cache + slot / op->block_size * op->value_stride + offset / 2 * op->value_size * 2 + offset % 2;
    const bf16 *v = op->v + token * op->v_stride;
    if (with_next && dim >= LANES) {
        for (int64_t head = 0; head < op->kv_heads; head++, v += dim, to += step)
            store_pair(v, v + op->v_stride, dim, to);
        return;
    }
    for (int64_t head = 0; head < op->kv_heads; head++, v += dim, to += step)
        for (int64_t i = 0; i < dim; i++) {
            to[2 * i] = v[i];
            if (with_next) to[2 * i + 1] = v[i + op->v_stride];
        }
}

/* A token's queries and keys. */
static void store_keys(const struct rope_store *op, int64_t slot, int64_t token) {
    int64_t dim = op->dim;
    struct turn turn = {
        .pairs = op->rotary_dim / 2, .dim = dim, .offset = (float)op->offset, .eps = (float)op->eps,
        .by = op->q_scales ? op->q_scales[token] : 1, .is_rotated_first = (int)op->is_rotated_first};
    const float *cos = op->cos + token * op->rotary_dim, *sin = op->sin + token * op->rotary_dim;
    set_angles(&turn, cos, sin);
    if (op->rotary_dim) turn.stretch = cos[0] * cos[0] + sin[0] * sin[0];
    bf16 *q = op->q + token * op->q_stride;
    bf16 *to = op->k_cache + slot / op->block_size * op->block_stride + slot % op->block_size * op->key_size;
    if (op->q_norm || op->rotary_dim || op->q_scales) turn_heads(&turn, q, op->q_norm, op->heads, q, dim);
    turn.by = 1;
    turn_heads(&turn, op->k + token * op->k_stride, op->k_norm, op->kv_heads, to, op->block_size * op->key_size);
    if (dim == op->key_size) return;
    for (int64_t head = 0; head < op->kv_heads; head++)
        memset(to + head * op->block_size * op->key_size + dim, 0, (op->key_size - dim) * sizeof(bf16));
}

static void store_tokens(const struct rope_store *op, const struct step *step, int64_t first, int64_t past) {
    int was_stored = 0;
    for (int64_t token = first; token < past; token++) {
        int64_t slot = step->slots[token];
        int with_next = slot % 2 == 0 && token + 1 < past && step->slots[token + 1] == slot + 1;
        store_keys(op, slot, token);
        if (!was_stored) store_values(op, slot, token, with_next);
        was_stored = with_next;
    }
}

/* Values of an earlier owner after a block's last token may not be finite, and are multiplied by 0. */
static void clear_rest(const struct rope_store *op, const struct step *step, int64_t row) {
    int64_t query_len = step->query_starts[row + 1] - step->query_starts[row];
    int64_t last = step->seq_lens[row] - 1, offset = last % op->block_size;
    if (query_len == 0 || offset > query_len - 1) return; /* cleared by the step that began the block */
    int64_t block = step->slots[step->query_starts[row + 1] - 1] / op->block_size;
    for (int64_t head = 0; head < op->kv_heads; head++) {
        bf16 *values = op->v_cache + block * op->value_stride + head * op->block_size * op->value_size;
        int64_t from = offset + 1;
        if (from % 2) {
            bf16 *other = values + from / 2 * op->value_size * 2 + 1;
            for (int64_t i = 0; i < op->value_size; i++) other[2 * i] = 0;
            from++;
        }
        memset(values + from * op->value_size, 0, (op->block_size - from) * op->value_size * sizeof(bf16));
    }
}

/* Tasks: runs of tokens, then rows. */
OPERATOR(rope_store) {
    const struct rope_store *op = arguments;
    int64_t tokens = step->num_tokens, run = tokens_of_task(tokens, worker->threads), runs = parts(tokens, run);
    for (int64_t task; (task = take_task(worker)) < runs + step->num_rows;) {
        if (task < runs) store_tokens(op, step, task * run, min64(tokens, task * run + run));
        else clear_rest(op, step, task - runs);
    }
}

/* Of gate and up clamped, (up + 1) * gate * sigmoid(alpha * gate), or silu(gate) * up if it is CLIPPED_SILU; a NaN stays
 * one. */
INLINE vector gate_clamped(const struct activation *by, vector gate, vector up) {
    vector limit = all((float)by->limit);
    gate = choose(gate > limit, limit, gate);
    up = choose(up > limit, limit, choose(up < -limit, -limit, up));
    if (by->activation == CLIPPED_SILU) return up * (gate * sigmoid_of(gate));
    return (up + 1.0f) * gate * sigmoid_of((float)by->alpha * gate);
}

INLINE vector gate(const struct activation *by, vector x, vector up) {
    if (by->activation == SILU) return up * (x * sigmoid_of(x));
    if (by->activation == RELU) return up * choose(x < 0.0f, all(0), x);
    if (by->activation == RELU_SQUARED) return up * choose(x < 0.0f, all(0), x * x);
    if (by->activation == GELU) return up * gelu_of(x);
    if (by->activation == GELU_TANH)
        return up * (0.5f * x * (1.0f + tanh_of(0.7978845608f * (x + 0.044715f * x * x * x))));
    return gate_clamped(by, x, up);
}

INLINE void gate_part(const struct activation *by, const bf16 *gates, const bf16 *ups, int64_t width, bf16 *out) {
    struct both x = load_both(gates, width), up = {all(1), all(1)};
    if (ups) up = load_both(ups, width);
    store_both(out, (struct both){gate(by, x.even, up.even), gate(by, x.odd, up.odd)}, width);
}

CLONES static void gate_row(const struct activation *by, const bf16 *gates, const bf16 *ups, int64_t size, bf16 *out) {
    FOR_PARTS(i, width, size, { gate_part(by, gates + i, ups ? ups + i : NULL, width, out + i); });
}

CLONES static void gate_rows(const struct activation *by, const bf16 *gates, int64_t stride, const bf16 *ups,
                             int64_t rows, bf16 *out) {
    for (int64_t row = 0; row < rows; row++)
        FOR_PARTS(i, width, PANEL, {
            gate_part(by, gates + row * stride + i, ups + row * PANEL + i, width, out + row * PANEL + i);
        });
}

#ifdef SHORT_VECTORS
void short_gate_panel(const struct activation *by, const bf16 *gates, int64_t stride, const bf16 *ups, int64_t rows,
                      bf16 *out) {
    gate_rows(by, gates, stride, ups, rows, out);
}
#else
void gate_panel(enum isa isa, const struct activation *by, const bf16 *gates, int64_t stride, const bf16 *ups,
                int64_t rows, bf16 *out) {
#if HAS_BOTH_LENGTHS
    if (!long_vectors(isa)) {
        short_gate_panel(by, gates, stride, ups, rows, out);
        return;
    }
#endif
    (void)isa;
    gate_rows(by, gates, stride, ups, rows, out);
}
#endif

/* Tasks: rows. */
OPERATOR(gated) {
    const struct gated *op = arguments;
    for (int64_t row; (row = take_task(worker)) < step->num_tokens * op->per_token;)
        gate_row(&op->by, op->gate + row * op->stride, op->up ? op->up + row * op->up_stride : NULL, op->size,
                 op->out + row * op->out_stride);
}

CLONES static void gate_head(const bf16 *x, const bf16 *gates, int is_of_head, bf16 *out, int64_t dim) {
    float whole = is_of_head ? 1 / (1 + expf(-widen(gates[0]))) : 0;
    FOR_PARTS(i, width, dim, {
        struct both v = load_both(x + i, width);
        if (is_of_head) v.even *= whole, v.odd *= whole;
        else if (gates) {
            struct both by = load_both(gates + i, width);
            v = times(v, (struct both){sigmoid_of(by.even), sigmoid_of(by.odd)});
        }
        store_both(out + i, v, width);
    });
}

/* Tasks: tokens. */
OPERATOR(gate_heads) {
    const struct gate_heads *op = arguments;
    for (int64_t token; (token = take_task(worker)) < step->num_tokens;)
        for (int64_t head = 0; head < op->heads; head++) {
            bf16 *out = op->out + token * op->out_stride + head * op->out_step;
            gate_head(op->x + token * op->x_stride + head * op->x_step,
                      op->gate ? op->gate + token * op->gate_stride + head * op->gate_step : NULL, op->is_of_head, out,
                      op->dim);
            if (op->zeros) memset(out + op->dim, 0, op->zeros * sizeof(bf16));
        }
}
