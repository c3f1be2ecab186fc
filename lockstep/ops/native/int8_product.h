// The product of 8-bit integers: sums are integers, so their order changes nothing, and every processor has the same
// ones. They do not overflow with less than 133,000 elements along k.
#pragma once
#include "product.h"

typedef int32_t integers __attribute__((vector_size(WIDTH * sizeof(int32_t))));

// What the instruction adds to each element of x, so that it has no sign. Those of a matrix unit have one.
#if !defined(__AMX_INT8__) && (defined(__AVX512VNNI__) || defined(__AVXVNNI__))
constexpr int32_t LEFT_OFFSET = 128;
#else
constexpr int32_t LEFT_OFFSET = 0;
#endif

// A word's first and third number, or its second and fourth, as 16 bits each.
static inline words sixteen_bits(words w, int half) {
    typedef int16_t shorts __attribute__((vector_size(WIDTH * sizeof(int32_t))));
    return (words)((half ? (shorts)w : (shorts)w << 8) >> 8);
}

template <>
struct Chain<int8> {
    typedef integers Sum;
    static integers splat(word x) { return integers{} + (int32_t)x; }
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    static constexpr int HALVES = 1;
    typedef integers Right;
    static words left(words x, int) { return x ^ 0x80808080u; }
    static Right right(words w, int) { return (integers)w; }
    static integers add(word x, Right w, integers sum) {
#ifdef __AVX512VNNI__
        return (integers)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)splat(x), (__m512i)w);
#else
        return (integers)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)splat(x), (__m256i)w);
#endif
    }
#else
    static constexpr int HALVES = 2;
    typedef words Right;
    static words left(words x, int half) { return sixteen_bits(x, half); }
    static Right right(words w, int half) { return sixteen_bits(w, half); }
    static integers add(word x, Right w, integers sum) {
#if defined(LOCKSTEP_AVX512)
        return sum + (integers)_mm512_madd_epi16((__m512i)splat(x), (__m512i)w);
#elif defined(LOCKSTEP_AVX2)
        return sum + (integers)_mm256_madd_epi16((__m256i)splat(x), (__m256i)w);
#else
        const integers a = splat(x), b = (integers)w;
        return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
    }
#endif
};

static inline integers rounded(floats x) {
    const float to_integer = 12582912.f;  // 1.5 · 2^23: adding it rounds to an integer, in the last bits
    return (integers)(x + to_integer) - (integers)(floats{} + to_integer);
}

static inline void narrow(int8* out, const f32x16& x) {
#if defined(LOCKSTEP_AVX512)
    _mm_storeu_si128((__m128i*)out, _mm512_cvtepi32_epi8((__m512i)rounded(x.parts[0])));
#elif defined(LOCKSTEP_AVX2)
    const __m256i both = _mm256_packs_epi32((__m256i)rounded(x.parts[0]), (__m256i)rounded(x.parts[1]));
    const __m256i ordered = _mm256_permute4x64_epi64(both, 0xd8);
    _mm_storeu_si128((__m128i*)out, _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
#else
    for (int i = 0; i < PARTS; i++)
        for (int j = 0; j < WIDTH; j++) out[i * WIDTH + j] = (int8)rounded(x.parts[i])[j];
#endif
}

// The largest magnitude, or something that is not finite if one element is not: compared by their bits.
template <class T>
static float largest(const T* x, int64_t count) {
    Lanes<uint32_t> most = {};
    for (int64_t i = 0; i < count; i += LANES) {
        const f32x16 v = load_first(x + i, count - i);
        for (int p = 0; p < PARTS; p++) {
            const words bits = (words)v.parts[p] & 0x7fffffffu;
            most.parts[p] = bits > most.parts[p] ? bits : most.parts[p];
        }
    }
    uint32_t bits[LANES], all = 0;
    store(bits, most);
    for (const uint32_t each : bits) all = std::max(all, each);
    float value;
    std::memcpy(&value, &all, sizeof value);
    return value;
}

// Rounded numbers of units of `scale`, up to `padded` zeros. They are clamped: the scale of denormals is inexact.
template <class T>
static void divide(const T* x, int64_t count, float scale, float least, float most, int8* codes, int64_t padded) {
    for (int64_t i = 0; i < padded; i += LANES) {
        f32x16 v = i < count ? load_first(x + i, count - i) / splat(scale) : f32x16{};
        v = where_less(v, splat(least), splat(least), where_less(splat(most), v, splat(most), v));
        narrow(codes + i, v);
    }
}

// The scale of a row's codes: its largest magnitude / 127, NaN if the row is not finite.
template <class T>
static float scale_of(const T* x, int64_t count) {
    const float most = largest(x, count);
    return std::isfinite(most) ? most / 127.f : NAN;
}

// Codes of a row in units of `scale`, up to `padded` zeros; all are zero if the scale is, or NaN.
template <class T>
static void encode(const T* x, int64_t count, float scale, int8* codes, int64_t padded) {
    if (scale > 0.f)
        divide(x, count, scale, -127.f, 127.f, codes, padded);
    else
        std::memset(codes, 0, padded);
}

// The codes in units of a scale that is returned: `given`, or without it the row's own.
template <class T>
static float quantize(const T* x, int64_t count, int8* codes, int64_t padded, const float* given = nullptr) {
    const float scale = given ? *given : scale_of(x, count);
    encode(x, count, scale, codes, padded);
    return scale;
}

static inline int64_t padded_depth(int64_t depth) { return (depth + LANES - 1) / LANES * LANES; }

// The number that a code stands for, times `scale`; out may be x.
template <class T>
static void dequantize(const int8* codes, float scale, T* out, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        float values[LANES] = {};
        for (int64_t j = 0; j < std::min(LANES, count - i); j++) values[j] = codes[i + j];
        store_first(out + i, load(values) * scale, count - i);
    }
}

// A weight's codes: its panels, then for each output (whole panels of them) the scale, and what `LEFT_OFFSET` adds to
// its sums.
struct Int8Weight {
    word* panels;
    int64_t depth, outputs;
    int64_t steps() const { return padded_depth(depth) / STEP<int8>; }
    int64_t count() const { return (outputs + COLUMNS - 1) / COLUMNS; }
    int64_t words() const { return count() * COLUMNS * (steps() + 2); }
    float* scales() const { return (float*)(panels + count() * steps() * COLUMNS); }
    int32_t* excess() const { return (int32_t*)(scales() + count() * COLUMNS); }

    // given: the outputs' scales, or null for those of their rows.
    template <class T>
    void pack(const T* w, int64_t row, const float* given) const {
#pragma omp parallel for schedule(static)
        for (int64_t panel = 0; panel < count(); panel++) {
            const int64_t first = panel * COLUMNS, rows = std::min(COLUMNS, outputs - first), padded = steps() * STEP<int8>;
            int8* codes = scratch<int8>(COLUMNS * padded, 0);
            for (int64_t n = 0; n < COLUMNS; n++) {
                int8* own = codes + n * padded;
                const int64_t output = first + std::min(n, rows - 1);
                scales()[first + n] = quantize(w + output * row, depth, own, padded, given ? given + output : nullptr);
                int32_t sum = 0;
                for (int64_t k = 0; k < padded; k++) sum += own[k];
                excess()[first + n] = sum * LEFT_OFFSET;
            }
            const Matrix<int8> all{codes, COLUMNS, padded, padded, 1};
            pack_panel(all, 0, 0, steps(), panels + first * steps());
        }
    }

    // out [rows][depth]: the numbers that the codes of these outputs stand for.
    template <class T>
    void unpack(const int64_t* chosen, T* out, int64_t rows) const {
#pragma omp parallel for schedule(static) if (rows * depth > OWN_WORDS)
        for (int64_t r = 0; r < rows; r++) {
            const int64_t output = chosen[r];
            const word* first = panels + output / COLUMNS * COLUMNS * steps() + output % COLUMNS;
            int8* codes = scratch<int8>(steps() * STEP<int8>, 0);
            for (int64_t s = 0; s < steps(); s++)
                std::memcpy(codes + s * STEP<int8>, first + s * COLUMNS, sizeof(word));
            dequantize(codes, scales()[output], out + r * depth, depth);
        }
    }
};

// The sums of WIDTH outputs, whose bits a product has in floats.
static inline integers integer_sums(floats sums, const int32_t* excess) {
    integers extra;
    std::memcpy(&extra, excess, sizeof extra);
    return (integers)sums - extra;
}

// Writes sums as numbers of Out: times the row's scale, times the output's.
template <class Out>
struct Scaled {
    Rounded<Out> rounded;
    const float* row_scales;
    const Int8Weight& weight;
    void operator()(float* sums, int64_t top, int64_t rows, int64_t panel) const {
        const float* scales = weight.scales() + panel * COLUMNS;
        const int32_t* excess = weight.excess() + panel * COLUMNS;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t n = 0; n < COLUMNS; n += LANES) {
                float* here = sums + r * COLUMNS + n;
                f32x16 v = load(here);
                for (int p = 0; p < PARTS; p++)
                    v.parts[p] = __builtin_convertvector(integer_sums(v.parts[p], excess + n + p * WIDTH), floats);
                store(here, v * row_scales[top + r] * load(scales + n));
            }
        rounded(sums, top, rows, panel);
    }
};

// Writes sums as they are, for ranks that each have a part of k.
struct Unscaled {
    int32_t* out;
    int64_t outputs;
    const Int8Weight& weight;
    void operator()(float* sums, int64_t top, int64_t rows, int64_t panel) const {
        const int64_t first = panel * COLUMNS, count = std::min(COLUMNS, outputs - first);
        const int32_t* excess = weight.excess() + first;
        for (int64_t r = 0; r < rows; r++) {
            float* here = sums + r * COLUMNS;
            for (int64_t n = 0; n < COLUMNS; n += WIDTH) {
                floats v;
                std::memcpy(&v, here + n, sizeof v);
                const integers whole = integer_sums(v, excess + n);
                std::memcpy(here + n, &whole, sizeof whole);
            }
            std::memcpy(out + (top + r) * outputs + first, here, count * sizeof(int32_t));
        }
    }
};
