"""Every Python block of the README and the documentation runs."""

import importlib
import inspect
import re
import runpy
import tomllib
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").glob("*.md") if p.name != "api.md")]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{index}", marks=[pytest.mark.slow] * ((page.name, index) == ("README.md", 1)))
    for page in PAGES
    for index, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_documented_block_runs(block):
    exec(compile(block, "documentation", "exec"), {})


def test_the_api_reference_describes_every_public_name():
    making = runpy.run_path(str(ROOT / "docs" / "make_api.py"))
    page = making["page"]()
    for module in making["MODULES"]:
        for name in importlib.import_module(module).__all__:
            value = getattr(importlib.import_module(module), name)
            if inspect.isclass(value) or inspect.isfunction(value):
                assert f"\n### {name}\n" in page and (value.__doc__ or "").strip(), f"{module}.{name} is not documented"
    assert "- `samples_per_prompt: Annotated[int, AtLeast(2)] = 8`: Completions per prompt" in page


def test_the_table_of_families_has_all_of_them():
    making = runpy.run_path(str(ROOT / "docs" / "make_models.py"))
    assert making["families"]() in (ROOT / "docs" / "models.md").read_text(), "run python docs/make_models.py"


@pytest.mark.slow
def test_the_table_of_models_is_what_trying_it_gives():
    making = runpy.run_path(str(ROOT / "docs" / "make_models.py"))
    assert making["table"]() in (ROOT / "docs" / "models.md").read_text(), "run python docs/make_models.py"


def test_documented_commands_exist():
    from lockstep.cli import COMMANDS

    for page in PAGES:
        for command in re.findall(r"^lockstep ([\w-]+)", page.read_text(), flags=re.M):
            assert command in COMMANDS, f"{page.name} names lockstep {command}"


def test_what_pages_and_messages_tell_to_install_is_on_the_index_or_in_the_clone():
    """The names are those that the project installs from there itself; its own is not one of them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    known = {re.match(r"[\w-]+", name)[0] for name in wanted} | {".", "dist"}
    found = [
        (file.name, name)
        for file in [*PAGES, *(ROOT / "lockstep").rglob("*.py")]
        for name in re.findall(r"""pip install ['"]?([\w.-]+)""", file.read_text())
    ]
    assert len(found) > 10 and [each for each in found if each[1] not in known] == []


def test_the_new_names_of_the_page_exist():
    parts = (ROOT / "docs" / "names.md").read_text().split("\n## ")[3:]
    modules, names = (re.findall(r"^\| `[\w.]+` \| `([\w.]+)` \|$", part, flags=re.M) for part in parts)
    assert len(modules) > 60 and len(names) > 60
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), module
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
