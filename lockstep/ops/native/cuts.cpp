// Which tokens top-k, top-p and min-p leave to be drawn.
#include <algorithm>
#include <vector>

#include "vector.h"

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
    extern "C" void cut##suffix(const T* logits, T* allowed, const float* inverse_temperatures, const bool* cuts,     \
                                const int64_t* top_ks, const double* top_ps, const double* min_ps, int64_t rows,      \
                                int64_t vocab) {                                                                      \
        cut<T>(logits, allowed, inverse_temperatures, cuts, top_ks, top_ps, min_ps, rows, vocab);                     \
    }

EXPORT(float, _f32)
EXPORT(bf16, _bf16)
