// A kernel's call as words of 8 bytes, so that calls of different kernels can lie in one list.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

template <class A>
static inline A from_word(int64_t word) {
    A argument;
    std::memcpy(&argument, &word, sizeof(A));  // of a float, the first four bytes
    return argument;
}

template <auto kernel>
struct Played;

template <class... A, void (*kernel)(A...)>
struct Played<kernel> {
    template <size_t... i>
    static void call(const int64_t* words, std::index_sequence<i...>) {
        kernel(from_word<A>(words[i])...);
    }
    static void run(const int64_t* words) { call(words, std::index_sequence_for<A...>()); }
};

// Defines a kernel's form for `play`.
#define PLAYED(kernel) \
    extern "C" void played_##kernel(const int64_t* words) { Played<kernel>::run(words); }
