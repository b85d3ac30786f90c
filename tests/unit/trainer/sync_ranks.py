"""Pieces of the tests of strategies: a net of several buckets, and a count of what is sent."""

import copy

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from contract.options import Options
from contract.strategies import MIB, Payload, parse
from tandem.sync import Topology, make
from trainer.world import start

WIDTH = 700


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
        ranks = list(self._groups.get(id(group), (None, every))[1])  # else the group of all
        following = ranks[(ranks.index(self._world.rank) + 1) % len(ranks)]
        self._add(following, 2 * (len(ranks) - 1) / len(ranks) * size(tensor))

    def _add(self, peer, count):
        nodes = self._world.nodes
        self._sizes.append(count if nodes[peer] != nodes[self._world.rank] else 0)


def size(tensor):
    return tensor.numel() * tensor.element_size()


def net():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(3, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)]
    return torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(WIDTH, 2 * WIDTH))


def payload_of(model, bucket_mb):
    return Payload(sum(map(size, model.parameters())), bucket_mb * MIB)


class Steps:
    """Backward by backward of one net with a strategy, and beside it the exact sums. The loss is
    multiplied by the number of ranks, of whose gradients a strategy takes the mean."""

    def __init__(self, spec, world=None):
        options = Options(bucket_mb=1, sync=spec)
        self.world = world or start(options)
        self.device = self.world.device
        self.model = net().to(self.device)
        self.alone = copy.deepcopy(self.model)
        self.sync = make(spec)
        self.wrapped = DistributedDataParallel(
            self.model,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            bucket_cap_mb=1,
            gradient_as_bucket_view=True,
        )
        topology = Topology(self.world.nodes, self.world.rank).connect(options.timeout)
        self.sync.setup(self.device, topology)
        self.wrapped.register_comm_hook(None, lambda _, bucket: self.sync.hook(bucket))
        self._backward(self.wrapped, 0)  # DDP orders its buckets by this one, and the sum is exact
        self.payload = payload_of(self.model, 1)
        self.strategy = parse(spec)

    def _backward(self, model, step, scale=1.0):
        model.zero_grad()
        torch.manual_seed(1000 * step + self.world.rank)
        (model(torch.randn(4, 3).to(self.device)).pow(2).sum() * scale).backward()

    def step(self, number, scale=1.0, spoil=None, exact=False):
        """This strategy's sums after one backward."""
        self.sync.begin(scale, exact)
        if spoil is not None and self.world.rank == 0:
            scale = spoil
        self._backward(self.wrapped, number, scale * dist.get_world_size())
        self.sync.close()
        return flat(self.model)

    def exact(self, number):
        """The same by plain all-reduce."""
        self._backward(self.alone, number)
        total = flat(self.alone)
        dist.all_reduce(total)
        return total


def flat(model):
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def six_steps(spec):
    """The steps, their sums and the exact ones, and how far the sums with all that was left out are
    from the exact ones, as a part of these."""
    steps = Steps(spec)
    total = exact = 0
    for number in range(1, 7):
        total = total + steps.step(number)
        exact = exact + steps.exact(number)
    # Buckets are in another order than the parameters: only their sums can be compared.
    kept = torch.zeros(())
    for bucket in steps.sync.errors.values():
        kept += sum(one.sum() for one in bucket.current)
    dist.all_reduce(kept)
    return steps, total, exact, float(total.sum() + kept - exact.sum()) / float(exact.abs().sum())
