"""Whole runs on a real GPU: every loop, algorithm and family. Run: make gpu-test PYTHON=python3."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from lockstep.config import (
    ActorsConfig,
    CheckpointConfig,
    CompileConfig,
    DPOConfig,
    EngineConfig,
    LoraConfig,
    PretrainConfig,
    RecomputeConfig,
    RewardConfig,
    RewardModelConfig,
    RLConfig,
    SFTConfig,
    TrainConfig,
    to_toml,
)
from lockstep.data import ByteTokenizer
from lockstep.model import build_model, preset, save_model
from lockstep.observe import read_metrics
from lockstep.rl.reinforce import reinforce
from lockstep.rl.replay import replay
from lockstep.train.dpo import prefer
from lockstep.train.pretrain import pretrain
from lockstep.train.reward_model import train_reward_model
from lockstep.train.sft import finetune
from tests.rl.generators.test_colocated import TASK, outcome

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SLOW = """
class Slow(Vowels):
    def reward(self, example, completion):
        import time
        time.sleep(0.03)
        return super().reward(example, completion)
"""
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{% generation %}{{ message.content }}{{ eos_token }}"
    "{% endgeneration %}{% endfor %}"
)
SMALL = dict(learning_rate=1e-3, warmup_steps=0, schedule="constant")


def _folder(path, family="qwen3", dtype="bfloat16", seed=1):
    tokenizer = ByteTokenizer()
    shape = preset(f"{family}:micro", tokenizer.vocab_size, (tokenizer.eos_id,))
    save_model(build_model(dataclasses.replace(shape, num_layers=2), dtype, seed=seed), path)
    tokenizer.save(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def _rl(tmp_path, family="qwen3", name="run", **changes):
    if not (tmp_path / "task.py").exists():
        (tmp_path / "task.py").write_text(TASK + SLOW)
    model = tmp_path / family
    if not model.exists():
        _folder(model, family)
    train = TrainConfig(**SMALL, tokens_per_microbatch=64)
    settings = dict(
        output=str(tmp_path / name), model=str(model), environment=f"{tmp_path / 'task.py'}:Vowels", steps=3,
        prompts_per_step=4, samples_per_prompt=4, max_new_tokens=12, validation_examples=2, updates_per_batch=2,
        temperature=0.85, device=DEVICE, train=train, rewards=RewardConfig(isolate="never"),
        engine=EngineConfig(max_tokens_per_step=256, max_sequences=8, cache_tokens=2048),
        checkpoint=CheckpointConfig(every=1, keep_last=0),
    )  # fmt: skip
    return RLConfig(**(settings | changes))


def _check(folder):
    steps = read_metrics(folder / "metrics.jsonl")[1:]
    assert len(steps) == 3 and steps[0]["parity/tokens_checked"] > 20
    assert all(m["parity/tokens_different"] == 0 for m in steps)
    assert len({m["loss"] for m in steps}) == len(steps)
    return steps


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ("grpo", {"kl_coefficient": 0.1}),
        ("dr_grpo", {"dtype": "float32"}),
        ("dapo", {"extra_rounds": 2, "entropy_coefficient": 0.01}),
        ("gspo", {"kl_coefficient": 0.05, "kl_reference": "average", "off_policy": "truncate"}),
        ("cispo", {"recompute": RecomputeConfig("full")}),
        ("rloo", {"kl_coefficient": 0.05, "updates_per_batch": 1}),
        ("reinforce++", {"top_p": 0.9, "off_policy": "mask"}),
        ("reinforce++-baseline", {"lora": LoraConfig(rank=4)}),
        ("rejection", {"compile": CompileConfig(backend="inductor")}),
        ("distillation", {"updates_per_batch": 1}),
        ("ppo", {"value_detached": True}),
        ("ppo", {"dtype": "float32"}),
    ],
)
def test_every_algorithm_runs_and_its_steps_have_the_recorded_bits(tmp_path, algorithm, changes):
    if algorithm == "distillation":
        changes = changes | {"teacher": str(_folder(tmp_path / "teacher", seed=2))}
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    folder = reinforce(_rl(tmp_path, algorithm=algorithm, **changes))
    assert torch.cuda.max_memory_allocated() > before, "nothing was computed on the GPU"
    _check(folder)
    state = json.loads((folder / "checkpoints" / "step_00000003" / "state.json").read_text())
    assert state["arithmetic"].startswith("cuda sm_")
    result = replay(folder, 3)
    assert result.equal, result.text()


@pytest.mark.parametrize("family", ["llama3", "qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_of_every_family_compares_its_routes_too(tmp_path, family, dtype):
    folder = reinforce(
        _rl(tmp_path, family, dtype=dtype, recompute=RecomputeConfig("selective"), router_replay=family != "llama3")
    )
    steps = _check(folder)
    if family != "llama3":
        assert all(m["routes/different"] == 0 for m in steps)
    assert replay(folder, 3, sample=True).equal


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_generator_in_a_process_of_its_own_gives_the_same_run(tmp_path, family):
    reinforce(_rl(tmp_path, family, "own"))
    actors = ActorsConfig(generators=1, silence_seconds=10)
    reinforce(_rl(tmp_path, family, "separate", actors=actors))
    assert outcome(tmp_path / "separate") == outcome(tmp_path / "own")


def test_two_generators_sample_ahead(tmp_path):
    actors = ActorsConfig(generators=2, max_staleness=1, silence_seconds=10)
    steps = _check(reinforce(_rl(tmp_path, actors=actors, off_policy="truncate")))
    assert max(m["policy/staleness_max"] for m in steps) == 1


def test_a_run_that_a_signal_ended_goes_on_with_the_same_bits(tmp_path):
    slow = f"{tmp_path / 'task.py'}:Slow"
    reinforce(_rl(tmp_path, name="whole", environment=slow))
    config = _rl(tmp_path, name="ended", environment=slow)
    (tmp_path / "rl.toml").write_text(to_toml(config))
    program = "import sys; from lockstep.config import RLConfig, from_toml; "
    program += "from lockstep.rl.reinforce import reinforce; reinforce(from_toml(sys.argv[1], RLConfig()))"
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "rl.toml")], stderr=subprocess.PIPE)
    metrics, patience = tmp_path / "ended" / "metrics.jsonl", time.monotonic() + 240
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 1):  # a step is done
        assert process.poll() is None and time.monotonic() < patience, process.stderr.read()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    said = process.communicate(timeout=120)[1].decode()
    assert process.returncode != 0 and "SIGTERM" in said, said
    reinforce(dataclasses.replace(config, resume=True))
    assert outcome(tmp_path / "ended") == outcome(tmp_path / "whole")


def _file(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def _losses(folder):
    return [m["loss"] for m in read_metrics(folder / "metrics.jsonl") if "loss" in m]


def _resumes(loop, config, steps=4):
    """The run learns; a copy of its beginning, resumed, has the same losses."""
    folder = loop(config)
    losses = _losses(folder)
    assert len(losses) == steps and losses[-1] < losses[0]
    last = max((folder / "checkpoints").glob("step_*"))
    shutil.copytree(folder, again := folder.with_name("again"), symlinks=True)
    shutil.rmtree(again / "checkpoints" / last.name)
    loop(dataclasses.replace(config, output=str(again), resume=True))
    assert _losses(again) == losses


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": "qwen3_moe:micro", "dtype": "float32"},
        {"model": "gpt_oss:micro", "recompute": RecomputeConfig("selective")},
        {"model": "deepseek_v3:micro", "train": TrainConfig(**SMALL, optimizer="muon")},
        {"compile": CompileConfig(backend="inductor")},
        {"train": TrainConfig(**SMALL, deterministic_layout=True, tokens_per_microbatch=128)},
        {"train": TrainConfig(**SMALL, optimizer_in_backward=True, max_grad_norm=0)},
    ],
)
def test_pretraining_learns_and_resumes_to_the_same_bits(tmp_path, changes):
    text = _file(
        tmp_path / "text.jsonl", [{"text": f"{a} and {b} are {a + b}. " * 5} for a in range(9) for b in range(9)]
    )
    settings = dict(
        output=str(tmp_path / "run"), model="llama3:micro", data=text, steps=4, tokens_per_step=512,
        sequence_length=128, dtype="bfloat16", device=DEVICE, train=TrainConfig(**SMALL),
        checkpoint=CheckpointConfig(every=2, keep_last=0), validation_data=text, validation_every=2,
    )  # fmt: skip
    _resumes(pretrain, PretrainConfig(**(settings | changes)))


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("loop", ["sft", "dpo", "reward-model"])
def test_fine_tuning_learns_and_resumes_to_the_same_bits(tmp_path, loop, lora):
    pairs = [
        {"prompt": f"{a}+{b}=", "chosen": f"{a + b}\n", "rejected": f"{a}{b} {'or so ' * (a % 3)}\n"}
        for a in range(1, 6)
        for b in range(2, 6)
    ]
    talks = [
        {"messages": [{"role": "user", "content": p["prompt"]}, {"role": "assistant", "content": p["chosen"]}]}
        for p in pairs
    ]
    shared = dict(
        output=str(tmp_path / "run"), model=str(_folder(tmp_path / "model")), steps=4, tokens_per_step=256,
        sequence_length=64, device=DEVICE, lora=LoraConfig(rank=lora),
        data=_file(tmp_path / "data.jsonl", talks if loop == "sft" else pairs),
        train=TrainConfig(**SMALL, tokens_per_microbatch=128), checkpoint=CheckpointConfig(every=2, keep_last=0),
    )  # fmt: skip
    if loop == "sft":
        _resumes(finetune, SFTConfig(**shared))
    elif loop == "dpo":
        _resumes(prefer, DPOConfig(**shared, beta=0.5))
    else:
        _resumes(train_reward_model, RewardModelConfig(**shared))
