// The gated delta rule over packed sequences, and over a cache of states and open chunks.
//
// The same arithmetic for both: chunks are aligned to a sequence's position 0, and a row's result is a fixed chain over
// the state at its chunk's beginning and the chunk's rows up to it.
#include "delta_chunk.h"
#include "replay.h"

// Declared as in omp.h, which not every compiler has.
extern "C" int omp_get_max_threads();

// Fewer elements of states are not worth waking the other threads.
constexpr int64_t PARALLEL_ELEMENTS = 16384;

struct HeadScratch {
    float* conv;  // [width][own_channels]
    Rows rows;
    Products products;
    float* states;  // [group][key_dim][value_row]
    Chunk chunk;

    HeadScratch(const Sizes& sizes, Memory& memory)
        : conv(memory.take(sizes.width * sizes.own_channels())), rows(sizes, memory), products(sizes, memory) {
        states = memory.take(sizes.group() * sizes.state());
        chunk = {memory.take(sizes.key_dim * CHUNK), memory.take(sizes.group() * CHUNK * sizes.value_row()),
                 sizes.value_row(), memory.take(sizes.group() * CHUNK)};
    }
};

// A thread's memory, and the head whose weights it has.
template <class T>
struct Worker : HeadScratch {
    const Layer<T>& layer;
    HeadWeights<T> weights;
    std::vector<const T*> before;
    std::vector<T> nothing;

    explicit Worker(const Layer<T>& layer)
        : HeadScratch(in_scratch<HeadScratch>(layer.sizes)),
          layer(layer),
          weights{conv},
          before(layer.sizes.earlier()),
          nothing(layer.sizes.channels()) {}
    State own_states() const { return {states, layer.sizes.value_row(), layer.sizes.state()}; }
    // Between tensors of unpadded rows and scratch memory.
    void copy_states(float* tensor, bool to_tensor) const {
        const Sizes& sizes = layer.sizes;
        for (int64_t r = 0; r < sizes.group() * sizes.key_dim; r++) {
            float *own = states + r * sizes.value_row(), *other = tensor + r * sizes.value_dim;
            if (to_tensor)
                std::copy(own, own + sizes.value_dim, other);
            else
                std::fill(std::copy(other, other + sizes.value_dim, own), own + sizes.value_row(), 0.f);
        }
    }
};

// Calls run(worker, head, sequence) for all of them. A thread takes the sequences of a head one after the other, since
// it then has the head's weights.
template <class T, class Run>
static void for_each_head(const Layer<T>& layer, int64_t sequences, const Run& run) {
    const int64_t tasks = layer.sizes.key_heads * sequences;
    const int64_t at_once = std::clamp<int64_t>(tasks / (8 * omp_get_max_threads()), 1, 8);
    const int64_t elements = sequences * layer.sizes.value_heads * layer.sizes.key_dim * layer.sizes.value_dim;
#pragma omp parallel if (elements > PARALLEL_ELEMENTS)
    {
        Worker<T> worker(layer);
#pragma omp for schedule(dynamic, at_once)
        for (int64_t task = 0; task < tasks; task++) {
            worker.weights.take(layer, task / sequences);
            run(worker, task / sequences, task % sequences);
        }
    }
}

// One key head of a whole sequence. saved: null, or the states at its inner boundaries.
template <class T>
static void packed_head(Worker<T>& worker, int64_t head, int64_t start, int64_t stop, T* out, float* saved) {
    const Layer<T>& layer = worker.layer;
    const Sizes& sizes = layer.sizes;
    std::fill(worker.before.begin(), worker.before.end(), worker.nothing.data());
    const Inputs<T> inputs{layer.mixed + start * sizes.channels(), worker.before.data(), sizes.channels(),
                           sizes.earlier()};
    const int64_t length = stop - start, per_row = sizes.value_heads * sizes.value_dim;
    State state{nullptr, 0, 0};
    for (int64_t begin = 0; begin < length; begin += CHUNK) {
        const int64_t count = std::min(CHUNK, length - begin);
        compute_rows(layer, worker.weights, inputs, start, begin, count, worker.rows);
        T* target = out + (start + begin) * per_row + head * sizes.group() * sizes.value_dim;
        extend(worker.rows, sizes, worker.chunk, 0, count, state, target, worker.products);
        if (begin + CHUNK >= length) return;
        next_state(worker.chunk, sizes, state, worker.states, worker.products);
        state = worker.own_states();
        if (saved) {
            const int64_t boundary = start / CHUNK + begin / CHUNK;
            const int64_t first_head = boundary * sizes.value_heads + head * sizes.group();
            worker.copy_states(saved + first_head * sizes.key_dim * sizes.value_dim, true);
        }
    }
}

template <class T>
static void delta(const Layer<T>& layer, T* out, float* saved, const int32_t* starts, int64_t sequences, int64_t rows) {
    const int64_t per_row = layer.sizes.value_heads * layer.sizes.value_dim;
    std::fill(out + starts[sequences] * per_row, out + rows * per_row, T{});
    for_each_head(layer, sequences, [&](Worker<T>& worker, int64_t head, int64_t s) {
        packed_head(worker, head, starts[s], starts[s + 1], out, saved);
    });
}

// One layer of a `DeltaCache`, and where the sequences of a step are in it.
template <class T>
struct Cache {
    float* states;    // [entries][value_heads][key_dim][value_dim]
    T* state_inputs;  // [entries][width - 1][channels]
    float* keys;      // [slots][chunks][key_heads][key_dim][CHUNK]
    float* updates;   // [slots][chunks][value_heads][CHUNK][value_dim]
    float* decays;    // [slots][chunks][value_heads][CHUNK]
    T* inputs;        // [slots][kept][channels]
    const int32_t *slots, *reads, *writes, *contexts;
    int64_t chunks, kept;
};

// One key head of a sequence in a step.
template <class T>
struct PagedHead {
    Worker<T>& worker;
    const Sizes& sizes;
    const Cache<T>& cache;
    int64_t head, first_head, slot, read, write, first;
    bool in_place;  // rows of updates and states are whole vectors

    PagedHead(Worker<T>& worker, const Cache<T>& cache, int64_t head, int64_t s, int64_t first)
        : worker(worker),
          sizes(worker.layer.sizes),
          cache(cache),
          head(head),
          first_head(head * sizes.group()),
          slot(cache.slots[s]),
          read(cache.reads[s]),
          write(cache.writes[s]),
          first(first),
          in_place(sizes.value_dim % LANES == 0) {}

    float* entry(int64_t index) const {
        return cache.states + (index * sizes.value_heads + first_head) * sizes.key_dim * sizes.value_dim;
    }
    T* ring(int64_t position) const {
        return cache.inputs + (slot * cache.kept + position % cache.kept) * sizes.channels();
    }
    // The convolution's input of a position before `first`.
    const T* input(int64_t position) const {
        const int64_t boundary = first / CHUNK * CHUNK;
        if (position >= boundary) return ring(position);
        if (read < 0) return worker.nothing.data();
        return cache.state_inputs + ((read + 1) * sizes.earlier() + position - boundary) * sizes.channels();
    }
    State begin() const {
        if (read < 0) return {nullptr, 0, 0};
        if (in_place) return {entry(read), sizes.value_dim, sizes.key_dim * sizes.value_dim};
        worker.copy_states(entry(read), false);
        return worker.own_states();
    }
    void copy_channels(const T* from, T* to) const {
        for (int64_t part = 0; part < 2 + sizes.group(); part++) {
            const Span span = span_of(sizes, head, part);
            std::copy(from + span.channel, from + span.channel + span.count, to + span.channel);
        }
    }
    float* slot_updates(int64_t position) const {
        const int64_t chunk = slot * cache.chunks + position / CHUNK % cache.chunks;
        return cache.updates + (chunk * sizes.value_heads + first_head) * CHUNK * sizes.value_dim;
    }
    Chunk chunk(int64_t position) const {
        const int64_t chunk = slot * cache.chunks + position / CHUNK % cache.chunks;
        Chunk own = worker.chunk;
        own.keys = cache.keys + (chunk * sizes.key_heads + head) * sizes.key_dim * CHUNK;
        own.decays = cache.decays + (chunk * sizes.value_heads + first_head) * CHUNK;
        if (in_place)
            own.updates = slot_updates(position), own.row = sizes.value_dim;
        else
            copy_updates(own, slot_updates(position), 0, position % CHUNK, false);
        return own;
    }
    // Between the slot and scratch memory.
    void copy_updates(const Chunk& own, float* tensor, int64_t begin, int64_t stop, bool to_tensor) const {
        for (int64_t g = 0; g < sizes.group(); g++)
            for (int64_t t = begin; t < stop; t++) {
                float* wide = own.updates + (g * CHUNK + t) * own.row;
                float* narrow = tensor + (g * CHUNK + t) * sizes.value_dim;
                if (to_tensor)
                    std::copy(wide, wide + sizes.value_dim, narrow);
                else
                    std::copy(narrow, narrow + sizes.value_dim, wide);
            }
    }
    void extend_by(int64_t start, int64_t count, T* out) const {
        for (int64_t i = 0; i < sizes.earlier(); i++) worker.before[i] = input(first - sizes.earlier() + i);
        const T* mixed = worker.layer.mixed + start * sizes.channels();
        const Inputs<T> inputs{mixed, worker.before.data(), sizes.channels(), sizes.earlier()};
        State state = begin();
        int64_t boundary = -1;
        for (int64_t begin = 0, stop; begin < count; begin = stop) {
            const int64_t position = first + begin, place = position % CHUNK;
            stop = std::min(count, begin + CHUNK - place);
            const Chunk open = chunk(position);
            compute_rows(worker.layer, worker.weights, inputs, start, begin, stop - begin, worker.rows);
            T* target = out + ((start + begin) * sizes.value_heads + first_head) * sizes.value_dim;
            extend(worker.rows, sizes, open, place, stop - begin, state, target, worker.products);
            if (!in_place) copy_updates(open, slot_updates(position), place, place + stop - begin, true);
            if ((first + stop) % CHUNK) continue;
            next_state(open, sizes, state, worker.states, worker.products);
            state = worker.own_states(), boundary = stop;
        }
        if (boundary >= 0) {
            worker.copy_states(entry(write), true);
            for (int64_t i = 0; i < sizes.earlier(); i++)
                copy_channels(inputs.at(boundary - sizes.earlier() + i),
                              cache.state_inputs + (write * sizes.earlier() + i) * sizes.channels());
        }
        for (int64_t row = std::max<int64_t>(0, count - cache.kept); row < count; row++)
            copy_channels(mixed + row * sizes.channels(), ring(first + row));
    }
};

template <class T>
static void paged_delta(const Layer<T>& layer, T* out, const Cache<T>& cache, const int32_t* starts, int64_t sequences,
                        int64_t rows) {
    const int64_t per_row = layer.sizes.value_heads * layer.sizes.value_dim;
    std::fill(out + starts[sequences] * per_row, out + rows * per_row, T{});
    for_each_head(layer, sequences, [&](Worker<T>& worker, int64_t head, int64_t s) {
        const int64_t count = starts[s + 1] - starts[s];
        if (count > 0)
            PagedHead<T>(worker, cache, head, s, cache.contexts[s] - count).extend_by(starts[s], count, out);
    });
}

#define EXPORT(T, suffix)                                                                                              \
    extern "C" void delta##suffix(const T* mixed, const T* b, const T* a, const T* conv, const T* log_rates,           \
                                  const T* step_bias, T* out, float* saved, const int32_t* starts, int64_t sequences,  \
                                  int64_t rows, int64_t key_heads, int64_t value_heads, int64_t key_dim,               \
                                  int64_t value_dim, int64_t width) {                                                  \
        const Sizes sizes{key_heads, value_heads, key_dim, value_dim, width};                                          \
        delta(Layer<T>{mixed, b, a, conv, log_rates, step_bias, sizes}, out, saved, starts, sequences, rows);          \
    }                                                                                                                  \
    extern "C" void paged_delta##suffix(                                                                               \
        const T* mixed, const T* b, const T* a, const T* conv, const T* log_rates, const T* step_bias, T* out,         \
        float* states, T* state_inputs, float* keys, float* updates, float* decays, T* inputs, const int32_t* starts,  \
        const int32_t* contexts, const int32_t* slots, const int32_t* reads, const int32_t* writes, int64_t sequences, \
        int64_t rows, int64_t key_heads, int64_t value_heads, int64_t key_dim, int64_t value_dim, int64_t width,       \
        int64_t chunks, int64_t kept) {                                                                                \
        const Sizes sizes{key_heads, value_heads, key_dim, value_dim, width};                                          \
        const Cache<T> cache{states, state_inputs, keys,   updates,  decays, inputs,                                   \
                             slots,  reads,        writes, contexts, chunks, kept};                                    \
        paged_delta(Layer<T>{mixed, b, a, conv, log_rates, step_bias, sizes}, out, cache, starts, sequences, rows);    \
    }                                                                                                                  \
    REPLAYABLE(delta##suffix)                                                                                          \
    REPLAYABLE(paged_delta##suffix)

EXPORT(float, _f32)
EXPORT(bf16, _bf16)
