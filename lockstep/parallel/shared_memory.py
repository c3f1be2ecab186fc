"""Exchanges between ranks on one host through shared memory instead of gloo's connections.

A decode step's message has a few kilobytes. Over TCP its time is that of waking gloo's thread and the waiting rank,
some hundred microseconds; through memory, a tenth of that. Only bytes are moved, so results are those of gloo.

The memory is an anonymous file (`memfd`): the system frees it with its processes, and it does not count toward
`/dev/shm`, which is small in containers. The ranks open it through its creator's entry in `/proc`; if they cannot,
because they are on different hosts or in different PID namespaces, gloo is used.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.ops import native
from lockstep.parallel.messages import from_all

SLOT = 1 << 20
"""Bytes of a slot; each rank has two. Longer messages are sent in pieces."""
PLACES = 4096
"""Bytes before the slots, for the ranks' progress counters."""
PROBLEMS = {
    1: "rank {} has ended, or left the group",
    2: "rank {} did not arrive within {}",
    3: "rank {} sent a message of another length: the ranks are out of step",
}


class SharedMemory:
    """A rank's access to its group's memory. One thread may call it; all ranks make the same calls in order."""

    def __init__(self, group: dist.ProcessGroup, file: int, patience: timedelta):
        self._rank, self._ranks, self._file, self._patience = group.rank(), group.size(), file, patience
        self._names = dist.get_process_group_ranks(group)
        # Locked while this process takes part: the system releases the lock when the process ends in any way, and
        # forked processes do not inherit it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._rank)
        self._memory: mmap.mmap | None = mmap.mmap(file, _size(self._ranks))
        self._address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self._function = native.function("exchange_parts")
        integer, pointer = ctypes.c_int64, ctypes.c_void_p
        self._function.argtypes = [pointer, *[integer] * 4, pointer, pointer, *[integer] * 3]
        self._function.restype = integer
        self._close_file = weakref.finalize(self, os.close, file)

    def gather(self, local: Tensor, out: Tensor) -> None:
        """Writes every rank's `local` to `out`, in rank order. Both are contiguous and on the CPU."""
        self._exchange(local, out, 1)

    def swap(self, x: Tensor, out: Tensor) -> None:
        """Sends part r of `x` to rank r; `out` gets what is received, in rank order. Both contiguous, on the CPU."""
        self._exchange(x, out, self._ranks)

    def _exchange(self, source: Tensor, out: Tensor, parts: int) -> None:
        if self._memory is None:
            raise RuntimeError("the ranks' shared memory is closed, after an error or after close_world")
        length, limit = source.nbytes // parts, int(self._patience.total_seconds() * 1000)
        place = self._address, self._file, self._rank, self._ranks, parts
        outcome = self._function(*place, source.data_ptr(), out.data_ptr(), length, SLOT, limit)
        if outcome:
            self.close()  # the ranks are out of step; this notifies the others
            rank = self._names[outcome // 4]
            raise RuntimeError("an exchange of ranks failed: " + PROBLEMS[outcome % 4].format(rank, self._patience))

    def close(self) -> None:
        """Leaves the group: ranks that still wait for this one get an error."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None
            self._close_file()


# Keyed by the group itself: a name can be reused after `destroy_process_group`.
_shared: weakref.WeakKeyDictionary[dist.ProcessGroup, SharedMemory] = weakref.WeakKeyDictionary()


def share_memory(group: dist.ProcessGroup, patience: timedelta) -> bool:
    """Makes exchanges of `group` use shared memory, if all of its ranks can. All of them call it.

    An exchange that takes longer than `patience` is an error. LOCKSTEP_SHARED_MEMORY=0 on any rank selects gloo.
    """
    enabled = os.environ.get("LOCKSTEP_SHARED_MEMORY", "1") != "0" and hasattr(os, "memfd_create")
    able = enabled and native.library() is not None
    created = create_memory(_size(group.size())) if able and group.rank() == 0 else None
    where = from_all(created, group)[0]
    memory = _joined(group, where, patience) if able and where is not None else None
    everywhere = all(from_all(memory is not None, group))
    if everywhere and memory is not None:
        _shared[group] = memory
    elif memory is not None:
        memory.close()
    return everywhere


def _size(ranks: int) -> int:
    return PLACES + 2 * ranks * SLOT


def create_memory(size: int) -> tuple[int, int, str] | None:
    """A new in-memory file of `size` zeros; None if the system has no such files.

    Returns this process's PID, the file's descriptor (to be closed), and its unique name.
    """
    name = f"lockstep-{secrets.token_hex(16)}"
    try:
        file = os.memfd_create(name)
    except (AttributeError, OSError):  # not Linux, or forbidden in this container
        return None
    os.ftruncate(file, size)
    return os.getpid(), file, name


def _joined(group: dist.ProcessGroup, where: tuple[int, int, str], patience: timedelta) -> SharedMemory | None:
    file = where[1] if group.rank() == 0 else None
    try:
        file = open_memory(*where) if file is None else file
        return SharedMemory(group, file, patience)
    except OSError:  # another host, container or PID namespace
        if file is not None:
            os.close(file)
        return None


def open_memory(process: int, file: int, name: str) -> int:
    """Opens a file that another process created; returns its descriptor here.

    Raises OSError if that process is not visible here, or if the descriptor is of another file.
    """
    path = f"/proc/{process}/fd/{file}"
    if name not in os.readlink(path):
        raise OSError(f"{path} is not {name}")
    return os.open(path, os.O_RDWR)


def memory_of(group: dist.ProcessGroup, tensor: Tensor) -> SharedMemory | None:
    """The shared memory of `group`; None if it has none, or if `tensor` is not on the CPU."""
    return _shared.get(group) if tensor.device.type == "cpu" else None


def close_memory(group: dist.ProcessGroup) -> None:
    """Leaves the memory of `group`, if any: ranks that still wait for this one get an error."""
    if (memory := _shared.pop(group, None)) is not None:
        memory.close()
