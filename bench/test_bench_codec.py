"""What strategies send, and what their coding takes of this machine's processor."""

import statistics
import time

import torch

from bench.codec import bucket_work
from contract.strategies import MIB, Payload, parse
from report.published_speeds import PARAMETERS

SPECS = ("ef:3:peak", "ef:5:peak", "ef:5:own", "ef:15:peak", "bf16")
RANKS, VALUES, ROUNDS = 4, 8 * MIB // 4, 5
BUCKETS = PARAMETERS["resnet50"] / VALUES  # of a step of ResNet-50


def coding_work(spec):
    """Return a call of what a rank's processor does for a bucket, except sums that Gloo adds up."""
    if spec == "bf16":
        gradients = torch.randn(VALUES)
        return lambda: gradients.copy_(gradients.to(torch.bfloat16))
    stages = bucket_work(spec, RANKS, VALUES).values()
    return lambda: [stage() for stage in stages]


def test_bytes_and_the_processor_s_time(figure):
    torch.set_num_threads(1)
    works = {spec: coding_work(spec) for spec in SPECS}
    seconds = {spec: [] for spec in SPECS}  # of one core, for each step
    # All are measured in each round, since what else the machine does changes what they take.
    for number in range(ROUNDS + 1):
        for spec, work in works.items():
            begin = time.thread_time()
            work()
            if number:  # the first round finds no memory that it may use again
                seconds[spec].append((time.thread_time() - begin) * BUCKETS)
    for spec in SPECS:
        strategy = parse(spec)
        payload = Payload(4 * PARAMETERS["resnet50"], strategy.rule.bucket_mb * MIB)
        sent = strategy.bytes_per_step(RANKS, payload)
        figure(f"{spec}: sent a step, {RANKS} machines", sent / 1e6, "MB")
        milliseconds = 1e3 * statistics.median(seconds[spec])
        figure(f"{spec}: coding and decoding, of one core a step", milliseconds, "ms")
        ratios = [own / base for own, base in zip(seconds[spec], seconds[SPECS[0]])]
        figure(f"  beside {SPECS[0]}", statistics.median(ratios), "x")
