/* The k largest values of each row in order, in one pass that copies nothing. */

#include "best.h"
#include "operators.h"

/* Keys whose unsigned order is the values' descending order: a NaN, unless its sign is set, is the largest value.
 * Adding 0 converts -0 to 0; the lower bits of a negative number are inverted, so that integers are ordered like the
 * numbers; then all bits except the sign are inverted, so that the largest value has the lowest key. */
INLINE bits keys_of(vector v) {
    integers b = (integers)(v + 0.0f);
    return (bits)(b ^ ((b >> 31) & 0x7fffffff) ^ 0x7fffffff);
}

CLONES static void offer_values(struct best *best, const float *values, int64_t first, int64_t past) {
    ALIGNED uint32_t keys[COMPARED];
    for (int64_t i = first; i < past; i += COMPARED) {
        for (int part = 0; part < COMPARED; part += LANES) {
            int64_t left = past - i - part;
            bits some = left > 0 ? keys_of(load_filled(values + i + part, left)) : ~(bits){0};
            memcpy(keys + part, &some, sizeof some);
        }
        offer_keys(best, keys, i, min64(COMPARED, past - i));
    }
}

/* Tasks: pieces of rows. Each finds its best values; the last one of a row compares them. */
void largest(const void *arguments, const struct step *step, struct worker *worker) {
    const struct largest *op = arguments;
    int64_t share = parts(parts(op->width, op->pieces), COMPARED) * COMPARED;
    for (int64_t task; (task = take_task(worker)) < step->num_tokens * op->pieces;) {
        int64_t row = task / op->pieces, piece = task % op->pieces;
        uint64_t *of_row = op->best + row * op->pieces * op->k;
        struct best best = {of_row + piece * op->k, 0, op->k, 0};
        offer_values(&best, op->values + row * op->stride, piece * share, min64(op->width, (piece + 1) * share));
        op->found[task] = best.count;
        if (!is_last_piece(op->ended + row, op->pieces)) continue;
        best = (struct best){of_row, op->found[row * op->pieces], op->k, 0};
        for (piece = 1; piece < op->pieces; piece++)
            for (int64_t i = 0; i < op->found[row * op->pieces + piece]; i++)
                offer_entry(&best, of_row[piece * op->k + i]);
        for (int64_t i = 0; i < op->k; i++) op->ids[row * op->k + i] = (int64_t)(uint32_t)best.entries[i];
    }
}
