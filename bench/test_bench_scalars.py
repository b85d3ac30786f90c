"""What recording eight scalars adds to a step: pairs of loops beside each other, one of which
records them. Processor time, so that the ratio holds whatever else this machine does."""

import statistics
import time

import torch
from torch.nn.functional import cross_entropy

from tandem import timings

PAIRS, STEPS = 40, 50


def test_scalars(tmp_path, figure, monkeypatch):
    monkeypatch.setenv("TANDEM_OUTPUT", str(tmp_path))
    monkeypatch.setattr(timings, "_current", None)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    width = 256
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    batch = torch.randn(64, width), torch.randint(10, (64,))
    names = [f"scalar{number}" for number in range(7)]

    def seconds(records):
        begin = time.process_time()
        for inputs, classes in timings.timed([batch] * STEPS, model):
            loss = cross_entropy(model(inputs), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if records:
                timings.step(loss=loss, **dict.fromkeys(names, loss))
            else:
                timings.step()
        return (time.process_time() - begin) / STEPS

    seconds(False), seconds(True)
    # The order alternates, because a core's clock drifts.
    pairs = [[seconds(records) for records in (n % 2 == 0, n % 2 == 1)] for n in range(PAIRS)]
    pairs = [pair[:: 1 if n % 2 else -1] for n, pair in enumerate(pairs)]
    ratios = [recording / plain for plain, recording in pairs]
    plain = statistics.median(pair[0] for pair in pairs)
    error = statistics.stdev(ratios) / PAIRS**0.5
    figure("a step without scalars", 1e3 * plain, "ms")
    added = statistics.median(recording - plain for plain, recording in pairs)
    figure("eight scalars add", 1e6 * added, "us")
    figure("a step with them, times one without", statistics.fmean(ratios), "x")
    figure("standard error of this ratio", error, "x")
