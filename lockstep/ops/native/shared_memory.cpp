// Exchanges between processes through shared memory: each rank publishes its bytes where all ranks can read them.
//
// Exchanges are numbered by turns, the same on all ranks, since all make the same exchanges. In each turn, a rank
// writes its bytes, publishes the turn's number, and reads the others' bytes once they are published. A slot is reused
// two turns later: a rank that published the turn in between has read the slot, so two slots per rank suffice and no
// writer waits.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstring>
#include <ctime>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

using Clock = std::chrono::steady_clock;

// What a rank publishes, on separate cache lines. The memory starts as zeros, which is turn 0.
struct alignas(128) Place {
    std::atomic<uint32_t> turn;      // last turn published by this rank; compared by difference, since it wraps
    std::atomic<uint32_t> sleepers;  // number of ranks to wake at the next turn
    int64_t bytes[2];                // size of each slot's message: written before `turn`, like the message
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "an atomic with a lock of its own process is not shared");

enum Outcome { DONE, ENDED, LATE, UNEQUAL };

// Longer than the skew between ranks with equal work, shorter than what a competing process would notice.
constexpr auto SPIN = std::chrono::microseconds(50);
constexpr int64_t NAP = 20'000'000;  // nanoseconds of sleep after which the other ranks' locks are checked

static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

static bool reached(const Place& place, uint32_t turn) {
    return (int32_t)(place.turn.load(std::memory_order_acquire) - turn) >= 0;
}

// Sequentially consistent, as in `sleep_for`: either this thread sees the sleeper, or the sleeper sees the turn.
static void arrive(Place& place, uint32_t turn) {
    place.turn.store(turn, std::memory_order_seq_cst);
#ifdef __linux__
    if (place.sleepers.load(std::memory_order_seq_cst))
        syscall(SYS_futex, &place.turn, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

static void sleep_for(Place& place, uint32_t turn) {
    const timespec nap{0, NAP};
#ifdef __linux__
    place.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = place.turn.load(std::memory_order_seq_cst);
    if ((int32_t)(seen - turn) < 0) syscall(SYS_futex, &place.turn, FUTEX_WAIT, seen, &nap, nullptr, 0);
    place.sleepers.fetch_sub(1, std::memory_order_seq_cst);
#else
    nanosleep(&nap, nullptr);
#endif
}

// Whether a rank's process has ended or left: it holds a lock on its byte of the file while it takes part.
static bool has_ended(int file, int64_t rank) {
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = rank;
    lock.l_len = 1;
    return fcntl(file, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

static Outcome wait_for(Place* places, int64_t& peer, int64_t rank, int64_t ranks, uint32_t turn, int file,
                        int64_t limit) {
    Place& place = places[peer];
    if (reached(place, turn)) return DONE;
    const auto began = Clock::now();
    do {
        for (int i = 0; i < 32; i++) {
            if (reached(place, turn)) return DONE;
            relax();
        }
    } while (Clock::now() - began < SPIN);
    while (true) {
        sleep_for(place, turn);
        if (reached(place, turn)) return DONE;
        if (Clock::now() - began < std::chrono::nanoseconds(NAP)) continue;
        for (int64_t other = 0; other < ranks; other++)
            // It may have published this turn and then ended, which does not affect this turn.
            if (other != rank && !reached(places[other], turn) && has_ended(file, other) &&
                !reached(places[other], turn)) {
                peer = other;
                return ENDED;
            }
        if (Clock::now() - began > std::chrono::milliseconds(limit)) return LATE;
    }
}

// Sends each rank a part of `bytes` bytes of `source`, and writes all ranks' parts to `out` in the order of ranks.
// `parts` is 1 if all ranks get the same bytes, or `ranks` if each gets a different part. `memory` has a page of
// states, and two slots of `capacity` bytes, a multiple of 64 per rank, for each rank; longer messages are sent in
// pieces. `file` is the memory's descriptor; `limit` is the timeout in milliseconds. One thread of a process at a time.
// Returns an Outcome, plus four times the rank that it concerns.
extern "C" int64_t exchange_parts(char* memory, int64_t file, int64_t rank, int64_t ranks, int64_t parts,
                                  const char* source, char* out, int64_t bytes, int64_t capacity, int64_t limit) {
    Place* places = reinterpret_cast<Place*>(memory);
    const int64_t piece = capacity / parts / 64 * 64, own = parts > 1 ? rank : 0;
    for (int64_t start = 0; start < bytes; start += piece) {
        const int64_t length = std::min(piece, bytes - start);
        const uint32_t turn = places[rank].turn.load(std::memory_order_relaxed) + 1;
        const auto slot = [&](int64_t of) { return memory + 4096 + (2 * of + turn % 2) * capacity; };
        for (int64_t part = 0; part < parts; part++)
            if (parts == 1 || part != rank)
                std::memcpy(slot(rank) + part * piece, source + part * bytes + start, length);
        places[rank].bytes[turn % 2] = bytes;
        arrive(places[rank], turn);
        std::memcpy(out + rank * bytes + start, source + own * bytes + start, length);
        for (int64_t step = 1; step < ranks; step++) {
            int64_t peer = (rank + step) % ranks;
            if (const Outcome outcome = wait_for(places, peer, rank, ranks, turn, (int)file, limit))
                return outcome + 4 * peer;
            if (places[peer].bytes[turn % 2] != bytes) return UNEQUAL + 4 * peer;
            std::memcpy(out + peer * bytes + start, slot(peer) + own * piece, length);
        }
    }
    return DONE;
}
