"""Ansible's modules replace `sys.intern`, and torch refuses to be imported after that."""

import contextlib
import importlib.util

with contextlib.suppress(ModuleNotFoundError):  # the second Ansible's environment has no torch
    import torchvision  # noqa: F401  # first, since all unit tests share one process

# Nor has that environment hypothesis.
collect_ignore = [] if importlib.util.find_spec("hypothesis") else ["test_fuzz.py"]
