"""Ranks exchange JSON, tensors and bytes, so that no rank's object becomes another's code."""

import ctypes
import os
import socket
import struct
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from contract import interface
from contract.options import Options
from tandem import compat
from tests.trainer_ranks import run_ranks


class Attack:
    """Unpickled, it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def told_by_a_hostile_rank(path):
    """Rank 1 sends an object as torch's all_gather_object does, within the same collectives."""
    from trainer.world import start

    world = start(Options())
    if world.rank == 1:
        group = getattr(getattr(world, "exchange", None), "_group", None)
        try:
            dist.all_gather_object([None, None], Attack(path), group=group)
        except Exception:  # it gets JSON
            return "attacked"
    try:
        return str(world.gather("honest"))
    except Exception as error:
        return str(error)


def test_an_object_of_one_rank_is_not_run_on_another(tmp_path):
    path = tmp_path / "made by another rank"
    told = run_ranks([1, 1], told_by_a_hostile_rank, str(path))
    assert not path.exists()
    assert "sent bytes that are not JSON" in told[0]


def exchanged():
    from trainer.world import start

    world = start(Options())
    rank, exchange = world.rank, world.exchange
    state = {"error": torch.full((rank, 3), float(rank)), "step": rank} if rank else None
    states = exchange.state(state)
    return (
        world.gather((f"node\udce9{rank}", [None, 0.1 * rank, "x" * 1000 * rank])),
        [one and (one["error"].tolist(), one["step"]) for one in states],
        exchange.bytes_from(2, b"" if rank else b"not this"),
        exchange.bytes_from(1, bytes(range(256)) * rank),
    )


def test_values_come_in_rank_order_to_all():
    told = run_ranks([1, 2], exchanged)
    values = [[f"node\udce9{rank}", [None, 0.1 * rank, "x" * 1000 * rank]] for rank in range(3)]
    states = [None, ([[1.0] * 3], 1), ([[2.0] * 3] * 2, 2)]
    assert told == [(values, states, b"", bytes(range(256)))] * 3


def waited(seconds):
    """A rank comes later than a step's peers would wait; then it sends more than a sentence."""
    from datetime import timedelta

    from tandem import exchange
    from trainer.world import start

    world = start(Options())  # whose meeting may take as long as a loaded machine needs
    patience, form = [], exchange.dist.new_group
    exchange.dist.new_group = lambda **words: patience.append(words["timeout"]) or form(**words)
    ours = exchange.Exchange(timedelta(seconds=seconds / 2))
    # A rank that ends while the group is formed: another may wait for its connection.
    assert patience == [timedelta(seconds=seconds / 2)] or not hasattr(exchange.dist, "set_timeout")
    time.sleep(seconds * world.rank)
    ranks = ours.json(world.rank)
    exchange.MAX_JSON_BYTES = 100
    try:
        return ranks, ours.json("x" * 200 * world.rank)
    except Exception as error:
        return ranks, str(error)


def test_unequal_phases_are_not_under_the_patience_of_a_step_and_much_json_is_refused():
    for ranks, error in run_ranks([1, 1], waited, 2):
        assert ranks == [0, 1] and error.startswith("rank 1 sent 202 bytes of JSON")


@pytest.mark.parametrize(("version", "set_"), [((2, 1), True), ((2, 2), False)])
def test_old_torch_ends_a_collective_that_hangs_without_torchrun_too(monkeypatch, version, set_):
    """And NCCL says what is wrong."""
    monkeypatch.setattr(compat, "TORCH_VERSION", version)
    for name in ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    ours = {"NCCL_ASYNC_ERROR_HANDLING": "1"} if set_ else {}
    assert compat.nccl_settings() == {"NCCL_DEBUG": "WARN", **ours}
    monkeypatch.setenv("NCCL_ASYNC_ERROR_HANDLING", "0")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert compat.nccl_settings() == {}


@pytest.mark.parametrize(
    ("address", "name"),
    [("192.0.2.1", "eth0"), ("192.0.2.7", "eth0"), ("127.0.1.1", None), ("no.such.name", None)],
)
def test_gloo_gets_the_card_that_leads_to_the_first_machine(monkeypatch, address, name):
    """A UDP socket of a machine with lo and eth0, whose second address it goes out by."""
    cards = {"lo": "127.0.0.1", "eth0": "198.51.100.7", "eth0:1": "192.0.2.7"}
    own = "127.0.0.1" if address.startswith("127.") else "192.0.2.7"
    route = mock.MagicMock(**{"getsockname.return_value": (own, 4711), "fileno.return_value": 3})
    route.__enter__.return_value = route
    route.connect.side_effect = socket.gaierror if address == "no.such.name" else None

    def ask(number, request, asked):
        """As SIOCGIFCONF: rows of a struct ifreq each, into the memory that is named."""
        size, memory = struct.unpack("iL", asked)
        rows = b"".join(
            name.encode().ljust(16, b"\0") + bytes(4) + socket.inet_aton(address) + bytes(16)
            for name, address in cards.items()
        )
        assert len(rows) <= size
        ctypes.memmove(memory, rows, len(rows))
        return struct.pack("iL", len(rows), memory)

    monkeypatch.setattr(interface.socket, "socket", lambda *_: route)
    monkeypatch.setattr(interface.fcntl, "ioctl", ask)
    assert interface.interface_towards(address) == name


def met(monkeypatch, device, form=None):
    """Settings with which a group is formed by a rank on this device."""
    from types import SimpleNamespace

    from contract.precisions import Device
    from trainer import world

    given = {}
    monkeypatch.setattr(world, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 0, 1)]))
    monkeypatch.setattr(world, "Exchange", lambda _: SimpleNamespace(meet=lambda: None))
    monkeypatch.setattr(world.dist, "init_process_group", form or Formed(given))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    own = Device("node1", device.type, "a card")
    world._meet(Options(), world.ProcessCoordinates(size=1), own, device)
    return given


class Formed:
    """init_process_group of a torch since 2.3, which notes what it is given."""

    def __init__(self, given):
        self.given = given

    def __call__(self, backend, store=None, rank=0, world_size=1, timeout=None, device_id=None):
        self.given.update(backend=backend, device_id=device_id)


def test_nccl_is_told_the_process_s_gpu_and_gloo_none(monkeypatch):
    """Barriers guess it otherwise, and errors come in the first step. Under torch 2.4 some ranks of
    a group that is bound to a GPU would wait for others where Gloo's groups are made."""
    splits, card = lambda pg, requested_backend: None, torch.device("cuda", 1)
    monkeypatch.setattr(dist.distributed_c10d, "_get_split_source", splits, raising=False)
    assert met(monkeypatch, card) == {"backend": "nccl", "device_id": card}
    assert met(monkeypatch, torch.device("cpu")) == {"backend": "gloo", "device_id": None}
    monkeypatch.setattr(dist.distributed_c10d, "_get_split_source", lambda pg: None)
    assert compat.bound_to(card) == {}  # torch 2.4
    monkeypatch.delattr(dist.distributed_c10d, "_get_split_source")
    assert compat.bound_to(card) == {}  # a torch without a word on splits
    monkeypatch.setattr(dist, "init_process_group", lambda backend, timeout=None: None)
    assert compat.bound_to(card) == {}  # before 2.3


def test_an_error_of_nccl_is_not_called_a_failed_meeting(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:825, invalid usage")

    with pytest.raises(RuntimeError, match="invalid usage"):
        met(monkeypatch, torch.device("cpu"), broken)
