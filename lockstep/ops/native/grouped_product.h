// Products of grouped rows with a separate matrix per group: the experts of a mixture. A group's product only depends
// on its rows, so neither the other groups nor their order can change a bit.
#pragma once
#include "replay.h"
#include "product.h"

// Calls one(group, split) for every group with rows. Many groups are distributed over the threads; if there are few,
// each is split among all threads.
template <class One>
static void for_groups(const int64_t* starts, int64_t groups, int64_t work_of_row, const One& one) {
    int64_t filled = 0;
    for (int64_t g = 0; g < groups; g++) filled += starts[g + 1] > starts[g];
    const bool split = filled < 2 * omp_get_max_threads();
#pragma omp parallel for schedule(dynamic, 1) if (!split && (starts[groups] - starts[0]) * work_of_row > SPLIT_WORK)
    for (int64_t g = 0; g < groups; g++)
        if (starts[g + 1] > starts[g]) one(g, split);
}

// out [rows][outputs]: rows starts[g] to starts[g + 1] are x [rows][depth] · w[g] [outputs][depth]ᵀ. `packed`: the
// panels of all matrices, one after the other, or null.
template <class T>
static void grouped_product(const T* x, const T* w, int64_t w_group, int64_t w_row, int64_t w_inner, const word* packed,
                            T* out, const int64_t* starts, int64_t groups, int64_t depth, int64_t outputs) {
    const int64_t panels = (outputs + COLUMNS - 1) / COLUMNS, words = panels * COLUMNS * ((depth + STEP<T> - 1) / STEP<T>);
    for_groups(starts, groups, depth * outputs, [&](int64_t g, bool split) {
        const Matrix<T> left{x + starts[g] * depth, starts[g + 1] - starts[g], depth, depth, 1};
        const Matrix<T> right{w + g * w_group, outputs, depth, w_row, w_inner};
        typename Best<T, Rounded<T>>::Product(left, right, packed ? packed + g * words : nullptr,
                                      {out + starts[g] * outputs, outputs}, 1)
            .run(split && left.rows * depth * outputs > SPLIT_WORK);
    });
}

// out [groups][left][right]: the sums over each group's rows of a [rows][left] times b [rows][right]; zeros for a group
// without rows.
template <class T>
static void grouped_outer(const T* a, const T* b, T* out, const int64_t* starts, int64_t groups, int64_t left,
                          int64_t right) {
    for_groups(starts, groups, left * right, [&](int64_t g, bool split) {
        const int64_t rows = starts[g + 1] - starts[g];
        const Matrix<T> first{a + starts[g] * left, left, rows, 1, left}, second{b + starts[g] * right, right, rows, 1, right};
        typename Best<T, Rounded<T>>::Product(first, second, nullptr, {out + g * left * right, right}, 1)
            .run(split && rows * left * right > SPLIT_WORK);
    });
    for (int64_t g = 0; g < groups; g++)
        if (starts[g + 1] == starts[g]) std::memset((void*)(out + g * left * right), 0, left * right * sizeof(T));
}

#define EXPORT_GROUPED(T, suffix)                                                                                     \
    extern "C" void grouped_product##suffix(const T* x, const T* w, int64_t w_group, int64_t w_row, int64_t w_inner,  \
                                            const word* packed, T* out, const int64_t* starts, int64_t groups,        \
                                            int64_t depth, int64_t outputs) {                                         \
        grouped_product<T>(x, w, w_group, w_row, w_inner, packed, out, starts, groups, depth, outputs);               \
    }                                                                                                                 \
    REPLAYABLE(grouped_product##suffix)                                                                               \
    extern "C" void grouped_outer##suffix(const T* a, const T* b, T* out, const int64_t* starts, int64_t groups,      \
                                          int64_t left, int64_t right) {                                              \
        grouped_outer<T>(a, b, out, starts, groups, left, right);                                                     \
    }
