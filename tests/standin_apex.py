"""Stands in for apex.amp, which needs CUDA: keeps its contract and records what is called.

Masters appear at the first zero_grad, a last backward unscales and moves the scale, an overflow
makes the next step do nothing, and a half model's state_dict is in fp32.
"""

import contextlib
import math

import torch

calls, scaler = [], {}


def _weights(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def initialize(model, optimizer, opt_level, verbosity, **more):
    calls.append(("initialize", opt_level, verbosity, type(model).__name__))
    calls.extend(more.items())
    scaler.update(loss_scale=2.0**16, unskipped=0)
    optimizer.halves, optimizer.skip, own_step = [], False, optimizer.step
    if opt_level == "O2":
        for parameter in model.parameters():
            parameter.data = parameter.data.half()

    def zero_grad():
        for group in optimizer.param_groups:
            for place, weight in enumerate(group["params"]):
                if weight.dtype is torch.float16:
                    group["params"][place] = torch.nn.Parameter(weight.detach().float())
                    optimizer.halves.append((weight, group["params"][place]))

    def step():
        calls.append(("step", optimizer.skip))
        if not optimizer.skip:
            own_step()
        for half, master in optimizer.halves:
            half.data.copy_(master.data)
            master.grad = None
        optimizer.skip = False

    optimizer.zero_grad, optimizer.step = zero_grad, step
    return model, optimizer


@contextlib.contextmanager
def scale_loss(loss, optimizer, delay_unscale):
    calls.append(("scale_loss", delay_unscale))
    yield loss.float() * scaler["loss_scale"]
    if delay_unscale:
        return
    for half, master in optimizer.halves:
        master.grad = half.grad.float()
    for weight in _weights(optimizer):
        weight.grad /= scaler["loss_scale"]
    optimizer.skip = not all(math.isfinite(w.grad.sum()) for w in _weights(optimizer))
    scaler["unskipped"] = 0 if optimizer.skip else scaler["unskipped"] + 1
    scaler["loss_scale"] /= 2 if optimizer.skip else 1


def master_params(optimizer):
    return iter(_weights(optimizer))


def state_dict():
    return {"loss_scaler0": dict(scaler)}


def load_state_dict(state):
    scaler.update(state["loss_scaler0"])
