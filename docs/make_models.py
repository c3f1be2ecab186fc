"""Writes the tables of docs/models.md: the families, and what each does, tried on its smallest model.

Run: python docs/make_models.py
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from lockstep import Engine, EngineConfig, SamplingParams, build_model, load_model, save_model, score
from lockstep.checkpoint import newest_checkpoint
from lockstep.checkpoint.convert import convert
from lockstep.config import LoraConfig, ParallelConfig, PretrainConfig, RecomputeConfig, TrainConfig
from lockstep.errors import UserError
from lockstep.model import ModelConfig, lora_of, preset
from lockstep.model.families import FAMILIES
from lockstep.model.gguf import ARCHITECTURES
from lockstep.parallel.recompute import apply_recompute
from lockstep.parallel.refusals import refuse_impossible
from lockstep.parallel.world import AXES
from lockstep.train import Trainer, pack
from lockstep.train.dry_run import dry_run
from lockstep.train.objective import NextTokenLoss
from lockstep.train.pretrain import pretrain

PAGE = Path(__file__).with_name("models.md")
FAMILIES_BEGIN, FAMILIES_END = "<!-- families -->\n", "<!-- end of families -->\n"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"
TITLES = {
    "llama3": "Llama 3", "qwen3": "Qwen3", "qwen3_moe": "Qwen3-MoE", "qwen3_next": "Qwen3-Next",
    "qwen3_5": "Qwen3.5", "qwen3_5_moe": "Qwen3.5-MoE", "gpt_oss": "gpt-oss", "deepseek_v3": "DeepSeek-V3",
    "qwen2": "Qwen2", "gemma3": "Gemma 3", "mistral": "Mistral", "ministral": "Ministral", "ministral3": "Ministral 3",
    "smollm3": "SmolLM3", "olmo2": "OLMo 2", "olmo3": "OLMo 3", "olmoe": "OLMoE", "phi3": "Phi-3", "granite": "Granite",
    "glm": "GLM-4", "glm4": "GLM-4-0414", "glm4_moe": "GLM-4.5", "nanochat": "nanochat",
}  # fmt: skip
PROMPTS = [[5, 9, 2], list(range(40, 75))]
FP8 = {"quant_method": "fp8", "weight_block_size": [1, 2**20]}
ROWS = {"num_bits": 8, "type": "int", "strategy": "channel"}
COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "int-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": ROWS}},
}  # fmt: skip
TEXT = ["0123456789 " * 40] * 8


def shape_of(family: str) -> ModelConfig:
    return preset(f"{family}:{next(iter(FAMILIES[family].PRESETS))}", 128)


def samples_as_it_trains(dtype: str, with_adapter: bool = False) -> Callable[[str], bool]:
    def check(family: str) -> bool:
        shape = shape_of(family)
        if with_adapter:
            shape = replace(shape, lora=lora_of(shape, 4, 8.0, LoraConfig().targets))
        model = build_model(shape, dtype, seed=1)
        for name, weight in model.named_parameters():
            if name.endswith("lora_B.weight"):  # fresh ones are zeros
                torch.nn.init.normal_(weight, std=0.05, generator=torch.Generator().manual_seed(1))
        params = SamplingParams(max_tokens=12, n=2, seed=1, ignore_eos=True)
        groups = Engine(model, EngineConfig(cache_tokens=512, max_tokens_per_step=16)).generate(PROMPTS, params)
        pairs = [(prompt, c) for prompt, group in zip(PROMPTS, groups) for c in group]
        scores = score(model, [prompt + list(c.token_ids) for prompt, c in pairs])
        return all(torch.equal(s[len(p) - 1 :], torch.tensor(c.logprobs)) for s, (p, c) in zip(scores, pairs))

    return check


def reuses_prefixes(family: str) -> bool:
    engine = Engine(build_model(shape_of(family), "float32", seed=1), EngineConfig(cache_tokens=512))
    first, again = (engine.generate([PROMPTS[1]], SamplingParams(max_tokens=6, seed=1)) for _ in range(2))
    return first == again and engine.statistics.prompt_tokens_reused > 0


def resumes(family: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        config = PretrainConfig(
            output=f"{folder}/whole", model=f"{family}:micro", steps=2, tokens_per_step=128, sequence_length=64,
            dtype="float32", train=TrainConfig(tokens_per_microbatch=128),
        )  # fmt: skip
        stopped = replace(config, output=f"{folder}/stopped")
        runs = [pretrain(config, TEXT), pretrain(replace(stopped, steps=1), TEXT)]
        runs[1] = pretrain(replace(stopped, resume=True), TEXT)
        whole, resumed = (load_model(newest_checkpoint(run) or run) for run in runs)
    return all(map(torch.equal, whole.parameters(), resumed.parameters()))


def rehearses(family: str) -> bool:
    config = PretrainConfig(dtype="bfloat16", sequence_length=64, tokens_per_step=512)
    config.train.tokens_per_microbatch = 128
    found = dry_run(config, shape_of(family), 2, NextTokenLoss(126))
    return found.memory["weights"] > 0


def steps(family: str, recompute: str = "none") -> list[float]:
    model = build_model(shape_of(family), "float32", seed=1)
    apply_recompute(model, RecomputeConfig(mode=recompute))  # type: ignore[arg-type]
    trainer = Trainer(model, TrainConfig(learning_rate=1e-3, warmup_steps=0), 10)
    return [trainer.step([pack(PROMPTS)], NextTokenLoss(36))["loss"] for _ in range(5)]


def learns(family: str) -> bool:
    losses = steps(family)
    return losses[-1] < losses[0]


def recomputes(family: str) -> bool:
    return steps(family, "full") == steps(family)


def goes_to_disk_and_back(family: str) -> bool:
    model = build_model(shape_of(family), "float32", seed=1)
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, folder)
        again = load_model(folder)
    return again.config == model.config and all(map(torch.equal, model.parameters(), again.parameters()))


def converts(family: str) -> bool:
    model = build_model(shape_of(family), "float32", seed=1)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "source"), Path(folder, "target")
        save_model(model, source)
        convert(source, target, "float32")
        again = load_model(target)
    return all(map(torch.equal, model.parameters(), again.parameters()))


def reads_quantized(settings: dict[str, Any], codes: torch.dtype, scale: str) -> Callable[[str], bool | str]:
    """Whether a folder is read whose matrices are stored in the type `codes`, with scales of 1/4 for each row."""

    def check(family: str) -> bool | str:
        with tempfile.TemporaryDirectory() as folder:
            save_model(build_model(shape_of(family), "bfloat16", seed=1), folder)
            weights = load_file(Path(folder, "model.safetensors"))
            stored = {}
            for name, weight in weights.items():
                stored[name] = weight
                if weight.ndim == 2 and name.endswith("_proj.weight"):
                    stored |= {name: (weight * 100).to(codes), name + scale: torch.full((len(weight), 1), 0.25)}
                    weights[name] = stored[name].bfloat16() / 4
            save_file(stored, Path(folder, "model.safetensors"))
            config = Path(folder, "config.json")
            config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": settings}))
            try:
                save_model(load_model(folder), folder)
            except UserError as error:
                return "refused: " + str(error).partition(": ")[2].partition(". ")[0]
            found = load_file(Path(folder, "model.safetensors"))
            return all(torch.equal(found[name], weight) for name, weight in weights.items())

    return check


def fits(**degrees: int) -> Callable[[str], bool | str]:
    def check(family: str) -> bool | str:
        shape = replace(shape_of(family), reduction_chunks=degrees.get("tensor", 1))
        try:
            refuse_impossible(shape, dict.fromkeys(AXES, 1) | degrees, ParallelConfig(**degrees))  # type: ignore[arg-type]
        except UserError as error:
            return "refused: " + str(error).splitlines()[-1].removeprefix("  - ")
        return True

    return check


CHECKS: dict[str, Callable[[str], bool | str]] = {
    "sampling has the trainer's bits, float32": samples_as_it_trains("float32"),
    "sampling has the trainer's bits, bfloat16": samples_as_it_trains("bfloat16"),
    "trains": learns,
    "activation checkpointing changes no bit": recomputes,
    "a prefix in the cache changes no bit": reuses_prefixes,
    "sampling has the trainer's bits, with an adapter": samples_as_it_trains("float32", with_adapter=True),
    "a resumed run has the bits of an uninterrupted one": resumes,
    "`--dry-run`": rehearses,
    "Hugging Face folder, written and read": goes_to_disk_and_back,
    "`lockstep convert`": converts,
    "folder in fp8, read": reads_quantized(FP8, torch.float8_e4m3fn, "_scale_inv"),
    "folder of compressed-tensors, read": reads_quantized(COMPRESSED, torch.int8, "_scale"),
    "GGUF file, read": lambda family: FAMILIES[family].ARCHITECTURE in ARCHITECTURES.values() or "refused",
    "`parallel.data_shard 2` (FSDP)": fits(data_shard=2),
    "`parallel.tensor 2`": fits(tensor=2),
    "`parallel.context 2`": fits(context=2),
    "`parallel.pipeline 2`": fits(pipeline=2),
    "`parallel.expert 2`": fits(expert=2, data_shard=2),
}


def families() -> str:
    """A row for each family."""
    lines = ["| family | class | sizes by name |", "| --- | --- | --- |"]
    for name, module in FAMILIES.items():
        sizes = ", ".join(f"`{name}:{size}`" for size in module.PRESETS)
        lines.append(f"| {TITLES[name]} | `{module.ARCHITECTURE}` | {sizes} |")
    return "\n".join(lines) + "\n"


def table() -> str:
    """A row for each feature: the answer of most families, and those with another one."""
    lines = ["| | |", "| --- | --- |"]
    for feature, check in CHECKS.items():
        answers: dict[str, list[str]] = defaultdict(list)
        for family in FAMILIES:
            found = check(family)
            answers[found if isinstance(found, str) else "yes" if found else "NO"].append(TITLES[family])
        most, *others = sorted(answers, key=lambda answer: -len(answers[answer]))
        cells = [most, *(f"{', '.join(answers[answer])}: {answer}" for answer in others)]
        lines.append(f"| {feature} | {'; '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    text = PAGE.read_text()
    for begin, end, made in ((FAMILIES_BEGIN, FAMILIES_END, families()), (BEGIN, END, table())):
        before, _, rest = text.partition(begin)
        text = before + begin + made + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
