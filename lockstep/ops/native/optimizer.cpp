// One step of AdamW, in the operations of lockstep/ops/optimizer.py: each is rounded by itself (-ffp-contract=off), so
// vectors of any width give the same bits.
#include "vector.h"

namespace {

// Work below this many elements is not worth waking the other threads for.
constexpr int64_t PARALLEL_ELEMENTS = 1 << 16;
// Elements of a thread's piece, so that a compiler sees plain loops inside.
constexpr int64_t PIECE = 4096;

inline void narrow(float x, float& out) { out = x; }
// To nearest, ties to even; NaN stays NaN.
inline void narrow(float x, bf16& out) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    out.bits = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
}

template <class T>
void adamw(float* __restrict master, const float* __restrict grad, T* __restrict mean, T* __restrict square,
           int64_t count, float decay, float beta1, float rest1, float beta2, float rest2, float step_size,
           float inverse_root, float epsilon) {
#pragma omp parallel for if (count > PARALLEL_ELEMENTS)
    for (int64_t start = 0; start < count; start += PIECE) {
        const int64_t stop = start + PIECE < count ? start + PIECE : count;
        for (int64_t i = start; i < stop; i++) {
            const float g = grad[i];
            const float m = wide(mean[i]) * beta1 + g * rest1;
            const float v = wide(square[i]) * beta2 + g * rest2 * g;
            narrow(m, mean[i]);
            narrow(v, square[i]);
            const float deviation = std::sqrt(v) * inverse_root + epsilon;
            master[i] = master[i] * decay - m * step_size / deviation;
        }
    }
}

}  // namespace

#define EXPORT(T, suffix)                                                                                              \
    extern "C" void adamw##suffix(float* master, const float* grad, T* mean, T* square, int64_t count, float decay,    \
                                  float beta1, float rest1, float beta2, float rest2, float step_size,                 \
                                  float inverse_root, float epsilon) {                                                 \
        adamw(master, grad, mean, square, count, decay, beta1, rest1, beta2, rest2, step_size, inverse_root, epsilon); \
    }

EXPORT(float, _f32)
EXPORT(bf16, _bf16)
