// The exported products with weights of 8-bit integers. Their factors have a scale per row: x's rows are quantized here.
#include "grouped_product.h"
#include "int8_product.h"

// The integer sums of x [rows][depth] · the weight's codes [outputs][depth]ᵀ, which `put(scales, weight)` writes. given:
// the rows' scales, or null for their own.
template <class T, class Put>
static void int8_product(const T* x, int64_t x_row, const float* given, const word* panels, int64_t rows, int64_t depth,
                         int64_t outputs, const Put& put, bool may_split = true) {
    if (rows == 0 || outputs == 0) return;
    const Int8Weight weight{(word*)panels, depth, outputs};
    const int64_t padded = weight.steps() * STEP<int8>;
    int8* codes = scratch<int8>(rows * (padded + sizeof(float)), 4);
    float* scales = (float*)(codes + rows * padded);
    const bool split = may_split && rows * outputs * depth > SPLIT_WORK;
#pragma omp parallel for schedule(static) if (split && rows * depth > OWN_WORDS)
    for (int64_t r = 0; r < rows; r++)
        scales[r] = quantize(x + r * x_row, depth, codes + r * padded, padded, given ? given + r : nullptr);
    const Matrix<int8> left{codes, rows, padded, padded, 1}, right{nullptr, outputs, padded, padded, 1};
    const auto write = put(scales, weight);
    typename Best<int8, decltype(put(scales, weight))>::Product(left, right, panels, write, 1).run(split);
}

// Rows starts[g] to starts[g + 1] with the panels of weight g, which follow those of weight g - 1.
template <class T>
static void grouped_int8_product(const T* x, const word* panels, T* out, const int64_t* starts, int64_t groups,
                                 int64_t depth, int64_t outputs) {
    const int64_t words = Int8Weight{nullptr, depth, outputs}.words();
    for_groups(starts, groups, depth * outputs, [&](int64_t g, bool split) {
        const auto put = [&](const float* scales, const auto& weight) {
            return Scaled<T>{{out + starts[g] * outputs, outputs}, scales, weight};
        };
        int8_product(x + starts[g] * depth, depth, nullptr, panels + g * words, starts[g + 1] - starts[g], depth, outputs,
                     put, split);
    });
}

// The numbers that codes of x stand for, which gradients see.
template <class T>
static void round_int8(const T* x, int64_t x_row, const float* given, T* out, int64_t rows, int64_t depth) {
    const int64_t padded = padded_depth(depth);
#pragma omp parallel for schedule(static) if (rows * depth > OWN_WORDS)
    for (int64_t r = 0; r < rows; r++) {
        int8* codes = scratch<int8>(padded, 0);
        const float scale = quantize(x + r * x_row, depth, codes, padded, given ? given + r : nullptr);
        dequantize(codes, scale, out + r * depth, depth);
    }
}

#define EXPORT(suffix, T)                                                                                              \
    extern "C" void int8_product##suffix(const T* x, int64_t x_row, const word* panels, T* out, int64_t rows,          \
                                         int64_t depth, int64_t outputs) {                                             \
        int8_product(x, x_row, nullptr, panels, rows, depth, outputs, [&](const float* scales, const auto& weight) {   \
            return Scaled<T>{{out, outputs}, scales, weight};                                                          \
        });                                                                                                            \
    }                                                                                                                  \
    REPLAYABLE(int8_product##suffix)                                                                                   \
    extern "C" void int8_sums##suffix(const T* x, int64_t x_row, const float* scales, const word* panels,              \
                                      int32_t* out, int64_t rows, int64_t depth, int64_t outputs) {                    \
        int8_product(x, x_row, scales, panels, rows, depth, outputs, [&](const float*, const auto& weight) {           \
            return Unscaled{out, outputs, weight};                                                                     \
        });                                                                                                            \
    }                                                                                                                  \
    extern "C" void grouped_int8_product##suffix(const T* x, const word* panels, T* out, const int64_t* starts,        \
                                                 int64_t groups, int64_t depth, int64_t outputs) {                     \
        grouped_int8_product<T>(x, panels, out, starts, groups, depth, outputs);                                       \
    }                                                                                                                  \
    REPLAYABLE(grouped_int8_product##suffix)                                                                           \
    extern "C" void pack_int8##suffix(const T* w, int64_t w_row, const float* scales, word* panels, int64_t depth,     \
                                      int64_t outputs) {                                                               \
        Int8Weight{panels, depth, outputs}.pack(w, w_row, scales);                                                     \
    }                                                                                                                  \
    extern "C" void unpack_int8##suffix(const word* panels, const int64_t* chosen, T* out, int64_t rows,               \
                                        int64_t depth, int64_t outputs) {                                              \
        Int8Weight{(word*)panels, depth, outputs}.unpack(chosen, out, rows);                                           \
    }                                                                                                                  \
    REPLAYABLE(unpack_int8##suffix)                                                                                    \
    extern "C" void round_int8##suffix(const T* x, int64_t x_row, const float* scales, T* out, int64_t rows,           \
                                       int64_t depth) {                                                                \
        round_int8<T>(x, x_row, scales, out, rows, depth);                                                             \
    }                                                                                                                  \
    REPLAYABLE(round_int8##suffix)

EXPORT(_f32, float)
EXPORT(_bf16, bf16)

// Words of a packed weight.
extern "C" int64_t int8_words(int64_t depth, int64_t outputs) { return Int8Weight{nullptr, depth, outputs}.words(); }
