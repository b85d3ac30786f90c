"""From when to when `tandem.sync.attach` is there: before, beside and after a model, and a peer."""

import copy
import gc
import io
import os
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from tandem import sync
from tests.trainer_ranks import run_ranks, start_ranks
from tests.unit.tandem import loop

SPEC = "ef:5"


def model():
    torch.manual_seed(0)
    return loop.wrapped(torch.nn.Linear(300, 40))


def step(ddp, number=0):
    """One step; returns the sum of gradients."""
    ddp.zero_grad()
    torch.manual_seed(10 * number + dist.get_rank())
    ddp(torch.randn(4, 300)).pow(2).mean().backward()
    torch.optim.SGD(ddp.parameters(), 0.0).step()
    return ddp.module.weight.grad.clone()


def steps(ddp, count=4):
    return torch.stack([step(ddp, number) for number in range(count)]).numpy()


def alive():
    """Threads of the operating system, open descriptors, process groups, and values in tensors."""
    gc.collect()
    counts, since = [], time.monotonic()
    while time.monotonic() < since + 0.3:  # a thread that was told to end is there for a moment
        now = [len([*Path("/proc/self", name).iterdir()]) for name in ("task", "fd")]
        counts, since = now, since if now == counts else time.monotonic()
        time.sleep(0.01)
    kinds = (torch.Tensor, torch.nn.Parameter)
    values = sum(one.numel() for one in gc.get_objects() if type(one) in kinds)
    return (*counts, len(dist.distributed_c10d._pg_map), values)


def after_models(spec):
    """What is alive after a plain model; with a strategy; and after models that had one, each with
    whether the model itself is gone."""
    loop.joined()
    ddp = model()
    sync.attach(ddp, spec)
    steps(ddp)  # constants of a strategy are kept from then on
    del ddp
    steps(model())
    found = [alive()]
    for attached in (True, False):
        ddp = model()
        if attached:
            kept = sync.attach(ddp, spec)
        else:
            ddp.register_comm_hook(*sync.hook(spec))
        steps(ddp)
        dist.barrier()
        gone, now = weakref.ref(ddp), alive()
        del ddp
        found += [now, (*alive(), gone() is None)]
        dist.barrier()
    assert kept.steps == 4  # what a script still holds keeps nothing but itself
    return found


@pytest.mark.parametrize(
    ("nodes", "spec"),
    [([1, 1], SPEC), pytest.param([2, 2], SPEC, marks=pytest.mark.long)],
)
def test_nothing_lives_longer_than_the_model(nodes, spec):
    for before, first, after, second, at_last in run_ranks(nodes, after_models, spec):
        assert first[0] > before[0] and second[0] > before[0]
        assert first[3] > before[3] + 2 * 300 * 40 and second[3] > before[3] + 2 * 300 * 40
        assert after == at_last == (*before, True)


def after_detaching():
    loop.joined()
    plain, ddp = model(), model()
    steps(plain)
    before = alive()
    attached = sync.attach(ddp, SPEC)
    coded = steps(ddp)
    attached.detach()
    attached.detach()  # again does nothing
    now, exact = alive(), steps(ddp)
    return before, now, (coded == steps(plain)).all(), (exact == steps(plain)).all()


def test_detach_gives_back_all_and_ddp_sums_from_then_on():
    for before, now, coded_alike, exact_alike in run_ranks([1, 1], after_detaching):
        assert now[:3] == before[:3]
        assert (coded_alike, exact_alike) == (False, True)


def three_ways():
    """The sums of models with `attach`, with `hook`, and attached after forwards without gradients,
    as Lightning makes them before the first step."""
    loop.joined()
    early, hooked, late = (model() for _ in range(3))
    sync.attach(early, SPEC)
    hooked.register_comm_hook(*sync.hook(SPEC))
    with torch.no_grad():
        late(torch.ones(4, 300))
    sync.attach(late, SPEC)
    return [steps(ddp) for ddp in (early, hooked, late)]


def test_a_hook_for_lightning_and_a_late_attach_do_the_same():
    for early, hooked, late in run_ranks([1, 1], three_ways):
        assert (early == hooked).all() and (early == late).all()


def copies():
    """Of a model with a strategy: whether its own sums go on, and whether those of copies are
    exact."""
    loop.joined()
    ddp, plain, other = model(), model(), model()
    sync.attach(ddp, SPEC)
    sync.attach(other, SPEC)
    steps(ddp, 2)
    steps(other, 2)
    copied, file = copy.deepcopy(ddp), io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    words = {"weights_only": False} if sys.version_info >= (3, 10) else {}
    loaded = torch.load(file, **words)
    expected = steps(plain)
    exact = [(steps(one) == expected).all() for one in (copied, loaded)]
    return exact, (steps(ddp) == steps(other)).all()


def test_a_copy_and_a_file_of_the_model_sum_as_ddp_does():
    for exact, goes_on in run_ranks([1, 1], copies):
        assert exact == [True, True] and goes_on


def dying(spec):
    """What rank 0's loop gets in step 3, in which its peer ends."""
    rank, _ = loop.joined()
    ddp = model()
    sync.attach(ddp, spec)
    steps(ddp, 2)
    if rank:
        os._exit(1)
    try:
        step(ddp)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(("spec", "who"), [(SPEC, "node2 (rank 1)"), ("fp16", "another rank")])
def test_a_peer_s_end_reads_as_a_sentence(spec, who):
    (_, pipe), (other, _) = start_ranks([1, 1], dying, spec)
    good, said = pipe.recv()
    other.join()
    assert good, said
    assert said.startswith(f"tandem.sync.attach: step 3: the connection to {who} was lost")


def waiting():
    """What rank 1's loop gets in step 3, which its peer does not make."""
    rank, _ = loop.joined()
    ddp, store = model(), _get_default_store()
    sync.attach(ddp, SPEC, patience=1.0)
    steps(ddp, 2)
    if not rank:
        store.wait(["it has given up"])
        return None
    try:
        step(ddp)
    except RuntimeError as error:
        store.set("it has given up", b"1")
        return str(error)


def test_so_does_a_peer_that_is_silent():
    _, said = run_ranks([1, 1], waiting)
    assert said.startswith("tandem.sync.attach: step 3: node1 (rank 0) sent nothing for 1 s")


class Scaler:
    """Notes in which of the loop's phases its scale is read."""

    def __init__(self):
        self.phase, self.read = "", []

    def get_scale(self):
        self.read.append(self.phase)
        return 1.0


def readings(spec):
    loop.joined()
    ddp, scaler = model(), Scaler()
    sync.attach(ddp, spec, scaler=scaler)
    for _ in range(3):
        scaler.phase = "forward"
        loss = ddp(torch.randn(4, 300)).pow(2).mean()
        scaler.phase = "backward"
        loss.backward()
    return scaler.read


@pytest.mark.parametrize(("spec", "read"), [(SPEC, ["forward"] * 3), ("fp16", [])])
def test_the_scale_is_read_before_backward_and_only_where_it_matters(spec, read):
    assert run_ranks([1, 1], readings, spec) == [read, read]


def test_threads_of_a_carrier_choose_its_card_first(monkeypatch):
    """Else each makes a context on card 0, of hundreds of MB."""
    calls = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(device))
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: calls.append("a stream"))
    made = sync.carrier.Carrier([sync.carrier.Stage(lambda _: None)], torch.device("cuda", 1), 1)
    made.end()
    assert calls == [torch.device("cuda", 1), "a stream"]
