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
}
ORIGINAL = "original_max_position_embeddings"
HARMLESS: dict[str, Any] = {
    "transformers_version": "4.51.0", "_name_or_path": "someone/model", "use_cache": False, "pad_token_id": 3,
    "initializer_range": 0.02, "pretraining_tp": 1, "attention_dropout": 0.0, "temperature": 0.6, "do_sample": True,
    "max_length": 20, "is_decoder": False, "tokenizer_class": "LlamaTokenizer", "unsloth_fixed": True,
    "output_hidden_states": False, "return_dict": True, "id2label": {"0": "LABEL_0"}, "quantization_config": None,
    "foo": None, "rope_interleaved": False, "hidden_act": "silu", "torchscript": False,
}  # fmt: skip
OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"mlp_bias": False, "attention_bias": False},
    "qwen3": {"use_sliding_window": False, "max_window_layers": 1, "sliding_window": 5},
    "qwen3_moe": {
        "use_sliding_window": False, "sliding_window": None, "qkv_bias": False, "use_qk_norm": True,
        "shared_expert_intermediate_size": 0, "output_router_logits": False, "router_aux_loss_coef": 0.001,
    },
    "gpt_oss": {"initial_context_length": 4096, "swiglu_limit": 7.0, "attention_bias": True},
    "deepseek_v3": {
        "aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "num_nextn_predict_layers": 1, "num_mtp_layers": 1, "qk_head_dim": 9,
    },
}  # fmt: skip
"""Keys of real folders that change nothing."""
REFUSED: dict[str, Any] = {
    "is_causal": False, "attention_bias": None, "mlp_bias": True, "hidden_act": "gelu", "use_sliding_window": True,
    "layer_types": "sliding_attention", "text_config": {"hidden_size": 32}, "per_layer_config": {"0": {}},
    "some_new_key": 1.5, "sliding_window_pattern": 2, "attention_dropout": 0.1, "output_router_logits": True,
    "model_type": "mistral", "transformers_weights": "other.safetensors", "partial_rotary_factor": 0.5,
    "logits_scaling": 8.0, "scoring_func": "softmax", "swiglu_limit": 5.0,
}  # fmt: skip
"""Keys that change what transformers computes, or might with others' code."""
CAN_BE_MISSING = {
    "llama": ("num_attention_heads", "num_key_value_heads", "head_dim"),
    "qwen3": ("num_attention_heads", "num_key_value_heads", "head_dim"),
    "qwen3_moe": (
        "num_key_value_heads", "head_dim", "moe_intermediate_size", "num_experts_per_tok", "norm_topk_prob",
        "decoder_sparse_step", "mlp_only_layers",
    ),
    "gpt_oss": ("num_key_value_heads", "head_dim", "num_experts_per_tok", "sliding_window", "layer_types"),
    "deepseek_v3": (
        "num_key_value_heads", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim",
        "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor",
        "first_k_dense_replace", "rope_interleave",
    ),
}  # fmt: skip
"""Keys whose default in transformers is small enough for a test, besides those of all families."""
OF_ALL = ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_id")


SIZES: dict[str, tuple[Any, ...]] = {
    "vocab_size": (64, 99), "hidden_size": (32, 64), "intermediate_size": (24, 40), "num_hidden_layers": (1, 2, 3),
    "num_attention_heads": (4, 8), "num_key_value_heads": (1, 2, 4), "head_dim": (8, 16, 24),
    "rms_norm_eps": (1e-6, 1e-5, 1e-2), "max_position_embeddings": (64, 128, 4096),
    "tie_word_embeddings": (True, False), "bos_token_id": (1, None), "eos_token_id": (2, [2], [5, 7], None),
}  # fmt: skip
MIXTURES: dict[str, dict[str, tuple[Any, ...]]] = {
    "qwen3_moe": {
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
    drawn = Drawn(rng, kind, {key: rng.choice(choices) for key, choices in (SIZES | MIXTURES.get(kind, {})).items()})
    named = [drawn.one("{}", "{}", "FSDP{}").format(ARCHITECTURES[kind])]
    drawn.values |= {"model_type": kind, "architectures": None if drawn.often(0.1) else named} | drawn.one(*DTYPES)
    if drawn.often(0.1):
        del drawn.values["architectures"]
    _mixture(drawn)
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
    if drawn.kind == "gpt_oss":
        kinds = [drawn.one("sliding_attention", "full_attention") for _ in range(values["num_hidden_layers"])]
        values["layer_types"] = drawn.one(kinds, None)
        if drawn.often(0.3):
            values["experts_per_token"] = drawn.one(values["num_experts_per_tok"], values["num_experts_per_tok"], 3)
            drawn.refused.add("experts_per_token")
    if drawn.kind == "deepseek_v3":
        del values["head_dim"]
        values["num_key_value_heads"] = values["num_attention_heads"]
        values["topk_group"] = min(values["topk_group"], values["n_group"])
        allowed = values["n_routed_experts"] // values["n_group"] * values["topk_group"]
        values["num_experts_per_tok"] = min(values["num_experts_per_tok"], allowed)
        if drawn.often(0.2):
            values["head_dim"] = values["qk_rope_head_dim"]
    if drawn.kind in OTHER_NAMES and drawn.often(0.3):
        # The value under its other name, or under both: then another number under the first.
        name, other = OTHER_NAMES[drawn.kind]
        values[other] = values[name]
        if drawn.often(0.5):
            del values[name]
        else:
            values[name] += drawn.one(0, 1)


def _missing_and_null(drawn: Drawn) -> None:
    values, defaults = drawn.values, CONFIG_MAPPING[drawn.kind]()
    for key in (*OF_ALL, *CAN_BE_MISSING[drawn.kind]):
        if drawn.often(0.15) and key in values:
            del values[key]
            if key == "qk_rope_head_dim":
                values.pop("head_dim", None)
            if key == "num_key_value_heads" and drawn.kind not in ("llama", "deepseek_v3"):
                values["num_attention_heads"] = defaults.num_key_value_heads
    if "num_attention_heads" not in values:  # 32
        values |= {"num_key_value_heads": drawn.one(2, 8), "hidden_size": 64}
    nullable = {"llama": ("num_key_value_heads", "head_dim"), "qwen3": ("num_key_value_heads", "layer_types")}
    for key in nullable.get(drawn.kind, ()):
        if drawn.often(0.1):
            values[key] = None
    if drawn.kind == "deepseek_v3":
        groups, kept = values.get("n_group", defaults.n_group), values.get("topk_group", defaults.topk_group)
        if kept > groups or values.get("num_experts_per_tok", 8) > 16 // groups * kept:
            values |= {"n_group": 2, "topk_group": 2}
    if drawn.kind != "gpt_oss" and drawn.often(0.1) and "layer_types" not in values:
        values["layer_types"] = ["full_attention"] * values["num_hidden_layers"]


def _rotation(drawn: Drawn) -> None:
    values = drawn.values
    theta = drawn.one(50.0, 1000, 10000.0, 500000, 1e6)
    table = _table(drawn, drawn.one("default", "yarn", "llama3"))
    original = drawn.one(8, 16, 32)
    if drawn.often(0.8):
        table[ORIGINAL] = original
    if drawn.often(0.3):
        values[ORIGINAL] = drawn.one(original, 24, 64)
    if drawn.often(0.1):
        (table if drawn.often(0.5) else values)["partial_rotary_factor"] = drawn.one(1.0, 1)
    place = drawn.one("v4", "v4", "v5", "v5", "v5 beside", "both", "both", "both", "none")
    other = {"rope_type": drawn.one("default", "yarn"), "factor": 3.0, ORIGINAL: 16, "rope_theta": 777.0}
    if place == "v4":
        values |= {"rope_theta": theta, "rope_scaling": table if table.get("factor") else None}
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


def _table(drawn: Drawn, kind: str) -> dict[str, Any]:
    if drawn.often(0.04):
        kind = drawn.one("linear", "dynamic", "proportional")
        drawn.refused.add("rope_type")
    names = {"rope_type": kind}
    if drawn.often(0.4):
        names = drawn.one({"type": kind}, {"rope_type": kind, "type": kind}, {"rope_type": kind, "type": "linear"})
    table: dict[str, Any] = {**names, "factor": drawn.one(2.0, 4, 8.5)}
    if kind == "default" and drawn.often(0.5):
        table = drawn.one({}, names)
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
        drawn.refused.add(name)
    if drawn.often(0.05):
        table[drawn.one("attn_factor", "extrapolation_factor")] = drawn.one(2.0, 0.88, None)
    return table


def _refused(drawn: Drawn) -> None:
    key = drawn.rng.choice(list(REFUSED))
    value = REFUSED[key]
    if key == "attention_bias":
        value = drawn.kind != "gpt_oss"
    if key == "layer_types":
        if drawn.kind == "gpt_oss":
            return
        value = [value] * drawn.values["num_hidden_layers"]
    drawn.values[key] = value
    drawn.refused.add(key)
