// The gradients of one chunk of the gated delta rule, for one head of values.
//
// With D_ij = e^(G_i - G_j), for j ≤ i, the chunk is: u_i = β_i (v_i - e^G_i Sᵀk_i - Σ_j<i A_ij u_j) with
// A_ij = D_ij k_i·k_j, o_i = e^G_i Sᵀq_i + Σ_j≤i B_ij u_j with B_ij = D_ij q_i·k_j, and after it the state is
// e^G_e S + Σ_j e^(G_e - G_j) k_j u_jᵀ. Below, z_i = -β_i du_i is the gradient of what is taken from v_i; v_i's is
// -z_i.
#pragma once
#include "delta_chunk.h"

// What the gradient takes of a recomputed chunk: the values' differences from what is stored at their keys.
struct Changes {
    static constexpr bool READS = false;
    float* at;
    int64_t row;
    void change(int64_t t, int64_t n, f32x16 x) const { store(at + t * row + n, x); }
    void output(int64_t, int64_t, f32x16) const {}
};

// Scratch memory of a chunk and head.
struct HeadMemory {
    float* before;         // [key_dim][value_row]: S
    float* before_across;  // [value_dim][key_row]: Sᵀ
    float* after_across;   // the same of the gradient of the state after the chunk
    float *updates, *changes, *grad_updates;  // [CHUNK][value_row]: u, v - stored, du
    float* updates_across;                    // [value_dim][CHUNK]
    float* grads;                             // [2 · rows][value_row]: do, then z
    float* pairs;                             // [2 · rows][CHUNK]: do_i·u_j, then z_i·u_j
    float* from_state;                        // [2 · rows][key_row]: S do, then S z
    float* from_after;                        // [rows][key_row]: dS' u
    float* scaled;                            // [2 · rows][key_row]: e^G q, then e^G k
    float *to_end, *of_decays;                // [CHUNK]: e^(G_e - G), dG

    HeadMemory(const Sizes& sizes, Memory& memory) {
        const int64_t values = padded(sizes.value_dim);
        before = memory.take(sizes.state());
        before_across = memory.take(values * sizes.key_row());
        after_across = memory.take(values * sizes.key_row());
        updates = memory.take(CHUNK * sizes.value_row());
        changes = memory.take(CHUNK * sizes.value_row());
        grad_updates = memory.take(CHUNK * sizes.value_row());
        updates_across = memory.take(values * CHUNK);
        grads = memory.take(2 * CHUNK * sizes.value_row());
        pairs = memory.take(2 * CHUNK * CHUNK);
        from_state = memory.take(2 * CHUNK * sizes.key_row());
        from_after = memory.take(CHUNK * sizes.key_row());
        scaled = memory.take(2 * CHUNK * sizes.key_row());
        to_end = memory.take(CHUNK);
        of_decays = memory.take(CHUNK);
    }
    // Padding that is multiplied but never written.
    void clear_padding(const Sizes& sizes) const {
        std::fill(before_across, after_across + padded(sizes.value_dim) * sizes.key_row(), 0.f);
    }
};

// A chunk of one value head: its rows, and the gradients that are added to those of other heads.
struct ChunkHead {
    const Rows& rows;
    const Sizes& sizes;
    const Products& products;
    const HeadMemory& memory;
    int64_t g, count;
    const float* decays;    // [CHUNK]
    bool has_before;        // whether the chunk begins with a state other than zeros, which `memory` has
    float* after;           // [key_dim][value_row]: dS', which becomes dS; unused without `has_after`
    bool has_after;         // whether rows follow
    float *grad_keys, *grad_queries;         // [rows][key_row]
    float *grad_strengths, *grad_log_decays;  // [CHUNK]

    int64_t columns() const { return padded(sizes.value_dim); }
    int64_t key_columns() const { return padded(sizes.key_dim); }
    const float* strengths() const { return rows.strengths + g * CHUNK; }
    float* taken() const { return memory.grads + count * sizes.value_row(); }
    const float* to_query() const { return products.weights + count * CHUNK; }  // B
    const float* to_key() const { return products.weights; }                    // A

    // c [rows][..] += aᵀ · b of lower triangles a [row][CHUNK], whose rows are those of b.
    void add_across(const float* a, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t width) const {
        for (int64_t j = 0; j < count; j += LANES)
            product({a + j * CHUNK + j, 1, CHUNK}, b + j * ldb, ldb, c + j * ldc, ldc, std::min(LANES, count - j),
                    count - j, width, FromMatrix{c + j * ldc, ldc});
    }
    // c [rows][..] += a · b of lower triangles a.
    void add_along(const float* a, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t width) const {
        for (int64_t i = 0; i < count; i += LANES)
            product({a + i * CHUNK, CHUNK, 1}, b, ldb, c + i * ldc, ldc, std::min(LANES, count - i),
                    std::min(count, i + LANES), width, FromMatrix{c + i * ldc, ldc});
    }

    // Recomputes the updates, and masks the weights: zero above the diagonal, and A on it.
    void recompute() const {
        decay_weights(products.inner, decays, 0, count, products.weights);
        exponentials(decays, count, products.from_start);
        if (has_before)
            product({rows.keys, sizes.key_row(), 1}, memory.before, sizes.value_row(), products.reads,
                    sizes.value_row(), count, sizes.key_dim, columns(), FromZero{});
        const Reading reading{products.weights,
                              nullptr,
                              has_before ? products.reads : nullptr,
                              nullptr,
                              products.from_start,
                              rows.values + g * CHUNK * sizes.value_row(),
                              strengths(),
                              sizes.value_row(),
                              memory.updates,
                              sizes.value_row(),
                              0};
        read_rows(reading, count, columns(), Changes{memory.changes, sizes.value_row()});
        turn(memory.updates, sizes.value_row(), memory.updates_across, CHUNK, count, columns());
        for (int64_t i = 0; i < count; i++)
            for (int64_t j = 0; j < CHUNK; j += LANES) {
                float *key = products.weights + i * CHUNK + j, *query = products.weights + (count + i) * CHUNK + j;
                store(key, keep_first(load(key), i - j, 0.f));
                store(query, keep_first(load(query), i + 1 - j, 0.f));
            }
        const float last = decays[count - 1];
        for (int64_t t = 0; t < count; t += LANES) store(memory.to_end + t, exp(last - load(decays + t)));
    }

    // du_j = Σ_i≥j B_ij do_i + e^(G_e - G_j) dS'ᵀk_j + Σ_i>j A_ij z_i, from the last row to the first.
    void solve_updates() const {
        const int64_t row = sizes.value_row();
        float *du = memory.grad_updates, *z = taken();
        if (has_after) {
            product({rows.keys, sizes.key_row(), 1}, after, row, du, row, count, sizes.key_dim, columns(), FromZero{});
            for (int64_t t = 0; t < count; t++)
                for (int64_t n = 0; n < columns(); n += LANES)
                    store(du + t * row + n, load(du + t * row + n) * memory.to_end[t]);
        } else {
            std::fill(du, du + count * row, 0.f);
        }
        add_across(to_query(), memory.grads, row, du, row, columns());
        for (int64_t block = (count - 1) / LANES * LANES; block >= 0; block -= LANES) {
            const int64_t in_block = std::min(LANES, count - block);
            for (int64_t i = block + in_block - 1; i >= block; i--)
                for (int64_t n = 0; n < columns(); n += LANES) {
                    const f32x16 own = load(du + i * row + n) * -strengths()[i];
                    store(z + i * row + n, own);
                    for (int64_t j = block; j < i; j++) {
                        float* sums = du + j * row + n;
                        store(sums, multiply_add(own, to_key()[i * CHUNK + j], load(sums)));
                    }
                }
            product({to_key() + block * CHUNK, 1, CHUNK}, z + block * row, row, du, row, block, in_block, columns(),
                    FromMatrix{du, row});
        }
        for (int64_t t = 0; t < count; t++)
            grad_strengths[t] = product_of_rows(du + t * row, memory.changes + t * row, columns());
    }

    // do_i·u_j and z_i·u_j become the gradients of B and A times the decays; the decays' gradients are added.
    void pair_gradients() const {
        float* of_key = memory.pairs + count * CHUNK;
        for (int64_t i = 0; i < count; i += LANES)
            for (int64_t half = 0; half < 2; half++) {
                const int64_t first = half * count + i;
                product({memory.grads + first * sizes.value_row(), sizes.value_row(), 1}, memory.updates_across, CHUNK,
                        memory.pairs + first * CHUNK, CHUNK, std::min(LANES, count - i), columns(), i + LANES,
                        FromZero{});
            }
        f32x16 of_columns[CHUNK / LANES] = {};
        for (int64_t i = 0; i < count; i++) {
            f32x16 of_row = {};
            for (int64_t block = 0; block <= i / LANES; block++) {
                const int64_t j = block * LANES, place = i * CHUNK + j;
                const f32x16 decay = exp(splat(decays[i]) - load(decays + j));
                const f32x16 query = keep_first(load(memory.pairs + place), i + 1 - j, 0.f);
                const f32x16 key = keep_first(load(of_key + place), i - j, 0.f);
                // Of a row's own decay the two parts are the same.
                f32x16 both = keep_first(query * load(to_query() + place), i - j, 0.f);
                both = multiply_add(key, load(to_key() + place), both);
                of_row += both;
                of_columns[block] = of_columns[block] - both;
                store(memory.pairs + place, keep_first(query * decay, i + 1 - j, 0.f));
                store(of_key + place, keep_first(key * decay, i - j, 0.f));
            }
            memory.of_decays[i] = sum(of_row);
        }
        for (int64_t j = 0; j < count; j += LANES)
            store(memory.of_decays + j, load(memory.of_decays + j) + of_columns[j / LANES]);
    }

    void add_to_keys_and_queries() const {
        const int64_t row = sizes.key_row();
        const float *of_query = memory.pairs, *of_key = memory.pairs + count * CHUNK;
        for (int64_t i = 0; i < count; i += LANES)  // above the diagonal's blocks, which `add_across` reads
            for (int64_t t = i; t < std::min(count, i + LANES); t++)
                std::fill(memory.pairs + t * CHUNK + i + LANES, memory.pairs + (t + 1) * CHUNK, 0.f);
        add_along(of_query, rows.keys, row, grad_queries, row, key_columns());
        add_along(of_key, rows.keys, row, grad_keys, row, key_columns());
        add_across(of_query, rows.queries, row, grad_keys, row, key_columns());
        add_across(of_key, rows.keys, row, grad_keys, row, key_columns());
    }

    // What goes through the state before the chunk.
    void add_from_before() const {
        const int64_t row = sizes.key_row();
        turn(memory.before, sizes.value_row(), memory.before_across, row, sizes.key_dim, columns());
        product({memory.grads, sizes.value_row(), 1}, memory.before_across, row, memory.from_state, row, 2 * count,
                columns(), key_columns(), FromZero{});
        for (int64_t t = 0; t < count; t++) {
            const float grown = products.from_start[t];
            const float *of_query = memory.from_state + t * row, *of_key = of_query + count * row;
            const float *query = rows.queries + t * row, *key = rows.keys + t * row;
            f32x16 along = {};
            for (int64_t d = 0; d < key_columns(); d += LANES) {
                along = multiply_add(load(query + d), load(of_query + d), along);
                along = multiply_add(load(key + d), load(of_key + d), along);
                float *to_query = grad_queries + t * row + d, *to_key = grad_keys + t * row + d;
                store(to_query, multiply_add(load(of_query + d), grown, load(to_query)));
                store(to_key, multiply_add(load(of_key + d), grown, load(to_key)));
                store(memory.scaled + t * row + d, load(query + d) * grown);
                store(memory.scaled + (count + t) * row + d, load(key + d) * grown);
            }
            memory.of_decays[t] += sum(along) * grown;
        }
    }

    // What goes through the state after the chunk, whose gradient becomes that of the state before it.
    void add_from_after() const {
        const int64_t row = sizes.key_row(), last = count - 1;
        if (has_after) {
            turn(after, sizes.value_row(), memory.after_across, row, sizes.key_dim, columns());
            product({memory.updates, sizes.value_row(), 1}, memory.after_across, row, memory.from_after, row, count,
                    columns(), key_columns(), FromZero{});
            for (int64_t t = 0; t < count; t++) {
                const float *from = memory.from_after + t * row, left = memory.to_end[t];
                const float along = product_of_rows(rows.keys + t * row, from, key_columns()) * left;
                for (int64_t d = 0; d < key_columns(); d += LANES) {
                    float* to_key = grad_keys + t * row + d;
                    store(to_key, multiply_add(load(from + d), left, load(to_key)));
                }
                memory.of_decays[t] -= along;
                memory.of_decays[last] += along;
            }
        }
        if (!has_before) return;
        const float whole = exp_float(decays[last]);
        if (has_after)
            memory.of_decays[last] += whole * product_of_rows(after, memory.before, sizes.state());
        const Factor left{memory.scaled, 1, row};
        const auto add = [&](const auto& start) {
            product(left, memory.grads, sizes.value_row(), after, sizes.value_row(), sizes.key_dim, 2 * count,
                    columns(), start);
        };
        if (has_after)
            add(FromScaled{after, sizes.value_row(), whole});
        else
            add(FromZero{});
    }

    // All gradients; those of values are -`taken()`.
    void backward() const {
        recompute();
        solve_updates();
        pair_gradients();
        add_to_keys_and_queries();
        if (has_before) add_from_before();
        add_from_after();
        float total = 0.f;
        for (int64_t t = count - 1; t >= 0; t--) grad_log_decays[t] = total += memory.of_decays[t];
    }
};
