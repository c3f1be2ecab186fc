"""DPO at 110M parameters against TRL's DPOTrainer on the same pairs: seconds per step, both sides in turn.

Pairs are random tokens: a prompt, and two answers of different lengths. Both sides have the reference's
log-probabilities already (TRL's precompute_ref_log_probs), and compute forward, backward, clipping and AdamW.
Run: python benchmarks/dpo.py [--dtype float32] [--pairs 4] [--prompt 192] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

VOCAB, STEPS = 32000, 2
ANSWERS = (32, 224)
"""Shortest and longest answer, in tokens."""

Pair = tuple[list[int], list[int], list[int]]


def pairs(options: argparse.Namespace) -> list[Pair]:
    """(prompt, chosen, rejected), the same on both sides."""
    draw = random.Random(0)
    lengths = [(options.prompt, draw.randint(*ANSWERS), draw.randint(*ANSWERS)) for _ in range(options.pairs)]
    return [tuple([draw.randrange(VOCAB) for _ in range(n)] for n in own) for own in lengths]  # type: ignore[misc]


def lockstep_step(options: argparse.Namespace) -> Callable[[], object]:
    from lockstep import load_model
    from lockstep.config import DPOConfig, TrainConfig
    from lockstep.data import StepRows
    from lockstep.data.preferences import AnswerTokens, Example, PreferenceRow
    from lockstep.train import Trainer
    from lockstep.train.dpo import PreferenceObjective

    examples = []
    for prompt, *answers in pairs(options):
        whole = [AnswerTokens(prompt + own, list(range(len(prompt), len(prompt + own)))) for own in answers]
        examples.append(Example((whole[0], whole[1]), False, (-1000.0, -1000.0)))
    import numpy as np

    row = PreferenceRow(np.zeros(1), [1], np.zeros(1, dtype=bool), 0, examples=examples)
    batch = StepRows([[row]], 1, len(examples), 1)
    trainer = Trainer(load_model(options.folder), TrainConfig(learning_rate=1e-6), 100)
    objective = PreferenceObjective(DPOConfig())
    return lambda: objective.step(trainer, batch)


def trl_step(options: argparse.Namespace) -> Callable[[], object]:
    import torch
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="0")
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=getattr(torch, options.dtype))
    arguments = trl.DPOConfig(
        output_dir=options.folder + "/trl", use_cpu=True, bf16=False, report_to="none", precompute_ref_log_probs=True,
        gradient_checkpointing=False, max_length=None,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": "1", "chosen": "2", "rejected": "3"}] * 2)
    trainer = trl.DPOTrainer(model, args=arguments, train_dataset=rows, processing_class=tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    columns = ("prompt_ids", "chosen_ids", "rejected_ids")
    known = {"ref_chosen_logps": -1000.0, "ref_rejected_logps": -1000.0}
    batch = trainer.data_collator([dict(zip(columns, pair)) | known for pair in pairs(options)])
    model.train()

    def step() -> None:
        trainer.compute_loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def best_seconds(step: Callable[[], object]) -> float:
    step()
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return min(times)


SIDES = {"lockstep": lockstep_step, "trl": trl_step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--pairs", type=int, default=4, help="in a step")
    parser.add_argument("--prompt", type=int, default=192, help="tokens of a prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="times that the sides are measured in turn")
    parser.add_argument("--side", choices=SIDES, default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(options.threads)
    if options.side:
        print(json.dumps({"seconds": best_seconds(SIDES[options.side](options))}))
        return
    from lockstep import build_model, save_model
    from lockstep.model import preset

    best: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_model(build_model(preset("qwen3:small", VOCAB), dtype=options.dtype), Path(folder))
        for _ in range(options.rounds):
            for side in SIDES:
                command = [sys.executable, __file__, "--side", side, "--folder", folder, "--dtype", options.dtype]
                command += ["--pairs", str(options.pairs), "--prompt", str(options.prompt)]
                command += ["--threads", str(options.threads)]
                printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                seconds = json.loads(next(line for line in printed.splitlines() if line.startswith('{"seconds')))
                best[side] = min(seconds["seconds"], best.get(side, float("inf")))
    tokens = sum(2 * len(prompt) + len(chosen) + len(rejected) for prompt, chosen, rejected in pairs(options))
    print(f"DPO step: 110M Qwen3, {options.dtype}, {options.pairs} pairs, {tokens} tokens, {options.threads} threads")
    for side, seconds in best.items():
        print(f"  {side:10} {seconds:7.2f} s   {tokens / seconds:7.0f} tokens/s")
    print(f"  ratio      {best['trl'] / best['lockstep']:7.2f}")


if __name__ == "__main__":
    main()
