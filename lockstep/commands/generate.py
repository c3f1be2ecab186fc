"""`lockstep generate`: a prompt streamed to the terminal, or a file of prompts to a file of completions."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

from lockstep.commands.terminal import printable
from lockstep.config.engine import RanksConfig
from lockstep.config.precision import PrecisionConfig
from lockstep.config.train import Arithmetic
from lockstep.errors import UserError

if TYPE_CHECKING:
    from lockstep.parallel import World


@dataclass
class GenerateOptions:
    """Continue a prompt, or every prompt of a file."""

    model: str
    """Hugging Face folder, a run's folder (its newest checkpoint), or ORGANISATION/MODEL[@REVISION] of the hub."""
    prompt: str = ""
    """Text to continue; with --chat: what the user says."""
    prompts: str = ""
    """File of prompts: text with one prompt per line; or JSONL, a JSON array, Parquet or hf:NAME[:config][:split] with
    `prompt`, a text or messages, or `messages`. Other keys are copied to a prompt's completions, except those that a
    completion has itself. Blank lines are left out."""
    output: str = ""
    """JSONL file to write, one completion per line; empty: the terminal."""
    overwrite: bool = False
    """Replace an existing output file."""
    chat: bool = False
    """Each prompt is a user's message, which the model's chat template renders."""
    chat_template_kwargs: str = ""
    """Values for the chat template, a JSON object such as '{"enable_thinking": false}'; a line's override them."""
    n: int = 1
    """Completions per prompt."""
    max_tokens: int = 128
    """Maximum number of tokens to sample."""
    temperature: float = 0.8
    """0: greedy, the likeliest token each time."""
    top_k: int = 0
    """Sample from the k likeliest tokens only; 0: off."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this probability; 1: off."""
    min_p: float = 0.0
    """Sample from tokens at least this likely relative to the likeliest; 0: off."""
    seed: int | None = None
    """Seed of the draws."""
    stop: tuple[str, ...] = ()
    """Stop after any of these strings."""
    dtype: Annotated[str, "dtype"] = "auto"
    """`bfloat16` or `float32`; auto: as in the files."""
    arithmetic: Arithmetic = "auto"
    """On a CPU: `portable`, `bf16_pairs` or `bf16_tiles`; auto: the one that the model was trained in, if known, else
    the fastest."""
    device: str = ""
    """`cpu`, `cuda` or `cuda:1` …; empty: the machine's accelerator if it has one."""
    parallel: RanksConfig = field(default_factory=RanksConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)


@dataclass
class Prompt:
    """One line of the file: its object, which the output repeats, and the text to continue."""

    line: dict[str, Any]
    text: str


def generate(options: GenerateOptions, world: World) -> None:
    """Runs the command. Raises UserError for unusable prompts or models."""
    from lockstep.checkpoint import folder_of_ranks, open_model
    from lockstep.config import EngineConfig
    from lockstep.data import load_tokenizer, name_ends, with_ends
    from lockstep.data.chat import load_chat_template
    from lockstep.generate import Engine, SamplingParams
    from lockstep.observe import announce, start_line

    if bool(options.prompt) == bool(options.prompts):
        raise UserError("give either a text with --prompt TEXT or a file with --prompts FILE")
    world.on_main(lambda: _refuse_to_replace(options))
    params = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        n=options.n,
        seed=options.seed,
        stop=options.stop,
    )
    folder = folder_of_ranks(options.model, world)
    prompts = list(_prompts(options, folder))
    chunks = options.parallel.reduction_chunks
    model = open_model(folder, options.dtype, options.device, options.arithmetic, world, chunks, options.precision)
    tokenizer = load_tokenizer(folder, model.config.vocab_size)
    model.config = with_ends(model.config, tokenizer, load_chat_template(folder))
    samples = len(prompts) * options.n
    work = f"{samples} samples of " * (samples > 1) + f"up to {options.max_tokens} tokens to go"
    ends = name_ends(model.config.eos_token_ids, tokenizer)
    line = start_line(options.model, model.config, model.device, model.dtype, work, world.size, ends)
    announce(f"generate: {line}")
    # Enough for one sequence of the whole context, or for many short ones.
    cache = min(65536, model.config.max_positions + 16)
    engine = Engine(model, EngineConfig(cache_tokens=cache, max_sequences=64 if samples > 1 else 1), tokenizer)
    if options.prompts or options.output:
        _write_all(prompts, params, engine, tokenizer, options.output if world.is_main else "")
    elif options.n > 1:
        _print_samples(prompts[0], params, engine, tokenizer)
    else:
        shown = "" if options.chat else options.prompt
        _stream(shown, prompts[0], params, engine, tokenizer, model.config.eos_token_ids)


def _refuse_to_replace(options: GenerateOptions) -> None:
    if options.output and Path(options.output).exists() and not options.overwrite:
        raise UserError(f"{options.output}: already exists; replace it with --overwrite, or give another --output")


def _prompts(options: GenerateOptions, folder: Path) -> Iterator[Prompt]:
    from lockstep.data.chat import OPTION, command_values, load_chat_template

    lines = [{"prompt": options.prompt}] if options.prompt else list(_read(options.prompts))
    if not lines:
        raise UserError(f"{options.prompts}: contains no prompts; write one per line")
    renders = options.chat or any(_messages(line) is not None for line in lines)
    template = load_chat_template(folder) if renders else None
    if options.chat_template_kwargs and not renders:
        raise UserError(f"{OPTION}: no prompt is rendered by the chat template; add --chat, or leave it out")
    values = command_values(options.chat_template_kwargs, template) if template else {}
    for line in lines:
        messages = _messages(line)
        if messages is None and not options.chat:
            text = line["prompt"]
        elif template is None:
            raise UserError(f"{folder}: has no chat template; put a chat_template.jinja next to the model's weights")
        else:
            text = _rendered(template, messages or [{"role": "user", "content": line["prompt"]}], line, values)
        if not text:
            raise UserError(f"{options.prompts or '--prompt'}: a prompt is empty; there is nothing to continue")
        yield Prompt(line, text)


def _messages(line: dict[str, Any]) -> list[Any] | None:
    """A line's messages; None if its prompt is a text."""
    messages = line.get("messages", line.get("prompt"))
    return messages if isinstance(messages, list) else None


def _rendered(template: Any, messages: Any, line: dict[str, Any], values: dict[str, Any]) -> str:
    from lockstep.data.chat import KEY, ChatTemplateError, template_values

    try:
        return str(template.render(messages, **values | template_values(line.get(KEY), template)))
    except ChatTemplateError as error:
        raise UserError(f"{error}; the messages are {json.dumps(messages, ensure_ascii=False)[:200]}") from error


def _read(prompts: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of a file as objects with `prompt` or `messages`, and their other keys."""
    from lockstep.data.records import HUB, Tally, holds_records, read_hub, read_records

    path, data = Path(prompts), str(prompts)
    if not data.startswith(HUB) and not path.is_file():
        raise UserError(f"{path}: no such file; give prompts with --prompts FILE")
    if not data.startswith(HUB) and not holds_records(path):
        try:
            lines = path.read_bytes().decode().split("\n")  # not at U+2028 and the like, nor at \r alone
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: is not UTF-8 at byte {error.start}; convert it first") from error
        yield from ({"prompt": line.removesuffix("\r")} for line in lines if line.strip())
        return
    for where, line in read_hub(data) if data.startswith(HUB) else read_records(path, False, Tally()):
        if isinstance(line.get("messages"), list):
            yield {key: value for key, value in line.items() if key != "prompt"}
        elif isinstance(line.get("prompt"), str | list):
            yield {key: value for key, value in line.items() if key != "messages"}
        else:
            raise UserError(f"{where}: has neither a `prompt`, a text or messages, nor a list `messages`; give one")


def _write_all(prompts: list[Prompt], params: Any, engine: Any, tokenizer: Any, output: str) -> None:
    """Writes one JSON object per completion, in the order of the prompts, batch by batch."""
    import dataclasses

    from lockstep.progress import Progress

    tokens = [tokenizer.encode(prompt.text) for prompt in prompts]
    # Equal lines get different draws, and a line's draws do not depend on the number of lines.
    seeds = [None if params.seed is None else params.seed + line for line in range(len(prompts))]
    each = [dataclasses.replace(params, seed=seed) for seed in seeds]
    batch = max(1, 4 * engine.config.max_sequences // params.n)
    with contextlib.ExitStack() as opened:
        file: IO[str] = opened.enter_context(_open_output(output)) if output else sys.stdout
        bar = opened.enter_context(Progress("generate", len(prompts))) if output else None
        for start in range(0, len(prompts), batch):
            part = slice(start, start + batch)
            completed = zip(prompts[part], tokens[part], engine.generate(tokens[part], each[part]))
            _write(file, (_line(p, i, _text(t, c, engine), c) for p, t, cs in completed for i, c in enumerate(cs)))
            if bar:
                bar.advance(len(prompts[part]))


def _open_output(output: str) -> IO[str]:
    try:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        return Path(output).open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{output}: cannot be written ({error.strerror}); give another --output") from error


def _write(file: Any, lines: Iterable[dict[str, Any]]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    try:
        file.write(text)
        file.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        with contextlib.suppress(OSError):
            file.close()  # tries to write again
        raise UserError(f"{file.name}: cannot be written ({error.strerror}); give another --output") from error


def _line(prompt: Prompt, index: int, text: str, completion: Any) -> dict[str, Any]:
    return prompt.line | {
        "sample": index,
        "completion": text,
        "finish_reason": completion.finish_reason,
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs,
    }


def _text(prompt: list[int], completion: Any, engine: Any) -> str:
    from lockstep.data import continuation

    ends = engine.model.config.eos_token_ids
    return continuation(engine.tokenizer, prompt, [t for t in completion.token_ids if t not in ends])


def _print_samples(prompt: Prompt, params: Any, engine: Any, tokenizer: Any) -> None:
    tokens = tokenizer.encode(prompt.text)
    for index, completion in enumerate(engine.generate([tokens], params)[0]):
        print(f"[{index}] {_shown(_text(tokens, completion, engine))}")


def _stream(shown: str, prompt: Prompt, params: Any, engine: Any, tokenizer: Any, ends: Collection[int] = ()) -> None:
    from lockstep.data import StreamDecoder, decoding_context

    tokens = tokenizer.encode(prompt.text)
    decoder = StreamDecoder(tokenizer, decoding_context(tokenizer, tokens))
    for event in engine.stream(tokens, params):
        print(_shown(shown), end="", flush=True)  # with the first token: a refused prompt is not shown
        shown = ""
        if event.token_id not in ends:
            print(_shown(decoder.push(event.token_id)), end="", flush=True)
    print(_shown(decoder.finish()))


def _shown(text: str) -> str:
    """Escaped for a terminal; files and pipes get every character."""
    return printable(text) if sys.stdout.isatty() else text
