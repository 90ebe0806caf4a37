/* Weights of 8 or 4 bits, and the rows that are multiplied by them. Shared by the quantized_*.c files.
 *
 * A packed weight is made of panels of 32 outputs; a panel of blocks of 128 inputs; a block of its scales and two
 * steps of 64 inputs; a step of two tiles of 16 outputs, each [16 fours of inputs][16 outputs][4] in bytes, which is
 * what AMX multiplies by and what a vector of products of four reads. With 8 bits a block has one scale an output,
 * with 4 bits one a step; then a byte holds an input of one four, plus 8, and of the next, so that a tile is half as
 * large. All sizes are padded with zeros.
 *
 * Rows are rounded to 8 bits too, 128 inputs by one scale. So the products of a block are sums of integers, exact in
 * any order, and blocks are added up in order: a row's result does not depend on the other rows. */

#ifndef QUANTIZED_H
#define QUANTIZED_H

#include "operators.h"
#include "panels.h"

#define FOUR 4              /* inputs that are added to one 32-bit sum at once */
#define STEP_INPUTS 64
#define STEPS 2             /* of a block */
#define BLOCK (STEPS * STEP_INPUTS)
#define BYTES_OF_TILE (LANES * STEP_INPUTS)
#define BYTES_OF_VALUES (STEPS * 2 * BYTES_OF_TILE) /* of a block, at 8 bits */
#define TWO_TILES (2 * LANES) /* rows at a time */
#define LARGEST 127         /* a value is at most, at 8 bits; at 4 bits it is -8 to 7 */
#define MIDDLE 8            /* added to a value of 4 bits */
#define MIDDLE_OF_8 128     /* added to a value of 8 bits by products that take it for a number without a sign */
#define BLOCKS_AT_ONCE 4    /* part of a panel that stays in the L1 cache while many rows are multiplied by it */

static inline int64_t scales_of_block(int64_t bits) { return bits == 8 ? PANEL : STEPS * PANEL; }

static inline int64_t bytes_of_block(int64_t bits) {
    return scales_of_block(bits) * (int64_t)sizeof(bf16) + BYTES_OF_VALUES * bits / 8;
}

/* Rows by 16: values as tiles [16 rows][64], and of each block and step a line of 16 rows. Sums of integers begin with
 * an offset, minus what MIDDLE adds to a step's sum, or MIDDLE_OF_8 to a block's. */
struct quantized_rows {
    const int8_t *values;   /* [steps][16][64] */
    const float *scales;    /* [blocks][16] */
    const int32_t *offsets; /* [steps][16]; of 8 bits, a block's are equal */
    int64_t blocks;         /* of all inputs: from one 16 to the next */
    int64_t count;
};

/* The part of a weight that is prefetched while the previous part is multiplied. */
struct lines {
    const char *at;
    unsigned lines; /* with each block */
    int is_near;    /* whether to the first cache */
    int in_turn;    /* whether a line of each of eight pages in turn */
};

#define PAGES_IN_TURN (8 * 4096) /* bytes */

/* The line to prefetch in place of `line`, so that the 32 KiB around it are fetched a line of each page in turn. */
static inline const char *in_turn(const char *line) {
    uintptr_t at = (uintptr_t)line, number = at / LINE % (PAGES_IN_TURN / LINE);
    return (const char *)((at & -(uintptr_t)PAGES_IN_TURN) + number % 8 * 4096 + number / 8 * LINE);
}

/* Part `part` of `of` equal parts of the lines that are to be fetched with a block. */
static inline void fetch(struct lines *ahead, unsigned part, unsigned of) {
    unsigned from = ahead->lines * part / of, past = ahead->lines * (part + 1) / of;
    if (ahead->in_turn)
        for (unsigned line = from; line < past; line++) __builtin_prefetch(in_turn(ahead->at + line * LINE), 0, 2);
    else if (ahead->is_near)
        for (unsigned line = from; line < past; line++) __builtin_prefetch(ahead->at + line * LINE, 0, 3);
    else
        for (unsigned line = from; line < past; line++) __builtin_prefetch(ahead->at + line * LINE, 0, 2);
    if (part + 1 == of) ahead->at += ahead->lines * LINE;
}

/* Some blocks of a panel. */
struct quantized_panel {
    const char *blocks;
    int64_t stride;       /* bytes from block to block */
    const int8_t *values; /* of 8 bits: in `blocks`, or unpacked from there */
    int64_t values_stride;
    int64_t count, bits;
};

struct quantized_products {
    int unpacks; /* whether 4 bits are converted to 8 beforehand */
    /* Sums [rows][32] of rows times a panel's blocks, added to the given ones. `products`: memory for integers. Lines
     * are prefetched with each block by the first rows of each TWO_TILES. */
    void (*multiply)(const struct quantized_rows *rows, const struct quantized_panel *panel, float *sums,
                     int32_t *products, struct lines *ahead);
    /* For EXPANDED_ROWS or more by 4 bits, or NULL: expand a panel, whose values then take a byte each, and multiply. */
    void (*expand)(const struct quantized_panel *panel, int8_t *to);
    void (*multiply_expanded)(const struct quantized_rows *rows, const struct quantized_panel *panel, float *sums,
                              struct lines *ahead);
};
#define EXPANDED_ROWS 12

extern const struct quantized_products quantized_avx2, quantized_avx_vnni, quantized_avx512, quantized_amx; /* x86 */
extern const struct quantized_products quantized_neon;                                            /* Arm */

/* For a number of rows at once. A processor gives the same sums for any number of them. */
const struct quantized_products *quantized_products(enum isa isa, int64_t rows, int64_t bits);

/* How a block of a row is rounded: to zeros if `inverse` is 0, also values that are not finite. */
struct block_scale {
    float inverse, of_values;
};

/* `largest`: the bits of the block's largest magnitude. A value that is not finite makes the scale NaN. */
static inline struct block_scale scale_of_block(uint32_t largest) {
    union {
        uint32_t bits;
        float value;
    } most = {largest};
    if (most.bits >= 0x7f800000) return (struct block_scale){0, __builtin_nanf("")};
    return (struct block_scale){most.value > 1e-30f ? LARGEST / most.value : 0, most.value / LARGEST};
}

/* `totals`: of the values of each step of a block. See `struct quantized_rows`. */
static inline void set_offsets(int32_t *offsets, const int32_t totals[STEPS], int64_t weight_bits) {
    for (int step = 0; step < STEPS; step++)
        offsets[step * LANES] = weight_bits == 8 ? -MIDDLE_OF_8 * (totals[0] + totals[1]) : -MIDDLE * totals[step];
}

#if HAS_X86
/* `stage_blocks` of quantized.c by AVX2, with the same results: vectors of 64 bytes take five times as long there. With
 * `in_halves`, an offset has two of 16 bits: of the first two inputs of fours, and of the other two. */
void avx2_stage_blocks(int8_t *to, float *scales, int32_t *offsets, const bf16 *x, int64_t inputs, int64_t weight_bits,
                       int in_halves);
#endif

/* `greedy_head` with such a weight. */
void quantized_greedy_head(const struct greedy_head *op, const struct step *step, struct worker *worker);

/* Convert the values of `panel` from 4 to 8 bits. */
void unpack_values(const struct quantized_panel *panel, int8_t *values);

#endif
