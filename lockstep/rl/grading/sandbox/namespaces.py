"""Namespaces in which a process sees a few read-only folders, a scratch folder, no network and no other processes.

Uses unshare(2), mount(2) and pivot_root(2). An ordinary user gets the privileges for them in a user namespace; root has
them, and becomes an unprivileged user afterwards.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MNT_DETACH = 442, -100, 0x8000, 2
FIRST_USER, USERS = 61184, 4336
"""The user ids that systemd reserves for dynamic users: root becomes one of them, so that the process limit, which the
kernel counts per user and does not apply to root, holds for each sandbox separately."""
PR_SET_DUMPABLE = 4
KEYCTL = {"x86_64": 250}
"""System call number of keyctl(2), by machine; 219 on those with the kernel's generic table, such as aarch64."""
KEYCTL_JOIN_SESSION_KEYRING = 1
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SCRATCH = "/scratch"

libc = ctypes.CDLL(None, use_errno=True)


def leave(number: int, may_drop: bool) -> None:
    """Leaves the network, mount, IPC and UTS namespaces; the next child is the first in a new process namespace.

    If root may not, as in a container, it first becomes the user `number`, if `may_drop`, and proceeds as any user.
    Raises OSError if the kernel, or a confinement of this process, forbids it.
    """
    flags = NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS
    if os.getuid() == 0:
        try:
            _call("unshare", flags)
            with suppress(OSError):  # read-only in some containers
                # No System V shared memory in this IPC namespace: no process limit counts it.
                Path("/proc/sys/kernel/shmall").write_text("0")
            return
        except PermissionError:
            if not may_drop:
                raise
            drop_root(number)
            _call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # else root still owns its files in /proc
    user, group = os.getuid(), os.getgid()
    _call("unshare", flags | NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def leave_keyring() -> None:
    """Joins an empty session keyring, as the caller's may hold passwords; namespaces keep it. Raises OSError."""
    try:
        _call("syscall", KEYCTL.get(os.uname().machine, 219), KEYCTL_JOIN_SESSION_KEYRING, None)
    except OSError as error:
        if error.errno != errno.ENOSYS:  # ENOSYS: a kernel without keyrings
            raise


def build_root(readable: Sequence[str], scratch_bytes: int) -> None:
    """Replaces the root by one with `readable` (read-only), some devices, and a scratch folder. Raises OSError.

    The new root has no /proc and no /sys.
    """
    _mount("none", "/", "", MS_REC | MS_PRIVATE)
    # Opened before anything is mounted over them.
    paths = {path for path in (*readable, *DEVICES) if os.path.lexists(path)}
    paths = {path for path in paths if not paths.intersection(map(str, Path(path).parents))}
    descriptors = {path: os.open(path, os.O_PATH) for path in paths if not os.path.islink(path)}
    root = "/tmp"
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=4096,mode=755")
    for path in sorted(paths):
        target = Path(root + path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path not in descriptors:
            target.symlink_to(os.readlink(path))
            continue
        source = f"/proc/self/fd/{descriptors[path]}"
        if os.path.isdir(source):
            target.mkdir(exist_ok=True)
        else:
            target.touch()
        _mount(source, str(target), "", MS_BIND | MS_REC)
        _set_attributes(str(target), MS_RDONLY | MS_NOSUID, AT_RECURSIVE)
        os.close(descriptors[path])
    Path(root + SCRATCH).mkdir()
    if not os.path.exists(root + "/tmp"):  # unless parts of it are readable
        Path(root + "/tmp").symlink_to(SCRATCH)
    options = f"size={scratch_bytes},nr_inodes=10000,mode=777"
    _mount("tmpfs", root + SCRATCH, "tmpfs", MS_NOSUID | MS_NODEV, options)
    _set_attributes(root, MS_RDONLY, 0)
    os.chdir(root)
    _call("pivot_root", b".", b".")  # the old root is stacked on the new one until it is unmounted
    _call("umount2", b".", MNT_DETACH)
    os.chdir(SCRATCH)


def drop_root(number: int) -> None:
    """Makes root a user that owns nothing, chosen per sandbox by `number`; other users stay the same."""
    if os.getuid() == 0:
        user = FIRST_USER + number % USERS
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def open_to_all(path: str) -> bool:
    """Whether every user can traverse all folders to a file, and execute it."""
    return all(part.stat().st_mode & 0o001 for part in (Path(path), *Path(path).parents))


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())


def _set_attributes(path: str, attributes: int, flags: int) -> None:
    """Sets attributes of a mount, and with AT_RECURSIVE of all mounts below it. The bits are those of mount(2)."""
    settings = struct.pack("<QQQQ", attributes, 0, 0, 0)
    _call("syscall", MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, settings, ctypes.c_size_t(len(settings)))


def _call(name: str, *arguments: object) -> None:
    if getattr(libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
