"""Carry out `make plan`: find the run or measurement to start from (measurements.py), predict the
table (predict.py), print it and write it to a file."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from contract import runs, strategies, verbs
from contract.command_line import verb_words
from contract.errors import UserError
from contract.options import DEFAULT_MODEL, OPTIMIZERS, options_of
from contract.strategies import Phases, Strategy
from contract.text import link_speed, seconds, size, three_digits
from report import formulas, published_speeds
from report import predict as prediction
from report.cli import write
from report.links import links_table
from report.measurements import Question, basis_on_paper, find_basis
from report.predict import HARMLESS, SHORT, Basis, Row, best, fastest, predict, times_one
from report.text import aligned, printed, wrap

# Short names for the table, which has only 80 columns.
LABELS = {
    "not measured": "-",
    "costs samples": "samples",
    "experimental": "experim.",
    SHORT: "short",
}
DEFAULT_LINK = 1000.0  # Mbit/s of the network cards of ordinary PCs
BETTER_LINK = 2500.0  # Mbit/s of newer ones, with a switch for it
MIN_SWITCH_GAIN = 1.05  # a smaller factor of speed is not worth a new switch

# The options of the command line, by the names that make uses.
ROWS = {name.upper(): row for name, row in options_of(Question).items()}
PLAN = verbs.Verb("predict the next run before it is started", "", " ".join(ROWS), table=ROWS)


def plan_main(argv: list[str]) -> int:
    """Print the table, and write runs/plan-<model>-<N>n.json. Returns 0; raises UserError."""
    options = Question(**verb_words("plan", argv, "python -m report plan", PLAN))
    if not options.model:
        model = published_speeds.MODEL if options.gpu else DEFAULT_MODEL
        options = replace(options, model=model)
    family = OPTIMIZERS[options.optimizer].family
    phases = Phases(options.epochs, options.warmup, family, options.warmup_chosen)
    requested = strategies.parse(options.sync)
    # Published speeds are about a single size of images, and about no run.
    if options.gpu and (options.run or options.image_size):
        raise UserError("--gpu predicts from published speeds: omit --run and --image-size.")
    basis = (
        basis_on_paper(options.gpu, options.model, options.precision)
        if options.gpu
        else find_basis(options)
    )
    mbit = None
    if options.link:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(g|m)(?:bit)?(?:/s)?", options.link.strip().lower())
        if not match or float(match[1]) <= 0:
            raise UserError(
                f"--link {options.link}: write a speed such as 1gbit, 2.5gbit or 100mbit."
            )
        mbit = float(match[1]) * (1000 if match[2] == "g" else 1)
    rates, source = usable_rates(basis, mbit)
    rows = predict(basis, options.nodes, rates, requested, phases)
    rate, row = rates(options.nodes), find_row(rows, options.nodes, requested, basis)
    # The file is only written if the prediction is about the user's own network and machines,
    # because the report of the next run shows it.
    if options.gpu:
        note = advise_switch(basis, rows, mbit or DEFAULT_LINK, requested, phases)
    elif options.link:
        note = (
            "The next run's report does not use this prediction, because LINK is not your network."
        )
    else:
        path = runs.prediction_path(Path(options.runs), options.model, options.nodes)
        text = runs.prediction_text(
            basis.setting,
            options.nodes,
            basis.unix if basis.machines else None,
            [asdict(row) for row in rows],
            images_per_second=round(row.images_per_second, 2),
            sync=row.sync,
            from_run=basis.run,
            bytes_per_second=round(rate),
        )
        write(path, text + "\n")
        note = f"Written to {path}; the report of the next run with these settings shows it."
    shown = rows if options.all else prediction.select_rows(rows, requested)
    # The table of pairs is long, so only a user who asks for details gets it.
    if basis.links and (options.run or options.all):
        print(printed([*links_table(basis.links), ""]))
    speed = f"{source}: a machine sends {size(rate)} per second"
    print(printed(render(basis, speed, rows, shown, phases)))
    reading = prediction.reading_sentence(basis, options.nodes, rates, requested, phases)
    print(printed([*wrap(reading, ""), *wrap(note, "")]))
    return 0


def advise_switch(
    basis: Basis, rows: list[Row], mbit: float, requested: Strategy, phases: Phases
) -> str:
    """Return a sentence on the gain by a switch of BETTER_LINK. `mbit`: the speed of the link."""
    # There is no better switch to recommend, so the user should measure real machines.
    if mbit >= BETTER_LINK:
        return "Nobody has measured such machines: `make plan` without GPU measures yours."
    nodes, faster = rows[-1].nodes, formulas.goodput(BETTER_LINK)
    current = best(rows)
    improved = best(predict(basis, nodes, lambda _: faster, requested, phases))
    if improved.run_images_per_second < MIN_SWITCH_GAIN * current.run_images_per_second:
        return f"A switch with {link_speed(BETTER_LINK)} would hardly be faster."
    return (
        f"With a switch of {link_speed(BETTER_LINK)}: sync {improved.sync} on {improved.nodes}, "
        f"{times_one(improved, rows):.2f} x one machine; {link_speed(mbit)} gives "
        f"{times_one(current, rows):.2f} x. Both use strategies that are exact or labelled safe."
    )


def usable_rates(basis: Basis, mbit: float | None) -> tuple[Callable[[int], float], str]:
    """Return a function from the number of machines to the bytes per second of a link, and words
    for where this rate comes from. `mbit`: the link that the user named, which has precedence."""
    step = basis.step
    if mbit:
        return lambda _: formulas.goodput(mbit), f"Over a link of {link_speed(mbit)}"
    if basis.rates:
        rates = basis.rates
        return lambda nodes: rates[min(nodes, len(rates)) - 1], "With the measured links"
    if step.rate and not step.shared_machine:
        rate = step.rate
        return lambda _: rate, "With the link speed measured in that run"
    return (
        lambda _: formulas.goodput(DEFAULT_LINK),
        f"Over a link of {link_speed(DEFAULT_LINK)} (LINK=...)",
    )


def find_row(rows: list[Row], nodes: int, strategy: Strategy, basis: Basis) -> Row:
    """Return the prediction for this number of machines and strategy. Raises UserError."""
    for row in rows:
        if row.nodes == nodes and (nodes == 1 or row.sync == strategy.spec):
            return row
    raise UserError(
        f"{basis.run} does not contain what --sync {strategy.spec} would send: train this "
        "model once with this version, or type another strategy."
    )


READING = (
    "N: machines; a step, img/s: after the warm-up; x one: times one machine, over a whole run; "
    "accuracy: the strategy's label with the run's optimizer (SGD, or what ARGS='--optimizer ...' "
    "says), or - (not measured), samples (costs samples), experim. (experimental), short (measured "
    "only in longer runs). The best row is exact or safe, at most 5 % slower than the fastest such "
    "row, and among these rows the most exact."
)


def render(
    basis: Basis, speed: str, rows: list[Row], shown: list[Row], phases: Phases
) -> list[str]:
    """Return the lines of the whole output, in 80 columns: the table of the rows `shown`, and the
    conclusions from all `rows`. `speed`: a sentence on the links."""
    pixels = f" at {basis.image_size} pixels" if basis.image_size else ""
    level = f" in {basis.precision}" if basis.precision else ""
    lines = wrap(f"{basis.model}{pixels}{level}, {basis.batch} images per node and step.", "")
    for sentence in basis.about:
        lines += wrap(sentence, "")
    # The marks stand behind the number of machines: `4 *=`. READING and `conclusion` explain them.
    marked = {"*": best(rows), "=": prediction.best_exact(rows)}
    if fastest(rows).label not in HARMLESS:
        marked["+"] = fastest(rows)
    marks = {row: "".join(mark for mark in marked if marked[mark] == row) for row in shown}
    run_heading = f"{phases.epochs:g} epochs"
    heads = ("N", "sync", "sent", "a step", "img/s", "x one", "accuracy", run_heading)
    cells: list[tuple[str, ...]] = [heads]
    cells += [
        (
            f"{row.nodes} {marks[row]}".rstrip(),
            row.sync if row.nodes > 1 else "-",
            size(row.bytes_sent) if row.nodes > 1 else "-",
            seconds(row.step_seconds),
            three_digits(row.images_per_second),
            f"{times_one(row, rows):.2f}",
            LABELS.get(row.label, row.label),
            seconds(row.run_seconds),
        )
        for row in shown
    ]
    # If the images of an epoch are unknown, the last column has no figures.
    if rows[0].run_seconds is None:
        cells = [row[:-1] for row in cells]
    lines += [*wrap(f"{speed}.", ""), "", *aligned(cells), ""]
    if len(shown) < len(rows):
        lines += wrap(f"ALL=1 shows {len(rows) - len(shown)} more rows.", "")
    # The strategies that begin with exact sums.
    warming = [row.sync for row in shown if phases.exact_share(strategies.parse(row.sync))]
    if warming:
        names = " or ".join(dict.fromkeys(spec.split(":")[0] for spec in warming))
        warm_up = (
            f"The speeds are for {phases.epochs:g} epochs (EPOCHS=). During the warm-up "
            f"(--sync_warmup {phases.warmup:g}), {names} uses exact sums and takes "
            "as long as allreduce."
        )
        if phases.warmup >= phases.epochs:
            warm_up = (
                f"All {phases.epochs:g} epochs are warm-up, in which {names} sums like allreduce."
            )
        lines += wrap(warm_up, "")
    lines += wrap(prediction.conclusion(rows), "")
    return [
        *lines,
        *wrap(READING, ""),
        *wrap("Slower machines and disks are not predicted: docs/report.md.", ""),
    ]
