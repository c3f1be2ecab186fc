// Attention over keys and values in pages.
//
// Every query row sees its keys in blocks of BLOCK, aligned to position 0, in ascending order, with the running
// maximum and sum in float32. Each element of a product is summed over its inner index in ascending order with one
// accumulator, so the grouping of rows, sequences or pages does not change a bit.
#include "block_products.h"
#include "cache_codes.h"
#include "panels.h"
#include "replay.h"

// Declared as in omp.h, which not every compiler has.
extern "C" int omp_get_max_threads();

// values [PAGE][dim] of a page whose keys are also the values: non-finite ones, written as NaN, are read as zero.
template <class T>
static void turn_page(const T* keys, int64_t dim, T* values) {
    for (int64_t d = 0; d < dim; d += LANES) {
        f32x16 columns[LANES];
        for (int64_t i = 0; i < LANES; i++) {
            columns[i] = load(keys + (d + i) * PAGE);
            columns[i] = where_less(columns[i], splat(INFINITY), columns[i], splat(0.f));
        }
        for (int part = 0; part < PARTS; part++) {
            f32x16 rows[WIDTH];
            for (int other = 0; other < PARTS; other++) {
                words block[WIDTH];
                for (int i = 0; i < WIDTH; i++) block[i] = (words)columns[other * WIDTH + i].parts[part];
                transpose(block);
                for (int i = 0; i < WIDTH; i++) rows[i].parts[other] = (floats)block[i];
            }
            for (int i = 0; i < WIDTH; i++) store(values + (part * WIDTH + i) * dim + d, rows[i]);
        }
    }
}

// One block of the running softmax for one row, which sees the block's first `keys` keys except the first `hidden`:
// turns scores into weights and rescales the sums.
static inline void softmax_block(float* scores, int64_t hidden, int64_t keys, float scale, float& highest, float& total,
                                 float* row, int64_t head_dim) {
    // The row's window begins in a later block than that of the tile's first row: the block has no effect.
    if (hidden >= keys) return std::fill(scores, scores + BLOCK, 0.f);
    f32x16 s[BLOCK / LANES], top = splat(LOWEST);
    for (int i = 0; i < BLOCK / LANES; i++) {
        s[i] = keep_first(load(scores + i * LANES) * scale, keys - i * LANES, LOWEST);
        s[i] = drop_first(s[i], hidden - i * LANES, LOWEST);
        top = maximum(top, s[i]);
    }
    const float next = std::max(highest, maximum(top));
    const float shrink = highest == LOWEST ? 0.f : exp_float(highest - next);
    for (int i = 0; i < BLOCK / LANES; i++) {
        s[i] = exp(s[i] - splat(next));
        store(scores + i * LANES, s[i]);
    }
    total = total * shrink + sum((s[0] + s[1]) + (s[2] + s[3]));
    highest = next;
    if (shrink != 1.f)
        for (int64_t d = 0; d < head_dim; d += LANES) store(row + d, load(row + d) * shrink);
}

// A layer's pages: of numbers of the model's dtype, or of codes; without values if these are the keys.
template <class T>
struct Pages {
    const T *keys, *values;
    const int8_t *key_codes, *value_codes;
    const int32_t* table;
    int64_t width;
    // Numbers of a block that products do not read in place.
    int64_t copied(int64_t dim) const { return key_codes || !values ? 2 * BLOCK * dim : 0; }
};

// The pages of a sequence's block of `count` keys from `start` on. `copies` has room for the pages' keys and values.
template <class T>
static BlockPages<T> block_of(const Pages<T>& pages, int64_t sequence, int64_t start, int64_t count, int64_t kv_head,
                              const Shape& shape, T* copies) {
    const int64_t dim = shape.head_dim;
    BlockPages<T> block{{}, {}, count};
    for (int64_t p = 0; p < BLOCK / PAGE; p++) {
        const bool in_use = p * PAGE < count;
        const int64_t index = start / PAGE + (in_use ? p : 0);
        const int64_t page = pages.table[sequence * pages.width + index] * shape.kv_heads + kv_head;
        T *keys = copies + (in_use ? p : 0) * 2 * PAGE * dim, *values = keys + PAGE * dim;
        if (pages.key_codes) {
            if (in_use)
                widen_page(pages.key_codes + page * (dim + SCALES) * PAGE, pages.value_codes + page * dim * PAGE, dim,
                           keys, values);
            block.keys[p] = keys, block.values[p] = values;
            continue;
        }
        block.keys[p] = pages.keys + page * dim * PAGE;
        block.values[p] = pages.values ? pages.values + page * dim * PAGE : values;
        if (!pages.values && in_use) turn_page(block.keys[p], dim, values);
    }
    return block;
}

template <class T, class Products>
static void attend_tile(const T* q, T* out, float* log_sums, const Pages<T>& pages, const Tile& tile, int64_t kv_head,
                        int64_t first_position, const Shape& shape, const Terms& terms) {
    const int64_t dim = shape.head_dim, rows = tile.tokens * shape.group();
    static thread_local std::vector<float> scratch;
    const int64_t padded = Products::padded_rows(rows);
    scratch.resize(padded * (dim + BLOCK) + 2 * rows + Products::scratch(rows, dim));
    float* sums = scratch.data();
    float* scores = sums + padded * dim;
    float* highest = scores + padded * BLOCK;
    float* totals = highest + rows;
    Products products(q, tile, kv_head, shape, totals + rows);
    static thread_local std::vector<T> copies;
    copies.resize(pages.copied(dim));
    std::fill(sums, sums + rows * dim, 0.f);
    std::fill(highest, highest + rows, LOWEST);
    std::fill(totals, totals + rows, 0.f);
    // The sink is a key before all others, whose value is zero.
    for (int64_t r = 0; terms.sinks && r < rows; r++)
        highest[r] = terms.sinks[kv_head * shape.group() + r % shape.group()], totals[r] = 1.f;

    const int64_t length = first_position + tile.tokens;  // keys that the last row sees
    const int64_t first = std::max<int64_t>(0, terms.hidden(first_position, 0)) / BLOCK * BLOCK;
    for (int64_t start = first; start < length; start += BLOCK) {
        const int64_t count = std::min(BLOCK, length - start);
        const BlockPages<T> block = block_of(pages, tile.sequence, start, count, kv_head, shape, copies.data());
        // Rows at the tile's start that see nothing of this block are skipped.
        const int64_t from = std::max<int64_t>(0, start - first_position) * shape.group(), left = rows - from;
        float* score = scores + from * BLOCK;
        products.scores(block, from, left, score);
        for (int64_t r = from; r < rows; r++) {
            const int64_t position = first_position + r / shape.group(), hidden = terms.hidden(position, start);
            softmax_block(scores + r * BLOCK, hidden, std::min(block.count, position + 1 - start), terms.scale,
                          highest[r], totals[r], sums + r * dim, dim);
        }
        products.add_values(block, left, score, sums + from * dim);
    }
    for (int64_t r = 0; r < rows; r++) {
        const int64_t row = (tile.token + r / shape.group()) * shape.heads + kv_head * shape.group() + r % shape.group();
        const float inverse = 1.f / totals[r];
        for (int64_t d = 0; d < dim; d += LANES) store(out + row * dim + d, load(sums + r * dim + d) * inverse);
        log_sums[row] = highest[r] + log_float(totals[r]);
    }
}

// The products of attention with heads of this size.
template <class T>
static auto attend_tile_of(int64_t) {
    return attend_tile<T, BlockProducts<T>>;
}
#ifdef LOCKSTEP_TILES
template <>
auto attend_tile_of<bf16>(int64_t head_dim) {
    return WholeUnits::divide(head_dim) ? attend_tile<bf16, BlockTiles> : attend_tile<bf16, BlockProducts<bf16>>;
}
#endif

template <class T>
static void attend(const T* q, T* out, float* log_sums, const Pages<T>& pages, const int32_t* query_starts,
                   const int32_t* context_lengths, int64_t sequences, const Shape& shape, const Terms& terms) {
    const int64_t kv_heads = shape.kv_heads;
    const std::vector<Tile> tiles = tiles_of(query_starts, sequences, shape.group());
    const auto one_tile = attend_tile_of<T>(shape.head_dim);
    // A decode step has many small tasks: if each were scheduled separately, threads would wait for the shared counter.
    const int64_t tasks = (int64_t)tiles.size() * kv_heads;
    const int64_t at_once = std::clamp<int64_t>(tasks / (8 * omp_get_max_threads()), 1, 4);
#pragma omp parallel for schedule(dynamic, at_once) collapse(2)
    for (size_t i = 0; i < tiles.size(); i++)
        for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++) {
            const Tile& tile = tiles[i];
            const int64_t before = context_lengths[tile.sequence] - query_starts[tile.sequence + 1];
            one_tile(q, out, log_sums, pages, tile, kv_head, tile.token + before, shape, terms);
        }
}

// P: the element of a page. After it, the first four fields of `Pages`.
#define EXPORT_ATTEND(name, T, P, ...)                                                                                 \
    extern "C" void name(const T* q, T* out, float* log_sums, const P* key_pages, const P* value_pages,                \
                         const int32_t* table, const int32_t* query_starts, const int32_t* context_lengths,            \
                         int64_t sequences, int64_t width, int64_t heads, int64_t kv_heads, int64_t head_dim,          \
                         float scale, int64_t window, const float* sinks) {                                            \
        attend<T>(q, out, log_sums, {__VA_ARGS__, table, width}, query_starts, context_lengths, sequences,             \
                  {heads, kv_heads, head_dim}, Terms{scale, window, sinks});                                           \
    }                                                                                                                  \
    REPLAYABLE(name)

#define EXPORT(T, suffix)                                                                        \
    EXPORT_ATTEND(attend##suffix, T, T, key_pages, value_pages, nullptr, nullptr)                \
    EXPORT_ATTEND(attend_codes##suffix, T, int8_t, nullptr, nullptr, key_pages, value_pages)

EXPORT(float, _f32)
EXPORT(bf16, _bf16)
