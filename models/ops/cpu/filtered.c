/* Samples a token from a whole row with filters, which may admit most of it, without sorting it.
 *
 * To find the end of a prefix of the order, the masses and numbers of tokens whose keys have equal leading bits are
 * computed; then the bucket in which the prefix ends is divided by further bits, until the key is known. This works for
 * any number of equal tokens, which may be all. */

#include "draw.h"

#define BITS 10                      /* of a key, by which a later pass divides tokens */
#define FIRST_SHIFT (2 * BITS)       /* bits that the first pass leaves out */
#define BUCKETS (1 << (31 - FIRST_SHIFT)) /* of the first pass, which has the most */
#define COPIES 4 /* of a table: no sum waits for that of the previous token, which often has the same bucket */

/* The mass of some tokens, and their number. */
typedef double tally __attribute__((vector_size(16)));
enum { MASS, NUMBER };

_Static_assert(sizeof(tally) * COPIES * (BUCKETS + (1 << BITS)) + 2 * sizeof(uint32_t) * MAX_DRAWN <= SCRATCH,
               "a thread's scratch holds the tables, and a row's keys twice");

/* A row in a thread's scratch. */
struct row {
    tally *first_look, *closer_look;
    uint32_t *keys, *alike; /* of all tokens by id; and room for some of them */
    int64_t width;
};

/* A prefix of the order: tokens of better keys, and `rank` of those with `key`, by id. */
struct prefix {
    uint32_t key;
    int64_t rank;
    tally tally;
};

/* The shortest prefix that has the number of tokens, or the mass. */
struct goal {
    double amount;
    enum { TOKENS, ENOUGH_MASS } of;
};

static inline int is_reached(struct goal goal, tally by) {
    return by[goal.of == TOKENS ? NUMBER : MASS] >= goal.amount;
}

static double weight_of(uint32_t key) {
    uint32_t keys[8] = {key};
    return weights_of_eight(keys)[0];
}

/* Tallies by the bits from `shift` on, as many as distinguish `buckets`. The last keys are read as up to 8. */
CLONES static void tally_keys(const uint32_t *keys, int64_t count, int shift, int64_t buckets, tally *table) {
    memset(table, 0, COPIES * buckets * sizeof(tally));
    for (int64_t i = 0; i < count; i += 8) {
        doubles weights = weights_of_eight(keys + i);
        for (int64_t lane = 0; lane < min64(8, count - i); lane++) {
            int64_t bucket = keys[i + lane] >> shift & (buckets - 1);
            table[lane % COPIES * buckets + bucket] += (tally){weights[lane], 1};
        }
    }
    for (int64_t bucket = 0; bucket < buckets; bucket++)
        for (int copy = 1; copy < COPIES; copy++) table[bucket] += table[copy * buckets + bucket];
}

/* The bucket in which a prefix ends that contains the earlier buckets; the last non-empty one if none reaches the goal,
 * because of rounding. Adds the earlier buckets to `before`. */
static uint32_t bucket_of(struct goal goal, const tally *table, int64_t buckets, tally *before) {
    int part = goal.of == TOKENS ? NUMBER : MASS;
    tally sum = *before;
    uint32_t last = 0;
    for (int64_t bucket = 0; bucket < buckets; bucket++) {
        if (table[bucket][part] == 0) continue;
        last = bucket, *before = sum;
        if (is_reached(goal, sum += table[bucket])) break;
    }
    return last;
}

/* Select the keys whose bits from `shift` on are `bits`; the result may overwrite the input. */
CLONES static int64_t keep_alike(const uint32_t *keys, int64_t count, int shift, uint32_t bits, uint32_t *alike) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t key = keys[i];
        alike[kept] = key;
        kept += key >> shift == bits;
    }
    return kept;
}

static struct prefix find(const struct row *row, struct goal goal) {
    tally before = {0}, one;
    const uint32_t *keys = row->keys;
    const tally *table = row->first_look;
    int64_t count = row->width;
    uint32_t bucket = bucket_of(goal, table, BUCKETS, &before), key = bucket;
    for (int shift = FIRST_SHIFT; shift; shift -= BITS) {
        count = keep_alike(keys, count, shift, key, row->alike);
        keys = row->alike, table = row->closer_look;
        tally_keys(keys, count, shift - BITS, 1 << BITS, row->closer_look);
        bucket = bucket_of(goal, table, 1 << BITS, &before);
        key = key << BITS | bucket;
    }
    int64_t least = 1, most = (int64_t)table[bucket][NUMBER];
    one = (tally){weight_of(key), 1};
    while (least < most) {
        int64_t middle = (least + most) / 2;
        if (is_reached(goal, before + (double)middle * one)) most = middle;
        else least = middle + 1;
    }
    return (struct prefix){key, most, before + (double)most * one};
}

CLONES static int64_t count_as_likely(const struct row *row, double min_p) {
    uint32_t enough = 0, too_little = LEAST_LIKELY;
    while (too_little - enough > 1) {
        uint32_t middle = enough + (too_little - enough) / 2;
        if (weight_of(middle) >= min_p) enough = middle;
        else too_little = middle;
    }
    int64_t count = 0;
    for (int64_t i = 0; i < row->width; i++) count += row->keys[i] <= enough;
    return count;
}

static struct prefix apply_filters(const struct draw *op, int64_t which, double total, const struct row *row) {
    int64_t kept = op->top_k[which];
    struct prefix prefix = {0};
    if (op->top_p[which] < 1) {
        /* A fraction of the mass within top-k. */
        double whole = kept < op->width ? find(row, (struct goal){kept, TOKENS}).tally[MASS] : total;
        prefix = find(row, (struct goal){op->top_p[which] * whole, ENOUGH_MASS});
        kept = min64(kept, prefix.tally[NUMBER]);
    }
    if (op->min_p[which] > 0) kept = min64(kept, count_as_likely(row, op->min_p[which]));
    return kept == prefix.tally[NUMBER] ? prefix : find(row, (struct goal){kept, TOKENS});
}

CLONES static struct row read_row(const struct draw *op, int64_t which, char *scratch) {
    int64_t padded = parts(op->width, WEIGHED) * WEIGHED;
    struct row row = {.first_look = (tally *)scratch, .width = op->width};
    row.closer_look = row.first_look + COPIES * BUCKETS;
    row.keys = (uint32_t *)(row.closer_look + (COPIES << BITS)), row.alike = row.keys + padded;
    const float *logits = op->logits + op->rows[which] * op->stride;
    for (int64_t i = 0; i < op->width; i += WEIGHED)
        read_keys(logits + i, min64(WEIGHED, op->width - i), scaling_of(op, which), row.keys + i);
    tally_keys(row.keys, row.width, FIRST_SHIFT, BUCKETS, row.first_look);
    return row;
}

/* The prefix's last token, which has its key. */
CLONES static int64_t last_of_prefix(const struct row *row, struct prefix kept) {
    int64_t first = 0, rank = 0, last;
    for (;; first += COMPARED) {
        bits equal = {0};
        uint32_t lanes[LANES], count = 0;
        for (int i = 0; i < COMPARED; i += LANES) equal -= (bits)(load_keys(row->keys + first + i) == kept.key);
        memcpy(lanes, &equal, sizeof lanes);
        for (int i = 0; i < LANES; i++) count += lanes[i];
        if (rank + count >= kept.rank) break;
        rank += count;
    }
    for (last = first - 1; rank < kept.rank; rank += row->keys[last] == kept.key) last++;
    return last;
}

/* The token with the largest score in a prefix. */
CLONES static int64_t best_of_prefix(const struct row *row, struct prefix kept, struct noise noise) {
    int64_t last = last_of_prefix(row, kept);
    struct winner best = NO_WINNER;
    float limit = limit_of(&best, 1);
    ALIGNED vector bounds[COMPARED / LANES];
    for (int64_t first = 0; first < row->width; first += COMPARED) {
        if (first > last && kept.key == 0) break;
        uint32_t most = first > last ? kept.key - 1 : kept.key;
        for (int i = 0; i < COMPARED / LANES; i++) {
            bits keys = load_keys(row->keys + first + i * LANES);
            vector some = bounds_of(-(vector)keys, first + i * LANES, noise, 1);
            bounds[i] = choose((integers)(keys <= most), some, all(-INFINITY));
        }
        if (!any_above(bounds, COMPARED / LANES, limit)) continue;
        for (int64_t i = 0; i < COMPARED; i++) {
            if (!(bounds[i / LANES][i % LANES] > limit) || (row->keys[first + i] == kept.key && first + i > last)) continue;
            float gap;
            memcpy(&gap, row->keys + first + i, sizeof gap);
            offer_token(&best, -gap, first + i, noise);
            limit = limit_of(&best, 1);
        }
    }
    return best.token;
}

int64_t draw_from_whole(const struct draw *op, int64_t which, double total, char *scratch) {
    struct row row = read_row(op, which, scratch);
    struct prefix kept = apply_filters(op, which, total, &row);
    return best_of_prefix(&row, kept, noise_of_key(op->row_keys[which]));
}

uint64_t last_of_whole(const struct draw *op, int64_t which, double total, char *scratch) {
    struct row row = read_row(op, which, scratch);
    struct prefix kept = apply_filters(op, which, total, &row);
    return (uint64_t)kept.key << 32 | (uint64_t)last_of_prefix(&row, kept);
}
