"""Parameter groups, learning rates, and the average of weights."""

import pytest
import torch
from torch import nn

from contract.options import OPTIMIZERS, Options
from trainer.ema import Ema
from trainer.models import build
from trainer.optim import build_optimizer, learning_rate, parameter_groups


def test_only_weights_decay_whatever_the_layers_are_called():
    model = build("resnet18", 10, 32)
    decaying, others = parameter_groups(model, Options(weight_decay=0.3, norm_weight_decay=0.1))
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.3, 0.1)
    chosen = {id(parameter) for parameter in decaying["params"]}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            weight = isinstance(module, (nn.Conv2d, nn.Linear)) and name == "weight"
            assert (id(parameter) in chosen) == weight
    # This is a normalisation without "bn" in its name, and that one of matrices.
    assert id(model.layer2[0].downsample[1].weight) not in chosen
    (group,) = parameter_groups(nn.LayerNorm((4, 4)), Options(norm_weight_decay=0.1))
    assert group["weight_decay"] == 0.1


def test_all_parameters_are_in_one_group_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model[2].bias.requires_grad = False
    groups = parameter_groups(model, Options())
    found = [id(parameter) for group in groups for parameter in group["params"]]
    wanted = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert len(found) == len(set(found)) == 4
    assert set(found) == wanted


def test_each_optimizer_is_made_and_counted_by_its_row():
    for name, row in OPTIMIZERS.items():
        model, options = nn.Linear(2, 2), Options(optimizer=name)
        made = build_optimizer(model, options, 64)
        model(torch.ones(1, 2)).sum().backward()
        made.step()
        kept = made.state[model.weight]
        large = {key for key, value in kept.items() if getattr(value, "shape", ()) == (2, 2)}
        assert (type(made).__name__, large) == (row.maker.split(":")[1], set(row.keeps(options)))
        assert ("step" in kept) == row.counts
    sgd = build_optimizer(model, Options(momentum=0.8, lr=0.4), 64)
    assert (sgd.defaults["momentum"], sgd.defaults["lr"]) == (0.8, 0.4)
    adamw = build_optimizer(model, Options(optimizer="adamw", beta2=0.95), 64)
    assert adamw.defaults["betas"] == (0.9, 0.95)


def rates(steps_per_epoch=10, global_batch=128, **settings):
    options = Options(**{"epochs": 10, "lr": 0.1, "warmup_epochs": 2, **settings})
    return [
        learning_rate(options, step, steps_per_epoch, global_batch)
        for step in range(options.epochs * steps_per_epoch)
    ]


def test_warm_up_is_linear_and_the_cosine_ends_at_its_minimum():
    found = rates(warmup_factor=0.1, min_lr=0.001)
    assert found[0] == pytest.approx(0.01)
    assert found[10] == pytest.approx(0.055)
    assert found[20] == pytest.approx(0.1)
    assert found[60] == pytest.approx((0.1 + 0.001) / 2)
    assert found[-1] == pytest.approx(0.001, rel=0.05)
    assert found[20:] == sorted(found[20:], reverse=True)


def test_the_rate_scales_with_the_global_batch_where_asked():
    assert max(rates(lr_batch=128, global_batch=256)) == pytest.approx(0.2)
    assert max(rates(lr_batch=0, global_batch=256)) == pytest.approx(0.1)
    assert max(rates(epochs=1, warmup_epochs=5)) < 0.1  # a warm-up longer than the run


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()


def move(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter))
    model(torch.rand(4, 3, dtype=torch.float64))


def test_the_average_is_the_formulas(model):
    ema = Ema(model.state_dict(), decay=0.3)
    wanted = {key: value.clone() for key, value in model.state_dict().items()}
    for n in range(1, 8):
        move(model)
        ema.update(model.state_dict())
        decay = min(0.3, (1 + n) / (10 + n))
        for key, value in model.state_dict().items():
            counts = not value.is_floating_point()
            wanted[key] = value.clone() if counts else decay * wanted[key] + (1 - decay) * value
    assert wanted["1.num_batches_tracked"] == 7
    for key, value in ema.state_dict()["average"].items():
        torch.testing.assert_close(value, wanted[key], rtol=1e-12, atol=0)


def test_the_model_is_its_own_again_after_the_average_was_applied(model):
    ema = Ema(model.state_dict(), decay=0.9)
    move(model)
    ema.update(model.state_dict())
    own = {key: value.clone() for key, value in model.state_dict().items()}
    address = model[0].weight.data_ptr()
    with pytest.raises(KeyError), ema.applied(model):
        assert torch.equal(model[0].weight, ema.average["0.weight"])
        assert not torch.equal(model[0].weight, own["0.weight"])
        raise KeyError
    assert model[0].weight.data_ptr() == address
    assert all(torch.equal(value, own[key]) for key, value in model.state_dict().items())
