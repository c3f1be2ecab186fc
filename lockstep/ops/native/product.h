// The matrix product. Each element of the result is one chain of fused multiply-adds over ascending k, from zero; the
// lanes of a vector are different outputs. So neither the number of rows, nor tiles, threads or the vector width can
// change a bit. With several chunks of k, each is a separate chain, and their sums are joined in a binary tree: ranks
// that each have some of the chunks join them in the same tree. In bfloat16 the factors are widened exactly; with pair
// instructions (LOCKSTEP_PAIRS) a chain adds two products per step, and with a matrix unit (`product_tiles.h`) 32: each
// gives different bits (`arithmetic`).
#pragma once
#include <type_traits>

#include "product_tiles.h"
#include "tiling.h"

// Declared as in omp.h, which not every compiler has.
extern "C" int omp_get_max_threads();
extern "C" int omp_get_num_threads();
extern "C" int omp_get_thread_num();

constexpr int64_t STEPS = 384;                           // in a block of k: a panel's part stays in the L1 cache
constexpr int64_t BLOCK_TILES = WIDTH == 16 ? 12 : 30;   // whose part of x stays in the L2 cache
constexpr int64_t GROUP = 16;                            // panels whose sums are in memory at a time
constexpr int64_t SPLIT_WORK = 1 << 18;                  // with fewer multiply-adds, waking threads costs more
constexpr int64_t OWN_WORDS = 1 << 15;  // up to which each thread packs x for itself: waiting for others takes longer
constexpr int64_t OWN_ROWS = 256;    // per thread, from which each thread has separate rows and packs w for itself
constexpr int64_t FEW_OWN_ROWS = 80;  // the same for few panels, where no thread then waits for another,
constexpr int64_t OWN_PANELS = 1 << 21;  // and most words of them for all threads: they stay in the last-level cache
constexpr int64_t TILES_TOGETHER = 8, STEPS_TOGETHER = 16;  // packed together, contiguous in memory

// A step of a chain, or each half of it: extracts the operands from a word of the left factor and from a vector of
// words of the right one, and adds their products to a sum.
template <class T>
struct Chain;
template <>
struct Chain<float> {
    static constexpr int HALVES = 1;
    typedef floats Right, Sum;
    static words left(words x, int) { return x; }
    static Right right(words w, int) { return (floats)w; }
    static floats add(word x, Right w, floats sum) {
        float factor;
        std::memcpy(&factor, &x, sizeof factor);
        return multiply_add(splat_part(factor), w, sum);
    }
};
#if defined(LOCKSTEP_PAIRS) && !defined(LOCKSTEP_TILES)
template <>
struct Chain<bf16> {
    static constexpr int HALVES = 1;
    typedef __m512bh Right;
    typedef floats Sum;
    static words left(words x, int) { return x; }
    static Right right(words w, int) { return (__m512bh)w; }
    static floats add(word x, Right w, floats sum) {
        return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int32_t)x), w);
    }
};
#else
template <>
struct Chain<bf16> : Chain<float> {
    static constexpr int HALVES = 2;
    static words left(words x, int half) { return half ? x & 0xffff0000u : x << 16; }
    static Right right(words w, int half) { return (floats)left(w, half); }
};
#endif

// Rows of a tile: as many as there are registers for besides the vectors of a panel.
template <class T>
constexpr int TILE_ROWS = WIDTH == 16 ? (Chain<T>::HALVES == 1 ? 14 : 12) : FUSED ? (Chain<T>::HALVES == 1 ? 6 : 5) : 2;

// What a tile prefetches into the L2 cache while it is multiplied, `bytes` per step and panel: its part of the next
// panels if those are packed in advance, else the next tile of x.
struct Ahead {
    const char* at;
    int64_t bytes;
};

// sums [panel][ROWS][COLUMNS] (+)= x [step][half][ROWS] · panels [step][COLUMNS], which are `stride` words apart.
// Sums that are integers have their bits in floats.
template <class T, int ROWS, int PANELS, bool FETCH>
static void tile(const word* x, const word* panels, int64_t stride, int64_t steps, bool begin,
                 float* sums, int64_t sums_stride, Ahead ahead) {
    constexpr int VECTORS = COLUMNS / WIDTH;
    typedef typename Chain<T>::Sum Sum;
    Sum s[PANELS][VECTORS][ROWS];
    const auto place = [&](int p, int v, int r) { return sums + p * sums_stride + r * COLUMNS + v * WIDTH; };
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++)
                if (begin)
                    s[p][v][r] = Sum{};
                else
                    std::memcpy(&s[p][v][r], place(p, v, r), sizeof(Sum));
#pragma GCC unroll(FUSED ? 4 : 1)
    for (int64_t k = 0; k < steps; k++) {
        if constexpr (FETCH) {
#pragma GCC unroll 4
            for (int p = 0; p < PANELS; p++) __builtin_prefetch(ahead.at + p * stride * sizeof(word), 0, 2);
            ahead.at += ahead.bytes;
        }
#pragma GCC unroll 2
        for (int half = 0; half < Chain<T>::HALVES; half++, x += ROWS) {
            // Prevents the compiler from loading both halves' vectors at once, for which there are no registers.
            if (Chain<T>::HALVES > 1) asm volatile("" : "+r"(x), "+r"(panels));
#pragma GCC unroll 4
            for (int p = 0; p < PANELS; p++) {
                typename Chain<T>::Right w[VECTORS];
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) {
                    words panel;
                    std::memcpy(&panel, panels + p * stride + k * COLUMNS + v * WIDTH, sizeof panel);
                    w[v] = Chain<T>::right(panel, half);
                }
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
                    for (int v = 0; v < VECTORS; v++) s[p][v][r] = Chain<T>::add(x[r], w[v], s[p][v][r]);
            }
        }
    }
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) std::memcpy(place(p, v, r), &s[p][v][r], sizeof(Sum));
}

// Few rows leave registers for several panels, whose chains hide each other's latency.
template <class T>
constexpr int panels_at_once(int rows) {
    return rows == 1 ? 4 : rows <= TILE_ROWS<T> / 2 ? 2 : 1;
}

template <class T, bool FETCH, int ROWS = TILE_ROWS<T>>
static void tile_of(int64_t rows, const word* x, const word* panels, int64_t count, int64_t stride,
                    int64_t steps, bool begin, float* sums, int64_t sums_stride, Ahead ahead) {
    if constexpr (ROWS > 1)
        if (rows < ROWS)
            return tile_of<T, FETCH, ROWS - 1>(rows, x, panels, count, stride, steps, begin, sums, sums_stride, ahead);
    constexpr int PANELS = panels_at_once<T>(ROWS);
    constexpr bool fetch = FETCH && ROWS > 1;  // a single row is limited by memory bandwidth
    if (count == PANELS) return tile<T, ROWS, PANELS, fetch>(x, panels, stride, steps, begin, sums, sums_stride, ahead);
    for (int64_t p = 0; p < count; p++, panels += stride, sums += sums_stride)
        tile<T, ROWS, 1, fetch>(x, panels, stride, steps, begin, sums, sums_stride, ahead);
}

// Steps along k that are multiplied at once, all in one chunk.
struct Block {
    int64_t from, count, chunk;
    bool first, last;  // block of its chunk
};

struct Blocks {
    int64_t steps, chunks, in_chunk, count;  // `steps` of a chunk
    Blocks(int64_t all, int64_t chunks)
        : steps(all / chunks), chunks(chunks), in_chunk((steps + STEPS - 1) / STEPS), count(chunks * in_chunk) {}
    Block operator[](int64_t i) const {
        const int64_t chunk = i / in_chunk, place = i % in_chunk, from = place * STEPS;
        return {chunk * steps + from, std::min(STEPS, steps - from), chunk, place == 0, place == in_chunk - 1};
    }
};

// `put` writes the sums of T.
template <class T, class Put>
struct Product {
    static constexpr int64_t HALVES = Chain<T>::HALVES;
    static constexpr int VECTORS = (TILE_ROWS<T> + WIDTH - 1) / WIDTH;  // for a tile's rows
    const Matrix<T>& x;
    const Matrix<T>& w;
    const word* packed;  // all panels of w, or none
    const Put put;
    const Tiling tiling;
    const int64_t steps, panels;
    const Blocks blocks;

    Product(const Matrix<T>& x, const Matrix<T>& w, const word* packed, const Put& put, int64_t chunks)
        : x(x), w(w), packed(packed), put(put), tiling(x.rows, TILE_ROWS<T>), steps(x.steps()),
          panels((w.rows + COLUMNS - 1) / COLUMNS), blocks(steps, chunks) {}

    // Packed rows of x from `top` on: [block of k][tile][step][half][row of the tile]; one block at a time if `rows`
    // is 0.
    struct Left {
        word* at;
        int64_t top, rows;
        word* tile(int64_t start, const Block& block) const {
            return at + (block.from * rows + (start - top) * block.count) * HALVES;
        }
    };

    // Packs steps [k, stop) of a block of x. Not inlined into `run`, whose loop would lack registers: products of few
    // rows would take 1.05 to 1.1 times as long.
    [[gnu::noinline]] void pack_left(const Left& left, int64_t tile, const Block& block, int64_t k, int64_t stop) const {
        const int64_t start = tiling.start(tile), rows = tiling.start(tile + 1) - start;
        const int64_t from = block.from, count = block.count;
        word* target = left.tile(start, block);
        const auto put_step = [&](int64_t k, const auto& column) {
#pragma GCC unroll 2
            for (int half = 0; half < HALVES; half++)
                for (int64_t r = 0; r < rows; r += WIDTH) {
                    const words part = Chain<T>::left(column(r), half);
                    std::memcpy(target + (k * HALVES + half) * rows + r, &part, sizeof part);
                }
        };
        // A tile's rows are not a multiple of the vector: the next half or step overwrites the excess of the last one.
        const int64_t whole = std::min({stop, count - (WIDTH + rows - 1) / rows, x.depth / STEP<T> - from});
        if (x.inner == 1) {
            const T* at[VECTORS * WIDTH];
            for (int64_t r = 0; r < VECTORS * WIDTH; r++)
                at[r] = x.at + (start + std::min(r, rows - 1)) * x.row + from * STEP<T>;
            for (; k + WIDTH <= whole; k += WIDTH) {
                words columns[VECTORS][WIDTH];
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) {
#pragma GCC unroll 16
                    for (int r = 0; r < WIDTH; r++) columns[v][r] = words_of_row(at[v * WIDTH + r] + k * STEP<T>);
                    transpose(columns[v]);
                }
#pragma GCC unroll 16
                for (int i = 0; i < WIDTH; i++) put_step(k + i, [&](int64_t r) { return columns[r / WIDTH][i]; });
            }
        } else if constexpr (STEP<T> <= 2) {
            for (; x.row == 1 && start + VECTORS * WIDTH <= x.rows && k < whole; k++) {
                const T* row = x.at + start + (from + k) * STEP<T> * x.inner;
                put_step(k, [&](int64_t r) { return words_at(row + r, row + r + x.inner); });
            }
        }
        for (; k < stop; k++)
            for (int half = 0; half < HALVES; half++)
                for (int64_t r = 0; r < rows; r++)
                    target[(k * HALVES + half) * rows + r] = Chain<T>::left(words{} + x(start + r, from + k), half)[0];
    }

    // In a matrix whose rows are contiguous (a weight's gradient has two), several tiles or panels are packed together,
    // a few steps at a time: a single one would read a cache line per step, and again for the next one.
    void pack_tiles(const Left& left, int64_t first, int64_t last, const Block& block) const {
        const int64_t at_once = x.row == 1 ? STEPS_TOGETHER : block.count;
        for (int64_t k = 0; k < block.count; k += at_once)
            for (int64_t t = first; t < last; t++) pack_left(left, t, block, k, std::min(block.count, k + at_once));
    }

    void pack_panels(int64_t panel, int64_t count, word* right) const {
        const int64_t at_once = w.row == 1 ? STEPS_TOGETHER : steps;
        for (int64_t k = 0; k < steps; k += at_once)
            for (int64_t p = 0; p < count; p++)
                pack_panel(w, (panel + p) * COLUMNS, k, std::min(at_once, steps - k), right + (p * steps + k) * COLUMNS);
    }

    // Tiles [first, last) with the panels of one group, which may be packed already (`ready`); `next`: what this thread
    // is likely to read after them.
    void group(const Left& left, int64_t first, int64_t last, int64_t panel, int64_t count, const word* ready,
               const word* next) const {
        if (!ready && last - first > BLOCK_TILES) {
            word* whole = scratch<word>(count * steps * COLUMNS, 0);
            pack_panels(panel, count, whole);
            ready = whole;
        }
        for (int64_t from = first; from < last; from += BLOCK_TILES) {
            const int64_t to = std::min(last, from + BLOCK_TILES);
            const int64_t top = tiling.start(from), rows = tiling.start(to) - top;
            // The chunks before this one are complete subtrees, one for each bit set in its index.
            const int64_t size = count * rows * COLUMNS, levels = 64 - __builtin_clzll(blocks.chunks);
            float* sums = scratch<float>(levels * size, 1);
            for (int64_t i = 0; i < blocks.count; i++) {
                const Block block = blocks[i];
                float* own = sums + __builtin_popcountll(block.chunk) * size;
                // After the group's last panel: the next part of its first one, or the next group's.
                const word* after = packed && i + 1 < blocks.count ? ready + blocks[i + 1].from * COLUMNS : next;
                if (!left.rows) pack_tiles(left, from, to, block);
                multiply(left, from, to, panel, count, ready, after, block, own, size);
            }
        }
    }

    // `sums`: of the block's chunk; those of earlier subtrees precede it, `size` floats apart.
    // `after`: what is read after these panels.
    void multiply(const Left& left, int64_t from, int64_t to, int64_t panel, int64_t count, const word* ready,
                  const word* after, const Block& block, float* sums, int64_t size) const {
        const int64_t top = tiling.start(from), rows = tiling.start(to) - top;
        const int64_t at_once = std::min<int64_t>(count, panels_at_once<T>(tiling.start(from + 1) - top));
        for (int64_t p = 0; p < count; p += at_once) {
            const int64_t now = std::min(at_once, count - p);
            const word* right = ready ? ready + (p * steps + block.from) * COLUMNS : nullptr;
            int64_t stride = steps * COLUMNS;
            if (!right) {
                word* here = scratch<word>(now * STEPS * COLUMNS, 2);
                for (int64_t i = 0; i < now; i++)
                    pack_panel(w, (panel + p + i) * COLUMNS, block.from, block.count, here + i * STEPS * COLUMNS);
                right = here, stride = STEPS * COLUMNS;
            }
            const int64_t bytes = COLUMNS * (int64_t)sizeof(word) / (to - from);
            const word* next = p + now < count ? right + now * stride : after;
            for (int64_t t = from; t < to; t++) {
                const int64_t start = tiling.start(t), height = tiling.start(t + 1) - start;
                float* here = sums + (p * rows + start - top) * COLUMNS;
                Ahead ahead{};
                if (packed && next)
                    ahead = {(const char*)next + (t - from) * block.count * bytes, bytes};
                else if (!packed && p == 0 && t + 1 < to && blocks.count > 1)  // a single block is streamed
                    ahead = {(const char*)left.tile(start + height, block), height * HALVES * (int64_t)sizeof(word)};
                const auto multiply_tile = [&](auto fetch) {
                    tile_of<T, fetch.value>(height, left.tile(start, block), right, now, stride, block.count, block.first,
                                            here, rows * COLUMNS, ahead);
                };
                ahead.at ? multiply_tile(std::true_type{}) : multiply_tile(std::false_type{});
                for (int64_t i = 0; block.last && i < now; i++)
                    end_chunk(block.chunk, here + i * rows * COLUMNS, size, start, height, panel + p + i);
            }
        }
    }

    // Joins the tile's sums of a chunk with those of the subtrees that it completes.
    void end_chunk(int64_t chunk, float* sums, int64_t size, int64_t top, int64_t rows, int64_t panel) const {
        for (int64_t subtree = chunk; subtree & 1; subtree >>= 1, sums -= size) add_sums(sums - size, sums, rows * COLUMNS);
        if (chunk == blocks.chunks - 1) put(sums, top, rows, panel);
    }

    // What one thread packs and another reads is moved between cores, which takes several times as long between
    // chiplets. So with enough rows, each thread has separate rows and packs w for itself: only a thread that has
    // finished its rows reads x packed by another.
    void run(bool split) const {
        const int64_t threads = split ? omp_get_max_threads() : 1, rows_each = x.rows / threads;
        const int64_t words = threads * panels * steps * COLUMNS;
        if (!packed && panels <= GROUP && tiling.count > BLOCK_TILES)
            return by_rows(split, rows_each >= FEW_OWN_ROWS && words <= OWN_PANELS);
        by_panels(split, !packed && rows_each >= OWN_ROWS);
    }

    // For few panels and many rows: all panels are packed, then each thread takes some rows, packs a block of them and
    // multiplies it with all panels. So x passes through the caches once, not once per group.
    void by_rows(bool split, bool own) const {
        word* shared = own ? nullptr : scratch<word>(panels * steps * COLUMNS, 0);
#pragma omp parallel if (split)
        {
            const int64_t threads = omp_get_num_threads();
            if (shared) {
#pragma omp for schedule(static)
                for (int64_t i = 0; i < threads; i++) {
                    const int64_t first = panels * i / threads;
                    pack_panels(first, panels * (i + 1) / threads - first, shared + first * steps * COLUMNS);
                }
            }
            word* ready = shared;
            const int64_t least = std::max(threads * 4, (tiling.count + BLOCK_TILES - 1) / BLOCK_TILES);
            const int64_t parts = std::min(tiling.count, (least + threads - 1) / threads * threads);
#pragma omp for schedule(dynamic, 1) nowait
            for (int64_t part = 0; part < parts; part++) {
                if (!ready) pack_panels(0, panels, ready = scratch<word>(panels * steps * COLUMNS, 0));
                const int64_t first = tiling.count * part / parts, last = tiling.count * (part + 1) / parts;
                const int64_t top = tiling.start(first), rows = tiling.start(last) - top;
                const Left left{scratch<word>(rows * STEPS * HALVES, 3), top, 0};
                group(left, first, last, 0, panels, ready, nullptr);
            }
        }
    }

    // Each thread takes some panels, with all rows of x or with its rows.
    void by_panels(bool split, bool own) const {
        const int64_t size = x.rows * steps * HALVES;
        word* shared = size > OWN_WORDS ? scratch<word>(size, 3) : nullptr;
        std::vector<int64_t> taken(tiling.count);  // groups taken of each part; at most as many parts as tiles
#pragma omp parallel if (split)
        {
            const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
            // If a thread shares its core with another process, other threads take its groups.
            const int64_t groups = std::min(panels, std::max(threads * 4, (panels + GROUP - 1) / GROUP));
            // Rows are divided if each thread has separate ones, and if there are too few panels for all threads.
            const int64_t parts = own ? threads : std::min(tiling.count, std::max<int64_t>(1, threads / groups));
            const auto first_tile = [&](int64_t part) { return tiling.count * part / parts; };
            const Left left{shared ? shared : scratch<word>(size, 3), 0, x.rows};
            if (!shared) {
                for (int64_t block = 0; block < blocks.count; block++) pack_tiles(left, 0, tiling.count, blocks[block]);
            } else if (own) {
                for (int64_t block = 0; block < blocks.count; block++)
                    pack_tiles(left, first_tile(thread), first_tile(thread + 1), blocks[block]);
#pragma omp barrier
            } else {
#pragma omp for collapse(2) schedule(static)
                for (int64_t first = 0; first < tiling.count; first += TILES_TOGETHER)
                    for (int64_t block = 0; block < blocks.count; block++)
                        pack_tiles(left, first, std::min(tiling.count, first + TILES_TOGETHER), blocks[block]);
            }
            for (int64_t i = 0; i < parts; i++) {
                const int64_t part = (thread + i) % parts;
                for (;;) {
                    int64_t g;
#pragma omp atomic capture
                    g = taken[part]++;
                    if (g >= groups) break;
                    const int64_t first = panels * g / groups;
                    const int64_t following = panels * std::min(g + threads, groups - 1) / groups;
                    group(left, first_tile(part), first_tile(part + 1), first, panels * (g + 1) / groups - first,
                          packed ? packed + first * steps * COLUMNS : nullptr,
                          packed ? packed + following * steps * COLUMNS : nullptr);
                }
            }
        }
    }
};

template <class T, class Put>
struct Best {
    typedef ::Product<T, Put> Product;
};
#ifdef LOCKSTEP_TILES
template <class Put>
struct Best<bf16, Put> {
    typedef TileProduct<bf16, Put> Product;
};
#endif
#ifdef __AMX_INT8__
template <class Put>
struct Best<int8, Put> {
    typedef TileProduct<int8, Put> Product;
};
#endif

// out [rows][outputs] = x [rows][depth] · w [outputs][depth]ᵀ, x and w with any strides. `packed`: w's panels, or null.
// `chunks`, a power of two, divides depth into whole steps.
template <class T, class Out>
static void product(const T* x, int64_t x_row, int64_t x_inner, const T* w, int64_t w_row, int64_t w_inner,
                    const word* packed, Out* out, int64_t rows, int64_t depth, int64_t outputs, int64_t chunks) {
    if (depth == 0) return (void)std::memset((void*)out, 0, rows * outputs * sizeof(Out));  // an empty sum
    if (rows == 0 || outputs == 0) return;
    const Matrix<T> left{x, rows, depth, x_row, x_inner}, right{w, outputs, depth, w_row, w_inner};
    const bool split = rows * outputs * depth > SPLIT_WORK;
    typename Best<T, Rounded<Out>>::Product(left, right, packed, {out, outputs}, chunks).run(split);
}
