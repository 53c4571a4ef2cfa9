/* The race of exponentials over rows of fp32 logits that nothing cuts: two passes over a row. */
#include <math.h>
#include <stdlib.h>

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

/* One row's token and figures, `stride` numbers apart; working memory for V exponentials and their
   sums by parts. */
static void draw_row(int64_t *token, float *figures, long stride, const float *x, int64_t key,
                     float temperature, float *e, float *sums, long V, long size) {
    long parts = (V + size - 1) / size;
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
        *token = -1;
        for (int f = 0; f < 5; f++) figures[f * stride] = NAN;
        return;
    }
    uint64_t state = mixed((uint64_t)key + GAMMA);
    long part = winner(sums, parts, state, FIRST_PART), first = part * size;
    long column = first + winner(e + first, first + size < V ? size : V - first, state, first);
    float log_sum = (float)log(total), at = x[column] - largest;
    float scaled = at / temperature - log_sum;
    *token = column;
    figures[0] = figures[2 * stride] = scaled;
    figures[stride] = temperature == 1.0f ? scaled : at - (float)log(at_one);
    figures[3 * stride] = -INFINITY;
    figures[4 * stride] = log_sum - (float)(mean / total);
}

/* Tokens [r], -1 where a row is no distribution, and figures [5, r]: log-probs at the temperature
   and at 1, log-probs of what is kept, cutoffs, entropies. Returns 0, or 1 where there is no memory
   for the exponentials of a row. */
int draw(int64_t *tokens, float *figures, const float *logits, long stride, const int64_t *keys,
         float temperature, long rows, long V, long size) {
    long parts = (V + size - 1) / size, failed = 0;
#pragma omp parallel reduction(+ : failed)
    {
        float *memory = malloc((V + parts) * sizeof(float));
        if (!memory) failed = 1;
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++)
            if (memory)
                draw_row(tokens + r, figures + r, rows, logits + r * stride, keys[r], temperature,
                         memory, memory + V, V, size);
        free(memory);
    }
    return failed != 0;
}
