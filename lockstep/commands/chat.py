"""`lockstep chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from lockstep.commands.terminal import printable
from lockstep.config import Arithmetic
from lockstep.errors import UserError, closest

if TYPE_CHECKING:
    from lockstep.data.replies import Piece

FAINT, PLAIN = "\x1b[2m", "\x1b[0m"
HELP = {
    "/reset": "forget the conversation, except the system message",
    "/system TEXT": "set the system message and reset; without TEXT: show it",
    "/help": "show this",
    "/quit": "leave, like Ctrl-D",
}
CUT = " (truncated: --max-tokens or the end of the context)"
KEYS = "Ctrl-C stops an answer; the arrow keys recall earlier input"


@dataclass
class ChatOptions:
    """Talk to a model."""

    model: str
    """Hugging Face folder, a run's folder (its newest checkpoint), or ORGANISATION/MODEL[@REVISION] of the hub."""
    system: str = ""
    """System message at the start of the conversation; empty: none."""
    chat_template_kwargs: str = ""
    """Values for the chat template, a JSON object such as '{"enable_thinking": false}'; empty: none."""
    max_tokens: int = 0
    """Maximum number of tokens per answer; 0: up to the end of the context."""
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
    dtype: Annotated[str, "dtype"] = "auto"
    """`bfloat16` or `float32`; auto: as in the files."""
    arithmetic: Arithmetic = "auto"
    """On a CPU: `portable`, `bf16_pairs` or `bf16_tiles`; auto: the one that the model was trained in, if known, else
    the fastest."""
    device: str = ""
    """`cpu`, `cuda` or `cuda:1` …; empty: the machine's accelerator if it has one."""


def chat(options: ChatOptions) -> None:
    """Runs the command until the user leaves. Raises UserError for a model that cannot chat."""
    with contextlib.suppress(ImportError):  # Python can be built without it
        import readline  # noqa: F401  # `input` then edits lines and keeps their history
    talk = open_talk(options)
    print(f"/help lists the commands. {KEYS}.")
    while True:
        try:
            # Bytes from the terminal that are not UTF-8 arrive as surrogates, which no tokenizer accepts.
            line = input("> ").encode(errors="surrogateescape").decode(errors="replace").strip()
        except UnicodeDecodeError:
            print("that is not UTF-8 text; type it again")
            continue
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /quit to leave)")
            continue
        if line.split()[:1] == ["/quit"]:
            return
        if line.startswith("/"):
            print(_command(line, talk))
        elif line:
            try:
                with _interrupts() as interrupted:
                    thoughts = _Thoughts()
                    for text in talk.answer(line, interrupted, thoughts.show):
                        if text:
                            thoughts.end()
                        print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)
                    thoughts.end()
                    print(" (stopped)" if interrupted else CUT if talk.was_cut else "")
            except UserError as error:
                print(f"lockstep: {printable(str(error))}", file=sys.stderr)


class _Thoughts:
    """An answer's reasoning, faint and before the answer on a terminal; elsewhere it is left out."""

    def __init__(self) -> None:
        self._open = False

    def show(self, text: str) -> None:
        if sys.stdout.isatty():
            self._open = True
            print(f"{FAINT}{printable(text)}{PLAIN}", end="", flush=True)

    def end(self) -> None:
        if self._open:
            print("\n")
        self._open = False


class Talk:
    """A conversation with a model, whose replies stay the tokens that were sampled, unless they have reasoning, which
    templates show differently."""

    def __init__(self, engine: Any, rendering: Any, options: ChatOptions):
        self._engine, self._rendering, self._options = engine, rendering, options
        self.system = options.system
        self.reset()

    def reset(self) -> None:
        """Forgets everything but the system message."""
        from lockstep.rl.conversations.rendering import Transcript

        self._turns, self.was_cut = 0, False
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self._transcript = Transcript(self._rendering)

    def answer(
        self, said: str, interrupted: list[bool], thinks: Callable[[str], None] = lambda text: None
    ) -> Iterator[str]:
        """The reply's content as it is sampled, until it ends or `interrupted` is not empty; `thinks` gets its
        reasoning, which the template shows to the model again or not.

        The reply up to then becomes part of the conversation; if it is empty, what the user `said` does not either.
        Raises UserError if the conversation does not fit the context, or the template refuses it.
        """
        from lockstep.data import StreamDecoder
        from lockstep.data.replies import ReplyReader
        from lockstep.rl.conversations.rendering import message_values

        prompt = self._prompt(said)
        request = self._engine.add(prompt, self.params(len(prompt)))
        sample = self._engine.samples(request)[0]
        reader = ReplyReader(self._rendering.form, StreamDecoder(self._rendering.tokenizer), prompt)
        try:
            # A step computes at most max_tokens_per_step of the prompt, so Ctrl-C works before all of it is read.
            while sample.finish_reason is None and not interrupted:
                for event in self._engine.step():
                    if event.finish_reason == "error":
                        raise UserError("the model's logits are not finite (NaN or infinite); check the weights")
                    if event.token_id not in self._rendering.end_ids:
                        yield _content(reader.push(event.token_id), thinks)
            yield _content(reader.finish(), thinks)
        finally:
            self._engine.abort(request)
            completion = sample.completion()
            self.was_cut = completion.finish_reason == "length"
            if completion.token_ids and completion.finish_reason != "error":
                self._transcript.add(completion)
                parts = self._transcript.last_reply
                reply = {"role": "assistant", "content": parts.content, **message_values(parts)}
                self.messages += [{"role": "user", "content": said}, reply]
                self._turns += 1

    def _prompt(self, said: str) -> list[int]:
        from lockstep.data.chat import ChatTemplateError
        from lockstep.rl.conversations.rendering import TooLongError

        full = f"the conversation fills the context of {self.context} tokens; /reset starts a new one"
        try:
            prompt: list[int] = self._transcript.prompt(
                [*self.messages, {"role": "user", "content": said}], self.context
            )
        except TooLongError as error:
            raise UserError(full) from error
        except ChatTemplateError as error:
            raise UserError(str(error)) from error
        if len(prompt) >= self.context:
            raise UserError(full)
        return prompt

    def params(self, prompt_tokens: int) -> Any:
        """How the next reply is sampled."""
        from lockstep.generate import SamplingParams

        options, room = self._options, self.context - prompt_tokens
        return SamplingParams(
            max_tokens=min(options.max_tokens or room, room),
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            seed=None if options.seed is None else options.seed + self._turns,
        )

    @property
    def context(self) -> int:
        """Most tokens that a conversation can have."""
        return min(int(self._engine.max_positions), int(self._engine.cache_tokens))


def open_talk(options: ChatOptions) -> Talk:
    """Raises UserError for a model that does not exist or has no chat template, and for settings that cannot work."""
    from lockstep.checkpoint import model_folder, open_model
    from lockstep.config import EngineConfig
    from lockstep.data import load_tokenizer, name_ends, with_ends
    from lockstep.data.chat import load_chat_template
    from lockstep.data.template_values import command_values
    from lockstep.generate import Engine
    from lockstep.observe import announce, start_line
    from lockstep.rl.conversations.rendering import Rendering

    if options.max_tokens < 0:
        raise UserError(
            f"max_tokens is {options.max_tokens}; give a number above 0, or 0 for up to the end of the context"
        )
    folder = model_folder(options.model)
    template = load_chat_template(folder)
    if template is None:
        raise UserError(f"{folder}: has no chat template; put a chat_template.jinja next to the model's weights")
    values = command_values(options.chat_template_kwargs, template)
    model = open_model(folder, options.dtype, options.device, options.arithmetic)
    tokenizer = load_tokenizer(folder, model.config.vocab_size)
    model.config = with_ends(model.config, tokenizer, template)
    cache = min(65536, model.config.max_positions + 16)
    engine = Engine(model, EngineConfig(cache_tokens=cache, max_sequences=1), tokenizer)
    rendering = Rendering(tokenizer, template, model.config.eos_token_ids, template_values=values)
    talk = Talk(engine, rendering, options)
    talk.params(0)  # refuses settings before the first question
    work = f"a context of {talk.context} tokens"
    ends = name_ends(model.config.eos_token_ids, tokenizer)
    announce("chat: " + start_line(options.model, model.config, model.device, model.dtype, work, ends=ends))
    return talk


def _content(pieces: Sequence[Piece], thinks: Callable[[str], None]) -> str:
    """The text of the content; the reasoning's goes to `thinks`."""
    if reasoning := "".join(piece.text for piece in pieces if piece.section == "reasoning"):
        thinks(reasoning)
    return "".join(piece.text for piece in pieces if piece.section == "content")


def _command(line: str, talk: Talk) -> str:
    """Does what a line that begins with `/` asks; returns what to show."""
    name, _, rest = line.partition(" ")
    if name == "/reset" and rest.strip():
        return "/reset takes no argument; nothing was forgotten"
    if name == "/reset":
        talk.reset()
        return "(a new conversation)"
    if name == "/system" and not rest.strip():
        return f"system: {printable(talk.system)}" if talk.system else "(no system message)"
    if name == "/system":
        talk.system = rest.strip()
        talk.reset()
        return "(a new conversation with this system message)"
    if name == "/help":
        return "\n".join([*(f"{command:14} {does}" for command, does in HELP.items()), KEYS])
    names = [command.split()[0] for command in HELP]
    return f'unknown command "{printable(name)}".{closest(name, names)} Known: {", ".join(names)}'


@contextlib.contextmanager
def _interrupts() -> Iterator[list[bool]]:
    """Ctrl-C appends to the list instead of interrupting whatever is running, which could be reading from a pipe."""
    heard: list[bool] = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append(True))
    try:
        yield heard
    finally:
        signal.signal(signal.SIGINT, before)
