"""Sampling with log-probabilities against vLLM and transformers: the same weights, prompts, lengths and dtype.

Run: python benchmarks/generation.py [--work batch|qwen2|hybrid|small|one|shared|start] [--dtype float32]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Work:
    """What is sampled, and by whom."""

    preset: str
    vocab: int
    prompts: int
    length: int
    new: int
    samples: int = 1
    peers: tuple[str, ...] = ("vLLM",)
    rounds: int = 2
    share: bool = False

    def tokens(self) -> list[list[int]]:
        draw = random.Random(0)
        return [[draw.randrange(self.vocab) for _ in range(self.length)] for _ in range(self.prompts)]

    def __str__(self) -> str:
        samples = f", {self.samples} samples" if self.samples > 1 else ""
        return f"{self.preset}, {self.prompts} x {self.length} tokens{samples}, {self.new} new"


WORKS = {
    "batch": Work("qwen3:0.6b", 151936, prompts=32, length=128, new=64),
    "qwen2": Work("qwen2:0.5b", 151936, prompts=32, length=128, new=64),
    "hybrid": Work("qwen3_5:0.8b", 248320, prompts=16, length=512, new=64, peers=("transformers",), rounds=1),
    "small": Work("qwen3:tiny", 2048, prompts=64, length=64, new=128, peers=("vLLM", "transformers"), rounds=3),
    "one": Work("qwen3:0.6b", 151936, prompts=1, length=32, new=256),
    "shared": Work(
        "qwen3:0.6b", 151936, prompts=1, length=512, new=64, samples=64, peers=("unshared",), rounds=1, share=True
    ),
}
REPEATS = 2


def lockstep_side(folder: str, work: Work, share: bool) -> dict[str, float]:
    began = time.perf_counter()
    from lockstep import Engine, EngineConfig, SamplingParams
    from lockstep.checkpoint import open_model

    cache_tokens = work.prompts * work.samples * (work.length + work.new + 16) + 64
    model = open_model(Path(folder))  # as `lockstep generate` does
    # From here on: pages of the weights' file, mapped while it was read, are the system's to take back.
    Path("/proc/self/clear_refs").write_text("5")
    engine = Engine(model, EngineConfig(prefix_cache=share, cache_tokens=cache_tokens))
    params = SamplingParams(max_tokens=work.new, ignore_eos=True, seed=0, n=work.samples)
    engine.generate([work.tokens()[0][:16]], SamplingParams(max_tokens=1))
    start = time.perf_counter() - began
    engine.generate(work.tokens()[:2], SamplingParams(max_tokens=4, ignore_eos=True))
    times = []
    for repeat in range(REPEATS):
        engine.weights_changed(repeat)  # forgets cached prompts
        began = time.perf_counter()
        groups = engine.generate(work.tokens(), params)
        times.append(time.perf_counter() - began)
    assert all(len(c.token_ids) == len(c.logprobs) == work.new for group in groups for c in group)
    asked = engine.cache.nbytes + sum(p.nbytes for p in model.parameters())
    return {"seconds": min(times), "start": start, "memory": peak_memory() - asked}


def peak_memory() -> int:
    """Bytes that this process has held at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def vllm_side(folder: str, work: Work) -> dict[str, float]:
    began = time.perf_counter()
    from vllm import LLM, SamplingParams

    model = LLM(
        model=folder, skip_tokenizer_init=True, dtype="auto", max_model_len=2048, enable_prefix_caching=work.share,
        max_num_seqs=max(64, work.prompts * work.samples), disable_log_stats=True,
    )  # fmt: skip

    def seconds(prompts: list[list[int]], new: int, samples: int) -> float:
        params = SamplingParams(max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False, n=samples)
        began = time.perf_counter()
        results = model.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        took = time.perf_counter() - began
        assert all(len(o.token_ids) == len(o.logprobs) == new for r in results for o in r.outputs)
        return took

    seconds([work.tokens()[0][:16]], 1, 1)
    start = time.perf_counter() - began
    seconds(work.tokens()[:2], 4, 1)
    return {"seconds": min(seconds(work.tokens(), work.new, work.samples) for _ in range(REPEATS)), "start": start}


def transformers_side(folder: str, work: Work) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    options = dict(
        max_new_tokens=work.new, min_new_tokens=work.new, do_sample=True, top_k=0, output_logits=True,
        return_dict_in_generate=True, pad_token_id=0,
    )  # fmt: skip
    tokens = torch.tensor(work.tokens())
    model.generate(tokens[:8], attention_mask=torch.ones_like(tokens[:8]), **options)
    began = time.perf_counter()
    result = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    logits = torch.stack(result.logits, 1).float().log_softmax(-1)
    logits.gather(-1, result.sequences[:, work.length :, None])
    seconds = time.perf_counter() - began
    assert result.sequences.shape == (work.prompts, work.length + work.new)
    return {"seconds": seconds}


def run_side(side: str, folder: str, work: Work) -> dict[str, float]:
    if side == "vLLM":
        return vllm_side(folder, work)
    if side == "transformers":
        return transformers_side(folder, work)
    return lockstep_side(folder, work, share=work.share and side == "lockstep")


def report(name: str, folder: str, dtype: str) -> None:
    import torch
    from ceilings import measure
    from peers import best_of

    from lockstep.model import preset

    work = WORKS[name]
    ceilings = measure(getattr(torch, dtype))
    best = best_of(__file__, ["--folder", folder, "--work", name], ["lockstep", *work.peers], work.rounds)
    ours = best["lockstep"]["seconds"]
    config = preset(work.preset, work.vocab)
    least = ceilings.seconds(config, work.prompts, work.length, work.new, work.samples, work.share)
    print(
        f"\n{name}: {work}, {dtype} ({len(os.sched_getaffinity(0))} cores, best of {work.rounds} processes x {REPEATS})"
    )
    for side, result in best.items():
        rate = work.prompts * work.samples * work.new / result["seconds"]
        start = f"  first token after {result['start']:.1f} s" if "start" in result else ""
        print(
            f"  {side:13} {result['seconds']:7.2f} s {rate:8.0f} tokens/s  ratio {result['seconds'] / ours:.2f}{start}"
        )
    print(
        f"  ceilings      {least:7.2f} s: {ceilings.products / 1e9:.0f} GF/s, {ceilings.streaming / 1e9:.1f} GB/s;",
        end="",
    )
    print(f" ours takes {ours / least:.2f} times as long")
    if work.samples == 1:  # shared pages leave most of the cache untouched
        print(f"  memory beyond weights and cache: {best['lockstep']['memory'] / 1e6:.0f} MB", flush=True)


def report_start(folder: str) -> None:
    """Time to the first token with nothing compiled yet, then with everything compiled."""
    from peers import best_of

    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for state in ("not compiled yet", "compiled"):
            result = best_of(__file__, ["--folder", folder, "--work", "one"], ["lockstep"], 1)
            print(f"start: first token, {state}: {result['lockstep']['start']:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", choices=[*WORKS, "start"])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--side")
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.side:
        print(json.dumps(run_side(options.side, options.folder, WORKS[options.work])))
        return
    from lockstep import build_model, save_model
    from lockstep.model import preset

    chosen = [options.work] if options.work else [*WORKS, "start"]
    for name in chosen:
        work = WORKS.get(name, WORKS["one"])
        with tempfile.TemporaryDirectory() as folder:
            save_model(build_model(preset(work.preset, work.vocab), dtype=options.dtype), folder)
            if name == "start":
                report_start(folder)
            else:
                report(name, folder, options.dtype)


if __name__ == "__main__":
    main()
