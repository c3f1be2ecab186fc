// Recorded kernel calls, replayed in order: through Python, a call takes as long as a kernel of a small model.
#include "replay.h"

// Each call is its kernel's replay function, the number of arguments, and the arguments.
extern "C" void replay_calls(const int64_t* words, int64_t calls) {
    for (; calls > 0; calls--) {
        reinterpret_cast<void (*)(const int64_t*)>(words[0])(words + 2);
        words += 2 + words[1];
    }
}
