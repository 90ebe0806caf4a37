/* See attention.h. A column's results do not depend on what the others hold. */

#include "attention.h"
#include "transpose.h"

/* ---- any processor ---- */

CLONES static void score_portable(const struct units *keys, const bf16 *queries, int64_t dim, int64_t columns,
                                  float scores[KEYS][LANES]) {
    (void)columns;
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

CLONES static void add_portable(const struct units *values, const bf16 *weights, int64_t dim, int64_t columns,
                                float *sums) {
    for (int64_t column = 0; column < columns; column++) {
        float *to = sums + column * dim;
        for (int key = 0; key < KEYS; key++) {
            const bf16 *unit = values->at[key / UNIT];
            if (!unit) continue;
            const bf16 *v = unit + key % UNIT / 2 * dim * 2 + key % 2;
            float weight = widen(weights[(key / 32 * LANES + column) * 32 + key % 32]);
            for (int64_t i = 0; i < dim; i++) to[i] += weight * widen(v[2 * i]);
        }
    }
}

CLONES static void turn_portable(float probabilities[KEYS][LANES], bf16 *weights) {
    for (int key = 0; key < KEYS; key++)
        for (int column = 0; column < LANES; column++)
            weights[(key / 32 * LANES + column) * 32 + key % 32] = narrow(probabilities[key][column]);
}

static void prepare_nothing(void) {}

static const struct attention_products portable = {score_portable, add_portable, turn_portable, prepare_nothing};

#if HAS_AMX
/* ---- AVX-512 with products of bfloat16 pairs ---- */

#define KEYS_OF_VECTORS 8

AVX512 static void score_avx512(const struct units *keys, const bf16 *queries, int64_t dim, int64_t columns,
                                float scores[KEYS][LANES]) {
    (void)columns;
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

AVX512 static void add_avx512(const struct units *values, const bf16 *weights, int64_t dim, int64_t columns,
                              float *sums) {
    for (int64_t i = 0; i < dim; i += LANES)
        for (int64_t column = 0; column < columns; column++) {
            __m512 sum = _mm512_loadu_ps(sums + column * dim + i);
            for (int unit = 0; unit < UNITS; unit++) {
                if (!values->at[unit]) continue;
                const bf16 *v = values->at[unit] + 2 * i;
                const bf16 *w = weights + (unit / 2 * LANES + column) * 32 + unit % 2 * UNIT;
                for (int pair = 0; pair < UNIT / 2; pair++) {
                    int both;
                    memcpy(&both, w + 2 * pair, sizeof both);
                    sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(both),
                                           (__m512bh)_mm512_loadu_si512(v + pair * dim * 2));
                }
            }
            _mm512_storeu_ps(sums + column * dim + i, sum);
        }
}

AVX512 static void turn_avx512(float probabilities[KEYS][LANES], bf16 *weights) {
    ALIGNED static const uint16_t in_turn[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8,  24, 9,  25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    __m512i order = _mm512_load_si512(in_turn);
    for (int half = 0; half < 2; half++) {
        __m512i pairs[16];
        for (int pair = 0; pair < 16; pair++) {
            float(*p)[LANES] = probabilities + half * 32 + 2 * pair;
            __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(p[1]), _mm512_loadu_ps(p[0]));
            pairs[pair] = _mm512_permutexvar_epi16(order, (__m512i)both);
        }
        transpose(pairs);
        for (int column = 0; column < LANES; column++)
            _mm512_storeu_si512(weights + (half * LANES + column) * 32, pairs[column]);
    }
}

static const struct attention_products avx512 = {score_avx512, add_avx512, turn_avx512, prepare_nothing};

/* ---- AMX: tiles 0 to 3 for sums, 4 for keys and 5 for queries, 6 for weights and 7 for values ---- */

static const struct ALIGNED {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tiles = {
    .palette = 1,
    .bytes = {LINE, LINE, LINE, LINE, LINE, LINE, UNIT * sizeof(bf16), LINE},
    .rows = {LANES, LANES, LANES, LANES, LANES, LANES, LANES, UNIT / 2},
};

AMX static void prepare_amx(void) { _tile_loadconfig(&tiles); }

AMX static void score_amx(const struct units *keys, const bf16 *queries, int64_t dim, int64_t columns,
                          float scores[KEYS][LANES]) {
    (void)columns;
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
        _tile_loadd(5, queries + i * LANES, LINE);
        _tile_loadd(4, k0 + i, stride);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(4, k1 + i, stride);
        _tile_dpbf16ps(1, 4, 5);
        _tile_loadd(4, k2 + i, stride);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(4, k3 + i, stride);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, scores[0], LINE);
    _tile_stored(1, scores[UNIT], LINE);
    _tile_stored(2, scores[2 * UNIT], LINE);
    _tile_stored(3, scores[3 * UNIT], LINE);
}

AMX static void add_amx(const struct units *values, const bf16 *weights, int64_t dim, int64_t columns, float *sums) {
    (void)columns;
    int64_t sums_stride = dim * sizeof(float), values_stride = 2 * dim * sizeof(bf16);
    for (int64_t i = 0; i < dim; i += 2 * LANES) {
        _tile_loadd(0, sums + i, sums_stride);
        _tile_loadd(1, sums + i + LANES, sums_stride);
        for (int unit = 0; unit < UNITS; unit++) {
            const bf16 *v = values->at[unit];
            if (!v) continue;
            _tile_loadd(6, weights + unit / 2 * LANES * 32 + unit % 2 * UNIT, LINE);
            _tile_loadd(7, v + 2 * i, values_stride);
            _tile_dpbf16ps(0, 6, 7);
            _tile_loadd(7, v + 2 * i + 2 * LANES, values_stride);
            _tile_dpbf16ps(1, 6, 7);
        }
        _tile_stored(0, sums + i, sums_stride);
        _tile_stored(1, sums + i + LANES, sums_stride);
    }
}

static const struct attention_products amx = {score_amx, add_amx, turn_avx512, prepare_amx};
#endif

const struct attention_products *attention_products(enum isa isa) {
#if HAS_AMX
    if (isa == WITH_AMX) return &amx;
    if (isa == WITH_AVX512_BF16) return &avx512;
#endif
    (void)isa;
    return &portable;
}
