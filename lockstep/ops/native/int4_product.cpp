// The exported products with weights of 4-bit integers.
#include "grouped_product.h"
#include "int4_product.h"

// Each group's codes, scale, and the sum that cancels `ZERO_CODE` in the weight's codes.
template <class T>
static void quantize_groups(const T* x, int64_t groups, int64_t group, int8* codes, float* scales, int32_t* first) {
    for (int64_t g = 0; g < groups; g++, x += group, codes += group) {
        scales[g] = quantize(x, group, codes, group);
        int32_t sum = 0;
        for (int64_t k = 0; k < group; k++) sum += codes[k];
        first[g] = -ZERO_CODE * sum;
    }
}

// out [rows][outputs] = x [rows][depth] · the weight's codes [outputs][depth]ᵀ, both times the scales of their groups.
// `chunks`, a power of two, divides the groups.
template <class T, class Out>
static void int4_product(const T* x, int64_t x_row, const word* panels, Out* out, int64_t rows, int64_t depth,
                         int64_t outputs, int64_t group, int64_t chunks, bool may_split = true) {
    if (rows == 0 || outputs == 0) return;
    const Int4Weight weight{(word*)panels, depth, outputs, group};
    const int64_t groups = weight.groups(), levels = 64 - __builtin_clzll(chunks);
    int8* codes = scratch<int8>(rows * (depth + groups * 8), 4);
    float* scales = (float*)(codes + rows * depth);
    int32_t* first = (int32_t*)(scales + rows * groups);
    const bool split = may_split && rows * outputs * depth > SPLIT_WORK;
#pragma omp parallel for schedule(static) if (split && rows * depth > OWN_WORDS)
    for (int64_t r = 0; r < rows; r++)
        quantize_groups(x + r * x_row, groups, group, codes + r * depth, scales + r * groups, first + r * groups);
    const Rounded<Out> put{out, outputs};
    const int64_t parts = std::min<int64_t>(weight.count(), 8 * omp_get_max_threads());
#pragma omp parallel for schedule(dynamic, 1) if (split)
    for (int64_t part = 0; part < parts; part++) {
        float* sums = scratch<float>(levels * INT4_ROWS * COLUMNS, 1);
        for (int64_t top = 0; top < rows; top += INT4_BLOCK) {
            const Tiling tiling(std::min(INT4_BLOCK, rows - top), INT4_ROWS);
            for (int64_t p = weight.count() * part / parts; p < weight.count() * (part + 1) / parts; p++)
                for (int64_t t = 0; t < tiling.count; t++) {
                    const int64_t r = top + tiling.start(t);
                    const Int4Rows tile{codes + r * depth, scales + r * groups, first + r * groups, depth, groups};
                    int4_chunks(tiling.height(t), tile, weight, weight.panel(p), chunks, sums);
                    put(sums, r, tiling.height(t), p);
                }
        }
    }
}

// Rows starts[g] to starts[g + 1] with the panels of matrix g, which follow those of matrix g - 1.
template <class T>
static void grouped_int4_product(const T* x, const word* panels, T* out, const int64_t* starts, int64_t matrices,
                                 int64_t depth, int64_t outputs, int64_t group) {
    const int64_t words = Int4Weight{nullptr, depth, outputs, group}.words();
    for_groups(starts, matrices, depth * outputs, [&](int64_t g, bool split) {
        int4_product<T, T>(x + starts[g] * depth, depth, panels + g * words, out + starts[g] * outputs,
                           starts[g + 1] - starts[g], depth, outputs, group, 1, split);
    });
}

// The numbers that the codes of groups stand for.
template <class T>
static void round_int4(const T* w, T* out, int64_t groups, int64_t group) {
#pragma omp parallel for schedule(static) if (groups * group > OWN_WORDS)
    for (int64_t g = 0; g < groups; g++) {
        int8* codes = scratch<int8>(group, 0);
        const bf16 scale = quantize_signed(w + g * group, group, codes);
        dequantize(codes, wide(scale), out + g * group, group);
    }
}

#define EXPORT_PRODUCT(name, T, Out)                                                                                   \
    extern "C" void name(const T* x, int64_t x_row, const word* panels, Out* out, int64_t rows, int64_t depth,         \
                         int64_t outputs, int64_t group, int64_t chunks) {                                             \
        int4_product<T, Out>(x, x_row, panels, out, rows, depth, outputs, group, chunks);                              \
    }                                                                                                                  \
    REPLAYABLE(name)
#define EXPORT(suffix, T)                                                                                              \
    extern "C" void grouped_int4_product##suffix(const T* x, const word* panels, T* out, const int64_t* starts,        \
                                                 int64_t matrices, int64_t depth, int64_t outputs, int64_t group) {    \
        grouped_int4_product<T>(x, panels, out, starts, matrices, depth, outputs, group);                              \
    }                                                                                                                  \
    REPLAYABLE(grouped_int4_product##suffix)                                                                           \
    extern "C" void pack_int4##suffix(const T* w, int64_t w_row, word* panels, int64_t depth, int64_t outputs,         \
                                      int64_t group) {                                                                 \
        Int4Weight{panels, depth, outputs, group}.pack(w, w_row);                                                      \
    }                                                                                                                  \
    extern "C" void unpack_int4##suffix(const word* panels, const int64_t* chosen, T* out, int64_t rows,               \
                                        int64_t depth, int64_t outputs, int64_t group) {                               \
        Int4Weight{(word*)panels, depth, outputs, group}.unpack(chosen, out, rows);                                    \
    }                                                                                                                  \
    REPLAYABLE(unpack_int4##suffix)                                                                                    \
    extern "C" void round_int4##suffix(const T* w, T* out, int64_t groups, int64_t group) {                            \
        round_int4<T>(w, out, groups, group);                                                                          \
    }                                                                                                                  \
    REPLAYABLE(round_int4##suffix)

EXPORT_PRODUCT(int4_product_f32, float, float)
EXPORT_PRODUCT(int4_product_bf16, bf16, bf16)
// Unrounded sums, for ranks that each have a part of k.
EXPORT_PRODUCT(int4_sums_bf16, bf16, float)
EXPORT(_f32, float)
EXPORT(_bf16, bf16)

// Words of a packed weight.
extern "C" int64_t int4_words(int64_t depth, int64_t outputs, int64_t group) {
    return Int4Weight{nullptr, depth, outputs, group}.words();
}
