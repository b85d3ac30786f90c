"""The registry of strategies: what a spec means, and what each one sends."""

import pytest

from contract.options import Options
from contract.strategies import RULES, Payload, list_usual, parse, ring_bytes
from tandem.sync import KINDS

RESNET50 = Payload(25_557_032 * 4)


def test_each_entry_has_its_code():
    assert set(RULES) == set(KINDS)


def test_only_the_sum_in_the_gradients_own_precision_is_called_exact():
    assert [strategy.spec for strategy in list_usual() if strategy.exact] == ["allreduce"]


@pytest.mark.parametrize(
    ("spec", "whole"),
    [
        ("bf16", "bf16"),
        ("ef:5:auto", "ef:5"),
        ("ef:5:own", "ef:5:own"),
    ],
)
def test_a_spec_is_a_name_and_its_arguments(spec, whole):
    strategy = parse(spec)
    assert strategy.spec == whole
    assert parse(whole) == strategy


def test_16_bits_are_half_the_bytes_of_a_ring():
    for spec in ("bf16", "fp16"):
        assert parse(spec).bytes_per_step(4, RESNET50) == ring_bytes(4, RESNET50.bytes / 2)
    double = Payload(RESNET50.bytes * 2, width=8)
    assert parse("fp16").bytes_per_step(4, double) == ring_bytes(4, RESNET50.bytes / 2)


@pytest.mark.parametrize(
    ("options", "epochs"),
    [
        ({"sync": "ef:5"}, 0.0),
        ({"sync": "ef:5", "optimizer": "adamw"}, 3.0),
        ({"sync": "ef:3"}, 3.0),
        ({"sync": "ef:5", "sync_warmup": 2.0}, 2.0),
        ({"sync": "allreduce", "sync_warmup": 2.0}, 0.0),
    ],
)
def test_exact_first_epochs_are_those_that_the_pairs_ask_for_or_that_were_chosen(options, epochs):
    assert Options(warmup_epochs=3.0, **options).exact_epochs == epochs
