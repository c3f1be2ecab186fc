// Shared by the attention kernels: pages and blocks, tiles of query rows, and products in registers.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "vector.h"

constexpr int64_t PAGE = 16;    // tokens per page; a page of keys is stored as [head_dim][PAGE]
constexpr int64_t BLOCK = 64;   // keys between two rescalings of the running sum
constexpr int64_t FEW_ROWS = 8;
constexpr int64_t TILE = 48;    // query rows (tokens x heads of a group) that share a block's conversion

// Groups of 16 columns whose sums fit in registers for six rows.
constexpr int GROUPS = WIDTH == 16 ? 4 : 1;

static const float LOWEST = -std::numeric_limits<float>::infinity();

// c[r][n] += sum over k of a(r, k) b_v[k][n] for ROWS rows and VECTORS groups of 16 columns, in registers. Each
// group has a separate matrix, since the pages of a block can be anywhere.
template <int ROWS, int VECTORS, class B>
static inline void product_tile(const float* a, int64_t a_row, int64_t a_k, const B* const* b, int64_t ldb, float* c,
                                int64_t ldc, int64_t inner) {
    f32x16 sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sums[r][v] = load(c + r * ldc + v * LANES);
    for (int64_t k = 0; k < inner; k++) {
        f32x16 columns[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) columns[v] = load(b[v] + k * ldb);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const f32x16 factor = splat(a[r * a_row + k * a_k]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[r][v] = multiply_add(factor, columns[v], sums[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) store(c + r * ldc + v * LANES, sums[r][v]);
}

template <int VECTORS, class B>
static void product_rows(const float* a, int64_t a_row, int64_t a_k, const B* const* b, int64_t ldb, float* c,
                         int64_t ldc, int64_t rows, int64_t inner) {
    int64_t r = 0;
    for (; r + 6 <= rows; r += 6)
        product_tile<6, VECTORS>(a + r * a_row, a_row, a_k, b, ldb, c + r * ldc, ldc, inner);
    for (; r + 2 <= rows; r += 2)
        product_tile<2, VECTORS>(a + r * a_row, a_row, a_k, b, ldb, c + r * ldc, ldc, inner);
    if (r < rows) product_tile<1, VECTORS>(a + r * a_row, a_row, a_k, b, ldb, c + r * ldc, ldc, inner);
}

// c [rows][columns] += a [rows][inner] · b [inner][columns]; a is read with any strides, columns divide by 16.
template <class B>
static void add_product(const float* a, int64_t a_row, int64_t a_k, const B* b, int64_t ldb, float* c, int64_t ldc,
                        int64_t rows, int64_t inner, int64_t columns) {
    int64_t n = 0;
    for (; n + GROUPS * LANES <= columns; n += GROUPS * LANES) {
        const B* groups[GROUPS];
        for (int v = 0; v < GROUPS; v++) groups[v] = b + n + v * LANES;
        product_rows<GROUPS>(a, a_row, a_k, groups, ldb, c + n, ldc, rows, inner);
    }
    for (; n + LANES <= columns; n += LANES) {
        const B* group = b + n;
        product_rows<1>(a, a_row, a_k, &group, ldb, c + n, ldc, rows, inner);
    }
}

template <class T>
static void widen(const T* in, float* out, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) store(out + i, load(in + i));
}

// A layer's attention parameters: the factor of the scores; the number of keys that a query sees, up to its position;
// and per head a score without a key, which only adds to the sum of weights (null without sinks).
struct Terms {
    float scale;
    int64_t window;
    const float* sinks;
    Terms(float scale, int64_t window, const float* sinks)
        : scale(scale), window(window > 0 ? window : std::numeric_limits<int64_t>::max() / 2), sinks(sinks) {}
    // Number of keys from `start` on that are before the window of the query at `position`; negative if it begins
    // earlier.
    int64_t hidden(int64_t position, int64_t start) const { return position + 1 - window - start; }
};

struct Shape {
    int64_t heads, kv_heads, head_dim;
    int64_t group() const { return heads / kv_heads; }
};

// The query rows of one tile: tokens [token, token + tokens) of a sequence, all heads of one group.
struct Tile {
    int64_t sequence, token, tokens;
};

static std::vector<Tile> tiles_of(const int32_t* query_starts, int64_t sequences, int64_t group) {
    const int64_t step = std::max<int64_t>(1, TILE / group);
    std::vector<Tile> tiles;
    // Descending lengths would balance better; ascending order follows the queries in memory.
    for (int64_t s = 0; s < sequences; s++)
        for (int64_t t = query_starts[s]; t < query_starts[s + 1]; t += step)
            tiles.push_back({s, t, std::min(step, query_starts[s + 1] - t)});
    return tiles;
}

template <class T>
static void load_rows(const T* x, const Tile& tile, int64_t kv_head, const Shape& shape, float* out) {
    for (int64_t t = 0; t < tile.tokens; t++)
        widen(x + ((tile.token + t) * shape.heads + kv_head * shape.group()) * shape.head_dim,
              out + t * shape.group() * shape.head_dim, shape.group() * shape.head_dim);
}
