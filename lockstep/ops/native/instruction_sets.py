"""The instruction sets for which the kernels are compiled, and which of them this processor supports."""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lockstep.errors import UserError


class UnknownInstructions(UserError, ValueError):
    """LOCKSTEP_ISA names an instruction set that is not available."""


@dataclass(frozen=True)
class InstructionSet:
    """A name, the compiler flags, and what /proc/cpuinfo must list.

    `arithmetic`: `portable` (the same bits on every processor), `bf16_pairs` or `bf16_tiles`. `emulated`: in plain C,
    many times slower, so it is only used if its arithmetic or its name is requested.
    """

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str] = frozenset()
    arithmetic: str = "portable"
    emulated: bool = False


_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_AVX512_NEEDS = frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"})
_AVX512_VNNI = (*_AVX512, "-mavx512vnni")
_AVX512_VNNI_NEEDS = _AVX512_NEEDS | {"avx512_vnni"}
_AVX512_BF16 = (*_AVX512_VNNI, "-mavx512bf16")
_AVX512_BF16_NEEDS = _AVX512_VNNI_NEEDS | {"avx512_bf16"}
_AMX_NEEDS = _AVX512_BF16_NEEDS | {"amx_tile", "amx_bf16", "amx_int8"}
_AMX = (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8", "-DLOCKSTEP_TILES")
_X86 = ("-march=x86-64-v2", "-DLOCKSTEP_PLAIN")
_X86_NEEDS = frozenset({"sse4_2", "ssse3", "popcnt"})
PLAIN = InstructionSet("plain", ("-DLOCKSTEP_PLAIN",))
# Vectors wider than a register make compilers warn about how they are passed.
_TILES = ("-DLOCKSTEP_TILES", "-Wno-psabi")
PLAIN_TILES = InstructionSet("plain_tiles", (*PLAIN.flags, *_TILES), arithmetic="bf16_tiles", emulated=True)
_ANY = (PLAIN_TILES, PLAIN)
_NEON = (InstructionSet("neon", ()), *_ANY)
# Best first.
BY_MACHINE = {
    "x86_64": (
        InstructionSet("amx", _AMX, _AMX_NEEDS, "bf16_tiles"),
        InstructionSet("avx512_bf16", _AVX512_BF16, _AVX512_BF16_NEEDS, "bf16_pairs"),
        InstructionSet("avx512_vnni", _AVX512_VNNI, _AVX512_VNNI_NEEDS),
        InstructionSet("avx512", _AVX512, _AVX512_NEEDS),
        InstructionSet("avx_vnni", (*_AVX2, "-mavxvnni"), frozenset({"avx2", "fma", "avx_vnni"})),
        InstructionSet("avx2", _AVX2, frozenset({"avx2", "fma"})),
        InstructionSet("plain_tiles", (*_X86, *_TILES), _X86_NEEDS, "bf16_tiles", emulated=True),
        InstructionSet("plain", _X86, _X86_NEEDS),
    ),
    "aarch64": _NEON,
    "arm64": _NEON,
}
NAMES = tuple(dict.fromkeys(each.name for sets in BY_MACHINE.values() for each in sets))


@cache
def supported() -> tuple[InstructionSet, ...]:
    """The instruction sets that this processor supports, best first, from LOCKSTEP_ISA down if that is set.

    Raises UnknownInstructions if LOCKSTEP_ISA names a set that is unknown or that the processor lacks.
    """
    available = tuple(each for each in _sets() if each.needs <= processor_flags())
    if available and available[0].name == "amx" and not _may_use_tiles():
        available = available[1:]
    highest = os.environ.get("LOCKSTEP_ISA", "")
    if not highest:
        return available
    names = [each.name for each in available]
    if highest not in names:
        reason = "this processor does not have it" if highest in NAMES else "there is no such instruction set"
        raise UnknownInstructions(f"LOCKSTEP_ISA is {highest}: {reason}; here it can be {', '.join(names)}")
    return available[names.index(highest) :]


def _may_use_tiles() -> bool:
    """Requests the matrix unit's registers from Linux, as every process must before using them."""
    request_permission, tile_data, system_call = 0x1023, 18, 158  # ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA, arch_prctl
    return ctypes.CDLL(None).syscall(system_call, request_permission, tile_data) == 0


def _sets() -> tuple[InstructionSet, ...]:
    return BY_MACHINE.get(platform.machine().lower(), _ANY)


@cache
def processor_flags() -> frozenset[str]:
    """The processor's features, by their names in Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return _flags_from_torch()
    line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(line.partition(":")[2].split())


def _flags_from_torch() -> frozenset[str]:
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX512":
        return _X86_NEEDS | _AVX512_NEEDS
    return _X86_NEEDS | {"avx2", "fma"} if capability == "AVX2" else _X86_NEEDS
