/* One small thread pool for the process.
 *
 * A job has a counter of tasks that its threads take from, so a late or slow thread costs nothing but its own task. All that
 * a worker may know about a job is in one 64-bit word, `state`: the job's generation, whether it is still open, how many
 * more workers may enter and how many are inside. A worker enters with a compare-and-swap; the caller closes the job when
 * no task is left and waits only for those who are inside. A worker that never woke up is therefore never waited for.
 *
 * Workers spin for a moment after a job (the next one of a forward pass comes within microseconds), then sleep.
 * They start when first needed, block all signals, are detached and hold nothing that a process exit would wait for.
 * A forked child begins without workers. When two threads submit at once, the second works through its job alone.
 */
#define _GNU_SOURCE
#include "native.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#define RELAX() _mm_pause()
#define FLOAT_MODE() _mm_getcsr()
#define SET_FLOAT_MODE(mode) _mm_setcsr(mode)
#else
#define RELAX() __asm__ volatile("" ::: "memory")
#define FLOAT_MODE() 0u
#define SET_FLOAT_MODE(mode) ((void)(mode))
#endif

#define MAX_WORKERS 255
#define SPIN_NANOSECONDS 50000

#define ONE_INSIDE ((uint64_t)1)
#define INSIDE(state) ((state) & 0xfff)
#define ONE_SEAT ((uint64_t)1 << 12)
#define SEATS(state) ((state) >> 12 & 0xfff)
#define OPEN ((uint64_t)1 << 24)
#define GENERATION(state) ((uint32_t)((state) >> 32))

static struct {
    pthread_mutex_t submit; /* held by the thread whose job runs */
    pthread_mutex_t sleep;  /* guards the two conditions */
    pthread_cond_t wake, done;
    int workers;
    _Atomic uint64_t state;
    atomic_int sleepers, caller_sleeps;
    /* the job */
    task_fn fn;
    const void *job;
    long tasks;
    unsigned float_mode;
    atomic_long next;
} pool = {.submit = PTHREAD_MUTEX_INITIALIZER, .sleep = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

static pthread_once_t fork_handler_once = PTHREAD_ONCE_INIT;

static void forget_workers(void) { /* runs in a forked child, where only the forking thread exists */
    pthread_mutex_init(&pool.submit, NULL);
    pthread_mutex_init(&pool.sleep, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.done, NULL);
    pool.workers = 0;
    atomic_store(&pool.state, 0);
    atomic_store(&pool.sleepers, 0);
    atomic_store(&pool.caller_sleeps, 0);
}

static void register_fork_handler(void) { pthread_atfork(NULL, NULL, forget_workers); }

static int64_t nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* A job that this worker has not seen. */
static bool is_news(uint64_t state, uint32_t seen) { return (state & OPEN) && GENERATION(state) != seen; }

static void wait_for_news(uint32_t seen) {
    const int64_t deadline = nanoseconds() + SPIN_NANOSECONDS;
    do {
        for (int i = 0; i < 32; i++) {
            if (is_news(atomic_load(&pool.state), seen)) return;
            RELAX();
        }
    } while (nanoseconds() < deadline);
    pthread_mutex_lock(&pool.sleep);
    atomic_fetch_add(&pool.sleepers, 1);
    while (!is_news(atomic_load(&pool.state), seen)) pthread_cond_wait(&pool.wake, &pool.sleep);
    atomic_fetch_sub(&pool.sleepers, 1);
    pthread_mutex_unlock(&pool.sleep);
}

static void take_tasks(task_fn fn, const void *job, long tasks) {
    for (long task; (task = atomic_fetch_add_explicit(&pool.next, 1, memory_order_relaxed)) < tasks;) fn(job, task);
}

static void leave(void) {
    const uint64_t before = atomic_fetch_sub(&pool.state, ONE_INSIDE);
    if (INSIDE(before) != 1 || (before & OPEN) || !atomic_load(&pool.caller_sleeps)) return;
    pthread_mutex_lock(&pool.sleep);
    pthread_cond_signal(&pool.done);
    pthread_mutex_unlock(&pool.sleep);
}

static void *work(void *unused) {
    (void)unused;
    uint32_t seen = 0;
    for (;;) {
        wait_for_news(seen);
        uint64_t state = atomic_load(&pool.state);
        while (is_news(state, seen) && SEATS(state)) {
            if (!atomic_compare_exchange_weak(&pool.state, &state, state + ONE_INSIDE - ONE_SEAT)) continue;
            SET_FLOAT_MODE(pool.float_mode);
            take_tasks(pool.fn, pool.job, pool.tasks);
            leave();
            break;
        }
        if (state & OPEN) seen = GENERATION(state);
    }
    return NULL;
}

/* Best effort: with fewer workers than asked for, the others do more. */
static void start_workers(int wanted) {
    pthread_once(&fork_handler_once, register_fork_handler);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    for (pthread_t id; pool.workers < wanted && pthread_create(&id, &detached, work, NULL) == 0;) pool.workers++;
    pthread_attr_destroy(&detached);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void wait_until_empty(void) {
    const int64_t deadline = nanoseconds() + SPIN_NANOSECONDS;
    do {
        for (int i = 0; i < 32; i++) {
            if (!INSIDE(atomic_load(&pool.state))) return;
            RELAX();
        }
    } while (nanoseconds() < deadline);
    pthread_mutex_lock(&pool.sleep);
    atomic_store(&pool.caller_sleeps, 1);
    while (INSIDE(atomic_load(&pool.state))) pthread_cond_wait(&pool.done, &pool.sleep);
    atomic_store(&pool.caller_sleeps, 0);
    pthread_mutex_unlock(&pool.sleep);
}

void pool_run(task_fn fn, const void *job, long tasks, int threads) {
    const int helpers = (int)min_long(min_long(threads - 1, tasks - 1), MAX_WORKERS);
    if (helpers < 1 || pthread_mutex_trylock(&pool.submit) != 0) {
        for (long task = 0; task < tasks; task++) fn(job, task);
        return;
    }
    if (pool.workers < helpers) start_workers(helpers);
    pool.fn = fn;
    pool.job = job;
    pool.tasks = tasks;
    pool.float_mode = FLOAT_MODE();
    atomic_store(&pool.next, 0);
    uint32_t generation = GENERATION(atomic_load(&pool.state)) + 1;
    if (generation == 0) generation = 1; /* 0 is what a new worker has seen */
    atomic_store(&pool.state, (uint64_t)generation << 32 | OPEN | (uint64_t)helpers * ONE_SEAT);
    if (atomic_load(&pool.sleepers)) {
        pthread_mutex_lock(&pool.sleep);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.sleep);
    }
    take_tasks(fn, job, tasks);
    atomic_fetch_and(&pool.state, ~OPEN);
    wait_until_empty();
    pthread_mutex_unlock(&pool.submit);
}

typedef struct {
    void *memory[SCRATCH_COUNT];
    size_t bytes[SCRATCH_COUNT];
} Scratch;

static pthread_key_t scratch_key;
static pthread_once_t scratch_key_once = PTHREAD_ONCE_INIT;

static void free_scratch(void *kept) {
    for (int i = 0; i < SCRATCH_COUNT; i++) free(((Scratch *)kept)->memory[i]);
    free(kept);
}

static void make_scratch_key(void) { pthread_key_create(&scratch_key, free_scratch); }

static void *or_die(void *memory) {
    if (!memory) abort(); /* no way on, and nothing to clean up that the system would not */
    return memory;
}

void *scratch(int which, size_t bytes) {
    pthread_once(&scratch_key_once, make_scratch_key);
    Scratch *kept = pthread_getspecific(scratch_key);
    if (!kept) {
        kept = or_die(calloc(1, sizeof *kept));
        pthread_setspecific(scratch_key, kept);
    }
    if (kept->bytes[which] < bytes || !kept->memory[which]) {
        free(kept->memory[which]);
        kept->bytes[which] = (bytes + 4096) & ~(size_t)4095;
        kept->memory[which] = or_die(aligned_alloc(64, kept->bytes[which]));
    }
    return kept->memory[which];
}
