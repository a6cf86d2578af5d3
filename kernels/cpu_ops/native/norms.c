/* Root-mean-square norms. A row is reduced in one order that depends on its width only. */
#include "native.h"
#include "simd.h"

enum { SMALL = 16384 /* floats that are not worth a second thread */, ROWS_PER_TASK = 8 };

typedef struct {
    const float *x, *gate, *weight;
    float *out;
    long rows, width, gate_step, groups;
    float eps;
} Norm;

/* Σ v² over n floats, as 4 x 8 running sums. */
static float sum_of_squares(const float *v, long n) {
    v8 sums[4] = {v8_zero(), v8_zero(), v8_zero(), v8_zero()};
    long i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        UNROLL for (int j = 0; j < 4; j++) {
            const v8 a = v8_load(v + i + j * LANES);
            sums[j] = v8_fma(a, a, sums[j]);
        }
    for (int j = 0; i < n; i += LANES, j++) {
        const v8 a = n - i >= LANES ? v8_load(v + i) : v8_load_part(v + i, n - i);
        sums[j] = v8_fma(a, a, sums[j]);
    }
    return v8_sum(v8_add(v8_add(sums[0], sums[1]), v8_add(sums[2], sums[3])));
}

/* out = v · weight / sqrt(mean(v²) + eps); out may be v. */
static void norm(const float *v, const float *weight, float *out, long n, float eps) {
    const v8 scale = v8_set1(1.0f / sqrtf(sum_of_squares(v, n) / (float)n + eps));
    long i = 0;
    for (; i + LANES <= n; i += LANES) v8_store(out + i, v8_mul(v8_mul(v8_load(v + i), scale), v8_load(weight + i)));
    const long rest = n - i;
    if (rest) v8_store_part(out + i, rest, v8_mul(v8_mul(v8_load_part(v + i, rest), scale), v8_load_part(weight + i, rest)));
}

static void apply_gate(const float *y, const float *gate, float *out, long n) {
    long i = 0;
    for (; i + LANES <= n; i += LANES) v8_store(out + i, v8_mul(v8_load(y + i), v8_silu(v8_load(gate + i))));
    const long rest = n - i;
    if (rest) v8_store_part(out + i, rest, v8_mul(v8_load_part(y + i, rest), v8_silu(v8_load_part(gate + i, rest))));
}

static void norm_task(const void *job, long task) {
    const Norm *j = job;
    const long end = min_long((task + 1) * ROWS_PER_TASK, j->rows), size = j->width / j->groups;
    for (long row = task * ROWS_PER_TASK; row < end; row++) {
        const float *v = j->x + row * j->width;
        float *out = j->out + row * j->width;
        if (j->gate) {
            apply_gate(v, j->gate + row * j->gate_step, out, j->width);
            v = out;
        }
        for (long g = 0; g < j->groups; g++) norm(v + g * size, j->weight + g * size, out + g * size, size, j->eps);
    }
}

static void run_norm(const Norm *job, int threads) {
    pool_run(norm_task, job, ceil_div(job->rows, ROWS_PER_TASK), job->rows * job->width > SMALL ? threads : 1);
}

EXPORT void baton_rms_norm(const float *x, const float *weight, float *out, long rows, long width, float eps, int threads) {
    const Norm job = {x, NULL, weight, out, rows, width, 0, 1, eps};
    run_norm(&job, threads);
}

/* Rows of the gate lie gate_step floats apart. */
EXPORT void baton_gated_group_rms_norm(
    const float *y, const float *gate, const float *weight, float *out, long rows, long width, long gate_step, long groups, float eps, int threads
) {
    const Norm job = {y, gate, weight, out, rows, width, gate_step, groups, eps};
    run_norm(&job, threads);
}

#include "simd_end.h"
