"""One command: lockstep demo | pretrain | sft | dpo | reward-model | data | rl | replay | generate | chat | eval |
serve | train-server | parity | compile | compare | convert | why | doctor.

Bad input ends with one clear message and exit code 2, without a traceback. A command imports its implementation after
parsing its options, so that --help and wrong options do not import PyTorch.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lockstep.commands.options import parse_options, run_config
from lockstep.commands.print_once import PrintOnce, print_once, ranks_folder
from lockstep.commands.terminal import in_encoding, printable
from lockstep.errors import ReportedByRank0, RunStopped, UserError, closest
from lockstep.hub import with_family_of


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = arguments[0] if arguments else "--help"
    warnings.showwarning, logging.lastResort = _show_warning, PrintOnce(logging.WARNING)
    ranks_folder()
    try:
        if name in ("-h", "--help"):
            print(_overview())
            return 0
        if name == "--version":
            from lockstep.version import __version__

            print(f"lockstep {__version__}")
            return 0
        if name not in COMMANDS:
            from lockstep.commands.option_names import COMMANDS_ELSEWHERE

            meant = COMMANDS_ELSEWHERE.get(name)
            hint = f" Use lockstep {meant}." if meant else closest(name, COMMANDS)
            raise UserError(f'unknown command "{name}".{hint} See lockstep --help')
        return COMMANDS[name](arguments[1:])
    except UserError as error:
        if not isinstance(error, ReportedByRank0):
            print_once(printable(str(error)), ends=True)
        return 2
    except RunStopped as error:
        # All ranks end the same way; one of them reports it.
        if _is_first_rank():
            print(f"lockstep: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except RuntimeError as error:
        if not _is_lost_rank(error):
            raise
        # The traceback is in that rank's log.
        print(
            f"lockstep: rank {os.environ['RANK']}: another rank has ended or cannot be reached "
            f"({printable(str(error).splitlines()[0])[:200]}); the run ends here. That rank's output has the cause; "
            "--resume continues from the newest checkpoint",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt as error:
        print_once("; ".join(filter(None, ["interrupted", printable(str(error))])), ends=True)
        return 130
    except BrokenPipeError:
        # The reader of the output, such as `head`, has ended. Nothing may be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        print_once(f"{printable(str(error.filename))[:80]}…: too long for a file name", ends=True)
        return 2


def _is_lost_rank(error: RuntimeError) -> bool:
    """Whether gloo or NCCL raised it for a closed connection."""
    text = str(error)
    from lockstep.observe.actors import LOST

    return "RANK" in os.environ and any(sign in text for sign in LOST)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print_once(f"warning: {printable(str(message))}")


def _overview() -> str:
    lines = [f"  lockstep {name:10} {function.__doc__}" for name, function in COMMANDS.items()]
    return (
        "Train and sample language models with one model definition.\n\n"
        + "\n".join(lines)
        + ("\n\nlockstep COMMAND --help lists a command's most used settings, --help-all all of them.")
    )


def demo(arguments: list[str]) -> int:
    """pretrain a small model from scratch, then improve it with GRPO, and show that the bits agree"""
    from lockstep.recipes.demo import DemoConfig, run_demo

    config = parse_options(DemoConfig, arguments, "demo")
    from lockstep.commands.summary import print_summary
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

    config = run_config("pretrain", PretrainConfig, arguments)
    if config.dry_run:
        from lockstep.train.dry_run import estimate_memory

        print(estimate_memory(config).text())
        return 0
    from lockstep.train.pretrain import pretrain as run

    _print_next(run(config), "generate --model {model} --prompt TEXT", config.model)
    return 0


def sft(arguments: list[str]) -> int:
    """fine-tuning on conversations, with the loss on the assistant's tokens only"""
    from lockstep.config import SFTConfig

    config = run_config("sft", SFTConfig, arguments)
    from lockstep.train.sft import finetune

    _print_next(finetune(config), "serve --model {model}", config.model)
    return 0


def dpo(arguments: list[str]) -> int:
    """preference optimization on chosen and rejected answers: DPO, IPO, SimPO, KTO"""
    from lockstep.config import DPOConfig

    config = run_config("dpo", DPOConfig, arguments)
    from lockstep.train.dpo import prefer

    _print_next(prefer(config), "serve --model {model}", config.model)
    return 0


def reward_model(arguments: list[str]) -> int:
    """train a model that scores answers, from chosen and rejected ones: a reward for rl"""
    from lockstep.config import RewardModelConfig

    config = run_config("reward-model", RewardModelConfig, arguments)
    from lockstep.train.reward_model import train_reward_model

    command = "rl --reward-model {model} --environment prompts --model MODEL --data DATA"
    _print_next(train_reward_model(config), command, config.model)
    return 0


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _print_next(folder: Path, command: str, began_from: str) -> None:
    model = with_family_of(began_from, folder)
    if _is_first_rank():
        print(f"\nreport: {folder / 'report.html'}\nnext:   lockstep {command.format(model=model)}")


@dataclass
class TokenizeOptions:
    """Tokenize data once, into a folder that pretrain and sft take as --data."""

    data: str
    """Text, JSONL, JSON or Parquet: a file, a folder or a glob; or hf:NAME[:config][:split]."""
    output: str
    """Folder to write."""
    tokenizer: str = "byte"
    """`byte`, `bpe:VOCABULARY` (trained on the data), or a folder with a tokenizer.json."""
    template: str = "{text}"
    """How a JSONL line or a row becomes text: keys in braces are replaced by their values. With --chat: chat template
    file (jinja), or `chatml`, to use instead of the model's own."""
    chat: bool = False
    """The data is conversations, for sft; the tokenizer is a model's folder."""
    turns: Literal["apart", "whole"] = "apart"
    """With --chat, as in sft: `apart`: an answer that the template renders differently once others follow is a separate
    sequence; `whole`: one sequence per conversation."""
    skip_bad_lines: bool = False
    """Count and skip malformed lines instead of stopping at the first."""
    workers: int = 4
    """Processes that tokenize; 0: only this one."""


def data(arguments: list[str]) -> int:
    """data tokenize: tokenize text or conversations once, for later runs"""
    if arguments in (["--help"], ["--help-all"], ["-h"]):
        arguments = ["tokenize", *arguments]
    if arguments[:1] != ["tokenize"]:
        raise UserError("write lockstep data tokenize --data DATA --tokenizer TOKENIZER --output FOLDER")
    options = parse_options(TokenizeOptions, arguments[1:], "data tokenize")
    from lockstep.checkpoint import folder_if_model
    from lockstep.data.token_folder import tokenize_to_folder

    options.tokenizer = folder_if_model(options.tokenizer)
    tokenize_to_folder(**vars(options))
    print(f"next: lockstep {'sft' if options.chat else 'pretrain'} --data {options.output}")
    return 0


def rl(arguments: list[str]) -> int:
    """GRPO and other algorithms on gsm8k, sums of digits, or your own task (--environment my_task.py:MyTask)"""
    from lockstep.config import RLConfig

    config = run_config("rl", RLConfig, arguments)
    from lockstep.commands.summary import print_summary
    from lockstep.rl.reinforce import reinforce
    from lockstep.rl.scoring.parity import ParityError

    if config.dry_run:
        from lockstep.rl.dry_run import estimate_memory

        print(estimate_memory(config).text())
        return 0
    try:
        folder = reinforce(config)
    except ParityError as error:  # raised on all ranks
        if _is_first_rank():
            print(f"lockstep: {error}", file=sys.stderr)
        return 1
    if _is_first_rank():
        print_summary(folder)
        print(f"next:   lockstep generate --model {with_family_of(config.model, folder)} --prompt TEXT")
    return 0


def generate(arguments: list[str]) -> int:
    """continue a prompt, streamed to the terminal, or every prompt in a file"""
    from lockstep.commands.generate import GenerateOptions
    from lockstep.commands.generate import generate as run

    options = parse_options(GenerateOptions, arguments, "generate")
    from lockstep.parallel import generating_world

    with generating_world(options.parallel, options.device) as world:
        run(options, world)
    return 0


def chat(arguments: list[str]) -> int:
    """a conversation with a model in the terminal"""
    from lockstep.commands.chat import ChatOptions
    from lockstep.commands.chat import chat as run

    options = parse_options(ChatOptions, arguments, "chat")
    from lockstep.parallel import refuse_ranks

    refuse_ranks("chat")
    run(options)
    return 0


def generator(arguments: list[str]) -> int:
    """sample for a reinforcement run whose trainer is another process, here or on another host"""
    from lockstep.commands.generator import GeneratorOptions
    from lockstep.commands.generator import generator as run

    return run(parse_options(GeneratorOptions, arguments, "generator"))


def evaluate(arguments: list[str]) -> int:
    """grade one or more models' answers to held-out examples: pass@k, rewards, and a paired test between models"""
    from lockstep.config import EvalConfig

    config = parse_options(EvalConfig, arguments, "eval")
    from lockstep.commands.evaluate import as_text
    from lockstep.parallel import refuse_ranks
    from lockstep.rl.evaluate import evaluate as run

    refuse_ranks("eval")
    evaluation = run(config)
    print(in_encoding(printable(as_text(evaluation)), sys.stdout.encoding))
    print(f"\nresults: {evaluation.path}")
    return 0


def serve(arguments: list[str]) -> int:
    """serve OpenAI's HTTP API: completions and chat, text or tokens, streamed or not"""
    from lockstep.config import ServeConfig, validate

    config = parse_options(ServeConfig, arguments, "serve")
    config.api_key = config.api_key or os.environ.get("LOCKSTEP_API_KEY", "")
    config.admin_key = config.admin_key or os.environ.get("LOCKSTEP_ADMIN_KEY", "")
    validate(config)
    from lockstep.checkpoint import folder_of_ranks
    from lockstep.generate.server import serve as run
    from lockstep.parallel import generating_world

    with generating_world(config.parallel, config.device) as world:
        return run(config, folder_of_ranks(config.model, world), world)


def train_server(arguments: list[str]) -> int:
    """serve the training API: the tinker client and its cookbook train adapters of a model here"""
    from lockstep.config import TrainServerConfig, validate

    config = parse_options(TrainServerConfig, arguments, "train-server")
    config.api_key = config.api_key or os.environ.get("TINKER_API_KEY", "")
    validate(config)
    from lockstep.checkpoint import model_folder
    from lockstep.parallel import refuse_ranks

    refuse_ranks("train-server")
    try:
        from lockstep.train_server import serve as run
    except ImportError as error:
        raise UserError(
            f"the training API needs protobuf ({error.name} is missing); pip install protobuf zstandard"
        ) from error
    return run(config, model_folder(config.model))


def parity(arguments: list[str]) -> int:
    """compare the log-probabilities of trainer and generator, bit by bit, under a mixed load"""
    from lockstep.commands.parity import ParityOptions
    from lockstep.commands.parity import parity as run

    return run(parse_options(ParityOptions, arguments, "parity"))


def compile_run(arguments: list[str]) -> int:
    """compile pretrain | sft | dpo | reward-model | rl: compile what such a run will call, before it starts"""
    from lockstep.config import DPOConfig, PretrainConfig, RewardModelConfig, RLConfig, SFTConfig

    kinds = {
        "pretrain": PretrainConfig, "sft": SFTConfig, "dpo": DPOConfig, "reward-model": RewardModelConfig,
        "rl": RLConfig,
    }  # fmt: skip
    usage = f"write lockstep compile COMMAND, with the options of the run; COMMAND: {', '.join(kinds)}"
    if arguments in (["--help"], ["--help-all"], ["-h"]):
        print(usage)
        sys.exit(0)
    if not arguments or arguments[0] not in kinds:
        raise UserError(usage)
    config = run_config(arguments[0], kinds[arguments[0]], arguments[1:])
    from lockstep.commands.compile import compile_run as run

    run(config)
    return 0


def convert(arguments: list[str]) -> int:
    """write a model as a Hugging Face folder, from a run, from another folder or from Meta's files"""
    from lockstep.commands.convert import ConvertOptions

    options = parse_options(ConvertOptions, arguments, "convert", positional=True)
    from lockstep.checkpoint import model_folder
    from lockstep.checkpoint.convert import convert as run

    source = model_folder(options.source)
    run(source, options.target, options.dtype, merge=options.merge, precision=options.precision)
    print(f"model: {options.target}")
    return 0


@dataclass
class CompareOptions:
    """Where runs' losses first differ, which settings differ, and which run is best."""

    runs: list[str]
    """The folders of two or more runs; each is compared with the first."""
    by: str = ""
    """Metric to rank the runs by, at its last value, such as validation/loss. Default: one that they have: validation
    accuracy, reward or loss, else the training reward or loss."""
    tolerance: float = 0.0
    """Relative difference that still counts as equal; 0: only identical bits."""
    plot: str = ""
    """Plot to write: the runs' curves and their relative differences from the first (.png, .svg or .pdf)."""


def compare(arguments: list[str]) -> int:
    """print where runs first differ, in which settings, and which is best; exit code 0: nowhere, 1: somewhere"""
    options = parse_options(CompareOptions, arguments, "compare", positional=True)
    from lockstep.commands.compare import compare_runs

    text, equal = compare_runs(options.runs, options.tolerance, options.by, options.plot)
    print(in_encoding(printable(text), sys.stdout.encoding))
    return 0 if equal else 1


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
    options = parse_options(ReplayOptions, arguments, "replay", positional=True)
    from lockstep.rl.replay import replay as run

    result = run(options.run, options.step, sample=options.sample)
    print(result.text())
    return 0 if result.equal else 1


@dataclass
class WhyOptions:
    """What each actor of a run is doing, who waits for whom, and who blocks the run."""

    run: str
    """The run's folder."""
    json: bool = False
    """Print one JSON object instead of a table."""


def why(arguments: list[str]) -> int:
    """for a run that hangs or has crashed: who waits for whom, and who blocks the run (exit code 1)"""
    options = parse_options(WhyOptions, arguments, "why", positional=True)
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
        options = parse_options(DoctorOptions, arguments, "doctor")
    except ModuleNotFoundError:
        # The command-line parser itself is missing, which the report will show.
        options = DoctorOptions("--json" in arguments)
    try:
        from lockstep.observe.doctor import AREAS, as_json, as_text, examine, usable
        from lockstep.progress import Progress
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
    "train-server": train_server,
    "parity": parity,
    "compile": compile_run,
    "compare": compare,
    "replay": replay,
    "convert": convert,
    "why": why,
    "doctor": doctor,
}

if __name__ == "__main__":
    sys.exit(main())
