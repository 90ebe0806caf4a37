/* Weights as quantised checkpoints store them: codes, scales and zero points.
 *
 * A packed weight is made of panels of 32 outputs; a panel of groups of inputs, a multiple of 32 of them, of which the
 * last may be shorter; a group of its 32 scales, with integers 32 zero points of 8 bits, and its steps of 32 inputs.
 * A step holds its codes in the order of a bfloat16 step, see linear.c, a tile as 16 lines of 32 elements
 * [16 outputs][2]:
 *
 *   8 bits  a byte an element
 *   4 bits  four lines together in 32 words of 16 bits; word e has element e of each line, of the first in its lowest
 *           bits. Shifts of whole words give vectors of elements.
 *
 * Every code is a number that bfloat16 holds. With vectors, rows are multiplied by those numbers, and the sums of each
 * group by its scales: few operations for a code, and a sum that is rounded less often than with a bfloat16 weight. The
 * sums of AMX lie in its tiles, where no scale reaches them, so there a code becomes the bfloat16 nearest to what it
 * means, and products are bit for bit those of the dequantised weight. */

#ifndef CODES_H
#define CODES_H

#include "operators.h"
#include "panels.h"

/* What a code means, before its zero point is subtracted and its scale multiplies it. */
enum { INT4, FP4, INT8, FP8 };
/* How scales are stored; E8M0: a power of two by its exponent. */
enum { SCALES_FLOAT32, SCALES_BFLOAT16, SCALES_FLOAT16, SCALES_E8M0 };

static inline int64_t bytes_of_scale(int64_t scales) {
    return scales == SCALES_FLOAT32 ? 4 : scales == SCALES_E8M0 ? 1 : 2;
}

static inline int has_zeros(int64_t kind) { return kind == INT4 || kind == INT8; }

static inline int64_t bytes_of_codes(int64_t kind) { return kind < INT8 ? STEP / 2 : STEP; } /* of a step */

static inline int64_t bytes_of_header(const struct codes *codes) {
    return PANEL * (bytes_of_scale(codes->scales) + has_zeros(codes->code_kind));
}

static inline int64_t bytes_of_group(const struct codes *codes) {
    return bytes_of_header(codes) + codes->group / DEPTH * bytes_of_codes(codes->code_kind);
}

static inline int64_t bytes_of_panel(const struct codes *codes, int64_t inputs) {
    return parts(inputs, codes->group) * bytes_of_header(codes) + parts(inputs, DEPTH) * bytes_of_codes(codes->code_kind);
}

/* Some steps of one group of panels that lie `apart`, and what is fetched meanwhile. */
struct row_of_codes {
    const char *codes;
    int64_t apart, steps;
    const char *ahead;
};

/* A staged row by those, added to its sums [panel][32]. */
typedef void row_adder(const char *x, const struct row_of_codes *row, float *sums);

/* How an instruction set makes bfloat16 of codes. */
struct numbers {
    int is_scaled;      /* as what the codes mean; otherwise sums of groups are yet to be scaled */
    float bias;         /* that was added to every number that is not scaled */
    row_adder *add_row; /* of `row_panels` panels at once, whose numbers it writes nowhere; or NULL */
    int64_t row_panels;
};

struct numbers numbers_of(enum isa isa, const struct codes *codes);

/* `steps` steps of a panel from `first` on, as steps of bfloat16; of one group where numbers are not scaled. */
void expand_steps(enum isa isa, const struct codes *codes, const char *panel, int64_t first, int64_t steps, bf16 *to);

/* The same as rows of outputs [steps][32][32], fetching as many bytes from `ahead` on. Of INT4 by AMX: an output's 16
 * numbers are then a table, which takes fewer operations than to scale each. */
void expand_rows(const struct codes *codes, const char *panel, int64_t first, int64_t steps, const char *ahead,
                 bf16 *to);

/* Some panels that lie next to each other. */
struct panels {
    const char *first;
    int64_t bytes, steps; /* of each */
    int64_t count;
};

/* The sums of a group [panel][rows][32], whose inputs of a row add up to `totals` [rows][groups], to all sums. `totals`
 * NULL: there are no zero points. */
void scale_sums(const struct codes *codes, const struct panels *panels, int64_t group, const float *of_group,
                const float *totals, float bias, int64_t rows, float *sums);

#endif
