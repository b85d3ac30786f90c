"""What is decided once for all ranks, before anything is built: the precision."""

import dataclasses
import logging

from . import checkpoint
from .levels import resolve
from .options import Options
from .world import World

logger = logging.getLogger(__name__)


def settle_precision(options: Options, world: World) -> Options:
    """The options with the level that all ranks compute in. A run that goes on keeps its own.
    Collective. Raises UserError."""
    kept = options.precision == "auto" and _kept(options, world)
    level = resolve(kept or options.precision, world.devices, options.emulate, bool(kept))
    if (level.name, level.why) != (options.precision, "as asked"):
        why = "as this run began" if kept and level.why == "as asked" else level.why
        logger.info(f"precision {level.name}: {why}")
    return dataclasses.replace(options, precision=level.name)


def _kept(options: Options, world: World) -> str:
    """The precision of the newest checkpoint that the run goes on from, or ""."""
    if options.resume == "none" or options.predict or options.extract:
        return ""
    mine = checkpoint.level_here(options) if world.local_rank == 0 else ("", 0, "")
    return str(max(world.gather(mine))[2])
