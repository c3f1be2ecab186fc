"""Landlock: a process drops rights, for itself and its descendants, to files (kernel 5.13), TCP (6.7) and signals to
other processes (6.12). The constants are those of linux/landlock.h."""

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
"""Number of file rights, as lowest bits, by version of the interface."""
PR_SET_NO_NEW_PRIVS = 38

libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """The kernel's version of Landlock; 0 without it."""
    return max(0, libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Makes only the `readable` paths readable, and only the `writable` paths writable, from now on. Raises OSError.

    Also forbids mounts and, if the kernel supports it, TCP, and abstract sockets of and signals to other processes.
    """
    supported = version()
    if not supported:
        raise OSError("the kernel has no Landlock")
    rights = (1 << max(bits for since, bits in RIGHTS_OF.items() if since <= supported)) - 1
    attributes = struct.pack("<Q", rights)
    if supported >= 4:
        attributes += struct.pack("<Q", 0b11)  # bind, connect
    if supported >= 6:
        attributes += struct.pack("<Q", 0b11)  # abstract sockets, signals
    rules = _checked(libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0)))
    for paths, allowed in ((readable, READ), (writable, rights)):
        for path in paths:
            if not Path(path).exists():
                continue
            descriptor = os.open(path, os.O_PATH)
            rule = struct.pack("<Qi", allowed if Path(path).is_dir() else allowed & OF_FILES, descriptor)
            _checked(libc.syscall(ADD_RULE, rules, 1, rule, ctypes.c_uint32(0)))
            os.close(descriptor)
    _checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _checked(libc.syscall(RESTRICT_SELF, rules, ctypes.c_uint32(0)))
    os.close(rules)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
