/* How a process waits for another that writes to the same memory. */

#ifndef WAITING_H
#define WAITING_H

#include <sched.h>
#include <time.h>

#include "operators.h"

#define SPINS 2000  /* about 100 microseconds */
#define YIELDS 4000 /* a millisecond or more, as long as nobody else wants the core */
#define NAP_NS 50000

/* Between two looks, of which this is the one of that number: ever longer. */
static inline void pause_for(int64_t round) {
    if (round < SPINS) relax();
    else if (round < SPINS + YIELDS) sched_yield();
    else nanosleep(&(struct timespec){0, NAP_NS}, NULL);
}

#endif
