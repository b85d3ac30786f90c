"""Decisions of all ranks when a run starts: precision, the strategy of --sync auto, the batch of
each rank, and settings that follow from the devices. A resumed run keeps those it began with.

The rules are in contract/precisions.py and contract/decisions.py. All ranks see the same devices,
checkpoints and measurements, so they decide the same.
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

# Options that are decided here if they are not given, besides precision and sync.
UNDECIDED = ("channels_last", "jpeg_scaling")


def decide(options: Options, world: World) -> Tuple[Options, World]:
    """Return options and world with everything that is decided when a run starts; `world.decided`
    is its record. Raises UserError. Collective."""
    with world.raise_on_all_ranks():
        document = read_measurements(os.environ).document() if world.rank == 0 else None
    measured = Measurements(**world.gather(document)[0])
    newest = options_of_newest(options, world)  # by their repr
    names = ("precision", "sync")
    stored: Dict[str, str] = {k: newest[k].strip("'") for k in names if k in newest}
    decided = decisions.decide(options.request, world.devices, measured, stored)
    level, choice, balance = decided.precision, decided.sync, decided.balance
    if (level.name, level.reason) != (options.precision, AS_ASKED):
        log.info(f"precision {level.name}: {level.reason}")
    if options.sync == AUTO:
        log.info(f"sync {choice.sync}: {choice.reason}")
    options = dataclasses.replace(options, precision=level.name, sync=choice.sync)

    # The batches of the ranks. Plain torchrun brings no measurements: then --balance counts.
    hosts = tuple(measured.hosts)
    ranks = [world.nodes.count(node) for node in dict.fromkeys(world.nodes)]
    if len(hosts) == len(ranks):
        weights = tuple(balance.weights[name] for name in hosts) if balance.weights else ()
        options = dataclasses.replace(options, balance=weights)
        if weights:
            sizes = node_batches(options.per_node_batch_size, ranks, weights)
            shares = ", ".join(f"{name} {size}" for name, size in zip(hosts, sizes))
            log.info(f"images a step: {shares}: {balance.reason}")
    places = [(node, world.nodes[:rank].count(node)) for rank, node in enumerate(world.nodes)]
    batches = rank_batches(options.per_node_batch_size, places, options.balance)

    prediction = decided.prediction
    speed = prediction.speed(parse(choice.sync).spec, len(ranks)) if prediction else None
    if warning := warn_if_slower(prediction, len(ranks), choice.sync, options.family):
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
    # Tensor cores compute in 16 bits. With them, cuDNN's fastest algorithm may differ from start to
    # start, and so may the last bits of results.
    fast = BITS[options.precision] <= 16 and not options.deterministic
    fast = fast and all(device.kind == "cuda" for device in world.devices)
    if fast:
        torch.backends.cudnn.benchmark = True
    usual = {"channels_last": fast, "jpeg_scaling": True}
    chosen: Dict[str, Any] = {
        name: stored.get(name, repr(usual[name])) == "True"
        for name in UNDECIDED
        if getattr(options, name) is None
    }
    # The sizes that a model of timm's is made for, if no others are asked for.
    if options.model.startswith(TIMM):
        with world.raise_on_all_ranks():
            made_for = timm_models.read_inputs(options.model)
        size = options.image_size or made_for.size
        resize = options.eval_resize or round((options.eval_size or size) / made_for.crop)
        chosen.update(image_size=size, eval_resize=resize)
    return dataclasses.replace(options, **chosen)
