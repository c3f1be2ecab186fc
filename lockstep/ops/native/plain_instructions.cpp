// Instructions on bfloat16 in plain C, rounded as Intel defines them (tdpbf16ps, vdpbf16ps, vcvtne2ps2bf16): to nearest
// even, with numbers below 2^-126 flushed to a zero of the same sign, as factors and as results. This is done on the
// bits, so that the thread's setting for denormals has no effect, as on the instructions.
#include "pairs.h"

#ifdef LOCKSTEP_PLAIN_TILES
namespace {

// Two at a time, for which every processor has registers.
typedef double doubles __attribute__((vector_size(16)));

// A float from its bits, as an instruction reads it.
inline doubles taken(uint32_t bits) {
    if (!(bits & 0x7f800000u)) bits &= 0x80000000u;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return doubles{value, value};
}

// The two bfloat16 halves of a word.
inline doubles first_half(uint32_t word) { return taken(word << 16); }
inline doubles second_half(uint32_t word) { return taken(word & 0xffff0000u); }

// A sum rounded to float32. `exact` is a float plus a float, or plus a product of two bfloat16, added in float64, where
// double rounding is innocuous (Figueroa 1995). Flushes to zero what would round to less than 2^-126 with an unbounded
// exponent: everything below the midpoint under it.
inline doubles rounded(doubles exact) {
    typedef int64_t integers __attribute__((vector_size(16)));
    typedef float floats2 __attribute__((vector_size(8)));
    const doubles midpoint = doubles{} + (0x1p-126 - 0x1p-151), magnitude = (doubles)((integers)exact & INT64_MAX);
    const integers kept = (integers)exact & ~((integers)(magnitude < midpoint) & INT64_MAX);
    return __builtin_convertvector(__builtin_convertvector((doubles)kept, floats2), doubles);
}

constexpr int REGISTERS = 8, ROWS = 16, WORDS = 16;

struct Settings {  // in the instruction's layout
    uint8_t palette = 0, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

struct Unit {
    Settings settings;
    uint32_t registers[REGISTERS][ROWS][WORDS] = {};

    int rows(int which) const { return settings.rows[which]; }
    int words(int which) const { return settings.row_bytes[which] / 4; }
    void clear(int which) { std::memset(registers[which], 0, sizeof registers[which]); }
};

thread_local Unit unit;

// Aborts on settings that the processor would refuse.
void require(bool allowed) {
    if (!allowed) __builtin_trap();
}

void require_shape(int which) { require(unit.settings.palette == 1 && unit.rows(which) && unit.words(which)); }

// sums [WORDS] of one row, from the words of the left factor's row and of the right factor, [step][half][column].
void add_row(uint32_t* sums, const uint32_t* left, const doubles (*right)[2][WORDS / 2], int steps) {
    doubles halves[2][WORDS / 2] = {};
    for (int k = 0; k < steps; k++) {
        const doubles first = first_half(left[k]), second = second_half(left[k]);
        for (int n = 0; n < WORDS / 2; n++) {
            halves[0][n] = rounded(halves[0][n] + first * right[k][0][n]);
            halves[1][n] = rounded(halves[1][n] + second * right[k][1][n]);
        }
    }
    for (int n = 0; n < WORDS; n++) {
        const doubles both = rounded(halves[0][n / 2] + halves[1][n / 2]);
        const float sum = (float)rounded(taken(sums[n]) + both)[n % 2];
        std::memcpy(sums + n, &sum, sizeof sum);
    }
}

}  // namespace

void _tile_loadconfig(const void* settings) {
    std::memcpy(&unit.settings, settings, sizeof unit.settings);
    require(unit.settings.palette == 1);
    for (int i = 0; i < REGISTERS; i++) require(unit.rows(i) <= ROWS && unit.words(i) <= WORDS), unit.clear(i);
}

void _tile_storeconfig(void* settings) { std::memcpy(settings, &unit.settings, sizeof unit.settings); }

void _tile_release() { unit.settings = Settings{}; }

void _tile_zero(int tile) {
    require_shape(tile);
    unit.clear(tile);
}

void _tile_loadd(int tile, const void* at, int64_t row_bytes) {
    _tile_zero(tile);
    for (int r = 0; r < unit.rows(tile); r++)
        std::memcpy(unit.registers[tile][r], (const char*)at + r * row_bytes, unit.settings.row_bytes[tile]);
}

void _tile_stored(int tile, void* at, int64_t row_bytes) {
    require_shape(tile);
    for (int r = 0; r < unit.rows(tile); r++)
        std::memcpy((char*)at + r * row_bytes, unit.registers[tile][r], unit.settings.row_bytes[tile]);
}

void _tile_dpbf16ps(int sums, int left, int right) {
    for (const int which : {sums, left, right}) require_shape(which);
    const int rows = unit.rows(sums), steps = unit.words(left);
    require(unit.rows(left) == rows && unit.rows(right) == steps && unit.words(right) == unit.words(sums));
    doubles factors[WORDS][2][WORDS / 2];
    for (int k = 0; k < steps; k++)
        for (int n = 0; n < WORDS; n++) {
            const uint32_t pair = unit.registers[right][k][n];
            factors[k][0][n / 2][n % 2] = first_half(pair)[0], factors[k][1][n / 2][n % 2] = second_half(pair)[0];
        }
    for (int r = 0; r < rows; r++) add_row(unit.registers[sums][r], unit.registers[left][r], factors, steps);
}

__m512 _mm512_dpbf16_ps(__m512 sums, __m512bh left, __m512bh right) {
    const words16 before = (words16)sums, a = (words16)left, b = (words16)right;
    for (int i = 0; i < 16; i++) {
        const doubles sum = rounded(taken(before[i]) + second_half(a[i]) * second_half(b[i]));
        sums[i] = (float)rounded(sum + first_half(a[i]) * first_half(b[i]))[0];
    }
    return sums;
}

__m512bh _mm512_cvtne2ps_pbh(__m512 second, __m512 first) {
    __m512bh v;
    for (int i = 0; i < 32; i++) {
        const uint32_t bits = ((words16)(i < 16 ? first : second))[i % 16];
        const bool normal = bits & 0x7f800000u, number = (bits & 0x7fffffffu) <= 0x7f800000u;
        v[i] = (!number ? bits | 0x400000u : normal ? bits + 0x7fff + (bits >> 16 & 1) : bits & 0x80000000u) >> 16;
    }
    return v;
}

__m512i _mm512_permutexvar_epi16(__m512i order, __m512i elements) {
    __m512bh v;
    for (int i = 0; i < 32; i++) v[i] = ((__m512bh)elements)[((__m512bh)order)[i] % 32];
    return (__m512i)v;
}
#endif
