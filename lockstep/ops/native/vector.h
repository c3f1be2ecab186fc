// Sixteen lanes at a time on any vector unit, with the same bits on all of them: every operation rounds as IEEE 754
// defines, products are only fused with sums by `multiply_add` (the build disables the compiler's contraction), and
// sums across lanes are one fixed tree.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

// The instructions to use. With LOCKSTEP_PLAIN, only those that the compiler chooses.
#if defined(LOCKSTEP_PLAIN)
#elif defined(__AVX512F__)
#define LOCKSTEP_AVX512
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__)
#define LOCKSTEP_AVX2
#include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#define LOCKSTEP_NEON
#include <arm_neon.h>
#else
#define LOCKSTEP_PLAIN
#endif

// Floats per register.
#if defined(LOCKSTEP_AVX512)
constexpr int WIDTH = 16;
#elif defined(LOCKSTEP_AVX2)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
// Whether the processor has fused multiply-add.
#ifdef LOCKSTEP_PLAIN
constexpr bool FUSED = false;
#else
constexpr bool FUSED = true;
#endif
constexpr int64_t LANES = 16;
constexpr int PARTS = LANES / WIDTH;

template <class T>
struct Lanes {
    typedef T Part __attribute__((vector_size(WIDTH * sizeof(T))));
    Part parts[PARTS];
};
typedef Lanes<float> f32x16;
typedef f32x16::Part floats;
typedef Lanes<uint32_t>::Part words;

// As calls, which GCC leaves them where a file has many, they would pass vectors through memory: seven times as slow.
#define INLINED __attribute__((always_inline)) static inline

struct bf16 {
    uint16_t bits;
};

static inline float wide(float x) { return x; }
static inline float wide(bf16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// One register: c + a · b with one rounding.
#if defined(LOCKSTEP_AVX512)
static inline floats multiply_add(floats a, floats b, floats c) {
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
#elif defined(LOCKSTEP_AVX2)
static inline floats multiply_add(floats a, floats b, floats c) {
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
#elif defined(LOCKSTEP_NEON)
static inline floats multiply_add(floats a, floats b, floats c) {
    return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
#else
// The product of two floats is exact in double; the sum is rounded to odd, so that rounding it again to float rounds
// the exact value (Boldo & Melquiond 2008). Several times as fast as a C library's `fmaf` without the instruction.
static inline floats multiply_add(floats a, floats b, floats c) {
    typedef double doubles __attribute__((vector_size(WIDTH * sizeof(double))));
    typedef int64_t integers __attribute__((vector_size(WIDTH * sizeof(int64_t))));
    const doubles product = __builtin_convertvector(a, doubles) * __builtin_convertvector(b, doubles);
    const doubles addend = __builtin_convertvector(c, doubles);
    const doubles sum = product + addend, part = sum - product;
    const doubles error = (product - (sum - part)) + (addend - part);
    const integers inexact = (integers)(error > 0.0) | (integers)(error < 0.0);
    const integers away = (integers)(error > 0.0) ^ ~(integers)(sum > 0.0);  // all ones: away from zero
    const integers even = ((integers)sum & 1) - 1;                           // all ones: the last bit is 0
    // Moving away from zero increments the bits, read as an integer; moving towards it decrements them.
    const integers step = inexact & even & ((away & 1) | (~away));
    return __builtin_convertvector((doubles)((integers)sum + step), floats);
}
#endif

// x - 0 is x and can be optimized away; x + 0 would change -0, and cost an addition.
static inline floats splat_part(float x) { return x - floats{}; }

INLINED f32x16 splat(float x) {
    f32x16 v;
    for (int i = 0; i < PARTS; i++) v.parts[i] = splat_part(x);
    return v;
}

// Part by part: GCC would copy the whole through memory in pieces of 16 bytes, and stall on reading it.
template <class T>
static inline Lanes<T> load(const T* p) {
    Lanes<T> v;
    for (int i = 0; i < PARTS; i++) std::memcpy(&v.parts[i], p + i * WIDTH, sizeof v.parts[i]);
    return v;
}

template <class T>
static inline void store(T* p, Lanes<T> v) {
    for (int i = 0; i < PARTS; i++) std::memcpy(p + i * WIDTH, &v.parts[i], sizeof v.parts[i]);
}

#define LANEWISE(OPERATOR)                                                           \
    INLINED f32x16 operator OPERATOR(f32x16 a, f32x16 b) {                           \
        for (int i = 0; i < PARTS; i++) a.parts[i] = a.parts[i] OPERATOR b.parts[i]; \
        return a;                                                                    \
    }                                                                                \
    INLINED f32x16 operator OPERATOR(f32x16 a, float b) { return a OPERATOR splat(b); } \
    INLINED f32x16 operator OPERATOR(float a, f32x16 b) { return splat(a) OPERATOR b; }
LANEWISE(+)
LANEWISE(-)
LANEWISE(*)
LANEWISE(/)
#undef LANEWISE

INLINED f32x16 operator-(f32x16 v) {
    for (int i = 0; i < PARTS; i++) v.parts[i] = -v.parts[i];
    return v;
}
INLINED f32x16& operator+=(f32x16& a, f32x16 b) { return a = a + b; }

// a · b + c with one rounding.
INLINED f32x16 multiply_add(f32x16 a, f32x16 b, f32x16 c) {
    for (int i = 0; i < PARTS; i++) a.parts[i] = multiply_add(a.parts[i], b.parts[i], c.parts[i]);
    return a;
}
INLINED f32x16 multiply_add(f32x16 a, float b, float c) { return multiply_add(a, splat(b), splat(c)); }
INLINED f32x16 multiply_add(f32x16 a, f32x16 b, float c) { return multiply_add(a, b, splat(c)); }
INLINED f32x16 multiply_add(f32x16 a, float b, f32x16 c) { return multiply_add(a, splat(b), c); }

// x where a < b; y elsewhere, also for NaN.
INLINED f32x16 where_less(f32x16 a, f32x16 b, f32x16 x, f32x16 y) {
    for (int i = 0; i < PARTS; i++) a.parts[i] = a.parts[i] < b.parts[i] ? x.parts[i] : y.parts[i];
    return a;
}
INLINED f32x16 maximum(f32x16 a, f32x16 b) { return where_less(b, a, a, b); }
// x where v is not NaN; v elsewhere.
INLINED f32x16 where_number(f32x16 v, f32x16 x) {
    for (int i = 0; i < PARTS; i++) v.parts[i] = v.parts[i] == v.parts[i] ? x.parts[i] : v.parts[i];
    return v;
}

// A register of bfloat16, the upper halves of floats. GCC would compile these conversions to halves and shuffles, three
// times as slow.
static inline words widened(const bf16* p) {
#if defined(LOCKSTEP_AVX512)
    return (words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif defined(LOCKSTEP_AVX2)
    return (words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#else
    typedef uint16_t halves __attribute__((vector_size(WIDTH * sizeof(uint16_t))));
    halves narrow;
    std::memcpy(&narrow, p, sizeof narrow);
    return __builtin_convertvector(narrow, words);
#endif
}

static inline f32x16 load(const bf16* p) {
    f32x16 v;
    for (int i = 0; i < PARTS; i++) v.parts[i] = (floats)(widened(p + i * WIDTH) << 16);
    return v;
}

// Rounds to nearest even, as torch does; preserves NaN.
static inline void store(bf16* p, f32x16 v) {
    words rounded[PARTS];
    for (int i = 0; i < PARTS; i++) {
        const words wide = (words)v.parts[i];
        const words nearest = wide + 0x7fff + ((wide >> 16) & 1);
        rounded[i] = (v.parts[i] == v.parts[i] ? nearest : words{} + 0x7fc00000u) >> 16;
    }
#if defined(LOCKSTEP_AVX512)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)rounded[0]));
#elif defined(LOCKSTEP_AVX2)
    const __m256i both = _mm256_packus_epi32((__m256i)rounded[0], (__m256i)rounded[1]);
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(both, 0xd8));
#else
    typedef uint16_t halves __attribute__((vector_size(WIDTH * sizeof(uint16_t))));
    for (int i = 0; i < PARTS; i++) {
        const halves narrow = __builtin_convertvector(rounded[i], halves);
        std::memcpy(p + i * WIDTH, &narrow, sizeof narrow);
    }
#endif
}

// A row's last elements take the same path as the others, on a padded copy, so their bits do not depend on their place
// in the tensor.
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

static inline float first_of(f32x16 v) { return v.parts[0][0]; }

static inline float sum(f32x16 v) {
    float x[LANES];
    store(x, v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
}

static inline float maximum(f32x16 v) {
    float x[LANES];
    store(x, v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
    return x[0];
}

// Lanes whose index is at least `count` become `filler`.
static inline f32x16 keep_first(f32x16 v, int64_t count, float filler) {
    static const float index[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    if (count >= LANES) return v;
    return where_less(load(index), splat((float)(count < 0 ? 0 : count)), v, splat(filler));
}

// Lanes whose index is below `count` become `filler`.
static inline f32x16 drop_first(f32x16 v, int64_t count, float filler) {
    static const float index[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    if (count <= 0) return v;
    return where_less(load(index), splat((float)(count > LANES ? LANES : count)), splat(filler), v);
}

// e^x within about one unit in the last place: x = k ln 2 + r, a polynomial in r (Cephes), 2^k by the exponent bits.
// Below -87 the result is exactly 0, so a masked score of -inf has weight 0; e^0 is exactly 1.
INLINED f32x16 exp(f32x16 x) {
    const f32x16 low = splat(-87.f), high = splat(88.f);
    f32x16 clamped = where_less(x, low, low, x);
    clamped = where_less(high, clamped, high, clamped);
    const float round_to_integer = 12582912.f;  // 1.5 * 2^23
    const f32x16 shifted = multiply_add(clamped, 1.44269504088896341f, round_to_integer), k = shifted - round_to_integer;
    f32x16 r = multiply_add(k, -0.693359375f, clamped);
    r = multiply_add(k, 2.12194440e-4f, r);
    f32x16 y = splat(1.9875691500e-4f);
    y = multiply_add(y, r, 1.3981999507e-3f);
    y = multiply_add(y, r, 8.3334519073e-3f);
    y = multiply_add(y, r, 4.1665795894e-2f);
    y = multiply_add(y, r, 1.6666665459e-1f);
    y = multiply_add(y, r, 5.0000001201e-1f);
    y = multiply_add(y, r * r, r) + 1.f;
    // The integer k is in the last bits of `shifted`.
    for (int i = 0; i < PARTS; i++) y.parts[i] = (floats)((words)y.parts[i] + ((words)shifted.parts[i] << 23));
    return where_number(x, where_less(x, low, f32x16{}, y));
}

// Natural logarithm within about one unit in the last place (Cephes): x = 2^e · m with m in [√½, √2).
// -inf at 0, NaN below it, inf at inf.
static inline float log_float(float x) {
    if (!(x > 0.f)) return x == 0.f ? -INFINITY : NAN;
    if (x == INFINITY) return x;
    int32_t shift = 0;
    if (x < 1.17549435e-38f) x *= 8388608.f, shift = -23;
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    int32_t exponent = ((bits - 0x3f3504f3) >> 23);
    bits -= exponent * (1 << 23);
    float m;
    std::memcpy(&m, &bits, sizeof m);
    const float e = (float)(exponent + shift), t = m - 1.f, z = t * t;
    const auto add = [](float a, float b, float c) { return first_of(multiply_add(splat(a), splat(b), splat(c))); };
    float y = 7.0376836292e-2f;
    for (const float next : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                             -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
        y = add(y, t, next);
    y = add(e, -2.12194440e-4f, t * z * y);
    y = add(-0.5f, z, y);
    return add(e, 0.693359375f, t + y);
}
static inline float exp_float(float x) { return first_of(exp(splat(x))); }
