"""A chat template is a program of someone else's: it ends in bounded time and memory, and the next rendering works."""

import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lockstep.data import chat, template_process
from lockstep.data.chat import ChatTemplate, ChatTemplateError, load_chat_template
from lockstep.errors import UserError

MESSAGES = [{"role": "user", "content": "hello"}]
GOOD = "{{ messages[0].content }}"
SLOW = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3


def _when(content, template):
    """A template that is harmless but for messages with this content."""
    return "{% if messages[0].content == '" + content + "' %}" + template + "{% endif %}" + GOOD


@pytest.fixture(autouse=True)
def _little_time(monkeypatch):
    monkeypatch.setattr(chat, "SECONDS", 1.0)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (SLOW, "more than 1 seconds"),
        ("{% set n = messages | length + 1 %}{{ (n + 7) ** ((n + 7) ** (n + 7)) }}", "more than 1 seconds"),
        ("{{ 'a' * (messages | length * 1500000000) }}", "more than 1024 MiB"),
        ("{{ 'a' * (messages | length * 70000000) }}", "more than 67108864 characters"),
        (
            "{% set ns = namespace(x=[1]) %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
            "more than",
        ),
    ],
)
def test_a_rendering_is_bounded_and_the_next_one_works(template, message):
    own = ChatTemplate(_when("bad", template), {})
    with pytest.raises(ChatTemplateError, match=message):
        own.render([{"role": "user", "content": "bad"}])
    assert own.render(MESSAGES) == "hello"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 9 ** (9 ** 9) }}",
        "{{ 'a' * 1500000000 }}",
        "{{ [[1] * 30000] * 30000 * 9000000 }}",
        "{{" + "(" * 100_000,
        "{% if",
    ],
)
def test_a_template_is_compiled_in_bounds(tmp_path, template):
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises((UserError, ChatTemplateError)) as raised:
        load_chat_template(tmp_path).render(MESSAGES)
    if isinstance(raised.value, UserError):
        assert str(tmp_path) in str(raised.value) and "cannot be read" in str(raised.value)


def test_what_goes_in_is_bounded(monkeypatch):
    template = ChatTemplate(GOOD, {})
    nested = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(ChatTemplateError, match="RecursionError"):
        template.render([{"role": "user", "content": nested}])
    monkeypatch.setattr(chat, "MOST_INPUT_BYTES", 1000)
    with pytest.raises(ChatTemplateError, match=r"bytes, more than 1000"):
        template.render([{"role": "user", "content": "x" * 1000}])
    assert template.render(MESSAGES) == "hello"


def test_one_process_renders_everything_from_any_thread_and_ends_with_the_template():
    template = ChatTemplate("{{ messages[0].content }}{{ eos_token }}", {"eos_token": "</s>"})
    process = template._process._child.pid
    texts = {}

    def ask(number):
        for _ in range(20):
            texts.setdefault(number, set()).add(template.render([{"content": f"\ud83d {number} " * 1000}]))  # noqa: F821

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: {f"\ud83d {number} " * 1000 + "</s>"} for number in range(4)}
    assert template._process._child.pid == process
    del template
    gc.collect()
    assert not Path(f"/proc/{process}").exists()


def test_a_process_that_was_killed_is_replaced():
    template = ChatTemplate(GOOD, {})
    os.kill(template._process._child.pid, signal.SIGKILL)
    time.sleep(0.1)
    with pytest.raises(ChatTemplateError, match="its process ended with code -9"):
        template.render(MESSAGES)
    assert template.render(MESSAGES) == "hello"


def test_nothing_is_imported_from_the_working_folder(tmp_path, monkeypatch):
    for name in ("jinja2", "pickle", "resource", "json"):
        (tmp_path / f"{name}.py").write_text("open('imported', 'w'); raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep + os.environ.get("PYTHONPATH", ""))
    assert ChatTemplate(GOOD, {}).render(MESSAGES) == "hello" and not (tmp_path / "imported").exists()


def test_a_process_whose_asker_is_gone_ends_in_silence():
    child = subprocess.Popen(
        [sys.executable, "-P", template_process.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    child.stdout.close()
    _, said = child.communicate(pickle.dumps(("{{ x }}", 2**30, 5.0, 2**20)), timeout=60)
    assert (said, child.returncode) == (b"", 0)
