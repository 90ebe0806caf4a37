/* The two products of attention and the softmax between them, for each instruction set. Called by attention.c.
 *
 * One or two tiles of 16 columns, each a head of a query, are multiplied by up to 256 keys at once: sixteen units of
 * 16, at the addresses of their blocks, in spans of 32. */

#ifndef ATTENTION_H
#define ATTENTION_H

#include "operators.h"

#define UNIT LANES /* keys that are adjacent */
#define UNITS 16   /* of a step */
#define KEYS (UNIT * UNITS)
#define SPAN DEPTH /* keys that one step of a product multiplies */
#define PAIR 2     /* tiles of columns */
#define MAX_VALUE_DIM 512 /* elements of a value; latents have more than heads */
#define SPLIT 1024        /* keys after which the softmax restarts */

/* Addresses of a step's keys or values; NULL: no query attends to these. */
struct units {
    const bf16 *at[UNITS];
};

/* A row's vector of that number. */
static inline const bf16 *vector_at(const struct paged *pages, const int32_t *blocks, int64_t number, int64_t dim) {
    int64_t block = ((number + 1) * pages->rate - 1) / pages->page_tokens;
    return pages->vectors + blocks[block] * pages->page_stride +
           (number - block * pages->page_tokens / pages->rate) * dim;
}

#define FEW_COLUMNS 4 /* of a KV head: as many as a decoded token has, or more */

#define AT_ONCE 4   /* lines */

/* The keys and values of a later step that are still to be prefetched. Computation issues a few prefetches at a time:
 * all at once would fill the processor's load buffers and stall it. They read a line of each of several units in turn,
 * so that the processor's own prefetcher, which continues within each page that it sees read in order, reads all these
 * pages at once. */
struct fetches {
    const char *at[2 * UNITS]; /* after the last, it is repeated up to a multiple of AT_ONCE */
    int first, unit, units;    /* first of the group taken in turn; unit of the next line; number of units */
    int64_t done, bytes;       /* prefetched of each unit of the group; size of a unit */
    int together;              /* units of a group */
    struct fetches *then;      /* of the step after that one, or NULL */
};

/* Prefetch `lines` more lines, or up to AT_ONCE - 1 more. */
static inline void fetch_lines(struct fetches *ahead, int lines) {
    while (lines > 0 && ahead) {
        if (ahead->first == ahead->units) {
            ahead = ahead->then;
            continue;
        }
        for (int i = 0; i < AT_ONCE; i++) __builtin_prefetch(ahead->at[ahead->unit + i] + ahead->done, 0, 2);
        int past = ahead->first + ahead->together < ahead->units ? ahead->first + ahead->together : ahead->units;
        int some = past - ahead->unit < AT_ONCE ? past - ahead->unit : AT_ONCE;
        ahead->unit += some, lines -= some;
        if (ahead->unit < past) continue;
        ahead->unit = ahead->first, ahead->done += LINE;
        if (ahead->done == ahead->bytes) ahead->done = 0, ahead->first = ahead->unit = past;
    }
}

/* Spans of a step. */
struct spans {
    int from, past;
};

/* The softmax state of 16 columns. */
struct seen {
    ALIGNED float most[LANES];  /* largest score, as a power of two */
    ALIGNED float total[LANES]; /* of the probabilities, relative to it */
    ALIGNED float sums[LANES * MAX_VALUE_DIM];
};

struct columns {
    int64_t count;
    ALIGNED int32_t last[LANES], first[LANES]; /* keys to which each attends; unused like column 0 */
    int64_t least, past;                       /* of all */
    int64_t always_from, always_past;          /* of each of them */
};

/* Products multiply 32 elements of a key at once, and 16 of a value. A head of another size, of 32 at least, ends with
 * parts that begin earlier, so that nothing after a vector is read: elements of a key that were multiplied before are
 * multiplied by zeros; for a value, their sums are computed twice, and stored in the next 16. */
static inline int64_t query_size(int64_t dim) { return parts(dim, DEPTH) * DEPTH; }
static inline int64_t value_size(int64_t dim) { return parts(dim, LANES) * LANES; }

/* Addresses of a step's values, by unit; NULL: no query attends to these. In a unit's pair of keys, 16 elements are
 * adjacent as [16][2]. Strides and offsets are in elements. */
struct values {
    const bf16 *tiles; /* where they were gathered as tiles [span][dim / 16][16 pairs][16][2], absent ones 0; or NULL */
    const bf16 *at[UNITS];
    int64_t pair_stride, block_stride; /* to the next pair of keys, and to the next 16 elements */
    int64_t last_block;                /* offset of the last 16 elements */
};

/* On processors that multiply pairs of bfloat16, queries are [query_size / 32][16 pairs][16 columns][2] of bfloat16,
 * and weights [span][16 columns][32 keys]. On others they are float32, [dim][16 columns] and [key][16 columns]. */

/* Convert queries [16 columns][dim], NULL after the last, to that layout. */
typedef void turn_queries(const bf16 *const columns[LANES], int64_t dim, void *queries);

/* scores[tile][key][column] = key . query. keys: unit [16][dim]; queries: [tile], 16 * query_size elements each. */
typedef void score_keys(const struct units *keys, struct spans spans, const void *queries,
                        const struct columns *columns, int tiles, int64_t dim, float scores[][KEYS][LANES],
                        struct fetches *ahead);

/* Convert a tile's scores, relative to the largest so far and with keys masked that a column does not attend to, to
 * weights; rescale the earlier results to the same maximum. */
typedef void weigh_keys(const struct attention *op, const struct columns *columns, int64_t first_key,
                        struct spans spans, float scores[KEYS][LANES], struct seen *seen, void *weights,
                        struct fetches *ahead);

/* sums[column][value_size] of each tile += the column's weights . values. weights: [tile]. */
typedef void add_values(const struct values *values, struct spans spans, const void *weights,
                        const struct columns *columns, int tiles, int64_t dim, struct seen *seen,
                        struct fetches *ahead);

struct attention_products {
    int64_t bytes;      /* of an element of queries and weights */
    int tiles_in_place; /* tiles of columns that may read values from the cache; for more, values are gathered */
    turn_queries *turn;
    score_keys *score;
    weigh_keys *weigh;
    add_values *add;
    int has_few; /* whether a tile of up to FEW_COLUMNS columns, without a soft cap, leaves its other lanes unchanged */
};

const struct attention_products *attention_products(enum isa isa);

/* The values that were gathered as tiles, of these units. */
struct values values_of_tiles(const bf16 *tiles, const struct units *units, int64_t dim);

/* The state of `count` columns before their first key. */
void begin(struct seen *seen, int64_t count, int64_t dim);

/* Merge the state of one split into that of the splits before it. */
void merge(struct seen *into, const struct seen *from, int64_t count, int64_t dim);

/* The first 16 of a row's `columns` from `first_column` on; a column is a head of a query. */
struct columns see(const struct attention *op, int64_t first_column, int64_t columns, int64_t context, int64_t group);

/* The spans of a step that contain a key to which a column attends. All others have weight 0. */
struct spans in_sight(int64_t first_key, int64_t least, int64_t past);

/* Add the head's sink to a column's values. */
void write_out(const struct attention *op, const struct seen *seen, int64_t column, int64_t head, bf16 *to);

#endif
