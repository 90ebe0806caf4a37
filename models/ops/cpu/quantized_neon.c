/* Products with quantised weights on Arm, see quantized.h. */

#include "quantized.h"
#include "vectors.h"

#if HAS_NEON
#include <arm_neon.h>

#define AT_ONCE 2 /* vectors of outputs */

typedef long long pair_of_words __attribute__((vector_size(16)));

/* To each 32-bit sum add the products of four bytes of the weight and four of a row, all signed. */
NEON INLINE pair_of_words neon_dot_fours(pair_of_words sum, pair_of_words weight, pair_of_words x) {
    return (pair_of_words)vdotq_s32((int32x4_t)sum, (int8x16_t)weight, (int8x16_t)x);
}
#define NAME(x) neon_##x
#define TARGET NEON
#define WIDTH 4
#define ROWS 4
#define UNSIGNED 0
#include "quantized_kernel.h"

const struct quantized_products quantized_neon = {.multiply = neon_multiply};

#endif
