/* Weights as quantised checkpoints store them: codes, scales and zero points.
 *
 * A packed weight consists of panels of 32 outputs; a panel of groups of inputs, a multiple of 32 of them, of which the
 * last may be shorter; a group of its 32 scales, 32 zero points of 8 bits where these are stored, and its steps of 32
 * inputs. A step has its codes in the order of a bfloat16 step, see linear.c, a tile as 16 lines of 32 elements [16
 * outputs][2]:
 *
 *   8 bits  a byte per element
 *   4 bits  four lines together in 32 words of 16 bits; word e has element e of each line, that of the first in its lowest
 *           bits. Shifts of whole words give vectors of elements.
 *
 * bfloat16 represents every code exactly, and also its difference from a zero point. With vectors, rows are multiplied
 * by these numbers, and the sums of each group by its scales: few operations per code, and fewer roundings than with a
 * bfloat16 weight. AVX2 multiplies integers, and rounds inputs that are far below the largest of 32: see codes_avx2.c. The
 * sums of AMX are in its tiles, to which scales cannot be applied, so there a code is converted to the bfloat16 nearest
 * to its value, and products are bit for bit those of the dequantised weight. */

#ifndef CODES_H
#define CODES_H

#include "operators.h"
#include "panels.h"

/* Kinds of codes. The zero point is subtracted from the number of an integer, and the scale multiplies the difference. */
enum { INT4, FP4, INT8, FP8 };
#define MIDDLE 8 /* the zero point of INT4 where none are stored; that of INT8 is 0 */
/* How scales are stored; E8M0: a power of two by its exponent. */
enum { SCALES_FLOAT32, SCALES_BFLOAT16, SCALES_FLOAT16, SCALES_E8M0 };

static inline int64_t bytes_of_scale(int64_t scales) {
    return scales == SCALES_FLOAT32 ? 4 : scales == SCALES_E8M0 ? 1 : 2;
}

static inline int64_t bytes_of_codes(int64_t kind) { return kind < INT8 ? STEP / 2 : STEP; } /* of a step */

static inline int64_t bytes_of_header(const struct codes *codes) {
    return PANEL * (bytes_of_scale(codes->scales) + codes->has_zeros);
}

static inline int64_t bytes_of_group(const struct codes *codes) {
    return bytes_of_header(codes) + codes->group / DEPTH * bytes_of_codes(codes->code_kind);
}

static inline int64_t bytes_of_panel(const struct codes *codes, int64_t inputs) {
    return parts(inputs, codes->group) * bytes_of_header(codes) + parts(inputs, DEPTH) * bytes_of_codes(codes->code_kind);
}

#define CODED_STEPS 4 /* steps of a panel, 8 KiB of numbers, that rows are multiplied by at once */

/* Staged rows and the part of panels that they are multiplied by: whole panels of codes, or stored numbers of some steps
 * of one panel. */
struct coded_part {
    const struct codes *codes;
    const char *header; /* of the group in which the part begins */
    const char *x;      /* rows, from the part's first step on, that have `all` steps */
    int64_t all, steps;
    const float *scales; /* of rows of integers: [rows / 16][`all`][16] */
    float *sums; /* [panel][rows][32], to which the scaled sums of whole groups are added */
    /* Of codes: */
    int64_t apart, distance; /* bytes from panel to panel, and to the codes that are fetched */
    /* Of numbers: */
    const bf16 *numbers; /* or integers of 16 bits */
    float *of_group; /* [rows][32] sums of the group in which the part begins or ends */
    int64_t begun;   /* steps of the first group that came before */
    int is_last;     /* whether the part ends with the panel */
    const char *ahead;
    int64_t stride; /* `ahead` is fetched, and so many bytes later the next line, with each pair of inputs */
};

typedef void codes_adder(const struct coded_part *part, int64_t rows, int64_t panels);

/* How an instruction set multiplies by codes. */
struct numbers {
    int is_scaled; /* whether numbers are scaled when they are converted, and then multiplied like a bfloat16 weight */
    codes_adder *add_codes; /* multiplies up to `code_rows` rows by a panel, or one row by `panels`; or NULL */
    int64_t code_rows, panels;
    void (*add_numbers)(const struct coded_part *part, int64_t rows); /* multiplies rows by converted codes */
    int are_integers; /* whether numbers and rows are integers of 16 bits, see codes_avx2.c */
};

/* Convert the codes of some steps of a group to the numbers that rows are multiplied by. `zeros`: 32 stored zero points, or
 * NULL. */
typedef void code_expander(const char *from, int64_t steps, const char *zeros, bf16 *to);

#if HAS_X86
extern code_expander *const integer_expanders[3]; /* by kind of codes, of those that are integers */
struct numbers by_avx2(const struct codes *codes);
void avx2_add_numbers(const struct coded_part *part, int64_t rows); /* of FP8 */
#define FP8_FACTOR 256 /* AVX2's numbers of FP8 are 1 / 256 of those of codes */

/* Convert 32 inputs of a row to integers, and the power of two that multiplies them. */
void stage_integers(const bf16 values[DEPTH], int kind, int16_t *to, float *scale);
#endif

struct numbers numbers_of(enum isa isa, const struct codes *codes);

/* Convert `steps` steps of a panel from `first` on to steps of the numbers that `numbers_of` multiplies rows by: bfloat16,
 * of FP8 divided by FP8_FACTOR on AVX2, or, if `are_integers`, integers of 16 bits, of FP4 doubled. */
void expand_steps(enum isa isa, const struct codes *codes, const char *panel, int64_t first, int64_t steps, bf16 *to);

/* The same as rows of outputs [steps][32][32], prefetching as many bytes from `ahead` on. For INT4 on AMX an output's
 * 16 numbers are then a table, which takes fewer operations than scaling each. */
void expand_rows(const struct codes *codes, const char *panel, int64_t first, int64_t steps, const char *ahead,
                 bf16 *to);

/* Some panels that are adjacent. */
struct panels {
    const char *first;
    int64_t bytes, steps; /* of each */
    int64_t count;
};

#endif
