/* See attention.h. A column's results do not depend on what the others hold. */

#include <math.h>

#include "attention.h"
#include "transpose.h"
#include "vectors.h"

/* ---- any processor ---- */

static void turn_portable(const bf16 *const columns[LANES], int64_t dim, bf16 *queries) {
    memset(queries, 0, LANES * dim * sizeof(bf16));
    for (int lane = 0; lane < LANES && columns[lane]; lane++)
        for (int64_t i = 0; i < dim; i += 2) memcpy(queries + i * LANES + 2 * lane, columns[lane] + i, 2 * sizeof(bf16));
}

CLONES static void score_unit(const bf16 *keys, const bf16 *queries, int64_t dim, float scores[UNIT][LANES]) {
    for (int key = 0; key < UNIT; key++, keys += dim) {
        float sums[LANES] = {0};
        for (int64_t pair = 0; pair < dim / 2; pair++) {
            const bf16 *q = queries + pair * LANES * 2;
            float k0 = widen(keys[2 * pair]), k1 = widen(keys[2 * pair + 1]);
            for (int lane = 0; lane < LANES; lane++) sums[lane] += k0 * widen(q[2 * lane]);
            for (int lane = 0; lane < LANES; lane++) sums[lane] += k1 * widen(q[2 * lane + 1]);
        }
        memcpy(scores[key], sums, sizeof sums);
    }
}

static void score_portable(const struct units *keys, struct spans spans, const bf16 *queries, int tiles, int64_t dim,
                           float scores[][KEYS][LANES]) {
    for (int tile = 0; tile < tiles; tile++)
        for (int unit = spans.from * SPAN / UNIT; unit < spans.past * SPAN / UNIT; unit++)
            if (keys->at[unit])
                score_unit(keys->at[unit], queries + tile * LANES * dim, dim, scores[tile] + unit * UNIT);
}

CLONES static void add_tile(const bf16 *values, struct spans spans, const bf16 *weights, int64_t dim, float *sums) {
    for (int64_t i = 0; i < dim; i += LANES)
        for (int64_t column = 0; column < LANES; column++) {
            float sum[LANES];
            memcpy(sum, sums + column * dim + i, sizeof sum);
            for (int span = spans.from; span < spans.past; span++) {
                const bf16 *v = values + (span * dim + i) * SPAN, *w = weights + (span * LANES + column) * SPAN;
                for (int key = 0; key < SPAN; key++) {
                    float weight = widen(w[key]);
                    for (int lane = 0; lane < LANES; lane++)
                        sum[lane] += weight * widen(v[key / 2 * LANES * 2 + 2 * lane + key % 2]);
                }
            }
            memcpy(sums + column * dim + i, sum, sizeof sum);
        }
}

static void add_portable(const bf16 *values, struct spans spans, const bf16 *weights, int tiles, int64_t dim,
                         struct seen *seen) {
    for (int tile = 0; tile < tiles; tile++)
        add_tile(values, spans, weights + tile * KEYS * LANES, dim, seen[tile].sums);
}

/* Where there is a cap. What scores are to be multiplied by to be powers of two. */
CLONES static float cap_scores(const struct attention *op, struct spans spans, float scores[KEYS][LANES]) {
    float scale = (float)op->scale, cap = (float)op->soft_cap;
    for (int key = spans.from * SPAN; cap > 0 && key < spans.past * SPAN; key++)
        store(scores[key], cap * LOG2_E * tanh_of(load(scores[key]) * scale / cap));
    return cap > 0 ? 1 : scale * LOG2_E;
}

static inline int all_see(const struct columns *columns, int64_t first_key) {
    return first_key >= columns->always_from && first_key + SPAN <= columns->always_past;
}

/* Scores of keys that a column does not see, at minus infinity. */
CLONES static void hide_keys(const struct columns *columns, int64_t first_key, struct spans spans,
                             float scores[KEYS][LANES]) {
    for (int span = spans.from; span < spans.past; span++) {
        if (all_see(columns, first_key + span * SPAN)) continue;
        for (int64_t key = span * SPAN; key < (span + 1) * SPAN; key++)
            for (int lane = 0; lane < LANES; lane++)
                if (first_key + key < columns->first[lane] || first_key + key > columns->last[lane])
                    scores[key][lane] = -INFINITY;
    }
}

CLONES static void weigh_portable(const struct attention *op, const struct columns *columns, int64_t first_key,
                                  struct spans spans, float scores[KEYS][LANES], struct seen *seen, bf16 *weights) {
    float scale = cap_scores(op, spans, scores);
    hide_keys(columns, first_key, spans, scores);
    vector before = load(seen->most), most = before;
    for (int key = spans.from * SPAN; key < spans.past * SPAN; key++) most = larger(load(scores[key]) * scale, most);
    vector base = choose(most == -INFINITY, all(0), most), fade = exp2_of(before - base);
    vector total = load(seen->total) * fade;
    for (int key = spans.from * SPAN; key < spans.past * SPAN; key++) {
        vector p = exp2_of(load(scores[key]) * scale - base);
        total += p;
        for (int column = 0; column < LANES; column++)
            weights[(key / SPAN * LANES + column) * SPAN + key % SPAN] = narrow(p[column]);
    }
    store(seen->most, most);
    store(seen->total, total);
    for (int64_t column = 0; column < columns->count; column++) {
        if (fade[column] == 1) continue;
        float *sums = seen->sums + column * op->dim;
        for (int64_t i = 0; i < op->dim; i += LANES) store(sums + i, load(sums + i) * fade[column]);
    }
}

static const struct attention_products portable = {turn_portable, score_portable, weigh_portable, add_portable};

#if HAS_AMX
/* ---- AVX-512 with products of bfloat16 pairs ---- */

AVX512 static void turn_avx512(const bf16 *const columns[LANES], int64_t dim, bf16 *queries) {
    for (int64_t i = 0; i < dim; i += DEPTH) {
        __m512i pairs[LANES];
        for (int lane = 0; lane < LANES; lane++)
            pairs[lane] = columns[lane] ? _mm512_loadu_si512(columns[lane] + i) : _mm512_setzero_si512();
        transpose(pairs);
        for (int pair = 0; pair < LANES; pair++) _mm512_store_si512(queries + (i + 2 * pair) * LANES, pairs[pair]);
    }
}

#define KEYS_OF_VECTORS 8

AVX512 static void score_vectors(const bf16 *keys, const bf16 *queries, int64_t dim, float scores[][LANES]) {
    __m512 sums[KEYS_OF_VECTORS];
    for (int key = 0; key < KEYS_OF_VECTORS; key++) sums[key] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < dim / 2; pair++) {
        __m512bh q = (__m512bh)_mm512_loadu_si512(queries + pair * LANES * 2);
        for (int key = 0; key < KEYS_OF_VECTORS; key++) {
            int both;
            memcpy(&both, keys + key * dim + 2 * pair, sizeof both);
            sums[key] = _mm512_dpbf16_ps(sums[key], (__m512bh)_mm512_set1_epi32(both), q);
        }
    }
    for (int key = 0; key < KEYS_OF_VECTORS; key++) _mm512_storeu_ps(scores[key], sums[key]);
}

static void score_avx512(const struct units *keys, struct spans spans, const bf16 *queries, int tiles, int64_t dim,
                         float scores[][KEYS][LANES]) {
    for (int tile = 0; tile < tiles; tile++)
        for (int key = spans.from * SPAN; key < spans.past * SPAN; key += KEYS_OF_VECTORS)
            if (keys->at[key / UNIT])
                score_vectors(keys->at[key / UNIT] + key % UNIT * dim, queries + tile * LANES * dim, dim,
                              scores[tile] + key);
}

AVX512 static void add_tile_avx512(const bf16 *values, struct spans spans, const bf16 *weights, int64_t dim,
                                   float *sums) {
    for (int64_t i = 0; i < dim; i += LANES)
        for (int64_t column = 0; column < LANES; column++) {
            __m512 sum = _mm512_loadu_ps(sums + column * dim + i);
            for (int span = spans.from; span < spans.past; span++) {
                const bf16 *v = values + (span * dim + i) * SPAN, *w = weights + (span * LANES + column) * SPAN;
                for (int pair = 0; pair < SPAN / 2; pair++) {
                    int both;
                    memcpy(&both, w + 2 * pair, sizeof both);
                    sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(both),
                                           (__m512bh)_mm512_loadu_si512(v + pair * LANES * 2));
                }
            }
            _mm512_storeu_ps(sums + column * dim + i, sum);
        }
}

static void add_avx512(const bf16 *values, struct spans spans, const bf16 *weights, int tiles, int64_t dim,
                       struct seen *seen) {
    for (int tile = 0; tile < tiles; tile++)
        add_tile_avx512(values, spans, weights + tile * KEYS * LANES, dim, seen[tile].sums);
}

/* As exp2_of of vectors.h, with what AVX-512 has for it; 0 below -125, as numbers too small to be normal take long. */
AVX512 static inline __m512 exp2_avx512(__m512 x) {
    __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-125.0f), _CMP_NLT_UQ); /* a NaN does */
    __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(9.58279e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.590624e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4024099e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9312421e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(counts, p, n);
}

AVX512 static void hide_keys_avx512(const struct columns *columns, int64_t first_key, struct spans spans,
                                    float scores[KEYS][LANES]) {
    __m512i first = _mm512_load_si512(columns->first), last = _mm512_load_si512(columns->last);
    __m512 hidden = _mm512_set1_ps(-INFINITY);
    for (int span = spans.from; span < spans.past; span++) {
        if (all_see(columns, first_key + span * SPAN)) continue;
        for (int key = span * SPAN; key < (span + 1) * SPAN; key++) {
            __m512i at = _mm512_set1_epi32((int)first_key + key);
            __mmask16 hides = _mm512_cmplt_epi32_mask(at, first) | _mm512_cmpgt_epi32_mask(at, last);
            _mm512_mask_store_ps(scores[key], hides, hidden);
        }
    }
}

#define CHAINS 4 /* of maxima and sums, so that none waits for the one before */

AVX512 static void weigh_avx512(const struct attention *op, const struct columns *columns, int64_t first_key,
                                struct spans spans, float scores[KEYS][LANES], struct seen *seen, bf16 *weights) {
    ALIGNED static const uint16_t in_turn[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8,  24, 9,  25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    __m512i order = _mm512_load_si512(in_turn);
    __m512 scale = _mm512_set1_ps(cap_scores(op, spans, scores)), most[CHAINS], total[CHAINS];
    hide_keys_avx512(columns, first_key, spans, scores);
    for (int chain = 0; chain < CHAINS; chain++) most[chain] = _mm512_set1_ps(-INFINITY);
    for (int key = spans.from * SPAN; key < spans.past * SPAN; key += CHAINS)
#pragma GCC unroll 4
        for (int chain = 0; chain < CHAINS; chain++)
            most[chain] = _mm512_max_ps(_mm512_load_ps(scores[key + chain]), most[chain]);
    __m512 before = _mm512_load_ps(seen->most);
    __m512 most_now = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
    most_now = _mm512_max_ps(_mm512_mul_ps(most_now, scale), before);
    __mmask16 sees = _mm512_cmp_ps_mask(most_now, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);
    __m512 base = _mm512_maskz_mov_ps(sees, most_now), fade = exp2_avx512(_mm512_sub_ps(before, base));
    for (int chain = 0; chain < CHAINS; chain++) total[chain] = _mm512_setzero_ps();
    for (int span = spans.from; span < spans.past; span++) {
        __m512i pairs[LANES];
#pragma GCC unroll 16
        for (int pair = 0; pair < LANES; pair++) {
            float(*s)[LANES] = scores + span * SPAN + 2 * pair;
            __m512 even = exp2_avx512(_mm512_fmsub_ps(_mm512_load_ps(s[0]), scale, base));
            __m512 odd = exp2_avx512(_mm512_fmsub_ps(_mm512_load_ps(s[1]), scale, base));
            total[pair % 2 * 2] = _mm512_add_ps(total[pair % 2 * 2], even);
            total[pair % 2 * 2 + 1] = _mm512_add_ps(total[pair % 2 * 2 + 1], odd);
            pairs[pair] = _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
        }
        transpose(pairs);
        for (int column = 0; column < LANES; column++)
            _mm512_store_si512(weights + (span * LANES + column) * SPAN, pairs[column]);
    }
    __m512 all_now = _mm512_add_ps(_mm512_add_ps(total[0], total[1]), _mm512_add_ps(total[2], total[3]));
    _mm512_store_ps(seen->most, most_now);
    _mm512_store_ps(seen->total, _mm512_fmadd_ps(_mm512_load_ps(seen->total), fade, all_now));
    uint32_t fades = _mm512_cmp_ps_mask(fade, _mm512_set1_ps(1), _CMP_NEQ_UQ) & ((1u << columns->count) - 1);
    if (!fades) return;
    ALIGNED float by[LANES];
    _mm512_store_ps(by, fade);
    for (; fades; fades &= fades - 1) {
        int column = __builtin_ctz(fades);
        __m512 factor = _mm512_set1_ps(by[column]);
        float *sums = seen->sums + column * op->dim;
        for (int64_t i = 0; i < op->dim; i += LANES)
            _mm512_store_ps(sums + i, _mm512_mul_ps(_mm512_load_ps(sums + i), factor));
    }
}

static const struct attention_products avx512 = {turn_avx512, score_avx512, weigh_avx512, add_avx512};

/* ---- AMX ---- */

AMX static void score_amx(const struct units *keys, struct spans spans, const bf16 *queries, int tiles, int64_t dim,
                          float scores[][KEYS][LANES]) {
    int64_t stride = dim * sizeof(bf16);
    for (int span = spans.from; span < spans.past; span++) {
        const bf16 *k0 = keys->at[2 * span], *k1 = keys->at[2 * span + 1], *q1 = queries + LANES * dim;
        /* A unit that is not there is multiplied as the other, and its scores are masked. */
        k0 = k0 ? k0 : k1, k1 = k1 ? k1 : k0;
        _tile_zero(0);
        _tile_zero(1);
        if (tiles == PAIR) {
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t i = 0; i < dim; i += DEPTH) {
                _tile_loadd(4, k0 + i, stride);
                _tile_loadd(6, queries + i * LANES, LINE);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(5, k1 + i, stride);
                _tile_dpbf16ps(1, 5, 6);
                _tile_loadd(7, q1 + i * LANES, LINE);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(2, scores[1][span * SPAN], LINE);
            _tile_stored(3, scores[1][span * SPAN + UNIT], LINE);
        } else {
            for (int64_t i = 0; i < dim; i += DEPTH) {
                _tile_loadd(4, k0 + i, stride);
                _tile_loadd(6, queries + i * LANES, LINE);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(5, k1 + i, stride);
                _tile_dpbf16ps(1, 5, 6);
            }
        }
        _tile_stored(0, scores[0][span * SPAN], LINE);
        _tile_stored(1, scores[0][span * SPAN + UNIT], LINE);
    }
}

AMX static void add_amx(const bf16 *values, struct spans spans, const bf16 *weights, int tiles, int64_t dim,
                        struct seen *seen) {
    int64_t stride = dim * sizeof(float);
    for (int64_t i = 0; i < dim; i += 2 * LANES) {
        float *sums = seen[0].sums + i, *others = seen[tiles - 1].sums + i;
        _tile_loadd(0, sums, stride);
        _tile_loadd(1, sums + LANES, stride);
        if (tiles == PAIR) {
            _tile_loadd(2, others, stride);
            _tile_loadd(3, others + LANES, stride);
            for (int span = spans.from; span < spans.past; span++) {
                const bf16 *v = values + (span * dim + i) * SPAN, *w = weights + span * LANES * SPAN;
                _tile_loadd(4, w, LINE);
                _tile_loadd(6, v, LINE);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, v + LANES * SPAN, LINE);
                _tile_dpbf16ps(1, 4, 7);
                _tile_loadd(5, w + KEYS * LANES, LINE);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(2, others, stride);
            _tile_stored(3, others + LANES, stride);
        } else {
            for (int span = spans.from; span < spans.past; span++) {
                const bf16 *v = values + (span * dim + i) * SPAN;
                _tile_loadd(4, weights + span * LANES * SPAN, LINE);
                _tile_loadd(6, v, LINE);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, v + LANES * SPAN, LINE);
                _tile_dpbf16ps(1, 4, 7);
            }
        }
        _tile_stored(0, sums, stride);
        _tile_stored(1, sums + LANES, stride);
    }
}

static const struct attention_products amx = {turn_avx512, score_amx, weigh_avx512, add_amx};
#endif

const struct attention_products *attention_products(enum isa isa) {
#if HAS_AMX
    if (isa == WITH_AMX) return &amx;
    if (isa == WITH_AVX512_BF16) return &avx512;
#endif
    (void)isa;
    return &portable;
}
