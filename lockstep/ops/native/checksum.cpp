// The checksum of lockstep/rl/weights/checksum.py: sums of products modulo 2^64, independent of their order.
#include <cstdint>
#include <vector>

namespace {

// Fewer words are not worth waking the other threads.
constexpr int64_t PARALLEL_WORDS = 1 << 16;

// A well-mixed odd factor for each word (the finalizer of SplitMix64).
inline uint64_t odd_number(uint64_t number) {
    uint64_t mixed = number * 0x9E3779B97F4A7C15;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB;
    return (mixed ^ (mixed >> 31)) | 1;
}

// `rows` rows of `columns` contiguous words; the index in the whole tensor of the first column, and of every row.
template <class T>
int64_t checksum(const T* bits, const int64_t* row_numbers, int64_t rows, int64_t columns, int64_t first_column) {
    std::vector<uint64_t> of_columns(columns);
    for (int64_t column = 0; column < columns; column++) of_columns[column] = odd_number(first_column + column);
    const uint64_t* factors = of_columns.data();
    uint64_t total = 0;
#pragma omp parallel for reduction(+ : total) if (rows * columns > PARALLEL_WORDS)
    for (int64_t row = 0; row < rows; row++) {
        uint64_t sum = 0;
        for (int64_t column = 0; column < columns; column++)
            sum += (uint64_t)(int64_t)bits[row * columns + column] * factors[column];
        total += sum * odd_number(~(uint64_t)row_numbers[row]);
    }
    return (int64_t)total;
}

}  // namespace

#define EXPORT(T, suffix)                                                                                       \
    extern "C" int64_t checksum##suffix(const T* bits, const int64_t* row_numbers, int64_t rows, int64_t columns, \
                                        int64_t first_column) {                                                 \
        return checksum(bits, row_numbers, rows, columns, first_column);                                        \
    }

EXPORT(int16_t, _i16)
EXPORT(int32_t, _i32)
EXPORT(int64_t, _i64)
