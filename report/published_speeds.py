"""A prediction on paper: published speeds of one GPU, or an estimate, in place of a measured run.

Speeds are images per second in training ResNet-50 with synthetic or real images of 224 pixels.
TENSORFLOW: Lambda's "RTX 2080 Ti Deep Learning Benchmarks with TensorFlow" (Chuan Li, 2019), fp32.
PYTORCH: Lambda's tables of NVIDIA's PyTorch examples, 2020 to 2023; fp32 is TF32 from Ampere on, as
it is by torch's default for convolutions, and 16 bits are autocast.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from contract import precisions, strategies
from contract.errors import UserError
from contract.precisions import Device
from contract.strategies import Payload
from report.measure import Step

TENSORFLOW = "lambdalabs.com/blog/2080-ti-deep-learning-benchmarks"
PYTORCH = "github.com/lambdal/deeplearning-benchmark, pytorch-train-throughput-*.csv"
SPECIFICATIONS = "NVIDIA's specifications"


class Card(NamedTuple):
    """Bandwidth of its memory in GB/s and fp32 arithmetic in Tflop/s, from NVIDIA's specifications;
    images/s in fp32 and in 16 bits where they were published. Cards before Volta gain little from
    16 bits, so no figure is estimated for them there."""

    gigabytes: float
    teraflops: float
    fp32: float | None = None
    half: float | None = None
    source: str = SPECIFICATIONS


CARDS = {
    "1070": Card(256, 6.5),
    "1080": Card(320, 8.9),
    "1080ti": Card(484, 11.3, 209, 230, TENSORFLOW),
    "titanxp": Card(548, 12.1, 236, None, TENSORFLOW),
    "titanv": Card(653, 14.9, 300, None, TENSORFLOW),
    "v100": Card(900, 15.7, 405, 833, TENSORFLOW),
    "2060": Card(336, 6.5),
    "2070": Card(448, 7.5),
    "2080": Card(448, 10.1, 213, None, TENSORFLOW),
    "2080ti": Card(616, 13.4, 294, 526, TENSORFLOW),
    "titanrtx": Card(672, 16.3, 330, 644, TENSORFLOW),
    "rtx5000": Card(448, 11.2, 213, 439, PYTORCH),
    "rtx8000": Card(672, 16.3, 274, 651, PYTORCH),
    "3060": Card(360, 12.7),
    "3060ti": Card(448, 16.2),
    "3070": Card(448, 20.3),
    "3070ti": Card(608, 21.7),
    "3080": Card(760, 29.8, 384, 650, PYTORCH),
    "3080ti": Card(912, 34.1),
    "3090": Card(936, 35.6, 513, 905, PYTORCH),
    "a4000": Card(448, 19.2),
    "a5000": Card(768, 27.8),
    "a6000": Card(768, 38.7, 514, 916, PYTORCH),
    "a10": Card(600, 31.2, 349, 638, PYTORCH),
    "a100": Card(1555, 19.5, 882, 1396, PYTORCH),
    "4060": Card(272, 15.1),
    "4060ti": Card(288, 22.1),
    "4070": Card(504, 29.1),
    "4070ti": Card(504, 40.1),
    "4080": Card(717, 48.7),
    "4090": Card(1008, 82.6, 721, 1301, PYTORCH),
    "6000ada": Card(960, 91.1, 647, 1146, PYTORCH),
    "h100": Card(2000, 51.2, 1197, 1866, PYTORCH),
    "5060": Card(448, 19.2),
    "5060ti": Card(448, 23.7),
    "5070": Card(672, 30.9),
    "5070ti": Card(896, 43.9),
    "5080": Card(960, 56.3),
    "5090": Card(1792, 104.8),
}
# The first card of each generation, and its compute capability.
GENERATIONS = {"1070": 61, "titanv": 70, "2060": 75, "3060": 86}
# An estimate's seconds an image are a part of memory, 1 / GB/s, and a part of arithmetic,
# 1 / Tflop/s: the least squares of relative errors over the cards of PYTORCH's tables that are no
# data-centre cards. Each of these, left out, is estimated within 11 % (fp32), and but for the 3080
# (25 % over), whose table is of the year that it came out, within 11 % in 16 bits.
COSTS = {"fp32": (1.130, 0.0264), "16 bits": (0.739, 0.0082)}
MODEL = "resnet50"  # where none is named
# torchvision's models with 1000 classes.
PARAMETERS = {"resnet50": 25_557_032, "resnet152": 60_192_808}
BATCH = 64
# Backward's part of forward and backward: it computes gradients of activations and of weights, each
# about as much work as forward.
BACKWARD = 2 / 3


# ResNet-152's speed by ResNet-50's: the ratio in TENSORFLOW's table, 0.36 to 0.39 by card.
SHARE = {"resnet50": 1.0, "resnet152": 0.38}


def card_of(gpu: str) -> tuple[str, Card]:
    """Raises UserError for a card that is not known."""
    name = gpu.lower().replace(" ", "").replace("-", "").replace("_", "")
    for brand in ("nvidia", "geforce", "quadro", "rtx", "gtx"):
        if name not in CARDS:
            name = name.removeprefix(brand)
    if name not in CARDS:
        raise UserError(f"--gpu {gpu}: known are {', '.join(CARDS)}.")
    return name, CARDS[name]


def level_of(gpu: str) -> str:
    """The precision that `make train` takes by itself on such cards, with a torch of today. Raises
    UserError."""
    name, _ = card_of(gpu)
    return precisions.best_level([Device(gpu, "cuda", name, generation(name))]).name


def generation(name: str) -> int:
    """The compute capability of a card of CARDS, or of its generation's first."""
    places = list(CARDS)
    return max(sm for at, sm in GENERATIONS.items() if places.index(at) <= places.index(name))


def images_per_second(gpu: str, model: str, precision: str) -> tuple[float, str]:
    """Images/s of one such card, and the source. Raises UserError where none is known."""
    name, card = card_of(gpu)
    if model not in SHARE:
        raise UserError(
            f"--model {model}: for a GPU on paper, speeds are known for {', '.join(SHARE)}."
        )
    half = precisions.BITS[precision] <= 16
    bits = "16 bits" if half else "fp32"
    published = card.half if half else card.fp32
    if published is not None:
        # Each figure in 16 bits is PYTORCH's.
        speed, source = published, f"published at {PYTORCH if half else card.source}"
    elif half and generation(name) < precisions.VOLTA:
        raise UserError(f"--gpu {gpu}: no speed in 16 bits is known: leave PRECISION out.")
    else:
        memory, arithmetic = COSTS[bits]
        speed = 1 / (memory / card.gigabytes + arithmetic / card.teraflops)
        source = (
            f"an estimate, by the memory's {card.gigabytes:g} GB/s and {card.teraflops:g} Tflop/s "
            "(such estimates are within 11 % of most published speeds)"
        )
    if SHARE[model] != 1.0:
        source += f", times {SHARE[model]} for {model}"
    return speed * SHARE[model], f"{source}, in {bits}"


def paper_step(gpu: str, model: str, precision: str = "fp32") -> Step:
    """One machine with that GPU. Raises UserError."""
    spent = BATCH / images_per_second(gpu, model, precision)[0]
    nothing: dict[str, Any] = dict.fromkeys(
        ("data", "h2d", "optimizer", "other", "network", "peers", "checkpoint"), 0.0
    )
    return Step(
        attempt=1,
        nodes=1,
        world=1,
        steps=0,
        images=BATCH,
        payload=Payload(PARAMETERS[model] * 4),
        strategy=strategies.parse(strategies.EXACT),
        forward=spent * (1 - BACKWARD),
        backward=spent * BACKWARD,
        bytes_sent=None,
        link_mbit=None,
        rate=None,
        shared_machine=False,
        ranks=(),
        **nothing,
    )
