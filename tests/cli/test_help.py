"""What --help and --help-all print."""

import re

import pytest

from lockstep.cli import COMMANDS, main
from lockstep.commands.option_names import options_of
from lockstep.commands.short_help import SHORT
from lockstep.config import (
    DPOConfig,
    EvalConfig,
    PretrainConfig,
    RewardModelConfig,
    RLConfig,
    ServeConfig,
    SFTConfig,
    TrainServerConfig,
)

RUNS = (PretrainConfig, SFTConfig, DPOConfig, RewardModelConfig, RLConfig)
KINDS = dict(zip(SHORT, (*RUNS, ServeConfig, TrainServerConfig, EvalConfig)))


@pytest.fixture
def printed(capsys, monkeypatch):
    """Prints on a terminal of 80 columns; returns what a command printed, without the box around the options."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([*arguments])
        assert ended.value.code == 0
        return re.sub("[\u2500-\u257f]", " ", capsys.readouterr().out)

    return run


def _options(said):
    return {
        name: " ".join(text.split())
        for name, text in re.findall(r"\n  --([\w.-]+)(.*?)(?=\n  -|\n\S|\n +\n)", said, re.S)
    }


@pytest.mark.parametrize("command", SHORT)
def test_the_short_help_has_a_line_of_some_twenty_settings_each_and_fits_80_columns(command, printed):
    names = SHORT[command].split()
    known = {name for name, _ in options_of(KINDS[command])}
    assert set(names) <= known and len(names) == len(set(names)) and 15 <= len(names) <= 27
    said = printed(command, "--help")
    assert [name for name in _options(said) if name not in ("config", "base", "max-positions", "recipe")] == names
    assert said.endswith(f"\n{len(known) - len(names)} more settings: lockstep {command} --help-all\n")
    assert max(map(len, said.splitlines())) <= 80
    for name, text in _options(said).items():
        assert re.search(r"[a-z]{3}.*\.( \((default: .+|required)\))?$", text), f"{name}: {text}"


@pytest.mark.parametrize("command", SHORT)
def test_the_full_help_lists_every_setting(command, printed):
    assert {name for name, _ in options_of(KINDS[command])} <= _options(printed(command, "--help-all")).keys()


def test_the_short_help_shows_the_defaults_of_the_recipe(printed):
    options = _options(printed("rl", "--recipe", "gsm8k", "--help"))
    assert options["max-new-tokens"].endswith("(default: 256)")
    assert options["train.learning-rate"].endswith("(default: 2e-06)")


def test_a_setting_that_a_command_inherits_has_the_text_of_the_command_itself(printed):
    options = _options(printed("sft", "--help"))
    assert "Tokens per row of conversations" in options["sequence-length"]
    assert "Continue the run" in options["resume"]


def test_commands_with_few_settings_list_all_of_them_in_either_help(printed):
    for command in COMMANDS.keys() - SHORT.keys():
        short, full = printed(command, "--help"), printed(command, "--help-all")
        assert short == full and len(_options(short)) <= 25, command
