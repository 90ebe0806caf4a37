/* The top k of a stream of values, in the order of every choice of tokens: descending, equal values by id.
 *
 * A key is lower for a larger value. An entry is a key followed by its id, so no two entries are equal. */

#ifndef BEST_H
#define BEST_H

#include <math.h>

#include "vectors.h"

#define COMPARED 64 /* values that are compared with the current k-th at once */

/* At most `most` entries, in order. Insertions are rare: fewer and fewer random values reach the top k. */
struct best {
    uint64_t *entries;
    int64_t count, most;
    uint32_t limit; /* keys from it on are not among the best; 0: not known */
};

/* The number of better entries, counted without branches, which would be unpredictable. */
static inline int64_t count_better(const struct best *best, uint64_t entry) {
    int64_t from = 0, size = best->count;
    for (int64_t half; size > 1; size -= half) {
        half = size / 2;
        from += half & -(int64_t)(best->entries[from + half - 1] < entry);
    }
    return from + (size == 1 && best->entries[from] < entry);
}

static inline void offer_entry(struct best *best, uint64_t entry) {
    int is_full = best->count == best->most;
    if (is_full && entry >= best->entries[best->most - 1]) return;
    int64_t at = count_better(best, entry), last = is_full ? best->most - 1 : best->count++;
    memmove(best->entries + at + 1, best->entries + at, (last - at) * sizeof(uint64_t));
    best->entries[at] = entry;
}

/* The first `count` of 16, the others minus infinity. */
INLINE vector load_filled(const float *from, int64_t count) {
    if (count >= LANES) return load(from);
    ALIGNED float padded[LANES];
    for (int i = 0; i < LANES; i++) padded[i] = i < count ? from[i] : -INFINITY;
    return load(padded);
}

INLINE bits lower_of(bits a, bits b) {
    bits is_lower = (bits)(a < b);
    return (a & is_lower) | (b & ~is_lower);
}

INLINE int any_below(bits v, uint32_t limit) {
    return any_bits((bits)(v < limit)) != 0;
}

INLINE bits load_keys(const uint32_t *keys) {
    bits v;
    memcpy(&v, keys, sizeof v);
    return v;
}

/* The keys of `count` ids from `first` on, which is after all previous ids, so that of equal keys the earlier is
 * better. COMPARED of them can be read; those after the last are no better than the others. */
INLINE void offer_keys(struct best *best, const uint32_t *keys, int64_t first, int64_t count) {
    int is_full = best->count == best->most;
    if (is_full || best->limit) {
        bits lowest = load_keys(keys);
        for (int i = LANES; i < COMPARED; i += LANES) lowest = lower_of(lowest, load_keys(keys + i));
        if (!any_below(lowest, is_full ? best->entries[best->most - 1] >> 32 : best->limit)) return;
    }
    for (int64_t i = 0; i < count; i += LANES) {
        is_full = best->count == best->most;
        if ((is_full || best->limit) &&
            !any_below(load_keys(keys + i), is_full ? best->entries[best->most - 1] >> 32 : best->limit))
            continue;
        for (int64_t lane = i; lane < min64(count, i + LANES); lane++)
            if (!best->limit || keys[lane] < best->limit)
                offer_entry(best, (uint64_t)keys[lane] << 32 | (uint64_t)(first + lane));
    }
}

/* Rows are divided into pieces, each a task, so that few rows occupy all threads. `ended` counts a row's completed
 * pieces. Returns whether this was the last, whose thread then sees the results of the others. */
static inline int is_last_piece(atomic_int *ended, int64_t pieces) {
    return atomic_fetch_add_explicit(ended, 1, memory_order_acq_rel) + 1 == pieces;
}

#endif
