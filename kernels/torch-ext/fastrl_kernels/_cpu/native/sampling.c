/* The race of exponentials over rows of fp32 logits that nothing cuts: two passes over a row. */
#include <math.h>

#include "vectors.h"

#define GAMMA 0x9E3779B97F4A7C15ull
#define FIRST_PART (1ull << 32)

static uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}

static float variate(uint64_t state, uint64_t counter) {
    uint64_t bits = mixed(state + counter * GAMMA) >> 17;
    float u = (float)(((double)bits + 0.5) * 0x1p-47);
    return -log1pf(-(u > 1.0f - 0x1p-24f ? 1.0f - 0x1p-24f : u));
}

/* Column of the largest weight / variate of `count` columns, whose counters begin at `first`. */
static long winner(const float *weights, long count, uint64_t state, uint64_t first) {
    long best = 0;
    float most = -1.0f;
    for (long i = 0; i < count; i++) {
        float score = weights[i] / variate(state, first + i);
        if (score > most) most = score, best = i;
    }
    return best;
}

/* Tokens [r], -1 where a row is no distribution, and figures [5, r]: log-probs at the temperature
   and at 1, log-probs of what is kept, cutoffs, entropies. `memory` has V + parts numbers a row. */
void draw(int64_t *tokens, float *figures, const float *logits, long stride, const int64_t *keys,
          float temperature, float *memory, long rows, long V, long size) {
    long parts = (V + size - 1) / size;
#pragma omp parallel for schedule(static)
    for (long r = 0; r < rows; r++) {
        const float *x = logits + r * stride;
        float *e = memory + r * (V + parts), *sums = e + V;
        vec most = all(-INFINITY);
        long whole = V / WIDTH * WIDTH, rest = V - whole;
        for (long i = 0; i < whole; i += WIDTH) most = larger(load(x + i), most);
        if (rest) most = larger(load_some(x + whole, rest, -INFINITY), most);
        float largest = largest_of(most);
        double total = 0, at_one = 0, mean = 0; /* of up to 1024 parts */
        for (long p = 0; p < parts; p++) {
            long begin = p * size, end = begin + size < V ? begin + size : V;
            vec sum = all(0.0f), cold = all(0.0f), weighted = all(0.0f);
            for (long i = begin; i < end; i += WIDTH) {
                long n = end - i;
                vec d = (n >= WIDTH ? load(x + i) : load_some(x + i, n, -INFINITY)) - largest;
                if (temperature != 1.0f) {
                    cold += exponential(d);
                    d /= temperature;
                }
                vec w = exponential(d);
                weighted += w * choose(d < all(-200.0f), all(-200.0f), d);
                sum += w;
                if (n >= WIDTH) store(e + i, w);
                else store_some(e + i, w, n);
            }
            sums[p] = sum_of(sum);
            total += sums[p];
            at_one += sum_of(cold);
            mean += sum_of(weighted);
        }
        if (!(total > 0 && largest > -INFINITY && largest < INFINITY)) {
            tokens[r] = -1;
            for (int f = 0; f < 5; f++) figures[f * rows + r] = NAN;
            continue;
        }
        uint64_t state = mixed((uint64_t)keys[r] + GAMMA);
        long part = winner(sums, parts, state, FIRST_PART), first = part * size;
        long column = first + winner(e + first, first + size < V ? size : V - first, state, first);
        float log_sum = (float)log(total), at = x[column] - largest;
        float scaled = at / temperature - log_sum;
        tokens[r] = column;
        figures[r] = figures[2 * rows + r] = scaled;
        figures[rows + r] = temperature == 1.0f ? scaled : at - (float)log(at_one);
        figures[3 * rows + r] = -INFINITY;
        figures[4 * rows + r] = log_sum - (float)(mean / total);
    }
}
