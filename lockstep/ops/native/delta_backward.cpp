// The gradient of the gated delta rule over packed sequences. Each key head of a sequence is computed by one thread,
// chunk by chunk from the last one; gradients of a layer's parameters are summed over sequences in their order.
#include "delta_backward.h"

// Gradients of a layer's tensors; those of rows are rounded to their dtype.
template <class T>
struct Gradients {
    T *mixed, *b, *a;
    float *conv, *log_rates, *step_bias;
};

struct BackwardScratch {
    float* conv;  // [width][own_channels]
    Rows rows;
    Products products;
    HeadMemory of_head;
    float* keys;                              // [key_dim][CHUNK]
    float* decays;                            // [group][CHUNK]
    float* after;                             // [group][key_dim][value_row]
    float *grad_keys, *grad_queries;          // [CHUNK][key_row]
    float *grad_strengths, *grad_log_decays;  // [CHUNK]
    // [CHUNK + width - 1][own_channels]: the gradients of the convolution's outputs; the rows after the chunk's are
    // those of the chunk after it.
    float* outputs;

    BackwardScratch(const Sizes& sizes, Memory& memory)
        : conv(memory.take(sizes.width * sizes.own_channels())),
          rows(sizes, memory),
          products(sizes, memory),
          of_head(sizes, memory) {
        rows.slopes = memory.take(CHUNK * sizes.own_channels());
        rows.norms = memory.take(2 * CHUNK);
        keys = memory.take(sizes.key_dim * CHUNK);
        decays = memory.take(sizes.group() * CHUNK);
        after = memory.take(sizes.group() * sizes.state());
        grad_keys = memory.take(CHUNK * sizes.key_row());
        grad_queries = memory.take(CHUNK * sizes.key_row());
        grad_strengths = memory.take(CHUNK);
        grad_log_decays = memory.take(CHUNK);
        outputs = memory.take((CHUNK + sizes.earlier()) * sizes.own_channels());
    }
};

// A thread's memory, and the head whose weights it has.
template <class T>
struct BackwardWorker : BackwardScratch {
    const Layer<T>& layer;
    HeadWeights<T> weights;
    std::vector<T> nothing;
    std::vector<const T*> before, sources;  // rows of inputs before a sequence, and of a chunk

    explicit BackwardWorker(const Layer<T>& layer)
        : BackwardScratch(in_scratch<BackwardScratch>(layer.sizes)),
          layer(layer),
          weights{conv},
          nothing(layer.sizes.channels()),
          before(layer.sizes.earlier(), nothing.data()),
          sources(CHUNK + layer.sizes.earlier()) {
        of_head.clear_padding(layer.sizes);
        std::fill(after, after + layer.sizes.group() * layer.sizes.state(), 0.f);  // padding is multiplied
    }
};

// One row's channels of one part: the gradients of its inputs, to which the `width` outputs from its own on contribute,
// and of the weights, to which its output's gradient does. taps: the inputs' rows. TAPS: the width if it is known.
template <int TAPS, class T>
static void convolution_row_gradients(const T* const* taps, const float* outputs, const float* weights,
                                      const Sizes& sizes, const Span& span, T* grad_inputs, float* grad_weights) {
    const int64_t width = TAPS ? TAPS : sizes.width, own = sizes.own_channels();
    for (int64_t i = 0; i < span.count; i += LANES) {
        const int64_t place = span.own + i, channel = span.channel + i, count = span.count - i;
        const f32x16 grad = load(outputs + place);
        f32x16 x = {};
        __builtin_prefetch(taps[width - 1] + channel + 3 * sizes.channels());
        __builtin_prefetch(grad_inputs + channel + 3 * sizes.channels(), 1);
#pragma GCC unroll 4
        for (int64_t tap = 0; tap < width; tap++) {
            x = multiply_add(load(weights + tap * own + place), load(outputs + (width - 1 - tap) * own + place), x);
            float* sums = grad_weights + tap * own + place;
            store(sums, multiply_add(grad, load_first(taps[tap] + channel, count), load(sums)));
        }
        store_first(grad_inputs + channel, x, count);
    }
}

// One key head of a sequence: `sums` [width][own_channels], then of rates and of biases [group] each, is its part of
// the parameters' gradients.
template <class T>
struct SequenceHead {
    BackwardWorker<T>& worker;
    const Layer<T>& layer;
    const Sizes& sizes;
    const T* grad_out;
    const float* saved;
    const Gradients<T>& grads;
    int64_t head, start, stop;
    float* sums;

    Inputs<T> inputs() const {
        return {layer.mixed + start * sizes.channels(), worker.before.data(), sizes.channels(), sizes.earlier()};
    }
    // The state of a value head at the boundary before row `begin`, or its rows' gradients of outputs.
    void load_state(int64_t begin, int64_t value_head) const {
        const int64_t boundary = start / CHUNK + begin / CHUNK - 1, dim = sizes.value_dim;
        const float* state = saved + (boundary * sizes.value_heads + value_head) * sizes.key_dim * dim;
        load_rows(state, dim, sizes.key_dim, worker.of_head.before);
    }
    template <class E>
    void load_rows(const E* first, int64_t stride, int64_t count, float* out) const {
        const int64_t dim = sizes.value_dim, row = sizes.value_row();
        for (int64_t r = 0; r < count; r++) {
            std::fill(out + r * row + dim / LANES * LANES, out + (r + 1) * row, 0.f);
            for (int64_t n = 0; n < dim; n += LANES)
                store(out + r * row + n, load_first(first + r * stride + n, dim - n));
        }
    }

    void value_head(int64_t g, int64_t begin, int64_t count, bool has_after) const {
        const int64_t value_head = head * sizes.group() + g, row = sizes.value_row();
        if (begin) load_state(begin, value_head);
        load_rows(grad_out + ((start + begin) * sizes.value_heads + value_head) * sizes.value_dim,
                  sizes.value_heads * sizes.value_dim, count, worker.of_head.grads);
        const ChunkHead chunk{worker.rows, sizes, worker.products, worker.of_head, g, count,
                              worker.decays + g * CHUNK, begin > 0, worker.after + g * sizes.state(), has_after,
                              worker.grad_keys, worker.grad_queries, worker.grad_strengths, worker.grad_log_decays};
        chunk.backward();
        const Span span = span_of(sizes, head, 2 + g);
        for (int64_t t = 0; t < count; t++)
            for (int64_t n = 0; n < padded(sizes.value_dim); n += LANES) {
                const int64_t place = t * sizes.own_channels() + span.own + n;
                store(worker.outputs + place, -load(chunk.taken() + t * row + n) * load(worker.rows.slopes + place));
            }
        step_gradients(g, begin, count);
    }

    // Of b and a, and of the head's rate and bias.
    void step_gradients(int64_t g, int64_t begin, int64_t count) const {
        const int64_t value_head = head * sizes.group() + g;
        const float rate = exp_float(wide(layer.log_rates[value_head])), bias = wide(layer.step_bias[value_head]);
        float *of_rates = sums + sizes.width * sizes.own_channels(), *of_biases = of_rates + sizes.group();
        for (int64_t t = 0; t < count; t += LANES) {
            const int64_t at = (start + begin + t) * sizes.value_heads + value_head;
            const int64_t in_block = std::min(LANES, count - t);
            const f32x16 strength = load(worker.rows.strengths + g * CHUNK + t);
            const f32x16 of_log = load(worker.grad_log_decays + t);
            const f32x16 step = column(layer.a + at, sizes.value_heads, count - t) + bias;
            float of_b[LANES], of_a[LANES];
            store(of_b, load(worker.grad_strengths + t) * strength * (1.f - strength));
            store(of_a, of_log * -rate / (1.f + exp(-step)));
            for (int64_t i = 0; i < in_block; i++) {
                const int64_t place = at + i * sizes.value_heads;
                store_first(grads.b + place, splat(of_b[i]), 1);
                store_first(grads.a + place, splat(of_a[i]), 1);
                of_rates[g] += worker.grad_log_decays[t + i] * worker.rows.log_decays[g * CHUNK + t + i];
                of_biases[g] += of_a[i];
            }
        }
    }

    // Through the norm and the activation of keys (part 0) and queries (part 1).
    void normed_gradients(int64_t part, int64_t count) const {
        const int64_t row = sizes.key_row();
        const float* normed = part ? worker.rows.queries : worker.rows.keys;
        const float* given = part ? worker.grad_queries : worker.grad_keys;
        const float squared_length = part ? 1.f / (float)sizes.key_dim : 1.f;
        for (int64_t t = 0; t < count; t++) {
            const float length = product_of_rows(normed + t * row, given + t * row, padded(sizes.key_dim));
            const float along = length / squared_length;
            const float factor = worker.rows.norms[part * CHUNK + t];
            for (int64_t d = 0; d < padded(sizes.key_dim); d += LANES) {
                const int64_t place = t * sizes.own_channels() + part * padded(sizes.key_dim) + d;
                const f32x16 x = multiply_add(load(normed + t * row + d), -along, load(given + t * row + d)) * factor;
                store(worker.outputs + place, x * load(worker.rows.slopes + place));
            }
        }
    }

    // Through the convolution: `outputs` has the chunk's rows, and the following chunk's first ones.
    void convolution_gradients(int64_t begin, int64_t count) const {
        const int64_t own = sizes.own_channels(), earlier = sizes.earlier();
        for (int64_t i = 0; i < count + earlier; i++) worker.sources[i] = inputs().at(begin - earlier + i);
        const auto one_row = sizes.width == 4 ? convolution_row_gradients<4, T> : convolution_row_gradients<0, T>;
        for (int64_t t = 0; t < count; t++)
            for (int64_t part = 0; part < 2 + sizes.group(); part++)
                one_row(worker.sources.data() + t, worker.outputs + t * own, worker.weights.conv, sizes,
                        span_of(sizes, head, part), grads.mixed + (start + begin + t) * sizes.channels(), sums);
        std::copy(worker.outputs, worker.outputs + earlier * own, worker.outputs + CHUNK * own);
    }

    void run() const {
        const int64_t length = stop - start, own = sizes.own_channels(), key_row = sizes.key_row();
        float* following = worker.outputs + CHUNK * own;
        std::fill(following, following + sizes.earlier() * own, 0.f);
        for (int64_t begin = (length - 1) / CHUNK * CHUNK; begin >= 0; begin -= CHUNK) {
            const int64_t count = std::min(CHUNK, length - begin);
            // Fewer rows than a chunk's are a sequence's last ones: what follows them are zeros.
            std::fill(worker.outputs + count * own, following, 0.f);
            compute_rows(layer, worker.weights, inputs(), start, begin, count, worker.rows);
            append_rows(worker.rows, sizes, {worker.keys, nullptr, 0, worker.decays}, 0, count);
            inner_products(worker.rows, sizes, worker.keys, 0, count, worker.products.inner);
            std::fill(worker.grad_keys, worker.grad_keys + count * key_row, 0.f);
            std::fill(worker.grad_queries, worker.grad_queries + count * key_row, 0.f);
            for (int64_t g = 0; g < sizes.group(); g++) value_head(g, begin, count, begin + count < length);
            for (const int64_t part : {0, 1}) normed_gradients(part, count);
            convolution_gradients(begin, count);
        }
    }
};

template <class T>
static void delta_backward(const Layer<T>& layer, const T* grad_out, const float* saved, const Gradients<T>& grads,
                           const int32_t* starts, int64_t sequences, int64_t rows) {
    const Sizes& sizes = layer.sizes;
    const int64_t heads = sizes.key_heads, own = sizes.own_channels(), group = sizes.group();
    const int64_t floats = padded(sizes.width * own + 2 * group);
    const int64_t end = starts[sequences];
    std::fill(grads.mixed + end * sizes.channels(), grads.mixed + rows * sizes.channels(), T{});
    std::fill(grads.b + end * sizes.value_heads, grads.b + rows * sizes.value_heads, T{});
    std::fill(grads.a + end * sizes.value_heads, grads.a + rows * sizes.value_heads, T{});
    std::vector<float> partial(std::max<int64_t>(1, sequences) * heads * floats, 0.f);
#pragma omp parallel
    {
        BackwardWorker<T> worker(layer);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < sequences * heads; task++) {
            const int64_t head = task / sequences, s = task % sequences;
            worker.weights.take(layer, head);
            if (starts[s] < starts[s + 1])
                SequenceHead<T>{worker, layer, sizes, grad_out, saved, grads, head, starts[s], starts[s + 1],
                                partial.data() + task * floats}
                    .run();
        }
#pragma omp for
        for (int64_t head = 0; head < heads; head++) {
            float* total = partial.data() + head * sequences * floats;
            for (int64_t s = 1; s < sequences; s++) add_sums(total, total + s * floats, floats);
            for (int64_t part = 0; part < 2 + group; part++) {
                const Span span = span_of(sizes, head, part);
                for (int64_t c = 0; c < span.count; c++)
                    for (int64_t tap = 0; tap < sizes.width; tap++)
                        grads.conv[(span.channel + c) * sizes.width + tap] = total[tap * own + span.own + c];
            }
            std::copy(total + sizes.width * own, total + sizes.width * own + group, grads.log_rates + head * group);
            std::copy(total + sizes.width * own + group, total + sizes.width * own + 2 * group,
                      grads.step_bias + head * group);
        }
    }
}

#define EXPORT(T, suffix)                                                                                              \
    extern "C" void delta_backward##suffix(                                                                            \
        const T* grad_out, const T* mixed, const T* b, const T* a, const T* conv, const T* log_rates,                  \
        const T* step_bias, const float* saved, T* grad_mixed, T* grad_b, T* grad_a, float* grad_conv,                 \
        float* grad_log_rates, float* grad_step_bias, const int32_t* starts, int64_t sequences, int64_t rows,          \
        int64_t key_heads, int64_t value_heads, int64_t key_dim, int64_t value_dim, int64_t width) {                   \
        const Sizes sizes{key_heads, value_heads, key_dim, value_dim, width};                                          \
        delta_backward(Layer<T>{mixed, b, a, conv, log_rates, step_bias, sizes}, grad_out, saved,                      \
                       Gradients<T>{grad_mixed, grad_b, grad_a, grad_conv, grad_log_rates, grad_step_bias}, starts,    \
                       sequences, rows);                                                                               \
    }

EXPORT(float, _f32)
EXPORT(bf16, _bf16)
