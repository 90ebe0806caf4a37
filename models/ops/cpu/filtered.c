/* Samples a token from a whole row with filters, which may admit most of it, without sorting it.
 *
 * The end of a prefix of the order lies between two keys. Passes over the tokens between them compute the mass and
 * number of those up to a middle key, until the keys are adjacent. This works for any number of equal tokens, which may
 * be all. */

#include "draw.h"

#define OF_DOUBLES 8     /* lanes of a vector of weights */
#define GATHERED 64      /* tokens between the two keys are gathered where they are at most this part of all */
#define UNLIKELY 64.0f   /* no middle is at a greater value at first: a weight of e^-32 rarely matters */
#define HALVED_VALUES 12 /* passes whose middle is that of the values, which are not spread over all exponents */

/* The mass of some tokens, and their number. */
struct tally {
    double mass, number;
};

/* Keys and weights of some tokens; those after the last, up to a whole vector, have the least weight. */
struct tokens {
    uint32_t *keys;
    double *weights;
    int64_t count;
};

struct whole {
    struct tokens all, some; /* by id; and room for some of them */
    struct tally tally;
    uint32_t highest; /* key of the last token in order */
};

#define MOST_SOME (MAX_DRAWN / GATHERED + OF_DOUBLES)
_Static_assert(sizeof(struct whole) + (MAX_DRAWN + MOST_SOME) * (sizeof(uint32_t) + sizeof(double)) +
                       MAX_DRAWN * sizeof(float) <= SCRATCH,
               "a thread's scratch holds a row's keys and weights, and the weights that rejection.c writes");

/* A prefix of the order: tokens of better keys, and `rank` of those with `key`, by id. */
struct prefix {
    uint32_t key;
    int64_t rank;
    struct tally tally;
};

/* The shortest prefix that has the number of tokens, or the mass. */
struct goal {
    double amount;
    enum { TOKENS, ENOUGH_MASS } of;
};

static inline double amount_of(struct goal goal, struct tally by) { return goal.of == TOKENS ? by.number : by.mass; }

static inline int is_reached(struct goal goal, struct tally by) { return amount_of(goal, by) >= goal.amount; }

static double weight_of(uint32_t key) {
    uint32_t keys[8] = {key};
    return weights_of_eight(keys)[0];
}

static inline float value_of(uint32_t key) {
    float value;
    memcpy(&value, &key, sizeof value);
    return value;
}

typedef int32_t eight_integers __attribute__((vector_size(32)));

/* The mask with lanes of 64 bits instead of 32. */
INLINE words widened(eight_integers mask) {
#if __GNUC__ >= 12 || defined __clang__
    /* GCC converts halves of the vector, which takes four instructions in place of one. */
    return (words)__builtin_shufflevector(mask, mask, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
#else
    typedef int64_t eight_longs __attribute__((vector_size(64)));
    return (words)__builtin_convertvector(mask, eight_longs);
#endif
}

/* Tokens with a key of at most `most`. Keys are less than 2^31. */
CLONES static struct tally tally_up_to(const struct tokens *tokens, uint32_t most) {
    doubles even = {0}, odd = {0};
    eight_integers number = {0};
    int64_t i = 0;
    for (; i + 2 * OF_DOUBLES <= tokens->count; i += 2 * OF_DOUBLES) {
        eight_integers keys[2], is_some[2];
        words weights[2];
        memcpy(keys, tokens->keys + i, sizeof keys);
        memcpy(weights, tokens->weights + i, sizeof weights);
        for (int half = 0; half < 2; half++) {
            is_some[half] = keys[half] <= (int32_t)most;
            number -= is_some[half];
            weights[half] &= widened(is_some[half]);
        }
        even += (doubles)weights[0], odd += (doubles)weights[1];
    }
    struct tally tally = {sum_of_doubles(even + odd), 0};
    for (int lane = 0; lane < OF_DOUBLES; lane++) tally.number += number[lane];
    for (; i < tokens->count; i++)
        if (tokens->keys[i] <= most) tally.mass += tokens->weights[i], tally.number++;
    return tally;
}

/* Select the tokens with keys above `lowest` and up to `highest`; the result may overwrite the input. */
CLONES static void gather(const struct tokens *from, uint32_t lowest, uint32_t highest, struct tokens *to) {
    int64_t count = 0;
    for (int64_t first = 0; first < from->count; first += LANES) {
        int64_t past = min64(from->count, first + LANES);
        if (past == first + LANES && !any_below(load_keys(from->keys + first) - lowest - 1, highest - lowest)) continue;
        for (int64_t i = first; i < past; i++) {
            /* Without a branch, which would be unpredictable; the next token overwrites one that is not selected. */
            uint32_t key = from->keys[i];
            to->keys[count] = key, to->weights[count] = from->weights[i];
            count += key - lowest - 1 < highest - lowest;
        }
    }
    to->count = count;
}

static struct tally sum_of_tallies(struct tally a, struct tally b) {
    return (struct tally){a.mass + b.mass, a.number + b.number};
}

static struct prefix find(const struct whole *row, struct goal goal) {
    struct tally none = {0}, before = none, base = none, up_to = row->tally;
    /* The goal is reached up to `highest`, and not up to `lowest`. */
    uint32_t lowest = UINT32_MAX, highest = row->highest;
    struct tokens tokens = row->all;
    goal.amount = fmin(goal.amount, amount_of(goal, up_to));
    for (int pass = 0; highest != lowest + 1; pass++) {
        uint32_t middle = lowest + (highest - lowest) / 2;
        if (pass < HALVED_VALUES) {
            float high = value_of(highest), value;
            value = 0.5f * (high < UNLIKELY ? high : UNLIKELY) + (lowest + 1 ? 0.5f * value_of(lowest) : 0);
            uint32_t key;
            memcpy(&key, &value, sizeof key);
            if (key - lowest - 1 < highest - lowest - 1) middle = key;
        }
        struct tally some = sum_of_tallies(base, tally_up_to(&tokens, middle));
        if (is_reached(goal, some)) highest = middle, up_to = some;
        else lowest = middle, before = some;
        if ((up_to.number - before.number) * GATHERED > (double)tokens.count) continue;
        struct tokens fewer = row->some;
        gather(&tokens, lowest, highest, &fewer);
        tokens = fewer, base = before;
        /* A sum in another order may differ in its last bits; sums in one order grow with the key. */
        up_to = sum_of_tallies(base, tally_up_to(&tokens, highest));
        goal.amount = fmin(goal.amount, amount_of(goal, up_to));
    }
    double weight = weight_of(highest);
    int64_t least = 1, most = (int64_t)(up_to.number - before.number);
    while (least < most) {
        int64_t middle = (least + most) / 2;
        struct tally some = {before.mass + (double)middle * weight, before.number + (double)middle};
        if (is_reached(goal, some)) most = middle;
        else least = middle + 1;
    }
    return (struct prefix){highest, most, {before.mass + (double)most * weight, before.number + (double)most}};
}

CLONES static int64_t count_as_likely(const struct whole *row, double min_p) {
    uint32_t enough = 0, too_little = LEAST_LIKELY;
    while (too_little - enough > 1) {
        uint32_t middle = enough + (too_little - enough) / 2;
        if (weight_of(middle) >= min_p) enough = middle;
        else too_little = middle;
    }
    int64_t count = 0;
    for (int64_t i = 0; i < row->all.count; i++) count += row->all.keys[i] <= enough;
    return count;
}

static struct prefix apply_filters(const struct draw *op, int64_t which, const struct whole *row) {
    int64_t kept = op->top_k[which];
    struct prefix prefix = {0};
    if (op->top_p[which] < 1) {
        /* A fraction of the mass within top-k. */
        double whole = kept < op->width ? find(row, (struct goal){kept, TOKENS}).tally.mass : row->tally.mass;
        prefix = find(row, (struct goal){op->top_p[which] * whole, ENOUGH_MASS});
        kept = min64(kept, (int64_t)prefix.tally.number);
    }
    if (op->min_p[which] > 0) kept = min64(kept, count_as_likely(row, op->min_p[which]));
    return kept == (int64_t)prefix.tally.number ? prefix : find(row, (struct goal){kept, TOKENS});
}

CLONES const struct whole *read_whole(const struct draw *op, int64_t which, char *scratch) {
    int64_t padded = parts(op->width, WEIGHED) * WEIGHED, room = padded / GATHERED + OF_DOUBLES;
    struct whole *row = (struct whole *)scratch;
    double *weights = (double *)(row + 1), *of_some = weights + padded;
    uint32_t *keys = (uint32_t *)(of_some + room);
    const float *logits = op->logits + op->rows[which] * op->stride;
    bits highest = {0};
    *row = (struct whole){.all = {keys, weights, op->width}, .some = {keys + padded, of_some, 0}};
    for (int64_t i = 0; i < op->width; i += WEIGHED) {
        int64_t count = min64(WEIGHED, op->width - i);
        read_keys(logits + i, count, scaling_of(op, which), keys + i);
        for (int64_t j = i; j < i + WEIGHED; j += OF_DOUBLES) {
            doubles some = weights_of_eight(keys + j);
            memcpy(weights + j, &some, sizeof some);
        }
        for (int64_t j = i; count == WEIGHED && j < i + WEIGHED; j += LANES)
            highest = ~lower_of(~highest, ~load_keys(keys + j));
    }
    for (int lane = 0; lane < LANES; lane++) row->highest = highest[lane] > row->highest ? highest[lane] : row->highest;
    for (int64_t i = op->width / WEIGHED * WEIGHED; i < op->width; i++)
        row->highest = keys[i] > row->highest ? keys[i] : row->highest;
    row->tally = tally_up_to(&row->all, row->highest);
    return row;
}

/* The id of a prefix's last token, which has its key. */
CLONES static int64_t last_of_prefix(const struct whole *row, struct prefix kept) {
    int64_t first = 0, rank = 0, last;
    for (;; first += COMPARED) {
        bits equal = {0};
        uint32_t lanes[LANES], count = 0;
        for (int i = 0; i < COMPARED; i += LANES) equal -= (bits)(load_keys(row->all.keys + first + i) == kept.key);
        memcpy(lanes, &equal, sizeof lanes);
        for (int i = 0; i < LANES; i++) count += lanes[i];
        if (rank + count >= kept.rank) break;
        rank += count;
    }
    for (last = first - 1; rank < kept.rank; rank += row->all.keys[last] == kept.key) last++;
    return last;
}

uint64_t last_of_whole(const struct draw *op, int64_t which, const struct whole *row) {
    struct prefix kept = apply_filters(op, which, row);
    return (uint64_t)kept.key << 32 | (uint64_t)last_of_prefix(row, kept);
}

CLONES int64_t draw_from_whole(const struct draw *op, int64_t which, const struct whole *row, uint64_t last_entry) {
    struct noise noise = noise_of_key(op->row_keys[which]);
    uint32_t last_key = last_entry >> 32;
    int64_t last = (uint32_t)last_entry;
    struct winner best = NO_WINNER;
    float limit = limit_of(&best, 1);
    ALIGNED vector bounds[COMPARED / LANES];
    for (int64_t first = 0; first < row->all.count; first += COMPARED) {
        if (first > last && last_key == 0) break;
        const uint32_t *keys = row->all.keys + first;
        uint32_t most = first > last ? last_key - 1 : last_key;
        for (int i = 0; i < COMPARED / LANES; i++) {
            bits some = load_keys(keys + i * LANES);
            vector bound = bounds_of(-(vector)some, first + i * LANES, noise, 1);
            bounds[i] = choose((integers)(some <= most), bound, all(-INFINITY));
        }
        if (!any_above(bounds, COMPARED / LANES, limit)) continue;
        for (int64_t i = 0; i < COMPARED; i++) {
            if (!(bounds[i / LANES][i % LANES] > limit) || (keys[i] == last_key && first + i > last)) continue;
            offer_token(&best, -value_of(keys[i]), first + i, noise);
            limit = limit_of(&best, 1);
        }
    }
    return best.token;
}

CLONES double weigh_whole(const struct whole *row, uint64_t last_entry, float *weights) {
    int64_t past = (int64_t)(uint32_t)last_entry + 1, width = row->all.count;
    int32_t most = (int32_t)(last_entry >> 32);
    doubles sums = {0};
    double sum = 0;
    for (int64_t i = 0; i < width; i += OF_DOUBLES) {
        /* Of tokens with the last one's key, those up to its id pass. */
        eight_integers keys, ids = (int32_t)i + (eight_integers){0, 1, 2, 3, 4, 5, 6, 7};
        words some;
        memcpy(&keys, row->all.keys + i, sizeof keys);
        memcpy(&some, row->all.weights + i, sizeof some);
        some &= widened(keys - (ids >= (int32_t)past) <= most);
        if (i + OF_DOUBLES <= width) {
            sums += (doubles)some;
            eight kept = __builtin_convertvector((doubles)some, eight);
            memcpy(weights + i, &kept, sizeof kept);
        } else
            for (int64_t lane = 0; lane < width - i; lane++)
                weights[i + lane] = (float)((doubles)some)[lane], sum += ((doubles)some)[lane];
    }
    return sum + sum_of_doubles(sums);
}
