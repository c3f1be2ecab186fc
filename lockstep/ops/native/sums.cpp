// Sums of squares in blocks, in the order of lockstep/ops/sums.py.
#include <cstdint>
#include <cstring>

namespace {

// Work below this many elements is not worth waking the other threads for.
constexpr int64_t PARALLEL_ELEMENTS = 1 << 16;
constexpr int64_t ROWS = 32, LANES = 32;

struct bf16 {
    uint16_t bits;
};

inline double wide(float x) { return x; }
inline double wide(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// The square of a float32 is exact in float64, so a fused sum would have the same bits.
inline double square(double x) { return x * x; }

template <class T>
void block_squares(const T* x, double* out, int64_t count) {
    constexpr int64_t BLOCK = ROWS * LANES;
#pragma omp parallel for if (count > PARALLEL_ELEMENTS)
    for (int64_t start = 0; start < count; start += BLOCK) {
        double lanes[LANES] = {};
        if (count - start >= BLOCK) {
            // Eight lanes at a time, which stay in registers down the rows.
            for (int64_t lane = 0; lane < LANES; lane += 8) {
                double sums[8] = {};
                for (int64_t row = 0; row < ROWS; row++)
                    for (int64_t i = 0; i < 8; i++) sums[i] += square(wide(x[start + row * LANES + lane + i]));
                for (int64_t i = 0; i < 8; i++) lanes[lane + i] = sums[i];
            }
        } else {
            for (int64_t i = 0; i < count - start; i++) lanes[i % LANES] += square(wide(x[start + i]));
        }
        for (int64_t half = LANES / 2; half > 0; half /= 2)
            for (int64_t lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
        out[start / BLOCK] = lanes[0];
    }
}

}  // namespace

extern "C" void block_squares_f32(const float* x, double* out, int64_t count) { block_squares(x, out, count); }
extern "C" void block_squares_bf16(const bf16* x, double* out, int64_t count) { block_squares(x, out, count); }
