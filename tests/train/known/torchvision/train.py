"""In the style of torchvision's references/classification/train.py: an ImageFolder, a model of
torchvision, and utils.py beside the script."""

import argparse
import os
import signal
from pathlib import Path

import torch
import torchvision
import utils
from torch import nn
from torchvision import transforms

parser = argparse.ArgumentParser()
parser.add_argument("--data-path", required=True)
parser.add_argument("--model", default="resnet18")
parser.add_argument("--device", default="cuda")
parser.add_argument("-b", "--batch-size", type=int, default=8)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("-j", "--workers", type=int, default=1)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--output-dir", default=".")
parser.add_argument("--resume", default="")
parser.add_argument("--crash-at", type=int)
parser.add_argument("--sync-bn", action="store_true")
parser.add_argument("--dist-url", default="env://")
args = parser.parse_args()


def main():
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    utils.init_distributed_mode(args)
    print(args)
    crop = transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])
    dataset = torchvision.datasets.ImageFolder(f"{args.data_path}/train", crop)
    sampler = torch.utils.data.RandomSampler(dataset)
    if args.distributed:
        sampler = torch.utils.data.distributed.DistributedSampler(dataset)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=args.batch_size, sampler=sampler, num_workers=args.workers
    )
    model = torchvision.models.get_model(args.model, num_classes=len(dataset.classes))
    model.to(args.device)
    if args.distributed and args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model_without_ddp = model
    if args.distributed:
        gpus = [args.gpu] if args.device == "cuda" else None
        model = nn.parallel.DistributedDataParallel(model, device_ids=gpus)
        model_without_ddp = model.module
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    start_epoch = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu", weights_only=False)
        model_without_ddp.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start_epoch = checkpoint["epoch"] + 1
    for epoch in range(start_epoch, args.epochs):
        if args.distributed:
            sampler.set_epoch(epoch)
        if epoch == args.crash_at:
            os.kill(os.getpid(), signal.SIGKILL)
        for image, target in loader:
            loss = nn.functional.cross_entropy(model(image.to(args.device)), target.to(args.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: world size {args.world_size}, loss {loss.item():.4f}", flush=True)
        state = {"model": model_without_ddp.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"epoch": epoch, "args": args}
        utils.save_on_master(state, f"{args.output_dir}/model_{epoch}.pth")
        utils.save_on_master(state, f"{args.output_dir}/checkpoint.pth")


if __name__ == "__main__":
    main()
