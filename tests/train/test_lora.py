"""Low-rank adapters: one forward for trainer and generator, `peft`'s layout, runs that resume, and what is refused."""

import json
import random
import shutil
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lockstep import Engine, EngineConfig, SamplingParams, load_model, score
from lockstep.checkpoint import model_folder as newest_folder
from lockstep.checkpoint.convert import convert
from lockstep.cli import main
from lockstep.config import (
    ActorsConfig,
    CheckpointConfig,
    CompileConfig,
    DPOConfig,
    LoraConfig,
    ParallelConfig,
    RewardModelConfig,
    RLConfig,
    SFTConfig,
    TrainConfig,
)
from lockstep.data import load_tokenizer
from lockstep.data.chat import load_chat_template
from lockstep.errors import UserError
from lockstep.model import ModelConfig, adapter_off, build_model, lora_of, preset, save_adapter, save_model
from lockstep.model.adapted_rows import AdaptedRows, adapted
from lockstep.model.adapters import build_adapter, load_adapter
from lockstep.observe import read_metrics
from lockstep.parallel import apply_compile
from lockstep.parallel.refusals import refuse_generators, refuse_impossible
from lockstep.parallel.world import AXES, World
from lockstep.rl.generators.open import open_policy
from lockstep.rl.reinforce import reinforce
from lockstep.train.dpo import prefer
from lockstep.train.expert_balance import balance_problems
from lockstep.train.optimizer import MasterOptimizer
from lockstep.train.packing import pack, pack_scored, target_log_prob_sum, target_scores
from lockstep.train.reward_model import train_reward_model
from lockstep.train.sft import finetune
from tests.data.test_end_tokens import write_tokenizer
from tests.parallel.launch import launch
from tests.train.runs import logged, write_lines

SHAPE = ModelConfig(
    family="qwen3", vocab_size=120, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
    intermediate_size=96, qk_norm="head", max_positions=512, eos_token_ids=(7,),
)  # fmt: skip
SEQUENCE = [list(range(5, 45))]


@cache
def _model(dtype, backend="none"):
    """Random weights, and an adapter that has moved."""
    model = build_model(replace(SHAPE, lora=lora_of(SHAPE, 4, 8.0, ("*_proj",))), dtype, seed=2)
    _move(model)
    apply_compile(model, CompileConfig(backend=backend))
    return model


def _move(model):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def _differences(model, seed, tokens_per_step):
    draw = random.Random(seed)
    common = [draw.randrange(120) for _ in range(40)]
    prompts = [common[: draw.choice([0, 20, 40])] + [draw.randrange(120)] * draw.randint(1, 30) for _ in range(5)]
    params = SamplingParams(max_tokens=12, temperature=0.9, n=2, seed=seed)
    engine = Engine(model, EngineConfig(max_tokens_per_step=tokens_per_step, max_sequences=4, cache_tokens=1024))
    different = 0
    for prompt, group in zip(prompts, engine.generate(prompts, params)):
        for completion in group:
            (scores,) = score(model, [prompt + completion.token_ids], 0.9)
            different += not torch.equal(scores[len(prompt) - 1 :], torch.tensor(completion.logprobs))
    return different


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        ("bfloat16", "none"),
        pytest.param("float32", "none", marks=pytest.mark.slow),
        *(pytest.param(dtype, "inductor", marks=pytest.mark.slow) for dtype in ("float32", "bfloat16")),
    ],
)
@settings(max_examples=3)
@given(seed=st.integers(0, 10_000), tokens_per_step=st.sampled_from([16, 37, 256]))
def test_the_engine_has_the_trainers_bits_with_an_adapter(dtype, backend, seed, tokens_per_step):
    assert _differences(_model(dtype, backend), seed, tokens_per_step) == 0


def test_a_fresh_adapter_changes_nothing_and_one_switched_off_is_the_base():
    base = build_model(SHAPE, "bfloat16", seed=2)
    fresh = build_model(replace(SHAPE, lora=lora_of(SHAPE, 4, 8.0, ("q_proj", "layers.1.mlp.*"))), "bfloat16", seed=2)
    (expected,) = score(base, SEQUENCE)
    assert torch.equal(score(fresh, SEQUENCE)[0], expected)
    assert all(parameter.requires_grad == ("lora_" in name) for name, parameter in fresh.named_parameters())
    _move(fresh)
    assert not torch.equal(score(fresh, SEQUENCE)[0], expected)
    with adapter_off(fresh):
        assert torch.equal(score(fresh, SEQUENCE)[0], expected)


@pytest.fixture(scope="module")
def made_by_peft(tmp_path_factory):
    """A base, and an adapter that `peft` has made for it."""
    folder = tmp_path_factory.mktemp("peft")
    save_model(build_model(SHAPE, "float32", seed=2), folder / "base")
    settings = PeftConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "base"), settings)
    _move(theirs)
    theirs.save_pretrained(folder / "adapter")
    return folder, theirs


@pytest.mark.parametrize(
    ("family", "targets"),
    [("phi3", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]), ("nanochat", ["q_proj", "o_proj", "fc1", "fc2"])],
)
def test_an_adapter_of_other_projections_than_llamas_travels_to_peft_and_back(tmp_path, family, targets):
    shape = replace(preset(f"{family}:micro", 120), num_layers=2, eos_token_ids=(7,))
    save_model(build_model(shape, "float32", seed=2), base := tmp_path / "base")
    settings = PeftConfig(r=3, lora_alpha=5, target_modules=targets, task_type="CAUSAL_LM")
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    _move(theirs)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = load_model(tmp_path / "adapter")
    assert len(ours.config.lora.modules) == 8
    # float32 sums in another order.
    torch.testing.assert_close(score(ours, SEQUENCE)[0], _their_scores(theirs), rtol=0, atol=1e-5)
    with theirs.disable_adapter():
        assert (_their_scores(theirs) - score(ours, SEQUENCE)[0]).abs().max() > 1e-3
    save_adapter(ours, tmp_path / "again", base)
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "again")
    assert torch.equal(_their_scores(again), _their_scores(theirs))
    convert(tmp_path / "adapter", tmp_path / "merged", merge=True)
    # The update is rounded into the weight once; float32 has 24 bits.
    merged = score(load_model(tmp_path / "merged"), SEQUENCE)[0]
    torch.testing.assert_close(merged, score(ours, SEQUENCE)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_an_adapter_of_the_head_travels_to_peft_and_back(tmp_path, tied, caplog):
    save_model(build_model(replace(SHAPE, tie_embeddings=tied), "float32", seed=2), base := tmp_path / "base")
    settings = PeftConfig(r=3, lora_alpha=5, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    _move(theirs)
    theirs.save_pretrained(tmp_path / "adapter")  # with a copy of the base's head
    theirs.save_pretrained(tmp_path / "alone", save_embedding_layers=False)
    ours = load_model(tmp_path / "adapter")
    assert "lm_head" in ours.config.lora.modules and ours.config.tie_embeddings == tied
    expected = score(ours, SEQUENCE)[0]
    # float32 sums in another order.
    torch.testing.assert_close(expected, _their_scores(theirs), rtol=0, atol=1e-5)
    assert torch.equal(score(load_model(tmp_path / "alone"), SEQUENCE)[0], expected)
    outside = load_adapter(tmp_path / "adapter", plain := load_model(base), base)
    with adapted([AdaptedRows(outside)]):
        assert torch.equal(score(plain, SEQUENCE)[0], expected)
    save_adapter(ours, tmp_path / "again", base)
    written, first = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("again", "alone"))
    assert written.keys() == first.keys() and all(torch.equal(first[name], value) for name, value in written.items())
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "again")
    assert torch.equal(_their_scores(again), _their_scores(theirs))
    convert(tmp_path / "adapter", tmp_path / "merged", merge=True)
    merged = load_model(tmp_path / "merged")
    assert not merged.config.tie_embeddings and torch.equal(merged.embed_tokens.weight, plain.embed_tokens.weight)
    assert not caplog.records, "the merged folder says that its head is not tied"
    # The update is rounded into the weight once; float32 has 24 bits.
    torch.testing.assert_close(score(merged, SEQUENCE)[0], expected, rtol=0, atol=1e-5)
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(_their_scores(alone), _their_scores(theirs), rtol=0, atol=1e-5)
    file, name = tmp_path / "adapter" / "adapter_model.safetensors", "base_model.model.lm_head.base_layer.weight"
    save_file(load_file(file) | {name: torch.zeros(120, 64)}, file, metadata={"format": "pt"})
    message = f"{name} has other values than {'model.embed_tokens' if tied else 'lm_head'}.weight in"
    with pytest.raises(UserError, match=message):
        load_model(tmp_path / "adapter")
    with pytest.raises(UserError, match=message):
        load_adapter(tmp_path / "adapter", plain, base)


def test_an_adapter_of_the_embedding_is_refused(tmp_path):
    save_model(build_model(SHAPE, "float32", seed=2), tmp_path / "base")
    # peft adapts the tied embedding and shares its matrices with the head.
    settings = PeftConfig(r=3, target_modules=["lm_head"], ensure_weight_tying=True, task_type="CAUSAL_LM")
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), settings)
    theirs.save_pretrained(tmp_path / "adapter")
    with pytest.raises(UserError, match=r"tensor .*embed_tokens.lora_embedding_A is not the LoRA matrix of a layer"):
        load_model(tmp_path / "adapter")


@pytest.fixture
def folders(made_by_peft, tmp_path):
    """A copy of base and adapter that a test may change."""
    shutil.copytree(made_by_peft[0], tmp_path, dirs_exist_ok=True)
    _change(tmp_path / "adapter", base_model_name_or_path=str(tmp_path / "base"))
    return tmp_path / "base", tmp_path / "adapter"


def _change(adapter, **settings):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def _their_scores(theirs):
    with torch.no_grad():
        log_probs = theirs(torch.tensor(SEQUENCE)).logits[0].log_softmax(-1)
    return log_probs[:-1].gather(1, torch.tensor(SEQUENCE[0][1:])[:, None])[:, 0]


def test_adapters_travel_to_peft_and_back_and_a_merged_one_is_a_model_of_its_own(made_by_peft, tmp_path):
    folder, theirs = made_by_peft
    base, adapter = folder / "base", folder / "adapter"
    ours = load_model(adapter)
    # float32 sums in another order.
    torch.testing.assert_close(score(ours, SEQUENCE)[0], _their_scores(theirs), rtol=0, atol=1e-5)
    save_adapter(ours, tmp_path / "again", base)
    written, first = (load_file(each / "adapter_model.safetensors") for each in (tmp_path / "again", adapter))
    assert written.keys() == first.keys() and all(torch.equal(first[name], value) for name, value in written.items())
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "again")
    assert torch.equal(_their_scores(again), _their_scores(theirs))
    assert not (tmp_path / "again" / "config.json").exists()
    convert(adapter, tmp_path / "merged", merge=True)
    merged = load_model(tmp_path / "merged")
    assert merged.config.lora is None
    # The update is rounded into the weight once; float32 has 24 bits.
    torch.testing.assert_close(score(merged, SEQUENCE)[0], score(ours, SEQUENCE)[0], rtol=0, atol=1e-5)
    with pytest.raises(UserError, match="is an adapter; give --merge"):
        convert(adapter, tmp_path / "other")
    with pytest.raises(UserError, match="is not an adapter, so there is nothing to merge"):
        convert(base, tmp_path / "other", merge=True)


@pytest.mark.parametrize(
    "command",
    [pytest.param("sft", marks=pytest.mark.slow), "dpo", pytest.param("reward-model", marks=pytest.mark.slow)],
)
def test_peft_loads_the_adapter_that_a_run_saves(tmp_path, model_folder, command):
    if command == "sft":
        run = finetune(_sft(tmp_path, model_folder, dtype="float32", steps=2))
    else:
        pairs = [{"prompt": f"Say {i}.", "chosen": f" {i}", "rejected": " no"} for i in range(40)]
        kind, train = (DPOConfig, prefer) if command == "dpo" else (RewardModelConfig, train_reward_model)
        data = write_lines(tmp_path / "pairs.jsonl", pairs)
        run = train(kind(**vars(_sft(tmp_path, model_folder, dtype="float32", steps=2, data=data))))
    folder = newest_folder(run)
    ours = load_model(folder, dtype="float32")
    assert ours.config.lora.scaling == 4.0  # alpha 16 / rank 4, as the run computed
    if command == "reward-model":
        base = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1, dtype=torch.float32)
        theirs = PeftModel.from_pretrained(base, folder)
        with torch.no_grad():
            expected = theirs(torch.tensor(SEQUENCE)).logits[0]
            found = target_scores(ours, pack_scored([[*SEQUENCE[0], 0]], [[len(SEQUENCE[0])]]))
    else:
        base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        theirs = PeftModel.from_pretrained(base, folder)
        expected, found = _their_scores(theirs), score(ours, SEQUENCE)[0]
        with theirs.disable_adapter():
            assert (_their_scores(theirs) - expected).abs().max() > 1e-3
    # float32 sums in another order.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_tokenizer_and_template_are_those_of_one_folder(tmp_path, folders):
    base, adapter = folders
    write_tokenizer(base, special=["<|endoftext|>"])
    (base / "chat_template.jinja").write_text("base: {{ messages[0].content }}")
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text("base with tools")
    (base / "generation_config.json").write_text('{"temperature": 0.5}')

    def rendered(folder):
        template = load_chat_template(folder)
        return [template.render([{"role": "user", "content": "hi"}], tools=tools) for tools in (None, [{}])]

    convert(adapter, tmp_path / "merged", merge=True)
    assert rendered(adapter) == rendered(tmp_path / "merged") == rendered(base) == ["base: hi", "base with tools"]
    write_tokenizer(adapter, "adapter: {{ messages[0].content }}")
    convert(adapter, tmp_path / "again", merge=True)
    assert rendered(adapter) == rendered(tmp_path / "again") == ["adapter: hi"] * 2
    assert load_tokenizer(tmp_path / "again").vocab_size == load_tokenizer(adapter).vocab_size > 257
    assert json.loads((tmp_path / "again" / "generation_config.json").read_text())["temperature"] == 0.5


def test_an_adapter_for_another_base_is_named(tmp_path, folders):
    base, adapter = folders
    save_adapter(load_model(adapter), tmp_path / "own", base)
    save_model(build_model(SHAPE, "float32", seed=3), base)
    with pytest.raises(UserError, match="for other weights than those in .*: their digest is [0-9a-f]{32}, but that"):
        load_model(tmp_path / "own")
    save_model(build_model(replace(SHAPE, dim=96), "float32"), base)
    with pytest.raises(UserError, match=r"lora_B.weight has shape \[64, 3\], but rank 3 with the 96 x 96 matrix"):
        load_model(adapter)
    save_model(build_model(replace(SHAPE, num_layers=1), "float32"), base)
    with pytest.raises(UserError, match=r"another base: it adapts layers.1.*, which .* does not have"):
        load_model(adapter)
    (base / "config.json").unlink()  # as in a run's folder
    missing = "its base was not found .* say where it is with --base DIR"
    with pytest.raises(UserError, match=f"^{adapter}: {missing}"):
        load_model(adapter)
    shutil.rmtree(base)
    with pytest.raises(UserError, match=f"^{adapter}: {missing}"):
        load_model(adapter)


def test_adapters_of_other_kinds_are_refused_and_settings_that_change_nothing_are_read(folders):
    adapter = folders[1]
    expected, file = load_model(adapter).config, adapter / "adapter_config.json"
    unchanged = file.read_text()
    _change(adapter, lora_dropout=0.1, qalora_group_size=8, layers_pattern="layers", auto_mapping={"a": "b"}, new={})
    assert load_model(adapter).config == expected
    for change, message in (
        ({"use_dora": True}, "use_dora is True"),
        ({"r": 0}, "r is 0"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', which changes the base"),
        ({"lora_alpha": float("inf")}, "lora_alpha inf"),
        ({"rank_pattern": {"a": 1}, "target_parameters": ["mlp.experts.down_proj"]}, "target_parameters is .*; merge"),
        ({"use_dorra": True}, 'key use_dorra is not known; .* Did you mean "use_dora"'),
        # peft leaves the tensors of other layers out, with a warning at most.
        ({"target_modules": ["nothing"]}, "target_modules does not select model.layers"),
        ({"exclude_modules": ["q_proj"]}, "exclude_modules does not select model.layers"),
        ({"layers_to_transform": 0}, "layers_to_transform does not select model.layers"),
    ):
        file.write_text(unchanged)
        _change(adapter, **change)
        with pytest.raises(UserError, match=message):
            load_model(adapter)
    file.write_text(unchanged)
    for change, message in (
        ({"eos_token_ids": ["7"]}, r"eos_token_ids is \['7'\]; it must be a list of whole numbers"),
        ({"bos_token_id": True}, "bos_token_id is True; it must be a whole number or null"),
        ({"reduction_chunks": 3}, r"cannot be used \(model: reduction_chunks is 3; it must be a power of two"),
    ):
        (adapter / "lockstep.json").write_text(json.dumps(change))
        with pytest.raises(UserError, match=f"^{adapter}/lockstep.json: {message}"):
            load_model(adapter)


def test_impossible_adapters_are_refused():
    with pytest.raises(
        UserError, match=r'lora.targets "wq" matches no linear layer; the layers are down_proj, .*q_proj'
    ):
        lora_of(SHAPE, 4, 8.0, ("q_proj", "wq"))
    with pytest.raises(UserError, match="lora.rank is 65, but .* is .*64.*; give 1 to 64"):
        lora_of(SHAPE, 65, 8.0, ("q_proj",))
    with pytest.raises(UserError, match="stacked experts have no adapters"):
        lora_of(preset("qwen3_moe:micro"), 4, 8.0, ("*.experts.*",))
    adapted = replace(SHAPE, reduction_chunks=2, lora=lora_of(SHAPE, 4, 8.0, ("q_proj",)))
    with pytest.raises(UserError, match="parallel.tensor 2 does not work with a low-rank adapter yet"):
        refuse_impossible(adapted, dict.fromkeys(AXES, 1) | {"tensor": 2}, ParallelConfig())
    with pytest.raises(UserError, match="actors.tensor 2 does not work with a low-rank adapter"):
        refuse_generators(adapted, 2)
    refuse_generators(replace(adapted, lora=None), 2)
    with pytest.raises(UserError, match='"lm_head" matches no linear layer'):
        lora_of(replace(SHAPE, score_head=True, tie_embeddings=False), 4, 8.0, ("lm_head",))
    assert lora_of(SHAPE, 4, 8.0, ("*_proj", "lm_head")).modules[-1] == "lm_head"
    assert "lm_head" not in lora_of(SHAPE, 4, 8.0, LoraConfig().targets).modules
    shape = preset("deepseek_v3:micro", 128)
    shape = replace(shape, lora=lora_of(shape, 2, 16.0, ("o_proj",)))
    (problem,) = balance_problems(TrainConfig(router_bias_rate=0.1), shape)
    assert "router_bias_rate changes weights of the base" in problem


def _sft(tmp_path, model, **changes):
    lines = [{"prompt": f"Say {i}.", "completion": f" {i}"} for i in range(40)]
    defaults = dict(
        output=str(tmp_path / "run"), model=str(model), data=write_lines(tmp_path / "data.jsonl", lines), steps=3,
        tokens_per_step=128, sequence_length=64, lora=LoraConfig(rank=4), checkpoint=CheckpointConfig(every=2),
        train=TrainConfig(learning_rate=1e-2, warmup_steps=0, schedule="constant", tokens_per_microbatch=64),
    )  # fmt: skip
    return SFTConfig(**(defaults | changes))


def _adapter(run):
    return load_file(newest_folder(run) / "adapter_model.safetensors")


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_fine_tuning_resumes_with_the_same_bits_and_saves_the_adapter_alone(tmp_path, model_folder, dtype, capsys):
    shutil.copytree(model_folder, base := tmp_path / "base")
    config = _sft(tmp_path, base, dtype=dtype)
    whole = finetune(config)
    assert logged(whole)[-1] < logged(whole)[0]
    checkpoint = newest_folder(whole)
    assert not list(checkpoint.glob("model*")) and not (checkpoint / "config.json").exists()
    finetune(again := replace(config, output=str(tmp_path / "again"), steps=2))
    for other, message in (
        (LoraConfig(rank=4, alpha=64.0), "was trained with lora.alpha 16.0, not 64.0"),
        (LoraConfig(rank=4, targets=("q_proj",)), r"was trained with lora.targets \['layers.0.mlp.down_proj"),
    ):
        with pytest.raises(UserError, match=message):
            finetune(replace(again, steps=3, resume=True, lora=other))
    finetune(replace(again, steps=3, resume=True))
    first, second = _adapter(whole), _adapter(tmp_path / "again")
    assert len(first) == 28 and all(torch.equal(second[name], value) for name, value in first.items())
    assert main(["parity", "--model", str(whole), "--tokens", "50"]) == 0
    assert "Tokens different  : 0" in capsys.readouterr().out
    with pytest.raises(UserError, match="is already an adapter of rank 4"):
        finetune(_sft(tmp_path, whole, output=str(tmp_path / "more")))
    # Without a rank the adapter itself is trained on.
    more = finetune(_sft(tmp_path, whole, output=str(tmp_path / "more"), lora=LoraConfig(), steps=1, dtype=dtype))
    moved = _adapter(more)
    assert moved.keys() == first.keys() and any(not torch.equal(moved[name], value) for name, value in first.items())
    file = base / "model.safetensors"
    save_file({name: 2 * value for name, value in load_file(file).items()}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match="is an adapter for other weights"):
        finetune(replace(config, steps=4, resume=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("in_backward", [False, True], ids=["accumulated", "in backward"])
def test_an_optimizer_trains_an_adapter_outside_of_the_model_as_one_built_in(dtype, in_backward):
    lora = lora_of(SHAPE, 4, 8.0, ("*_proj", "lm_head"))
    base, whole = build_model(SHAPE, dtype, seed=2), build_model(replace(SHAPE, lora=lora), dtype, seed=2)
    adapter = build_adapter(base.requires_grad_(False), lora, seed=2)
    config = TrainConfig(optimizer_in_backward=in_backward, max_grad_norm=0.1, weight_decay=0.1)
    batches = [[[*range(first, first + 30)] for first in range(start, start + 8)] for start in (1, 20, 40, 60)]
    results = []
    for model, trained, rows in ((whole, whole, []), (base, adapter, [AdaptedRows(adapter)])):
        optimizer, norms = MasterOptimizer(trained, config), []
        for step in (batches[:1], batches[1:2]) if in_backward else (batches[:2], batches[2:]):
            optimizer.begin(1e-2, len(step))
            for texts in step:
                with adapted(rows):
                    target_log_prob_sum(model, pack(texts), -1 / 200).backward()
            if not in_backward:
                norms.append(optimizer.gradient_norms())
                optimizer.update(1e-2, norms[-1]["grad_norm"])
        results.append((norms, optimizer.state_tensors(), dict(trained.named_parameters())))
    (norms, state, weights), (others_norms, others_state, others) = results
    assert norms == others_norms
    assert state.keys() == others_state.keys() and all(torch.equal(state[name], others_state[name]) for name in state)
    assert all(torch.equal(value, weights[name]) for name, value in others.items())
    fresh = build_adapter(base, lora, seed=2)
    moved = [not torch.equal(value, others[name]) for name, value in fresh.named_parameters()]
    assert all(moved) and len(moved) == len(others) == 30
    assert all(parameter.grad is None for parameter in base.parameters())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_run_trains_the_heads_adapter_and_its_checkpoint_samples_with_it(tmp_path, tied, model_folder, capsys):
    base = load_model(model_folder)
    if not tied:
        untied = build_model(replace(base.config, tie_embeddings=False), base.dtype)
        untied.load_state_dict(base.state_dict() | {"lm_head.weight": base.embed_tokens.weight})
        shutil.copytree(model_folder, model_folder := tmp_path / "untied")
        save_model(untied, model_folder)
    options = ["--model", str(model_folder), "--data", str(_sft(tmp_path, "").data), "--output", str(tmp_path / "run")]
    options += ["--lora.targets", "*_proj*", "lm_head", "--lora.rank", "4", "--lora.alpha", "16", "--steps", "2"]
    options += ["--sequence-length", "64", "--tokens-per-step", "128", "--train.learning-rate", "1e-2"]
    assert main(["sft", *options, "--train.warmup-steps", "0", "--train.tokens-per-microbatch", "64"]) == 0
    trained, lora = _adapter(tmp_path / "run"), load_model(tmp_path / "run").config.lora
    fresh = dict(build_adapter(load_model(model_folder), lora).named_parameters())
    for side in ("lora_A.weight", "lora_B.weight"):
        moved = trained[f"base_model.model.lm_head.{side}"]
        assert not torch.equal(moved.float(), fresh[f"lm_head.{side}"].float())
    assert main(["generate", "--model", str(tmp_path / "run"), "--prompt", "Say 1.", "--max-tokens", "4"]) == 0
    assert main(["parity", "--model", str(tmp_path / "run"), "--tokens", "50"]) == 0
    assert "Tokens different  : 0" in capsys.readouterr().out


def test_a_reward_models_head_has_no_adapter(tmp_path, model_folder):
    data = write_lines(tmp_path / "pairs.jsonl", [{"prompt": "Say 1.", "chosen": " 1", "rejected": " no"}] * 9)
    lora = LoraConfig(rank=4, targets=("*_proj", "lm_head"))
    with pytest.raises(UserError, match='lora.targets "lm_head" matches no linear layer'):
        train_reward_model(RewardModelConfig(**vars(_sft(tmp_path, model_folder, data=data, lora=lora))))


def _rl(tmp_path, model, **changes):
    defaults = dict(
        output=str(tmp_path / "rl"), model=str(model), steps=2, prompts_per_step=2, samples_per_prompt=4,
        max_new_tokens=8, validation_examples=1, updates_per_batch=2, kl_coefficient=0.05, lora=LoraConfig(rank=4),
        train=TrainConfig(learning_rate=1e-2, warmup_steps=0, schedule="constant"), algorithm="dr_grpo",
        engine=EngineConfig(max_tokens_per_step=64, max_sequences=8, cache_tokens=2048),
        environment=str(tmp_path / "task.py") + ":Even",
    )  # fmt: skip
    (tmp_path / "task.py").write_text(TASK)
    return RLConfig(**(defaults | changes))


TASK = """
from lockstep.rl import Environment, Example

class Even(Environment):
    def examples(self, split):
        return [Example(f"{split} {i}", "") for i in range(8)]

    def reward(self, example, completion):
        return {"even": float(sum(completion.encode()) % 2)}
"""


def _metrics(run):
    return read_metrics(run / "metrics.jsonl")[1:]


@pytest.fixture(scope="module")
def reinforced(tmp_path_factory, model_folder):
    return reinforce(_rl(tmp_path_factory.mktemp("rl"), model_folder))


def test_reinforcement_compares_every_bit_and_its_reference_is_the_model_without_the_adapter(
    reinforced, tmp_path, model_folder
):
    second = reinforce(_rl(tmp_path, model_folder, kl_reference=str(model_folder)))
    for metrics, others in zip(_metrics(reinforced), _metrics(second), strict=True):
        assert metrics["parity/tokens_checked"] > 0 and metrics["parity/tokens_different"] == 0
        assert metrics["grad_norm"] > 0
        # The same reference, as a second model.
        assert (metrics["policy/kl"], metrics["loss"]) == (others["policy/kl"], others["loss"])
    assert _metrics(reinforced)[-1]["policy/kl"] > 0


def test_servers_are_refused_an_adapter_by_name(reinforced, tmp_path, model_folder):
    served = ActorsConfig(urls=("http://127.0.0.1:1",))
    with pytest.raises(UserError, match=r"lora.rank does not work with servers \(actors.urls\)"):
        reinforce(_rl(tmp_path, model_folder, actors=served))
    with pytest.raises(UserError, match="is an adapter, but servers .* need full weights"):
        config = _rl(tmp_path, newest_folder(reinforced), actors=served, lora=LoraConfig())
        open_policy(config, World(torch.device("cpu")))


def test_ranks_train_the_adapter_of_one_process_and_sample_with_it(tmp_path, model_folder):
    lora = LoraConfig(rank=4, targets=("*_proj", "lm_head"))
    config = _sft(tmp_path, model_folder, dtype="float32", steps=2, lora=lora)
    alone = finetune(replace(config, output=str(tmp_path / "alone")))
    launch(2, finetune, config)
    launch(2, reinforce, _rl(tmp_path, model_folder, lora=lora))
    first, second = _adapter(alone), _adapter(tmp_path / "run")
    assert first.keys() == second.keys()
    for name, value in first.items():
        # Gradients are summed in another order, and Adam's first steps take a sign from each.
        assert (second[name] - value).norm() < 1e-2 * value.norm(), name
    for metrics in _metrics(tmp_path / "rl"):
        assert metrics["parity/tokens_checked"] > 0 and metrics["parity/tokens_different"] == 0
        assert metrics["grad_norm"] > 0
    assert len(_adapter(tmp_path / "rl")) == 30


@pytest.mark.slow
def test_a_generator_in_a_process_of_its_own_samples_with_the_adapter_of_a_folder(reinforced, tmp_path):
    changes = dict(dtype="bfloat16", lora=LoraConfig())
    alone = reinforce(_rl(tmp_path, reinforced, output=str(tmp_path / "alone"), **changes))
    launch(1, reinforce, _rl(tmp_path, reinforced, actors=ActorsConfig(generators=1, threads=1), **changes))
    for step in (1, 2):
        rollouts = [(run / f"rollouts/step_{step:08}.jsonl").read_text() for run in (alone, tmp_path / "rl")]
        assert rollouts[0] == rollouts[1]
    for metrics, others in zip(_metrics(alone), _metrics(tmp_path / "rl"), strict=True):
        assert metrics["parity/tokens_different"] == others["parity/tokens_different"] == 0 < metrics["grad_norm"]
        assert (metrics["loss"], metrics["grad_norm"]) == (others["loss"], others["grad_norm"])
    assert _metrics(alone)[-1]["policy/kl"] > 0, "its samples depend on the adapter"
