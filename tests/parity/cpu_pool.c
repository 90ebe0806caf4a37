/* Thousands of programs of three small operators while the number of threads changes, so many for each number, and
 * another thread interrupts every second program: test_cpu_sanitized.py runs it in a build that a data race ends. */

#include <pthread.h>
#include <stdlib.h>

#include "operators.h"

int kaon_start(int threads, int isa);
int64_t kaon_run(const struct operation *operations, int64_t count, const struct step *step, int may_pause);

void kaon_interrupt(void);

static atomic_int has_ended;

static void *interrupt(void *unused) {
    while (!atomic_load(&has_ended)) kaon_interrupt();
    return unused;
}

enum { TOKENS = 9, SIZE = 32, WIDTH = 300, PIECES = 4, MOST = 3 };

int main(int argc, char **argv) {
    const int programs = argc > 1 ? atoi(argv[1]) : 1000;
    static bf16 x[TOKENS * SIZE], norm[SIZE], normed[TOKENS * SIZE], weight[SIZE * SIZE], out[TOKENS * SIZE];
    const struct rms_norm first = {.x = x, .x_stride = SIZE, .weight = norm, .out = normed, .out_stride = SIZE,
                                   .size = SIZE, .eps = 1e-5};
    const struct linear second = {.x = normed, .x_stride = SIZE, .weight = weight, .out = out, .out_stride = SIZE,
                                  .in_features = SIZE, .out_features = SIZE};
    static float values[TOKENS * WIDTH];
    static uint64_t best[TOKENS * PIECES * MOST];
    static int64_t found[TOKENS * PIECES], ids[TOKENS * MOST];
    static atomic_int ended[TOKENS];
    const struct largest third = {.values = values, .stride = WIDTH, .width = WIDTH, .pieces = PIECES, .k = MOST,
                                  .best = best, .found = found, .ended = ended, .ids = ids};
    const struct operation program[] = {{RMS_NORM, &first}, {LINEAR, &second}, {LARGEST, &third}};
    const struct step step = {.num_tokens = TOKENS};
    pthread_t other;
    if (pthread_create(&other, NULL, interrupt, NULL)) return 1;
    for (int round = 0; round < 12; round++) {
        static const int threads[] = {2, 4, 1, 3};
        int isa = round % ISAS;
        while (!kaon_runs(isa)) isa--;
        if (kaon_start(threads[round % 4], isa)) return 1;
        for (int i = 0; i < programs; i++) {
            for (int token = 0; token < TOKENS; token++) atomic_init(&ended[token], 0);
            for (int64_t done = 0; done < 3;) {
                int64_t ran = kaon_run(program + done, 3 - done, &step, i % 2);
                if (ran < 1 || (ran < 3 - done && i % 2 == 0)) return 2;
                done += ran;
            }
            for (int token = 0; token < TOKENS; token++)
                if (atomic_load(&ended[token]) != PIECES) return 3;
        }
    }
    atomic_store(&has_ended, 1);
    pthread_join(other, NULL);
    return 0;
}
