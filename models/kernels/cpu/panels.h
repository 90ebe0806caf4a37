/* The product of staged rows and a panel of a packed weight, for each instruction set. Called by linear.c. */

#ifndef PANELS_H
#define PANELS_H

#include "kaon.h"

/* Sums [rows, rounded up to 16][32] of `count` rows and `steps` steps of a panel, beginning with step `first` of
 * `all_steps`: added to what `sums` has unless `first` is 0. */
typedef void multiply_panel(const bf16 *staged, int64_t count, int64_t all_steps, const bf16 *weight, int64_t first,
                            int64_t steps, float *sums);

multiply_panel *panel_product(enum isa isa);

/* Before a thread's first product of an operator. */
void prepare_tiles(enum isa isa);

#endif
