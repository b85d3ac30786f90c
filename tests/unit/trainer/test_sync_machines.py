"""Several ranks a machine: gradients are summed within it, and one rank of it speaks for all."""

import hashlib

import pytest
import torch
import torch.distributed as dist

from contract.options import Options
from tandem.compat import load_tensors
from tandem.sync import Topology, make
from tests.trainer_ranks import make_images, run_ranks, trainer
from tests.unit.trainer.sync_ranks import Steps, net, six_steps, size
from trainer.parallel import wrap
from trainer.world import start

SPECS = ["ef:1.6", "powersgd:1"]


def test_machines_are_told_from_the_machine_of_each_rank():
    """As mpirun deals ranks out by node."""
    machines = Topology((0, 1, 0, 2), rank=2)
    assert machines.ranks == ((0, 2), (1,), (3,))
    assert (machines.leaders, machines.own_ranks, machines.leads) == ((0, 1, 3), (0, 2), False)
    assert machines.several
    assert not Topology((0, 1, 2), rank=2).several


def summed_up(spec):
    """How far all sums and what was left out are from the exact sums, after 6 steps; a digest of
    the last sums; how much this rank keeps."""
    steps, total, _, off = six_steps(spec)
    held = sum(one.numel() for bucket in steps.sync.kept.values() for one in bucket.now)
    return off, hashlib.sha256(total.numpy().tobytes()).hexdigest(), held


@pytest.mark.parametrize("spec", ["ef:8", "ef:1.6", "powersgd:3"])
def test_what_is_left_out_belongs_to_a_machine_and_all_ranks_have_the_same_sums(spec):
    results = run_ranks([2, 1], summed_up, spec)
    assert all(abs(off) < 1e-5 for off, _, _ in results)
    assert len({digest for _, digest, _ in results}) == 1
    first, second, alone = (held for _, _, held in results)
    assert first == alone > 0
    assert second == 0


class Between:
    """Bytes that this rank sends to other machines; sums go round a ring of their group's ranks."""

    def __init__(self, world):
        self._sizes, self._groups, self._world = [], {}, world
        self._wrap("new_group", self._note)
        self._wrap("all_reduce", self._sum)
        self._wrap("broadcast", self._sum)
        self._wrap("isend", lambda _, tensor, peer, **words: self._add(peer, size(tensor)))

    @property
    def sent(self):
        return sum(self._sizes)

    def _wrap(self, name, look):
        real = getattr(dist, name)

        def looked_at(*args, **words):
            made = real(*args, **words)
            look(made, *args, **words)
            return made

        setattr(dist, name, looked_at)

    def _note(self, made, ranks, *_):
        self._groups[id(made)] = (made, ranks)  # kept, so that no other one gets its number

    def _sum(self, _, tensor, *args, group=None, **words):
        every = range(self._world.size)
        ranks = list(every) if group is None else self._groups[id(group)][1]
        following = ranks[(ranks.index(self._world.rank) + 1) % len(ranks)]
        self._add(following, 2 * (len(ranks) - 1) / len(ranks) * size(tensor))

    def _add(self, peer, count):
        nodes = self._world.nodes
        self._sizes.append(count if nodes[peer] != nodes[self._world.rank] else 0)


def bytes_between(specs):
    """By spec: counted bytes a step, and those declared for a machine of two."""
    world, found = start(Options()), {}
    between = Between(world)
    for spec in specs:
        steps = Steps(spec, world)
        for number in range(3):
            if number == 1:
                before = between.sent
            steps.step(number)
        sent = (between.sent - before) / 2
        found[spec] = sent, steps.strategy.bytes_per_step(2, steps.payload, gpus=2)
    return found


def test_a_machine_sends_what_the_registry_declares_whatever_its_ranks():
    specs = ["allreduce", "ef:1.6", "powersgd:2"]
    told = run_ranks([2, 2], bytes_between, specs)
    for spec in specs:
        ranks = [found[spec][0] for found in told]
        declared = told[0][spec][1]
        for machine in (ranks[:2], ranks[2:]):
            assert abs(sum(machine) - declared) <= max(0.02 * declared, 2**16), spec
            assert 0 in machine, spec


def begun(spec):
    """A digest of the weights with which DDP begins, where each rank had others."""
    options = Options(sync=spec)
    world, model = start(options), net()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(world.rank)
    wrap(model, options, world, make(spec, lambda: None))
    flat = torch.cat([weight.detach().reshape(-1) for weight in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("spec", ["ef:2", "powersgd:2"])
def test_all_machines_begin_with_the_first_rank_s_weights(spec):
    assert len(set(run_ranks([1, 2], begun, spec))) == 1


ARGV = [
    "--model", "tests.trainer_models:plain", "--precision", "fp32", "--augment", "none",
    "--per_node_batch_size", 8, "--workers", 0, "--epochs", 3, "--sync_warmup", 1, "--lr", 0.05,
]  # fmt: skip


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images"), per_class=16)


def train(images, output, nodes, *more):
    """The saved weights, after runs whose ranks' batches make up the same ones of machines."""
    argv = ["--data", images, "--output", output, *ARGV, *more]
    assert run_ranks(list(nodes), trainer, *argv, quiet=True) == [0] * sum(nodes)
    file = sorted((output / "checkpoints/node1").glob("step-*.pt"))[-1]
    with file.open("rb") as content:
        return load_tensors(content)["model"]


@pytest.mark.parametrize("spec", SPECS)
def test_two_machines_of_two_train_as_two_of_one_with_twice_the_batch(images, tmp_path, spec):
    ones = train(images, tmp_path / "a", [1, 1], "--sync", spec)
    for nodes in ([2, 2], [2, 1]):
        ours = train(images, tmp_path / str(nodes), nodes, "--sync", spec)
        for name, value in ones.items():
            assert torch.allclose(value, ours[name], atol=1e-4), name


@pytest.mark.parametrize("classes", [4, 2], ids=["a rank", "a machine of two"])
def test_who_has_no_samples_holds_up_nobody(tmp_path, classes):
    """In each step an image of each class: two samples are the second machine's."""
    few = make_images(tmp_path / "images", per_class=1, classes=classes)
    more = ("--weight_decay", 0.01, "--sync_warmup", 0, "--find_unused_parameters")
    exact = train(few, tmp_path / "exact", [2, 1], *more)
    ours = train(few, tmp_path / "ours", [2, 1], *more, "--sync", "ef:8")
    for name, value in exact.items():
        assert torch.allclose(value, ours[name], atol=1e-3), name


def test_on_one_machine_sums_are_exact(images, tmp_path):
    exact = train(images, tmp_path / "exact", [2])
    for spec in ("ef:1.6", "powersgd:4"):
        ours = train(images, tmp_path / spec[:2], [2], "--sync", spec)
        assert all(torch.equal(value, ours[name]) for name, value in exact.items())
