/* AMX's tiles in software, for processors without them: included before all else, it replaces the intrinsics, and has
 * isa.c find tiles wherever there are products of bfloat16. Ends the process where a processor would raise #UD. */

#ifndef CPU_TILES_H
#define CPU_TILES_H

#ifdef __x86_64__
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* before the first header, as pool.c does */
#endif
#include <cpuid.h>
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>

static inline int cpuid_with_tiles(unsigned leaf, unsigned part, unsigned *a, unsigned *b, unsigned *c, unsigned *d) {
    int is_known = __get_cpuid_count(leaf, part, a, b, c, d);
    if (leaf == 7 && part == 0) *d |= 1u << 22 | 1u << 24 | 1u << 25;
    return is_known;
}
#define __get_cpuid_count cpuid_with_tiles
#undef SYS_arch_prctl
#define SYS_arch_prctl SYS_sched_yield /* which succeeds */

/* One for all files. */
__attribute__((weak)) _Thread_local struct {
    uint8_t rows[8], bytes[8]; /* 0: not configured */
    uint8_t data[8][16][64];
} cpu_tiles;

static inline void require(int condition) {
    if (!condition) abort();
}

static inline void tile_loadconfig(const void *from) {
    const uint8_t *given = from;
    memset(&cpu_tiles, 0, sizeof cpu_tiles);
    for (int i = 0; i < 16; i++) require(given[i] == (i == 0));
    for (int tile = 0; tile < 16; tile++) {
        uint16_t bytes;
        memcpy(&bytes, given + 16 + 2 * tile, sizeof bytes);
        require(bytes <= 64 && given[48 + tile] <= 16 && !bytes == !given[48 + tile] && (tile < 8 || !bytes));
        if (bytes) cpu_tiles.rows[tile] = given[48 + tile], cpu_tiles.bytes[tile] = (uint8_t)bytes;
    }
}

static inline void tile_release(void) { memset(&cpu_tiles, 0, sizeof cpu_tiles); }

static inline void tile_zero(int tile) {
    require(cpu_tiles.rows[tile]);
    memset(cpu_tiles.data[tile], 0, sizeof cpu_tiles.data[tile]);
}

static inline void tile_load(int tile, const void *from, long stride) {
    tile_zero(tile);
    for (int row = 0; row < cpu_tiles.rows[tile]; row++)
        memcpy(cpu_tiles.data[tile][row], (const char *)from + row * stride, cpu_tiles.bytes[tile]);
}

static inline void tile_store(int tile, void *to, long stride) {
    require(cpu_tiles.rows[tile]);
    for (int row = 0; row < cpu_tiles.rows[tile]; row++)
        memcpy((char *)to + row * stride, cpu_tiles.data[tile][row], cpu_tiles.bytes[tile]);
}

static inline void require_product(int sum, int a, int b) {
    const uint8_t *rows = cpu_tiles.rows, *bytes = cpu_tiles.bytes;
    require(sum != a && sum != b && a != b && rows[sum] && rows[sum] == rows[a] && bytes[sum] == bytes[b]);
    require(bytes[a] == 4 * rows[b] && bytes[sum] % 4 == 0);
}

/* The sums of even and of odd inputs begin with 0 and are added to the tile's at the end. */
static inline void tile_dpbf16ps(int sum, int a, int b) {
    require_product(sum, a, b);
    for (int row = 0; row < cpu_tiles.rows[sum]; row++)
        for (int column = 0; column < cpu_tiles.bytes[sum]; column += 4) {
            float total, of[2] = {0, 0};
            for (int pair = 0; pair < cpu_tiles.rows[b]; pair++)
                for (int odd = 0; odd < 2; odd++) {
                    float factors[2];
                    uint32_t x = 0, y = 0;
                    memcpy((char *)&x + 2, cpu_tiles.data[a][row] + pair * 4 + odd * 2, 2);
                    memcpy((char *)&y + 2, cpu_tiles.data[b][pair] + column + odd * 2, 2);
                    memcpy(factors, &x, 4), memcpy(factors + 1, &y, 4);
                    of[odd] = __builtin_fmaf(factors[0], factors[1], of[odd]);
                }
            memcpy(&total, cpu_tiles.data[sum][row] + column, 4);
            total += of[0] + of[1];
            memcpy(cpu_tiles.data[sum][row] + column, &total, 4);
        }
}

static inline void tile_dpbssd(int sum, int a, int b) {
    require_product(sum, a, b);
    for (int row = 0; row < cpu_tiles.rows[sum]; row++)
        for (int column = 0; column < cpu_tiles.bytes[sum]; column += 4) {
            int32_t total;
            memcpy(&total, cpu_tiles.data[sum][row] + column, 4);
            for (int i = 0; i < cpu_tiles.bytes[a]; i++)
                total += (int8_t)cpu_tiles.data[a][row][i] * (int8_t)cpu_tiles.data[b][i / 4][column + i % 4];
            memcpy(cpu_tiles.data[sum][row] + column, &total, 4);
        }
}

#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig tile_loadconfig
#define _tile_release tile_release
#define _tile_loadd tile_load
#define _tile_stream_loadd tile_load
#define _tile_stored tile_store
#define _tile_zero tile_zero
#define _tile_dpbf16ps tile_dpbf16ps
#define _tile_dpbssd tile_dpbssd
#endif

#endif
