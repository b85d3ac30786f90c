"""Which functions of torchvision.models make a classifier: those that take `weights`.

The launcher sends this source to a machine, to ask the torchvision there for the names before a
run. So it imports nothing but the standard library.
"""

import inspect
from typing import Any, List


def names(models: Any) -> List[str]:
    """The names of all classifiers in the module torchvision.models, sorted."""
    return sorted(
        name
        for name, value in vars(models).items()
        if inspect.isfunction(value) and "weights" in inspect.signature(value).parameters
    )
