"""Ranks of one host exchange bytes through shared memory as through gloo, and hear of each other's end."""

import ctypes
import itertools
import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep.config import ParallelConfig
from lockstep.parallel import close_world, open_world, shared_memory
from lockstep.parallel.exchange import all_gather, gather_rows, group_named, swap_rows
from tests.parallel.launch import CONTEXT, free_port, launch, ranks_environment

LONG = shared_memory.SLOT // 7
"""Rows of a message that is longer than the memory."""


def opened():
    """This rank's tensor group."""
    world = open_world(ParallelConfig(tensor=int(os.environ["WORLD_SIZE"])), "cpu")
    return world, world.tensor_group


def renew_memory(group, slot=shared_memory.SLOT, patience=timedelta(minutes=1)):
    """Gives the group new memory, with slots of so many bytes."""
    shared_memory.close_memory(group)
    shared_memory.SLOT = slot
    assert shared_memory.share_memory(group, patience)


def compare_with_gloo(slots):
    world, group = opened()
    assert shared_memory.memory_of(group_named(group.group_name), torch.ones(1)) is not None
    draw = torch.Generator().manual_seed(world.rank)
    for slot, rows in slots.items():
        renew_memory(group, slot)
        for count, dtype in itertools.product(rows, (torch.bfloat16, torch.int64, torch.bool)):
            size = count * world.size, 3 * dtype.itemsize
            numbers = torch.randint(256, size, generator=draw, dtype=torch.uint8)
            x = (numbers % 2).bool() if dtype == torch.bool else numbers.view(dtype)
            for own in (x, x.T.contiguous().T, x[:, 1:], x[:, 0]):
                gathered = own.new_empty(world.size * len(own), *own.shape[1:])
                all_gather(gathered, own.contiguous(), group=group)
                swapped = torch.empty_like(own, memory_format=torch.contiguous_format)
                dist.all_to_all_single(swapped, own.contiguous(), group=group)
                for ours, theirs in ((gather_rows(own, group), gathered), (swap_rows(own, group), swapped)):
                    # As bytes, for the bits of these floats are any, and some are NaN.
                    assert torch.equal(ours.contiguous().view(torch.uint8), theirs.view(torch.uint8))
    close_world(world)


@pytest.mark.parametrize(
    ("ranks", "rows"), [(2, [0, 7]), pytest.param(4, [0, 1, 7, 300, LONG], marks=pytest.mark.slow)]
)
def test_what_arrives_has_the_bytes_that_gloo_brings_in_one_piece_and_in_many(ranks, rows):
    launch(ranks, compare_with_gloo, {shared_memory.SLOT: rows, 64 * ranks: [5, 64]})


def exchange_at_all_paces(before_wrap, turns):
    """Messages that differ by turn and rank, from ranks that come in any order; some sleep."""
    world, group = opened()
    renew_memory(group, slot=1024)
    memory = shared_memory.memory_of(group, torch.ones(1))
    ctypes.c_uint32.from_address(memory._address + 128 * world.rank).value = -before_wrap % 2**32
    world.barrier()
    pace, sizes = random.Random(world.rank), random.Random(0)
    ranks = torch.arange(world.size)[:, None]
    for turn in range(turns):
        count = world.size * sizes.choice([1, 40, 200])
        if pace.random() < 0.02:
            time.sleep(pace.choice([0.0002, 0.002, 0.05]))  # beyond the naps too
        own = (torch.arange(count) + turn * 1000 + world.rank * 10**7)[:, None]
        everyone = (torch.arange(count) + turn * 1000 + ranks * 10**7).view(-1, 1)
        assert torch.equal(gather_rows(own, group), everyone)
        parts = everyone.view(world.size, world.size, -1)[:, world.rank]
        assert torch.equal(swap_rows(own, group).view(world.size, -1), parts)
    close_world(world)


@pytest.mark.parametrize(("ranks", "turns"), [(2, 200), pytest.param(4, 1000, marks=pytest.mark.slow)])
def test_turns_follow_each_other_at_any_pace_and_past_the_end_of_their_numbers(ranks, turns):
    launch(ranks, exchange_at_all_paces, 100, turns)


def lose_a_rank(rank, ranks, port, said):
    os.environ |= ranks_environment(rank, ranks, port)
    torch.set_num_threads(1)
    _, group = opened()
    for _ in range(3):
        gather_rows(torch.ones(4), group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        gather_rows(torch.ones(4), group)
    except RuntimeError as error:
        said.put(str(error))


def test_a_rank_that_dies_is_an_error_on_all_others_at_once():
    said, port = CONTEXT.Queue(), free_port()
    processes = [CONTEXT.Process(target=lose_a_rank, args=(rank, 3, port, said), daemon=True) for rank in range(3)]
    for process in processes:
        process.start()
    try:
        # Nobody has waited for the one that died: to its parent it is still a process.
        errors = [said.get(timeout=60) for _ in range(2)]  # of the 600 s that a message may take
    finally:
        for process in processes:
            process.kill()
    assert errors == ["an exchange of ranks failed: rank 1 has ended, or left the group"] * 2


def held(what="memfd:lockstep"):
    """What this process holds of such memory: open files, and what of it is mapped."""
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    mapped = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return {text for text in [*links, *mapped] if what in text}


def misuse():
    """Ranks that come late or differ get an error; nothing is left of any memory."""
    before = held("/dev/shm/")  # of this process alone: others put files there and take them away meanwhile
    world, group = opened()
    assert held() and held("/dev/shm/") == before
    renew_memory(group, patience=timedelta(milliseconds=200))
    if world.rank == 0:
        with pytest.raises(RuntimeError, match=r"rank 1 did not arrive within 0:00:00\.2"):
            gather_rows(torch.ones(4), group)
        with pytest.raises(RuntimeError, match="memory is closed"):
            gather_rows(torch.ones(4), group)
    world.barrier()
    if world.rank == 1:
        # What rank 0 had laid out for that exchange is there: this one is whole, the next is not.
        gather_rows(torch.ones(4), group)
        with pytest.raises(RuntimeError, match="rank 0 has ended, or left the group"):
            gather_rows(torch.ones(4), group)
    renew_memory(group)
    with pytest.raises(RuntimeError, match=f"rank {1 - world.rank} (sent a message of another length|has ended, or)"):
        gather_rows(torch.ones(4 + world.rank), group)
    del group
    close_world(world)
    assert not held()


def test_ranks_that_are_out_of_step_are_told_so_and_leave_no_memory_behind():
    launch(2, misuse)


def go_without():
    created = shared_memory.create_memory
    shared_memory.create_memory = lambda size: (1, *created(size)[1:])  # process 1 is not the one that has it
    world, group = opened()
    assert shared_memory.memory_of(group, torch.ones(1)) is None and not held()
    assert torch.equal(gather_rows(torch.full((2,), world.rank), group), torch.tensor([0, 0, 1, 1]))
    shared_memory.create_memory = created
    os.environ["LOCKSTEP_SHARED_MEMORY"] = str(1 - world.rank)
    assert not shared_memory.share_memory(group, timedelta(minutes=1)) and not held()
    close_world(world)


def test_where_one_rank_cannot_share_all_use_gloo():
    launch(2, go_without)


def test_another_file_under_the_same_number_is_refused():
    process, file, _ = shared_memory.create_memory(4096)
    try:
        with pytest.raises(OSError, match="is not lockstep-0000"):
            shared_memory.open_memory(process, file, "lockstep-" + "0" * 32)
    finally:
        os.close(file)
