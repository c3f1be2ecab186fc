"""Ready runs: what they are made of, and settings from files over them."""

import pytest

from lockstep.cli import main
from lockstep.config import PretrainConfig, RLConfig, from_toml, validate
from lockstep.errors import UserError
from lockstep.model import PRESETS, preset
from lockstep.recipes import RECIPES, recipe

# What the models' own pages state, in billions.
PARAMETERS = {
    "llama3:1b": 1.24, "llama3:3b": 3.21, "llama3:8b": 8.03, "llama3:70b": 70.55, "llama3:405b": 405.85,
    "qwen3:0.6b": 0.60, "qwen3:1.7b": 1.72, "qwen3:4b": 4.02, "qwen3:8b": 8.19, "qwen3:14b": 14.77, "qwen3:32b": 32.76,
}  # fmt: skip


@pytest.mark.parametrize(("name", "billions"), PARAMETERS.items())
def test_a_preset_has_the_published_number_of_parameters(name, billions):
    assert round(preset(name).num_parameters / 1e9, 2) == billions


@pytest.mark.parametrize(("command", "name"), [(c, n) for c, recipes in RECIPES.items() for n in recipes])
def test_a_recipe_is_valid_and_its_model_exists(command, name):
    config = recipe(command, name)
    if command == "pretrain":
        assert config.model in PRESETS
    else:
        config.model = config.model or "DIR"
    config.data = config.data or "DATA"
    validate(config)


@pytest.mark.parametrize("command", RECIPES)
def test_help_begins_with_what_is_used_most_and_a_line_for_each_recipe(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = capsys.readouterr().out
    assert said.startswith("most used: --")
    for name in RECIPES[command]:
        assert any(line.strip().startswith(f"{name} ") and len(line.split()) > 3 for line in said.splitlines())


def test_yaml_is_read_like_toml(tmp_path):
    yaml = "steps: 7\nmodel: DIR\ntrain:\n  learning_rate: 1e-5\n  rules: ['*norm* weight_decay=0.1']\n"
    toml = 'steps = 7\nmodel = "DIR"\n[train]\nlearning_rate = 1e-5\nrules = ["*norm* weight_decay=0.1"]\n'
    (tmp_path / "c.yaml").write_text(yaml)
    (tmp_path / "c.toml").write_text(toml)
    read = from_toml(tmp_path / "c.yaml", RLConfig())
    assert read == from_toml(tmp_path / "c.toml", RLConfig()) and read.train.learning_rate == 1e-5
    (tmp_path / "empty.yml").write_text("")
    assert from_toml(tmp_path / "empty.yml", RLConfig()) == RLConfig()


@pytest.mark.parametrize(
    "text", ["steps: [1", "just a text", "stepz: 1", "train: {lr: 1}", "- 1\n- 2", "!!python/object:os.x {}"]
)
def test_bad_yaml_is_named(tmp_path, text):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(UserError, match=r"bad\.yaml"):
        from_toml(tmp_path / "bad.yaml", PretrainConfig())
