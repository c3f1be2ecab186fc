// The exported products with weights of 8-bit integers. Their factors have a scale per row: x's rows are quantized here.
#include "grouped_product.h"
#include "int8_product.h"

// out [rows][outputs] = x [rows][depth] · the weight's codes [outputs][depth]ᵀ, both times their scales.
template <class T>
static void int8_product(const T* x, int64_t x_row, const word* panels, T* out, int64_t rows, int64_t depth,
                         int64_t outputs, bool may_split = true) {
    if (rows == 0 || outputs == 0) return;
    const Int8Weight weight{(word*)panels, depth, outputs};
    const int64_t padded = weight.steps() * STEP<int8>;
    int8* codes = scratch<int8>(rows * (padded + sizeof(float)), 4);
    float* scales = (float*)(codes + rows * padded);
    const bool split = may_split && rows * outputs * depth > SPLIT_WORK;
#pragma omp parallel for schedule(static) if (split && rows * depth > OWN_WORDS)
    for (int64_t r = 0; r < rows; r++) scales[r] = quantize(x + r * x_row, depth, codes + r * padded, padded);
    const Matrix<int8> left{codes, rows, padded, padded, 1}, right{nullptr, outputs, padded, padded, 1};
    Product<int8, Scaled<T>>(left, right, panels, {{out, outputs}, scales, weight}, 1).run(split);
}

// Rows starts[g] to starts[g + 1] with the panels of weight g, which follow those of weight g - 1.
template <class T>
static void grouped_int8_product(const T* x, const word* panels, T* out, const int64_t* starts, int64_t groups,
                                 int64_t depth, int64_t outputs) {
    const int64_t words = Int8Weight{nullptr, depth, outputs}.words();
    for_groups(starts, groups, depth * outputs, [&](int64_t g, bool split) {
        int8_product<T>(x + starts[g] * depth, depth, panels + g * words, out + starts[g] * outputs,
                        starts[g + 1] - starts[g], depth, outputs, split);
    });
}

// The numbers that codes of x stand for, which gradients see.
template <class T>
static void round_int8(const T* x, int64_t x_row, T* out, int64_t rows, int64_t depth) {
    const int64_t padded = padded_depth(depth);
#pragma omp parallel for schedule(static) if (rows * depth > OWN_WORDS)
    for (int64_t r = 0; r < rows; r++) {
        int8* codes = scratch<int8>(padded, 0);
        const float scale = quantize(x + r * x_row, depth, codes, padded);
        dequantize(codes, scale, out + r * depth, depth);
    }
}

#define EXPORT(suffix, T)                                                                                              \
    extern "C" void int8_product##suffix(const T* x, int64_t x_row, const word* panels, T* out, int64_t rows,          \
                                         int64_t depth, int64_t outputs) {                                             \
        int8_product<T>(x, x_row, panels, out, rows, depth, outputs);                                                  \
    }                                                                                                                  \
    REPLAYABLE(int8_product##suffix)                                                                                   \
    extern "C" void grouped_int8_product##suffix(const T* x, const word* panels, T* out, const int64_t* starts,        \
                                                 int64_t groups, int64_t depth, int64_t outputs) {                     \
        grouped_int8_product<T>(x, panels, out, starts, groups, depth, outputs);                                       \
    }                                                                                                                  \
    REPLAYABLE(grouped_int8_product##suffix)                                                                           \
    extern "C" void pack_int8##suffix(const T* w, int64_t w_row, word* panels, int64_t depth, int64_t outputs) {       \
        Int8Weight{panels, depth, outputs}.pack(w, w_row);                                                             \
    }                                                                                                                  \
    extern "C" void unpack_int8##suffix(const word* panels, T* out, int64_t depth, int64_t outputs) {                  \
        Int8Weight{(word*)panels, depth, outputs}.unpack(out);                                                         \
    }                                                                                                                  \
    extern "C" void round_int8##suffix(const T* x, int64_t x_row, T* out, int64_t rows, int64_t depth) {               \
        round_int8<T>(x, x_row, out, rows, depth);                                                                     \
    }

EXPORT(_f32, float)
EXPORT(_bf16, bf16)

// Words of a packed weight.
extern "C" int64_t int8_words(int64_t depth, int64_t outputs) { return Int8Weight{nullptr, depth, outputs}.words(); }
