/* The products of attention.h in vectors of WIDTH float32, for processors without bfloat16 products: keys and values
 * are converted, queries and weights are float32. Included once for each instruction set, with
 *
 *   NAME(x)   the names of this set's functions
 *   TARGET    the attribute by which they are compiled
 *   WIDTH     float32 of a vector
 *   SUMS      vectors of sums that stay in registers
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

/* Number of vectors of the used columns. */
#define VECTORS_OF(columns) (int)parts((columns).count, WIDTH)

TARGET static void NAME(score)(const struct units *keys, struct spans spans, const void *queries,
                               const struct columns *columns, int tiles, int64_t dim, float scores[][KEYS][LANES],
                               struct fetches *ahead) {
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

TARGET static void NAME(weigh)(const struct attention *op, const struct columns *columns, int64_t first_key,
                               struct spans spans, float scores[KEYS][LANES], struct seen *seen, void *weights,
                               struct fetches *ahead) {
    float scale = cap_scores(op, spans, scores), (*to)[LANES] = weights;
    hide_keys(columns, first_key, spans, scores);
    for (int lane = 0; lane < columns->count; lane += WIDTH) {
        NAME(floats) before = NAME(load)(seen->most + lane), most = before;
        for (int key = spans.from * SPAN; key < spans.past * SPAN; key++) {
            NAME(floats) score = NAME(load)(scores[key] + lane) * scale;
            most = NAME(choose)(score > most, score, most);
        }
        NAME(floats) base = NAME(choose)(most == -INFINITY, (NAME(floats)){0}, most);
        NAME(floats) fade = NAME(exp2)(before - base), total = NAME(load)(seen->total + lane) * fade;
        for (int key = spans.from * SPAN; key < spans.past * SPAN; key++) {
            if (key % SPAN == 0) fetch_lines(ahead, OF_WEIGH);
            NAME(floats) p = NAME(exp2)(NAME(load)(scores[key] + lane) * scale - base);
            total += p;
            NAME(store)(to[key] + lane, p);
        }
        NAME(store)(seen->most + lane, most);
        NAME(store)(seen->total + lane, total);
        for (int64_t column = lane; column < min64(columns->count, lane + WIDTH); column++) {
            int64_t size = value_size(op->value_dim);
            float *sums = seen->sums + column * size;
            for (int64_t i = 0; fade[column - lane] != 1 && i < size; i += WIDTH)
                NAME(store)(sums + i, NAME(load)(sums + i) * fade[column - lane]);
        }
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
        for (int pair = 0; pair < UNIT / 2; pair++, from += values->pair_stride)
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; odd++) {
                const float *w = weights + (unit * UNIT + 2 * pair + odd) * LANES;
#pragma GCC unroll 8
                for (int v = 0; v < blocks * OF_TILE; v++) {
                    NAME(words) x;
                    memcpy(&x, from + v / OF_TILE * values->block_stride + v % OF_TILE * WIDTH * 2, sizeof x);
                    x = odd ? x & 0xffff0000u : x << 16;
#pragma GCC unroll 8
                    for (int c = 0; c < count; c++) s[c][v] += w[c] * (NAME(floats))x;
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

#undef VECTORS_OF
#undef OF_TILE
#undef NAME
#undef TARGET
#undef WIDTH
#undef SUMS
