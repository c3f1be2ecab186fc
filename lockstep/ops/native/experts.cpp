// The parts of a mixture of experts around its products: routing and weights, sorting rows by expert, and the weighted
// sum of a token's expert outputs. A token's bits depend on that token alone.
#include <algorithm>
#include <vector>

#include "replay.h"
#include "vector.h"

constexpr int64_t PARALLEL_ELEMENTS = 16384;

enum Scoring { SOFTMAX, SOFTMAX_OF_CHOSEN, SIGMOID };

static inline float sigmoid(float x) { return 1.f / (1.f + exp_float(-x)); }

// The sum of e^(x - highest) over all scores of a row, in a fixed order.
static float sum_of_powers(const float* x, int64_t count, float highest) {
    f32x16 total = {};
    for (int64_t i = 0; i < count; i += LANES)
        total += keep_first(exp(load_first(x + i, count - i) - splat(highest)), count - i, 0.f);
    return sum(total);
}

// The `count` highest candidates, in descending order, ties by ascending index. A NaN is lower than any number.
static void choose(const float* scores, const char* allowed, int64_t candidates, int64_t count, int64_t* chosen) {
    int64_t held = 0;
    const auto above = [&](int64_t a, int64_t b) {
        return scores[a] > scores[b] || (scores[b] != scores[b] && scores[a] == scores[a]);
    };
    for (int64_t e = 0; e < candidates; e++) {
        if (allowed && !allowed[e]) continue;
        if (held == count && !above(e, chosen[held - 1])) continue;
        int64_t place = held < count ? held++ : held - 1;
        for (; place > 0 && above(e, chosen[place - 1]); place--) chosen[place] = chosen[place - 1];
        chosen[place] = e;
    }
}

// A group is ranked by the sum of its two highest scores (arXiv 2412.19437).
static void allow_groups(const float* scores, int64_t experts, int64_t groups, int64_t kept, char* allowed) {
    const int64_t size = experts / groups;
    std::vector<float> worth(groups);
    std::vector<int64_t> chosen(std::max<int64_t>(kept, 2));
    for (int64_t g = 0; g < groups; g++) {
        const int64_t count = std::min<int64_t>(2, size);
        choose(scores + g * size, nullptr, size, count, chosen.data());
        worth[g] = scores[g * size + chosen[0]] + (count > 1 ? scores[g * size + chosen[1]] : 0.f);
    }
    choose(worth.data(), nullptr, groups, kept, chosen.data());
    std::fill(allowed, allowed + experts, 0);
    for (int64_t i = 0; i < kept; i++) std::fill_n(allowed + chosen[i] * size, size, 1);
}

// logits [tokens][experts]; weights and chosen [tokens][active]. `bias` is only added to sigmoid scores for the choice.
extern "C" void route_f32(const float* logits, const float* bias, float* weights, int64_t* chosen, int64_t tokens,
                          int64_t experts, int64_t active, int64_t scoring, int64_t normalize, float scale,
                          int64_t groups, int64_t groups_kept) {
#pragma omp parallel if (tokens * experts > PARALLEL_ELEMENTS)
    {
        std::vector<float> scores(experts), choices(experts);
        std::vector<char> allowed(experts);
#pragma omp for
        for (int64_t token = 0; token < tokens; token++) {
            const float* row = logits + token * experts;
            float* out = weights + token * active;
            int64_t* own = chosen + token * active;
            const float* by = row;
            if (scoring == SIGMOID) {
                for (int64_t e = 0; e < experts; e++) {
                    scores[e] = sigmoid(row[e]);
                    choices[e] = bias ? scores[e] + bias[e] : scores[e];
                }
                by = choices.data();
            }
            if (groups > 1) allow_groups(by, experts, groups, groups_kept, allowed.data());
            choose(by, groups > 1 ? allowed.data() : nullptr, experts, active, own);
            if (scoring == SIGMOID) {
                for (int64_t j = 0; j < active; j++) out[j] = scores[own[j]];
            } else {
                const float highest = row[own[0]];
                for (int64_t j = 0; j < active; j++) out[j] = exp_float(row[own[j]] - highest);
            }
            float total = 0.f;
            if (scoring == SOFTMAX)
                total = sum_of_powers(row, experts, row[own[0]]);
            else
                for (int64_t j = 0; j < active; j++) total += out[j];
            for (int64_t j = 0; j < active; j++)
                out[j] = (scoring == SIGMOID && !normalize ? out[j] : out[j] / total) * scale;
        }
    }
}
REPLAYABLE(route_f32)

// Sorts rows by expert, then token: `starts` [experts + 1] of each expert's rows, `places` [count] with the row of each
// choice, `sources` [count] with the choice of each row.
extern "C" void order_by_expert_f32(const int64_t* chosen, int64_t* starts, int64_t* places, int64_t* sources,
                                    int64_t count, int64_t experts) {
    std::vector<int64_t> next(experts + 1, 0);
    for (int64_t i = 0; i < count; i++) next[chosen[i] + 1]++;
    for (int64_t e = 0; e < experts; e++) next[e + 1] += next[e];
    std::copy(next.begin(), next.end(), starts);
    for (int64_t i = 0; i < count; i++) {
        places[i] = next[chosen[i]]++;
        sources[places[i]] = i;
    }
}
REPLAYABLE(order_by_expert_f32)

// out [count][dim]: the token of each row; a token has `active` choices.
template <class T>
static void dispatch(const T* x, const int64_t* sources, T* out, int64_t count, int64_t active, int64_t dim) {
#pragma omp parallel for if (count * dim > PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < count; row++) std::copy_n(x + sources[row] / active * dim, dim, out + row * dim);
}

// out [tokens][dim]: the sum over a token's choices, in order, of weight times row, in float32 and rounded once.
// Without weights, the plain sum.
template <class T>
static void combine(const T* rows, const float* weights, const int64_t* places, T* out, int64_t tokens, int64_t active,
                    int64_t dim) {
#pragma omp parallel for if (tokens * active * dim > PARALLEL_ELEMENTS)
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t i = 0; i < dim; i += LANES) {
            f32x16 total = {};
            for (int64_t j = token * active; j < (token + 1) * active; j++)
                total = multiply_add(load_first(rows + places[j] * dim + i, dim - i), weights ? weights[j] : 1.f, total);
            store_first(out + token * dim + i, total, dim - i);
        }
}

template <class T>
static void combine_backward(const T* grad, const T* rows, const float* weights, const int64_t* places, T* grad_rows,
                             float* grad_weights, int64_t tokens, int64_t active, int64_t dim) {
#pragma omp parallel for if (tokens * active * dim > PARALLEL_ELEMENTS)
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t j = token * active; j < (token + 1) * active; j++) {
            const T* row = rows + places[j] * dim;
            f32x16 products = {};
            for (int64_t i = 0; i < dim; i += LANES) {
                const f32x16 g = load_first(grad + token * dim + i, dim - i);
                products = multiply_add(g, load_first(row + i, dim - i), products);
                store_first(grad_rows + places[j] * dim + i, g * weights[j], dim - i);
            }
            grad_weights[j] = sum(products);
        }
}

#define EXPORT(T, suffix)                                                                                             \
    extern "C" void dispatch##suffix(const T* x, const int64_t* sources, T* out, int64_t count, int64_t active,       \
                                     int64_t dim) {                                                                   \
        dispatch<T>(x, sources, out, count, active, dim);                                                             \
    }                                                                                                                 \
    extern "C" void combine##suffix(const T* rows, const float* weights, const int64_t* places, T* out,               \
                                    int64_t tokens, int64_t active, int64_t dim) {                                    \
        combine<T>(rows, weights, places, out, tokens, active, dim);                                                  \
    }                                                                                                                 \
    extern "C" void combine_backward##suffix(const T* grad, const T* rows, const float* weights,                      \
                                             const int64_t* places, T* grad_rows, float* grad_weights,                \
                                             int64_t tokens, int64_t active, int64_t dim) {                           \
        combine_backward<T>(grad, rows, weights, places, grad_rows, grad_weights, tokens, active, dim);               \
    }                                                                                                                 \
    REPLAYABLE(dispatch##suffix)                                                                                      \
    REPLAYABLE(combine##suffix)

EXPORT(float, _f32)
EXPORT(bf16, _bf16)
