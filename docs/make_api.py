"""Writes docs/api.md from the docstrings of the public names: make api"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("api.md")
MODULES = (
    "lockstep",
    "lockstep.config",
    "lockstep.rl",
    "lockstep.rl.grading.sandbox",
    "lockstep.data",
    "lockstep.model",
    "lockstep.train",
)
ABOUT = """# API reference

Made from the docstrings by `make api`. Shapes are in the annotations, in
[jaxtyping](https://docs.kidger.site/jaxtyping/)'s notation. Everything that a user can mend raises
`lockstep.errors.UserError`.
"""


def page() -> str:
    """The whole page. A name that several modules export is described at the first of them."""
    seen: set[int] = set()
    parts = [ABOUT]
    for name in MODULES:
        module = importlib.import_module(name)
        parts.append(f"## {name}\n\n{inspect.getdoc(module)}\n")
        for exported in sorted(module.__all__, key=str.lower):
            value = getattr(module, exported)
            if (inspect.isclass(value) or inspect.isfunction(value)) and id(value) not in seen:
                seen.add(id(value))
                parts.append("\n".join(_described(exported, value)))
    return "\n".join(parts)


def _described(name: str, value: Any) -> Iterator[str]:
    yield f"### {name}\n"
    fields = _field_docs(value) if dataclasses.is_dataclass(value) else {}
    if not fields:
        yield f"```\n{name}{_signature(value)}\n```\n"
    doc = inspect.getdoc(value) or ""
    if not doc.startswith(f"{name}("):  # what dataclasses write by themselves
        yield f"{doc}\n"
    for field, text in fields.items():
        yield f"- `{field}`: {text}" if text else f"- `{field}`"
    if fields:
        yield ""
    if inspect.isclass(value):
        for method, function in vars(value).items():
            plain = getattr(function, "__func__", function)
            if not method.startswith("_") and inspect.isfunction(plain) and inspect.getdoc(plain):
                yield f"`{method}{_signature(plain)}`\n"
                yield textwrap.indent(inspect.getdoc(plain) or "", "> ", lambda line: True) + "\n"


def _signature(value: Any) -> str:
    if inspect.isclass(value) and issubclass(value, Exception):
        return ""
    return str(inspect.signature(value)).replace("'", "").replace("(self, ", "(").replace("(self)", "()")


def _field_docs(kind: Any) -> dict[str, str]:
    """`name: type = default` of each field, and the text below it, where a field's own documentation stands."""
    docs: dict[str, str] = {}
    for base in reversed([k for k in kind.__mro__ if dataclasses.is_dataclass(k)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for statement, after in zip(body, [*body[1:], None]):
            if not isinstance(statement, ast.AnnAssign) or "ClassVar" in ast.unparse(statement.annotation):
                continue
            name = ast.unparse(statement.target)
            told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            docs = {k: v for k, v in docs.items() if k.split(":")[0] != name}
            text = inspect.cleandoc(after.value.value).replace("\n", " ") if told else ""  # type: ignore[union-attr]
            docs[ast.unparse(statement)] = text
    return docs


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
