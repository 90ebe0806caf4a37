/* The work of a thread of attention.c: tasks, the addresses of their keys and values, and prefetches. */

#ifndef ATTENTION_TASKS_H
#define ATTENTION_TASKS_H

#include "attention.h"

#define TILES 16 /* of columns that meet keys while these are near */

/* Some columns of one row, or of rows that share what they see here, and one KV head. */
struct task {
    const struct attention *op;
    int64_t kv_head, group;    /* query heads that share it */
    const int32_t *blocks;     /* of the row */
    int64_t start, query_len;  /* its tokens in the step */
    int64_t context;           /* and before it */
    const int32_t *selected;   /* blocks of keys, which lie next to each other in the columns' sight; NULL: all keys */
    int64_t row, rows, shared; /* how many rows share their first keys, 1 for none, and how many keys */
    int64_t first_column, tiles;
    int64_t least, past;       /* keys that any of the columns sees */
    struct columns columns[TILES];
    struct seen *all, *split; /* [tiles], of all splits before this one, and of this one */
    char *queries;
};

/* A thread's position in the list of tasks. With selected blocks a task is one token and KV head. */
struct cursor {
    int64_t row, rows, shared;    /* as of a task */
    int64_t before, of_row, tiles; /* tasks before the row's, and of it; tiles of its columns */
};

/* Go on to the row of the task of that number, which is no earlier one; 0 where there are fewer. */
int reach_task(const struct attention *op, const struct step *step, int threads, long number, struct cursor *at);

/* The same, and the task. */
int find_task(const struct attention *op, const struct step *step, int threads, long number, struct cursor *at,
              struct task *task);

/* Where the keys and values of a step from `first_key` on are. */
void locate(const struct task *task, int64_t first_key, struct units *keys, struct units *values);

/* The two steps after the one that is taken, of a thread's tasks. */
struct ahead {
    struct fetches soon, later;
    const struct task *task; /* of the step after these two, or NULL where that is not known yet */
    int64_t first_key;
};

/* Before a task's first step, unless what follows that is known from the task before. */
void begin_task(struct ahead *ahead, const struct task *task, int64_t first_key);

/* Before each step: which two follow. `after`: what is likely the next task, or NULL. */
void look_further(struct ahead *ahead, const struct task *after);

/* After each step: what is left of the next one is asked for all at once. */
void go_on(struct ahead *ahead);

#endif
