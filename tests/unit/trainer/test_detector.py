"""docs/detector.md: a run's backbone in a detector of torchvision."""

import torch
from torchvision.models import resnet18
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.backbone_utils import BackboneWithFPN, resnet_fpn_backbone

from examples.own_backbone import small_resnet18
from tandem.pickles import load_tensors
from tests.trainer_ranks import run_ranks, snapshot, trainer
from trainer.export import main as export
from trainer.writer import Writer


def exported(run, file):
    assert export([str(run), "PART=backbone", f"TO={file}"]) == 0
    with file.open("rb") as content:
        return load_tensors(content)


def test_a_run_s_own_backbone_is_one_of_a_detector(images, tmp_path):
    argv = ["--data", images, "--output", tmp_path, "--epochs", 1, "--workers", 0]
    model = ["--model", "examples.own_backbone:small_resnet18", "--per_node_batch_size", 10]
    assert run_ranks([1], trainer, *argv, *model) == [0]
    backbone = small_resnet18()
    backbone.load_state_dict(exported(tmp_path, tmp_path / "backbone.pt"))
    pyramid = BackboneWithFPN(
        backbone, {"4": "0", "5": "1", "6": "2", "7": "3"}, [64, 128, 256, 512], 16
    )
    with next(tmp_path.glob("checkpoints/*/best.pt")).open("rb") as file:
        kept = load_tensors(file)["model"]
    assert all(
        torch.equal(value, kept[f"backbone.{key}"]) for key, value in backbone.state_dict().items()
    )
    detector = FasterRCNN(pyramid, num_classes=3, min_size=64, max_size=64)
    target = {"boxes": torch.tensor([[4.0, 4.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
    losses = detector([torch.rand(3, 64, 64)], [target])
    sum(losses.values()).backward()
    assert all(loss.isfinite() for loss in losses.values())
    assert pyramid.body["0"].weight.grad.abs().sum() > 0


def test_a_resnet_of_torchvision_fits_its_own_detectors(tmp_path):
    state = snapshot(model=resnet18(num_classes=7).state_dict(), classes=["x"] * 7)
    writer = Writer(tmp_path / "checkpoints/node1", keep=1)
    writer.save(state, best=True)
    writer.finish()
    tensors = exported(tmp_path, tmp_path / "backbone.pt")
    body = resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5).body
    body.load_state_dict(tensors)
    assert torch.equal(body.layer4[1].conv2.weight, state["model"]["layer4.1.conv2.weight"])


def test_a_model_without_a_classifier_has_no_backbone(tmp_path, capsys):
    writer = Writer(tmp_path / "checkpoints/node1", keep=1)
    writer.save(snapshot(model={"x": torch.ones(4, 4)}, classes=["x"] * 7), best=False)
    writer.finish()
    assert export([str(tmp_path), "PART=backbone", f"TO={tmp_path}/backbone.pt"]) == 2
    assert "7 outputs" in capsys.readouterr().err and not list(tmp_path.glob("*.pt"))
