"""mixup and cutmix."""

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from contract.options import Options
from trainer.data.batch import Mix, build_loss, mix_images, plan_mix


def test_the_plan_depends_on_seed_step_and_rank_alone():
    options = Options(mixup=0.2, cutmix=1.0)
    plans = {
        (step, rank): plan_mix(options, 32, step, rank) for step in range(9) for rank in (0, 1)
    }
    assert len(set(plans.values())) == 18
    assert plans[3, 1] == plan_mix(options, 32, 3, 1)
    assert plans[3, 1] != plan_mix(Options(mixup=0.2, cutmix=1.0, seed=1), 32, 3, 1)
    kinds = [plan.box is None for plan in plans.values()]
    assert 3 <= sum(kinds) <= 15


def test_cutmix_shares_are_the_areas():
    for step in range(200):
        plan = plan_mix(Options(cutmix=1.0), 32, step, 0)
        marks = torch.stack([torch.zeros(3, 32, 32), torch.ones(3, 32, 32)]).double()
        own = mix_images(marks, marks.roll(1, 0), plan)
        assert own[0].mean().item() == pytest.approx(1 - plan.weight)
        assert own[1].mean().item() == pytest.approx(plan.weight)


def test_mixup_blends_with_the_next_and_leaves_its_input():
    images = torch.rand(3, 3, 4, 4, dtype=torch.float64)
    before = images.clone()
    mixed = mix_images(images, images.roll(1, 0), Mix(0.7))
    torch.testing.assert_close(mixed[1], 0.7 * images[1] + 0.3 * images[0])
    mix_images(images, images.roll(1, 0), Mix(0.5, (0, 2, 0, 2)))
    assert torch.equal(images, before)


def test_the_loss_is_that_of_soft_targets():
    outputs, targets = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0])
    soft = 0.7 * torch.eye(4)[targets] + 0.3 * torch.eye(4)[targets.roll(1, 0)]
    ours = build_loss(Options())(outputs, (targets, targets.roll(1, 0)), Mix(0.7))
    torch.testing.assert_close(ours, cross_entropy(outputs, soft.double(), reduction="sum"))


@pytest.mark.parametrize(
    ("threshold", "mix"), [(0.0, None), (0.0, Mix(0.7)), (0.2, Mix(0.7)), (0.2, Mix(0.9))]
)
def test_binary_cross_entropy_is_a_yes_or_no_to_each_class(threshold, mix):
    """As timm's, with its soft targets."""
    outputs, targets = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0])
    weight = 1.0 if mix is None else mix.weight
    soft = weight * torch.eye(4)[targets] + (1 - weight) * torch.eye(4)[targets.roll(1, 0)]
    soft = (0.9 * soft + 0.1 / 4).double()
    if threshold:
        assert (soft > threshold).sum() == (9 if weight == 0.7 else 5)
        soft = (soft > threshold).double()
    options = Options(loss="bce", bce_threshold=threshold, label_smoothing=0.1)
    ours = build_loss(options)(outputs, (targets, targets.roll(1, 0)), mix)
    mean = binary_cross_entropy_with_logits(outputs, soft, reduction="mean")
    torch.testing.assert_close(ours / 5, mean)
