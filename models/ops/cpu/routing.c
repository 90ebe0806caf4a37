/* Routing of tokens to experts: float32 scores of a float32 router, and the selection of the best. */

#include <math.h>

#include "operators.h"
#include "vectors.h"

#define BLOCK 4          /* tokens, and outputs, that are multiplied in registers */
#define TOKENS_AT_ONCE 32 /* tokens by which a task's weights are read once */

INLINE vector load_floats(const float *from, int64_t width) {
    if (width == LANES) return load(from);
    ALIGNED float padded[LANES] = {0};
    memcpy(padded, from, width * sizeof(float));
    return load(padded);
}

INLINE vector load_inputs(const bf16 *from, int64_t width) {
    return width == LANES ? load_bf16(from) : load_some(from, width);
}

/* Sums of up to BLOCK tokens and BLOCK outputs; after the last token or output, others are repeated. Each sum has 16
 * lanes over the inputs in order, independent of its neighbours. */
INLINE void multiply_block(const bf16 *const *x, const float *const *weight, int64_t in_features, int tokens,
                           float sums[BLOCK][BLOCK]) {
    vector lanes[BLOCK][BLOCK] = {{{0}}};
    for (int64_t i = 0; i < in_features; i += LANES) {
        int64_t width = min64(LANES, in_features - i);
        vector w[BLOCK];
        for (int output = 0; output < BLOCK; output++) w[output] = load_floats(weight[output] + i, width);
        for (int token = 0; token < tokens; token++) {
            vector inputs = load_inputs(x[token] + i, width);
            for (int output = 0; output < BLOCK; output++) lanes[token][output] += inputs * w[output];
        }
    }
    for (int token = 0; token < tokens; token++)
        for (int output = 0; output < BLOCK; output++) sums[token][output] = sum_of(lanes[token][output]);
}

CLONES static void multiply_tokens(const struct float_linear *op, int64_t first, int64_t past, int64_t output) {
    int64_t outputs = min64(BLOCK, op->out_features - output);
    const float *weight[BLOCK];
    for (int i = 0; i < BLOCK; i++) weight[i] = op->weight + (output + min64(i, outputs - 1)) * op->in_features;
    for (int64_t token = first; token < past; token += BLOCK) {
        int64_t tokens = min64(BLOCK, past - token);
        const bf16 *x[BLOCK];
        float sums[BLOCK][BLOCK];
        for (int i = 0; i < BLOCK; i++) x[i] = op->x + (token + min64(i, tokens - 1)) * op->x_stride;
        if (tokens == 1) multiply_block(x, weight, op->in_features, 1, sums);
        else multiply_block(x, weight, op->in_features, BLOCK, sums);
        for (int64_t row = 0; row < tokens; row++)
            memcpy(op->out + (token + row) * op->out_stride + output, sums[row], outputs * sizeof(float));
    }
}

/* Tasks: runs of tokens, each with the outputs by BLOCK. */
void float_linear(const void *arguments, const struct step *step, struct worker *worker) {
    const struct float_linear *op = arguments;
    int64_t runs = parts(step->num_tokens, TOKENS_AT_ONCE), shares = parts(op->out_features, BLOCK);
    for (int64_t task; (task = take_task(worker)) < runs * shares;) {
        int64_t first = task / shares * TOKENS_AT_ONCE;
        multiply_tokens(op, first, min64(step->num_tokens, first + TOKENS_AT_ONCE), task % shares * BLOCK);
    }
}

/* The best so far, in descending order; of equal ones the first. */
struct best_experts {
    float *values;
    int64_t *places;
    int64_t count, most;
};

static inline void offer(struct best_experts *best, float value, int64_t place) {
    if (value != value) value = INFINITY; /* A NaN is reported, not skipped. */
    int64_t at = best->count;
    if (at == best->most && !(value > best->values[at - 1])) return;
    if (at == best->most) at--;
    else best->count++;
    for (; at > 0 && value > best->values[at - 1]; at--) {
        best->values[at] = best->values[at - 1];
        best->places[at] = best->places[at - 1];
    }
    best->values[at] = value, best->places[at] = place;
}

static void score(const struct route *op, const float *logits, float *scores) {
    if (op->scoring == SIGMOID) {
        for (int64_t i = 0; i < op->experts; i++) scores[i] = 1 / (1 + expf(-logits[i]));
        return;
    }
    if (op->scoring == SQRT_SOFTPLUS) {
        for (int64_t i = 0; i < op->experts; i++)
            scores[i] = sqrtf(logits[i] > 20 ? logits[i] : log1pf(expf(logits[i])));
        return;
    }
    float most = logits[0], total = 0;
    for (int64_t i = 1; i < op->experts; i++) most = logits[i] > most ? logits[i] : most;
    for (int64_t i = 0; i < op->experts; i++) total += scores[i] = expf(logits[i] - most);
    for (int64_t i = 0; i < op->experts; i++) scores[i] /= total;
}

/* A thread's memory for one token. */
struct desk {
    float *scores, *choice;       /* [experts], the second with the correction */
    float *values, *group_values; /* of the best */
    int64_t *group_places;
    char *is_open; /* [groups] */
};

static struct desk set_up(const struct route *op, struct worker *worker) {
    int64_t *places = (int64_t *)worker->scratch;
    float *floats = (float *)(places + op->groups);
    struct desk desk = {.group_places = places, .scores = floats, .choice = floats + op->experts};
    desk.values = desk.choice + op->experts;
    desk.group_values = desk.values + op->top_k;
    desk.is_open = (char *)(desk.group_values + op->groups);
    return desk;
}

/* With a correction a group is scored by the sum of its two best experts, without one by its best. */
static float goodness_of(const struct route *op, const float *choice) {
    float values[2];
    int64_t places[2], of_group = op->experts / op->groups;
    struct best_experts best = {values, places, 0, op->correction && of_group > 1 ? 2 : 1};
    for (int64_t i = 0; i < of_group; i++) offer(&best, choice[i], i);
    return best.count == 2 ? values[0] + values[1] : values[0];
}

static void open_groups(const struct route *op, const struct desk *desk) {
    int64_t of_group = op->experts / op->groups;
    memset(desk->is_open, op->top_groups == op->groups, op->groups);
    if (op->top_groups == op->groups) return;
    struct best_experts best = {desk->group_values, desk->group_places, 0, op->top_groups};
    for (int64_t group = 0; group < op->groups; group++)
        offer(&best, goodness_of(op, desk->choice + group * of_group), group);
    for (int64_t i = 0; i < best.count; i++) desk->is_open[best.places[i]] = 1;
}

/* By their scores. */
static void choose_experts(const struct route *op, const struct desk *desk, int64_t *ids) {
    int64_t of_group = op->experts / op->groups;
    for (int64_t i = 0; i < op->experts; i++)
        desk->choice[i] = desk->scores[i] + (op->correction ? op->correction[i] : 0);
    open_groups(op, desk);
    struct best_experts best = {desk->values, ids, 0, op->top_k};
    for (int64_t i = 0; i < op->experts; i++)
        if (desk->is_open[i / of_group]) offer(&best, desk->choice[i], i);
}

static void route_token(const struct route *op, const float *logits, const int64_t *chosen, float *weights,
                        int64_t *ids, const struct desk *desk) {
    score(op, logits, desk->scores);
    if (chosen) memcpy(ids, chosen, op->top_k * sizeof(int64_t));
    else choose_experts(op, desk, ids);
    float total = 0;
    for (int64_t i = 0; i < op->top_k; i++) total += weights[i] = desk->scores[ids[i]];
    /* All scores of a token may underflow in float32. */
    float divisor = op->renormalize ? total + 1e-20f : 1;
    for (int64_t i = 0; i < op->top_k; i++) weights[i] = weights[i] / divisor * (float)op->scaling_factor;
    for (int64_t i = 0; op->expert_scales && i < op->top_k; i++) weights[i] *= op->expert_scales[ids[i]];
}

/* Tasks: tokens. */
void route(const void *arguments, const struct step *step, struct worker *worker) {
    const struct route *op = arguments;
    struct desk desk = set_up(op, worker);
    for (int64_t token; (token = take_task(worker)) < step->num_tokens;)
        route_token(op, op->logits + token * op->stride,
                    op->table ? op->table + step->input_ids[token] * op->top_k : NULL,
                    op->weights + token * op->top_k, op->ids + token * op->top_k, &desk);
}
