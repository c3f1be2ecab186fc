"""An unknown architecture is refused with the family that comes nearest, and with what differs."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from lockstep import build_model, save_model
from lockstep.errors import UserError
from lockstep.model import preset, read_config
from lockstep.model.families import FAMILIES, from_hugging_face, to_hugging_face


def refusal(values):
    with pytest.raises(UserError) as error:
        from_hugging_face(values, "config.json")
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "family", "different"),
    [
        ("starcoder2", "mistral", "hidden_act is 'gelu_pytorch_tanh' (only 'silu'); keys embedding_dropout, norm_eps"),
        ("gemma2", "gemma3", "attn_logit_softcapping is 50.0 (only None)"),
        ("stablelm", "phi3", "keys hidden_dropout, layer_norm_eps, qk_layernorm, use_parallel_residual, use_qkv_bias"),
        ("mixtral", "olmoe", "keys router_jitter_noise"),
        ("qwen2_moe", "qwen3_moe", "qkv_bias is True (only False); shared_expert_intermediate_size is 5632 (only 0)"),
        ("deepseek_v2", "deepseek_v3", "topk_method is 'greedy' (only 'noaux_tc')"),
        ("olmo_hybrid", "qwen3_5", "keys linear_a_log_max, linear_a_log_min, linear_allow_neg_eigval"),
        ("olmo", "olmo2", "reads all keys; the models may differ in what no key says"),
        *((kind, "", "keys ") for kind in ("cohere", "cohere2", "falcon", "gpt2", "gpt_neox", "bloom", "opt", "mamba")),
    ],
)
def test_configurations_of_transformers_are_compared_with_the_family_that_reads_most_of_them(kind, family, different):
    text = refusal(CONFIG_MAPPING[kind]().to_dict())
    assert text.startswith(f'config.json: model_type "{kind}" is not supported. The nearest family is {family}')
    assert different in text and text.endswith("To read it as a family of your own, see docs/models.md")
    assert len(text) < 500 and "\n" not in text


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_a_family_under_another_name_is_nearest_to_it(family):
    shape = preset(f"{family}:{next(iter(FAMILIES[family].PRESETS))}")
    values = to_hugging_face(shape, "float32") | {"model_type": f"{FAMILIES[family].MODEL_TYPE}_of_mine"}
    text = refusal(values | {"architectures": None, "auto_map": {"AutoModel": "x.Y"}})
    assert f"nearest family is {family} ({FAMILIES[family].ARCHITECTURE}), which reads all keys" in text
    text = refusal(values | {"architectures": ["MyModel"], "scale_of_odd_layers": 2.0})
    assert f"nearest family is {family}; what differs: keys scale_of_odd_layers. To" in text


def test_the_names_of_tensors_are_compared_too(tmp_path):
    torch.manual_seed(0)
    config = CONFIG_MAPPING["starcoder2"](
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "starcoder")
    with pytest.raises(UserError) as error:
        read_config(tmp_path / "starcoder")
    there, _, lacking = str(error.value).partition("; no tensors ")
    assert "; tensors " in there and " model.layers.0.mlp.c_fc.weight" in there
    assert "model.layers.0.mlp.down_proj.weight" in lacking

    # The keys fit llama3 and olmo2 alike; where the norms are tells which it is.
    for family in ("llama3", "olmo2"):
        save_model(build_model(preset(f"{family}:micro", 64), "float32", seed=0), tmp_path / family)
        path = tmp_path / family / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": None, "model_type": "other"}))
        with pytest.raises(UserError, match=f"nearest family is {family} "):
            read_config(tmp_path / family)


KEYS = sorted({key for family in FAMILIES.values() for key in family.DEFAULTS} | {"layer_types", "odd", "rope_scaling"})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=12), st.text())
def test_any_configuration_is_refused_in_one_short_line(values, kind):
    text = refusal({"hidden_size": 64, "model_type": f"x{kind}", **values})
    assert "The nearest family is " in text and len(text) < 1500
