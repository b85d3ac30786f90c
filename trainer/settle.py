"""What is decided once for all ranks, before anything is built: the precision, and what follows
from it."""

import dataclasses
import logging
from typing import Any, Dict, Iterable, Optional

import torch

from contract.levels import HALF, Device, resolve
from contract.options import Options

from . import resume
from .world import World

logger = logging.getLogger(__name__)

# Options for which None is settled here, and which a resumed run keeps.
OPEN = ("channels_last", "jpeg_scaling")


def settle(options: Options, world: World) -> Options:
    """The options with the settings that all ranks use. A resumed run keeps its own. Collective.
    Raises UserError."""
    kept = _from_checkpoint(options, world)
    options = settle_precision(options, world, kept)
    fast = _for_tensor_cores(options, world.devices)
    usual = {"channels_last": fast, "jpeg_scaling": True}
    chosen: Dict[str, Any] = {
        name: kept.get(name, repr(usual[name])) == "True"
        for name in OPEN
        if getattr(options, name) is None
    }
    if fast:
        # Which cuDNN algorithm is fastest may differ from start to start, and so may the last bits.
        torch.backends.cudnn.benchmark = True
    return dataclasses.replace(options, **chosen)


def settle_precision(
    options: Options, world: World, kept: Optional[Dict[str, str]] = None
) -> Options:
    """The options with the level that all ranks compute in. `kept`: the result of
    `_from_checkpoint`, which is called if it is None. Collective. Raises UserError."""
    found = _from_checkpoint(options, world) if kept is None else kept
    before = found.get("precision", "") if options.precision == "auto" else ""
    level = resolve(before or options.precision, world.devices, options.emulate, bool(before))
    if (level.name, level.why) != (options.precision, "as asked"):
        why = "as this run began" if before and level.why == "as asked" else level.why
        logger.info(f"precision {level.name}: {why}")
    return dataclasses.replace(options, precision=level.name)


def _for_tensor_cores(options: Options, devices: Iterable[Device]) -> bool:
    """Whether to choose settings for tensor cores, which compute in 16 bits; results may then
    differ in the last bits from start to start."""
    half = options.precision in ("bf16", *HALF) and not options.deterministic
    return half and all(device.kind == "cuda" for device in devices)


def _from_checkpoint(options: Options, world: World) -> Dict[str, str]:
    """The options settled here, as stored in the newest checkpoint from which the run would resume;
    {} where there is none."""
    if options.resume == "none" or options.predict or options.extract:
        return {}
    mine = None
    with world.agreed():
        if world.local_rank == 0:
            mine = resume.settled_here(options, ("precision", *OPEN))
    found = [one for one in world.gather(mine) if one]
    return max(found, key=lambda one: one[:2])[2] if found else {}
