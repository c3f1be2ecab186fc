// Sixteen floats at a time, on whatever vector unit the compiler finds (GCC and Clang vector extensions).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef float f32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

struct bf16 {
    uint16_t bits;
};

constexpr int64_t LANES = 16;

static inline f32x16 splat(float x) { return f32x16{} + x; }

static inline f32x16 load(const float* p) {
    f32x16 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// GCC would build these two conversions from halves and shuffles, three times as slow.
#ifdef __AVX512F__
static inline u32x16 widened(u16x16 v) { return (u32x16)_mm512_cvtepu16_epi32((__m256i)v); }
static inline u16x16 narrowed(u32x16 v) { return (u16x16)_mm512_cvtepi32_epi16((__m512i)v); }
#else
static inline u32x16 widened(u16x16 v) { return __builtin_convertvector(v, u32x16); }
static inline u16x16 narrowed(u32x16 v) { return __builtin_convertvector(v, u16x16); }
#endif

static inline f32x16 load(const bf16* p) {
    u16x16 half;
    std::memcpy(&half, p, sizeof half);
    return (f32x16)(widened(half) << 16);
}

// a · b - c with one rounding, where the compiler might otherwise choose one or two, here this and there that.
#ifdef __AVX512F__
static inline f32x16 multiply_subtract(f32x16 a, float b, float c) {
    return (f32x16)_mm512_fmsub_ps((__m512)a, _mm512_set1_ps(b), _mm512_set1_ps(c));
}
#else
static inline f32x16 multiply_subtract(f32x16 a, float b, float c) { return a * b - c; }
#endif

static inline void store(float* p, f32x16 v) { std::memcpy(p, &v, sizeof v); }

// Rounds to nearest even, as torch does; a NaN stays one.
static inline void store(bf16* p, f32x16 v) {
    u32x16 wide = (u32x16)v;
    u32x16 rounded = wide + 0x7fff + ((wide >> 16) & 1);
    rounded = (v == v) ? rounded : (u32x16{} + 0x7fc00000u);
    u16x16 half = narrowed(rounded >> 16);
    std::memcpy(p, &half, sizeof half);
}

// A row's last elements take the very path of the others, on a padded copy, so their bits do not depend on
// where in a tensor they stand.
template <class T>
static inline f32x16 load_first(const T* p, int64_t count) {
    if (count >= LANES) return load(p);
    T padded[LANES] = {};
    std::memcpy(padded, p, count * sizeof(T));
    return load(padded);
}

template <class T>
static inline void store_first(T* p, f32x16 v, int64_t count) {
    if (count >= LANES) return store(p, v);
    T padded[LANES];
    store(padded, v);
    std::memcpy(p, padded, count * sizeof(T));
}

static inline float sum(f32x16 v) {
    float x[LANES];
    store(x, v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
}

static inline f32x16 maximum(f32x16 a, f32x16 b) { return a > b ? a : b; }

static inline float maximum(f32x16 v) {
    float x[LANES];
    store(x, v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
    return x[0];
}

// e^x within about one unit in the last place: x = k ln 2 + r, a polynomial in r (Cephes), 2^k by the exponent bits.
// Below -87 the result is exactly 0, so a masked score of -inf weighs nothing.
static inline f32x16 exp(f32x16 x) {
    f32x16 clamped = x < -87.f ? splat(-87.f) : x;
    clamped = clamped > 88.f ? splat(88.f) : clamped;
    const float round_to_integer = 12582912.f;  // 1.5 * 2^23
    f32x16 k = (clamped * 1.44269504088896341f + round_to_integer) - round_to_integer;
    f32x16 r = clamped - k * 0.693359375f;
    r = r - k * -2.12194440e-4f;
    f32x16 y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.f;
    i32x16 exponent = __builtin_convertvector(k, i32x16) << 23;
    f32x16 result = (f32x16)((i32x16)y + exponent);
    result = x < -87.f ? f32x16{} : result;
    return x == x ? result : x;
}

// Lanes whose index is at least `count` become `filler`.
static inline f32x16 keep_first(f32x16 v, int64_t count, float filler) {
    const i32x16 index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return index < (int32_t)(count < 0 ? 0 : count > LANES ? LANES : count) ? v : splat(filler);
}
