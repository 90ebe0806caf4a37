/* The product of staged rows and a panel of a packed weight, for each instruction set. Called by linear.c. */

#ifndef PANELS_H
#define PANELS_H

#include "kaon.h"

#define TILE (LANES * DEPTH) /* bfloat16 of a tile */
#define STEP (2 * TILE)      /* of a step of a panel */
#define GROUP (2 * LANES)    /* rows at a time */

struct panel_products {
    /* Sums [32][32] of up to 32 staged rows and a panel of so many steps, which is fetched `ahead` bytes before. */
    void (*multiply)(const bf16 *staged, int64_t count, const bf16 *weight, int64_t steps, int64_t ahead, float *sums);
    /* Sums and a bias [32] to bfloat16, 32 outputs a row; past the caches where they are whole lines of a large output. */
    void (*round)(const float *sums, const float *bias, int64_t count, int is_large, bf16 *out, int64_t out_stride);
};

const struct panel_products *panel_products(enum isa isa);

/* After a thread's last `round` of an operator with a large output, before others read it. */
void settle_rounded(void);

/* Before a thread's first product of an operator. */
void prepare_tiles(enum isa isa);

/* Shared with linear.c, which says what they are for. */
int64_t rows_to_stage(int64_t inputs);
void stage_rows(bf16 *staged, const bf16 *x, int64_t stride, int64_t count, int64_t in_features);
int64_t look_ahead(int64_t rows);
int64_t panels_of_task(int64_t rows, int64_t steps, int64_t panels, int threads);

#endif
