"""A `config.json` is read as transformers reads it, or refused by the name of a key."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from lockstep import load_model, score
from lockstep.errors import UserError
from lockstep.model import Yarn, preset, read_config
from lockstep.model.families import from_hugging_face, to_hugging_face
from lockstep.model.families.keys import NULL_IS_MISSING, ONLY
from lockstep.model.ropes import LongRope
from tests.model.drawn_configurations import HYBRID, draw
from tests.model.public_configurations import PHI_MINI, PUBLIC

# Both sides sum in float32, in different orders, through up to three layers.
TOLERANCE = 1e-4
# The norm of linear attention's outputs scales up the roundings of those that are small: transformers' own two forms,
# by chunk and by token, differ by 4e-4.
HYBRID_TOLERANCE = 1e-3
LENGTH, LONGER = 40, 140
"""Tokens; of models with linear attention, more than two of its chunks."""


def write_weights(folder, seed):
    """Of the shapes that transformers takes from the folder's `config.json`, large enough for differences to show."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, tensor in model.state_dict().items():
        drawn = torch.randn(tensor.shape, generator=generator)
        if "norm" in name:
            offset = model.config.model_type in HYBRID and "linear_attn" not in name
            drawn = (0 if offset else 1) + 0.2 * drawn
        elif name.endswith("A_log"):
            drawn = torch.linspace(-4, 2, len(tensor))
        elif tensor.dim() > 1:
            drawn *= (2 if "q_" in name or "k_" in name else 1) / tensor.shape[-1] ** 0.5
        tensors[name] = drawn
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def their_log_probs(folder, tokens):
    model = AutoModelForCausalLM.from_pretrained(folder)
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
    return model, logits[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


@pytest.mark.filterwarnings("ignore:.*(replaces rope_parameters|is ignored, as in transformers)")
@pytest.mark.parametrize("seed", [*range(40), *(pytest.param(n, marks=pytest.mark.slow) for n in range(40, 2000))])
def test_a_configuration_gives_the_log_probabilities_of_transformers_or_a_refusal_that_names_its_key(tmp_path, seed):
    drawn = draw(seed)
    (tmp_path / "config.json").write_text(json.dumps(drawn.values))
    try:
        config = read_config(tmp_path)
    except UserError as error:
        assert any(re.search(rf"\b{key}\b", str(error)) for key in drawn.refused), error
        return
    write_weights(tmp_path, seed)
    length = min(LONGER, config.max_positions) if drawn.kind in HYBRID else LENGTH
    tokens = torch.randint(60, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    theirs, expected = their_log_probs(tmp_path, tokens)
    ours = load_model(tmp_path)
    assert ours.config == config and ours.dtype == theirs.dtype
    tolerance = HYBRID_TOLERANCE if drawn.kind in HYBRID else TOLERANCE
    torch.testing.assert_close(score(ours, [tokens])[0], expected, rtol=0, atol=tolerance)
    eos = theirs.config.eos_token_id
    assert list(config.eos_token_ids) == (eos if isinstance(eos, list) else [] if eos is None else [eos])
    assert config.bos_token_id == theirs.config.bos_token_id and config.pad_token_id == theirs.config.pad_token_id


@pytest.mark.parametrize("key", ONLY)
def test_a_setting_that_is_not_supported_is_refused_by_name(key):
    values = PUBLIC["DeepSeek-V3, in bfloat16"][1]
    other = "gelu" if isinstance(ONLY[key], str) else 0.1 if ONLY[key] == 0 and key == "attention_dropout" else True
    with pytest.raises(UserError, match=rf"config\.json: {key} is .*; only .* is supported"):
        from_hugging_face(values | {key: other}, "config.json")
    assert from_hugging_face(values | {key: ONLY[key]}, "config.json") == from_hugging_face(values, "config.json")


def test_dropout_that_published_granite_folders_name_is_warned_of():
    values = to_hugging_face(preset("granite:micro"), "float32")
    with pytest.warns(UserWarning, match=r"attention_dropout is 0\.1; Lockstep trains without dropout"):
        assert from_hugging_face(values | {"attention_dropout": 0.1}, "") == preset("granite:micro")


def test_a_null_is_a_key_that_is_missing():
    values = PUBLIC["Qwen3 8B"][1]
    for key in NULL_IS_MISSING:
        without = {name: value for name, value in values.items() if name != key}
        assert from_hugging_face(values | {key: None}, "") == from_hugging_face(without, ""), key


@pytest.mark.parametrize("name", list(PUBLIC))
def test_public_folders_are_read_as_the_sizes_that_they_are(name):
    size, values = PUBLIC[name]
    ours, known = from_hugging_face(values, "config.json"), preset(size)
    eos = values["eos_token_id"]
    expected = replace(
        known,
        bos_token_id=values.get("bos_token_id"),
        pad_token_id=values.get("pad_token_id"),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,),
        intermediate_size=values["intermediate_size"],
    )
    assert ours == expected


def test_phi_4_mini_is_read_with_its_factors():
    config = from_hugging_face(PHI_MINI, "config.json")
    assert config.rotated_features == 96 and config.windows == (262144,) and config.tie_embeddings
    scaling = config.rope_scaling
    assert isinstance(scaling, LongRope) and scaling.original_max_positions == 4096
    assert scaling.attention_factor == math.sqrt(1 + math.log(32) / math.log(4096))
    assert scaling.long_factors == tuple(PHI_MINI["rope_scaling"]["long_factor"])


def test_rope_scaling_replaces_rope_parameters_and_what_it_leaves_out_is_warned_of():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    values = to_hugging_face(preset("qwen3:micro"), "float32")
    config = from_hugging_face(values | {"rope_scaling": yarn}, "config.json")
    assert config.rope_scaling == Yarn(4.0, 64) and config.rope_theta == 1e6
    with pytest.warns(UserWarning, match="rope_scaling: attn_factor is ignored, .* only reads attention_") as caught:
        ignored = from_hugging_face(values | {"rope_scaling": yarn | {"attn_factor": 0.88}}, "config.json")
    assert ignored == config and sum("is ignored" in str(each.message) for each in caught) == 1
    del values["rope_theta"]
    with pytest.warns(UserWarning, match=r"rope_scaling replaces .* rope_theta of 1000000.0: .* it is 10000.0 now"):
        assert from_hugging_face(values | {"rope_scaling": yarn}, "config.json").rope_theta == 10000.0
