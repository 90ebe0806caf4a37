/* Gated delta nets (Yang et al., 2025): a short causal convolution, a state that moves towards each token's value at
 * its key, and a gated norm of the query's read. Computed token by token in any step, so that a row's result does not
 * depend on how it is divided into steps. */

#include <math.h>

#include "lengths.h"
#include "operators.h"
#include "vectors.h"

#define AT_ONCE 4 /* vectors of a state's columns, whose sums are then independent */
#define CHUNK 16  /* tokens that are prepared before a state goes through them */
#define WIDE 8    /* the same for one token: a state of 128 columns is then read in the order of memory */
#define AHEAD 8   /* keys of a state that are prefetched */
#define DISTANCE 32768 /* bytes of memory that are prefetched for one token, of the next head too */
#define MAX_TAPS 64 /* of a convolution */

/* A token in the layout that the state of one value head needs. The state's row of each key dimension is multiplied by
 * `decay[key * each]`. The decayed state's value at the key is `scale` times the product of the state with `fading`. */
struct token {
    const float *q, *k, *fading, *decay; /* [key_dim]; `decay` has one number where `each` is 0 */
    const float *v;                      /* [value_dim] */
    float scale, beta;
    float *read; /* [value_dim] what the query reads */
};

INLINE void deinterleave(const bf16 *restrict from, int64_t count, int taps, float *restrict to, int64_t stride) {
    for (int64_t i = 0; i < count; i++)
        for (int tap = 0; tap < taps; tap++) to[tap * stride + i] = widen(from[i * taps + tap]);
}

INLINE void interleave(const float *const *from, int64_t count, int taps, bf16 *restrict to) {
    for (int64_t i = 0; i < count; i++)
        for (int tap = 0; tap < taps; tap++) to[i * taps + tap] = narrow(from[tap][i]);
}

/* Transpose [count, taps] to the rows of [taps, stride]. */
CLONES static void to_rows(const bf16 *from, int64_t count, int64_t taps, float *to, int64_t stride) {
    if (taps == 3) deinterleave(from, count, 3, to, stride);
    else if (taps == 4) deinterleave(from, count, 4, to, stride);
    else deinterleave(from, count, (int)taps, to, stride);
}

/* Transpose the rows, each [count], to [count, taps]. */
CLONES static void from_rows(const float *const *from, int64_t count, int64_t taps, bf16 *to) {
    if (taps == 3) interleave(from, count, 3, to);
    else interleave(from, count, (int)taps, to);
}

CLONES static void widen_all(const bf16 *from, int64_t count, float *to) {
    for (int64_t i = 0; i < count; i++) to[i] = widen(from[i]);
}

CLONES static void narrow_all(const float *from, int64_t count, bf16 *to) {
    for (int64_t i = 0; i < count; i += LANES) store_bf16(to + i, load(from + i));
}

/* Scale to the length `wanted`. */
CLONES static void scale_to(float *x, int64_t size, float wanted) {
    vector squares = {0};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) squares += load(x + i) * load(x + i);
    for (; i < size; i++) rest += x[i] * x[i];
    float scale = wanted / sqrtf(sum_of(squares) + rest + 1e-6f);
    for (i = 0; i < size; i++) x[i] *= scale;
}

/* Take some columns of a state through the tokens. Each element of the state is loaded and stored once per token: when a
 * token has changed an element, the next token's key reads it at once. The last token runs the same instructions, although
 * its `next` is not used, since compilers may round a sum of two products in two ways. `more`: whether to prefetch the
 * columns that follow; rows of WIDE vectors prefetch the memory that follows. */
INLINE void recur_columns(const float *before, float *state, const struct token *tokens, int64_t num_tokens,
                          int64_t column, int64_t each, int64_t key_dim, int64_t value_dim, int count, int more) {
    vector held[WIDE] = {{0}};
    before += column, state += column;
    for (int64_t key = 0; key < key_dim; key++) {
        const float *row = before + key * value_dim;
        float fading = tokens->fading[key];
        for (int i = 0; i < count; i++) {
            if (count == WIDE) __builtin_prefetch((const char *)(row + i * LANES) + DISTANCE);
            else if (key + AHEAD < key_dim) __builtin_prefetch(row + AHEAD * value_dim + i * LANES);
            if (more) __builtin_prefetch(row + (count + i) * LANES);
            held[i] += load(row + i * LANES) * fading;
        }
    }
    for (int64_t t = 0; t < num_tokens; t++, before = state) {
        const struct token *token = tokens + t;
        const float *q = token->q, *k = token->k, *decay = token->decay;
        const float *fading = tokens[min64(t + 1, num_tokens - 1)].fading;
        vector sums[WIDE] = {{0}}, next[WIDE] = {{0}};
        for (int i = 0; i < count; i++)
            held[i] = (load(token->v + column + i * LANES) - held[i] * token->scale) * token->beta;
        for (int64_t key = 0; key < key_dim; key++) {
            float fades = decay[key * each], own = k[key], query = q[key], following = fading[key];
            for (int i = 0; i < count; i++) {
                int64_t at = key * value_dim + i * LANES;
                vector now = load(before + at) * fades + held[i] * own;
                sums[i] += now * query;
                next[i] += now * following;
                store(state + at, now);
            }
        }
        for (int i = 0; i < count; i++) store(token->read + column + i * LANES, sums[i]), held[i] = next[i];
    }
}

/* For each token the state before decays into the state after, which may be the same memory, and its value at the key
 * moves towards the token's value; the query reads it afterwards. */
CLONES static void recur(const float *before, float *state, const struct token *tokens, int64_t num_tokens,
                         int64_t each, int64_t key_dim, int64_t value_dim) {
    int64_t i = 0;
    for (; num_tokens == 1 && i + WIDE * LANES <= value_dim; i += WIDE * LANES)
        recur_columns(before, state, tokens, 1, i, each, key_dim, value_dim, WIDE, 0);
    for (; i + AT_ONCE * LANES <= value_dim; i += AT_ONCE * LANES)
        recur_columns(before, state, tokens, num_tokens, i, each, key_dim, value_dim, AT_ONCE,
                      i + 2 * AT_ONCE * LANES <= value_dim);
    for (; i < value_dim; i += LANES)
        recur_columns(before, state, tokens, num_tokens, i, each, key_dim, value_dim, 1, 0);
}

/* Address of a token's state. */
static int64_t slot_after(const struct step *step, int64_t row, int64_t token) {
    return step->states_after ? step->states_after[token] : step->state_slots[row];
}

/* The end of the tokens from `first` on that a state goes through at once: those whose states go to the same slot. */
static int64_t chunk_past(const struct step *step, int64_t row, int64_t first) {
    int64_t past = min64(step->query_starts[row + 1], first + CHUNK), token = first + 1;
    while (token < past && slot_after(step, row, token) == slot_after(step, row, first)) token++;
    return token;
}

/* A key head of one row: its channels are its query's, its key's and its values'. */
struct part {
    const struct delta_net *op;
    int64_t head, channels, room; /* `room`: channels, padded to whole vectors */
    float *weights; /* [kernel][room] */
    float *window;  /* [kernel][room], the input at position p in row p % kernel */
    float *mixed;   /* [CHUNK][room] */
    float *read;    /* [CHUNK][value_dim] */
};

/* A section of the head's channels: its queries, its keys or its values. */
struct section {
    int64_t first, count, offset; /* `first`: index among the channels of all heads; `offset`: among the head's */
};

static void sections_of(const struct part *part, struct section sections[3]) {
    const struct delta_net *op = part->op;
    int64_t keys = op->key_dim, values = op->group * op->value_dim, of_keys = op->key_heads * keys;
    sections[0] = (struct section){part->head * keys, keys, 0};
    sections[1] = (struct section){of_keys + part->head * keys, keys, keys};
    sections[2] = (struct section){2 * of_keys + part->head * values, values, 2 * keys};
}

static struct part set_up(const struct delta_net *op, int64_t head, struct worker *worker) {
    int64_t channels = 2 * op->key_dim + op->group * op->value_dim, room = parts(channels, LANES) * LANES;
    struct part part = {.op = op, .head = head, .channels = channels, .room = room};
    part.weights = (float *)worker->scratch;
    part.window = part.weights + op->kernel * room;
    part.mixed = part.window + op->kernel * room;
    part.read = part.mixed + CHUNK * room;
    for (int64_t i = 0; i < 2 * op->kernel; i++)
        memset(part.weights + i * room + channels, 0, (room - channels) * sizeof(float));
    struct section sections[3];
    sections_of(&part, sections);
    for (int i = 0; i < 3; i++)
        to_rows(op->conv + sections[i].first * op->kernel, sections[i].count, op->kernel,
                part.weights + sections[i].offset, room);
    return part;
}

/* Load the inputs before the step's first token, which is at position kernel - 1. Without a state they are zeros. */
static void remember(const struct part *part, const bf16 *state) {
    int64_t kept = part->op->kernel - 1;
    struct section sections[3];
    sections_of(part, sections);
    if (!state) memset(part->window, 0, kept * part->room * sizeof(float));
    else
        for (int i = 0; i < 3; i++)
            to_rows(state + sections[i].first * kept, sections[i].count, kept, part->window + sections[i].offset,
                    part->room);
}

/* Store the last inputs; the step has ended before `position`. */
static void keep(const struct part *part, int64_t position, bf16 *state) {
    int64_t kernel = part->op->kernel, kept = kernel - 1;
    struct section sections[3];
    sections_of(part, sections);
    const float *rows[MAX_TAPS];
    for (int i = 0; i < 3; i++) {
        for (int64_t tap = 0; tap < kept; tap++)
            rows[tap] = part->window + (position - kept + tap) % kernel * part->room + sections[i].offset;
        from_rows(rows, sections[i].count, kept, state + sections[i].first * kept);
    }
}

/* Convolve each channel over its own last inputs. */
CLONES static void convolve(const struct part *part, const bf16 *x, int64_t position, float *mixed) {
    int64_t kernel = part->op->kernel, room = part->room;
    float *now = part->window + position % kernel * room;
    for (int64_t i = 0; i < part->channels; i++) now[i] = widen(x[i]);
    for (int64_t i = 0; i < room; i += LANES) {
        vector sum = {0};
        for (int64_t tap = 0; tap < kernel; tap++) {
            int64_t row = (position + 1 + tap) % kernel;
            sum += load(part->weights + tap * room + i) * load(part->window + row * room + i);
        }
        store(mixed + i, sum * sigmoid_of(sum));
    }
}

/* The norm of the read values, times the gate. */
CLONES static void write_gated(const struct delta_net *op, const float *read, const bf16 *gate, bf16 *out) {
    vector squares = {0};
    for (int64_t i = 0; i < op->value_dim; i += LANES) squares += load(read + i) * load(read + i);
    float scale = 1.0f / sqrtf(sum_of(squares) / (float)op->value_dim + (float)op->eps);
    for (int64_t i = 0; i < op->value_dim; i += LANES) {
        vector z = load_bf16(gate + i);
        store_bf16(out + i, load(read + i) * scale * load_bf16(op->norm + i) * z * sigmoid_of(z));
    }
}

static float decay_of(const struct delta_net *op, int64_t head, float a) {
    float x = a + widen(op->dt_bias[head]), softplus = x > 20 ? x : log1pf(expf(x));
    return expf(-expf(widen(op->a_log[head])) * softplus);
}

/* The tokens of a chunk, for each of the value heads that share the part's key. */
static void read_tokens(const struct part *part, int64_t first, int64_t past, const float *before, float *states) {
    const struct delta_net *op = part->op;
    int64_t keys = op->key_dim, values = op->value_dim, wide = op->group * values;
    struct token tokens[CHUNK];
    float decays[CHUNK];
    for (int64_t i = 0; i < op->group; i++) {
        int64_t head = part->head * op->group + i;
        for (int64_t token = first; token < past; token++) {
            const bf16 *b = op->ba + token * op->ba_stride + part->head * 2 * op->group, *a = b + op->group;
            const float *q = part->mixed + (token - first) * part->room, *k = q + keys;
            float decay = decays[token - first] = decay_of(op, head, widen(a[i]));
            tokens[token - first] = (struct token){
                .q = q, .k = k, .fading = k, .decay = decays + (token - first), .v = k + keys + i * values,
                .scale = decay, .beta = 1 / (1 + expf(-widen(b[i]))), .read = part->read + (token - first) * values,
            };
        }
        recur(before + i * keys * values, states + i * keys * values, tokens, past - first, 0, keys, values);
        for (int64_t token = first; token < past; token++) {
            const bf16 *gates = op->x + token * op->x_stride + part->head * 2 * (keys + wide) + 2 * keys + wide;
            write_gated(op, tokens[token - first].read, gates + i * values,
                        op->out + token * op->out_stride + head * values);
        }
    }
}

static void read_row(const struct part *part, const struct step *step, int64_t row) {
    const struct delta_net *op = part->op;
    int64_t first = step->query_starts[row], end = step->query_starts[row + 1], slot = step->state_slots[row];
    if (first == end) return;
    int64_t keys = op->key_dim, wide = op->group * op->value_dim, state = keys * wide, position = op->kernel - 1;
    int64_t of_slot = op->key_heads * (2 * keys + wide) * (op->kernel - 1);
    float *before = op->states + (slot * op->key_heads + part->head) * state;
    int begins = step->seq_lens[row] == end - first && slot_after(step, row, first) >= 0;
    if (begins) memset(before, 0, state * sizeof(float));
    remember(part, begins ? NULL : op->inputs + slot * of_slot);
    for (int64_t past; first < end; first = past) {
        int64_t after = slot_after(step, row, first);
        past = chunk_past(step, row, first);
        if (after < 0) {
            for (int64_t token = first; token < past; token++)
                memset(op->out + token * op->out_stride + part->head * wide, 0, wide * sizeof(bf16));
            continue;
        }
        float *states = op->states + (after * op->key_heads + part->head) * state;
        for (int64_t token = first; token < past; token++) {
            float *mixed = part->mixed + (token - first) * part->room;
            convolve(part, op->x + token * op->x_stride + part->head * 2 * (keys + wide), position++, mixed);
            scale_to(mixed, keys, 1.0f / sqrtf((float)keys));
            scale_to(mixed + keys, keys, 1);
        }
        read_tokens(part, first, past, before, states);
        before = states;
        if (past == end || slot_after(step, row, past) != after) keep(part, position, op->inputs + after * of_slot);
    }
}

/* Tasks: key heads of rows; see `take_states`. */
OPERATOR(delta_net) {
    const struct delta_net *op = arguments;
    for (struct states states; take_states(step, worker, op->key_heads, &states);)
        for (int64_t head = states.first; head < states.past; head++) {
            const struct part part = set_up(op, head, worker);
            read_row(&part, step, states.row);
        }
}

/* A value head of one row. */
struct ruled {
    const struct delta_rule *op;
    int64_t head;
    float *floats; /* [CHUNK][4 * key_dim + 2 * value_dim] */
};

static float *ruled_state(const struct ruled *ruled, int64_t slot) {
    const struct delta_rule *op = ruled->op;
    return op->states + (slot * op->heads + ruled->head) * op->key_dim * op->value_dim;
}

/* Compute each key dimension's decay, exp(-rate * softplus(a + bias)) or, with a bound, exp(-bound * sigmoid(rate *
 * (a + bias))), and the key multiplied by it. */
CLONES static void fade_keys(const bf16 *a, const float *bias, const float *k, int64_t count, float rate, float bound,
                             float *decay, float *fading) {
    for (int64_t i = 0; i < count; i += LANES) {
        int64_t width = min64(LANES, count - i);
        float some[2][LANES] = {{0}};
        memcpy(some[0], bias + i, width * sizeof(float));
        memcpy(some[1], k + i, width * sizeof(float));
        vector raw = load_some(a + i, width) + load(some[0]);
        vector faded = exp_of(bound > 0 ? sigmoid_of(raw * rate) * -bound : softplus_of(raw) * -rate);
        vector key = load(some[1]) * faded;
        memcpy(decay + i, &faded, width * sizeof(float));
        memcpy(fading + i, &key, width * sizeof(float));
    }
}

static struct token rule_token(const struct ruled *ruled, int64_t token, float *floats) {
    const struct delta_rule *op = ruled->op;
    int64_t keys = op->key_dim, values = op->value_dim, head = ruled->head, of_keys = op->heads / op->group * keys;
    const bf16 *x = op->x + token * op->x_stride, *a = op->a + token * op->a_stride + head * op->decays;
    float *q = floats, *k = q + keys, *decay = k + keys, *fading = decay + keys, *v = fading + keys;
    widen_all(x + head / op->group * keys, keys, q);
    widen_all(x + of_keys + head / op->group * keys, keys, k);
    widen_all(x + 2 * of_keys + head * values, values, v);
    scale_to(q, keys, 1.0f / sqrtf((float)keys));
    scale_to(k, keys, 1);
    float beta = (float)op->most / (1 + expf(-widen(op->b[token * op->b_stride + head]))), rate = expf(op->a_log[head]);
    struct token made = {.q = q, .k = k, .fading = k, .decay = decay, .v = v, .scale = 1, .beta = beta, .read = v + values};
    if (op->decays > 1) {
        fade_keys(a, op->dt_bias + head * keys, k, keys, rate, (float)op->bound, decay, fading);
        made.fading = fading;
    } else {
        float raw = widen(a[0]) + op->dt_bias[head], softplus = raw > 20 ? raw : log1pf(expf(raw));
        made.scale = decay[0] = expf(-rate * softplus);
    }
    return made;
}

static void rule_row(const struct ruled *ruled, const struct step *step, int64_t row) {
    const struct delta_rule *op = ruled->op;
    int64_t first = step->query_starts[row], end = step->query_starts[row + 1], values = op->value_dim;
    if (first == end) return;
    float *before = ruled_state(ruled, step->state_slots[row]);
    if (step->seq_lens[row] == end - first && slot_after(step, row, first) >= 0)
        memset(before, 0, op->key_dim * values * sizeof(float));
    for (int64_t past; first < end; first = past) {
        int64_t after = slot_after(step, row, first);
        past = chunk_past(step, row, first);
        bf16 *out = op->out + first * op->out_stride + ruled->head * values;
        if (after < 0) {
            for (int64_t i = 0; i < past - first; i++) memset(out + i * op->out_stride, 0, values * sizeof(bf16));
            continue;
        }
        struct token tokens[CHUNK];
        float *state = ruled_state(ruled, after);
        for (int64_t i = 0; i < past - first; i++)
            tokens[i] = rule_token(ruled, first + i, ruled->floats + i * (4 * op->key_dim + 2 * values));
        recur(before, state, tokens, past - first, op->decays > 1, op->key_dim, values);
        for (int64_t i = 0; i < past - first; i++) narrow_all(tokens[i].read, values, out + i * op->out_stride);
        before = state;
    }
}

/* Tasks: value heads of rows; see `take_states`. */
OPERATOR(delta_rule) {
    const struct delta_rule *op = arguments;
    struct ruled ruled = {.op = op, .floats = (float *)worker->scratch};
    for (struct states states; take_states(step, worker, op->heads, &states);)
        for (ruled.head = states.first; ruled.head < states.past; ruled.head++) rule_row(&ruled, step, states.row);
}
