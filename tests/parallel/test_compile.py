"""Compiled once for both sides: the bits of trainer and generator agree, and nothing compiles again.

The engine's own property tests also run compiled (`tests/generate/test_engine.py`).
"""

import os
import stat
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from lockstep import Engine, EngineConfig, SamplingParams, build_model, ops, score
from lockstep.cache import UnsafeCache
from lockstep.config import CompileConfig, ParallelConfig, TrainConfig
from lockstep.data import ByteTokenizer
from lockstep.errors import UserError
from lockstep.model import initialize, preset, resolve_dtype, save_model
from lockstep.ops.opaque import library
from lockstep.parallel import apply_compile, close_world, generator_model, open_world, parallel_model
from lockstep.parallel.compile import keep_artifacts
from lockstep.precision import Precision
from lockstep.rl.scoring.parity_check import check_parity
from lockstep.train import Trainer, pack
from lockstep.train.packing import target_log_probs
from tests.parallel.hybrids import HYBRID
from tests.parallel.launch import launch
from tests.parallel.training import whole

INDUCTOR = CompileConfig(backend="inductor")


@pytest.fixture(scope="module", params=["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def model(request):
    model = build_model(replace(preset("qwen3:micro", 258), num_layers=2), dtype=request.param, seed=0)
    apply_compile(model, INDUCTOR)
    return model


@pytest.mark.slow
def test_compiled_trainer_and_generator_agree_under_a_mixed_load(model):
    parity, load = check_parity(model, tokens=1500)
    assert parity.tokens_different == 0 and parity.tokens_checked >= 1500
    assert load["preemptions"] > 0 and load["reused prompt tokens"] > 0


def test_a_compiled_forward_with_a_gradient_has_the_bits_of_one_without_and_a_gradient_near_the_eager_one(model):
    row = pack([[1, 2, 3, 4, 5], list(range(40))])
    with torch.no_grad():
        expected = target_log_probs(model, row)[0]
    log_probs = target_log_probs(model, row)[0]
    assert torch.equal(log_probs.detach(), expected)
    log_probs.sum().backward()
    eager = build_model(model.config, dtype=model.dtype, seed=0)
    target_log_probs(eager, row)[0].sum().backward()
    for (name, compiled), plain in zip(model.named_parameters(), eager.parameters()):
        # Both sum in their dtype's own precision, in other orders.
        tolerance = 1e-4 if model.dtype == torch.float32 else 3e-2
        difference = (compiled.grad.float() - plain.grad.float()).norm() / plain.grad.float().norm()
        assert difference < tolerance, name
    model.zero_grad()


def test_a_step_of_the_trainer_is_seen_by_the_compiled_generator(model):
    trainer = Trainer(model, TrainConfig(learning_rate=1e-2, warmup_steps=0), 1)
    engine = Engine(model, EngineConfig(cache_tokens=512))
    params = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    before = engine.generate([[1, 2, 3]], params)[0][0]
    trainer.step([pack([list(range(30))])], lambda m, row: -target_log_probs(m, row)[0].mean())
    engine.weights_changed(1)
    after = engine.generate([[1, 2, 3]], params)[0][0]
    assert after.logprobs != before.logprobs
    assert torch.equal(score(model, [[1, 2, 3, *after.token_ids]])[0][2:], torch.tensor(after.logprobs))


def test_compiling_again_in_steady_state_is_an_error_that_names_the_guard(model):
    norm = model.layers[0].input_layernorm
    eps, norm.eps = norm.eps, 1e-3
    try:
        with pytest.raises(torch._dynamo.exc.RecompileError, match="eps"):
            model(torch.tensor([1, 2]), torch.tensor([0, 1]), ops.PackedAttention([2]))
    finally:
        norm.eps = eps


def test_a_width_that_compiled_loops_cannot_treat_evenly_is_refused_by_name():
    narrow = build_model(replace(preset("llama3:micro", 50), dim=48), dtype="float32")
    with pytest.raises(UserError, match=r"does not work with dim 48 .* compile.backend = \"none\""):
        apply_compile(narrow, INDUCTOR)


@pytest.mark.parametrize(
    "trains, with_one", [pytest.param(True, "with one", marks=pytest.mark.slow), (False, "without one")]
)
def test_a_compiler_that_changes_bits_with_the_number_of_rows_is_refused(trains, with_one, monkeypatch):
    from lockstep.parallel.compile import CompiledHalves

    exact = CompiledHalves.after_attention
    # No compiler at hand is this bad, so one is made: it adds what depends on the number of rows.
    monkeypatch.setattr(
        CompiledHalves, "after_attention", lambda self, b, h, a, g: exact(self, b, h, a, g) + h.shape[0] * 1e-2
    )
    said = f"the block's output of .* rows without a gradient differ from those of 96 rows {with_one};"
    with pytest.raises(UserError, match=said):
        apply_compile(build_model(preset("qwen3:micro", 258), dtype="float32"), INDUCTOR, trains)


def test_a_model_that_only_samples_is_compiled_without_gradients():
    # A width of its own: what other tests of this process have compiled would be found.
    model = build_model(replace(preset("qwen3:micro", 258), intermediate_size=96, num_layers=1), dtype="float32")
    apply_compile(model, INDUCTOR, trains=False)
    (completions,) = Engine(model).generate([[1, 2, 3]], SamplingParams(max_tokens=4, seed=1, ignore_eos=True))
    assert len(completions[0].token_ids) == 4
    with pytest.raises(torch._dynamo.exc.RecompileError, match="grad_mode"):
        model(torch.tensor([1, 2]), torch.tensor([0, 1]), ops.PackedAttention([2]))


def test_layers_in_different_formats_are_compiled():
    """The first and the last layer of a mixture are not quantized."""
    shape = preset("qwen3_moe:micro", 258)
    model = build_model(replace(shape, num_layers=3, precision=Precision("int8")), dtype="float32")
    apply_compile(model, INDUCTOR, trains=False)
    (completions,) = Engine(model).generate([[1, 2, 3]], SamplingParams(max_tokens=4, seed=1, ignore_eos=True))
    assert len(completions[0].token_ids) == 4


@pytest.mark.parametrize("trains", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_each_kind_of_a_hybrids_layers_is_compiled_once_for_trainer_and_generator(trains):
    model = build_model(replace(HYBRID, num_layers=4), dtype="float32", seed=0)
    apply_compile(model, INDUCTOR, trains)
    prompt = list(range(60))
    # Across a boundary of chunks; anything that compiled again would be an error.
    ((sampled,),) = Engine(model).generate([prompt], SamplingParams(max_tokens=9, seed=1, ignore_eos=True))
    scores = score(model, [prompt + sampled.token_ids])[0]
    assert torch.equal(scores[59:], torch.tensor(sampled.logprobs))
    if not trains:
        return
    log_probs = target_log_probs(model, pack([prompt + sampled.token_ids]))[0]
    assert torch.equal(log_probs.detach(), scores)
    log_probs.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_compiled_code_is_kept_in_the_users_cache_for_each_set_of_operators_and_for_its_owner_only(
    tmp_path, monkeypatch
):
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before, folders = os.umask(0), []
    try:
        for another in range(2):
            monkeypatch.setattr(library, "schemas", [f"another{another}(Tensor x) -> Tensor"])
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # as importing torch._dynamo does
            folders.append(keep_artifacts())
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folders[-1])
    finally:
        os.umask(before)
    assert folders[0] != folders[1]
    for folder in folders:
        assert folder.parent == tmp_path / "lockstep" and stat.S_IMODE(folder.stat().st_mode) == 0o700
    folders[0].chmod(0o777)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folders[0]))
    with pytest.raises(UnsafeCache, match="other users can write to it .*TORCHINDUCTOR_CACHE_DIR"):
        keep_artifacts()


def compiled_on(ranks, dtype):
    """Hidden states and gradients of a compiled model, of lone tokens too, and what its engine samples."""
    parallel = ParallelConfig(tensor=ranks, reduction_chunks=2)
    world = open_world(parallel, "cpu")
    shape = preset("qwen3_moe:micro", 259)
    kind = resolve_dtype(dtype)
    model = parallel_model(shape, kind, world, parallel, INDUCTOR, partial(initialize, seed=3))
    found = []
    for length in (2, 8, 62):  # of 2 tokens each rank has one
        tokens = torch.arange(length)
        hidden = model(tokens, tokens, ops.PackedAttention([length]))
        found.append(hidden.detach())
    # After the last norm a gradient is each rank's part of a sum.
    ((hidden * torch.linspace(-1, 1, hidden.shape[1])).sum() / ranks).backward()
    gradients = {name: whole(p.grad).float() for name, p in model.named_parameters()}
    if ranks > 1:
        with pytest.raises(UserError, match="sharded over data ranks.*generator_model"):
            Engine(model)
    model = generator_model(shape, kind, world, parallel, partial(initialize, seed=3))
    apply_compile(model, INDUCTOR, trains=False)
    engine = Engine(model, EngineConfig(max_tokens_per_step=37, cache_tokens=512))
    sampled = engine.generate([[1], list(range(40)), [5, 6, 7]], SamplingParams(max_tokens=9, seed=1, n=2))
    close_world(world)
    return found, gradients, [(c.token_ids, c.logprobs) for group in sampled for c in group]


SHORT_RL = ["rl", "--environment", "digit_sum", "--prompts-per-step", "2", "--max-new-tokens", "4"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [["pretrain"], SHORT_RL, [*SHORT_RL, "--actors.generators", "1", "--actors.threads", "1", "--lora.rank", "4"]],
)
def test_a_run_compiles_nothing_that_the_compile_command_has_compiled(options, tmp_path):
    compiled, kept, model = tmp_path / "compiled", [], tmp_path / "model"
    tokenizer = ByteTokenizer()
    save_model(build_model(preset("qwen3:micro", tokenizer.vocab_size, (tokenizer.eos_id,)), "float32"), model)
    tokenizer.save(model)
    run = [*options, "--model", str(model), "--steps", "1", "--device", "cpu", "--output", str(tmp_path / "run")]
    for command in (["compile", *run], [*run, "--compile.backend", "inductor"]):
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(compiled)}
        subprocess.run([sys.executable, "-m", "lockstep", *command], env=environment, check=True)
        kept.append({path for path in compiled.rglob("*") if path.is_file()})
    assert len(kept[0]) > 10 and kept[1] == kept[0]


@pytest.mark.slow  # rl/scoring/test_parity_matrix.py compiles dense models on ranks in every run
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_ranks_have_the_bits_of_one_compiled_process(dtype):
    (alone,) = launch(1, compiled_on, 1, dtype, seconds=400)
    for rank in launch(2, compiled_on, 2, dtype, seconds=400):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(rank[0], alone[0]))
        assert rank[2] == alone[2]
        for weight, expected in alone[1].items():
            tolerance = 1e-5 if dtype == "float32" else 2e-2
            assert (rank[1][weight] - expected).norm() / expected.norm() < tolerance, weight
