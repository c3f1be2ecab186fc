"""The memory of a rank for every recipe that trains from scratch, on 8, 64 and 512 GPUs: the table of docs/cluster.md.

A dry run each, without a GPU; a quarter of an hour in all.
Run: python benchmarks/clusters.py [RECIPE ...]
"""

from __future__ import annotations

import argparse
import sys

from lockstep.errors import UserError
from lockstep.recipes import FROM_SCRATCH
from lockstep.train.dry_run import estimate_memory

RANKS = (8, 64, 512)


def memory(name: str, ranks: int) -> str:
    """GiB of a rank, or nothing where the recipe's layout needs more ranks."""
    config = FROM_SCRATCH[name]()
    config.dry_run, config.device = ranks, "cuda"
    try:
        return f"{sum(estimate_memory(config).memory.values()) / 2**30:.1f}"
    except UserError as error:
        print(f"{name} on {ranks}: {error}", file=sys.stderr)
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=list(FROM_SCRATCH))
    print("| recipe | " + " | ".join(f"{ranks} GPUs" for ranks in RANKS) + " |")
    print("| --- |" + " --- |" * len(RANKS))
    for name in parser.parse_args().recipes:
        print(f"| `{name}` | " + " | ".join(memory(name, ranks) for ranks in RANKS) + " |", flush=True)


if __name__ == "__main__":
    main()
