// The product of 4-bit weights and 8-bit rows, both in groups along k with a scale per group. A group's sum is an
// integer; an output is one chain of fused multiply-adds over the groups in ascending order, from zero. With several
// chunks of groups, each is a separate chain, and their sums are joined in a binary tree, as in product.h.
#pragma once
#include "int8_product.h"

constexpr int32_t ZERO_CODE = 8;  // codes are stored as numbers from 0 to 15
constexpr int64_t CODES_PER_WORD = 8;

// Rows of a tile: each has a register of integer and one of float sums per vector of outputs.
constexpr int INT4_ROWS = WIDTH == 16 ? 6 : FUSED ? 2 : 1;
constexpr int64_t INT4_BLOCK = 96;  // rows whose codes stay in the L2 cache

// Adds the products of four unsigned numbers of each word of w with those of x, which have a sign.
static inline integers add_products(words w, word x, integers sum) {
    const integers factor = Chain<int8>::splat(x);
#if defined(__AVX512VNNI__)
    return (integers)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)factor);
#elif defined(LOCKSTEP_AVX512)  // two products of at most 15 · 127 fit 16 bits
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)w, (__m512i)factor);
    return sum + (integers)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVXVNNI__)
    return (integers)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)factor);
#elif defined(LOCKSTEP_AVX2)
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)w, (__m256i)factor);
    return sum + (integers)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
    for (int shift = 0; shift < 32; shift += 8)
        sum += (integers)(w >> shift & 0xffu) * (factor << (24 - shift) >> 24);
    return sum;
#endif
}

// Codes from -8 to 7, and the scale that maps the number of the largest magnitude to -8, rounded before the codes are. A
// group that is not finite has the scale NaN.
template <class T>
static bf16 quantize_signed(const T* w, int64_t count, int8* codes) {
    f32x16 highest = {}, lowest = {};
    for (int64_t i = 0; i < count; i += LANES) {
        const f32x16 v = load_first(w + i, count - i);
        highest = where_less(highest, v, v, highest), lowest = where_less(v, lowest, v, lowest);
    }
    const float most = maximum(highest), least = -maximum(-lowest);
    const bool finite = std::isfinite(largest(w, count));
    bf16 stored[LANES];
    store(stored, splat(finite ? (most > -least ? most : least) / -8.f : NAN));
    const float scale = wide(stored[0]);
    if (finite && scale != 0.f)
        divide(w, count, scale, -8.f, 7.f, codes, count);
    else
        std::memset(codes, 0, count);
    return stored[0];
}

// A weight's panels: for each panel and group, `group` / 8 words per output (the lower halves of its bytes are four
// consecutive codes, the upper ones the next four), then the outputs' scales in bfloat16.
struct Int4Weight {
    word* panels;
    int64_t depth, outputs, group;
    int64_t groups() const { return depth / group; }
    int64_t count() const { return (outputs + COLUMNS - 1) / COLUMNS; }
    int64_t code_words() const { return group / CODES_PER_WORD * COLUMNS; }
    int64_t group_words() const { return code_words() + COLUMNS / 2; }
    int64_t words() const { return count() * groups() * group_words(); }
    word* panel(int64_t p) const { return panels + p * groups() * group_words(); }

    template <class T>
    void pack(const T* w, int64_t row) const {
#pragma omp parallel for schedule(static)
        for (int64_t p = 0; p < count(); p++)
            for (int64_t g = 0; g < groups(); g++) {
                word* codes = panel(p) + g * group_words();
                bf16* scales = (bf16*)(codes + code_words());
                for (int64_t n = 0; n < COLUMNS; n++) {
                    const int64_t output = std::min(p * COLUMNS + n, outputs - 1);
                    scales[n] = pack_group(w + output * row + g * group, codes + n);
                }
            }
    }

    // out [rows][depth]: the numbers that the codes of these outputs stand for.
    template <class T>
    void unpack(const int64_t* chosen, T* out, int64_t rows) const {
#pragma omp parallel for schedule(static) if (rows * depth > OWN_WORDS)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t g = 0; g < groups(); g++) {
                const int64_t output = chosen[r];
                const word* words = panel(output / COLUMNS) + g * group_words();
                const float scale = wide(((const bf16*)(words + code_words()))[output % COLUMNS]);
                int8* codes = scratch<int8>(group, 0);
                for (int64_t k = 0; k < group; k++)
                    codes[k] = (words[k / CODES_PER_WORD * COLUMNS + output % COLUMNS] >> shift(k) & 15) - ZERO_CODE;
                dequantize(codes, scale, out + r * depth + g * group, group);
            }
    }

    // Of a code within its word.
    static int64_t shift(int64_t k) { return k % 4 * 8 + k / 4 % 2 * 4; }

    template <class T>
    bf16 pack_group(const T* w, word* words) const {
        int8* codes = scratch<int8>(group, 1);
        const bf16 scale = quantize_signed(w, group, codes);
        for (int64_t k = 0; k < group; k += CODES_PER_WORD) {
            word all = 0;
            for (int64_t i = k; i < k + CODES_PER_WORD; i++) all |= (word)(codes[i] + ZERO_CODE) << shift(i);
            words[k / CODES_PER_WORD * COLUMNS] = all;
        }
        return scale;
    }
};

// Rows of codes with the scale and the first sum of each of their groups.
struct Int4Rows {
    const int8* codes;
    const float* scales;
    const int32_t* first;
    int64_t depth, groups;
};

// sums [ROWS][COLUMNS] of the groups from `begin` to `stop`.
template <int ROWS>
static void int4_tile(const Int4Rows& x, const Int4Weight& weight, const word* panel, int64_t begin, int64_t stop,
                      float* sums) {
    constexpr int VECTORS = COLUMNS / WIDTH;
    floats total[ROWS][VECTORS] = {};
    const int64_t steps = weight.group / CODES_PER_WORD;
    panel += begin * weight.group_words();
    for (int64_t g = begin; g < stop; g++) {
        integers part[ROWS][VECTORS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) part[r][v] = integers{} + x.first[r * x.groups + g];
        const int8* codes = x.codes + g * weight.group;
        for (int64_t s = 0; s < steps; s++, panel += COLUMNS, codes += CODES_PER_WORD) {
            words low[VECTORS], high[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                words both;
                std::memcpy(&both, panel + v * WIDTH, sizeof both);
                low[v] = both & 0x0f0f0f0fu, high[v] = both >> 4 & 0x0f0f0f0fu;
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                word factors[2];
                std::memcpy(factors, codes + r * x.depth, sizeof factors);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) {
                    part[r][v] = add_products(low[v], factors[0], part[r][v]);
                    part[r][v] = add_products(high[v], factors[1], part[r][v]);
                }
            }
        }
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const floats scales = (floats)(widened((const bf16*)panel + v * WIDTH) << 16);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const floats group_sum = __builtin_convertvector(part[r][v], floats) * scales;
                total[r][v] = multiply_add(group_sum, splat_part(x.scales[r * x.groups + g]), total[r][v]);
            }
        }
        panel += COLUMNS / 2;
    }
    std::memcpy(sums, total, sizeof total);
}

template <int ROWS = INT4_ROWS>
static void int4_tile_of(int64_t rows, const Int4Rows& x, const Int4Weight& weight, const word* panel, int64_t begin,
                         int64_t stop, float* sums) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return int4_tile_of<ROWS - 1>(rows, x, weight, panel, begin, stop, sums);
    int4_tile<ROWS>(x, weight, panel, begin, stop, sums);
}

// The sums of all chunks, of which `sums` has space for one more than levels of their tree.
static inline void int4_chunks(int64_t rows, const Int4Rows& x, const Int4Weight& weight, const word* panel,
                               int64_t chunks, float* sums) {
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        // The chunks before this one are complete subtrees, one for each bit set in its index.
        float* own = sums + __builtin_popcountll(chunk) * INT4_ROWS * COLUMNS;
        int4_tile_of(rows, x, weight, panel, x.groups * chunk / chunks, x.groups * (chunk + 1) / chunks, own);
        for (int64_t subtree = chunk; subtree & 1; subtree >>= 1, own -= INT4_ROWS * COLUMNS)
            add_sums(own - INT4_ROWS * COLUMNS, own, rows * COLUMNS);
    }
}
