// Attention over keys and values in pages, and its gradient over packed sequences.
//
// Every query row sees its keys in blocks of BLOCK, aligned to position 0, in ascending order, with a running
// maximum and sum in float32. An element of a product is always summed over its inner index in ascending order
// with one accumulator, so no grouping of rows, sequences or pages changes a bit.
#include <algorithm>
#include <limits>
#include <vector>

#include "vector.h"

constexpr int64_t PAGE = 16;    // tokens of a page; a page of keys is stored as [head_dim][PAGE]
constexpr int64_t BLOCK = 64;   // keys between two rescalings of the running sum
constexpr int64_t FEW_ROWS = 8;
constexpr int64_t TILE = 48;    // query rows (tokens x heads of a group) that share a block's conversion

static const float LOWEST = -std::numeric_limits<float>::infinity();

// c[r][n] += sum over k of a(r, k) b_v[k][n] for ROWS rows and VECTORS groups of 16 columns, held in registers. Each
// group has a matrix of its own, for the pages of a block may lie anywhere.
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
            for (int v = 0; v < VECTORS; v++) sums[r][v] += factor * columns[v];
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
    for (; n + 64 <= columns; n += 64) {
        const B* groups[4] = {b + n, b + n + 16, b + n + 32, b + n + 48};
        product_rows<4>(a, a_row, a_k, groups, ldb, c + n, ldc, rows, inner);
    }
    for (; n + 16 <= columns; n += 16) {
        const B* group = b + n;
        product_rows<1>(a, a_row, a_k, &group, ldb, c + n, ldc, rows, inner);
    }
}

template <class T>
static void widen(const T* in, float* out, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) store(out + i, load(in + i));
}

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
    // Long tails first would balance better; ascending keeps the queries' memory order.
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

template <class T>
static void write_pages(const T* k, const T* v, const int64_t* slots, T* key_pages, T* value_pages, int64_t tokens,
                        int64_t kv_heads, int64_t head_dim) {
#pragma omp parallel for if (tokens * kv_heads * head_dim > 16384)
    for (int64_t token = 0; token < tokens; token++) {
        const int64_t page = slots[token] / PAGE, offset = slots[token] % PAGE;
        for (int64_t head = 0; head < kv_heads; head++) {
            const T* key = k + (token * kv_heads + head) * head_dim;
            T* page_start = key_pages + (page * kv_heads + head) * head_dim * PAGE;
            for (int64_t d = 0; d < head_dim; d++) page_start[d * PAGE + offset] = key[d];
            std::memcpy(value_pages + ((page * kv_heads + head) * PAGE + offset) * head_dim,
                        v + (token * kv_heads + head) * head_dim, head_dim * sizeof(T));
        }
    }
}

// One block of the running softmax for one row: scores become weights, the sums are rescaled.
static inline void softmax_block(float* scores, int64_t keys, float scale, float& highest, float& total, float* row,
                                 int64_t head_dim) {
    f32x16 s[BLOCK / LANES], top = splat(LOWEST);
    for (int i = 0; i < BLOCK / LANES; i++) {
        s[i] = keep_first(load(scores + i * LANES) * scale, keys - i * LANES, LOWEST);
        top = maximum(top, s[i]);
    }
    const float next = std::max(highest, maximum(top));
    const float shrink = highest == LOWEST ? 0.f : exp(splat(highest - next))[0];
    for (int i = 0; i < BLOCK / LANES; i++) {
        s[i] = exp(s[i] - next);
        store(scores + i * LANES, s[i]);
    }
    total = total * shrink + sum((s[0] + s[1]) + (s[2] + s[3]));
    highest = next;
    if (shrink != 1.f)
        for (int64_t d = 0; d < head_dim; d += LANES) store(row + d, load(row + d) * shrink);
}

template <class T>
struct Pages {
    const T *keys, *values;
    const int32_t* table;
    int64_t width;
};

template <class T>
static void attend_tile(const T* q, T* out, float* log_sums, const Pages<T>& pages, const Tile& tile, int64_t kv_head,
                        int64_t first_position, const Shape& shape, float scale) {
    const int64_t dim = shape.head_dim, rows = tile.tokens * shape.group();
    static thread_local std::vector<float> scratch;
    scratch.resize(2 * rows * dim + rows * (BLOCK + 2) + 2 * BLOCK * dim);
    float* queries = scratch.data();
    float* sums = queries + rows * dim;
    float* scores = sums + rows * dim;
    float* keys = scores + rows * BLOCK;
    float* values = keys + BLOCK * dim;
    float* highest = values + BLOCK * dim;
    float* totals = highest + rows;
    load_rows(q, tile, kv_head, shape, queries);
    std::fill(sums, sums + rows * dim, 0.f);
    std::fill(highest, highest + rows, LOWEST);
    std::fill(totals, totals + rows, 0.f);

    const int64_t length = first_position + tile.tokens;  // keys that the last row sees
    // Few rows, as in decode, read the pages in place; many share a block that is converted once. The products add
    // the same terms in the same order.
    const bool direct = rows < FEW_ROWS;
    for (int64_t start = 0; start < length; start += BLOCK) {
        const int64_t count = std::min(BLOCK, length - start);
        const T *key_pages[BLOCK / PAGE], *value_pages[BLOCK / PAGE];
        for (int64_t p = 0; p < BLOCK / PAGE; p++) {
            // Past the sequence's end the first page stands in; its scores are masked.
            const int64_t index = p * PAGE < count ? start / PAGE + p : start / PAGE;
            const int64_t page = pages.table[tile.sequence * pages.width + index] * shape.kv_heads + kv_head;
            key_pages[p] = pages.keys + page * dim * PAGE;
            value_pages[p] = pages.values + page * dim * PAGE;
        }
        // Rows that see nothing of this block are skipped: earlier tokens of the tile, at its start.
        const int64_t from = std::max<int64_t>(0, start - first_position) * shape.group(), left = rows - from;
        const float* query = queries + from * dim;
        float *score = scores + from * BLOCK, *attended = sums + from * dim;
        std::fill(score, score + left * BLOCK, 0.f);
        if (direct) {
            product_rows<BLOCK / PAGE>(query, dim, 1, key_pages, PAGE, score, BLOCK, left, dim);
        } else {
            for (int64_t p = 0; p * PAGE < count; p++) {
                for (int64_t d = 0; d < dim; d++) store(keys + d * BLOCK + p * PAGE, load(key_pages[p] + d * PAGE));
                widen(value_pages[p], values + p * PAGE * dim, std::min(PAGE, count - p * PAGE) * dim);
            }
            add_product(query, dim, 1, keys, BLOCK, score, BLOCK, left, dim, (count + LANES - 1) / LANES * LANES);
        }
        for (int64_t r = from; r < rows; r++)
            softmax_block(scores + r * BLOCK, std::min(count, first_position + r / shape.group() + 1 - start), scale,
                          highest[r], totals[r], sums + r * dim, dim);
        if (direct) {
            for (int64_t p = 0; p * PAGE < count; p++)
                add_product(score + p * PAGE, BLOCK, 1, value_pages[p], dim, attended, dim, left,
                            std::min(PAGE, count - p * PAGE), dim);
        } else {
            add_product(score, BLOCK, 1, values, dim, attended, dim, left, count, dim);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        const int64_t row = (tile.token + r / shape.group()) * shape.heads + kv_head * shape.group() + r % shape.group();
        const float inverse = 1.f / totals[r];
        for (int64_t d = 0; d < dim; d += LANES) store(out + row * dim + d, load(sums + r * dim + d) * inverse);
        log_sums[row] = highest[r] + std::log(totals[r]);
    }
}

template <class T>
static void attend(const T* q, T* out, float* log_sums, const T* key_pages, const T* value_pages, const int32_t* table,
                   const int32_t* query_starts, const int32_t* context_lengths, int64_t sequences, int64_t width,
                   int64_t heads, int64_t kv_heads, int64_t head_dim, float scale) {
    const Shape shape{heads, kv_heads, head_dim};
    const Pages<T> pages{key_pages, value_pages, table, width};
    const std::vector<Tile> tiles = tiles_of(query_starts, sequences, shape.group());
#pragma omp parallel for schedule(dynamic, 1) collapse(2)
    for (size_t i = 0; i < tiles.size(); i++)
        for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++) {
            const Tile& tile = tiles[i];
            const int64_t before = context_lengths[tile.sequence] - query_starts[tile.sequence + 1];
            attend_tile(q, out, log_sums, pages, tile, kv_head, tile.token + before, shape, scale);
        }
}

// The gradient for one sequence and one key-value head. The weights are recomputed block by block from the saved
// log-sums (arXiv 2205.14135). grad_q is float32 and zero on entry.
template <class T>
static void backward_head(const T* grad_out, const T* q, const T* k, const T* v, const float* log_sums,
                          const float* deltas, float* grad_q, T* grad_k, T* grad_v, const std::vector<Tile>& tiles,
                          int64_t first, int64_t length, int64_t kv_head, const Shape& shape, float scale) {
    const int64_t dim = shape.head_dim, group = shape.group();
    const int64_t tile_rows = std::max<int64_t>(1, TILE / group) * group;
    static thread_local std::vector<float> scratch;
    scratch.resize(5 * BLOCK * dim + BLOCK * dim + 3 * tile_rows * dim + 2 * tile_rows * BLOCK);
    float* keys = scratch.data();
    float* keys_across = keys + BLOCK * dim;
    float* values_across = keys_across + BLOCK * dim;
    float* key_sums = values_across + BLOCK * dim;
    float* value_sums = key_sums + BLOCK * dim;
    float* values = value_sums + BLOCK * dim;
    float* queries = values + BLOCK * dim;
    float* grads = queries + tile_rows * dim;
    float* query_sums = grads + tile_rows * dim;
    float* weights = query_sums + tile_rows * dim;
    float* grad_scores = weights + tile_rows * BLOCK;

    for (int64_t start = 0; start < length; start += BLOCK) {
        const int64_t count = std::min(BLOCK, length - start), columns = (count + LANES - 1) / LANES * LANES;
        std::fill(keys, keys + 6 * BLOCK * dim, 0.f);
        for (int64_t j = 0; j < count; j++) {
            const int64_t row = ((first + start + j) * shape.kv_heads + kv_head) * dim;
            widen(k + row, keys + j * dim, dim);
            widen(v + row, values + j * dim, dim);
        }
        for (int64_t j = 0; j < count; j++)
            for (int64_t d = 0; d < dim; d++) {
                keys_across[d * BLOCK + j] = keys[j * dim + d];
                values_across[d * BLOCK + j] = values[j * dim + d];
            }
        for (const Tile& tile : tiles) {
            const int64_t position = tile.token - first, rows = tile.tokens * group;
            if (position + tile.tokens <= start) continue;
            load_rows(q, tile, kv_head, shape, queries);
            load_rows(grad_out, tile, kv_head, shape, grads);
            std::fill(weights, weights + 2 * tile_rows * BLOCK, 0.f);
            add_product(queries, dim, 1, keys_across, BLOCK, weights, BLOCK, rows, dim, columns);
            add_product(grads, dim, 1, values_across, BLOCK, grad_scores, BLOCK, rows, dim, columns);
            for (int64_t r = 0; r < rows; r++) {
                const int64_t row = (tile.token + r / group) * shape.heads + kv_head * group + r % group;
                const int64_t seen = std::min(count, position + r / group + 1 - start);
                for (int64_t j = 0; j < columns; j += LANES) {
                    float *weight = weights + r * BLOCK + j, *grad = grad_scores + r * BLOCK + j;
                    f32x16 p = exp(keep_first(load(weight) * scale - log_sums[row], seen - j, LOWEST));
                    store(weight, p);
                    store(grad, p * (load(grad) - deltas[row]) * scale);
                }
            }
            add_product(weights, 1, BLOCK, grads, dim, value_sums, dim, count, rows, dim);
            add_product(grad_scores, 1, BLOCK, queries, dim, key_sums, dim, count, rows, dim);
            std::fill(query_sums, query_sums + rows * dim, 0.f);
            add_product(grad_scores, BLOCK, 1, keys, dim, query_sums, dim, rows, count, dim);
            for (int64_t r = 0; r < rows; r++) {
                const int64_t row = (tile.token + r / group) * shape.heads + kv_head * group + r % group;
                float* target = grad_q + row * dim;
                for (int64_t d = 0; d < dim; d += LANES) store(target + d, load(target + d) + load(query_sums + r * dim + d));
            }
        }
        for (int64_t j = 0; j < count; j++) {
            const int64_t row = ((first + start + j) * shape.kv_heads + kv_head) * dim;
            for (int64_t d = 0; d < dim; d += LANES) {
                store(grad_k + row + d, load(key_sums + j * dim + d));
                store(grad_v + row + d, load(value_sums + j * dim + d));
            }
        }
    }
}

template <class T>
static void attend_backward(const T* grad_out, const T* q, const T* k, const T* v, const T* out, const float* log_sums,
                            float* grad_q, T* grad_k, T* grad_v, const int32_t* starts, int64_t sequences,
                            int64_t heads, int64_t kv_heads, int64_t head_dim, float scale) {
    const Shape shape{heads, kv_heads, head_dim};
    const int64_t rows = starts[sequences] * heads;
    std::vector<float> deltas(rows);
#pragma omp parallel for
    for (int64_t row = 0; row < rows; row++) {
        f32x16 products = {};
        for (int64_t d = 0; d < head_dim; d += LANES)
            products += load(grad_out + row * head_dim + d) * load(out + row * head_dim + d);
        deltas[row] = sum(products);
    }
    const std::vector<Tile> all = tiles_of(starts, sequences, shape.group());
    std::vector<std::vector<Tile>> tiles(sequences);
    for (const Tile& tile : all) tiles[tile.sequence].push_back(tile);
#pragma omp parallel for schedule(dynamic, 1) collapse(2)
    for (int64_t s = 0; s < sequences; s++)
        for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++)
            backward_head(grad_out, q, k, v, log_sums, deltas.data(), grad_q, grad_k, grad_v, tiles[s], starts[s],
                          starts[s + 1] - starts[s], kv_head, shape, scale);
}

#define EXPORT(T, suffix)                                                                                             \
    extern "C" void write_pages##suffix(const T* k, const T* v, const int64_t* slots, T* key_pages, T* value_pages,   \
                                        int64_t tokens, int64_t kv_heads, int64_t head_dim) {                         \
        write_pages<T>(k, v, slots, key_pages, value_pages, tokens, kv_heads, head_dim);                              \
    }                                                                                                                 \
    extern "C" void attend##suffix(const T* q, T* out, float* log_sums, const T* key_pages, const T* value_pages,     \
                                   const int32_t* table, const int32_t* query_starts, const int32_t* context_lengths, \
                                   int64_t sequences, int64_t width, int64_t heads, int64_t kv_heads,                 \
                                   int64_t head_dim, float scale) {                                                   \
        attend<T>(q, out, log_sums, key_pages, value_pages, table, query_starts, context_lengths, sequences, width,   \
                  heads, kv_heads, head_dim, scale);                                                                  \
    }                                                                                                                 \
    extern "C" void attend_backward##suffix(const T* grad_out, const T* q, const T* k, const T* v, const T* out,      \
                                            const float* log_sums, float* grad_q, T* grad_k, T* grad_v,               \
                                            const int32_t* starts, int64_t sequences, int64_t heads,                  \
                                            int64_t kv_heads, int64_t head_dim, float scale) {                        \
        attend_backward<T>(grad_out, q, k, v, out, log_sums, grad_q, grad_k, grad_v, starts, sequences, heads,        \
                           kv_heads, head_dim, scale);                                                                \
    }

EXPORT(float, _f32)
EXPORT(bf16, _bf16)
