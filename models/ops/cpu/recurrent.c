/* Layers with a state per sequence: short causal convolutions, the selective state space of Mamba-2 (Dao and Gu, 2024),
 * and the operators after it. Each element of a state goes through the tokens of a row in order, in any step, so that a
 * row's result does not depend on how it is divided into steps.
 *
 * A sequence's inputs [kernel - 1, channels] and its state [heads, state, dim] are in its slot. */

#include <math.h>

#include "operators.h"
#include "vectors.h"

#define CHANNELS 64 /* of a task: two cache lines of each token */
#define TOGETHER 4  /* tokens that a state goes through between its load and its store */
#define AHEAD 8     /* tokens whose inputs are prefetched */
#define COLUMNS 2   /* vectors of a state's row that are processed at a time */

/* Consecutive tokens of a row of a step, the slot of the state before them, -1 if they begin their sequence, and that
 * of the state after them. A row is one such span, except if it verifies drafts: then each token is one, or none if it
 * was computed before. */
struct span {
    int64_t first, past, before, after;
};

/* The row's next span after `from`; 0 if there is none. `slot` is the state's. */
static int next_span(const struct step *step, int64_t row, int64_t from, int64_t slot, struct span *span) {
    int64_t first = step->query_starts[row], past = step->query_starts[row + 1];
    if (!step->states_after) {
        *span = (struct span){first, past, slot, slot};
        if (step->seq_lens[row] == past - first) span->before = -1;
        return from < past;
    }
    const int64_t *after = step->states_after;
    while (from < past && after[from] < 0) from++;
    if (from == past) return 0;
    *span = (struct span){from, from + 1, slot, after[from]};
    if (from == first && step->seq_lens[row] == past - first) span->before = -1;
    while (span->past < past && after[span->past] == span->after) span->past++;
    return 1;
}

/* Zeros for the tokens that change no state. */
static void clear_outputs(const struct step *step, int64_t row, bf16 *out, int64_t stride, int64_t count) {
    if (!step->states_after) return;
    for (int64_t token = step->query_starts[row]; token < step->query_starts[row + 1]; token++)
        if (step->states_after[token] < 0) memset(out + token * stride, 0, count * sizeof(bf16));
}

static bf16 *inputs_of(const struct short_conv *op, int64_t slot) {
    return op->inputs + slot * (op->kernel - 1) * op->channels;
}

/* 16 channels of the input at a token of the span or before it. */
INLINE vector input_at(const struct short_conv *op, const struct span *span, int64_t token, int64_t channel,
                       int64_t count) {
    if (token < span->first) {
        if (span->before < 0) return (vector){0};
        int64_t at = (token - span->first + op->kernel - 1) * op->channels + channel;
        return load_some(inputs_of(op, span->before) + at, count);
    }
    vector x = load_some(op->x + token * op->x_stride + channel, count);
    if (!op->before) return x;
    x *= load_some(op->before + token * op->gate_stride + channel, count);
    return (vector)(rounded(x) & 0xffff0000); /* as it is stored */
}

CLONES static void widen_weights(const struct short_conv *op, int64_t channel, int64_t count, float *weights) {
    for (int64_t tap = 0; tap < op->kernel; tap++)
        for (int64_t i = 0; i < count; i += LANES)
            store(weights + tap * CHANNELS + i,
                  load_some(op->weight + tap * op->channels + channel + i, min64(LANES, count - i)));
}

CLONES static void convolve(const struct short_conv *op, const struct span *span, int64_t channel, int64_t count,
                            const float *weights) {
    for (int64_t token = span->first; token < span->past; token++) {
        /* Rows are pages apart, which hardware prefetchers do not predict. */
        if (token + AHEAD < span->past)
            for (int64_t i = 0; i < count; i += LINE / (int64_t)sizeof(bf16))
                __builtin_prefetch(op->x + (token + AHEAD) * op->x_stride + channel + i);
        for (int64_t i = 0; i < count; i += LANES) {
            int64_t width = min64(LANES, count - i), at = channel + i;
            vector sum = {0};
            for (int64_t tap = 0; tap < op->kernel; tap++)
                sum += load(weights + tap * CHANNELS + i)
                       * input_at(op, span, token - op->kernel + 1 + tap, at, width);
            if (op->bias) sum += load_some(op->bias + at, width);
            if (op->has_silu) sum *= sigmoid_of(sum);
            if (op->after) sum *= load_some(op->after + token * op->gate_stride + at, width);
            store_some(op->out + token * op->out_stride + at, sum, width);
        }
    }
}

/* Store the last inputs of the span. Those that remain from before it move towards the front, so that none is
 * overwritten before it is read. */
CLONES static void keep(const struct short_conv *op, const struct span *span, int64_t channel, int64_t count) {
    bf16 *inputs = inputs_of(op, span->after);
    for (int64_t i = 0; i < op->kernel - 1; i++)
        for (int64_t j = 0; j < count; j += LANES) {
            int64_t width = min64(LANES, count - j), at = channel + j;
            store_some(inputs + i * op->channels + at, input_at(op, span, span->past - op->kernel + 1 + i, at, width),
                       width);
        }
}

/* Tasks: blocks of channels of rows. */
void short_conv(const void *arguments, const struct step *step, struct worker *worker) {
    const struct short_conv *op = arguments;
    int64_t blocks = parts(op->channels, CHANNELS);
    for (int64_t task; (task = take_task(worker)) < step->num_rows * blocks;) {
        int64_t row = task / blocks, channel = task % blocks * CHANNELS, count = min64(CHANNELS, op->channels - channel);
        int64_t token = step->query_starts[row], slot = step->state_slots[row];
        if (token == step->query_starts[row + 1]) continue;
        float *weights = (float *)worker->scratch;
        widen_weights(op, channel, count, weights);
        clear_outputs(step, row, op->out + channel, op->out_stride, count);
        for (struct span span; next_span(step, row, token, slot, &span); token = span.past, slot = span.after) {
            convolve(op, &span, channel, count, weights);
            keep(op, &span, channel, count);
        }
    }
}

/* Some tokens of one head, in the layout that the state needs. */
struct tokens {
    int64_t count;
    float decay[TOGETHER], dt[TOGETHER];
    float *b, *c; /* [TOGETHER, state] */
    float *x;     /* [TOGETHER, room] */
    int64_t room; /* dim, padded to whole vectors */
};

CLONES static void widen_row(const bf16 *from, int64_t count, float *to) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, load_bf16(from + i));
    for (; i < count; i++) to[i] = widen(from[i]);
}

static void read_tokens(const struct state_space *op, int64_t head, int64_t first, struct tokens *tokens) {
    float rate = -expf(op->a_log[head]);
    int64_t group = head / (op->heads / op->groups), keys = op->heads * op->dim;
    for (int64_t i = 0; i < tokens->count; i++) {
        const bf16 *x = op->x + (first + i) * op->x_stride;
        widen_row(x + head * op->dim, op->dim, tokens->x + i * tokens->room);
        widen_row(x + keys + group * op->state, op->state, tokens->b + i * op->state);
        widen_row(x + keys + (op->groups + group) * op->state, op->state, tokens->c + i * op->state);
        float raw = widen(op->dt[(first + i) * op->dt_stride + head]) + op->dt_bias[head];
        float dt = raw > 20 ? raw : log1pf(expf(raw));
        dt = fminf(fmaxf(dt, (float)op->least), (float)op->most);
        tokens->dt[i] = dt;
        tokens->decay[i] = expf(dt * rate);
    }
}

INLINE void scan_columns(const struct tokens *tokens, float *state, int64_t stride, int64_t size, int64_t column,
                         float skip, int count, int columns, float *read) {
    vector added[TOGETHER][COLUMNS], sums[TOGETHER][COLUMNS];
    for (int t = 0; t < count; t++)
        for (int i = 0; i < columns; i++) {
            added[t][i] = load(tokens->x + t * tokens->room + column + i * LANES) * tokens->dt[t];
            sums[t][i] = (vector){0};
        }
    for (int64_t key = 0; key < size; key++)
        for (int i = 0; i < columns; i++) {
            float *at = state + key * stride + column + i * LANES;
            vector now = load(at);
            for (int t = 0; t < count; t++) {
                now = now * tokens->decay[t] + added[t][i] * tokens->b[t * size + key];
                sums[t][i] += now * tokens->c[t * size + key];
            }
            store(at, now);
        }
    for (int t = 0; t < count; t++)
        for (int i = 0; i < columns; i++) {
            int64_t at = t * tokens->room + column + i * LANES;
            store(read + at, sums[t][i] + load(tokens->x + at) * skip);
        }
}

/* The state decays, then adds each token's value at its key; the query reads it afterwards. `read` [TOGETHER, room]
 * receives the result, plus `skip` times the value. */
CLONES static void scan(const struct tokens *tokens, float *state, int64_t stride, int64_t size, float skip,
                        float *read) {
    int64_t i = 0;
    for (; i + COLUMNS * LANES <= tokens->room; i += COLUMNS * LANES) {
        if (tokens->count == TOGETHER)
            scan_columns(tokens, state, stride, size, i, skip, TOGETHER, COLUMNS, read);
        else scan_columns(tokens, state, stride, size, i, skip, 1, COLUMNS, read);
    }
    for (; i < tokens->room; i += LANES) {
        if (tokens->count == TOGETHER) scan_columns(tokens, state, stride, size, i, skip, TOGETHER, 1, read);
        else scan_columns(tokens, state, stride, size, i, skip, 1, 1, read);
    }
}

CLONES static void narrow_row(const float *from, int64_t count, bf16 *to) {
    for (int64_t i = 0; i < count; i += LANES) store_some(to + i, load(from + i), min64(LANES, count - i));
}

static float *state_of(const struct state_space *op, int64_t slot, int64_t head) {
    return op->states + (slot * op->heads + head) * op->state * op->dim;
}

static void read_head(const struct state_space *op, const struct span *span, int64_t head, float *scratch) {
    int64_t size = op->state, dim = op->dim, room = parts(dim, LANES) * LANES;
    float *state = state_of(op, span->after, head);
    struct tokens tokens = {.room = room, .x = scratch};
    tokens.b = tokens.x + TOGETHER * room;
    tokens.c = tokens.b + TOGETHER * size;
    float *read = tokens.c + TOGETHER * size, *padded = read + TOGETHER * room, *at = state;
    memset(tokens.x, 0, TOGETHER * room * sizeof(float));
    if (span->before < 0) memset(state, 0, size * dim * sizeof(float));
    else if (span->before != span->after)
        memcpy(state, state_of(op, span->before, head), size * dim * sizeof(float));
    if (room != dim) {
        at = padded;
        for (int64_t key = 0; key < size; key++) memcpy(padded + key * room, state + key * dim, dim * sizeof(float));
        for (int64_t key = 0; key < size; key++)
            memset(padded + key * room + dim, 0, (room - dim) * sizeof(float));
    }
    for (int64_t token = span->first; token < span->past; token += tokens.count) {
        tokens.count = span->past - token >= TOGETHER ? TOGETHER : 1;
        read_tokens(op, head, token, &tokens);
        scan(&tokens, at, room, size, op->d[head], read);
        for (int64_t i = 0; i < tokens.count; i++)
            narrow_row(read + i * room, dim, op->out + (token + i) * op->out_stride + head * dim);
    }
    if (room != dim)
        for (int64_t key = 0; key < size; key++) memcpy(state + key * dim, padded + key * room, dim * sizeof(float));
}

/* Tasks: heads of rows. */
void state_space(const void *arguments, const struct step *step, struct worker *worker) {
    const struct state_space *op = arguments;
    for (int64_t task; (task = take_task(worker)) < step->num_rows * op->heads;) {
        int64_t row = task / op->heads, head = task % op->heads;
        int64_t token = step->query_starts[row], slot = step->state_slots[row];
        clear_outputs(step, row, op->out + head * op->dim, op->out_stride, op->dim);
        for (struct span span; next_span(step, row, token, slot, &span); token = span.past, slot = span.after)
            read_head(op, &span, head, (float *)worker->scratch);
    }
}

INLINE vector silu(vector x) { return x * sigmoid_of(x); }

CLONES static void norm_group(const struct group_norm *op, const bf16 *x, const bf16 *gate, const bf16 *weight,
                              bf16 *out, float *values) {
    vector squares = {0};
    for (int64_t i = 0; i < op->size; i += LANES) {
        int64_t width = min64(LANES, op->size - i);
        vector value = load_some(x + i, width);
        if (op->is_gated_first || !weight) value *= silu(load_some(gate + i, width));
        store(values + i, value);
        squares += value * value;
    }
    float scale = weight ? 1.0f / sqrtf(sum_of(squares) / (float)op->size + (float)op->eps) : 1.0f;
    for (int64_t i = 0; i < op->size; i += LANES) {
        int64_t width = min64(LANES, op->size - i);
        vector value = load(values + i) * scale;
        if (weight) value *= load_some(weight + i, width);
        if (weight && !op->is_gated_first) value *= silu(load_some(gate + i, width));
        store_some(out + i, value, width);
    }
}

/* Tasks: groups of tokens' features. */
void group_norm(const void *arguments, const struct step *step, struct worker *worker) {
    const struct group_norm *op = arguments;
    for (int64_t task; (task = take_task(worker)) < step->num_tokens * op->groups;) {
        int64_t token = task / op->groups, first = task % op->groups * op->size;
        norm_group(op, op->x + token * op->x_stride + first, op->gate + token * op->gate_stride + first,
                   op->weight ? op->weight + first : NULL, op->out + token * op->out_stride + first,
                   (float *)worker->scratch);
    }
}

CLONES static void scale_row(const struct scale_rows *op, const bf16 *x, const bf16 *added, bf16 *out) {
    for (int64_t i = 0; i < op->columns; i += LANES) {
        int64_t width = min64(LANES, op->columns - i);
        vector value = load_some(x + i, width);
        if (!op->by) value *= (float)op->scale;
        else if (width == LANES) value *= load(op->by + i);
        else {
            float by[LANES] = {0};
            memcpy(by, op->by + i, width * sizeof(float));
            value *= load(by);
        }
        if (added) value += load_some(added + i, width);
        store_some(out + i, value, width);
    }
}

/* Tasks: rows. */
void scale_rows(const void *arguments, const struct step *step, struct worker *worker) {
    const struct scale_rows *op = arguments;
    for (int64_t row; (row = take_task(worker)) < step->num_tokens * op->per_token;)
        scale_row(op, op->x + row * op->x_stride, op->added ? op->added + row * op->added_stride : NULL,
                op->out + row * op->out_stride);
}

/* log(1 + e^x) within 2e-7 of it: of e^-|x|, by the series of the inverse hyperbolic tangent of u / (2 + u). */
INLINE vector softplus_of(vector x) {
    vector u = exp_of(-larger(x, -x)), s = u * reciprocal_of(2.0f + u), square = s * s, sum = all(1.0f / 15);
    for (int odd = 13; odd > 0; odd -= 2) sum = sum * square + 1.0f / odd;
    return larger(x, all(0)) + 2.0f * s * sum;
}

/* At most LANES channels of a span. `room` holds their states [state, LANES] and then their decays. */
CLONES static void scan_channels(const struct selective_scan *op, const struct span *span, int64_t channel,
                                 int64_t width, float *room) {
    float *rates = room + op->state * LANES, some[LANES] = {0}, bias[LANES] = {0}, skip[LANES] = {0};
    int64_t of_slot = op->state * op->channels;
    for (int64_t key = 0; key < op->state; key++) {
        memcpy(some, op->a_log + key * op->channels + channel, width * sizeof(float));
        store(rates + key * LANES, -exp_of(load(some)));
        memset(some, 0, sizeof some);
        if (span->before >= 0)
            memcpy(some, op->states + span->before * of_slot + key * op->channels + channel, width * sizeof(float));
        store(room + key * LANES, load(some));
    }
    memcpy(bias, op->dt_bias + channel, width * sizeof(float));
    memcpy(skip, op->d + channel, width * sizeof(float));
    for (int64_t token = span->first; token < span->past; token++) {
        vector x = load_some(op->x + token * op->x_stride + channel, width), sum = load(skip) * x;
        vector dt = softplus_of(load_some(op->dt + token * op->dt_stride + channel, width) + load(bias));
        const bf16 *b = op->b + token * op->b_stride, *c = op->c + token * op->c_stride;
        x *= dt;
        for (int64_t key = 0; key < op->state; key++) {
            vector now = load(room + key * LANES) * exp_of(dt * load(rates + key * LANES)) + x * widen(b[key]);
            store(room + key * LANES, now);
            sum += now * widen(c[key]);
        }
        store_some(op->out + token * op->out_stride + channel, sum, width);
    }
    for (int64_t key = 0; key < op->state; key++)
        memcpy(op->states + span->after * of_slot + key * op->channels + channel, room + key * LANES,
               width * sizeof(float));
}

/* Tasks: parts of the channels of rows. */
void selective_scan(const void *arguments, const struct step *step, struct worker *worker) {
    const struct selective_scan *op = arguments;
    int64_t shares = parts(op->channels, CHANNELS);
    for (int64_t task; (task = take_task(worker)) < step->num_rows * shares;) {
        int64_t row = task / shares, first = task % shares * CHANNELS, past = min64(op->channels, first + CHANNELS);
        int64_t token = step->query_starts[row], slot = step->state_slots[row];
        clear_outputs(step, row, op->out + first, op->out_stride, past - first);
        for (struct span span; next_span(step, row, token, slot, &span); token = span.past, slot = span.after)
            for (int64_t channel = first; channel < past; channel += LANES)
                scan_channels(op, &span, channel, min64(LANES, past - channel), (float *)worker->scratch);
    }
}
