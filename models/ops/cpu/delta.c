/* Gated delta nets (Yang et al., 2025): a short causal convolution, a state that moves towards each token's value at
 * its key, and a gated norm of the query's read. Computed token by token in any step, so that a row's result does not
 * depend on how it is divided into steps. */

#include <math.h>

#include "operators.h"
#include "vectors.h"

#define AT_ONCE 4 /* vectors of a state's columns, whose sums are then independent */

/* A key head of one row: its channels are its query's, its key's and its values'. */
struct part {
    const struct delta_net *op;
    int64_t head, channels;
    float *weights; /* [kernel][channels] */
    float *window;  /* [kernel][channels], the input at position p in row p % kernel */
    float *mixed;   /* [channels] */
    float *read;    /* [value_dim] */
};

/* Index of a channel among those of all heads: all queries', all keys', all values'. */
static int64_t channel_of(const struct part *part, int64_t channel) {
    const struct delta_net *op = part->op;
    int64_t keys = op->key_dim, values = op->group * op->value_dim, of_keys = op->key_heads * keys;
    if (channel < keys) return part->head * keys + channel;
    if (channel < 2 * keys) return of_keys + part->head * keys + channel - keys;
    return 2 * of_keys + part->head * values + channel - 2 * keys;
}

static struct part set_up(const struct delta_net *op, int64_t head, struct worker *worker) {
    int64_t channels = 2 * op->key_dim + op->group * op->value_dim, room = parts(channels, LANES) * LANES;
    float *floats = (float *)worker->scratch;
    struct part part = {.op = op, .head = head, .channels = room, .weights = floats};
    part.window = part.weights + op->kernel * room;
    part.mixed = part.window + op->kernel * room;
    part.read = part.mixed + room;
    memset(floats, 0, 2 * op->kernel * room * sizeof(float));
    for (int64_t channel = 0; channel < channels; channel++)
        for (int64_t i = 0; i < op->kernel; i++)
            part.weights[i * room + channel] = widen(op->conv[channel_of(&part, channel) * op->kernel + i]);
    return part;
}

/* The inputs before the step's first token, which is at position kernel - 1. */
static void remember(const struct part *part, const bf16 *state) {
    const struct delta_net *op = part->op;
    int64_t kept = op->kernel - 1, channels = 2 * op->key_dim + op->group * op->value_dim;
    for (int64_t channel = 0; channel < channels; channel++)
        for (int64_t i = 0; i < kept; i++)
            part->window[i * part->channels + channel] = widen(state[channel_of(part, channel) * kept + i]);
}

/* Store the last inputs; the step has ended before `position`. */
static void keep(const struct part *part, int64_t position, bf16 *state) {
    const struct delta_net *op = part->op;
    int64_t kept = op->kernel - 1, channels = 2 * op->key_dim + op->group * op->value_dim;
    for (int64_t channel = 0; channel < channels; channel++)
        for (int64_t i = 0; i < kept; i++) {
            int64_t row = (position - kept + i) % op->kernel;
            state[channel_of(part, channel) * kept + i] = narrow(part->window[row * part->channels + channel]);
        }
}

/* Convolve each channel over its own last inputs. */
CLONES static void convolve(const struct part *part, const bf16 *x, int64_t position) {
    const struct delta_net *op = part->op;
    int64_t channels = 2 * op->key_dim + op->group * op->value_dim;
    float *now = part->window + position % op->kernel * part->channels;
    for (int64_t i = 0; i < channels; i++) now[i] = widen(x[i]);
    for (int64_t i = 0; i < part->channels; i += LANES) {
        vector sum = {0};
        for (int64_t tap = 0; tap < op->kernel; tap++) {
            int64_t row = (position + 1 + tap) % op->kernel;
            sum += load(part->weights + tap * part->channels + i) * load(part->window + row * part->channels + i);
        }
        store(part->mixed + i, sum * sigmoid_of(sum));
    }
}

/* Scale to the length `wanted`. */
CLONES static void scale_to(float *x, int64_t size, float wanted) {
    float squares = 0;
    for (int64_t i = 0; i < size; i++) squares += x[i] * x[i];
    float scale = wanted / sqrtf(squares + 1e-6f);
    for (int64_t i = 0; i < size; i++) x[i] *= scale;
}

/* `each`: 1 if every key dimension has a decay of its own, 0 if they share one. */
INLINE void recur_columns(const float *before, float *state, const float *q, const float *k, const float *v,
                          const float *decay, int64_t each, float beta, int64_t key_dim, int64_t value_dim, int count,
                          float *read) {
    vector held[AT_ONCE] = {{0}}, sums[AT_ONCE] = {{0}};
    for (int64_t key = 0; key < key_dim; key++)
        for (int i = 0; i < count; i++) {
            int64_t at = key * value_dim + i * LANES;
            vector now = load(before + at) * decay[key * each];
            store(state + at, now);
            held[i] += k[key] * now;
        }
    for (int i = 0; i < count; i++) held[i] = (load(v + i * LANES) - held[i]) * beta;
    for (int64_t key = 0; key < key_dim; key++)
        for (int i = 0; i < count; i++) {
            float *at = state + key * value_dim + i * LANES;
            vector now = load(at) + k[key] * held[i];
            store(at, now);
            sums[i] += q[key] * now;
        }
    for (int i = 0; i < count; i++) store(read + i * LANES, sums[i]);
}

/* The state before decays into the state after, which may be the same memory, and its value at the key moves towards
 * the token's value; the query reads it afterwards. */
CLONES static void recur(const float *before, float *state, const float *q, const float *k, const float *v,
                         const float *decay, int64_t each, float beta, int64_t key_dim, int64_t value_dim,
                         float *read) {
    int64_t i = 0;
    for (; i + AT_ONCE * LANES <= value_dim; i += AT_ONCE * LANES)
        recur_columns(before + i, state + i, q, k, v + i, decay, each, beta, key_dim, value_dim, AT_ONCE, read + i);
    for (; i < value_dim; i += LANES)
        recur_columns(before + i, state + i, q, k, v + i, decay, each, beta, key_dim, value_dim, 1, read + i);
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

/* One token, for each of the value heads that share the part's key. */
static void read_token(const struct part *part, int64_t token, const float *before, float *states) {
    const struct delta_net *op = part->op;
    int64_t keys = op->key_dim, values = op->value_dim, wide = op->group * values;
    const bf16 *gates = op->x + token * op->x_stride + part->head * 2 * (keys + wide) + 2 * keys + wide;
    const bf16 *b = op->ba + token * op->ba_stride + part->head * 2 * op->group, *a = b + op->group;
    float *q = part->mixed, *k = q + keys;
    scale_to(q, keys, 1.0f / sqrtf((float)keys));
    scale_to(k, keys, 1);
    for (int64_t i = 0; i < op->group; i++) {
        int64_t head = part->head * op->group + i;
        float beta = 1 / (1 + expf(-widen(b[i]))), decay = decay_of(op, head, widen(a[i]));
        recur(before + i * keys * values, states + i * keys * values, q, k, k + keys + i * values, &decay, 0, beta,
              keys, values, part->read);
        write_gated(op, part->read, gates + i * values, op->out + token * op->out_stride + head * values);
    }
}

/* Address of a token's state. */
static int64_t slot_after(const struct step *step, int64_t row, int64_t token) {
    return step->states_after ? step->states_after[token] : step->state_slots[row];
}

static void read_row(const struct part *part, const struct step *step, int64_t row) {
    const struct delta_net *op = part->op;
    int64_t first = step->query_starts[row], past = step->query_starts[row + 1], slot = step->state_slots[row];
    if (first == past) return;
    int64_t wide = op->group * op->value_dim, state = op->key_dim * wide, position = op->kernel - 1;
    int64_t of_slot = op->key_heads * (2 * op->key_dim + wide) * (op->kernel - 1);
    float *before = op->states + (slot * op->key_heads + part->head) * state;
    int begins = step->seq_lens[row] == past - first && slot_after(step, row, first) >= 0;
    if (begins) memset(before, 0, state * sizeof(float));
    else remember(part, op->inputs + slot * of_slot);
    for (int64_t token = first; token < past; token++) {
        int64_t after = slot_after(step, row, token);
        if (after < 0) {
            memset(op->out + token * op->out_stride + part->head * wide, 0, wide * sizeof(bf16));
            continue;
        }
        float *states = op->states + (after * op->key_heads + part->head) * state;
        convolve(part, op->x + token * op->x_stride + part->head * 2 * (op->key_dim + wide), position++);
        read_token(part, token, before, states);
        before = states;
        if (token + 1 == past || slot_after(step, row, token + 1) != after)
            keep(part, position, op->inputs + after * of_slot);
    }
}

/* Tasks: key heads of rows. */
void delta_net(const void *arguments, const struct step *step, struct worker *worker) {
    const struct delta_net *op = arguments;
    for (int64_t task; (task = take_task(worker)) < step->num_rows * op->key_heads;) {
        const struct part part = set_up(op, task % op->key_heads, worker);
        read_row(&part, step, task / op->key_heads);
    }
}

/* A value head of one row. */
struct ruled {
    const struct delta_rule *op;
    int64_t head;
    float *q, *k, *v, *decay, *read;
};

static float *ruled_state(const struct ruled *ruled, int64_t slot) {
    const struct delta_rule *op = ruled->op;
    return op->states + (slot * op->heads + ruled->head) * op->key_dim * op->value_dim;
}

CLONES static void widen_all(const bf16 *from, int64_t count, float *to) {
    for (int64_t i = 0; i < count; i++) to[i] = widen(from[i]);
}

static void rule_token(const struct ruled *ruled, int64_t token, const float *before, float *state) {
    const struct delta_rule *op = ruled->op;
    int64_t keys = op->key_dim, values = op->value_dim, head = ruled->head, of_keys = op->heads / op->group * keys;
    const bf16 *x = op->x + token * op->x_stride, *a = op->a + token * op->a_stride + head * op->decays;
    widen_all(x + head / op->group * keys, keys, ruled->q);
    widen_all(x + of_keys + head / op->group * keys, keys, ruled->k);
    widen_all(x + 2 * of_keys + head * values, values, ruled->v);
    scale_to(ruled->q, keys, 1.0f / sqrtf((float)keys));
    scale_to(ruled->k, keys, 1);
    float rate = expf(op->a_log[head]);
    for (int64_t i = 0; i < op->decays; i++) {
        float raw = widen(a[i]) + op->dt_bias[head * op->decays + i], softplus = raw > 20 ? raw : log1pf(expf(raw));
        ruled->decay[i] = expf(-rate * softplus);
    }
    float beta = (float)op->most / (1 + expf(-widen(op->b[token * op->b_stride + head])));
    recur(before, state, ruled->q, ruled->k, ruled->v, ruled->decay, op->decays > 1, beta, keys, values, ruled->read);
    bf16 *out = op->out + token * op->out_stride + head * values;
    for (int64_t i = 0; i < values; i++) out[i] = narrow(ruled->read[i]);
}

static void rule_row(const struct ruled *ruled, const struct step *step, int64_t row) {
    const struct delta_rule *op = ruled->op;
    int64_t first = step->query_starts[row], past = step->query_starts[row + 1];
    if (first == past) return;
    float *before = ruled_state(ruled, step->state_slots[row]);
    if (step->seq_lens[row] == past - first && slot_after(step, row, first) >= 0)
        memset(before, 0, op->key_dim * op->value_dim * sizeof(float));
    for (int64_t token = first; token < past; token++) {
        int64_t after = slot_after(step, row, token);
        if (after < 0) {
            memset(op->out + token * op->out_stride + ruled->head * op->value_dim, 0, op->value_dim * sizeof(bf16));
            continue;
        }
        float *state = ruled_state(ruled, after);
        rule_token(ruled, token, before, state);
        before = state;
    }
}

/* Tasks: value heads of rows. */
void delta_rule(const void *arguments, const struct step *step, struct worker *worker) {
    const struct delta_rule *op = arguments;
    struct ruled ruled = {.op = op, .q = (float *)worker->scratch};
    ruled.k = ruled.q + op->key_dim;
    ruled.decay = ruled.k + op->key_dim;
    ruled.v = ruled.decay + op->key_dim;
    ruled.read = ruled.v + op->value_dim;
    for (int64_t task; (task = take_task(worker)) < step->num_rows * op->heads;) {
        ruled.head = task % op->heads;
        rule_row(&ruled, step, task / op->heads);
    }
}
