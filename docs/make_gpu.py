"""Writes the tables of docs/gpu.md: what each Triton kernel becomes on each kind of GPU, compiled ahead of time.

Run: PYTHONPATH=. python docs/make_gpu.py   (ten minutes on two cores; needs no GPU)
"""

from __future__ import annotations

from pathlib import Path

import torch

from tests.ops.gpu_builds import INSTRUCTION, SHARED, build, launches

PAGE = Path(__file__).with_name("gpu.md")
MARK = "<!-- table of {} -->\n"


def table(dtype: torch.dtype) -> str:
    """A line per kernel: shared memory and, if registers are spilled, the bytes, of its most demanding variant."""
    cells: dict[str, dict[int, str]] = {}
    for capability, limit in SHARED.items():
        used: dict[str, list[tuple[int, int]]] = {}
        for each in launches(dtype, capability):
            built = build(each, capability)
            if built.shared <= limit * 1024:
                used.setdefault(each.name, []).append((-(-built.shared // 1024), built.stack))
        for name, variants in used.items():
            shared, spilled = (max(column) for column in zip(*variants))
            cells.setdefault(name, {})[capability] = f"{shared}, {spilled} B" if spilled else str(shared)
    lines = [
        "| kernel | " + " | ".join(f"sm_{capability}" for capability in SHARED) + " |",
        "| --- |" + " --- |" * len(SHARED),
        "| *may have, KiB* | " + " | ".join(map(str, SHARED.values())) + " |",
    ]
    if dtype == torch.bfloat16:
        lines.append("| *products* | " + " | ".join(f"`{INSTRUCTION[capability]}`" for capability in SHARED) + " |")
    lines += [
        f"| {name.replace('_kernel', '')} | " + " | ".join(of.get(capability, "–") for capability in SHARED) + " |"
        for name, of in sorted(cells.items())
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    page = PAGE.read_text()
    for dtype in ("bfloat16", "float32"):
        before, _, rest = page.partition(MARK.format(dtype))
        page = before + MARK.format(dtype) + table(getattr(torch, dtype)) + rest[rest.index("<!-- end -->") :]
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
