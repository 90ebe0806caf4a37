/* Layers with a state per sequence: short causal convolutions, the selective state space of Mamba-2 (Dao and Gu, 2024),
 * and the operators after it. Each element of a state goes through the tokens of a row in order, in any step, so that a
 * row's result does not depend on how it is divided into steps.
 *
 * A sequence's inputs [kernel - 1, channels] and its state [heads, state, dim] are in its slot. */

#include <math.h>

#include "lengths.h"
#include "operators.h"
#include "vectors.h"

#define CHANNELS 64 /* of a block: two cache lines of each token */
#define TOGETHER 4  /* tokens that a state goes through between its load and its store */
#define AHEAD 8     /* tokens whose inputs are prefetched */
#define COLUMNS 2   /* vectors of a state's row that are processed at a time, for several tokens */
#define WIDE 4      /* the same for one token, or twice this: rows of 64 or 128 are read in the order of memory */
#define DISTANCE 16384 /* bytes of memory that are prefetched for one token, of the next head too */

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

/* A block of channels in float32: the taps' weights [kernel][CHANNELS], and a window of the last inputs, where row
 * p % kernel is the input at position p. */
struct block {
    int64_t channel, count;
    float *weights, *window;
};

CLONES static void set_up(const struct short_conv *op, const struct block *block) {
    for (int64_t tap = 0; tap < op->kernel; tap++)
        for (int64_t i = 0; i < block->count; i += LANES)
            store(block->weights + tap * CHANNELS + i,
                  load_some(op->weight + tap * op->channels + block->channel + i, min64(LANES, block->count - i)));
}

/* Load the inputs before the span, which are at positions 0 to kernel - 2. */
CLONES static void remember(const struct short_conv *op, const struct block *block, const struct span *span) {
    const bf16 *inputs = span->before < 0 ? NULL : inputs_of(op, span->before) + block->channel;
    for (int64_t position = 0; position < op->kernel - 1; position++)
        for (int64_t i = 0; i < block->count; i += LANES)
            store(block->window + position * CHANNELS + i,
                  inputs ? load_some(inputs + position * op->channels + i, min64(LANES, block->count - i)) : all(0));
}

/* LANES channels of the input, rounded as it is stored. */
INLINE vector input_at(const struct short_conv *op, int64_t token, int64_t channel, int64_t width) {
    vector x = load_some(op->x + token * op->x_stride + channel, width);
    if (!op->before) return x;
    x *= load_some(op->before + token * op->gate_stride + channel, width);
    return (vector)(rounded(x) & 0xffff0000);
}

INLINE void finish(const struct short_conv *op, int64_t token, int64_t channel, int64_t width, vector sum) {
    if (op->bias) sum += load_some(op->bias + channel, width);
    if (op->has_silu) sum *= sigmoid_of(sum);
    if (op->after) sum *= load_some(op->after + token * op->gate_stride + channel, width);
    store_some(op->out + token * op->out_stride + channel, sum, width);
}

/* `row`: the window's row of the token's input. */
INLINE void convolve_some(const struct short_conv *op, const struct block *block, int64_t token, int64_t row, int64_t i,
                          int64_t width, int64_t kernel) {
    const float *weights = block->weights + i;
    float *window = block->window + i;
    vector x = input_at(op, token, block->channel + i, width), sum = {0};
    for (int64_t tap = 0; tap + 1 < kernel; tap++) {
        row = row + 1 < kernel ? row + 1 : 0;
        sum += load(weights + tap * CHANNELS) * load(window + row * CHANNELS);
    }
    row = row + 1 < kernel ? row + 1 : 0;
    store(window + row * CHANNELS, x);
    sum += load(weights + (kernel - 1) * CHANNELS) * x;
    finish(op, token, block->channel + i, width, sum);
}

INLINE void convolve_span(const struct short_conv *op, const struct block *block, const struct span *span,
                          int64_t kernel) {
    /* Copies, which no store can have changed. */
    const struct short_conv own = *op;
    const struct block some = *block;
    int64_t row = kernel - 1;
    for (int64_t token = span->first; token < span->past; token++, row = row + 1 < kernel ? row + 1 : 0) {
        /* Rows are pages apart, which hardware prefetchers do not predict. */
        if (token + AHEAD < span->past)
            for (int64_t i = 0; i < some.count; i += LINE / (int64_t)sizeof(bf16))
                __builtin_prefetch(own.x + (token + AHEAD) * own.x_stride + some.channel + i);
        int64_t i = 0;
        for (; i + LANES <= some.count; i += LANES) convolve_some(&own, &some, token, row, i, LANES, kernel);
        if (i < some.count) convolve_some(&own, &some, token, row, i, some.count - i, kernel);
    }
}

CLONES static void convolve(const struct short_conv *op, const struct block *block, const struct span *span) {
    if (op->kernel == 4) convolve_span(op, block, span, 4);
    else if (op->kernel == 3) convolve_span(op, block, span, 3);
    else convolve_span(op, block, span, op->kernel);
}

INLINE void copy_some(bf16 *to, const bf16 *from, int64_t count) {
    if (count == LANES) memcpy(to, from, LANES * sizeof(bf16));
    else memmove(to, from, count * sizeof(bf16));
}

INLINE void convolve_one(const struct short_conv *op, const struct span *span, int64_t channel, int64_t width) {
    int64_t kept = op->kernel - 1, channels = op->channels;
    const bf16 *before = span->before < 0 ? NULL : inputs_of(op, span->before) + channel;
    bf16 *after = inputs_of(op, span->after) + channel;
    vector x = input_at(op, span->first, channel, width), sum = {0};
    for (int64_t tap = 0; tap < kept; tap++) {
        vector input = before ? load_some(before + tap * channels, width) : all(0);
        sum += load_some(op->weight + tap * channels + channel, width) * input;
        if (!tap) continue;
        if (before) copy_some(after + (tap - 1) * channels, before + tap * channels, width);
        else store_some(after + (tap - 1) * channels, all(0), width);
    }
    sum += load_some(op->weight + kept * channels + channel, width) * x;
    store_some(after + (kept - 1) * channels, x, width);
    finish(op, span->first, channel, width, sum);
}

/* Convolve a span of one token. The stored inputs are read in place and shifted by one. */
CLONES static void convolve_token(const struct short_conv *op, const struct span *span, int64_t channel, int64_t past) {
    const struct short_conv own = *op;
    for (; channel + LANES <= past; channel += LANES) convolve_one(&own, span, channel, LANES);
    if (channel < past) convolve_one(&own, span, channel, past - channel);
}

/* Store the last inputs of the span. */
CLONES static void keep(const struct short_conv *op, const struct block *block, const struct span *span) {
    bf16 *inputs = inputs_of(op, span->after) + block->channel;
    int64_t kept = op->kernel - 1, first = span->past - span->first; /* position of the first stored input */
    for (int64_t tap = 0; tap < kept; tap++)
        for (int64_t i = 0; i < block->count; i += LANES)
            store_some(inputs + tap * op->channels + i, load(block->window + (first + tap) % op->kernel * CHANNELS + i),
                       min64(LANES, block->count - i));
}

static void convolve_row(const struct short_conv *op, const struct step *step, int64_t row, int64_t channel,
                         float *floats) {
    int64_t token = step->query_starts[row], slot = step->state_slots[row];
    int64_t count = min64(CHANNELS, op->channels - channel);
    struct block block = {channel, count, floats, floats + op->kernel * CHANNELS};
    clear_outputs(step, row, op->out + channel, op->out_stride, count);
    for (struct span span; next_span(step, row, token, slot, &span); token = span.past, slot = span.after) {
        if (span.past - span.first == 1) {
            convolve_token(op, &span, channel, channel + count);
            continue;
        }
        set_up(op, &block);
        remember(op, &block, &span);
        convolve(op, &block, &span);
        keep(op, &block, &span);
    }
}

/* Tasks: blocks of channels of rows, several in a decode, where a block takes as long as a task costs. */
OPERATOR(short_conv) {
    const struct short_conv *op = arguments;
    int64_t width = step->num_tokens > step->num_rows ? CHANNELS : 8 * CHANNELS, tasks = parts(op->channels, width);
    for (int64_t task; (task = take_task(worker)) < step->num_rows * tasks;) {
        int64_t row = task / tasks, first = task % tasks * width, past = min64(op->channels, first + width);
        if (step->query_starts[row] == step->query_starts[row + 1]) continue;
        for (int64_t channel = first; channel < past; channel += CHANNELS)
            convolve_row(op, step, row, channel, (float *)worker->scratch);
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
    vector added[TOGETHER][2 * WIDE], sums[TOGETHER][2 * WIDE];
    const float *b = tokens->b, *c = tokens->c;
    float decay[TOGETHER];
    for (int t = 0; t < count; t++) decay[t] = tokens->decay[t];
    for (int t = 0; t < count; t++)
        for (int i = 0; i < columns; i++) {
            added[t][i] = load(tokens->x + t * tokens->room + column + i * LANES) * tokens->dt[t];
            sums[t][i] = (vector){0};
        }
    for (int64_t key = 0; key < size; key++) {
        float own[TOGETHER], query[TOGETHER];
        for (int t = 0; t < count; t++) own[t] = b[t * size + key], query[t] = c[t * size + key];
        for (int i = 0; i < columns; i++) {
            float *at = state + key * stride + column + i * LANES;
            if (count == 1) __builtin_prefetch((char *)at + DISTANCE, 1);
            vector now = load(at);
            for (int t = 0; t < count; t++) {
                now = now * decay[t] + added[t][i] * own[t];
                sums[t][i] += now * query[t];
            }
            store(at, now);
        }
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
    int64_t i = 0, room = tokens->room;
    if (tokens->count == TOGETHER) {
        for (; i + COLUMNS * LANES <= room; i += COLUMNS * LANES)
            scan_columns(tokens, state, stride, size, i, skip, TOGETHER, COLUMNS, read);
        if (i < room) scan_columns(tokens, state, stride, size, i, skip, TOGETHER, 1, read);
    } else {
        for (; i + 2 * WIDE * LANES <= room; i += 2 * WIDE * LANES)
            scan_columns(tokens, state, stride, size, i, skip, 1, 2 * WIDE, read);
        if (i + WIDE * LANES <= room) {
            scan_columns(tokens, state, stride, size, i, skip, 1, WIDE, read);
            i += WIDE * LANES;
        }
        for (; i < room; i += LANES) scan_columns(tokens, state, stride, size, i, skip, 1, 1, read);
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

/* Tasks: heads of rows; see `take_states`. */
OPERATOR(state_space) {
    const struct state_space *op = arguments;
    for (struct states states; take_states(step, worker, op->heads, &states);)
        for (int64_t head = states.first; head < states.past; head++) {
            int64_t token = step->query_starts[states.row], slot = step->state_slots[states.row];
            clear_outputs(step, states.row, op->out + head * op->dim, op->out_stride, op->dim);
            for (struct span span; next_span(step, states.row, token, slot, &span); token = span.past, slot = span.after)
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
OPERATOR(group_norm) {
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
OPERATOR(scale_rows) {
    const struct scale_rows *op = arguments;
    for (int64_t row; (row = take_task(worker)) < step->num_tokens * op->per_token;)
        scale_row(op, op->x + row * op->x_stride, op->added ? op->added + row * op->added_stride : NULL,
                op->out + row * op->out_stride);
}

INLINE vector load_floats(const float *from, int64_t count) {
    float some[LANES] = {0};
    if (count == LANES) return load(from);
    memcpy(some, from, count * sizeof(float));
    return load(some);
}

INLINE void store_floats(float *to, vector v, int64_t count) {
    if (count == LANES) store(to, v);
    else memcpy(to, &v, count * sizeof(float));
}

/* At most LANES channels of a span. `room` holds their states [state, LANES], their decays, and a token's keys and
 * queries. */
INLINE void scan_channels(const struct selective_scan *op, const struct span *span, int64_t channel, int64_t width,
                          float *room) {
    int64_t size = op->state, of_slot = size * op->channels;
    float *rates = room + size * LANES, *b = rates + size * LANES, *c = b + size;
    const float *before = span->before < 0 ? NULL : op->states + span->before * of_slot + channel;
    vector bias = load_floats(op->dt_bias + channel, width), skip = load_floats(op->d + channel, width);
    for (int64_t key = 0; key < size; key++) {
        /* Prefetch the rows of the next channels, which are pages apart. */
        __builtin_prefetch(op->a_log + key * op->channels + channel + LANES);
        if (before) __builtin_prefetch(before + key * op->channels + LANES);
        store(rates + key * LANES, -exp_of(load_floats(op->a_log + key * op->channels + channel, width)));
        store(room + key * LANES, before ? load_floats(before + key * op->channels, width) : all(0));
    }
    for (int64_t token = span->first; token < span->past; token++) {
        vector x = load_some(op->x + token * op->x_stride + channel, width), sum = skip * x;
        vector dt = softplus_of(load_some(op->dt + token * op->dt_stride + channel, width) + bias);
        widen_row(op->b + token * op->b_stride, size, b);
        widen_row(op->c + token * op->c_stride, size, c);
        x *= dt;
        for (int64_t key = 0; key < size; key++) {
            float own = b[key], query = c[key];
            vector now = load(room + key * LANES) * exp_of(dt * load(rates + key * LANES)) + x * own;
            store(room + key * LANES, now);
            sum += now * query;
        }
        store_some(op->out + token * op->out_stride + channel, sum, width);
    }
    for (int64_t key = 0; key < size; key++)
        store_floats(op->states + span->after * of_slot + key * op->channels + channel, load(room + key * LANES), width);
}

CLONES static void scan_block(const struct selective_scan *op, const struct span *span, int64_t first, int64_t past,
                              float *room) {
    int64_t channel = first;
    for (; channel + LANES <= past; channel += LANES) scan_channels(op, span, channel, LANES, room);
    if (channel < past) scan_channels(op, span, channel, past - channel, room);
}

/* Tasks: parts of the channels of rows. */
OPERATOR(selective_scan) {
    const struct selective_scan *op = arguments;
    int64_t shares = parts(op->channels, CHANNELS);
    for (int64_t task; (task = take_task(worker)) < step->num_rows * shares;) {
        int64_t row = task / shares, first = task % shares * CHANNELS, past = min64(op->channels, first + CHANNELS);
        int64_t token = step->query_starts[row], slot = step->state_slots[row];
        clear_outputs(step, row, op->out + first, op->out_stride, past - first);
        for (struct span span; next_span(step, row, token, slot, &span); token = span.past, slot = span.after)
            scan_block(op, &span, first, past, (float *)worker->scratch);
    }
}
