"""Fine-tune a model on conversations, with the loss on what the assistant says.

    python examples/sft.py --model Qwen/Qwen3-0.6B --data conversations.jsonl [--epochs 2]

A line of the data is {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}.
"""

import argparse
from pathlib import Path

import lockstep
from lockstep.config import SFTConfig, TrainConfig

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--output", default="run-example-sft")
parser.add_argument("--epochs", type=float, default=1.0)
parser.add_argument("--tokens-per-step", type=int, default=8192, help="a multiple of 1024, the sequence length")
arguments = parser.parse_args()

run = lockstep.finetune(
    SFTConfig(
        model=arguments.model,
        data=arguments.data,
        output=arguments.output,
        epochs=arguments.epochs,
        tokens_per_step=arguments.tokens_per_step,
        train=TrainConfig(learning_rate=2e-5, warmup_steps=5),
        overwrite=Path(arguments.output).is_dir(),
    ),
    on_metrics=lambda step, metrics: print(f"step {step}: loss {metrics['loss']:.3f}, epoch {metrics['epoch']:.2f}"),
)
print(f"talk to it: lockstep generate --model {run} --chat --prompt 'Hello'")
