"""Gradient synchronisation by name, as in `--sync`."""

from typing import Dict, Type

from .allreduce import AllReduce
from .base import Sync
from .compressed import BF16, FP16

KINDS: Dict[str, Type[Sync]] = {"allreduce": AllReduce, "fp16": FP16, "bf16": BF16}
