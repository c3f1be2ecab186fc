// The product in a matrix unit. A tile is 32 rows of one panel, or 16 rows of two.
#pragma once
#include "unit.h"

#ifdef LOCKSTEP_TILES
#include "tiling.h"

extern "C" int omp_get_num_threads();

static_assert(COLUMNS == 2 * UNIT_ROWS, "a panel is two registers wide");

// Of numbers T, bf16 or int8, whose sums `write` writes. Sums of integers have their bits in floats.
template <class T, class Write>
struct TileProduct {
    static constexpr int64_t TILE = 2 * UNIT_ROWS * COLUMNS;  // floats of its sums
    static constexpr int64_t GROUP_WORDS = 3 << 16;           // of panels that stay in the L2 cache with x
    const Matrix<T>& x;
    const Matrix<T>& w;
    const word* packed;  // all panels of w, or none
    const Write write;
    const int64_t chunks, steps, panels;
    const Tiling tiling;
    const int64_t of_chunk;  // steps of a chunk
    word* copied = nullptr;

    TileProduct(const Matrix<T>& x, const Matrix<T>& w, const word* packed, const Write& write, int64_t chunks)
        : x(x), w(w), packed(packed), write(write), chunks(chunks), steps(x.steps()),
          panels((w.rows + COLUMNS - 1) / COLUMNS), tiling(x.rows, 2 * UNIT_ROWS), of_chunk(steps / chunks) {
        // The unit reads whole words of a row: an incomplete last one is padded with zeros.
        if (x.inner != 1 || x.depth % STEP<T>) copied = scratch<word>(x.rows * steps, 3);
    }

    int64_t subtrees() const { return 64 - __builtin_clzll(chunks); }
    Rows left() const {
        if (copied) return {copied, steps * (int64_t)sizeof(word)};
        return {(const word*)x.at, x.row * (int64_t)sizeof(T)};
    }
    static Rows panel_rows(const word* panel) { return rows_of(panel, COLUMNS); }

    // A thread's state. A tile's sums are rounded and written while the unit computes the next tile, whose sums then
    // replace them in the L1 cache (1.1 times as fast for short k).
    struct Worker {
        float* sums;  // [subtrees][TILE]
        UnitShape shape;
        int64_t tile = 0, panel = 0, panels = 0;  // of the tile whose sums are not written yet, if `panels` > 0
    };

    void finish(Worker& worker) const {
        for (int64_t p = 0; p < worker.panels; p++)
            put(worker.sums + p * UNIT_ROWS * COLUMNS, worker.tile, worker.panel + p);
        worker.panels = 0;
    }

    // Multiplies rows of a tile with one panel, or with two if `next` is one.
    void tile(int64_t t, const word* right, const word* next, int64_t panel, Worker& worker) const {
        const int64_t top = tiling.start(t), rows = tiling.height(t), below = std::max<int64_t>(rows - UNIT_ROWS, 0);
        const auto add = [&](int64_t from, int64_t count, int64_t at_once, bool begin, float* own) {
            const UnitShape wanted{rows - below, below, at_once};
            if (!(wanted == worker.shape)) (worker.shape = wanted).load();
            const auto meanwhile = [&] { finish(worker); };
            const Rows part = left().from(top, from), here = panel_rows(right).from(from, 0);
            float* more = own + UNIT_ROWS * COLUMNS;
            if (below)
                unit_product<T, ROWS_BELOW>(part, here, {}, count, begin, own, COLUMNS, more, meanwhile);
            else if (next)
                unit_product<T, NEXT_COLUMNS>(part, here, panel_rows(next).from(from, 0), count, begin, own, COLUMNS, more,
                                           meanwhile);
            else
                unit_product<T, NONE>(part, here, {}, count, begin, own, COLUMNS, nullptr, meanwhile);
        };
        // The chunks before this one are complete subtrees, one for each bit set in its index.
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
            float* own = worker.sums + __builtin_popcountll(chunk) * TILE;
            const int64_t from = chunk * of_chunk, rest = of_chunk % UNIT_STEPS, whole = of_chunk - rest;
            if (whole) add(from, whole, UNIT_STEPS, true, own);
            if (rest) add(from + whole, rest, rest, !whole, own);
            for (int64_t subtree = chunk; subtree & 1; subtree >>= 1, own -= TILE)
                for (int64_t i = 0; i < TILE; i += LANES) store(own - TILE + i, load(own - TILE + i) + load(own + i));
        }
        worker.tile = t, worker.panel = panel, worker.panels = next ? 2 : 1;
    }

    void put(float* sums, int64_t t, int64_t panel) const {
        if constexpr (std::is_same_v<Write, Rounded<bf16>>)
            if (chunks == 1 && w.rows - panel * COLUMNS >= COLUMNS) return put_pairs(sums, t, panel);
        write(sums, tiling.start(t), tiling.height(t), panel);
    }

    // The unit produces no denormals, which this rounding would flush to zero.
    void put_pairs(const float* sums, int64_t t, int64_t panel) const {
        for (int64_t r = tiling.start(t); r < tiling.start(t + 1); r++, sums += COLUMNS) {
            const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(sums + LANES), _mm512_loadu_ps(sums));
            std::memcpy((void*)(write.out + r * w.rows + panel * COLUMNS), &both, sizeof both);
        }
    }

    // Tiles [first, last) with the panels of one group.
    void group(int64_t first, int64_t last, int64_t panel, int64_t count, Worker& worker) const {
        const int64_t size = steps * COLUMNS;
        word* made = packed ? nullptr : scratch<word>(count * size, 0);
        const word* right = packed ? packed + panel * size : made;
        for (int64_t t = first; t < last; t++) {
            const int64_t at_once = tiling.height(t) > UNIT_ROWS ? 1 : 2;
            for (int64_t p = 0; p < count; p += at_once) {
                const bool two = at_once == 2 && p + 1 < count;
                if (made && t == first)
                    for (int64_t i = p; i < p + 1 + two; i++)
                        pack_panel(w, (panel + i) * COLUMNS, 0, steps, made + i * size);
                tile(t, right + p * size, two ? right + (p + 1) * size : nullptr, panel + p, worker);
            }
        }
    }

    void run(bool split) const {
#pragma omp parallel if (split)
        {
            const int64_t threads = omp_get_num_threads();
            if (copied)
#pragma omp for schedule(static)
                for (int64_t r = 0; r < x.rows; r++)
                    for (int64_t k = 0; k < steps; k++) copied[r * steps + k] = x(r, k);
            // As many groups as threads can share evenly; a single thread reads x as rarely as the cache allows. If
            // there are too few panels for all threads, rows are divided too.
            const int64_t in_cache = (panels * steps * COLUMNS + GROUP_WORDS - 1) / GROUP_WORDS;
            const int64_t groups = std::min(panels, std::max(threads > 1 ? threads * 4 : 1, in_cache));
            const int64_t parts = std::min(tiling.count, std::max<int64_t>(1, threads / groups));
            Worker worker{scratch<float>(subtrees() * TILE, 1)};
#pragma omp for collapse(2) schedule(dynamic, 1)
            for (int64_t part = 0; part < parts; part++)
                for (int64_t g = 0; g < groups; g++) {
                    const int64_t first = panels * g / groups;
                    group(tiling.count * part / parts, tiling.count * (part + 1) / parts, first,
                          panels * (g + 1) / groups - first, worker);
                }
            finish(worker);
            _tile_release();
        }
    }
};
#endif
