/* Products with a packed weight. A row's sums are made of TERMS terms each, one after the other,
   whatever the number of rows and threads: its bits depend on the row and the weight alone. */
#include "vectors.h"

#define COLUMNS (2 * WIDTH) /* of a panel */
#define TERMS 64 /* of a sum: few, as its error grows with them; they stay in the first cache for all blocks */
#if WIDTH == 16
#define ROWS 12 /* of a block: 24 sums and what they are made of fill 32 registers */
#else
#define ROWS 6
#endif

long columns_of_a_panel(void) { return COLUMNS; }

/* Panels [ceil(columns / COLUMNS)][K][COLUMNS], whose columns from `first` on become the rows of a weight
   [N, K] with the given strides. Columns that no row has are left as they are. */
void pack(float *restrict out, const float *restrict weight, long N, long K, long down, long across,
          long first) {
    long end = first + N;
#pragma omp parallel for schedule(static)
    for (long p = first / COLUMNS; p < (end + COLUMNS - 1) / COLUMNS; p++) {
        long from = p * COLUMNS > first ? p * COLUMNS : first;
        long to = end < (p + 1) * COLUMNS ? end : (p + 1) * COLUMNS;
        for (long some = 0; some < K; some += 16)
            for (long k = some; k < (some + 16 < K ? some + 16 : K); k++)
                for (long c = from; c < to; c++)
                    out[(p * K + k) * COLUMNS + c % COLUMNS] = weight[(c - first) * down + k * across];
    }
}

/* A piece of a panel [terms][COLUMNS]: so many numbers of rows that begin `down` apart. */
static void turn(float *restrict piece, const float *rows, long down, long terms, long columns) {
    const float *at[COLUMNS];
    for (long c = 0; c < COLUMNS; c++) at[c] = rows + (c < columns ? c : 0) * down;
    long whole = terms / 4 * 4;
    for (int half = 0; half < COLUMNS; half += WIDTH)
        for (long k = 0; k < whole; k += 4) {
            vec a = every_fourth(at + half, k), b = every_fourth(at + half + 1, k);
            vec c = every_fourth(at + half + 2, k), d = every_fourth(at + half + 3, k);
            vec low = MIXED(a, b, 0, 4, 1, 5), high = MIXED(a, b, 2, 6, 3, 7);
            vec low2 = MIXED(c, d, 0, 4, 1, 5), high2 = MIXED(c, d, 2, 6, 3, 7);
            float *to = piece + k * COLUMNS + half;
            store(to, MIXED(low, low2, 0, 1, 4, 5));
            store(to + COLUMNS, MIXED(low, low2, 2, 3, 6, 7));
            store(to + 2 * COLUMNS, MIXED(high, high2, 0, 1, 4, 5));
            store(to + 3 * COLUMNS, MIXED(high, high2, 2, 3, 6, 7));
        }
    for (long k = whole; k < terms; k++)
        for (long c = 0; c < COLUMNS; c++) piece[k * COLUMNS + c] = at[c][k];
}

static void fetch(const float *rows, long down) {
    for (long c = 0; c < COLUMNS; c++)
        for (long k = 0; k < TERMS; k += 16) __builtin_prefetch(rows + c * down + k, 0, 2);
}

/* sums [R, COLUMNS] += x panel of x laid out as [K][R]. Meanwhile it fetches what comes next from memory,
   `ahead` bytes for each term. */
#define EACH(R) _Pragma("GCC unroll 12") for (int r = 0; r < R; r++) /* keeps sums in registers */
#define BLOCK(R)                                                                                   \
    static void block_##R(const float *restrict x, const float *restrict panel, float *restrict sums,\
                          long K, const char *next, long ahead) {                                  \
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
        EACH(R) {                                                                                  \
            float *to = sums + r * COLUMNS;                                                        \
            store(to, load(to) + low[r]);                                                          \
            store(to + WIDTH, load(to + WIDTH) + high[r]);                                         \
        }                                                                                          \
    }

BLOCK(1) BLOCK(2) BLOCK(3) BLOCK(4) BLOCK(5) BLOCK(6)
#if ROWS == 12
BLOCK(7) BLOCK(8) BLOCK(9) BLOCK(10) BLOCK(11) BLOCK(12)
#endif

typedef void block(const float *restrict, const float *restrict, float *restrict, long, const char *,
                   long);
static block *const blocks[] = {
    0, block_1, block_2, block_3, block_4, block_5, block_6,
#if ROWS == 12
    block_7, block_8, block_9, block_10, block_11, block_12,
#endif
};

#define AT_A_TIME 96 /* rows whose blocks meet a panel while it is in the cache */

/* out [M, N] = x w^T + bias of x [M, K], whose rows begin `stride` numbers apart, and a w in panels; or
   without panels, of w [N, K] whose rows begin `down` numbers apart, of which each thread turns a piece
   at a time: the same sums. `turned` is working memory for M K numbers. */
void linear(float *restrict out, const float *restrict x, long stride, const float *restrict packed,
            const float *restrict weight, long down, const float *bias, float *restrict turned, long M,
            long N, long K) {
    long count = (M + ROWS - 1) / ROWS; /* blocks, all but the last one whole */
    long panels = (N + COLUMNS - 1) / COLUMNS, together = AT_A_TIME / ROWS;
#pragma omp parallel
    {
        float piece[TERMS * COLUMNS] __attribute__((aligned(64)));
        float sums[AT_A_TIME * COLUMNS] __attribute__((aligned(64))); /* out's rows lie apart */
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
                const float *rows = weight + p * COLUMNS * down;
                long first_row = begin * ROWS, last_row = M < end * ROWS ? M : end * ROWS;
                memset(sums, 0, sizeof sums);
                for (long r = 0; bias && r < last_row - first_row; r++)
                    memcpy(sums + r * COLUMNS, bias + p * COLUMNS, columns * sizeof(float));
                for (long k = 0; k < K; k += TERMS) {
                    long terms = K - k < TERMS ? K - k : TERMS;
                    const float *panel = piece;
                    const char *next = (const char *)piece;
                    long ahead = 0;
                    if (packed) {
                        panel = packed + (p * K + k) * COLUMNS;
                        next = (const char *)(panel + terms * COLUMNS);
                        ahead = COLUMNS * (long)sizeof(float) / of;
                    } else {
                        int last = k + terms == K;
                        turn(piece, rows + k, down, terms, columns);
                        fetch(last ? rows + COLUMNS * down : rows + k + terms, down);
                    }
                    for (long i = begin; i < end; i++) {
                        long first = i * ROWS, R = M - first < ROWS ? M - first : ROWS;
                        blocks[R](turned + first * K + k * R, panel, sums + (i - begin) * ROWS * COLUMNS,
                                  terms, next + (i - begin) * ahead * terms, ahead);
                    }
                }
                for (long r = first_row; r < last_row; r++)
                    memcpy(out + r * N + p * COLUMNS, sums + (r - first_row) * COLUMNS,
                           columns * sizeof(float));
            }
        }
    }
}
