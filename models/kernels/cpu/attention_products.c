/* See attention.h. A column's results do not depend on what the others hold. */

#include <math.h>

#include "attention.h"
#include "transpose.h"
#include "vectors.h"

/* ---- any processor ---- */

CLONES static void score_portable(const struct units *keys, const bf16 *queries, int64_t dim,
                                  float scores[KEYS][LANES]) {
    for (int unit = 0; unit < UNITS; unit++) {
        if (!keys->at[unit]) continue;
        for (int key = 0; key < UNIT; key++) {
            const bf16 *k = keys->at[unit] + key * dim;
            float sums[LANES] = {0};
            for (int64_t pair = 0; pair < dim / 2; pair++) {
                const bf16 *q = queries + pair * LANES * 2;
                float k0 = widen(k[2 * pair]), k1 = widen(k[2 * pair + 1]);
                for (int lane = 0; lane < LANES; lane++) sums[lane] += k0 * widen(q[2 * lane]);
                for (int lane = 0; lane < LANES; lane++) sums[lane] += k1 * widen(q[2 * lane + 1]);
            }
            memcpy(scores[unit * UNIT + key], sums, sizeof sums);
        }
    }
}

CLONES static void add_portable(const bf16 *values, const bf16 *weights, int64_t dim, int64_t columns, float *sums) {
    for (int64_t column = 0; column < columns; column++) {
        float *to = sums + column * dim;
        for (int key = 0; key < KEYS; key++) {
            const bf16 *v = values + key / 2 * dim * 2 + key % 2;
            float weight = widen(weights[(key / 32 * LANES + column) * 32 + key % 32]);
            for (int64_t i = 0; i < dim; i++) to[i] += weight * widen(v[2 * i]);
        }
    }
}

/* Capped, and those of keys that a column does not see at minus infinity; what they are then to be multiplied by to be
 * powers of two. It is the same whether something is hidden or not: a column's companions decide that. */
CLONES static float prepare_scores(const struct attention *op, const struct columns *columns, int64_t first_key,
                                   float scores[KEYS][LANES]) {
    float scale = (float)op->scale, cap = (float)op->soft_cap;
    for (int key = 0; cap > 0 && key < KEYS; key++)
        store(scores[key], cap * LOG2_E * tanh_of(load(scores[key]) * scale / cap));
    if (first_key < columns->always_from || first_key + KEYS > columns->always_past) {
        integers first, last;
        memcpy(&first, columns->first, sizeof first);
        memcpy(&last, columns->last, sizeof last);
        for (int key = 0; key < KEYS; key++) {
            integers at = (int32_t)(first_key + key) - (integers){0};
            store(scores[key], choose((at < first) | (at > last), all(-INFINITY), load(scores[key])));
        }
    }
    return cap > 0 ? 1 : scale * LOG2_E;
}

CLONES static void weigh_portable(const struct attention *op, const struct columns *columns, int64_t first_key,
                         float scores[KEYS][LANES], struct seen *seen, bf16 *weights) {
    float scale = prepare_scores(op, columns, first_key, scores);
    vector before = load(seen->most), most = before;
    for (int key = 0; key < KEYS; key++) most = larger(load(scores[key]) * scale, most);
    vector base = choose(most == -INFINITY, all(0), most), fade = exp2_of(before - base);
    vector total = load(seen->total) * fade;
    for (int key = 0; key < KEYS; key++) {
        vector p = exp2_of(load(scores[key]) * scale - base);
        total += p;
        for (int column = 0; column < LANES; column++)
            weights[(key / 32 * LANES + column) * 32 + key % 32] = narrow(p[column]);
    }
    store(seen->most, most);
    store(seen->total, total);
    for (int64_t column = 0; column < columns->count; column++) {
        if (fade[column] == 1) continue;
        float *sums = seen->sums + column * op->dim;
        for (int64_t i = 0; i < op->dim; i += LANES) store(sums + i, load(sums + i) * fade[column]);
    }
}

static const struct attention_products portable = {score_portable, weigh_portable, add_portable};

#if HAS_AMX
/* ---- AVX-512 with products of bfloat16 pairs ---- */

#define KEYS_OF_VECTORS 8

AVX512 static void score_avx512(const struct units *keys, const bf16 *queries, int64_t dim,
                                float scores[KEYS][LANES]) {
    for (int first = 0; first < KEYS; first += KEYS_OF_VECTORS) {
        if (!keys->at[first / UNIT]) continue;
        const bf16 *k = keys->at[first / UNIT] + first % UNIT * dim;
        __m512 sums[KEYS_OF_VECTORS];
        for (int key = 0; key < KEYS_OF_VECTORS; key++) sums[key] = _mm512_setzero_ps();
        for (int64_t pair = 0; pair < dim / 2; pair++) {
            __m512bh q = (__m512bh)_mm512_loadu_si512(queries + pair * LANES * 2);
            for (int key = 0; key < KEYS_OF_VECTORS; key++) {
                int both;
                memcpy(&both, k + key * dim + 2 * pair, sizeof both);
                sums[key] = _mm512_dpbf16_ps(sums[key], (__m512bh)_mm512_set1_epi32(both), q);
            }
        }
        for (int key = 0; key < KEYS_OF_VECTORS; key++) _mm512_storeu_ps(scores[first + key], sums[key]);
    }
}

AVX512 static void add_avx512(const bf16 *values, const bf16 *weights, int64_t dim, int64_t columns, float *sums) {
    for (int64_t i = 0; i < dim; i += LANES)
        for (int64_t column = 0; column < columns; column++) {
            __m512 sum = _mm512_loadu_ps(sums + column * dim + i);
            for (int pair = 0; pair < KEYS / 2; pair++) {
                int both;
                memcpy(&both, weights + (pair / LANES * LANES + column) * 32 + pair % LANES * 2, sizeof both);
                sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(both),
                                       (__m512bh)_mm512_loadu_si512(values + (pair * dim + i) * 2));
            }
            _mm512_storeu_ps(sums + column * dim + i, sum);
        }
}

/* As exp2_of of vectors.h, with what AVX-512 has for it; 0 below -149. */
AVX512 static inline __m512 exp2_avx512(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x); /* a NaN stays one */
    __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(9.58279e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.590624e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4024099e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9312421e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

#define FEW 4 /* columns that four keys are side by side for */

/* What a column does not see of keys [4][FEW] from `first_key` on, at minus infinity. */
AVX512 static inline __m512 hide_avx512(__m512 scores, const struct columns *columns, int64_t first_key) {
    __m512i at = _mm512_add_epi32(_mm512_set1_epi32((int)first_key),
                                  _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3));
    __m512i first = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)columns->first));
    __m512i last = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)columns->last));
    __mmask16 hidden = _mm512_cmplt_epi32_mask(at, first) | _mm512_cmpgt_epi32_mask(at, last);
    return _mm512_mask_mov_ps(scores, hidden, _mm512_set1_ps(-INFINITY));
}

/* The largest, or the sum, of what four keys have for FEW columns, where the sum of all keys is made as for 16. */
AVX512 static inline __m128 largest_of_four(__m512 x) {
    return _mm_max_ps(_mm_max_ps(_mm512_castps512_ps128(x), _mm512_extractf32x4_ps(x, 1)),
                      _mm_max_ps(_mm512_extractf32x4_ps(x, 2), _mm512_extractf32x4_ps(x, 3)));
}
AVX512 static inline __m128 sum_of_four(__m512 x) {
    return _mm_add_ps(_mm_add_ps(_mm512_castps512_ps128(x), _mm512_extractf32x4_ps(x, 1)),
                      _mm_add_ps(_mm512_extractf32x4_ps(x, 2), _mm512_extractf32x4_ps(x, 3)));
}

AVX512 static void fade_sums(const struct attention *op, const float *by, uint32_t fades, float *all_sums) {
    for (; fades; fades &= fades - 1) {
        int column = __builtin_ctz(fades);
        __m512 factor = _mm512_set1_ps(by[column]);
        float *sums = all_sums + column * op->dim;
        for (int64_t i = 0; i < op->dim; i += LANES)
            _mm512_store_ps(sums + i, _mm512_mul_ps(_mm512_load_ps(sums + i), factor));
    }
}

/* As weigh_avx512, number for number, for FEW columns: a token that is decoded has no more, and needs a quarter of it.
 * The other columns' weights are left as they are. */
AVX512 static void weigh_few(const struct attention *op, const struct columns *columns, int64_t first_key,
                             float scores[KEYS][LANES], struct seen *seen, bf16 *weights) {
    ALIGNED static const uint16_t by_column[32] = {0, 4, 8,  12, 16, 20, 24, 28, 1, 5, 9,  13, 17, 21, 25, 29,
                                                   2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31};
    int hides = first_key < columns->always_from || first_key + KEYS > columns->always_past;
    __m512i order = _mm512_load_si512(by_column);
    __m512 scale = _mm512_set1_ps((float)op->scale * LOG2_E), s[KEYS / FEW], most = _mm512_set1_ps(-INFINITY);
#pragma GCC unroll 16
    for (int i = 0; i < KEYS / FEW; i++) {
        float(*four)[LANES] = scores + FEW * i;
        __m256 low = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_load_ps(four[0])), _mm_load_ps(four[1]), 1);
        __m256 high = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_load_ps(four[2])), _mm_load_ps(four[3]), 1);
        s[i] = _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
        if (hides) s[i] = hide_avx512(s[i], columns, first_key + FEW * i);
        most = _mm512_max_ps(s[i], most);
    }
    __m128 before = _mm_load_ps(seen->most);
    __m128 most_now = _mm_max_ps(_mm_mul_ps(largest_of_four(most), _mm512_castps512_ps128(scale)), before);
    __mmask8 sees = _mm_cmp_ps_mask(most_now, _mm_set1_ps(-INFINITY), _CMP_NEQ_UQ);
    __m128 base = _mm_maskz_mov_ps(sees, most_now);
    __m128 fade = _mm512_castps512_ps128(exp2_avx512(_mm512_castps128_ps512(_mm_sub_ps(before, base))));
    __m512 bases = _mm512_broadcast_f32x4(base), total = _mm512_setzero_ps();
    for (int half = 0; half < 2; half++) {
        __m512i keys[4]; /* [4 columns][8 keys] each */
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            __m512 first = exp2_avx512(_mm512_fmsub_ps(s[8 * half + 2 * i], scale, bases));
            __m512 second = exp2_avx512(_mm512_fmsub_ps(s[8 * half + 2 * i + 1], scale, bases));
            total = _mm512_add_ps(_mm512_add_ps(total, first), second);
            keys[i] = _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
        }
        __m512i even0 = _mm512_shuffle_i64x2(keys[0], keys[1], 0x88);
        __m512i odd0 = _mm512_shuffle_i64x2(keys[0], keys[1], 0xDD);
        __m512i even1 = _mm512_shuffle_i64x2(keys[2], keys[3], 0x88);
        __m512i odd1 = _mm512_shuffle_i64x2(keys[2], keys[3], 0xDD);
        bf16 *to = weights + half * LANES * 32;
        _mm512_store_si512(to, _mm512_shuffle_i64x2(even0, even1, 0x88));
        _mm512_store_si512(to + 32, _mm512_shuffle_i64x2(odd0, odd1, 0x88));
        _mm512_store_si512(to + 64, _mm512_shuffle_i64x2(even0, even1, 0xDD));
        _mm512_store_si512(to + 96, _mm512_shuffle_i64x2(odd0, odd1, 0xDD));
    }
    _mm_store_ps(seen->most, most_now);
    __m512 old = _mm512_castps128_ps512(_mm_load_ps(seen->total)), new = _mm512_castps128_ps512(sum_of_four(total));
    new = _mm512_fmadd_ps(old, _mm512_castps128_ps512(fade), new);
    _mm_store_ps(seen->total, _mm512_castps512_ps128(new));
    ALIGNED float by[FEW];
    _mm_store_ps(by, fade);
    uint32_t fades = _mm_cmp_ps_mask(fade, _mm_set1_ps(1), _CMP_NEQ_UQ) & ((1u << columns->count) - 1);
    fade_sums(op, by, fades, seen->sums);
}

#define CHAINS 4 /* of maxima and sums, so that none waits for the one before */

AVX512 static void weigh_avx512(const struct attention *op, const struct columns *columns, int64_t first_key,
                                float scores[KEYS][LANES], struct seen *seen, bf16 *weights) {
    ALIGNED static const uint16_t in_turn[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8,  24, 9,  25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    if (columns->count <= FEW && !(op->soft_cap > 0)) {
        weigh_few(op, columns, first_key, scores, seen, weights);
        return;
    }
    __m512i order = _mm512_load_si512(in_turn);
    __m512 scale = _mm512_set1_ps(prepare_scores(op, columns, first_key, scores)), most[CHAINS], total[CHAINS];
    for (int chain = 0; chain < CHAINS; chain++) most[chain] = _mm512_load_ps(scores[chain]);
    for (int key = CHAINS; key < KEYS; key += CHAINS)
#pragma GCC unroll 4
        for (int chain = 0; chain < CHAINS; chain++)
            most[chain] = _mm512_max_ps(_mm512_load_ps(scores[key + chain]), most[chain]);
    __m512 before = _mm512_load_ps(seen->most);
    __m512 most_now = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
    most_now = _mm512_max_ps(_mm512_mul_ps(most_now, scale), before);
    __mmask16 sees = _mm512_cmp_ps_mask(most_now, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);
    __m512 base = _mm512_maskz_mov_ps(sees, most_now), fade = exp2_avx512(_mm512_sub_ps(before, base));
    for (int chain = 0; chain < CHAINS; chain++) total[chain] = _mm512_setzero_ps();
    for (int half = 0; half < 2; half++) {
        __m512i pairs[LANES];
#pragma GCC unroll 16
        for (int pair = 0; pair < LANES; pair++) {
            float(*s)[LANES] = scores + half * 32 + 2 * pair;
            __m512 even = exp2_avx512(_mm512_fmsub_ps(_mm512_load_ps(s[0]), scale, base));
            __m512 odd = exp2_avx512(_mm512_fmsub_ps(_mm512_load_ps(s[1]), scale, base));
            total[pair % 2 * 2] = _mm512_add_ps(total[pair % 2 * 2], even);
            total[pair % 2 * 2 + 1] = _mm512_add_ps(total[pair % 2 * 2 + 1], odd);
            pairs[pair] = _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
        }
        transpose(pairs);
        for (int column = 0; column < LANES; column++)
            _mm512_store_si512(weights + (half * LANES + column) * 32, pairs[column]);
    }
    __m512 all_now = _mm512_add_ps(_mm512_add_ps(total[0], total[1]), _mm512_add_ps(total[2], total[3]));
    _mm512_store_ps(seen->most, most_now);
    _mm512_store_ps(seen->total, _mm512_fmadd_ps(_mm512_load_ps(seen->total), fade, all_now));
    uint32_t fades = _mm512_cmp_ps_mask(fade, _mm512_set1_ps(1), _CMP_NEQ_UQ) & ((1u << columns->count) - 1);
    if (!fades) return;
    ALIGNED float by[LANES];
    _mm512_store_ps(by, fade);
    fade_sums(op, by, fades, seen->sums);
}

static const struct attention_products avx512 = {score_avx512, weigh_avx512, add_avx512};

/* ---- AMX ---- */

AMX static void score_amx(const struct units *keys, const bf16 *queries, int64_t dim, float scores[KEYS][LANES]) {
    /* A unit that is not there is multiplied as another, and its scores are masked. */
    const bf16 *k0 = keys->at[0], *k1 = keys->at[1], *k2 = keys->at[2], *k3 = keys->at[3];
    const bf16 *any = k0 ? k0 : k1 ? k1 : k2 ? k2 : k3;
    k0 = k0 ? k0 : any, k1 = k1 ? k1 : any, k2 = k2 ? k2 : any, k3 = k3 ? k3 : any;
    int64_t stride = dim * sizeof(bf16);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < dim; i += DEPTH) {
        _tile_loadd(4, queries + i * LANES, LINE);
        _tile_loadd(5, k0 + i, stride);
        _tile_dpbf16ps(0, 5, 4);
        _tile_loadd(6, k1 + i, stride);
        _tile_dpbf16ps(1, 6, 4);
        _tile_loadd(7, k2 + i, stride);
        _tile_dpbf16ps(2, 7, 4);
        _tile_loadd(5, k3 + i, stride);
        _tile_dpbf16ps(3, 5, 4);
    }
    _tile_stored(0, scores[0], LINE);
    _tile_stored(1, scores[UNIT], LINE);
    _tile_stored(2, scores[2 * UNIT], LINE);
    _tile_stored(3, scores[3 * UNIT], LINE);
}

AMX static void add_amx(const bf16 *values, const bf16 *weights, int64_t dim, int64_t columns, float *sums) {
    (void)columns;
    int64_t sums_stride = dim * sizeof(float), values_stride = 2 * dim * sizeof(bf16);
    const bf16 *later = values + LANES * 2 * dim;
    _tile_loadd(6, weights, LINE);
    _tile_loadd(7, weights + LANES * DEPTH, LINE);
    for (int64_t i = 0; i < dim; i += 2 * LANES) {
        _tile_loadd(0, sums + i, sums_stride);
        _tile_loadd(4, values + 2 * i, values_stride);
        _tile_dpbf16ps(0, 6, 4);
        _tile_loadd(1, sums + i + LANES, sums_stride);
        _tile_loadd(5, values + 2 * (i + LANES), values_stride);
        _tile_dpbf16ps(1, 6, 5);
        _tile_loadd(2, later + 2 * i, values_stride);
        _tile_dpbf16ps(0, 7, 2);
        _tile_loadd(3, later + 2 * (i + LANES), values_stride);
        _tile_dpbf16ps(1, 7, 3);
        _tile_stored(0, sums + i, sums_stride);
        _tile_stored(1, sums + i + LANES, sums_stride);
    }
}

static const struct attention_products amx = {score_amx, weigh_avx512, add_amx};
#endif

const struct attention_products *attention_products(enum isa isa) {
#if HAS_AMX
    if (isa == WITH_AMX) return &amx;
    if (isa == WITH_AVX512_BF16) return &avx512;
#endif
    (void)isa;
    return &portable;
}
