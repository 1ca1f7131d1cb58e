"""Shows the reference what users see: an extension of griffe, which reads the sources."""

import os
import pathlib
import re
import runpy
from typing import Any

import griffe

FORMULAS = runpy.run_path(os.fspath(pathlib.Path(__file__).parent / "formulas.py"))
ENTRIES = {
    name
    for page in (pathlib.Path(__file__).parent / "reference").glob("*.md")
    for name in re.findall(r"^::: jstep\.(\w+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    # Other words are arguments as often: `momentum`, `batches`, `scale`.
    if (re.search("_|[A-Z]", name) and name != "global_step")
    or name in ("train", "minimize", "chain", "partition")
}


class AsUsersSeeIt(griffe.Extension):
    """The reference as users see it.

    Names of the root mean functions, not files; examples are code, formulas are equations, names
    are links.
    """

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Points each name of the root at the function or class that it is at run time."""
        if pkg.name != "jstep":
            return
        for module in _modules(pkg):
            for member in module.members.values():
                if not member.is_alias:
                    _examples_and_links(member)
        for name, member in list(pkg.members.items()):
            if member.is_alias:
                target = _meant(member.final_target, name)
                pkg.members[name] = griffe.Alias(name, target, parent=pkg)
                if target.docstring is not None:
                    head, gap, rest = target.docstring.value.partition("\n\n")
                    target.docstring.value = head + FORMULAS["shown"](name) + gap + rest


def _modules(module: griffe.Module) -> list[griffe.Module]:
    members = module.members.values()
    inner = [member for member in members if not member.is_alias and member.is_module]
    return [module, *(found for one in inner for found in _modules(one))]


def _meant(target: Any, name: str) -> Any:
    while target.is_module and name in target.members:
        target = target.members[name]
        target = target.final_target if target.is_alias else target
    return target


def _examples_and_links(member: Any) -> None:
    if member.docstring is not None:
        text = re.sub(r"(?m)^Example:$", "Examples:", member.docstring.value)
        member.docstring.value = re.sub(r"(?m)(?<!\[)`(?:jstep\.)?(\w+)`(?!\])", _link, text)
    for inner in member.members.values() if member.is_class else ():
        if not inner.is_alias:
            _examples_and_links(inner)


def _link(match: re.Match[str]) -> str:
    return f"[{match[0]}][jstep.{match[1]}]" if match[1] in ENTRIES else match[0]
