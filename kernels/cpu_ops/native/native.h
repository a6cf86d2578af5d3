/* What the files of the library share: the thread pool, scratch memory and small helpers. */
#ifndef BATON_NATIVE_H
#define BATON_NATIVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define SINK 0 /* index of the sink slot and of the sink block, as in kernels/contract.py */

typedef void (*task_fn)(const void *job, long task);

/* Runs fn(job, i) for every i in [0, tasks), on the calling thread and up to threads - 1 workers, and returns when all are
 * done. Which thread runs which task is left to chance, so a task's result must not depend on it. */
void pool_run(task_fn fn, const void *job, long tasks, int threads);

enum { SCRATCH_INPUT, SCRATCH_HIDDEN, SCRATCH_OUTPUT, SCRATCH_LISTS, SCRATCH_STATE, SCRATCH_QUERIES, SCRATCH_COUNT };

/* At least `bytes` of memory, aligned to 64, owned by the calling thread and kept for its next call with the same `which`. */
void *scratch(int which, size_t bytes);

static inline long min_long(long a, long b) { return a < b ? a : b; }
static inline long max_long(long a, long b) { return a > b ? a : b; }
static inline long ceil_div(long a, long b) { return (a + b - 1) / b; }

#endif
