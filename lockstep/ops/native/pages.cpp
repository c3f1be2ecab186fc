// Writing keys and values into pages, as numbers of the model's dtype or as 8-bit codes.
#include "cache_codes.h"
#include "int8_product.h"
#include "replay.h"

template <class T>
static inline bool all_finite(const T* x, int64_t count) {
    int broken = 0;
    for (int64_t i = 0; i < count; i++) broken |= !(std::abs(wide(x[i])) < INFINITY);
    return !broken;
}

// A value that is not finite is written as zero, and its key as NaN: queries that see the key get NaN, and for the
// others, its weight of zero meets a finite value. Without pages of values, the keys are the values.
template <class T>
static void write_pages(const T* k, const T* v, const int64_t* slots, T* key_pages, T* value_pages, int64_t tokens,
                        int64_t kv_heads, int64_t head_dim) {
    // Each element of a key is on a separate cache line, so even a few keys are worth several threads.
#pragma omp parallel for if (tokens * kv_heads * head_dim > 1024)
    for (int64_t token = 0; token < tokens; token++) {
        const int64_t page = slots[token] / PAGE, offset = slots[token] % PAGE;
        for (int64_t head = 0; head < kv_heads; head++) {
            const T* key = k + (token * kv_heads + head) * head_dim;
            T* page_start = key_pages + (page * kv_heads + head) * head_dim * PAGE;
            const T* value = (value_pages ? v : k) + (token * kv_heads + head) * head_dim;
            const bool finite = all_finite(value, head_dim);
            if (finite)
                for (int64_t d = 0; d < head_dim; d++) page_start[d * PAGE + offset] = key[d];
            else
                for (int64_t d = 0; d < head_dim; d++) store_first(page_start + d * PAGE + offset, splat(NAN), 1);
            if (!value_pages) continue;
            T* value_row = value_pages + ((page * kv_heads + head) * PAGE + offset) * head_dim;
            if (finite)
                std::memcpy(value_row, value, head_dim * sizeof(T));
            else
                std::memset((void*)value_row, 0, head_dim * sizeof(T));
        }
    }
}

// The codes of a row, with zeros up to a multiple of 16, and its scale's exponent. A row with a number that is not
// finite, or of more than 127 · 2^121, is NaN.
template <class T>
static uint8_t encode(const T* x, int64_t count, int8* codes) {
    const float most = largest(x, count);
    if (!(most <= 127.f * 0x1p121f)) {
        std::memset(codes, 0, padded_depth(count));
        return NOT_A_NUMBER;
    }
    int32_t bits;
    std::memcpy(&bits, &most, sizeof bits);
    // 127 is 2^6 times a fraction of 0x7e0000: a larger one needs the next power of two. At least that of the smallest
    // normal number, since a scale is never denormal.
    const int32_t exponent = std::max(1, ((bits + 0x1ffff) >> 23) - 6);
    const f32x16 inverse = splat(scale_of(254 - exponent));
    for (int64_t i = 0; i < count; i += LANES) narrow(codes + i, load_first(x + i, count - i) * inverse);
    return exponent;
}

// As `write_pages`, of numbers that `round_cached` has rounded: their codes are exact.
template <class T>
static void write_codes(const T* k, const T* v, const int64_t* slots, int8* key_pages, int8* value_pages, int64_t tokens,
                        int64_t kv_heads, int64_t head_dim) {
#pragma omp parallel for if (tokens * kv_heads * head_dim > 1024)
    for (int64_t token = 0; token < tokens; token++) {
        const int64_t page = slots[token] / PAGE, offset = slots[token] % PAGE;
        int8* codes = scratch<int8>(head_dim, 0);
        for (int64_t head = 0; head < kv_heads; head++) {
            const int64_t row = (token * kv_heads + head) * head_dim, of_head = page * kv_heads + head;
            int8* keys = key_pages + of_head * (head_dim + SCALES) * PAGE;
            uint8_t* scales = (uint8_t*)keys + head_dim * PAGE + offset;
            scales[0] = encode(k + row, head_dim, codes);
            scales[PAGE] = encode(v + row, head_dim, value_pages + (of_head * PAGE + offset) * head_dim);
            if (scales[PAGE] == NOT_A_NUMBER) {
                scales[0] = NOT_A_NUMBER, scales[PAGE] = 0;
                std::memset(codes, 0, head_dim);
            }
            for (int64_t d = 0; d < head_dim; d++) keys[d * PAGE + offset] = codes[d];
        }
    }
}

// The numbers that the codes of each row represent.
template <class T>
static void round_cached(const T* x, T* out, int64_t rows, int64_t head_dim) {
#pragma omp parallel for schedule(static) if (rows * head_dim > OWN_WORDS)
    for (int64_t r = 0; r < rows; r++) {
        int8* codes = scratch<int8>(padded_depth(head_dim), 0);
        const f32x16 scale = splat(scale_of(encode(x + r * head_dim, head_dim, codes)));
        for (int64_t i = 0; i < head_dim; i += LANES)
            store_first(out + r * head_dim + i, load(codes + i) * scale, head_dim - i);
    }
}

#define EXPORT(T, suffix)                                                                                              \
    extern "C" void write_pages##suffix(const T* k, const T* v, const int64_t* slots, T* key_pages, T* value_pages,    \
                                        int64_t tokens, int64_t kv_heads, int64_t head_dim) {                          \
        write_pages<T>(k, v, slots, key_pages, value_pages, tokens, kv_heads, head_dim);                               \
    }                                                                                                                  \
    extern "C" void write_codes##suffix(const T* k, const T* v, const int64_t* slots, int8* key_pages,                 \
                                        int8* value_pages, int64_t tokens, int64_t kv_heads, int64_t head_dim) {       \
        write_codes<T>(k, v, slots, key_pages, value_pages, tokens, kv_heads, head_dim);                               \
    }                                                                                                                  \
    extern "C" void round_cached##suffix(const T* x, T* out, int64_t rows, int64_t head_dim) {                         \
        round_cached<T>(x, out, rows, head_dim);                                                                       \
    }                                                                                                                  \
    REPLAYABLE(write_pages##suffix)                                                                                    \
    REPLAYABLE(write_codes##suffix)                                                                                    \
    REPLAYABLE(round_cached##suffix)

EXPORT(float, _f32)
EXPORT(bf16, _bf16)
