"""What holds for every family of mixtures: the logits and folders of transformers, and one set of bits."""

import json

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lockstep import Engine, EngineConfig, SamplingParams, load_model, ops, save_model, score
from tests.model.test_against_transformers import TOLERANCE


@torch.no_grad()
def check_folder(model, folder, length, tied):
    """Reads transformers' `model` from `folder` / "theirs", compares logits, and writes it back; returns ours and what
    transformers reads of that."""
    ours = load_model(folder / "theirs")
    tokens = torch.randint(101, (length,), generator=torch.Generator().manual_seed(1))
    hidden = ours(tokens, torch.arange(length), ops.PackedAttention([length]))
    torch.testing.assert_close(ours.logits(hidden), model(tokens[None]).logits[0], rtol=TOLERANCE, atol=TOLERANCE)

    save_model(ours, folder / "ours")
    before, after = (load_file(folder / name / "model.safetensors") for name in ("theirs", "ours"))
    before.pop("lm_head.weight", None) if tied else None
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = AutoModelForCausalLM.from_pretrained(folder / "ours")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))
    return ours, again


def check_engine(model, longest, max_tokens):
    """Prompts that share a start, in chunks and out of the cache: each token has the bits of the trainer's forward."""
    generator = torch.Generator().manual_seed(2)
    shared = torch.randint(101, (longest,), generator=generator).tolist()
    prompts = [shared[:3], shared, [*shared, 5, 6], shared[7 : longest // 2 - 1]]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.9, n=2, seed=3, ignore_eos=True)
    engine = Engine(model, EngineConfig(cache_tokens=1024, max_tokens_per_step=24))
    groups = engine.generate(prompts, params)
    sequences = [p + list(c.token_ids) for p, group in zip(prompts, groups) for c in group]
    scores = iter(score(model, sequences, temperature=0.9))
    for prompt, group in zip(prompts, groups):
        for completion in group:
            assert torch.equal(next(scores)[len(prompt) - 1 :], torch.tensor(completion.logprobs))


def change(folder, **values):
    """Of its config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
