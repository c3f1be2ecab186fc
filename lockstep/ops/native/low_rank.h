// A low-rank adapter's update of some rows of a product: both of its products, the scaled update and the sum, each
// rounded, as the operators that compute them one by one.
#pragma once
#include "replay.h"
#include "product.h"

// out[at[r]] += scaling · b · a · x[at[r]], for x [rows of x][depth], a [rank][depth], b [outputs][rank], and out [rows
// of x][outputs]. `at` null: all rows. `packed_a` and `packed_b`: their panels, or null.
template <class T>
static void add_low_rank(const T* x, const int64_t* at, const T* a, const word* packed_a, const T* b,
                         const word* packed_b, T* out, int64_t rows, int64_t depth, int64_t rank, int64_t outputs,
                         float scaling) {
    // Of the calling thread, next to those that a product uses. Each part begins at a vector.
    const auto padded = [](int64_t count) { return (count + LANES - 1) / LANES * LANES; };
    T* narrow = scratch<T>(padded(rows * rank) + padded(rows * outputs) + (at ? rows * depth : 0), 4);
    T *update = narrow + padded(rows * rank), *gathered = update + padded(rows * outputs);
    if (at) {
        for (int64_t r = 0; r < rows; r++) std::memcpy((void*)(gathered + r * depth), x + at[r] * depth, depth * sizeof(T));
        x = gathered;
    }
    product<T, T>(x, depth, 1, a, depth, 1, packed_a, narrow, rows, depth, rank, 1);
    product<T, T>(narrow, rank, 1, b, rank, 1, packed_b, update, rows, rank, outputs, 1);
#pragma omp parallel for if (rows * outputs > SPLIT_WORK / 16)
    for (int64_t r = 0; r < rows; r++) {
        T *own = update + r * outputs, *target = out + (at ? at[r] : r) * outputs;
        for (int64_t i = 0; i < outputs; i += LANES) {
            const int64_t count = outputs - i;
            store_first(own + i, load_first(own + i, count) * scaling, count);
            store_first(target + i, load_first(target + i, count) + load_first(own + i, count), count);
        }
    }
}

#define EXPORT_LOW_RANK(T, suffix)                                                                                     \
    extern "C" void add_low_rank##suffix(const T* x, const int64_t* at, const T* a, const word* packed_a, const T* b,  \
                                         const word* packed_b, T* out, int64_t rows, int64_t depth, int64_t rank,      \
                                         int64_t outputs, float scaling) {                                             \
        add_low_rank<T>(x, at, a, packed_a, b, packed_b, out, rows, depth, rank, outputs, scaling);                    \
    }                                                                                                                  \
    REPLAYABLE(add_low_rank##suffix)
