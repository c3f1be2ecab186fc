"""PPO: generalized advantages, values that are the same bits everywhere, and runs that resume with their value head."""

import math
import shutil
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep import build_model, load_model
from lockstep.checkpoint.manifest import write_manifest
from lockstep.config import CheckpointConfig, CompileConfig, RLConfig, TrainConfig
from lockstep.data import ByteTokenizer
from lockstep.errors import RunStopped, UserError
from lockstep.model import ModelConfig, save_model
from lockstep.rl.algorithms import explained_variance, generalized_advantages, value_losses, value_returns
from lockstep.rl.reinforce import reinforce
from lockstep.rl.rollouts.advantages import assign_advantages
from lockstep.rl.scoring.value_head import make_value_head, train_settings
from lockstep.train import Trainer
from tests.rl.losses import assign_values, batches_of, drawn_rollouts, drawn_value_head, log_probs_of, loss_of
from tests.rl.small_runs import EvenBytes, small_config, steps_of

SHAPE = ModelConfig(
    family="qwen3", vocab_size=258, dim=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
    intermediate_size=64, qk_norm="head", max_positions=64,
)  # fmt: skip
NUMBERS = st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=12)


@given(tokens=NUMBERS, gamma=st.floats(0, 1), lambda_=st.floats(0, 1))
def test_advantages_are_the_sum_of_equation_16(tokens, gamma, lambda_):
    rewards, values = map(list, zip(*tokens))
    deltas = [r + gamma * v for r, v in zip(rewards, [*values[1:], 0.0])]
    deltas = [delta - v for delta, v in zip(deltas, values)]
    expected = [
        math.fsum((gamma * lambda_) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))
    ]
    found = generalized_advantages(rewards, values, gamma, lambda_)
    # Two orders of adding a dozen float64 numbers below 15: 9e-16 measured, at worst 12 roundings of 180.
    assert found == pytest.approx(expected, abs=1e-12)
    assert value_returns(found, values) == [a + v for a, v in zip(found, values)]


def test_a_value_exactly_on_the_bound_or_as_far_from_the_return_as_the_bound_has_its_whole_gradient():
    old, returns = torch.zeros(3), torch.tensor([1.0, -1.0, 0.375])
    values = torch.tensor([0.25, -0.25, 0.5], requires_grad=True)
    losses, bounded = value_losses(values, old, returns, 0.25)
    losses.sum().backward()
    assert values.grad.tolist() == [-0.75, 0.75, 0.125] and not bounded.any()


def test_explained_variance_is_1_for_the_returns_and_0_for_a_constant():
    returns = [0.0, 1.0, 3.0, -2.5]
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance([0.7] * 4, returns) == 0.0
    assert explained_variance([r + 5 for r in returns], returns) == 1.0
    assert explained_variance([-r for r in returns], returns) == -3.0
    assert explained_variance([1.0, 2.0], [0.5, 0.5]) == 0.0


def _config(**changes):
    return RLConfig(**dict(model="m", algorithm="ppo") | changes)


def test_a_detached_head_learns_and_leaves_the_models_gradient_as_it_is_without_one():
    rollouts = drawn_rollouts(build_model(SHAPE, dtype="float32", seed=0), longest=16)
    found = {}
    for name, changes in {
        "none": {"value_coefficient": 0.0},
        "detached": {"value_detached": True},
        "shared": {},
    }.items():
        model, config = build_model(SHAPE, dtype="float32", seed=0), _config(**changes)
        value_head = drawn_value_head(config, model)
        scored = [replace(r, logprobs=own) for r, own in zip(rollouts, log_probs_of(model, rollouts, config))]
        assign_values(scored, model, value_head, config)
        loss = loss_of(config, value_head=value_head)
        assign_advantages(scored, loss.algorithm)
        for batch in batches_of(scored, config):
            loss(model, batch).backward()
        parameters = [*model.named_parameters(), *value_head.parameters_by_name().items()]
        found[name] = {name: parameter.grad for name, parameter in parameters}
    head = "value_head.weight"
    assert torch.equal(found["detached"][head], found["shared"][head]) and found["detached"][head].any()
    for name, gradient in found["none"].items():
        if name != head:
            assert torch.equal(found["detached"][name], gradient), name
            assert not torch.equal(found["shared"][name], gradient), name


def _run(output, folder, **changes):
    train = dict(learning_rate=1e-2, warmup_steps=0, schedule="constant", tokens_per_microbatch=64)
    train |= changes.pop("train", {})
    settings = dict(algorithm="ppo", steps=4, prompts_per_step=2, updates_per_batch=2, kl_coefficient=0.05)
    settings |= dict(checkpoint=CheckpointConfig(every=2, last_model_only=False), train=TrainConfig(**train))
    return reinforce(small_config(output, folder, **settings | changes), EvenBytes())


def _metrics(run):
    return [
        {k: v for k, v in m.items() if not k.startswith(("time", "generators/")) and "per_second" not in k}
        for m in steps_of(run)
    ]


def _files(run):
    newest = run / "checkpoints" / "step_00000004"
    return {name: (newest / name).read_bytes() for name in ("model.safetensors", "trainer/optimizer.safetensors")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, folders):
    """A run of four steps."""
    return _run(tmp_path_factory.mktemp("finished") / "run", folders[0])


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it."""
    return shutil.copytree(finished, tmp_path / "run")


def test_a_run_resumes_to_the_same_bits_with_its_value_head(run, folders):
    metrics, files = _metrics(run), _files(run)
    for step in metrics:
        assert step["parity/tokens_different"] == 0 and step["policy/ratio_first_max"] == 1.0
        assert step["value/loss"] > 0 and step["grad_norm/value_head"] > 0 and step["value/explained_variance"] < 1
    assert metrics[0]["value/explained_variance"] == 0.0, "the head begins as zero"
    assert any(step["value/clip_fraction"] > 0 for step in metrics), "the second update"
    shutil.rmtree(run / "checkpoints" / "step_00000004")
    assert _run(run, folders[0], resume=True) == run
    assert _metrics(run) == metrics and _files(run) == files


def test_a_checkpoint_is_a_model_folder_and_keeps_the_head_with_the_trainers_tensors(finished):
    from safetensors import safe_open

    newest = finished / "checkpoints" / "step_00000004"
    named = {path.name: set(safe_open(path, "pt").keys()) for path in newest.rglob("*.safetensors")}
    ours = {name for names in named.values() for name in names if "value_head" in name}
    assert ours == {f"{kind}.value_head.weight" for kind in ("master", "step", "exp_avg", "exp_avg_sq")}
    assert not any("value_head" in name for name in named["model.safetensors"])
    transformers = pytest.importorskip("transformers")
    theirs, own = transformers.AutoModelForCausalLM.from_pretrained(newest), load_model(newest)
    assert torch.equal(theirs.get_input_embeddings().weight, own.embed_tokens.weight)


def change_the_head(path, change):
    """Saves `change(head)`, or leaves the head out if that is None, in a checkpoint whose manifest fits."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    tensors["master.value_head.weight"] = change(tensors["master.value_head.weight"])
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    (path.parent.parent / "manifest.json").unlink()
    write_manifest(path.parent.parent, [])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda head: head[:, :1].contiguous(), id="another shape"),
        pytest.param(lambda head: None, id="left out"),
    ],
)
def test_a_head_of_another_shape_or_none_is_named_on_resuming(run, folders, change):
    shutil.rmtree(run / "checkpoints" / "step_00000002")
    change_the_head(run / "checkpoints" / "step_00000004" / "trainer" / "optimizer.safetensors", change)
    with pytest.raises((UserError, RunStopped), match="value_head.weight"):
        _run(run, folders[0], steps=5, resume=True)


def test_a_checkpoint_of_another_algorithm_has_no_head_to_resume_with(tmp_path, folders):
    run = _run(tmp_path / "run", folders[0], algorithm="grpo", steps=2)
    with pytest.raises(UserError, match=r"value_head.*algorithm, .* must be those of the run that wrote it"):
        _run(run, folders[0], resume=True)


def test_the_head_has_a_learning_rate_of_its_own_and_cannot_be_frozen():
    value_head = make_value_head(_config(), build_model(SHAPE))
    for changes, expected in ({}, 10.0), ({"value_learning_rate": 3.0}, 3.0), ({"algorithm": "grpo"}, 1.0):
        trainer = Trainer(
            build_model(SHAPE), train_settings(_config(**changes)), 1, extra_parameters=value_head.parameters_by_name()
        )
        assert trainer.optimizer.settings["value_head.weight"].learning_rate == expected
    own = _config(train=TrainConfig(rules=("value_head.* learning_rate=2",)))
    trainer = Trainer(build_model(SHAPE), train_settings(own), 1, extra_parameters=value_head.parameters_by_name())
    assert trainer.optimizer.settings["value_head.weight"].learning_rate == 2.0
    with pytest.raises(UserError, match=r"train.rules freeze value_head.weight, .* \"value_head.weight frozen=false\""):
        Trainer(
            build_model(SHAPE),
            TrainConfig(rules=("* frozen=true",)),
            1,
            extra_parameters=value_head.parameters_by_name(),
        )


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(("layers.0.* frozen=true",), id="frozen layer"),
        pytest.param((), id="in backward", marks=pytest.mark.slow),
    ],
)
def test_runs_with_frozen_layers_and_with_updates_in_the_backward_train_the_head(tmp_path, folders, rules):
    train = {"rules": rules, "optimizer_in_backward": not rules, "tokens_per_microbatch": 4096}
    train |= {} if rules else {"max_grad_norm": 0.0}
    metrics = _metrics(_run(tmp_path / "run", folders[0], steps=2, train=train))
    assert all(m["parity/tokens_different"] == 0 and m["grad_norm/value_head"] > 0 for m in metrics)
    assert metrics[1]["value/explained_variance"] != 0.0


@pytest.mark.slow
def test_a_compiled_run_compares_every_bit(tmp_path):
    folder = tmp_path / "policy"
    save_model(build_model(replace(SHAPE, head_dim=32), dtype="float32", seed=0), folder)
    ByteTokenizer().save(folder)
    metrics = _metrics(_run(tmp_path / "run", folder, steps=2, compile=CompileConfig(backend="inductor")))
    assert all(m["parity/tokens_different"] == 0 and m["policy/ratio_first_max"] == 1.0 for m in metrics)
    assert all(m["value/loss"] > 0 for m in metrics)
