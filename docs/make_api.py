"""Writes docs/api.md, the API reference, from the docstrings: `python docs/make_api.py`."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("api.md")
ROOT = PAGE.parents[1]
sys.path.insert(0, str(ROOT))  # The checkout that this stands in, installed or not.

import pallas_pool as pp  # noqa: E402

WIDTH = 96
HEAD = """\
# API reference

Written from the docstrings by `docs/make_api.py`. Shapes stand in brackets, with the letters of the
geometry: L layers, E experts of a layer, R pool rows, S staging rows, W lanes. What the words mean
is in [how-it-works.md](how-it-works.md).

```text
import pallas_pool as pp
```
"""
SECTION = re.compile(r"(Args|Attributes|Returns|Raises):")
ITEM = re.compile(r"  (\w[\w, *]*): (.*)")


def escape(text: str) -> str:
    """Text outside code spans, made safe for Markdown."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*<])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def markdown(doc: str) -> Iterator[str]:
    """Lines of Markdown for a docstring in the style of this project."""
    section, example = None, False
    for line in inspect.cleandoc(doc).splitlines():
        if line.startswith(">>> ") and not example:
            yield "```text"
            example = True
        if example:
            if line:
                yield line
                continue
            yield "```"
            example = False
        found = SECTION.fullmatch(line)
        if found:
            section = found[1]
            yield from (f"*{section}*", "")
        elif section in (None, "Returns"):
            yield escape(line.strip())
        elif item := ITEM.fullmatch(line):
            names = ", ".join(f"`{name}`" for name in item[1].split(", "))
            yield f"- {names}: {escape(item[2])}"
        else:
            yield f"  {escape(line.strip())}" if line else ""
    if example:
        yield "```"


def annotation_of(value: Any) -> str:
    """An annotation as it stands in the source."""
    value = getattr(value, "__forward_arg__", value)
    return value if isinstance(value, str) else inspect.formatannotation(value)


def signature(name: str, thing: Any) -> Iterator[str]:
    """Lines of a call, with annotations and defaults as in the source."""
    parameters, star = [], False
    for parameter in inspect.signature(thing).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parameters.append("*")
            star = True
        text = f"{parameter.name}: {annotation_of(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {parameter.default!r}"
        parameters.append(text)
    returns = inspect.signature(thing).return_annotation
    arrow = "" if returns is inspect.Signature.empty else f" -> {annotation_of(returns)}"
    if inspect.isclass(thing):
        arrow = ""
    one_line = f"{name}({', '.join(parameters)}){arrow}"
    yield "```text"
    if len(one_line) <= WIDTH:
        yield one_line
    else:
        yield f"{name}("
        yield from (f"    {parameter}," for parameter in parameters)
        yield f"){arrow}"
    yield "```"


def entry(name: str) -> Iterator[str]:
    """The section of one public name."""
    thing = getattr(pp, name)
    yield from (f"## {name}", "")
    if thing is pp.KERNELS:
        names = ", ".join(f"`{kernel}`" for kernel in thing)
        yield f"The kernels by name, as `step` takes them: {names}."
        return
    made_by_a_caller = not inspect.isclass(thing) or dataclasses.is_dataclass(thing)
    if made_by_a_caller:
        yield from (*signature(name, thing), "")
    yield from markdown(thing.__doc__)
    attributes = vars(thing) if inspect.isclass(thing) else {}
    for attribute, value in attributes.items():
        if isinstance(value, property):
            doc = inspect.cleandoc(value.__doc__)
            yield from ("", f"`{name}.{attribute}`: {escape(doc)}")
    for attribute, value in attributes.items():
        if isinstance(value, classmethod) and value.__doc__:
            made_by = f"{name}.{attribute}"
            yield from ("", f"### {made_by}", "", *signature(made_by, getattr(thing, attribute)), "")
            yield from markdown(value.__doc__)


def render() -> str:
    """The whole page."""
    names = [name for name in pp.__all__ if not name.startswith("_")]
    lines = [HEAD.rstrip()]
    for name in names:
        lines += ["", *entry(name)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render())
