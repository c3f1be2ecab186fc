"""Parses command-line options, and a run's configuration from recipe, files and command line."""

from __future__ import annotations

import io
import os
import sys
from contextlib import nullcontext, redirect_stderr
from typing import Any

from lockstep.commands.print_once import print_once, ranks_folder
from lockstep.errors import UserError
from lockstep.hub import with_family_of

RESUMES = ("--resume", "--output")
"""The options that suffice to resume a run."""


def parse_options(kind: type, arguments: list[str], command: str, default: Any = None, positional: bool = False) -> Any:
    """Parses a command's options into an instance of `kind`; exits after --help and for wrong options.

    With `positional`, fields without a default are positional arguments.
    """
    import tyro

    from lockstep.commands.option_names import refuse_other_names
    from lockstep.commands.short_help import OF_MODELS, READS_MODELS, SHORT, print_short_help

    if command in READS_MODELS:
        arguments = without_environment(arguments)
    refuse_other_names(kind, arguments, positional)
    if "--help-all" in arguments:
        arguments = ["--help"]
    elif command in SHORT and not {"-h", "--help"}.isdisjoint(arguments):
        print_short_help(kind, command, default)
        sys.exit(0)
    keywords: dict[str, Any] = {} if default is None else {"default": default}
    if command in READS_MODELS:
        options = [f"--{name.replace('_', '-')} {value}: {help}" for (name, value), help in OF_MODELS.items()]
        keywords["description"] = "\n\n".join([str(kind.__doc__), *options])
    if positional:
        keywords["config"] = (tyro.conf.PositionalRequiredArgs,)
    refusal = io.StringIO()
    try:
        with redirect_stderr(refusal) if ranks_folder() else nullcontext():
            return tyro.cli(kind, args=arguments, prog=f"lockstep {command}", **keywords)
    except SystemExit:
        if refusal.getvalue():
            print_once(refusal.getvalue().rstrip(), head="", ends=True)
        raise


def without_environment(arguments: list[str]) -> list[str]:
    """The arguments without the options of `OF_MODELS`, which are set in the environment for this process and its
    children."""
    from lockstep.commands.short_help import OF_MODELS

    rest, remaining = [], iter(arguments)
    options = {f"--{name.replace('_', '-')}": name for name, _ in OF_MODELS}
    for argument in remaining:
        option, equals, value = argument.partition("=")
        if option not in options:
            rest.append(argument)
        elif value := value if equals else next(remaining, ""):
            _set(options[option], value)
        else:
            raise UserError(f"{option} needs a value")
    return rest


def _set(option: str, value: str) -> None:
    from lockstep.checkpoint import model_folder
    from lockstep.model.adapter_folder import BASE
    from lockstep.model.config_json import MAX_POSITIONS, positions_limit

    if option == "base":
        os.environ[BASE] = str(model_folder(value).resolve())
    else:
        os.environ[MAX_POSITIONS] = value
        positions_limit()


def run_config(command: str, kind: type, arguments: list[str]) -> Any:
    """The recipe's configuration, overridden, in this order, by the settings of the resumed run, a TOML file and the
    command line."""
    from lockstep.commands.short_help import FROM_FILE
    from lockstep.config import RLConfig, SFTConfig, from_toml, recorded_run, with_algorithm
    from lockstep.recipes import recipe

    rest, chosen = [], {"--recipe": "", "--config": ""}
    remaining = iter(arguments)
    for argument in remaining:
        option, equals, value = argument.partition("=")
        if option in chosen:
            chosen[option] = value if equals else next(remaining, "")
            if not chosen[option]:
                raise UserError(f"{option} needs a value")
        else:
            rest.append(argument)
    default = recipe(command, chosen["--recipe"]) if chosen["--recipe"] else kind()
    requested = default
    if chosen["--config"]:
        requested = from_toml(chosen["--config"], default)  # type: ignore[type-var]
    if output := _output_to_resume(rest, requested.output):
        if run := recorded_run(output, default):  # type: ignore[type-var]
            default = run
        elif {argument.partition("=")[0] for argument in arguments if argument.startswith("-")} <= {*RESUMES}:
            raise UserError(f"{output}: has no run to resume; to start one, give its settings along with --resume")
    if chosen["--config"]:
        default = from_toml(chosen["--config"], default)  # type: ignore[type-var]
        # These were meant for one start: reusing a run's config.toml must not overwrite the run.
        for action in ("overwrite", "resume", "dry_run"):
            if getattr(default, action, False):
                file = chosen["--config"]
                print_once(
                    f"warning: {file}: {action} is ignored in a file; give it on the command line if you mean it"
                )
                setattr(default, action, type(getattr(default, action))())
    if "--help-all" in rest:
        from lockstep.recipes import describe_recipes

        recipes = describe_recipes(command)
        print(
            f"--config FILE: {FROM_FILE}" + f"\n--recipe NAME: start from a recipe:\n{recipes}" * bool(recipes) + "\n"
        )
    config = parse_options(kind, rest, command, default)
    options = (argument for argument in rest if argument.startswith("--"))  # a value may equal an option's name
    option_names = {option[2:].partition("=")[0].replace("-", "_") for option in options}
    if isinstance(config, RLConfig) and isinstance(default, RLConfig):
        config = with_algorithm(config, default, option_names)
    if "base" in option_names and config.lora.rank:
        # A run that trains an adapter starts from its base.
        config.model = with_family_of(config.model, os.environ["LOCKSTEP_BASE"])
    if isinstance(config, SFTConfig) and "epochs" in option_names and "steps" not in option_names:
        config.steps = 0  # not those of a recipe, or of the resumed run's epochs
    return config


def _output_to_resume(arguments: list[str], default: str) -> str:
    """The folder of the run to resume; empty without --resume."""
    resume, output = False, default
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in ("--resume", "--no-resume"):
            resume = name == "--resume"
        elif name == "--output":
            output = value if equals else "".join(arguments[index + 1 : index + 2])
    return output if resume else ""
