"""Tokens of rollouts in report.html: their colours, whatever they say, in one file of a bounded size."""

import json
from html.parser import HTMLParser

import pytest

from lockstep.data import ByteTokenizer
from lockstep.data.decoding import token_pieces
from lockstep.errors import UserError
from lockstep.observe import MetricsWriter, open_run, write_report
from lockstep.observe.report import MAX_BYTES
from lockstep.observe.token_view import ENVIRONMENTS, channels, shown_steps

HOSTILE = "</i></span><script>alert('gotcha')</script><img src=x onerror=\"gotcha()\">&lt;b&gt;\x00\x1b[2Jä\u202e"


class Page(HTMLParser):
    """All elements and their attributes, and the text of the tokens by the section that they stand in."""

    VOID = ("meta", "br", "link", "img", "input", "hr")

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.tokens = [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "i":
            self.tokens.append([dict(attrs), ""])

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "i" in self.open:
            self.tokens[-1][1] += data


def _line(group, text, advantage=0.0, **more):
    tokens = ByteTokenizer().encode(text)
    return {
        "prompt": text, "completion": text, "answer": text, "rewards": {text[:40]: 1.0}, "reward": 1.0,
        "advantage": advantage, "finish_reason": "stop", "group": group, "version": 0, "prompt_ids": [1],
        "token_ids": tokens, "log_probs": [-1.0] * len(tokens), **more,
    }  # fmt: skip


def _run(folder, **steps):
    run = open_run(str(folder), f"output = '{folder}'\nmodel = '{folder}/model'\n")
    (run.path / "model").mkdir()
    ByteTokenizer().save(run.path / "model")
    (run.path / "rollouts").mkdir()
    for step, lines in steps.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        run.rollouts_path(int(step.removeprefix("step"))).write_text(text)
    return run.path


def test_a_token_has_a_colour_for_each_known_value(tmp_path):
    text = "ab\n"
    lines = [
        _line(0, text, 1.0, log_probs=[-0.5, -2.0, -8.0], entropies=[0.0, 1.0, 4.0],
              reference_log_probs=[-0.5, -4.0, 0.0], trainer_log_probs=[-0.5, -2.0, -8.0 - 1e-6]),
        _line(0, text, -0.5),
        # The environment wrote the first and the last token; each of the others has an advantage of its own.
        _line(1, text + "x", 0.0, sampled=[0, 1, 1, 0], log_probs=[-1.0, -2.0], token_advantages=[0.25, 1.0]),
    ]  # fmt: skip
    run = _run(tmp_path / "run", step1=lines)
    page = Page(write_report(run).read_text())
    assert [text for _, text in page.tokens] == [*["a", "b", "⏎\n"] * 3, "x"]
    assert [attrs["title"] == ENVIRONMENTS and not attrs["style"] for attrs, _ in page.tokens[6:]] == [1, 0, 0, 1]
    assert [attrs["style"] for attrs, _ in page.tokens[7:9]] == ["--l:0.25;--a:0.25", "--l:0.5;--a:1"]
    styles = [dict(p.split(":") for p in attrs["style"].split(";")) for attrs, _ in page.tokens[:6]]
    assert [style.get("--l") for style in styles[:3]] == ["0.12", "0.5", "1"]
    assert [style.get("--e") for style in styles[:3]] == [None, "0.25", "1"]
    assert [(style.get("--r"), style.get("--rn")) for style in styles[:3]] == [(None, None), (None, "0.5"), ("1", None)]
    assert [style.get("--dn") for style in styles] == [None, None, "1", None, None, None], "any difference is shown"
    assert styles[0]["--a"] == "1" and styles[3]["--an"] == "0.5"
    assert "log-probability -2 · advantage 1 · trainer minus generator 0 · entropy 1" in (page.tokens[1][0]["title"])
    offered = [attrs["value"] for tag, attrs in page.elements if tag == "option"]
    assert offered == ["l", "a", "e", "d", "r"], "there is no teacher"
    assert channels(shown_steps(run))["e"] == "entropy"


def test_nothing_that_a_model_says_becomes_part_of_the_page(tmp_path):
    run = _run(tmp_path / "run", step1=[_line(0, HOSTILE, 1.0, dropped=HOSTILE, failure=HOSTILE), _line(0, "x", -1.0)])
    for step in (0, 1):
        (run / "rollouts" / f"validation_{step:08}.jsonl").write_text(json.dumps(_line(0, HOSTILE)) + "\n")
    with MetricsWriter(run) as writer:
        writer.write(1, {"reward/mean": 1.0, f"alarm/{HOSTILE}": 1.0})
    path = run / "rollouts/step_00000001.jsonl"
    path.write_bytes(path.read_bytes() + b'{"prompt": ')  # a line that a killed run has not finished
    text = write_report(run, title=HOSTILE, introduction=HOSTILE).read_text()
    page = Page(text)
    loading = {"script", "img", "iframe", "object", "embed", "link", "base", "form", "a"}
    assert not loading & {tag for tag, _ in page.elements}
    assert not any(name.startswith("on") or name in ("src", "href") for _, attrs in page.elements for name in attrs)
    policy = next(a["content"] for t, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'"), "nor would it run"
    unseen = [c for c in text if not c.isprintable() and c != "\n"]
    assert not unseen and "\\x1b[2Jä\\x202e" in text, "characters that cannot be seen are written by their number"
    shown = "".join(text for _, text in page.tokens)
    assert "<script>alert('gotcha')</script>" in shown and "\\x00\\x1b[2J\\xc3\\xa4" in shown


def test_the_first_a_middle_and_the_last_step_are_shown_or_requested_ones(tmp_path):
    steps = {f"step{n}": [_line(g, f"{n}{g}", a) for g in range(9) for a in (0.5, 0.1, -0.5)] for n in range(1, 12)}
    run = _run(tmp_path / "run", **steps)
    assert [one.step for one in shown_steps(run)] == [1, 6, 11]
    assert [one.step for one in shown_steps(run, (3, 2))] == [3, 2]
    ranked = [shown.rollout["advantage"] for shown in shown_steps(run, (2,))[0].rollouts]
    assert ranked == [0.5, -0.5] * 4, "the best and the worst of four groups"
    with pytest.raises(UserError, match="no rollouts of step 12; it has rollouts of 11"):
        write_report(run, steps=(1, 12))


def test_groups_that_taught_something_come_first_and_an_unknown_tokenizer_leaves_the_text(tmp_path):
    lines = [_line(group, f"say {group}", 0.5 * (group > 5)) for group in range(8)]
    run = _run(tmp_path / "run", step1=lines)
    (run / "model" / "byte_tokenizer.json").unlink()
    (run / "model" / "tokenizer.json").unlink()
    text = write_report(run).read_text()
    page = Page(text)
    assert not page.tokens and "option" not in {tag for tag, _ in page.elements}
    assert text.index("say 6") < text.index("say 0") and "say 5" not in text


def test_a_report_of_the_longest_rollouts_stays_below_its_size(tmp_path):
    loud = "\"&<>'" * 4_000
    many = {f"name {n} {HOSTILE}": 0.1 for n in range(300)}
    lines = [_line(g, loud, a, entropies=[1.0] * len(loud), rewards=many) for g in range(4) for a in (1.0, -1.0)]
    run = _run(tmp_path / "run", step1=lines, step2=lines, step3=lines)
    for step in (0, 3):
        text = "".join(json.dumps(line) + "\n" for line in [_line(n, loud, rewards=many) for n in range(12)])
        (run / "rollouts" / f"validation_{step:08}.jsonl").write_text(text)
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(4_000):
            names = ("reward/mean", "rollout/tokens_mean", "policy/entropy", "grad_norm", "learning_rate", "loss")
            file.write(json.dumps({"step": step, **{n: hash((step, n)) % 1000 / 1000 for n in names}}) + "\n")
    page = write_report(run).read_text()
    assert len(page.encode()) < MAX_BYTES
    parsed = Page(page)
    assert len(parsed.tokens) > 1000 and "characters left out" in page
    assert any("tokens left out" in text for _, text in parsed.tokens)


def test_a_piece_is_what_a_token_says_by_itself(bpe_tokenizer):
    text = "naïve\n🦙 x"
    pieces = token_pieces(bpe_tokenizer, [*bpe_tokenizer.encode(text), bpe_tokenizer.eos_id])
    assert pieces[-1] == "<|endoftext|>"
    # What was written as bytes stands for the same text.
    joined = "".join(pieces[:-1]).encode("latin-1", errors="backslashreplace").decode("unicode_escape")
    assert joined.encode("latin-1").decode() == text or "".join(pieces[:-1]) == text
    assert "\\xf0" in "".join(pieces)
    assert token_pieces(ByteTokenizer(), [97, 0xC3, 0xA4, 256, 257, 300]) == [
        "a", "\\xc3", "\\xa4", "<|endoftext|>", "[257]", "[300]"
    ]  # fmt: skip
