/* Runs operators that another process asks for on standard input: tests/parity/emulated_operators.py, which compiles
 * this for a processor that an emulator runs. Numbers are 64-bit integers.
 *
 *   at first: the address of the arena ->
 *   RUNS isa -> whether;  START threads isa -> 0, or not
 *   RUN operators, bytes of the arena, the step, the arena, then of each operator its kind, and the offset of its
 *       arguments in the arena -> the arena */

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "operators.h"

int kaon_start(int threads, int isa);
int64_t kaon_run(const struct operation *operations, int64_t count, const struct step *step, int may_pause);

enum { RUNS, START, RUN };
#define ARENA ((size_t)1 << 30)

static int read_all(void *to, size_t bytes) { return bytes == 0 || fread(to, bytes, 1, stdin) == 1; }

static void answer(const void *from, size_t bytes) {
    fwrite(from, 1, bytes, stdout);
    fflush(stdout);
}

static int run(char *arena) {
    int64_t count, bytes;
    struct step step;
    if (!read_all(&count, sizeof count) || !read_all(&bytes, sizeof bytes) || !read_all(&step, sizeof step)) return 0;
    if (!read_all(arena, bytes)) return 0;
    struct operation *operations = calloc(count, sizeof *operations);
    for (int64_t i = 0; i < count; i++) {
        int64_t kind, offset;
        if (!read_all(&kind, sizeof kind) || !read_all(&offset, sizeof offset)) return 0;
        operations[i] = (struct operation){kind, arena + offset};
    }
    kaon_run(operations, count, &step, 0);
    answer(arena, bytes);
    free(operations);
    return 1;
}

int main(void) {
    char *arena = mmap(NULL, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    int64_t command, base = (int64_t)arena, given[2];
    answer(&base, sizeof base);
    while (read_all(&command, sizeof command)) {
        if (command == RUN) {
            if (!run(arena)) return 1;
            continue;
        }
        if (!read_all(given, sizeof given)) return 1;
        int64_t result = command == RUNS ? kaon_runs((int)given[1]) : kaon_start((int)given[0], (int)given[1]);
        answer(&result, sizeof result);
    }
    return 0;
}
