/* Samples tokens from their logits by the largest score: one pass over each row, and for some rows another of
 * filtered.c. `draw` gets the parameters of rows from its caller, `sample_tokens` by the slots of sequences. */

#include "draw.h"

/* The sum of WEIGHED tokens' weights, in a fixed order. */
INLINE double mass_of(const uint32_t *keys) {
    doubles even = {0}, odd = {0};
    for (int i = 0; i < WEIGHED; i += 2 * 8) even += weights_of_eight(keys + i), odd += weights_of_eight(keys + i + 8);
    return sum_of_doubles(even + odd);
}

/* The masses of a piece's blocks if `masses` is set, and its top tokens. */
CLONES static void read_piece(const struct draw *op, int64_t which, int64_t first, int64_t past, double *masses,
                              struct best *best) {
    const float *logits = op->logits + op->rows[which] * op->stride;
    struct scaling by = scaling_of(op, which);
    ALIGNED uint32_t keys[WEIGHED];
    for (int64_t block = first; block < past; block += WEIGHED) {
        int64_t count = min64(WEIGHED, past - block);
        read_keys(logits + block, count, by, keys);
        if (masses) masses[block / WEIGHED] = mass_of(keys);
        for (int64_t i = 0; i < count; i += COMPARED)
            offer_keys(best, keys + i, block + i, min64(COMPARED, count - i));
    }
}

#define MOST_BOUNDED 48   /* tokens up to which the maxima of COMPARED groups bound the last of the best well */
#define LEAST_BOUNDED 1024 /* values of a piece from which the pass for it pays */
#define HALVINGS 12

/* The key after those of a piece's best `most` tokens, from a bound: in groups of which at least so many have a maximum of
 * a value or more, so many tokens do. 0 where none is computed. */
CLONES static uint32_t bound_best(const float *logits, int64_t count, int64_t most, struct scaling by) {
    vector maxima[COMPARED / LANES], least, greatest;
    if (most > MOST_BOUNDED || count < LEAST_BOUNDED) return 0;
    for (int i = 0; i < COMPARED / LANES; i++) maxima[i] = load(logits + i * LANES);
    for (int64_t first = COMPARED; first + COMPARED <= count; first += COMPARED)
        for (int i = 0; i < COMPARED / LANES; i++) maxima[i] = larger(load(logits + first + i * LANES), maxima[i]);
    least = greatest = maxima[0];
    for (int i = 1; i < COMPARED / LANES; i++)
        least = choose(maxima[i] < least, maxima[i], least), greatest = larger(maxima[i], greatest);
    float low = least[0], high = greatest[0];
    for (int lane = 1; lane < LANES; lane++) low = fminf(low, least[lane]), high = fmaxf(high, greatest[lane]);
    for (int pass = 0; pass < HALVINGS; pass++) {
        float middle = 0.5f * low + 0.5f * high;
        integers reached = {0};
        int32_t number = 0;
        for (int i = 0; i < COMPARED / LANES; i++) reached -= maxima[i] >= middle;
        for (int lane = 0; lane < LANES; lane++) number += reached[lane];
        if (number >= most) low = middle;
        else high = middle;
    }
    return keys_of_scaled(scaled_of(all(low), by))[0] + 1;
}

/* The token with the largest score of a piece of a row without filters. */
CLONES static struct winner best_of_piece(const struct draw *op, int64_t which, int64_t first, int64_t past) {
    const float *logits = op->logits + op->rows[which] * op->stride;
    struct scaling by = scaling_of(op, which);
    struct noise noise = noise_of_key(op->row_keys[which]);
    struct winner best = NO_WINNER;
    float limit = limit_of(&best, by.temperature), padded[COMPARED];
    ALIGNED vector bounds[COMPARED / LANES];
    for (int64_t block = first; block < past; block += COMPARED) {
        const float *values = logits + block;
        int64_t count = min64(COMPARED, past - block);
        if (count < COMPARED) {
            for (int64_t i = 0; i < COMPARED; i++) padded[i] = i < count ? values[i] : -INFINITY;
            values = padded;
        }
        for (int i = 0; i < COMPARED / LANES; i++)
            bounds[i] = bounds_of(load(values + i * LANES) - by.peak, block + i * LANES, noise, by.temperature);
        if (!any_above(bounds, COMPARED / LANES, limit)) continue;
        for (int64_t i = 0; i < count; i++) {
            if (!(bounds[i / LANES][i % LANES] > limit)) continue;
            offer_token(&best, (values[i] - by.peak) / by.temperature, block + i, noise);
            limit = limit_of(&best, by.temperature);
        }
    }
    return best;
}

CLONES static void weigh_entries(const struct best *best, double *weights) {
    for (int64_t i = 0; i < best->count; i += 8) {
        uint32_t keys[8];
        for (int lane = 0; lane < 8; lane++) keys[lane] = best->entries[min64(i + lane, best->count - 1)] >> 32;
        doubles some = weights_of_eight(keys);
        memcpy(weights + i, &some, min64(8, best->count - i) * sizeof(double));
    }
}

/* How many of the top tokens, which are in order, pass the filters; -1 if these do not determine it. `total` is the sum
 * of the row's weights, of which top-p is a fraction if there is no top-k. */
static int64_t count_kept(const struct draw *op, int64_t which, const struct best *best, double total) {
    int64_t top_k = op->top_k[which], count = best->count, kept = min64(top_k, count), likely = 0;
    double weights[MAX_LARGEST], sum = 0;
    if (op->top_p[which] < 1 || op->min_p[which] > 0) weigh_entries(best, weights);
    if (op->top_p[which] < 1) {
        for (int64_t i = 0; i < kept; i++) sum += weights[i];
        double needed = op->top_p[which] * (kept == top_k ? sum : total);
        int64_t enough = 0;
        for (sum = 0; enough < kept && sum < needed; enough++) sum += weights[enough];
        kept = max64(1, enough);
    }
    if (op->min_p[which] > 0) {
        while (likely < kept && weights[likely] >= op->min_p[which]) likely++;
        kept = likely;
    }
    return top_k > count && (top_k < op->width || kept == count) ? -1 : kept;
}

static int64_t draw_from_best(const struct draw *op, int64_t which, const struct best *best, int64_t kept) {
    struct noise noise = noise_of_key(op->row_keys[which]);
    struct winner winner = NO_WINNER;
    for (int64_t i = 0; i < kept; i++) {
        uint32_t key = best->entries[i] >> 32;
        float scaled;
        memcpy(&scaled, &key, sizeof scaled);
        if (winner.score - MAX_NOISE > -scaled) break; /* and so are all after it */
        offer_token(&winner, -scaled, (int64_t)(uint32_t)best->entries[i], noise);
    }
    return winner.token;
}

/* Memory of the masses of a row's blocks, if top-p needs them: with top-k, the total does not matter. */
static double *masses_of(const struct draw *op, int64_t which) {
    int is_weighed = op->filtered[which] && op->top_p[which] < 1 && op->top_k[which] == op->width;
    return is_weighed ? op->masses + which * parts(op->width, WEIGHED) : NULL;
}

static struct kept keep_of_whole(const struct draw *op, int64_t which, char *scratch) {
    const struct whole *row = read_whole(op, which, scratch);
    return (struct kept){.count = -1, .whole = row, .last = last_of_whole(op, which, row)};
}

struct kept filter_row(const struct draw *op, int64_t which, char *scratch) {
    if (is_read_whole(op, which)) return keep_of_whole(op, which, scratch);
    uint64_t *of_row = op->best + which * op->pieces * op->most;
    const int64_t *found = op->found + which * op->pieces;
    const double *masses = masses_of(op, which);
    struct kept kept = {.best = {of_row, found[0], looked_at(op->top_k[which])}};
    for (int64_t piece = 1; piece < op->pieces; piece++)
        for (int64_t i = 0; i < found[piece]; i++) offer_entry(&kept.best, of_row[piece * op->most + i]);
    double total = 0;
    for (int64_t block = 0; masses && block < parts(op->width, WEIGHED); block++) total += masses[block];
    kept.count = count_kept(op, which, &kept.best, total);
    return kept.count < 0 ? keep_of_whole(op, which, scratch) : kept;
}

static int64_t draw_unfiltered(const struct draw *op, int64_t which) {
    struct winner best = NO_WINNER;
    for (int64_t piece = 0; piece < op->pieces; piece++) {
        int64_t at = which * op->pieces + piece;
        if (op->scores[at] > best.score) best = (struct winner){op->scores[at], op->found[at]};
    }
    return best.token;
}

void look_at_piece(const struct draw *op, int64_t task) {
    int64_t which = task / op->pieces, share = parts(parts(op->width, WEIGHED), op->pieces) * WEIGHED;
    int64_t first = task % op->pieces * share, past = min64(op->width, first + share);
    if (is_read_whole(op, which)) return;
    if (op->filtered[which]) {
        struct best best = {op->best + task * op->most, 0, looked_at(op->top_k[which]), 0};
        const float *logits = op->logits + op->rows[which] * op->stride;
        best.limit = bound_best(logits + first, past - first, best.most, scaling_of(op, which));
        read_piece(op, which, first, past, masses_of(op, which), &best);
        op->found[task] = best.count;
    } else {
        struct winner best = best_of_piece(op, which, first, past);
        op->scores[task] = best.score, op->found[task] = best.token;
    }
}

int64_t token_of(const struct draw *op, int64_t which, const struct kept *kept) {
    if (!op->filtered[which]) return draw_unfiltered(op, which);
    if (kept->count < 0) return draw_from_whole(op, which, kept->whole, kept->last);
    return draw_from_best(op, which, &kept->best, kept->count);
}

/* e to the x for x of at most 0, within 3e-7 of it; 0 below -87. The multiple of ln 2 is subtracted in two parts, of which
 * the first product is exact. */
INLINE vector exp_below_0(vector x) {
    integers is_tiny = x < -87.0f;
    vector inside = choose(is_tiny, all(-87.0f), x), shifted = inside * LOG2_E + 12582912.0f, n = shifted - 12582912.0f;
    vector r = inside - n * 0.693359375f + n * 2.12194440e-4f;
    vector p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return (vector)(((integers)p + ((integers)shifted << 23)) & ~is_tiny);
}

/* Weights of all tokens, and their sum. */
CLONES static double weigh_all(const struct draw *op, int64_t which, float *weights) {
    const float *logits = op->logits + op->rows[which] * op->stride;
    struct scaling by = scaling_of(op, which);
    double sum = 0;
    for (int64_t block = 0; block < op->width; block += WEIGHED) {
        int64_t past = min64(op->width, block + WEIGHED);
        vector some = {0};
        for (int64_t i = block; i < past; i += LANES) {
            vector weight = exp_below_0(scaled_of(load_filled(logits + i, past - i), by));
            some += weight;
            if (past - i >= LANES) store(weights + i, weight);
            else memcpy(weights + i, &weight, (past - i) * sizeof(float));
        }
        sum += sum_of(some);
    }
    return sum;
}

double weigh_some(const struct draw *op, int64_t which, const struct kept *kept, float *weights) {
    if (!op->filtered[which]) return weigh_all(op, which, weights);
    if (kept->count < 0) return weigh_whole(kept->whole, kept->last, weights);
    double some[MAX_LARGEST], sum = 0;
    weigh_entries(&kept->best, some);
    memset(weights, 0, op->width * sizeof(float));
    for (int64_t i = 0; i < kept->count; i++) weights[(uint32_t)kept->best.entries[i]] = (float)some[i], sum += some[i];
    return sum;
}

float weigh_token(const struct kept *kept, int64_t token, double *sum) {
    double some[MAX_LARGEST];
    float weight = 0;
    weigh_entries(&kept->best, some);
    *sum = 0;
    for (int64_t i = 0; i < kept->count; i++) {
        if ((uint32_t)kept->best.entries[i] == token) weight = (float)some[i];
        *sum += some[i];
    }
    return weight;
}

#define UNCERTAIN 1e-5 /* relative error of sums of float32, and more */

/* Adds the weights of up to WEIGHED tokens, and of those of them before one token in order. */
INLINE void add_weights(const float *logits, int64_t count, struct scaling by, integers key, int32_t after,
                        double *total, double *before) {
    vector some = {0}, better = {0};
    for (int64_t i = 0; i < count; i += LANES) {
        integers ids = (int32_t)i + (integers){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        vector scaled = scaled_of(load_filled(logits + i, count - i), by), weight = exp_below_0(scaled);
        integers keys = (integers)keys_of_scaled(scaled);
        /* Of equal tokens, those with lower ids are before it. */
        some += weight, better += choose(keys - (ids >= after) <= key, weight, all(0));
    }
    *total += sum_of(some), *before += sum_of(better);
}

CLONES enum verdict compare(const struct draw *op, int64_t which, int64_t token, double number) {
    if (op->top_k[which] < op->width || op->min_p[which] > 0) return UNKNOWN;
    const float *logits = op->logits + op->rows[which] * op->stride;
    struct scaling by = scaling_of(op, which);
    integers key = (integers)keys_of_scaled(scaled_of(all(logits[token]), by));
    double total = 0, before = 0;
    int64_t past = op->width / WEIGHED * WEIGHED;
    for (int64_t i = 0; i < past; i += WEIGHED)
        add_weights(logits + i, WEIGHED, by, key, (int32_t)(token - i), &total, &before);
    add_weights(logits + past, op->width - past, by, key, (int32_t)(token - past), &total, &before);
    /* The mass of the prefix is what top-p needs, and at most the weight of its last token more, which is no more than
     * this token's. */
    double weight = exp_below_0(scaled_of(all(logits[token]), by))[0], needed = op->top_p[which] * total;
    if (before >= needed * (1 + UNCERTAIN)) return ABOVE;
    if (before >= needed * (1 - UNCERTAIN)) return UNKNOWN;
    if (number < weight / (needed + weight) * (1 - UNCERTAIN)) return BELOW;
    return number > weight / needed * (1 + UNCERTAIN) ? ABOVE : UNKNOWN;
}

CLONES static void scale_row(float *row, int64_t count, float factor) {
    for (int64_t i = 0; i < count; i++) row[i] *= factor;
}

/* Tasks: pieces of rows. The last one of a row samples. */
void draw(const void *arguments, const struct step *step, struct worker *worker) {
    const struct draw *op = arguments;
    for (int64_t task; (task = take_task(worker)) < step->num_tokens * op->pieces;) {
        int64_t which = task / op->pieces;
        struct kept kept = {0};
        look_at_piece(op, task);
        if (!is_last_piece(op->ended + which, op->pieces)) continue;
        if (op->filtered[which]) kept = filter_row(op, which, worker->scratch);
        op->tokens[which] = token_of(op, which, &kept);
        if (!op->probabilities) continue;
        float *row = op->probabilities + which * op->width;
        scale_row(row, op->width, (float)(1 / weigh_some(op, which, &kept, row)));
    }
}

/* The first of the largest logits, and a NaN before any number. */
CLONES static float find_peak(const float *logits, int64_t width, int64_t *token) {
    vector most = all(-INFINITY), sums = all(0);
    float peak = -INFINITY;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        vector some = load(logits + i);
        most = choose((integers)(some > most), some, most);
        sums += some - some; /* a NaN where one is, or an infinity */
    }
    int is_plain = 1;
    for (int lane = 0; lane < LANES; lane++) peak = most[lane] > peak ? most[lane] : peak, is_plain &= sums[lane] == 0;
    for (; i < width; i++) peak = logits[i] > peak ? logits[i] : peak, is_plain &= logits[i] == logits[i];
    if (!is_plain)
        for (i = 0; i < width; i++)
            if (logits[i] != logits[i]) return *token = i, logits[i];
    for (i = 0; i < width && logits[i] != peak;) i++;
    *token = i < width ? i : 0;
    return peak;
}

/* Returns whether a token has occurred, and marks it. */
static int is_met(uint64_t *met, int64_t token) {
    uint64_t bit = (uint64_t)1 << token % 64, before = met[token / 64] & bit;
    met[token / 64] |= bit;
    return before != 0;
}

/* Penalties of the tokens before a position, as in engine.sampling.torch_ops. A bitmap of the vocabulary marks tokens
 * that have occurred: the first two penalties count each once. */
static void penalise(const struct sampling *by, int64_t slot, int64_t position, float *logits, int64_t width,
                     uint64_t *met) {
    const int32_t *known = by->known + slot * by->known_stride;
    float repetition = by->repetition[slot], presence = by->presence[slot], frequency = by->frequency[slot];
    int64_t words = parts(width, 64), prompt = by->num_prompt_tokens[slot];
    if (repetition != 1) {
        memset(met, 0, words * sizeof *met);
        for (int64_t i = 0; i < position; i++) {
            int64_t token = known[i];
            if (is_met(met, token)) continue;
            logits[token] = logits[token] > 0 ? logits[token] / repetition : logits[token] * repetition;
        }
    }
    if (presence != 0) {
        memset(met, 0, words * sizeof *met);
        for (int64_t i = prompt; i < position; i++)
            if (!is_met(met, known[i])) logits[known[i]] -= presence;
    }
    if (frequency != 0)
        for (int64_t i = prompt; i < position; i++) logits[known[i]] -= frequency;
}

/* A token of a row whose largest logit is finite. */
static int64_t sample_row(const float *logits, int64_t width, float peak, const struct sampling *by, int64_t slot,
                          int64_t position, char *scratch) {
    int64_t top_k = by->top_k[slot], only = 0, found;
    double masses[MAX_DRAWN / WEIGHED + 1], score;
    uint64_t best[MAX_LARGEST], key = key_of_row(by->keys[slot], position);
    if (top_k < 1 || top_k > width) top_k = width;
    char filtered = top_k < width || by->top_p[slot] < 1 || by->min_p[slot] > 0;
    struct draw op = {
        .logits = logits, .stride = width, .width = width, .pieces = 1, .peaks = &peak, .rows = &only,
        .temperature = by->temperature + slot, .top_k = &top_k, .top_p = by->top_p + slot, .min_p = by->min_p + slot,
        .row_keys = &key, .filtered = &filtered, .masses = masses, .best = best, .scores = &score, .found = &found,
        .most = MAX_LARGEST,
    };
    struct kept kept = {0};
    look_at_piece(&op, 0);
    if (filtered) kept = filter_row(&op, 0, scratch);
    return token_of(&op, 0, &kept);
}

/* Tasks: rows. */
void sample_tokens(const void *arguments, const struct step *step, struct worker *worker) {
    const struct sample_tokens *op = arguments;
    const struct sampling *by = op->by;
    for (int64_t row; (row = take_task(worker)) < step->num_tokens;) {
        int64_t slot = op->slots[row], position = (int32_t)step->positions[row] + op->ahead;
        float *logits = op->logits + row * op->width;
        if (by->repetition[slot] != 1 || by->presence[slot] != 0 || by->frequency[slot] != 0)
            penalise(by, slot, position, logits, op->width, (uint64_t *)worker->scratch);
        float peak = op->peaks[row] = find_peak(logits, op->width, op->tokens + row);
        if (isfinite(peak) && by->temperature[slot] > 0)
            op->tokens[row] = sample_row(logits, op->width, peak, by, slot, position, worker->scratch);
    }
}
