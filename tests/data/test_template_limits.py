"""A chat template is a program of someone else's: it ends in bounded time and memory, and the next rendering works."""

import pytest

from lockstep.data import chat
from lockstep.data.chat import ChatTemplate, ChatTemplateError, load_chat_template
from lockstep.errors import UserError

GOOD = "{{ messages[0].content }}"
HARMFUL = {
    "slow": ("{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3, "more than 1 seconds"),
    "large": ("{{ 'a' * (messages | length * 1500000000) }}", "more than 1024 MiB"),
    "long": ("{{ 'a' * (messages | length * 70000000) }}", "more than 67108864 characters"),
    "power": ("{% set n = messages | length + 1 %}{{ (n + 7) ** ((n + 7) ** (n + 7)) }}", "more than 1 seconds"),
    "doubling": (
        "{% set ns = namespace(x=[1]) %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "more than",
    ),
}
"""A template's source, harmful only for messages with that content, and what is said about it."""


@pytest.fixture(scope="module", autouse=True)
def little_time():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat, "SECONDS", 1.0)
        yield


@pytest.fixture(scope="module")
def template():
    sources = [f"{{% if messages[0].content == '{name}' %}}{HARMFUL[name][0]}{{% endif %}}" for name in HARMFUL]
    return ChatTemplate("".join(sources) + GOOD, {})


@pytest.mark.parametrize(
    "name", ["large", "long", *(pytest.param(n, marks=pytest.mark.slow) for n in ("slow", "power", "doubling"))]
)
def test_a_rendering_is_bounded_and_the_next_one_works(template, name):
    with pytest.raises(ChatTemplateError, match=HARMFUL[name][1]):
        template.render([{"role": "user", "content": name}])
    assert template.render([{"role": "user", "content": "hello"}]) == "hello"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 1500000000 }}",
        "{{" + "(" * 100_000,
        "{% if",
        pytest.param("{{ 9 ** (9 ** 9) }}", marks=pytest.mark.slow),
        pytest.param("{{ [[1] * 30000] * 30000 * 9000000 }}", marks=pytest.mark.slow),
    ],
)
def test_a_template_is_compiled_in_bounds(tmp_path, source):
    (tmp_path / "chat_template.jinja").write_text(source)
    with pytest.raises((UserError, ChatTemplateError)) as raised:
        load_chat_template(tmp_path).render([{"role": "user", "content": "hello"}])
    if isinstance(raised.value, UserError):
        assert str(tmp_path) in str(raised.value) and "cannot be read" in str(raised.value)


def test_messages_are_bounded(template, monkeypatch):
    nested = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(ChatTemplateError, match="RecursionError"):
        template.render([{"role": "user", "content": nested}])
    monkeypatch.setattr(chat, "MOST_INPUT_BYTES", 1000)
    with pytest.raises(ChatTemplateError, match=r"bytes, more than 1000"):
        template.render([{"role": "user", "content": "x" * 1000}])
    assert template.render([{"role": "user", "content": "half a pair: \ud83d"}]) == "half a pair: \ud83d"
