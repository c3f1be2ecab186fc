// The smooth cap of logits: cap · tanh(x / cap).
#include "replay.h"
#include "vector.h"

// Fewer elements are not worth waking the other threads.
constexpr int64_t PARALLEL_ELEMENTS = 16384;

// tanh x within about two units in the last place (Cephes): x + x³ · P(x²) below 0.625, else from an exponential.
INLINED f32x16 tangent(f32x16 x) {
    const f32x16 zero = {}, square = x * x, size = where_less(x, zero, -x, x);
    f32x16 y = splat(-5.70498872745e-3f);
    y = multiply_add(y, square, 2.06390887954e-2f);
    y = multiply_add(y, square, -5.37397155531e-2f);
    y = multiply_add(y, square, 1.33314422036e-1f);
    y = multiply_add(y, square, -3.33332819422e-1f);
    const f32x16 near_zero = multiply_add(y * square, x, x), far = 1.f - 2.f / (exp(2.f * size) + 1.f);
    return where_less(size, splat(0.625f), near_zero, where_less(x, zero, -far, far));
}

template <class T>
static void softcap(const T* logits, T* out, int64_t count, float cap) {
#pragma omp parallel for if (count > PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < count; i += LANES)
        store_first(out + i, tangent(load_first(logits + i, count - i) / cap) * cap, count - i);
}

template <class T>
static void softcap_backward(const T* grad, const T* capped, T* out, int64_t count, float cap) {
#pragma omp parallel for if (count > PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < count; i += LANES) {
        const f32x16 share = load_first(capped + i, count - i) / cap;
        store_first(out + i, load_first(grad + i, count - i) * multiply_add(-share, share, 1.f), count - i);
    }
}

#define EXPORT(T, suffix)                                                                                           \
    extern "C" void softcap##suffix(const T* logits, T* out, int64_t count, float cap) {                            \
        softcap<T>(logits, out, count, cap);                                                                        \
    }                                                                                                               \
    extern "C" void softcap_backward##suffix(const T* grad, const T* capped, T* out, int64_t count, float cap) {    \
        softcap_backward<T>(grad, capped, out, count, cap);                                                         \
    }                                                                                                               \
    REPLAYABLE(softcap##suffix)

EXPORT(float, _f32)
EXPORT(bf16, _bf16)
