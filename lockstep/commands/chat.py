"""`lockstep chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from lockstep.commands.terminal import printable
from lockstep.config import Arithmetic, PrecisionConfig
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
TRUNCATED = " (truncated: --max-tokens or the end of the context)"
KEYS = "Ctrl-C stops an answer; the arrow keys recall earlier input"


@dataclass
class ChatOptions:
    """ChatSession to a model."""

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
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)


def chat(options: ChatOptions) -> None:
    """Runs the command until the user leaves. Raises UserError for a model that cannot chat."""
    with contextlib.suppress(ImportError):  # Python may be built without it
        import readline  # noqa: F401  # makes `input` edit lines and remember them
    session = open_chat(options)
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
            print(_command(line, session))
        elif line:
            try:
                with _interrupts() as interrupted:
                    reasoning = _ReasoningPrinter()
                    for text in session.answer(line, interrupted, reasoning.show):
                        if text:
                            reasoning.end()
                        print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)
                    reasoning.end()
                    print(" (stopped)" if interrupted else TRUNCATED if session.was_truncated else "")
            except UserError as error:
                print(f"lockstep: {printable(str(error))}", file=sys.stderr)


class _ReasoningPrinter:
    """Prints an answer's reasoning, faint, before the answer; only on a terminal."""

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


class ChatSession:
    """A conversation with a model. Replies stay the sampled tokens in later prompts, except those with reasoning, which
    templates render differently."""

    def __init__(self, engine: Any, rendering: Any, options: ChatOptions):
        self._engine, self._rendering, self._options = engine, rendering, options
        self.system = options.system
        self.reset()

    def reset(self) -> None:
        """Clears everything but the system message."""
        from lockstep.rl.conversations.rendering import Transcript

        self._turns, self.was_truncated = 0, False
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self._transcript = Transcript(self._rendering)

    def answer(
        self, question: str, interrupted: list[bool], on_reasoning: Callable[[str], None] = lambda text: None
    ) -> Iterator[str]:
        """The reply's content as it is sampled, until it ends or `interrupted` is not empty; `on_reasoning` is called
        with its reasoning.

        The `question` and the reply so far become part of the conversation, unless the reply is empty. Raises UserError
        if the conversation does not fit the context, or the template refuses it.
        """
        from lockstep.data import StreamDecoder
        from lockstep.data.replies import ReplyReader
        from lockstep.rl.conversations.rendering import message_values

        prompt = self._prompt(question)
        request = self._engine.add(prompt, self.params(len(prompt)))
        sample = self._engine.samples(request)[0]
        reader = ReplyReader(self._rendering.form, StreamDecoder(self._rendering.tokenizer), prompt)
        try:
            # A step prefills at most max_tokens_per_step, so Ctrl-C also works during the prompt.
            while sample.finish_reason is None and not interrupted:
                for event in self._engine.step():
                    if event.finish_reason == "error":
                        raise UserError("the model's logits are not finite (NaN or infinite); check the weights")
                    if event.token_id not in self._rendering.end_ids:
                        yield _content(reader.push(event.token_id), on_reasoning)
            yield _content(reader.finish(), on_reasoning)
        finally:
            self._engine.abort(request)
            completion = sample.completion()
            self.was_truncated = completion.finish_reason == "length"
            if completion.token_ids and completion.finish_reason != "error":
                self._transcript.add(completion)
                parts = self._transcript.last_reply
                reply = {"role": "assistant", "content": parts.content, **message_values(parts)}
                self.messages += [{"role": "user", "content": question}, reply]
                self._turns += 1

    def _prompt(self, question: str) -> list[int]:
        from lockstep.data.chat import ChatTemplateError
        from lockstep.rl.conversations.rendering import TooLongError

        full = f"the conversation fills the context of {self.context} tokens; /reset starts a new one"
        try:
            prompt: list[int] = self._transcript.prompt(
                [*self.messages, {"role": "user", "content": question}], self.context
            )
        except TooLongError as error:
            raise UserError(full) from error
        except ChatTemplateError as error:
            raise UserError(str(error)) from error
        if len(prompt) >= self.context:
            raise UserError(full)
        return prompt

    def params(self, prompt_tokens: int) -> Any:
        """Sampling parameters of the next reply."""
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
        """Maximum number of tokens of a conversation."""
        return min(int(self._engine.max_positions), int(self._engine.cache_tokens))


def open_chat(options: ChatOptions) -> ChatSession:
    """Opens a session. Raises UserError for a model that does not exist or cannot chat, and for invalid settings."""
    from lockstep.checkpoint import model_folder, open_model
    from lockstep.config import EngineConfig
    from lockstep.data import load_tokenizer, name_ends, with_ends
    from lockstep.data.chat import command_values, load_chat_template
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
    model = open_model(folder, options.dtype, options.device, options.arithmetic, precision=options.precision)
    tokenizer = load_tokenizer(folder, model.config.vocab_size)
    model.config = with_ends(model.config, tokenizer, template)
    cache = min(65536, model.config.max_positions + 16)
    engine = Engine(model, EngineConfig(cache_tokens=cache, max_sequences=1), tokenizer)
    rendering = Rendering(tokenizer, template, model.config.eos_token_ids, template_values=values)
    session = ChatSession(engine, rendering, options)
    session.params(0)  # validates settings before the first question
    work = f"a context of {session.context} tokens"
    ends = name_ends(model.config.eos_token_ids, tokenizer)
    announce("chat: " + start_line(options.model, model.config, model.device, model.dtype, work, ends=ends))
    return session


def _content(pieces: Sequence[Piece], on_reasoning: Callable[[str], None]) -> str:
    """The text of the content; the reasoning's is passed to `on_reasoning`."""
    if reasoning := "".join(piece.text for piece in pieces if piece.section == "reasoning"):
        on_reasoning(reasoning)
    return "".join(piece.text for piece in pieces if piece.section == "content")


def _command(line: str, session: ChatSession) -> str:
    """Runs a command that begins with `/`; returns what to print."""
    name, _, rest = line.partition(" ")
    if name == "/reset" and rest.strip():
        return "/reset takes no argument; nothing was forgotten"
    if name == "/reset":
        session.reset()
        return "(a new conversation)"
    if name == "/system" and not rest.strip():
        return f"system: {printable(session.system)}" if session.system else "(no system message)"
    if name == "/system":
        session.system = rest.strip()
        session.reset()
        return "(a new conversation with this system message)"
    if name == "/help":
        return "\n".join([*(f"{command:14} {does}" for command, does in HELP.items()), KEYS])
    names = [command.split()[0] for command in HELP]
    return f'unknown command "{printable(name)}".{closest(name, names)} Known: {", ".join(names)}'


@contextlib.contextmanager
def _interrupts() -> Iterator[list[bool]]:
    """Ctrl-C appends to the list instead of raising, which could interrupt a read from a pipe."""
    interrupted: list[bool] = []
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.append(True))
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
