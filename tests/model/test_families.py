"""Families against transformers: logits, folders in and out, refusals, and the same bits in the engine."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lockstep import Engine, EngineConfig, SamplingParams, build_model, load_model, ops, save_model, score
from lockstep.checkpoint.convert import convert
from lockstep.config import CompileConfig
from lockstep.errors import UserError
from lockstep.model import Latent, ModelConfig, preset
from lockstep.model.mxfp4 import Mxfp4, dequantized
from lockstep.parallel import apply_compile
from tests.model.in_memory import InMemory

# Both sides sum in float32, in different orders, through two or three layers to logits of order 1.
TOLERANCE = 1e-4
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = ROPE | dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
YARN = ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LATENT_YARN = YARN | dict(factor=8.0, mscale=1.0, mscale_all_dim=0.7, beta_fast=32, beta_slow=1)
FULL, SLIDING, RECURRENT = "full_attention", "sliding_attention", "linear_attention"
DELTA = dict(
    num_hidden_layers=2, layer_types=[RECURRENT, FULL], linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=16, linear_value_head_dim=24, rope_parameters=ROPE | {"partial_rotary_factor": 0.25},
)  # fmt: skip
SHARED = dict(
    moe_intermediate_size=48, shared_expert_intermediate_size=40, num_experts=6, num_experts_per_tok=2
)  # fmt: skip
SIZES = dict(
    vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, tie_word_embeddings=False, rope_parameters=ROPE,
)  # fmt: skip
OF_FAMILY = {
    "llama": dict(num_hidden_layers=2),
    "qwen3": dict(num_hidden_layers=2),
    "qwen3_moe": dict(moe_intermediate_size=48, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True),
    "gpt_oss": dict(
        num_local_experts=6, num_experts_per_tok=2, sliding_window=20, max_position_embeddings=512, pad_token_id=0,
        eos_token_id=7, rope_parameters=YARN | {"truncate": False, "rope_theta": 150000.0},
    ),
    "deepseek_v3": dict(
        num_key_value_heads=4, head_dim=16, moe_intermediate_size=48, n_routed_experts=8, num_experts_per_tok=3,
        n_shared_experts=1, n_group=4, topk_group=2, routed_scaling_factor=1.7, first_k_dense_replace=1,
        kv_lora_rank=32, q_lora_rank=40, qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=20,
        max_position_embeddings=256, num_nextn_predict_layers=0,
    ),
    "qwen2": dict(head_dim=16),
    "mistral": dict(sliding_window=20),
    "ministral": dict(sliding_window=20),
    "ministral3": dict(
        rope_parameters=YARN | dict(factor=16.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1),
        max_position_embeddings=512,
    ),
    "smollm3": dict(pad_token_id=0, head_dim=16),
    "granite": dict(
        head_dim=16, embedding_multiplier=12.0, attention_multiplier=0.02, residual_multiplier=0.22, logits_scaling=8.0
    ),
    "olmo2": dict(head_dim=16, eos_token_id=7),
    "olmo3": dict(num_hidden_layers=4, head_dim=16, eos_token_id=7, sliding_window=20, rope_parameters=None),
    "olmoe": dict(head_dim=16, eos_token_id=7, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True),
    "phi3": dict(head_dim=16, pad_token_id=0, eos_token_id=7),
    "glm": dict(pad_token_id=0, eos_token_id=7, rope_parameters=ROPE | {"partial_rotary_factor": 0.5}),
    "glm4": dict(pad_token_id=0, eos_token_id=7, rope_parameters=ROPE | {"partial_rotary_factor": 0.5}),
    "glm4_moe": dict(
        moe_intermediate_size=48, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1,
        rope_parameters=ROPE | {"partial_rotary_factor": 0.5},
    ),
    "qwen3_5_text": DELTA | dict(num_hidden_layers=4, layer_types=None),
    "qwen3_5_moe_text": DELTA | SHARED,
    "qwen3_next": DELTA | SHARED,
    "gemma3_text": dict(
        num_hidden_layers=4, sliding_window=20, query_pre_attn_scalar=48, pad_token_id=0, rope_parameters=None,
        layer_types=[SLIDING, FULL, FULL, SLIDING],
    ),
    "nanochat": dict(head_dim=16),
}  # fmt: skip


HYBRID = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
OFFSET = ("gemma3_text", *HYBRID)


@torch.no_grad()
def theirs(family, folder, **settings):
    """transformers' model of a family, saved to the folder: weights of a size that shows differences."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | OF_FAMILY[family] | settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name:  # factors may be 1 + weight
            offset = family in OFFSET and "linear_attn" not in name
            tensor.copy_((0 if offset else 1) + 0.2 * torch.randn_like(tensor))
        elif name.endswith("A_log"):  # decays from slow to fast
            tensor.copy_(torch.linspace(-4, 2, len(tensor)))
        elif "dt_bias" in name or "conv1d" in name:
            tensor.normal_(0, 0.5)
        elif "e_score_correction_bias" in name:
            tensor.normal_(0, 0.1)
        elif (
            "inv_freq" not in name and "embed_scale" not in name
        ):  # sinks and gates: what is clamped, and what they take, must show
            tensor.normal_(0, 2.0 if "sinks" in name else 0.5 if "router" in name or "gate_up" in name else 0.15)
    model.save_pretrained(folder)
    return model.eval()


def change(folder, **values):
    """Of its config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def slow(family, settings):
    """A case whose form the default run has in others."""
    return pytest.param(family, settings, marks=pytest.mark.slow)


LONGROPE = ROPE | {"rope_type": "longrope", "original_max_position_embeddings": 32}
LONGROPE |= {"short_factor": [1 + 0.1 * n for n in range(8)], "long_factor": [1.0 + n for n in range(8)]}
LONG = dict(max_position_embeddings=256, original_max_position_embeddings=32)
HALF_LONGROPE = LONGROPE | dict(partial_rotary_factor=0.5, short_factor=[1.0] * 4, long_factor=[1.5, 2.0, 4.0, 8.0])
LINEAR = ROPE | {"rope_type": "linear", "factor": 3.0}
TWO_TABLES = {FULL: LINEAR | {"rope_theta": 1e6}, SLIDING: ROPE | {"rope_theta": 100.0}}
DYNAMIC = ROPE | {"rope_type": "dynamic", "factor": 3.0}
BIASES = dict(attention_bias=True, mlp_bias=True)
WINDOW = dict(use_sliding_window=True, sliding_window=20)
CASES = [
    ("llama", dict(num_attention_heads=2, head_dim=128, tie_word_embeddings=True)),
    ("llama", dict(rope_parameters=LLAMA3, head_dim=96, num_key_value_heads=1)),
    ("llama", dict(rope_parameters=YARN, head_dim=64, tie_word_embeddings=True)),
    ("qwen3", dict(num_attention_heads=2, head_dim=96)),
    ("qwen3", dict(num_key_value_heads=1, head_dim=128, tie_word_embeddings=True)),
    ("qwen3_moe", dict()),
    ("qwen3_moe", dict(norm_topk_prob=False, num_experts=4, num_experts_per_tok=1, mlp_only_layers=[1])),
    ("qwen3_moe", dict(decoder_sparse_step=2, tie_word_embeddings=True, num_experts=9, moe_intermediate_size=36)),
    ("gpt_oss", dict()),
    ("gpt_oss", dict(rope_parameters=ROPE, sliding_window=1, num_local_experts=9, num_experts_per_tok=4)),
    ("gpt_oss", dict(layer_types=["full_attention", *["sliding_attention"] * 2], sliding_window=64, head_dim=64)),
    ("gpt_oss", dict(num_key_value_heads=1, head_dim=16, tie_word_embeddings=True, num_experts_per_tok=1)),
    ("deepseek_v3", dict()),
    ("deepseek_v3", dict(q_lora_rank=None, rope_interleave=False, n_group=1, topk_group=1)),
    ("deepseek_v3", dict(num_attention_heads=12, num_key_value_heads=12, norm_topk_prob=False, n_shared_experts=2)),
    ("deepseek_v3", dict(first_k_dense_replace=0, n_group=2, topk_group=1, rope_parameters=LATENT_YARN, v_head_dim=40)),
    ("deepseek_v3", dict(first_k_dense_replace=3, rope_parameters=LATENT_YARN | {"truncate": False})),
    ("llama", dict(**BIASES, rope_parameters=LINEAR)),
    slow("llama", dict(attention_bias=True, tie_word_embeddings=True)),
    ("llama", dict(mlp_bias=True, rope_parameters=DYNAMIC)),
    ("llama", dict(head_dim=16, rope_parameters=LONGROPE, max_position_embeddings=256)),
    slow("llama", dict(head_dim=16, rope_parameters=LONGROPE | {"attention_factor": 1.3, "factor": 5.0})),
    ("qwen3", dict(**WINDOW, layer_types=[SLIDING, FULL], attention_bias=True)),
    slow("qwen3", dict(**WINDOW, max_window_layers=1)),
    ("qwen3_moe", dict(**WINDOW, attention_bias=True)),
    ("qwen2", dict()),
    ("qwen2", dict(**WINDOW, max_window_layers=1, tie_word_embeddings=True)),
    slow("qwen2", dict(**WINDOW, layer_types=[SLIDING, FULL, SLIDING], head_dim=48)),
    slow("qwen2", dict(**WINDOW, max_window_layers=0, rope_parameters=YARN)),
    ("mistral", dict()),
    ("mistral", dict(sliding_window=None, tie_word_embeddings=True, head_dim=48)),
    ("ministral", dict(layer_types=[FULL, SLIDING, SLIDING])),
    slow("ministral", dict()),
    slow("ministral", dict(layer_types=[FULL] * 3, rope_parameters=YARN, tie_word_embeddings=True)),
    ("ministral3", dict()),
    slow("ministral3", dict(sliding_window=20, tie_word_embeddings=True)),
    (
        "ministral3",
        dict(rope_parameters=ROPE | {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 7}),
    ),
    ("smollm3", dict()),
    ("smollm3", dict(no_rope_layer_interval=2, tie_word_embeddings=True, mlp_bias=True)),
    ("smollm3", dict(no_rope_layers=[0, 1, 1], **WINDOW, **BIASES)),
    slow("smollm3", dict(**WINDOW, layer_types=[SLIDING, SLIDING, FULL], no_rope_layer_interval=3)),
    slow("smollm3", dict(no_rope_layer_interval=1, no_rope_layers=[0, 0, 0])),
    ("granite", dict()),
    slow("granite", dict(**BIASES, tie_word_embeddings=True)),
    ("olmo2", dict()),
    slow("olmo2", dict(attention_bias=True, num_key_value_heads=4, tie_word_embeddings=True, head_dim=24)),
    ("olmo3", dict(rope_scaling=YARN)),
    ("olmo3", dict(attention_bias=True, rope_parameters={FULL: YARN, SLIDING: ROPE | {"rope_theta": 500.0}})),
    slow("olmo3", dict(layer_types=[FULL] * 4, tie_word_embeddings=True)),
    slow("olmo3", dict(layer_types=[FULL, SLIDING, SLIDING, SLIDING], rope_theta=777.0)),
    ("olmoe", dict()),
    slow("olmoe", dict(norm_topk_prob=False, attention_bias=True, tie_word_embeddings=True)),
    ("phi3", dict()),
    ("phi3", dict(sliding_window=20, rope_parameters=ROPE | {"partial_rotary_factor": 0.75})),
    ("phi3", dict(rope_parameters=LONGROPE, **LONG)),
    ("phi3", dict(rope_parameters=LONGROPE, max_position_embeddings=256, original_max_position_embeddings=256)),
    slow("phi3", dict(rope_parameters=HALF_LONGROPE, **LONG, tie_word_embeddings=True)),
    ("glm", dict()),
    slow("glm", dict(attention_bias=False, rope_parameters=ROPE | {"partial_rotary_factor": 0.25})),
    ("glm4", dict(attention_bias=False)),
    slow("glm4", dict(rope_parameters=ROPE | {"partial_rotary_factor": 1.0}, tie_word_embeddings=True)),
    ("glm4_moe", dict(use_qk_norm=True, attention_bias=True, routed_scaling_factor=1.5)),
    slow("glm4_moe", dict(n_group=2, topk_group=1, n_shared_experts=2, first_k_dense_replace=0)),
    slow("glm4_moe", dict(norm_topk_prob=False, rope_parameters=ROPE | {"partial_rotary_factor": 1.0})),
    ("gemma3_text", dict(tie_word_embeddings=True, rope_scaling={"rope_type": "linear", "factor": 8.0})),
    ("gemma3_text", dict(final_logit_softcapping=2.0, attention_bias=True, rope_parameters=TWO_TABLES)),
    slow("gemma3_text", dict(num_hidden_layers=7, layer_types=None, rope_theta=5e5, rope_local_base_freq=300.0)),
    slow("gemma3_text", dict(layer_types=None, sliding_window_pattern=2, tie_word_embeddings=True)),
    slow("gemma3_text", dict(layer_types=[FULL] * 4, final_logit_softcapping=30.0)),
    ("qwen3_5_text", dict()),
    ("qwen3_5_text", dict(full_attention_interval=2, num_hidden_layers=3, linear_num_value_heads=2, head_dim=16)),
    (
        "qwen3_5_text",
        dict(layer_types=[FULL, RECURRENT], num_hidden_layers=2, attention_bias=True, tie_word_embeddings=True),
    ),
    slow("qwen3_5_text", dict(linear_num_key_heads=1, linear_conv_kernel_dim=2, num_key_value_heads=4)),
    slow("qwen3_5_text", dict(linear_num_key_heads=3, linear_num_value_heads=9, linear_conv_kernel_dim=7)),
    slow("qwen3_5_text", dict(rope_parameters=YARN | {"partial_rotary_factor": 0.5}, linear_value_head_dim=8)),
    ("qwen3_5_moe_text", dict()),
    slow("qwen3_5_moe_text", dict(tie_word_embeddings=True, num_experts=9, attention_bias=True)),
    ("qwen3_next", dict()),
    ("qwen3_next", dict(mlp_only_layers=[1], norm_topk_prob=False, linear_num_value_heads=6)),
    slow("qwen3_next", dict(decoder_sparse_step=2, linear_num_key_heads=4, tie_word_embeddings=True)),
    ("nanochat", dict()),
    slow("nanochat", dict(attention_bias=True, num_key_value_heads=4, final_logit_softcapping=None)),
    slow("nanochat", dict(final_logit_softcapping=2.0, tie_word_embeddings=True, rope_parameters={"rope_theta": 99.0})),
]


@pytest.mark.parametrize(("family", "settings"), CASES, ids=str)
@torch.no_grad()
def test_a_folder_of_transformers_gives_its_logits_and_comes_back_tensor_by_tensor(tmp_path, family, settings):
    model = theirs(family, tmp_path / "theirs", **settings)
    ours = load_model(tmp_path / "theirs")
    length = 150 if family in HYBRID else 90  # longer than two chunks of linear attention
    tokens = torch.randint(101, (length,), generator=torch.Generator().manual_seed(1))
    hidden = ours(tokens, torch.arange(length), ops.PackedAttention([length]))
    expected = model(tokens[None]).logits[0]
    torch.testing.assert_close(ours.logits(hidden), expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert sum(p.numel() for p in ours.parameters()) == ours.config.num_parameters

    save_model(ours, tmp_path / "ours")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    before.pop("lm_head.weight", None) if settings.get("tie_word_embeddings") else None
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert load_model(tmp_path / "ours").config == ours.config
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert torch.equal(again(tokens[None]).logits[0], expected), "with the same settings"


NEW_ARITHMETIC = ("gemma3_text", "olmo2", "phi3", "glm4", "ministral3", "granite", "smollm3", "nanochat")
"""Families each of which computes something that Llama and Qwen3 do not."""


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3_moe", "bfloat16"), ("gpt_oss", "float32"), ("deepseek_v3", "float32"),
        *((family, "float32") for family in NEW_ARITHMETIC),
        *(slow(family, "bfloat16") for family in ("gpt_oss", "deepseek_v3", *NEW_ARITHMETIC)),
    ],
)  # fmt: skip
def test_the_engine_gives_the_trainers_bits(tmp_path, family, dtype):
    """Prompts that share a start, in chunks and out of the cache."""
    theirs(family, tmp_path, **({} if family in NEW_ARITHMETIC else {"rope_parameters": ROPE}))
    assert_bits_agree(load_model(tmp_path, dtype=dtype))


def assert_bits_agree(model):
    shared = torch.randint(101, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    prompts = [shared[:3], shared, [*shared, 5, 6], shared[7:19]]
    params = SamplingParams(max_tokens=12, temperature=0.9, n=2, seed=3, ignore_eos=True)
    engine = Engine(model, EngineConfig(cache_tokens=400, max_tokens_per_step=24, max_sequences=5))
    pairs = [(p, c) for p, group in zip(prompts, engine.generate(prompts, params)) for c in group]
    scores = score(model, [p + list(c.token_ids) for p, c in pairs], temperature=0.9)
    for (prompt, completion), trainer in zip(pairs, scores):
        assert torch.equal(trainer[len(prompt) - 1 :], torch.tensor(completion.logprobs))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"), [("gemma3:micro", {}), ("phi3:micro", dict(head_dim=64, rotated_features=32))], ids=str
)
def test_norms_around_both_halves_and_fused_projections_are_compiled_for_engine_and_trainer(name, sizes):
    model = build_model(replace(preset(name), num_layers=2, **sizes), "bfloat16", seed=3)
    apply_compile(model, CompileConfig(backend="inductor"))
    assert_bits_agree(model)


@pytest.mark.slow
def test_layers_of_both_kinds_are_compiled_once_for_engine_and_trainer():
    shape = replace(preset("deepseek_v3:micro"), num_layers=3)
    assert [shape.is_dense(layer) for layer in range(3)] == [True, False, False]
    model = build_model(shape, "bfloat16", seed=3)
    apply_compile(model, CompileConfig(backend="inductor"))
    assert_bits_agree(model)


REFUSED = [
    ("qwen3_moe", dict(num_experts_per_tok=7), "7 experts per token of 6"),
    ("qwen3_moe", dict(num_experts_per_tok=None), "num_experts_per_tok is missing"),
    ("qwen3_moe", dict(norm_topk_prob="yes"), "norm_topk_prob is 'yes'; it must be true or false"),
    ("qwen3_moe", dict(mlp_only_layers=[3]), r"mlp_only_layers is \[3\]; it must be a list of layers from 0 to 2"),
    ("qwen3_moe", dict(num_local_experts=8, num_experts=8), "experts.6.gate_proj.weight is missing"),
    ("gpt_oss", dict(swiglu_limit=5.0), "swiglu_limit is 5.0; only 7.0 is supported"),
    ("gpt_oss", dict(layer_types=[FULL, "chunked_attention", FULL]), "layer_types is .*chunked"),
    ("gpt_oss", dict(sliding_window=-1), "sliding_window is -1"),
    ("gpt_oss", dict(quantization_config={"quant_method": "gptq"}), r"'gptq'\), .*\(supported: mxfp4, .*dequantize"),
    (
        "gpt_oss",
        dict(quantization_config="fp8"),
        r"'fp8'\), which is not supported \(supported: mxfp4, .*dequantize",
    ),
    ("deepseek_v3", {"kv_lora_rank": 0}, "kv_rank is 0; it must be at least 1"),
    ("deepseek_v3", {"qk_rope_head_dim": 15}, "rope_dim is 15; rotary embedding needs an even one"),
    ("deepseek_v3", {"v_head_dim": 21}, r"kv_b_proj.weight has shape \[176, 32\], .* requires \[180, 32\]"),
    ("deepseek_v3", {"n_group": 3}, "8 experts in 3 groups"),
    ("deepseek_v3", {"q_lora_rank": None}, "tensor .*q_proj.weight is missing"),
    ("olmoe", dict(clip_qkv=8.0), "clip_qkv is 8.0; only None is supported"),
    ("gemma3_text", dict(attn_logit_softcapping=50.0), "attn_logit_softcapping is 50.0; only None is supported"),
    ("gemma3_text", dict(use_bidirectional_attention=True), "use_bidirectional_attention is True; only False"),
    ("gemma3_text", dict(hidden_activation="gelu"), "hidden_activation is 'gelu'; only 'gelu_pytorch_tanh'"),
    ("gemma3_text", dict(rope_parameters=ROPE), "rope_parameters is .* must have a table for full_attention and one"),
    ("gemma3_text", dict(rope_parameters={FULL: YARN | {"truncate": False}}), "truncate is False, which transformers"),
    ("gemma3_text", dict(final_logit_softcapping=-1.0), "final_logit_softcapping is -1.0; it must be a number above"),
    ("gemma3_text", dict(query_pre_attn_scalar=0), "query_pre_attn_scalar is 0; it must be a number above 0"),
    ("gemma3_text", dict(partial_rotary_factor=0.5), "full_attention: partial_rotary_factor is 0.5; only 1.0 is"),
    ("ministral3", dict(rope_parameters=YARN), "rope_parameters needs llama_4_scaling_beta and original_max_position"),
    ("ministral3", dict(layer_types=[FULL, SLIDING, FULL]), "layer_types differ from full_attention in all layers"),
    ("qwen3_moe", dict(layer_types=[SLIDING] * 3), "layer_types differ from full_attention in all layers"),
    ("phi3", dict(sliding_window=20, layer_types=[FULL] * 3), "layer_types differ from sliding_attention in all"),
    ("granite", dict(layer_types=[SLIDING] * 3), "layer_types is .* it must name one of full_attention for each"),
    ("granite", dict(residual_multiplier=0), "residual_multiplier is 0; it must be a number above 0"),
    ("smollm3", dict(no_rope_layers=[1, 0]), r"no_rope_layers is \[1, 0\]; it must be a list with 0 or 1 for each"),
    ("smollm3", dict(no_rope_layers=[1, 0, 2]), r"no_rope_layers is \[1, 0, 2\]; it must be a list with 0 or 1"),
    ("smollm3", dict(layer_types=[SLIDING] * 3, sliding_window=20), "layer_types has .* needs use_sliding_window and"),
    ("phi3", dict(rope_parameters=LONGROPE | {"long_factor": [1.0] * 7}), "long_factor has 7 numbers, but 8 pairs"),
    ("phi3", dict(rope_parameters=LONGROPE | {"short_factor": 2.0}), "short_factor is 2.0; .* needs a list of numbers"),
    (
        "phi3",
        dict(rope_parameters=ROPE | {"partial_rotary_factor": 0.2}),
        "partial_rotary_factor is 0.2; .* rotate an even number of the 16",
    ),
    ("phi3", dict(lm_head_bias=True), "lm_head_bias is True; only False is supported"),
    ("nanochat", dict(rope_scaling=YARN), "rope_scaling and rope_parameters: only rope_type default is supported"),
    ("nanochat", dict(hidden_act="silu"), "hidden_act is 'silu'; only 'relu2' is supported"),
    ("olmo3", dict(sliding_window=None), "sliding_window is missing"),
    ("glm4_moe", dict(use_qk_norm="yes"), "use_qk_norm is 'yes'; it must be true or false"),
    ("qwen2", dict(use_mrope=True), "use_mrope is True; only False is supported"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of each family, by name, a folder that nobody changes."""

    class Folders(dict):
        def __missing__(self, family):
            self[family] = tmp_path_factory.mktemp(family)
            theirs(family, self[family])
            return self[family]

    return Folders()


def linked(folder, target):
    """A folder with the same tensors, and a config.json of its own."""
    target.mkdir(exist_ok=True)
    (target / "model.safetensors").hardlink_to(folder / "model.safetensors")
    (target / "config.json").write_text((folder / "config.json").read_text())
    return target


@pytest.mark.parametrize(("family", "values", "message"), REFUSED, ids=str)
def test_a_configuration_that_cannot_be_is_refused_by_name(tmp_path, folders, family, values, message):
    change(linked(folders[family], tmp_path / "changed"), **values)
    with pytest.raises(UserError, match=message):
        load_model(tmp_path / "changed")


def test_sizes_of_a_key_that_do_not_agree_are_refused_with_both():
    with pytest.raises(UserError, match=r"kv_rank \+ rope_dim = 48 .*but num_kv_heads is 4 and head_dim 32"):
        ModelConfig("deepseek_v3", 100, 64, 2, 4, 4, 32, 96, latent=Latent(32, 16, 16, 16))


@pytest.mark.parametrize("fused", [True, False])
def test_experts_in_one_tensor_are_read(tmp_path, folders, fused):
    expected = load_model(folders["qwen3_moe"])
    before = load_file(folders["qwen3_moe"] / "model.safetensors")
    (tmp_path / "config.json").write_text((folders["qwen3_moe"] / "config.json").read_text())
    tensors = dict(before)
    for path in (f"model.layers.{layer}.mlp.experts." for layer in range(SIZES["num_hidden_layers"])):
        gate, up, down = (
            torch.stack([tensors.pop(f"{path}{e}.{kind}_proj.weight") for e in range(6)])
            for kind in ("gate", "up", "down")
        )
        if fused:
            tensors |= {f"{path}gate_up_proj": torch.cat([gate, up], 1), f"{path}down_proj": down}
        else:
            tensors |= {f"{path}{kind}_proj.weight": t for kind, t in (("gate", gate), ("up", up), ("down", down))}
    save_file(tensors, tmp_path / "model.safetensors")
    got = load_model(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(got.parameters(), expected.parameters()))
    convert(tmp_path, tmp_path / "converted")
    held = load_file(tmp_path / "converted" / "model.safetensors")
    assert held.keys() == before.keys() and all(torch.equal(held[name], before[name]) for name in held)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_layers_that_predict_further_tokens_are_left_out(tmp_path, folders, family):
    tensors = load_file(folders[family] / "model.safetensors")
    for name in ("eh_proj", "enorm", "self_attn.o_proj", "mlp.experts.0.up_proj", "shared_head.head"):
        tensors[f"model.layers.3.{name}.weight"] = torch.zeros(3, 3)
    (tmp_path / "more").mkdir()
    save_file(tensors, tmp_path / "more" / "model.safetensors")
    values = json.loads((folders[family] / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "more" / "config.json").write_text(json.dumps(values))
    convert(tmp_path / "more", tmp_path / "converted")
    expected = load_model(folders[family])
    for folder in ("more", "converted"):
        found = dict(load_model(tmp_path / folder).named_parameters())
        assert all(torch.equal(parameter, found[name]) for name, parameter in expected.named_parameters())
    assert json.loads((tmp_path / "converted" / "config.json").read_text())["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize("n_group", [1, 4])
@torch.no_grad()
def test_kimi_k2_is_deepseek_v3_by_another_name(tmp_path, n_group):
    model = theirs("deepseek_v3", tmp_path, n_group=n_group, topk_group=n_group)
    change(tmp_path, model_type="kimi_k2", aux_loss_alpha=0.001, auto_map={"AutoConfig": "configuration_deepseek.K2"})
    ours = load_model(tmp_path)
    tokens = torch.randint(101, (30,), generator=torch.Generator().manual_seed(1))
    expected = model(tokens[None]).logits[0].log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
    torch.testing.assert_close(score(ours, [tokens.tolist()])[0], expected, rtol=TOLERANCE, atol=TOLERANCE)
    save_model(ours, tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == "deepseek_v3"


@torch.no_grad()
def test_mistral_with_kinds_of_layers_is_ministral_as_in_transformers(tmp_path):
    theirs("mistral", tmp_path)
    change(tmp_path, layer_types=[SLIDING, FULL, SLIDING])
    ours, model = load_model(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    assert ours.config.family == "ministral" and ours.config.windows == (20, 0)
    tokens = torch.arange(60)
    logits = ours.logits(ours(tokens, tokens, ops.PackedAttention([60])))
    torch.testing.assert_close(logits, model(tokens[None]).logits[0], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["phi3", "nanochat", "glm4", "gemma3_text"])
def test_folders_are_converted_tensor_by_tensor(tmp_path, folders, family):
    convert(folders[family], tmp_path / "same", dtype="float32", max_file_bytes=100_000)
    convert(folders[family], tmp_path / "half", dtype="bfloat16")
    before, half = (load_file(folder / "model.safetensors") for folder in (folders[family], tmp_path / "half"))
    shards = sorted((tmp_path / "same").glob("*.safetensors"))
    same = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert len(shards) > 1 and before.keys() == same.keys() == half.keys()
    assert all(torch.equal(same[name], tensor) for name, tensor in before.items())
    assert all(torch.equal(half[name], tensor.bfloat16()) for name, tensor in before.items())
    assert load_model(tmp_path / "same").config == load_model(folders[family]).config


@pytest.fixture(scope="module")
def mxfp4(folders, tmp_path_factory):
    """A folder whose experts are MXFP4, its tensors, and those that they stand for."""
    folder = tmp_path_factory.mktemp("mxfp4")
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folders["gpt_oss"] / "model.safetensors").items()}
    draw, plain = torch.Generator().manual_seed(1), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(118, 125, blocks.shape[:3], generator=draw, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).contiguous()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((folders["gpt_oss"] / "config.json").read_text())
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    change(folder, dtype="bfloat16", quantization_config=method)
    return folder, tensors, plain


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_mxfp4_experts_are_read_as_transformers_reads_them_and_saved_unquantised(tmp_path, mxfp4, dtype):
    source, held, plain = mxfp4
    model = load_model(source, dtype=dtype)
    assert model.dtype == (torch.bfloat16 if dtype is None else torch.float32)
    save_model(model, tmp_path / "ours")
    convert(source, tmp_path / "converted", dtype=dtype or "auto")
    expected = {name: tensor for name, tensor in held.items() if not name.endswith(("_blocks", "_scales"))} | plain
    for folder in ("ours", "converted"):
        found = load_file(tmp_path / folder / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor.to(model.dtype)) for name, tensor in expected.items()), folder
        assert "quantization_config" not in json.loads((tmp_path / folder / "config.json").read_text())


def test_every_number_of_mxfp4_at_every_scale():
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 256, 16, 16).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).expand(1, 256, 16).contiguous()
    found = dequantized(blocks, scales)[0]
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    values = torch.cat((values, -values))
    row = torch.stack([values[[byte & 15, byte >> 4]] for byte in range(256)]).flatten()
    expected = row * torch.exp2(torch.arange(256, dtype=torch.float64) - 127)[:, None]
    assert torch.equal(found[:255].double(), expected[:255].bfloat16().double())
    assert found[255].isnan().all()


def test_any_place_of_an_mxfp4_tensor_can_be_read():
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 10, 4, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(120, 130, (3, 10, 4), generator=draw, dtype=torch.uint8)
    whole = dequantized(blocks, scales).mT
    tensor = Mxfp4("down_proj", InMemory(blocks), InMemory(scales))
    for place in (
        (slice(0, 3), slice(0, 128), slice(0, 10)),
        (slice(1, 2), slice(31, 33), slice(3, 4)),
        (slice(0, 2), slice(70, 128), slice(9, 10)),
    ):
        assert torch.equal(tensor[place], whole[place])


EXPERTS = "model.layers.1.mlp.experts."


@pytest.mark.parametrize(
    ("name", "damaged", "message"),
    [
        ("gate_up_proj_scales", lambda tensor: None, r"gate_up_proj_scales is missing"),
        ("down_proj_blocks", lambda tensor: tensor.float(), r"down_proj_blocks is F32; only U8 are read"),
        ("down_proj_scales", lambda tensor: tensor.index_fill(0, torch.tensor(2), 255), "a scale byte of 255 for exp"),
        (
            "down_proj_scales",
            lambda tensor: tensor[..., :2].contiguous(),
            r"\[6, 64, 2\], .* \[6, 64, 3, 16\]",
        ),
    ],
)
def test_damaged_mxfp4_is_named(tmp_path, mxfp4, name, damaged, message):
    tensors = mxfp4[1] | {EXPERTS + name: damaged(mxfp4[1][EXPERTS + name])}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((mxfp4[0] / "config.json").read_text())
    with pytest.raises(UserError, match=message):
        load_model(tmp_path)


def test_presets_have_the_published_sizes():
    published = {
        "gpt_oss:20b": (20_914_757_184, 3.61e9, 2e-3), "gpt_oss:120b": (116_829_156_672, 5.13e9, 2e-3),
        "qwen3_moe:30b-a3b": (30_532_122_624, 3_353_032_704, 1e-9), "deepseek_v3:671b": (671_026_419_200, 37.6e9, 5e-3),
    }  # fmt: skip
    for name, (total, active, digits) in published.items():
        config = preset(name)
        # gpt-oss's are published without the embedding, to three digits.
        embedding = config.vocab_size * config.dim if config.family == "gpt_oss" else 0
        assert config.num_parameters == total
        assert config.num_active_parameters - embedding == pytest.approx(active, rel=digits)
    micro = build_model(preset("gpt_oss:micro"), "float32", seed=0)
    assert sum(p.numel() for p in micro.parameters()) == micro.config.num_parameters
    for name, parameter in micro.named_parameters():
        assert parameter.any() != name.endswith(("bias", "sinks")), name
