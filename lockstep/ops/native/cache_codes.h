// Keys and values in the cache as 8-bit codes. The row of a token and key-value head has one scale, a power of two: the
// smallest with which no magnitude exceeds 127. So code · scale is exact in float32 and in bfloat16.
//
// A page of keys is [head_dim][PAGE] codes, then the scale of each key, then that of each value, as the byte of a
// float's exponent. A page of values is [PAGE][head_dim] codes.
#pragma once
#include "attention.h"

constexpr uint8_t NOT_A_NUMBER = 255;  // whose scale is infinite: times a code of 0, NaN
constexpr int64_t SCALES = 2;          // bytes of scales per token in a page of keys

static inline float scale_of(uint8_t exponent) {
    const uint32_t bits = (uint32_t)exponent << 23;
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return scale;
}

static inline f32x16 load(const int8_t* p) {
    f32x16 v;
    for (int i = 0; i < PARTS; i++) {
#if defined(LOCKSTEP_AVX512)
        v.parts[i] = (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(LOCKSTEP_AVX2)
        v.parts[i] = (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + i * WIDTH))));
#else
        typedef int8_t bytes __attribute__((vector_size(WIDTH)));
        bytes codes;
        std::memcpy(&codes, p + i * WIDTH, sizeof codes);
        v.parts[i] = __builtin_convertvector(codes, floats);
#endif
    }
    return v;
}

// A page's keys [dim][PAGE] and values [PAGE][dim] in the model's dtype.
template <class T>
static void widen_page(const int8_t* key_codes, const int8_t* value_codes, int64_t dim, T* keys, T* values) {
    const uint8_t *of_keys = (const uint8_t*)key_codes + dim * PAGE, *of_values = of_keys + PAGE;
    float scales[PAGE];
    for (int64_t i = 0; i < PAGE; i++) scales[i] = scale_of(of_keys[i]);
    const f32x16 of_columns = load(scales);
    for (int64_t d = 0; d < dim; d++) store(keys + d * PAGE, load(key_codes + d * PAGE) * of_columns);
    for (int64_t i = 0; i < PAGE; i++) {
        const f32x16 scale = splat(scale_of(of_values[i]));
        for (int64_t d = 0; d < dim; d += LANES)
            store(values + i * dim + d, load(value_codes + i * dim + d) * scale);
    }
}
