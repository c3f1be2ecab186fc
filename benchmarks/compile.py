"""A GRPO run eager and compiled: the same steps of the 5M and the 110M model, bfloat16, in turn.

Run: python benchmarks/compile.py [--model tiny|small]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time

from grpo import GROUP, NEW, PROMPTS, steps_of_run, write_model

STEPS = 6
PARTS = {"step": "time/step", "generator": "time/generate", "trainer": "time/train", "weight sync": "time/weight_sync"}


def run_side(backend: str, folder: str) -> dict[str, float]:
    """`seconds` of the whole run, of its start-up, and of the parts of its median step."""
    began = time.perf_counter()
    from lockstep.config import CompileConfig

    steps = steps_of_run(
        folder, steps=STEPS, compile=CompileConfig(backend="inductor" if backend == "compiled" else "none")
    )
    seconds = time.perf_counter() - began
    assert all(step["parity/tokens_different"] == 0 for step in steps)
    times = {name: statistics.median(step[key] for step in steps[1:]) for name, key in PARTS.items()}
    return {"seconds": seconds, "start-up": seconds - sum(step["time/step"] for step in steps), **times}


def report(size: str, vocab: int) -> None:
    from peers import best_of

    with tempfile.TemporaryDirectory() as folder:
        config = write_model(folder, size, vocab, "bfloat16")
        best = best_of(__file__, ["--folder", folder], ["eager", "compiled"], rounds=2)
    rows = f"{config.num_parameters / 1e6:.0f}M parameters, {PROMPTS * GROUP} completions x {NEW} tokens, {STEPS} steps"
    print(f"\n{rows} (seconds; parts are of the median step)")
    columns = ["seconds", "start-up", *PARTS]
    print(" " * 10 + "".join(f"{'total' if c == 'seconds' else c:>13}" for c in columns))
    for side, result in best.items():
        print(f"{side:10}" + "".join(f"{result[c]:13.3f}" for c in columns))
    print(f"{'ratio':10}" + "".join(f"{best['eager'][c] / best['compiled'][c]:13.2f}" for c in columns), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["tiny", "small"])
    parser.add_argument("--side")
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.side:
        print(json.dumps(run_side(options.side, options.folder)))
        return
    for size, vocab in (("tiny", 2048), ("small", 32000)):
        if options.model in (None, size):
            report(size, vocab)


if __name__ == "__main__":
    main()
