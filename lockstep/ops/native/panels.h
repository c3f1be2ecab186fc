// The layout of a product's right factor: panels of a few outputs, whose words are contiguous for each step along k. A
// word is a float, or as many narrower numbers as it has room for, consecutive along k.
#pragma once
#include <algorithm>

#include "pairs.h"
#include "vector.h"

typedef uint32_t word;

// Outputs per panel: a matrix unit reads two registers of 16.
#ifdef LOCKSTEP_TILES
constexpr int64_t COLUMNS = 32;
#else
constexpr int64_t COLUMNS = WIDTH == 16 ? 32 : 16;
#endif

typedef int8_t int8;  // a number from -127 to 127, with a scale of its row

// Elements along k per step.
template <class T>
constexpr int64_t STEP = sizeof(word) / sizeof(T);

// A step's words of WIDTH contiguous rows or columns; `next` is the next element along k.
static inline words words_at(const float* first, const float*) {
    words w;
    std::memcpy(&w, first, sizeof w);
    return w;
}
static inline words words_at(const bf16* first, const bf16* next) { return widened(first) | widened(next) << 16; }

// A vector of words of one row. Prefetches along the row: with many rows read in parallel, hardware prefetching is
// insufficient (measured on Zen 4).
template <class T>
static inline words words_of_row(const T* row) {
    __builtin_prefetch((const char*)row + 256, 0, 2);
    words w;
    std::memcpy(&w, row, sizeof w);
    return w;
}

// One factor of a product: [rows][depth] with any strides.
template <class T>
struct Matrix {
    const T* at;
    int64_t rows, depth, row, inner;
    int64_t steps() const { return (depth + STEP<T> - 1) / STEP<T>; }
    word operator()(int64_t r, int64_t step) const {
        word all = 0;
        const int64_t first = step * STEP<T>, count = std::min(STEP<T>, depth - first);
        for (int64_t k = 0; k < count; k++) std::memcpy((T*)&all + k, at + r * row + (first + k) * inner, sizeof(T));
        return all;
    }
};

// WIDTH rows of WIDTH words become columns.
#if defined(LOCKSTEP_AVX512)
static inline void transpose(words (&rows)[WIDTH]) {
    __m512i t[16], r[16];
    for (int i = 0; i < 16; i++) r[i] = (__m512i)rows[i];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 4; i++) {
        const __m512i a = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88), b = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        const __m512i c = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88),
                      d = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
        rows[i] = (words)_mm512_shuffle_i32x4(a, c, 0x88);
        rows[i + 4] = (words)_mm512_shuffle_i32x4(b, d, 0x88);
        rows[i + 8] = (words)_mm512_shuffle_i32x4(a, c, 0xdd);
        rows[i + 12] = (words)_mm512_shuffle_i32x4(b, d, 0xdd);
    }
}
#elif defined(LOCKSTEP_AVX2)
static inline void transpose(words (&rows)[WIDTH]) {
    __m256i t[8], r[8];
    for (int i = 0; i < 8; i++) r[i] = (__m256i)rows[i];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm256_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm256_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 4; i++) {
        rows[i] = (words)_mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
        rows[i + 4] = (words)_mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
    }
}
#else
static inline void transpose(words (&r)[WIDTH]) {
    const words a = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5), b = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
    const words c = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5), d = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
    r[0] = __builtin_shufflevector(a, c, 0, 1, 4, 5);
    r[1] = __builtin_shufflevector(a, c, 2, 3, 6, 7);
    r[2] = __builtin_shufflevector(b, d, 0, 1, 4, 5);
    r[3] = __builtin_shufflevector(b, d, 2, 3, 6, 7);
}
#endif

// out [step][COLUMNS]: outputs from `first` on, `steps` steps from `from` on. The last output is repeated as padding.
template <class T>
static void pack_panel(const Matrix<T>& w, int64_t first, int64_t from, int64_t steps, word* out) {
    const int64_t whole = std::min(steps, w.depth / STEP<T> - from);  // without the half step of an odd depth
    const auto column = [&](int64_t n) { return std::min(first + n, w.rows - 1); };
    int64_t done = 0;
    if (w.inner == 1) {
        const T* at[COLUMNS];
        for (int64_t n = 0; n < COLUMNS; n++) at[n] = w.at + column(n) * w.row + from * STEP<T>;
        for (; done + WIDTH <= whole; done += WIDTH)
            for (int64_t n = 0; n < COLUMNS; n += WIDTH) {
                words block[WIDTH];
#pragma GCC unroll 16
                for (int i = 0; i < WIDTH; i++) block[i] = words_of_row(at[n + i] + done * STEP<T>);
                transpose(block);
#pragma GCC unroll 16
                for (int i = 0; i < WIDTH; i++) std::memcpy(out + (done + i) * COLUMNS + n, &block[i], sizeof(words));
            }
    } else if constexpr (STEP<T> <= 2) {  // narrower numbers only have contiguous rows
        for (; w.row == 1 && first + COLUMNS <= w.rows && done < whole; done++) {
            const T* row = w.at + first + (from + done) * STEP<T> * w.inner;
#pragma GCC unroll 8
            for (int64_t n = 0; n < COLUMNS; n += WIDTH) {
                const words both = words_at(row + n, row + n + w.inner);
                std::memcpy(out + done * COLUMNS + n, &both, sizeof both);
            }
        }
    }
    for (; done < steps; done++)
        for (int64_t n = 0; n < COLUMNS; n++) out[done * COLUMNS + n] = w(column(n), from + done);
}
