"""Landlock: a process gives up rights, for itself and all it starts, to files (kernel 5.13), TCP (6.7) and signals to
others (6.12). The constants are those of linux/landlock.h."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""System call numbers, the same on all architectures."""
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = (1 << bit for bit in range(4))
READ = EXECUTE | READ_FILE | READ_DIR
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE
RIGHTS_OF = {1: 13, 2: 14, 3: 15, 5: 16}
"""File rights known to each version of the interface: the number of lowest bits."""
PR_SET_NO_NEW_PRIVS = 38

libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Version of the kernel's Landlock; 0 if it has none."""
    return max(0, libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """From now on only the `readable` paths can be read, and only the `writable` ones written. Raises OSError.

    It also forbids mounting and, if the kernel supports it, TCP, others' abstract sockets, and signals to others.
    """
    known = version()
    if not known:
        raise OSError("the kernel has no Landlock")
    rights = (1 << max(bits for since, bits in RIGHTS_OF.items() if since <= known)) - 1
    attributes = struct.pack("<Q", rights)
    if known >= 4:
        attributes += struct.pack("<Q", 0b11)  # bind, connect
    if known >= 6:
        attributes += struct.pack("<Q", 0b11)  # abstract sockets, signals
    rules = _checked(libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0)))
    for paths, allowed in ((readable, READ), (writable, rights)):
        for path in paths:
            if not Path(path).exists():
                continue
            place = os.open(path, os.O_PATH)
            rule = struct.pack("<Qi", allowed if Path(path).is_dir() else allowed & OF_FILES, place)
            _checked(libc.syscall(ADD_RULE, rules, 1, rule, ctypes.c_uint32(0)))
            os.close(place)
    _checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _checked(libc.syscall(RESTRICT_SELF, rules, ctypes.c_uint32(0)))
    os.close(rules)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
