"""Give the step of a GPU that nobody measured here, by published speeds or by an estimate.

measurements.basis_on_paper predicts from such a step. Speeds are images per second in training
ResNet-50 with synthetic or real images of 224 pixels.
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


class GpuSpeed(NamedTuple):
    """The specified and published figures of a GPU. Rows of GPUS have the order of these fields."""

    gigabytes: float  # of memory bandwidth per second, by NVIDIA's specifications
    teraflops: float  # of fp32 arithmetic per second
    fp32: float | None = None  # images/s, if published
    half: float | None = None  # images/s in 16 bits
    source: str = SPECIFICATIONS


GPUS = {
    "1070": GpuSpeed(256, 6.5),
    "1080": GpuSpeed(320, 8.9),
    "1080ti": GpuSpeed(484, 11.3, 209, 230, TENSORFLOW),
    "titanxp": GpuSpeed(548, 12.1, 236, None, TENSORFLOW),
    "titanv": GpuSpeed(653, 14.9, 300, None, TENSORFLOW),
    "v100": GpuSpeed(900, 15.7, 405, 833, TENSORFLOW),
    "2060": GpuSpeed(336, 6.5),
    "2070": GpuSpeed(448, 7.5),
    "2080": GpuSpeed(448, 10.1, 213, None, TENSORFLOW),
    "2080ti": GpuSpeed(616, 13.4, 294, 526, TENSORFLOW),
    "titanrtx": GpuSpeed(672, 16.3, 330, 644, TENSORFLOW),
    "rtx5000": GpuSpeed(448, 11.2, 213, 439, PYTORCH),
    "rtx8000": GpuSpeed(672, 16.3, 274, 651, PYTORCH),
    "3060": GpuSpeed(360, 12.7),
    "3060ti": GpuSpeed(448, 16.2),
    "3070": GpuSpeed(448, 20.3),
    "3070ti": GpuSpeed(608, 21.7),
    "3080": GpuSpeed(760, 29.8, 384, 650, PYTORCH),
    "3080ti": GpuSpeed(912, 34.1),
    "3090": GpuSpeed(936, 35.6, 513, 905, PYTORCH),
    "a4000": GpuSpeed(448, 19.2),
    "a5000": GpuSpeed(768, 27.8),
    "a6000": GpuSpeed(768, 38.7, 514, 916, PYTORCH),
    "a10": GpuSpeed(600, 31.2, 349, 638, PYTORCH),
    "a100": GpuSpeed(1555, 19.5, 882, 1396, PYTORCH),
    "4060": GpuSpeed(272, 15.1),
    "4060ti": GpuSpeed(288, 22.1),
    "4070": GpuSpeed(504, 29.1),
    "4070ti": GpuSpeed(504, 40.1),
    "4080": GpuSpeed(717, 48.7),
    "4090": GpuSpeed(1008, 82.6, 721, 1301, PYTORCH),
    "6000ada": GpuSpeed(960, 91.1, 647, 1146, PYTORCH),
    "h100": GpuSpeed(2000, 51.2, 1197, 1866, PYTORCH),
    "5060": GpuSpeed(448, 19.2),
    "5060ti": GpuSpeed(448, 23.7),
    "5070": GpuSpeed(672, 30.9),
    "5070ti": GpuSpeed(896, 43.9),
    "5080": GpuSpeed(960, 56.3),
    "5090": GpuSpeed(1792, 104.8),
}
# The first GPU of each generation, and its compute capability.
GENERATIONS = {"1070": 61, "titanv": 70, "2060": 75, "3060": 86}
# An estimate's seconds per image are the sum of two terms, in 1 / (GB/s) of memory and in
# 1 / (Tflop/s) of arithmetic. They are the least squares of relative errors over the GPUs of
# PYTORCH's tables, without data-centre GPUs. Left out of the fit, each is estimated within 11 % in
# fp32, and in 16 bits, except the 3080 (25 % too fast): its table is from the year it came out.
COSTS = {"fp32": (1.130, 0.0264), "16 bits": (0.739, 0.0082)}
MODEL = "resnet50"  # the default
# torchvision's models with 1000 classes.
PARAMETERS = {"resnet50": 25_557_032, "resnet152": 60_192_808}
BATCH, IMAGE_SIZE = 64, 224  # images of a step, and their pixels per side
# Backward's share of computing: gradients of activations and of weights are each about as much work
# as forward.
BACKWARD = 2 / 3
# A model's speed as a fraction of ResNet-50's. That of ResNet-152 is 0.36 to 0.39 in TENSORFLOW's
# table, depending on the GPU.
SHARE = {"resnet50": 1.0, "resnet152": 0.38}


def find_gpu(gpu: str) -> str:
    """Return the name in GPUS that the user means. Raises UserError for an unknown GPU."""
    name = gpu.lower().replace(" ", "").replace("-", "").replace("_", "")
    for brand in ("nvidia", "geforce", "quadro", "rtx", "gtx"):
        if name not in GPUS:
            name = name.removeprefix(brand)
    if name not in GPUS:
        raise UserError(f"--gpu {gpu}: Tandem knows {', '.join(GPUS)}.")
    return name


def best_precision(gpu: str) -> str:
    """Return the precision that `make train` chooses on such GPUs. Raises UserError."""
    name = find_gpu(gpu)
    return precisions.best_level([Device(gpu, "cuda", name, generation(name))]).name


def generation(name: str) -> int:
    """Return the compute capability of the first GPU of its generation. `name`: a key of GPUS."""
    # GPUS lists the generations in order, so the last one that began before this GPU is its own.
    names = list(GPUS)
    capabilities = GENERATIONS.items()
    return max(sm for oldest, sm in capabilities if names.index(oldest) <= names.index(name))


def images_per_second(gpu: str, model: str, precision: str) -> tuple[float, str]:
    """Return the images/s of one such GPU, and words for the source. Raises UserError if no speed
    is known."""
    name = find_gpu(gpu)
    speeds = GPUS[name]
    if model not in SHARE:
        raise UserError(
            f"--model {model}: without a measurement, Tandem knows the speeds of "
            f"{', '.join(SHARE)}."
        )
    half = precisions.BITS[precision] <= 16
    bits = "16 bits" if half else "fp32"
    published = speeds.half if half else speeds.fp32
    if published is not None:
        # All speeds in 16 bits are from PYTORCH, whatever the source of fp32.
        speed, source = published, f"published in {PYTORCH if half else speeds.source}"
    # GPUs before Volta gain little from 16 bits, by an amount that the formula does not know.
    elif half and generation(name) < precisions.VOLTA:
        raise UserError(f"--gpu {gpu}: its speed with 16 bits is unknown: omit PRECISION.")
    else:
        memory, arithmetic = COSTS[bits]
        speed = 1 / (memory / speeds.gigabytes + arithmetic / speeds.teraflops)
        source = (
            f"an estimate from the memory's {speeds.gigabytes:g} GB/s and "
            f"{speeds.teraflops:g} Tflop/s (such estimates are within 11 % of most published "
            "speeds)"
        )
    if SHARE[model] != 1.0:
        source += f", times {SHARE[model]} for {model}"
    return speed * SHARE[model], f"{source}, in {bits}"


def paper_step(gpu: str, model: str, precision: str = "fp32") -> Step:
    """Return the step of one machine with that GPU. Raises UserError."""
    speed, _ = images_per_second(gpu, model, precision)
    spent = BATCH / speed
    unknown = ("data", "h2d", "optimizer", "other", "network", "peers", "checkpoint")
    zero: dict[str, Any] = dict.fromkeys(unknown, 0.0)
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
        ranks=(),
        **zero,
    )
