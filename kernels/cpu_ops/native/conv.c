/* Causal depthwise convolution with a carried window of raw inputs, then silu. One routine for prefill rows and windows:
 * a row is a run of tokens that begins with a window (or with zeros) and stores the window after some of them. */
#include "native.h"
#include "simd.h"

enum { CHANNELS = 64 /* channels of a task */, VECTORS = CHANNELS / LANES, MAX_TAPS = 8, SMALL = 16384 };

typedef struct {
    const float *x, *weight, *bias;
    float *windows, *out;
    long x_step, window_step, channels, taps, rows, blocks;
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

/* Stores the raw inputs up to and including token t. They may come from the very window that is overwritten. */
static void store_window(const Conv *j, const float *row_x, const float *window, long t, long slot, long channel, long count) {
    if (slot == SINK) return;
    float kept[MAX_TAPS][CHANNELS] = {{0}};
    for (long i = 0; i + 1 < j->taps; i++) {
        const float *from = raw_input(j, row_x, window, t, j->taps - 2 - i);
        if (from) memcpy(kept[i], from + channel, sizeof(float) * count);
    }
    float *to = j->windows + slot * j->window_step + channel;
    for (long i = 0; i + 1 < j->taps; i++) memcpy(to + i * j->channels, kept[i], sizeof(float) * count);
}

/* weight [C, taps] -> taps x the channels of this block, zeros beyond the last channel. */
static void load_taps(const Conv *j, long channel, long count, float taps[MAX_TAPS][CHANNELS]) {
    for (long i = 0; i < j->taps; i++)
        for (long c = 0; c < CHANNELS; c++) taps[i][c] = c < count ? j->weight[(channel + c) * j->taps + i] : 0.0f;
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

static void conv_task(const void *job, long task) {
    const Conv *j = job;
    const long row = task / j->blocks, channel = task % j->blocks * CHANNELS, count = min_long(CHANNELS, j->channels - channel);
    const long first = j->cu_tokens ? j->cu_tokens[row] : row * j->width;
    const long tokens = j->cu_tokens ? j->cu_tokens[row + 1] - first : j->width;
    const float *row_x = j->x + first * j->x_step;
    const bool has_state = !j->has_state || j->has_state[row];
    const float *window = has_state ? j->windows + j->slot_in[row] * j->window_step : NULL;
    float taps[MAX_TAPS][CHANNELS];
    load_taps(j, channel, count, taps);
    for (long t = 0; t < tokens; t++) {
        const float *inputs[MAX_TAPS];
        for (long i = 0; i < j->taps; i++) inputs[i] = raw_input(j, row_x, window, t, j->taps - 1 - i);
        conv_token(j, taps, inputs, channel, count, j->out + (first + t) * j->channels);
        if (!j->cu_tokens) store_window(j, row_x, window, t, j->slots_out[row * j->width + t], channel, count);
    }
    if (j->cu_tokens) store_window(j, row_x, window, tokens - 1, j->slots_out[row], channel, count);
}

static void run_conv(const Conv *job, long tokens, int threads) {
    pool_run(conv_task, job, job->rows * job->blocks, tokens * job->channels > SMALL ? threads : 1);
}

/* Shapes as in kernels/contract.py; *_step are floats from one row of x and from one slot of windows to the next. taps <= 8. */
EXPORT void baton_conv_prefill(
    const float *x, const float *weight, const float *bias, float *windows, float *out, long x_step, long window_step, long channels, long taps,
    long rows, long tokens, const int32_t *cu_tokens, const uint8_t *has_state, const int32_t *slot_in, const int32_t *slot_out, int threads
) {
    const Conv job = {x, weight, bias, windows, out, x_step, window_step, channels, taps, rows, ceil_div(channels, CHANNELS), cu_tokens, slot_in, slot_out, has_state, 0};
    run_conv(&job, tokens, threads);
}

EXPORT void baton_conv_window(
    const float *x, const float *weight, const float *bias, float *windows, float *out, long x_step, long window_step, long channels, long taps,
    long rows, long width, const int32_t *slot_in, const int32_t *slots_out, int threads
) {
    const Conv job = {x, weight, bias, windows, out, x_step, window_step, channels, taps, rows, ceil_div(channels, CHANNELS), NULL, slot_in, slots_out, NULL, width};
    run_conv(&job, rows * width, threads);
}

#include "simd_end.h"
