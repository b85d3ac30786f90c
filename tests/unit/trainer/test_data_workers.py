"""Loader processes: how many, how long they live, and that only their rank ends them."""

import os
import signal

import pytest
import torch

from contract.options import Options
from tests.trainer_ranks import CONTEXT, make_images
from trainer import process
from trainer.data.decode import open_picture
from trainer.data.folder import ImageFolder
from trainer.data.loader import TrainBatches
from trainer.data.workers import FEW_IMAGES, data_loader, start_loader, worker_count
from trainer.world import World

WORLD = World(batches=(4,))


@pytest.mark.parametrize("cores, ranks, each", [(8, 1, 7), (64, 1, 16), (24, 4, 5), (4, 8, 1)])
def test_a_machine_s_ranks_share_its_cores(monkeypatch, cores, ranks, each):
    """Eight loaders gave 2,900 images a second, as many as a single card may need."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores)), raising=False)
    here = World(local_size=ranks)
    assert worker_count(Options(), here, 224, 1) == each
    # A few small images need none.
    assert worker_count(Options(), here, 32, FEW_IMAGES) == 0
    assert worker_count(Options(), here, 32, FEW_IMAGES + 1) == each
    assert worker_count(Options(workers=5), here, 32, 1) == 5


class Pids(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return os.getpid()


def test_no_signal_of_a_whole_job_reaches_loader_processes():
    """As scancel, systemd and a terminal send them."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    made = start_loader(data_loader(Pids(), [[0]] * 30, list, workers=2))
    loaders = [next(made)[0] for _ in range(2)]
    for pid in loaders:
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    assert {one[0] for one in made} == set(loaders)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask


class Hanging(torch.utils.data.Dataset):
    """A data set whose samples take for ever, as on a file share that is gone."""

    def __init__(self, pipe):
        self.pipe = pipe

    def __getitem__(self, index):
        self.pipe.send(os.getpid())
        os.read(os.pipe()[0], 1)


def hang(pipe):
    next(start_loader(data_loader(Hanging(pipe), [[0]], list, workers=1)))


def test_a_loader_that_hangs_in_a_read_ends_with_its_rank():
    """It holds the rank's connections open, by whose end its peers notice."""
    ours, theirs = CONTEXT.Pipe()
    rank = CONTEXT.Process(target=hang, args=(theirs,))
    rank.start()
    theirs.close()
    loader = ours.recv()
    os.kill(rank.pid, signal.SIGKILL)
    rank.join()
    # Their end of the pipe is closed when both are gone.
    if not ours.poll(30):
        os.kill(loader, signal.SIGKILL)
        pytest.fail("the loader is still there")
    with pytest.raises(EOFError):
        ours.recv()


def leave_beside_one_that_hangs():
    ours, theirs = CONTEXT.Pipe()
    made = start_loader(data_loader(Hanging(theirs), [[0]], list, workers=1))
    ours.recv()
    process.leave(3 + (made is None))


def test_a_loader_that_hangs_does_not_keep_its_rank_from_leaving():
    """Python asks its processes by a signal that loaders do not hear, and then waits for them."""
    rank = CONTEXT.Process(target=leave_beside_one_that_hangs)
    rank.start()
    rank.join(30)
    if rank.is_alive():
        rank.kill()
        rank.join()
    assert rank.exitcode == 3


@pytest.fixture
def root(tmp_path):
    return make_images(tmp_path, per_class=9, classes=3)


def epochs(root, workers, wanted):
    """What one rank trains on in these (epoch, start)."""
    options = Options(augment="crop", random_erase=0.5, workers=workers)
    batches = TrainBatches(ImageFolder(root, "train", options), options, WORLD)
    next(batches.epoch(5))  # broken off
    return [
        (batch.images, batch.targets, batch.indices)
        for one in wanted
        for batch in batches.epoch(*one)
    ]


def test_loader_processes_stay_from_epoch_to_epoch_and_change_no_pixel(root, monkeypatch, tmp_path):
    """Also where an epoch begins in its middle, and after one that was broken off."""
    seen = tmp_path / "pids"

    def noted(path, *again, **named):
        with seen.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return open_picture(path, *again, **named)

    monkeypatch.setattr("trainer.data.loader.open_picture", noted)
    wanted = [(0, 11), (1, 0), (2, 20), (1, 0)]
    ours = epochs(root, 2, wanted)
    assert len(set(seen.read_text().split())) == 2
    theirs = epochs(root, 0, wanted)
    assert len(ours) == len(theirs) > 0
    for pair in zip(ours, theirs):
        assert all(torch.equal(a, b) for a, b in zip(*pair))
