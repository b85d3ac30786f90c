"""Builds run directories of docs/run-directory.md from a few figures. Standard library but for
what renders: a node's Python has no Jinja2, and a stand-in there builds runs."""

import json
from pathlib import Path

from contract.runs import RECORD
from launcher import build_script, build_trainer
from report.figures import RANK_TIMES

# What plan.json says of a program: of our trainer, and of a script of the user's.
TRAINER = {
    "command": "",
    "sample": "image",
    "times_steps": True,
    "adjustable": True,
    "phrases": build_trainer.PHRASES,
}
SCRIPT = {
    "command": "train.py --lr=1",
    "sample": "sample",
    "times_steps": False,
    "adjustable": False,
    "phrases": build_script.PHRASES,
}

GRADIENTS = 4 * 25_557_032  # ResNet-50 in fp32
STEP = {
    "data": 0.002,
    "h2d": 0.001,
    "forward": 0.04,
    "backward": 0.08,
    "sync_exposed": 0.01,
    "optimizer": 0.004,
    "other": 0.001,
}
SAMPLES = 100  # about so many lines a machine has
GUARD = 100.0  # the guard's start on each machine's monotonic clock
START, STOP, EVALUATE, CHECKPOINT = 6.0, 1.0, 2.0, 0.5


DEFAULTS = {
    "batch": 32,
    "by_rank": {},  # other seconds of a step, by rank
    "parts": [],  # images of a step, by rank
    "sync": "allreduce",
    "bucket_mb": 25,
    "model": "resnet50",
    "data": "imagenet",
    "gradient_bytes": GRADIENTS,
    "speed_mbit": 10000,
    "connection": "ssh",
    "checkpoint": CHECKPOINT,
    "disk": {"rkB/s": 900.0, "util": 3.0, "r_await": 0.8},
    "mounts": 0.0,  # MB/s of a share that each machine reads but the one that has it
    "share_host": None,
    "gpu": False,
    "links": {},
    # What a second adds to the counters of a machine, or its state; of one host, by name.
    "machine": {},
    "machines": {},
    "versions": {},
    "options": {},
    "cpu": "Intel(R) Core(TM) i7-8700 CPU @ 3.20GHz",
    # The first steps, exact sums with the same seconds but for those that differ.
    "exact": 0,
    "slow_steps": 0,  # the first, in which forward takes twice as long
    "steps_per_epoch": None,  # where the run was stopped within one
    "exact_step": {},
    "exact_sent": 0.0,
}


class RunBuilder:
    """Each method writes one kind of file; `write` writes them all."""

    def __init__(self, folder, nodes=4, steps=240, epochs=2, step=None, **settings):
        self.__dict__.update(
            DEFAULTS, sent=2 * (nodes - 1) / nodes * settings.get("gradient_bytes", GRADIENTS)
        )
        assert settings.keys() <= self.__dict__.keys(), settings
        self.__dict__.update(settings)
        self.folder = Path(folder)
        self.hosts = [f"node{rank + 1}" for rank in range(nodes)]
        self.epochs, self.per_epoch = epochs, steps // epochs
        self.step = {**STEP, **(step or {})}
        self.attempt = 1
        self.warmup = self.exact / self.per_epoch

    @property
    def loop_seconds(self):
        per_epoch = self.per_epoch * sum(self.step.values()) + EVALUATE + self.checkpoint
        return self.epochs * per_epoch + self.exact * (self.exact_seconds - sum(self.step.values()))

    @property
    def exact_seconds(self):
        return sum({**self.step, **self.exact_step}.values())

    @property
    def wall(self):
        return START + self.loop_seconds + STOP

    def write(self):
        self.write_control()
        for rank, host in enumerate(self.hosts):
            self.write_rank(rank, host)
            self.write_machine(rank, host)
            self.write_exit(rank, host)
        return self.folder

    def plan_nodes(self):
        return [
            {
                "host": host,
                "node_rank": rank,
                "ranks": [rank],
                "connection": self.connection,
                "address": f"192.168.56.{111 + rank}",
                "port": 22,
                "user": "tandem",
                "interface": "eth0",
                "argv": ["python", "-m", "torch.distributed.launch"],
                "env": {"OMP_NUM_THREADS": "1"},
                "cwd": "tandem/code",
                "output": "tandem/runs/x",
                "versions": {"python": "3.11.2", "torch": "2.15.0", "torchvision": "0.29.2"},
            }
            for rank, host in enumerate(self.hosts)
        ]

    def write_control(self, **changes):
        self.dump(
            "plan.json",
            {
                "run": self.folder.name,
                "created_unix": 1.7e9,
                "tandem": "0.1.0",
                "data": self.data,
                "world_size": len(self.hosts),
                "master_addr": "192.168.56.111",
                "master_port": 29500,
                "code_sha256": "0" * 64,
                "git_revision": None,
                "git_diff": "",
                "nodes": self.plan_nodes(),
                "measured": None,
                "program": TRAINER,
                "check": [],
                "sent": [],
            },
        )
        entry = {
            "attempt": 1,
            "nodes": self.hosts,
            "ranks": {host: [rank] for rank, host in enumerate(self.hosts)},
            "decided": None,
            "code_sha256": "0" * 64,
            "world_size": len(self.hosts),
            "master_port": 29500,
            "started_unix": 1.7e9,
            "wall_seconds": self.wall,
            "reason": "first attempt",
            "status": "finished",
            "resumed_samples": 0,
            "first_cause": None,
            "to_resume": None,
            "silent_ranks": [],
            "went_on_from": None,
        }
        document = {"status": "finished", "attempts": [{**entry, **changes}]}
        document["status"] = document["attempts"][0]["status"]
        self.dump("attempts.json", document)

    def start_line(self, rank, host):
        world = len(self.hosts)
        return {
            "kind": "start",
            "record": RECORD,
            "attempt": self.attempt,
            "mono_process": GUARD,
            "mono": GUARD + START,
            "unix": 1.7e9,
            "host": host,
            "rank": rank,
            "local_rank": 0,
            "node_rank": rank,
            "world_size": world,
            "pid": 1000 + rank,
            "python": "3.11.2",
            "torch": "2.15.0",
            "device": "cpu",
            "instructions": {"aten": "AVX2", "onednn_limit": None},
            "versions": {"torchvision": "0.29.2", "kernel": "6.1.0", **self.versions},
            "cpu": self.cpu,
            "cores": 8,
            "decided": {"precision": "fp32", "sync": self.sync, "balance": {}},
            "options": {"sync_bn": False, "step_epochs": [30, 60], "output": host, **self.options},
            "workers": 4,
            "model": self.model,
            "parameters": self.gradient_bytes // 4,
            "gradient_bytes": self.gradient_bytes,
            "bucket_mb": self.bucket_mb,
            "flops_per_image": None,
            "global_batch": self.batch * world,
            "rank_batch": self.batch,
            "accumulate": 1,
            "train_images": self.per_epoch * self.batch * world,
            "eval_images": 1000,
            "epochs": self.epochs,
            "steps_per_epoch": self.steps_per_epoch or self.per_epoch,
            "warmup": self.warmup,
            "precision": "fp32",
            "sync": self.sync,
            "image_size": 224,
            "resumed_samples": 0,
        }

    def write_rank(self, rank, host, steps=None, end=True):
        """`steps` cuts the file after that many steps; without `end` the rank died."""
        seconds = {**self.step, **self.by_rank.get(rank, {})}
        lines, step = [self.start_line(rank, host)], 0
        for epoch in range(self.epochs):
            for _ in range(self.per_epoch):
                step += 1
                samples = self.parts[rank] if self.parts else self.batch
                line = {"kind": "step", "step": step, "steps": 1, "epoch": epoch}
                lines.append({**line, "samples": samples, "seconds": seconds})
                if step <= self.slow_steps:
                    lines[-1]["seconds"] = {**seconds, "forward": 2 * seconds["forward"]}
                if step <= self.exact:
                    lines[-1].update(exact=True, seconds={**seconds, **self.exact_step})
                lines[-1]["longest"] = sum(lines[-1]["seconds"].values())
            lines += [self.evaluate_line(epoch), self.checkpoint_line(step)]
        if steps:
            lines = lines[: 1 + steps]
        if end:
            line = {"kind": "end", "status": "finished", "seconds": {}}
            mono = GUARD + START + self.loop_seconds
            lines.append({**line, "mono": mono, "peak_memory_bytes": 10**9, "bad_images": 0})
        self.append(f"nodes/{host}/rank{rank}.{self.attempt}.steps.jsonl", lines)

    def evaluate_line(self, epoch):
        return {
            "kind": "evaluate",
            "train_loss": 1.0,
            "train_top1": 0.625,
            "epoch": epoch,
            "samples": 1000,
            "top1": 0.5 + 0.4 * (epoch + 1) / self.epochs,
            "top5": 0.99,
            "loss": 0.5,
            "seconds": {"evaluate": EVALUATE},
        }

    def checkpoint_line(self, step):
        return {
            "kind": "checkpoint",
            "step": step,
            "seconds": {"checkpoint": self.checkpoint},
            "bytes": 2 * self.gradient_bytes,
            "file": f"step-{step:08d}.pt",
        }

    def machine_file(self, host):
        return f"nodes/{host}/machine.{self.attempt}.jsonl"

    def write_exit(self, rank, host, **changes):
        entry = {
            "kind": "exit",
            "mono_start": GUARD,
            "mono_end": GUARD + self.wall,
            "exit_code": 0,
            "signal": None,
            "workers": {str(rank): {"exit_code": 0, "signal": None, "exception": None}},
            "peak_memory_bytes": {str(rank): 2e9},
        }
        self.append(self.machine_file(host), [{**entry, **changes}])

    def disks(self):
        usual = {"r/s": 10.0, "w/s": 2.0, "wkB/s": 40.0, "w_await": 1.0, "aqu-sz": 0.1}
        return {"sda": {**usual, **self.disk}}

    def interface(self, rank, second):
        """The counters of a network interface that sends evenly while the loop runs."""
        steps, warm = self.epochs * self.per_epoch, self.exact * self.exact_seconds
        rate = self.sent * (steps - self.exact) / (self.loop_seconds - warm)
        exact_rate = self.exact_sent * self.exact / warm if warm else 0.0
        shared = len(self.hosts) if self.connection == "local" else 1
        since = min(max(0.0, second - START), self.loop_seconds)
        moved = int(shared * (exact_rate * min(since, warm) + rate * max(0.0, since - warm)))
        return {
            "interface": "eth0",
            "rx_bytes": moved,
            "tx_bytes": moved,
            "rx_dropped": 0,
            "tx_dropped": 0,
            "tcp_retransmits": second,
            "speed_mbit": self.speed_mbit,
            "peers": self.peers(rank, since),
        }

    def peers(self, rank, since):
        """What this machine sent to the next one of the ring; `links`: Mbit/s of a host's link."""
        after = (rank + 1) % len(self.hosts)
        ends = (self.hosts[rank], self.hosts[after])
        sent = self.sent * self.per_epoch * self.epochs * since / self.loop_seconds
        rate = min(self.links.get(host, 940) for host in ends) * 1e6 / 8
        own, peer = (f"192.168.56.{111 + place}" for place in (rank, after))
        return {peer: {"from": own, "sent": int(sent), "busy": sent / rate}}

    def write_machine(self, rank, host):
        """Every second the same: four of eight processors busy, three of them with this rank."""
        usual = {"busy": 4.0, "ran": 3.0, "waited": 0.1, "in": 0.0, "out": 0.0, "pressure": 0.0}
        usual |= {"available": 20 << 30, "loaders": 0.0, "loaders_busy": 0.0}
        of = {**usual, **self.machine, **self.machines.get(host, {})}
        gpu = {"index": 0, "utilization": 100, "memory_used": 9 * 10**9, "temperature": 71}
        gpu |= {"power": 180.0, "clock_sm": 1770}
        lines = []
        # A real recorder writes each second; of counters that grow evenly a few lines say the same.
        for second in range(0, int(self.wall) + 1, max(1, int(self.wall) // SAMPLES)):
            line = {
                "kind": "sample",
                "mono": GUARD + second,
                "unix": 1.7e9 + second,
                "cores": 8,
                "cpu_busy": of["busy"] * second,
                "cpu_iowait": 0.0,
                "cpu_steal": 0.0,
                "memory_total": 32 << 30,
                "memory_available": of["available"],
                "swap_total": 8 << 30,
                "swap_free": 4 << 30,
                "swapped_in": int(of["in"] * second),
                "swapped_out": int(of["out"] * second),
                "pressure_cpu": 0.2 * second,
                "pressure_io": 0.0,
                "ranks": {
                    str(rank): {
                        **{name: of[name] * second for name in RANK_TIMES},
                        "state": "R",
                    }
                },
                "card": self.interface(rank, second),
                "disks": self.disks(),
            }
            if of["pressure"] is not None:
                line["pressure_memory"] = of["pressure"] * second
            if self.gpu:
                line["gpus"] = [{**gpu, "mono": GUARD + second}]
            if self.mounts and host != self.share_host:
                read = int(self.mounts * 1e6 * second)
                line["mounts"] = {"/srv/tandem/data": {"type": "nfs4", "read_bytes": read}}
            lines.append(line)
        self.append(self.machine_file(host), lines)

    def dump(self, name, value):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))

    def append(self, name, lines):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


STRAGGLER = {
    "step": {"sync_exposed": 0.16},
    "by_rank": {2: {"backward": 0.23, "sync_exposed": 0.01}},
}
# One setting per value of `bottleneck`: what the run would have measured.
BOTTLENECKS = {
    "network": {"step": {"sync_exposed": 1.2}, "speed_mbit": 1000},
    "slow_link": {
        "steps": 40,
        "step": {"sync_exposed": 12.0},
        "speed_mbit": 1000,
        "links": {"node3": 95},
    },
    "compute": {},
    "data_disk": {
        "step": {"data": 0.3},
        "disk": {"rkB/s": 12000.0, "util": 97.0, "r_await": 11.0},
    },
    "data_share": {"step": {"data": 0.3}, "mounts": 9.0},
    "data_decode": {"step": {"data": 0.3}},
    "h2d": {"step": {"h2d": 0.2}},
    "straggler": STRAGGLER,
    "cpu_contention": {
        **STRAGGLER,
        "machines": {"node3": {"busy": 7.9, "ran": 2.0, "waited": 2.5}},
    },
    "memory_pressure": {
        **STRAGGLER,
        "machines": {
            "node3": {"in": 6e6, "out": 7e6, "pressure": 0.4, "available": 200 << 20},
        },
    },
    "checkpoint": {"checkpoint": 12.0},
    "none": {"step": {"data": 0.05, "h2d": 0.05, "sync_exposed": 0.05, "other": 0.05}},
}

# Four machines on 1 Gbit/s: with ef:3 a step waits 5 ms, and 1.2 s where it sums exactly.
WARMED = {
    "sync": "ef:3",
    "bucket_mb": 8,
    "speed_mbit": 1000,
    "step": {"sync_exposed": 0.005},
    "exact_step": {"sync_exposed": 1.2},
    "sent": 8e6,
    "exact_sent": 153.4e6,
}


def change(path, **values):
    """Other fields of a JSON document."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_lines(path, change):
    """Each line of a JSON Lines file as `change` returns it, or leaves it."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(change(line) or line) + "\n" for line in lines))


def text_of(analysis):
    from report import run_view, text

    return text.render_text(run_view.view_of(analysis))


def page_of(analysis):
    from report import page, run_view

    return page.render_page(run_view.view_of(analysis))
