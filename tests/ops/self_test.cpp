// Prints a digest of what the kernels compute on fixed data: in one arithmetic the same on every processor.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>
#if defined(LOCKSTEP_TILES) && !defined(LOCKSTEP_PLAIN)
#include <sys/syscall.h>
#include <unistd.h>
#endif

struct bf16;
extern "C" {
void product_f32(const float*, int64_t, int64_t, const float*, int64_t, int64_t, const uint32_t*, float*, int64_t,
                 int64_t, int64_t, int64_t);
void product_bf16(const bf16*, int64_t, int64_t, const bf16*, int64_t, int64_t, const uint32_t*, bf16*, int64_t,
                  int64_t, int64_t, int64_t);
void product_sums_bf16(const bf16*, int64_t, int64_t, const bf16*, int64_t, int64_t, const uint32_t*, float*, int64_t,
                       int64_t, int64_t, int64_t);
int64_t int8_words(int64_t, int64_t);
int64_t int4_words(int64_t, int64_t, int64_t);
void pack_int8_f32(const float*, int64_t, const float*, uint32_t*, int64_t, int64_t);
void pack_int4_bf16(const bf16*, int64_t, uint32_t*, int64_t, int64_t, int64_t);
void int8_product_f32(const float*, int64_t, const uint32_t*, float*, int64_t, int64_t, int64_t);
void int4_product_bf16(const bf16*, int64_t, const uint32_t*, bf16*, int64_t, int64_t, int64_t, int64_t, int64_t);
void round_int8_f32(const float*, int64_t, const float*, float*, int64_t, int64_t);
void round_int4_bf16(const bf16*, bf16*, int64_t, int64_t);
void rms_norm_f32(const float*, const float*, float*, float*, int64_t, int64_t, float, int64_t);
void rms_norm_backward_f32(const float*, const float*, const float*, const float*, float*, float*, int64_t, int64_t,
                           int64_t);
void silu_mul_f32(const float*, const float*, float*, int64_t);
void gelu_mul_f32(const float*, const float*, float*, int64_t);
void gelu_mul_backward_f32(const float*, const float*, const float*, float*, float*, int64_t);
void relu_squared_f32(const float*, float*, int64_t);
void relu_squared_backward_f32(const float*, const float*, float*, int64_t);
void sigmoid_mul_f32(const float*, const float*, float*, int64_t);
void sigmoid_mul_backward_f32(const float*, const float*, const float*, float*, float*, int64_t);
void clamped_swiglu_f32(const float*, const float*, float*, int64_t);
void clamped_swiglu_backward_f32(const float*, const float*, const float*, float*, float*, int64_t);
void column_sums_f32(const float*, float*, int64_t, int64_t);
void rotary_f32(const float*, const float*, const float*, float*, int64_t, int64_t, int64_t, int64_t, int64_t, float);
void route_f32(const float*, const float*, float*, int64_t*, int64_t, int64_t, int64_t, int64_t, int64_t, float, int64_t,
               int64_t);
void order_by_expert_f32(const int64_t*, int64_t*, int64_t*, int64_t*, int64_t, int64_t);
void combine_f32(const float*, const float*, const int64_t*, float*, int64_t, int64_t, int64_t);
void grouped_product_f32(const float*, const float*, int64_t, int64_t, int64_t, const uint32_t*, float*, const int64_t*,
                         int64_t, int64_t, int64_t);
void grouped_product_bf16(const bf16*, const bf16*, int64_t, int64_t, int64_t, const uint32_t*, bf16*, const int64_t*,
                          int64_t, int64_t, int64_t);
void grouped_outer_f32(const float*, const float*, float*, const int64_t*, int64_t, int64_t, int64_t);
void block_squares_f32(const float*, double*, int64_t);
void integer_squares_f32(const float*, int64_t*, int64_t, int64_t);
void join_masses_f32(const float*, const float*, float*, float*, float*, int64_t, int64_t);
void write_pages_f32(const float*, const float*, const int64_t*, float*, float*, int64_t, int64_t, int64_t);
void attend_f32(const float*, float*, float*, const float*, const float*, const int32_t*, const int32_t*,
                const int32_t*, int64_t, int64_t, int64_t, int64_t, int64_t, float, int64_t, const float*);
void attend_backward_f32(const float*, const float*, const float*, const float*, const float*, const float*, float*,
                         float*, float*, const int32_t*, const int32_t*, const int32_t*, int64_t, int64_t, int64_t,
                         int64_t, float, int64_t);
void sink_gradient_f32(const float*, const float*, const float*, const float*, float*, int64_t, int64_t, int64_t);
void write_codes_f32(const float*, const float*, const int64_t*, int8_t*, int8_t*, int64_t, int64_t, int64_t);
void write_codes_bf16(const bf16*, const bf16*, const int64_t*, int8_t*, int8_t*, int64_t, int64_t, int64_t);
void round_cached_f32(const float*, float*, int64_t, int64_t);
void round_cached_bf16(const bf16*, bf16*, int64_t, int64_t);
void attend_codes_f32(const float*, float*, float*, const int8_t*, const int8_t*, const int32_t*, const int32_t*,
                      const int32_t*, int64_t, int64_t, int64_t, int64_t, int64_t, float, int64_t, const float*);
void attend_codes_bf16(const bf16*, bf16*, float*, const int8_t*, const int8_t*, const int32_t*, const int32_t*,
                       const int32_t*, int64_t, int64_t, int64_t, int64_t, int64_t, float, int64_t, const float*);
void write_pages_bf16(const bf16*, const bf16*, const int64_t*, bf16*, bf16*, int64_t, int64_t, int64_t);
void attend_bf16(const bf16*, bf16*, float*, const bf16*, const bf16*, const int32_t*, const int32_t*, const int32_t*,
                 int64_t, int64_t, int64_t, int64_t, int64_t, float, int64_t, const float*);
void attend_backward_bf16(const bf16*, const bf16*, const bf16*, const bf16*, const bf16*, const float*, float*, bf16*,
                          bf16*, const int32_t*, const int32_t*, const int32_t*, int64_t, int64_t, int64_t, int64_t,
                          float, int64_t);
void delta_f32(const float*, const float*, const float*, const float*, const float*, const float*, float*, float*,
               const int32_t*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);
void delta_backward_f32(const float*, const float*, const float*, const float*, const float*, const float*, const float*,
                        const float*, float*, float*, float*, float*, float*, float*, const int32_t*, int64_t, int64_t,
                        int64_t, int64_t, int64_t, int64_t, int64_t);
void paged_delta_bf16(const bf16*, const bf16*, const bf16*, const bf16*, const bf16*, const bf16*, bf16*, float*, bf16*,
                      float*, float*, float*, bf16*, const int32_t*, const int32_t*, const int32_t*, const int32_t*,
                      const int32_t*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);
void log_probs_f32(const float*, const int64_t*, const float*, const int64_t*, float*, float*, float*, int64_t, int64_t,
                   int64_t);
void masses_f32(const float*, const float*, const int64_t*, float*, int64_t, int64_t, int64_t);
void draw_f32(const float*, const float*, const double*, const float*, const int64_t*, int64_t*, float*, int64_t,
              int64_t, int64_t);
void bucket_sums_f32(const float*, const int64_t*, const float*, const float*, const int64_t*, int64_t*, int64_t,
                     int64_t, int64_t, int64_t);
void keep_f32(float*, const int64_t*, const float*, const float*, const int64_t*, const int64_t*, int64_t, int64_t,
              int64_t, int64_t);
}

static uint64_t state = 1, hash = 14695981039346656037u;

// Random signs and mantissas over thirteen powers of two; each second half of a row takes the first one back.
static std::vector<float> values(int64_t rows, int64_t columns) {
    std::vector<float> out(rows * columns);
    for (int64_t i = 0; i < rows * columns; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        const float mantissa = (float)((int64_t)(state >> 40) - (1 << 23)) / (1 << 23);
        out[i] = mantissa * (float)(1 << (state >> 33) % 13) / 64;
        if (i % columns >= (columns + 1) / 2) out[i] = -out[i - columns / 2];
    }
    return out;
}

static std::vector<uint16_t> narrowed(const std::vector<float>& wide) {
    std::vector<uint16_t> out(wide.size());
    for (size_t i = 0; i < wide.size(); i++) out[i] = *(const uint32_t*)&wide[i] >> 16;
    return out;
}

template <class T>
static void add(const std::vector<T>& data) {
    const unsigned char* bytes = (const unsigned char*)data.data();
    for (size_t i = 0; i < data.size() * sizeof(T); i++) hash = (hash ^ bytes[i]) * 1099511628211u;
}

// Prints the digest so far, of which these results are the last.
template <class... T>
static void digest(const char* what, const std::vector<T>&... results) {
    (add(results), ...);
    std::printf("%s %016llx\n", what, (unsigned long long)hash);
}

static const bf16* in(const std::vector<uint16_t>& x, int64_t first = 0) { return (const bf16*)(x.data() + first); }
static bf16* to(std::vector<uint16_t>& x, int64_t first = 0) { return (bf16*)(x.data() + first); }

enum { SOFTMAX, SOFTMAX_OF_CHOSEN, SIGMOID };

static void routes(int64_t scoring, bool normalize, int64_t groups, int64_t groups_kept) {
    const int64_t tokens = 40, experts = 12, active = 3, dim = 37;
    auto logits = values(tokens, experts);
    const auto bias = values(1, experts);
    for (float& logit : logits) logit /= 16.f;
    logits[5] = logits[2];
    std::vector<float> weights(tokens * active), out(tokens * dim);
    std::vector<int64_t> chosen(tokens * active), starts(experts + 1), places(chosen.size()), sources(chosen.size());
    route_f32(logits.data(), scoring == SIGMOID ? bias.data() : nullptr, weights.data(), chosen.data(), tokens, experts,
              active, scoring, normalize, 2.5f, groups, groups_kept);
    order_by_expert_f32(chosen.data(), starts.data(), places.data(), sources.data(), chosen.size(), experts);
    const auto rows = values(chosen.size(), dim);
    combine_f32(rows.data(), weights.data(), places.data(), out.data(), tokens, active, dim);
    digest("routes, their weights and sums", chosen, weights, out);
}

static void grouped_products() {
    const int64_t depth = 101, outputs = 75, groups = 4, starts[] = {0, 5, 5, 38, 40};
    const auto x = values(40, depth), w = values(groups * outputs, depth), grad = values(40, outputs);
    const auto narrow_x = narrowed(x), narrow_w = narrowed(w);
    std::vector<float> out(40 * outputs), outer(groups * outputs * depth);
    std::vector<uint16_t> narrow(out.size());
    grouped_product_f32(x.data(), w.data(), outputs * depth, depth, 1, nullptr, out.data(), starts, groups, depth, outputs);
    grouped_product_bf16(in(narrow_x), in(narrow_w), outputs * depth, depth, 1, nullptr, to(narrow), starts, groups, depth,
                         outputs);
    grouped_outer_f32(grad.data(), x.data(), outer.data(), starts, groups, outputs, depth);
    digest("grouped products", out, narrow, outer);
}

static void integer_products() {
    const int64_t rows = 20, depth = 160, outputs = 75, group = 32;
    const auto x = values(rows, depth), w = values(outputs, depth);
    const auto narrow_x = narrowed(x), narrow_w = narrowed(w);
    std::vector<float> out(rows * outputs), rounded(w.size());
    std::vector<uint16_t> narrow(out.size()), narrow_rounded(w.size());
    std::vector<uint32_t> packed(int8_words(depth, outputs)), narrow_packed(int4_words(depth, outputs, group));
    pack_int8_f32(w.data(), depth, nullptr, packed.data(), depth, outputs);
    pack_int4_bf16(in(narrow_w), depth, narrow_packed.data(), depth, outputs, group);
    int8_product_f32(x.data(), depth, packed.data(), out.data(), rows, depth, outputs);
    int4_product_bf16(in(narrow_x), depth, narrow_packed.data(), to(narrow), rows, depth, outputs, group, 1);
    round_int8_f32(w.data(), depth, nullptr, rounded.data(), outputs, depth);
    round_int4_bf16(in(narrow_w), to(narrow_rounded), outputs * depth / group, group);
    digest("products of integers", out, narrow, rounded, narrow_rounded);
}

static void attention_in_bfloat16(int64_t dim, int64_t window, const float* sinks) {
    const int64_t tokens = 150, heads = 4, kv_heads = 2, pages = 10;
    const auto q = narrowed(values(tokens, heads * dim)), k = narrowed(values(tokens, kv_heads * dim));
    const auto v = narrowed(values(tokens, kv_heads * dim));
    std::vector<uint16_t> key_pages(pages * 16 * kv_heads * dim), value_pages(key_pages.size()), out(q.size());
    std::vector<uint16_t> grad_k(k.size()), grad_v(v.size());
    std::vector<float> log_sums(tokens * heads), grad_q(q.size());
    std::vector<int64_t> slots(tokens);
    for (int64_t i = 0; i < tokens; i++) slots[i] = i;
    std::vector<int32_t> table(pages), starts = {0, (int32_t)tokens}, contexts = {(int32_t)tokens}, first = {0};
    for (int64_t i = 0; i < pages; i++) table[i] = i;
    write_pages_bf16(in(k), in(v), slots.data(), to(key_pages), to(value_pages), tokens, kv_heads, dim);
    attend_bf16(in(q), to(out), log_sums.data(), in(key_pages), in(value_pages), table.data(), starts.data(),
                contexts.data(), 1, pages, heads, kv_heads, dim, 0.01f, window, sinks);
    attend_backward_bf16(in(q), in(q), in(k), in(v), in(out), log_sums.data(), grad_q.data(), to(grad_k), to(grad_v),
                         starts.data(), contexts.data(), first.data(), 1, heads, kv_heads, dim, 0.01f, window);
    digest("attention in bfloat16 and its gradients", out, log_sums, grad_q, grad_k, grad_v);
}

static void attention_to_codes() {
    const int64_t tokens = 150, heads = 4, kv_heads = 2, pages = 10, dim = 48, rows = tokens * kv_heads;
    const auto q = values(tokens, heads * dim), k = values(tokens, kv_heads * dim), v = values(tokens, kv_heads * dim);
    const auto narrow_q = narrowed(q), narrow_k = narrowed(k), narrow_v = narrowed(v);
    std::vector<float> keys(k.size()), ours(v.size()), out(q.size()), log_sums(tokens * heads);
    std::vector<uint16_t> narrow_keys(k.size()), narrow_ours(v.size()), narrow_out(q.size());
    std::vector<int8_t> key_pages(pages * kv_heads * (dim + 2) * 16), value_pages(pages * kv_heads * dim * 16);
    std::vector<int64_t> slots(tokens);
    for (int64_t i = 0; i < tokens; i++) slots[i] = i;
    std::vector<int32_t> table(pages), starts = {0, (int32_t)tokens}, contexts = {(int32_t)tokens};
    for (int64_t i = 0; i < pages; i++) table[i] = i;
    round_cached_f32(k.data(), keys.data(), rows, dim);
    round_cached_f32(v.data(), ours.data(), rows, dim);
    write_codes_f32(keys.data(), ours.data(), slots.data(), key_pages.data(), value_pages.data(), tokens, kv_heads, dim);
    attend_codes_f32(q.data(), out.data(), log_sums.data(), key_pages.data(), value_pages.data(), table.data(),
                     starts.data(), contexts.data(), 1, pages, heads, kv_heads, dim, 0.01f, 0, nullptr);
    digest("attention to codes", keys, ours, key_pages, value_pages, out, log_sums);
    round_cached_bf16(in(narrow_k), to(narrow_keys), rows, dim);
    round_cached_bf16(in(narrow_v), to(narrow_ours), rows, dim);
    write_codes_bf16(in(narrow_keys), in(narrow_ours), slots.data(), key_pages.data(), value_pages.data(), tokens,
                     kv_heads, dim);
    attend_codes_bf16(in(narrow_q), to(narrow_out), log_sums.data(), key_pages.data(), value_pages.data(), table.data(),
                      starts.data(), contexts.data(), 1, pages, heads, kv_heads, dim, 0.01f, 0, nullptr);
    digest("attention to codes in bfloat16", narrow_keys, narrow_ours, key_pages, value_pages, narrow_out, log_sums);
}

// Two sequences: packed with their gradients, and the first one in two steps over a cache.
static void delta_rule(int64_t key_dim, int64_t value_dim) {
    const int64_t tokens = 150, key_heads = 2, value_heads = 4, width = 4, entries = 2, kept = 4;
    const int64_t channels = 2 * key_heads * key_dim + value_heads * value_dim;
    auto b = values(tokens, value_heads), a = values(tokens, value_heads), conv = values(channels, width);
    auto rates = values(1, value_heads), bias = values(1, value_heads);
    for (auto* each : {&b, &a, &conv, &rates, &bias})
        for (float& value : *each) value /= 32.f;
    const auto mixed = values(tokens, channels), grad = values(tokens, value_heads * value_dim);
    std::vector<float> out(grad.size()), saved(tokens / 64 * value_heads * key_dim * value_dim);
    std::vector<float> grad_mixed(mixed.size()), grad_b(b.size()), grad_a(a.size()), grad_conv(conv.size());
    std::vector<float> grad_rates(value_heads), grad_bias(value_heads);
    const int32_t starts[] = {0, 131, (int32_t)tokens};
    delta_f32(mixed.data(), b.data(), a.data(), conv.data(), rates.data(), bias.data(), out.data(), saved.data(), starts,
              2, tokens, key_heads, value_heads, key_dim, value_dim, width);
    delta_backward_f32(grad.data(), mixed.data(), b.data(), a.data(), conv.data(), rates.data(), bias.data(),
                       saved.data(), grad_mixed.data(), grad_b.data(), grad_a.data(), grad_conv.data(),
                       grad_rates.data(), grad_bias.data(), starts, 2, tokens, key_heads, value_heads, key_dim,
                       value_dim, width);
    digest("delta rule and its gradients", out, saved, grad_mixed, grad_b, grad_a, grad_conv, grad_rates, grad_bias);
    const auto narrow = narrowed(mixed), narrow_b = narrowed(b), narrow_a = narrowed(a), narrow_conv = narrowed(conv);
    const auto narrow_rates = narrowed(rates), narrow_bias = narrowed(bias);
    std::vector<uint16_t> narrow_out(out.size()), state_inputs(entries * (width - 1) * channels), inputs(kept * channels);
    std::vector<float> states(entries * value_heads * key_dim * value_dim), keys(key_heads * key_dim * 64);
    std::vector<float> updates(value_heads * 64 * value_dim), decays(value_heads * 64);
    int32_t first = 0;
    for (const int32_t stop : {70, 131}) {
        const int32_t rows[] = {0, stop - first}, context = stop, slot = 0, read = first / 64 - 1, write = stop / 64 - 1;
        paged_delta_bf16(in(narrow, first * channels), in(narrow_b, first * value_heads),
                         in(narrow_a, first * value_heads), in(narrow_conv), in(narrow_rates), in(narrow_bias),
                         to(narrow_out, first * value_heads * value_dim), states.data(), to(state_inputs), keys.data(),
                         updates.data(), decays.data(), to(inputs), rows, &context, &slot, &read, &write, 1,
                         stop - first, key_heads, value_heads, key_dim, value_dim, width, 1, kept);
        first = stop;
    }
    digest("delta rule over a cache", narrow_out, states, state_inputs, keys, updates, decays, inputs);
}

int main() {
#if defined(LOCKSTEP_TILES) && !defined(LOCKSTEP_PLAIN)
    const long request_permission = 0x1023, tile_data = 18;  // as `_may_use_tiles` asks: a program inherits none
    if (syscall(SYS_arch_prctl, request_permission, tile_data) != 0) return 1;
#endif
    for (const int64_t rows : {1, 7, 33}) {
        const int64_t depth = 437, outputs = 75;
        const auto x = values(rows, depth), w = values(outputs, depth);
        std::vector<float> out(rows * outputs);
        product_f32(x.data(), depth, 1, w.data(), depth, 1, nullptr, out.data(), rows, depth, outputs, 1);
        auto across = out;  // of which the last elements stay as they are
        product_f32(w.data(), 1, depth, w.data(), 1, depth, nullptr, across.data(), rows, outputs, rows, 1);
        const auto narrow_x = narrowed(x), narrow_w = narrowed(w);
        std::vector<uint16_t> narrow(rows * outputs);
        product_bf16(in(narrow_x), depth, 1, in(narrow_w), depth, 1, nullptr, to(narrow), rows, depth, outputs, 1);
        digest("products", out, across, narrow);
    }
    const int64_t tokens = 150, heads = 4, kv_heads = 2, dim = 32, pages = 10;
    const auto q = values(tokens, heads * dim), k = values(tokens, kv_heads * dim), v = values(tokens, kv_heads * dim);
    std::vector<float> key_pages(pages * 16 * kv_heads * dim), value_pages(key_pages.size()), attended(q.size());
    std::vector<float> log_sums(tokens * heads), grad_q(q.size()), grad_k(k.size()), grad_v(k.size());
    std::vector<int64_t> slots(tokens);
    for (int64_t i = 0; i < tokens; i++) slots[i] = i;
    std::vector<int32_t> table(pages), starts = {0, (int32_t)tokens}, contexts = {(int32_t)tokens}, first = {0};
    for (int64_t i = 0; i < pages; i++) table[i] = i;
    write_pages_f32(k.data(), v.data(), slots.data(), key_pages.data(), value_pages.data(), tokens, kv_heads, dim);
    const auto attend = [&](int64_t window, const float* sinks) {
        attend_f32(q.data(), attended.data(), log_sums.data(), key_pages.data(), value_pages.data(), table.data(),
                   starts.data(), contexts.data(), 1, pages, heads, kv_heads, dim, 0.01f, window, sinks);
        attend_backward_f32(q.data(), q.data(), k.data(), v.data(), attended.data(), log_sums.data(), grad_q.data(),
                            grad_k.data(), grad_v.data(), starts.data(), contexts.data(), first.data(), 1, heads,
                            kv_heads, dim, 0.01f, window);
    };
    attend(0, nullptr);
    digest("attention and its gradients", attended, log_sums, grad_q, grad_k);
    constexpr int64_t rows = 9, width = 531;
    const auto x = values(rows, width), up = values(rows, width), weight = values(1, width);
    std::vector<float> out(x.size()), scales(rows);
    rms_norm_f32(x.data(), weight.data(), out.data(), scales.data(), rows, width, 1e-6f, 0);
    digest("norm", out);
    silu_mul_f32(x.data(), up.data(), out.data(), rows * width);
    digest("activation", out);
    const auto angles = values(rows, 32);
    std::vector<float> rotated(rows * 2 * 64);
    rotary_f32(q.data(), angles.data(), angles.data() + 5, rotated.data(), rows - 1, 2, 64, 32, 0, 1.f);
    digest("rotation", rotated);
    std::vector<int64_t> targets(rows), drawn(rows);
    std::vector<float> inverse(rows), chosen(rows), entropies(rows), normalizers(rows);
    std::vector<double> uniforms(rows);
    for (int64_t r = 0; r < rows; r++) targets[r] = 3 * r, inverse[r] = 1.f / (1 + r), uniforms[r] = r / 9.0;
    const int64_t pieces[] = {0, 67, 134, 201, 268, 335, 402, 469, width}, count = 8;
    log_probs_f32(x.data(), targets.data(), inverse.data(), pieces, chosen.data(), entropies.data(), normalizers.data(),
                  rows, width, count);
    digest("log-probabilities and entropies", chosen, entropies);
    std::vector<float> masses(rows * count * 3), highest(rows);
    masses_f32(x.data(), inverse.data(), pieces, masses.data(), rows, width, count);
    std::vector<float> of_drawn(rows);
    draw_f32(x.data(), inverse.data(), uniforms.data(), masses.data(), pieces, drawn.data(), of_drawn.data(), rows, width,
             count);
    digest("draws", drawn);
    std::vector<int64_t> row(rows), prefixes(rows), sums_of_buckets(rows * 256), remaining(rows);
    std::vector<float> inverse_of_row(rows);
    for (int64_t r = 0; r < rows; r++) {
        row[r] = rows - 1 - r, remaining[r] = (int64_t)r << 39, inverse_of_row[r] = inverse[row[r]];
        for (int64_t p = 0; p < count; p++) highest[r] = std::max(highest[r], masses[(row[r] * count + p) * 3]);
    }
    bucket_sums_f32(x.data(), row.data(), inverse_of_row.data(), highest.data(), prefixes.data(), sums_of_buckets.data(), 1, 24,
                    rows, width);
    digest("weights of buckets", sums_of_buckets);
    for (int64_t r = 0; r < rows; r++) prefixes[r] = 0x3f + r % 2;  // the last byte of keys of logits between 0.5 and 2
    out = x;
    keep_f32(out.data(), row.data(), inverse_of_row.data(), highest.data(), prefixes.data(), remaining.data(), 1, 24, rows,
             width);
    digest("cuts", out);
    const int64_t depth = 848, outputs = 75;
    const auto left = values(rows, depth), right = values(outputs, depth);
    std::vector<float> sums(rows * outputs);
    product_f32(left.data(), depth, 1, right.data(), depth, 1, nullptr, sums.data(), rows, depth, outputs, 8);
    digest("product in chunks", sums);
    const auto narrow_left = narrowed(left), narrow_right = narrowed(right);
    product_sums_bf16(in(narrow_left), depth, 1, in(narrow_right), depth, 1, nullptr, sums.data(), rows, depth, outputs,
                      8);
    digest("its sums in bfloat16", sums);
    for (const int64_t dim : {32, 48}) attention_in_bfloat16(dim, 0, nullptr);
    const float sinks[] = {0.5f, -2.f, 3.f, 0.f};
    attend(70, sinks);
    std::vector<float> grad_sinks(heads);
    sink_gradient_f32(q.data(), attended.data(), log_sums.data(), sinks, grad_sinks.data(), tokens, heads, dim);
    digest("attention in a window with sinks and its gradients", attended, log_sums, grad_q, grad_k, grad_sinks);
    for (const int64_t dim : {32, 48}) attention_in_bfloat16(dim, 70, sinks);
    auto wide = x;  // beyond the activation's bounds
    for (float& value : wide) value *= 9.f;
    clamped_swiglu_f32(wide.data(), up.data(), out.data(), rows * width);
    std::vector<float> grad_gate(x.size()), grad_up(x.size()), columns(width);
    clamped_swiglu_backward_f32(x.data(), wide.data(), up.data(), grad_gate.data(), grad_up.data(), rows * width);
    digest("clamped activation and its gradients", out, grad_gate, grad_up);
    column_sums_f32(q.data(), columns.data(), tokens, heads * dim);
    digest("sums of columns", columns);
    std::vector<float> scaled(rows), joined(rows), joined_entropies(rows), joined_normalizers(rows);
    for (int64_t r = 0; r < rows; r++) scaled[r] = x[r * width + targets[r]] * inverse[r];
    join_masses_f32(masses.data(), scaled.data(), joined.data(), joined_entropies.data(), joined_normalizers.data(), rows,
                    count);
    digest("masses joined", joined);
    const int64_t count_of_squares = 2500, blocks = 3;
    const auto squared = values(1, count_of_squares);
    std::vector<double> squares(blocks);
    std::vector<int64_t> integers(blocks);
    block_squares_f32(squared.data(), squares.data(), count_of_squares);
    integer_squares_f32(squared.data(), integers.data(), count_of_squares, 20);
    digest("sums of squares", squares, integers);
    grouped_products();
    routes(SOFTMAX, true, 1, 1);
    routes(SOFTMAX_OF_CHOSEN, true, 1, 1);
    routes(SIGMOID, true, 4, 2);
    routes(SIGMOID, false, 4, 2);
    integer_products();
    attention_to_codes();
    std::vector<float> grad_x(x.size()), grad_weight(width);
    rms_norm_f32(x.data(), weight.data(), out.data(), scales.data(), rows, width, 1e-6f, 1);
    rms_norm_backward_f32(up.data(), x.data(), weight.data(), scales.data(), grad_x.data(), grad_weight.data(), rows,
                          width, 1);
    digest("norm with an offset and its gradients", out, grad_x, grad_weight);
    gelu_mul_f32(wide.data(), up.data(), out.data(), rows * width);
    gelu_mul_backward_f32(x.data(), wide.data(), up.data(), grad_gate.data(), grad_up.data(), rows * width);
    digest("gelu and its gradients", out, grad_gate, grad_up);
    relu_squared_f32(x.data(), out.data(), rows * width);
    relu_squared_backward_f32(up.data(), x.data(), grad_x.data(), rows * width);
    digest("squared relu and its gradient", out, grad_x);
    rotary_f32(q.data(), angles.data(), angles.data() + 5, rotated.data(), rows - 1, 2, 64, 19, 1, -1.f);
    digest("rotation of neighbors", rotated);
    sigmoid_mul_f32(x.data(), up.data(), out.data(), rows * width);
    sigmoid_mul_backward_f32(x.data(), x.data(), up.data(), grad_gate.data(), grad_up.data(), rows * width);
    digest("gate of attention and its gradients", out, grad_gate, grad_up);
    delta_rule(32, 48);
    delta_rule(19, 21);
}
