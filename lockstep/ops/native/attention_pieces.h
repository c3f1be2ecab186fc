// The query rows of attention's gradient, and the keys that they see.
#pragma once
#include "attention.h"

// Consecutive runs of query rows. A piece's rows are the last of its context, which is `contexts` keys from its first.
struct Pieces {
    const int32_t *starts, *contexts, *first_keys;
    int64_t count;
    int64_t position(const Tile& tile) const {
        return tile.token + contexts[tile.sequence] - starts[tile.sequence + 1];
    }
};

// The keys of a sequence that are seen, and all query rows that see them.
struct Sequence {
    int64_t first, length;
    std::vector<Tile> tiles;
};

static std::vector<Sequence> sequences_of(const Pieces& pieces, int64_t group) {
    std::vector<Sequence> all;
    for (const Tile& tile : tiles_of(pieces.starts, pieces.count, group)) {
        const int64_t first = pieces.first_keys[tile.sequence], length = pieces.contexts[tile.sequence];
        if (all.empty() || all.back().first != first) all.push_back({first, 0, {}});
        all.back().length = std::max(all.back().length, length);
        all.back().tiles.push_back(tile);
    }
    return all;
}
