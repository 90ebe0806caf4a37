/* The product of staged rows and a panel of a packed weight, for each instruction set. Called by linear.c. */

#ifndef PANELS_H
#define PANELS_H

#include "operators.h"

#define TILE (LANES * DEPTH) /* bfloat16 of a tile */
#define STEP (2 * TILE)      /* of a step of a panel */
#define GROUP (2 * LANES)    /* rows at a time */

struct panel_products {
    /* Sums [32][32] of up to 32 staged rows and a panel of so many steps, which is fetched `ahead` bytes before. */
    void (*multiply)(const bf16 *staged, int64_t count, const bf16 *weight, int64_t steps, int64_t ahead, float *sums);
    /* Sums and a bias [32] to bfloat16, 32 outputs a row; whole lines of a large output past the caches. */
    void (*round)(const float *sums, const float *bias, int64_t count, int is_large, bf16 *out, int64_t out_stride);
};

const struct panel_products *panel_products(enum isa isa);

/* After a thread's last `round` of an operator with a large output, before others read it. */
void settle_rounded(void);

/* Before a thread's first product of an operator. */
void prepare_tiles(enum isa isa);

#define FEW_ROWS 64 /* up to here reading the weight is what takes a product's time */

/* Rows of so many inputs that are multiplied by a panel while they are near. */
int64_t rows_to_stage(int64_t inputs);

/* `count` rows for the products: by 16, as tiles [inputs / 32][16 rows][32], filled up with zeros. `tokens`: which rows
 * of x they are, or NULL. */
void stage_rows(bf16 *staged, const bf16 *x, int64_t stride, const int64_t *tokens, int64_t count,
                int64_t in_features);

/* Rows of one group, of those that have any. */
struct run {
    int64_t number, group, start, count;
};

/* Go on to the run of that number; 0 where there are fewer, with `start` past all rows. */
int find_run(const struct grouped_linear *op, struct run *run, int64_t number);

/* A run's product; its weight is `bytes` large. */
struct linear product_of_run(const struct grouped_linear *op, const struct run *run, int64_t bytes);

/* Rows from there on are in no run, and 0. */
void clear_past_runs(const struct grouped_linear *op, const struct step *step, struct worker *worker, int64_t from);

/* Bytes between what is read of a weight for so many rows and what is fetched. */
int64_t look_ahead(int64_t rows);

/* Panels, of so many bytes each, that a thread takes at once. */
int64_t panels_of_task(int64_t rows, int64_t bytes, int64_t panels, int threads);

#endif
