/* Rows times codes by AVX2: rows as integers of 16 bits times the codes of integers and of E2M1, and one row of float32
 * times FP8. See codes.h.
 *
 * The processor multiplies twice as many pairs of 16 bits as float32 at once, and makes 16 bits of a code by half the
 * operations. 32 inputs of a row share a power of two, by which their largest magnitude has 15 bits: values from a 128th of
 * it on, which have 8 bits, are exact, and smaller ones are rounded by at most 2^-15 of it. bfloat16 rounded the largest
 * one itself by up to 2^-9, before it came here. Products of these and their sum are exact. A sum of a group runs over its
 * steps in order, in float32, for any number of rows.
 *
 * A row with an infinity or a NaN has only NaN as results, where float32 would also give infinities. */

#include "codes.h"
#include "vectors.h"

#if HAS_X86

#define ROWS 4
#define OF_TILE 2 /* vectors of 8 outputs */
#define SMALLEST 27 /* biased exponent: a step without a larger value has the power of two of 2^-100 */

/* ---- rows ---- */

AVX2 void stage_integers(const bf16 values[DEPTH], int kind, int16_t *to, float *scale) {
    __m256i low = _mm256_loadu_si256((const void *)values), high = _mm256_loadu_si256((const void *)(values + LANES));
    const __m256i magnitude = _mm256_set1_epi16(0x7fff);
    __m256i both = _mm256_max_epu16(_mm256_and_si256(low, magnitude), _mm256_and_si256(high, magnitude));
    /* The complement of the smallest complement is the largest. */
    __m128i most = _mm_max_epu16(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    int largest = 0xffff ^ _mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(most, _mm_set1_epi16(-1))));
    int exponent = (largest & 0xffff) >> 7, used = exponent < SMALLEST ? SMALLEST : exponent;
    union {
        uint32_t bits;
        float value;
    } inverse = {(uint32_t)(254 + 14 - used) << 23}, power = {(uint32_t)(used - 14) << 23};
    if (exponent == 255) inverse.value = 0, power.value = __builtin_nanf(""); /* A value that is not finite. */
    /* The numbers of E2M1 are doubled. */
    *scale = kind == FP4 ? power.value * 0.5f : power.value;
    for (int i = 0; i < DEPTH; i += 16) {
        __m256i of = _mm256_loadu_si256((const void *)(values + i)), none = _mm256_setzero_si256();
        __m256 by = _mm256_set1_ps(inverse.value);
        __m256i first = _mm256_cvtps_epi32(_mm256_mul_ps((__m256)_mm256_unpacklo_epi16(none, of), by));
        __m256i second = _mm256_cvtps_epi32(_mm256_mul_ps((__m256)_mm256_unpackhi_epi16(none, of), by));
        _mm256_storeu_si256((void *)(to + i), _mm256_packs_epi32(first, second));
    }
}

/* ---- codes ---- */

/* Four lines of half a tile, or with 8 bits one line. `zeros`: pairs of 16 bits for each of 8 outputs. */
AVX2 INLINE void integers_of(int kind, const char *from, __m256i zeros, int has_zeros, __m256i lines[4]) {
    if (kind == INT8) {
        lines[0] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)from));
        if (has_zeros) lines[0] = _mm256_sub_epi16(lines[0], zeros);
        return;
    }
    const __m256i nibbles = _mm256_set1_epi8(15);
    __m256i words = load_32_bytes(from), of_words[2] = {_mm256_and_si256(words, nibbles),
                                                     _mm256_and_si256(_mm256_srli_epi16(words, 4), nibbles)};
    for (int line = 0; line < 2; line++) {
        __m256i codes = of_words[line];
        if (kind == FP4) {
            const __m256i table = _mm256_broadcastsi128_si256(
                _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
            codes = _mm256_shuffle_epi8(table, codes);
            lines[line] = _mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 8);
            lines[line + 2] = _mm256_srai_epi16(codes, 8);
        } else {
            lines[line] = _mm256_sub_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(15)), zeros);
            lines[line + 2] = _mm256_sub_epi16(_mm256_srli_epi16(codes, 8), zeros);
        }
    }
}

/* Zero points of a panel; `stored`: 32 of 8 bits, or NULL. */
AVX2 INLINE void find_zeros(int kind, const char *stored, __m256i zeros[2][OF_TILE]) {
    for (int i = 0; i < 2 * OF_TILE; i++) {
        __m256i pairs = _mm256_set1_epi16(kind == INT4 ? MIDDLE : 0);
        if (stored) {
            __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)(stored + i * 8)));
            pairs = _mm256_blend_epi16(wide, _mm256_slli_epi32(wide, 16), 0xaa);
        }
        zeros[i / OF_TILE][i % OF_TILE] = pairs;
    }
}

AVX2 SPECIALIZED void expand(const char *from, int64_t steps, const char *stored, int16_t *to, int kind) {
    enum { HALF = LINE / 2 };
    const int lines = kind == INT8 ? 1 : 4;
    __m256i zeros[2][OF_TILE];
    find_zeros(kind, stored, zeros);
    for (int64_t tile = 0; tile < 2 * steps; tile++)
        for (int line = 0; line < DEPTH / 2; line += lines, from += kind == INT8 ? LINE / 2 : LINE, to += lines * 2 * LANES)
            for (int half = 0; half < OF_TILE; half++) {
                __m256i made[4];
                integers_of(kind, from + half * (kind == INT8 ? LANES : HALF), zeros[tile % 2][half], stored != NULL, made);
                for (int i = 0; i < lines; i++)
                    _mm256_storeu_si256((void *)(to + (i * OF_TILE + half) * LANES), made[i]);
            }
}

AVX2 static void expand_int4(const char *from, int64_t steps, const char *zeros, bf16 *to) {
    expand(from, steps, zeros, (int16_t *)to, INT4);
}

AVX2 static void expand_fp4(const char *from, int64_t steps, const char *zeros, bf16 *to) {
    (void)zeros;
    expand(from, steps, NULL, (int16_t *)to, FP4);
}

AVX2 static void expand_int8(const char *from, int64_t steps, const char *zeros, bf16 *to) {
    if (zeros) expand(from, steps, zeros, (int16_t *)to, INT8);
    else expand(from, steps, NULL, (int16_t *)to, INT8);
}

code_expander *const integer_expanders[3] = {expand_int4, expand_fp4, expand_int8};

/* ---- products ---- */

AVX2 INLINE __m256i pair_of(const int16_t *x) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return _mm256_set1_epi32(pair);
}

/* Scales of 8 outputs, from the first of 32 on. */
AVX2 INLINE __m256 scales_from(const struct codes *codes, const char *header, int first) {
    const char *from = header + first * bytes_of_scale(codes->scales);
    if (codes->scales == SCALES_FLOAT32) return _mm256_loadu_ps((const float *)(const void *)from);
    if (codes->scales == SCALES_E8M0) {
        __m256i exponents = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)from));
        __m256i powers = _mm256_slli_epi32(exponents, 23);
        __m256i none = _mm256_cmpeq_epi32(exponents, _mm256_setzero_si256());
        __m256i nan = _mm256_cmpeq_epi32(exponents, _mm256_set1_epi32(255));
        powers = _mm256_or_si256(powers, _mm256_and_si256(none, _mm256_set1_epi32(0x400000)));
        return (__m256)_mm256_or_si256(powers, _mm256_and_si256(nan, _mm256_set1_epi32(0x400000)));
    }
    __m128i halves_of = _mm_loadu_si128((const void *)from);
    if (codes->scales == SCALES_FLOAT16) return _mm256_cvtph_ps(halves_of);
    return (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves_of), 16);
}

AVX2 INLINE __m256 add_step(__m256 sum, __m256i of_step, float scale) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(of_step), _mm256_set1_ps(scale), sum);
}

AVX2 INLINE void add_group(__m256 sum, __m256 scales, float *to) {
    _mm256_storeu_ps(to, _mm256_fmadd_ps(sum, scales, _mm256_loadu_ps(to)));
}

/* Rows times the stored numbers of a tile. `by`: [groups][32] scales of the weight. */
AVX2 SPECIALIZED void add_tile(const struct coded_part *part, const float *by, int64_t row, int64_t stride, int rows,
                               int tile) {
    const int16_t *weight = (const int16_t *)part->numbers + tile * TILE;
    const int16_t *x = (const int16_t *)part->x + row / LANES * part->all * TILE + row % LANES * DEPTH;
    const float *scales = part->scales + row / LANES * part->all * LANES + row % LANES;
    const char *ahead = part->ahead;
    const int64_t in_group = part->codes->group / DEPTH;
    float *sums = part->sums + row * PANEL + tile * LANES, *of_group = part->of_group + row * PANEL + tile * LANES;
    __m256 f[ROWS][OF_TILE];
    for (int64_t left = part->steps, begun = part->begun, some; left > 0; left -= some) {
        some = min64(left, in_group - begun);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < OF_TILE; v++)
                f[r][v] = begun ? _mm256_loadu_ps(of_group + r * PANEL + v * 8) : _mm256_setzero_ps();
        for (int64_t step = 0; step < some; step++, weight += STEP, x += TILE, scales += LANES) {
            __m256i s[ROWS][OF_TILE];
#pragma GCC unroll 16
            for (int pair = 0; pair < DEPTH / 2; pair++, ahead += stride) {
                __builtin_prefetch(ahead);
                __m256i lines[OF_TILE];
                for (int v = 0; v < OF_TILE; v++) lines[v] = load_32_bytes(weight + (pair * OF_TILE + v) * LANES);
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) {
                    __m256i both = pair_of(x + r * DEPTH + pair * 2);
#pragma GCC unroll 2
                    for (int v = 0; v < OF_TILE; v++) {
                        __m256i made = _mm256_madd_epi16(lines[v], both);
                        s[r][v] = pair ? in_order(_mm256_add_epi32(s[r][v], made)) : made;
                    }
                }
            }
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < OF_TILE; v++) f[r][v] = add_step(f[r][v], s[r][v], scales[r]);
        }
        begun += some;
        int is_whole = begun == in_group || (left == some && part->is_last);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < OF_TILE; v++)
                if (is_whole) add_group(f[r][v], _mm256_loadu_ps(by + tile * LANES + v * 8), sums + r * PANEL + v * 8);
                else _mm256_storeu_ps(of_group + r * PANEL + v * 8, f[r][v]);
        if (is_whole) by += PANEL, begun = 0;
    }
}

/* A function for each number of rows. */
#define ADD_ROWS(COUNT)                                                                                              \
    AVX2 static void add_rows##COUNT(const struct coded_part *part, const float *by, int64_t row, int64_t stride) { \
        add_tile(part, by, row, stride, COUNT, 0);                                                                   \
        add_tile(part, by, row, 0, COUNT, 1);                                                                        \
    }
UP_TO(ROWS, ADD_ROWS)
#define ADDER(COUNT) add_rows##COUNT,

typedef void rows_adder(const struct coded_part *part, const float *by, int64_t row, int64_t stride);

AVX2 static void add_numbers(const struct coded_part *part, int64_t rows) {
    static rows_adder *const adders[ROWS] = {UP_TO(ROWS, ADDER)};
    /* A group has at least one step, so that a part has at most as many groups as steps. */
    float by[CODED_STEPS * PANEL];
    int64_t groups = parts(part->begun + part->steps, part->codes->group / DEPTH);
    for (int64_t group = 0; group < groups; group++)
        for (int output = 0; output < PANEL; output += 8)
            _mm256_storeu_ps(by + group * PANEL + output,
                             scales_from(part->codes, part->header + group * bytes_of_group(part->codes), output));
    for (int64_t row = 0; row < rows; row += ROWS)
        adders[min64(ROWS, rows - row) - 1](part, by, row, row ? 0 : part->stride);
}

/* One row times a panel, whose codes are converted in registers. */
AVX2 SPECIALIZED void add_codes(const struct coded_part *part, int kind, int has_zeros) {
    const int64_t of_step = bytes_of_codes(kind), of_tile = of_step / 2;
    const struct codes *codes = part->codes;
    const int lines = kind == INT8 ? 1 : 4, half_line = kind == INT8 ? LANES : LINE / 2;
    const int64_t in_group = codes->group / DEPTH, fetched = of_step * lines / (DEPTH / 2);
    const int16_t *x = (const int16_t *)part->x;
    const float *scales = part->scales;
    const char *header = part->header;
    for (int64_t left = part->steps, some; left > 0; left -= some, header += bytes_of_group(codes)) {
        some = min64(left, in_group);
        __m256 f[2 * OF_TILE];
        __m256i zeros[2][OF_TILE];
        find_zeros(kind, has_zeros ? header + PANEL * bytes_of_scale(codes->scales) : NULL, zeros);
        for (int64_t byte = 0; byte < bytes_of_header(codes); byte += LINE) __builtin_prefetch(header + part->distance + byte);
        for (int v = 0; v < 2 * OF_TILE; v++) f[v] = _mm256_setzero_ps();
        const char *at = header + bytes_of_header(codes);
        for (int64_t step = 0; step < some; step++, at += of_step, x += TILE, scales += LANES) {
            __m256i s[2 * OF_TILE];
#pragma GCC unroll 16
            for (int first = 0; first < DEPTH / 2; first += lines) {
                for (int64_t byte = 0; byte < fetched; byte += LINE)
                    __builtin_prefetch(at + part->distance + first / lines * fetched + byte);
#pragma GCC unroll 4
                for (int v = 0; v < 2 * OF_TILE; v++) {
                    __m256i made[4];
                    integers_of(kind, at + v / OF_TILE * of_tile + first / lines * OF_TILE * half_line + v % OF_TILE * half_line,
                                zeros[v / OF_TILE][v % OF_TILE], has_zeros, made);
#pragma GCC unroll 4
                    for (int line = 0; line < lines; line++) {
                        __m256i product = _mm256_madd_epi16(made[line], pair_of(x + (first + line) * 2));
                        s[v] = first + line ? in_order(_mm256_add_epi32(s[v], product)) : product;
                    }
                }
            }
            for (int v = 0; v < 2 * OF_TILE; v++) f[v] = add_step(f[v], s[v], *scales);
        }
        for (int v = 0; v < 2 * OF_TILE; v++) add_group(f[v], scales_from(codes, header, v * 8), part->sums + v * 8);
    }
}

#define ADD_CODES(NAME, KIND, HAS_ZEROS)                                                      \
    AVX2 static void NAME(const struct coded_part *part, int64_t rows, int64_t panels) { \
        (void)rows, (void)panels;                                                             \
        add_codes(part, KIND, HAS_ZEROS);                                                     \
    }
ADD_CODES(add_int4, INT4, 0)
ADD_CODES(add_fp4, FP4, 0)
ADD_CODES(add_int8, INT8, 0)
ADD_CODES(add_shifted_int4, INT4, 1)
ADD_CODES(add_shifted_int8, INT8, 1)

/* A byte becomes a half float, which is 2^-8 times its number: the halves' exponents reach as far down. */
AVX2 static void add_fp8(const struct coded_part *part, int64_t rows, int64_t panels) {
    const int64_t of_step = bytes_of_codes(FP8), in_group = part->codes->group / DEPTH;
    const __m256i kept = _mm256_set1_epi16((short)0xbf80);
    const float *x = (const float *)(const void *)part->x;
    const char *header = part->header;
    (void)rows, (void)panels;
    for (int64_t left = part->steps, some; left > 0; left -= some, header += bytes_of_group(part->codes)) {
        some = min64(left, in_group);
        __m256 s[2 * OF_TILE] = {0};
        for (int64_t byte = 0; byte < bytes_of_header(part->codes); byte += LINE)
            __builtin_prefetch(header + part->distance + byte);
        const char *at = header + bytes_of_header(part->codes);
        for (int64_t step = 0; step < some; step++, at += of_step, x += TILE)
#pragma GCC unroll 4
            for (int line = 0; line < DEPTH / 2; line++) {
                __m256 even = _mm256_set1_ps(x[2 * line]), odd = _mm256_set1_ps(x[2 * line + 1]);
                __builtin_prefetch(at + part->distance + line * LINE);
#pragma GCC unroll 2
                for (int tile = 0; tile < 2; tile++) {
                    __m256i codes = load_32_bytes(at + tile * of_step / 2 + line * 2 * LANES);
                    /* The sign is copied into the bit below it, which is then cleared. */
                    __m256i low = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 1), kept);
                    __m256i high = _mm256_and_si256(_mm256_srai_epi16(codes, 1), kept);
                    __m256 *sum = s + tile * OF_TILE;
                    sum[0] = _mm256_fmadd_ps(even, _mm256_cvtph_ps(_mm256_castsi256_si128(low)), sum[0]);
                    sum[1] = _mm256_fmadd_ps(even, _mm256_cvtph_ps(_mm256_extracti128_si256(low, 1)), sum[1]);
                    sum[0] = _mm256_fmadd_ps(odd, _mm256_cvtph_ps(_mm256_castsi256_si128(high)), sum[0]);
                    sum[1] = _mm256_fmadd_ps(odd, _mm256_cvtph_ps(_mm256_extracti128_si256(high, 1)), sum[1]);
                }
            }
        for (int v = 0; v < 2 * OF_TILE; v++) {
            __m256 by = _mm256_mul_ps(scales_from(part->codes, header, v * 8), _mm256_set1_ps(FP8_FACTOR));
            add_group(s[v], by, part->sums + v * 8);
        }
    }
}

struct numbers by_avx2(const struct codes *codes) {
    /* [whether zero points are stored][kind] */
    static codes_adder *const adders[2][3] = {{add_int4, add_fp4, add_int8}, {add_shifted_int4, NULL, add_shifted_int8}};
    if (codes->code_kind == FP8)
        return (struct numbers){.add_codes = add_fp8, .code_rows = 1, .panels = 1, .add_numbers = avx2_add_numbers};
    return (struct numbers){.are_integers = 1,
                            .add_codes = adders[codes->has_zeros][codes->code_kind],
                            .code_rows = 1,
                            .panels = 1,
                            .add_numbers = add_numbers};
}

#endif
