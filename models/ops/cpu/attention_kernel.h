/* The products of attention.h in vectors of WIDTH float32, for processors without bfloat16 products: keys and values
 * are converted, queries and weights are float32. Included once for each instruction set, with
 *
 *   NAME(x)   the names of this set's functions
 *   TARGET    the attribute by which they are compiled
 *   WIDTH     float32 of a vector
 *   SUMS      vectors of sums that stay in registers
 *   HAS_FEW   whether a decode's few columns are multiplied by a vector of keys: with WIDTH 8
 *
 * Queries are [dim][16 columns], weights [key][16 columns]. */

#define OF_TILE (LANES / WIDTH) /* vectors of 16 columns, or of 16 elements of a value */

typedef float NAME(floats) __attribute__((vector_size(WIDTH * 4)));
typedef int32_t NAME(ints) __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t NAME(words) __attribute__((vector_size(WIDTH * 4)));

TARGET INLINE NAME(floats) NAME(load)(const float *from) {
    NAME(floats) v;
    memcpy(&v, from, sizeof v);
    return v;
}

TARGET INLINE void NAME(store)(float *to, NAME(floats) v) { memcpy(to, &v, sizeof v); }

TARGET INLINE NAME(floats) NAME(choose)(NAME(ints) condition, NAME(floats) yes, NAME(floats) no) {
    return (NAME(floats))(((NAME(ints))yes & condition) | ((NAME(ints))no & ~condition));
}

/* As exp2_of of vectors.h. */
TARGET INLINE NAME(floats) NAME(exp2)(NAME(floats) x) {
    NAME(ints) is_tiny = x < -125.0f; /* a NaN is not */
    NAME(floats) inside = NAME(choose)(is_tiny, (NAME(floats)){0} - 125.0f, x), shifted = inside + 12582912.0f;
    NAME(floats) r = inside - (shifted - 12582912.0f), p = (NAME(floats)){0} + 9.58279e-3f;
    p = p * r + 5.590624e-2f;
    p = p * r + 2.4024099e-1f;
    p = p * r + 6.9312421e-1f;
    p = p * r + 1.0f;
    return (NAME(floats))(((NAME(ints))p + ((NAME(ints))shifted << 23)) & ~is_tiny);
}

TARGET static void NAME(turn)(const bf16 *const columns[LANES], int64_t dim, void *queries) {
    float *to = queries;
    for (int lane = 0; lane < LANES; lane++)
        for (int64_t i = 0; i < dim; i++) to[i * LANES + lane] = columns[lane] ? widen(columns[lane][i]) : 0;
}

/* Multiply `keys` float32 keys by the first `vectors` of a tile's columns. */
TARGET INLINE void NAME(score_keys)(const float *keys, int64_t dim, const float *queries, float scores[][LANES],
                                    int count, int vectors) {
    NAME(floats) s[SUMS][OF_TILE];
    for (int key = 0; key < count; key++)
        for (int v = 0; v < vectors; v++) s[key][v] = (NAME(floats)){0};
#pragma GCC unroll 4
    for (int64_t i = 0; i < dim; i++) {
        NAME(floats) q[OF_TILE];
        for (int v = 0; v < vectors; v++) q[v] = NAME(load)(queries + i * LANES + v * WIDTH);
#pragma GCC unroll 16
        for (int key = 0; key < count; key++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) s[key][v] += keys[key * dim + i] * q[v];
    }
    for (int key = 0; key < count; key++)
        for (int v = 0; v < vectors; v++) NAME(store)(scores[key] + v * WIDTH, s[key][v]);
}

#if HAS_FEW
#define UNIT_OF_KEYS (UNIT / WIDTH) /* vectors of a unit's keys */

/* 8 elements of 8 keys, as [4 pairs][8 keys]. */
TARGET INLINE void NAME(turn_keys)(const bf16 *keys, int64_t dim, NAME(words) pairs[4]) {
    __m256i r[4], low[2], high[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m128i first = _mm_loadu_si128((const void *)(keys + i * dim));
        r[i] = _mm256_set_m128i(_mm_loadu_si128((const void *)(keys + (i + 4) * dim)), first);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        low[i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        high[i] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    pairs[0] = (NAME(words))_mm256_unpacklo_epi64(low[0], low[1]);
    pairs[1] = (NAME(words))_mm256_unpackhi_epi64(low[0], low[1]);
    pairs[2] = (NAME(words))_mm256_unpacklo_epi64(high[0], high[1]);
    pairs[3] = (NAME(words))_mm256_unpackhi_epi64(high[0], high[1]);
}

_Static_assert(FEW_COLUMNS == 4, "put_few stores vectors of four");

/* Sums of 8 keys by each column, to scores by key. */
TARGET INLINE void NAME(put_few)(const NAME(floats) sums[FEW_COLUMNS], float scores[][LANES]) {
    __m256 low0 = _mm256_unpacklo_ps((__m256)sums[0], (__m256)sums[1]);
    __m256 low1 = _mm256_unpacklo_ps((__m256)sums[2], (__m256)sums[3]);
    __m256 high0 = _mm256_unpackhi_ps((__m256)sums[0], (__m256)sums[1]);
    __m256 high1 = _mm256_unpackhi_ps((__m256)sums[2], (__m256)sums[3]);
    __m256d four[4] = {_mm256_unpacklo_pd((__m256d)low0, (__m256d)low1), _mm256_unpackhi_pd((__m256d)low0, (__m256d)low1),
                       _mm256_unpacklo_pd((__m256d)high0, (__m256d)high1),
                       _mm256_unpackhi_pd((__m256d)high0, (__m256d)high1)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        _mm_storeu_ps(scores[i], _mm256_castps256_ps128((__m256)four[i]));
        _mm_storeu_ps(scores[4 + i], _mm256_extractf128_ps((__m256)four[i], 1));
    }
}

/* The keys of `units` adjacent units times a few columns, both constants: the same sums as for 16 columns, with a key in
 * each lane instead of a column. */
TARGET INLINE void NAME(score_few)(const bf16 *const *units_at, int units, int64_t dim, const float *queries,
                                   int columns, float scores[][LANES]) {
    NAME(floats) s[2 * UNIT_OF_KEYS][FEW_COLUMNS];
#pragma GCC unroll 4
    for (int i = 0; i < units * UNIT_OF_KEYS; i++)
#pragma GCC unroll 4
        for (int c = 0; c < FEW_COLUMNS; c++) s[i][c] = (NAME(floats)){0};
    for (int64_t element = 0; element < dim; element += 8, queries += 8 * LANES)
#pragma GCC unroll 4
        for (int i = 0; i < units * UNIT_OF_KEYS; i++) {
            NAME(words) pairs[4];
            NAME(turn_keys)(units_at[i / UNIT_OF_KEYS] + i % UNIT_OF_KEYS * WIDTH * dim + element, dim, pairs);
#pragma GCC unroll 8
            for (int one = 0; one < 8; one++) {
                NAME(words) k = one % 2 ? pairs[one / 2] & 0xffff0000u : pairs[one / 2] << 16;
#pragma GCC unroll 4
                for (int c = 0; c < columns; c++) s[i][c] += queries[one * LANES + c] * (NAME(floats))k;
            }
        }
#pragma GCC unroll 4
    for (int i = 0; i < units * UNIT_OF_KEYS; i++) NAME(put_few)(s[i], scores + i * WIDTH);
}

#define SCORE_FEW(UNITS_AT_ONCE, COLUMNS)                                                                             \
    TARGET static void NAME(score_few##UNITS_AT_ONCE##_##COLUMNS)(const bf16 *const *at, int64_t dim,                 \
                                                                  const float *queries, float scores[][LANES]) {      \
        NAME(score_few)(at, UNITS_AT_ONCE, dim, queries, COLUMNS, scores);                                            \
    }
SCORE_FEW(1, 1)
SCORE_FEW(1, 2)
SCORE_FEW(1, 3)
SCORE_FEW(1, 4)
SCORE_FEW(2, 1)
SCORE_FEW(2, 2)

/* The units of a step, without the absent ones; with one or two columns two at a time, so that no sum waits. */
TARGET static void NAME(score_units)(const struct units *keys, struct spans spans, const float *queries,
                                     int64_t columns, int64_t dim, float scores[KEYS][LANES], struct fetches *ahead) {
    typedef void scorer(const bf16 *const *at, int64_t dim, const float *queries, float scores[][LANES]);
    static scorer *const one[FEW_COLUMNS] = {NAME(score_few1_1), NAME(score_few1_2), NAME(score_few1_3),
                                             NAME(score_few1_4)};
    static scorer *const two[2] = {NAME(score_few2_1), NAME(score_few2_2)};
    for (int unit = spans.from * SPAN / UNIT, some; unit < spans.past * SPAN / UNIT; unit += some) {
        const bf16 *const *at = keys->at + unit;
        some = columns <= 2 && unit % 2 == 0 && at[0] && at[1] ? 2 : 1;
        if (!*at) continue;
        fetch_lines(ahead, some * UNIT / SUMS * OF_SCORE);
        (some == 2 ? two : one)[columns - 1](at, dim, queries, scores + unit * UNIT);
    }
}
#endif

/* Number of vectors of the used columns. */
#define VECTORS_OF(columns) (int)parts((columns).count, WIDTH)

TARGET static void NAME(score)(const struct units *keys, struct spans spans, const void *queries,
                               const struct columns *columns, int tiles, int64_t dim, float scores[][KEYS][LANES],
                               struct fetches *ahead) {
#if HAS_FEW
    if (tiles == 1 && columns->count <= FEW_COLUMNS && dim % 8 == 0) {
        NAME(score_units)(keys, spans, queries, columns->count, dim, scores[0], ahead);
        return;
    }
#endif
    ALIGNED float wide[SUMS * MAX_LATENT_DIM];
    for (int key = spans.from * SPAN; key < spans.past * SPAN; key += SUMS) {
        const bf16 *unit = keys->at[key / UNIT];
        if (!unit) continue;
        unit += key % UNIT * dim;
        fetch_lines(ahead, OF_SCORE);
        for (int64_t i = 0; i < SUMS * dim; i++) wide[i] = widen(unit[i]);
        for (int tile = 0; tile < tiles; tile++) {
            const float *q = (const float *)queries + tile * LANES * query_size(dim);
            if (OF_TILE > 1 && VECTORS_OF(columns[tile]) == 1) {
                NAME(score_keys)(wide, dim, q, scores[tile] + key, SUMS, 1);
                continue;
            }
            enum { KEYS_AT_ONCE = SUMS / OF_TILE };
            for (int more = 0; more < SUMS; more += KEYS_AT_ONCE)
                NAME(score_keys)(wide + more * dim, dim, q, scores[tile] + key + more, KEYS_AT_ONCE, OF_TILE);
        }
    }
}

#define CHAINS 4 /* of maxima and sums, so that none waits for the previous one */

TARGET INLINE NAME(floats) NAME(larger)(NAME(floats) a, NAME(floats) b) { return NAME(choose)(a > b, a, b); }

/* A column's results so far, relative to a new maximum. */
TARGET static void NAME(fade_sums)(const struct attention *op, float *sums, float fade) {
    int64_t size = value_size(op->value_dim);
    for (int64_t i = 0; fade != 1 && i < size; i += WIDTH) NAME(store)(sums + i, NAME(load)(sums + i) * fade);
}

#if HAS_FEW
_Static_assert(WIDTH == 2 * FEW_COLUMNS && CHAINS == 4, "a vector has two keys' columns, and two vectors all chains");

/* Two keys' scores or weights of FEW_COLUMNS columns. */
TARGET INLINE NAME(floats) NAME(load_two)(float from[][LANES]) {
    return (NAME(floats))_mm256_set_m128(_mm_loadu_ps(from[1]), _mm_loadu_ps(from[0]));
}

TARGET INLINE void NAME(store_two)(float to[][LANES], NAME(floats) v) {
    _mm_storeu_ps(to[0], _mm256_castps256_ps128((__m256)v));
    _mm_storeu_ps(to[1], _mm256_extractf128_ps((__m256)v, 1));
}

/* Of both keys, for each column, in both halves. */
TARGET INLINE NAME(floats) NAME(swap)(NAME(floats) v) {
    return (NAME(floats))_mm256_permute2f128_ps((__m256)v, (__m256)v, 1);
}

/* The same results as `weigh`, bit for bit, of two keys at once. */
TARGET static void NAME(weigh_few)(const struct attention *op, const struct columns *columns, struct spans spans,
                                   float scale, float scores[KEYS][LANES], struct seen *seen, float (*to)[LANES],
                                   struct fetches *ahead) {
    enum { PAIRS_OF_CHAINS = CHAINS / 2 };
    float before[2][LANES], after[2][LANES];
    memcpy(before[0], seen->most, sizeof before[0]), memcpy(before[1], seen->most, sizeof before[1]);
    NAME(floats) was = NAME(load_two)(before), most[PAIRS_OF_CHAINS] = {was, was}, total[PAIRS_OF_CHAINS] = {{0}};
    for (int key = spans.from * SPAN; key < spans.past * SPAN; key += CHAINS)
#pragma GCC unroll 2
        for (int pair = 0; pair < PAIRS_OF_CHAINS; pair++)
            most[pair] = NAME(larger)(NAME(load_two)(scores + key + 2 * pair) * scale, most[pair]);
    NAME(floats) now = NAME(larger)(most[0], most[1]);
    now = NAME(larger)(now, NAME(swap)(now));
    NAME(floats) base = NAME(choose)(now == -INFINITY, (NAME(floats)){0}, now), fade = NAME(exp2)(was - base);
    for (int key = spans.from * SPAN; key < spans.past * SPAN; key += CHAINS) {
        if (key % SPAN == 0) fetch_lines(ahead, OF_WEIGH);
#pragma GCC unroll 2
        for (int pair = 0; pair < PAIRS_OF_CHAINS; pair++) {
            NAME(floats) p = NAME(exp2)(NAME(load_two)(scores + key + 2 * pair) * scale - base);
            total[pair] += p;
            NAME(store_two)(to + key + 2 * pair, p);
        }
    }
    for (int pair = 0; pair < PAIRS_OF_CHAINS; pair++) total[pair] += NAME(swap)(total[pair]);
    NAME(store)(after[0], total[0] + total[1]);
    NAME(store)(after[1], now);
    for (int64_t column = 0; column < columns->count; column++) {
        seen->total[column] = seen->total[column] * fade[column] + after[0][column];
        seen->most[column] = after[1][column];
        NAME(fade_sums)(op, seen->sums + column * value_size(op->value_dim), fade[column]);
    }
}
#endif

TARGET static void NAME(weigh)(const struct attention *op, const struct columns *columns, int64_t first_key,
                               struct spans spans, float scores[KEYS][LANES], struct seen *seen, void *weights,
                               struct fetches *ahead) {
    float scale = cap_scores(op, spans, scores), (*to)[LANES] = weights;
    hide_keys(columns, first_key, spans, scores);
#if HAS_FEW
    if (columns->count <= FEW_COLUMNS) {
        NAME(weigh_few)(op, columns, spans, scale, scores, seen, to, ahead);
        return;
    }
#endif
    for (int lane = 0; lane < columns->count; lane += WIDTH) {
        NAME(floats) before = NAME(load)(seen->most + lane), most[CHAINS], total[CHAINS];
        for (int chain = 0; chain < CHAINS; chain++) most[chain] = before, total[chain] = (NAME(floats)){0};
        for (int key = spans.from * SPAN; key < spans.past * SPAN; key += CHAINS)
#pragma GCC unroll 4
            for (int chain = 0; chain < CHAINS; chain++)
                most[chain] = NAME(larger)(NAME(load)(scores[key + chain] + lane) * scale, most[chain]);
        NAME(floats) now = NAME(larger)(NAME(larger)(most[0], most[1]), NAME(larger)(most[2], most[3]));
        NAME(floats) base = NAME(choose)(now == -INFINITY, (NAME(floats)){0}, now), fade = NAME(exp2)(before - base);
        for (int key = spans.from * SPAN; key < spans.past * SPAN; key += CHAINS) {
            if (key % SPAN == 0) fetch_lines(ahead, OF_WEIGH);
#pragma GCC unroll 4
            for (int chain = 0; chain < CHAINS; chain++) {
                NAME(floats) p = NAME(exp2)(NAME(load)(scores[key + chain] + lane) * scale - base);
                total[chain] += p;
                NAME(store)(to[key + chain] + lane, p);
            }
        }
        NAME(floats) sum = (total[0] + total[1]) + (total[2] + total[3]);
        NAME(store)(seen->most + lane, now);
        NAME(store)(seen->total + lane, NAME(load)(seen->total + lane) * fade + sum);
        for (int64_t column = lane; column < min64(columns->count, lane + WIDTH); column++)
            NAME(fade_sums)(op, seen->sums + column * value_size(op->value_dim), fade[column - lane]);
    }
}

/* `count` columns times `blocks` times 16 elements, whose sums stay in registers. */
TARGET INLINE void NAME(add_block)(const struct values *values, struct spans spans, const float *weights, float *sums,
                                   int64_t stride, int count, int blocks, struct fetches *ahead) {
    NAME(floats) s[SUMS][SUMS];
    for (int c = 0; c < count; c++)
        for (int v = 0; v < blocks * OF_TILE; v++) s[c][v] = NAME(load)(sums + c * stride + v * WIDTH);
    for (int unit = spans.from * SPAN / UNIT; unit < spans.past * SPAN / UNIT; unit++) {
        const bf16 *from = values->at[unit];
        if (!from) continue;
        fetch_lines(ahead, OF_ADD);
#pragma GCC unroll 2
        for (int pair = 0; pair < UNIT / 2; pair++, from += values->pair_stride)
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; odd++) {
                const float *w = weights + (unit * UNIT + 2 * pair + odd) * LANES;
                /* A weight is loaded once for all vectors of a block. */
#pragma GCC unroll 8
                for (int b = 0; b < blocks; b++) {
                    NAME(words) x[OF_TILE];
#pragma GCC unroll 4
                    for (int v = 0; v < OF_TILE; v++) {
                        memcpy(&x[v], from + b * values->block_stride + v * WIDTH * 2, sizeof x[v]);
                        x[v] = odd ? x[v] & 0xffff0000u : x[v] << 16;
                    }
#pragma GCC unroll 8
                    for (int c = 0; c < count; c++)
#pragma GCC unroll 4
                        for (int v = 0; v < OF_TILE; v++) s[c][b * OF_TILE + v] += w[c] * (NAME(floats))x[v];
                }
            }
    }
    for (int c = 0; c < count; c++)
        for (int v = 0; v < blocks * OF_TILE; v++) NAME(store)(sums + c * stride + v * WIDTH, s[c][v]);
}

/* All elements of `count` columns, a constant. */
TARGET INLINE void NAME(add_columns)(const struct values *values, struct spans spans, const float *weights,
                                     float *sums, int64_t dim, int count, struct fetches *ahead) {
    enum { BLOCK = LANES };
    int blocks = count * OF_TILE >= SUMS ? 1 : SUMS / (count * OF_TILE);
    struct values here = *values;
    int64_t i = 0, stride = value_size(dim);
    for (; i + blocks * BLOCK <= dim; i += blocks * BLOCK) {
        NAME(add_block)(&here, spans, weights, sums + i, stride, count, blocks, ahead);
        for (int unit = 0; unit < UNITS; unit++)
            if (here.at[unit]) here.at[unit] += blocks * here.block_stride;
    }
    for (; i < dim; i += BLOCK) {
        for (int unit = 0; unit < UNITS && i + BLOCK >= dim; unit++)
            if (here.at[unit]) here.at[unit] = values->at[unit] + values->last_block;
        NAME(add_block)(&here, spans, weights, sums + i, stride, count, 1, ahead);
        for (int unit = 0; unit < UNITS; unit++)
            if (here.at[unit]) here.at[unit] += here.block_stride;
    }
}

TARGET static void NAME(add)(const struct values *values, struct spans spans, const void *weights,
                             const struct columns *columns, int tiles, int64_t dim, struct seen *seen,
                             struct fetches *ahead) {
    for (int tile = 0; tile < tiles; tile++) {
        int64_t column = 0, count = columns[tile].count;
        while (column < count) {
            const float *w = (const float *)weights + tile * KEYS * LANES + column;
            float *sums = seen[tile].sums + column * value_size(dim);
            if (SUMS / OF_TILE >= 8 && count - column >= 8)
                NAME(add_columns)(values, spans, w, sums, dim, 8, ahead), column += 8;
            else if (count - column >= 4) NAME(add_columns)(values, spans, w, sums, dim, 4, ahead), column += 4;
            else if (count - column >= 2) NAME(add_columns)(values, spans, w, sums, dim, 2, ahead), column += 2;
            else NAME(add_columns)(values, spans, w, sums, dim, 1, ahead), column++;
        }
    }
}

static const struct attention_products NAME(products) = {sizeof(float), 1,           NAME(turn), NAME(score),
                                                         NAME(weigh),   NAME(add), 0};

#undef SCORE_FEW
#undef UNIT_OF_KEYS
#undef HAS_FEW
#undef CHAINS
#undef VECTORS_OF
#undef OF_TILE
#undef NAME
#undef TARGET
#undef WIDTH
#undef SUMS
