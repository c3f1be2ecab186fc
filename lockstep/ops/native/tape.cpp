// Calls of kernels one after the other: through Python each takes as long as a kernel of a small model.
#include "played.h"

// Of each call: its kernel's played form, how many arguments follow, and these.
extern "C" void play(const int64_t* tape, int64_t calls) {
    for (; calls > 0; calls--) {
        reinterpret_cast<void (*)(const int64_t*)>(tape[0])(tape + 2);
        tape += 2 + tape[1];
    }
}
