"""A command line's options, and the configuration of a run from its recipe, its files and its command line."""

from __future__ import annotations

from typing import Any

from lockstep.errors import UserError

RESUMES = ("--resume", "--output")
"""All that it takes to continue a run."""
MOST_USED = {
    "pretrain": "--model --data --tokenizer --output --steps --tokens-per-step --sequence-length --dtype\n"
    "  --train.learning-rate --validation-data --resume --dry-run",
    "sft": "--model --data --output --epochs --tokens-per-step --sequence-length --dtype --train.learning-rate\n"
    "  --validation-data --resume",
    "dpo": "--model --data --loss --beta --output --epochs --tokens-per-step --sequence-length --train.learning-rate\n"
    "  --validation-data --resume",
    "reward-model": "--model --data --output --epochs --tokens-per-step --sequence-length --train.learning-rate\n"
    "  --validation-data --resume",
    "rl": "--model --environment --algorithm --data --output --steps --prompts-per-step --samples-per-prompt\n"
    "  --max-new-tokens --train.learning-rate --validation-every --resume --dry-run",
}


def parse_options(kind: type, arguments: list[str], command: str, default: Any = None, positional: bool = False) -> Any:
    """A command's options as an instance of `kind`; ends the process after --help and after wrong options.

    With `positional`, fields without a default are positional arguments.
    """
    import tyro

    from lockstep.commands.spelling import refuse_other_names

    refuse_other_names(kind, arguments, positional)
    keywords: dict[str, Any] = {} if default is None else {"default": default}
    if positional:
        keywords["config"] = (tyro.conf.PositionalRequiredArgs,)
    return tyro.cli(kind, args=arguments, prog=f"lockstep {command}", **keywords)


def run_config(command: str, kind: type, arguments: list[str]) -> Any:
    """The recipe's configuration, overridden, in this order, by the settings of the run that --resume continues, a
    TOML file and the command line."""
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
    given = default
    if chosen["--config"]:
        given = from_toml(chosen["--config"], default)  # type: ignore[type-var]
    if output := _output_to_resume(rest, given.output):
        if run := recorded_run(output, default):  # type: ignore[type-var]
            default = run
        elif {argument.partition("=")[0] for argument in arguments if argument.startswith("-")} <= {*RESUMES}:
            raise UserError(f"{output}: has no run to resume; to start one, give its settings along with --resume")
    if chosen["--config"]:
        default = from_toml(chosen["--config"], default)  # type: ignore[type-var]
        # How to treat the folder was meant for that start alone: a run's own file must not erase it.
        for action in ("overwrite", "resume", "dry_run"):
            if getattr(default, action, False):
                file = chosen["--config"]
                print(f"{file}: {action} is ignored in a file; give it on the command line if you mean it")
                setattr(default, action, type(getattr(default, action))())
    if "--help" in rest or "-h" in rest:
        from lockstep.recipes import described

        print(f"most used: {MOST_USED[command]}")
        print("--config FILE: start from a TOML or YAML file, such as a run's config.toml")
        print(f"--recipe NAME: start from a recipe:\n{described(command)}\n")
    config = parse_options(kind, rest, command, default)
    given = {argument.lstrip("-").partition("=")[0].replace("-", "_") for argument in rest}
    if isinstance(config, RLConfig) and isinstance(default, RLConfig):
        config = with_algorithm(config, default, given)
    if isinstance(config, SFTConfig) and "epochs" in given and "steps" not in given:
        config.steps = 0  # a recipe's, or those that the epochs of the run took so far
    return config


def _output_to_resume(arguments: list[str], default: str) -> str:
    """The run's folder that the command line asks to resume; empty if it does not."""
    resume, output = False, default
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in ("--resume", "--no-resume"):
            resume = name == "--resume"
        elif name == "--output":
            output = value if equals else "".join(arguments[index + 1 : index + 2])
    return output if resume else ""
