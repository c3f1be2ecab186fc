// The rows of a chunk of the gated delta rule, and the state after it. Every element of a result is one chain over
// ascending keys, and no row reads what comes after it, so its bits do not depend on the rows computed with it.
#pragma once
#include "delta.h"

// How the sums of a product begin.
struct FromZero {
    f32x16 operator()(int64_t, int64_t) const { return f32x16{}; }
};
struct FromMatrix {
    const float* at;
    int64_t row;
    f32x16 operator()(int64_t r, int64_t n) const { return load(at + r * row + n); }
};
struct FromScaled {
    const float* at;
    int64_t row;
    float factor;
    f32x16 operator()(int64_t r, int64_t n) const { return load(at + r * row + n) * factor; }
};

// A matrix with any strides.
struct Factor {
    const float* at;
    int64_t row, inner;
};

// Groups of 16 columns whose sums fit in registers for six rows.
constexpr int GROUPS = WIDTH == 16 ? 4 : 1;

template <int ROWS, int VECTORS, class Start>
static inline void product_tile(const Factor& a, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t inner,
                                int64_t r0, int64_t n0, const Start& start) {
    f32x16 sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sums[r][v] = start(r0 + r, n0 + v * LANES);
    const float* rows = a.at + r0 * a.row;
    for (int64_t k = 0; k < inner; k++) {
        f32x16 columns[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) columns[v] = load(b + k * ldb + n0 + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const f32x16 factor = splat(rows[r * a.row + k * a.inner]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[r][v] = multiply_add(factor, columns[v], sums[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) store(c + (r0 + r) * ldc + n0 + v * LANES, sums[r][v]);
}

template <int VECTORS, class Start>
static void product_panel(const Factor& a, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t rows,
                          int64_t inner, int64_t n, const Start& start) {
    int64_t r = 0;
    for (; r + 6 <= rows; r += 6) product_tile<6, VECTORS>(a, b, ldb, c, ldc, inner, r, n, start);
    for (; r + 2 <= rows; r += 2) product_tile<2, VECTORS>(a, b, ldb, c, ldc, inner, r, n, start);
    if (r < rows) product_tile<1, VECTORS>(a, b, ldb, c, ldc, inner, r, n, start);
}

// c [rows][columns] = start + a [rows][inner] · b [inner][columns]; columns divide by 16. The start may be c.
template <class Start>
static void product(const Factor& a, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t rows, int64_t inner,
                    int64_t columns, const Start& start) {
    int64_t n = 0;
    for (; n + GROUPS * LANES <= columns; n += GROUPS * LANES)
        product_panel<GROUPS>(a, b, ldb, c, ldc, rows, inner, n, start);
    for (; GROUPS > 2 && n + 2 * LANES <= columns; n += 2 * LANES)
        product_panel<2>(a, b, ldb, c, ldc, rows, inner, n, start);
    for (; n < columns; n += LANES) product_panel<1>(a, b, ldb, c, ldc, rows, inner, n, start);
}

// out [columns][rows] of in [rows][columns].
static void turn(const float* in, int64_t in_row, float* out, int64_t out_row, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r += WIDTH)
        for (int64_t c = 0; c < columns; c += WIDTH) {
            if (r + WIDTH > rows || c + WIDTH > columns) {
                for (int64_t i = r; i < std::min(rows, r + WIDTH); i++)
                    for (int64_t j = c; j < std::min(columns, c + WIDTH); j++) out[j * out_row + i] = in[i * in_row + j];
                continue;
            }
            words block[WIDTH];
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; i++) std::memcpy(&block[i], in + (r + i) * in_row + c, sizeof(words));
            transpose(block);
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; i++) std::memcpy(out + (c + i) * out_row + r, &block[i], sizeof(words));
        }
}

// One key head's rows of a chunk, up to the last one computed.
struct Chunk {
    float* keys;     // [key_dim][CHUNK]
    float* updates;  // [group][CHUNK][row]: what each row writes at its key
    int64_t row;
    float* decays;  // [group][CHUNK]: the sums of log-decays
};

// The states of a key head's value heads [group][key_dim][row]; null: zeros.
struct State {
    const float* at;
    int64_t row, head;
};

// The rows of a value head whose updates and outputs are computed, and what they are computed from.
struct Reading {
    const float *at_keys, *at_queries;  // [rows][CHUNK]: the weights of the chunk's updates
    const float *old, *reads;           // [rows][value_row]: what keys and queries read in the state; null: zeros
    const float* from_start;            // [rows]: the factors of these
    const float *values, *strengths;
    int64_t value_row;
    float* updates;
    int64_t update_row, first;  // `first` is the place of row 0 in the chunk
};

// ROWS rows from row t on. For each of them, the sums of its key begin with what it reads in the state; those of its
// query, too. `sink` takes the values' differences from what is stored at the keys, and the outputs.
template <int ROWS, int VECTORS, class Sink>
static inline void read_tile(const Reading& x, int64_t t, int64_t n, const Sink& sink) {
    constexpr bool READS = Sink::READS;
    f32x16 at_keys[ROWS][VECTORS] = {}, at_queries[READS ? ROWS : 1][VECTORS] = {};
    if (x.old)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                const int64_t place = (t + r) * x.value_row + n + v * LANES;
                at_keys[r][v] = load(x.old + place) * x.from_start[t + r];
                if (READS) at_queries[r][v] = load(x.reads + place) * x.from_start[t + r];
            }
    const float *keys = x.at_keys + t * CHUNK, *queries = READS ? x.at_queries + t * CHUNK : nullptr;
    const auto add = [&](int r, int64_t j, const f32x16(&update)[VECTORS], bool to_key, bool to_query) {
        const f32x16 key = splat(keys[r * CHUNK + j]), query = READS ? splat(queries[r * CHUNK + j]) : f32x16{};
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            if (to_key) at_keys[r][v] = multiply_add(key, update[v], at_keys[r][v]);
            if (READS && to_query) at_queries[r][v] = multiply_add(query, update[v], at_queries[r][v]);
        }
    };
    const int64_t before = x.first + t;
    for (int64_t j = 0; j < before; j++) {
        f32x16 update[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) update[v] = load(x.updates + j * x.update_row + n + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) add(r, j, update, true, true);
    }
#pragma GCC unroll 8
    for (int own = 0; own < ROWS; own++) {
        f32x16 update[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const f32x16 change = load(x.values + (t + own) * x.value_row + n + v * LANES) - at_keys[own][v];
            update[v] = x.strengths[t + own] * change;
            store(x.updates + (before + own) * x.update_row + n + v * LANES, update[v]);
            sink.change(t + own, n + v * LANES, change);
        }
#pragma GCC unroll 8
        for (int r = own; r < ROWS; r++) add(r, before + own, update, r > own, true);
#pragma GCC unroll 4
        for (int v = 0; READS && v < VECTORS; v++) sink.output(t + own, n + v * LANES, at_queries[own][v]);
    }
}

template <int VECTORS, class Sink>
static void read_panel(const Reading& x, int64_t rows, int64_t n, const Sink& sink) {
    int64_t t = 0;
    for (; t + 3 <= rows; t += 3) read_tile<3, VECTORS>(x, t, n, sink);
    for (; t < rows; t++) read_tile<1, VECTORS>(x, t, n, sink);
}

template <class Sink>
static void read_rows(const Reading& x, int64_t rows, int64_t columns, const Sink& sink) {
    int64_t n = 0;
    for (; n + GROUPS * LANES <= columns; n += GROUPS * LANES) read_panel<GROUPS>(x, rows, n, sink);
    for (; n < columns; n += LANES) read_panel<1>(x, rows, n, sink);
}

// Outputs of rows in a tensor.
template <class T>
struct Outputs {
    static constexpr bool READS = true;
    T* out;
    int64_t row, dim;
    void change(int64_t, int64_t, f32x16) const {}
    void output(int64_t t, int64_t n, f32x16 x) const { store_first(out + t * row + n, x, dim - n); }
};

// Scratch memory of a chunk's products.
struct Products {
    float *inner, *weights;  // [2 · rows][CHUNK]: keys and queries with the chunk's keys, without and with decay
    float* reads;            // [2 · rows][value_row]
    float* from_start;       // [CHUNK]
    float* decayed;          // [key_dim][CHUNK]

    Products(const Sizes& sizes, Memory& memory) {
        inner = memory.take(2 * CHUNK * CHUNK);
        weights = memory.take(2 * CHUNK * CHUNK);
        reads = memory.take(2 * CHUNK * sizes.value_row());
        from_start = memory.take(CHUNK);
        decayed = memory.take(sizes.key_dim * CHUNK);
    }
};

// Writes the keys and the sums of log-decays of `count` rows at `first`.
static void append_rows(const Rows& rows, const Sizes& sizes, const Chunk& chunk, int64_t first, int64_t count) {
    turn(rows.keys, sizes.key_row(), chunk.keys + first, CHUNK, count, sizes.key_dim);
    for (int64_t g = 0; g < sizes.group(); g++) {
        float* decays = chunk.decays + g * CHUNK;
        float total = first ? decays[first - 1] : 0.f;
        for (int64_t t = 0; t < count; t++) decays[first + t] = total += rows.log_decays[g * CHUNK + t];
    }
}

// The inner products of keys and queries with the chunk's keys, up to each row's own rounded up to a block of 16.
static void inner_products(const Rows& rows, const Sizes& sizes, const float* keys, int64_t first, int64_t count,
                           float* inner) {
    for (int64_t t = 0; t < count;) {
        const int64_t columns = padded(first + t + 1), stop = std::min(count, columns - first), block = stop - t;
        const auto multiply = [&](int64_t begin, int64_t height) {
            product({rows.keys + begin * sizes.key_row(), sizes.key_row(), 1}, keys, CHUNK, inner + begin * CHUNK, CHUNK,
                    height, sizes.key_dim, columns, FromZero{});
        };
        if (block == count)
            multiply(0, 2 * count);
        else
            multiply(t, block), multiply(count + t, block);
        t = stop;
    }
}

// A value head's weights: the inner products times e^(the row's decay - the key's). Lanes after a row's own are not
// used.
static void decay_weights(const float* inner, const float* decays, int64_t first, int64_t count, float* weights) {
    for (int64_t t = 0; t < count; t++)
        for (int64_t j = 0; j <= first + t; j += LANES) {
            const f32x16 decay = exp(splat(decays[first + t]) - load(decays + j));
            store(weights + t * CHUNK + j, load(inner + t * CHUNK + j) * decay);
            store(weights + (count + t) * CHUNK + j, load(inner + (count + t) * CHUNK + j) * decay);
        }
}

static void exponentials(const float* x, int64_t count, float* out) {
    for (int64_t t = 0; t < count; t += LANES) store_first(out + t, exp(load_first(x + t, count - t)), count - t);
}

// Appends `count` rows at `first` to a chunk that begins with `state`.
template <class T>
static void extend(const Rows& rows, const Sizes& sizes, const Chunk& chunk, int64_t first, int64_t count,
                   const State& state, T* out, const Products& products) {
    const int64_t value_row = sizes.value_row(), columns = padded(sizes.value_dim);
    for (int64_t t = 0; t < count; t++)
        for (int64_t n = 0; n < sizes.group() * sizes.value_dim; n += LANES)
            __builtin_prefetch(out + t * sizes.value_heads * sizes.value_dim + n, 1);
    append_rows(rows, sizes, chunk, first, count);
    inner_products(rows, sizes, chunk.keys, first, count, products.inner);
    for (int64_t g = 0; g < sizes.group(); g++) {
        const float* decays = chunk.decays + g * CHUNK;
        decay_weights(products.inner, decays, first, count, products.weights);
        exponentials(decays + first, count, products.from_start);
        if (state.at)
            product({rows.keys, sizes.key_row(), 1}, state.at + g * state.head, state.row, products.reads, value_row,
                    2 * count, sizes.key_dim, columns, FromZero{});
        const Reading reading{products.weights,
                              products.weights + count * CHUNK,
                              state.at ? products.reads : nullptr,
                              products.reads + count * value_row,
                              products.from_start,
                              rows.values + g * CHUNK * value_row,
                              rows.strengths + g * CHUNK,
                              value_row,
                              chunk.updates + g * CHUNK * chunk.row,
                              chunk.row,
                              first};
        read_rows(reading, count, columns,
                  Outputs<T>{out + g * sizes.value_dim, sizes.value_heads * sizes.value_dim, sizes.value_dim});
    }
}

// The states after a full chunk, in scratch memory: e^decay of the whole chunk times the state, plus each key, decayed
// from its row to the last one, times its update. `state` may be `next`.
static void next_state(const Chunk& chunk, const Sizes& sizes, const State& state, float* next,
                       const Products& products) {
    for (int64_t g = 0; g < sizes.group(); g++) {
        const float *decays = chunk.decays + g * CHUNK, last = decays[CHUNK - 1];
        f32x16 left[CHUNK / LANES];
        for (int i = 0; i < CHUNK / LANES; i++) left[i] = exp(last - load(decays + i * LANES));
        for (int64_t d = 0; d < sizes.key_dim; d++)
            for (int i = 0; i < CHUNK / LANES; i++) {
                const int64_t place = d * CHUNK + i * LANES;
                store(products.decayed + place, load(chunk.keys + place) * left[i]);
            }
        const auto add = [&](const auto& start) {
            product({products.decayed, CHUNK, 1}, chunk.updates + g * CHUNK * chunk.row, chunk.row,
                    next + g * sizes.state(), sizes.value_row(), sizes.key_dim, CHUNK, padded(sizes.value_dim), start);
        };
        if (state.at)
            add(FromScaled{state.at + g * state.head, state.row, exp_float(last)});
        else
            add(FromZero{});
    }
}
