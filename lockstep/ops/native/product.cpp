// The exported products: of two matrices, of groups of rows with a matrix per group, and of adapters.
#include "grouped_product.h"
#include "low_rank.h"
#include "replay.h"
#include "product.h"

template <class T>
static void pack(const T* w, int64_t w_row, int64_t w_inner, word* packed, int64_t depth, int64_t outputs) {
    const Matrix<T> right{w, outputs, depth, w_row, w_inner};
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < outputs; first += COLUMNS)
        pack_panel(right, first, 0, right.steps(), packed + first * right.steps());
}

#define EXPORT(name, T, Out)                                                                                          \
    extern "C" void name(const T* x, int64_t x_row, int64_t x_inner, const T* w, int64_t w_row, int64_t w_inner,      \
                         const word* packed, Out* out, int64_t rows, int64_t depth, int64_t outputs, int64_t chunks) { \
        product<T, Out>(x, x_row, x_inner, w, w_row, w_inner, packed, out, rows, depth, outputs, chunks);             \
    }                                                                                                                 \
    REPLAYABLE(name)
#define EXPORT_PACK(name, T)                                                                                          \
    extern "C" void name(const T* w, int64_t w_row, int64_t w_inner, word* packed, int64_t depth, int64_t outputs) {  \
        pack<T>(w, w_row, w_inner, packed, depth, outputs);                                                           \
    }

EXPORT(product_f32, float, float)
EXPORT(product_bf16, bf16, bf16)
// Unrounded sums, for ranks that each have a part of k.
EXPORT(product_sums_bf16, bf16, float)
EXPORT_PACK(pack_f32, float)
EXPORT_PACK(pack_bf16, bf16)
EXPORT_GROUPED(float, _f32)
EXPORT_GROUPED(bf16, _bf16)
EXPORT_LOW_RANK(float, _f32)
EXPORT_LOW_RANK(bf16, _bf16)

extern "C" int64_t panel_columns() { return COLUMNS; }

#ifdef LOCKSTEP_TILES
// Whether this thread still uses the matrix unit, whose state the kernel would save at every context switch.
extern "C" int64_t holds_unit() {
    uint8_t settings[64];  // all zeros once released
    _tile_storeconfig(settings);
    return settings[0];
}
#endif
