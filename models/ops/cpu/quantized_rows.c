/* Rows into a weight of 8 or 4 bits, and back out of it, see quantized.h. */

#include <math.h>

#include "quantized.h"
#include "vectors.h"

#define TINY 1e-30f /* If all values are smaller, they are rounded to 0. */

/* A scale as bfloat16 that is no smaller, so that no value exceeds the largest. */
static bf16 narrow_up(float value) {
    bf16 near = narrow(value);
    return widen(near) < value ? near + 1 : near;
}

/* Vectors of 32 bytes: AVX2 has none of 64, and other processors pack as fast by these. */
typedef float eight __attribute__((vector_size(32)));
typedef int32_t eight_integers __attribute__((vector_size(32)));
typedef int8_t eight_bytes __attribute__((vector_size(8)));
#define OF_EIGHT 8

INLINE eight load_eight(const float *from) {
    eight v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE eight smaller_of(eight a, eight b) {
    eight_integers is_less = a < b;
    return (eight)(((eight_integers)a & is_less) | ((eight_integers)b & ~is_less));
}

INLINE eight larger_of(eight a, eight b) {
    eight_integers is_less = a < b;
    return (eight)(((eight_integers)b & is_less) | ((eight_integers)a & ~is_less));
}

INLINE eight between(eight v, float least, float most) {
    return smaller_of(larger_of(v, (eight){0} + least), (eight){0} + most);
}

/* The first sum rounds. */
INLINE eight nearest(eight v, float inverse) { return (v * inverse + 12582912.0f) - 12582912.0f; }

struct limits {
    float low, high;
};

/* The smallest and the largest of some values and 0. */
INLINE struct limits limits_of(const float *values, int64_t count) {
    eight low = {0}, high = {0};
    for (int64_t i = 0; i < count; i += OF_EIGHT) {
        eight v = load_eight(values + i);
        low = smaller_of(v, low), high = larger_of(v, high);
    }
    struct limits found = {0};
    for (int i = 0; i < OF_EIGHT; i++) {
        found.low = low[i] < found.low ? low[i] : found.low;
        found.high = high[i] > found.high ? high[i] : found.high;
    }
    return found;
}

/* The nearest values, between the limits, and `middle` added to them. */
INLINE void round_values(const float *values, int64_t count, float scale, float least, float most, int middle,
                         int8_t *rounded) {
    float inverse = scale != 0 ? 1 / scale : 0;
    for (int64_t i = 0; i < count; i += OF_EIGHT) {
        eight value = between(nearest(load_eight(values + i), inverse), least, most);
        eight_bytes bytes = __builtin_convertvector(__builtin_convertvector(value, eight_integers) + middle, eight_bytes);
        memcpy(rounded + i, &bytes, sizeof bytes);
    }
}

/* In the order of sums of vectors of 16. */
INLINE float squared_error(const float *values, float scale) {
    float inverse = 1 / scale;
    eight errors[2] = {{0}};
    for (int i = 0; i < STEP_INPUTS; i += 2 * OF_EIGHT)
        for (int half = 0; half < 2; half++) {
            eight value = load_eight(values + i + half * OF_EIGHT);
            eight error = value - between(nearest(value, inverse), -MIDDLE, MIDDLE - 1) * scale;
            errors[half] += error * error;
        }
    eight sum = errors[0] + errors[1];
    float four[4];
    for (int i = 0; i < 4; i++) four[i] = sum[i] + sum[i + 4];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

/* The scale, of either sign, with which the 4-bit values have the least error: the largest value becomes one of the
 * limits. */
INLINE bf16 best_scale(const float *values) {
    static const float of_largest[] = {-8, -8.5f, -7.5f, -7, -6.5f, -6, -9, 7, 7.5f, 8};
    struct limits found = limits_of(values, STEP_INPUTS);
    float least = INFINITY, largest = found.high > -found.low ? found.high : found.low;
    bf16 best = 0;
    for (unsigned i = 0; fabsf(largest) > TINY && i < sizeof of_largest / sizeof *of_largest; i++) {
        bf16 scale = narrow(largest / of_largest[i]);
        float error = squared_error(values, widen(scale));
        if (error < least || i == 0) least = error, best = scale; /* Errors of the largest numbers are infinite. */
    }
    return best;
}

/* One row's part of a block at 8 bits. */
INLINE void pack8(const float *values, char *block, int64_t output) {
    int8_t rounded[BLOCK];
    struct limits found = limits_of(values, BLOCK);
    float largest = found.high > -found.low ? found.high : -found.low;
    bf16 scale = largest > TINY ? narrow_up(largest / LARGEST) : 0;
    memcpy(block + output * sizeof(bf16), &scale, sizeof scale);
    round_values(values, BLOCK, widen(scale), -LARGEST, LARGEST, 0, rounded);
    char *to = block + PANEL * sizeof(bf16) + output / LANES * BYTES_OF_TILE + output % LANES * FOUR;
    for (int step = 0; step < STEPS; step++)
        for (int i = 0; i < STEP_INPUTS; i += FOUR)
            memcpy(to + step * 2 * BYTES_OF_TILE + i / FOUR * LINE, rounded + step * STEP_INPUTS + i, FOUR);
}

/* The same at 4 bits. */
INLINE void pack4(const float *values, char *block, int64_t output) {
    char *to = block + STEPS * PANEL * sizeof(bf16) + output / LANES * (BYTES_OF_TILE / 2) + output % LANES * FOUR;
    for (int step = 0; step < STEPS; step++, values += STEP_INPUTS, to += BYTES_OF_TILE) {
        int8_t rounded[STEP_INPUTS];
        bf16 scale = best_scale(values);
        memcpy(block + (step * PANEL + output) * sizeof(bf16), &scale, sizeof scale);
        round_values(values, STEP_INPUTS, widen(scale), -MIDDLE, MIDDLE - 1, MIDDLE, rounded);
        for (int i = 0; i < STEP_INPUTS; i += 2 * FOUR) {
            uint32_t fours[2];
            memcpy(fours, rounded + i, sizeof fours);
            fours[0] |= fours[1] << 4;
            memcpy(to + i / (2 * FOUR) * LINE, fours, sizeof *fours);
        }
    }
}

CLONES static void pack_row(const bf16 *row, int64_t inputs, int64_t bits, char *panel, int64_t output) {
    for (int64_t i = 0; i < inputs; i += BLOCK, panel += bytes_of_block(bits)) {
        float values[BLOCK] = {0};
        int is_finite = 1;
        for (int64_t j = 0; j < min64(BLOCK, inputs - i); j++) {
            values[j] = widen(row[i + j]);
            is_finite &= (row[i + j] & 0x7f80) != 0x7f80;
        }
        if (!is_finite) memset(values, 0, sizeof values);
        if (bits == 8) pack8(values, panel, output);
        else pack4(values, panel, output);
        for (int64_t scale = output; !is_finite && scale < scales_of_block(bits); scale += PANEL)
            ((bf16 *)panel)[scale] = 0x7fc0; /* A value that is not finite makes its block NaN. */
    }
}

/* Tasks: 16 rows each, in the order of the packed weight. */
void quantized_pack(const void *arguments, const struct step *step, struct worker *worker) {
    (void)step;
    const struct quantized_pack *quantized = arguments;
    const struct pack *op = &quantized->pack;
    int64_t bytes = parts(op->in_features, BLOCK) * bytes_of_block(quantized->bits), last = op->first + op->count;
    for (int64_t task; (task = take_task(worker)) < parts(last, LANES) - op->first / LANES;) {
        int64_t tile = op->first / LANES + task;
        for (int64_t row = max64(op->first, tile * LANES); row < min64(last, (tile + 1) * LANES); row++)
            pack_row(op->rows + (row - op->first) * op->row_stride, op->in_features, quantized->bits,
                     (char *)op->weight + row / PANEL * bytes, row % PANEL);
    }
}

INLINE int value_of(const char *values, int64_t bits, int64_t output, int64_t input) {
    int64_t step = input / STEP_INPUTS, four = input % STEP_INPUTS / FOUR;
    int64_t place = output % LANES * FOUR + input % FOUR;
    if (bits == 8)
        return (int8_t)values[(step * 2 + output / LANES) * BYTES_OF_TILE + four * LINE + place];
    int both = (uint8_t)values[(step * 2 + output / LANES) * (BYTES_OF_TILE / 2) + four / 2 * LINE + place];
    return (four % 2 ? both >> 4 : both & 15) - MIDDLE;
}

/* Tasks: tokens. */
void quantized_embed(const void *arguments, const struct step *step, struct worker *worker) {
    const struct quantized_embed *quantized = arguments;
    const struct embed *op = &quantized->embed;
    int64_t bits = quantized->bits, bytes = parts(op->in_features, BLOCK) * bytes_of_block(bits);
    for (int64_t token; (token = take_task(worker)) < step->num_tokens;) {
        int64_t row = step->input_ids[token] - op->first_row, output = row % PANEL;
        if (row < 0 || row >= op->num_rows) {
            memset(op->out + token * op->out_stride, 0, op->in_features * sizeof(bf16));
            continue;
        }
        const char *panel = (const char *)op->weight + row / PANEL * bytes;
        bf16 *to = op->out + token * op->out_stride;
        for (int64_t i = 0; i < op->in_features; i++) {
            const char *block = panel + i / BLOCK * bytes_of_block(bits);
            const bf16 *scales = (const bf16 *)block + (bits == 4 ? i % BLOCK / STEP_INPUTS * PANEL : 0);
            const char *values = block + scales_of_block(bits) * sizeof(bf16);
            to[i] = narrow(value_of(values, bits, output, i % BLOCK) * widen(scales[output]));
            if (op->scale != 1) to[i] = narrow(widen(to[i]) * (float)op->scale);
        }
    }
}
