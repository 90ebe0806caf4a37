/* Waiting for another process that writes to shared memory: spin, then yield, then sleep. */

#ifndef WAITING_H
#define WAITING_H

#include <sched.h>
#include <time.h>

#include "operators.h"

#define SPINS 2000  /* about 100 microseconds */
#define YIELDS 4000 /* a millisecond or more, while no other process wants the core */
#define NAP_NS 50000

/* Called between two reads, with their number: waits ever longer. */
static inline void pause_for(int64_t round) {
    if (round < SPINS) relax();
    else if (round < SPINS + YIELDS) sched_yield();
    else nanosleep(&(struct timespec){0, NAP_NS}, NULL);
}

#endif
