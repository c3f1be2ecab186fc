// The two products of a block of attention: queries with keys, weights with values. In float32; in bfloat16 with pair
// instructions (vdpbf16ps) or in the matrix unit if the processor has them, with weights rounded to bfloat16 as in
// flash attention.
#pragma once
#include "attention.h"
#include "pairs.h"
#include "unit.h"

// The pages of a block's keys and values, `count` keys in total. Past the sequence's end, the first page is repeated;
// its scores are masked.
template <class T>
struct BlockPages {
    const T *keys[BLOCK / PAGE], *values[BLOCK / PAGE];
    int64_t count;
};

// Few rows, as in decode, read the pages in place; many rows share a block converted once. Both add the same terms in
// the same order.
template <class T>
struct BlockProducts {
    const int64_t dim;
    const bool direct;
    float *queries, *keys, *values;

    static int64_t scratch(int64_t rows, int64_t dim) { return rows * dim + 2 * BLOCK * dim; }
    static int64_t padded_rows(int64_t rows) { return rows; }

    BlockProducts(const T* q, const Tile& tile, int64_t kv_head, const Shape& shape, float* scratch)
        : dim(shape.head_dim), direct(tile.tokens * shape.group() < FEW_ROWS), queries(scratch) {
        keys = queries + tile.tokens * shape.group() * dim;
        values = keys + BLOCK * dim;
        load_rows(q, tile, kv_head, shape, queries);
    }

    // scores [rows][BLOCK] of the query rows starting at `from`.
    void scores(const BlockPages<T>& pages, int64_t from, int64_t rows, float* scores) {
        std::fill(scores, scores + rows * BLOCK, 0.f);
        const float* query = queries + from * dim;
        if (direct) {
            for (int64_t p = 0; p < BLOCK / PAGE; p += GROUPS)
                product_rows<GROUPS>(query, dim, 1, pages.keys + p, PAGE, scores + p * PAGE, BLOCK, rows, dim);
            return;
        }
        for (int64_t p = 0; p * PAGE < pages.count; p++) {
            for (int64_t d = 0; d < dim; d++) store(keys + d * BLOCK + p * PAGE, load(pages.keys[p] + d * PAGE));
            widen(pages.values[p], values + p * PAGE * dim, std::min(PAGE, pages.count - p * PAGE) * dim);
        }
        add_product(query, dim, 1, keys, BLOCK, scores, BLOCK, rows, dim, (pages.count + LANES - 1) / LANES * LANES);
    }

    // attended [rows][dim] += weights [rows][BLOCK] · values, after `scores` of the same block.
    void add_values(const BlockPages<T>& pages, int64_t rows, const float* weights, float* attended) {
        if (!direct) return add_product(weights, BLOCK, 1, values, dim, attended, dim, rows, pages.count, dim);
        for (int64_t p = 0; p * PAGE < pages.count; p++)
            add_product(weights + p * PAGE, BLOCK, 1, pages.values[p], dim, attended, dim, rows,
                        std::min(PAGE, pages.count - p * PAGE), dim);
    }
};

#ifdef LOCKSTEP_PAIRS
struct KeyPairs {  // of a block: vector v is page v
    const bf16* const* pages;
    __m512bh operator()(int64_t pair, int v) const {
        return interleaved(_mm512_loadu_si512(pages[v] + 2 * pair * PAGE));
    }
};

struct ValuePairs {  // of one page, from column `first` on; rows from `count` on are zeros
    const bf16* first;
    int64_t dim, count;
    __m512bh operator()(int64_t pair, int v) const {
        static const bf16 zeros[LANES] = {};
        const bf16* row = first + 2 * pair * dim + v * LANES;
        return interleaved(2 * pair < count ? row : zeros, 2 * pair + 1 < count ? row + dim : zeros);
    }
};

// Packs keys [dim / 2][4] and values [BLOCK / 2][dim / 16] of a block; values past its last key are zeros.
static void convert_block(const BlockPages<bf16>& pages, int64_t dim, __m512i* keys, __m512i* values) {
    const KeyPairs key_pairs{pages.keys};
    for (int64_t k = 0; k < dim / 2; k++)
        for (int v = 0; v < BLOCK / PAGE; v++) keys[k * (BLOCK / PAGE) + v] = (__m512i)key_pairs(k, v);
    for (int64_t p = 0; p < BLOCK / PAGE; p++)
        for (int64_t k = 0; k < PAGE / 2; k++)
            for (int64_t v = 0; v < dim / LANES; v++)
                values[(p * PAGE / 2 + k) * (dim / LANES) + v] =
                    (__m512i)ValuePairs{pages.values[p], dim, pages.count - p * PAGE}(k, v);
}

template <>
struct BlockProducts<bf16> {
    const int64_t dim;
    const bool direct;
    bf16 *queries, *weights;
    __m512i *keys, *values;  // [dim / 2][4], and [BLOCK / 2][dim / 16]

    static int64_t scratch(int64_t rows, int64_t dim) { return rows * (dim + BLOCK) / 2 + BLOCK * dim + 2 * LANES; }
    static int64_t padded_rows(int64_t rows) { return rows; }

    BlockProducts(const bf16* q, const Tile& tile, int64_t kv_head, const Shape& shape, float* scratch)
        : dim(shape.head_dim), direct(tile.tokens * shape.group() < FEW_ROWS) {
        const int64_t rows = tile.tokens * shape.group();
        keys = (__m512i*)(((uintptr_t)scratch + 63) / 64 * 64);
        values = keys + dim / 2 * (BLOCK / PAGE);
        queries = (bf16*)(values + BLOCK / 2 * (dim / LANES));
        weights = queries + rows * dim;
        for (int64_t t = 0; t < tile.tokens; t++)
            std::memcpy(queries + t * shape.group() * dim,
                        q + ((tile.token + t) * shape.heads + kv_head * shape.group()) * dim,
                        shape.group() * dim * sizeof(bf16));
    }

    void scores(const BlockPages<bf16>& pages, int64_t from, int64_t rows, float* scores) {
        const KeyPairs key_pairs{pages.keys};
        const LeftPairs left = left_rows(queries + from * dim, dim);
        if (direct) return pair_rows<false, BLOCK / PAGE>(left, key_pairs, scores, BLOCK, rows, dim / 2);
        convert_block(pages, dim, keys, values);
        pair_product<false>(left, keys, BLOCK / PAGE, scores, BLOCK, rows, dim / 2, BLOCK);
    }

    void add_values(const BlockPages<bf16>& pages, int64_t rows, const float* exact, float* attended) {
        for (int64_t i = 0; i < rows * BLOCK; i += LANES) store(weights + i, load(exact + i));
        for (int64_t p = 0; p * PAGE < pages.count; p++) {
            int64_t n = 0;
            for (; n + 4 * LANES <= dim; n += 4 * LANES) add_columns<4>(pages, p, n, rows, attended);
            for (; n < dim; n += LANES) add_columns<1>(pages, p, n, rows, attended);
        }
    }

    template <int VECTORS>
    void add_columns(const BlockPages<bf16>& pages, int64_t p, int64_t n, int64_t rows, float* attended) {
        const LeftPairs left = left_rows(weights + p * PAGE, BLOCK);
        const ValuePairs value_pairs{pages.values[p] + n, dim, pages.count - p * PAGE};
        if (direct) return pair_rows<true, VECTORS>(left, value_pairs, attended + n, dim, rows, PAGE / 2);
        const PackedPairs pairs{values + p * PAGE / 2 * (dim / LANES) + n / LANES, dim / LANES};
        pair_rows<true, VECTORS>(left, pairs, attended + n, dim, rows, PAGE / 2);
    }
};
#endif

#ifdef LOCKSTEP_TILES
// In the matrix unit, for any number of rows: a block at a time, padded with zero keys.
struct BlockTiles {
    const int64_t dim;
    const WholeUnits unit;
    word *queries, *weights;  // [rows][dim / 2], [rows][BLOCK / 2]
    __m512i *keys, *values;   // [dim / 2][4], [BLOCK / 2][dim / 16]

    static int64_t scratch(int64_t rows, int64_t dim) {
        return padded_rows(rows) * (dim + BLOCK) / 2 + BLOCK * dim + 2 * LANES;
    }
    // The unit reads and writes 16 rows, starting at any row.
    static int64_t padded_rows(int64_t rows) { return rows + UNIT_ROWS - 1; }

    BlockTiles(const bf16* q, const Tile& tile, int64_t kv_head, const Shape& shape, float* scratch)
        : dim(shape.head_dim) {
        const int64_t count = shape.group() * dim;
        keys = (__m512i*)(((uintptr_t)scratch + 63) / 64 * 64);
        values = keys + dim / 2 * (BLOCK / PAGE);
        queries = (word*)(values + BLOCK / 2 * (dim / LANES));
        weights = queries + padded_rows(tile.tokens * shape.group()) * dim / 2;
        for (int64_t t = 0; t < tile.tokens; t++)
            std::memcpy((bf16*)queries + t * count, q + ((tile.token + t) * shape.heads + kv_head * shape.group()) * dim,
                        count * sizeof(bf16));
    }

    void scores(const BlockPages<bf16>& pages, int64_t from, int64_t rows, float* scores) {
        convert_block(pages, dim, keys, values);
        unit.product<false>(rows_of(queries, dim / 2).from(from, 0), rows_of(keys, BLOCK), scores, BLOCK, rows, dim / 2,
                            BLOCK);
    }

    void add_values(const BlockPages<bf16>&, int64_t rows, const float* exact, float* attended) {
        for (int64_t i = 0; i < rows * BLOCK; i += LANES) store((bf16*)weights + i, load(exact + i));
        unit.product<true>(rows_of(weights, BLOCK / 2), rows_of(values, dim), attended, dim, rows, BLOCK / 2, dim);
    }
};
#endif
