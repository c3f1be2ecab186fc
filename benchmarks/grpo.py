"""A GRPO step against TRL: the same Qwen3 in float32, by default 5M parameters and 32 completions of 64 tokens.

Run: python benchmarks/grpo.py [--size 0.6b --prompts 1 --steps 3 --rounds 1]
     python benchmarks/grpo.py --growth      how our step's time grows, into docs/grpo_growth.png
     python benchmarks/grpo.py --precision int8      against our own step in float32, in turns

Completions come in groups of 8. With OMP_NUM_THREADS=1 times are those of the processor, not of the clock: what is left
to compare by where other work runs on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.model import ModelConfig

PROMPTS, GROUP, NEW, STEPS = 4, 8, 64, 8
COMPLETIONS = (8, 16, 32, 64, 128, 256)
LENGTHS = (64, 128, 256, 512, 1024)
PLOT = Path(__file__).parents[1] / "docs" / "grpo_growth.png"
clock = time.process_time if os.environ.get("OMP_NUM_THREADS") == "1" else time.perf_counter
WORDS = ("stone", "river", "cloud", "apple", "glass", "paper", "light", "music")
TASK = f"""
import lockstep.rl as rl

class Letters(rl.Environment):
    def examples(self, split):
        for word in {WORDS!r}:
            yield rl.Example(prompt=f"Write about {{word}}:")
    def reward(self, example, completion):
        return completion.count("e") / max(1, len(completion))
"""


def write_model(folder: str, size: str, vocab: int, dtype: str, ends: bool = True) -> ModelConfig:
    """Fresh weights of a Qwen3 of this size, and a tokenizer of 2,048 tokens. Unless it `ends`, nothing stops it."""
    from lockstep import build_model, save_model
    from lockstep.data import TextSource, train_bpe
    from lockstep.model import preset

    tokenizer = train_bpe(TextSource().__iter__(), 2048)
    tokenizer.save(folder)
    config = preset(f"qwen3:{size}", vocab, (tokenizer.eos_id or 0,) if ends else ())
    save_model(build_model(config, dtype=dtype), folder)
    return config


def steps_of_run(
    folder: str, prompts: int = PROMPTS, group: int = GROUP, new: int = NEW, **options: Any
) -> list[dict[str, float]]:
    """The metrics of each step of a GRPO run from the folder's model, `seconds` by our clock among them.

    options: RLConfig's.
    """
    from lockstep.config import RLConfig, TrainConfig
    from lockstep.rl.reinforce import reinforce

    times = [0.0]
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "task.py").write_text(TASK)
        config = RLConfig(
            output=f"{scratch}/run",
            model=folder,
            environment=f"{scratch}/task.py:Letters",
            prompts_per_step=prompts,
            samples_per_prompt=group,
            max_new_tokens=new,
            validation_examples=1,
            validation_every=0,
            train=TrainConfig(learning_rate=1e-5),
            **options,
        )
        run = reinforce(config, on_metrics=lambda step, metrics: times.append(clock()))
        lines = (run / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    for step, began, ended in zip(steps, times, times[1:]):
        step["seconds"] = ended - began
    # The first line is the validation before the first step.
    return steps[1:]


def lockstep_seconds(folder: str, prompts: int = PROMPTS, new: int = NEW, steps: int = STEPS) -> float:
    # The last step's seconds include a validation.
    measured = steps_of_run(folder, prompts, new=new, steps=steps + 1, dtype="float32")[:-1]
    assert all(step["rollout/tokens_mean"] > 0.9 * new for step in measured)
    assert not any(step["parity/tokens_different"] for step in measured)
    return statistics.median(step["seconds"] for step in measured[1:] or measured)


def print_precisions(folder: str, linear: str, rounds: int) -> None:
    """Our own steps with all layers and the head in a precision, against those in float32, in turns."""
    from lockstep.config import PrecisionConfig

    for turn in range(2 * rounds):
        form = linear if turn % 2 else "none"
        precision = PrecisionConfig(form, keep=())
        steps = steps_of_run(folder, steps=STEPS + 2, dtype="float32", precision=precision)[1:-1]
        medians = [statistics.median(step[key] for step in steps) for key in ("seconds", "time/generate", "time/train")]
        print(f"{form:8} a step {medians[0]:.3f} s, sampling {medians[1]:.3f}, training {medians[2]:.3f}", flush=True)


def trl_seconds(folder: str, prompts: int = PROMPTS, new: int = NEW, steps: int = STEPS) -> float:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *arguments, **keywords):
            self.began = clock()

        def on_step_end(self, *arguments, **keywords):
            times.append(clock() - self.began)

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json", eos_token="<|endoftext|>")
    tokenizer.pad_token = tokenizer.eos_token
    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=False,
            report_to=[],
            per_device_train_batch_size=prompts * GROUP,
            num_generations=GROUP,
            max_completion_length=new,
            max_steps=steps,
            learning_rate=1e-5,
            save_strategy="no",
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
            gradient_checkpointing=False,
        )
        trainer = GRPOTrainer(
            model=folder,
            reward_funcs=lambda completions, **_: [c.count("e") / max(1, len(c)) for c in completions],
            args=config,
            train_dataset=Dataset.from_list([{"prompt": f"Write about {w}:"} for w in WORDS * 8]),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    return statistics.median(times[1:])


def growth(folder: str) -> None:
    """Steps of more and of longer completions, as a plot and as lines of text."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, sides = pyplot.subplots(1, 2, figsize=(8, 3.2), sharey=True)
    for axes, counts, label in (
        (sides[0], LENGTHS, f"tokens of each of {GROUP} completions"),
        (sides[1], COMPLETIONS, f"completions of {NEW} tokens"),
    ):
        seconds = []
        for count in counts:
            shape = {"prompts": count // GROUP} if counts is COMPLETIONS else {"prompts": 1, "new": count}
            seconds.append(lockstep_seconds(folder, **shape, steps=1))
            print(f"{label}: {count:5} {seconds[-1]:8.2f} s", flush=True)
        axes.loglog(counts, seconds, "o-", label="a step")
        axes.loglog(counts, [seconds[0] * n / counts[0] for n in counts], ":", color="grey", label="in proportion")
        axes.set_xticks(counts, [str(n) for n in counts])
        axes.minorticks_off()
        axes.set_xlabel(label)
        axes.legend(frameon=False)
    sides[0].set_ylabel("seconds of a step" + (", one core" if clock is time.process_time else ""))
    figure.tight_layout()
    figure.savefig(PLOT, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--side")
    parser.add_argument("--folder")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--precision", help="a number format of the linear layers")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.side:
        seconds = lockstep_seconds if options.side == "lockstep" else trl_seconds
        took = seconds(options.folder, prompts=options.prompts, steps=options.steps)
        print(json.dumps({"seconds": took}))
        return
    from peers import compare

    with tempfile.TemporaryDirectory() as folder:
        vocab = 2048 if options.size == "tiny" else 151936
        write_model(folder, options.size, vocab, "float32", ends=not options.growth)
        if options.growth:
            return growth(folder)
        if options.precision:
            return print_precisions(folder, options.precision, options.rounds)
        completions = options.prompts * GROUP
        work = f"GRPO step: Qwen3 {options.size}, float32, {completions} completions x {NEW} tokens"
        arguments = ["--folder", folder, "--prompts", str(options.prompts), "--steps", str(options.steps)]
        compare(__file__, arguments, work, completions * NEW, "tokens/s", "TRL", options.rounds)


if __name__ == "__main__":
    main()
