"""How runs end: asked to, killed, by Ctrl-C, by an error, beside loader processes."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from contract.errors import STOPPED
from launcher.node.processes import descendants
from tests.gpu.jobs import batches, distance, options_of, prepared, train, weights
from tests.gpu.ranks import TWO, on_one_device, run_two
from tests.trainer_ranks import end, start_ranks, trainer, wait_for_steps
from trainer.stop import LEAD, Stop
from trainer.world import World

PATIENCE = 60  # seconds in which a process is to be gone, on a machine that does other things too


@pytest.fixture
def argv(images, device, tmp_path):
    """Of a run that goes on until somebody ends it."""
    words = ["--data", images, "--output", tmp_path, "--model", "tests.trainer_models:normed"]
    words += ["--device", device.type, "--per_node_batch_size", 4, "--epochs", 10000]
    return [*words, "--log_every", 1, "--evaluate_every", 9999, "--checkpoint_every", 10]


def started(nodes, argv, output, steps=8, function=on_one_device, before=trainer):
    """Ranks that have done some steps."""
    ranks = start_ranks(nodes, function, before, *argv, quiet=True)
    over = threading.Timer(2 * PATIENCE, end, (ranks, signal.SIGKILL))
    over.start()
    wait_for_steps(output, steps, ranks)
    over.cancel()
    return ranks


def codes(ranks):
    """Exit codes of all, which have to come in time; whoever has not come is killed."""
    try:
        assert all(pipe.poll(PATIENCE) for _, pipe in ranks)
        return [pipe.recv()[1] for _, pipe in ranks]
    finally:
        end(ranks, signal.SIGKILL)


def late(*argv):
    """In a rank: the trainer, whose sums come late, by another thread, and whose second host is
    slower than the first."""
    from tandem.sync import allreduce, base

    def sum_late(tensor):
        result = torch.futures.Future(devices=[tensor.device] if tensor.is_cuda else [])
        ready = torch.cuda.current_stream().record_event() if tensor.is_cuda else None
        threading.Thread(target=deliver, args=(tensor, result, ready), daemon=True).start()
        return result

    def deliver(tensor, result, ready):
        stream = torch.cuda.Stream() if tensor.is_cuda else None
        with torch.cuda.stream(stream):
            if ready is not None:
                stream.wait_event(ready)  # the gradient may not have been computed yet
            done = base.sum_over_ranks(tensor)
            done.wait()
            time.sleep(0.02)
            result.set_result(tensor)

    allreduce.sum_over_ranks = sum_late
    real = Stop.now

    def slow(self):
        time.sleep(0.01 * self.world.rank)
        return real(self)

    Stop.now = slow
    return trainer(*argv)


@pytest.mark.parametrize("told", [0, pytest.param(1, marks=pytest.mark.quick)])
def test_late_sums_and_skewed_hosts_stop_at_one_step(argv, tmp_path, told):
    ranks = started(TWO, argv, tmp_path, before=late)
    os.kill(ranks[told][0].pid, signal.SIGTERM)
    assert codes(ranks) == [STOPPED] * 2
    newest = [sorted(path.glob("step-*.pt"))[-1].name for path in tmp_path.glob("checkpoints/*")]
    assert len(newest) == 2
    assert len(set(newest)) == 1


@pytest.mark.needs_gpu
def test_a_host_runs_ahead_of_its_device_two_meetings_at_most(device):
    """Each step of the device takes far longer than the host needs to hand it over."""
    before = signal.getsignal(signal.SIGTERM)
    stop, ends, ahead = Stop(World(size=2, device=device, store=dist.HashStore())), [], []
    signal.signal(signal.SIGTERM, before)
    for _ in range(8):
        assert stop.now() is False
        ahead.append(sum(not event.query() for event in ends))
        torch.cuda._sleep(50_000_000)  # cycles: some 30 ms
        ends.append(torch.cuda.Event())
        ends[-1].record()
    torch.cuda.synchronize()
    assert max(ahead) <= LEAD
    assert max(ahead) > 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, STOPPED), (signal.SIGINT, 130)])
def test_a_signal_to_each_process_ends_the_run_and_its_loaders(argv, tmp_path, number, code):
    """As Slurm's scancel, systemd and a terminal send it."""
    ranks = started([1], [*argv, "--workers", 2, "--augment", "crop"], tmp_path)
    pids = [ranks[0][0].pid, *descendants(ranks[0][0].pid)]
    assert len(pids) >= 3
    for pid in reversed(pids):
        os.kill(pid, number)
    assert codes(ranks) == [code]
    until = time.monotonic() + PATIENCE
    while any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.05)


def broken(images, device):
    """In a rank: an error while a sum is under way that the other rank does not come to. The file
    has what it had to say."""
    from trainer import __main__ as program
    from trainer.world import start

    world = start(options_of(images, device))
    if world.rank == 1:
        time.sleep(PATIENCE)
    dist.all_reduce(torch.ones(8, device=world.device), async_op=True)

    def fails():
        raise ValueError("broken on purpose")

    program.main = fails
    program.run()  # ends this process


@pytest.mark.quick
def test_an_error_beside_a_sum_that_nobody_ends_is_over_at_once(images, device):
    ranks = start_ranks(TWO, on_one_device, broken, str(images), device, quiet=True)
    ranks[0][0].join(PATIENCE / 2)
    code = ranks[0][0].exitcode
    end(ranks, signal.SIGKILL)
    assert code == 1


REFUSED_BESIDE_NCCL = """
import sys, torch, torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1, device="cuda"))
from trainer.__main__ import run
run()
"""


@pytest.mark.needs_gpu
def test_nccl_s_tear_down_says_nothing_after_the_sentence(images):
    """torch 2.4 and later warn there of a group that was not destroyed."""
    command = [sys.executable, "-c", REFUSED_BESIDE_NCCL, "--data", images, "--model", "resnet1"]
    done = subprocess.run([*command, "--device", "cuda"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("trainer: --model resnet1: ")


def statistics_of(norm):
    """The group over which batch normalisation sums, where it does."""
    own = norm.group.group if hasattr(norm, "group") else getattr(norm, "process_group", None)
    return own or dist.group.WORLD


def unequal(images, device, given):
    """In a rank: the first pass takes the second rank longer than its peer waits for a sum.
    Returns whether a step has moved the weights."""
    from trainer import step

    job = prepared(images, device, model="tests.gpu.models:fixed", **given)
    # After the meeting, which may take as long as a loaded machine needs.
    for group in {dist.group.WORLD, *map(statistics_of, job.norms)}:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), group)
    real = step.blank_pass

    def slow(*args, **kwargs):
        """Stands in for a compilation, which one rank finds in its cache."""
        step.blank_pass = real
        time.sleep(4.5 * job.world.rank)
        return real(*args, **kwargs)

    step.blank_pass = slow
    step.rebuild_buckets(job)
    before = weights(job)
    train(job, batches(job, 1, 1))
    return step.blank_pass is real and distance(weights(job), before) > 0


@pytest.mark.needs_torch_2  # whose time-outs can be set later
@pytest.mark.parametrize(
    "given",
    [pytest.param({}, marks=pytest.mark.quick), {"static_graph": True}, {"sync_bn": True}],
    ids=str,
)
def test_a_first_pass_that_takes_longer_on_one_rank_breaks_nothing(images, device, given):
    """Compiling is no step: its peers wait longer than --timeout for it."""
    assert run_two(unequal, str(images), device, given) == [True, True]
