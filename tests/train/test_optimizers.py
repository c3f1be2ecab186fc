"""Schedules, rules and optimizers against their definitions, and over ranks against one process."""

import math
from functools import partial

import pytest
import torch

from lockstep import build_model
from lockstep.config import CompileConfig, ParallelConfig, PretrainConfig, TrainConfig, from_toml, to_toml
from lockstep.errors import UserError
from lockstep.model import initialize, preset
from lockstep.parallel import close_world, open_world, parallel_model
from lockstep.train import MasterOptimizer, Trainer, make_schedule, pack
from lockstep.train.gradient_norm import gradient_norms, squares_by_device
from lockstep.train.muon import muon_state, muon_update, orthogonalize, orthogonalize_together
from lockstep.train.objective import NextTokenLoss
from tests.parallel.launch import launch
from tests.parallel.training import train

SEQUENCES = [list(range(1, 33)), list(range(60, 90)), [7, 7, 7, 9]]
TARGETS = sum(len(s) - 1 for s in SEQUENCES)


def _rates(steps, **settings):
    schedule = make_schedule(TrainConfig(learning_rate=1.0, **settings), steps)
    return [schedule(step) for step in range(steps)]


def _trained(steps=5, dtype="float32", **settings):
    """A trainer after some steps on one batch, and the steps' metrics."""
    settings = {"warmup_steps": 0, "schedule": "constant", "learning_rate": 1e-3} | settings
    trainer = Trainer(build_model(preset("qwen3:micro"), dtype=dtype), TrainConfig(**settings), steps)
    return trainer, [trainer.step([pack(SEQUENCES)], NextTokenLoss(TARGETS)) for _ in range(steps)]


def test_the_learning_rate_rises_and_falls_as_its_schedule_says():
    warm = dict(warmup_steps=4, final_learning_rate_ratio=0.0)
    assert _rates(8, schedule="linear", **warm) == [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert _rates(8, schedule="cosine", **warm)[6] == pytest.approx(0.5)  # cos(π/2), rounded
    assert _rates(8, schedule="constant", **warm)[4:] == [1.0] * 4
    decays = dict(schedule="wsd", warmup_steps=2, decay_share=0.2, final_learning_rate_ratio=0.0)
    for shape, half in (("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - math.sqrt(0.5))):
        rates = _rates(20, decay_shape=shape, **decays)
        assert rates[:2] == [0.5, 1.0] and rates[2:17] == [1.0] * 15, "until its share of steps is left"
        assert rates[18] == pytest.approx(half) and rates[17] > rates[18] > rates[19] > 0


def test_a_schedule_file_is_interpolated_held_at_its_ends_and_refused_by_file_and_line(tmp_path):
    path = tmp_path / "rates.csv"
    path.write_text("step,learning_rate\n2,1.0\n6,0.2\n")
    rates = _rates(8, schedule="csv", schedule_file=str(path))
    assert rates == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2], rel=1e-12)
    for text, message in (
        ("1,0.1\n", "line 1: the header must be step,learning_rate"),
        ("step,learning_rate\n1,0.1\n\nfast,0.2\n", "line 4: 'fast,0.2' is not a later step"),
        ("step,learning_rate\n5,0.1\n5,0.2\n", "line 3: '5,0.2' is not a later step"),
        ("step,learning_rate\n5,-0.1\n", "line 2: '5,-0.1' is not .* its learning rate of 0 or more"),
        ("step,learning_rate\n", "has no steps"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=f"rates.csv.*{message}"):
            _rates(8, schedule="csv", schedule_file=str(path))


def test_updates_in_the_backward_refuse_a_step_of_several_micro_batches():
    config = TrainConfig(optimizer_in_backward=True, max_grad_norm=0)
    trainer = Trainer(build_model(preset("qwen3:micro")), config, 1)
    with pytest.raises(UserError, match="a step has 2 of them; raise train.tokens_per_microbatch"):
        trainer.step([pack(SEQUENCES)] * 2, NextTokenLoss(TARGETS))


def test_rules_set_what_a_parameter_is_trained_by_and_survive_a_file(tmp_path):
    rules = ("*norm* learning_rate=0.5 weight_decay=0.2", "layers.0.* frozen=true", "layers.*.mlp.* optimizer=adamw")
    config = PretrainConfig(train=TrainConfig(optimizer="muon", weight_decay=0.1, rules=rules))
    (tmp_path / "config.toml").write_text(to_toml(config))
    config = from_toml(tmp_path / "config.toml", PretrainConfig())
    assert config.train.rules == rules
    model = build_model(preset("qwen3:micro"), dtype="float32")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainer = Trainer(model, config.train, 1)
    settings = trainer.optimizer.settings
    assert settings["layers.1.input_layernorm.weight"].learning_rate == 0.5
    assert settings["layers.1.input_layernorm.weight"].weight_decay == 0.2
    assert settings["layers.1.mlp.up_proj.weight"].optimizer == "adamw"
    assert settings["layers.1.self_attn.q_proj.weight"].optimizer == "muon"
    assert settings["embed_tokens.weight"].optimizer == "adamw"
    trainer.step([pack(SEQUENCES)], NextTokenLoss(TARGETS))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == name.startswith("layers.0."), name
    assert not any("layers.0." in name for name in trainer.optimizer.state_tensors())


def test_a_rule_that_cannot_be_followed_is_quoted():
    model = build_model(preset("qwen3:micro"))
    for rule, message in (
        ("layers.9.* frozen=true", "no parameter has such a name"),
        ("* frozen=true", "freeze every parameter"),
        ("*norm* lr=1", 'unknown key "lr"'),
        ("*norm* optimizer=muon", "is not a matrix"),
        ("*norm* learning_rate=-1", "give a factor"),
        ("*norm*", "give PATTERN key=value"),
    ):
        with pytest.raises(UserError, match=message) as error:
            MasterOptimizer(model, TrainConfig(rules=(rule,)))
        assert f'"{rule}"' in str(error.value)


@pytest.mark.slow
def test_muon_is_torchs_muon_for_the_layers_matrices_and_adamw_for_the_rest():
    config = TrainConfig(optimizer="muon", weight_decay=0.1, max_grad_norm=0.0)
    model = build_model(preset("qwen3:micro"), dtype="float32")
    ours = MasterOptimizer(model, config)
    named = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    inner = [p for n, p in named.items() if n.startswith("layers.") and p.ndim == 2]
    rest = [{"params": [named["embed_tokens.weight"]], "weight_decay": 0.1}]
    rest += [{"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0}]
    muon = torch.optim.Muon(inner, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=1e-2, betas=(0.9, 0.95))
    for _ in range(3):
        NextTokenLoss(TARGETS)(model, pack(SEQUENCES)).backward()
        for name, parameter in model.named_parameters():
            named[name].grad = parameter.grad.clone()
        muon.step()
        adamw.step()
        ours.update(1e-2, 0.0)
    for name, parameter in model.named_parameters():
        difference = (parameter - named[name]).norm() / named[name].norm()
        # Fused and plain AdamW round in other places.
        assert difference < 1e-6, name


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_moments_in_bfloat16_learn_as_float32_ones_do(optimizer):
    trainer, narrow = _trained(10, learning_rate=1e-2, optimizer=optimizer, moments_dtype="bfloat16")
    _, wide = _trained(10, learning_rate=1e-2, optimizer=optimizer)
    kept = trainer.optimizer.state_tensors()
    assert {t.dtype for n, t in kept.items() if n.startswith(("exp_avg", "momentum"))} == {torch.bfloat16}
    assert narrow[-1]["loss"] == pytest.approx(wide[-1]["loss"], abs=0.1) and wide[-1]["loss"] < wide[0]["loss"] - 1


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_an_update_in_backward_is_the_very_update_and_keeps_no_gradient(dtype):
    now, metrics = _trained(3, dtype, optimizer_in_backward=True, max_grad_norm=0.0)
    later, expected = _trained(3, dtype, max_grad_norm=0.0)
    for (name, mine), theirs in zip(now.optimizer.masters.items(), later.optimizer.masters.values()):
        assert torch.equal(mine, theirs) and mine.grad is None, name
    assert [m["loss"] for m in metrics] == [m["loss"] for m in expected]
    assert [m["grad_norm"] for m in metrics] == [m["grad_norm"] for m in expected]


def _with_a_head():
    """Of a bfloat16 model with a head in float32, as a value head is: the head's gradient, and what it should be."""
    world = open_world(ParallelConfig(), "cpu")
    fill = partial(initialize, seed=0)
    model = parallel_model(preset("qwen3:micro"), torch.bfloat16, world, ParallelConfig(), CompileConfig(), fill)
    head = torch.nn.Parameter(torch.zeros(3))
    trainer = Trainer(model, TrainConfig(warmup_steps=0), 3, world, {"value_head.weight": head})
    loss = NextTokenLoss(TARGETS * world.size)
    trainer.accumulate([pack(SEQUENCES)] * 2, lambda model, row: loss(model, row) + (world.rank + 1) * head.sum())
    found = trainer.optimizer.gradients.pending()["value_head.weight"].tolist()
    close_world(world)
    return found


def test_the_gradient_of_a_float32_head_on_a_bfloat16_model_is_summed_over_micro_batches_and_ranks():
    assert launch(2, _with_a_head) == [[6.0] * 3] * 2


@pytest.mark.slow
def test_the_state_of_every_optimizer_is_put_back_to_the_bit():
    settings = dict(dtype="bfloat16", moments_dtype="bfloat16", optimizer="muon")
    whole, expected = _trained(3, **settings)
    half, _ = _trained(2, **settings)
    fresh, _ = _trained(0, **settings)
    fresh.optimizer.load_state_tensors({n: t.clone() for n, t in half.optimizer.state_tensors().items()})
    assert fresh.step([pack(SEQUENCES)], NextTokenLoss(TARGETS)) == expected[2]
    for name, tensor in fresh.optimizer.state_tensors().items():
        assert torch.equal(tensor, whole.optimizer.state_tensors()[name]), name
    adamw, _ = _trained(0, "bfloat16")
    with pytest.raises(UserError, match="lacks .* exp_avg.layers.0.*train.optimizer, train.rules and .* must be those"):
        adamw.optimizer.load_state_tensors(whole.optimizer.state_tensors())


def test_the_norm_of_the_whole_is_that_of_its_parts():
    _, (metrics,) = _trained(1)
    parts = {name: value for name, value in metrics.items() if name.startswith("grad_norm/")}
    assert parts.keys() == {f"grad_norm/{p}" for p in ("embedding", "attention", "feed-forward", "norms")}
    assert metrics["grad_norm"] == pytest.approx(math.hypot(*parts.values()), rel=1e-6)


def test_squares_add_up_to_the_same_sum_however_a_gradient_is_cut_on_a_gpu_too():
    gradient = torch.full((1 << 24,), 0.1)  # a sum of so many squares in float32 is two percent short
    expected = (1 << 24) * float(torch.tensor(0.1)) ** 2
    for pieces in (1, 5):
        parts = gradient.chunk(pieces)
        norms = gradient_norms({f"layers.{index}.mlp.up_proj.weight": part for index, part in enumerate(parts)})
        assert norms["grad_norm"] == pytest.approx(math.sqrt(expected), rel=1e-12)
        # What other devices run. A GPU adds up in a tree; this one lane after lane.
        assert sum(float(square) for square in squares_by_device(parts)) == pytest.approx(expected, rel=1e-9)


FSDP = (2, ParallelConfig())
LAYOUTS = [FSDP, (4, ParallelConfig(data_replicate=2)), (4, ParallelConfig(tensor=2)), (2, ParallelConfig(pipeline=2))]
SETTINGS = {
    # In bfloat16 the iterations would round the last bits of a gradient up to 1e-5 of the loss in 20 steps.
    "muon": dict(optimizer="muon", muon_dtype="float32"),
    "in-backward": dict(optimizer_in_backward=True, max_grad_norm=0.0),
    "rules": dict(rules=("layers.1.* frozen=true", "*norm* learning_rate=0.5"), moments_dtype="bfloat16"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n != "in-backward" else []) for n in SETTINGS]
)
def test_every_optimizer_follows_one_process_over_ranks(name):
    def traces(ranks, layout, steps):
        rest = (True, SETTINGS[name], None, False, 2)
        return launch(ranks, train, layout, "float32", steps, "qwen3:micro", 258, *rest)

    (alone,) = traces(1, ParallelConfig(), 5)
    for ranks, layout in LAYOUTS if name == "muon" else [FSDP]:
        steps = 5 if (ranks, layout) == FSDP else 3
        for trace in traces(ranks, layout, steps):
            assert trace.losses == pytest.approx(alone.losses[:steps], rel=1e-5)
            assert trace.norms[0] == pytest.approx(alone.norms[0], rel=1e-5)


@pytest.mark.parametrize("shape", [(48, 80), (80, 48)])
def test_muons_iteration_in_float32_is_the_published_one_which_gives_singular_values_near_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(matrix))
    assert values.min() > 0.6 and values.max() < 1.3
    x = (matrix if shape[0] < shape[1] else matrix.T).double()
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    expected = x if shape[0] < shape[1] else x.T
    assert (orthogonalize(matrix) - expected).abs().max() < 1e-5  # float32, some hundred roundings of values below 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(3, 24, 40), (3, 40, 24)])
def test_muon_trains_each_of_stacked_matrices_as_one_that_is_alone(dtype, shape):
    draw = torch.Generator().manual_seed(0)
    config = TrainConfig(optimizer="muon", muon_dtype=dtype)
    stacked = torch.randn(shape, generator=draw)
    alone = [matrix.clone() for matrix in stacked]
    states = muon_state(stacked, torch.float32), [muon_state(matrix, torch.float32) for matrix in alone]
    for _ in range(2):
        # Of other sizes, as of experts with many tokens and with few.
        grad = torch.randn(shape, generator=draw) * torch.tensor([1.0, 1e-3, 50.0])[:, None, None]
        muon_update([stacked], [stacked], [grad], [states[0]], 0.1, 0.1, config)
        muon_update(alone, alone, list(grad), states[1], 0.1, 0.1, config)
    assert all(map(torch.equal, stacked, alone))
    # All at once, as on a GPU, they are the same up to float32's rounding.
    wide = grad / grad.norm()
    torch.testing.assert_close(orthogonalize_together(wide), orthogonalize(wide), rtol=0, atol=1e-5)


def test_muon_is_the_default_of_experts_and_not_of_their_biases():
    model = build_model(preset("gpt_oss:micro", 258), "float32", seed=0)
    settings = MasterOptimizer(model, TrainConfig(optimizer="muon")).settings
    experts = "layers.0.mlp.experts."
    kinds = {name: settings[experts + name].optimizer for name in ("gate_up_proj", "down_proj", "down_proj_bias")}
    assert kinds == {"gate_up_proj": "muon", "down_proj": "muon", "down_proj_bias": "adamw"}


@pytest.mark.parametrize("layout", [pytest.param(ParallelConfig(), marks=pytest.mark.slow), ParallelConfig(expert=2)])
def test_muon_of_experts_follows_one_process_over_ranks(layout):
    def trace(ranks, layout):
        rest = (True, SETTINGS["muon"], None, False, 2)
        return launch(ranks, train, layout, "float32", 3, "qwen3_moe:micro", 258, *rest)

    (alone,) = trace(1, ParallelConfig())
    for found in trace(2, layout):
        assert found.losses == pytest.approx(alone.losses, rel=1e-5)  # whose sums over tokens round in another order
