"""Draws a `config.json` of every family in the forms that are in use, and some that are not."""

import random
from dataclasses import dataclass, field
from typing import Any

from transformers import CONFIG_MAPPING

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "nanochat": "NanoChatForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
HYBRID = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
ORIGINAL = "original_max_position_embeddings"
HARMLESS: dict[str, Any] = {
    "transformers_version": "4.51.0", "_name_or_path": "someone/model", "use_cache": False, "pad_token_id": 3,
    "initializer_range": 0.02, "pretraining_tp": 1, "attention_dropout": 0.0, "temperature": 0.6, "do_sample": True,
    "max_length": 20, "is_decoder": False, "tokenizer_class": "LlamaTokenizer", "unsloth_fixed": True,
    "output_hidden_states": False, "return_dict": True, "id2label": {"0": "LABEL_0"}, "quantization_config": None,
    "foo": None, "rope_interleaved": False, "torchscript": False, "auto_map": {"AutoConfig": "some.Config"},
    "cache_implementation": "hybrid",
}  # fmt: skip
OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"hidden_act": "silu"},
    "qwen3": {"hidden_act": "silu", "use_qk_norm": True},
    "qwen3_moe": {
        "max_window_layers": 1, "qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0,
        "output_router_logits": False, "router_aux_loss_coef": 0.001,
    },
    "gpt_oss": {"initial_context_length": 4096, "swiglu_limit": 7.0, "attention_bias": True},
    "deepseek_v3": {
        "aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "num_nextn_predict_layers": 1, "num_mtp_layers": 1, "qk_head_dim": 9,
        "attention_bias": False,
    },
    "qwen2": {"use_mrope": False, "hidden_act": "silu"},
    "mistral": {"hidden_act": "silu"},
    "ministral": {"hidden_act": "silu"},
    "ministral3": {"hidden_act": "silu"},
    "smollm3": {"pretraining_tp": 2, "max_window_layers": 28},
    "granite": {"hidden_act": "silu"},
    "olmo2": {"hidden_act": "silu"},
    "olmo3": {"hidden_act": "silu"},
    "olmoe": {"clip_qkv": None, "output_router_logits": False, "router_aux_loss_coef": 0.01},
    "phi3": {
        "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attention_bias": False, "mlp_bias": False, "lm_head_bias": False,
        "full_attn_mod": 1, "interpolate_factor": 1,
    },
    "glm": {"hidden_act": "silu"},
    "glm4": {"hidden_act": "silu"},
    "glm4_moe": {"num_nextn_predict_layers": 1, "num_mtp_layers": 1},
    "gemma3_text": {
        "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": None, "use_bidirectional_attention": False,
        "_sliding_window_pattern": 4,
    },
    "nanochat": {"hidden_act": "relu2"},
    "qwen3_5_text": {
        "attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
    },
    "qwen3_5_moe_text": {
        "attn_output_gate": True, "mlp_only_layers": [], "router_aux_loss_coef": 0.001, "mtp_num_hidden_layers": 1,
        "output_router_logits": False, "norm_topk_prob": True, "decoder_sparse_step": 1,
    },
    "qwen3_next": {"router_aux_loss_coef": 0.001, "output_router_logits": False, "use_sliding_window": False},
}  # fmt: skip
"""Keys of real folders that change nothing."""
REFUSED: dict[str, Any] = {
    "is_causal": False, "attention_bias": None, "mlp_bias": True, "hidden_act": "gelu", "use_sliding_window": True,
    "layer_types": "chunked_attention", "text_config": {"hidden_size": 32}, "per_layer_config": {"0": {}},
    "some_new_key": 1.5, "clip_qkv": 3.0, "attention_dropout": 0.1, "output_router_logits": True,
    "model_type": "mixtral", "transformers_weights": "other.safetensors", "partial_rotary_factor": 0.5,
    "attn_logit_softcapping": 50.0, "scoring_func": "softmax", "swiglu_limit": 5.0,
}  # fmt: skip
"""Keys that change what transformers computes, or might with others' code."""
_WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
_HYBRID = (
    "num_key_value_heads", "attention_bias", "partial_rotary_factor", "linear_conv_kernel_dim",
    "full_attention_interval", "layer_types",
)  # fmt: skip
CAN_BE_MISSING = {
    "llama": ("num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias", "mlp_bias"),
    "qwen3": ("num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias", *_WINDOWS),
    "qwen3_moe": (
        "num_key_value_heads", "head_dim", "moe_intermediate_size", "num_experts_per_tok", "norm_topk_prob",
        "decoder_sparse_step", "mlp_only_layers", "attention_bias", "use_sliding_window", "sliding_window",
    ),
    "gpt_oss": ("num_key_value_heads", "head_dim", "num_experts_per_tok", "sliding_window", "layer_types"),
    "deepseek_v3": (
        "num_key_value_heads", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim",
        "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor",
        "first_k_dense_replace", "rope_interleave",
    ),
    "qwen2": ("num_key_value_heads", "head_dim", *_WINDOWS),
    "mistral": ("num_key_value_heads", "head_dim", "sliding_window", "layer_types"),
    "ministral": ("num_key_value_heads", "sliding_window", "layer_types"),
    "ministral3": ("num_key_value_heads", "head_dim", "sliding_window", "layer_types"),
    "smollm3": (
        "num_key_value_heads", "head_dim", "no_rope_layers", "no_rope_layer_interval", "attention_bias", "mlp_bias",
        *_WINDOWS,
    ),
    "granite": (
        "num_key_value_heads", "head_dim", "embedding_multiplier", "residual_multiplier", "attention_multiplier",
        "logits_scaling", "attention_bias", "mlp_bias",
    ),
    "olmo2": ("num_key_value_heads", "head_dim", "attention_bias"),
    "olmo3": ("num_key_value_heads", "head_dim", "attention_bias", "sliding_window", "layer_types"),
    "olmoe": ("num_key_value_heads", "head_dim", "attention_bias", "num_experts_per_tok", "norm_topk_prob"),
    "phi3": ("num_key_value_heads", "head_dim", "sliding_window", "layer_types", ORIGINAL),
    "glm": ("num_key_value_heads", "head_dim", "attention_bias"),
    "glm4": ("num_key_value_heads", "head_dim", "attention_bias"),
    "glm4_moe": (
        "num_key_value_heads", "head_dim", "attention_bias", "use_qk_norm", "moe_intermediate_size",
        "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor",
        "first_k_dense_replace",
    ),
    "gemma3_text": (
        "num_key_value_heads", "head_dim", "attention_bias", "query_pre_attn_scalar", "sliding_window",
        "sliding_window_pattern", "layer_types", "final_logit_softcapping", "rope_local_base_freq",
    ),
    "nanochat": ("num_key_value_heads", "head_dim", "attention_bias", "final_logit_softcapping"),
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": (*_HYBRID, "num_experts_per_tok"),
    "qwen3_next": (*_HYBRID, "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"),
}  # fmt: skip
"""Keys whose default in transformers is small enough for a test, besides those of all families."""
OF_ALL = ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_id")


SIZES: dict[str, tuple[Any, ...]] = {
    "vocab_size": (64, 99), "hidden_size": (32, 64), "intermediate_size": (24, 40), "num_hidden_layers": (1, 2, 3),
    "num_attention_heads": (4, 8), "num_key_value_heads": (1, 2, 4), "head_dim": (8, 16, 24),
    "rms_norm_eps": (1e-6, 1e-5, 1e-2), "max_position_embeddings": (64, 128, 4096),
    "tie_word_embeddings": (True, False), "bos_token_id": (1, None), "eos_token_id": (2, [2], [5, 7], None),
}  # fmt: skip
_BOTH = (True, False)
_WINDOW: dict[str, tuple[Any, ...]] = {
    "use_sliding_window": _BOTH, "sliding_window": (3, 8, None), "max_window_layers": (0, 1, 28)
}  # fmt: skip
_DELTA: dict[str, tuple[Any, ...]] = {
    "attention_bias": _BOTH, "partial_rotary_factor": (0.25, 0.5, 1.0), "linear_num_key_heads": (1, 2, 3),
    "linear_num_value_heads": (1, 2, 3, 4), "linear_key_head_dim": (4, 8), "linear_value_head_dim": (4, 12),
    "linear_conv_kernel_dim": (2, 4, 5), "full_attention_interval": (1, 2, 3, 4),
}  # fmt: skip
_SHARED: dict[str, tuple[Any, ...]] = {
    "num_experts": (8, 11), "num_experts_per_tok": (1, 2, 4), "moe_intermediate_size": (16, 24),
    "shared_expert_intermediate_size": (16, 20),
}  # fmt: skip
MORE: dict[str, dict[str, tuple[Any, ...]]] = {
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA | _SHARED,
    "qwen3_next": {
        **_DELTA, **_SHARED, "norm_topk_prob": _BOTH, "decoder_sparse_step": (1, 2),
        "mlp_only_layers": ([], [0], None),
    },
    "llama": {"attention_bias": _BOTH, "mlp_bias": _BOTH},
    "qwen3": {"attention_bias": _BOTH, **_WINDOW},
    "qwen2": _WINDOW,
    "mistral": {"sliding_window": (3, 8, None)},
    "ministral": {"sliding_window": (3, 8)},
    "ministral3": {"sliding_window": (3, None, None)},
    "smollm3": {
        "pad_token_id": (0, 3, None),
        "no_rope_layers": (None, [1, 0, 1, 0], [1, 1, 1], [0, 1, 1, 1, 1]), "no_rope_layer_interval": (1, 2, 3, 4),
        "attention_bias": _BOTH, "mlp_bias": _BOTH, **_WINDOW,
    },
    "granite": {
        "embedding_multiplier": (1.0, 12.0, 6), "residual_multiplier": (0.22, 1.0), "attention_multiplier": (0.125, 1),
        "logits_scaling": (8.0, 3, 1.0), "attention_bias": _BOTH, "mlp_bias": _BOTH,
    },
    "olmo2": {"attention_bias": _BOTH},
    "olmo3": {"attention_bias": _BOTH, "sliding_window": (3, 8)},
    "olmoe": {
        "attention_bias": _BOTH, "num_experts": (8, 11), "num_experts_per_tok": (1, 2, 4), "norm_topk_prob": _BOTH,
    },
    "phi3": {
        "pad_token_id": (0, 3, None), "sliding_window": (3, None, 262144), ORIGINAL: (16, 32),
        "partial_rotary_factor": (0.5, 0.75, 1.0),
    },
    "glm": {"pad_token_id": (0, 3, None), "attention_bias": _BOTH, "partial_rotary_factor": (0.5, 0.25, 1.0)},
    "glm4": {"pad_token_id": (0, 3, None), "attention_bias": _BOTH, "partial_rotary_factor": (0.5, 0.75, 1)},
    "glm4_moe": {
        "attention_bias": _BOTH, "partial_rotary_factor": (0.5, 0.25, 1.0), "use_qk_norm": _BOTH,
        "moe_intermediate_size": (16, 24), "n_routed_experts": (16,), "num_experts_per_tok": (2, 4),
        "n_shared_experts": (1, 2), "n_group": (1, 4, 8), "topk_group": (1, 2, 4, 8), "norm_topk_prob": _BOTH,
        "routed_scaling_factor": (1.0, 2.5), "first_k_dense_replace": (0, 1),
    },
    "gemma3_text": {
        "attention_bias": _BOTH, "query_pre_attn_scalar": (16, 24, 168), "sliding_window": (3, 8),
        "sliding_window_pattern": (1, 2, 3, 6), "final_logit_softcapping": (None, 2.0, 30.0),
        "rope_local_base_freq": (100.0, 10000),
    },
    "nanochat": {"attention_bias": _BOTH, "final_logit_softcapping": (None, 2.0, 15.0)},
    "qwen3_moe": {
        "attention_bias": _BOTH, "use_sliding_window": _BOTH, "sliding_window": (3, 8, None),
        "num_experts": (8, 11), "num_experts_per_tok": (1, 2, 4), "moe_intermediate_size": (16, 24),
        "norm_topk_prob": (True, False), "decoder_sparse_step": (1, 2), "mlp_only_layers": ([], [0], None),
    },
    "gpt_oss": {"num_local_experts": (4, 7), "num_experts_per_tok": (1, 2, 4), "sliding_window": (3, 8, 128)},
    "deepseek_v3": {
        "moe_intermediate_size": (16, 24), "n_routed_experts": (16,), "num_experts_per_tok": (2, 4),
        "n_shared_experts": (1, 2), "n_group": (1, 4, 8), "topk_group": (1, 2, 4, 8), "norm_topk_prob": (True, False),
        "routed_scaling_factor": (1.0, 1.7, 2.5), "first_k_dense_replace": (0, 1), "kv_lora_rank": (16, 24),
        "q_lora_rank": (24, None), "qk_nope_head_dim": (8,), "qk_rope_head_dim": (8, 16), "v_head_dim": (8, 12),
        "rope_interleave": (True, False),
    },
}  # fmt: skip
OTHER_NAMES = {
    "qwen3_moe": ("num_experts", "num_local_experts"),
    "gpt_oss": ("num_local_experts", "num_experts"),
    "deepseek_v3": ("n_routed_experts", "num_local_experts"),
    "olmoe": ("num_experts", "num_local_experts"),
    "glm4_moe": ("n_routed_experts", "num_local_experts"),
}
DTYPES: tuple[dict[str, Any], ...] = (
    {}, {"torch_dtype": None}, {"dtype": None, "torch_dtype": "float32"}, {"dtype": "float32"},
    {"torch_dtype": "float32"}, {"dtype": "float32", "torch_dtype": "bfloat16"},
)  # fmt: skip


@dataclass
class Drawn:
    """A `config.json`, and the keys that a refusal may name; without any it must load."""

    rng: random.Random
    kind: str
    values: dict[str, Any]
    refused: set[str] = field(default_factory=set)

    def one(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def often(self, share: float) -> bool:
        return self.rng.random() < share


def draw(seed: int) -> Drawn:
    """The same one for the same seed."""
    rng = random.Random(seed)
    kind = rng.choice(list(ARCHITECTURES))
    drawn = Drawn(rng, kind, {key: rng.choice(choices) for key, choices in (SIZES | MORE.get(kind, {})).items()})
    named = [drawn.one("{}", "{}", "FSDP{}").format(ARCHITECTURES[kind])]
    drawn.values |= {"model_type": kind, "architectures": None if drawn.often(0.1) else named} | drawn.one(*DTYPES)
    if drawn.often(0.1):
        del drawn.values["architectures"]
    _mixture(drawn)
    _windows(drawn)
    _missing_and_null(drawn)
    _rotation(drawn)
    harmless = HARMLESS | OF_FAMILY[kind]
    drawn.values |= {key: harmless[key] for key in rng.sample(list(harmless), rng.randint(0, 6))}
    if drawn.often(0.1):
        _refused(drawn)
    order = list(drawn.values)
    rng.shuffle(order)
    drawn.values = {key: drawn.values[key] for key in order}
    return drawn


def _mixture(drawn: Drawn) -> None:
    values = drawn.values
    if drawn.kind == "gpt_oss" and drawn.often(0.3):
        values["experts_per_token"] = drawn.one(values["num_experts_per_tok"], values["num_experts_per_tok"], 3)
        drawn.refused.add("experts_per_token")
    if drawn.kind == "deepseek_v3":
        del values["head_dim"]
        values["num_key_value_heads"] = values["num_attention_heads"]
        if drawn.often(0.2):
            values["head_dim"] = values["qk_rope_head_dim"]
    if "topk_group" in values:
        values["topk_group"] = min(values["topk_group"], values["n_group"])
        allowed = values["n_routed_experts"] // values["n_group"] * values["topk_group"]
        values["num_experts_per_tok"] = min(values["num_experts_per_tok"], allowed)
    if drawn.kind in ("olmoe", "phi3"):  # which transformers runs with this width only
        del values["head_dim"]
    if drawn.kind in HYBRID:  # for each key head
        values["linear_num_value_heads"] *= values["linear_num_key_heads"]
    if drawn.kind in OTHER_NAMES and drawn.often(0.3):
        # The value under its other name, or under both: then another number under the first.
        name, other = OTHER_NAMES[drawn.kind]
        values[other] = values[name]
        if drawn.often(0.5):
            del values[name]
        else:
            values[name] += drawn.one(0, 1)


def _windows(drawn: Drawn) -> None:
    """`layer_types`: missing, null, or a list; it may name windows that the other keys do not give."""
    values, layers = drawn.values, drawn.values["num_hidden_layers"]
    if drawn.kind == "smollm3" and values["no_rope_layers"] and drawn.often(0.1):
        values["no_rope_layers"] = [1] * (layers - 1)
        drawn.refused.add("no_rope_layers")
    if drawn.often(0.5):
        return
    if drawn.kind in HYBRID:
        kinds = [drawn.one(LINEAR, FULL) for _ in range(layers)]
        values["layer_types"] = drawn.one(kinds, kinds, None)
        return
    kinds = [drawn.one(SLIDING, FULL)] * layers
    if drawn.often(0.7):
        kinds = [drawn.one(SLIDING, FULL) for _ in range(layers)]
    if drawn.kind not in READS_KINDS:
        kinds = [FULL] * layers
    values["layer_types"] = drawn.one(kinds, kinds, None)
    if values["layer_types"] and drawn.kind not in ("gpt_oss", "gemma3_text", "olmo3"):
        drawn.refused |= {"layer_types", "sliding_window"}


AS_MANY_AS_HEADS = ("llama", "granite", "olmo2", "olmo3", "olmoe", "phi3", "nanochat", "deepseek_v3")
"""Families with a key-value head for each head unless the key says otherwise."""
READS_KINDS = (
    "gpt_oss", "qwen2", "qwen3", "qwen3_moe", "mistral", "ministral", "ministral3", "smollm3", "olmo3", "phi3",
    "gemma3_text",
)  # fmt: skip
"""Families with windows."""


def _missing_and_null(drawn: Drawn) -> None:
    values, defaults = drawn.values, CONFIG_MAPPING[drawn.kind]()
    for key in (*OF_ALL, *CAN_BE_MISSING[drawn.kind]):
        if drawn.often(0.15) and key in values:
            del values[key]
            if key == "qk_rope_head_dim":
                values.pop("head_dim", None)
            if key == "num_key_value_heads" and drawn.kind not in AS_MANY_AS_HEADS:
                values["num_attention_heads"] = defaults.num_key_value_heads
                values["hidden_size"] = 64
    if "num_attention_heads" not in values:  # 32
        values |= {"num_key_value_heads": drawn.one(2, 8), "hidden_size": 64}
    if drawn.kind in (*AS_MANY_AS_HEADS, "qwen2", "qwen3", "smollm3") and drawn.often(0.1):
        values["num_key_value_heads"] = None
    if drawn.kind in ("llama", "mistral") and drawn.often(0.1):
        values["head_dim"] = None
    if drawn.kind == "gemma3_text" and "head_dim" not in values:  # 256: scores must not saturate
        values["query_pre_attn_scalar"] = 168
    if drawn.kind == "mistral" and (values.get("sliding_window", 3) is None or values.get("head_dim") is None):
        values.pop("layer_types", None)  # with it, transformers reads Ministral, which needs both
    if drawn.kind in ("deepseek_v3", "glm4_moe"):
        groups, kept = values.get("n_group", defaults.n_group), values.get("topk_group", defaults.topk_group)
        if kept > groups or values.get("num_experts_per_tok", 8) > 16 // groups * kept:
            values |= {"n_group": 2, "topk_group": 2}


def _rotation(drawn: Drawn) -> None:
    values = drawn.values
    if drawn.kind in ("gemma3_text", "olmo3"):
        return _two_rotations(drawn)
    kinds = {
        "phi3": ("default", "longrope"), "nanochat": ("default",), "ministral3": ("yarn", "yarn", "llama3", "default"),
        "deepseek_v3": ("default", "yarn", "llama3"),
    }  # fmt: skip
    theta = drawn.one(50.0, 1000, 10000.0, 500000, 1e6)
    kind = drawn.one(*kinds.get(drawn.kind, ("default", "yarn", "llama3", "linear", "dynamic", "longrope")))
    if kind == "dynamic" and _pairs(drawn.kind, values) < 2:  # transformers divides by zero
        kind = "linear"
    table = _table(drawn, kind)
    original = drawn.one(8, 16, 32)
    if drawn.kind != "phi3" and drawn.often(0.3):
        values[ORIGINAL] = drawn.one(original, 24, 64) if kind != "longrope" else original
    if drawn.often(0.8):
        table[ORIGINAL] = original
    if drawn.kind == "ministral3":
        table |= {"llama_4_scaling_beta": drawn.one(0.1, 0.5, 1), ORIGINAL: original}
        if drawn.often(0.05):
            del table[drawn.one("llama_4_scaling_beta", ORIGINAL)]
            drawn.refused |= {"llama_4_scaling_beta"}
    if drawn.kind in ("nanochat", "phi3", *HYBRID):  # a table beside an empty one, or factors for another share
        drawn.refused |= {"rope_type", "short_factor"}
    if drawn.kind in ("glm4_moe", "phi3", *HYBRID):
        drawn.refused.add("partial_rotary_factor")  # of an odd number of features
    if "partial_rotary_factor" in values and drawn.often(0.3):
        (table if drawn.often(0.5) else values)["partial_rotary_factor"] = values.pop("partial_rotary_factor")
    elif "partial_rotary_factor" not in values and drawn.often(0.1):
        (table if drawn.often(0.5) else values)["partial_rotary_factor"] = drawn.one(1.0, 1)
    place = drawn.one("v4", "v4", "v5", "v5", "v5 beside", "both", "both", "both", "none")
    other = {"rope_type": drawn.one("default", "yarn"), "factor": 3.0, ORIGINAL: 16, "rope_theta": 777.0}
    if place == "v4":
        values |= {"rope_theta": theta, "rope_scaling": table or None}
    elif place == "v5":
        values["rope_parameters"] = {"rope_theta": theta, **table}
        values |= drawn.one({}, {"rope_scaling": None}, {"rope_scaling": {}}, {"rope_theta": 3.0})
    elif place == "v5 beside":
        values |= {"rope_parameters": table, "rope_theta": theta}
    elif place == "both":
        values |= {
            "rope_scaling": table | drawn.one({}, {"rope_theta": theta}),
            "rope_parameters": drawn.one(other, None),
        }
        values |= drawn.one({}, {"rope_theta": 300})
    if drawn.often(0.05):
        values.pop("rope_theta", None)


def _two_rotations(drawn: Drawn) -> None:
    """Of families whose layers with a window have a table of their own."""
    values = drawn.values
    theta = drawn.one(50.0, 1000, 10000.0, 500000, 1e6)
    drawn.refused |= {"truncate", "mscale_all_dim"}
    full, sliding = (_table(drawn, drawn.one("default", "default", "yarn", "llama3", "linear")) for _ in range(2))
    for table in (full, sliding):
        if drawn.often(0.8):
            table[ORIGINAL] = drawn.one(8, 16, 32)
        if drawn.often(0.5):
            table["rope_theta"] = drawn.one(30.0, 2000)
    if drawn.often(0.1):
        values[ORIGINAL] = drawn.one(8, 24, 64)
    if drawn.often(0.1):
        drawn.one(full, sliding, values)["partial_rotary_factor"] = drawn.one(1.0, 0.5)
        drawn.refused.add("partial_rotary_factor")
    place = drawn.one("v4", "v4", "v5", "v5", "both", "none")
    if place == "v4":
        values |= {"rope_theta": theta, "rope_scaling": drawn.one(full, None, {})}
    if place in ("v5", "both"):
        values["rope_parameters"] = {FULL: full, SLIDING: drawn.one(sliding, sliding, None)}
        values |= drawn.one({}, {"rope_theta": theta}, {"rope_scaling": None})
    if place == "both":
        values |= {"rope_scaling": _table(drawn, drawn.one("yarn", "linear"))}
    if place == "v5" and drawn.often(0.2):
        del values["rope_parameters"][drawn.one(FULL, SLIDING)]


WIDTHS = {"qwen3": 128, "gpt_oss": 64, "glm": 128, "glm4": 128}
"""Features of a head, if the key is missing, for families in which they do not follow from the others."""


def _pairs(kind: str, values: dict[str, Any]) -> int:
    """Of a head's features that are rotated together."""
    width = values.get("head_dim", WIDTHS.get(kind)) or values["hidden_size"] // values.get("num_attention_heads", 32)
    return int(width * values.get("partial_rotary_factor", 0.25 if kind in HYBRID else 1.0)) // 2


def _table(drawn: Drawn, kind: str) -> dict[str, Any]:
    if drawn.often(0.04):
        kind = "proportional"
        drawn.refused.add("rope_type")
    names = {"rope_type": kind}
    if drawn.often(0.4):
        names = drawn.one({"type": kind}, {"rope_type": kind, "type": kind}, {"rope_type": kind, "type": "default"})
    table: dict[str, Any] = {**names, "factor": drawn.one(2.0, 4, 8.5)}
    if kind == "default" and drawn.often(0.5):
        table = drawn.one({}, names)
    if kind == "longrope":
        pairs = _pairs(drawn.kind, drawn.values)
        table |= {
            key: [drawn.one(1, 1.0, 1.5, 4.0) for _ in range(pairs)] for key in ("short_factor", "long_factor")
        } | drawn.one({}, {"attention_factor": 1.2}, {"attention_factor": None})
        if drawn.often(0.5):
            del table["factor"]
        if drawn.often(0.05):
            table["long_factor"] = [1.0] * (pairs + 1)
            drawn.refused.add("long_factor")
    if kind == "llama3":
        table |= {"low_freq_factor": drawn.one(1, 1.5), "high_freq_factor": drawn.one(4.0, 2)}
        if drawn.often(0.05):
            table["high_freq_factor"] = 0.5
            drawn.refused.add("high_freq_factor")
    if kind == "yarn":
        more = {
            "beta_fast": drawn.one(32, 16.0, None, 0),
            "beta_slow": drawn.one(1, 2.0, None),
            "truncate": drawn.one(True, False),
            "mscale": drawn.one(1.0, 0.707, 1, None, 0),
            "mscale_all_dim": drawn.one(1.0, 0.5, None, 0),
            "attention_factor": drawn.one(1.3, None, 1),
            "finetuned": True,
        }
        table |= {key: more[key] for key in drawn.rng.sample(list(more), drawn.rng.randint(0, 5))}
        if drawn.often(0.2) and not table.get("mscale_all_dim"):
            table["factor"] = None
        if drawn.often(0.03):
            table["attention_factor"] = 0.0
            drawn.refused.add("attention_factor")
    if drawn.often(0.03):
        name = drawn.one("full_attention", "mrope_section")
        table[name] = {"full_attention": {"rope_theta": 10.0}, "mrope_section": [1, 1, 2]}[name]
        if name != "mrope_section" or drawn.kind not in HYBRID[:2]:
            drawn.refused.add(name)
    if drawn.often(0.05):
        table[drawn.one("attn_factor", "extrapolation_factor")] = drawn.one(2.0, 0.88, None)
    return table


def _refused(drawn: Drawn) -> None:
    key = drawn.rng.choice(list(REFUSED))
    value = REFUSED[key]
    if key in drawn.values or key in CAN_BE_MISSING[drawn.kind]:
        return
    if key == "attention_bias":
        value = drawn.kind not in ("gpt_oss", "qwen2")
    if key == "layer_types":
        value = [value] * drawn.values["num_hidden_layers"]
    drawn.values[key] = value
    drawn.refused.add(key)
