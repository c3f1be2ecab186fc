// Top-k and top-p: the bucket sums that locate a row's last allowed token, and the masking of tokens after it.
#include <algorithm>

#include "vector.h"

// Sort keys of logits, greater logits first. -0 is treated as 0.
static inline void keys_of(f32x16 logits, uint32_t (&keys)[LANES]) {
    float x[LANES];
    store(x, logits + 0.f);
    std::memcpy(keys, x, sizeof keys);
    for (uint32_t& key : keys) key ^= ~(uint32_t)((int32_t)key >> 31) & 0x7fffffffu;
}

// Logits per block; blocks without an allowed logit are skipped, and after top-k few are left.
constexpr int64_t BLOCK = 4 * LANES;

template <class T>
static inline bool any_left(const T* x, int64_t count) {
    if (count < BLOCK) return true;
    float highest[LANES];
    store(highest, maximum(maximum(load(x), load(x + LANES)), maximum(load(x + 2 * LANES), load(x + 3 * LANES))));
    int left = 0;
    for (const float each : highest) left |= each > -INFINITY;
    return left;
}

// Calls `visit(place, logits, keys, count)` for sixteen logits at a time, in blocks with any allowed logit.
template <class T, class Visit>
static inline void visit_left(const T* x, int64_t count, Visit visit) {
    uint32_t keys[LANES];
    for (int64_t block = 0; block < count; block += BLOCK) {
        if (!any_left(x + block, count - block)) continue;
        for (int64_t i = block; i < std::min(block + BLOCK, count); i += LANES) {
            const int64_t n = std::min(LANES, count - i);
            const f32x16 logits = load_first(x + i, n);
            keys_of(logits, keys);
            visit(i, logits, keys, n);
        }
    }
}

// What is summed per token: 1, or its weight as an integer in units of 2^-40 of the greatest weight, for exact sums.
static inline void measure(f32x16 logits, float inverse, float highest, bool by_weight, int64_t (&out)[LANES]) {
    if (!by_weight) return std::fill(out, out + LANES, 1);
    float weights[LANES];
    store(weights, exp(logits * inverse - highest) * 0x1p40f);
    for (int64_t lane = 0; lane < LANES; lane++) out[lane] = (int64_t)weights[lane];
}

// Bucket sums over the tokens whose key begins with the row's prefix, by the key's next byte, above `shift` bits.
template <class T>
static void bucket_sums(const T* logits, const int64_t* rows, const float* inverse_temperatures, const float* highest,
                        const int64_t* prefixes, int64_t* sums, bool by_weight, int64_t shift, int64_t count,
                        int64_t vocab) {
    constexpr int64_t BUCKETS = 256, COPIES = 4;
#pragma omp parallel for
    for (int64_t row = 0; row < count; row++) {
        const T* x = logits + rows[row] * vocab;
        const uint32_t prefix = (uint32_t)prefixes[row];
        // Neighboring tokens add to different copies: most are in a few buckets, and would depend on each other.
        int64_t found[COPIES][BUCKETS] = {}, measures[LANES];
        visit_left(x, vocab, [&](int64_t, f32x16 v, const uint32_t(&keys)[LANES], int64_t n) {
            uint32_t inside = 0;
            for (const uint32_t key : keys) inside |= key >> shift >> 8 == prefix;
            if (!inside) return;
            measure(v, inverse_temperatures[row], highest[row], by_weight, measures);
            for (int64_t lane = 0; lane < n; lane++)
                if (keys[lane] >> shift >> 8 == prefix)
                    found[lane % COPIES][keys[lane] >> shift & (BUCKETS - 1)] += measures[lane];
        });
        for (int64_t bucket = 0; bucket < BUCKETS; bucket++)
            for (const auto& copy : found) sums[row * BUCKETS + bucket] += copy[bucket];
    }
}

// -inf for every token whose key, without its last `shift` bits, is after the row's prefix, and for those at the prefix
// once their sum has reached `remaining`.
template <class T>
static void keep(T* logits, const int64_t* rows, const float* inverse_temperatures, const float* highest,
                 const int64_t* prefixes, const int64_t* remaining, bool by_weight, int64_t shift, int64_t count,
                 int64_t vocab) {
#pragma omp parallel for
    for (int64_t row = 0; row < count; row++) {
        T* x = logits + rows[row] * vocab;
        const uint32_t prefix = (uint32_t)prefixes[row];
        int64_t left = remaining[row], measures[LANES];
        visit_left(x, vocab, [&](int64_t i, f32x16 v, const uint32_t(&keys)[LANES], int64_t n) {
            uint32_t out = 0, tied = 0;
            for (const uint32_t key : keys) out |= key >> shift > prefix, tied |= key >> shift == prefix;
            if (!(out | tied)) return;
            if (tied) measure(v, inverse_temperatures[row], highest[row], by_weight, measures);
            float kept[LANES];
            store(kept, v);
            for (int64_t lane = 0; lane < n; lane++) {
                const uint32_t key = keys[lane] >> shift;
                if (key > prefix || (key == prefix && left <= 0)) kept[lane] = -INFINITY;
                if (key == prefix) left -= measures[lane];
            }
            store_first(x + i, load(kept), n);
        });
    }
}

// Copies the logits, with -inf for those that, divided by the temperature, are below `lowest`.
template <class T>
static void drop_below(const T* logits, T* out, const float* inverse_temperatures, const float* lowest, int64_t rows,
                       int64_t vocab) {
#pragma omp parallel for
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = row * vocab; i < (row + 1) * vocab; i += LANES) {
            const int64_t n = std::min(LANES, (row + 1) * vocab - i);
            const f32x16 v = load_first(logits + i, n);
            store_first(out + i, where_less(v * inverse_temperatures[row], splat(lowest[row]), splat(-INFINITY), v), n);
        }
}

#define EXPORT(T, suffix)                                                                                             \
    extern "C" void bucket_sums##suffix(const T* logits, const int64_t* rows, const float* inverse_temperatures,      \
                                        const float* highest, const int64_t* prefixes, int64_t* sums,                 \
                                        int64_t by_weight, int64_t shift, int64_t count, int64_t vocab) {             \
        bucket_sums<T>(logits, rows, inverse_temperatures, highest, prefixes, sums, by_weight, shift, count, vocab);  \
    }                                                                                                                 \
    extern "C" void keep##suffix(T* logits, const int64_t* rows, const float* inverse_temperatures,                   \
                                 const float* highest, const int64_t* prefixes, const int64_t* remaining,             \
                                 int64_t by_weight, int64_t shift, int64_t count, int64_t vocab) {                    \
        keep<T>(logits, rows, inverse_temperatures, highest, prefixes, remaining, by_weight, shift, count, vocab);    \
    }                                                                                                                 \
    extern "C" void drop_below##suffix(const T* logits, T* out, const float* inverse_temperatures,                    \
                                       const float* lowest, int64_t rows, int64_t vocab) {                            \
        drop_below<T>(logits, out, inverse_temperatures, lowest, rows, vocab);                                        \
    }

EXPORT(float, _f32)
EXPORT(bf16, _bf16)
