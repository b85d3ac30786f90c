"""Decide when a run starts: the precision, the strategy of --sync auto, the batch of each rank, and
settings that follow from the devices. A resumed run keeps its earlier decisions.

The rules are in contract/precisions.py and contract/decisions.py. All ranks see the same devices,
checkpoints and measurements, so all make the same decisions. process.py calls `decide`.
"""

import dataclasses
import logging
import os
from typing import Any, Dict, Tuple

import torch

from contract import decisions
from contract.decisions import AS_ASKED, Measurements, read_measurements, warn_if_slower
from contract.options import TIMM, Options
from contract.precisions import BITS
from contract.split import node_batches, rank_batches
from contract.strategies import AUTO, parse

from . import timm_models
from .resume import options_of_newest
from .world import World

log = logging.getLogger(__name__)

# Options that `_with_device_settings` decides if the user does not.
UNDECIDED = ("channels_last", "jpeg_scaling")


def decide(options: Options, world: World) -> Tuple[Options, World]:
    """Return options and world with all decisions; `world.decided` records them. Raises UserError.
    Collective."""
    with world.raise_on_all_ranks():
        document = read_measurements(os.environ).document() if world.rank == 0 else None
    measured = Measurements(**world.gather(document)[0])
    newest = options_of_newest(options, world)  # such as {"precision": "'bf16'"}
    names = ("precision", "sync")
    stored: Dict[str, str] = {name: newest[name].strip("'") for name in names if name in newest}
    decided = decisions.decide(options.request, world.devices, measured, stored)
    level, choice, balance = decided.precision, decided.sync, decided.balance
    if (level.name, level.reason) != (options.precision, AS_ASKED):
        log.info(f"precision {level.name}: {level.reason}")
    if options.sync == AUTO:
        log.info(f"sync {choice.sync}: {choice.reason}")
    options = dataclasses.replace(options, precision=level.name, sync=choice.sync)

    # Choose the batches of the ranks. Without the launcher there are no measurements, and only
    # --balance counts.
    hosts = tuple(measured.hosts)
    node_ranks = [world.nodes.count(node) for node in dict.fromkeys(world.nodes)]
    if len(hosts) == len(node_ranks):
        weights = tuple(balance.weights[name] for name in hosts) if balance.weights else ()
        options = dataclasses.replace(options, balance=weights)
        if weights:
            sizes = node_batches(options.per_node_batch_size, node_ranks, weights)
            shares = ", ".join(f"{name} {size}" for name, size in zip(hosts, sizes))
            log.info(f"images a step: {shares}: {balance.reason}")
    # Each rank's machine, and its number on that machine.
    places = [(node, world.nodes[:rank].count(node)) for rank, node in enumerate(world.nodes)]
    batches = rank_batches(options.per_node_batch_size, places, options.balance)

    prediction = decided.prediction
    node_count = len(node_ranks)
    speed = prediction.speed(parse(choice.sync).spec, node_count) if prediction else None
    if warning := warn_if_slower(prediction, node_count, choice.sync, options.family):
        log.info(warning)
    record: Dict[str, Any] = {
        "precision": level.name,
        "precision_why": level.reason,
        "sync": choice.sync,
        "sync_why": choice.reason,
        "balance": {name: balance.weights.get(name, 1) for name in hosts},
        "balance_why": balance.reason,
        "predicted": None,
    }
    if prediction and speed:
        record["predicted"] = {
            "images_per_second": round(speed, 2),
            "made_unix": prediction.made_unix,
        }
    world = dataclasses.replace(world, batches=batches, decided=record)
    return _with_device_settings(options, world, newest), world


def _with_device_settings(options: Options, world: World, stored: Dict[str, str]) -> Options:
    """Set options that follow from the devices and the model, unless they are given or `stored`."""
    # Tensor cores compute in 16 bits. cuDNN then times its algorithms at each start, and may choose
    # another algorithm, which changes the last bits of results.
    uses_tensor_cores = BITS[options.precision] <= 16 and not options.deterministic
    uses_tensor_cores &= all(device.kind == "cuda" for device in world.devices)
    if uses_tensor_cores:
        torch.backends.cudnn.benchmark = True
    defaults = {"channels_last": uses_tensor_cores, "jpeg_scaling": True}
    chosen: Dict[str, Any] = {
        name: stored.get(name, repr(defaults[name])) == "True"
        for name in UNDECIDED
        if getattr(options, name) is None
    }
    # A model of timm has its own default sizes.
    if options.model.startswith(TIMM):
        with world.raise_on_all_ranks():
            inputs = timm_models.read_inputs(options.model)
        size = options.image_size or inputs.size
        resize = options.eval_resize or round((options.eval_size or size) / inputs.crop)
        chosen.update(image_size=size, eval_resize=resize)
    return dataclasses.replace(options, **chosen)
