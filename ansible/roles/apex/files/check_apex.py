"""Fail, with the cause in the last line, if NVIDIA's apex.amp is not usable.

Role apex runs this file on the environment's Python after it has built apex.
"""

import importlib.util

import apex
from apex import amp

# The package apex of PyPI is a toolkit for Pyramid, and has no amp at all.
for name in ("initialize", "scale_loss"):
    if not callable(getattr(amp, name, None)):
        raise SystemExit("%s has no amp.%s" % (apex.__file__, name))


def step():
    """Make one step of a small model in O1, if there is a GPU."""
    import torch

    if not torch.cuda.is_available():
        return
    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    loss = model(torch.randn(8, 64, device="cuda")).float().square().mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    if not all(torch.isfinite(weight).all() for weight in model.parameters()):
        raise SystemExit("one step with amp gave weights that are not finite")


if importlib.util.find_spec("torch"):
    step()
