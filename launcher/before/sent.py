"""Our modules as one text for `python -`, for a machine that does not have the code yet."""

from __future__ import annotations

from launcher.inventory import CHECKOUT

# Each module is made from its source; its packages are empty and know their modules by name.
LOADER = """
import sys, types
def _load(name, source):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    package, _, last = name.rpartition(".")
    if package:
        if package not in sys.modules:
            _load(package, "")
        setattr(sys.modules[package], last, module)
    exec(compile(source, name, "exec"), module.__dict__)
"""


def program(names: tuple[str, ...], call: str) -> str:
    """A Python program that loads these modules of the checkout in this order, and then evaluates
    `call` in the last one. They may import each other and the standard library."""
    lines = [LOADER]
    for name in names:
        path = CHECKOUT / f"{name.replace('.', '/')}.py"
        lines.append(f"_load({name!r}, {path.read_text(encoding='utf-8')!r})")
    return "\n".join([*lines, f"sys.modules[{names[-1]!r}].{call}", ""])
