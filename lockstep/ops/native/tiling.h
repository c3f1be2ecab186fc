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
    static thread_local std::vector<char> kept[4];
    if ((int64_t)kept[which].size() < count * (int64_t)sizeof(T) + 64) kept[which].resize(count * sizeof(T) + 64);
    return (T*)(((uintptr_t)kept[which].data() + 63) / 64 * 64);
}
