// Log-probabilities over the vocabulary, their gradient, and drawing a token.
#include <algorithm>
#include <limits>
#include <vector>

#include "replay.h"
#include "vector.h"

// The vocabulary is reduced in at most this many pieces, joined in a binary tree. Their bounds are arguments: wherever
// a head sharded over 2, 4 or 8 ranks is split, so that each rank reduces whole pieces (`piece_bounds`).
constexpr int64_t PIECES = 16;

// For a set of logits x (already divided by the temperature): m = max x, s = Σ e^(x-m), t = Σ e^(x-m) x.
struct Mass {
    float m = -std::numeric_limits<float>::infinity(), s = 0, t = 0;
};

static Mass join(Mass a, Mass b) {
    if (b.m == -std::numeric_limits<float>::infinity()) return a;
    if (a.m == -std::numeric_limits<float>::infinity()) return b;
    const float m = std::max(a.m, b.m), wa = exp_float(a.m - m), wb = exp_float(b.m - m);
    return {m, a.s * wa + b.s * wb, a.t * wa + b.t * wb};
}

template <class T>
static Mass reduce(const T* logits, int64_t count, float inverse_temperature) {
    if (count <= 0) return {};
    const float lowest = -std::numeric_limits<float>::infinity();
    f32x16 highest = splat(lowest);
    for (int64_t i = 0; i < count; i += LANES)
        highest = maximum(highest, keep_first(load_first(logits + i, count - i) * inverse_temperature, count - i, lowest));
    Mass mass;
    mass.m = maximum(highest);
    if (mass.m == lowest) {
        int broken = 0;  // a maximum may drop a NaN
        for (int64_t i = 0; i < count; i++) broken |= wide(logits[i]) != wide(logits[i]);
        if (broken) mass.m = NAN;
        return mass;
    }
    f32x16 s = {}, t = {};
    for (int64_t i = 0; i < count; i += LANES) {
        f32x16 x = load_first(logits + i, count - i) * inverse_temperature;
        f32x16 weight = exp(keep_first(x - mass.m, count - i, lowest));
        s += weight;
        // A masked token has weight 0 and logit -inf, whose product is NaN.
        t = where_less(f32x16{}, weight, multiply_add(weight, x, t), t);
    }
    mass.s = sum(s);
    mass.t = sum(t);
    return mass;
}

// Piece p has the tokens from bounds[p] to bounds[p + 1]; pieces after the last are empty.
template <class T>
static void reduce_pieces(const T* logits, const int64_t* bounds, int64_t count, float inverse_temperature,
                          Mass (&pieces)[PIECES]) {
    for (int64_t p = 0; p < PIECES; p++)
        pieces[p] = p < count ? reduce(logits + bounds[p], bounds[p + 1] - bounds[p], inverse_temperature) : Mass{};
}

static Mass join(const Mass (&pieces)[PIECES]) {
    Mass level[PIECES];
    std::copy(pieces, pieces + PIECES, level);
    for (int64_t n = PIECES / 2; n > 0; n /= 2)
        for (int64_t i = 0; i < n; i++) level[i] = join(level[2 * i], level[2 * i + 1]);
    return level[0];
}

template <class T>
static float element(const T* p) {
    return first_of(load_first(p, 1));
}

// Joins a row's pieces; `chosen` is the target's logit, divided by the temperature.
static void finish(const Mass (&pieces)[PIECES], float chosen, float& out, float& entropy, float& normalizer) {
    const Mass all = join(pieces);
    normalizer = all.m + log_float(all.s);
    out = chosen - normalizer;
    entropy = normalizer - all.t / all.s;
}

template <class T>
static void log_probs(const T* logits, const int64_t* targets, const float* inverse_temperatures, const int64_t* bounds,
                      float* out, float* entropies, float* normalizers, int64_t rows, int64_t vocab, int64_t count) {
#pragma omp parallel for
    for (int64_t row = 0; row < rows; row++) {
        const T* x = logits + row * vocab;
        const float inverse = inverse_temperatures[row];
        Mass pieces[PIECES];
        reduce_pieces(x, bounds, count, inverse, pieces);
        finish(pieces, element(x + targets[row]) * inverse, out[row], entropies[row], normalizers[row]);
    }
}

// The same in two steps, for ranks that each have some of the pieces: masses [row][piece][m, s, t], then the join.
template <class T>
static void masses(const T* logits, const float* inverse_temperatures, const int64_t* bounds, float* out, int64_t rows,
                   int64_t vocab, int64_t count) {
#pragma omp parallel for
    for (int64_t row = 0; row < rows; row++) {
        Mass pieces[PIECES];
        reduce_pieces(logits + row * vocab, bounds, count, inverse_temperatures[row], pieces);
        std::memcpy(out + row * count * 3, pieces, count * sizeof(Mass));
    }
}

extern "C" void join_masses_f32(const float* masses, const float* chosen, float* out, float* entropies,
                                float* normalizers, int64_t rows, int64_t count) {
#pragma omp parallel for
    for (int64_t row = 0; row < rows; row++) {
        Mass pieces[PIECES];
        std::memcpy((void*)pieces, masses + row * count * 3, count * sizeof(Mass));
        finish(pieces, chosen[row], out[row], entropies[row], normalizers[row]);
    }
}
REPLAYABLE(join_masses_f32)

// In place: replaces the logits with their gradient. A negative target is in another rank's part of the vocabulary.
template <class T>
static void log_probs_backward(T* logits, const int64_t* targets, const float* inverse_temperatures,
                               const float* normalizers, const float* grad_out, int64_t rows, int64_t vocab) {
#pragma omp parallel for
    for (int64_t row = 0; row < rows; row++) {
        T* x = logits + row * vocab;
        const float inverse = inverse_temperatures[row], factor = grad_out[row] * inverse;
        const int64_t target = targets[row];
        float chosen = 0;
        if (target >= 0) chosen = factor * (1.f - exp_float(element(x + target) * inverse - normalizers[row]));
        for (int64_t i = 0; i < vocab; i += LANES) {
            f32x16 p = exp(load_first(x + i, vocab - i) * inverse - normalizers[row]);
            store_first(x + i, p * -factor, vocab - i);
        }
        if (target >= 0) store_first(x + target, splat(chosen), 1);
    }
}

// Inverse transform: the first token at which the running sum of weights exceeds uniform · total. A negative uniform
// draws the likeliest token. Logits of -inf are never drawn. The row's masses determine the token's piece; the part of
// the vocabulary with that piece then locates the token in it.
struct Choice {
    int64_t piece;     // the first one if no logit is finite
    float highest;     // of the whole row
    double remaining;  // weight in the piece of the tokens before the drawn one
};

static Choice choose(const Mass (&pieces)[PIECES], int64_t count, double uniform) {
    const float highest = join(pieces).m;
    if (uniform < 0) {
        for (int64_t p = 0; p < count; p++)
            if (pieces[p].m == highest) return {p, highest, 0};
        return {0, highest, 0};
    }
    double total = 0, weights[PIECES];
    for (int64_t p = 0; p < count; p++) total += weights[p] = (double)pieces[p].s * exp_float(pieces[p].m - highest);
    double remaining = uniform * total;
    int64_t p = 0;
    while (p < count - 1 && remaining >= weights[p]) remaining -= weights[p++];
    // If rounding leaves a remainder at the end, the last token with any weight is drawn.
    if (weights[p] > 0) return {p, highest, remaining};
    while (p > 0 && !(weights[p] > 0)) p--;
    return {p, highest, std::numeric_limits<double>::infinity()};
}

template <class T>
static int64_t walk(const T* x, int64_t first, int64_t stop, float inverse, bool likeliest, const Choice& choice) {
    int64_t token = first;
    double remaining = choice.remaining;
    for (int64_t i = first; i < stop && remaining >= 0; i += LANES) {
        const int64_t n = std::min(LANES, stop - i);
        float logits[LANES], w[LANES];
        const f32x16 scaled = load_first(x + i, n) * inverse;
        store(logits, scaled);
        store(w, keep_first(exp(scaled - choice.highest), n, 0.f));
        for (int64_t lane = 0; lane < n && remaining >= 0; lane++) {
            if (likeliest && logits[lane] == choice.highest) return i + lane;
            if (!likeliest && w[lane] > 0) {
                token = i + lane;
                remaining -= w[lane];
            }
        }
    }
    return token;
}

// `logits` are those of a part of the vocabulary; `bounds` of all pieces are relative to it. The token is -1 if it is
// in another part. `scaled` gets the tokens' logits divided by the temperature.
template <class T>
static void draw(const T* logits, const float* inverse_temperatures, const double* uniforms, const float* masses,
                 const int64_t* bounds, int64_t* tokens, float* scaled, int64_t rows, int64_t part, int64_t count) {
#pragma omp parallel for
    for (int64_t row = 0; row < rows; row++) {
        Mass pieces[PIECES];
        std::memcpy((void*)pieces, masses + row * count * 3, count * sizeof(Mass));
        const Choice choice = choose(pieces, count, uniforms[row]);
        const int64_t first = bounds[choice.piece], stop = bounds[choice.piece + 1];
        const bool held = first >= 0 && stop <= part;
        const T* x = logits + row * part;
        const float inverse = inverse_temperatures[row];
        tokens[row] = held ? walk(x, first, stop, inverse, uniforms[row] < 0, choice) : -1;
        scaled[row] = held ? wide(x[tokens[row]]) * inverse : 0.f;
    }
}

#define EXPORT(T, suffix)                                                                                             \
    extern "C" void log_probs##suffix(const T* logits, const int64_t* targets, const float* inverse_temperatures,     \
                                      const int64_t* bounds, float* out, float* entropies, float* normalizers,        \
                                      int64_t rows, int64_t vocab, int64_t count) {                                   \
        log_probs<T>(logits, targets, inverse_temperatures, bounds, out, entropies, normalizers, rows, vocab, count); \
    }                                                                                                                 \
    extern "C" void masses##suffix(const T* logits, const float* inverse_temperatures, const int64_t* bounds,         \
                                   float* out, int64_t rows, int64_t vocab, int64_t count) {                          \
        masses<T>(logits, inverse_temperatures, bounds, out, rows, vocab, count);                                     \
    }                                                                                                                 \
    extern "C" void log_probs_backward##suffix(T* logits, const int64_t* targets, const float* inverse_temperatures,  \
                                               const float* normalizers, const float* grad_out, int64_t rows,         \
                                               int64_t vocab) {                                                       \
        log_probs_backward<T>(logits, targets, inverse_temperatures, normalizers, grad_out, rows, vocab);             \
    }                                                                                                                 \
    extern "C" void draw##suffix(const T* logits, const float* inverse_temperatures, const double* uniforms,          \
                                 const float* masses, const int64_t* bounds, int64_t* tokens, float* scaled,          \
                                 int64_t rows, int64_t part, int64_t count) {                                         \
        draw<T>(logits, inverse_temperatures, uniforms, masses, bounds, tokens, scaled, rows, part, count);           \
    }                                                                                                                 \
    REPLAYABLE(masses##suffix)                                                                                        \
    REPLAYABLE(draw##suffix)

EXPORT(float, _f32)
EXPORT(bf16, _bf16)
