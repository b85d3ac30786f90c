"""Put the report of a run into a View: a function for each section, in the order of the report.

__main__.py calls `view_of` with the Analysis of the run; text.py and page.py show the View. The
sections about machines are in tables.py, and the charts over time in time_charts.py.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from contract import records
from contract.records import CATEGORIES, COMPUTE, DERIVED, LOCAL, PEERS, of_kind
from contract.split import MIN_SPEED_RATIO
from contract.text import millions, percent, pluralize, seconds, three_digits
from report import differences, tables, view
from report.analysis import Analysis
from report.bottleneck import step_shares
from report.measure import NOTICEABLE, Step, find_slowest_rank, machine_speeds, unsummed_steps
from report.read import RunRecord
from report.rerun import train_line
from report.time_charts import charts_of
from report.verdict import describe_missing_gradients, describe_unsummed_steps, step_words
from report.view import Bar, Bars, Fact, Item, Key, Line, Paragraph, Section, View, or_unknown, top1
from report.wait_rules import OWN_WORK
from report.windows import Points

MOST_RANKS = 16  # rows of a chart
FIRST_EPOCHS, LAST_EPOCHS = 4, 6  # rows of the table of epochs
# The fields of Step that add up to the mean step, with their categories. A step has two fields for
# the category `sync_exposed`: `network` and `peers`.
PARTS = {
    field: {**CATEGORIES, **DERIVED}[field]
    for name in of_kind(COMPUTE, LOCAL, PEERS)
    for field in (("network", "peers") if name == "sync_exposed" else (name,))
}
# The parts of a rank's step: first the work for which other ranks wait, then the rank's own waits.
RANK_PARTS = (*OWN_WORK, *of_kind(PEERS))


def view_of(analysis: Analysis) -> View:
    """Return the report of a run, without empty sections."""
    curves = charts_of(analysis)
    sections = (
        verdict_section(analysis),
        advice_section(analysis),
        time_section(analysis),
        step_section(analysis),
        Section("Over the run", [view.Charts(curves)] if curves else []),
        scalar_section(analysis),
        evaluation_section(analysis),
        tables.disk_section(analysis),
        tables.network_section(analysis),
        tables.machine_section(analysis),
        tables.gpu_section(analysis),
        tables.memory_section(analysis),
        attempt_section(analysis),
        run_section(analysis),
        Section("What is missing", [Paragraph(note) for note in analysis.notes]),
    )
    return View(
        brand="Tandem run",
        title=analysis.run.folder.resolve().name,
        setup=describe_setup(analysis),
        facts=list_facts(analysis),
        sections=[section for section in sections if section.items],
        state=analysis.summary["status"],
        bad=analysis.summary["status"] == "failed",
        links=(
            ("summary.json", "the figures for scripts"),
            ("series.csv", "all metrics that the charts show over time"),
            ("report.txt", "this as text"),
        ),
    )


def describe_setup(analysis: Analysis) -> list[str]:
    """Return what affects speed, if it is recorded: model, machines, batch and so on."""
    summary, start = analysis.summary, analysis.start
    words = [
        analysis.run.program.command or start.model or "unknown program",
        f"{pluralize(summary['nodes'], 'node')} ({pluralize(summary['world_size'], 'rank')})",
    ]
    words += [f"{millions(start.parameters)} parameters"] if start.parameters else []
    words += [f"{start.image_size} px"] if start.image_size else []
    if start.global_batch:
        micro = ""
        if start.accumulate is not None and start.accumulate > 1:
            micro = f" in {start.accumulate:.0f} micro-batches"
        words.append(f"batch {start.global_batch}{micro}")
    words += [start.precision] if start.precision else []
    words += [f"sync {summary['sync']}"] if summary["sync"] else []
    words += [start.device] if start.device else []
    words += [f"torch {start.torch}"] if start.torch else []
    # If the environment denies oneDNN some instructions, the CPU is slower than it could be.
    limit = start.instructions.onednn_limit
    return words + ([f"oneDNN limited to {limit}"] if limit else [])


def list_facts(analysis: Analysis) -> list[tuple[str, str]]:
    """Return the figures at the top of the page: (figure, its meaning)."""
    summary, step = analysis.summary, analysis.step
    rows = []
    if summary["images_per_second"]:
        rows.append((three_digits(summary["images_per_second"]), f"{analysis.run.samples}/s"))
    # A run without measured steps has only its duration.
    if step:
        shares = step_shares(step)
        rows.append((seconds(step.seconds), "a step"))
        if step.world > 1:
            waits = percent(shares["network"] + shares["straggler"])
            rows.append((waits, "of it waiting for others"))
        rows.append((percent(shares["data"]), f"of it waiting for {step.samples}"))
    if summary["final_top1"] is not None:
        best = top1(summary["best_top1"])
        newest = [epoch for epoch in analysis.curve if epoch.top1 is not None][-1]
        meaning = f"top-1{newest.part} after epoch {newest.epoch} (best {best})"
        rows.append((top1(summary["final_top1"]), meaning))
    # If records contradict each other (time_section), the report shows no duration of the run.
    if not analysis.accounting.contradictions:
        if summary["wall_seconds"]:
            rows.append((seconds(summary["wall_seconds"]), "in all"))
        if analysis.hundred_epochs:
            rows.append((seconds(analysis.hundred_epochs), "for 100 epochs like these"))
    return rows


def verdict_section(analysis: Analysis) -> Section:
    """Show why the run failed and what is wrong with the training, then the bottleneck."""
    items: list[Item] = []
    short, verdict = analysis.too_short, analysis.verdict
    if analysis.failure:
        cause = analysis.summary["first_cause"] or {}
        items.append(Paragraph(analysis.failure, "headline"))
        if cause.get("remedy"):
            items.append(Paragraph(f"Remedy: {cause['remedy']}"))
        if analysis.to_resume:
            items.append(Paragraph(f"{analysis.to_resume[:1].upper()}{analysis.to_resume[1:]}."))
        if cause.get("last_lines"):
            items.append(view.Log(list(map(str, cause["last_lines"]))))
        # A line begins with a host (`node2, rank 1 did not enter ...`), whose name stays as it is,
        # or with `rank 1 (node2), silent for ...`, which begins a sentence here.
        for line in analysis.silent_ranks:
            is_host = line.partition(",")[0] in analysis.run.hosts
            items.append(Paragraph(f"{line}." if is_host else f"{line[:1].upper()}{line[1:]}."))
    if warning := separate_models_warning(analysis.run):
        items.append(Paragraph(warning, "headline"))
    items += [Paragraph(sentence, "headline") for sentence in not_finite_sentences(analysis.run)]
    # A run that failed before its first steps has no speed to judge.
    if analysis.failure and analysis.step is None and not analysis.run.untimed:
        return Section("Verdict", items)
    if short:
        items.append(Paragraph(short.headline, "headline"))
    if short and not analysis.failure:
        items += [Paragraph("This one says more:"), view.Command(short.command)]
    if verdict:
        items.append(Paragraph(verdict.headline, "headline"))
        items += [Paragraph(sentence) for sentence in verdict.because]
    return Section("Verdict", items)


def separate_models_warning(run: RunRecord) -> str | None:
    """Return a warning if some ranks seem to have trained separate models."""
    # The ranks' own counts are surer than the traffic of their machine.
    if steps := unsummed_steps(run.ranks):
        return describe_unsummed_steps(steps)
    newest = max((attempt for _, attempt in run.exits), default=0)
    for (host, attempt), end in run.exits.items():
        if attempt == newest and end.only_received:
            return f"{host}: {describe_missing_gradients(end.only_received)}"
    return None


def not_finite_sentences(run: RunRecord) -> list[str]:
    """Return a sentence on each scalar of a script that became NaN or infinite, in the order of the
    steps. Only the last attempt in which that happened counts."""
    newest = max((record.attempt for record in run.ranks if record.not_finite), default=None)
    # Scalar -> the first step in which it was not finite, and the rank and host of that step.
    events: dict[str, tuple[int, int, str]] = {}
    for record in run.ranks_in(newest):
        for name, step in record.not_finite.items():
            event = step, record.rank, record.host
            events[name] = min(event, events.get(name, event))
    return [
        f"{name} was NaN or infinite for the first time in step {step:,}, on rank {rank} ({host})."
        for name, (step, rank, host) in sorted(events.items(), key=lambda item: item[1])
    ]


def advice_section(analysis: Analysis) -> Section:
    """Show the result of an advice that this run tried, then the remedies with their commands."""
    advice, entries, tried = analysis.advice, analysis.summary["advice"], analysis.summary["tried"]
    samples = analysis.run.samples
    items: list[Item] = []
    if tried:
        change, ratio = tried["change"], tried["reached"] / tried["predicted"]
        items.append(Paragraph(f"This run follows advice of {tried['run']}: {change}."))
        previous, predicted, reached = (
            or_unknown(tried[key], three_digits) for key in ("before", "predicted", "reached")
        )
        text = f"{previous} {samples}/s before, {predicted} predicted, {reached} reached"
        items.append(Paragraph(f"{text} ({100 * (ratio - 1):+.0f} % against the prediction)."))
    if not entries:
        return Section("What to do", items)
    speed = advice.images_per_second
    # The bars borrow the colours of two categories: `other` for now, `forward` for predictions.
    rows, bars = [], [Bar("now", [("other", speed)], three_digits(speed))]
    # The entries are the remedies, the best one first, and at the end the combined remedy.
    for number, entry in enumerate(entries, 1):
        is_combined = number > len(advice.remedies)
        prediction = entry["predicted_images_per_second"]
        figure = three_digits(prediction)
        text = f"{figure} ({prediction / speed:.2f} x): {entry['change']}"
        # Commands of all remedies would make the list long.
        command = entry["command"] if number == 1 or is_combined else None
        mark = "" if is_combined else f"{number}."
        rows.append(view.Choice(mark, text, command, entry["costs_money"]))
        bars.append(Bar(mark or "together", [("forward", prediction)], figure))
    items.append(view.Choices(rows))
    # The first remedy that can be tried for a minute, with its number in the list.
    trials = ((number, entry["trial"]) for number, entry in enumerate(entries, 1) if entry["trial"])
    number, command = next(trials, (0, ""))  # a blank command: no remedy can be tried
    if command:
        text = (
            f"To try {number} for a minute, in a run of its own that saves nothing; its report "
            "shows this prediction beside the result:"
        )
        items += [Paragraph(text), view.Command(command)]
    items.append(Bars(f"{samples.capitalize()} per second", bars, "/s", []))
    note = "Predicted from the measured step: see docs/report.md."
    items.append(Paragraph(note, "note"))
    counted = "".join(f", {name} counted" for name in advice.counted)
    aside = f"predicted {samples}/s; now {three_digits(speed)}{counted}"
    return Section("What to do", items, aside)


def time_section(analysis: Analysis) -> Section:
    """Show the time of each category and the gap: the mean, then each rank of the last attempt."""
    accounting, title = analysis.accounting, "Where the time went"
    if accounting.wall <= 0 or analysis.run.untimed:
        return Section(title, [])
    if accounting.contradictions:
        rank, *further_ranks = accounting.contradictions
        file = records.steps(rank.rank, rank.attempt)
        also = f" (and {len(further_ranks)} more ranks)" if further_ranks else ""
        text = (
            f"Records contradict each other: a process took {seconds(sum(rank.seconds.values()))} "
            f"according to nodes/{rank.host}/{file}{also}, but attempt {rank.attempt} "
            f"took {seconds(rank.wall)}. The report shows neither."
        )
        return Section(title, [Paragraph(text)])
    spent = {n: accounting.seconds[n] for n in CATEGORIES if accounting.seconds[n] > 0}
    # A gap within the rounding of the percentages (0.5 %) would only confuse.
    if abs(accounting.gap) >= 0.005 * accounting.wall:
        spent["gap"] = accounting.gap
    keys = []
    for name, value in spent.items():
        share = value / accounting.wall
        figure = f"{percent(share):>5} {seconds(value):>8}"
        keys.append(Key(name, category_words(name, analysis.run.samples), figure, share))
    newest = max((rank.attempt for rank in accounting.ranks), default=None)
    ranks = [rank for rank in accounting.ranks if rank.attempt == newest]
    unit, unit_seconds = view.time_unit(accounting.wall)
    rows = [Bar("all", segments({**accounting.seconds, "gap": accounting.gap}, unit_seconds), "")]
    # The bar of a single rank would equal the first bar.
    if len(ranks) > 1:
        rows += [
            Bar(f"rank {rank.rank}", segments({**rank.seconds, "gap": rank.gap}, unit_seconds), "")
            for rank in ranks[:MOST_RANKS]
        ]
    return Section(
        title,
        [Bars("Where the wall time went", rows, unit, keys)],
        f"mean of the ranks; {seconds(accounting.wall)} in all",
    )


def category_words(name: str, samples: str) -> str:
    return {**CATEGORIES, **DERIVED}[name].words.format(samples)


def segments(spent: Mapping[str, float], unit_seconds: float) -> list[tuple[str, float]]:
    """Return the segments of a bar for the seconds of each category."""
    return [(name, value / unit_seconds) for name, value in spent.items()]


def step_section(analysis: Analysis) -> Section:
    """Show the mean step, and the mean step of each rank, or of the slowest of many ranks."""
    step = analysis.step
    if step is None:
        return Section("One step", [])
    shares = ", ".join(
        f"{category.short.format(step.samples)} {seconds(getattr(step, field))}"
        for field, category in PARTS.items()
        if getattr(step, field) >= view.LEAST_SHOWN_SECONDS
    )
    steps = pluralize(step.measured_steps, "step")
    images = f"{step.images:.0f} {step.samples} in " if step.images else ""
    items: list[Item] = [Paragraph(f"{images}{step_words(step)}, the mean of {steps}: {shares}.")]
    # A table of one rank would repeat the sentence.
    if len(step.ranks) < 2:
        return Section("One step", items)
    # Of many ranks, the slowest are shown, in the order of their numbers.
    by_work = sorted(step.ranks, key=lambda rank: -rank.work_seconds)[:MOST_RANKS]
    ranks = sorted(by_work, key=lambda rank: rank.rank)
    rows = [
        Bar(
            f"{rank.rank} {rank.host[:12]}",
            segments({name: rank.seconds.get(name, 0.0) for name in RANK_PARTS}, 1e-3),
            seconds(rank.work_seconds),
        )
        for rank in ranks
    ]
    keys = [Key(name, category_words(name, step.samples)) for name in RANK_PARTS]
    items.append(Bars("One step of each rank", rows, "ms", keys))
    columns = tables.rank_columns(step.samples)
    items.append(view.table("The mean step of each rank", columns, ranks))
    slow = find_slowest_rank(step)
    if slow.median > 0 and slow.rank.work_seconds > NOTICEABLE * slow.median:
        factor = slow.rank.work_seconds / slow.median
        items.append(
            Paragraph(f"{slow.location} needs {factor:.2f} times as long as the other ranks.")
        )
    if unequal := describe_unequal_batches(step):
        items.append(Paragraph(unequal))
    hidden = len(ranks) < len(step.ranks)
    aside = f"the slowest {len(ranks)} of {len(step.ranks)}" if hidden else ""
    return Section("One step, rank by rank", items, aside)


def describe_unequal_batches(step: Step) -> str:
    """Return a sentence on the gain by unequal batches; "" if all machines had equal batches."""
    images: dict[str, float] = {}  # of a step, by machine
    for rank in step.ranks:
        images[rank.host] = images.get(rank.host, 0.0) + rank.images
    speeds = machine_speeds(step)
    # BALANCE=auto gives unequal batches only if speeds differ by more than MIN_SPEED_RATIO.
    if len(speeds) < 2 or max(images.values()) <= MIN_SPEED_RATIO * min(images.values()):
        return ""
    batches = ", ".join(f"{host} {round(batch)}" for host, batch in images.items())
    # Seconds of the slowest machine's work, with its batch and with the mean batch.
    spent = max(images[host] / speed for host, speed in speeds.items())
    equal = sum(images.values()) / len(images) / min(speeds.values())
    return (
        f"{step.samples.capitalize()} of a step (BALANCE): {batches}. The slowest machine needed "
        f"{seconds(spent)}; with equal batches it would have needed {seconds(equal)}."
    )


def scalar_section(analysis: Analysis) -> Section:
    """Show the first, last, lowest and highest value of each scalar."""
    # The values of each scalar, the oldest first.
    values = {
        name: [value for _, value in points] for name, points in analysis.scalars.items() if points
    }
    columns = [
        view.Column("scalar", lambda name: name),
        view.Column("first", lambda name: f"{values[name][0]:.5g}"),
        view.Column("last", lambda name: f"{values[name][-1]:.5g}"),
        view.Column("lowest", lambda name: f"{min(values[name]):.5g}"),
        view.Column("highest", lambda name: f"{max(values[name]):.5g}"),
    ]
    table = view.table("What the script recorded", columns, list(values), names=1)
    return Section("Scalars", [table] if values else [], "means over steps and ranks")


def evaluation_section(analysis: Analysis) -> Section:
    """Show the curves of top-1 and loss, and a table of the first and the last epochs."""
    epochs = analysis.curve
    if not any(epoch.top1 is not None for epoch in epochs):
        return Section("Evaluation", [])

    def points_of(field: str, factor: float = 1.0) -> Points:
        scores = [(epoch.epoch, getattr(epoch, field)) for epoch in epochs]
        return [(float(epoch), factor * score) for epoch, score in scores if score is not None]

    top1_lines, loss_lines = [], []
    # A line's name, its colour, and the prefix of its fields of Epoch.
    names = (("in training", "data", "train_"), ("on validation data", "forward", ""))
    for name, colour, prefix in names:
        percentages = points_of(f"{prefix}top1", 100)
        top1_lines += [Line(name, colour, percentages)] if percentages else []
        loss_lines.append(Line(name, colour, points_of(f"{prefix}loss")))
    # A mark shows the epoch, such as 2.5, at which a later attempt resumed.
    images = analysis.start.train_images
    resumed = [entry.resumed_samples or 0.0 for entry in analysis.run.attempts[1:]]
    marks = tuple(view.Mark(count / images, "restart") for count in resumed) if images else ()
    curves = [
        view.Curve("Top-1", "%", top1_lines, "epochs", 100.0, marks=marks),
        view.Curve("Loss", "", loss_lines, "epochs", steady=True, marks=marks),
    ]
    drawn = [curve for curve in curves if any(len(line.points) > 1 for line in curve.lines)]
    # The first epochs show how the model learned, the last ones what it reached.
    is_short = len(epochs) <= FIRST_EPOCHS + LAST_EPOCHS
    shown = epochs if is_short else [*epochs[:FIRST_EPOCHS], *epochs[-LAST_EPOCHS:]]
    rows = view.table("Top-1 and loss after each epoch", tables.EPOCHS, shown, names=1)
    partial = [
        Paragraph(f"Epoch {epoch.epoch} was evaluated{epoch.part}: other images could not be read.")
        for epoch in epochs
        if epoch.part
    ]
    # Only the sentence on the newest such epoch is shown.
    items: list[Item] = [view.Charts(drawn), rows, *partial[-1:]]
    return Section("Evaluation", items, "exact, over the data of all ranks")


def attempt_section(analysis: Analysis) -> Section:
    """Show the attempts if there was more than one."""
    rows = []
    for number, entry in enumerate(analysis.summary["attempts"], 1):
        hosts = ", ".join(map(str, entry.get("nodes") or []))
        took = f" {seconds(entry['wall_seconds'])}," if entry.get("wall_seconds") else ""
        status = f" {entry['status']}:" if entry.get("status") else ""
        text = f"{hosts};{took}{status} {entry.get('reason') or 'no reason recorded'}"
        rows.append(view.Choice(f"{number}.", text))
    return Section("Attempts", [view.Choices(rows)] if len(rows) > 1 else [])


def run_section(analysis: Analysis) -> Section:
    """Show what identifies the run: its command, date, code and machines."""
    run, plan, start = analysis.run, analysis.run.plan, analysis.start
    unix = plan.created_unix or start.unix
    # Why the trainer chose the precision; `as asked` if the user chose it.
    prediction, reason = analysis.summary["predicted"], start.decided.precision_why
    rows = {
        "started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix)) if unix else "",
        "revision": differences.code_of(plan) if plan.code_sha256 else "",
        "precision": f"{start.precision}: {reason}" if reason and reason != "as asked" else "",
        "make plan said": f"{prediction['images_per_second']:.1f} images/s" if prediction else "",
        **differences.machines(analysis),
    }
    facts = [Fact(name, value) for name, value in rows.items() if value]
    command = train_line(run)
    commands: list[Item] = [view.Command(command)] if command else []
    return Section("This run", [*commands, view.Facts("When it ran, and on what", facts)])
