"""Checkpoint files are whole or absent, and few."""

import os
import pathlib
import threading
from types import SimpleNamespace

import pytest
import torch

from contract.errors import RankError
from trainer import checkpoint, writer
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


def test_the_thread_that_writes_chooses_its_card_before_it_waits_for_it(tmp_path, monkeypatch):
    calls = []
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: calls.append("waited"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(device.index))
    own = Writer(tmp_path, keep=1)
    waiter = checkpoint.make_copy_waiter(torch.device("cuda", 1))
    own.save({"step": 1}, best=False, wait_for_copies=waiter)
    own.finish()
    assert calls == [1, "waited"]


def saved(own, step, best=False):
    path = own.save({"step": step, "x": torch.ones(2)}, best)
    own.finish()
    os.utime(path, ns=(step, step))  # clocks of file systems are coarse


@pytest.mark.parametrize("linked", [True, False])
def test_the_best_is_not_written_twice(tmp_path, monkeypatch, linked):
    if not linked:  # as on exFAT

        def refused(*_):
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr(writer.os, "link", refused)
    own = Writer(tmp_path, keep=1)
    saved(own, 1, best=True)
    same = (tmp_path / "best.pt").stat().st_ino == (tmp_path / "step-00000001.pt").stat().st_ino
    assert same == linked
    saved(own, 2)
    assert torch.load(tmp_path / "best.pt")["step"] == 1
    saved(own, 3, best=True)
    assert torch.load(tmp_path / "best.pt")["step"] == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best.pt", "step-00000003.pt"]


def test_an_older_run_s_later_steps_go_first(tmp_path):
    saved(Writer(tmp_path, keep=2), 900)
    os.utime(tmp_path / "step-00000900.pt", ns=(0, 0))
    for step in (1, 2):
        saved(Writer(tmp_path, keep=2), step)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step-00000001.pt", "step-00000002.pt"]


def test_another_process_may_remove_what_is_left_at_the_same_moment(tmp_path, monkeypatch):
    """Eight of 150 resumed runs with two ranks a node died of it."""
    (tmp_path / "step-00000007.unfinished").write_bytes(b"half")
    unlink = pathlib.Path.unlink

    def raced(path, *args, **named):
        unlink(path)
        unlink(path, *args, **named)

    monkeypatch.setattr(pathlib.Path, "unlink", raced)
    Writer(tmp_path, keep=2)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_breaks_off_leaves_the_one_before(tmp_path):
    (tmp_path / "table.csv").write_text("before")
    with pytest.raises(OSError, match="full"), writer.atomic_write(tmp_path / "table.csv") as file:
        file.write(b"half")
        raise OSError("full")
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]
    assert (tmp_path / "table.csv").read_text() == "before"


def test_a_checkpoint_that_cannot_be_written_is_a_sentence(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer.torch, "save", full)
    own = Writer(tmp_path, keep=2)
    own.save({"step": 1}, best=False)
    with pytest.raises(RankError, match="could not be written: No space left on device"):
        own.finish()
    assert not list(tmp_path.glob("*.pt"))


def test_nothing_is_written_before_the_copy_has_arrived(tmp_path):
    """On CUDA the loop goes on while the device still copies."""
    there, own = threading.Event(), Writer(tmp_path, 2)
    payload = {"step": 1, "x": torch.zeros(2)}

    def arrived():
        assert there.wait(60)
        payload["x"].fill_(7)

    path = own.save(payload, False, arrived)
    assert not path.exists()
    there.set()
    own.finish()
    assert torch.load(path)["x"].tolist() == [7, 7]
