"""A GRPO step against TRL: the same 5M-parameter Qwen3 in float32, 32 completions of 64 tokens in groups of 8.

Run: python benchmarks/grpo.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.model import ModelConfig

PROMPTS, GROUP, NEW, STEPS = 4, 8, 64, 8
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


def write_model(folder: str, size: str, vocab: int, dtype: str) -> ModelConfig:
    """Fresh weights of a Qwen3 of this size, and a tokenizer of 2,048 tokens."""
    from lockstep import build_model, save_model
    from lockstep.data import TextSource, train_bpe
    from lockstep.model import preset

    tokenizer = train_bpe(TextSource().__iter__(), 2048)
    tokenizer.save(folder)
    config = preset(f"qwen3:{size}", vocab, (tokenizer.eos_id or 0,))
    save_model(build_model(config, dtype=dtype), folder)
    return config


def steps_of_run(folder: str, **options: Any) -> list[dict[str, float]]:
    """The metrics of each step of a GRPO run from the folder's model; `options` are RLConfig's."""
    from lockstep.config import RLConfig, TrainConfig
    from lockstep.rl.controller import reinforce

    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "task.py").write_text(TASK)
        config = RLConfig(
            output=f"{scratch}/run",
            model=folder,
            environment=f"{scratch}/task.py:Letters",
            prompts_per_step=PROMPTS,
            samples_per_prompt=GROUP,
            max_new_tokens=NEW,
            validation_examples=1,
            train=TrainConfig(learning_rate=1e-5),
            **options,
        )
        lines = (reinforce(config) / "metrics.jsonl").read_text().splitlines()
    # The first line is the validation before the first step.
    return [json.loads(line) for line in lines[1:]]


def lockstep_seconds(folder: str) -> float:
    steps = steps_of_run(folder, steps=STEPS, dtype="float32")
    assert all(step["rollout/tokens_mean"] > 0.9 * NEW for step in steps)
    return statistics.median(step["time/step"] for step in steps[1:])


def trl_seconds(folder: str) -> float:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *arguments, **keywords):
            self.began = time.perf_counter()

        def on_step_end(self, *arguments, **keywords):
            times.append(time.perf_counter() - self.began)

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json", eos_token="<|endoftext|>")
    tokenizer.pad_token = tokenizer.eos_token
    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=False,
            report_to=[],
            per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            max_completion_length=NEW,
            max_steps=STEPS,
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--side")
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.side:
        seconds = lockstep_seconds if options.side == "lockstep" else trl_seconds
        print(json.dumps({"seconds": seconds(options.folder)}))
        return
    from peers import compare

    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, "tiny", 2048, "float32")
        work = f"GRPO step: 5M Qwen3, float32, {PROMPTS * GROUP} completions x {NEW} tokens"
        compare(__file__, ["--folder", folder], work, PROMPTS * GROUP * NEW, "tokens/s", "TRL")


if __name__ == "__main__":
    main()
