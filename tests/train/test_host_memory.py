"""What a process holds of the memory that it has freed: in a process of its own, since it cannot be undone."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import random
import torch
from lockstep.train.host_memory import keep_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def held_after(size):
    before = resident()
    torch.ones(size, dtype=torch.uint8)
    return (resident() - before) / size

keep_freed_memory()
print(held_after(24 << 20), held_after(256 << 20), held_after(120 << 20))

# Blocks of many sizes, as of steps of many lengths, freed in another order than they were made in.
draw, start, most, blocks = random.Random(0), resident(), 0, []
live = 0
for _ in range(400):
    if len(blocks) == 8:
        live -= blocks.pop(draw.randrange(8)).numel()
    blocks.append(torch.ones(int(draw.uniform(1, 24)) << 20, dtype=torch.uint8))
    live += blocks[-1].numel()
    most = max(most, live)
print((resident() - start) / most)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep what they like")
def test_blocks_up_to_a_size_are_kept_and_many_sizes_take_less_than_twice_what_is_alive():
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    small, large, most, many = map(float, result.stdout.split())
    newer = tuple(map(int, platform.libc_ver()[1].split("."))) >= (2, 35)
    # A heap of blocks of any sizes has gaps: 1.5 times what is alive was measured with glibc 2.36.
    assert small > 0.9 and large < 0.1 and many < 2 and (most > 0.7 or not newer)
