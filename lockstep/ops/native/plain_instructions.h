// Emulation of the bfloat16 instructions that `bf16_tiles` needs, under Intel's names, so that its kernels compile
// unchanged for processors without them. Slow, and exact (plain_instructions.cpp).
#pragma once
#include "vector.h"

typedef int64_t __m512i __attribute__((vector_size(64), may_alias));
typedef uint16_t __m512bh __attribute__((vector_size(64), may_alias));
typedef float __m512 __attribute__((vector_size(64), may_alias));
typedef int64_t __m256i __attribute__((vector_size(32), may_alias));
typedef uint32_t words16 __attribute__((vector_size(64)));

#define PLAIN __attribute__((visibility("hidden")))
// The matrix unit; each thread has one.
PLAIN void _tile_loadconfig(const void* settings);
PLAIN void _tile_storeconfig(void* settings);
PLAIN void _tile_release();
PLAIN void _tile_zero(int tile);
PLAIN void _tile_loadd(int tile, const void* at, int64_t row_bytes);
PLAIN void _tile_stored(int tile, void* at, int64_t row_bytes);
PLAIN void _tile_dpbf16ps(int sums, int left, int right);
// sums + left · right of each pair's second halves, then of the first ones.
PLAIN __m512 _mm512_dpbf16_ps(__m512 sums, __m512bh left, __m512bh right);
// `first`, then `second`, rounded to nearest even.
PLAIN __m512bh _mm512_cvtne2ps_pbh(__m512 second, __m512 first);
PLAIN __m512i _mm512_permutexvar_epi16(__m512i order, __m512i elements);
#undef PLAIN

template <class Vector>
static inline Vector vector_at(const void* at) {
    Vector v;
    std::memcpy(&v, at, sizeof v);
    return v;
}

static inline __m256i _mm256_loadu_si256(const __m256i* at) { return vector_at<__m256i>(at); }
static inline __m512i _mm512_loadu_si512(const void* at) { return vector_at<__m512i>(at); }
static inline __m512 _mm512_loadu_ps(const void* at) { return vector_at<__m512>(at); }
static inline void _mm256_storeu_si256(__m256i* at, __m256i v) { std::memcpy((void*)at, &v, sizeof v); }
static inline void _mm512_storeu_ps(void* at, __m512 v) { std::memcpy(at, &v, sizeof v); }
static inline __m512 _mm512_setzero_ps() { return __m512{}; }
static inline __m512i _mm512_set1_epi32(int32_t x) { return (__m512i)(words16{} + (uint32_t)x); }

// Halves of 512 bits: `which` is 1 for the upper one.
static inline __m512i _mm512_castsi256_si512(__m256i v) { return __m512i{v[0], v[1], v[2], v[3]}; }
static inline __m256i _mm512_castsi512_si256(__m512i v) { return __m256i{v[0], v[1], v[2], v[3]}; }
static inline __m512i _mm512_inserti64x4(__m512i v, __m256i half, int which) {
    for (int i = 0; i < 4; i++) v[4 * which + i] = half[i];
    return v;
}
static inline __m256i _mm512_extracti64x4_epi64(__m512i v, int which) {
    return which ? __m256i{v[4], v[5], v[6], v[7]} : _mm512_castsi512_si256(v);
}

template <class... Elements>
static inline __m512i _mm512_set_epi16(Elements... from_last_to_first) {
    const uint16_t elements[] = {(uint16_t)from_last_to_first...};
    __m512bh v;
    for (int i = 0; i < 32; i++) v[i] = elements[31 - i];
    return (__m512i)v;
}
