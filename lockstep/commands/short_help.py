"""The short form of --help: the most used settings. --help-all lists all of them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
from contextlib import suppress
from functools import cache
from shutil import get_terminal_size
from textwrap import fill
from typing import Annotated, Any, get_type_hints

from lockstep.commands.option_names import options_of

_TRAINING = "dtype device train.learning-rate train.warmup-steps train.tokens-per-microbatch"
_TUNING = f"epochs tokens-per-step sequence-length {_TRAINING} lora.rank parallel.data-shard parallel.tensor"
_RUN = "checkpoint.every validation-data validation-share seed resume overwrite"
SHORT = {
    "pretrain": f"model data tokenizer output steps tokens-per-step sequence-length {_TRAINING} train.optimizer "
    f"parallel.data-shard parallel.tensor parallel.context parallel.pipeline recompute.mode {_RUN} dry-run",
    "sft": f"model data template output steps {_TUNING} recompute.mode {_RUN}",
    "dpo": f"model data output loss beta reference {_TUNING} {_RUN}",
    "reward-model": f"model data output centering {_TUNING} {_RUN}",
    "rl": "model environment data output steps prompts-per-step samples-per-prompt max-new-tokens temperature chat "
    "algorithm kl-coefficient reward-model train.learning-rate dtype device lora.rank parallel.data-shard "
    "parallel.tensor engine.cache-tokens validation-every validation-examples seed resume overwrite dry-run",
    "serve": "model model-name host port api-key admin-key dtype device parallel.tensor engine.cache-tokens "
    "engine.max-sequences engine.max-tokens-per-step engine.cuda-graphs engine.draft "
    "compile.backend max-prompt-tokens max-n max-requests max-waiting request-seconds",
    "train-server": "model output host port model-name api-key dtype device tokens-per-microbatch max-models "
    "session-seconds max-state-bytes engine.cache-tokens engine.max-sequences engine.max-tokens-per-step",
    "eval": "model environment data split examples samples-per-prompt pass-at max-new-tokens temperature top-p chat "
    "reward-model seed output overwrite dtype device engine.cache-tokens rewards.workers rewards.on-failure",
}
"""The settings in a command's short help, in order; for other commands, --help lists every setting."""

READS_MODELS = (
    "chat", "convert", "dpo", "eval", "generate", "parity", "pretrain", "replay", "reward-model", "rl", "serve", "sft",
    "train-server",
)  # fmt: skip
"""Commands that read models and therefore accept the options of `OF_MODELS`."""
OF_MODELS = {
    ("base", "DIR"): "where an adapter's base is now, if it has moved",
    ("max_positions", "N"): "the longest text, if it is less than the model's folder says",
}
"""Options that are set in the environment, and what they are."""
FROM_FILE = "start from a TOML or YAML file, such as a run's config.toml"


def print_short_help(kind: type, command: str, default: Any = None) -> None:
    """Prints the help of a command in `SHORT`. default: an instance of `kind` with the defaults."""
    import tyro

    from lockstep.recipes import RECIPES

    starts = {}
    if command in RECIPES:
        starts["config", "FILE"] = f"{FROM_FILE[0].upper()}{FROM_FILE[1:]}."
    if command in READS_MODELS:
        starts |= {option: f"{help[0].upper()}{help[1:]}." for option, help in OF_MODELS.items()}
    if recipes := RECIPES.get(command):
        starts["recipe", "NAME"] = f"Start from a recipe: {', '.join(recipes)}."
    fields = []
    for (name, value), text in starts.items():
        about = tyro.conf.arg(metavar=value, help=text, help_behavior_hint="")
        fields.append((name, Annotated[str, about], dataclasses.field(default="")))
    names = SHORT[command].split()
    fields += [_field(kind, name, name, default) for name in names]
    shown = dataclasses.make_dataclass("Shown", fields, kw_only=True)
    print(fill(kind.__doc__ or "", get_terminal_size().columns), end="\n\n")
    with suppress(SystemExit):
        tyro.cli(shown, args=["--help"], prog=f"lockstep {command}", config=(tyro.conf.FlagCreatePairsOff,))
    print(f"{len(list(options_of(kind))) - len(names)} more settings: lockstep {command} --help-all")


def _field(kind: Any, name: str, option: str, default: Any) -> tuple[str, Any, Any]:
    """The setting `name` of `kind` as a field, with its name on the command line, type, default and first sentence."""
    import tyro

    first, _, rest = name.replace("-", "_").partition(".")
    (field,) = [field for field in dataclasses.fields(kind) if field.name == first]
    initial = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    value: Any = getattr(default, first, initial)
    if rest:
        return _field(type(value), rest, option, value)
    text = re.split(r"(?<=\.)\s", _texts(kind)[first], maxsplit=1)[0]
    about = tyro.conf.arg(name=option, help=text, help_behavior_hint=_default)
    with_default = dataclasses.field() if value is dataclasses.MISSING else dataclasses.field(default=value)
    return re.sub(r"\W", "_", option), Annotated[get_type_hints(kind, include_extras=True)[first], about], with_default


def _default(value: str) -> str:
    return "" if value in ("", "''", "None", "False") else f"(default: {value})"


@cache
def _texts(kind: type) -> dict[str, str]:
    """The docstring below each field of a dataclass and its bases."""
    texts = {}
    for base in reversed([base for base in kind.__mro__ if dataclasses.is_dataclass(base)]):
        (definition,) = ast.parse(inspect.getsource(base)).body
        for field, below in itertools.pairwise(definition.body):  # type: ignore[attr-defined]
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                texts[ast.unparse(field.target)] = " ".join(str(ast.literal_eval(below.value)).split())
    return texts
