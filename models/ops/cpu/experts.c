/* Tokens to their experts and back. The pairs of a token and one of its experts are sorted by expert, so that each
 * expert's weight is read once, by grouped_linear in linear.c; a token's results are added in its own order. */

#include <math.h>

#include "operators.h"
#include "vectors.h"

/* An expert's number in the order that begins with the first. */
static int64_t number(const struct sort_pairs *op, int64_t expert) {
    return expert - op->first + (expert < op->first ? op->experts : 0);
}

/* One task: it takes less time than distributing it would. Within an expert, pairs stay in the order of tokens. */
void sort_pairs(const void *arguments, const struct step *step, struct worker *worker) {
    const struct sort_pairs *op = arguments;
    if (take_task(worker) > 0) return;
    int64_t pairs = step->num_tokens * op->top_k, *next = (int64_t *)worker->scratch, place = 0;
    memset(op->counts, 0, op->experts * sizeof(int64_t));
    for (int64_t pair = 0; pair < pairs; pair++) op->counts[number(op, op->ids[pair])]++;
    for (int64_t expert = 0; expert < op->experts; expert++) next[expert] = place, place += op->counts[expert];
    for (int64_t token = 0, pair = 0; token < step->num_tokens; token++)
        for (int64_t i = 0; i < op->top_k; i++, pair++) {
            place = next[number(op, op->ids[pair])]++;
            op->places[pair] = place, op->tokens[place] = token;
        }
}

CLONES static void combine_token(const struct combine *op, const float *weights, const int64_t *places,
                                 const bf16 *shared, float factor, bf16 *out) {
    for (int64_t i = 0; i < op->size; i += LANES) {
        int64_t width = min64(LANES, op->size - i);
        vector sum = {0};
        for (int64_t k = 0; k < op->top_k; k++) {
            const bf16 *product = op->products + places[k] * op->products_stride + i;
            sum += weights[k] * (width == LANES ? load_bf16(product) : load_some(product, width));
        }
        if (shared) sum += factor * (width == LANES ? load_bf16(shared + i) : load_some(shared + i, width));
        if (width == LANES) store_bf16(out + i, sum);
        else store_some(out + i, sum, width);
    }
}

/* Tasks: tokens. */
void combine(const void *arguments, const struct step *step, struct worker *worker) {
    const struct combine *op = arguments;
    for (int64_t token; (token = take_task(worker)) < step->num_tokens;) {
        const bf16 *shared = op->shared ? op->shared + token * op->shared_stride : NULL;
        float factor = op->gate ? 1 / (1 + expf(-op->gate[token])) : 1;
        combine_token(op, op->weights + token * op->top_k, op->places + token * op->top_k, shared, factor,
                      op->out + token * op->out_stride);
    }
}
