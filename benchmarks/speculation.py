"""Speculative decoding against plain decoding and against vLLM's own n-gram speculation; the same tokens with both.

Run: python benchmarks/speculation.py one --model DIR [--data DATA]      one prompt, 256 new tokens
     python benchmarks/speculation.py rollouts --model DIR --data DATA   GRPO over five epochs, with and without
     python benchmarks/speculation.py texts --model DIR --data DATA      prose, code and JSON, by each source of drafts,
                                                                         on a 0.6B shape that is trained on them first
     python benchmarks/speculation.py acceptance [--picture FILE]        speed by acceptance and batch size

DIR is what `lockstep pretrain --recipe gsm8k_tiny` made, for `texts` a new folder; DATA the folder of GSM8K.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import unicodedata
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

NEW = 256
PROMPTS = 6
EPOCHS = 5
HELD_OUT = 3
"""Documents of each kind that `texts` does not train on."""
PROMPT = 128
"""Tokens of each of them that are continued."""
STEP_TOKENS = 1024
WARMING, TURNS = 3, 5
"""Runs of `acceptance` before it measures, since an engine learns what is accepted, and those measured, in turns."""
DRAFT_MODEL = "draft"
"""The folder of a smaller model in the folder of the model."""
PROMPTS_FILE = "benchmark_prompts.json"
"""The peer's environment lacks our tokenizers: it reads the tokens from this file beside the weights."""


def prompts_of(folder: str, data: str) -> list[list[int]]:
    """Questions of the test set, as the model knows them."""
    from lockstep.data import load_tokenizer

    tokenizer = load_tokenizer(folder, json.loads(Path(folder, "config.json").read_text())["vocab_size"])
    lines = islice(Path(data, "test.jsonl").read_text().splitlines(), PROMPTS)
    return [tokenizer.encode(f"Question: {json.loads(line)['question']}\nAnswer:") for line in lines]


def texts_of(data: str) -> dict[str, list[str]]:
    """Documents by kind: problems of GSM8K, the standard library's modules, and Unicode's characters as JSON."""
    problems = (json.loads(line) for line in Path(data, "train.jsonl").read_text().splitlines())
    modules = sorted(p for p in Path(json.__file__).parent.parent.glob("*.py") if 8_000 < p.stat().st_size < 60_000)
    characters = [
        {
            "character": chr(code),
            "code": f"U+{code:04X}",
            "name": unicodedata.name(chr(code)),
            "category": unicodedata.category(chr(code)),
            "bidirectional": unicodedata.bidirectional(chr(code)),
            "decomposition": unicodedata.decomposition(chr(code)),
            "mirrored": bool(unicodedata.mirrored(chr(code))),
        }
        for code in range(0x20, 0x2000)
        if unicodedata.name(chr(code), "")
    ]
    return {
        "prose": [f"Question: {each['question']}\nAnswer: {each['answer']}" for each in problems],
        "code": [module.read_text() for module in modules],
        "JSON": [
            json.dumps(characters[first : first + 40], indent=2, ensure_ascii=False)
            for first in range(0, len(characters), 40)
        ],
    }


def train_on_texts(folder: str, data: str, steps: int) -> None:
    """A 0.6B shape, and in `DRAFT_MODEL` a 5M one of the same tokenizer: fresh weights, then so many steps."""
    documents = {kind: found[:-HELD_OUT] for kind, found in texts_of(data).items()}
    draw, lines = random.Random(0), []
    for found in documents.values():
        draw.shuffle(found)
        room = steps * STEP_TOKENS  # characters: a third of what the tokens of all steps hold
        while room > 0 and found:
            lines.append(json.dumps({"text": found.pop()[:12_000]}))
            room -= len(lines[-1])
    draw.shuffle(lines)
    with tempfile.TemporaryDirectory() as place:
        Path(place, "texts.jsonl").write_text("\n".join(lines))
        for model, tokenizer, out, rate, more in (
            ("qwen3:0.6b", "bpe:4096", folder, "1.5e-4", 1),
            ("qwen3:tiny", folder, str(Path(folder, DRAFT_MODEL)), "1e-3", 10),
        ):
            command = [
                *(sys.executable, "-m", "lockstep", "pretrain", "--model", model, "--tokenizer", tokenizer),
                *("--data", f"{place}/texts.jsonl", "--output", f"{place}/run", "--overwrite", "--dtype", "bfloat16"),
                *("--steps", str(more * steps), "--tokens-per-step", str(STEP_TOKENS), "--sequence-length", "512"),
                *("--train.learning-rate", rate, "--train.warmup-steps", "10", "--checkpoint.every", "0"),
            ]
            subprocess.run(command, check=True)
            subprocess.run([sys.executable, "-m", "lockstep", "convert", f"{place}/run", out], check=True)


def held_out_prompts(folder: str, data: str) -> dict[str, list[list[int]]]:
    """The beginnings of documents that the model has not seen."""
    from lockstep.data import load_tokenizer

    tokenizer = load_tokenizer(folder, json.loads(Path(folder, "config.json").read_text())["vocab_size"])
    return {
        kind: [tokenizer.encode(text)[:PROMPT] for text in found[-HELD_OUT:]] for kind, found in texts_of(data).items()
    }


def lockstep_side(folder: str, prompts: list[list[int]], draft: str, temperature: float) -> dict[str, Any]:
    from lockstep import Engine, EngineConfig, SamplingParams, load_model

    model = load_model(folder)
    small = str(Path(folder, DRAFT_MODEL)) if draft == "model" else ""
    config = EngineConfig(max_sequences=16, cache_tokens=8192, draft=draft, draft_model=small)
    engine = Engine(model, config)
    params = SamplingParams(max_tokens=NEW, temperature=temperature, seed=0, ignore_eos=True)
    engine.generate([prompts[0][:16]], params)
    before, times, tokens = dict(vars(engine.statistics)), [], []
    for round_number in range(2):
        engine.weights_changed(round_number)
        began = time.perf_counter()
        tokens = [engine.generate([prompt], params)[0][0] for prompt in prompts]
        times.append(time.perf_counter() - began)
    done = {name: value - before[name] for name, value in vars(engine.statistics).items()}
    return {
        "seconds": min(times),
        "tokens": [c.token_ids for c in tokens],
        "logprobs": [c.logprobs for c in tokens],
        "accepted": done["guesses_accepted"] / max(1, done["tokens_guessed"]),
        "run": done["tokens_sampled"] / max(1, done["steps"]),
    }


def vllm_side(folder: str, prompts: list[list[int]], speculate: bool, temperature: float) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    drafts = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    model = LLM(
        model=folder, skip_tokenizer_init=True, dtype="auto", max_model_len=2048, enable_prefix_caching=False,
        max_num_seqs=16, disable_log_stats=True, **({"speculative_config": drafts} if speculate else {}),
    )  # fmt: skip
    params = SamplingParams(max_tokens=NEW, temperature=temperature, seed=0, ignore_eos=True, detokenize=False)
    times = []
    model.generate([{"prompt_token_ids": prompts[0][:16]}], params, use_tqdm=False)
    for _ in range(2):
        began = time.perf_counter()
        for prompt in prompts:
            model.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        times.append(time.perf_counter() - began)
    return {"seconds": min(times)}


def report_one(folder: str, data: str, rounds: int) -> None:
    from peers import best_of

    for temperature in (0.0, 1.0):
        arguments = ["one", "--model", folder, "--data", data, "--temperature", str(temperature)]
        sides = ["plain", "auto", "vLLM", "vLLM n-gram"]
        best = best_of(__file__, arguments, sides, rounds)
        assert best["plain"]["tokens"] == best["auto"]["tokens"], "other tokens with drafts"
        assert best["plain"]["logprobs"] == best["auto"]["logprobs"], "other bits with drafts"
        ours = best["auto"]["seconds"]
        print(f"\n{PROMPTS} prompts one after the other, {NEW} new tokens each, temperature {temperature}")
        for side in sides:
            seconds = best[side]["seconds"]
            print(f"  {side:12} {seconds:7.2f} s  {PROMPTS * NEW / seconds:7.0f} tokens/s  ratio {seconds / ours:.2f}")
        print(f"  accepted {best['auto']['accepted']:.2f} of the drafts, {best['auto']['run']:.2f} tokens a step")


def report_texts(folder: str, data: str, rounds: int, steps: int) -> None:
    from peers import best_of

    if not Path(folder).exists():
        train_on_texts(folder, data, steps)
    sides = ["plain", "auto", "model", "vLLM", "vLLM n-gram"]
    for kind, prompts in held_out_prompts(folder, data).items():
        Path(folder, PROMPTS_FILE).write_text(json.dumps(prompts))
        best = best_of(__file__, ["texts", "--model", folder], sides, rounds)
        _print_sides(f"{kind}: {HELD_OUT} prompts of {PROMPT} tokens", best, len(prompts))


def _print_sides(title: str, best: dict[str, Any], count: int) -> None:
    """Every side's time against that of `auto`; those of ours must have given the same tokens and bits."""
    print(f"\n{title} one after the other, {NEW} new tokens each, temperature 0", flush=True)
    for side, found in best.items():
        line = f"  {side:12} {found['seconds']:7.2f} s  {count * NEW / found['seconds']:7.1f} tokens/s"
        line += f"  ratio {found['seconds'] / best['auto']['seconds']:.2f}"
        if "tokens" in found:
            assert found["tokens"] == best["plain"]["tokens"], "other tokens with drafts"
            assert found["logprobs"] == best["plain"]["logprobs"], "other bits with drafts"
            line += f"  accepted {found['accepted']:.2f}, {found['run']:.2f} tokens a step"
        print(line, flush=True)


def report_rollouts(folder: str, data: str, steps: int) -> None:
    """As many prompts as the steps see five times, sampled with and without drafts: the same run, and its times."""
    rows = {}
    with tempfile.TemporaryDirectory() as place:
        lines = Path(data, "train.jsonl").read_text().splitlines()[: steps * 8 // EPOCHS]
        Path(place, "train.jsonl").write_text("\n".join(lines))
        Path(place, "test.jsonl").write_text("\n".join(Path(data, "test.jsonl").read_text().splitlines()[:32]))
        for draft in ("none", "auto"):
            command = [
                *(sys.executable, "-m", "lockstep", "rl", "--recipe", "gsm8k_tiny", "--model", folder),
                *("--data", place, "--output", f"{place}/{draft}", "--steps", str(steps), "--engine.draft", draft),
                *("--validation-every", "0", "--checkpoint.every", "0"),
            ]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            lines = Path(place, draft, "metrics.jsonl").read_text().splitlines()
            rows[draft] = [row for row in map(json.loads, lines) if "loss" in row]
        bounds = tokens_a_step(Path(place, "none", "rollouts"), steps)
    first = steps // EPOCHS
    for name in ("loss", "reward/mean", "rollout/tokens", "parity/tokens_different"):
        assert [row[name] for row in rows["none"]] == [row[name] for row in rows["auto"]], name
    print(f"\nGRPO, 8 x 8, {steps} steps over {EPOCHS} epochs; the same rewards and losses bit for bit")
    for epoch in range(EPOCHS):
        part = slice(epoch * first, (epoch + 1) * first)
        figures = []
        for name in ("time/generate", "time/step"):
            plain, drafted = (statistics.median(r[name] for r in rows[draft][part]) for draft in ("none", "auto"))
            figures.append(f"{name} {plain:.3f} -> {drafted:.3f} s: {plain / drafted:.2f}x")
        print(f"  epoch {epoch + 1}: {'; '.join(figures)}; at most {bounds[epoch]:.2f} tokens a step")


def tokens_a_step(folder: Path, steps: int) -> list[float]:
    """By epoch, how many tokens a step brings at most with drafts from history: rows free, drafts as long as can be.

    folder: the rollouts of a run of so many steps.
    """
    from lockstep import SamplingParams
    from lockstep.generate.drafts import HistoryDraft
    from lockstep.generate.sequence import Sequence

    history, params, bounds = HistoryDraft(), SamplingParams(), []
    for epoch in range(EPOCHS):
        tokens = taken = 0
        for step in range(epoch * (steps // EPOCHS) + 1, (epoch + 1) * (steps // EPOCHS) + 1):
            rows = [json.loads(line) for line in (folder / f"step_{step:08}.jsonl").read_text().splitlines()]
            for row in rows:
                prompt, completion = row["prompt_ids"], row["token_ids"]
                sequence = Sequence(0, 0, params, 0, list(prompt), len(prompt), frozenset())
                while sequence.sampled < len(completion):
                    rest = completion[sequence.sampled :]
                    right = takewhile(lambda pair: pair[0] == pair[1], zip(history.propose([sequence], [15])[0], rest))
                    sequence.tokens += rest[: 1 + len(list(right))]
                    taken += 1
                tokens += len(completion)
            for row in rows:
                history.remember(row["prompt_ids"], row["token_ids"])
        bounds.append(tokens / taken)
    return bounds


class Spoilt:
    """Knows what will be drawn, and is wrong about each token with the same chance."""

    cost = 0.0

    def __init__(self, answers: dict[int, list[int]], acceptance: float):
        draw = random.Random(0)
        self.drafts = {
            first: [token if draw.random() < acceptance else token ^ 1 for token in right]
            for first, right in answers.items()
        }

    def propose(self, sequences: list[Any], counts: list[int]) -> list[list[int]]:
        return [self.drafts[s.tokens[0]][s.sampled :][:count] for s, count in zip(sequences, counts)]

    def verified(self, *_: Any) -> None: ...

    def ended(self, *_: Any) -> None: ...

    def weights_changed(self) -> None: ...


def report_acceptance(preset_name: str, vocab: int, new: int, device: str, picture: str) -> None:
    from gpu_model import random_model

    from lockstep import Engine, EngineConfig, SamplingParams, build_model
    from lockstep.model import preset

    shape = preset(preset_name, vocab)
    model = build_model(shape, dtype="bfloat16") if device == "cpu" else random_model(shape)
    shares, ratios = [0.0, 0.25, 0.5, 0.75, 0.9, 1.0], {}
    params = SamplingParams(max_tokens=new, seed=0, ignore_eos=True)
    name = f"{preset_name} of fresh weights, bfloat16, {device}"
    print(f"\n{name}, {new} new tokens: speed against plain decoding by acceptance", flush=True)

    def seconds(engine: Engine, prompts: list[list[int]]) -> float:
        engine.weights_changed(1)
        began = time.perf_counter()
        engine.generate(prompts, params)
        return time.perf_counter() - began

    for batch in (1, 4, 16, 64):
        prompts = [[i + 1, *range(40)] for i in range(batch)]

        settings = dict(cache_tokens=(new + 64) * batch)
        plain = Engine(model, EngineConfig(**settings, draft="none"))
        groups = plain.generate(prompts, params)
        answers = {prompt[0]: group[0].token_ids for prompt, group in zip(prompts, groups)}
        ratios[batch] = []
        for share in shares:
            drafting = Engine(model, EngineConfig(**settings), draft=Spoilt(answers, share))
            for _ in range(WARMING):
                drafted = drafting.generate(prompts, params)
            assert [g[0].logprobs for g in drafted] == [g[0].logprobs for g in groups]
            pairs = [(seconds(plain, prompts), seconds(drafting, prompts)) for _ in range(TURNS)]
            ratios[batch].append(statistics.median(one / other for one, other in pairs))
        print(
            f"  {batch:3} sequences: " + ", ".join(f"{s:.2f}: {r:.2f}x" for s, r in zip(shares, ratios[batch])),
            flush=True,
        )
    if picture:
        _draw(shares, ratios, f"{preset_name}, {device}", picture)


def _draw(shares: list[float], ratios: dict[int, list[float]], name: str, picture: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for batch, values in ratios.items():
        axes.plot(shares, values, marker="o", label=f"{batch} sequences")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(xlabel="share of drafts that are right", ylabel="tokens/s against plain decoding", title=name)
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=("one", "rollouts", "texts", "acceptance"))
    parser.add_argument("--model", default="")
    parser.add_argument("--data", default="")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--preset", default="qwen3:tiny")
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--picture", default="")
    parser.add_argument("--side")
    options = parser.parse_args()
    if options.side:
        prompts = json.loads(Path(options.model, PROMPTS_FILE).read_text())
        if options.side.startswith("vLLM"):
            result = vllm_side(options.model, prompts, options.side != "vLLM", options.temperature)
        else:
            draft = "none" if options.side == "plain" else options.side
            result = lockstep_side(options.model, prompts, draft, options.temperature)
        print(json.dumps(result))
    elif options.work == "one":
        Path(options.model, PROMPTS_FILE).write_text(json.dumps(prompts_of(options.model, options.data)))
        report_one(options.model, options.data, options.rounds)
    elif options.work == "texts":
        report_texts(options.model, options.data, options.rounds, options.steps)
    elif options.work == "rollouts":
        report_rollouts(options.model, options.data, options.steps)
    else:
        report_acceptance(options.preset, options.vocab, options.new, options.device, options.picture)


if __name__ == "__main__":
    main()
