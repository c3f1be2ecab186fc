"""Renderings of real templates, and small models that speak them."""

import dataclasses

import pytest
import torch

from lockstep import Engine, EngineConfig, load_model
from lockstep.data import load_tokenizer
from lockstep.model import build_model, preset, save_model
from tests.rl.conversations.families import FAMILIES, rendering_of, write_family


@pytest.fixture(scope="session")
def families(tmp_path_factory, bpe_tokenizer):
    """A folder with a folder of each family's name."""
    folder = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        write_family(folder / name, name, bpe_tokenizer)
    return folder


@pytest.fixture(scope="session")
def renderings(families):
    return {name: rendering_of(families / name) for name in FAMILIES}


@pytest.fixture(scope="session")
def chat_model(families):
    """`chat_model(name)`: the folder with a small model in it, whose tokens depend on what was said."""

    def make(name):
        folder = families / name
        if not (folder / "config.json").is_file():
            tokenizer = load_tokenizer(folder)
            shape = preset("qwen3:micro", tokenizer.vocab_size + tokenizer.vocab_size % 2, (tokenizer.eos_id,))
            model = build_model(dataclasses.replace(shape, max_positions=512), dtype="float32", seed=1)
            with torch.no_grad():
                model.embed_tokens.weight.mul_(2)
            template = (folder / "tokenizer_config.json").read_text()
            save_model(model, folder)
            (folder / "tokenizer_config.json").write_text(template)
        return folder

    return make


@pytest.fixture(scope="session")
def engine_of(chat_model):
    """`engine_of(name)`: an engine over that model, with another scheduling where `max_sequences` is another."""
    models = {}

    def make(name, max_sequences=8):
        folder = chat_model(name)
        if name not in models:
            models[name] = load_model(folder), load_tokenizer(folder)
        model, tokenizer = models[name]
        settings = EngineConfig(max_tokens_per_step=64, max_sequences=max_sequences, cache_tokens=4096)
        return Engine(model, settings, tokenizer)

    return make
