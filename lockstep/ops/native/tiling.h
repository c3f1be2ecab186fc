// Shared by the products: the division of rows into tiles, and scratch memory.
#pragma once
#include <vector>

#include "panels.h"

// Divides rows into tiles of nearly equal heights.
struct Tiling {
    int64_t rows, count;
    Tiling(int64_t rows, int64_t highest) : rows(rows), count((rows + highest - 1) / highest) {}
    int64_t start(int64_t tile) const { return rows * tile / count; }
    int64_t height(int64_t tile) const { return start(tile + 1) - start(tile); }
};

// Scratch memory that a thread reuses between calls.
template <class T>
static T* scratch(int64_t count, int which) {
    static thread_local std::vector<char> kept[5];
    if ((int64_t)kept[which].size() < count * (int64_t)sizeof(T) + 64) kept[which].resize(count * sizeof(T) + 64);
    return (T*)(((uintptr_t)kept[which].data() + 63) / 64 * 64);
}

// sums += others; a multiple of LANES.
static inline void add_sums(float* sums, const float* others, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) store(sums + i, load(sums + i) + load(others + i));
}

// Writes the sums of a tile [rows][COLUMNS], rounded to Out, to a result with this many outputs.
template <class Out>
struct Rounded {
    Out* out;
    int64_t outputs;
    void operator()(const float* sums, int64_t top, int64_t rows, int64_t panel) const {
        const int64_t count = std::min(COLUMNS, outputs - panel * COLUMNS);
        Out* target = out + top * outputs + panel * COLUMNS;
        for (int64_t r = 0; r < rows; r++, target += outputs, sums += COLUMNS)
            if (count == COLUMNS)
#pragma GCC unroll 2
                for (int64_t n = 0; n < COLUMNS; n += LANES) store(target + n, load(sums + n));
            else
                for (int64_t n = 0; n < count; n += LANES) store_first(target + n, load(sums + n), count - n);
    }
};
