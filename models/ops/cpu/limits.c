/* The limits of this machine, measured by plain loops: reading memory, and multiplying in registers by the instruction
 * that the instruction set uses for bfloat16. Products are compared with both. */

#include "operators.h"
#include "panels.h"
#include "vectors.h"

#define PIECE (1 << 20) /* bytes of a task */

CLONES static uint32_t read_piece(const char *piece, int64_t bytes) {
    bits sums[4] = {{0}};
    for (int64_t i = 0; i + 4 * LINE <= bytes; i += 4 * LINE)
        for (int line = 0; line < 4; line++) {
            bits v;
            memcpy(&v, piece + i + line * LINE, sizeof v);
            sums[line] ^= v;
        }
    bits all_sums = (sums[0] ^ sums[1]) ^ (sums[2] ^ sums[3]);
    uint32_t sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum ^= all_sums[lane];
    return sum;
}

/* Tasks: pieces of the memory. */
void read_limit(const void *arguments, const struct step *step, struct worker *worker) {
    (void)step;
    const struct read_limit *op = arguments;
    uint32_t sum = 0;
    for (int64_t task; (task = take_task(worker)) < parts(op->bytes, PIECE);)
        sum ^= read_piece(op->memory + task * PIECE, min64(PIECE, op->bytes - task * PIECE));
    op->sums[worker->thread] = sum; /* Otherwise the compiler could leave out the loop. */
}

/* Tasks: one for each thread, each with a number of rounds. */
void product_limit(const void *arguments, const struct step *step, struct worker *worker) {
    (void)step;
    const struct product_limit *op = arguments;
    const struct panel_products *products = panel_products(worker->isa);
    prepare_tiles(worker->isa);
    op->products[worker->thread] = 0;
    while (take_task(worker) < worker->threads)
        op->products[worker->thread] += products->spin(op->rounds, (float *)worker->scratch);
}
