"""The report of a run as a View."""

from __future__ import annotations

import time
from collections.abc import Mapping

from contract import records
from contract.records import CATEGORIES, COMPUTE, DERIVED, LOCAL, PEERS, of_kind
from contract.split import MIN_SPEED_RATIO
from contract.text import millions, percent, pluralize, seconds, three_digits
from report import differences, tables
from report.analysis import Analysis
from report.bottleneck import parts
from report.measure import Step, own_speeds, slow_place, slowest, unsummed_steps
from report.read import Run
from report.rerun import train_line
from report.time_charts import charts_of
from report.verdict import not_summed, only_received, step_words
from report.view import (
    Bar,
    Bars,
    Charts,
    Choice,
    Choices,
    Command,
    Curve,
    Fact,
    Facts,
    Item,
    Key,
    Line,
    Log,
    Mark,
    Paragraph,
    Section,
    View,
    table,
    time_unit,
    top1,
)
from report.wait_rules import OWN_WORK
from report.windows import Points

MOST_RANKS = 16  # rows of a chart
# The parts of the mean step: fields of Step, by their categories.
PARTS = {
    part: {**CATEGORIES, **DERIVED}[part]
    for name in of_kind(COMPUTE, LOCAL, PEERS)
    for part in (("network", "peers") if name == "sync_exposed" else (name,))
}


def view_of(analysis: Analysis) -> View:
    makers = (
        verdict_section,
        advice_section,
        time_section,
        step_section,
        course_section,
        evaluation_section,
        tables.disk_section,
        tables.network_section,
        tables.machine_section,
        tables.gpu_section,
        tables.memory_section,
        attempt_section,
        run_section,
        missing_section,
    )
    sections = [section for make in makers if (section := make(analysis)).items]
    return View(
        brand="Tandem run",
        title=analysis.run.folder.resolve().name,
        setup=setup(analysis),
        facts=facts(analysis),
        sections=sections,
        state=analysis.summary["status"],
        bad=analysis.summary["status"] == "failed",
        links=(
            ("summary.json", "the figures for scripts"),
            ("series.csv", "all that is drawn over time"),
            ("report.txt", "this as text"),
        ),
    )


def setup(analysis: Analysis) -> list[str]:
    """Model, machines, batch and what else decides how fast a step is, as far as it is known."""
    summary, start = analysis.summary, analysis.start
    words = [
        program(analysis),
        f"{pluralize(summary['nodes'], 'node')} ({pluralize(summary['world_size'], 'rank')})",
    ]
    parameters, micro_batches = start.parameters, start.accumulate
    words += [f"{millions(parameters)} parameters"] if parameters else []
    words += [f"{start.image_size} px"] if start.image_size else []
    if start.global_batch:
        several = micro_batches is not None and micro_batches > 1
        micro = f" in {micro_batches:.0f} micro-batches" if several else ""
        words.append(f"batch {start.global_batch}{micro}")
    words += [start.precision] if start.precision else []
    if summary["sync"]:
        words.append(f"sync {summary['sync']}")
    words += [start.device] if start.device else []
    words += [f"torch {start.torch}"] if start.torch else []
    # A CPU whose instructions the environment denies oneDNN is slower than it could be.
    limit = start.instructions.onednn_limit
    return words + ([f"oneDNN limited to {limit}"] if limit else [])


def program(analysis: Analysis) -> str:
    """The command of the program, or else the model that its ranks recorded."""
    return analysis.run.program.command or analysis.start.model or "unknown program"


def facts(analysis: Analysis) -> list[tuple[str, str]]:
    """The figures at the top of the page: (figure, of what)."""
    summary, step = analysis.summary, analysis.step
    rows = []
    if summary["images_per_second"]:
        rows.append((three_digits(summary["images_per_second"]), f"{analysis.run.samples}/s"))
    if step:
        rows.append((seconds(step.seconds), "a step"))
        if step.world > 1:
            waited = parts(step)["network"] + parts(step)["straggler"]
            rows.append((percent(waited), "of it waiting for others"))
        rows.append((percent(parts(step)["data"]), f"of it waiting for {step.samples}"))
    if summary["final_top1"] is not None:
        best = top1(summary["best_top1"])
        last = [epoch for epoch in analysis.curve if epoch.top1 is not None][-1]
        words = f"top-1{last.part} after epoch {last.epoch} (best {best})"
        rows.append((top1(summary["final_top1"]), words))
    if summary["wall_seconds"] and not analysis.accounting.contradictions:
        rows.append((seconds(summary["wall_seconds"]), "in all"))
    if analysis.hundred_epochs and not analysis.accounting.contradictions:
        rows.append((seconds(analysis.hundred_epochs), "for 100 epochs like these"))
    return rows


def verdict_section(analysis: Analysis) -> Section:
    """The sentence that matters, then its figures."""
    items: list[Item] = []
    short, verdict = analysis.too_short, analysis.verdict
    if analysis.failure:
        cause = analysis.summary["first_cause"] or {}
        items += [Paragraph(analysis.failure, "headline")]
        items += [Paragraph(f"Remedy: {cause['remedy']}")] if cause.get("remedy") else []
        items += (
            [Paragraph(f"{analysis.to_resume[:1].upper()}{analysis.to_resume[1:]}.")]
            if analysis.to_resume
            else []
        )
        items += [Log(list(map(str, cause["last_lines"])))] if cause.get("last_lines") else []
        items += [Paragraph(f"{line[:1].upper()}{line[1:]}.") for line in analysis.silent_ranks]
    if apart := ranks_apart(analysis.run):
        items.append(Paragraph(apart, "headline"))
    if analysis.failure and analysis.step is None and not analysis.run.untimed:
        return Section("Verdict", items)
    if short:
        items.append(Paragraph(short.headline, "headline"))
    if short and not analysis.failure:
        items += [Paragraph("This one says more:"), Command(short.command)]
    if verdict:
        items.append(Paragraph(verdict.headline, "headline"))
        items += [Paragraph(sentence) for sentence in verdict.because]
    return Section("Verdict", items)


def ranks_apart(run: Run) -> str | None:
    """A sentence where the ranks trained each a model of its own, as far as is seen."""
    if steps := unsummed_steps(run.ranks):
        return not_summed(steps)
    last = max((attempt for _, attempt in run.exits), default=0)
    for (host, attempt), end in run.exits.items():
        if attempt == last and end.only_received:
            return f"{host}: {only_received(end.only_received)}"
    return None


def advice_section(analysis: Analysis) -> Section:
    """The best that costs no money first, with its command; then the others."""
    advice, listed = analysis.advice, analysis.summary["advice"]
    if not listed:
        return Section("What to do", [])
    single, rows, bars = len(advice.remedies), [], [Bar("now", [("other", advice.now)], "")]
    for place, item in enumerate(listed, 1):
        speed = item["predicted_images_per_second"]
        text = f"{three_digits(speed)} ({speed / advice.now:.2f} x): {item['change']}"
        typed = item["command"] if place == 1 or place > single else None
        rows.append(Choice("" if place > single else f"{place}.", text, typed, item["costs_money"]))
        bars.append(Bar("together" if place > single else f"{place}.", [("forward", speed)], ""))
    samples = analysis.run.samples
    bars = [bar._replace(figure=three_digits(bar.parts[0][1])) for bar in bars]
    saving = "".join(f", {what} counted" for what in advice.counted)
    return Section(
        "What to do",
        [
            Choices(rows),
            Bars(f"{samples.capitalize()} per second", bars, "/s", []),
            Paragraph("Predictions of one model, from the measured step: docs/report.md.", "note"),
        ],
        f"predicted {samples}/s; now {three_digits(advice.now)}{saving}",
    )


def time_section(analysis: Analysis) -> Section:
    """All categories and the gap: the mean over ranks, then each rank of the last attempt."""
    accounting = analysis.accounting
    if accounting.wall <= 0 or analysis.run.untimed:
        return Section("Where the time went", [])
    if wrong := accounting.contradictions:
        file = records.steps(wrong[0].rank, wrong[0].attempt)
        more = f" (and {len(wrong) - 1} more ranks)" if len(wrong) > 1 else ""
        text = (
            f"Records contradict each other: by nodes/{wrong[0].host}/{file}{more} a process took "
            f"{seconds(sum(wrong[0].seconds.values()))}, and attempt {wrong[0].attempt} took "
            f"{seconds(wrong[0].wall)}. Neither is shown."
        )
        return Section("Where the time went", [Paragraph(text)])
    spent = [(name, accounting.seconds[name]) for name in CATEGORIES]
    spent = [part for part in spent if part[1] > 0]
    if abs(accounting.gap) >= 0.005 * accounting.wall:
        spent.append(("gap", accounting.gap))
    samples = analysis.run.samples
    keys = [
        Key(
            name,
            words_of(name, samples),
            f"{percent(value / accounting.wall):>5} {seconds(value):>8}",
            part,
        )
        for name, value in spent
        for part in [value / accounting.wall]
    ]
    newest = max((rank.attempt for rank in accounting.ranks), default=None)
    last = [rank for rank in accounting.ranks if rank.attempt == newest]
    unit, length = time_unit(accounting.wall)
    rows = [Bar("all", rank_parts({**accounting.seconds, "gap": accounting.gap}, length), "")]
    if len(last) > 1:
        rows += [
            Bar(f"rank {rank.rank}", rank_parts({**rank.seconds, "gap": rank.gap}, length), "")
            for rank in last[:MOST_RANKS]
        ]
    return Section(
        "Where the time went",
        [Bars("Where the wall time went", rows, unit, keys)],
        f"mean of the ranks; {seconds(accounting.wall)} in all",
    )


def words_of(name: str, samples: str) -> str:
    return {**CATEGORIES, **DERIVED}[name].words.format(samples)


def rank_parts(spent: Mapping[str, float], length: float) -> list[tuple[str, float]]:
    return [(name, value / length) for name, value in spent.items()]


def step_section(analysis: Analysis) -> Section:
    """The mean step, and each rank's; of many the slowest."""
    step = analysis.step
    if step is None:
        return Section("One step", [])
    named = ", ".join(
        f"{part.short.format(step.samples)} {seconds(getattr(step, name))}"
        for name, part in PARTS.items()
        if getattr(step, name) >= 0.0005
    )
    steps = pluralize(step.measured_steps, "step")
    images = f"{step.images:.0f} {step.samples} in " if step.images else ""
    items: list[Item] = [Paragraph(f"{images}{step_words(step)}, the mean of {steps}: {named}.")]
    if len(step.ranks) < 2:
        return Section("One step", items)
    slow = sorted(step.ranks, key=lambda rank: -rank.own)[:MOST_RANKS]
    ranks = sorted(slow, key=lambda rank: rank.rank)
    rows = [
        Bar(
            f"{rank.rank} {rank.host[:12]}",
            rank_parts({n: rank.seconds.get(n, 0.0) for n in STEP_PARTS}, 1e-3),
            seconds(rank.own),
        )
        for rank in ranks
    ]
    keys = [Key(name, words_of(name, step.samples)) for name in STEP_PARTS]
    items.append(Bars("One step of each rank", rows, "ms", keys))
    items.append(table("The mean step of each rank", tables.rank_columns(step.samples), ranks))
    last, others = slowest(step)
    if others > 0 and last.own > 1.1 * others:
        items.append(
            Paragraph(
                f"{slow_place(step, last)} needs {last.own / others:.2f} times what "
                "the others need."
            )
        )
    unequal = unequal_parts(step)
    items += [Paragraph(unequal)] if unequal else []
    of = f"the slowest {len(ranks)} of {len(step.ranks)}" if len(ranks) < len(step.ranks) else ""
    return Section("One step, rank by rank", items, of)


STEP_PARTS = (*OWN_WORK, *of_kind(PEERS))  # what the others wait for first, then the waiting


def unequal_parts(step: Step) -> str:
    """A sentence on the gain by unequal parts of a step's images; "" where they were equal."""
    images: dict[str, float] = {}
    for rank in step.ranks:
        images[rank.host] = images.get(rank.host, 0.0) + rank.images
    speeds = own_speeds(step)
    if len(speeds) < 2 or max(images.values()) <= MIN_SPEED_RATIO * min(images.values()):
        return ""
    named = ", ".join(f"{host} {round(part)}" for host, part in images.items())
    spent = max(images[host] / speed for host, speed in speeds.items())
    equal = sum(images.values()) / len(images) / min(speeds.values())
    return (
        f"{step.samples.capitalize()} of a step (BALANCE): {named}. The slowest machine's took "
        f"{seconds(spent)}; with equal parts it would have taken {seconds(equal)}."
    )


def course_section(analysis: Analysis) -> Section:
    curves = charts_of(analysis)
    return Section("Over the run", [Charts(curves)] if curves else [])


def evaluation_section(analysis: Analysis) -> Section:
    """Top-1 and the losses by epoch; of a long list only the two ends."""
    epochs = analysis.curve
    if not any(epoch.top1 is not None for epoch in epochs):
        return Section("Evaluation", [])
    lines_of = {
        "in training": ("data", [(e.train_top1, e.train_loss) for e in epochs]),
        "on validation data": ("forward", [(e.top1, e.loss) for e in epochs]),
    }
    scores: list[Line] = []
    losses: list[Line] = []
    for name, (colour, pairs) in lines_of.items():
        points = list(zip([e.epoch for e in epochs], pairs))
        shares = curve_of([(epoch, share and 100 * share) for epoch, (share, _) in points])
        scores += [Line(name, colour, shares)] if shares else []
        losses.append(
            Line(name, colour, curve_of([(epoch, value) for epoch, (_, value) in points]))
        )
    marks = restarts(analysis)
    curves = [
        Curve("Top-1", "%", scores, "epochs", 100.0, marks=marks),
        Curve("Loss", "", losses, "epochs", steady=True, marks=marks),
    ]
    drawn = [curve for curve in curves if any(len(line.points) > 1 for line in curve.lines)]
    shown = epochs if len(epochs) <= 10 else [*epochs[:4], *epochs[-6:]]
    rows = table("Top-1 and loss after each epoch", tables.EPOCHS, shown, 1)
    partly = [
        Paragraph(f"Epoch {epoch.epoch} was evaluated{epoch.part}: the others could not be read.")
        for epoch in epochs
        if epoch.part
    ]
    items: list[Item] = [Charts(drawn), rows, *partly[-1:]]
    return Section("Evaluation", items, "exact, over the data of all ranks")


def restarts(analysis: Analysis) -> tuple[Mark, ...]:
    """Marks at the epochs at which later attempts resumed."""
    images = analysis.start.train_images
    samples = [entry.resumed_samples or 0.0 for entry in analysis.run.attempts[1:]]
    return tuple(Mark(count / images, "restart") for count in samples) if images else ()


def curve_of(points: list[tuple[int, float | None]]) -> Points:
    return [(float(x), y) for x, y in points if y is not None]


def attempt_section(analysis: Analysis) -> Section:
    """The attempts, when there was more than one."""
    attempts, rows = analysis.summary["attempts"], []
    for index, entry in enumerate(attempts, 1):
        hosts = ", ".join(map(str, entry.get("nodes") or []))
        took = f" {seconds(entry['wall_seconds'])}," if entry.get("wall_seconds") else ""
        status = f" {entry['status']}:" if entry.get("status") else ""
        text = f"{hosts};{took}{status} {entry.get('reason') or 'no reason recorded'}"
        rows.append(Choice(f"{index}.", text))
    return Section("Attempts", [Choices(rows)] if len(rows) > 1 else [])


def run_section(analysis: Analysis) -> Section:
    """What identifies the run: its command, when, which code, and which machines."""
    run, plan = analysis.run, analysis.run.plan
    unix = plan.created_unix or analysis.start.unix
    start, prediction = analysis.start, analysis.summary["predicted"]
    why = start.decided.precision_why
    rows = {
        "started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix)) if unix else "",
        "revision": differences.code_of(plan) if plan.code_sha256 else "",
        "precision": f"{start.precision}: {why}" if why and why != "as asked" else "",
        "make plan said": f"{prediction['images_per_second']:.1f} images/s" if prediction else "",
        **differences.machines(analysis),
    }
    known = [Fact(name, value) for name, value in rows.items() if value]
    command = train_line(run)
    typed: list[Item] = [Command(command)] if command else []
    return Section("This run", [*typed, Facts("When it ran, and on what", known)])


def missing_section(analysis: Analysis) -> Section:
    """What was not recorded."""
    return Section("What is missing", [Paragraph(note) for note in analysis.notes])
