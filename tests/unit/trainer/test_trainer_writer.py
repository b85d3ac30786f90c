"""Checkpoint files are whole or absent, few, and the end of a run is agreed on."""

import os
import pathlib
import signal
import types

import pytest
import torch
import torch.distributed as dist

from trainer import writer
from trainer.errors import RankError
from trainer.stop import Stop
from trainer.writer import Writer, write_whole


def test_a_name_appears_only_when_its_bytes_are_on_the_disk(tmp_path, monkeypatch):
    """A power cut may come at any moment: file, then name, then folder."""
    done, fsync, replace = [], os.fsync, pathlib.Path.replace

    def sync(number):
        path = pathlib.Path(f"/proc/self/fd/{number}").readlink()
        done.append(("fsync", path.name, path.is_dir() or path.stat().st_size > 0))
        fsync(number)

    def rename(path, to):
        done.append(("rename", to.name))
        return replace(path, to)

    monkeypatch.setattr(writer.os, "fsync", sync)
    monkeypatch.setattr(pathlib.Path, "replace", rename)
    write_whole({"x": torch.ones(3)}, tmp_path / "checkpoints" / "step-1.pt")
    assert done == [
        ("fsync", "step-1.unfinished", True),
        ("rename", "step-1.pt"),
        ("fsync", "checkpoints", True),
    ]


def saved(own, step, best=False):
    path = own.save({"step": step, "x": torch.ones(2)}, best)
    own.finish()
    os.utime(path, ns=(step, step))  # clocks of file systems are coarse


def test_the_newest_are_kept_and_the_best(tmp_path):
    own = Writer(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        saved(own, step, best=step == 2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["best.pt", "step-00000003.pt", "step-00000004.pt"]
    assert torch.load(tmp_path / "best.pt")["step"] == 2


def test_an_older_run_s_later_steps_go_first(tmp_path):
    saved(Writer(tmp_path, keep=2), 900)
    os.utime(tmp_path / "step-00000900.pt", ns=(0, 0))
    for step in (1, 2):
        saved(Writer(tmp_path, keep=2), step)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step-00000001.pt", "step-00000002.pt"]


def test_what_a_killed_process_left_is_removed(tmp_path):
    (tmp_path / "step-00000007.unfinished").write_bytes(b"half")
    Writer(tmp_path, keep=2)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_cannot_be_written_is_a_sentence(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer.torch, "save", full)
    own = Writer(tmp_path, keep=2)
    own.save({"step": 1}, best=False)
    with pytest.raises(RankError, match="no checkpoint written: No space left on device"):
        own.finish()
    assert not list(tmp_path.glob("*.pt"))


@pytest.fixture
def stops():
    """Those of three ranks, whose store is in this process."""
    before, store = signal.getsignal(signal.SIGTERM), dist.HashStore()
    yield [Stop(types.SimpleNamespace(store=store)) for _ in range(3)]
    signal.signal(signal.SIGTERM, before)


def test_all_ranks_leave_before_the_same_step(stops):
    first, second, third = stops
    assert not any(stop.before(4) for stop in stops)
    # The second is told while the first has begun step 5 already.
    assert not first.before(5)
    second.told = True
    assert not second.before(5)
    assert not third.before(5)
    assert [stop.before(6) for stop in stops] == [True] * 3


def test_the_first_that_was_told_decides(stops):
    first, second, third = stops
    first.told = second.told = True
    assert not first.before(7)
    assert not second.before(7)
    assert not third.before(7)
    assert [stop.before(8) for stop in stops] == [True] * 3


def test_two_that_are_told_at_once_write_one_step(stops):
    """Both have read that nobody was told, before either writes."""
    first, second, third = stops
    store = second.world.store
    late = types.SimpleNamespace(add=lambda name, n: store.add(name, n) if n else 0)
    second.world = types.SimpleNamespace(store=late)
    first.told = second.told = True
    assert not first.before(7)
    assert not second.before(7)
    assert third.before(8)


def test_sigterm_tells(stops):
    os.kill(os.getpid(), signal.SIGTERM)
    assert stops[-1].told  # the last to have set the handler


def test_one_process_leaves_at_once():
    before = signal.getsignal(signal.SIGTERM)
    stop = Stop(types.SimpleNamespace(store=None))
    assert not stop.before(3)
    stop.told = True
    assert stop.before(3)
    signal.signal(signal.SIGTERM, before)
