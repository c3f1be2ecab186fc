"""Ready runs: what they are made of, and settings from files over them."""

from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.config import PretrainConfig, RLConfig, from_toml, validate
from lockstep.errors import UserError
from lockstep.model import PRESETS, preset
from lockstep.recipes import FROM_SCRATCH, RECIPES, recipe
from lockstep.train.dry_run import estimate_memory
from tests.parallel.launch import launch

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
    if getattr(config, "algorithm", "") == "distillation":
        config.teacher = "TEACHER"
    validate(config)


def memory_of(name):
    """GiB per rank on 8, 64 and 512 of them; None where the layout takes more."""
    found = []
    for ranks in (8, 64, 512):
        config = FROM_SCRATCH[name]()
        config.dry_run, config.device = ranks, "cuda"
        try:
            found.append(sum(estimate_memory(config).memory.values()) / 2**30)
        except UserError as error:
            assert f"ranks, but {ranks} are running" in str(error)
            found.append(None)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", FROM_SCRATCH)
def test_the_table_of_memory_in_the_documentation_is_what_dry_runs_say(name):
    page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
    # In a process of its own, for the simulated ranks are that process's world.
    (found,) = launch(1, memory_of, name, seconds=900)
    for cell, result in zip(line.split("|")[2:5], found):
        assert cell.strip() == ("" if result is None else f"{result:.1f}")
    assert found[-1] < 75, "512 GPUs of 80 GiB are enough for each"


@pytest.mark.parametrize("command", RECIPES)
def test_help_names_every_recipe_and_the_full_help_has_a_line_for_each(command, capsys):
    for option in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            main([command, option])
    short, _, full = capsys.readouterr().out.partition("--help-all")
    assert ("--recipe" in short) == ("--recipe" in full) == bool(RECIPES[command])
    for name in RECIPES[command]:
        assert name in short
        assert any(line.strip().startswith(f"{name} ") and len(line.split()) > 3 for line in full.splitlines())


def test_yaml_is_read_like_toml(tmp_path):
    yaml = "steps: 7\nmodel: DIR\ntrain:\n  learning_rate: 1e-5\n  rules: ['*norm* weight_decay=0.1']\n"
    toml = 'steps = 7\nmodel = "DIR"\n[train]\nlearning_rate = 1e-5\nrules = ["*norm* weight_decay=0.1"]\n'
    (tmp_path / "c.yaml").write_text(yaml)
    (tmp_path / "c.toml").write_text(toml)
    read = from_toml(tmp_path / "c.yaml", RLConfig())
    assert read == from_toml(tmp_path / "c.toml", RLConfig()) and read.train.learning_rate == 1e-5
    (tmp_path / "empty.yml").write_text("")
    assert from_toml(tmp_path / "empty.yml", RLConfig()) == RLConfig()


MERGED = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i}\n  <<: [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.toml", "[model]\na = 1\n", '"model" must be a value, not a table'),
        ("c.yaml", "train: x\n", '"train" must be a table'),
        ("c.yaml", "lr: 1e-3\n", 'unknown key "lr". In Lockstep it is train.learning_rate'),
        ("c.toml", "[train]\nmax_grad_norm = 1\nbatch_size = 8\n", '"batch_size". In Lockstep it is tokens_per_step'),
        ("c.yaml", "~: 2\n", 'unknown key "None"'),
        *(
            ("c.yaml", text, r"c\.yaml")
            for text in (
                "steps: 2\nsteps: 3",
                "data: null",
                "steps: [1",
                "just a text",
                "- 1",
                "!!python/object:os.x {}",
            )
        ),
        ("c.yaml", "x: " + "[" * 100_000, "cannot be read as YAML"),
        ("c.toml", "x = " + "[" * 100_000, "cannot be read as TOML"),
        ("c.yaml", "model: &a [*a]\n", '"model" must be a list of plain values'),
        ("c.yaml", MERGED, "cannot be read as YAML .more than 10 aliases"),
        ("c.yaml", 'steps: !!int ""', "cannot be read as YAML .IndexError"),
        ("c.yaml", "steps: " + "1:" * 400 + "1.5", "cannot be read as YAML .OverflowError"),
        ("c.yaml", "train:\n  rules: [0xffffffffffffffff]", '"rules" contains a number of more than 64 bits'),
        ("c.toml", "steps = 0x" + "f" * 5000, '"steps" contains a number of more than 64 bits'),
        ("c.toml", "# a comment\n" * 10_000, "cannot be read as TOML .larger than 65536 bytes"),
    ],
)
def test_a_config_file_of_a_wrong_shape_is_refused_by_its_key(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        from_toml(tmp_path / name, PretrainConfig())
