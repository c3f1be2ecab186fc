// One step of AdamW, with the operations of lockstep/ops/optimizer.py: each is rounded separately (-ffp-contract=off),
// so vectors of any width give the same bits.
#include "vector.h"

namespace {

// Fewer elements are not worth waking the other threads.
constexpr int64_t PARALLEL_ELEMENTS = 1 << 16;
// Elements per piece of a thread, so that the compiler sees plain inner loops.
constexpr int64_t PIECE = 4096;

inline void narrow(float x, float& out) { out = x; }
// Rounds to nearest, ties to even; preserves NaN.
inline void narrow(float x, bf16& out) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    out.bits = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
}

// One thread's piece. `weight`, if not null, gets the rounded new master.
template <class T, class G, bool WEIGHT>
void adamw_piece(float* __restrict master, bf16* __restrict weight, const G* __restrict grad, T* __restrict mean,
                 T* __restrict square, int64_t start, int64_t stop, float scale, float decay, float beta1, float rest1,
                 float beta2, float rest2, float step_size, float inverse_root, float epsilon) {
    for (int64_t i = start; i < stop; i++) {
        const float g = wide(grad[i]) * scale;
        const float m = wide(mean[i]) * beta1 + g * rest1;
        const float v = wide(square[i]) * beta2 + g * rest2 * g;
        narrow(m, mean[i]);
        narrow(v, square[i]);
        const float deviation = std::sqrt(v) * inverse_root + epsilon;
        const float updated = master[i] * decay - m * step_size / deviation;
        master[i] = updated;
        if (WEIGHT) narrow(updated, weight[i]);
    }
}

template <class T, class G>
void adamw(float* master, bf16* weight, const G* grad, T* mean, T* square, int64_t count, float scale, float decay,
           float beta1, float rest1, float beta2, float rest2, float step_size, float inverse_root, float epsilon) {
#pragma omp parallel for if (count > PARALLEL_ELEMENTS)
    for (int64_t start = 0; start < count; start += PIECE) {
        const int64_t stop = start + PIECE < count ? start + PIECE : count;
        const auto piece = weight ? adamw_piece<T, G, true> : adamw_piece<T, G, false>;
        piece(master, weight, grad, mean, square, start, stop, scale, decay, beta1, rest1, beta2, rest2, step_size,
              inverse_root, epsilon);
    }
}

}  // namespace

#define EXPORT(name, T, G, suffix)                                                                                     \
    extern "C" void name##suffix(float* master, bf16* weight, const G* grad, T* mean, T* square, int64_t count,        \
                                 float scale, float decay, float beta1, float rest1, float beta2, float rest2,         \
                                 float step_size, float inverse_root, float epsilon) {                                 \
        adamw(master, weight, grad, mean, square, count, scale, decay, beta1, rest1, beta2, rest2, step_size,          \
              inverse_root, epsilon);                                                                                  \
    }

EXPORT(adamw, float, float, _f32)
EXPORT(adamw, bf16, float, _bf16)
EXPORT(adamw_narrow_grad, float, bf16, _f32)
EXPORT(adamw_narrow_grad, bf16, bf16, _bf16)
