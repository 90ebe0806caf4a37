/* See panels.h. Each instruction set has one order of sums for any `count`. */

#include "panels.h"
#include "operators.h"
#include "vectors.h"

#define STEP_LINES (STEP * (int)sizeof(bf16) / LINE)
#define SIDE_PANELS 4 /* largest number that few rows are multiplied by together */
#define SIDE_AHEAD 2  /* steps by which these are fetched ahead */
#define NEAR_STEPS 4 /* 8 KiB of a weight, which stay in the L1 cache together with their rows */
#define NEAR_PART_STEPS (fetches_far() ? 6 : NEAR_STEPS) /* the same of a weight that is in the L2 cache already */

/* Rows to take of a tile from `row` on, `most` at most, and if possible no single one, which takes as long as several. */
static inline int64_t rows_at_once(int64_t row, int64_t count, int64_t most) {
    int64_t left = min64(count - row, LANES - row % LANES);
    return left > most + 1 ? most : left > most ? parts(left, 2) : left;
}

static inline int is_whole_lines(const bf16 *out, int64_t out_stride) {
    return ((uintptr_t)out | out_stride * sizeof(bf16)) % LINE == 0;
}

/* Store a line with a non-temporal hint. */
static inline void stream_line(bf16 *out, const bf16 *line) {
#if HAS_X86
    for (int i = 0; i < PANEL; i += 8) _mm_stream_si128((__m128i *)(out + i), _mm_loadu_si128((const void *)(line + i)));
#else
    memcpy(out, line, LINE);
#endif
}

#if defined(__x86_64__)
#define REGISTER(x) "x"(x)
#elif defined(__aarch64__)
#define REGISTER(x) "w"(x)
#else
#define REGISTER(x) "m"(x)
#endif

/* ---- any processor: vectors that all have ---- */

#define NAME(x) portable_##x
#define TARGET
#define WIDTH 4
#define ROWS 4
#define SUMS 8
#define PAIRS 0
#include "panel_kernel.h"

#if HAS_NEON
/* ---- Arm: twice as many registers as other vectors of 128 bits have, without products of bfloat16 and with them ---- */

#define NAME(x) neon_##x
#define TARGET NEON
#define WIDTH 4
#define ROWS 8
#define SUMS 16
#define PAIRS 0
#include "panel_kernel.h"

NEON_BF16 INLINE uint16x4_t neon_bf16_narrow(float32x4_t v) { return vreinterpret_u16_bf16(vcvt_bf16_f32(v)); }

#define NAME(x) neon_bf16_##x
#define TARGET NEON_BF16
#define WIDTH 4
#define ROWS 8
#define SUMS 16
#define PAIRS 1
#include "panel_kernel.h"
#endif

#if HAS_X86
/* ---- AVX2 and AVX-512 without products of bfloat16 ---- */

#define NAME(x) avx2_##x
#define TARGET AVX2
#define WIDTH 8
#define ROWS 6
#define SUMS 12
#define NEAR (blocks > 2 ? 16 : NEAR_STEPS)
#define NEAR_PART steps
#define LEAST_AHEAD 3072
#define PAIRS 0
#include "panel_kernel.h"

#define NAME(x) avx512_##x
#define TARGET AVX512
#define WIDTH 16
#define ROWS 8
#define SUMS 16
#define PAIRS 0
#include "panel_kernel.h"

/* ---- AVX-512 with them ---- */

/* The line is stored as one vector, so that its next read waits for one store. */
AVX512_BF16 INLINE void pairs_narrow_line(const float *sums, const float *bias, bf16 *line) {
    __m512 low = _mm512_add_ps(_mm512_loadu_ps(sums), _mm512_loadu_ps(bias));
    __m512 high = _mm512_add_ps(_mm512_loadu_ps(sums + LANES), _mm512_loadu_ps(bias + LANES));
    _mm512_storeu_si512(line, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

#define NAME(x) pairs_##x
#define TARGET AVX512_BF16
#define WIDTH 16
#define ROWS 8
#define SUMS 16
#define PAIRS 1
#include "panel_kernel.h"

/* ---- AMX: the weight's two tiles by one to three tiles of rows, whose sums are in tiles 0 to 5 ---- */

/* Some lines of the step that lies `ahead` bytes behind this one. */
static inline void fetch_part(const bf16 *weight, int64_t ahead, int line, int past) {
    for (; line < past; line++) _mm_prefetch((const char *)weight + ahead + line * LINE, _MM_HINT_T0);
}

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

/* By two tiles, whose four sums leave room for both tiles of the weight. */
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

/* Three tiles of rows at a time, which leave one tile for rows and one for the weight. Rows are read once, past the L1
 * cache, which then keeps the weight's tiles for their second use. */
AMX static inline void add_three(const bf16 *x0, const bf16 *x1, const bf16 *x2, const bf16 *weight) {
    _tile_stream_loadd(6, x0, LINE);
    _tile_loadd(7, weight, LINE);
    _tile_dpbf16ps(0, 6, 7);
    _tile_loadd(7, weight + TILE, LINE);
    _tile_dpbf16ps(1, 6, 7);
    _tile_stream_loadd(6, x1, LINE);
    _tile_dpbf16ps(3, 6, 7);
    _tile_loadd(7, weight, LINE);
    _tile_dpbf16ps(2, 6, 7);
    _tile_stream_loadd(6, x2, LINE);
    _tile_dpbf16ps(4, 6, 7);
    _tile_loadd(7, weight + TILE, LINE);
    _tile_dpbf16ps(5, 6, 7);
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

/* The inverse of `store_sums`. */
AMX static inline void load_sums(const float *sums, int tiles) {
    _tile_loadd(0, sums, PANEL * sizeof(float));
    _tile_loadd(1, sums + LANES, PANEL * sizeof(float));
    sums += LANES * PANEL;
    if (tiles > 1) {
        _tile_loadd(2, sums, PANEL * sizeof(float));
        _tile_loadd(3, sums + LANES, PANEL * sizeof(float));
    }
    sums += LANES * PANEL;
    if (tiles > 2) {
        _tile_loadd(4, sums, PANEL * sizeof(float));
        _tile_loadd(5, sums + LANES, PANEL * sizeof(float));
    }
}

#define RUN 8       /* steps of a weight that comes from memory by one tile of rows, then by the next */
#define OF_FIRST 28 /* of a step's lines, fetched with the first: the others take as long as the rest */

/* Several tiles of rows times a weight that is read from memory. With all tiles in each step it would be a third
 * slower: while the products wait for a step, few lines are requested. */
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

/* Tiles of rows times a weight in the cache, and the work between their steps. */
AMX static inline void add_steps(const bf16 *x, int tiles, const bf16 *weight, int64_t steps,
                                 int64_t all, const struct side_work *side) {
    int64_t row = side->first, each = parts(side->past - row, steps), rows = all * TILE;
    const char *soon = side->soon;
    for (int64_t step = 0; step < steps; step++, weight += STEP, x += TILE) {
        for (int64_t line = 0; line < side->lines; line++, soon += LINE) _mm_prefetch(soon, _MM_HINT_T1);
        if (tiles == 1) add_first(x, weight);
        else if (tiles == 2) add_two(x, x + rows, weight);
        else add_three(x, x + rows, x + 2 * rows, weight);
        int64_t first = row;
        row = min64(side->past, row + each);
        if (first < row) side->do_rows(side->what, first, row);
    }
}

AMX static void multiply_part_amx(const char *rows, int64_t count, int64_t all, const bf16 *weight, int64_t steps,
                                  int is_first, float *sums, const struct side_work *side) {
    int tiles = (int)parts(count, LANES);
    if (is_first) clear_sums(tiles);
    else load_sums(sums, tiles);
    add_steps((const bf16 *)rows, tiles, weight, steps, all, side);
    store_sums(sums, tiles);
}

/* Of all three panels, so many lines. */
static inline void fetch_side(const struct near_panels *near, int64_t from, int64_t past) {
    for (int64_t line = from; line < past; line++)
        for (int64_t panel = 0; panel < near->count; panel++)
            _mm_prefetch(near->ahead + panel * near->ahead_apart + line * LINE, _MM_HINT_T0);
}

/* One tile of rows by three panels. */
AMX static void add_side_amx(const bf16 *x, int64_t count, const struct near_panels *near, float *sums) {
    enum { STRIDE = PANEL * sizeof(float) };
    const bf16 *weight = near->first;
    int64_t apart = near->apart, lines = near->stride * DEPTH / 2 / LINE;
    float *second = sums + count * PANEL, *third = second + count * PANEL;
    _tile_loadd(0, sums, STRIDE);
    _tile_loadd(1, sums + LANES, STRIDE);
    _tile_loadd(2, second, STRIDE);
    _tile_loadd(3, second + LANES, STRIDE);
    _tile_loadd(4, third, STRIDE);
    _tile_loadd(5, third + LANES, STRIDE);
    for (int64_t step = 0; step < near->steps; step++, x += TILE, weight += STEP) {
        int64_t line = step * lines;
        _tile_loadd(6, x, LINE);
        _tile_loadd(7, weight, LINE);
        _tile_dpbf16ps(0, 6, 7);
        fetch_side(near, line, line + lines / 4);
        _tile_loadd(7, weight + TILE, LINE);
        _tile_dpbf16ps(1, 6, 7);
        _tile_loadd(7, weight + apart, LINE);
        _tile_dpbf16ps(2, 6, 7);
        fetch_side(near, line + lines / 4, line + lines / 2);
        _tile_loadd(7, weight + apart + TILE, LINE);
        _tile_dpbf16ps(3, 6, 7);
        fetch_side(near, line + lines / 2, line + lines * 3 / 4);
        _tile_loadd(7, weight + 2 * apart, LINE);
        _tile_dpbf16ps(4, 6, 7);
        _tile_loadd(7, weight + 2 * apart + TILE, LINE);
        _tile_dpbf16ps(5, 6, 7);
        fetch_side(near, line + lines * 3 / 4, line + lines);
    }
    _tile_stored(0, sums, STRIDE);
    _tile_stored(1, sums + LANES, STRIDE);
    _tile_stored(2, second, STRIDE);
    _tile_stored(3, second + LANES, STRIDE);
    _tile_stored(4, third, STRIDE);
    _tile_stored(5, third + LANES, STRIDE);
}

#define SIDE_PANELS_OF_AMX 3
#define SIDE_AHEAD_OF_AMX 2 /* steps */

static inline void fetch_tile(const char *soon) {
    for (int line = 0; line < STEP_LINES / 2; line++) _mm_prefetch(soon + line * LINE, _MM_HINT_T0);
}

/* A step of a panel times the rows in tile 6, and a step of this panel that is to be prefetched. */
#define SIDE_STEP(LOW, HIGH, weight, soon)           \
    do {                                             \
        _tile_loadd(7, weight, LINE);                \
        fetch_tile(soon);                            \
        _tile_dpbf16ps(LOW, 6, 7);                   \
        _tile_loadd(7, (weight) + TILE, LINE);       \
        fetch_tile((soon) + TILE * sizeof(bf16));    \
        _tile_dpbf16ps(HIGH, 6, 7);                  \
    } while (0)

/* One tile of rows times three panels that are read from memory: several streams keep more lines in flight. During the
 * last steps the panels that are read next are prefetched. A panel has 16 rows of sums, of which those after `count`
 * are overwritten by the next panel's. */
AMX static int64_t multiply_side_amx(const char *rows, int64_t count, const bf16 *weight, int64_t panels, int64_t steps,
                                     float *sums) {
    enum { STRIDE = PANEL * sizeof(float) };
    if (count > LANES || panels < SIDE_PANELS_OF_AMX) return 0;
    const bf16 *x = (const bf16 *)rows;
    int64_t apart = steps * STEP, bytes = apart * (int64_t)sizeof(bf16);
    clear_sums(SIDE_PANELS_OF_AMX);
    for (int64_t step = 0; step < steps; step++, x += TILE, weight += STEP) {
        int64_t beyond = step + SIDE_AHEAD_OF_AMX < steps ? 0 : (SIDE_PANELS_OF_AMX - 1) * apart;
        const char *soon = (const char *)(weight + SIDE_AHEAD_OF_AMX * STEP + beyond);
        _tile_loadd(6, x, LINE);
        SIDE_STEP(0, 1, weight, soon);
        SIDE_STEP(2, 3, weight + apart, soon + bytes);
        SIDE_STEP(4, 5, weight + 2 * apart, soon + 2 * bytes);
    }
    float *second = sums + count * PANEL, *third = second + count * PANEL;
    _tile_stored(0, sums, STRIDE);
    _tile_stored(1, sums + LANES, STRIDE);
    _tile_stored(2, second, STRIDE);
    _tile_stored(3, second + LANES, STRIDE);
    _tile_stored(4, third, STRIDE);
    _tile_stored(5, third + LANES, STRIDE);
    return SIDE_PANELS_OF_AMX;
}

static int64_t side_panels_amx(int64_t count) { return count > LANES ? 1 : SIDE_PANELS_OF_AMX; }

AMX static void add_amx(const char *rows, int64_t count, int64_t all, const struct near_panels *near, float *sums) {
    static const struct side_work nothing = {0};
    if (near->count == SIDE_PANELS_OF_AMX) {
        add_side_amx((const bf16 *)rows, count, near, sums);
        return;
    }
    int tiles = (int)parts(count, LANES);
    fetch_side(near, 0, near->steps * near->stride * (DEPTH / 2) / LINE);
    for (int64_t panel = 0; panel < near->count; panel++, sums += count * PANEL) {
        load_sums(sums, tiles);
        add_steps((const bf16 *)rows, tiles, near->first + panel * near->apart, near->steps, all, &nothing);
        store_sums(sums, tiles);
    }
}

/* The weight's rows are the first factor here, and rows the second: sums of the same products in the same order. */
AMX static void add_columns_amx(const bf16 *columns, int64_t count, const struct near_panels *near, float *sums) {
    const bf16 *weight = near->first, *other = weight + near->apart;
    float *of_other = sums + PANEL * LANES;
    int has_other = near->count > 1;
    _tile_loadd(0, sums, LINE);
    _tile_loadd(1, sums + LANES * LANES, LINE);
    if (has_other) {
        _tile_loadd(2, of_other, LINE);
        _tile_loadd(3, of_other + LANES * LANES, LINE);
    }
    for (int64_t step = 0; step < near->steps; step++, weight += STEP, other += STEP) {
        _tile_loadd(6, columns + step * DEPTH * count, count * 4);
        _tile_loadd(7, weight, LINE);
        _tile_dpbf16ps(0, 7, 6);
        _tile_loadd(7, weight + TILE, LINE);
        _tile_dpbf16ps(1, 7, 6);
        if (!has_other) continue;
        _tile_loadd(7, other, LINE);
        _tile_dpbf16ps(2, 7, 6);
        _tile_loadd(7, other + TILE, LINE);
        _tile_dpbf16ps(3, 7, 6);
    }
    _tile_stored(0, sums, LINE);
    _tile_stored(1, sums + LANES * LANES, LINE);
    if (has_other) {
        _tile_stored(2, of_other, LINE);
        _tile_stored(3, of_other + LANES * LANES, LINE);
    }
}

AMX static void multiply_amx(const char *rows, int64_t count, const bf16 *weight, int64_t steps, int64_t ahead,
                             float *sums) {
    static const struct side_work nothing = {0};
    const bf16 *staged = (const bf16 *)rows;
    int tiles = (int)parts(count, LANES);
    if (ahead == 0) {
        multiply_part_amx(rows, count, steps, weight, steps, 1, sums, &nothing);
        return;
    }
    clear_sums(tiles);
    if (tiles > 1) add_runs(staged, tiles, weight, steps, ahead);
    else
        for (int64_t step = 0; step < steps; step++) {
            fetch_part(weight + step * STEP, ahead, 0, STEP_LINES);
            add_first(staged + step * TILE, weight + step * STEP);
        }
    store_sums(sums, tiles);
}

AMX static int64_t spin_amx(int64_t rounds, float *sums) {
    bf16 *factors = (bf16 *)sums; /* not zeros, see panel_kernel.h */
    for (int i = 0; i < 2 * TILE; i++) factors[i] = (bf16)((i % 2 ? 0x3f80 : 0xbf80) + i * 37 % 128);
    clear_sums(2);
    _tile_loadd(4, factors, LINE);
    _tile_loadd(5, factors + LANES, LINE);
    _tile_loadd(6, factors, LINE);
    _tile_loadd(7, factors + TILE, LINE);
    for (int64_t round = 0; round < rounds; round++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    store_sums(sums, 2);
    return rounds * 4 * 2 * LANES * LANES * DEPTH;
}

static const struct panel_products amx = {.staged_bytes = sizeof(bf16),
                                          .multiply = multiply_amx,
                                          .multiply_part = multiply_part_amx,
                                          .round = pairs_round,
                                          .put = pairs_put,
                                          .spin = spin_amx,
                                          .multiply_side = multiply_side_amx,
                                          .add = add_amx,
                                          .add_columns = add_columns_amx,
                                          .side_panels = side_panels_amx};

/* Eight tiles of lines: seven with a number of rows and one of 16, the weight's; or seven of 16 rows with a number of
 * columns. Constants, because gcc 12 assumes that the intrinsic reads only the first bytes, and would omit the stores
 * to the rest of a variable. */
#define PALETTE(n, line) {.palette = 1, .bytes = {line, line, line, line, line, line, line, LINE}, \
                          .rows = {n, n, n, n, n, n, n, LANES}}
#define OF_ROWS(n) PALETTE(n, LINE)
#define OF_COLUMNS(n) PALETTE(LANES, 4 * n)
#define FOR_EACH(of) {of(1), of(2), of(3), of(4), of(5), of(6), of(7), of(8), of(9), of(10), of(11), of(12), of(13), \
                      of(14), of(15), of(16)}
static const struct ALIGNED {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} palettes[2][LANES] = {FOR_EACH(OF_ROWS), FOR_EACH(OF_COLUMNS)};

AMX static void load_palette(int has_columns, int64_t rows) {
    _tile_loadconfig(&palettes[has_columns][max64(1, min64(rows, LANES)) - 1]);
}

AMX static void release_palette(void) { _tile_release(); }

#endif

const struct panel_products *panel_products(enum isa isa) {
#if HAS_X86
    if (isa == WITH_AMX) return &amx;
    if (isa == WITH_AVX512_BF16) return &pairs_products;
    if (isa == WITH_AVX512) return &avx512_products;
    if (isa >= WITH_AVX2) return &avx2_products;
#elif HAS_NEON
    if (isa == WITH_NEON_BF16) return &neon_bf16_products;
    if (isa == WITH_NEON) return &neon_products;
#endif
    (void)isa;
    return &portable_products;
}

void settle_rounded(void) {
#if HAS_X86
    __builtin_ia32_sfence(); /* Non-temporal stores are not ordered by locks. */
#endif
}

void prepare_tiles(enum isa isa) { prepare_rows(isa, LANES); }

void prepare_rows(enum isa isa, int64_t rows) {
#if HAS_X86
    if (isa == WITH_AMX) load_palette(0, rows);
#endif
    (void)isa, (void)rows;
}

void prepare_columns(enum isa isa, int64_t count) {
#if HAS_X86
    if (isa == WITH_AMX) load_palette(1, count);
#endif
    (void)isa, (void)count;
}

void release_tiles(enum isa isa) {
#if HAS_X86
    if (isa == WITH_AMX) release_palette();
#endif
    (void)isa;
}
