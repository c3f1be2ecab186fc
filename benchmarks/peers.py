"""The environment that the peers live in, apart from the project's own, and how both sides are timed in turn."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / ".peers"
ROUNDS = 3


def peer_python() -> str:
    """The peers' Python; its environment is made on first use."""
    python = FOLDER / "bin" / "python"
    if not (FOLDER / ".installed").exists():
        print(f"installing transformers and TRL into {FOLDER} …", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
        for packages in (["torch>=2.11,<2.14"], ["trl==1.16.0", "transformers>=5", "datasets", "accelerate"]):
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
        (FOLDER / ".installed").touch()
    return str(python)


def compare(script: str, arguments: list[str], work: str, units: float, unit: str, peer: str) -> float:
    """Runs `script` as both sides in turn, ROUNDS times; prints the best of each and their ratio, which it returns.

    Each run is a process of its own that prints the seconds it took as its last line.
    """
    best = {"lockstep": float("inf"), peer: float("inf")}
    for _ in range(ROUNDS):
        for side, python in (("lockstep", sys.executable), (peer, peer_python())):
            best[side] = min(best[side], _seconds([python, script, "--side", side, *arguments]))
    ratio = best[peer] / best["lockstep"]
    cores = len(os.sched_getaffinity(0))
    print(f"{work} ({platform.machine()}, {cores} cores, best of {ROUNDS})")
    for side, seconds in best.items():
        print(f"  {side:13} {seconds:7.2f} s  {units / seconds:9.0f} {unit}")
    print(f"  ratio         {ratio:7.2f}")
    return ratio


def _seconds(command: list[str]) -> float:
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stderr[-3000:]}")
    return float(result.stdout.strip().splitlines()[-1])
