/* Rejection sampling of drafts (Leviathan, Kalman and Matias, 2023), as in engine.sampling.torch_ops.
 *
 * A draft whose probability is q for the drafter and p for the target is accepted with probability min(1, p / q), and
 * otherwise replaced by a sample of max(p - q, 0). A sequence's rows are adjacent, and each is computed only if the
 * drafts before it are accepted. */

#include "draw.h"

/* log2(1 + m) is at most this much more than m, for m from 0 to 1. */
#define LOG2_ABOVE 0.0861f

/* Overwrites p by the rest, p / total - q, and returns the largest. */
CLONES static float subtract(float *p, float factor, const float *q, int64_t width) {
    vector most = all(0);
    float largest = 0;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        vector rest = load(p + i) * factor - load(q + i);
        store(p + i, rest);
        most = larger(rest, most);
    }
    for (; i < width; i++) {
        p[i] = p[i] * factor - q[i];
        largest = p[i] > largest ? p[i] : largest;
    }
    for (int lane = 0; lane < LANES; lane++) largest = most[lane] > largest ? most[lane] : largest;
    return largest;
}

/* A token sampled in proportion to the positive values, of which `largest` is the greatest. Bounds as in noise.h: also
 * of a logarithm from above. */
CLONES static int64_t draw_rest(const float *rest, int64_t width, float largest, struct noise noise) {
    struct winner best = NO_WINNER;
    best.score += (float)log(largest);
    float limit = limit_of(&best, 1);
    ALIGNED vector bounds[COMPARED / LANES];
    for (int64_t first = 0; first < width; first += COMPARED) {
        const float *values = rest + first;
        int64_t count = min64(COMPARED, width - first);
        float padded[COMPARED];
        if (count < COMPARED) {
            for (int64_t i = 0; i < COMPARED; i++) padded[i] = i < count ? values[i] : 0;
            values = padded;
        }
        for (int i = 0; i < COMPARED / LANES; i++) {
            vector some = load(values + i * LANES);
            vector log2_above = __builtin_convertvector((integers)some - BOUND_BIAS, vector) * 0x1p-23f + LOG2_ABOVE;
            vector bound = bounds_of((float)M_LN2 * log2_above, first + i * LANES, noise, 1);
            bounds[i] = choose((integers)(some > 0.0f), bound, all(-INFINITY));
        }
        if (!any_above(bounds, COMPARED / LANES, limit)) continue;
        for (int64_t i = 0; i < count; i++) {
            if (!(bounds[i / LANES][i % LANES] > limit)) continue;
            offer_token(&best, (float)log(values[i]), first + i, noise);
            limit = limit_of(&best, 1);
        }
    }
    return best.token;
}

/* The token of a row at which a draft is verified. */
static int64_t verify_row(const struct verify_drafts *op, int64_t which, char *scratch) {
    const struct draw *draw = &op->by;
    int64_t draft = op->drafts[which];
    const float *q = op->probabilities_of_drafts[which];
    double number = op->numbers[which] * (double)q[draft];
    struct kept kept = {.count = -1};
    enum verdict verdict = UNKNOWN;
    /* The end of a thread's scratch: the filters of a whole row use the other one. */
    float *p = (float *)scratch + (SCRATCH / sizeof(float) - parts(draw->width, LANES) * LANES);
    if (draw->filtered[which] && draw->top_k[which] > MAX_LARGEST) {
        /* Most drafts are accepted without the end of the prefix that the filters admit. */
        verdict = compare(draw, which, draft, number);
        if (verdict == BELOW) return draft;
        kept.whole = read_whole(draw, which, scratch);
        kept.last = last_of_whole(draw, which, kept.whole);
    } else if (draw->filtered[which]) {
        look_at_piece(draw, which);
        kept = filter_row(draw, which, scratch);
        if (kept.count >= 0) {
            double sum;
            float weight = weigh_token(&kept, draft, &sum);
            if (number < (double)(float)(weight / sum)) return draft;
            verdict = ABOVE;
        }
    }
    double total = weigh_some(draw, which, &kept, p);
    if (verdict == UNKNOWN && number < (double)(float)(p[draft] / total)) return draft;
    float largest = subtract(p, (float)(1 / total), q, draw->width);
    if (largest > 0) return draw_rest(p, draw->width, largest, noise_of_key(draw->row_keys[which]));
    /* Both are equal up to rounding. */
    if (!draw->filtered[which]) look_at_piece(draw, which);
    return token_of(draw, which, &kept);
}

static int64_t draw_row(const struct draw *op, int64_t which, char *scratch) {
    struct kept kept = {0};
    look_at_piece(op, which);
    if (op->filtered[which]) kept = filter_row(op, which, scratch);
    return token_of(op, which, &kept);
}

/* Tasks: sequences. */
void verify_drafts(const void *arguments, const struct step *step, struct worker *worker) {
    const struct verify_drafts *op = arguments;
    for (int64_t task; (task = take_task(worker)) < step->num_tokens;)
        for (int64_t which = op->firsts[task]; which < op->firsts[task + 1]; which++) {
            int64_t draft = op->drafts[which];
            if (draft < 0) op->by.tokens[which] = draw_row(&op->by, which, worker->scratch);
            else if ((op->by.tokens[which] = verify_row(op, which, worker->scratch)) != draft) break;
        }
}
