"""What strategies send, and what their coding takes of this machine's processor, beside peers."""

import statistics

import torch

from bench import codec

SPECS = ("ef:3:peak", "ef:5:peak", "ef:5:own", "ef:15:peak", "bf16")
RANKS, VALUES, ROUNDS = 4, 8 * codec.MIB // 4, 5


def test_bytes_and_the_processor_s_time(figure):
    torch.set_num_threads(1)
    spent = codec.cpu_seconds(SPECS, RANKS, VALUES, ROUNDS)
    for spec in SPECS:
        figure(f"{spec}: sent a step, {RANKS} machines", codec.sent(spec, RANKS) / 1e6, "MB")
        milliseconds = 1e3 * statistics.median(spent[spec])
        figure(f"{spec}: coding and decoding, of one core a step", milliseconds, "ms")
        pairs = zip(spent[spec], spent[SPECS[0]])
        figure(f"  beside {SPECS[0]}", statistics.median(own / base for own, base in pairs), "x")
