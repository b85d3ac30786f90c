"""Ansible's modules replace `sys.intern`, and torch refuses to be imported after that."""

import torchvision  # noqa: F401  # first, since all unit tests share one process
