/* Causal depthwise convolution with a carried window of raw inputs, then silu. One routine for prefill rows and windows:
 * a row is a run of tokens that begins with a window (or with zeros) and stores the window after some of them. A task is a
 * run of channels, over all rows. */
#include "native.h"
#include "simd.h"

enum { CHANNELS = 64 /* channels of a task */, VECTORS = CHANNELS / LANES, MAX_TAPS = 8, SMALL = 2048 /* outputs that are not worth a second thread */ };

typedef struct {
    const float *x, *weight, *bias;
    float *windows, *out;
    long x_step, window_step, channels, taps, rows;
    /* prefill rows: cu_tokens is not NULL; windows: width tokens a row */
    const int32_t *cu_tokens, *slot_in, *slots_out;
    const uint8_t *has_state;
    long width;
} Conv;

/* Raw input `back` places before the row's token t: from the row itself, the carried window or, before a START, nowhere. */
static const float *raw_input(const Conv *j, const float *row_x, const float *window, long t, long back) {
    if (t >= back) return row_x + (t - back) * j->x_step;
    return window ? window + (j->taps - 1 + t - back) * j->channels : NULL;
}

/* Stores the raw inputs up to and including token t. Where they come from the window that is overwritten they only move
 * towards its start, so oldest first is a safe order. */
static void store_window(const Conv *j, const float *row_x, const float *window, long t, long slot, long channel, long count) {
    if (slot == SINK) return;
    float *to = j->windows + slot * j->window_step + channel;
    for (long i = 0; i + 1 < j->taps; i++, to += j->channels) {
        const float *from = raw_input(j, row_x, window, t, j->taps - 2 - i);
        if (from)
            memcpy(to, from + channel, sizeof(float) * count);
        else
            memset(to, 0, sizeof(float) * count);
    }
}

/* weight [C, taps] -> taps x the channels of this task. */
static void load_taps(const Conv *j, long channel, long count, float taps[MAX_TAPS][CHANNELS]) {
    const float *weight = j->weight + channel * j->taps;
    for (long c = 0; c < count; c++)
        for (long i = 0; i < j->taps; i++) taps[i][c] = weight[c * j->taps + i];
    for (long i = 0; i < j->taps && count < CHANNELS; i++) memset(taps[i] + count, 0, sizeof(float) * (CHANNELS - count));
}

static void conv_token(const Conv *j, const float taps[MAX_TAPS][CHANNELS], const float *inputs[MAX_TAPS], long channel, long count, float *out) {
    for (long v = 0; v < count; v += LANES) {
        const long rest = count - v;
        v8 sum = v8_zero();
        if (j->bias) sum = rest >= LANES ? v8_load(j->bias + channel + v) : v8_load_part(j->bias + channel + v, rest);
        for (long i = 0; i < j->taps; i++) {
            if (!inputs[i]) continue; /* a zero adds nothing */
            const float *from = inputs[i] + channel + v;
            sum = v8_fma(v8_load(taps[i] + v), rest >= LANES ? v8_load(from) : v8_load_part(from, rest), sum);
        }
        if (rest >= LANES)
            v8_store(out + channel + v, v8_silu(sum));
        else
            v8_store_part(out + channel + v, rest, v8_silu(sum));
    }
}

static void conv_row(const Conv *j, const float taps[MAX_TAPS][CHANNELS], long row, long channel, long count) {
    const long first = j->cu_tokens ? j->cu_tokens[row] : row * j->width;
    const long tokens = j->cu_tokens ? j->cu_tokens[row + 1] - first : j->width;
    const float *row_x = j->x + first * j->x_step;
    const bool has_state = !j->has_state || j->has_state[row];
    const float *window = has_state ? j->windows + j->slot_in[row] * j->window_step : NULL;
    for (long t = 0; t < tokens; t++) {
        const float *inputs[MAX_TAPS];
        for (long i = 0; i < j->taps; i++) inputs[i] = raw_input(j, row_x, window, t, j->taps - 1 - i);
        conv_token(j, taps, inputs, channel, count, j->out + (first + t) * j->channels);
        if (!j->cu_tokens) store_window(j, row_x, window, t, j->slots_out[row * j->width + t], channel, count);
    }
    if (j->cu_tokens) store_window(j, row_x, window, tokens - 1, j->slots_out[row], channel, count);
}

static void conv_task(const void *job, long task) {
    const Conv *j = job;
    const long channel = task * CHANNELS, count = min_long(CHANNELS, j->channels - channel);
    float taps[MAX_TAPS][CHANNELS];
    load_taps(j, channel, count, taps);
    for (long row = 0; row < j->rows; row++) conv_row(j, taps, row, channel, count);
}

static void run_conv(const Conv *job, long tokens, int threads) {
    pool_run(conv_task, job, ceil_div(job->channels, CHANNELS), tokens * job->channels > SMALL ? threads : 1);
}

/* Shapes as in kernels/contract.py; *_step are floats from one row of x and from one slot of windows to the next. taps <= 8. */
EXPORT void baton_conv_prefill(
    const float *x, const float *weight, const float *bias, float *windows, float *out, long x_step, long window_step, long channels, long taps,
    long rows, long tokens, const int32_t *cu_tokens, const uint8_t *has_state, const int32_t *slot_in, const int32_t *slot_out, int threads
) {
    const Conv job = {x, weight, bias, windows, out, x_step, window_step, channels, taps, rows, cu_tokens, slot_in, slot_out, has_state, 0};
    run_conv(&job, tokens, threads);
}

EXPORT void baton_conv_window(
    const float *x, const float *weight, const float *bias, float *windows, float *out, long x_step, long window_step, long channels, long taps,
    long rows, long width, const int32_t *slot_in, const int32_t *slots_out, int threads
) {
    const Conv job = {x, weight, bias, windows, out, x_step, window_step, channels, taps, rows, NULL, slot_in, slots_out, NULL, width};
    run_conv(&job, rows * width, threads);
}

#include "simd_end.h"
