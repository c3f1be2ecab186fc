// Shared by the kernels of the gated delta rule: a layer's sizes, and what the recurrence reads of its rows.
#pragma once
#include <algorithm>

#include "panels.h"
#include "tiling.h"

constexpr int64_t CHUNK = 64;  // rows between two states
constexpr float EPS = 1e-6f;   // added to the squared length of queries and keys

static inline int64_t padded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }
// Floats from one row of scratch memory to the next: an odd number of cache lines, so that the rows of a matrix are
// spread over all sets of a cache.
static inline int64_t row_stride(int64_t count) { return padded(count) | LANES; }

struct Sizes {
    int64_t key_heads, value_heads, key_dim, value_dim, width;
    int64_t group() const { return value_heads / key_heads; }
    int64_t earlier() const { return width - 1; }
    int64_t channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
    int64_t key_row() const { return row_stride(key_dim); }
    int64_t value_row() const { return row_stride(value_dim); }
    // A state in scratch memory, of one value head.
    int64_t state() const { return key_dim * value_row(); }
    // The channels of one key head, in its order: keys, queries and each head of values, each padded.
    int64_t own_channels() const { return 2 * padded(key_dim) + group() * padded(value_dim); }
};

// A layer's tensors, and the outputs or what the gradient is of.
template <class T>
struct Layer {
    const T *mixed, *b, *a, *conv, *log_rates, *step_bias;
    Sizes sizes;
};

// Consecutive channels of a key head: in the tensors, and in the head's own order.
struct Span {
    int64_t channel, own, count;
};

// Part 0: keys; 1: queries; from 2 on: values of each head.
static inline Span span_of(const Sizes& sizes, int64_t head, int64_t part) {
    const int64_t dim = sizes.key_dim, values = sizes.value_dim;
    if (part < 2) return {(part == 0 ? sizes.key_heads + head : head) * dim, part * padded(dim), dim};
    const int64_t value_head = head * sizes.group() + part - 2;
    return {2 * sizes.key_heads * dim + value_head * values, 2 * padded(dim) + (part - 2) * padded(values), values};
}

// The convolution's inputs of consecutive rows: those from row 0 on, and those before it.
template <class T>
struct Inputs {
    const T* rows;
    const T* const* before;
    int64_t channels, earlier;
    // Inlined into a loop, GCC 12 would read `before` for every row, also beyond its end: it merges a masked load into
    // a blend.
    __attribute__((noinline)) const T* at(int64_t row) const {
        return row < 0 ? before[row + earlier] : rows + row * channels;
    }
};

// Divides a thread's scratch memory; without any, only counts what is needed.
struct Memory {
    float* first;
    int64_t used = 0;
    float* take(int64_t count) {
        float* taken = first ? first + used : nullptr;
        used += padded(count);
        return taken;
    }
};

// Parts, which divide memory, in that of this thread.
template <class Parts>
static Parts in_scratch(const Sizes& sizes) {
    Memory counted{nullptr};
    (void)Parts(sizes, counted);
    Memory memory{scratch<float>(counted.used, 0)};
    return Parts(sizes, memory);
}

// What the recurrence reads of a chunk's rows: of one key head and its value heads.
struct Rows {
    float *keys, *queries;          // [rows][key_row]; the queries follow the last key
    float* values;                  // [group][CHUNK][value_row]
    float *strengths, *log_decays;  // [group][CHUNK]
    // For gradients only, else null: the slope of each channel's activation [rows][own_channels], and the factors by
    // which keys and queries were normed [2][CHUNK].
    float *slopes, *norms;

    Rows(const Sizes& sizes, Memory& memory) : slopes(nullptr), norms(nullptr) {
        keys = queries = memory.take(2 * CHUNK * sizes.key_row());
        values = memory.take(sizes.group() * CHUNK * sizes.value_row());
        strengths = memory.take(sizes.group() * CHUNK);
        log_decays = memory.take(sizes.group() * CHUNK);
    }
};

// One key head's parameters, wide and in its order.
template <class T>
struct HeadWeights {
    float* conv;  // [width][own_channels]
    int64_t head = -1;

    void take(const Layer<T>& layer, int64_t other) {
        if (head == other) return;
        head = other;
        const int64_t own = layer.sizes.own_channels(), width = layer.sizes.width;
        std::fill(conv, conv + width * own, 0.f);
        for (int64_t part = 0; part < 2 + layer.sizes.group(); part++) {
            const Span span = span_of(layer.sizes, head, part);
            const T* weights = layer.conv + span.channel * width;
            for (int64_t c = 0; c < span.count; c++)
                for (int64_t tap = 0; tap < width; tap++)
                    conv[tap * own + span.own + c] = wide(weights[c * width + tap]);
        }
    }
};

// ln x for 1 ≤ x ≤ 2, as `log_float`.
INLINED f32x16 log_up_to_2(f32x16 x) {
    const f32x16 root = splat(1.41421354f), e = where_less(x, root, f32x16{}, splat(1.f));
    const f32x16 t = where_less(x, root, x, x * 0.5f) - 1.f, z = t * t;
    f32x16 y = splat(7.0376836292e-2f);
    for (const float next : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                             -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
        y = multiply_add(y, t, next);
    y = multiply_add(e, -2.12194440e-4f, t * z * y);
    y = multiply_add(z, -0.5f, y);
    return multiply_add(e, 0.693359375f, t + y);
}

INLINED f32x16 softplus(f32x16 x) {
    const f32x16 zero = {}, size = where_less(x, zero, -x, x);
    return where_less(x, zero, zero, x) + log_up_to_2(1.f + exp(-size));
}

// Up to 16 rows of one column, whose rows are `stride` apart; zeros after them.
template <class T>
static inline f32x16 column(const T* first, int64_t stride, int64_t count) {
    float lanes[LANES] = {};
    for (int64_t i = 0; i < std::min(count, LANES); i++) lanes[i] = wide(first[i * stride]);
    return load(lanes);
}

static inline float product_of_rows(const float* x, const float* y, int64_t count) {
    f32x16 products = {};
    for (int64_t i = 0; i < count; i += LANES) products = multiply_add(load(x + i), load(y + i), products);
    return sum(products);
}

// Scales a row to length `length`; returns the factor.
static inline float norm_row(float* x, int64_t dim, float length) {
    const float factor = 1.f / std::sqrt(product_of_rows(x, x, dim) + EPS);
    for (int64_t i = 0; i < dim; i += LANES) store(x + i, load(x + i) * factor * length);
    return factor * length;
}

// Rows are too far from each other for the processor to prefetch them: the next few are fetched, and, into the second
// cache, those of the next chunk.
template <class T>
static inline void prefetch_rows(const T* row, int64_t stride, bool has_next) {
    if (has_next) __builtin_prefetch(row + CHUNK * stride, 0, 2);
    __builtin_prefetch(row + 3 * stride);
}

// Up to 16 channels of a row: a chain over the taps, the oldest first, then silu. TAPS: the width if it is known.
template <int TAPS, class T>
static inline void convolve(const T* const* taps, const float* weights, const Sizes& sizes, int64_t channel,
                            int64_t count, float* out, float* slopes) {
    f32x16 x = {};
    const int64_t width = TAPS ? TAPS : sizes.width, own = sizes.own_channels();
    prefetch_rows(taps[width - 1] + channel, sizes.channels(), slopes == nullptr);  // gradients go backward
#pragma GCC unroll 4
    for (int64_t tap = 0; tap < width; tap++)
        x = multiply_add(load_first(taps[tap] + channel, count), load(weights + tap * own), x);
    const f32x16 whole = 1.f + exp(-x);
    store(out, x / whole);
    if (slopes == nullptr) return;
    const f32x16 sigmoid = 1.f / whole;
    store(slopes, sigmoid * multiply_add(x, 1.f - sigmoid, 1.f));
}

// A row's channels of one part. taps: the inputs' rows.
template <int TAPS, class T>
static void convolve_row(const T* const* taps, const float* weights, const Sizes& sizes, const Span& span, float* out,
                         float* slopes) {
    int64_t i = 0;
    for (; i + LANES <= span.count; i += LANES)
        convolve<TAPS>(taps, weights + span.own + i, sizes, span.channel + i, LANES, out + i,
                       slopes ? slopes + span.own + i : nullptr);
    if (i < span.count)
        convolve<TAPS>(taps, weights + span.own + i, sizes, span.channel + i, span.count - i, out + i,
                       slopes ? slopes + span.own + i : nullptr);
}

// Computes `count` rows from row `begin` of the inputs on; `first` is the tensors' row of their row 0.
template <class T>
static void compute_rows(const Layer<T>& layer, const HeadWeights<T>& weights, const Inputs<T>& inputs, int64_t first,
                         int64_t begin, int64_t count, Rows& rows) {
    const Sizes& sizes = layer.sizes;
    const int64_t head = weights.head, group = sizes.group();
    static thread_local std::vector<const T*> taps;
    taps.resize(sizes.width);
    rows.queries = rows.keys + count * sizes.key_row();
    const auto one_part = sizes.width == 4 ? convolve_row<4, T> : convolve_row<0, T>;
    const float query_length = (float)(1.0 / std::sqrt((double)sizes.key_dim));
    for (int64_t t = 0; t < count; t++) {
        for (int64_t tap = 0; tap < sizes.width; tap++) taps[tap] = inputs.at(begin + t - sizes.earlier() + tap);
        float* slopes = rows.slopes ? rows.slopes + t * sizes.own_channels() : nullptr;
        for (int64_t part = 0; part < 2 + group; part++) {
            const bool is_value = part >= 2;
            float* out = is_value ? rows.values + ((part - 2) * CHUNK + t) * sizes.value_row()
                                  : rows.keys + (part * count + t) * sizes.key_row();
            one_part(taps.data(), weights.conv, sizes, span_of(sizes, head, part), out, slopes);
            if (is_value) continue;
            const float factor = norm_row(out, sizes.key_dim, part ? query_length : 1.f);
            if (rows.norms) rows.norms[part * CHUNK + t] = factor;
        }
    }
    for (int64_t g = 0; g < group; g++) {
        const int64_t value_head = head * group + g;
        const float rate = exp_float(wide(layer.log_rates[value_head])), bias = wide(layer.step_bias[value_head]);
        for (int64_t t = 0; t < count; t += LANES) {
            const int64_t at = (first + begin + t) * sizes.value_heads + value_head;
            const f32x16 b = column(layer.b + at, sizes.value_heads, count - t);
            const f32x16 a = column(layer.a + at, sizes.value_heads, count - t);
            store(rows.strengths + g * CHUNK + t, 1.f / (1.f + exp(-b)));
            store(rows.log_decays + g * CHUNK + t, softplus(a + bias) * -rate);
        }
    }
}
