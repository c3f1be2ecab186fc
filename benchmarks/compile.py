"""A GRPO run eager and compiled: the same steps of the 5M and the 110M model, bfloat16, in turn.

Run: python benchmarks/compile.py [--model tiny|small]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from grpo import GROUP, NEW, PROMPTS, TASK

STEPS = 6
PARTS = {"generator": "time/generate", "trainer": "time/train", "weight sync": "time/weight_sync"}


def run_side(backend: str, folder: str) -> dict[str, float]:
    """`seconds` of the whole run, of its start-up, and of the parts of its median step."""
    began = time.perf_counter()
    from lockstep.config import CompileConfig, RLConfig, TrainConfig
    from lockstep.rl.controller import reinforce

    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "task.py").write_text(TASK)
        config = RLConfig(
            output=f"{scratch}/run",
            model=folder,
            environment=f"{scratch}/task.py:Letters",
            steps=STEPS,
            prompts_per_step=PROMPTS,
            samples_per_prompt=GROUP,
            max_new_tokens=NEW,
            validation_examples=1,
            train=TrainConfig(learning_rate=1e-5),
            compile=CompileConfig(backend="inductor" if backend == "compiled" else "none"),
        )
        reinforce(config)
        seconds = time.perf_counter() - began
        lines = [json.loads(line) for line in (Path(scratch) / "run" / "metrics.jsonl").read_text().splitlines()][1:]
    assert all(line["parity/tokens_different"] == 0 for line in lines)
    result = {name: statistics.median(line[key] for line in lines[1:]) for name, key in PARTS.items()}
    start = seconds - sum(line["time/step"] for line in lines)
    step = statistics.median(line["time/step"] for line in lines[1:])
    return {"seconds": seconds, "start-up": start, "step": step, **result}


def report(size: str, vocab: int) -> None:
    from peers import best_of

    from lockstep import build_model, save_model
    from lockstep.data import TextSource, train_bpe
    from lockstep.model import preset

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = train_bpe(TextSource().__iter__(), 2048)
        tokenizer.save(folder)
        config = preset(f"qwen3:{size}", vocab, (tokenizer.eos_id or 0,))
        save_model(build_model(config, dtype="bfloat16"), folder)
        best = best_of(__file__, ["--folder", folder], ["eager", "compiled"], rounds=2)
    rows = f"{config.num_parameters / 1e6:.0f}M parameters, {PROMPTS * GROUP} completions x {NEW} tokens, {STEPS} steps"
    print(f"\n{rows} (seconds; parts are of the median step)")
    columns = ["seconds", "start-up", "step", *PARTS]
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
