"""Two ranks that share the device compute what one does, settings in pairs."""

import pytest
import torch

from tandem.compat import static_graph_accumulates
from tests.gpu.jobs import that_torch_has
from tests.gpu.ranks import compared, run_two
from tests.trainer_ranks import run_ranks

# Images of both ranks in a step. The last step of `idle` has two images, all for the first rank.
SHARES = {"even": (6, 6), "uneven": (7, 5), "idle": (21, 21)}
# Batch normalisation over ranks is in no row with micro-batches or an idle rank: it would see other
# samples together than one rank's does. Of all else each pair of values is in a row.
NAMES = ("sync", "shares", "graph", "accumulate", "norm", "format", "recomputed", "ema")
ROWS = [
    ("fp16", "idle", "unused", 1, "none", "usual", False, True),
    ("allreduce", "uneven", "static", 1, "over ranks", "channels last", True, False),
    ("allreduce", "even", "usual", 3, "none", "usual", True, False),
    ("ef:255:peak", "even", "usual", 1, "over ranks", "channels last", False, True),
    ("allreduce", "uneven", "static", 3, "none", "usual", False, True),
    ("ef:255:peak", "idle", "unused", 3, "none", "channels last", True, False),
    ("fp16", "uneven", "usual", 1, "over ranks", "usual", False, False),
    ("fp16", "even", "static", 3, "none", "channels last", True, True),
    ("ef:255:peak", "uneven", "unused", 1, "none", "channels last", False, True),
    ("allreduce", "even", "unused", 1, "over ranks", "usual", False, True),
    ("allreduce", "idle", "usual", 1, "none", "usual", True, True),
    ("ef:255:peak", "uneven", "static", 3, "none", "usual", False, True),
    ("fp16", "idle", "static", 1, "none", "usual", True, False),
]
# With a static graph torch 1.12 cannot add up micro-batches.
POSSIBLE = [row for row in ROWS if static_graph_accumulates() or row[2] != "static" or row[3] == 1]
# As a share of the way that a weight has come. Sums in fp64 differ by their order alone; of codes,
# small values wait longest beside large ones until what was left out of them is sent.
NEAR = {"allreduce": 1e-9, "fp16": 0.01, "ef:255:peak": 0.5}
# Batch normalisation over both ranks against that of the whole batch, in each precision.
PRECISIONS = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 0.25, "O1": 0.15, "O2": 0.15, "O3": 0.35}
PRECISIONS = {name: PRECISIONS[name] for name in that_torch_has(PRECISIONS)}


def settings(row):
    """(shares, options) of a row."""
    of = dict(zip(NAMES, row))
    model = {"none": "plain", "over ranks": "fixed"}[of["norm"]]
    return SHARES[of["shares"]], {
        "model": f"tests.gpu.models:{model}{'_unused' * (of['graph'] == 'unused')}",
        "sync": of["sync"],
        # Codes are of fp32.
        "precision": "fp64" if of["sync"] in ("allreduce", "fp16") else "fp32",
        "static_graph": of["graph"] == "static",
        "find_unused_parameters": of["graph"] == "unused",
        "accumulate": of["accumulate"],
        "sync_bn": of["norm"] == "over ranks",
        "channels_last": of["format"] == "channels last",
        "checkpoint_activations": of["recomputed"],
        "ema": 0.9 if of["ema"] else 0.0,
        "momentum": 0.0,
    }


def over_ranks(precision):
    given = {"model": "tests.gpu.models:fixed", "precision": precision, "sync_bn": True}
    return SHARES["uneven"], {**given, "momentum": 0.0, "ema": 0.9}


@pytest.fixture(scope="module")
def found(images, device):
    """By row or precision: what both ranks found, in one pair of processes."""
    precisions = that_torch_has(PRECISIONS, device)
    rows = [*map(settings, POSSIBLE), *map(over_ranks, precisions)]
    told = run_two(compared, str(images), device, rows)
    return dict(zip([*POSSIBLE, *precisions], zip(*told)))


@pytest.mark.parametrize("row", POSSIBLE, ids=lambda row: "-".join(map(str, row)).replace(" ", "_"))
def test_two_ranks_compute_what_one_does(found, row):
    for weights, average, way in found[row]:
        assert way > 0.01
        assert weights < NEAR[row[0]]
        assert average < NEAR[row[0]]


@pytest.mark.quick
@pytest.mark.parametrize("precision", PRECISIONS)
def test_statistics_over_two_ranks_are_those_of_the_batch(found, precision):
    for weights, average, _ in found[precision]:
        assert weights < PRECISIONS[precision]
        assert average < PRECISIONS[precision]


def cards_there(images, device):
    """In a rank: how many cards it sees, before it forms a group."""
    return torch.cuda.device_count()


@pytest.mark.needs_gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_cards_compute_over_nccl_what_one_does(images, device, cards, precision):
    """Both ranks of one machine, each with a card of its own."""
    env = {"CUDA_VISIBLE_DEVICES": cards}
    if run_ranks([1], cards_there, str(images), device, env=env) != [2]:
        pytest.skip("one card is there")
    rows = [over_ranks(precision)]
    for (found,) in run_ranks([2], compared, str(images), device, rows, env=env):
        weights, average, way = found
        assert way > 0.01
        assert weights < PRECISIONS[precision]
        assert average < PRECISIONS[precision]
