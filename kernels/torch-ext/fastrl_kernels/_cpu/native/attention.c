/* Attention of one new token for each row over its slot of a cache. Each key and value is read once
   for all heads that share it. */
#include <math.h>
#include <stdlib.h>

#include "vectors.h"

static float dot(const float *a, const float *b, long D) {
    vec sums = all(0.0f);
    long whole = D / WIDTH * WIDTH;
    for (long i = 0; i < whole; i += WIDTH) sums += load(a + i) * load(b + i);
    if (whole < D) sums += load_some(a + whole, D - whole, 0.0f) * load_some(b + whole, D - whole, 0.0f);
    return sum_of(sums);
}

/* Scores [T] to weights, exp(score - largest); returns their sum. */
static float weigh(float *scores, long T, float sink, int has_sink) {
    vec most = all(-INFINITY);
    long whole = T / WIDTH * WIDTH, rest = T - whole;
    for (long t = 0; t < whole; t += WIDTH) most = larger(load(scores + t), most);
    if (rest) most = larger(load_some(scores + whole, rest, -INFINITY), most);
    float largest = largest_of(most);
    if (has_sink && sink > largest) largest = sink;
    vec sums = all(0.0f);
    for (long t = 0; t < whole; t += WIDTH) {
        vec e = exponential(load(scores + t) - largest);
        store(scores + t, e);
        sums += e;
    }
    if (rest) {
        vec e = exponential(load_some(scores + whole, rest, -INFINITY) - largest);
        store_some(scores + whole, e, rest);
        for (long i = rest; i < WIDTH; i++) e[i] = 0.0f;
        sums += e;
    }
    return sum_of(sums) + (has_sink ? expf(sink - largest) : 0.0f);
}

/* out [B, Hq, Dv] of query [B, Hq, D], keys and values with strides of slots, tokens and heads; of
   `lengths` tokens the last `window` count, and those of the last one's chunk. NaN in rows that are
   longer than the span, 0 in empty ones. Returns 0, or 1 where there is no memory for scores. */
int decode_attention(float *out, const float *query, const float *keys, const long *of_keys,
                     const float *values, const long *of_values, const int32_t *lengths,
                     const float *sinks, float scale, float cap, long span, long window, long chunk,
                     long B, long Hq, long Hkv, long D, long Dv) {
    long share = Hq / Hkv, failed = 0;
#pragma omp parallel reduction(+ : failed)
    {
        float *scores = malloc(share * span * sizeof(float) + 1);
        if (!scores) failed = 1;
#pragma omp for schedule(dynamic)
        for (long job = 0; job < B * Hkv; job++) {
            if (!scores) continue;
            long b = job / Hkv, g = job % Hkv, end = lengths[b];
            float *to = out + (b * Hq + g * share) * Dv;
            if (end > span || end <= 0) {
                for (long i = 0; i < share * Dv; i++) to[i] = end > span ? NAN : 0.0f;
                continue;
            }
            long begin = end - window > 0 ? end - window : 0;
            if ((end - 1) / chunk * chunk > begin) begin = (end - 1) / chunk * chunk;
            const float *q = query + (b * Hq + g * share) * D;
            const float *k = keys + b * of_keys[0] + g * of_keys[2];
            const float *v = values + b * of_values[0] + g * of_values[2];
            long T = end - begin;
            for (long t = 0; t < T; t++)
                for (long h = 0; h < share; h++) {
                    float score = dot(q + h * D, k + (begin + t) * of_keys[1], D);
                    score = cap > 0 ? cap * tanhf(score * (scale / cap)) : score * scale;
                    scores[h * T + t] = score;
                }
            for (long h = 0; h < share; h++) {
                float sink = sinks ? sinks[g * share + h] : 0.0f;
                float sum = weigh(scores + h * T, T, sink, sinks != 0);
                for (long t = 0; t < T; t++) scores[h * T + t] /= sum;
            }
            memset(to, 0, share * Dv * sizeof(float));
            for (long t = 0; t < T; t++) {
                const float *x = v + (begin + t) * of_values[1];
                for (long h = 0; h < share; h++) {
                    vec p = all(scores[h * T + t]);
                    long whole = Dv / WIDTH * WIDTH;
                    for (long i = 0; i < whole; i += WIDTH)
                        store(to + h * Dv + i, load(to + h * Dv + i) + p * load(x + i));
                    for (long i = whole; i < Dv; i++) to[h * Dv + i] += scores[h * T + t] * x[i];
                }
            }
        }
        free(scores);
    }
    return failed != 0;
}
