// The gradient of attention in bfloat16, with pair instructions or in the matrix unit. The weights and the gradients of
// the scores are rounded to bfloat16 before they are multiplied, as in flash attention; every sum is float32.
#pragma once
#include "attention_pieces.h"
#include "pairs.h"
#include "unit.h"

#ifdef LOCKSTEP_PAIRS
// A block's products with pair instructions.
struct BlockPairs {
    static constexpr int64_t ROWS = 2, COLUMNS_AT_ONCE = LANES;  // rows and keys are padded to multiples

    // sums [rows][columns] (+)= left [rows][pairs] · right [pairs][columns]; the rows of sums have the right factor's
    // stride.
    template <bool ADD>
    void product(const void* left, int64_t left_pairs, const __m512i* right, int64_t width, float* sums, int64_t rows,
                 int64_t pairs, int64_t columns) const {
        pair_product<ADD>({(const int32_t*)left, left_pairs, 1}, right, width / LANES, sums, width, rows, pairs, columns);
    }

    // The same with a transposed left factor, [pairs][BLOCK].
    void add_across(const __m512i* left, const __m512i* right, int64_t width, float* sums, int64_t rows,
                    int64_t pairs) const {
        pair_product<true>({(const int32_t*)left, 1, BLOCK}, right, width / LANES, sums, width, rows, pairs, width);
    }
};

#ifdef LOCKSTEP_TILES
struct BlockUnits {
    static constexpr int64_t ROWS = 2 * UNIT_STEPS, COLUMNS_AT_ONCE = 2 * UNIT_ROWS;
    const WholeUnits unit;

    template <bool ADD>
    void product(const void* left, int64_t left_pairs, const __m512i* right, int64_t width, float* sums, int64_t rows,
                 int64_t pairs, int64_t columns) const {
        unit.product<ADD>(rows_of(left, left_pairs), rows_of(right, width), sums, width, rows, pairs, columns);
    }

    void add_across(const __m512i* left, const __m512i* right, int64_t width, float* sums, int64_t rows,
                    int64_t pairs) const {
        static thread_local std::vector<word> scratch;
        scratch.resize(BLOCK * pairs);
        word* turned = scratch.data();  // [key][pair]
        const int64_t read = (rows + UNIT_ROWS - 1) / UNIT_ROWS * UNIT_ROWS;
        for (int64_t p = 0; p < pairs; p += WIDTH)
            for (int64_t j = 0; j < read; j += WIDTH) {
                words block[WIDTH];
                for (int i = 0; i < WIDTH; i++)
                    std::memcpy(&block[i], (const word*)left + (p + i) * BLOCK + j, sizeof(words));
                transpose(block);
                for (int i = 0; i < WIDTH; i++) std::memcpy(turned + (j + i) * pairs + p, &block[i], sizeof(words));
            }
        unit.product<true>(rows_of(turned, pairs), rows_of(right, width), sums, width, rows, pairs, width);
    }
};
#endif

// One block of keys, and the query rows that see it, one tile at a time.
template <class Products>
class BlockGradient {
    const Products products{};
    const int64_t dim, group, kv_head;
    const Shape& shape;
    const Terms& terms;
    __m512i *keys_across, *values_across, *key_pairs;      // pairs along [dim / 2][BLOCK]; [BLOCK / 2][dim]
    __m512i *query_pairs, *grad_pairs;                     // [rows / 2][dim]
    __m512i *weight_pairs, *grad_score_pairs;              // [rows / 2][BLOCK]
    bf16 *keys, *values, *queries, *grads, *grad_scores;   // [BLOCK][dim], [rows][dim], [rows][BLOCK]
    float *key_sums, *value_sums, *query_sums;             // [BLOCK][dim], [rows][dim]
    float *scores, *grad_weights;                          // [rows][BLOCK]

   public:
    BlockGradient(const Shape& shape, int64_t kv_head, const Terms& terms)
        : dim(shape.head_dim), group(shape.group()), kv_head(kv_head), shape(shape), terms(terms) {
        const int64_t rows = filled(std::max<int64_t>(1, TILE / group) * group);
        static thread_local std::vector<float> scratch;
        scratch.resize(9 * BLOCK * dim / 2 + 3 * rows * dim + 7 * rows * BLOCK / 2 + LANES);
        float* next = (float*)(((uintptr_t)scratch.data() + 63) / 64 * 64);
        const auto take = [&](auto*& array, int64_t floats) {
            array = (std::remove_reference_t<decltype(array)>)next;
            next += floats;
        };
        for (auto** pairs : {&keys_across, &values_across, &key_pairs}) take(*pairs, BLOCK * dim / 2);
        for (auto** pairs : {&query_pairs, &grad_pairs}) take(*pairs, rows * dim / 2);
        for (auto** pairs : {&weight_pairs, &grad_score_pairs}) take(*pairs, rows * BLOCK / 2);
        for (auto** block : {&keys, &values}) take(*block, BLOCK * dim / 2);
        for (auto** tile : {&queries, &grads}) take(*tile, rows * dim / 2);
        take(grad_scores, rows * BLOCK / 2);
        for (auto** sums : {&key_sums, &value_sums}) take(*sums, BLOCK * dim);
        take(query_sums, rows * dim);
        for (auto** products : {&scores, &grad_weights}) take(*products, rows * BLOCK);
    }

    // `count` keys, starting at row `first` of k.
    void begin(const bf16* k, const bf16* v, int64_t first, int64_t count) {
        std::fill(key_sums, key_sums + 2 * BLOCK * dim, 0.f);
        load_block(k, first, count, keys, (int32_t*)keys_across);
        load_block(v, first, count, values, (int32_t*)values_across);
        pair_up(keys, BLOCK, key_pairs);
    }

    // Adds the contribution of the rows of `tile`. Its first token sees the first `seen` keys of the block, its last
    // token the first `most`; the first `hidden` are before its first token's window.
    void add(const bf16* grad_out, const bf16* q, const float* log_sums, const float* deltas, float* grad_q,
             const Tile& tile, int64_t hidden, int64_t seen, int64_t most) {
        constexpr int64_t AT_ONCE = Products::COLUMNS_AT_ONCE;
        const int64_t rows = tile.tokens * group, columns = (most + AT_ONCE - 1) / AT_ONCE * AT_ONCE;
        const int64_t row_pairs = filled(rows) / 2, wide = BLOCK / LANES;
        load_tile(q, tile, queries, query_pairs);
        load_tile(grad_out, tile, grads, grad_pairs);
        products.template product<false>(queries, dim / 2, keys_across, BLOCK, scores, rows, dim / 2, columns);
        products.template product<false>(grads, dim / 2, values_across, BLOCK, grad_weights, rows, dim / 2, columns);
        for (int64_t r = 0; r < filled(rows); r += 2) {
            f32x16 weight[2] = {}, grad[2] = {};
            for (int64_t j = 0; j < columns; j += LANES) {
                for (int64_t i = 0; i < 2 && r + i < rows; i++) {
                    const int64_t token = (r + i) / group, place = (r + i) * BLOCK + j;
                    const int64_t row = (tile.token + token) * shape.heads + kv_head * group + (r + i) % group;
                    const f32x16 score = multiply_add(load(scores + place), terms.scale, -log_sums[row]);
                    const f32x16 kept = keep_first(score, std::min(seen + token, most) - j, LOWEST);
                    weight[i] = exp(drop_first(kept, hidden + token - j, LOWEST));
                    grad[i] = weight[i] * (load(grad_weights + place) - deltas[row]) * terms.scale;
                }
                store_pairs(weight, weight_pairs + r / 2 * wide + j / LANES);
                const __m512i both = store_pairs(grad, grad_score_pairs + r / 2 * wide + j / LANES);
                _mm256_storeu_si256((__m256i*)(grad_scores + r * BLOCK + j), _mm512_castsi512_si256(both));
                _mm256_storeu_si256((__m256i*)(grad_scores + (r + 1) * BLOCK + j), _mm512_extracti64x4_epi64(both, 1));
            }
        }
        products.add_across(weight_pairs, grad_pairs, dim, value_sums, most, row_pairs);
        products.add_across(grad_score_pairs, query_pairs, dim, key_sums, most, row_pairs);
        products.template product<false>(grad_scores, BLOCK / 2, key_pairs, dim, query_sums, rows, columns / 2, dim);
        for (int64_t t = 0; t < tile.tokens; t++) {
            float* target = grad_q + ((tile.token + t) * shape.heads + kv_head * group) * dim;
            const float* sums = query_sums + t * group * dim;
            for (int64_t d = 0; d < group * dim; d += LANES) store(target + d, load(target + d) + load(sums + d));
        }
    }

    template <class G>
    void end(G* grad_k, G* grad_v, int64_t first, int64_t count) const {
        for (int64_t j = 0; j < count; j++) {
            const int64_t row = ((first + j) * shape.kv_heads + kv_head) * dim;
            for (int64_t d = 0; d < dim; d += LANES) {
                store(grad_k + row + d, load(key_sums + j * dim + d));
                store(grad_v + row + d, load(value_sums + j * dim + d));
            }
        }
    }

   private:
    static int64_t filled(int64_t rows) { return (rows + Products::ROWS - 1) / Products::ROWS * Products::ROWS; }

    void load_block(const bf16* x, int64_t first, int64_t count, bf16* rows, int32_t* across) const {
        for (int64_t j = 0; j < count; j++)
            std::memcpy(rows + j * dim, x + ((first + j) * shape.kv_heads + kv_head) * dim, dim * sizeof(bf16));
        std::memset((void*)(rows + count * dim), 0, (BLOCK - count) * dim * sizeof(bf16));
        for (int64_t j = 0; j < BLOCK; j++)
            for (int64_t d = 0; d < dim / 2; d++) std::memcpy(across + d * BLOCK + j, rows + j * dim + 2 * d, 4);
    }

    void load_tile(const bf16* x, const Tile& tile, bf16* rows, __m512i* pairs) const {
        for (int64_t t = 0; t < tile.tokens; t++)
            std::memcpy(rows + t * group * dim, x + ((tile.token + t) * shape.heads + kv_head * group) * dim,
                        group * dim * sizeof(bf16));
        const int64_t count = tile.tokens * group;
        std::memset((void*)(rows + count * dim), 0, (filled(count) - count) * dim * sizeof(bf16));
        pair_up(rows, filled(count), pairs);
    }

    void pair_up(const bf16* rows, int64_t count, __m512i* pairs) const {
        for (int64_t r = 0; r < count; r += 2)
            for (int64_t d = 0; d < dim; d += LANES)
                *pairs++ = (__m512i)interleaved(rows + r * dim + d, rows + (r + 1) * dim + d);
    }

    // Two rows interleaved and rounded; returns them one after the other.
    static __m512i store_pairs(const f32x16 (&rows)[2], __m512i* pairs) {
        const __m512i both = (__m512i)narrowed(rows[0], rows[1]);
        *pairs = (__m512i)interleaved(both);
        return both;
    }
};

template <class Products, class G>
static void backward_blocks(const bf16* grad_out, const bf16* q, const bf16* k, const bf16* v, const float* log_sums,
                          const float* deltas, float* grad_q, G* grad_k, G* grad_v, const Sequence& sequence,
                          const Pieces& pieces, int64_t kv_head, const Shape& shape, const Terms& terms) {
    BlockGradient<Products> block(shape, kv_head, terms);
    for (int64_t start = 0; start < sequence.length; start += BLOCK) {
        const int64_t count = std::min(BLOCK, sequence.length - start);
        block.begin(k, v, sequence.first + start, count);
        for (Tile tile : sequence.tiles) {
            const int64_t position = pieces.position(tile);
            const int64_t unseeing = std::max<int64_t>(0, start - position);  // tokens before the block
            // The windows of further tokens begin after the block.
            tile.tokens = std::min(tile.tokens, count - terms.hidden(position, start));
            if (unseeing >= tile.tokens) continue;
            tile.token += unseeing;
            tile.tokens -= unseeing;
            const int64_t seen = position + unseeing - start + 1, most = std::min(count, seen + tile.tokens - 1);
            const int64_t hidden = terms.hidden(position + unseeing, start);
            block.add(grad_out, q, log_sums, deltas, grad_q, tile, hidden, seen, most);
        }
        block.end(grad_k, grad_v, sequence.first + start, count);
    }
}

// The bfloat16 version of the generic form.
template <class G>
static void backward_head(const bf16* grad_out, const bf16* q, const bf16* k, const bf16* v, const float* log_sums,
                          const float* deltas, float* grad_q, G* grad_k, G* grad_v, const Sequence& sequence,
                          const Pieces& pieces, int64_t kv_head, const Shape& shape, const Terms& terms) {
#ifdef LOCKSTEP_TILES
    if (WholeUnits::divide(shape.head_dim))
        return backward_blocks<BlockUnits>(grad_out, q, k, v, log_sums, deltas, grad_q, grad_k, grad_v, sequence,
                                           pieces, kv_head, shape, terms);
#endif
    backward_blocks<BlockPairs>(grad_out, q, k, v, log_sums, deltas, grad_q, grad_k, grad_v, sequence, pieces, kv_head,
                                shape, terms);
}
#endif
