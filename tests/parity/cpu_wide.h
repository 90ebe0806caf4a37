/* AVX-512, its products and AVX-VNNI in software, for x86 processors with AVX2 alone: included before all else, it replaces
 * the intrinsics that the operators use, and has isa.c find their sets. AMX's tiles come from cpu_tiles.h.
 *
 * Where a processor leaves a result undefined, it is a pattern; an aligned access that is not ends the process. */

#ifndef CPU_WIDE_H
#define CPU_WIDE_H

#ifdef __x86_64__
#include "cpu_tiles.h"

#include <math.h>

#define target(sets) target("avx2,fma,bmi,bmi2,f16c") /* whatever kaon.h names */
#define __asm__(...)                                  /* of vectors that no register holds */
#define SOFT __attribute__((target(""))) static inline

static inline int cpuid_with_vnni(unsigned leaf, unsigned part, unsigned *a, unsigned *b, unsigned *c, unsigned *d) {
    int is_known = cpuid_with_tiles(leaf, part, a, b, c, d);
    if (leaf == 7 && part == 1) *a |= 1u << 4, is_known = 1;
    return is_known;
}
#undef __get_cpuid_count
#define __get_cpuid_count cpuid_with_vnni
#define __builtin_cpu_supports(name) 1

typedef int8_t v64i8 __attribute__((vector_size(64)));
typedef uint8_t v64u8 __attribute__((vector_size(64)));
typedef int16_t v32i16 __attribute__((vector_size(64)));
typedef uint16_t v32u16 __attribute__((vector_size(64)));
typedef int32_t v16i32 __attribute__((vector_size(64)));
typedef uint32_t v16u32 __attribute__((vector_size(64)));
typedef int64_t v8i64 __attribute__((vector_size(64)));
typedef int8_t v16i8 __attribute__((vector_size(16)));
typedef uint8_t v16u8 __attribute__((vector_size(16)));
typedef int8_t v32i8 __attribute__((vector_size(32)));
typedef uint16_t v16u16 __attribute__((vector_size(32)));
typedef int32_t v8i32 __attribute__((vector_size(32)));

#define EACH(i, count) for (int i = 0; i < (count); i++)

/* A vector whose lanes are `value`, which may depend on the lane's number `i`. */
#define LANES_OF(type, count, value)                  \
    ({                                                \
        type made_;                                   \
        EACH(i, count) made_[i] = (value);            \
        made_;                                        \
    })

/* ---- memory ---- */

SOFT const void *aligned(const void *at) {
    require((uintptr_t)at % 64 == 0);
    return at;
}
SOFT __m512i soft_load(const void *from) {
    __m512i v;
    memcpy(&v, from, sizeof v);
    return v;
}
SOFT void soft_store(void *to, __m512i v) { memcpy(to, &v, sizeof v); }
SOFT __m512i soft_load_words(__mmask32 mask, const void *from) {
    v32i16 v = {0};
    EACH(i, 32) if (mask >> i & 1) {
        int16_t word;
        memcpy(&word, (const char *)from + 2 * i, sizeof word);
        v[i] = word;
    }
    return (__m512i)v;
}
SOFT void soft_store_floats(float *to, __mmask16 mask, __m512 v) {
    aligned(to);
    EACH(i, 16) if (mask >> i & 1) to[i] = v[i];
}
#undef _mm512_loadu_si512
#define _mm512_loadu_si512(from) soft_load(from)
#undef _mm512_load_si512
#define _mm512_load_si512(from) soft_load(aligned(from))
#undef _mm512_loadu_ps
#define _mm512_loadu_ps(from) ((__m512)soft_load(from))
#undef _mm512_load_ps
#define _mm512_load_ps(from) ((__m512)soft_load(aligned(from)))
#undef _mm512_storeu_si512
#define _mm512_storeu_si512(to, v) soft_store(to, v)
#undef _mm512_store_si512
#define _mm512_store_si512(to, v) soft_store((void *)aligned(to), v)
#undef _mm512_storeu_ps
#define _mm512_storeu_ps(to, v) soft_store(to, (__m512i)(v))
#undef _mm512_store_ps
#define _mm512_store_ps(to, v) soft_store((void *)aligned(to), (__m512i)(v))
#undef _mm512_maskz_loadu_epi16
#define _mm512_maskz_loadu_epi16 soft_load_words
#undef _mm512_mask_store_ps
#define _mm512_mask_store_ps soft_store_floats

/* ---- constants ---- */

#undef _mm512_set1_ps
#define _mm512_set1_ps(x) ((float)(x) - (__m512){0})
#undef _mm512_set1_epi8
#define _mm512_set1_epi8(x) ((__m512i)((v64i8){0} + (int8_t)(x)))
#undef _mm512_set1_epi16
#define _mm512_set1_epi16(x) ((__m512i)((v32i16){0} + (int16_t)(x)))
#undef _mm512_set1_epi32
#define _mm512_set1_epi32(x) ((__m512i)((v16i32){0} + (int32_t)(x)))
#undef _mm512_set1_epi64
#define _mm512_set1_epi64(x) ((__m512i)((v8i64){0} + (int64_t)(x)))
#undef _mm512_setzero_ps
#define _mm512_setzero_ps() ((__m512){0})
#undef _mm512_setzero_si512
#define _mm512_setzero_si512() ((__m512i){0})
#undef _mm512_setr_ps
#define _mm512_setr_ps(...) ((__m512){__VA_ARGS__})
#undef _mm512_setr_epi32
#define _mm512_setr_epi32(...) ((__m512i)(v16i32){__VA_ARGS__})
#undef _mm512_setr_epi64
#define _mm512_setr_epi64(...) ((__m512i)(v8i64){__VA_ARGS__})
#undef _mm512_set_epi16
#define _mm512_set_epi16(...) soft_reversed((v32i16){__VA_ARGS__})
SOFT __m512i soft_reversed(v32i16 v) { return (__m512i)LANES_OF(v32i16, 32, v[31 - i]); }
#undef _mm512_set4_epi32
#define _mm512_set4_epi32(d, c, b, a) ((__m512i)(v16i32){a, b, c, d, a, b, c, d, a, b, c, d, a, b, c, d})

/* ---- arithmetic ---- */

SOFT __m512 soft_fmadd(__m512 a, __m512 b, __m512 c) { return LANES_OF(__m512, 16, __builtin_fmaf(a[i], b[i], c[i])); }
SOFT __m512 soft_max(__m512 a, __m512 b) { return LANES_OF(__m512, 16, a[i] > b[i] ? a[i] : b[i]); }
SOFT __m512 soft_round(__m512 v) { return LANES_OF(__m512, 16, __builtin_rintf(v[i])); }
SOFT __m512 soft_scalef(__mmask16 mask, __m512 a, __m512 b) {
    return LANES_OF(__m512, 16, !(mask >> i & 1) ? 0 : b[i] != b[i] ? b[i] : ldexpf(a[i], (int)floorf(b[i])));
}
SOFT float soft_widen(uint16_t half) {
    uint32_t bits_of = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits_of, sizeof value);
    return value;
}
SOFT uint16_t soft_narrow(float value) {
    uint32_t b;
    memcpy(&b, &value, sizeof b);
    if ((b & 0x7fffffff) > 0x7f800000) return (uint16_t)(b >> 16 | 0x40);
    if ((b & 0x7f800000) == 0) return (uint16_t)(b >> 16 & 0x8000); /* Denormal numbers become 0. */
    return (uint16_t)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}
SOFT __m512 soft_dpbf16(__m512 sum, __m512i a, __m512i b) {
    v32u16 x = (v32u16)a, y = (v32u16)b;
    EACH(i, 16) for (int odd = 1; odd >= 0; odd--)
        sum[i] = __builtin_fmaf(soft_widen(x[2 * i + odd]), soft_widen(y[2 * i + odd]), sum[i]);
    return sum;
}
SOFT __m512i soft_dpbusd(__m512i sum, __m512i a, __m512i b) {
    v16i32 s = (v16i32)sum;
    EACH(i, 64) s[i / 4] += ((v64u8)a)[i] * ((v64i8)b)[i];
    return (__m512i)s;
}
SOFT __m256i soft_dpbusd_short(__m256i sum, __m256i a, __m256i b) {
    v8i32 s = (v8i32)sum;
    EACH(i, 32) s[i / 4] += (uint8_t)((v32i8)a)[i] * ((v32i8)b)[i];
    return (__m256i)s;
}
SOFT __m512i soft_narrow_both(__m512 high, __m512 low) {
    return (__m512i)LANES_OF(v32u16, 32, soft_narrow(i < 16 ? low[i] : high[i - 16]));
}
SOFT __m256i soft_narrow_one(__m512 v) { return (__m256i)LANES_OF(v16u16, 16, soft_narrow(v[i])); }
SOFT __m512 soft_of_halves(__m256i v) {
    __m256 parts[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(v)), _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1))};
    return (__m512)soft_load(parts);
}
#undef _mm512_add_ps
#define _mm512_add_ps(a, b) ((__m512)(a) + (__m512)(b))
#undef _mm512_sub_ps
#define _mm512_sub_ps(a, b) ((__m512)(a) - (__m512)(b))
#undef _mm512_mul_ps
#define _mm512_mul_ps(a, b) ((__m512)(a) * (__m512)(b))
#undef _mm512_fmadd_ps
#define _mm512_fmadd_ps(a, b, c) soft_fmadd(a, b, c)
#undef _mm512_fmsub_ps
#define _mm512_fmsub_ps(a, b, c) soft_fmadd(a, b, -(c))
#undef _mm512_max_ps
#define _mm512_max_ps soft_max
#undef _mm512_roundscale_ps
#define _mm512_roundscale_ps(v, how) (require(((how) & 0xf7) == 0), soft_round(v))
#undef _mm512_maskz_scalef_ps
#define _mm512_maskz_scalef_ps soft_scalef
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps(sum, a, b) soft_dpbf16(sum, (__m512i)(a), (__m512i)(b))
#undef _mm512_dpbusd_epi32
#define _mm512_dpbusd_epi32 soft_dpbusd
#undef _mm256_dpbusd_avx_epi32
#define _mm256_dpbusd_avx_epi32 soft_dpbusd_short
#undef _mm512_cvtne2ps_pbh
#define _mm512_cvtne2ps_pbh soft_narrow_both
#undef _mm512_cvtneps_pbh
#define _mm512_cvtneps_pbh soft_narrow_one
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps soft_of_halves
#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps(v) __builtin_convertvector((v16i32)(v), __m512)
#undef _mm512_cvtepi8_epi32
#define _mm512_cvtepi8_epi32(v) ((__m512i)__builtin_convertvector((v16i8)(v), v16i32))
#undef _mm512_cvtepu8_epi32
#define _mm512_cvtepu8_epi32(v) ((__m512i)__builtin_convertvector((v16u8)(v), v16i32))
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32(v) ((__m512i)__builtin_convertvector((v16u16)(v), v16i32))
#undef _mm512_cvtepi8_epi16
#define _mm512_cvtepi8_epi16(v) ((__m512i)__builtin_convertvector((v32i8)(v), v32i16))

SOFT __m512i soft_shift16(__m512i v, __m512i by, int is_left) {
    v32u16 x = (v32u16)v, n = (v32u16)by;
    return (__m512i)LANES_OF(v32u16, 32, (uint16_t)(n[i] > 15 ? 0 : is_left ? x[i] << n[i] : x[i] >> n[i]));
}
SOFT __m512i soft_shift32(__m512i v, unsigned by, int is_left) {
    v16u32 x = (v16u32)v;
    return (__m512i)LANES_OF(v16u32, 16, by > 31 ? 0 : is_left ? x[i] << by : x[i] >> by);
}
SOFT __m512i soft_ternary(__m512i a, __m512i b, __m512i c, int table) {
    __m512i found = {0};
    EACH(i, 8) if (table >> i & 1) found |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return found;
}
#undef _mm512_and_si512
#define _mm512_and_si512(a, b) ((__m512i)(a) & (__m512i)(b))
#undef _mm512_or_si512
#define _mm512_or_si512(a, b) ((__m512i)(a) | (__m512i)(b))
#undef _mm512_ternarylogic_epi32
#define _mm512_ternarylogic_epi32 soft_ternary
#undef _mm512_add_epi32
#define _mm512_add_epi32(a, b) ((__m512i)((v16u32)(a) + (v16u32)(b)))
#undef _mm512_add_epi16
#define _mm512_add_epi16(a, b) ((__m512i)((v32u16)(a) + (v32u16)(b)))
#undef _mm512_sub_epi16
#define _mm512_sub_epi16(a, b) ((__m512i)((v32u16)(a) - (v32u16)(b)))
#undef _mm512_sub_epi8
#define _mm512_sub_epi8(a, b) ((__m512i)((v64u8)(a) - (v64u8)(b)))
#undef _mm512_slli_epi16
#define _mm512_slli_epi16(v, by) soft_shift16(v, _mm512_set1_epi16(by), 1)
#undef _mm512_srli_epi16
#define _mm512_srli_epi16(v, by) soft_shift16(v, _mm512_set1_epi16(by), 0)
#undef _mm512_srlv_epi16
#define _mm512_srlv_epi16(v, by) soft_shift16(v, by, 0)
#undef _mm512_slli_epi32
#define _mm512_slli_epi32(v, by) soft_shift32(v, (unsigned)(by), 1)
#undef _mm512_srli_epi32
#define _mm512_srli_epi32(v, by) soft_shift32(v, (unsigned)(by), 0)

/* ---- masks ---- */

#define MASK_OF(count, condition)                                          \
    ({                                                                     \
        uint64_t mask_ = 0;                                                \
        EACH(i, count) mask_ |= (uint64_t)((condition) ? 1 : 0) << i;      \
        mask_;                                                             \
    })
SOFT int soft_compares(float a, float b, int how) {
    require(how == _CMP_NLT_UQ || how == _CMP_NEQ_UQ);
    return how == _CMP_NLT_UQ ? !(a < b) : a != b;
}
SOFT __mmask16 soft_cmp(__m512 a, __m512 b, int how) { return (__mmask16)MASK_OF(16, soft_compares(a[i], b[i], how)); }
SOFT __mmask8 soft_cmp_four(__m128 a, __m128 b, int how) { return (__mmask8)MASK_OF(4, soft_compares(a[i], b[i], how)); }
SOFT __mmask16 soft_less(__m512i a, __m512i b) { return (__mmask16)MASK_OF(16, ((v16i32)a)[i] < ((v16i32)b)[i]); }
SOFT __mmask32 soft_test(__m512i a, __m512i b) { return (__mmask32)MASK_OF(32, ((v32i16)(a & b))[i]); }
SOFT __mmask16 soft_signs(__m512i v) { return (__mmask16)MASK_OF(16, ((v16i32)v)[i] < 0); }
SOFT __mmask32 soft_greater_bytes(__m256i a, __m256i b) {
    return (__mmask32)MASK_OF(32, (uint8_t)((v32i8)a)[i] > (uint8_t)((v32i8)b)[i]);
}
SOFT __m512 soft_choose(__m512 no, __mmask16 mask, __m512 yes) {
    return LANES_OF(__m512, 16, mask >> i & 1 ? yes[i] : no[i]);
}
SOFT __m512i soft_choose16(__m512i no, __mmask32 mask, __m512i yes) {
    return (__m512i)LANES_OF(v32i16, 32, mask >> i & 1 ? ((v32i16)yes)[i] : ((v32i16)no)[i]);
}
SOFT __m512i soft_choose64(__m512i no, __mmask8 mask, __m512i yes) {
    return (__m512i)LANES_OF(v8i64, 8, mask >> i & 1 ? ((v8i64)yes)[i] : ((v8i64)no)[i]);
}
SOFT __m128 soft_keep_four(__mmask8 mask, __m128 v) { return LANES_OF(__m128, 4, mask >> i & 1 ? v[i] : 0); }
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask soft_cmp
#undef _mm_cmp_ps_mask
#define _mm_cmp_ps_mask soft_cmp_four
#undef _mm512_cmplt_epi32_mask
#define _mm512_cmplt_epi32_mask soft_less
#undef _mm512_cmpgt_epi32_mask
#define _mm512_cmpgt_epi32_mask(a, b) soft_less(b, a)
#undef _mm512_test_epi16_mask
#define _mm512_test_epi16_mask soft_test
#undef _mm512_testn_epi16_mask
#define _mm512_testn_epi16_mask(a, b) ((__mmask32)~soft_test(a, b))
#undef _mm512_movepi32_mask
#define _mm512_movepi32_mask soft_signs
#undef _mm256_cmpgt_epu8_mask
#define _mm256_cmpgt_epu8_mask soft_greater_bytes
#undef _mm512_mask_mov_ps
#define _mm512_mask_mov_ps soft_choose
#undef _mm512_maskz_mov_ps
#define _mm512_maskz_mov_ps(mask, v) soft_choose((__m512){0}, mask, v)
#undef _mm_maskz_mov_ps
#define _mm_maskz_mov_ps soft_keep_four
#undef _mm512_maskz_add_epi16
#define _mm512_maskz_add_epi16(mask, a, b) soft_choose16((__m512i){0}, mask, _mm512_add_epi16(a, b))
#undef _mm512_mask_blend_epi16
#define _mm512_mask_blend_epi16(mask, a, b) soft_choose16(a, mask, b)
#undef _mm512_mask_blend_epi64
#define _mm512_mask_blend_epi64(mask, a, b) soft_choose64(a, mask, b)

/* ---- parts and orders ---- */

SOFT __m512i soft_first_of(const void *from, int bytes, int fill) {
    __m512i v;
    memset(&v, fill, sizeof v);
    memcpy(&v, from, (size_t)bytes);
    return v;
}
#define FIRST_OF(v, type, fill)                          \
    ({                                                   \
        type given_ = (v);                               \
        soft_first_of(&given_, sizeof given_, fill);     \
    })
#define UNDEFINED 0x5a
SOFT __m512i soft_repeated(const void *from, int bytes) {
    __m512i v;
    for (int at = 0; at < 64; at += bytes) memcpy((char *)&v + at, from, (size_t)bytes);
    return v;
}
#define REPEATED(v, type)                            \
    ({                                               \
        type given_ = (v);                           \
        soft_repeated(&given_, sizeof given_);       \
    })
SOFT __m512i soft_with_upper(__m512i v, __m256i half) {
    memcpy((char *)&v + 32, &half, sizeof half);
    return v;
}
SOFT __m128i soft_quarter(__m512i v, int part) {
    __m128i found;
    memcpy(&found, (char *)&v + 16 * part, sizeof found);
    return found;
}
SOFT __m256i soft_half(__m512i v, int part) {
    __m256i found;
    memcpy(&found, (char *)&v + 32 * part, sizeof found);
    return found;
}
#undef _mm512_castsi128_si512
#define _mm512_castsi128_si512(v) FIRST_OF(v, __m128i, UNDEFINED)
#undef _mm512_castsi256_si512
#define _mm512_castsi256_si512(v) FIRST_OF(v, __m256i, UNDEFINED)
#undef _mm512_castps128_ps512
#define _mm512_castps128_ps512(v) ((__m512)FIRST_OF(v, __m128, UNDEFINED))
#undef _mm512_castps256_ps512
#define _mm512_castps256_ps512(v) ((__m512)FIRST_OF(v, __m256, UNDEFINED))
#undef _mm512_zextsi128_si512
#define _mm512_zextsi128_si512(v) FIRST_OF(v, __m128i, 0)
#undef _mm512_castps512_ps128
#define _mm512_castps512_ps128(v) ((__m128)soft_quarter((__m512i)(v), 0))
#undef _mm512_extractf32x4_ps
#define _mm512_extractf32x4_ps(v, part) ((__m128)soft_quarter((__m512i)(v), part))
#undef _mm512_castsi512_si256
#define _mm512_castsi512_si256(v) soft_half(v, 0)
#undef _mm512_extracti64x4_epi64
#define _mm512_extracti64x4_epi64(v, part) soft_half(v, part)
#undef _mm512_inserti64x4
#define _mm512_inserti64x4(v, half, part) (require((part) == 1), soft_with_upper(v, half))
#undef _mm512_insertf32x8
#define _mm512_insertf32x8(v, half, part) ((__m512)(require((part) == 1), soft_with_upper((__m512i)(v), (__m256i)(half))))
#undef _mm512_broadcast_i32x4
#define _mm512_broadcast_i32x4(v) REPEATED(v, __m128i)
#undef _mm512_broadcast_f32x4
#define _mm512_broadcast_f32x4(v) ((__m512)REPEATED(v, __m128))
#undef _mm512_broadcast_i64x4
#define _mm512_broadcast_i64x4(v) REPEATED(v, __m256i)

/* Quarters of `a`, then of `b`. */
SOFT __m512i soft_quarters(__m512i a, __m512i b, int which) {
    return (__m512i)LANES_OF(v8i64, 8, ((v8i64)(i < 4 ? a : b))[(which >> i / 2 * 2 & 3) * 2 + i % 2]);
}
/* Elements of `bytes` of one half of each quarter, of `a` and `b` in turn. */
SOFT __m512i soft_unpack(__m512i a, __m512i b, int bytes, int is_high) {
    v64i8 found;
    EACH(i, 64) {
        int element = i % 16 / bytes;
        int from = i / 16 * 16 + is_high * 8 + element / 2 * bytes + i % bytes;
        found[i] = ((v64i8)(element % 2 ? b : a))[from];
    }
    return (__m512i)found;
}
SOFT __m512i soft_permute16(__m512i a, __m512i at, __m512i b) {
    v32i16 n = (v32i16)at;
    return (__m512i)LANES_OF(v32i16, 32, ((v32i16)(n[i] & 32 ? b : a))[n[i] & 31]);
}
SOFT __m512i soft_permute8(__m512i a, __m512i at, __m512i b) {
    v64i8 n = (v64i8)at;
    return (__m512i)LANES_OF(v64i8, 64, ((v64i8)(n[i] & 64 ? b : a))[n[i] & 63]);
}
SOFT __m512 soft_permute32(__m512i at, __m512 v) { return LANES_OF(__m512, 16, v[((v16i32)at)[i] & 15]); }
SOFT __m512i soft_permute64(__m512i at, __m512i v) {
    return (__m512i)LANES_OF(v8i64, 8, ((v8i64)v)[((v8i64)at)[i] & 7]);
}
SOFT __m512i soft_shuffle8(__m512i v, __m512i at) {
    v64i8 n = (v64i8)at;
    return (__m512i)LANES_OF(v64i8, 64, (int8_t)(n[i] < 0 ? 0 : ((v64i8)v)[i / 16 * 16 + (n[i] & 15)]));
}
#undef _mm512_shuffle_i32x4
#define _mm512_shuffle_i32x4 soft_quarters
#undef _mm512_shuffle_i64x2
#define _mm512_shuffle_i64x2 soft_quarters
#undef _mm512_unpacklo_epi8
#define _mm512_unpacklo_epi8(a, b) soft_unpack(a, b, 1, 0)
#undef _mm512_unpackhi_epi8
#define _mm512_unpackhi_epi8(a, b) soft_unpack(a, b, 1, 1)
#undef _mm512_unpacklo_epi32
#define _mm512_unpacklo_epi32(a, b) soft_unpack(a, b, 4, 0)
#undef _mm512_unpackhi_epi32
#define _mm512_unpackhi_epi32(a, b) soft_unpack(a, b, 4, 1)
#undef _mm512_unpacklo_epi64
#define _mm512_unpacklo_epi64(a, b) soft_unpack(a, b, 8, 0)
#undef _mm512_unpackhi_epi64
#define _mm512_unpackhi_epi64(a, b) soft_unpack(a, b, 8, 1)
#undef _mm512_unpacklo_ps
#define _mm512_unpacklo_ps(a, b) ((__m512)soft_unpack((__m512i)(a), (__m512i)(b), 4, 0))
#undef _mm512_unpackhi_ps
#define _mm512_unpackhi_ps(a, b) ((__m512)soft_unpack((__m512i)(a), (__m512i)(b), 4, 1))
#undef _mm512_unpacklo_pd
#define _mm512_unpacklo_pd(a, b) ((__m512d)soft_unpack((__m512i)(a), (__m512i)(b), 8, 0))
#undef _mm512_unpackhi_pd
#define _mm512_unpackhi_pd(a, b) ((__m512d)soft_unpack((__m512i)(a), (__m512i)(b), 8, 1))
#undef _mm512_permutexvar_epi16
#define _mm512_permutexvar_epi16(at, v) soft_permute16(v, (__m512i)((v32i16)(at) & 31), v)
#undef _mm512_mask_permutexvar_epi16
#define _mm512_mask_permutexvar_epi16(no, mask, at, v) soft_choose16(no, mask, _mm512_permutexvar_epi16(at, v))
#undef _mm512_permutex2var_epi16
#define _mm512_permutex2var_epi16 soft_permute16
#undef _mm512_permutex2var_epi8
#define _mm512_permutex2var_epi8 soft_permute8
#undef _mm512_permutexvar_ps
#define _mm512_permutexvar_ps soft_permute32
#undef _mm512_permutexvar_epi64
#define _mm512_permutexvar_epi64 soft_permute64
#undef _mm512_shuffle_epi8
#define _mm512_shuffle_epi8 soft_shuffle8
#endif

#endif
