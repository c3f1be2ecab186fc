// x · wᵀ in bfloat16 for few rows, on the weight as it lies in memory: no packed copy to keep, none to renew after an
// update. Each element is one chain of vdpbf16ps over ascending pairs of K, which is what oneDNN computes on
// processors with AVX512-BF16; the caller checks that the bits are the same.
#include <algorithm>
#include <vector>

#include "vector.h"

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#include <immintrin.h>

constexpr int64_t COLUMNS = 32;           // outputs of a panel: two vectors
constexpr int64_t PAIRS = 128;            // pairs of K in a panel: 16 KB, half of the first-level cache

// Sixteen rows of sixteen pairs become sixteen pairs of sixteen rows.
static inline void transpose(__m512i (&r)[LANES]) {
    __m512i t[LANES];
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
        t[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
        t[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
        t[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
    for (int i = 0; i < 16; i++) r[i] = t[i];
}

// panel [pair][COLUMNS] from `pairs` pairs of COLUMNS rows of the weight; rows past the last repeat it.
static void fill_panel(const bf16* weight, int64_t depth, int64_t columns, int64_t pairs, __m512i* panel) {
    for (int64_t half = 0; half < COLUMNS / LANES; half++)
        for (int64_t pair = 0; pair < pairs; pair += LANES) {
            __m512i block[LANES];
            for (int64_t n = 0; n < LANES; n++)
                block[n] = _mm512_loadu_si512(weight + std::min(half * LANES + n, columns - 1) * depth + 2 * pair);
            transpose(block);
            for (int64_t k = 0; k < LANES; k++) panel[(pair + k) * (COLUMNS / LANES) + half] = block[k];
        }
}

// sums [ROWS][COLUMNS] += x [ROWS][pairs] · panel. With FETCH the next panel's part of the weight is on its way
// meanwhile: its lines lie in COLUMNS rows, a line being LANES pairs.
template <int ROWS, bool FETCH>
static inline void add_rows(const bf16* x, int64_t depth, const __m512i* panel, int64_t pairs, float* sums,
                            const bf16* next) {
    __m512 first[ROWS], second[ROWS];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
        first[r] = _mm512_loadu_ps(sums + r * COLUMNS);
        second[r] = _mm512_loadu_ps(sums + r * COLUMNS + LANES);
    }
    for (int64_t k = 0; k < pairs; k++) {
        if (FETCH) {
            const int64_t line = 2 * k;
            const bf16* row = next + line / (PAIRS / LANES) * depth + line % (PAIRS / LANES) * 2 * LANES;
            _mm_prefetch((const char*)row, _MM_HINT_T1);
            _mm_prefetch((const char*)(row + 2 * LANES), _MM_HINT_T1);
        }
        const __m512bh a = (__m512bh)panel[2 * k], b = (__m512bh)panel[2 * k + 1];
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            int32_t pair;
            std::memcpy(&pair, x + r * depth + 2 * k, sizeof pair);
            const __m512bh factor = (__m512bh)_mm512_set1_epi32(pair);
            first[r] = _mm512_dpbf16_ps(first[r], factor, a);
            second[r] = _mm512_dpbf16_ps(second[r], factor, b);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
        _mm512_storeu_ps(sums + r * COLUMNS, first[r]);
        _mm512_storeu_ps(sums + r * COLUMNS + LANES, second[r]);
    }
}

template <int ROWS>
static inline int64_t add_tiles(const bf16* x, int64_t row, int64_t rows, int64_t depth, const __m512i* panel,
                                int64_t pairs, float* sums, const bf16* next) {
    for (; row + ROWS <= rows; row += ROWS)
        if (row == 0)
            add_rows<ROWS, true>(x, depth, panel, pairs, sums, next);
        else
            add_rows<ROWS, false>(x + row * depth, depth, panel, pairs, sums + row * COLUMNS, next);
    return row;
}

static void add_panel(const bf16* x, int64_t rows, int64_t depth, const __m512i* panel, int64_t pairs, float* sums,
                      const bf16* next) {
    int64_t row = add_tiles<12>(x, 0, rows, depth, panel, pairs, sums, next);
    row = add_tiles<8>(x, row, rows, depth, panel, pairs, sums, next);
    row = add_tiles<4>(x, row, rows, depth, panel, pairs, sums, next);
    add_tiles<1>(x, row, rows, depth, panel, pairs, sums, next);
}

// x [rows][depth], weight [outputs][depth], out [rows][outputs]; depth divides by 32. Chains of `chain` pairs (a
// multiple of PAIRS, or all) start from zero and are added in order.
extern "C" void few_rows_product_bf16(const bf16* x, const bf16* weight, bf16* out, int64_t rows, int64_t depth,
                                      int64_t outputs, int64_t chain) {
    const int64_t panels = (outputs + COLUMNS - 1) / COLUMNS;
#pragma omp parallel
    {
        std::vector<float> storage(PAIRS * COLUMNS + LANES);
        __m512i* panel = (__m512i*)(((uintptr_t)storage.data() + 63) / 64 * 64);
        std::vector<float> sums(rows * COLUMNS), totals(rows * COLUMNS);
#pragma omp for schedule(static)
        for (int64_t p = 0; p < panels; p++) {
            const int64_t first = p * COLUMNS, columns = std::min(COLUMNS, outputs - first);
            std::fill(totals.begin(), totals.end(), 0.f);
            for (int64_t k = 0; k < depth / 2; k += PAIRS) {
                const int64_t pairs = std::min(PAIRS, depth / 2 - k);
                if (k % chain == 0) std::fill(sums.begin(), sums.end(), 0.f);
                const bf16* here = weight + first * depth + 2 * k;
                const bf16* next = k + PAIRS < depth / 2 ? here + 2 * PAIRS : weight + (first + COLUMNS) * depth;
                fill_panel(here, depth, columns, pairs, panel);
                add_panel(x + 2 * k, rows, depth, panel, pairs, sums.data(), next);
                if ((k + pairs) % chain == 0 || k + pairs == depth / 2)
                    for (int64_t i = 0; i < rows * COLUMNS; i += LANES)
                        store(totals.data() + i, load(totals.data() + i) + load(sums.data() + i));
            }
            for (int64_t r = 0; r < rows; r++)
                for (int64_t n = 0; n < columns; n += LANES)
                    store_first(out + r * outputs + first + n, load(totals.data() + r * COLUMNS + n), columns - n);
        }
    }
}

extern "C" int64_t has_few_rows_product() { return 1; }
#else
extern "C" void few_rows_product_bf16(const bf16*, const bf16*, bf16*, int64_t, int64_t, int64_t, int64_t) {}
extern "C" int64_t has_few_rows_product() { return 0; }
#endif
