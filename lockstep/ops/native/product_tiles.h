// The product in a matrix unit (Intel's AMX, `tdpbf16ps`). The unit takes 32 elements along k at once: the even ones and
// the odd ones are a chain of fused multiply-adds each, from zero, and the two sums are added to each other and then to
// the output's. It takes numbers too small for a normal float as zero. An output depends on its own row and column
// alone, as the instruction defines it: the number of rows in a tile has no say.
#pragma once
#ifdef LOCKSTEP_TILES
#include "tiling.h"

extern "C" int omp_get_num_threads();

constexpr int64_t UNIT_STEPS = 16, UNIT_ROWS = 16;  // of an instruction: words along k, and rows
static_assert(COLUMNS == 2 * UNIT_ROWS, "a panel is two registers wide");

// What the unit's registers hold: 0 to 3 sums, 4 and 5 rows of x, 6 and 7 the halves of a panel. A tile is 32 rows of
// one panel, or 16 rows of two.
struct UnitShape {
    int64_t rows = 0, rows_below = 0, steps = 0;
    bool operator==(const UnitShape& other) const {
        return rows == other.rows && rows_below == other.rows_below && steps == other.steps;
    }
    void load() const {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } settings;
        const auto set = [&](int which, int64_t rows, int64_t words) {
            settings.rows[which] = rows, settings.row_bytes[which] = rows ? words * sizeof(word) : 0;
        };
        for (int sum = 0; sum < 4; sum++) set(sum, sum > 1 && rows_below ? rows_below : rows, UNIT_ROWS);
        set(4, rows, steps), set(5, rows_below, steps);
        set(6, steps, UNIT_ROWS), set(7, steps, UNIT_ROWS);
        _tile_loadconfig(&settings);
    }
};

// Sums are rounded to Out.
template <class Out>
struct TileProduct {
    static constexpr int64_t TILE = 2 * UNIT_ROWS * COLUMNS;  // floats of its sums
    static constexpr int64_t GROUP_WORDS = 1 << 17;           // of panels that stay in the second cache
    static constexpr int64_t SUMS_ROW = COLUMNS * sizeof(float), PANEL_ROW = COLUMNS * sizeof(word);
    const Matrix<bf16>& x;
    const Matrix<bf16>& w;
    const word* packed;  // all panels of w, or none
    Out* out;
    const int64_t chunks, steps, panels;
    const Tiling tiling;
    const int64_t of_chunk;  // steps of a chunk
    word* copied = nullptr;

    TileProduct(const Matrix<bf16>& x, const Matrix<bf16>& w, const word* packed, Out* out, int64_t chunks)
        : x(x), w(w), packed(packed), out(out), chunks(chunks), steps(x.steps()),
          panels((w.rows + COLUMNS - 1) / COLUMNS), tiling(x.rows, 2 * UNIT_ROWS), of_chunk(steps / chunks) {
        // The unit reads whole words of a row: half a word at an odd end is filled with zero.
        if (x.inner != 1 || x.depth % 2) copied = scratch<word>(x.rows * steps, 3);
    }

    const word* row(int64_t r) const { return copied ? copied + r * steps : (const word*)(x.at + r * x.row); }

    enum More { NONE, ROWS_BELOW, NEXT_PANEL };
    // sums of 16 rows and a panel = left · right; beside them `more` of the next rows, or of the next panel.
    template <More MORE>
    static void multiply(const word* left, int64_t left_row, const word* right, const word* next, int64_t steps,
                         bool begin, float* sums, float* more) {
        asm volatile("" ::: "memory");  // the compiler does not know what the unit's instructions read
        if (begin) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        } else {
            _tile_loadd(0, sums, SUMS_ROW);
            _tile_loadd(1, sums + LANES, SUMS_ROW);
            if (MORE != NONE) {
                _tile_loadd(2, more, SUMS_ROW);
                _tile_loadd(3, more + LANES, SUMS_ROW);
            }
        }
        for (int64_t k = 0; k < steps; k += UNIT_STEPS) {
            _tile_loadd(4, left + k, left_row);
            _tile_loadd(6, right + k * COLUMNS, PANEL_ROW);
            _tile_loadd(7, right + k * COLUMNS + LANES, PANEL_ROW);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (MORE == ROWS_BELOW) {
                _tile_loadd(5, (char*)(left + k) + UNIT_ROWS * left_row, left_row);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            } else if (MORE == NEXT_PANEL) {
                _tile_loadd(6, next + k * COLUMNS, PANEL_ROW);
                _tile_loadd(7, next + k * COLUMNS + LANES, PANEL_ROW);
                _tile_dpbf16ps(2, 4, 6);
                _tile_dpbf16ps(3, 4, 7);
            }
        }
        _tile_stored(0, sums, SUMS_ROW);
        _tile_stored(1, sums + LANES, SUMS_ROW);
        if (MORE != NONE) {
            _tile_stored(2, more, SUMS_ROW);
            _tile_stored(3, more + LANES, SUMS_ROW);
        }
        asm volatile("" ::: "memory");
    }

    // Rows of a tile with one panel, or with two where `next` is one.
    void tile(int64_t t, const word* right, const word* next, int64_t panel, UnitShape& shape, float* sums) const {
        const int64_t top = tiling.start(t), rows = tiling.height(t), below = std::max<int64_t>(rows - UNIT_ROWS, 0);
        const int64_t left_row = copied ? steps * sizeof(word) : x.row * sizeof(bf16);
        const auto add = [&](int64_t from, int64_t count, int64_t at_once, bool begin, float* own) {
            const UnitShape wanted{rows - below, below, at_once};
            if (!(wanted == shape)) (shape = wanted).load();
            const word *left = row(top) + from, *here = right + from * COLUMNS;
            float* more = own + UNIT_ROWS * COLUMNS;
            if (below)
                multiply<ROWS_BELOW>(left, left_row, here, nullptr, count, begin, own, more);
            else if (next)
                multiply<NEXT_PANEL>(left, left_row, here, next + from * COLUMNS, count, begin, own, more);
            else
                multiply<NONE>(left, left_row, here, nullptr, count, begin, own, nullptr);
        };
        // The chunks before one are held as whole subtrees, one for each bit that is set in its number.
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
            float* own = sums + __builtin_popcountll(chunk) * TILE;
            const int64_t from = chunk * of_chunk, rest = of_chunk % UNIT_STEPS, whole = of_chunk - rest;
            if (whole) add(from, whole, UNIT_STEPS, true, own);
            if (rest) add(from + whole, rest, rest, !whole, own);
            for (int64_t subtree = chunk; subtree & 1; subtree >>= 1, own -= TILE)
                for (int64_t i = 0; i < TILE; i += LANES) store(own - TILE + i, load(own - TILE + i) + load(own + i));
        }
        put(sums, top, rows, panel);
        if (next) put(sums + UNIT_ROWS * COLUMNS, top, rows, panel + 1);
    }

    void put(const float* sums, int64_t top, int64_t rows, int64_t panel) const {
        const int64_t first = panel * COLUMNS, count = w.rows - first;
        for (int64_t r = 0; r < rows; r++, sums += COLUMNS) {
            Out* target = out + (top + r) * w.rows + first;
            if (count >= COLUMNS && sizeof(Out) == 2 && chunks == 1) {
                // The unit leaves no number that this rounding would take as zero.
                const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(sums + LANES), _mm512_loadu_ps(sums));
                std::memcpy((void*)target, &both, sizeof both);
            } else {
                for (int64_t n = 0; n < std::min(COLUMNS, count); n += LANES)
                    store_first(target + n, load(sums + n), count - n);
            }
        }
    }

    // Tiles [first, last) with the panels of one group.
    void group(int64_t first, int64_t last, int64_t panel, int64_t count, UnitShape& shape) const {
        const int64_t size = steps * COLUMNS;
        word* made = packed ? nullptr : scratch<word>(count * size, 0);
        const word* right = packed ? packed + panel * size : made;
        float* sums = scratch<float>((64 - __builtin_clzll(chunks)) * TILE, 1);
        for (int64_t t = first; t < last; t++) {
            const int64_t at_once = tiling.height(t) > UNIT_ROWS ? 1 : 2;
            for (int64_t p = 0; p < count; p += at_once) {
                const bool two = at_once == 2 && p + 1 < count;
                if (made && t == first)
                    for (int64_t i = p; i < p + 1 + two; i++)
                        pack_panel(w, (panel + i) * COLUMNS, 0, steps, made + i * size);
                tile(t, right + p * size, two ? right + (p + 1) * size : nullptr, panel + p, shape, sums);
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
            // As many groups as threads can share evenly. Where there are too few panels for all, rows are divided too.
            const int64_t in_cache = (panels * steps * COLUMNS + GROUP_WORDS - 1) / GROUP_WORDS;
            const int64_t groups = std::min(panels, std::max(threads * 4, in_cache));
            const int64_t parts = std::min(tiling.count, std::max<int64_t>(1, threads / groups));
            UnitShape shape;
#pragma omp for collapse(2) schedule(dynamic, 1)
            for (int64_t part = 0; part < parts; part++)
                for (int64_t g = 0; g < groups; g++) {
                    const int64_t first = panels * g / groups;
                    group(tiling.count * part / parts, tiling.count * (part + 1) / parts, first,
                          panels * (g + 1) / groups - first, shape);
                }
            _tile_release();
        }
    }
};
#endif
