// Intel's matrix unit (AMX). `tdpbf16ps` processes 32 elements along k at a time: the even and the odd ones are separate
// chains of fused multiply-adds, from zero, whose sums are added to each other and then to the output. It treats
// denormals as zero. By the instruction's definition, an output depends on its row and column alone, not on the number
// of rows. `tdpbssd` adds the products of 8-bit integers, 64 elements at a time.
#pragma once
#ifdef LOCKSTEP_TILES
#include <type_traits>

#include "panels.h"

constexpr int64_t UNIT_STEPS = 16, UNIT_ROWS = 16;  // per instruction: words along k, and rows

// The unit's registers: 0 to 3 are sums, 4 and 5 rows of the left factor, 6 and 7 columns of the right one.
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
        asm volatile("" ::"r"(&settings) : "memory");  // the instruction reads more than the compiler assumes
        _tile_loadconfig(&settings);
    }
};

// A factor's words, and the bytes from one row to the next.
struct Rows {
    const word* at;
    int64_t bytes;
    Rows from(int64_t row, int64_t column) const { return {(const word*)((char*)at + row * bytes) + column, bytes}; }
};

// Of a factor with contiguous rows.
static inline Rows rows_of(const void* at, int64_t words) {
    return {(const word*)at, words * (int64_t)sizeof(word)};
}

enum More { NONE, ROWS_BELOW, NEXT_COLUMNS };

// Adds the products of two registers of numbers T to the sums. The registers' numbers are part of the instruction.
#ifdef __AMX_INT8__
#define UNIT_MULTIPLY(sums, left, right)        \
    if constexpr (std::is_same_v<T, int8>)      \
        _tile_dpbssd(sums, left, right);        \
    else                                        \
        _tile_dpbf16ps(sums, left, right)
#else
#define UNIT_MULTIPLY(sums, left, right) _tile_dpbf16ps(sums, left, right)
#endif

// Of words of T: sums of 16 rows and 32 columns (+)= left · right; and `more`, of the next 16 rows of `left`, or of the
// 32 columns of `next`. The right factors are [step][column]. `meanwhile` runs while the unit computes.
template <class T, More MORE, class Meanwhile>
static void unit_product(const Rows& left, const Rows& right, const Rows& next, int64_t steps, bool begin, float* sums,
                         int64_t sums_row, float* more, const Meanwhile& meanwhile) {
    const int64_t sums_bytes = sums_row * sizeof(float);
    asm volatile("" ::: "memory");  // the compiler does not see what the unit's instructions read
    if (begin) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, sums_bytes);
        _tile_loadd(1, sums + UNIT_ROWS, sums_bytes);
        if (MORE != NONE) {
            _tile_loadd(2, more, sums_bytes);
            _tile_loadd(3, more + UNIT_ROWS, sums_bytes);
        }
    }
    for (int64_t k = 0; k < steps; k += UNIT_STEPS) {
        const Rows columns = right.from(k, 0);
        _tile_loadd(4, left.at + k, left.bytes);
        _tile_loadd(6, columns.at, columns.bytes);
        _tile_loadd(7, columns.at + UNIT_ROWS, columns.bytes);
        UNIT_MULTIPLY(0, 4, 6);
        UNIT_MULTIPLY(1, 4, 7);
        if (MORE == ROWS_BELOW) {
            _tile_loadd(5, left.from(UNIT_ROWS, k).at, left.bytes);
            UNIT_MULTIPLY(2, 5, 6);
            UNIT_MULTIPLY(3, 5, 7);
        } else if (MORE == NEXT_COLUMNS) {
            const Rows others = next.from(k, 0);
            _tile_loadd(6, others.at, others.bytes);
            _tile_loadd(7, others.at + UNIT_ROWS, others.bytes);
            UNIT_MULTIPLY(2, 4, 6);
            UNIT_MULTIPLY(3, 4, 7);
        }
    }
    meanwhile();
    asm volatile("" ::: "memory");
    _tile_stored(0, sums, sums_bytes);
    _tile_stored(1, sums + UNIT_ROWS, sums_bytes);
    if (MORE != NONE) {
        _tile_stored(2, more, sums_bytes);
        _tile_stored(3, more + UNIT_ROWS, sums_bytes);
    }
    asm volatile("" ::: "memory");
}

// Products of factors that are multiples of registers: reads rows of the left one up to a multiple of 16, and writes
// sums of as many.
class WholeUnits {
   public:
    static bool divide(int64_t dim) { return dim % (2 * UNIT_ROWS) == 0; }

    WholeUnits() { UnitShape{UNIT_ROWS, UNIT_ROWS, UNIT_STEPS}.load(); }
    WholeUnits(const WholeUnits&) = delete;
    ~WholeUnits() { _tile_release(); }

    // sums [rows][columns] (+)= left [rows][steps] · right [steps][columns], with sums `sums_row` floats apart.
    template <bool ADD>
    void product(const Rows& left, const Rows& right, float* sums, int64_t sums_row, int64_t rows, int64_t steps,
                 int64_t columns) const {
        for (int64_t r = 0; r < rows; r += 2 * UNIT_ROWS)
            for (int64_t n = 0; n < columns; n += 2 * UNIT_ROWS) {
                const Rows part = left.from(r, 0), columns_of = right.from(0, n);
                float *own = sums + r * sums_row + n, *below = own + UNIT_ROWS * sums_row;
                if (r + UNIT_ROWS < rows)
                    unit_product<bf16, ROWS_BELOW>(part, columns_of, {}, steps, !ADD, own, sums_row, below, [] {});
                else
                    unit_product<bf16, NONE>(part, columns_of, {}, steps, !ADD, own, sums_row, nullptr, [] {});
            }
    }
};
#endif
