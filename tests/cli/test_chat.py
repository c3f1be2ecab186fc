"""`lockstep chat` as a user has it: the real command in a pseudo-terminal, with its keys."""

import fcntl
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from contextlib import contextmanager

import pytest

from lockstep.cli import main
from lockstep.commands.chat import ChatOptions, open_chat
from lockstep.errors import UserError
from tests.server.scripted import save_thinking


class Terminal:
    """What a user types, and sees."""

    def __init__(self, process, descriptor):
        self.process, self._descriptor = process, descriptor
        self.seen = ""

    def type(self, text):
        os.write(self._descriptor, text.encode())

    def until(self, wanted, seconds=120.0, pressing=""):
        """What is shown up to a match of `wanted`, which is taken from what is still to be seen.

        pressing: typed every second until then.
        """
        end = time.monotonic() + seconds
        while not (found := re.search(wanted, self.seen)):
            assert time.monotonic() < end, self.seen
            if select.select([self._descriptor], [], [], 1.0)[0]:
                self.seen += os.read(self._descriptor, 65536).decode(errors="replace")
            else:
                self.type(pressing)
        shown, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return shown


def _as_from_a_terminal():
    """Ctrl-C reaches the process, also where the tests run in a shell's background, which ignores it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def chatting(folder, *options):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "lockstep", "chat", "--model", str(folder), *map(str, options)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
        preexec_fn=_as_from_a_terminal,
    )  # fmt: skip
    os.close(theirs)
    terminal = Terminal(process, ours)
    try:
        terminal.until(r"/help lists the commands.*\n")
        terminal.until("> ")
        yield terminal
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_a_conversation_in_a_terminal_with_its_commands_keys_and_history(chat_folder):
    with chatting(chat_folder, "--temperature", 1, "--seed", 3) as terminal:
        terminal.type("hello there\n")
        terminal.until(r"hello there\r\n[^\n]")  # the answer has begun
        terminal.type("\x03")  # which stops the answer and not the program
        assert terminal.until(r"\n> ").rstrip("\r\n> ").endswith("(stopped)")
        terminal.type("/system You are terse.\n")
        assert "(a new conversation with this system message)" in terminal.until(r"\)\r\n> ")
        terminal.type("/reset\n")
        terminal.until(r"\(a new conversation\)\r\n> ")
        terminal.type("/system\n")
        assert "system: You are terse." in terminal.until(r"terse\.\r\n> ")
        terminal.type("/rest\n")
        assert 'unknown command "/rest". Did you mean "/reset"?' in terminal.until(r"/quit\r\n> ")
        terminal.type("\x1b[A\x1b[A\x1b[A\x1b[A\x1b[A\n")  # the arrow up brings back what was said first
        terminal.until("hello there")
        terminal.until(r"\n> ")
        terminal.type("/reset now\n")
        terminal.until(r"nothing was forgotten\r\n> ")
        # Python's readline shows its prompt, then waits; a Ctrl-C between the two does nothing until the next key.
        terminal.type("\x03")
        terminal.until(r"\(Ctrl-D or /quit to leave\)\r\n> ", pressing="\x03")
        terminal.type("\x04")
        assert terminal.process.wait(30) == 0


def test_what_was_said_stays_the_tokens_that_were_sampled_and_a_reset_forgets_it(chat_folder):
    session = open_chat(ChatOptions(str(chat_folder), system="Be kind.", seed=1, max_tokens=6, temperature=1.0))
    said = "".join(session.answer("one", []))
    (row,) = session._transcript.rows
    sampled = row.prompt_ids + row.token_ids
    list(session.answer("two", []))
    (row,) = session._transcript.rows  # the second prompt went on after the first reply's own tokens
    assert (row.prompt_ids + row.token_ids)[: len(sampled)] == sampled and row.turns == 2
    assert [m["role"] for m in session.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert session.messages[2]["content"] == said
    assert session.was_truncated
    session.reset()
    assert session.messages == [{"role": "system", "content": "Be kind."}] and session._transcript.rows == []


@pytest.fixture(scope="module")
def thinking_folder(tmp_path_factory, bpe_tokenizer):
    folder = tmp_path_factory.mktemp("thinking") / "qwen3"
    save_thinking(folder, bpe_tokenizer)
    return folder


def test_reasoning_is_apart_and_the_next_turn_is_rendered_from_the_content(thinking_folder):
    session = open_chat(ChatOptions(str(thinking_folder), temperature=0))
    thoughts = []
    for _ in range(2):
        assert "".join(session.answer("hi", [], thoughts.append)) == "now:4!"
    assert "".join(thoughts) == "We add." * 2
    assert session.messages[1]["content"] == "now:4!" and session.messages[1]["reasoning_content"] == "We add."
    second = session._transcript.rows[-1].prompt_ids
    template, tokenizer = session._rendering.template, session._rendering.tokenizer
    plain = [{"role": m["role"], "content": m["content"]} for m in session.messages[:3]]
    assert second == tokenizer.encode(template.render(plain))  # Qwen3's leaves earlier reasoning out


@pytest.mark.parametrize("terminal", [True, False])
def test_reasoning_is_faint_on_a_terminal_and_left_out_elsewhere(thinking_folder, capsys, monkeypatch, terminal):
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert main(["chat", "--model", str(thinking_folder), "--temperature", "0"]) == 0
    shown = capsys.readouterr().out.partition("> ")[2]
    thought = re.sub(r"\x1b\[0m\x1b\[2m", "", shown).partition("now:4!")[0]
    assert "now:4!" in shown and thought == ("\x1b[2mWe add.\x1b[0m\n\n" if terminal else "")


def test_an_answer_that_does_not_come_leaves_the_conversation_as_it_was(chat_folder):
    session = open_chat(ChatOptions(str(chat_folder), max_tokens=3))
    assert "".join(session.answer("one", [True])) == "" and session.messages == [], "stopped before its first token"
    with pytest.raises(UserError, match="fills the context of 512 tokens; /reset starts a new one"):
        list(session.answer("word " * 600, []))
    assert session.messages == [] and list(session.answer("hi", []))


def test_a_model_without_a_template_and_impossible_settings_are_refused(chat_folder, model_folder, capsys):
    assert main(["chat", "--model", str(model_folder)]) == 2
    assert "has no chat template" in capsys.readouterr().err
    assert main(["chat", "--model", str(chat_folder), "--top-p", "0"]) == 2
    assert "top_p is 0.0" in capsys.readouterr().err


def test_bytes_that_are_no_text_end_no_conversation(chat_folder, capfd, monkeypatch):
    for errors in ("strict", "surrogateescape"):
        lines = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n/quit now\n"), "utf-8", errors)
        monkeypatch.setattr("sys.stdin", lines)
        assert main(["chat", "--model", str(chat_folder), "--max-tokens", "2"]) == 0
    assert "Traceback" not in capfd.readouterr().err
