// Rounding to float8: e4m3 times powers of two, one per row or block, or either type with a tensor's scale. The bits are
// those of the PyTorch form (float8.py).
#include <algorithm>

#include "replay.h"
#include "vector.h"

constexpr int64_t PARALLEL_ELEMENTS = 16384;  // fewer are not worth waking the other threads
constexpr uint32_t INFINITE = 0x7f800000, NOT_A_NUMBER = 0x7fc00000;
constexpr float LARGEST = 448.f;          // of e4m3
constexpr uint32_t ABOVE_448 = 0x1fffff;  // carries into the exponent of a magnitude that exceeds 448 times its scale

typedef Lanes<uint32_t> u32x16;
typedef int32_t ints __attribute__((vector_size(WIDTH * sizeof(int32_t))));

struct Format {
    uint32_t smallest;  // normal number, as a float's bits
    float shift;        // added, times a number's power of two, it leaves as many bits of the number as the format has
};
constexpr Format E4M3{(127 - 6) << 23, 1.5f * (1 << 20)}, E5M2{(127 - 14) << 23, 1.5f * (1 << 21)};

struct Rule {
    int64_t smallest, floor;  // exponent; whether scales are rounded down, so that magnitudes may exceed 448 times them
};

struct Scales {
    f32x16 inverse, scale;
};

static inline u32x16 larger_magnitude(u32x16 largest, f32x16 x) {
    for (int i = 0; i < PARTS; i++) {
        const words size = (words)x.parts[i] & 0x7fffffff;
        largest.parts[i] = size > largest.parts[i] ? size : largest.parts[i];
    }
    return largest;
}

static inline Scales scales_of(u32x16 largest, Rule rule) {
    Scales scales;
    for (int i = 0; i < PARTS; i++) {
        const words bits = largest.parts[i], carried = bits + (rule.floor ? 0 : ABOVE_448);
        const ints smallest = ints{} + (int32_t)rule.smallest;
        ints exponents = (ints)(carried >> 23) - (127 + 8);
        exponents = exponents < smallest ? smallest : exponents;
        const words powers = (words)((127 - exponents) << 23);
        scales.inverse.parts[i] = (floats)(bits >= INFINITE ? words{} + NOT_A_NUMBER : powers);
        scales.scale.parts[i] = 1.f / scales.inverse.parts[i];
    }
    return scales;
}

// To nearest, ties to even, as if the format had no largest number.
static inline f32x16 nearest(f32x16 x, Format format) {
    for (int i = 0; i < PARTS; i++) {
        const words power = (words)x.parts[i] & INFINITE, least = words{} + format.smallest;
        const floats shift = (floats)(power < least ? least : power) * format.shift;
        x.parts[i] = (x.parts[i] + shift) - shift;
    }
    return x;
}

static inline f32x16 rounded(f32x16 x, const Scales& scales, bool saturate) {
    f32x16 y = nearest(x * scales.inverse, E4M3);
    if (saturate) {
        y = where_less(splat(LARGEST), y, splat(LARGEST), y);
        y = where_less(y, splat(-LARGEST), splat(-LARGEST), y);
    }
    return y * scales.scale;
}

// One scale for contiguous numbers.
template <class T>
static void round_row(const T* x, T* out, int64_t length, Rule rule) {
    u32x16 largest = {};
    for (int64_t i = 0; i < length; i += LANES) largest = larger_magnitude(largest, load_first(x + i, length - i));
    uint32_t bits[LANES], most = 0;
    store(bits, largest);
    for (int i = 0; i < LANES; i++) most = std::max(most, bits[i]);
    for (int i = 0; i < PARTS; i++) largest.parts[i] = words{} + most;
    const Scales scales = scales_of(largest, rule);
    for (int64_t i = 0; i < length; i += LANES)
        store_first(out + i, rounded(load_first(x + i, length - i), scales, rule.floor), length - i);
}

// A scale per column, for `count` columns of at most a panel.
constexpr int64_t PANEL = 4;
template <class T>
static void round_columns(const T* x, T* out, int64_t length, int64_t inner, int64_t count, Rule rule) {
    u32x16 largest[PANEL] = {};
    for (int64_t row = 0; row < length; row++)
        for (int64_t i = 0; i * LANES < count; i++)
            largest[i] = larger_magnitude(largest[i], load_first(x + row * inner + i * LANES, count - i * LANES));
    Scales scales[PANEL];
    for (int64_t i = 0; i < PANEL; i++) scales[i] = scales_of(largest[i], rule);
    for (int64_t row = 0; row < length; row++)
        for (int64_t i = 0; i * LANES < count; i++) {
            const int64_t at = row * inner + i * LANES, left = count - i * LANES;
            store_first(out + at, rounded(load_first(x + at, left), scales[i], rule.floor), left);
        }
}

// x [outer][length][inner], in blocks along `length`.
template <class T>
static void round_e4m3(const T* x, T* out, int64_t outer, int64_t length, int64_t inner, int64_t block, Rule rule) {
    const int64_t blocks = (length + block - 1) / block, width = PANEL * LANES;
    const int64_t panels = (inner + width - 1) / width, parts = outer * blocks * panels;
#pragma omp parallel for if (outer * length * inner > PARALLEL_ELEMENTS)
    for (int64_t part = 0; part < parts; part++) {
        const int64_t panel = part % panels, first = part / panels % blocks * block;
        const int64_t rows = std::min(block, length - first);
        const int64_t at = (part / panels / blocks * length + first) * inner + panel * width;
        if (inner == 1)
            round_row(x + at, out + at, rows, rule);
        else
            round_columns(x + at, out + at, rows, inner, std::min(width, inner - panel * width), rule);
    }
}

template <class T>
static void round_scaled(const T* x, const float* inverse, T* out, int64_t count, Format format) {
#pragma omp parallel for if (count > PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < count; i += LANES)
        store_first(out + i, nearest(load_first(x + i, count - i) * *inverse, format), count - i);
}

#define EXPORT(T, suffix)                                                                                            \
    extern "C" void round_e4m3##suffix(const T* x, T* out, int64_t outer, int64_t length, int64_t inner,             \
                                       int64_t block, int64_t smallest, int64_t floor) {                             \
        round_e4m3<T>(x, out, outer, length, inner, block, Rule{smallest, floor});                                   \
    }                                                                                                                \
    extern "C" void round_scaled##suffix(const T* x, const float* inverse, T* out, int64_t count, int64_t e5m2) {    \
        round_scaled<T>(x, inverse, out, count, e5m2 ? E5M2 : E4M3);                                                 \
    }                                                                                                                \
    REPLAYABLE(round_e4m3##suffix)                                                                                   \
    REPLAYABLE(round_scaled##suffix)

EXPORT(float, _f32)
EXPORT(bf16, _bf16)
