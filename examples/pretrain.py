"""Pretrain a small Qwen3 on text of your own and continue a sentence with it.

python examples/pretrain.py [--steps 100]
"""

import argparse
from pathlib import Path

import lockstep
from lockstep.checkpoint import model_folder
from lockstep.config import CheckpointConfig, PretrainConfig, TrainConfig
from lockstep.data import load_tokenizer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", default="", help="a text file, a folder or a glob; empty: Python's standard library")
parser.add_argument("--output", default="run-example-pretrain")
parser.add_argument("--steps", type=int, default=100)
arguments = parser.parse_args()


def show(step: int, metrics: dict[str, float]) -> None:
    if step % 10 == 0:
        print(f"step {step}: loss {metrics['loss']:.3f}, {metrics['tokens_per_second']:.0f} tokens/s")


run = lockstep.pretrain(
    PretrainConfig(
        model="qwen3:micro",
        data=arguments.data,
        output=arguments.output,
        steps=arguments.steps,
        tokens_per_step=2048,
        sequence_length=256,
        train=TrainConfig(learning_rate=3e-3, warmup_steps=10),
        checkpoint=CheckpointConfig(every=50),
        overwrite=Path(arguments.output).is_dir(),
    ),
    on_metrics=show,
)

checkpoint = model_folder(run)  # the newest
model = lockstep.load_model(checkpoint)
tokenizer = load_tokenizer(checkpoint)
engine = lockstep.Engine(model, lockstep.EngineConfig(), tokenizer)
prompt = "def main():\n"
completion = engine.generate([tokenizer.encode(prompt)], lockstep.SamplingParams(max_tokens=100, temperature=0.7))[0][0]
print(prompt + tokenizer.decode(completion.token_ids))
