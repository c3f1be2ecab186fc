"""Sample with the engine, score with the trainer's forward pass, and compare every log-probability bit by bit.

python examples/parity.py [--model DIR]
"""

import argparse

import torch

import lockstep
from lockstep.model import preset

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="", help="a folder or a model of the hub; empty: fresh weights")
arguments = parser.parse_args()

model = lockstep.load_model(arguments.model) if arguments.model else lockstep.build_model(preset("qwen3:micro"), seed=0)
engine = lockstep.Engine(model, lockstep.EngineConfig())
prompts = [[1 + i, 2 + i, 3 + i] * (i + 1) for i in range(12)]
params = lockstep.SamplingParams(max_tokens=48, temperature=0.85, seed=0)

compared = different = 0
for prompt, (completion,) in zip(prompts, engine.generate(prompts, params)):
    scores = lockstep.score(model, [prompt + completion.token_ids], temperature=0.85)[0][len(prompt) - 1 :]
    compared += len(scores)
    different += int((scores != torch.tensor(completion.logprobs)).sum())
print(f"{compared} log-probabilities compared, {different} different")
