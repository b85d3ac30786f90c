"""The names of torchvision's classifiers, read from its source: importing it takes seconds."""

import ast
import importlib.util
import pathlib
from typing import List


def classifier_names() -> List[str]:
    """Return the names of all classifiers of this environment's torchvision, sorted: the functions
    in the files of torchvision/models that take `weights`. Empty if there is no torchvision."""
    spec = importlib.util.find_spec("torchvision")
    names = []
    for folder in spec.submodule_search_locations or () if spec else ():
        # Detection, segmentation and video models are in subfolders, which this pattern leaves out.
        for file in pathlib.Path(folder, "models").glob("[!_]*.py"):
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                    arguments = {a.arg for a in [*node.args.args, *node.args.kwonlyargs]}
                    names += [node.name] if "weights" in arguments else []
    return sorted(names)
