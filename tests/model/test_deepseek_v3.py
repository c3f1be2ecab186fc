"""DeepSeek-V3: the logits of transformers, its folders in and out, what is left out and what is refused."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from lockstep import Engine, EngineConfig, SamplingParams, build_model, load_model, ops, save_model, score
from lockstep.checkpoint.convert import convert
from lockstep.config import CompileConfig
from lockstep.errors import UserError
from lockstep.model import Latent, ModelConfig, preset
from lockstep.parallel import apply_compile
from tests.model.test_against_transformers import TOLERANCE

SIZES = dict(
    vocab_size=101,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    moe_intermediate_size=48,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_shared_experts=1,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=1.7,
    first_k_dense_replace=1,
    kv_lora_rank=32,
    q_lora_rank=40,
    qk_nope_head_dim=24,
    qk_rope_head_dim=16,
    v_head_dim=20,
    max_position_embeddings=256,
    initializer_range=0.1,
    num_nextn_predict_layers=0,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)
YARN = dict(
    rope_type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=32, mscale=1.0,
    mscale_all_dim=0.7, beta_fast=32, beta_slow=1,
)  # fmt: skip


def theirs(folder, **settings):
    torch.manual_seed(0)
    config = DeepseekV3Config(**{**SIZES, **settings}, attn_implementation="eager")
    model = DeepseekV3ForCausalLM(config)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                tensor.add_(torch.randn_like(tensor) * 0.2)
            elif "experts" in name or "mlp.gate" in name:
                tensor.normal_(0, 0.2)
            elif "e_score_correction_bias" in name:
                tensor.normal_(0, 0.1)
    model.save_pretrained(folder)
    return model.eval()


def _logits(model, tokens):
    return model.logits(model(tokens, torch.arange(len(tokens)), ops.PackedAttention([len(tokens)])))


@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        dict(rope_parameters=YARN),
        dict(q_lora_rank=None, rope_interleave=False, n_group=1, topk_group=1),
        dict(num_attention_heads=12, num_key_value_heads=12, kv_lora_rank=48, norm_topk_prob=False, n_shared_experts=2),
        dict(first_k_dense_replace=0, n_routed_experts=6, n_group=2, topk_group=1, qk_rope_head_dim=32, v_head_dim=40),
        dict(first_k_dense_replace=3, hidden_size=80, rope_parameters=YARN | {"truncate": False}),
    ],
    ids=["groups", "yarn", "whole queries", "12 heads", "no dense layer", "dense"],
)
@torch.no_grad()
def test_a_folder_of_transformers_gives_its_logits_and_comes_back_tensor_by_tensor(tmp_path, settings):
    model = theirs(tmp_path / "theirs", **settings)
    ours = load_model(tmp_path / "theirs")
    tokens = torch.randint(101, (90,), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(_logits(ours, tokens), model(tokens[None]).logits[0], rtol=TOLERANCE, atol=TOLERANCE)
    assert sum(p.numel() for p in ours.parameters()) == ours.config.num_parameters

    save_model(ours, tmp_path / "ours")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert load_model(tmp_path / "ours").config == ours.config
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert torch.equal(again(tokens[None]).logits, model(tokens[None]).logits)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    theirs(tmp_path / "whole")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    for name in ("eh_proj", "enorm", "self_attn.o_proj", "mlp.experts.0.up_proj", "shared_head.head"):
        tensors[f"model.layers.3.{name}.weight"] = torch.zeros(3, 3)
    (tmp_path / "more").mkdir()
    save_file(tensors, tmp_path / "more" / "model.safetensors")
    values = json.loads((tmp_path / "whole" / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "more" / "config.json").write_text(json.dumps(values))
    convert(tmp_path / "more", tmp_path / "converted")
    expected = load_model(tmp_path / "whole")
    for folder in ("more", "converted"):
        found = dict(load_model(tmp_path / folder).named_parameters())
        assert all(torch.equal(parameter, found[name]) for name, parameter in expected.named_parameters())
    assert json.loads((tmp_path / "converted" / "config.json").read_text())["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "weights are quantized .'fp8'.*Convert .*: fp8 is float8_e4m3.*fp8_cast_bf16.py",
        ),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid'"),
        ({"kv_lora_rank": None}, "key kv_lora_rank is missing"),
        ({"kv_lora_rank": 0}, "kv_rank is 0; it must be at least 1"),
        ({"qk_rope_head_dim": 15}, "rope_dim is 15; rotary embedding needs an even one"),
        ({"v_head_dim": 21}, r"kv_b_proj.weight has shape \[176, 32\], but config.json requires \[180, 32\]"),
        ({"rope_interleave": "no"}, "rope_interleave is 'no'; it must be true or false"),
        ({"num_experts_per_tok": 9}, "9 experts per token of 8 in total"),
        ({"n_group": 3}, "8 experts in 3 groups"),
        ({"q_lora_rank": None}, "tensor .*q_proj.weight is missing"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, change, message):
    theirs(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=message):
        load_model(tmp_path)


def test_sizes_of_a_key_that_do_not_agree_are_refused_with_both():
    with pytest.raises(UserError, match=r"kv_rank \+ rope_dim = 48 .*but num_kv_heads is 4 and head_dim 32"):
        ModelConfig("deepseek_v3", 100, 64, 2, 4, 4, 32, 96, latent=Latent(32, 16, 16, 16))


def assert_bits_agree(model):
    """An engine under a mixed load samples with the trainer's own log-probabilities."""
    with torch.no_grad():
        model.embed_tokens.weight.mul_(8)
    engine = Engine(model, EngineConfig(max_tokens_per_step=29, max_sequences=5, cache_tokens=400))
    prompts = [[5, 6, 7] * 11, [5, 6, 7] * 10, [9]]
    for prompt, group in zip(prompts, engine.generate(prompts, SamplingParams(max_tokens=12, n=2, ignore_eos=True))):
        for completion in group:
            trainer = score(model, [prompt + completion.token_ids])[0][len(prompt) - 1 :]
            assert torch.equal(torch.tensor(completion.logprobs), trainer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_samples_with_the_trainers_bits(dtype):
    assert_bits_agree(build_model(preset("deepseek_v3:micro"), dtype, seed=3))


@pytest.mark.slow
def test_layers_of_both_kinds_are_compiled_once_for_engine_and_trainer():
    shape = replace(preset("deepseek_v3:micro"), num_layers=3)
    assert [shape.is_dense(layer) for layer in range(3)] == [True, False, False]
    model = build_model(shape, "bfloat16", seed=3)
    apply_compile(model, CompileConfig(backend="inductor"))
    assert_bits_agree(model)


def test_the_published_model_has_its_number_of_weights():
    config = preset("deepseek_v3:671b")
    # Published as 671B and 37B, so to three digits and to two.
    assert config.num_parameters == pytest.approx(671e9, rel=1e-3)
    assert config.num_active_parameters == pytest.approx(37.6e9, rel=5e-3)  # with embedding and head
