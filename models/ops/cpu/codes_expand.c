/* Codes to bfloat16, see codes.h. */

#include "codes.h"
#include "vectors.h"

#if HAS_X86
#include <immintrin.h>
#endif

#define AHEAD 4096 /* bytes between the codes that are read and those that are fetched */

/* What is subtracted from the numbers of codes, and what multiplies the difference, by element of a line: an output's
 * twice. */
struct factors {
    vector zeros[2][2], by[2][2]; /* [tile][half of a line] */
};

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

/* `unit`: by which the numbers that codes are made of are too small. */
CLONES static void find_factors(const struct codes *codes, const char *group, float unit, struct factors *factors) {
    const integers low = {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7}, high = low + 8;
    int64_t size = bytes_of_scale(codes->scales);
    for (int tile = 0; tile < 2; tile++) {
        vector by = load_scales(group + tile * LANES * size, codes->scales) * unit, zeros = {0};
        if (has_zeros(codes->code_kind)) {
            signed_bytes stored;
            memcpy(&stored, group + PANEL * size + tile * LANES, sizeof stored);
            zeros = __builtin_convertvector(stored, vector);
        }
        factors->by[tile][0] = __builtin_shuffle(by, low), factors->by[tile][1] = __builtin_shuffle(by, high);
        factors->zeros[tile][0] = __builtin_shuffle(zeros, low);
        factors->zeros[tile][1] = __builtin_shuffle(zeros, high);
    }
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

INLINE void expand_any(const struct factors *f, const char *from, int64_t steps, bf16 *to, int kind) {
    for (int64_t tile = 0; tile < 2 * steps; tile++) {
        const vector *by = f->by[tile % 2], *zeros = f->zeros[tile % 2];
        for (int line = 0; line < LANES; line++, to += 2 * LANES)
            for (int half = 0; half < 2; half++) {
                vector numbers;
                if (kind >= INT8) numbers = numbers_of_bytes(from + line * 2 * LANES + half * LANES, kind);
                else {
                    bits words;
                    memcpy(&words, from + line / 4 * LINE, sizeof words);
                    words = (words >> (line % 4 * 8 + half * 4)) & 15;
                    numbers = kind == FP4 ? numbers_of_fp4(words)
                                          : __builtin_convertvector((integers)words, vector);
                }
                store_bf16(to + half * LANES, (numbers - zeros[half]) * by[half]);
            }
        from += bytes_of_codes(kind) / 2;
    }
}

CLONES static void expand_int4(const struct factors *f, const char *from, int64_t steps, bf16 *to) {
    expand_any(f, from, steps, to, INT4);
}
CLONES static void expand_fp4(const struct factors *f, const char *from, int64_t steps, bf16 *to) {
    expand_any(f, from, steps, to, FP4);
}
CLONES static void expand_int8(const struct factors *f, const char *from, int64_t steps, bf16 *to) {
    expand_any(f, from, steps, to, INT8);
}
CLONES static void expand_fp8(const struct factors *f, const char *from, int64_t steps, bf16 *to) {
    expand_any(f, from, steps, to, FP8);
}

typedef void expander(const struct factors *f, const char *from, int64_t steps, bf16 *to);
static expander *const portable[] = {expand_int4, expand_fp4, expand_int8, expand_fp8};
static const float units[] = {1, 0.5f, 1, 1};

#if HAS_X86
/* ---- AVX-512 with bfloat16, which rounds two vectors at once ---- */

AVX512_BF16 INLINE void put_line(bf16 *to, __m512 low, __m512 high) {
    __m512bh line = _mm512_cvtne2ps_pbh(high, low);
    memcpy(to, &line, sizeof line);
}

/* A table has the number of each code; its permutation reads but four bits of an element. Products of a zero point and a
 * scale of 16 bits are exact, so that one operation rounds as two would. */
AVX512_BF16 INLINE void expand4(const struct factors *f, const char *from, int64_t steps, bf16 *to, __m512 table) {
    for (int64_t tile = 0; tile < 2 * steps; tile++) {
        const vector *by = f->by[tile % 2], *zeros = f->zeros[tile % 2];
        __m512 low = (__m512)by[0], high = (__m512)by[1];
        __m512 plus_low = (__m512)(-zeros[0] * by[0]), plus_high = (__m512)(-zeros[1] * by[1]);
        for (int lines = 0; lines < LANES; lines += 4, from += LINE, to += 4 * 2 * LANES) {
            _mm_prefetch(from + AHEAD, _MM_HINT_T0);
            __m512i words = _mm512_loadu_si512(from);
#pragma GCC unroll 4
            for (int line = 0; line < 4; line++)
                put_line(to + line * 2 * LANES,
                         _mm512_fmadd_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(words, line * 8), table), low,
                                         plus_low),
                         _mm512_fmadd_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(words, line * 8 + 4), table), high,
                                         plus_high));
        }
    }
}

AVX512_BF16 static void pairs_int4(const struct factors *f, const char *from, int64_t steps, bf16 *to) {
    expand4(f, from, steps, to, _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}

AVX512_BF16 static void pairs_fp4(const struct factors *f, const char *from, int64_t steps, bf16 *to) {
    expand4(f, from, steps, to,
            _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6));
}

AVX512_BF16 INLINE void expand8(const struct factors *f, const char *from, int64_t steps, bf16 *to, int has_zeros) {
    for (int64_t tile = 0; tile < 2 * steps; tile++) {
        const vector *by = f->by[tile % 2], *zeros = f->zeros[tile % 2];
        for (int line = 0; line < LANES; line++, from += 2 * LANES, to += 2 * LANES) {
            if (line % 2 == 0) _mm_prefetch(from + AHEAD, _MM_HINT_T0);
            vector low = (vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)from)));
            vector high =
                (vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(from + LANES))));
            if (has_zeros) low -= zeros[0], high -= zeros[1];
            put_line(to, (__m512)(low * by[0]), (__m512)(high * by[1]));
        }
    }
}

AVX512_BF16 static void pairs_int8(const struct factors *f, const char *from, int64_t steps, bf16 *to) {
    integers is_zero = (f->zeros[0][0] == 0.0f) & (f->zeros[0][1] == 0.0f) & (f->zeros[1][0] == 0.0f) &
                       (f->zeros[1][1] == 0.0f);
    if (_mm512_movepi32_mask((__m512i)is_zero) == 0xffff) expand8(f, from, steps, to, 0);
    else expand8(f, from, steps, to, 1);
}

/* As float16, which has as many bits of exponent and more, a code is 2^-8 times its number. */
AVX512_BF16 static void pairs_fp8(const struct factors *f, const char *from, int64_t steps, bf16 *to) {
    for (int64_t tile = 0; tile < 2 * steps; tile++) {
        const vector *by = f->by[tile % 2];
        for (int line = 0; line < LANES; line++, from += 2 * LANES, to += 2 * LANES) {
            if (line % 2 == 0) _mm_prefetch(from + AHEAD, _MM_HINT_T0);
            __m512i codes = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)from));
            codes = _mm512_and_si512(_mm512_slli_epi16(codes, 7), _mm512_set1_epi16((short)0xbfff));
            put_line(to, _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(codes)), (__m512)by[0]),
                     _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(codes, 1)), (__m512)by[1]));
        }
    }
}

static expander *const pairs[] = {pairs_int4, pairs_fp4, pairs_int8, pairs_fp8};
static const float units_of_pairs[] = {1, 1, 1, 256};
#endif

void expand_steps(enum isa isa, const struct codes *codes, const char *panel, int64_t first, int64_t steps, bf16 *to) {
    int64_t in_group = codes->group / DEPTH, bytes = bytes_of_codes(codes->code_kind);
    expander *expand = portable[codes->code_kind];
    float unit = units[codes->code_kind];
#if HAS_X86
    int is_exact = codes->code_kind != INT4 || codes->scales != SCALES_FLOAT32;
    if (isa >= WITH_AVX512_BF16 && is_exact) expand = pairs[codes->code_kind], unit = units_of_pairs[codes->code_kind];
#endif
    (void)isa;
    for (int64_t past = first + steps; first < past;) {
        const char *group = panel + first / in_group * bytes_of_group(codes);
        int64_t some = min64(past - first, in_group - first % in_group);
        struct factors factors;
        find_factors(codes, group, unit, &factors);
        expand(&factors, group + bytes_of_header(codes) + first % in_group * bytes, some, to);
        to += some * STEP, first += some;
    }
    __asm__ volatile("" ::: "memory"); /* To gcc 12 loading a tile reads no memory. */
}
