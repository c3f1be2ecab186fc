"""Every Python block of the README and the documentation runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{index}")
    for page in PAGES
    for index, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_documented_block_runs(block):
    exec(compile(block, "documentation", "exec"), {})


def test_documented_commands_exist():
    from lockstep.cli import COMMANDS

    for page in PAGES:
        for command in re.findall(r"^lockstep (\w+)", page.read_text(), flags=re.M):
            assert command in COMMANDS, f"{page.name} names lockstep {command}"
