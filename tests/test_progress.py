"""Progress: a bar, or lines now and then and one at the end; a validation has a line of its own on both."""

import io
import re
import sys

import pytest

from lockstep.progress import Progress


def test_the_end_is_printed_once_however_often_it_is_reached(capsys):
    with Progress("tokenize", 3) as progress:
        for _ in range(3):
            progress.advance()
        for _ in range(20):
            progress.advance(0)
    assert capsys.readouterr().out == "tokenize: 100%, 0 s left  \n"


@pytest.mark.parametrize("to", ["a terminal", "a file"])
def test_a_validation_is_printed_once_and_whole_when_it_has_run(to, capsys, monkeypatch):
    if to == "a terminal":
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("TERM", "xterm")

    def printed():
        """Without control sequences."""
        return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", capsys.readouterr().out)

    metrics = {"validation/[red]correct": 0.5, "validation/accuracy": 0.25, "validation/accuracy_stderr": 0.125}
    with Progress("rl", 3, "step") as progress:
        progress.validated(0, metrics)
        before = printed()
        for step in range(1, 4):
            if step == 2:
                progress.validated(2, {f"validation/{name}": 1.0 for name in map(str, range(40))})
            progress.advance(reward=0.5)
    after = printed()
    assert ("━" in after) == (to == "a terminal")
    assert before.count("rl: validation before step 1: [red]correct 0.5  accuracy 0.25 (stderr 0.125)\n") == 1
    assert after.count("validation") == 1
    assert "rl: validation after step 2: " + "  ".join(f"{n} 1" for n in range(40)) + "\n" in after


def test_a_name_that_the_output_cannot_show_is_escaped(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    with Progress("rl", 1, "step") as progress:
        progress.validated(1, {"validation/größe": 1.0})
    assert written.getvalue() == b"rl: validation after step 1: gr\\xf6\\xdfe 1\n"
