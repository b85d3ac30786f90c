"""Checkpoints and weights that were damaged, or that no run of ours wrote: one sentence, or it goes
on; never a traceback, never memory beyond the file's size."""

import copy
import io
import logging
import math
import warnings
import zipfile
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("hypothesis")  # where the newest torch is tested
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import UserError
from tandem import sync as syncs
from tests.fuzz import damaged, many, odd, places
from tests.gpu.jobs import batches, prepared, train
from tests.trainer_ranks import as_safetensors
from trainer import checkpoint, export, resume, weights, writer

PER_CLASS = 3

CPU = torch.device("cpu")


def of_another_kind(make):
    """Another tensor in the place of one."""
    return lambda old: make(old) if isinstance(old, torch.Tensor) else old


TENSORS = (
    of_another_kind(lambda old: torch.empty_like(old, device="meta")),
    of_another_kind(lambda old: torch.zeros(1).expand(2**40)),
    of_another_kind(lambda old: old.to(torch.uint8)),
    of_another_kind(lambda old: old.to(torch.complex64)),
    of_another_kind(lambda old: torch.full_like(old, math.nan) if old.is_floating_point() else old),
    of_another_kind(lambda old: old[None].to_sparse()),
    torch.zeros(3),
    torch.zeros(()),
    torch.zeros(2, 2, dtype=torch.complex64),
    torch.zeros(1, dtype=torch.int8),
    torch.zeros(3).to_sparse(),
    (1, 2),
    b"x",
    {1: 2},
)


class Tried:
    """A job that has done two steps, its checkpoint, and what it would resume from."""

    def __init__(self, images, folder, **given):
        self.job = prepared(
            images, CPU, output=str(folder), resume="auto", per_node_batch_size=4, ema=0.9, **given
        )
        self.folder, self.fed = folder, batches(self.job)[:2]
        train(self.job, self.fed)
        at = checkpoint.Position.of_new_run(self.job.world)
        at.sample, at.step = 8, 2
        self.good = checkpoint.snapshot(self.job, at)
        self.path = folder / "checkpoints/node1/step-00000002.pt"
        writer.write_whole(self.good, self.path)
        self.raw = self.path.read_bytes()

    def resumed(self):
        """Whether there was something to resume from; then a step is done. Raises UserError."""
        checkpoint.restore(self.job, checkpoint.load("it", io.BytesIO(self.raw)))
        state = resume.find(self.job)
        if state is not None:
            checkpoint.restore(self.job, state)
            train(self.job, self.fed[:1])
        return state is not None


@pytest.fixture(scope="module", params=["adamw", "sgd"])
def tried(request, images, tmp_path_factory):
    precision = {"adamw": "fp32", "sgd": "O2"}[request.param]
    folder = tmp_path_factory.mktemp("run")
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fp16 on a CPU
        yield Tried(images, folder, optimizer=request.param, precision=precision, sync="allreduce")
    logging.disable(logging.NOTSET)


def test_a_run_goes_on_with_its_own_strategy_alone(tried):
    then = {**tried.good["options"], "sync": repr("ef:5")}
    writer.write_whole({**tried.good, "options": then}, tried.path)
    with pytest.raises(UserError, match="omit --sync allreduce"):
        tried.resumed()
    writer.write_whole(tried.good, tried.path)
    assert tried.resumed()


def ends_of(path, states, resumed, count, examples=()):
    """What became of files with these states or bytes. What is refused is refused in a sentence."""
    ends = {"resumed": 0, "passed over": 0, "refused": 0}

    def each(state):
        try:
            if isinstance(state, bytes):
                path.write_bytes(state)
            else:
                writer.write_whole(state, path)
        except (UnicodeError, OverflowError):
            return  # no file can hold it
        try:
            ends["resumed" if resumed() else "passed over"] += 1
        except UserError as error:
            assert "\n" not in str(error)
            ends["refused"] += 1

    for one in examples:
        each(one)
    many(count)(given(states)(each))()
    return ends


@pytest.mark.hypothesis
def test_odd_checkpoints_end_in_a_sentence_or_go_on(tried):
    good, of_another_size = tried.good, copy.deepcopy(tried.good)
    kept = of_another_size["optimizer"]["state"][0]
    kept.update((name, torch.zeros(7)) for name in kept if name != "step")
    changes = [{"sample": 9}, {"ema": None}, {"precision": {}}, {"sample": 99, "samples": 99}]
    groups = [True, [{"params": 1}], torch.zeros(3)]
    changes += [{"optimizer": {"state": {}, "param_groups": one}} for one in groups]
    examples = [of_another_size, {}, *({**good, **change} for change in changes)]
    ends = ends_of(tried.path, odd(good, TENSORS), tried.resumed, 200, examples)
    assert min(ends["resumed"], ends["refused"]) > 5, ends


KINDS = [kind for kind in ("float4_e2m1fn_x2", "qint8") if hasattr(torch, kind)]


@pytest.mark.parametrize("kind", ["meta", "view", *KINDS])
def test_a_tensor_that_nothing_can_be_copied_from_is_refused_wherever_it_stands(tried, kind):
    """torch reads kinds of tensors that no kernel takes, and views of any size from few bytes."""
    every = [path for path in places(tried.good) if isinstance(at(tried.good, path), torch.Tensor)]
    assert {path[0] for path in every} == {"model", "optimizer", "ema"}
    for path in {path[0]: path for path in every}.values():
        state = copy.deepcopy(tried.good)
        at(state, path[:-1])[path[-1]] = of_kind(kind, at(state, path))
        writer.write_whole(state, tried.path)
        with pytest.raises(UserError, match=r"missing or invalid|more than tensors"):
            tried.resumed()
        assert export.main([str(tried.folder), f"TO={tried.folder}/out.pt"]) == 2


def of_kind(kind, tensor):
    if kind == "meta":
        return torch.empty_like(tensor, device="meta")
    if kind == "view":
        return torch.zeros(1).expand(2**40)
    if kind == "qint8":
        return torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8)
    return torch.empty(tensor.shape, dtype=getattr(torch, kind))


def at(document, path):
    for key in path:
        document = document[key]
    return document


@pytest.mark.hypothesis
def test_damaged_checkpoints_are_passed_over_or_are_a_sentence(tried):
    # Few damages are harmless, so the whole file is tried, too.
    ends = ends_of(tried.path, damaged(tried.raw), tried.resumed, 200, [tried.raw])
    assert min(ends["resumed"], ends["passed over"]) > 0, ends


def begin_and_sum(sync, bucket):
    if bucket.index() == 0:
        sync.begin(1.0, exact=False)
    return sync.hook(bucket)


class Kept:
    """A job whose strategy keeps state of its own, after three steps of a world of one machine, and
    the machine's own file."""

    def __init__(self, images, folder, spec):
        self.job = prepared(
            images, CPU, output=str(folder), resume="auto", per_node_batch_size=4, sync=spec
        )
        sync = syncs.make(spec)
        self.job.attached = SimpleNamespace(sync=sync)  # Attached sums exactly in such a world
        self.job.net = torch.nn.parallel.DistributedDataParallel(self.job.model)
        sync.setup(CPU)
        self.job.net.register_comm_hook(sync, begin_and_sum)
        fed = batches(self.job)
        self.step = lambda: train(self.job, fed[:3])
        self.step()
        self.at = checkpoint.Position.of_new_run(self.job.world)
        self.good = checkpoint.copy_node_state(self.job, self.at)
        assert any(tensor.any() for one in self.good["sync"]["kept"].values() for tensor in one)
        self.path = folder / "checkpoints/node1/rank0/step-00000003.pt"

    def resumed(self):
        """Whether there was something to resume from; then steps are done. Raises UserError."""
        there = resume.restore_node_state(self.job, self.at)
        self.step()
        return there


@pytest.fixture(params=["ef:5"])
def kept(request, images, tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    logging.disable(logging.CRITICAL)
    yield Kept(images, tmp_path, request.param)
    logging.disable(logging.NOTSET)
    dist.destroy_process_group()


@pytest.mark.hypothesis
def test_an_odd_own_file_of_a_machine_ends_in_a_sentence_or_goes_on(kept):
    """Also the steps after it: a tensor of another size is noticed before the first one."""
    writer.write_whole(kept.good, kept.path)
    assert kept.resumed()
    states = odd(kept.good, TENSORS) | damaged(kept.path.read_bytes())
    ends = ends_of(kept.path, states, kept.resumed, 180)
    assert min(ends.values()) > 0, ends


@pytest.mark.hypothesis
def test_odd_scales_of_a_strategy_end_in_a_sentence_or_go_on(kept):
    good = checkpoint.snapshot(kept.job, kept.at)
    path = kept.path.with_name("common.pt")

    def resumed():
        checkpoint.restore(kept.job, checkpoint.load("it", io.BytesIO(path.read_bytes())))
        kept.step()
        return True

    def holding(scales):
        return {**good, "sync": scales}

    examples = [holding({**good["sync"], "scale": 10**400}), good]
    ends = ends_of(path, odd(good["sync"], TENSORS).map(holding), resumed, 100, examples)
    assert min(ends["resumed"], ends["refused"]) > 0, ends


def test_an_older_checkpoint_takes_the_place_of_a_damaged_one(tried, caplog):
    """Its checksums are right, and yet it cannot be read."""
    caplog.set_level(logging.WARNING)
    writer.write_whole(tried.good, tried.path)
    newer = tried.path.with_name("step-00000003.pt")
    with zipfile.ZipFile(newer, "w") as archive:
        archive.writestr("x/data.pkl", b"no pickle")
    assert writer.is_complete(newer)
    assert tried.resumed() and newer.name in caplog.text
    newer.unlink()
    writer.write_whole({"run": "r", "model": {}}, tried.path)  # no checkpoint of ours
    assert export.main([str(tried.folder), f"TO={tried.folder}/out.pt"]) == 2


@pytest.mark.hypothesis
def test_weights_that_are_damaged_or_of_another_program(images, tmp_path):
    path = tmp_path / "weights.pt"
    job = prepared(images, CPU, weights=str(path), ema=0.9)
    good = {"model": job.model.state_dict()}
    torch.save(good, path)
    raw = path.read_bytes()
    floats = {name: one for name, one in good["model"].items() if one.is_floating_point()}
    diverged = {name: torch.full_like(one, math.nan) for name, one in floats.items()}

    def read():
        try:
            weights.start_from_weights(job)
        except UserError as error:
            assert str(path) in str(error) or str(error).startswith("these weights ")
            raise
        return True

    examples = [b"", b"PK", bytes(999), [torch.ones(2)], {"model": {**good["model"], **diverged}}]
    states = damaged(raw) | odd(good, TENSORS) | st.sampled_from((None, "x", 3))
    states |= damaged(as_safetensors(good["model"]))
    ends = ends_of(path, states, read, 400, examples)
    assert min(ends["resumed"], ends["refused"]) > 3, ends
    job.ema = None
    path.write_bytes(raw)
    assert read()


@pytest.mark.hypothesis
def test_a_small_file_does_not_fill_the_memory():
    """64 MB of zeros, compressed to 64 kB: torch itself would take them."""
    content, packed = io.BytesIO(), io.BytesIO()
    torch.save({"weight": torch.zeros(1 << 24)}, content)
    with zipfile.ZipFile(content) as plain, zipfile.ZipFile(packed, "w", 8) as archive:
        for entry in plain.namelist():
            archive.writestr(entry, plain.read(entry))
    assert len(packed.getvalue()) < 1 << 17
    packed.seek(0)
    assert torch.load(packed)["weight"].numel() == 1 << 24
    with pytest.raises(checkpoint.Damaged):
        checkpoint.load("it", packed)
