"""What runs on a node must be understood by the oldest Python there is."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NODE = ROOT / "launcher" / "node"
# tools/verbs.py says itself that a Python is too old.
BESIDE = [NODE.parent / "__init__.py", ROOT / "contract/records.py", ROOT / "tools/verbs.py"]
FILES = [*sorted(NODE.glob("*.py")), *BESIDE]
YOUNGER = {"contextvars", "dataclasses", "graphlib", "tomllib", "zoneinfo"}  # than Python 3.6
ALLOWED = (set(sys.stdlib_module_names) - YOUNGER) | {"launcher", "contract"}
NEWER = {
    ("subprocess", "capture_output"),  # 3.7
    ("subprocess", "text"),  # 3.7
    ("time", "monotonic_ns"),  # 3.7
    ("time", "CLOCK_BOOTTIME"),  # 3.7
    ("os", "pidfd_open"),  # 3.9
    ("shlex", "join"),  # 3.8
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_python_3_6_understands_it(path):
    """What that Python does not know is a SyntaxError here; nothing newer is imported or called."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 6))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module != "__future__"  # annotations: 3.7
            # Nothing of the package above, which needs a newer Python.
            assert not node.module.startswith("launcher") or node.module.startswith("launcher.node")
            imported.add(node.module.split(".")[0])
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in NEWER
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("subprocess."):
            assert not {word.arg for word in node.keywords} & {"capture_output", "text"}
    assert imported <= ALLOWED
