"""What a process holds of the memory that it has freed: in a process of its own, since it cannot be undone."""

import platform
import subprocess
import sys

import pytest

RESIDENT = """
import os, random
import torch
from lockstep.host_memory import keep_freed_memory, return_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
"""
OF_SOME_SIZES = """
def held_after(size):
    before = resident()
    torch.ones(size, dtype=torch.uint8)
    return (resident() - before) / size

keep_freed_memory()
print(held_after(24 << 20), held_after(256 << 20), held_after(120 << 20))

blocks = [torch.ones(24 << 20, dtype=torch.uint8) for _ in range(6)]
blocks.clear()
kept = resident()
return_freed_memory()
print((kept - resident()) >> 20)
"""
OF_MANY_SIZES = """
def most_of(seed):
    # As of steps of many lengths, freed in another order than they were made in.
    draw, start, most, blocks = random.Random(seed), resident(), 0, []
    for _ in range(400):
        if len(blocks) == 8:
            blocks.pop(draw.randrange(8))
        blocks.append(torch.ones(int(draw.uniform(1, 24)) << 20, dtype=torch.uint8))
        most = max(most, resident() - start)
    return most

for keep in (True, False):
    for seed in range(3):
        if not os.fork():
            if keep:
                keep_freed_memory()
            print(most_of(seed), flush=True)
            os._exit(0)
        os.wait()
"""
pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep what they like")


def _run(program):
    command = [sys.executable, "-c", RESIDENT + program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return [float(number) for number in result.stdout.split()]


def test_blocks_up_to_a_size_are_kept_until_they_are_returned():
    small, large, most, returned = _run(OF_SOME_SIZES)
    newer = tuple(map(int, platform.libc_ver()[1].split("."))) >= (2, 35)
    assert small > 0.9 and large < 0.1 and (most > 0.7 or not newer)
    assert returned > 100, "MiB: nearly all that was kept"


@pytest.mark.slow
def test_blocks_of_many_sizes_take_less_than_twice_what_they_take_without():
    # A heap of blocks of many sizes has gaps either way: 3.2, 3.5 and 2.9 times what is alive was measured with
    # glibc 2.36, and 2.9, 2.1 and 2.4 times without. One draw of sizes is no measure: where the system places the heap
    # differs from process to process, and 575 MiB for 410 have been seen.
    most = _run(OF_MANY_SIZES)
    kept, without = most[:3], most[3:]
    assert len(without) == 3 and sum(kept) < 1.5 * sum(without), "1.1 was measured"
