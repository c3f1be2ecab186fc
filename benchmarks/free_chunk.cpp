// The packed delta rule with chunks that are not causal row by row, to measure what causality costs: the system of a
// chunk's updates is inverted (arXiv 2406.06484, section 3.2), and all products are of full tiles. The rest is the
// kernels'.
#include "delta_chunk.h"

// inverse [CHUNK][CHUNK] of I + strengths · weights, whose part below the diagonal counts.
static void invert(const float* weights, const float* strengths, int64_t count, float* inverse) {
    for (int64_t i = 0; i < CHUNK; i++) {
        float* row = inverse + i * CHUNK;
        std::fill(row, row + CHUNK, 0.f);
        if (i < count)
            product({weights + i * CHUNK, CHUNK, 1}, inverse, CHUNK, row, CHUNK, 1, i, padded(i), FromZero{});
        for (int64_t j = 0; j < padded(i) && i < count; j += LANES) store(row + j, load(row + j) * -strengths[i]);
        row[i] = 1.f;
    }
}

template <class T>
static void free_extend(const Rows& rows, const Sizes& sizes, const Chunk& chunk, int64_t first, int64_t count,
                        const State& state, T* out, const Products& products) {
    const int64_t value_row = sizes.value_row(), columns = padded(sizes.value_dim);
    append_rows(rows, sizes, chunk, first, count);
    product({rows.keys, sizes.key_row(), 1}, chunk.keys, CHUNK, products.inner, CHUNK, 2 * count, sizes.key_dim, CHUNK,
            FromZero{});
    for (int64_t g = 0; g < sizes.group(); g++) {
        const float *decays = chunk.decays + g * CHUNK, *strengths = rows.strengths + g * CHUNK;
        float *at_keys = products.weights, *at_queries = at_keys + count * CHUNK;
        decay_weights(products.inner, decays, 0, count, products.weights);
        for (int64_t t = 0; t < count; t++)
            for (int64_t j = 0; j < CHUNK; j += LANES) {
                float* query = at_queries + t * CHUNK + j;
                store(query, keep_first(load(query), t + 1 - j, 0.f));
            }
        float* inverse = products.decayed;
        invert(at_keys, strengths, count, inverse);
        exponentials(decays, count, products.from_start);
        const State own{state.at ? state.at + g * state.head : nullptr, state.row, 0};
        if (own.at)
            product({rows.keys, sizes.key_row(), 1}, own.at, own.row, products.reads, value_row, 2 * count, sizes.key_dim,
                    columns, FromZero{});
        float *changes = rows.values + g * CHUNK * value_row, *reads = products.reads + count * value_row;
        for (int64_t t = 0; t < count; t++)
            for (int64_t n = 0; n < columns; n += LANES) {
                float *change = changes + t * value_row + n, *read = reads + t * value_row + n;
                f32x16 stored = {};
                if (own.at) stored = load(products.reads + t * value_row + n) * products.from_start[t];
                store(change, strengths[t] * (load(change) - stored));
                store(read, own.at ? load(read) * products.from_start[t] : f32x16{});
            }
        float* updates = chunk.updates + g * CHUNK * chunk.row;
        product({inverse, CHUNK, 1}, changes, value_row, updates, chunk.row, count, count, columns, FromZero{});
        product({at_queries, CHUNK, 1}, updates, chunk.row, reads, value_row, count, count, columns,
                FromMatrix{reads, value_row});
        for (int64_t t = 0; t < count; t++)
            for (int64_t n = 0; n < sizes.value_dim; n += LANES)
                store_first(out + (t * sizes.value_heads + g) * sizes.value_dim + n, load(reads + t * value_row + n),
                            sizes.value_dim - n);
    }
}

#define extend free_extend
#include "delta.cpp"
