"""`make plan`: finds the run to start from, prints the predicted table and writes it to a file."""

from __future__ import annotations

import argparse
import json
import re
import time
from dataclasses import asdict
from pathlib import Path

from launcher import defaults
from report import formulas
from report.errors import Parser, ReportError
from report.files import Entry, number
from report.layout import table, wrap
from report.measure import Step, measure_step
from report.network import network_use
from report.paper import BATCH, SOURCE, paper_step
from report.predict import Basis, Row, conclusion, predict
from report.progress import learning_curve
from report.records import read_run
from report.units import link, seconds, size, three_digits
from report.writing import write
from trainer import prices, strategies
from trainer.errors import UserError
from trainer.strategies import Strategy

DEFAULT_LINK = 1000.0  # Mbit/s: what the cards of ordinary PCs do


def plan_main(argv: list[str]) -> int:
    """Prints the table and writes runs/plan-<model>-<N>n.json."""
    parser = Parser(
        prog="python -m report plan", description="Predicts the next run before it is started."
    )
    parser.add_argument("--nodes", type=int, default=4, help="up to how many machines (4)")
    parser.add_argument(
        "--model", default=defaults.MODEL, help=f"as in make train ({defaults.MODEL})"
    )
    parser.add_argument("--gpu", help="predict on paper, by published speeds of it: 2080ti, v100")
    parser.add_argument("--image-size", type=int, help="only from a run at this size")
    parser.add_argument(
        "--link", help="speed of the network, like 1gbit or 2.5gbit (as measured, else 1gbit)"
    )
    parser.add_argument("--sync", default=strategies.EXACT, help="as in make train (allreduce)")
    parser.add_argument("--run", type=Path, help="the run to start from (the newest of that model)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where runs are (runs)")
    options = parser.parse_args(argv)
    if options.nodes < 1:
        raise ReportError(f"--nodes {options.nodes}: must be at least 1.")
    asked = asked_strategy(options.sync)
    basis = find_basis(options) if options.gpu is None else on_paper(options)
    rate, where = usable_rate(basis.step, parse_link(options.link) if options.link else None)
    rows = predict(basis, options.nodes, rate, asked)
    if options.gpu is not None:
        print("\n".join(render(basis, f"{where}: {size(rate)} a second get through", rows)))
        print("\n".join(wrap(f"Speeds published at {SOURCE}, for 1000 classes.", "")))
        return 0
    path = options.runs / f"plan-{options.model}-{options.nodes}n.json"
    write_plan(path, options.nodes, asked, basis, rate, rows)
    print("\n".join(render(basis, f"{where}: {size(rate)} a second get through", rows)))
    print("\n".join(wrap(f"Written to {path}; the next such run's report shows it.", "")))
    return 0


def on_paper(options: argparse.Namespace) -> Basis:
    """A machine that nobody measured. Raises ReportError where no published figure is known."""
    if options.run or options.image_size:
        raise ReportError("--gpu is a prediction on paper: leave --run and --image-size out.")
    step = paper_step(options.gpu, options.model)
    return Basis(f"published figures of {options.gpu}", options.model, 224, BATCH, step, None, 0.0)


def asked_strategy(spec: str) -> Strategy:
    """Raises ReportError for what the trainer would refuse."""
    try:
        return strategies.parse(spec)
    except UserError as error:
        raise ReportError(str(error)) from None


def usable_rate(step: Step, mbit: float | None) -> tuple[float, str]:
    """Bytes per second that gradients get, and in words where that figure is from."""
    if mbit:
        return formulas.goodput(mbit), f"Over a link of {link(mbit)}"
    if step.rate and not step.shared_machine:
        return step.rate, "Over the link as measured in that run"
    return formulas.goodput(DEFAULT_LINK), f"Over a link of {link(DEFAULT_LINK)} (--link)"


def parse_link(text: str) -> float:
    """`1gbit`, `2.5gbit`, `100mbit` in Mbit/s."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(g|m)(?:bit)?(?:/s)?", text.strip().lower())
    if not match or float(match.group(1)) <= 0:
        raise ReportError(f"--link {text}: write a speed like 1gbit, 2.5gbit or 100mbit.")
    return float(match.group(1)) * (1000 if match.group(2) == "g" else 1)


def find_basis(options: argparse.Namespace) -> Basis:
    """The given run, else the newest of the model that measured a step."""
    if options.run:
        basis = read_basis(options.run)
        if basis is None:
            raise ReportError(f"{options.run} has no measured step: choose a run that trained.")
        return basis
    name = re.escape(defaults.short(options.model))
    pattern = re.compile(rf"\d{{8}}T\d{{6}}Z-{name}-\d+n")
    folders = sorted(options.runs.iterdir(), reverse=True) if options.runs.is_dir() else []
    for folder in folders:
        if pattern.fullmatch(folder.name) and folder.is_dir():
            basis = read_basis(folder)
            if (
                basis
                and basis.model == options.model
                and options.image_size in (None, basis.image_size)
            ):
                return basis
    at = f" at {options.image_size} pixels" if options.image_size else ""
    raise ReportError(
        f"No run of {options.model}{at} was measured yet, and a prediction needs its "
        f"computing time: run `make train NODES=1 MODEL={options.model} EPOCHS=1 DATA=...` with "
        "your images, or on this machine alone "
        f"`make demo NODES=1 MODEL={options.model} EPOCHS=1`, then `make plan` again."
    )


def read_basis(folder: Path) -> Basis | None:
    """None when the run has no measured step or its gradients' size is unknown."""
    run = read_run(folder)
    step = measure_step(run, network_use(run))
    if step is None or not step.payload.bytes:
        return None
    records = [r for r in run.ranks if r.attempt == step.attempt]
    start: Entry = next((record.start for record in records if record.start), {})
    images = number(start.get("train_images"))
    size_ = number(start.get("image_size"))
    evaluated = max(1, len(learning_curve(run)))
    spent = sum(record.seconds.get("evaluate", 0.0) for record in records) / len(records)
    return Basis(
        run=folder.resolve().name,
        model=str(start.get("model", "unknown")),
        image_size=int(size_) if size_ else None,
        batch=node_batch(start, step),
        step=step,
        train_images=int(images) if images else None,
        evaluate_seconds=spent / evaluated,
    )


def node_batch(start: Entry, step: Step) -> int:
    """BATCH of that run: its global batch, which its machines shared evenly."""
    whole = number(start.get("global_batch")) or step.images
    return round(whole / step.nodes)


def write_plan(
    path: Path, nodes: int, strategy: Strategy, basis: Basis, rate: float, rows: list[Row]
) -> None:
    """`images_per_second` is that of the asked number of nodes and strategy."""
    asked = next(
        (row for row in rows if row.nodes == nodes and (nodes == 1 or row.sync == strategy.spec)),
        None,
    )
    if asked is None:
        raise ReportError(
            f"{basis.run} does not say what --sync {strategy.spec} would send: train this model "
            "once with this version, or ask for another strategy."
        )
    document = {
        "images_per_second": round(asked.images_per_second, 2),
        "made_unix": time.time(),
        "model": basis.model,
        "nodes": nodes,
        "batch": basis.batch,
        "sync": asked.sync,
        "from_run": basis.run,
        "bytes_per_second": round(rate),
        "rows": [asdict(row) for row in rows],
    }
    write(path, json.dumps(document, indent=1) + "\n")


def render(basis: Basis, speed: str, rows: list[Row]) -> list[str]:
    """The table and what follows from it, in 80 columns."""
    step = basis.step
    at = f" at {basis.image_size} pixels" if basis.image_size else ""
    lines = wrap(
        f"{basis.model}{at}, {basis.batch} images per node and step. In "
        f"{basis.run} a step without waiting for other ranks took {seconds(step.work)}.",
        "",
    )
    if step.shared_machine:
        lines += wrap("There the nodes shared one machine's cores: alone, each is faster.", "")
    alone = rows[0].images_per_second
    heads = ("nodes", "sync", "sent", "a step", "images/s", "of one", "accuracy", "100 epochs")
    cells: list[tuple[str, ...]] = [heads]
    cells += [
        (
            str(row.nodes),
            row.sync if row.nodes > 1 else "-",
            size(row.bytes_sent) if row.nodes > 1 else "-",
            seconds(row.step_seconds),
            three_digits(row.images_per_second),
            f"{row.images_per_second / alone:.2f} x",
            prices.label_of(strategies.parse(row.sync)) if row.nodes > 1 else "-",
            seconds(row.hundred_epochs),
        )
        for row in rows
    ]
    if rows[0].hundred_epochs is None:
        cells = [row[:-1] for row in cells]
    lines += [*wrap(f"{speed}.", ""), "", *table(cells), ""]
    lines += wrap(conclusion(rows), "")
    return [
        *lines,
        *wrap("Slower machines, disks and shares are not predicted: docs/report.md.", ""),
    ]
