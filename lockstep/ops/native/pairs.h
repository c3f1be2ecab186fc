// bfloat16 products with the instruction that multiplies pairs and adds in float32 (vdpbf16ps).
#pragma once
#include "vector.h"

#if defined(LOCKSTEP_PLAIN) && defined(LOCKSTEP_TILES)
#define LOCKSTEP_PLAIN_TILES
#include "plain_instructions.h"
#endif

#if defined(LOCKSTEP_AVX512) && defined(__AVX512BF16__) || defined(LOCKSTEP_PLAIN_TILES)
#define LOCKSTEP_PAIRS

// Pairs along the inner index: element i of two rows in one 32-bit word.
static inline __m512bh interleaved(__m512i rows) {  // 16 elements of one row, then of the next
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (__m512bh)_mm512_permutexvar_epi16(order, rows);
}

static inline __m512bh interleaved(const bf16* first, const bf16* second) {
    const __m256i a = _mm256_loadu_si256((const __m256i*)first), b = _mm256_loadu_si256((const __m256i*)second);
    return interleaved(_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
}

// Two concatenated vectors, rounded. Denormals become zero.
static inline __m512bh narrowed(const f32x16& first, const f32x16& second) {
    return _mm512_cvtne2ps_pbh(_mm512_loadu_ps(&second), _mm512_loadu_ps(&first));
}

struct PackedPairs {  // [pair][stride], converted
    const __m512i* at;
    int64_t stride;
    __m512bh operator()(int64_t pair, int v) const { return (__m512bh)at[pair * stride + v]; }
};

// A product's left factor: pair k of row r at at[r * row + k * pair].
struct LeftPairs {
    const int32_t* at;
    int64_t row, pair;
    LeftPairs from(int64_t r) const { return {at + r * row, row, pair}; }
    __m512bh operator()(int64_t r, int64_t k) const {
        int32_t both;
        std::memcpy(&both, at + r * row + k * pair, sizeof both);
        return (__m512bh)_mm512_set1_epi32(both);
    }
};

// A left factor whose rows are unconverted in memory, `stride` elements apart.
static inline LeftPairs left_rows(const bf16* a, int64_t stride) { return {(const int32_t*)a, stride / 2, 1}; }

// c [ROWS][VECTORS x 16] (+)= a [ROWS][pairs] · b, as `product_tile`; ADD: to the values in c.
template <bool ADD, int ROWS, int VECTORS, class Right>
static inline void pair_tile(const LeftPairs& a, const Right& b, float* c, int64_t ldc, int64_t pairs) {
    __m512 sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            sums[r][v] = ADD ? _mm512_loadu_ps(c + r * ldc + v * LANES) : _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs; k++) {
        __m512bh columns[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) columns[v] = b(k, v);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const __m512bh factor = a(r, k);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], factor, columns[v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) _mm512_storeu_ps(c + r * ldc + v * LANES, sums[r][v]);
}

template <bool ADD, int VECTORS, class Right>
static void pair_rows(const LeftPairs& a, const Right& b, float* c, int64_t ldc, int64_t rows, int64_t pairs) {
    int64_t r = 0;
    for (; r + 6 <= rows; r += 6) pair_tile<ADD, 6, VECTORS>(a.from(r), b, c + r * ldc, ldc, pairs);
    for (; r + 2 <= rows; r += 2) pair_tile<ADD, 2, VECTORS>(a.from(r), b, c + r * ldc, ldc, pairs);
    if (r < rows) pair_tile<ADD, 1, VECTORS>(a.from(r), b, c + r * ldc, ldc, pairs);
}

// c [rows][columns] (+)= a · b for packed pairs b [pairs][ldb]; columns divide by 16.
template <bool ADD>
static void pair_product(const LeftPairs& a, const __m512i* b, int64_t ldb, float* c, int64_t ldc, int64_t rows,
                         int64_t pairs, int64_t columns) {
    int64_t n = 0;
    for (; n + 4 * LANES <= columns; n += 4 * LANES)
        pair_rows<ADD, 4>(a, PackedPairs{b + n / LANES, ldb}, c + n, ldc, rows, pairs);
    for (; n < columns; n += LANES) pair_rows<ADD, 1>(a, PackedPairs{b + n / LANES, ldb}, c + n, ldc, rows, pairs);
}
#endif
