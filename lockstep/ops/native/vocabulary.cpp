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

// A token with its logit, divided by the temperature. Larger ones come first; of equal ones, the lower token.
struct Candidate {
    float logit;
    int64_t token;
    bool operator<(const Candidate& other) const {
        return logit > other.logit || (logit == other.logit && token < other.token);
    }
};

// The first `count` candidates in order.
static std::vector<Candidate> first_candidates(const std::vector<float>& logits, int64_t count) {
    std::vector<Candidate> kept;
    kept.reserve(count);
    // A heap with the last of those kept on top, which few tokens come before.
    for (int64_t token = 0; token < (int64_t)logits.size(); token++) {
        const Candidate next{logits[token], token};
        if ((int64_t)kept.size() < count) {
            kept.push_back(next);
            if ((int64_t)kept.size() == count) std::make_heap(kept.begin(), kept.end());
        } else if (next < kept.front()) {
            std::pop_heap(kept.begin(), kept.end());
            kept.back() = next;
            std::push_heap(kept.begin(), kept.end());
        }
    }
    std::sort(kept.begin(), kept.end());
    return kept;
}

// Of candidates in order, the one with which their weights, added to `before`, reach `goal`; null if none does.
template <class Iterator>
static const Candidate* reaching(Iterator first, Iterator last, const std::vector<float>& weights, double goal,
                                 double& before) {
    for (; first != last; ++first)
        if ((before += weights[first->token]) >= goal) return &*first;
    return nullptr;
}

// The last token that top-k, and top-p among what that leaves, keep. `weights` are e^(logit - maximum).
static Candidate last_kept(const std::vector<float>& logits, const std::vector<float>& weights, int64_t top_k,
                           double top_p) {
    constexpr int64_t FEW = 256;  // that a heap puts in order faster than anything else
    const int64_t vocab = logits.size(), limit = top_k > 0 ? std::min(top_k, vocab) : vocab;
    if (limit == vocab && top_p >= 1) return {-INFINITY, vocab};
    double total = 0, before = 0;
    if (limit == vocab)
        for (const float weight : weights) total += weight;
    if (limit <= FEW || limit == vocab) {
        const std::vector<Candidate> few = first_candidates(logits, std::min(limit, FEW));
        if (top_p >= 1) return few.back();
        if (limit < vocab)
            for (const Candidate& candidate : few) total += weights[candidate.token];
        if (const Candidate* found = reaching(few.begin(), few.end(), weights, top_p * total, before)) return *found;
        if (limit <= FEW) return few.back();
    }
    std::vector<Candidate> all(vocab);
    for (int64_t token = 0; token < vocab; token++) all[token] = {logits[token], token};
    if (limit < vocab) {
        std::nth_element(all.begin(), all.begin() + limit - 1, all.end());
        const Candidate last = all[limit - 1];
        if (top_p >= 1) return last;
        all.resize(limit);
        for (int64_t token = 0; token < vocab; token++)
            if (!(last < Candidate{logits[token], token})) total += weights[token];
    }
    before = 0;
    for (int64_t from = 0, to = 16 * FEW; from < limit; from = to, to *= 8) {
        to = std::min(to, limit);
        if (to < limit) std::nth_element(all.begin() + from, all.begin() + to, all.end());
        std::sort(all.begin() + from, all.begin() + to);
        if (const Candidate* found = reaching(all.begin() + from, all.begin() + to, weights, top_p * total, before))
            return *found;
    }
    return all.back();
}

// `allowed` are the logits with -inf for every token that a row's cuts leave out: top-k, top-p among what that leaves,
// and min-p, relative to the likeliest token. Rows without `cuts`, or that are not finite, are copied.
template <class T>
static void cut(const T* logits, T* allowed, const float* inverse_temperatures, const bool* cuts, const int64_t* top_ks,
                const double* top_ps, const double* min_ps, int64_t rows, int64_t vocab) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t row = 0; row < rows; row++) {
        const T* x = logits + row * vocab;
        T* out = allowed + row * vocab;
        std::memcpy((void*)out, x, vocab * sizeof(T));
        if (!cuts[row]) continue;
        const float inverse = inverse_temperatures[row];
        std::vector<float> scaled(vocab), weights(vocab);
        bool finite = true;
        float highest = -INFINITY;
        for (int64_t i = 0; i < vocab; i += LANES) {
            store_first(scaled.data() + i, load_first(x + i, vocab - i) * inverse, vocab - i);
            for (int64_t j = i; j < std::min(vocab, i + LANES); j++) {
                finite &= scaled[j] < INFINITY;  // which a NaN is not
                highest = std::max(highest, scaled[j]);
            }
        }
        if (!finite || highest == -INFINITY) continue;
        for (int64_t i = 0; i < vocab; i += LANES)
            store_first(weights.data() + i, exp(load_first(scaled.data() + i, vocab - i) - highest), vocab - i);
        const Candidate last = last_kept(scaled, weights, top_ks[row], top_ps[row]);
        for (int64_t i = 0; i < vocab; i++)
            if (last < Candidate{scaled[i], i} || weights[i] < min_ps[row]) store_first(out + i, splat(-INFINITY), 1);
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
    }                                                                                                                 \
    extern "C" void cut##suffix(const T* logits, T* allowed, const float* inverse_temperatures, const bool* cuts,     \
                                const int64_t* top_ks, const double* top_ps, const double* min_ps, int64_t rows,      \
                                int64_t vocab) {                                                                      \
        cut<T>(logits, allowed, inverse_temperatures, cuts, top_ks, top_ps, min_ps, rows, vocab);                     \
    }

EXPORT(float, _f32)
EXPORT(bf16, _bf16)
