// Operators on single rows or elements: norm, rotary embedding, gated activation.
#include <algorithm>
#include <vector>

#include "replay.h"
#include "vector.h"

// Fewer elements are not worth waking the other threads.
constexpr int64_t PARALLEL_ELEMENTS = 16384;

// A norm's factors: the weight, or with OFFSET one more.
template <class T, bool OFFSET>
static inline f32x16 factors(const T* weight, int64_t count) {
    const f32x16 w = load_first(weight, count);
    return OFFSET ? 1.f + w : w;
}

template <class T, bool OFFSET>
static void rms_norm(const T* x, const T* weight, T* out, float* scales, int64_t rows, int64_t dim, float eps) {
#pragma omp parallel for if (rows * dim > PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++) {
        const T* in = x + row * dim;
        f32x16 squares = {};
        for (int64_t i = 0; i < dim; i += LANES) {
            f32x16 v = load_first(in + i, dim - i);
            squares = multiply_add(v, v, squares);
        }
        const float scale = 1.f / std::sqrt(sum(squares) / (float)dim + eps);
        scales[row] = scale;
        for (int64_t i = 0; i < dim; i += LANES) {
            const int64_t n = dim - i;
            store_first(out + row * dim + i, load_first(in + i, n) * scale * factors<T, OFFSET>(weight + i, n), n);
        }
    }
}

// The weight's gradient is a sum over rows: in slabs of this many rows, added in order for any number of threads. Rows
// of zeros at the end, which are padding, do not change it.
constexpr int64_t SLAB_ROWS = 64;

template <class T, bool OFFSET>
static void rms_norm_backward(const T* grad_out, const T* x, const T* weight, const float* scales, T* grad_x,
                              float* grad_weight, int64_t rows, int64_t dim) {
    const int64_t slabs = (rows + SLAB_ROWS - 1) / SLAB_ROWS, padded = (dim + LANES - 1) / LANES * LANES;
    std::vector<float> partial(slabs * padded, 0.f);
#pragma omp parallel for if (rows * dim > PARALLEL_ELEMENTS)
    for (int64_t slab = 0; slab < slabs; slab++) {
        float* weight_sum = partial.data() + slab * padded;
        for (int64_t row = slab * SLAB_ROWS; row < std::min(rows, (slab + 1) * SLAB_ROWS); row++) {
            const T *g = grad_out + row * dim, *in = x + row * dim;
            const float scale = scales[row];
            f32x16 products = {};
            for (int64_t i = 0; i < dim; i += LANES) {
                f32x16 grad = load_first(g + i, dim - i), v = load_first(in + i, dim - i);
                products = multiply_add(grad * factors<T, OFFSET>(weight + i, dim - i), v, products);
                store(weight_sum + i, multiply_add(grad * v, scale, load(weight_sum + i)));
            }
            const float along = sum(products) * scale * scale / (float)dim;
            for (int64_t i = 0; i < dim; i += LANES) {
                f32x16 direct = load_first(g + i, dim - i) * factors<T, OFFSET>(weight + i, dim - i);
                store_first(grad_x + row * dim + i, multiply_add(load_first(in + i, dim - i), -along, direct) * scale, dim - i);
            }
        }
    }
    for (int64_t slab = 0; slab < slabs; slab++)
        for (int64_t i = 0; i < dim; i++) grad_weight[i] += partial[slab * padded + i];
}

template <int64_t step, class T>
static inline f32x16 load_spaced(const T* p, int64_t count) {
    if (step == 1) return load_first(p, count);
    T padded[LANES] = {};
    for (int64_t i = 0; i < std::min(count, LANES); i++) padded[i] = p[i * step];
    return load(padded);
}

template <int64_t step, class T>
static inline void store_spaced(T* p, f32x16 v, int64_t count) {
    if (step == 1) return store_first(p, v, count);
    T padded[LANES];
    store(padded, v);
    for (int64_t i = 0; i < std::min(count, LANES); i++) p[i * step] = padded[i];
}

// Rotates the first 2 · `half` features of each head, and copies the others. `sign` -1 rotates back, for the gradient.
template <class T, bool INTERLEAVED>
static void rotary(const T* x, const float* cosines, const float* sines, T* out, int64_t tokens, int64_t heads,
                   int64_t head_dim, int64_t half, float sign) {
    constexpr int64_t step = INTERLEAVED ? 2 : 1;
    const int64_t partner = INTERLEAVED ? 1 : half;
#pragma omp parallel for if (tokens * heads * head_dim > PARALLEL_ELEMENTS)
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t head = 0; head < heads; head++) {
            const int64_t base = (token * heads + head) * head_dim;
            for (int64_t i = 0; i < half; i += LANES) {
                const int64_t n = half - i;
                f32x16 c = load_first(cosines + token * half + i, n), s = load_first(sines + token * half + i, n) * sign;
                const int64_t a = base + i * step, b = a + partner;
                f32x16 first = load_spaced<step>(x + a, n), second = load_spaced<step>(x + b, n);
                store_spaced<step>(out + a, multiply_add(first, c, -(second * s)), n);
                store_spaced<step>(out + b, multiply_add(second, c, first * s), n);
            }
            std::copy(x + base + 2 * half, x + base + head_dim, out + base + 2 * half);
        }
}

INLINED f32x16 sigmoid(f32x16 x) { return 1.f / (1.f + exp(-x)); }

INLINED f32x16 at_most(f32x16 x, float most) { return where_less(splat(most), x, splat(most), x); }
INLINED f32x16 at_least(f32x16 x, float least) { return where_less(x, splat(least), splat(least), x); }

// An activation is `value` · sigmoid(z), and its slope sigmoid(z) · (1 + `inner` · (1 - sigmoid(z))).
struct Gate {
    f32x16 value, sigmoid, inner;
};

INLINED Gate silu(f32x16 gate) { return {gate, sigmoid(gate), gate}; }

// The tanh form: z = 2 √(2/π) (x + 0.044715 x³). Beyond ±10 the sigmoid is 0 or 1, and x³ would overflow.
INLINED Gate gelu(f32x16 gate) {
    constexpr float LINEAR = 1.5957691216057308f, CUBIC = 0.07135481627260025f, BOUND = 10.f;
    const f32x16 value = at_least(gate, -BOUND), x = at_most(value, BOUND), cubic = CUBIC * (x * x);
    const f32x16 power = exp(x * (cubic + LINEAR));
    return {value, power / (power + 1.f), x * multiply_add(cubic, 3.f, LINEAR)};
}

template <class T, Gate (*activation)(f32x16)>
static void gate_mul(const T* gate, const T* up, T* out, int64_t count) {
#pragma omp parallel for if (count > PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < count; i += LANES) {
        const Gate g = activation(load_first(gate + i, count - i));
        store_first(out + i, g.value * g.sigmoid * load_first(up + i, count - i), count - i);
    }
}

template <class T, Gate (*activation)(f32x16)>
static void gate_mul_backward(const T* grad_out, const T* gate, const T* up, T* grad_gate, T* grad_up, int64_t count) {
#pragma omp parallel for if (count > PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < count; i += LANES) {
        const int64_t n = count - i;
        const f32x16 grad = load_first(grad_out + i, n);
        const Gate g = activation(load_first(gate + i, n));
        store_first(grad_up + i, grad * g.value * g.sigmoid, n);
        const f32x16 slope = multiply_add(g.inner, 1.f - g.sigmoid, 1.f);
        store_first(grad_gate + i, grad * load_first(up + i, n) * g.sigmoid * slope, n);
    }
}

// Gated attention, arXiv 2505.06708.
template <class T>
static void sigmoid_mul(const T* gate, const T* up, T* out, int64_t count) {
#pragma omp parallel for if (count > PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < count; i += LANES)
        store_first(out + i, sigmoid(load_first(gate + i, count - i)) * load_first(up + i, count - i), count - i);
}

template <class T>
static void sigmoid_mul_backward(const T* grad_out, const T* gate, const T* up, T* grad_gate, T* grad_up,
                                 int64_t count) {
#pragma omp parallel for if (count > PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < count; i += LANES) {
        const int64_t n = count - i;
        const f32x16 grad = load_first(grad_out + i, n), s = sigmoid(load_first(gate + i, n));
        store_first(grad_up + i, grad * s, n);
        store_first(grad_gate + i, grad * (load_first(up + i, n) * s * (1.f - s)), n);
    }
}

template <class T>
static void relu_squared(const T* x, T* out, int64_t count) {
#pragma omp parallel for if (count > PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < count; i += LANES) {
        const f32x16 positive = at_least(load_first(x + i, count - i), 0.f);
        store_first(out + i, positive * positive, count - i);
    }
}

template <class T>
static void relu_squared_backward(const T* grad_out, const T* x, T* grad_x, int64_t count) {
#pragma omp parallel for if (count > PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < count; i += LANES) {
        const f32x16 v = load_first(x + i, count - i), grad = load_first(grad_out + i, count - i) * (2.f * v);
        store_first(grad_x + i, where_number(v, where_less(f32x16{}, v, grad, f32x16{})), count - i);
    }
}

template <class T>
static void add(const T* a, const T* b, T* out, int64_t count) {
#pragma omp parallel for if (count > PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < count; i += LANES)
        store_first(out + i, load_first(a + i, count - i) + load_first(b + i, count - i), count - i);
}

// gpt-oss: (up + 1) · gate · sigmoid(1.702 · gate), with gate clamped to 7 and up to [-7, 7].
constexpr float SLOPE = 1.702f, LIMIT = 7.f;

template <class T>
static void clamped_swiglu(const T* gate, const T* up, T* out, int64_t count) {
#pragma omp parallel for if (count > PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < count; i += LANES) {
        f32x16 g = at_most(load_first(gate + i, count - i), LIMIT);
        f32x16 factor = at_least(at_most(load_first(up + i, count - i), LIMIT), -LIMIT);
        store_first(out + i, (factor + 1.f) * (g * sigmoid(SLOPE * g)), count - i);
    }
}

template <class T>
static void clamped_swiglu_backward(const T* grad_out, const T* gate, const T* up, T* grad_gate, T* grad_up,
                                    int64_t count) {
    const f32x16 zero = {};
#pragma omp parallel for if (count > PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < count; i += LANES) {
        const int64_t n = count - i;
        f32x16 grad = load_first(grad_out + i, n), given = load_first(gate + i, n), other = load_first(up + i, n);
        f32x16 g = at_most(given, LIMIT), factor = at_least(at_most(other, LIMIT), -LIMIT), s = sigmoid(SLOPE * g);
        f32x16 slope = (factor + 1.f) * s * multiply_add(SLOPE * g, 1.f - s, 1.f), of_up = grad * g * s;
        store_first(grad_gate + i, where_less(splat(LIMIT), given, zero, grad * slope), n);
        of_up = where_less(splat(LIMIT), other, zero, of_up);
        store_first(grad_up + i, where_less(other, splat(-LIMIT), zero, of_up), n);
    }
}

// Sums over rows, in slabs as in the norm.
template <class T>
static void column_sums(const T* x, float* sums, int64_t rows, int64_t dim) {
    const int64_t slabs = (rows + SLAB_ROWS - 1) / SLAB_ROWS, padded = (dim + LANES - 1) / LANES * LANES;
    std::vector<float> partial(slabs * padded, 0.f);
#pragma omp parallel for if (rows * dim > PARALLEL_ELEMENTS)
    for (int64_t slab = 0; slab < slabs; slab++)
        for (int64_t row = slab * SLAB_ROWS; row < std::min(rows, (slab + 1) * SLAB_ROWS); row++)
            for (int64_t i = 0; i < dim; i += LANES) {
                float* target = partial.data() + slab * padded + i;
                store(target, load(target) + load_first(x + row * dim + i, dim - i));
            }
    for (int64_t slab = 0; slab < slabs; slab++)
        for (int64_t i = 0; i < dim; i++) sums[i] += partial[slab * padded + i];
}

#define EXPORT(T, suffix)                                                                                             \
    extern "C" void rms_norm##suffix(const T* x, const T* weight, T* out, float* scales, int64_t rows, int64_t dim,   \
                                     float eps, int64_t offset) {                                                     \
        const auto kernel = offset ? rms_norm<T, true> : rms_norm<T, false>;                                          \
        kernel(x, weight, out, scales, rows, dim, eps);                                                               \
    }                                                                                                                 \
    extern "C" void rms_norm_backward##suffix(const T* grad_out, const T* x, const T* weight, const float* scales,    \
                                              T* grad_x, float* grad_weight, int64_t rows, int64_t dim,               \
                                              int64_t offset) {                                                       \
        const auto kernel = offset ? rms_norm_backward<T, true> : rms_norm_backward<T, false>;                        \
        kernel(grad_out, x, weight, scales, grad_x, grad_weight, rows, dim);                                          \
    }                                                                                                                 \
    extern "C" void rotary##suffix(const T* x, const float* cosines, const float* sines, T* out, int64_t tokens,      \
                                   int64_t heads, int64_t head_dim, int64_t half, int64_t interleaved, float sign) {  \
        const auto kernel = interleaved ? rotary<T, true> : rotary<T, false>;                                         \
        kernel(x, cosines, sines, out, tokens, heads, head_dim, half, sign);                                          \
    }                                                                                                                 \
    extern "C" void silu_mul##suffix(const T* gate, const T* up, T* out, int64_t count) {                             \
        gate_mul<T, silu>(gate, up, out, count);                                                                      \
    }                                                                                                                 \
    extern "C" void silu_mul_backward##suffix(const T* grad_out, const T* gate, const T* up, T* grad_gate,            \
                                              T* grad_up, int64_t count) {                                            \
        gate_mul_backward<T, silu>(grad_out, gate, up, grad_gate, grad_up, count);                                    \
    }                                                                                                                 \
    extern "C" void gelu_mul##suffix(const T* gate, const T* up, T* out, int64_t count) {                             \
        gate_mul<T, gelu>(gate, up, out, count);                                                                      \
    }                                                                                                                 \
    extern "C" void gelu_mul_backward##suffix(const T* grad_out, const T* gate, const T* up, T* grad_gate,            \
                                              T* grad_up, int64_t count) {                                            \
        gate_mul_backward<T, gelu>(grad_out, gate, up, grad_gate, grad_up, count);                                    \
    }                                                                                                                 \
    extern "C" void sigmoid_mul##suffix(const T* gate, const T* up, T* out, int64_t count) {                          \
        sigmoid_mul<T>(gate, up, out, count);                                                                         \
    }                                                                                                                 \
    extern "C" void sigmoid_mul_backward##suffix(const T* grad_out, const T* gate, const T* up, T* grad_gate,         \
                                                 T* grad_up, int64_t count) {                                         \
        sigmoid_mul_backward<T>(grad_out, gate, up, grad_gate, grad_up, count);                                       \
    }                                                                                                                 \
    extern "C" void relu_squared##suffix(const T* x, T* out, int64_t count) { relu_squared<T>(x, out, count); }       \
    extern "C" void relu_squared_backward##suffix(const T* grad_out, const T* x, T* grad_x, int64_t count) {          \
        relu_squared_backward<T>(grad_out, x, grad_x, count);                                                         \
    }                                                                                                                 \
    extern "C" void clamped_swiglu##suffix(const T* gate, const T* up, T* out, int64_t count) {                       \
        clamped_swiglu<T>(gate, up, out, count);                                                                      \
    }                                                                                                                 \
    extern "C" void clamped_swiglu_backward##suffix(const T* grad_out, const T* gate, const T* up, T* grad_gate,      \
                                                    T* grad_up, int64_t count) {                                      \
        clamped_swiglu_backward<T>(grad_out, gate, up, grad_gate, grad_up, count);                                    \
    }                                                                                                                 \
    extern "C" void column_sums##suffix(const T* x, float* sums, int64_t rows, int64_t dim) {                         \
        column_sums<T>(x, sums, rows, dim);                                                                           \
    }                                                                                                                 \
    extern "C" void add##suffix(const T* a, const T* b, T* out, int64_t count) { add<T>(a, b, out, count); }          \
    REPLAYABLE(rms_norm##suffix)                                                                                      \
    REPLAYABLE(rotary##suffix)                                                                                        \
    REPLAYABLE(silu_mul##suffix)                                                                                      \
    REPLAYABLE(gelu_mul##suffix)                                                                                      \
    REPLAYABLE(sigmoid_mul##suffix)                                                                                   \
    REPLAYABLE(relu_squared##suffix)                                                                                  \
    REPLAYABLE(clamped_swiglu##suffix)                                                                                \
    REPLAYABLE(add##suffix)

EXPORT(float, _f32)
EXPORT(bf16, _bf16)
