// Kernel calls as words of 8 bytes, so that one array can hold calls of different kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

template <class A>
static inline A from_word(int64_t word) {
    A argument;
    std::memcpy(&argument, &word, sizeof(A));  // a float is the first four bytes
    return argument;
}

template <auto kernel>
struct Replayed;

template <class... A, void (*kernel)(A...)>
struct Replayed<kernel> {
    template <size_t... i>
    static void call(const int64_t* words, std::index_sequence<i...>) {
        kernel(from_word<A>(words[i])...);
    }
    static void run(const int64_t* words) { call(words, std::index_sequence_for<A...>()); }
};

// Defines a kernel's replay function, for `replay_calls`.
#define REPLAYABLE(kernel) \
    extern "C" void replay_##kernel(const int64_t* words) { Replayed<kernel>::run(words); }
