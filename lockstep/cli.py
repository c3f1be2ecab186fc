"""One command: lockstep demo | pretrain | sft | dpo | reward-model | data | rl | replay | generate | chat | eval |
serve | parity | compare | convert | why | doctor.

Bad input ends with one clear message and exit code 2, without a traceback. A command imports what it runs once its
options are read, so that help and a wrong option need not wait for PyTorch.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from lockstep.commands.terminal import in_encoding, printable
from lockstep.errors import RunStopped, SaidByRank0, UserError, closest


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = arguments[0] if arguments else "--help"
    warnings.showwarning = _show_warning
    try:
        if name in ("-h", "--help"):
            print(_overview())
            return 0
        if name == "--version":
            from lockstep import __version__

            print(f"lockstep {__version__}")
            return 0
        if name not in COMMANDS:
            from lockstep.commands.spelling import COMMANDS_ELSEWHERE

            meant = COMMANDS_ELSEWHERE.get(name)
            hint = f" Use lockstep {meant}." if meant else closest(name, COMMANDS)
            raise UserError(f'unknown command "{name}".{hint} See lockstep --help')
        return COMMANDS[name](arguments[1:])
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        if not isinstance(error, SaidByRank0):
            print(f"lockstep: {'' if rank == '0' else f'rank {rank}: '}{printable(str(error))}", file=sys.stderr)
        return 2
    except RunStopped as error:
        # All ranks end the same way; one of them reports it.
        if _is_first_rank():
            print(f"lockstep: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except RuntimeError as error:
        if not _is_lost_rank(error):
            raise
        # Its traceback is in the rank's log.
        print(
            f"lockstep: rank {os.environ['RANK']}: another rank has ended or cannot be reached "
            f"({printable(str(error).splitlines()[0])[:200]}); the run ends here. That rank's output has the cause; "
            "--resume continues from the newest checkpoint",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt as error:
        print("; ".join(filter(None, ["lockstep: interrupted", printable(str(error))])), file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of the output, such as `head`, has ended. Nothing is left to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        print(f"lockstep: {printable(str(error.filename))[:80]}…: too long for a file name", file=sys.stderr)
        return 2


def _is_lost_rank(error: RuntimeError) -> bool:
    """Whether it is how gloo and NCCL report that a connection has ended."""
    said = str(error)
    from lockstep.observe.actors import LOST

    return "RANK" in os.environ and any(sign in said for sign in LOST)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"lockstep: warning: {printable(str(message))}", file=sys.stderr)


def _overview() -> str:
    lines = [f"  lockstep {name:10} {function.__doc__}" for name, function in COMMANDS.items()]
    return (
        "Train and sample language models with one model definition.\n\n"
        + "\n".join(lines)
        + ("\n\nlockstep COMMAND --help lists a command's options.")
    )


def _parse(kind: type, arguments: list[str], command: str, default: Any = None, positional: bool = False) -> Any:
    """With `positional`, fields without a default are positional arguments."""
    import tyro

    from lockstep.commands.spelling import refuse_other_names

    refuse_other_names(kind, arguments)
    keywords: dict[str, Any] = {} if default is None else {"default": default}
    if positional:
        keywords["config"] = (tyro.conf.PositionalRequiredArgs,)
    return tyro.cli(kind, args=arguments, prog=f"lockstep {command}", **keywords)


def _run_config(command: str, kind: type, arguments: list[str]) -> Any:
    """The recipe's configuration, overridden, in this order, by the settings of the run that --resume continues, a
    TOML file and the command line."""
    from lockstep.config import RLConfig, from_toml, recorded_run, with_algorithm
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
    config = _parse(kind, rest, command, default)
    if isinstance(config, RLConfig) and isinstance(default, RLConfig):
        given = {argument.lstrip("-").partition("=")[0].replace("-", "_") for argument in rest}
        config = with_algorithm(config, default, given)
    return config


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


def demo(arguments: list[str]) -> int:
    """pretrain a small model from scratch, then improve it with GRPO, and show that the bits agree"""
    from lockstep.recipes.demo import DemoConfig, run_demo

    config = _parse(DemoConfig, arguments, "demo")
    from lockstep.parallel import refuse_ranks

    refuse_ranks("demo")
    folder = run_demo(config)
    print_summary(folder)
    print("\ntry next:")
    print(f"  lockstep generate --model {folder} --prompt '3+5+2=' --temperature 0")
    print(f"  lockstep parity --model {folder}")
    print(f"  lockstep serve --model {folder}")
    print("  lockstep pretrain --recipe tiny --output run-tiny")
    return 0


def pretrain(arguments: list[str]) -> int:
    """next-token training on text, from fresh weights or a Hugging Face folder"""
    from lockstep.config import PretrainConfig

    config = _run_config("pretrain", PretrainConfig, arguments)
    from lockstep.train.pretrain import foresee
    from lockstep.train.pretrain import pretrain as run

    if config.dry_run:
        print(foresee(config).text())
        return 0
    _print_next(run(config), "generate --model {folder} --prompt TEXT")
    return 0


def sft(arguments: list[str]) -> int:
    """fine-tuning on conversations, with the loss on the assistant's tokens only"""
    from lockstep.config import SFTConfig

    config = _run_config("sft", SFTConfig, arguments)
    from lockstep.train.sft import finetune

    _print_next(finetune(config), "serve --model {folder}")
    return 0


def dpo(arguments: list[str]) -> int:
    """preference optimization on chosen and rejected answers: DPO, IPO, SimPO, KTO"""
    from lockstep.config import DPOConfig

    config = _run_config("dpo", DPOConfig, arguments)
    from lockstep.train.dpo import prefer

    _print_next(prefer(config), "serve --model {folder}")
    return 0


def reward_model(arguments: list[str]) -> int:
    """train a model that scores answers, from chosen and rejected ones: a reward for rl"""
    from lockstep.config import RewardModelConfig

    config = _run_config("reward-model", RewardModelConfig, arguments)
    from lockstep.train.reward_model import train_reward_model

    _print_next(
        train_reward_model(config), "rl --reward-model {folder} --environment prompts --model MODEL --data DATA"
    )
    return 0


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _print_next(folder: Path, command: str) -> None:
    if _is_first_rank():
        print(f"\nreport: {folder / 'report.html'}\nnext:   lockstep {command.format(folder=folder)}")


@dataclass
class TokenizeOptions:
    """Tokenize data once, into a folder that pretrain and sft take as --data."""

    data: str
    """Text, JSONL or Parquet: a file, a folder or a glob; or hf:NAME[:config][:split]."""
    output: str
    """Folder to write."""
    tokenizer: str = "byte"
    """`byte`, `bpe:VOCABULARY` (trained on the data), or a folder with a tokenizer.json."""
    template: str = "{text}"
    """How a JSONL line or a row becomes text: keys in braces are replaced by their values. With --chat: chat template
    file (jinja) to use instead of the model's own."""
    chat: bool = False
    """The data is conversations, for sft; the tokenizer is a model's folder."""
    skip_bad_lines: bool = False
    """Count and skip malformed lines instead of stopping at the first."""
    workers: int = 4
    """Processes that tokenize; 0: only this one."""


def data(arguments: list[str]) -> int:
    """data tokenize: tokenize text or conversations once, for later runs"""
    if arguments in (["--help"], ["-h"]):
        arguments = ["tokenize", *arguments]
    if arguments[:1] != ["tokenize"]:
        raise UserError("write lockstep data tokenize --data DATA --tokenizer TOKENIZER --output FOLDER")
    options = _parse(TokenizeOptions, arguments[1:], "data tokenize")
    from lockstep.checkpoint import folder_if_model
    from lockstep.data.tokenize_once import tokenize_once

    options.tokenizer = folder_if_model(options.tokenizer)
    tokenize_once(**vars(options))
    print(f"next: lockstep {'sft' if options.chat else 'pretrain'} --data {options.output}")
    return 0


def rl(arguments: list[str]) -> int:
    """GRPO and other algorithms on gsm8k, sums of digits, or your own task (--environment my_task.py:MyTask)"""
    from lockstep.config import RLConfig

    config = _run_config("rl", RLConfig, arguments)
    from lockstep.rl.controller import reinforce
    from lockstep.rl.parity import ParityError

    if config.dry_run:
        from lockstep.rl.dry_run import foresee

        print(foresee(config).text())
        return 0
    try:
        folder = reinforce(config)
    except ParityError as error:  # on all ranks alike
        if _is_first_rank():
            print(f"lockstep: {error}", file=sys.stderr)
        return 1
    if _is_first_rank():
        print_summary(folder)
        print(f"next:   lockstep generate --model {folder} --prompt TEXT")
    return 0


def print_summary(folder: Path) -> None:
    """The run's result in a few lines, and what they mean."""
    import json

    from lockstep.observe.report import duration, in_tokens, parity_meaning, validated
    from lockstep.rl.prompt_balance import PromptBalance

    summary = json.loads((folder / "summary.json").read_text())
    print()
    name, measured = "accuracy", validated(summary, "accuracy")
    if not measured:
        name, measured = summary["reward_name"], validated(summary, "reward")
    if measured:
        values, when = measured
        also_trained = summary.get("validation_also_trained")
        where = f"validation examples, {also_trained} of them also trained on" if also_trained else "held-out examples"
        print(f"{name} {' -> '.join(values)} on {where}" + (f", {when}" if len(values) == 1 else ""))
    checked, different = int(summary["parity_tokens_checked"]), int(summary["parity_tokens_different"])
    print(
        f"{checked} log-probabilities compared, {different} different; "
        f"largest ratio on a first inner step: {summary['ratio_max_on_first_inner_step']!r}"
    )
    if "parity_routes_checked" in summary:
        routes, others = int(summary["parity_routes_checked"]), int(summary["parity_routes_different"])
        print(f"experts of {routes} tokens compared, {others} different")
    print(f"  {parity_meaning(checked, different, summary['staleness_max'] > 0)}")
    if "prompts" in summary:
        print(PromptBalance(**summary["prompts"]).text())
    tokens, seconds = summary["tokens"], sum(summary["seconds"].values())
    trained = sum(count for stage, count in tokens.items() if stage != "generated")
    print(
        f"{duration(seconds)} in all: {in_tokens(trained)} tokens trained on, {in_tokens(tokens['generated'])} sampled"
    )
    print(f"report: {folder / 'report.html'}")


def generate(arguments: list[str]) -> int:
    """continue a prompt, streamed to the terminal, or every prompt in a file"""
    from lockstep.commands.generate import GenerateOptions
    from lockstep.commands.generate import generate as run

    options = _parse(GenerateOptions, arguments, "generate")
    from lockstep.parallel import generating_world

    with generating_world(options.parallel, options.device) as world:
        run(options, world)
    return 0


def chat(arguments: list[str]) -> int:
    """a conversation with a model in the terminal"""
    from lockstep.commands.chat import ChatOptions
    from lockstep.commands.chat import chat as run

    options = _parse(ChatOptions, arguments, "chat")
    from lockstep.parallel import refuse_ranks

    refuse_ranks("chat")
    run(options)
    return 0


def generator(arguments: list[str]) -> int:
    """sample for a reinforcement run whose trainer is another process, here or on another host"""
    from lockstep.commands.generator import GeneratorOptions
    from lockstep.commands.generator import generator as run

    return run(_parse(GeneratorOptions, arguments, "generator"))


def evaluate(arguments: list[str]) -> int:
    """grade one or more models' answers to held-out examples: pass@k, rewards, and a paired test between models"""
    from lockstep.config import EvalConfig

    config = _parse(EvalConfig, arguments, "eval")
    from lockstep.commands.evaluate import as_text
    from lockstep.parallel import refuse_ranks
    from lockstep.rl.evaluation import evaluate as run

    refuse_ranks("eval")
    evaluation = run(config)
    print(in_encoding(printable(as_text(evaluation)), sys.stdout.encoding))
    print(f"\nresults: {evaluation.path}")
    return 0


def serve(arguments: list[str]) -> int:
    """serve OpenAI's HTTP API: completions and chat, text or tokens, streamed or not"""
    from lockstep.config import ServeConfig, validate

    config = _parse(ServeConfig, arguments, "serve")
    config.api_key = config.api_key or os.environ.get("LOCKSTEP_API_KEY", "")
    config.admin_key = config.admin_key or os.environ.get("LOCKSTEP_ADMIN_KEY", "")
    validate(config)
    from lockstep.generate.server import serve as run
    from lockstep.parallel import generating_world

    with generating_world(config.parallel, config.device) as world:
        return run(config, Path(world.from_main(lambda: str(_model_folder(config.model)))), world)


def parity(arguments: list[str]) -> int:
    """compare the log-probabilities of trainer and generator, bit by bit, under a mixed load"""
    from lockstep.commands.parity import ParityOptions
    from lockstep.commands.parity import parity as run

    return run(_parse(ParityOptions, arguments, "parity"))


@dataclass
class ConvertOptions:
    """Write a model as a Hugging Face folder."""

    source: str
    """Hugging Face folder, a run's folder (its newest checkpoint), or Meta's params.json and consolidated.*.pth."""
    target: str
    """New folder to write."""
    dtype: Annotated[str, "dtype"] = "auto"
    """`bfloat16` or `float32`; auto or empty: as in the source."""
    merge: bool = False
    """For an adapter: add its updates to its base's weights, in float32, rounded once."""


def convert(arguments: list[str]) -> int:
    """write a model as a Hugging Face folder, from a run, from another folder or from Meta's files"""
    options = _parse(ConvertOptions, arguments, "convert", positional=True)
    from lockstep.checkpoint.convert import convert as run

    run(_model_folder(options.source), options.target, options.dtype, merge=options.merge)
    print(f"model: {options.target}")
    return 0


def _model_folder(name: str) -> Path:
    from lockstep.checkpoint import model_folder

    return model_folder(name)


@dataclass
class CompareOptions:
    """Where two runs' losses first differ."""

    first: str
    """A run's folder."""
    second: str
    """Another run's folder."""
    tolerance: float = 0.0
    """Relative difference that still counts as equal; 0: only identical bits."""
    plot: str = ""
    """Plot to write: both runs' curves and their relative difference (.png, .svg or .pdf)."""


def compare(arguments: list[str]) -> int:
    """print where two runs' losses and gradient norms first differ; exit code 0: nowhere, 1: somewhere"""
    options = _parse(CompareOptions, arguments, "compare", positional=True)
    from lockstep.observe.compare import compare_runs, comparison_plot, comparison_text

    comparison = compare_runs(options.first, options.second)
    print(comparison_text(comparison, options.tolerance))
    if options.plot:
        comparison_plot(comparison, Path(options.plot), (options.first, options.second))
        print(f"\nplot: {options.plot}")
    return 0 if comparison.equal(options.tolerance) else 1


@dataclass
class ReplayOptions:
    """Recompute a finished step of a reinforcement run."""

    run: str
    """The run's folder."""
    step: int | None = None
    """The step; the checkpoint of the step before it must exist, unless it is the first. None: the last that can be
    replayed."""
    sample: bool = False
    """Sample its completions again, too, instead of taking them from rollouts/."""


def replay(arguments: list[str]) -> int:
    """recompute a finished step of rl and compare its bits with the record; exit code 0: equal, 1: not"""
    options = _parse(ReplayOptions, arguments, "replay", positional=True)
    from lockstep.rl.replay import replay as run

    result = run(options.run, options.step, sample=options.sample)
    print(result.text())
    return 0 if result.equal else 1


@dataclass
class WhyOptions:
    """What each actor of a run does, who waits for whom, and who holds everybody up."""

    run: str
    """The run's folder."""
    json: bool = False
    """Print one JSON object instead of a table."""


def why(arguments: list[str]) -> int:
    """for a run that hangs or has crashed: who waits for whom, and who holds everybody up (exit code 1)"""
    options = _parse(WhyOptions, arguments, "why", positional=True)
    from lockstep.commands.why import why as explain

    explanation = explain(Path(options.run))
    print(explanation.as_json() if options.json else printable(explanation.text()))
    return 0 if explanation.moves else 1


@dataclass
class DoctorOptions:
    """What this machine has that Lockstep uses, and what to do about what is missing."""

    json: bool = False
    """Print one JSON object instead of a table."""


def doctor(arguments: list[str]) -> int:
    """examine this machine: speed, packages, GPU, folders, and what to do; exit code 1: something is broken"""
    try:
        options = _parse(DoctorOptions, arguments, "doctor")
    except ModuleNotFoundError:
        # The package that reads the command line is missing itself, and the report will say so.
        options = DoctorOptions("--json" in arguments)
    try:
        from lockstep.observe.doctor import AREAS, as_json, as_text, examine, usable
        from lockstep.observe.progress import Progress
    except ModuleNotFoundError as error:
        print(f"✗ {error.name} is not installed, and nothing runs without it: pip install {error.name}")
        return 1
    if options.json or not sys.stdout.isatty():
        findings = examine()
    else:
        with Progress("examining this machine", len(AREAS)) as bar:
            findings = examine(lambda area: bar.advance(title=area))
    print(as_json(findings) if options.json else as_text(findings, sys.stdout.encoding))
    return 0 if usable(findings) else 1


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "demo": demo,
    "pretrain": pretrain,
    "sft": sft,
    "dpo": dpo,
    "reward-model": reward_model,
    "data": data,
    "rl": rl,
    "generator": generator,
    "generate": generate,
    "chat": chat,
    "eval": evaluate,
    "serve": serve,
    "parity": parity,
    "compare": compare,
    "replay": replay,
    "convert": convert,
    "why": why,
    "doctor": doctor,
}

if __name__ == "__main__":
    sys.exit(main())
