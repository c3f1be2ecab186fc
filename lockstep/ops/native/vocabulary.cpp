// Log-probabilities over the vocabulary, their gradient, and the draw of a token.
#include <algorithm>
#include <limits>
#include <vector>

#include "vector.h"

// The vocabulary is reduced in this many pieces, joined in a binary tree: a head sharded over 2, 4 or 8 ranks
// reduces whole pieces and meets in the same tree.
constexpr int64_t PIECES = 8;

// Of a set of logits x (already divided by the temperature): m = max x, s = Σ e^(x-m), t = Σ e^(x-m) x.
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
        int broken = 0;  // a maximum may lose a NaN
        for (int64_t i = 0; i < count; i++) broken |= wide(logits[i]) != wide(logits[i]);
        if (broken) mass.m = NAN;
        return mass;
    }
    f32x16 s = {}, t = {};
    for (int64_t i = 0; i < count; i += LANES) {
        f32x16 x = load_first(logits + i, count - i) * inverse_temperature;
        f32x16 weight = exp(keep_first(x - mass.m, count - i, lowest));
        s += weight;
        // A token that is cut out has weight 0 and the logit -inf, whose product is no number.
        t = where_less(f32x16{}, weight, multiply_add(weight, x, t), t);
    }
    mass.s = sum(s);
    mass.t = sum(t);
    return mass;
}

template <class T>
static void reduce_pieces(const T* logits, int64_t vocab, float inverse_temperature, Mass (&pieces)[PIECES]) {
    const int64_t width = (vocab + PIECES - 1) / PIECES;
    for (int64_t p = 0; p < PIECES; p++)
        pieces[p] = reduce(logits + p * width, std::min(width, vocab - p * width), inverse_temperature);
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

template <class T>
static void log_probs(const T* logits, const int64_t* targets, const float* inverse_temperatures, float* out,
                      float* entropies, float* normalizers, int64_t rows, int64_t vocab) {
#pragma omp parallel for
    for (int64_t row = 0; row < rows; row++) {
        const T* x = logits + row * vocab;
        Mass pieces[PIECES];
        reduce_pieces(x, vocab, inverse_temperatures[row], pieces);
        const Mass all = join(pieces);
        normalizers[row] = all.m + log_float(all.s);
        out[row] = element(x + targets[row]) * inverse_temperatures[row] - normalizers[row];
        entropies[row] = normalizers[row] - all.t / all.s;
    }
}

// In place: the logits become the gradient with respect to them. A negative target is not among them: another rank
// holds its part of the vocabulary.
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

// Inverse transform: the first token at which the running sum of weights passes uniform · total. A negative
// uniform asks for the likeliest token. Logits of -inf are never drawn.
template <class T>
static void draw(const T* logits, const float* inverse_temperatures, const double* uniforms, int64_t* tokens,
                 int64_t rows, int64_t vocab) {
#pragma omp parallel for
    for (int64_t row = 0; row < rows; row++) {
        const T* x = logits + row * vocab;
        const float inverse = inverse_temperatures[row];
        Mass pieces[PIECES];
        reduce_pieces(x, vocab, inverse, pieces);
        const Mass all = join(pieces);
        const int64_t width = (vocab + PIECES - 1) / PIECES;
        int64_t token = -1;
        if (uniforms[row] < 0) {
            for (int64_t i = 0; i < vocab && token < 0; i++)
                if (element(x + i) * inverse == all.m) token = i;
        } else {
            double total = 0, weights[PIECES];
            for (int64_t p = 0; p < PIECES; p++) total += weights[p] = (double)pieces[p].s * exp_float(pieces[p].m - all.m);
            double remaining = uniforms[row] * total;
            int64_t p = 0;
            while (p < PIECES - 1 && remaining >= weights[p]) remaining -= weights[p++];
            // Rounding may leave a little over at the end: then the last token with any weight is taken.
            for (; token < 0 && p >= 0; p--, remaining = std::numeric_limits<double>::infinity())
                for (int64_t i = p * width; i < std::min(vocab, (p + 1) * width) && remaining >= 0; i += LANES) {
                    const int64_t n = std::min(vocab, (p + 1) * width) - i;
                    float w[LANES];
                    store(w, keep_first(exp(load_first(x + i, n) * inverse - all.m), n, 0.f));
                    for (int64_t lane = 0; lane < std::min(n, LANES) && remaining >= 0; lane++)
                        if (w[lane] > 0) {
                            token = i + lane;
                            remaining -= w[lane];
                        }
                }
        }
        tokens[row] = token < 0 ? 0 : token;  // only if every logit is NaN
    }
}

#define EXPORT(T, suffix)                                                                                             \
    extern "C" void log_probs##suffix(const T* logits, const int64_t* targets, const float* inverse_temperatures,     \
                                      float* out, float* entropies, float* normalizers, int64_t rows, int64_t vocab) { \
        log_probs<T>(logits, targets, inverse_temperatures, out, entropies, normalizers, rows, vocab);                \
    }                                                                                                                 \
    extern "C" void log_probs_backward##suffix(T* logits, const int64_t* targets, const float* inverse_temperatures,  \
                                               const float* normalizers, const float* grad_out, int64_t rows,         \
                                               int64_t vocab) {                                                       \
        log_probs_backward<T>(logits, targets, inverse_temperatures, normalizers, grad_out, rows, vocab);             \
    }                                                                                                                 \
    extern "C" void draw##suffix(const T* logits, const float* inverse_temperatures, const double* uniforms,          \
                                 int64_t* tokens, int64_t rows, int64_t vocab) {                                      \
        draw<T>(logits, inverse_temperatures, uniforms, tokens, rows, vocab);                                         \
    }

EXPORT(float, _f32)
EXPORT(bf16, _bf16)
