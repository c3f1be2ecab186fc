// The gradient of attention over packed sequences, in float32; in bfloat16 with pair instructions if available.
#include "attention_backward_pairs.h"

// The gradient for one sequence's keys and one key-value head. The weights are recomputed block by block from the
// saved log-sums (arXiv 2205.14135). grad_q is float32; all gradients are zero on entry.
template <class T, class G>
static void backward_head(const T* grad_out, const T* q, const T* k, const T* v, const float* log_sums,
                          const float* deltas, float* grad_q, G* grad_k, G* grad_v, const Sequence& sequence,
                          const Pieces& pieces, int64_t kv_head, const Shape& shape, const Terms& terms) {
    const int64_t first = sequence.first, length = sequence.length;
    const int64_t dim = shape.head_dim, group = shape.group();
    const int64_t tile_rows = std::max<int64_t>(1, TILE / group) * group;
    static thread_local std::vector<float> scratch;
    scratch.resize(5 * BLOCK * dim + BLOCK * dim + 3 * tile_rows * dim + 2 * tile_rows * BLOCK);
    float* keys = scratch.data();
    float* keys_across = keys + BLOCK * dim;
    float* values_across = keys_across + BLOCK * dim;
    float* key_sums = values_across + BLOCK * dim;
    float* value_sums = key_sums + BLOCK * dim;
    float* values = value_sums + BLOCK * dim;
    float* queries = values + BLOCK * dim;
    float* grads = queries + tile_rows * dim;
    float* query_sums = grads + tile_rows * dim;
    float* weights = query_sums + tile_rows * dim;
    float* grad_scores = weights + tile_rows * BLOCK;

    for (int64_t start = 0; start < length; start += BLOCK) {
        const int64_t count = std::min(BLOCK, length - start), columns = (count + LANES - 1) / LANES * LANES;
        std::fill(keys, keys + 6 * BLOCK * dim, 0.f);
        for (int64_t j = 0; j < count; j++) {
            const int64_t row = ((first + start + j) * shape.kv_heads + kv_head) * dim;
            widen(k + row, keys + j * dim, dim);
            widen(v + row, values + j * dim, dim);
        }
        for (int64_t j = 0; j < count; j++)
            for (int64_t d = 0; d < dim; d++) {
                keys_across[d * BLOCK + j] = keys[j * dim + d];
                values_across[d * BLOCK + j] = values[j * dim + d];
            }
        for (const Tile& tile : sequence.tiles) {
            const int64_t position = pieces.position(tile), rows = tile.tokens * group;
            if (position + tile.tokens <= start || terms.hidden(position, start) >= count) continue;
            load_rows(q, tile, kv_head, shape, queries);
            load_rows(grad_out, tile, kv_head, shape, grads);
            std::fill(weights, weights + 2 * tile_rows * BLOCK, 0.f);
            add_product(queries, dim, 1, keys_across, BLOCK, weights, BLOCK, rows, dim, columns);
            add_product(grads, dim, 1, values_across, BLOCK, grad_scores, BLOCK, rows, dim, columns);
            for (int64_t r = 0; r < rows; r++) {
                const int64_t row = (tile.token + r / group) * shape.heads + kv_head * group + r % group;
                const int64_t own = position + r / group, seen = std::min(count, own + 1 - start);
                const int64_t hidden = terms.hidden(own, start);
                for (int64_t j = 0; j < columns; j += LANES) {
                    float *weight = weights + r * BLOCK + j, *grad = grad_scores + r * BLOCK + j;
                    f32x16 score = multiply_add(load(weight), terms.scale, -log_sums[row]);
                    f32x16 p = exp(drop_first(keep_first(score, seen - j, LOWEST), hidden - j, LOWEST));
                    store(weight, p);
                    store(grad, p * (load(grad) - deltas[row]) * terms.scale);
                }
            }
            add_product(weights, 1, BLOCK, grads, dim, value_sums, dim, count, rows, dim);
            add_product(grad_scores, 1, BLOCK, queries, dim, key_sums, dim, count, rows, dim);
            std::fill(query_sums, query_sums + rows * dim, 0.f);
            add_product(grad_scores, BLOCK, 1, keys, dim, query_sums, dim, rows, count, dim);
            for (int64_t r = 0; r < rows; r++) {
                const int64_t row = (tile.token + r / group) * shape.heads + kv_head * group + r % group;
                float* target = grad_q + row * dim;
                for (int64_t d = 0; d < dim; d += LANES) store(target + d, load(target + d) + load(query_sums + r * dim + d));
            }
        }
        for (int64_t j = 0; j < count; j++) {
            const int64_t row = ((first + start + j) * shape.kv_heads + kv_head) * dim;
            for (int64_t d = 0; d < dim; d += LANES) {
                store(grad_k + row + d, load(key_sums + j * dim + d));
                store(grad_v + row + d, load(value_sums + j * dim + d));
            }
        }
    }
}

template <class T>
static float row_product(const T* grad_out, const T* out, int64_t head_dim) {
    f32x16 products = {};
    for (int64_t d = 0; d < head_dim; d += LANES)
        products = multiply_add(load_first(grad_out + d, head_dim - d), load_first(out + d, head_dim - d), products);
    return sum(products);
}

template <class T, class G>
static void attend_backward(const T* grad_out, const T* q, const T* k, const T* v, const T* out, const float* log_sums,
                            float* grad_q, G* grad_k, G* grad_v, const Pieces& pieces, int64_t heads,
                            int64_t kv_heads, int64_t head_dim, const Terms& terms) {
    const Shape shape{heads, kv_heads, head_dim};
    const int64_t rows = pieces.starts[pieces.count] * heads;
    std::vector<float> deltas(rows);
#pragma omp parallel for
    for (int64_t row = 0; row < rows; row++)
        deltas[row] = row_product(grad_out + row * head_dim, out + row * head_dim, head_dim);
    const std::vector<Sequence> sequences = sequences_of(pieces, shape.group());
#pragma omp parallel for schedule(dynamic, 1) collapse(2)
    for (size_t s = 0; s < sequences.size(); s++)
        for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++)
            backward_head(grad_out, q, k, v, log_sums, deltas.data(), grad_q, grad_k, grad_v, sequences[s], pieces,
                          kv_head, shape, terms);
}

// The gradient of each sink: Σ over rows of -weight · (gradient of the output · output), since a sink only reduces the
// other weights. In slabs of this many rows, added in order for any number of threads.
constexpr int64_t SLAB_ROWS = 64;

template <class T>
static void sink_gradient(const T* grad_out, const T* out, const float* log_sums, const float* sinks, float* grad_sinks,
                          int64_t rows, int64_t heads, int64_t head_dim) {
    const int64_t slabs = (rows + SLAB_ROWS - 1) / SLAB_ROWS;
    std::vector<float> partial(slabs * heads, 0.f);
#pragma omp parallel for
    for (int64_t slab = 0; slab < slabs; slab++)
        for (int64_t row = slab * SLAB_ROWS; row < std::min(rows, (slab + 1) * SLAB_ROWS); row++)
            for (int64_t head = 0; head < heads; head++) {
                const int64_t line = row * heads + head;
                const float delta = row_product(grad_out + line * head_dim, out + line * head_dim, head_dim);
                partial[slab * heads + head] -= exp_float(sinks[head] - log_sums[line]) * delta;
            }
    for (int64_t slab = 0; slab < slabs; slab++)
        for (int64_t head = 0; head < heads; head++) grad_sinks[head] += partial[slab * heads + head];
}

// G: the type of the keys' and values' gradients: float32 if several ranks' are added.
#define EXPORT(T, G, name)                                                                                           \
    extern "C" void name(const T* grad_out, const T* q, const T* k, const T* v, const T* out, const float* log_sums,  \
                         float* grad_q, G* grad_k, G* grad_v, const int32_t* starts, const int32_t* contexts,         \
                         const int32_t* first_keys, int64_t pieces, int64_t heads, int64_t kv_heads,                  \
                         int64_t head_dim, float scale, int64_t window) {                                             \
        attend_backward<T, G>(grad_out, q, k, v, out, log_sums, grad_q, grad_k, grad_v,                               \
                              Pieces{starts, contexts, first_keys, pieces}, heads, kv_heads, head_dim,                \
                              Terms{scale, window, nullptr});                                                         \
    }

EXPORT(float, float, attend_backward_f32)
EXPORT(bf16, bf16, attend_backward_bf16)
EXPORT(float, float, attend_backward_wide_f32)
EXPORT(bf16, float, attend_backward_wide_bf16)

#define EXPORT_SINKS(T, suffix)                                                                                       \
    extern "C" void sink_gradient##suffix(const T* grad_out, const T* out, const float* log_sums, const float* sinks, \
                                          float* grad_sinks, int64_t rows, int64_t heads, int64_t head_dim) {         \
        sink_gradient<T>(grad_out, out, log_sums, sinks, grad_sinks, rows, heads, head_dim);                          \
    }

EXPORT_SINKS(float, _f32)
EXPORT_SINKS(bf16, _bf16)
