/* Codes to bfloat16, and sums of groups by their scales: see codes.h. */

#include "codes.h"
#include "vectors.h"

typedef uint8_t bytes __attribute__((vector_size(LANES)));
typedef int8_t signed_bytes __attribute__((vector_size(LANES)));

INLINE vector numbers_of_halves(bits half) {
    bits rest = half & 0x7fff;
    vector tiny = __builtin_convertvector((integers)rest, vector) * 0x1p-24f;
    bits whole = (rest << 13) + (112u << 23), large = rest << 13 | 0x7f800000;
    vector numbers = choose((integers)(rest < 0x400), tiny,
                            choose((integers)(rest >= 0x7c00), (vector)large, (vector)whole));
    return (vector)((bits)numbers | (half & 0x8000) << 16);
}

INLINE vector powers_of_two(bits exponents) {
    bits powers = exponents << 23, none = (bits){0};
    vector numbers = choose((integers)(exponents == 0), (vector)(none + 0x400000), (vector)powers);
    return choose((integers)(exponents == 255), (vector)(none + 0x7fc00000), numbers);
}

/* Of 16 outputs. */
INLINE vector load_scales(const char *from, int64_t kind) {
    bytes exponents;
    halves scales;
    if (kind == SCALES_FLOAT32) return load((const float *)(const void *)from);
    if (kind == SCALES_E8M0) {
        memcpy(&exponents, from, sizeof exponents);
        return powers_of_two(__builtin_convertvector(exponents, bits));
    }
    memcpy(&scales, from, sizeof scales);
    bits wide = __builtin_convertvector(scales, bits);
    return kind == SCALES_BFLOAT16 ? (vector)(wide << 16) : numbers_of_halves(wide);
}

/* Of the outputs of a tile. */
struct factors {
    vector scales, zeros;
};

INLINE struct factors factors_of(const struct codes *codes, const char *group, int tile) {
    int64_t size = bytes_of_scale(codes->scales);
    struct factors found = {load_scales(group + tile * LANES * size, codes->scales), {0}};
    if (codes->has_zeros) {
        signed_bytes stored;
        memcpy(&stored, group + PANEL * size + tile * LANES, sizeof stored);
        found.zeros = __builtin_convertvector(stored, vector);
    } else if (codes->code_kind == INT4) found.zeros += MIDDLE;
    return found;
}

/* ---- any processor ---- */

/* Twice the numbers of E2M1. */
INLINE vector numbers_of_fp4(bits codes) {
    bits size = codes & 7, shift = size >> 1, is_small = (bits)(size < 2);
    bits twice = (size & is_small) | (((2 | (size & 1)) << ((shift - 1) & 3)) & ~is_small);
    vector numbers = __builtin_convertvector((integers)twice, vector);
    return (vector)((bits)numbers | (codes & 8) << 28);
}

INLINE vector numbers_of_fp8(bits codes) {
    bits size = codes & 0x7f;
    vector tiny = __builtin_convertvector((integers)size, vector) * 0x1p-9f;
    vector numbers = choose((integers)(size < 8), tiny, (vector)((size << 20) + (120u << 23)));
    return (vector)((bits)numbers | (codes & 0x80) << 24);
}

INLINE vector numbers_of_bytes(const char *from, int kind) {
    bytes v;
    memcpy(&v, from, sizeof v);
    if (kind == FP8) return numbers_of_fp8(__builtin_convertvector(v, bits));
    return __builtin_convertvector(__builtin_convertvector((signed_bytes)v, integers), vector);
}

SPECIALIZED void expand_any(const char *from, int64_t steps, const char *zeros, bf16 *to, int kind) {
    for (int64_t line = 0; line < steps * DEPTH; line++, to += 2 * LANES)
        for (int half = 0; half < 2; half++) {
            vector numbers, less = all(kind == INT4 ? MIDDLE : 0);
            if (zeros) {
                bytes stored;
                memcpy(&stored, zeros + line % DEPTH / (DEPTH / 2) * LANES, sizeof stored);
                halves twice = __builtin_convertvector(stored, halves) * 0x101;
                memcpy(&stored, (const char *)&twice + half * LANES, sizeof stored);
                less = __builtin_convertvector((signed_bytes)stored, vector);
            }
            if (kind >= INT8) numbers = numbers_of_bytes(from + line * 2 * LANES + half * LANES, kind);
            else {
                halves words;
                memcpy(&words, from + line / 4 * LINE + half * (LINE / 2), sizeof words);
                bits code = __builtin_convertvector(words >> (line % 4 * 4) & 15, bits);
                if (kind == FP4) numbers = numbers_of_fp4(code) * 0.5f;
                else numbers = __builtin_convertvector((integers)code, vector);
            }
            if (kind == INT4 || kind == INT8) numbers -= less;
            store_bf16(to + half * LANES, numbers);
        }
}

#define EXPANDER(NAME, OF, KIND)                                                                     \
    static void NAME(const char *from, int64_t steps, const char *zeros, bf16 *to) {                 \
        if (zeros && (KIND == INT4 || KIND == INT8)) OF(from, steps, zeros, to, KIND);               \
        else OF(from, steps, NULL, to, KIND);                                                        \
    }
CLONES EXPANDER(any_int4, expand_any, INT4)
CLONES EXPANDER(any_fp4, expand_any, FP4)
CLONES EXPANDER(any_int8, expand_any, INT8)
CLONES EXPANDER(any_fp8, expand_any, FP8)
static code_expander *const with_any[] = {any_int4, any_fp4, any_int8, any_fp8};

#define NAME(x) portable_##x
#define TARGET
#define WIDTH 4
#define ROWS 4
#define CODE_ROWS 0
#define PAIRS 0
#include "codes_kernel.h"

#if HAS_NEON
#define NAME(x) neon_##x
#define TARGET NEON
#define WIDTH 4
#define ROWS 8
#define CODE_ROWS 0
#define PAIRS 0
#include "codes_kernel.h"

#define NAME(x) neon_bf16_##x
#define TARGET NEON_BF16
#define WIDTH 4
#define ROWS 8
#define CODE_ROWS 0
#define PAIRS 1
#include "codes_kernel.h"
#endif

#if HAS_X86
/* ---- AVX2 ---- */

AVX2 INLINE __m256i avx2_load(const char *from) { return _mm256_loadu_si256((const void *)from); }

AVX2 INLINE __m256i twice(__m128i table) { return _mm256_broadcastsi128_si256(table); }

/* The upper byte of a number has its sign and all but one bit of the exponent, which grows by 112. The codes without an
 * exponent are corrected by tables. */
AVX2 INLINE void avx2_fp8(const char *from, __m256i words[2]) {
    const __m256i high = twice(
        _mm_setr_epi8(56, 57, 58, 59, 60, 61, 62, 63, -72, -71, -70, -69, -68, -67, -66, -65));
    const __m256i less = twice(_mm_setr_epi8(56, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0));
    const __m256i other = twice(_mm_setr_epi8(0, 16, -96, -16, 64, 112, 32, 16, 0, 0, 0, 0, 0, 0, 0, 0));
    const __m256i mask = _mm256_set1_epi8(15), exponent = _mm256_set1_epi8(0x78);
    __m256i codes = _mm256_permute4x64_epi64(avx2_load(from), 0xd8); /* so that the halves come out in order */
    __m256i rest = _mm256_and_si256(codes, mask), l = _mm256_slli_epi16(rest, 4);
    __m256i h = _mm256_shuffle_epi8(high, _mm256_and_si256(_mm256_srli_epi16(codes, 4), mask));
    __m256i is_tiny = _mm256_cmpeq_epi8(_mm256_and_si256(codes, exponent), _mm256_setzero_si256());
    h = _mm256_sub_epi8(h, _mm256_and_si256(_mm256_shuffle_epi8(less, rest), is_tiny));
    l = _mm256_xor_si256(l, _mm256_and_si256(_mm256_shuffle_epi8(other, rest), is_tiny));
    words[0] = _mm256_unpacklo_epi8(l, h), words[1] = _mm256_unpackhi_epi8(l, h);
}

AVX2 static void avx2_expand_fp8(const char *from, int64_t steps, const char *zeros, bf16 *to) {
    (void)zeros;
    for (int64_t line = 0; line < steps * DEPTH; line++, from += 2 * LANES, to += 2 * LANES) {
        __m256i words[2];
        avx2_fp8(from, words);
        _mm256_storeu_si256((void *)to, words[0]);
        _mm256_storeu_si256((void *)(to + LANES), words[1]);
    }
}

/* Of FP8; the other kinds are integers. */
#define NAME(x) avx2_of_fp8_##x
#define TARGET AVX2
#define WIDTH 8
#define ROWS 4
#define CODE_ROWS 0
#define PAIRS 0
#define FACTOR FP8_FACTOR
/* As one row's sums in codes_avx2.c. */
#define FUSED(a, b, c) \
    ((avx2_of_fp8_floats)_mm256_fmadd_ps((__m256)((a) - (avx2_of_fp8_floats){0}), (__m256)(b), (__m256)(c)))
#include "codes_kernel.h"

void avx2_add_numbers(const struct coded_part *part, int64_t rows) { avx2_of_fp8_add_numbers(part, rows); }

/* ---- AVX-512 ---- */

/* The numbers of 16 codes, twice: a permutation reads five bits of a word. */
AVX512 INLINE __m512i table_of_int4(void) {
    return _mm512_broadcast_i64x4(_mm256_setr_epi16(-0x3f00, -0x3f20, -0x3f40, -0x3f60, -0x3f80, -0x3fc0, -0x4000,
                                                    -0x4080, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0));
}

/* Those of a code less a zero point, as five bits with a sign. */
AVX512 INLINE __m512i table_of_differences(void) {
    const __m512i positive = _mm512_castsi256_si512(_mm256_setr_epi16(
        0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160,
        0x4170));
    return _mm512_inserti64x4(positive, _mm256_setr_epi16(-0x3e80, -0x3e90, -0x3ea0, -0x3eb0, -0x3ec0, -0x3ed0, -0x3ee0,
                                                          -0x3ef0, -0x3f00, -0x3f20, -0x3f40, -0x3f60, -0x3f80, -0x3fc0,
                                                          -0x4000, -0x4080), 1);
}

AVX512 INLINE __m512i table_of_fp4(void) {
    return _mm512_broadcast_i64x4(_mm256_setr_epi16(0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, -0x8000,
                                                    -0x4100, -0x4080, -0x4040, -0x4000, -0x3fc0, -0x3f80, -0x3f40));
}

AVX512 INLINE __m512i float_of_bytes(const char *from) {
    return (__m512i)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)from)));
}

/* The magnitude bits move to their position in bfloat16, and the exponent grows by 120. A table has the numbers of
 * codes without an exponent. */
AVX512 INLINE __m512i avx512_fp8(const char *from) {
    const __m512i tiny = _mm512_zextsi128_si512(
        _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    __m512i codes = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)from)), moved = _mm512_slli_epi16(codes, 4);
    __m512i size = _mm512_and_si512(moved, _mm512_set1_epi16(0x7f0));
    __mmask32 is_tiny = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(0x78));
    size = _mm512_add_epi16(size, _mm512_set1_epi16(120 << 7));
    size = _mm512_mask_permutexvar_epi16(size, is_tiny, codes, tiny);
    return _mm512_ternarylogic_epi32(size, moved, _mm512_set1_epi16((short)0x8000), 0xf8); /* size | (moved & sign) */
}

/* The zero points of a tile: of INT4 one for each byte of a word, of INT8 float32 in the order of a line. */
AVX512 INLINE void avx512_zeros(int kind, const char *from, bits zeros[2]) {
    const __m512i first = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
    __m128i stored = _mm_loadu_si128((const void *)from);
    if (kind == INT4) {
        zeros[0] = (bits)_mm512_shuffle_epi8(_mm512_cvtepu8_epi32(stored), first);
        return;
    }
    zeros[0] = (bits)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_unpacklo_epi8(stored, stored)));
    zeros[1] = (bits)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_unpackhi_epi8(stored, stored)));
}

/* The numbers of a line of bytes in one half, less the zero points. */
AVX512 INLINE __m512i avx512_half(const char *line, int half, const bits *zeros) {
    __m512i numbers = float_of_bytes(line + half * LANES);
    return zeros ? (__m512i)_mm512_sub_ps((__m512)numbers, (__m512)zeros[half]) : numbers;
}

AVX512 INLINE void avx512_int8(const char *lines, const bits *zeros, bits words[2][1]) {
    const __m512i upper = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                                           25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    for (int i = 0; i < 2; i++, lines += 2 * LANES)
        words[i][0] = (bits)_mm512_permutex2var_epi16(avx512_half(lines, 0, zeros), upper, avx512_half(lines, 1, zeros));
}

/* Two lines of bytes, or the codes of four of 4 bits; less zero points, the even lines and the odd ones, a code in each
 * byte. `zeros`: see `avx512_zeros`, or NULL. */
AVX512 INLINE void avx512_held_of(int kind, const char *tile, int first, const bits *zeros, bits held[2][1]) {
    const char *lines = tile + first * (kind < INT8 ? LANES : 2 * LANES);
    if (kind == INT8) avx512_int8(lines, zeros, held);
    else if (kind == FP8)
        for (int i = 0; i < 2; i++) held[i][0] = (bits)avx512_fp8(lines + i * 2 * LANES);
    else {
        const __m512i mask = _mm512_set1_epi8(15);
        __m512i codes = _mm512_loadu_si512(lines);
        __asm__("" : "+v"(codes)); /* The compiler would load it for each line. */
        held[0][0] = (bits)codes;
        if (!zeros) return;
        held[0][0] = (bits)_mm512_sub_epi8(_mm512_and_si512(codes, mask), (__m512i)zeros[0]);
        codes = _mm512_and_si512(_mm512_srli_epi16(codes, 4), mask);
        held[1][0] = (bits)_mm512_sub_epi8(codes, (__m512i)zeros[0]);
    }
}

AVX512 INLINE bits avx512_words_of(int kind, const bits held[2][1], int line, int v, int has_zeros) {
    (void)v;
    if (kind >= INT8) return held[line][0];
    __m512i codes = (__m512i)held[has_zeros ? line % 2 : 0][0];
    codes = _mm512_srli_epi16(codes, has_zeros ? line / 2 * 8 : line * 4);
    return (bits)_mm512_permutexvar_epi16(
        codes, kind == FP4 ? table_of_fp4() : has_zeros ? table_of_differences() : table_of_int4());
}

AVX512 SPECIALIZED void avx512_expand(const char *from, int64_t steps, const char *stored, bf16 *to, int kind) {
    const int lines = kind < INT8 ? 4 : 2;
    bits zeros[2][2], held[2][1];
    for (int tile = 0; stored && tile < 2; tile++) avx512_zeros(kind, stored + tile * LANES, zeros[tile]);
    for (int64_t step = 0; step < steps; step++)
#pragma GCC unroll 2
        for (int tile = 0; tile < 2; tile++, from += bytes_of_codes(kind) / 2)
#pragma GCC unroll 8
            for (int first = 0; first < DEPTH / 2; first += lines) {
                avx512_held_of(kind, from, first, stored ? zeros[tile] : NULL, held);
                for (int i = 0; i < lines; i++, to += 2 * LANES)
                    _mm512_storeu_si512(to, (__m512i)avx512_words_of(kind, held, i, 0, stored != NULL));
            }
}

AVX512 EXPANDER(avx512_expand_int4, avx512_expand, INT4)
AVX512 EXPANDER(avx512_expand_fp4, avx512_expand, FP4)
AVX512 EXPANDER(avx512_expand_int8, avx512_expand, INT8)
AVX512 EXPANDER(avx512_expand_fp8, avx512_expand, FP8)
static code_expander *const with_avx512[] = {avx512_expand_int4, avx512_expand_fp4, avx512_expand_int8, avx512_expand_fp8};

/* Where bytes are widened to pairs of 16 bits, the zero points of INT8 are, too. */
AVX512 INLINE void avx512_zeros_of(int kind, const char *from, bits zeros[2]) {
    if (kind == INT4) avx512_zeros(kind, from, zeros);
    else {
        __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)from));
        zeros[0] = (bits)_mm512_mask_blend_epi16(0xaaaaaaaa, wide, _mm512_slli_epi32(wide, 16));
    }
}

AVX512 INLINE bits avx512_bytes_of(const char *from) {
    return (bits)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)from));
}

/* Subtract numbers of 16 bits. */
AVX512 INLINE bits avx512_less(bits both, bits zeros) {
    return (bits)_mm512_sub_epi16((__m512i)both, (__m512i)zeros);
}

#define NAME(x) avx512_##x
#define TARGET AVX512
#define WIDTH 16
#define ROWS 8
#define CODE_ROWS 8
#define PANELS 4
#define GROUPS 2
#define PAIRS 0
#include "codes_kernel.h"

/* ---- AVX-512 with bfloat16 ---- */

AVX512_BF16 INLINE __m512i line_of(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

/* Both bytes of the number that a code's seven bits of magnitude mean. */
#define HIGH(code) (((code) << 4) + (120 << 7)) >> 8
#define LOW(code) (((code) << 4) & 0xff)
#define EIGHT(of, code) \
    of(code), of(code + 1), of(code + 2), of(code + 3), of(code + 4), of(code + 5), of(code + 6), of(code + 7)
#define ALL_WHOLE(of)                                                                                         \
    EIGHT(of, 8), EIGHT(of, 16), EIGHT(of, 24), EIGHT(of, 32), EIGHT(of, 40), EIGHT(of, 48), EIGHT(of, 56),   \
        EIGHT(of, 64), EIGHT(of, 72), EIGHT(of, 80), EIGHT(of, 88), EIGHT(of, 96), EIGHT(of, 104),            \
        EIGHT(of, 112), EIGHT(of, 120)
static const ALIGNED uint8_t high_bytes[128] = {0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, ALL_WHOLE(HIGH)};
static const ALIGNED uint8_t low_bytes[128] = {0, 0, 0x80, 0xc0, 0, 0x20, 0x40, 0x60, ALL_WHOLE(LOW)};

/* Two lines. Quarters of the first and of the second alternate, so that the bytes of numbers come out in order. */
AVX512_BF16 INLINE void pairs_fp8(const char *from, bits words[2][1]) {
    const __m512i turns = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), sign = _mm512_set1_epi8(-128);
    __m512i codes = _mm512_permutexvar_epi64(turns, _mm512_loadu_si512(from));
    __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(high_bytes), codes, _mm512_load_si512(high_bytes + LINE));
    __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(low_bytes), codes, _mm512_load_si512(low_bytes + LINE));
    high = _mm512_ternarylogic_epi32(high, codes, sign, 0xf8); /* high | (codes & sign) */
    words[0][0] = (bits)_mm512_unpacklo_epi8(low, high), words[1][0] = (bits)_mm512_unpackhi_epi8(low, high);
}

AVX512_BF16 INLINE void pairs_held_of(int kind, const char *tile, int first, const bits *zeros, bits held[2][1]) {
    const char *line = tile + first * 2 * LANES;
    if (kind == FP8) pairs_fp8(line, held);
    else if (kind == INT8)
        for (int i = 0; i < 2; i++, line += 2 * LANES)
            held[i][0] = (bits)line_of((__m512)avx512_half(line, 0, zeros), (__m512)avx512_half(line, 1, zeros));
    else avx512_held_of(kind, tile, first, zeros, held);
}

AVX512_BF16 INLINE bits pairs_words_of(int kind, const bits held[2][1], int line, int v, int has_zeros) {
    return avx512_words_of(kind, held, line, v, has_zeros);
}

AVX512_BF16 INLINE void pairs_zeros_of(int kind, const char *from, bits zeros[2]) { avx512_zeros(kind, from, zeros); }

#define NAME(x) pairs_##x
#define TARGET AVX512_BF16
#define WIDTH 16
#define ROWS 8
#define CODE_ROWS 8
#define PANELS 4
#define GROUPS 2
#define PAIRS 1
#include "codes_kernel.h"

/* ---- AMX: numbers by their scales ---- */

/* The factors of both elements of each output, in the order of a line. */
struct line_factors {
    vector scales[2], zeros[2];
};

AVX512_BF16 INLINE struct line_factors in_line(struct factors of) {
    const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    __m512 scales = (__m512)of.scales, zeros = (__m512)of.zeros;
    return (struct line_factors){
        {(vector)_mm512_permutexvar_ps(low, scales), (vector)_mm512_permutexvar_ps(high, scales)},
        {(vector)_mm512_permutexvar_ps(low, zeros), (vector)_mm512_permutexvar_ps(high, zeros)}};
}

/* A tile of 4 bits, whose numbers are in a table. Products of a zero point and a scale of 16 bits are exact, so that
 * one operation rounds as two would. */
AVX512_BF16 INLINE void scaled4(const struct factors *by, const char *from, bf16 *to, __m512 table, int is_short) {
    const __m512i mixed = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512 scales = (__m512)by->scales, zeros = (__m512)by->zeros, plus = (__m512)(-by->zeros * by->scales);
    for (int lines = 0; lines < LANES; lines += 4, from += LINE, to += 4 * 2 * LANES) {
        __m512i words = _mm512_loadu_si512(from);
#pragma GCC unroll 4
        for (int line = 0; line < 4; line++) {
            __m512 even = _mm512_permutexvar_ps(_mm512_srli_epi32(words, line * 4), table);
            __m512 odd = _mm512_permutexvar_ps(_mm512_srli_epi32(words, line * 4 + 16), table);
            if (is_short) even = _mm512_fmadd_ps(even, scales, plus), odd = _mm512_fmadd_ps(odd, scales, plus);
            else
                even = _mm512_mul_ps(_mm512_sub_ps(even, zeros), scales),
                odd = _mm512_mul_ps(_mm512_sub_ps(odd, zeros), scales);
            _mm512_storeu_si512(to + line * 2 * LANES, _mm512_permutexvar_epi16(mixed, line_of(even, odd)));
        }
    }
}

/* A tile of E2M1 times powers of two: exponents are added, except that of 0. */
AVX512 INLINE void scaled_fp4(const char *exponents, const char *from, bf16 *to) {
    const __m512i table = table_of_fp4();
    __m512i grown = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)exponents));
    grown = _mm512_slli_epi16(_mm512_sub_epi16(_mm512_or_si512(grown, _mm512_slli_epi32(grown, 16)),
                                               _mm512_set1_epi16(127)), 7);
    for (int lines = 0; lines < LANES; lines += 4, from += LINE, to += 4 * 2 * LANES) {
        __m512i words = _mm512_loadu_si512(from);
#pragma GCC unroll 4
        for (int line = 0; line < 4; line++) {
            __m512i numbers = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, line * 4), table);
            __mmask32 is_any = _mm512_test_epi16_mask(numbers, _mm512_set1_epi16(0x7fff));
            _mm512_storeu_si512(to + line * 2 * LANES, _mm512_maskz_add_epi16(is_any, numbers, grown));
        }
    }
}

AVX512_BF16 INLINE void scaled_int8(const struct factors *factors, const char *from, bf16 *to, int has_zeros) {
    struct line_factors by = in_line(*factors);
    for (int line = 0; line < LANES; line++, from += 2 * LANES, to += 2 * LANES) {
        vector low = (vector)float_of_bytes(from), high = (vector)float_of_bytes(from + LANES);
        if (has_zeros) low -= by.zeros[0], high -= by.zeros[1];
        _mm512_storeu_si512(to, line_of((__m512)(low * by.scales[0]), (__m512)(high * by.scales[1])));
    }
}

/* Read as float16, which has at least as many bits of exponent, a code is 2^-8 times its number. */
AVX512_BF16 INLINE void scaled_fp8(const struct factors *factors, const char *from, bf16 *to) {
    struct line_factors by = in_line((struct factors){factors->scales * 256, factors->zeros});
    for (int line = 0; line < LANES; line++, from += 2 * LANES, to += 2 * LANES) {
        __m512i codes = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)from));
        codes = _mm512_and_si512(_mm512_slli_epi16(codes, 7), _mm512_set1_epi16((short)0xbfff));
        __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(codes));
        __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(codes, 1));
        _mm512_storeu_si512(to, line_of(_mm512_mul_ps(low, (__m512)by.scales[0]), _mm512_mul_ps(high, (__m512)by.scales[1])));
    }
}

/* A tile times one scale. The rounded product of a code's three mantissa bits and the scale is in a table, and the
 * code's exponent is added to it; another table has the numbers of codes without an exponent. */
AVX512_BF16 INLINE void scaled_block(float scale, const char *from, bf16 *to) {
    const __m512 eighths = _mm512_setr_ps(8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    __m256i both = (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(eighths, _mm512_set1_ps(scale * 0x1p-9f)));
    __m512i table = _mm512_broadcast_i32x4(_mm256_castsi256_si128(both));
    __m512i tiny = _mm512_castsi128_si512(_mm256_extracti128_si256(both, 1));
    for (int line = 0; line < LANES; line++, from += 2 * LANES, to += 2 * LANES) {
        __m512i codes = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)from));
        __m512i exponents = _mm512_slli_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(0x78)), 4);
        __mmask32 is_tiny = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(0x78));
        exponents = _mm512_sub_epi16(exponents, _mm512_set1_epi16(1 << 7));
        __m512i size = _mm512_add_epi16(_mm512_permutexvar_epi16(codes, table), exponents);
        size = _mm512_mask_permutexvar_epi16(size, is_tiny, codes, tiny);
        /* size ^ (codes & sign) */
        _mm512_storeu_si512(to, _mm512_ternarylogic_epi32(size, codes, _mm512_set1_epi16((short)0x8000), 0x78));
    }
}

/* The 16 numbers of each output of a group. */
AVX512_BF16 static void find_tables(const struct codes *codes, const char *group, __m256i tables[PANEL]) {
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    ALIGNED float scales[PANEL], zeros[PANEL];
    for (int tile = 0; tile < 2; tile++) {
        struct factors by = factors_of(codes, group, tile);
        store(scales + tile * LANES, by.scales), store(zeros + tile * LANES, by.zeros);
    }
#pragma GCC unroll 4
    for (int output = 0; output < PANEL; output += 2) {
        __m512 low = _mm512_sub_ps(numbers, _mm512_set1_ps(zeros[output]));
        __m512 high = _mm512_sub_ps(numbers, _mm512_set1_ps(zeros[output + 1]));
        low = _mm512_mul_ps(low, _mm512_set1_ps(scales[output]));
        high = _mm512_mul_ps(high, _mm512_set1_ps(scales[output + 1]));
        _mm512_storeu_si512(tables + output, line_of(low, high));
    }
}

/* Four rows of outputs of a tile, from the four words of 32 bits that each output has, in the order of inputs. */
AVX512 INLINE void put_rows(__m512i words, const __m256i *tables, bf16 *to) {
    const __m512i order = _mm512_set_epi16(7, 6, 7, 6, 7, 6, 7, 6, 5, 4, 5, 4, 5, 4, 5, 4, 3, 2, 3, 2, 3, 2, 3, 2, 1, 0,
                                           1, 0, 1, 0, 1, 0);
    const __m512i shifts = _mm512_set1_epi64(0x000c000c00080008), first = _mm512_set1_epi64(0x0004000400000000);
    const __m512i nibbles = _mm512_mask_blend_epi64(0x55, shifts, first);
#pragma GCC unroll 4
    for (int lane = 0; lane < 4; lane++) {
        __m512i from = _mm512_add_epi16(order, _mm512_set1_epi16((short)(lane * 8)));
        __m512i codes = _mm512_srlv_epi16(_mm512_permutexvar_epi16(from, words), nibbles);
        __m512i table = _mm512_broadcast_i64x4(tables[lane * 4]);
        _mm512_storeu_si512(to + lane * 4 * DEPTH, _mm512_permutexvar_epi16(codes, table));
    }
}

AVX512 static void put_tiles(const __m256i *tables, const char *from, int64_t steps, const char *ahead, bf16 *to) {
    for (int64_t tile = 0; tile < 2 * steps; tile++, from += TILE / 2, ahead += TILE / 2, to += TILE) {
        for (int line = 0; line < 4; line++) __builtin_prefetch(ahead + line * LINE);
        const __m256i *of = tables + tile % 2 * LANES;
        __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + LINE);
        __m512i c = _mm512_loadu_si512(from + 2 * LINE), d = _mm512_loadu_si512(from + 3 * LINE);
        __m512i low = _mm512_unpacklo_epi32(a, b), high = _mm512_unpackhi_epi32(a, b);
        __m512i low2 = _mm512_unpacklo_epi32(c, d), high2 = _mm512_unpackhi_epi32(c, d);
        put_rows(_mm512_unpacklo_epi64(low, low2), of, to);
        put_rows(_mm512_unpackhi_epi64(low, low2), of + 1, to + DEPTH);
        put_rows(_mm512_unpacklo_epi64(high, high2), of + 2, to + 2 * DEPTH);
        put_rows(_mm512_unpackhi_epi64(high, high2), of + 3, to + 3 * DEPTH);
    }
}

/* Ways to convert the numbers of a group. */
enum form { SHORT_INT4, LONG_INT4, SMALL_FP4, ANY_FP4, SYMMETRIC_INT8, ANY_INT8, BLOCK_FP8, ANY_FP8 };

/* Whether all outputs have one scale, with which every number stays in the range of normal numbers. */
AVX512 static int is_block(const struct codes *codes, const char *group) {
    struct factors first = factors_of(codes, group, 0), second = factors_of(codes, group, 1);
    vector scale = all(first.scales[0]), size = (vector)((bits)scale & 0x7fffffff);
    integers is_same = (first.scales == scale) & (second.scales == scale) & (size > 0x1p-100f) & (size < 0x1p100f);
    return _mm512_movepi32_mask((__m512i)is_same) == 0xffff;
}

AVX512 static enum form form_of(const struct codes *codes, const char *group) {
    if (codes->code_kind == FP8) return is_block(codes, group) ? BLOCK_FP8 : ANY_FP8;
    if (codes->code_kind == INT4) return codes->scales == SCALES_FLOAT32 ? LONG_INT4 : SHORT_INT4;
    if (codes->code_kind == INT8) {
        if (!codes->has_zeros) return SYMMETRIC_INT8;
        __m256i zeros = _mm256_loadu_si256((const void *)(group + PANEL * bytes_of_scale(codes->scales)));
        return _mm256_testz_si256(zeros, zeros) ? SYMMETRIC_INT8 : ANY_INT8;
    }
    /* So that all products are normal numbers. */
    __m256i less = _mm256_sub_epi8(_mm256_loadu_si256((const void *)group), _mm256_set1_epi8(2));
    return _mm256_cmpgt_epu8_mask(less, _mm256_set1_epi8(-6)) ? ANY_FP4 : SMALL_FP4;
}

AVX512_BF16 INLINE void scale_steps(const struct factors by[2], const char *group, const char *from, int64_t steps,
                                    bf16 *to, enum form form) {
    const __m512 of_int4 = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 of_fp4 = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    int64_t bytes = form < SYMMETRIC_INT8 ? TILE / 2 : TILE;
    for (int64_t tile = 0; tile < 2 * steps; tile++, from += bytes, to += TILE) {
        const struct factors *of = by + tile % 2;
        if (form == SHORT_INT4) scaled4(of, from, to, of_int4, 1);
        else if (form == LONG_INT4) scaled4(of, from, to, of_int4, 0);
        else if (form == SMALL_FP4) scaled_fp4(group + tile % 2 * LANES, from, to);
        else if (form == ANY_FP4) scaled4(of, from, to, of_fp4, 0);
        else if (form == BLOCK_FP8) scaled_block(of->scales[0], from, to);
        else if (form == ANY_FP8) scaled_fp8(of, from, to);
        else scaled_int8(of, from, to, form == ANY_INT8);
    }
}

AVX512_BF16 static void expand_scaled(const struct codes *codes, const char *group, const char *from, int64_t steps,
                                      bf16 *to) {
    enum form form = form_of(codes, group);
    struct factors by[2];
    for (int tile = 0; tile < 2 && form != SMALL_FP4; tile++) by[tile] = factors_of(codes, group, tile);
    switch (form) {
    case SHORT_INT4: scale_steps(by, group, from, steps, to, SHORT_INT4); break;
    case LONG_INT4: scale_steps(by, group, from, steps, to, LONG_INT4); break;
    case SMALL_FP4: scale_steps(by, group, from, steps, to, SMALL_FP4); break;
    case ANY_FP4: scale_steps(by, group, from, steps, to, ANY_FP4); break;
    case SYMMETRIC_INT8: scale_steps(by, group, from, steps, to, SYMMETRIC_INT8); break;
    case ANY_INT8: scale_steps(by, group, from, steps, to, ANY_INT8); break;
    case BLOCK_FP8: scale_steps(by, group, from, steps, to, BLOCK_FP8); break;
    case ANY_FP8: scale_steps(by, group, from, steps, to, ANY_FP8); break;
    }
}
#endif

struct numbers numbers_of(enum isa isa, const struct codes *codes) {
    struct numbers numbers = {.add_numbers = portable_add_numbers};
#if HAS_X86
    int64_t kind = codes->code_kind, has_zeros = codes->has_zeros;
    numbers.is_scaled = isa == WITH_AMX;
    if (isa == WITH_AVX512_BF16)
        numbers = (struct numbers){0, pairs_codes_adders[has_zeros][kind], 8, 4, pairs_add_numbers, 0};
    if (isa == WITH_AVX512)
        numbers = (struct numbers){0, avx512_codes_adders[has_zeros][kind], 8, 4, avx512_add_numbers, 0};
    if (isa == WITH_AVX2 || isa == WITH_AVX_VNNI)
        numbers = by_avx2(codes);
#elif HAS_NEON
    if (isa == WITH_NEON) numbers.add_numbers = neon_add_numbers;
    if (isa == WITH_NEON_BF16) numbers.add_numbers = neon_bf16_add_numbers;
#endif
    (void)isa, (void)codes;
    return numbers;
}

void expand_steps(enum isa isa, const struct codes *codes, const char *panel, int64_t first, int64_t steps, bf16 *to) {
    int64_t in_group = codes->group / DEPTH, bytes = bytes_of_codes(codes->code_kind);
    code_expander *expand = with_any[codes->code_kind];
#if HAS_X86
    if (isa >= WITH_AVX512) expand = with_avx512[codes->code_kind];
    else if (isa >= WITH_AVX2) expand = codes->code_kind == FP8 ? avx2_expand_fp8 : integer_expanders[codes->code_kind];
#endif
    (void)isa;
    for (int64_t past = first + steps; first < past;) {
        const char *group = panel + first / in_group * bytes_of_group(codes);
        const char *from = group + bytes_of_header(codes) + first % in_group * bytes;
        int64_t some = min64(past - first, in_group - first % in_group);
#if HAS_X86
        if (isa == WITH_AMX) expand_scaled(codes, group, from, some, to);
        else
#endif
            expand(from, some, codes->has_zeros ? group + PANEL * bytes_of_scale(codes->scales) : NULL, to);
        to += some * STEP, first += some;
    }
    __asm__ volatile("" ::: "memory"); /* gcc 12 assumes that loading a tile reads no memory. */
}

void expand_rows(const struct codes *codes, const char *panel, int64_t first, int64_t steps, const char *ahead,
                 bf16 *to) {
#if HAS_X86
    int64_t in_group = codes->group / DEPTH;
    for (int64_t past = first + steps, some; first < past; first += some, ahead += some * (STEP / 2), to += some * STEP) {
        const char *group = panel + first / in_group * bytes_of_group(codes);
        ALIGNED __m256i tables[PANEL];
        some = min64(past - first, in_group - first % in_group);
        find_tables(codes, group, tables);
        put_tiles(tables, group + bytes_of_header(codes) + first % in_group * (STEP / 2), some, ahead, to);
    }
    __asm__ volatile("" ::: "memory"); /* gcc 12 assumes that loading a tile reads no memory. */
#else
    (void)codes, (void)panel, (void)first, (void)steps, (void)ahead, (void)to;
#endif
}
