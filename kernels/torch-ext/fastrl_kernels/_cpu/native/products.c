/* Products with a packed weight. A row's sums are made of TERMS terms each, one after the other,
   whatever the number of rows and threads: its bits depend on the row and the weight alone. */
#include "vectors.h"

#define COLUMNS (2 * WIDTH) /* of a panel */
#define TERMS 64 /* of a sum: few, as its error grows with them; they stay in the first cache for all blocks */
#if defined(__AVX512F__)
#define ROWS 12 /* of a block: 24 sums and what they are made of fill 32 registers */
#else
#define ROWS 6
#endif

long columns_of_a_panel(void) { return COLUMNS; }

/* Panels [ceil(N / COLUMNS)][K][COLUMNS] of a weight [N, K] with the given strides; 0 behind N. */
void pack(float *restrict out, const float *restrict weight, long N, long K, long down, long across) {
    long panels = (N + COLUMNS - 1) / COLUMNS;
#pragma omp parallel for schedule(static)
    for (long p = 0; p < panels; p++)
        for (long first = 0; first < K; first += 16)
            for (long k = first; k < (first + 16 < K ? first + 16 : K); k++)
                for (long c = 0; c < COLUMNS; c++) {
                    long n = p * COLUMNS + c;
                    out[(p * K + k) * COLUMNS + c] = n < N ? weight[n * down + k * across] : 0.0f;
                }
}

/* out [R, columns] = x panel + before [columns], or out += x panel without `before`; x is laid out as
   [K][R]. Meanwhile it fetches what comes next from memory, `ahead` bytes for each term. */
#define EACH(R) _Pragma("GCC unroll 12") for (int r = 0; r < R; r++) /* keeps sums in registers */
#define BLOCK(R)                                                                                   \
    static void block_##R(const float *restrict x, const float *restrict panel,                    \
                          float *restrict out, long stride, long K, long columns,                  \
                          const float *before, const char *next, long ahead) {                     \
        vec low[R], high[R];                                                                       \
        EACH(R) low[r] = high[r] = all(0.0f);                                                      \
        for (long k = 0; k < K; k++) {                                                             \
            vec a = load(panel + k * COLUMNS), b = load(panel + k * COLUMNS + WIDTH);              \
            __builtin_prefetch(next + k * ahead, 0, 2);                                            \
            EACH(R) {                                                                              \
                vec s = all(x[k * R + r]);                                                         \
                low[r] += s * a;                                                                   \
                high[r] += s * b;                                                                  \
            }                                                                                      \
        }                                                                                          \
        if (columns == COLUMNS) {                                                                  \
            EACH(R) {                                                                              \
                float *to = out + r * stride;                                                      \
                const float *added = before ? before : to;                                         \
                store(to, load(added) + low[r]);                                                   \
                store(to + WIDTH, load(added + WIDTH) + high[r]);                                  \
            }                                                                                      \
            return;                                                                                \
        }                                                                                          \
        EACH(R) {                                                                                  \
            float whole[COLUMNS], *to = out + r * stride;                                          \
            store(whole, low[r]);                                                                  \
            store(whole + WIDTH, high[r]);                                                         \
            const float *added = before ? before : to;                                             \
            for (long c = 0; c < columns; c++) to[c] = added[c] + whole[c];                        \
        }                                                                                          \
    }

BLOCK(1) BLOCK(2) BLOCK(3) BLOCK(4) BLOCK(5) BLOCK(6)
#if ROWS == 12
BLOCK(7) BLOCK(8) BLOCK(9) BLOCK(10) BLOCK(11) BLOCK(12)
#endif

typedef void block(const float *restrict, const float *restrict, float *restrict, long, long, long,
                   const float *, const char *, long);
static block *const blocks[] = {
    0, block_1, block_2, block_3, block_4, block_5, block_6,
#if ROWS == 12
    block_7, block_8, block_9, block_10, block_11, block_12,
#endif
};

static const float nothing[COLUMNS];

#define AT_A_TIME 96 /* rows whose blocks meet a panel while it is in the cache */

/* out [M, N] = x w^T + bias of x [M, K], whose rows begin `stride` numbers apart, and a packed w;
   `turned` is working memory for M K numbers. */
void linear(float *restrict out, const float *restrict x, long stride, const float *restrict packed,
            const float *bias, float *restrict turned, long M, long N, long K) {
    long count = (M + ROWS - 1) / ROWS; /* blocks, all but the last one whole */
    long panels = (N + COLUMNS - 1) / COLUMNS, together = AT_A_TIME / ROWS;
#pragma omp parallel
    {
#pragma omp for collapse(2) schedule(static)
        for (long k = 0; k < K; k += 64)
            for (long i = 0; i < count; i++) {
                long first = i * ROWS, R = M - first < ROWS ? M - first : ROWS;
                long end = k + 64 < K ? k + 64 : K;
                for (long r = 0; r < R; r++)
                    for (long j = k; j < end; j++)
                        turned[first * K + j * R + r] = x[(first + r) * stride + j];
            }
        for (long begin = 0; begin < count; begin += together) {
            long end = begin + together < count ? begin + together : count, of = end - begin;
#pragma omp for schedule(static) nowait
            for (long p = 0; p < panels; p++) {
                long columns = N - p * COLUMNS < COLUMNS ? N - p * COLUMNS : COLUMNS;
                long ahead = COLUMNS * (long)sizeof(float) / of;
                for (long k = 0; k < K; k += TERMS) {
                    long terms = K - k < TERMS ? K - k : TERMS;
                    const float *panel = packed + (p * K + k) * COLUMNS;
                    const float *before = k ? 0 : bias ? bias + p * COLUMNS : nothing;
                    const char *next = (const char *)(panel + terms * COLUMNS);
                    for (long i = begin; i < end; i++) {
                        long first = i * ROWS, R = M - first < ROWS ? M - first : ROWS;
                        blocks[R](turned + first * K + k * R, panel, out + first * N + p * COLUMNS,
                                  N, terms, columns, before, next + (i - begin) * ahead * terms,
                                  ahead);
                    }
                }
            }
        }
    }
}
