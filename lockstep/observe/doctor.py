"""`lockstep doctor`: this machine's hardware, speed and software, and remedies for what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lockstep.cache import UnsafeCache, cache_folder
from lockstep.errors import UserError
from lockstep.model import arithmetic_of, instruction_set, name_of
from lockstep.observe import machine
from lockstep.ops import native
from lockstep.ops.native.compiling import find_compiler

State = Literal["ok", "absent", "note", "bad"]
"""Fine; missing but not needed; worth a look, although commands run; broken, so that some commands do not run."""
REQUIRED = {
    "torch": "torch", "numpy": "numpy", "safetensors": "safetensors", "tokenizers": "tokenizers", "jinja2": "jinja2",
    "jaxtyping": "jaxtyping", "tyro": "tyro", "rich": "rich", "matplotlib": "matplotlib",
    "markdown-it-py": "markdown_it", "math-verify": "math_verify", "fastapi": "fastapi", "uvicorn": "uvicorn",
    "prometheus-client": "prometheus_client",
}  # fmt: skip
"""Packages and the modules they provide."""
OPTIONAL = {
    "datasets": "hf:… data sets",
    "pyarrow": "Parquet data",
    "tensorboard": "observe.tensorboard",
    "wandb": "observe.wandb",
    "trackio": "observe.trackio",
}
"""Packages and what they are for."""
VARIABLES = (
    "LOCKSTEP_ISA", "LOCKSTEP_NATIVE", "LOCKSTEP_SHARED_MEMORY", "OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY", "CUDA_VISIBLE_DEVICES", "XDG_CACHE_HOME",
)  # fmt: skip
"""Environment variables that affect speed, bits or paths."""
PORT = 8000
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    """`area/thing`."""
    state: State
    value: Any
    """For JSON."""
    text: str
    """The value as text."""
    remedy: str = ""
    """What to do if it is not fine."""


def examine(checked: Callable[[str], None] = lambda area: None) -> list[Finding]:
    """Examines this machine; calls `checked` with each area when it is done."""
    findings: list[Finding] = []
    for area in AREAS:
        findings += AREAS[area]()
        checked(area)
    return findings


def usable(findings: Iterable[Finding]) -> bool:
    """Whether nothing that commands need is broken."""
    return all(finding.state != "bad" for finding in findings)


def as_json(findings: list[Finding]) -> str:
    """One object: whether everything is usable, and each finding by its name."""
    entries = {f.name: {"state": f.state, "value": f.value, "text": f.text, "remedy": f.remedy} for f in findings}
    return json.dumps({"usable": usable(findings), "findings": entries}, indent=1)


def as_text(findings: list[Finding], encoding: str = "utf-8") -> str:
    """A table for a terminal, area by area; what to do is shown below each finding."""
    marks = {"ok": "✓", "absent": "·", "note": "!", "bad": "✗"}
    try:
        "".join(marks.values()).encode(encoding)
    except UnicodeEncodeError:
        marks = {"ok": "ok", "absent": "-", "note": "!!", "bad": "XX"}
    lines, before = [], ""
    for finding in findings:
        area, _, name = finding.name.partition("/")
        lines.append(f"{area if area != before else '':11}{marks[finding.state]:>2}  {name:18} {finding.text}".rstrip())
        if finding.remedy:
            lines.append(f"{'':34}→ {finding.remedy}" if marks["ok"] == "✓" else f"{'':34}-> {finding.remedy}")
        before = area
    notes, broken = (sum(f.state == state for f in findings) for state in ("note", "bad"))
    lines.append("")
    if broken:
        more = f"; {notes} more worth a look" if notes else ""
        lines.append(f"{broken} broken; what to do is shown next to each{more}")
    else:
        lines.append("everything that commands need is available" + (f"; worth a look: {notes}" if notes else ""))
    return "\n".join(lines)


def _processor() -> Iterator[Finding]:
    yield Finding("processor/name", "ok", machine.processor(), machine.processor())
    has = machine.instructions()
    yield Finding("processor/instructions", "ok", has, ", ".join(has) or "unknown")
    try:
        used, arithmetic = instruction_set(), arithmetic_of(torch.device("cpu"))
    except UserError as error:  # LOCKSTEP_ISA names none, or the cache folder is refused
        yield Finding("processor/used", "bad", None, "no operators can be used", str(error))
    else:
        yield Finding("processor/used", "ok", used, f"{used}, the operators' instruction set")
        faster = "" if arithmetic.startswith("bf16") else ", without instructions for bfloat16: int8 is the fast format"
        yield Finding("processor/arithmetic", "ok", arithmetic, arithmetic + faster)
    cpus, threads = machine.usable_cpus(), torch.get_num_threads()
    too_many = f"more threads than CPUs: set OMP_NUM_THREADS={cpus}" if threads > cpus else ""
    text = f"{threads} on {cpus} CPU{'s' * (cpus > 1)}"
    yield Finding("processor/threads", "note" if too_many else "ok", threads, text, too_many)
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    remedy = (
        "other work is running: every speed below is lower than this machine's" if busy > cpus * 0.75 + 0.25 else ""
    )
    yield Finding("processor/load", "note" if remedy else "ok", round(busy, 2), f"{busy:.1f} processes", remedy)
    for name in VARIABLES:
        if (value := os.environ.get(name)) is not None:
            slow = "selects the plain operators, which are slow: unset it"
            remedy = slow if (name, value) == ("LOCKSTEP_NATIVE", "0") else ""
            yield Finding(f"processor/{name}", "note" if remedy else "ok", value, value, remedy)


def _operators() -> Iterator[Finding]:
    compiler = find_compiler() or ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            built = native.library() is not None
    except UserError:
        yield Finding("operators/native", "bad", False, "they cannot be used", "see processor/used")
        return
    if built:
        yield Finding("operators/native", "ok", True, "using compiled operators")
        yield Finding("operators/compiler", "ok", compiler, compiler or "none, but none is needed")
    else:
        text = "using plain PyTorch operators, which are many times slower"
        off = os.environ.get("LOCKSTEP_NATIVE", "1") == "0"
        yield Finding(
            "operators/native", "note", False, text, "" if off else "install g++ (apt install g++), or set CXX"
        )
        yield Finding("operators/compiler", "ok" if compiler else "note", compiler, compiler or "none")
    for dtype in (torch.float32, torch.bfloat16):
        flops = machine.product_flops(dtype)
        yield Finding(
            f"operators/{name_of(dtype)}",
            "ok",
            flops,
            f"{flops / 1e9:,.3g} GF/s in a matrix product",
        )


def _memory() -> Iterator[Finding]:
    total, free = machine.memory_bytes()
    if total:
        little = "close other programs, or use a smaller model" if free < 2 * GIB else ""
        text = f"{free / GIB:.1f} GiB free of {total / GIB:.1f}"
        yield Finding("memory/free", "note" if little else "ok", {"free": free, "total": total}, text, little)
    speed = machine.copied_bytes()
    yield Finding("memory/speed", "ok", speed, f"{speed / 1e9:.1f} GB/s (read and write) in a copy")
    if Path("/dev/shm").is_dir():
        shared = shutil.disk_usage("/dev/shm").free
        little = "ranks and loader workers share memory there: docker run --shm-size 1g" if shared < GIB // 4 else ""
        text = f"{shared / GIB:.1f} GiB free in /dev/shm"
        yield Finding("memory/shared", "note" if little else "ok", shared, text, little)


def _gpu() -> Iterator[Finding]:
    driver = machine.driver_version()
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            value = {
                "name": properties.name,
                "memory": properties.total_memory,
                "capability": [properties.major, properties.minor],
            }
            text = f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, capability {properties.major}."
            old = "the kernels are built for capability 8.0 and later" if properties.major < 8 else ""
            yield Finding(f"gpu/cuda:{index}", "note" if old else "ok", value, f"{text}{properties.minor}", old)
        yield Finding(
            "gpu/driver", "ok", driver, f"{driver or 'unknown'}; torch is built for CUDA {torch.version.cuda}"
        )
        triton = importlib.util.find_spec("triton") is not None
        remedy = "" if triton else "without it, GPUs use plain operators, which are slow: pip install triton"
        yield Finding("gpu/triton", "ok" if triton else "note", triton, _version("triton") or "missing", remedy)
    elif driver:
        if torch.version.cuda is None:
            remedy = "this torch is built without CUDA: pip install torch from https://pytorch.org/get-started"
        else:
            remedy = f"torch is built for CUDA {torch.version.cuda}: update the driver, and check CUDA_VISIBLE_DEVICES"
        yield Finding("gpu/cuda", "note", driver, f"driver {driver}, but torch sees no GPU", remedy)
    else:
        yield Finding("gpu/cuda", "absent", None, "none; everything runs on the CPU")


def _packages() -> Iterator[Finding]:
    python = sys.version.split()[0]
    yield Finding("packages/python", "ok", python, python)
    for package, module in REQUIRED.items():
        installed = importlib.util.find_spec(module) is not None
        version = _version(package)
        wanted = _wanted(package)
        fits = installed and _fits(version, wanted)
        remedy = "" if fits else f'pip install "{package}{wanted}"'
        state: State = "bad" if not installed else "ok" if fits else "note"
        yield Finding(f"packages/{package}", state, version, version or ("found" if installed else "missing"), remedy)
    for package, purpose in OPTIONAL.items():
        installed = importlib.util.find_spec(package) is not None
        text = _version(package) if installed else f"not installed; for {purpose}: pip install {package}"
        value = _version(package) if installed else None
        yield Finding(f"packages/{package}", "ok" if installed else "absent", value, text)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _wanted(package: str) -> str:
    """The versions that this installation requires, such as `>=2.11,<2.16`; empty if unknown."""
    try:
        lines = importlib.metadata.requires("lockstep-lm") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    for line in lines:
        name = line.split(";")[0].replace(" ", "")
        if name.startswith(package) and name[len(package) :][:1] in tuple("<>=!~"):
            return name[len(package) :]
    return ""


def _fits(version: str, wanted: str) -> bool:
    if not version or not wanted or importlib.util.find_spec("packaging") is None:
        return True
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(wanted).contains(version.split("+")[0], prereleases=True)


def _folders() -> Iterator[Finding]:
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cache = cache_folder()
    except UnsafeCache as error:
        place, _, remedy = str(error).partition(": ")
        yield Finding("folders/cache", "bad", place, place, remedy)
    else:
        remedy = "it may not last: set XDG_CACHE_HOME to a writable folder"
        lasting = not caught and Path(tempfile.gettempdir()) not in cache.parents
        yield Finding("folders/cache", "ok" if lasting else "note", str(cache), str(cache), "" if lasting else remedy)
    here = Path.cwd()
    writable = os.access(here, os.W_OK)
    remedy = "" if writable else "runs are written here: change to another folder, or give --output"
    yield Finding("folders/current", "ok" if writable else "note", str(here), str(here), remedy)
    free = shutil.disk_usage(here).free
    remedy = "" if free > 2 * GIB else "checkpoints may not fit: free some space, or give --output on another disk"
    state: State = "ok" if free > 2 * GIB else "note" if free > GIB // 16 else "bad"
    yield Finding("folders/disk", state, free, f"{free / GIB:,.1f} GiB free here", remedy)


def _network() -> Iterator[Finding]:
    try:
        socket.create_server(("127.0.0.1", PORT)).close()
    except OSError as error:
        text = f"cannot listen on {PORT} ({error.strerror or error})"
        yield Finding(
            "network/port", "note", False, text, "give lockstep serve another --port, or --port 0 (any free port)"
        )
    else:
        yield Finding("network/port", "ok", True, f"{PORT} is free, for lockstep serve")
    try:
        import resource
    except ImportError:
        return
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = "" if files >= 1024 or files < 0 else "a server needs one per client: ulimit -n 4096"
    yield Finding("network/open files", "note" if few else "ok", files, f"{files} at a time", few)


AREAS: dict[str, Callable[[], Iterator[Finding]]] = {
    "processor": _processor,
    "operators": _operators,
    "memory": _memory,
    "gpu": _gpu,
    "packages": _packages,
    "folders": _folders,
    "network": _network,
}
