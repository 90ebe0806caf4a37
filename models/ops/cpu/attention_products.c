/* See attention.h. A column's results do not depend on the other columns. */

#include <math.h>

#include "attention.h"
#include "transpose.h"
#include "vectors.h"

/* Lines that are prefetched at a time, next to this much computation. */
#define OF_SCORE 16
#define OF_WEIGH 32
#define OF_ADD 16

/* Apply the soft cap, if there is one. Returns the factor that makes scores exponents of 2. */
CLONES static float cap_scores(const struct attention *op, struct spans spans, float scores[KEYS][LANES]) {
    float scale = (float)op->scale, cap = (float)op->soft_cap;
    for (int key = spans.from * SPAN; cap > 0 && key < spans.past * SPAN; key++)
        store(scores[key], cap * LOG2_E * tanh_of(load(scores[key]) * scale / cap));
    return cap > 0 ? 1 : scale * LOG2_E;
}

static inline int all_see(const struct columns *columns, int64_t first_key) {
    return first_key >= columns->always_from && first_key + SPAN <= columns->always_past;
}

/* Set scores of keys to which a column does not attend to minus infinity. */
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

/* ---- float32 ---- */

#define NAME(x) portable_##x
#define TARGET
#define WIDTH 4
#define SUMS 8
#define HAS_FEW 0
#include "attention_kernel.h"

#if HAS_X86
#define NAME(x) avx2_##x
#define TARGET AVX2
#define WIDTH 8
#define SUMS 8
#define HAS_FEW 1
#include "attention_kernel.h"

#define NAME(x) avx512_##x
#define TARGET AVX512
#define WIDTH 16
#define SUMS 8
#define HAS_FEW 0
#include "attention_kernel.h"

/* ---- AVX-512 with products of bfloat16 pairs ---- */

AVX512_BF16 static void turn_avx512(const bf16 *const columns[LANES], int64_t dim, void *to) {
    bf16 *queries = to;
    for (int64_t i = 0; i < dim; i += DEPTH) {
        __m512i pairs[LANES];
        int64_t from = min64(i, dim - DEPTH);
        __mmask32 new = ~0u << (i - from);
        for (int lane = 0; lane < LANES; lane++)
            pairs[lane] = columns[lane] ? _mm512_maskz_loadu_epi16(new, columns[lane] + from) : _mm512_setzero_si512();
        transpose(pairs);
        for (int pair = 0; pair < LANES; pair++) _mm512_store_si512(queries + (i + 2 * pair) * LANES, pairs[pair]);
    }
}

#define KEYS_OF_VECTORS 8

/* Pairs of elements of a number of keys times the columns of one or two tiles. */
AVX512_BF16 INLINE void score_elements(const bf16 *keys, const bf16 *queries, int pairs, int tiles, int64_t dim,
                                       __m512 sums[PAIR][KEYS_OF_VECTORS]) {
    int64_t apart = LANES * query_size(dim);
#pragma GCC unroll 4
    for (int pair = 0; pair < pairs; pair++, keys += 2, queries += 2 * LANES) {
        __m512bh q[PAIR];
#pragma GCC unroll 2
        for (int tile = 0; tile < tiles; tile++) q[tile] = (__m512bh)_mm512_loadu_si512(queries + tile * apart);
#pragma GCC unroll 8
        for (int i = 0; i < KEYS_OF_VECTORS; i++) {
            int both;
            memcpy(&both, keys + i * dim, sizeof both);
            __m512bh k = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 2
            for (int tile = 0; tile < tiles; tile++) sums[tile][i] = _mm512_dpbf16_ps(sums[tile][i], k, q[tile]);
        }
    }
}

/* A number of keys times the columns of one or two tiles. */
AVX512_BF16 INLINE void score_vectors(const bf16 *keys, const bf16 *queries, int tiles, int64_t dim,
                                      float scores[][KEYS][LANES], int key) {
    __m512 sums[PAIR][KEYS_OF_VECTORS];
    int64_t whole = dim / DEPTH * DEPTH, rest = dim - whole;
#pragma GCC unroll 2
    for (int tile = 0; tile < tiles; tile++)
#pragma GCC unroll 8
        for (int i = 0; i < KEYS_OF_VECTORS; i++) sums[tile][i] = _mm512_setzero_ps();
    score_elements(keys, queries, (int)whole / 2, tiles, dim, sums);
    /* The last pairs are at the end of their 32 elements. */
    if (rest) score_elements(keys + whole, queries + (whole + DEPTH - rest) * LANES, (int)rest / 2, tiles, dim, sums);
#pragma GCC unroll 2
    for (int tile = 0; tile < tiles; tile++)
#pragma GCC unroll 8
        for (int i = 0; i < KEYS_OF_VECTORS; i++) _mm512_storeu_ps(scores[tile][key + i], sums[tile][i]);
}

AVX512_BF16 static void score_one(const bf16 *keys, const bf16 *queries, int64_t dim, float scores[][KEYS][LANES],
                                  int key) {
    score_vectors(keys, queries, 1, dim, scores, key);
}

AVX512_BF16 static void score_two(const bf16 *keys, const bf16 *queries, int64_t dim, float scores[][KEYS][LANES],
                                  int key) {
    score_vectors(keys, queries, PAIR, dim, scores, key);
}

#define FEW FEW_COLUMNS
#define UNITS_OF_FEW 4 /* units at once: with one, each product waits for the previous one */

#define PART 16 /* elements of a key at a time: with 32, registers would not hold the pairs and the sums of all units */

/* Pairs of 16 elements of a unit's keys, [8][16 keys]. */
AVX512_BF16 INLINE void turn_part(const bf16 *keys, int64_t dim, __m512i pairs[PART / 2]) {
    __m512i two[8], quarter[2][4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const bf16 *key = keys + (i / 4 * 8 + i % 4) * dim;
        two[i] = _mm512_castsi256_si512(_mm256_loadu_si256((const void *)key));
        two[i] = _mm512_inserti64x4(two[i], _mm256_loadu_si256((const void *)(key + 4 * dim)), 1);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        quarter[0][i] = _mm512_shuffle_i32x4(two[i], two[i + 4], 0x88);
        quarter[1][i] = _mm512_shuffle_i32x4(two[i], two[i + 4], 0xdd);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++, pairs += 4) {
        const __m512i *q = quarter[half];
        __m512i low0 = _mm512_unpacklo_epi32(q[0], q[1]), high0 = _mm512_unpackhi_epi32(q[0], q[1]);
        __m512i low1 = _mm512_unpacklo_epi32(q[2], q[3]), high1 = _mm512_unpackhi_epi32(q[2], q[3]);
        pairs[0] = _mm512_unpacklo_epi64(low0, low1), pairs[1] = _mm512_unpackhi_epi64(low0, low1);
        pairs[2] = _mm512_unpacklo_epi64(high0, high1), pairs[3] = _mm512_unpackhi_epi64(high0, high1);
    }
}

/* 16 elements of a unit's keys, of which those from the pair `first` on are used. */
AVX512_BF16 INLINE void score_part(const bf16 *keys, const bf16 *queries, int columns, int64_t dim, int first,
                                   __m512 sums[FEW]) {
    __m512i pairs[PART / 2];
    turn_part(keys, dim, pairs);
#pragma GCC unroll 8
    for (int pair = first; pair < PART / 2; pair++)
#pragma GCC unroll 4
        for (int column = 0; column < columns; column++) {
            int both;
            memcpy(&both, queries + (pair * LANES + column) * 2, sizeof both);
            sums[column] = _mm512_dpbf16_ps(sums[column], (__m512bh)pairs[pair], (__m512bh)_mm512_set1_epi32(both));
        }
}

/* Sums of a unit's keys by each column, to scores by key. */
AVX512_BF16 INLINE void put_few(const __m512 sums[FEW], float scores[][LANES]) {
    __m512 low0 = _mm512_unpacklo_ps(sums[0], sums[1]), high0 = _mm512_unpackhi_ps(sums[0], sums[1]);
    __m512 low1 = _mm512_unpacklo_ps(sums[2], sums[3]), high1 = _mm512_unpackhi_ps(sums[2], sums[3]);
    __m512d four[4] = {_mm512_unpacklo_pd((__m512d)low0, (__m512d)low1), _mm512_unpackhi_pd((__m512d)low0, (__m512d)low1),
                       _mm512_unpacklo_pd((__m512d)high0, (__m512d)high1),
                       _mm512_unpackhi_pd((__m512d)high0, (__m512d)high1)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        _mm_store_ps(scores[i], _mm512_castps512_ps128((__m512)four[i]));
        _mm_store_ps(scores[4 + i], _mm512_extractf32x4_ps((__m512)four[i], 1));
        _mm_store_ps(scores[8 + i], _mm512_extractf32x4_ps((__m512)four[i], 2));
        _mm_store_ps(scores[12 + i], _mm512_extractf32x4_ps((__m512)four[i], 3));
    }
}

/* Keys of `units` units together, times each of a few columns, both constants: the same sums as for 16 columns, in a
 * quarter of the time. */
AVX512_BF16 INLINE void score_few(const bf16 *const *keys, int units, const bf16 *queries, int columns, int64_t dim,
                                  float scores[][LANES], struct fetches *ahead) {
    __m512 sums[UNITS_OF_FEW][FEW];
    for (int unit = 0; unit < units; unit++)
        for (int column = 0; column < FEW; column++) sums[unit][column] = _mm512_setzero_ps();
    int64_t skipped = query_size(dim) - dim; /* before the queries' last elements */
    for (int64_t i = 0; i + PART <= dim; i += PART) {
        const bf16 *part = queries + (i + (i < dim / DEPTH * DEPTH ? 0 : skipped)) * LANES;
#pragma GCC unroll 4
        for (int unit = 0; unit < units; unit++) {
            fetch_lines(ahead, OF_SCORE / 2);
            score_part(keys[unit] + i, part, columns, dim, 0, sums[unit]);
        }
    }
    for (int unit = 0; dim % PART && unit < units; unit++)
        score_part(keys[unit] + dim - PART, queries + (dim - PART + skipped) * LANES, columns, dim, PART / 4, sums[unit]);
    for (int unit = 0; unit < units; unit++) put_few(sums[unit], scores + unit * UNIT);
}

typedef void few_scorer(const bf16 *const *keys, const bf16 *queries, int64_t dim, float scores[][LANES],
                        struct fetches *ahead);

#define SCORE_FEW(UNITS_AT_ONCE, COLUMNS)                                                                             \
    AVX512_BF16 static void score_few##UNITS_AT_ONCE##_##COLUMNS(                                                      \
        const bf16 *const *keys, const bf16 *queries, int64_t dim, float scores[][LANES], struct fetches *ahead) {     \
        score_few(keys, UNITS_AT_ONCE, queries, COLUMNS, dim, scores, ahead);                                          \
    }
SCORE_FEW(1, 1)
SCORE_FEW(1, 2)
SCORE_FEW(1, 3)
SCORE_FEW(1, 4)
SCORE_FEW(4, 1)
SCORE_FEW(4, 2)
SCORE_FEW(4, 3)
SCORE_FEW(4, 4)

/* The units from `first` to `past`, without the absent ones. */
static void score_units(const struct units *keys, int first, int past, const void *queries, int64_t columns, int64_t dim,
                        float scores[KEYS][LANES], struct fetches *ahead) {
    static few_scorer *const one[FEW] = {score_few1_1, score_few1_2, score_few1_3, score_few1_4};
    static few_scorer *const four[FEW] = {score_few4_1, score_few4_2, score_few4_3, score_few4_4};
    for (int unit = first, some; unit < past; unit += some) {
        const bf16 *const *at = keys->at + unit;
        some = past - unit >= UNITS_OF_FEW && at[0] && at[1] && at[2] && at[3] ? UNITS_OF_FEW : 1;
        if (*at) (some > 1 ? four : one)[columns - 1](at, queries, dim, scores + unit * UNIT, ahead);
    }
}

static void score_pairs(const struct units *keys, struct spans spans, const void *queries,
                        const struct columns *columns, int tiles, int64_t dim, float scores[][KEYS][LANES],
                        struct fetches *ahead) {
    if (tiles == 1 && columns->count <= FEW) {
        score_units(keys, spans.from * SPAN / UNIT, spans.past * SPAN / UNIT, queries, columns->count, dim, scores[0], ahead);
        return;
    }
    for (int key = spans.from * SPAN; key < spans.past * SPAN; key += KEYS_OF_VECTORS) {
        const bf16 *unit = keys->at[key / UNIT];
        if (!unit) continue;
        fetch_lines(ahead, OF_SCORE);
        (tiles == PAIR ? score_two : score_one)(unit + key % UNIT * dim, queries, dim, scores, key);
    }
}

/* `count` columns times `blocks` times 16 elements, from an offset on, whose sums stay in registers. */
AVX512_BF16 INLINE void add_block(const struct values *values, int64_t offset, struct spans spans, const bf16 *weights,
                                  float *sums, int64_t stride, int count, int blocks, struct fetches *ahead) {
    __m512 s[8][8];
    for (int c = 0; c < count; c++)
        for (int b = 0; b < blocks; b++) s[c][b] = _mm512_loadu_ps(sums + c * stride + b * LANES);
    for (int unit = spans.from * SPAN / UNIT; unit < spans.past * SPAN / UNIT; unit++) {
        if (!values->at[unit]) continue;
        const bf16 *from = values->at[unit] + offset;
        const bf16 *w = weights + unit / 2 * LANES * SPAN + unit % 2 * UNIT;
#pragma GCC unroll 8
        for (int pair = 0; pair < UNIT / 2; pair++, from += values->pair_stride) {
            if (pair % (OF_ADD / blocks) == 0) fetch_lines(ahead, OF_ADD); /* as many as are read */
#pragma GCC unroll 8
            for (int b = 0; b < blocks; b++) {
                __m512bh v = (__m512bh)_mm512_loadu_si512(from + b * values->block_stride);
#pragma GCC unroll 8
                for (int c = 0; c < count; c++) {
                    int both;
                    memcpy(&both, w + c * SPAN + 2 * pair, sizeof both);
                    s[c][b] = _mm512_dpbf16_ps(s[c][b], (__m512bh)_mm512_set1_epi32(both), v);
                }
            }
        }
    }
    for (int c = 0; c < count; c++)
        for (int b = 0; b < blocks; b++) _mm512_storeu_ps(sums + c * stride + b * LANES, s[c][b]);
}

/* All elements of a number of columns, eight or more sums at a time, so that none waits for the previous one. */
#define ADD_COLUMNS(COUNT, BLOCKS)                                                                                    \
    AVX512_BF16 static void add_columns##COUNT(const struct values *values, struct spans spans, const bf16 *weights,  \
                                               float *sums, int64_t dim, struct fetches *ahead) {                     \
        int64_t i = 0, step = values->block_stride / LANES, stride = value_size(dim);                                 \
        for (; i + (BLOCKS) * LANES <= dim; i += (BLOCKS) * LANES)                                                    \
            add_block(values, i * step, spans, weights, sums + i, stride, COUNT, BLOCKS, ahead);                      \
        for (; i < dim; i += LANES)                                                                                   \
            add_block(values, i + LANES < dim ? i * step : values->last_block, spans, weights, sums + i, stride, COUNT,\
                      1, ahead);                                                                                      \
    }
ADD_COLUMNS(1, 8)
ADD_COLUMNS(2, 8)
ADD_COLUMNS(4, 4)
ADD_COLUMNS(8, 2)

static void add_pairs(const struct values *values, struct spans spans, const void *weights,
                      const struct columns *columns, int tiles, int64_t dim, struct seen *seen,
                      struct fetches *ahead) {
    for (int tile = 0; tile < tiles; tile++)
        for (int64_t column = 0, left, some; (left = columns[tile].count - column) > 0; column += some) {
            const bf16 *w = (const bf16 *)weights + tile * KEYS * LANES + column * SPAN;
            float *sums = seen[tile].sums + column * value_size(dim);
            some = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
            (some == 8 ? add_columns8 : some == 4 ? add_columns4 : some == 2 ? add_columns2 : add_columns1)(
                values, spans, w, sums, dim, ahead);
        }
}

/* As exp2_of of vectors.h, by instructions of AVX-512; 0 below -125, since subnormal numbers are slow. */
AVX512_BF16 static inline __m512 exp2_avx512(__m512 x) {
    __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-125.0f), _CMP_NLT_UQ); /* a NaN does */
    __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(9.58279e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.590624e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4024099e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9312421e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(counts, p, n);
}

AVX512_BF16 static void hide_keys_avx512(const struct columns *columns, int64_t first_key, struct spans spans,
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

/* Set scores of keys [4][FEW] from `first_key` on to which a column does not attend to minus infinity. */
AVX512_BF16 static inline __m512 hide_avx512(__m512 scores, const struct columns *columns, int64_t first_key) {
    __m512i at = _mm512_add_epi32(_mm512_set1_epi32((int)first_key),
                                  _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3));
    __m512i first = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)columns->first));
    __m512i last = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)columns->last));
    __mmask16 hidden = _mm512_cmplt_epi32_mask(at, first) | _mm512_cmpgt_epi32_mask(at, last);
    return _mm512_mask_mov_ps(scores, hidden, _mm512_set1_ps(-INFINITY));
}

/* The largest, or the sum, of four keys' values for FEW columns, in the order of sums for 16 columns. */
AVX512_BF16 static inline __m128 largest_of_four(__m512 x) {
    return _mm_max_ps(_mm_max_ps(_mm512_castps512_ps128(x), _mm512_extractf32x4_ps(x, 1)),
                      _mm_max_ps(_mm512_extractf32x4_ps(x, 2), _mm512_extractf32x4_ps(x, 3)));
}
AVX512_BF16 static inline __m128 sum_of_four(__m512 x) {
    return _mm_add_ps(_mm_add_ps(_mm512_castps512_ps128(x), _mm512_extractf32x4_ps(x, 1)),
                      _mm_add_ps(_mm512_extractf32x4_ps(x, 2), _mm512_extractf32x4_ps(x, 3)));
}

AVX512_BF16 static void fade_sums(const struct attention *op, const float *by, uint32_t fades, float *all_sums) {
    for (; fades; fades &= fades - 1) {
        int column = __builtin_ctz(fades);
        __m512 factor = _mm512_set1_ps(by[column]);
        int64_t size = value_size(op->value_dim);
        float *sums = all_sums + column * size;
        for (int64_t i = 0; i < size; i += LANES)
            _mm512_store_ps(sums + i, _mm512_mul_ps(_mm512_load_ps(sums + i), factor));
    }
}

/* Scores of four keys and FEW columns together. */
AVX512_BF16 static inline __m512 load_four(float scores[FEW][LANES]) {
    __m256 low = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_load_ps(scores[0])), _mm_load_ps(scores[1]), 1);
    __m256 high = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_load_ps(scores[2])), _mm_load_ps(scores[3]), 1);
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
}

/* Weights of a span, [8 keys' pairs][4 columns][2] each, to [4 columns][32 keys]. */
AVX512_BF16 static inline void store_span(const __m512i keys[4], bf16 *to) {
    __m512i even0 = _mm512_shuffle_i64x2(keys[0], keys[1], 0x88), odd0 = _mm512_shuffle_i64x2(keys[0], keys[1], 0xDD);
    __m512i even1 = _mm512_shuffle_i64x2(keys[2], keys[3], 0x88), odd1 = _mm512_shuffle_i64x2(keys[2], keys[3], 0xDD);
    _mm512_store_si512(to, _mm512_shuffle_i64x2(even0, even1, 0x88));
    _mm512_store_si512(to + SPAN, _mm512_shuffle_i64x2(odd0, odd1, 0x88));
    _mm512_store_si512(to + 2 * SPAN, _mm512_shuffle_i64x2(even0, even1, 0xDD));
    _mm512_store_si512(to + 3 * SPAN, _mm512_shuffle_i64x2(odd0, odd1, 0xDD));
}

/* The same results as weigh_avx512, bit for bit, for FEW columns: a decoded token has no more, and needs a quarter of
 * the time. The other columns' weights are left unchanged. */
AVX512_BF16 static void weigh_few(const struct attention *op, const struct columns *columns, int64_t first_key,
                             struct spans spans, float scores[KEYS][LANES], struct seen *seen, bf16 *weights,
                             struct fetches *ahead) {
    ALIGNED static const uint16_t by_column[32] = {0, 4, 8,  12, 16, 20, 24, 28, 1, 5, 9,  13, 17, 21, 25, 29,
                                                   2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31};
    __m512i order = _mm512_load_si512(by_column);
    __m512 scale = _mm512_set1_ps((float)op->scale * LOG2_E), s[KEYS / FEW], most = _mm512_set1_ps(-INFINITY);
    for (int span = spans.from; span < spans.past; span++) {
        int hides = !all_see(columns, first_key + span * SPAN);
        for (int i = span * SPAN / FEW; i < (span + 1) * SPAN / FEW; i++) {
            s[i] = load_four(scores + FEW * i);
            if (hides) s[i] = hide_avx512(s[i], columns, first_key + FEW * i);
            most = _mm512_max_ps(s[i], most);
        }
    }
    __m128 before = _mm_load_ps(seen->most);
    __m128 most_now = _mm_max_ps(_mm_mul_ps(largest_of_four(most), _mm512_castps512_ps128(scale)), before);
    __mmask8 sees = _mm_cmp_ps_mask(most_now, _mm_set1_ps(-INFINITY), _CMP_NEQ_UQ);
    __m128 base = _mm_maskz_mov_ps(sees, most_now);
    __m128 fade = _mm512_castps512_ps128(exp2_avx512(_mm512_castps128_ps512(_mm_sub_ps(before, base))));
    __m512 bases = _mm512_broadcast_f32x4(base), total = _mm512_setzero_ps();
    for (int span = spans.from; span < spans.past; span++) {
        __m512i keys[4];
        fetch_lines(ahead, OF_WEIGH);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m512 *eight = s + span * SPAN / FEW + 2 * i;
            __m512 first = exp2_avx512(_mm512_fmsub_ps(eight[0], scale, bases));
            __m512 second = exp2_avx512(_mm512_fmsub_ps(eight[1], scale, bases));
            total = _mm512_add_ps(_mm512_add_ps(total, first), second);
            keys[i] = _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
        }
        store_span(keys, weights + span * LANES * SPAN);
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

#define CHAINS 4 /* of maxima and sums, so that none waits for the previous one */

AVX512_BF16 static void weigh_avx512(const struct attention *op, const struct columns *columns, int64_t first_key,
                                struct spans spans, float scores[KEYS][LANES], struct seen *seen, void *to,
                                struct fetches *ahead) {
    bf16 *weights = to;
    ALIGNED static const uint16_t in_turn[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8,  24, 9,  25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    if (columns->count <= FEW && !(op->soft_cap > 0)) {
        weigh_few(op, columns, first_key, spans, scores, seen, weights, ahead);
        return;
    }
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
        fetch_lines(ahead, OF_WEIGH);
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
    fade_sums(op, by, fades, seen->sums);
}

static const struct attention_products pairs = {sizeof(bf16), 1, turn_avx512, score_pairs, weigh_avx512, add_pairs, 1};

/* ---- AMX ---- */

/* Two units of keys by one or two tiles of queries: `tiles` is known where this is compiled. */
AMX INLINE void score_span(const bf16 *k0, const bf16 *k1, const bf16 *queries, int tiles, int64_t dim, int span,
                           float scores[][KEYS][LANES], struct fetches *ahead) {
    int64_t stride = dim * sizeof(bf16);
    const bf16 *others = queries + LANES * query_size(dim);
    _tile_zero(0);
    _tile_zero(1);
    if (tiles == PAIR) _tile_zero(2);
    if (tiles == PAIR) _tile_zero(3);
    for (int64_t i = 0; i < dim; i += DEPTH) {
        fetch_lines(ahead, OF_SCORE);
        int64_t from = min64(i, dim - DEPTH);
        _tile_loadd(4, k0 + from, stride);
        _tile_loadd(6, queries + i * LANES, LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, k1 + from, stride);
        _tile_dpbf16ps(1, 5, 6);
        if (tiles < PAIR) continue;
        _tile_loadd(7, others + i * LANES, LINE);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, scores[0][span * SPAN], LINE);
    _tile_stored(1, scores[0][span * SPAN + UNIT], LINE);
    if (tiles == PAIR) _tile_stored(2, scores[1][span * SPAN], LINE);
    if (tiles == PAIR) _tile_stored(3, scores[1][span * SPAN + UNIT], LINE);
}

AMX static void score_amx(const struct units *keys, struct spans spans, const void *queries,
                          const struct columns *columns, int tiles, int64_t dim, float scores[][KEYS][LANES],
                          struct fetches *ahead) {
    (void)columns;
    for (int span = spans.from; span < spans.past; span++) {
        const bf16 *k0 = keys->at[2 * span], *k1 = keys->at[2 * span + 1];
        /* An absent unit is multiplied like the other one, and its scores are masked. */
        k0 = k0 ? k0 : k1, k1 = k1 ? k1 : k0;
        if (tiles == PAIR) score_span(k0, k1, queries, PAIR, dim, span, scores, ahead);
        else score_span(k0, k1, queries, 1, dim, span, scores, ahead);
    }
}

/* `blocks` tiles of values, one or two, of the elements from `i` on, times the weights of one or two tiles: as above.
 * The values of a span are `apart` after those of the previous one. */
AMX INLINE void add_elements(const bf16 *values, int64_t apart, struct spans spans, const bf16 *weights, int tiles,
                             int blocks, int64_t size, int64_t i, struct seen *seen, struct fetches *ahead) {
    int64_t stride = size * sizeof(float);
    float *sums = seen[0].sums + i, *others = seen[tiles - 1].sums + i;
    _tile_loadd(0, sums, stride);
    if (blocks == PAIR) _tile_loadd(1, sums + LANES, stride);
    if (tiles == PAIR) _tile_loadd(2, others, stride);
    if (tiles == PAIR && blocks == PAIR) _tile_loadd(3, others + LANES, stride);
    for (int span = spans.from; span < spans.past; span++) {
        const bf16 *v = values + span * apart, *w = weights + span * LANES * SPAN;
        fetch_lines(ahead, OF_ADD);
        _tile_loadd(4, w, LINE);
        _tile_loadd(6, v, LINE);
        _tile_dpbf16ps(0, 4, 6);
        if (blocks == PAIR) _tile_loadd(7, v + LANES * SPAN, LINE);
        if (blocks == PAIR) _tile_dpbf16ps(1, 4, 7);
        if (tiles < PAIR) continue;
        _tile_loadd(5, w + KEYS * LANES, LINE);
        _tile_dpbf16ps(2, 5, 6);
        if (blocks == PAIR) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, stride);
    if (blocks == PAIR) _tile_stored(1, sums + LANES, stride);
    if (tiles == PAIR) _tile_stored(2, others, stride);
    if (tiles == PAIR && blocks == PAIR) _tile_stored(3, others + LANES, stride);
}

#define OF_UNIT 8 /* lines that are prefetched while a unit's values are gathered for two tiles */

/* Gather values from the cache as [span][block][16 pairs of keys][16][2], for one or two blocks of 16 elements from `i`
 * on: few enough to stay in the L1 cache until they are multiplied. */
AMX static void gather_blocks(const struct values *from, struct spans spans, int blocks, int64_t dim, int64_t i,
                              bf16 *tiles, struct fetches *ahead) {
    for (int unit = spans.from * SPAN / UNIT; unit < spans.past * SPAN / UNIT; unit++) {
        bf16 *to = tiles + unit / 2 * PAIR * LANES * SPAN + unit % 2 * UNIT * LANES;
        fetch_lines(ahead, OF_UNIT);
        for (int block = 0; block < blocks; block++, to += LANES * SPAN) {
            int64_t first = i + block * LANES;
            int64_t offset = first + LANES < dim ? first / LANES * from->block_stride : from->last_block;
#pragma GCC unroll 8
            for (int pair = 0; pair < UNIT / 2; pair++) {
                __m512i line = _mm512_setzero_si512();
                if (from->at[unit]) line = _mm512_loadu_si512(from->at[unit] + offset + pair * from->pair_stride);
                _mm512_store_si512(to + pair * 2 * LANES, line);
            }
        }
    }
}

AMX static void add_amx(const struct values *from, struct spans spans, const void *weights,
                        const struct columns *columns, int tiles, int64_t dim, struct seen *seen,
                        struct fetches *ahead) {
    (void)columns;
    ALIGNED bf16 near[KEYS * PAIR * LANES];
    int64_t size = value_size(dim);
    for (int64_t i = 0; i < size; i += PAIR * LANES) {
        int blocks = i + LANES < size ? PAIR : 1;
        const bf16 *values = from->tiles ? from->tiles + i * SPAN : near;
        int64_t apart = from->tiles ? size * SPAN : PAIR * LANES * SPAN;
        if (!from->tiles) gather_blocks(from, spans, blocks, dim, i, near, ahead);
        if (tiles == PAIR && blocks == PAIR)
            add_elements(values, apart, spans, weights, PAIR, PAIR, size, i, seen, ahead);
        else if (tiles == PAIR) add_elements(values, apart, spans, weights, PAIR, 1, size, i, seen, ahead);
        else if (blocks == PAIR) add_elements(values, apart, spans, weights, 1, PAIR, size, i, seen, ahead);
        else add_elements(values, apart, spans, weights, 1, 1, size, i, seen, ahead);
    }
}

static const struct attention_products amx = {sizeof(bf16), PAIR, turn_avx512, score_amx, weigh_avx512, add_amx, 0};
#endif

const struct attention_products *attention_products(enum isa isa) {
#if HAS_X86
    if (isa == WITH_AMX) return &amx;
    if (isa == WITH_AVX512_BF16) return &pairs;
    if (isa == WITH_AVX512) return &avx512_products;
    if (isa >= WITH_AVX2) return &avx2_products;
#endif
    (void)isa;
    return &portable_products;
}
