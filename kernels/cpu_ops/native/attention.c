/* Paged attention over a block-wise cache [B, 2, V, block_tokens, D], and the writes into it.
 *
 * A task is one key/value head and some consecutive tokens of one row, with all query heads that share it. Keys pass in
 * tiles of at most 16 positions that never cross a block, each tile read once for all the task's queries. For a query the
 * order is always the same: tile by tile, an online softmax, values added position by position. Tiles lie at absolute
 * positions and positions that a query may not see are left out exactly, so its bits depend on the keys it sees alone.
 */
#include "native.h"
#include "simd.h"

enum { TILE = 16, TASK_QUERIES = 48, SMALL = 32768 /* floats that are not worth a second thread */ };

typedef struct {
    const float *key, *value;
    float *cache;
    const int64_t *kv_index;
    long tokens, key_step, value_step, cache_step, heads, block_tokens, width;
} Write;

static void write_task(const void *job, long t) {
    const Write *j = job;
    const long head_floats = j->block_tokens * j->width;
    float *keys = j->cache + j->kv_index[t] / j->block_tokens * j->cache_step + j->kv_index[t] % j->block_tokens * j->width;
    float *values = keys + j->heads * head_floats;
    for (long v = 0; v < j->heads; v++) {
        memcpy(keys + v * head_floats, j->key + t * j->key_step + v * j->width, sizeof(float) * j->width);
        memcpy(values + v * head_floats, j->value + t * j->value_step + v * j->width, sizeof(float) * j->width);
    }
}

/* key, value [T, V, D] with rows key_step and value_step floats apart; blocks of the cache cache_step floats apart. */
EXPORT void baton_write_kv(
    const float *key, const float *value, float *cache, const int64_t *kv_index, long tokens, long key_step, long value_step, long cache_step,
    long heads, long block_tokens, long width, int threads
) {
    const Write job = {key, value, cache, kv_index, tokens, key_step, value_step, cache_step, heads, block_tokens, width};
    pool_run(write_task, &job, tokens, tokens * heads * width > SMALL ? threads : 1);
}

/* Mirrored by AttentionArguments in native_ops.py. Shapes as in kernels/contract.py. */
typedef struct {
    const float *query, *cache;
    float *out;
    const int32_t *cu_tokens, *block_table, *num_keys;
    int64_t rows, tokens, cache_step, table_step, heads, kv_heads, block_tokens, width, first_key, task_tokens;
    float scale;
} Attention;

/* The running softmax of some queries: q, sums [queries][padded width], both padded with zeros to whole vectors. */
typedef struct {
    long queries, padded;
    float *q, *sums;
    float highest[TASK_QUERIES], total[TASK_QUERIES];
    long num_keys[TASK_QUERIES];
    float scores[TASK_QUERIES][TILE];
} Softmax;

/* Scores of two queries against four keys. */
static void eight_scores(const float *q0, const float *q1, const float *const keys[4], long width, float *s0, float *s1) {
    v8 sums[8];
    UNROLL for (int i = 0; i < 8; i++) sums[i] = v8_zero();
    long d = 0;
    for (; d + LANES <= width; d += LANES) {
        const v8 a = v8_load(q0 + d), b = v8_load(q1 + d);
        UNROLL for (int i = 0; i < 4; i++) {
            const v8 k = v8_load(keys[i] + d);
            sums[i] = v8_fma(a, k, sums[i]);
            sums[i + 4] = v8_fma(b, k, sums[i + 4]);
        }
    }
    const long rest = width - d;
    if (rest) {
        const v8 a = v8_load(q0 + d), b = v8_load(q1 + d);
        UNROLL for (int i = 0; i < 4; i++) {
            const v8 k = v8_load_part(keys[i] + d, rest);
            sums[i] = v8_fma(a, k, sums[i]);
            sums[i + 4] = v8_fma(b, k, sums[i + 4]);
        }
    }
    float out[LANES];
    v8_store(out, v8_sums8(sums));
    memcpy(s0, out, sizeof(float) * 4);
    memcpy(s1, out + 4, sizeof(float) * 4);
}

/* Scores of all queries that see anything of a tile of `count` keys; those beyond a query's keys are nonsense. */
static void tile_scores(Softmax *s, const float *keys, long width, long position, long count) {
    for (long i = 0; i < s->queries; i += 2) {
        const long other = min_long(i + 1, s->queries - 1);
        if (max_long(s->num_keys[i], s->num_keys[other]) <= position) continue;
        for (long k = 0; k < count; k += 4) {
            const float *four[4];
            for (long n = 0; n < 4; n++) four[n] = keys + min_long(k + n, count - 1) * width;
            eight_scores(s->q + i * s->padded, s->q + other * s->padded, four, width, s->scores[i] + k, s->scores[other] + k);
        }
    }
}

/* sums += Σ p[k] · values[k] for k in [low, high), one position after the other, for `vectors` vectors from d on. */
INLINE void add_columns(const int vectors, float *sums, const float *p, const float *values, long width, long low, long high) {
    v8 acc[8];
    UNROLL for (int i = 0; i < vectors; i++) acc[i] = v8_load(sums + i * LANES);
    for (long k = low; k < high; k++) {
        const v8 weight = v8_set1(p[k]);
        UNROLL for (int i = 0; i < vectors; i++) acc[i] = v8_fma(weight, v8_load(values + k * width + i * LANES), acc[i]);
    }
    UNROLL for (int i = 0; i < vectors; i++) v8_store(sums + i * LANES, acc[i]);
}

static void add_values(float *sums, const float *p, const float *values, long width, long low, long high) {
    long d = 0;
    for (; d + 8 * LANES <= width; d += 8 * LANES) add_columns(8, sums + d, p, values + d, width, low, high);
    for (; d + LANES <= width; d += LANES) add_columns(1, sums + d, p, values + d, width, low, high);
    if (d == width) return;
    v8 acc = v8_load(sums + d);
    for (long k = low; k < high; k++) acc = v8_fma(v8_set1(p[k]), v8_load_part(values + k * width + d, width - d), acc);
    v8_store(sums + d, acc);
}

/* Adds positions [low, high) of a tile, relative to it, to query i. */
static void add_tile(Softmax *s, long i, const float *values, long width, long low, long high) {
    float *scores = s->scores[i], *sums = s->sums + i * s->padded;
    for (long k = 0; k < low; k++) scores[k] = -INFINITY;
    for (long k = high; k < TILE; k++) scores[k] = -INFINITY;
    v8 a = v8_load(scores), b = v8_load(scores + LANES);
    const float highest = v8_highest(v8_max(a, b));
    if (highest > s->highest[i]) {
        const v8 shrink = v8_exp(v8_set1(s->highest[i] - highest));
        float factor[LANES];
        v8_store(factor, shrink);
        s->total[i] *= factor[0];
        for (long d = 0; d < s->padded; d += LANES) v8_store(sums + d, v8_mul(v8_load(sums + d), shrink));
        s->highest[i] = highest;
    }
    a = v8_exp(v8_sub(a, v8_set1(s->highest[i])));
    b = v8_exp(v8_sub(b, v8_set1(s->highest[i])));
    s->total[i] += v8_sum(v8_add(a, b));
    v8_store(scores, a);
    v8_store(scores + LANES, b);
    add_values(sums, scores, values, width, low, high);
}

static void begin(Softmax *s, const Attention *j, long first, long tokens, long kv_head) {
    const long shared = j->heads / j->kv_heads;
    s->queries = tokens * shared;
    s->padded = ceil_div(j->width, LANES) * LANES;
    s->q = scratch(SCRATCH_QUERIES, sizeof(float) * 2 * s->queries * s->padded);
    s->sums = s->q + s->queries * s->padded;
    memset(s->q, 0, sizeof(float) * 2 * s->queries * s->padded);
    for (long i = 0; i < s->queries; i++) {
        const long token = first + i / shared, head = kv_head * shared + i % shared;
        const float *query = j->query + (token * j->heads + head) * j->width;
        for (long d = 0; d < j->width; d++) s->q[i * s->padded + d] = query[d] * j->scale;
        s->num_keys[i] = j->num_keys[token];
        s->highest[i] = -INFINITY;
        s->total[i] = 0.0f;
    }
}

static void finish(const Softmax *s, const Attention *j, long first, long kv_head) {
    const long shared = j->heads / j->kv_heads;
    for (long i = 0; i < s->queries; i++) {
        float *out = j->out + ((first + i / shared) * j->heads + kv_head * shared + i % shared) * j->width;
        const bool empty = s->num_keys[i] <= j->first_key;
        for (long d = 0; d < j->width; d++) out[d] = empty ? 0.0f : s->sums[i * s->padded + d] / s->total[i];
    }
}

static void attend(const Attention *j, long row, long first, long tokens, long kv_head) {
    Softmax s;
    begin(&s, j, first, tokens, kv_head);
    long end = 0;
    for (long i = 0; i < s.queries; i++) end = max_long(end, s.num_keys[i]);
    const int32_t *table = j->block_table + row * j->table_step;
    const long head_floats = j->block_tokens * j->width;
    for (long block = j->first_key / j->block_tokens; block * j->block_tokens < end; block++) {
        const float *block_keys = j->cache + table[block] * j->cache_step + kv_head * head_floats;
        for (long offset = 0; offset < j->block_tokens; offset += TILE) {
            const long position = block * j->block_tokens + offset, count = min_long(TILE, j->block_tokens - offset);
            const float *keys = block_keys + offset * j->width, *values = keys + j->kv_heads * head_floats;
            tile_scores(&s, keys, j->width, position, count);
            for (long i = 0; i < s.queries; i++) {
                const long low = max_long(0, j->first_key - position), high = min_long(count, s.num_keys[i] - position);
                if (low < high) add_tile(&s, i, values, j->width, low, high);
            }
        }
    }
    finish(&s, j, first, kv_head);
}

static long tasks_of_row(const Attention *j, long row) { return ceil_div(j->cu_tokens[row + 1] - j->cu_tokens[row], j->task_tokens); }

/* Tasks are numbered from the last tokens of the last row to the first: in a prefill the longest come first. */
static void attention_task(const void *job, long task) {
    const Attention *j = job;
    const long kv_head = task % j->kv_heads;
    long run = task / j->kv_heads, row = j->rows - 1;
    for (; run >= tasks_of_row(j, row); row--) run -= tasks_of_row(j, row);
    run = tasks_of_row(j, row) - 1 - run;
    const long first = j->cu_tokens[row] + run * j->task_tokens;
    attend(j, row, first, min_long(j->task_tokens, j->cu_tokens[row + 1] - first), kv_head);
}

/* task_tokens · heads / kv_heads must be at most 48 and is at least one token: so at most 48 query heads a key/value head. */
EXPORT void baton_paged_attention(const Attention *j, int threads) {
    long runs = 0, keys = 0;
    for (long row = 0; row < j->rows; row++) runs += tasks_of_row(j, row);
    for (long t = 0; t < j->tokens; t++) keys += max_long(0, j->num_keys[t] - j->first_key);
    pool_run(attention_task, j, runs * j->kv_heads, keys * j->heads * j->width > SMALL ? threads : 1);
}

#include "simd_end.h"
