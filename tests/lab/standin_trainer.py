"""Stands in for the trainer without torch: same options, files, exit codes, order of images.

All ranks do each step together by way of rank 0, as a collective would: who loses a peer fails,
who waits for a frozen one waits for ever. A step takes $STEP_SECONDS, in later attempts a third.
Standard library only.
"""

import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
import types

IMAGES, RANK_BATCH = 97, 4
if "--check" in sys.argv:  # before any rank starts
    sys.exit()
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
HOST, ATTEMPT = os.environ["TANDEM_NODE"], int(os.environ["TANDEM_ATTEMPT"])


class Group:
    """The ranks, joined at the master's address: rank 0 answers when all have asked."""

    def __init__(self):
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if RANK:
            self.peers = [connect(place)]
        else:
            with socket.socket() as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind(place)
                server.listen(WORLD)
                self.peers = [server.accept()[0] for _ in range(WORLD - 1)]
        self.files = [peer.makefile("rw") for peer in self.peers]

    def gather(self, value):
        """Returns the values of all ranks, on every rank."""
        if RANK:
            self.send(self.files[0], value)
            return self.receive(self.files[0])
        values = [value] + [self.receive(file) for file in self.files]
        for file in self.files:
            self.send(file, values)
        return values

    @staticmethod
    def send(file, value):
        file.write(json.dumps(value) + "\n")
        file.flush()

    @staticmethod
    def receive(file):
        line = file.readline()
        if not line:
            raise RuntimeError("Connection closed by peer")
        return json.loads(line)


def connect(place):
    """Rank 0 may be later than this one."""
    while True:
        try:
            return socket.create_connection(place)
        except ConnectionRefusedError:
            time.sleep(0.05)


class Files:
    """What the trainer writes into the run folder (docs/run-directory.md)."""

    def __init__(self, output):
        output = pathlib.Path(output)
        self.checkpoints = output / "checkpoints" / HOST
        (output / "samples").mkdir(parents=True, exist_ok=True)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self.samples = (output / "samples" / f"rank{RANK}.{ATTEMPT}.csv").open("w")
        self.samples.write("epoch,position,index\n")
        self.steps = (output / "nodes" / HOST / f"rank{RANK}.{ATTEMPT}.steps.jsonl").open("a")

    def line(self, kind, **fields):
        self.steps.write(json.dumps(dict({"kind": kind, "attempt": ATTEMPT}, **fields)) + "\n")
        self.steps.flush()

    def log_samples(self, epoch, begin, indices):
        rows = [f"{epoch},{begin + i},{n}\n" for i, n in enumerate(indices)]
        self.samples.write("".join(rows))
        self.samples.flush()

    def save(self, at):
        path = self.checkpoints / "step-{}.pt".format(at["step"])
        fresh = path.with_name(".fresh")
        # Large enough to notice a full disk.
        fresh.write_text(json.dumps(at) + " " * (1 << 20))
        fresh.replace(path)

    def newest(self):
        """The position in the newest checkpoint of this machine, or null."""
        found = [json.loads(path.read_text()) for path in self.checkpoints.glob("step-*.pt")]
        return max(found, key=lambda at: at["step"]) if found else None


def train(options, group, files):
    """Train from the newest checkpoint that any machine holds to the last epoch."""
    held = [at for at in group.gather(files.newest()) if at] if options.resume == "auto" else []
    at = max(held, key=samples) if held else {"epoch": 0, "sample": 0, "step": 0}
    files.line(
        "start", mono=time.monotonic(), rank=RANK, host=HOST, world_size=WORLD,
        resumed_samples=samples(at), train_images=IMAGES, epochs=options.epochs,
        steps_per_epoch=-(-IMAGES // (WORLD * RANK_BATCH)), global_batch=WORLD * RANK_BATCH,
        mono_process=float(os.environ.get("TANDEM_GUARD_MONO", time.monotonic())),
    )  # fmt: skip
    print("training", flush=True)
    while at["epoch"] < options.epochs:
        step(at, group, files)
        if at["sample"] == IMAGES:
            at.update(epoch=at["epoch"] + 1, sample=0)
        if at["step"] % options.checkpoint_every == 0 or at["sample"] == 0:
            group.gather("saving")  # whoever saves knows that all have done and logged this step
            files.save(at)
    files.line("end", mono=time.monotonic(), status="finished", seconds={})


def samples(at):
    return at["epoch"] * IMAGES + at["sample"]


def step(at, group, files):
    """One step of all ranks. Leaves together when one of them was asked to stop."""
    if any(group.gather(STOP)):
        files.save(at)
        print("saved", flush=True)
        sys.exit(75)
    began = time.monotonic()
    time.sleep(float(os.environ["STEP_SECONDS"]) / (1 if ATTEMPT == 1 else 3))
    computed = time.monotonic()
    group.gather("gradients")
    exchanged = time.monotonic()
    count = min(WORLD * RANK_BATCH, IMAGES - at["sample"])
    sizes = [count // WORLD + (rank < count % WORLD) for rank in range(WORLD)]
    begin = at["sample"] + sum(sizes[:RANK])
    order = random.Random(at["epoch"]).sample(range(IMAGES), IMAGES)
    files.log_samples(at["epoch"], begin, order[begin : begin + sizes[RANK]])
    epoch = at["epoch"]
    at["sample"] += count
    at["step"] += 1
    spent = {"backward": computed - began, "sync_exposed": exchanged - computed}
    LAST.append(time.monotonic())
    spent["other"] = LAST[-1] - (LAST.pop(0) if len(LAST) > 1 else began) - sum(spent.values())
    files.line("step", step=at["step"], epoch=epoch, samples=sizes[RANK], seconds=spent)
    print("step", at["step"], flush=True)


STOP, LAST = [], []  # signals; when the last step ended
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: STOP.append(1))
    # A loader with a session of its own, as some make: the run's end must find it, too.
    loader = subprocess.Popen(["sleep", "7777"], start_new_session=True)
    defaults = {"resume": "none", "epochs": 1, "checkpoint_every": 5}
    config, *words = sys.argv[sys.argv.index("--config") + 1 :]
    asked = types.SimpleNamespace(**{**defaults, **json.loads(config)})
    if words[:1] == ["--resume"]:
        asked.resume = words[1]
    train(asked, Group(), Files(os.environ["TANDEM_OUTPUT"]))
    loader.kill()
