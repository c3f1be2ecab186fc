"""Which experts a token went to, in the generator and in the trainer: compared, named where they differ, replayed."""

import copy
import json
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from lockstep import Engine, EngineConfig, SamplingParams, build_model, ops, save_model
from lockstep.config import ActorsConfig, CheckpointConfig, CompileConfig, RecomputeConfig, RLConfig, TrainConfig
from lockstep.data import ByteTokenizer
from lockstep.errors import UserError
from lockstep.generate.drafts import Draft
from lockstep.generate.routes import read_route, shortened, written
from lockstep.model import preset
from lockstep.ops import routing
from lockstep.parallel.recompute import apply_recompute
from lockstep.rl import Example
from lockstep.rl.reinforce import reinforce
from lockstep.rl.rollouts.records import Rollout, Scores
from lockstep.rl.scoring.explain import first_difference, in_words
from lockstep.rl.scoring.parity import Parity, ParityError
from lockstep.rl.scoring.routes import routes_to_replay
from tests.rl.losses import batches_of, loss_of
from tests.rl.small_runs import rollouts_of, small_config, steps_of
from tests.server.conftest import running_server

MICRO = preset("qwen3_moe:micro", 258)
SHAPE = replace(
    MICRO, dim=64, num_layers=3, experts=replace(MICRO.experts, intermediate_size=32, dense_layers=(1,))
)  # fmt: skip
"""Its routes are shorter than a digest, and so digests themselves; `LONG`'s are longer."""
LONG = replace(SHAPE, experts=replace(SHAPE.experts, routing=replace(SHAPE.experts.routing, active=5)))


def mixture(shape=SHAPE):
    return build_model(shape, "float32", seed=1)


def perturbed(model, size=0.02):
    """What another engine makes of the model: products that are off by some per cent."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + size * torch.randn(parameter.shape, generator=generator))
    return other


def sampled(engine, form="whole", seed=0, tokens=16):
    """Rollouts of prompts of which one begins with another."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randint(256, (40,), generator=generator).tolist()
    prompts = [shared[:3], shared, [*shared, 5, 6], shared[7:19]]
    params = SamplingParams(max_tokens=tokens, n=3, seed=3, ignore_eos=True, routes=form)
    return [
        Rollout(Example(f"prompt {i}"), i, prompt, c.token_ids, c.logprobs, "length", "", 0,
                routes=c.routes, scores=Scores(advantage=1.0, reward=1.0))
        for i, (prompt, group) in enumerate(zip(prompts, engine.generate(prompts, params)))
        for c in group
    ]  # fmt: skip


def gradients_of(model, rollouts, **settings):
    """All micro-batches through the loss, and their gradients, as a step does."""
    train = TrainConfig(tokens_per_microbatch=90)
    config = RLConfig(dtype="float32", train=train, on_parity_error="measure", **settings)
    loss = loss_of(config, compare=True)
    for batch in batches_of(rollouts, config):
        loss(model, batch).backward()
    return loss


@pytest.fixture(scope="module")
def rollouts():
    """Of `mixture()`, by the same bits."""
    return sampled(Engine(mixture(), EngineConfig(cache_tokens=4096)))


@pytest.fixture(scope="module")
def other_rollouts():
    """Of an engine whose products differ."""
    return sampled(Engine(perturbed(mixture()), EngineConfig(cache_tokens=4096)))


class HalfRight(Draft):
    """Drafts the tokens of another engine, every third one spoiled."""

    def __init__(self, known):
        self.known = known

    def propose(self, sequences, counts):
        return [self._of(sequence.tokens, count) for sequence, count in zip(sequences, counts)]

    def _of(self, tokens, count):
        found = next((k for k in self.known if k[: len(tokens)] == tokens), tokens)
        draft = found[len(tokens) : len(tokens) + count]
        return [(t + 1) % 256 if (len(tokens) + i) % 3 == 0 else t for i, t in enumerate(draft)]


@pytest.mark.parametrize(("form", "shape"), [pytest.param("digest", SHAPE, marks=pytest.mark.slow), ("whole", LONG)])
def test_every_sampled_token_has_the_trainers_route_however_it_was_computed(shape, form):
    model = mixture(shape)
    plain = sampled(Engine(model, EngineConfig(cache_tokens=4096)), form, tokens=40)
    assert all(len(r.routes) == len(r.token_ids) for r in plain)
    # Prompts in chunks, pages that run out, prefixes that are known, and drafts of which some are wrong.
    narrow = EngineConfig(cache_tokens=128, max_tokens_per_step=24, max_sequences=5, draft_tokens=4)
    engine = Engine(model, narrow, draft=HalfRight([r.prompt_ids + r.token_ids for r in plain]))
    mixed = sampled(engine, form, tokens=40)
    did = engine.statistics
    assert did.preemptions and did.prompt_tokens_reused and did.tokens_guessed > did.guesses_accepted > 0
    assert [(r.token_ids, r.routes) for r in mixed] == [(r.token_ids, r.routes) for r in plain]
    parity = gradients_of(model, mixed).parity
    tokens = sum(r.num_sampled for r in mixed)
    assert (parity.routes_checked, parity.routes_different, parity.tokens_different) == (tokens, 0, 0)


def test_what_ranks_find_of_routes_is_added_up():
    found = Parity(routes_checked=4, routes_different=1, first_route="here", sequence=([1, 2], 1))
    of_tokens = Parity(3, 1, 0.5, first="there", sequence=([3, 4], 1), routes_checked=3)
    parity = Parity()
    parity.combine(json.loads(json.dumps([Parity().plain(), found.plain(), of_tokens.plain()])))
    assert (parity.routes_checked, parity.routes_different) == (7, 1)
    assert (parity.first_route, parity.first, parity.sequence) == ("here", "there", ([1, 2], 1))


def test_without_experts_or_a_request_there_are_no_routes():
    dense = build_model(preset("qwen3:micro", 258), "float32", seed=1)
    rollouts = sampled(Engine(dense, EngineConfig(cache_tokens=4096)), tokens=2)
    assert not any(r.routes for r in rollouts)
    assert "parity/routes_checked" not in gradients_of(dense, rollouts).parity.metrics()
    assert not any(r.routes for r in sampled(Engine(mixture(), EngineConfig(cache_tokens=4096)), form="", tokens=2))


def test_a_digest_is_that_of_its_route_and_names_nothing():
    route = bytes(range(9))
    whole, digest = written(route), written(route, "digest")
    assert shortened(whole) == digest == shortened(digest) != whole
    assert written(route[:8]) == written(route[:8], "digest") and written(route, "") == ""
    assert written(bytes([*range(8), 9]), "digest") != digest
    assert read_route(digest, LONG) is None
    wide = replace(LONG, experts=replace(LONG.experts, count=300))
    chosen = np.array([[0, 1, 299, 3, 4], [256, 7, 8, 9, 10]])
    assert (read_route(written(chosen.astype("<i2").tobytes()), wide) == chosen).all()


@pytest.mark.parametrize(("place", "layer"), [(1, 0), (2, 2)])
def test_one_flipped_route_is_named_with_its_layer_token_and_experts(place, layer, rollouts):
    model, first = mixture(), rollouts[0]
    ours = read_route(first.routes[5], SHAPE)[layer // 2].tolist()
    theirs = list(ours)
    theirs[place - 1] = next(e for e in range(8) if e not in ours)
    route = read_route(first.routes[5], SHAPE).copy()
    route[layer // 2] = theirs
    flipped = [*first.routes[:5], written(route.astype("u1").tobytes()), *first.routes[6:]]
    parity = gradients_of(model, [replace(first, routes=flipped), *rollouts[1:]]).parity
    token = f"token {first.token_ids[5]} at position {len(first.prompt_ids) + 5} after 'prompt 0'"
    assert parity.first_route == (
        f"{token}: layer {layer} chose experts {theirs} in the generator, {ours} in the trainer"
    )
    assert parity.metrics()["parity/routes_different"] == 1
    with pytest.raises(ParityError, match="had different experts in the generator and the trainer; the first is token"):
        parity.require_equal(1, "stop", model)


def test_a_digest_that_differs_is_found_and_the_layer_is_named_by_running_both_paths_again(monkeypatch):
    model = mixture(LONG)
    exact = routing._choose

    def choose(logits, *settings):
        weights, chosen = exact(logits, *settings)
        # Of single rows, which only the generator has, the last expert is another.
        if len(logits) == 1:
            chosen = chosen.clone()
            chosen[0, -1] = next(e for e in range(8) if e not in chosen[0].tolist())
        return weights, chosen

    monkeypatch.setattr(routing, "_choose", choose)
    prompt = [*range(5, 26)]
    params = SamplingParams(max_tokens=9, seed=3, ignore_eos=True, routes="digest")
    ((said,),) = Engine(model, EngineConfig(cache_tokens=4096)).generate([prompt], params)
    rollout = Rollout(Example("p"), 0, prompt, said.token_ids, said.logprobs, "length", "", 0, routes=said.routes)
    parity = gradients_of(model, [rollout]).parity
    assert parity.first_route.endswith("experts differ (only their digests were compared)")
    found = first_difference(model, *parity.sequence)
    assert found.operator == "layer 0, route of experts" and found.position == len(prompt)
    said = in_words(model, parity.sequence)
    assert said.startswith("The first operator that differs is layer 0, route of experts: [") and "trainer" in said


def test_replayed_routes_are_the_generators_and_rows_of_prompts_choose_for_themselves(other_rollouts):
    model = mixture()
    metrics = gradients_of(model, other_rollouts, router_replay=True).metrics()
    assert 0 < metrics["routes/different"] < 0.5
    assert all(float(model.layers[i].mlp.gate.weight.grad.abs().sum()) > 0 for i in (0, 2))
    batch = batches_of(other_rollouts, RLConfig(dtype="float32"))[0]
    replayed = routes_to_replay(batch.rollouts, batch.row, model.config, len(batch.row.tokens), None)
    with torch.no_grad():
        with ops.recorded_routes() as own:
            model(batch.row.tokens, batch.row.positions, batch.row.attend())
        with ops.recorded_routes() as recorded, ops.replayed_routes(replayed):
            model(batch.row.tokens, batch.row.positions, batch.row.attend())
    for chosen, wanted in zip(recorded, replayed.chosen, strict=True):
        assert torch.equal(chosen[replayed.rows].long().sort(-1).values, wanted.sort(-1).values)
    rows = torch.ones(len(batch.row.tokens), dtype=torch.bool)
    rows[replayed.rows] = False
    assert rows.any() and torch.equal(own[0][rows], recorded[0][rows])


@pytest.mark.parametrize("scoring", routing.SCORINGS)
def test_gradients_of_a_replayed_route_are_those_of_its_weights(scoring):
    settings = ops.Routing(3, scoring, scale=1.7)
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(6, 8, generator=generator, requires_grad=True)
    grad = torch.randn(6, 3, generator=generator)
    rows = torch.tensor([1, 4])
    given = torch.stack([logits[r].topk(3, largest=False).indices for r in rows])
    with ops.replayed_routes(ops.ReplayedRoutes(rows, [given])) as _:
        weights, chosen = ops.route(logits, settings)
    (got,) = torch.autograd.grad(weights, logits, grad)
    scores = torch.sigmoid(logits) if scoring == "sigmoid" else logits
    own = scores.gather(1, chosen)
    if scoring == "sigmoid":
        expected = own / own.sum(-1, keepdim=True)
    else:
        expected = torch.softmax(logits, -1).gather(1, chosen) if scoring == "softmax" else torch.softmax(own, -1)
    torch.testing.assert_close(weights, expected * 1.7)
    torch.testing.assert_close(got, torch.autograd.grad(expected * 1.7, logits, grad)[0])
    assert torch.equal(chosen[rows].sort(-1).values, given.sort(-1).values)
    plain = ops.route(logits.detach(), settings)
    others = torch.tensor([0, 2, 3, 5])
    assert torch.equal(weights[others], plain[0][others]) and torch.equal(chosen[others], plain[1][others])


@pytest.mark.parametrize(
    "recompute",
    [
        pytest.param(RecomputeConfig("full"), marks=pytest.mark.slow, id="full"),
        pytest.param(RecomputeConfig("selective", keep=("linear", "route")), marks=pytest.mark.slow, id="selective"),
        pytest.param(RecomputeConfig("budget", budget_gib=0.001), id="budget"),
    ],
)
def test_layers_that_are_computed_again_record_their_routes_once_and_replay_the_same(
    recompute, rollouts, other_rollouts
):
    model = mixture()
    expected = gradients_of(model, other_rollouts, router_replay=True)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    apply_recompute(model, recompute)
    found = gradients_of(model, other_rollouts, router_replay=True)
    assert found.metrics() == expected.metrics() and expected.metrics()["routes/different"] > 0
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())
    parity = gradients_of(model, rollouts).parity
    assert (parity.routes_checked, parity.routes_different) == (sum(r.num_sampled for r in rollouts), 0)


def test_replay_without_experts_or_routes_is_refused(tmp_path, model_folder, rollouts):
    settings = {"model": str(model_folder), "output": str(tmp_path / "run"), "environment": "digit_sum"}
    config = RLConfig(**settings, router_replay=True, steps=1)
    with pytest.raises(UserError, match="router_replay is set, but .* has no experts"):
        reinforce(config)
    with pytest.raises(UserError, match="a rollout lacks routes for all its tokens and layers"):
        gradients_of(mixture(), [replace(rollout, routes=[]) for rollout in rollouts], router_replay=True)


def run_of(folder, **settings):
    """Of `LONG`, in the folder `model`: the metrics of two steps, and the rollouts of the second."""
    save_model(build_model(LONG, "float32", seed=0), folder / "model")
    ByteTokenizer().save(folder / "model")
    settings = dict(environment="digit_sum", checkpoint=CheckpointConfig()) | settings
    run = reinforce(small_config(folder / "run", folder / "model", **settings))
    return steps_of(run), rollouts_of(run, 2)


def test_a_run_checks_every_route_and_replaying_them_changes_no_bit(tmp_path):
    without, digests = run_of(tmp_path / "without")
    with_replay, whole = run_of(tmp_path / "with", router_replay=True)
    for step in without:
        assert step["parity/routes_checked"] == step["parity/tokens_checked"] > 0
        assert step["parity/routes_different"] == step["parity/tokens_different"] == 0
    assert all(read_route(route, LONG) is None for line in digests for route in line["routes"])
    assert [step["loss"] for step in with_replay] == [step["loss"] for step in without]
    assert all(step["routes/different"] == 0 for step in with_replay)
    assert all(read_route(route, LONG) is not None for line in whole for route in line["routes"])


@pytest.mark.slow
def test_a_compiled_run_checks_the_route_of_every_token(tmp_path):
    metrics, _ = run_of(tmp_path, compile=CompileConfig(backend="inductor"))
    for step in metrics:
        assert step["parity/routes_checked"] == step["parity/tokens_checked"] > 0
        assert step["parity/routes_different"] == step["parity/tokens_different"] == 0


def test_a_server_says_the_routes_that_an_engine_here_says(tmp_path):
    save_model(mixture(LONG), tmp_path)
    ByteTokenizer().save(tmp_path)
    params = SamplingParams(max_tokens=9, n=2, seed=1, routes="digest", ignore_eos=True)
    (expected,) = Engine(mixture(LONG), EngineConfig(cache_tokens=1024)).generate([[5, 6, 7]], params)
    body = dict(prompt=[5, 6, 7], n=2, max_tokens=9, seed=1, ignore_eos=True, return_token_ids=True)
    with running_server(tmp_path) as server:
        answer = server.complete(**body, return_routes="digest").json()
        whole = server.complete(**body, return_routes="whole").json()
        without = server.complete(**body).json()
        wrong = server.complete(**body, return_routes=True)
        alone = server.complete(**body | {"return_token_ids": False}, return_routes="digest")
    assert [choice["routes"] for choice in answer["choices"]] == [c.routes for c in expected]
    assert [list(map(shortened, choice["routes"])) for choice in whole["choices"]] == [c.routes for c in expected]
    assert all(choice["routes"] != other["routes"] for choice, other in zip(answer["choices"], whole["choices"]))
    assert not any("routes" in choice for choice in without["choices"])
    assert wrong.status_code == 400 and "return_routes" in wrong.text
    assert alone.status_code == 400 and "also set return_token_ids: true" in alone.json()["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["process", "http"])
def test_digests_travel_and_whole_routes_where_they_are_replayed(tmp_path, monkeypatch, way):
    monkeypatch.setenv("LOCKSTEP_ADMIN_KEY", "secret")
    for name, replays in (("digests", False), ("whole", True)):
        (tmp_path / name).mkdir()
        save_model(build_model(LONG, "float32", seed=0), tmp_path / name / "model")
        ByteTokenizer().save(tmp_path / name / "model")
        served = running_server(tmp_path / name / "model", admin_key="secret") if way == "http" else nullcontext()
        with served as server:
            actors = ActorsConfig(urls=(server.url,)) if server else ActorsConfig(generators=1, threads=1)
            metrics, lines = run_of(tmp_path / name, actors=actors, router_replay=replays)
        for step in metrics:
            checked = step.get("parity/routes_checked")
            assert checked == (None if replays else step["parity/tokens_checked"])
            assert step["routes/different" if replays else "parity/routes_different"] == 0
        assert all((read_route(r, LONG) is not None) == replays for line in lines for r in line["routes"])
