"""Whether a model of the given name exists, found out without importing torch."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path

from launcher.before.probe import Facts
from launcher.inventory import CHECKOUT, Host


def rule(name: str) -> str | None:
    """The source by which a machine learns which functions of its torchvision are classifiers; None
    for the user's own function, which torchvision does not know."""
    if ":" in name:
        return None
    return (CHECKOUT / "trainer" / "classifiers.py").read_text(encoding="utf-8")


def problem(name: str, host: Host, facts: Facts, sent: tuple[str, ...]) -> str | None:
    """A sentence when the trainer would not find the model on this machine; `sent` names the
    files that will be sent there."""
    if ":" in name:
        return _own(name, host, facts, sent)
    known = facts.models
    if not known or name in known:  # no torchvision, or no answer in time
        return None
    near = difflib.get_close_matches(name, known, 3) or known[:3]
    return (
        f"MODEL={name}: torchvision {facts.versions.get('torchvision')} on {host.name} has no such "
        f"classifier; nearest: {', '.join(near)}. Your own: MODEL=package.module:function."
    )


def _own(name: str, host: Host, facts: Facts, sent: tuple[str, ...]) -> str | None:
    """`package.module:function`, in the checkout or in the machine's environment."""
    module, _, function = name.partition(":")
    stem = module.replace(".", "/")
    files = [f for f in (f"{stem}.py", f"{stem}/__init__.py") if (CHECKOUT / f).is_file()]
    if files and files[0] not in sent:
        return (
            f"MODEL={name}: {files[0]} is not copied to the machines; files of examples/, recipes/ "
            "and trainer/ are, but no links: put it into examples/."
        )
    if files:
        return _function(name, CHECKOUT / files[0], function)
    if facts.packages.get(module.partition(".")[0]):
        return None
    modules = [f.removesuffix(".py").replace("/", ".") for f in sent if f.startswith("examples/")]
    near = difflib.get_close_matches(module, modules, 3)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    return f"MODEL={name}: neither here nor on {host.name} is there a module {module}{hint}."


def _function(name: str, file: Path, function: str) -> str | None:
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except SyntaxError as error:
        return f"MODEL={name}: {file.name}, line {error.lineno}: {error.msg}: correct it."
    own = [node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    # A name may also come from an import or an assignment: only a file of definitions is certain.
    others = (ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.If, ast.Try)
    bound = any(function in ast.unparse(node) for node in body if isinstance(node, others))
    if function in own or bound:
        return None
    near = difflib.get_close_matches(function, own, 3) or own
    return f"MODEL={name}: {file.name} has no {function!r}; it has {', '.join(near) or 'none'}."
