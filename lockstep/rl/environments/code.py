"""Programs that must pass hidden tests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from lockstep.errors import UserError
from lockstep.rl.conversations import ConversationEnvironment
from lockstep.rl.conversations.reasoning import answer_text
from lockstep.rl.environments.code_harness import count_tests
from lockstep.rl.environments.problems import needs_text, prompt_of, read_problems
from lockstep.rl.environments.protocol import Example
from lockstep.rl.grading.sandbox import SandboxLimits, missing_protections, run_code

PROMPT_KEYS = ("prompt", "problem", "question")
NEEDS = "`prompt`, and `tests`: Python source, or a list of sources, or of {input, output}"
STOPPED_SECONDS = 3.0
"""Seconds after its timeout until a silent harness, which the code may have stopped, is ended."""
LANGUAGE = re.compile(r"\s*\{?\s*\.?(\w*)")
"""The first word of an info string: `python title="x"`, `{.python}`."""
PYTHON = ("python", "py", "python3")
INSTRUCTION = "\n\nWrite Python. Give the whole program in one ```python block."


class Code(ConversationEnvironment):
    """Lines of `prompt` and `tests`; the last Python block in the reply is graded.

    `tests` are Python source (assertions, functions `test_…`, unittest classes), whose undefined names are the
    functions to write, or a list of such sources, or a list of `{"input": …, "output": …}` for programs that read and
    print. With `entry_point`, `check(ENTRY_POINT)` is called, as in HumanEval (arXiv 2107.03374).

    Rewards: `correct`, 1 if all tests pass; `passed`, the fraction that do, with weight 0: give it a weight in
    `reward_weights` for partial credit.

    The tests run in the sandbox, in another process than the code, and exchange plain data with it: see
    `code_harness.py`.
    """

    in_workers = True
    reward_weights: ClassVar[Mapping[str, float]] = {"correct": 1.0, "passed": 0.0}
    turns = 1
    marks_reasoning = True
    unfinished: ClassVar[Mapping[str, float]] = {"correct": 0.0, "passed": 0.0}
    seconds = 5.0
    """Timeout for all tests of a problem together."""
    memory_mib = 512

    def examples(self, split: str) -> Iterator[Example]:
        if missing := missing_protections():
            reasons = "; ".join(f"{name} ({reason})" for name, reason in missing.items())
            raise UserError(f"code is not run here, because the kernel cannot confine it sufficiently: {reasons}")
        for where, values in read_problems(self.data, split, self.skip_bad_lines, NEEDS):
            prompt = prompt_of(values, PROMPT_KEYS, INSTRUCTION)
            tests, problem = _tests(values)
            if prompt is not None and not problem:
                kwargs = values["chat_template_kwargs"]
                yield Example(prompt, id=where, metadata={"tests": tests}, chat_template_kwargs=kwargs)
            elif not self.skip_bad_lines:
                if prompt is None:
                    raise needs_text(where, values, PROMPT_KEYS)
                raise UserError(f"{where}: {problem}; fix it or use --skip-bad-lines")

    def reward(self, example: Example, completion: str) -> dict[str, float]:
        code = code_in(completion)
        passed, tests = run_tests(code, example.metadata["tests"], self.seconds, self.memory_mib) if code else (0, 1)
        return {"correct": float(0 < tests == passed), "passed": passed / max(1, tests)}


def code_in(completion: str) -> str:
    """The last Python block after the reasoning; if none is marked Python, the last block; without blocks, all text.

    Blocks that are not closed, as in a truncated reply, count only if there is no closed one.
    """
    answer = answer_text(completion)
    blocks = _blocks(answer)
    chosen = [block for block in blocks if block[0] in PYTHON] or blocks
    bodies = [body for _, body, is_closed in chosen if is_closed] or [body for _, body, _ in chosen] or [answer]
    return bodies[-1].strip("\n")


def _blocks(text: str) -> list[tuple[str, str, bool]]:
    """Language and body of each fenced block as CommonMark defines them, and whether it is closed.

    Unlike in CommonMark, tags such as <answer> do not hide a block on the next line.
    """
    blocks = []
    for token in _parser().parse(text + "\n"):
        if token.type == "fence" and token.map:
            language = LANGUAGE.match(token.info)
            fences = token.map[1] - token.map[0] - token.content.count("\n")
            blocks.append((language[1].lower() if language else "", token.content, fences == 2))
    return blocks


@cache
def _parser() -> Any:
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark").disable(["html_block", "inline"])


def run_tests(code: str, tests: Any, seconds: float = 5.0, memory_mib: int = 512) -> tuple[int, int]:
    """Runs tests of some code in the sandbox; returns (tests passed, tests), or (0, 0) if there is no result.

    `tests` is Python source, or a list of `{"input": …, "output": …}`. Raises as `run_code`.
    """
    harness = _harness()
    job = {"code": code, "tests": tests, "programs": None, "harness": harness, "seconds": seconds}
    if not isinstance(tests, str):
        job |= {"programs": tests, "output_bytes": 2**16 + 4 * max(len(test["output"]) for test in tests)}
    limits = SandboxLimits(seconds=seconds + STOPPED_SECONDS, memory_mib=memory_mib)
    result = run_code(harness, json.dumps(job), limits)
    if result.exit != 0:
        return 0, 0
    passed, count = json.loads(result.stdout)
    return passed, count


@cache
def _harness() -> str:
    return Path(__file__).with_name("code_harness.py").read_text()


def _tests(values: Mapping[str, Any]) -> tuple[Any, str]:
    """A line's tests for `run_tests`, and what is wrong with them."""
    tests = values.get("tests", values.get("test"))
    if isinstance(tests, list) and tests and all(isinstance(test, dict) for test in tests):
        if all(isinstance(t.get("input"), str) and isinstance(t.get("output"), str) for t in tests):
            return [{"input": t["input"], "output": t["output"]} for t in tests], ""
        return None, "each of `tests` needs the strings `input` and `output`"
    if isinstance(tests, list) and tests and all(isinstance(test, str) for test in tests):
        tests = "\n".join(tests)
    if not isinstance(tests, str) or not tests.strip():
        return None, "needs `tests`: Python source, or a list of sources, or of objects with `input` and `output`"
    if isinstance(entry := values.get("entry_point"), str) and entry.isidentifier():
        tests += f"\ncheck({entry})\n"
    try:
        count = count_tests(tests)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return None, f"its `tests` are not valid Python ({error})"
    return tests, "" if count else "its `tests` have no assertion and no function `test_…`"
