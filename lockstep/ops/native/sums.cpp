// Sums of squares in blocks, in the order of lockstep/ops/sums.py.
#include "vector.h"

namespace {

// Fewer elements are not worth waking the other threads.
constexpr int64_t PARALLEL_ELEMENTS = 1 << 16;
constexpr int64_t ROWS = 32, COLUMNS = 32;

// The square of a float32 is exact in float64, so a fused sum would have the same bits.
inline double square(double x) { return x * x; }

template <class T>
void block_squares(const T* x, double* out, int64_t count) {
    constexpr int64_t BLOCK = ROWS * COLUMNS;
#pragma omp parallel for if (count > PARALLEL_ELEMENTS)
    for (int64_t start = 0; start < count; start += BLOCK) {
        double lanes[COLUMNS] = {};
        if (count - start >= BLOCK) {
            // Eight lanes at a time, which stay in registers across the rows.
            for (int64_t lane = 0; lane < COLUMNS; lane += 8) {
                double sums[8] = {};
                for (int64_t row = 0; row < ROWS; row++)
                    for (int64_t i = 0; i < 8; i++) sums[i] += square(wide(x[start + row * COLUMNS + lane + i]));
                for (int64_t i = 0; i < 8; i++) lanes[lane + i] = sums[i];
            }
        } else {
            for (int64_t i = 0; i < count - start; i++) lanes[i % COLUMNS] += square(wide(x[start + i]));
        }
        for (int64_t half = COLUMNS / 2; half > 0; half /= 2)
            for (int64_t lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
        out[start / BLOCK] = lanes[0];
    }
}

// Integers up to 2^42: float64 sums of 1024 of them are exact.
template <class T>
void integer_squares(const T* x, int64_t* out, int64_t count, int64_t exponent) {
    const double scale = __builtin_ldexp(1.0, static_cast<int>(exponent));
    constexpr int64_t BLOCK = ROWS * COLUMNS;
#pragma omp parallel for if (count > PARALLEL_ELEMENTS)
    for (int64_t start = 0; start < count; start += BLOCK) {
        int64_t stop = start + BLOCK < count ? start + BLOCK : count;
        double lanes[8] = {};
        int64_t i = start;
        for (; i + 8 <= stop; i += 8)
            for (int64_t lane = 0; lane < 8; lane++) lanes[lane] += __builtin_nearbyint(square(wide(x[i + lane])) * scale);
        for (; i < stop; i++) lanes[0] += __builtin_nearbyint(square(wide(x[i])) * scale);
        double sum = 0;
        for (double lane : lanes) sum += lane;
        out[start / BLOCK] = static_cast<int64_t>(sum);
    }
}

}  // namespace

extern "C" void block_squares_f32(const float* x, double* out, int64_t count) { block_squares(x, out, count); }
extern "C" void block_squares_bf16(const bf16* x, double* out, int64_t count) { block_squares(x, out, count); }

extern "C" void integer_squares_f32(const float* x, int64_t* out, int64_t count, int64_t exponent) {
    integer_squares(x, out, count, exponent);
}
extern "C" void integer_squares_bf16(const bf16* x, int64_t* out, int64_t count, int64_t exponent) {
    integer_squares(x, out, count, exponent);
}
