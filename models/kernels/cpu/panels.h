/* The product of staged rows and a panel of a packed weight, for each instruction set. Called by linear.c. */

#ifndef PANELS_H
#define PANELS_H

#include "kaon.h"

#define TILE (LANES * DEPTH) /* bfloat16 of a tile */
#define STEP (2 * TILE)      /* of a step of a panel */
#define GROUP (2 * LANES)    /* rows at a time */

/* What of a weight is fetched from memory while what came before it is multiplied. */
struct ahead {
    const char *at;
    int lines; /* with each step */
    int is_near;
};

struct panel_products {
    /* Sums [32][32] of up to 32 staged rows and `steps` steps of a panel: added to what is there unless `is_first`. */
    void (*multiply)(const bf16 *staged, int64_t count, int64_t all_steps, const bf16 *weight, int64_t steps,
                     int is_first, float *sums, struct ahead *ahead);
    /* Sums and a bias [32] to bfloat16, 32 outputs a row. */
    void (*round)(const float *sums, const float *bias, int64_t count, bf16 *out, int64_t out_stride);
};

const struct panel_products *panel_products(enum isa isa);

/* Before a thread's first product of an operator. */
void prepare_tiles(enum isa isa);

/* Shared with linear.c, which says what they are for. */
int64_t rows_to_stage(int64_t inputs);
void stage_rows(bf16 *staged, const bf16 *x, int64_t stride, int64_t count, int64_t in_features);
struct ahead look_ahead(const bf16 *panel, int64_t steps, int64_t groups);
int64_t panels_of_task(int64_t rows, int64_t steps, int64_t panels, int threads);

#endif
