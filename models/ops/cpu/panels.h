/* The product of staged rows and a panel of a packed weight, for each instruction set. Called by linear.c. */

#ifndef PANELS_H
#define PANELS_H

#include "operators.h"

#define TILE (LANES * DEPTH) /* bfloat16 of a tile */
#define STEP (2 * TILE)      /* of a step of a panel */
#define GROUP (3 * LANES)    /* rows at a time */

#define STAGED_BYTES(pairs) ((pairs) ? (int64_t)sizeof(bf16) : (int64_t)sizeof(float)) /* of an input of a staged row */

/* A macro for each number up to 1, 4, 6 or 8: kernels have functions for so many rows. */
#define UP_TO_1(OF) OF(1)
#define UP_TO_4(OF) UP_TO_1(OF) OF(2) OF(3) OF(4)
#define UP_TO_6(OF) UP_TO_4(OF) OF(5) OF(6)
#define UP_TO_8(OF) UP_TO_6(OF) OF(7) OF(8)
#define PASTED(A, B) A##B
#define UP_TO(COUNT, OF) PASTED(UP_TO_, COUNT)(OF)

#define MANY_ROWS (8 * LANES) /* with more rows, three tiles are faster than two */

/* Number of rows to take of those left; of 64, not all but 16, which would take as long as 32. */
static inline int64_t rows_of_group(int64_t left, int64_t rows) {
    int is_two = left > GROUP && (rows <= MANY_ROWS || left <= 4 * LANES);
    return is_two ? 2 * LANES : min64(GROUP, left);
}

/* Other work, which a product does between its steps with execution units that it leaves idle: `do_rows` for some of the
 * rows from `first` to `past` at a time. And the weight that is multiplied next: each step fetches `lines` cache lines of it
 * into the L2 cache. */
struct side_work {
    void (*do_rows)(const void *what, int64_t first, int64_t past);
    const void *what;
    int64_t first, past;
    const char *soon;
    int64_t lines;
};

/* Parts of panels in the cache, as bfloat16, and the weight to prefetch while rows are multiplied by them: `stride`
 * bytes with each pair of inputs, of each panel. */
struct near_panels {
    const bf16 *first;
    int64_t apart, count, steps;
    const char *ahead;
    int64_t ahead_apart, stride;
};

struct panel_products {
    int64_t staged_bytes; /* of an input of a staged row: bfloat16, or float32 where the processor multiplies those */
    /* Sums [48][32] of up to 48 staged rows and a panel of `steps` steps, which is prefetched `ahead` bytes before. */
    void (*multiply)(const char *staged, int64_t count, const bf16 *weight, int64_t steps, int64_t ahead, float *sums);
    /* The same for a part of a panel that is in a cache, with rows that have `all` steps. The products are added to the
     * sums, or replace them with `is_first`; `side` is done between the steps. */
    void (*multiply_part)(const char *staged, int64_t count, int64_t all, const bf16 *weight, int64_t steps,
                          int is_first, float *sums, const struct side_work *side);
    /* Sums and a bias [32] to bfloat16, 32 outputs a row; whole lines of a large output past the caches. */
    void (*round)(const float *sums, const float *bias, int64_t count, int is_large, bf16 *out, int64_t out_stride);
    /* Store rows of 32 outputs that `round` has rounded; whole lines of a large output past the caches. */
    void (*put)(const bf16 *rows, int64_t count, int is_large, bf16 *out, int64_t out_stride);
    /* A plain loop of products in registers, for a number of rounds; returns its number of multiplications and
     * additions. `sums`: [1536], the sums of the loop. */
    int64_t (*spin)(int64_t rounds, float *sums);
    /* For few rows: multiply by as many of the `panels`, which are read from memory, as are read fastest together: sums
     * [panel][count][32], after which it may write up to 16 rows of the last panel. Returns the number of these panels,
     * 0 if it computed none: more rows than it supports, or fewer panels. */
    int64_t (*multiply_side)(const char *staged, int64_t count, const bf16 *weight, int64_t panels, int64_t steps,
                             float *sums);
    /* Of AMX, whose products by codes are those of a bfloat16 weight, see codes.h; NULL elsewhere: */
    /* As `multiply` for parts of panels, added to the sums [panel][count][32]; rows have `all` steps. Sums in parts equal
     * those of the whole, bit for bit. */
    void (*add)(const char *staged, int64_t count, int64_t all, const struct near_panels *near, float *sums);
    /* Up to 16 rows, as columns [steps][16 pairs][count][2], times one or two panels, of which a step has 32 rows of 32
     * inputs: added to sums [panel][32][16], the same as those of `add`. It prefetches nothing. */
    void (*add_columns)(const bf16 *columns, int64_t count, const struct near_panels *near, float *sums);
    /* Number of panels by which `add` multiplies a number of rows at once. */
    int64_t (*side_panels)(int64_t count);
};

const struct panel_products *panel_products(enum isa isa);

/* Write sums [count][32] of a panel that begins with `output`, with its bias, to the output. `is_large`: whether the
 * output is too large to be read again from a cache. */
void finish_panel(const struct linear *op, const struct panel_products *products, const float *sums, int64_t row,
                  int64_t count, int64_t output, int is_large);

/* After a thread's last `put`, or `round` of an operator with a large output, before others read it. */
void settle_rounded(void);

/* Before a thread's first product of an operator, of any rows. */
void prepare_tiles(enum isa isa);

/* Called before products of a number of rows at once: of less than a tile no more are multiplied, read and written. */
void prepare_rows(enum isa isa, int64_t rows);

/* Called before `add_columns`. */
void prepare_columns(enum isa isa, int64_t count);

#define COLUMN_PANELS 2 /* at most */
#define SIDE_ROWS 4

/* The product of up to 48 staged rows and the first of `panels` panels, or several if rows are few. Returns their
 * number; their sums are [panel][count][32]. */
int64_t multiply_first(const struct panel_products *products, const char *staged, int64_t count, const bf16 *weight,
                       int64_t panels, int64_t steps, int64_t ahead, float *sums);

#define FEW_ROWS 64 /* up to this number of rows, reading the weight takes a product's time */

#define STAGED_ROWS 512 /* at most, that are multiplied by a panel while they are cached */

/* How many rows of `inputs` inputs are staged at once. */
int64_t rows_to_stage(int64_t inputs);

/* A thread's rows in the layout of the products: by 16, as tiles [inputs / 32][16 rows][32], padded with zeros. */
struct staged {
    char *rows;
    int64_t first; /* of them, -1 for none */
    int64_t bytes; /* of an input */
};

/* Stage the `count` rows from `first` on unless they are staged. `tokens`: their rows of x, or NULL. */
void stage(struct staged *staged, const bf16 *x, int64_t stride, const int64_t *tokens, int64_t first, int64_t count,
           int64_t in_features);

/* Staged rows, which are all multiplied by one part of a weight while it is in a cache, and the use of their sums. */
struct many {
    const struct linear *op;
    const struct activation *by; /* by which the first half of the outputs gates the second, or NULL */
    enum isa isa;                /* of the gates */
    const struct panel_products *products;
    const struct staged *staged;
    int64_t first, count; /* the first row and how many */
    float *sums;          /* `bytes_of_waiting` */
    int is_large;         /* whether the output is too large to be read again from a cache */
};

/* Multiply by the panels from `first` to `past`; of a gated product, by these panels of gates and those they gate. */
void multiply_many(const struct many *many, int64_t first, int64_t past);
int64_t bytes_of_waiting(void);

#define BLOCK_ROWS 384         /* the most rows that a thread multiplies at once */
#define STAGED_BLOCK (3 << 20) /* the most bytes of these rows as bfloat16 */

/* How many rows of `inputs` inputs a thread multiplies at once. */
int64_t rows_of_block(int64_t inputs);

/* Rows of one group, among those that have any. */
struct run {
    int64_t number, group, start, count;
};

/* Move to the run with that number; returns 0 if there are fewer, with `start` after all rows. */
int find_run(const struct grouped_linear *op, const struct step *step, struct run *run, int64_t number);

/* A run's product; its weight is `bytes` large. */
struct linear product_of_run(const struct grouped_linear *op, const struct run *run, int64_t bytes);

/* Rows from there on are in no run, and become 0. */
void clear_past_runs(const struct grouped_linear *op, const struct step *step, struct worker *worker, int64_t from);

/* Bytes between the read and the prefetched addresses of a weight, for a number of rows. */
int64_t look_ahead(int64_t rows);

/* Whether this processor reads memory fastest when a thread reads one panel of a weight after the other: AMD's. Others
 * read several panels together. */
int reads_one_stream(void);

/* Whether such a processor reads a weight fastest when it is prefetched far ahead into the L1 cache, for any number of
 * rows: from Zen 5 on. */
int fetches_far(void);

/* Panels, of so many bytes each, that a thread takes at once. */
int64_t panels_of_task(int64_t rows, int64_t bytes, int64_t panels, int threads);

/* How a product is divided among threads: blocks of rows, and for the last ones, a block per thread, shares of the
 * panels. */
struct cut {
    int64_t rows, panels, block, whole, share, shares, tasks;
};

/* `block`: the most rows that a thread multiplies at once; `bytes` of a panel. */
struct cut cut_product(int64_t rows, int64_t block, int64_t bytes, int64_t panels, int threads);

/* That of a dense weight. */
struct cut cut_dense(int64_t rows, int64_t in_features, int64_t panels, int threads);

/* A thread's next part: `count` rows from `first` on by the panels from `panel` to `past`. 0: there are no more. */
struct share {
    int64_t first, count, panel, past;
};
int take_share(const struct cut *cut, struct worker *worker, struct share *share);

#endif
