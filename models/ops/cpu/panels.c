/* See panels.h. Each follows one order of sums whatever `count` is. */

#include "panels.h"
#include "operators.h"

#if HAS_AMX
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* ---- any processor ---- */

#define PORTABLE_ROWS 4

CLONES static void add_rows(const bf16 *x, int64_t rows, const bf16 *weight, int64_t steps, float *sums) {
    float s[PORTABLE_ROWS][PANEL] = {{0}};
    for (int64_t step = 0; step < steps; step++, weight += STEP, x += TILE) {
        for (int pair = 0; pair < DEPTH / 2; pair++) {
            float even[PANEL], odd[PANEL];
            for (int half = 0; half < 2; half++) {
                const bf16 *w = weight + half * TILE + pair * LANES * 2;
                for (int lane = 0; lane < LANES; lane++) {
                    uint32_t both;
                    memcpy(&both, w + lane * 2, sizeof both);
                    uint32_t low = both << 16, high = both & 0xffff0000u;
                    memcpy(&even[half * LANES + lane], &low, sizeof low);
                    memcpy(&odd[half * LANES + lane], &high, sizeof high);
                }
            }
            for (int64_t row = 0; row < rows; row++) {
                float x0 = widen(x[row * DEPTH + 2 * pair]), x1 = widen(x[row * DEPTH + 2 * pair + 1]);
                for (int lane = 0; lane < PANEL; lane++) s[row][lane] += x0 * even[lane];
                for (int lane = 0; lane < PANEL; lane++) s[row][lane] += x1 * odd[lane];
            }
        }
    }
    memcpy(sums, s, rows * sizeof s[0]);
}

static void multiply_portable(const bf16 *staged, int64_t count, const bf16 *weight, int64_t steps, int64_t ahead,
                              float *sums) {
    (void)ahead;
    for (int64_t row = 0; row < count; row += PORTABLE_ROWS)
        add_rows(staged + row / LANES * LANES * steps * DEPTH + row % LANES * DEPTH,
                 min64(PORTABLE_ROWS, count - row), weight, steps, sums + row * PANEL);
}

CLONES static void round_portable(const float *sums, const float *bias, int64_t count, int is_large, bf16 *out,
                                  int64_t out_stride) {
    (void)is_large;
    for (int64_t row = 0; row < count; row++)
        for (int64_t i = 0; i < PANEL; i++) out[row * out_stride + i] = narrow(sums[row * PANEL + i] + bias[i]);
}

static void multiply_beside_portable(const bf16 *staged, int64_t count, const bf16 *weight, int64_t steps, float *sums,
                                     const struct beside *beside) {
    multiply_portable(staged, count, weight, steps, 0, sums);
    for (int64_t row = beside->first; row < beside->past; row++) beside->do_row(beside->what, row);
}

static void put_portable(const bf16 *row, int is_large, bf16 *out) {
    (void)is_large;
    memcpy(out, row, PANEL * sizeof(bf16));
}

static const struct panel_products portable = {multiply_portable, multiply_beside_portable, round_portable,
                                               put_portable};

#if HAS_AMX
/* ---- AVX-512 with products of bfloat16 pairs ---- */

#define STEP_LINES (STEP * (int)sizeof(bf16) / LINE)

/* Some lines of the step that lies `ahead` bytes behind this one. */
AVX512 static inline void fetch_part(const bf16 *weight, int64_t ahead, int line, int past) {
    for (; line < past; line++) _mm_prefetch((const char *)weight + ahead + line * LINE, _MM_HINT_T0);
}

/* All of it; 0 for none, when it is left to the processor. */
AVX512 static inline void fetch(const bf16 *weight, int64_t ahead) {
    if (ahead) fetch_part(weight, ahead, 0, STEP_LINES);
}

/* ROWS rows: a function each, so that the sums stay in registers. */
#define ADD_ROWS(ROWS)                                                                                       \
    AVX512 static void add_rows##ROWS(const bf16 *x, const bf16 *weight, int64_t steps, int64_t ahead,       \
                                      float *sums) {                                                         \
        __m512 s0[ROWS], s1[ROWS];                                                                           \
        for (int r = 0; r < ROWS; r++) {                                                                     \
            s0[r] = _mm512_setzero_ps();                                                                     \
            s1[r] = _mm512_setzero_ps();                                                                     \
        }                                                                                                    \
        for (int64_t step = 0; step < steps; step++, weight += STEP, x += TILE) {                            \
            fetch(weight, ahead);                                                                            \
            for (int pair = 0; pair < DEPTH / 2; pair++) {                                                   \
                const bf16 *w = weight + pair * LANES * 2;                                                   \
                __m512bh w0 = (__m512bh)_mm512_loadu_si512(w), w1 = (__m512bh)_mm512_loadu_si512(w + TILE);  \
                for (int r = 0; r < ROWS; r++) {                                                             \
                    int both;                                                                                \
                    memcpy(&both, x + r * DEPTH + 2 * pair, sizeof both);                                    \
                    __m512bh xs = (__m512bh)_mm512_set1_epi32(both);                                         \
                    s0[r] = _mm512_dpbf16_ps(s0[r], xs, w0);                                                 \
                    s1[r] = _mm512_dpbf16_ps(s1[r], xs, w1);                                                 \
                }                                                                                            \
            }                                                                                                \
        }                                                                                                    \
        for (int r = 0; r < ROWS; r++) {                                                                     \
            _mm512_storeu_ps(sums + r * PANEL, s0[r]);                                                       \
            _mm512_storeu_ps(sums + r * PANEL + LANES, s1[r]);                                               \
        }                                                                                                    \
    }
ADD_ROWS(1)
ADD_ROWS(2)
ADD_ROWS(4)
ADD_ROWS(8)

static void multiply_avx512(const bf16 *staged, int64_t count, const bf16 *weight, int64_t steps, int64_t ahead,
                            float *sums) {
    for (int64_t row = 0; row < count; row += 8, sums += PANEL * 8, ahead = 0) {
        const bf16 *x = staged + row / LANES * LANES * steps * DEPTH + row % LANES * DEPTH;
        int64_t left = min64(8, count - row);
        float *to = sums;
        if (left == 8) {
            add_rows8(x, weight, steps, ahead, to);
            continue;
        }
        if (left & 4) add_rows4(x, weight, steps, ahead, to), x += 4 * DEPTH, to += 4 * PANEL, ahead = 0;
        if (left & 2) add_rows2(x, weight, steps, ahead, to), x += 2 * DEPTH, to += 2 * PANEL, ahead = 0;
        if (left & 1) add_rows1(x, weight, steps, ahead, to);
    }
}

AVX512 static inline void put_line(bf16 *out, __m512i line, int is_streamed) {
    if (is_streamed) _mm512_stream_si512((__m512i *)out, line);
    else _mm512_storeu_si512(out, line);
}

static int is_whole_lines(const bf16 *out, int64_t out_stride) {
    return ((uintptr_t)out | out_stride * sizeof(bf16)) % LINE == 0;
}

AVX512 static void round_avx512(const float *sums, const float *bias, int64_t count, int is_large, bf16 *out,
                                int64_t out_stride) {
    __m512 low = _mm512_loadu_ps(bias), high = _mm512_loadu_ps(bias + LANES);
    int is_streamed = is_large && is_whole_lines(out, out_stride);
    for (int64_t row = 0; row < count; row++, sums += PANEL, out += out_stride) {
        __m512 a = _mm512_add_ps(_mm512_loadu_ps(sums), low), b = _mm512_add_ps(_mm512_loadu_ps(sums + LANES), high);
        put_line(out, (__m512i)_mm512_cvtne2ps_pbh(b, a), is_streamed);
    }
}

AVX512 static void put_avx512(const bf16 *row, int is_large, bf16 *out) {
    put_line(out, _mm512_loadu_si512(row), is_large && is_whole_lines(out, 0));
}

static void multiply_beside_avx512(const bf16 *staged, int64_t count, const bf16 *weight, int64_t steps, float *sums,
                                   const struct beside *beside) {
    multiply_avx512(staged, count, weight, steps, 0, sums);
    for (int64_t row = beside->first; row < beside->past; row++) beside->do_row(beside->what, row);
}

static const struct panel_products avx512 = {multiply_avx512, multiply_beside_avx512, round_avx512, put_avx512};

/* ---- AMX: the weight's two tiles by one to three tiles of rows, whose sums are in tiles 0 to 5 ---- */

/* A step by one tile of rows. */
#define ADD_TILE(NAME, LOW, HIGH)                                          \
    AMX static inline void NAME(const bf16 *x, const bf16 *weight) {       \
        _tile_loadd(6, x, LINE);                                           \
        _tile_loadd(7, weight, LINE);                                      \
        _tile_dpbf16ps(LOW, 6, 7);                                         \
        _tile_loadd(7, weight + TILE, LINE);                               \
        _tile_dpbf16ps(HIGH, 6, 7);                                        \
    }
ADD_TILE(add_first, 0, 1)
ADD_TILE(add_second, 2, 3)
ADD_TILE(add_third, 4, 5)

/* By two, which with their four sums leave room for both tiles of the weight. */
AMX static inline void add_two(const bf16 *x0, const bf16 *x1, const bf16 *weight) {
    _tile_loadd(4, x0, LINE);
    _tile_loadd(6, weight, LINE);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weight + TILE, LINE);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, x1, LINE);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

/* By three, which leave room for one tile of rows and one of the weight: rows, which the first cache keeps, are read
 * twice, and a weight's tile serves three. */
AMX static inline void add_three(const bf16 *x0, const bf16 *x1, const bf16 *x2, const bf16 *weight) {
    _tile_loadd(6, x0, LINE);
    _tile_loadd(7, weight, LINE);
    _tile_dpbf16ps(0, 6, 7);
    _tile_loadd(6, x1, LINE);
    _tile_dpbf16ps(2, 6, 7);
    _tile_loadd(6, x2, LINE);
    _tile_dpbf16ps(4, 6, 7);
    _tile_loadd(7, weight + TILE, LINE);
    _tile_dpbf16ps(5, 6, 7);
    _tile_loadd(6, x1, LINE);
    _tile_dpbf16ps(3, 6, 7);
    _tile_loadd(6, x0, LINE);
    _tile_dpbf16ps(1, 6, 7);
}

AMX static inline void clear_sums(int tiles) {
    _tile_zero(0);
    _tile_zero(1);
    if (tiles > 1) {
        _tile_zero(2);
        _tile_zero(3);
    }
    if (tiles > 2) {
        _tile_zero(4);
        _tile_zero(5);
    }
}

AMX static inline void store_sums(float *sums, int tiles) {
    _tile_stored(0, sums, PANEL * sizeof(float));
    _tile_stored(1, sums + LANES, PANEL * sizeof(float));
    sums += LANES * PANEL;
    if (tiles > 1) {
        _tile_stored(2, sums, PANEL * sizeof(float));
        _tile_stored(3, sums + LANES, PANEL * sizeof(float));
    }
    sums += LANES * PANEL;
    if (tiles > 2) {
        _tile_stored(4, sums, PANEL * sizeof(float));
        _tile_stored(5, sums + LANES, PANEL * sizeof(float));
    }
}

#define RUN 8       /* steps of a weight that comes from memory by one tile of rows, then by the next */
#define OF_FIRST 28 /* of a step's lines, fetched with the first: the others take as long as the rest */

/* Several tiles of rows by a weight that comes from memory. By all at each step it would come a third slower: while the
 * products wait for a step, little is asked for. */
AMX static void add_runs(const bf16 *x, int tiles, const bf16 *weight, int64_t steps, int64_t ahead) {
    const bf16 *x1 = x + steps * TILE, *x2 = x1 + steps * TILE;
    for (int64_t done = 0; done < steps; done += RUN) {
        int64_t past = min64(steps, done + RUN);
        for (int64_t step = done; step < past; step++) {
            fetch_part(weight + step * STEP, ahead, 0, OF_FIRST);
            add_first(x + step * TILE, weight + step * STEP);
        }
        for (int64_t step = done; step < past; step++) {
            fetch_part(weight + step * STEP, ahead, OF_FIRST, STEP_LINES);
            add_second(x1 + step * TILE, weight + step * STEP);
        }
        for (int64_t step = done; tiles > 2 && step < past; step++)
            add_third(x2 + step * TILE, weight + step * STEP);
    }
}

/* Tiles of rows by a weight that is near, and what is done beside. */
AMX static inline void add_steps(const bf16 *x, int tiles, const bf16 *weight, int64_t steps,
                                 const struct beside *beside) {
    int64_t row = beside->first, each = parts(beside->past - row, steps), rows = steps * TILE;
    for (int64_t step = 0; step < steps; step++, weight += STEP, x += TILE) {
        if (tiles == 1) add_first(x, weight);
        else if (tiles == 2) add_two(x, x + rows, weight);
        else add_three(x, x + rows, x + 2 * rows, weight);
        for (int64_t past = min64(beside->past, row + each); row < past; row++) beside->do_row(beside->what, row);
    }
}

AMX static void multiply_beside_amx(const bf16 *staged, int64_t count, const bf16 *weight, int64_t steps, float *sums,
                                    const struct beside *beside) {
    int tiles = (int)parts(count, LANES);
    clear_sums(tiles);
    add_steps(staged, tiles, weight, steps, beside);
    store_sums(sums, tiles);
}

AMX static void multiply_amx(const bf16 *staged, int64_t count, const bf16 *weight, int64_t steps, int64_t ahead,
                             float *sums) {
    static const struct beside nothing = {NULL, NULL, 0, 0};
    int tiles = (int)parts(count, LANES);
    if (ahead == 0) {
        multiply_beside_amx(staged, count, weight, steps, sums, &nothing);
        return;
    }
    clear_sums(tiles);
    if (tiles > 1) add_runs(staged, tiles, weight, steps, ahead);
    else
        for (int64_t step = 0; step < steps; step++) {
            fetch(weight + step * STEP, ahead);
            add_first(staged + step * TILE, weight + step * STEP);
        }
    store_sums(sums, tiles);
}

static const struct panel_products amx = {multiply_amx, multiply_beside_amx, round_avx512, put_avx512};

/* Eight tiles of 16 rows of a line. A constant: to gcc 12 the intrinsic reads but the first bytes, so that it would
 * leave out the stores to the rest of a variable. */
static const struct ALIGNED {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} whole_tiles = {
    .palette = 1,
    .bytes = {LINE, LINE, LINE, LINE, LINE, LINE, LINE, LINE},
    .rows = {LANES, LANES, LANES, LANES, LANES, LANES, LANES, LANES},
};

AMX static void load_palette(void) { _tile_loadconfig(&whole_tiles); }

AMX static void release_palette(void) { _tile_release(); }

/* The kernel lends a process the tiles' state on request. */
static int may_use_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#endif

int kaon_isa(void) {
#if HAS_AMX
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16") &&
          __builtin_cpu_supports("avx512vnni")))
        return PORTABLE;
    unsigned a, b, c, d;
    __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
    int has_tiles = (d >> 24 & 1) && (d >> 22 & 1) && (d >> 25 & 1); /* AMX-TILE, AMX-BF16, AMX-INT8 */
    return has_tiles && may_use_tiles() ? WITH_AMX : WITH_AVX512_BF16;
#else
    return PORTABLE;
#endif
}

const struct panel_products *panel_products(enum isa isa) {
#if HAS_AMX
    if (isa == WITH_AMX) return &amx;
    if (isa == WITH_AVX512_BF16) return &avx512;
#endif
    (void)isa;
    return &portable;
}

void settle_rounded(void) {
#if HAS_AMX
    __builtin_ia32_sfence(); /* Stores past the caches wait for no lock. */
#endif
}

void prepare_tiles(enum isa isa) {
#if HAS_AMX
    if (isa == WITH_AMX) load_palette();
#endif
    (void)isa;
}

void release_tiles(enum isa isa) {
#if HAS_AMX
    if (isa == WITH_AMX) release_palette();
#endif
    (void)isa;
}
