"""Shows the reference what users see: an extension of griffe, which reads the sources for the site."""

import re
from typing import Any

import griffe


class AsUsersSeeIt(griffe.Extension):
    """Names of the root mean functions, not the files of the same name; examples are shown as code."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Points each name of the root at the function or class that it is at run time."""
        if pkg.name != "jstep":
            return
        for module in _modules(pkg):
            for member in module.members.values():
                if not member.is_alias:
                    _examples_as_code(member)
        for name, member in list(pkg.members.items()):
            if member.is_alias:
                pkg.members[name] = griffe.Alias(name, _meant(member.final_target, name), parent=pkg)


def _modules(module: griffe.Module) -> list[griffe.Module]:
    inner = [member for member in module.members.values() if not member.is_alias and member.is_module]
    return [module, *(found for one in inner for found in _modules(one))]


def _meant(target: Any, name: str) -> Any:
    while target.is_module and name in target.members:
        target = target.members[name]
        target = target.final_target if target.is_alias else target
    return target


def _examples_as_code(member: Any) -> None:
    if member.docstring is not None:
        member.docstring.value = re.sub(r"(?m)^Example:$", "Examples:", member.docstring.value)
    for inner in member.members.values() if member.is_class else ():
        if not inner.is_alias:
            _examples_as_code(inner)
