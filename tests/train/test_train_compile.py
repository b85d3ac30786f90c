"""torch.compile: for which sizes, and when."""

import pytest
import torch

from contract.options import Options
from tandem.clock import Clock
from tests.trainer_ranks import make_images, run_ranks
from trainer.build import build_job, build_materials
from trainer.data.loader import TrainBatches
from trainer.decide import decide
from trainer.process import start
from trainer.step import rebuild_buckets, train_step


def compiled_for(root):
    """Batch sizes for which a rank compiles before its first step, and in an epoch."""
    sizes, compile = [], torch.compile

    def backend(graph, inputs):
        # DDP's other pieces begin with what the one before them made.
        sizes.extend(len(one) for one in inputs if one.shape[1:] == (3, 16, 16))
        return graph.forward

    torch.compile = lambda net, dynamic: compile(net, dynamic=dynamic, backend=backend)
    options = Options(
        data=str(root), model="tests.trainer_models:plain", workers=0, compile=True,
        per_node_batch_size=8, accumulate=2, bucket_mb=999,
    )  # fmt: skip
    options, world = decide(options, start(options))
    ours = build_job(options, world, build_materials(options, world), Clock(world.device))
    rebuild_buckets(ours)
    settled = list(sizes)
    for step, batch in enumerate(TrainBatches(ours.train_set, options, world).epoch(0)):
        train_step(ours, batch, step, 0.1)
    weights = torch.cat([p.detach().flatten() for p in ours.model.parameters()])
    return settled, sizes, weights.sum().item()


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_compiled_is_compiled_for_the_sizes_of_an_epoch_before_it(tmp_path, ranks):
    """Settled with two images it was compiled for these, and then again, for any size."""
    if not hasattr(torch, "compile"):
        pytest.skip("this torch does not compile")
    root = make_images(tmp_path / "images", per_class=13)
    answers = run_ranks([1] * ranks, compiled_for, root)
    for settled, sizes, _ in answers:
        assert settled == sizes, "nothing is compiled once steps are made"
        assert len(set(sizes)) == len(sizes) <= 2
        assert min(sizes) > 1 and max(sizes) <= 4
    assert len({total for *_, total in answers}) == 1
