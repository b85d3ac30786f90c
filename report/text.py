"""The report for the terminal: at most 80 columns of plain ASCII."""

from __future__ import annotations

import shlex

from contract.records import CATEGORIES
from contract.split import WORTH
from contract.text import counted
from report import layout, tables
from report.analysis import Analysis
from report.files import number
from report.layout import millions, printed, seconds, three_digits, wrap
from report.measure import Step, own_speeds, slowest

BAR = 30
WORDS = {
    "start_stop": "start and stop",
    "data": "waiting for images",
    "h2d": "copy to device",
    "forward": "forward",
    "backward": "backward",
    "sync_exposed": "waiting for gradients",
    "optimizer": "optimizer",
    "evaluate": "evaluation",
    "checkpoint": "checkpoints",
    "other": "other",
    "gap": "not accounted for",
}


def render_text(analysis: Analysis) -> str:
    """The whole report; ends with a newline."""
    sections = (
        heading_section,
        verdict_section,
        advice_section,
        time_section,
        step_section,
        disk_section,
        network_section,
        machine_section,
        gpu_section,
        memory_section,
        rank_section,
        curve_section,
        attempt_section,
        note_section,
    )
    blocks = [section(analysis) for section in sections]
    return "\n\n".join(printed(block) for block in blocks if block) + "\n"


def heading_section(analysis: Analysis) -> list[str]:
    """What ran, for how long, and how well."""
    summary = analysis.summary
    name = analysis.run.folder.resolve().name
    lines = [f"Tandem run {name}", *wrap(", ".join(setup(analysis)))]
    wall = summary["wall_seconds"]
    facts = [
        f"{summary['status']} after {seconds(wall)}"
        if wall
        else f"{summary['status']} before its first step"
    ]
    if summary["final_top1"] is not None:
        facts.append(
            f"top-1 {summary['final_top1']:.2%} (best {summary['best_top1']:.2%})".replace(
                "%", " %"
            )
        )
    if summary["images_per_second"]:
        facts.append(f"{three_digits(summary['images_per_second'])} images/s")
    lines += wrap(", ".join(facts))
    why = analysis.run.plan.get("precision_why")
    if why and why != "as asked":
        lines += wrap(f"precision {analysis.run.plan.get('precision')}: {why}")
    if analysis.hundred_epochs:
        lines += wrap(f"100 epochs like these would take {seconds(analysis.hundred_epochs)}.")
    predicted = summary["predicted"]
    if isinstance(predicted, dict) and predicted.get("images_per_second"):
        lines += wrap(f"make plan had predicted {predicted['images_per_second']:.1f} images/s.")
    return lines


def verdict_section(analysis: Analysis) -> list[str]:
    """The sentence that matters, then its figures."""
    lines = ["VERDICT"]
    if analysis.failure:
        lines += wrap(analysis.failure)
        cause = analysis.summary["first_cause"] or {}
        lines += wrap(f"Remedy: {cause['remedy']}") if cause.get("remedy") else []
        for line in cause.get("last_lines") or []:
            lines += wrap(str(line), "    |   ", "    | ")
    if analysis.failure and analysis.step is None and not analysis.run.untimed:
        return lines
    if analysis.too_short:
        lines += wrap(analysis.too_short.headline)
    if analysis.too_short and not analysis.failure:
        lines += wrap(analysis.too_short.because)
        lines += layout.command(analysis.too_short.command)
    if analysis.verdict:
        lines += wrap(analysis.verdict.headline)
        for sentence in analysis.verdict.because:
            lines += wrap(sentence)
    return lines


def time_section(analysis: Analysis) -> list[str]:
    """Bars of the categories and the gap, as parts of the wall time."""
    accounting = analysis.accounting
    if accounting.wall <= 0 or analysis.run.untimed:
        return []
    lines = [f"WHERE THE TIME WENT  (mean over ranks; wall time {seconds(accounting.wall)})"]
    parts = [(name, accounting.seconds[name]) for name in CATEGORIES]
    if abs(accounting.gap) >= 0.005 * accounting.wall:
        parts.append(("gap", accounting.gap))
    for name, value in parts:
        if name != "gap" and value == 0:
            continue
        part = value / accounting.wall
        bar = ("." if name == "gap" else "#") * round(max(0.0, min(1.0, part)) * BAR)
        lines.append(f"  {WORDS[name]:<22}{part:>6.1%}  {seconds(abs(value)):>10}  {bar}".rstrip())
    if accounting.gap < -0.005 * accounting.wall:
        lines += wrap("The categories say more than the clock: the negative part is shown last.")
    return lines


def step_section(analysis: Analysis) -> list[str]:
    """The mean step."""
    step = analysis.step
    if step is None:
        return []
    parts = (
        ("images", step.data),
        ("copy", step.h2d),
        ("forward", step.forward),
        ("backward", step.backward),
        ("gradients", step.network),
        ("slower ranks", step.peers),
        ("optimizer", step.optimizer),
        ("other", step.other),
    )
    named = ", ".join(f"{name} {seconds(value)}" for name, value in parts if value >= 0.0005)
    return ["ONE STEP", *wrap(f"{seconds(step.seconds)} for {step.images:.0f} images: {named}.")]


def disk_section(analysis: Analysis) -> list[str]:
    """For each node its disks, the one with the data first, and what it read from shares."""
    if not analysis.disks and not analysis.shares:
        return []
    lines = ["DISKS  (while training ran)", *aligned(tables.disks(analysis.disks))]
    for use in analysis.shares:
        lines += wrap(
            f"{use.host} read {three_digits(use.read)} MB/s from {use.mount} ({use.kind})."
        )
    return lines


def aligned(table: tables.Table) -> list[str]:
    """The lines of a table; none without rows."""
    return layout.table([table.heads, *table.rows], tables.NAMES) if table.rows else []


def network_section(analysis: Analysis) -> list[str]:
    """For each node, what its card sent and what the link can carry."""
    if not analysis.networks:
        return []
    lines = ["NETWORK  (sent while training ran)", *aligned(tables.networks(analysis.networks))]
    if any(use.shared_by > 1 for use in analysis.networks):
        lines += wrap("The nodes share one machine's card: each is given its part of the counters.")
    return lines


QUEUED = (
    "`queued`: of the time in which this run's threads wanted a processor, the share in which they "
    "had none. `pressure`: of the time, the share in which some process waited for memory."
)


def machine_section(analysis: Analysis) -> list[str]:
    """Processors, memory and swap of each machine."""
    if not analysis.machines:
        return []
    lines = ["MACHINES  (while training ran)", *aligned(tables.machines(analysis.machines))]
    return lines + wrap(QUEUED)


def gpu_section(analysis: Analysis) -> list[str]:
    """The figures of each card, with the warning about utilisation."""
    if not analysis.gpus:
        return []
    lines = ["GPUS  (while training ran)", *aligned(tables.gpus(analysis.gpus))]
    joules, each = (analysis.summary[f"gpu_joules{of}"] for of in ("", "_per_image"))
    if joules is not None:
        image = f", {three_digits(each)} J an image" if each else ""
        lines += wrap(f"The cards took {three_digits(joules / 3600)} Wh{image}; the PCs took more.")
    return lines + wrap(
        "`resident` is what nvidia-smi calls utilisation: it also counts waiting for gradients, so "
        "nothing is concluded from it."
    )


def memory_section(analysis: Analysis) -> list[str]:
    """Peak memory and bad images, by machine."""
    if not analysis.memory:
        return []
    return ["MEMORY  (of the process that took most)", *aligned(tables.memory(analysis.memory))]


def rank_section(analysis: Analysis) -> list[str]:
    """Each rank's own work; a long list is cut to the slowest."""
    step = analysis.step
    if step is None or len(step.ranks) < 2:
        return []
    ranks = list(step.ranks)
    title = "RANKS  (own work per step, waiting for others excluded)"
    if len(ranks) > 8:
        ranks = sorted(ranks, key=lambda rank: -rank.own)[:8]
        title += f": the slowest 8 of {len(step.ranks)}"
    most = max(rank.own for rank in ranks) or 1.0
    lines = [title]
    for rank in ranks:
        bar = "#" * round(rank.own / most * BAR)
        lines.append(f"  {rank.rank:>3} {rank.host[:16]:<17}{seconds(rank.own):>9}  {bar}")
    last, others = slowest(step)
    if others > 0 and last.own > 1.1 * others:
        lines += wrap(f"{last.host} needs {last.own / others:.2f} times what the others need.")
    return lines + wrap(unequal_parts(step))


def unequal_parts(step: Step) -> str:
    """What unequal parts of a step's images brought; empty where they were equal."""
    parts: dict[str, float] = {}
    for rank in step.ranks:
        parts[rank.host] = parts.get(rank.host, 0.0) + rank.images
    speeds = own_speeds(step)
    if len(speeds) < 2 or max(parts.values()) <= WORTH * min(parts.values()):
        return ""
    named = ", ".join(f"{host} {round(images)}" for host, images in parts.items())
    spent = max(parts[host] / speed for host, speed in speeds.items())
    equal = sum(parts.values()) / len(parts) / min(speeds.values())
    return (
        f"Images of a step (BALANCE): {named}. The slowest machine's took {seconds(spent)}; with "
        f"equal parts it would have taken {seconds(equal)}."
    )


def curve_section(analysis: Analysis) -> list[str]:
    """Top-1 and the losses per epoch; of a long list only the two ends."""
    scored = [(epoch.top1, epoch) for epoch in analysis.curve if epoch.top1 is not None]
    if not scored:
        return []
    shown = scored if len(scored) <= 10 else [*scored[:4], *scored[-6:]]
    lines = ["EVALUATION  (top-1 after each epoch; loss in training, and on validation images)"]
    for top1, epoch in shown:
        if epoch is scored[-6:][0][1] and len(scored) > 10:
            lines.append("    ...")
        losses = "".join(f"{word:>8}" for word in tables.losses(epoch))
        bar = "#" * round(top1 * BAR)
        lines.append(f"  {epoch.epoch:>4}{top1:>9.2%}{losses}  {bar}")
    return lines


def attempt_section(analysis: Analysis) -> list[str]:
    """The attempts, when there was more than one."""
    attempts = analysis.summary["attempts"]
    if len(attempts) < 2:
        return []
    lines = ["ATTEMPTS"]
    for index, entry in enumerate(attempts, 1):
        hosts = ", ".join(map(str, entry.get("nodes") or []))
        took = f" {seconds(entry['wall_seconds'])}," if entry.get("wall_seconds") else ""
        status = f" {entry['status']}:" if entry.get("status") else ""
        sentence = f"{hosts};{took}{status} {entry.get('reason') or 'no reason recorded'}"
        lines += wrap(sentence, "     ", f"  {index}. ")
    return lines


def advice_section(analysis: Analysis) -> list[str]:
    """What to do: the best that costs no money first, with its command; then the others."""
    advice, listed = analysis.advice, analysis.summary["advice"]
    if not listed:
        return []
    saving = ", saving counted" if advice.saving else ""
    lines = [f"WHAT TO DO  (predicted images/s; now {three_digits(advice.now)}{saving})"]
    for place, item in enumerate(listed, 1):
        figure = three_digits(item["predicted_images_per_second"])
        gain = item["predicted_images_per_second"] / advice.now
        money = " (costs money)" if item["costs_money"] else ""
        number = "  " if place > len(advice.remedies) else f"{place}."
        said = f"{figure} ({gain:.2f} x): {item['change']}{money}"
        lines += wrap(said, " " * 5, f"  {number} ")
        if item["command"] and (place == 1 or place > len(advice.remedies)):
            lines += layout.command(item["command"])
    return lines + wrap("Predictions of one model, from the measured step: docs/report.md.")


def note_section(analysis: Analysis) -> list[str]:
    """What the report could not see."""
    if not analysis.notes:
        return []
    lines = ["WHAT IS MISSING"]
    for note in analysis.notes:
        lines += wrap(note)
    return lines


def setup(analysis: Analysis) -> list[str]:
    """Model, machines, batch and what else decides how fast a step is, as far as it is known."""
    summary, start = analysis.summary, analysis.start
    words = [
        program(analysis),
        f"{counted(summary['nodes'], 'node')} ({counted(summary['world_size'], 'rank')})",
    ]
    parameters, micro_batches = (number(start.get(key)) for key in ("parameters", "accumulate"))
    words += [f"{millions(parameters)} parameters"] if parameters else []
    words += [f"{start['image_size']} px"] if start.get("image_size") else []
    if start.get("global_batch"):
        several = micro_batches is not None and micro_batches > 1
        parts = f" in {micro_batches:.0f} micro-batches" if several else ""
        words.append(f"batch {start['global_batch']}{parts}")
    words += [str(start["precision"])] if start.get("precision") else []
    if summary["sync"] or not analysis.run.plan.get("script"):
        words.append(f"sync {summary['sync'] or 'unknown'}")
    words += [str(start["device"])] if start.get("device") else []
    words += [f"torch {start['torch']}"] if start.get("torch") else []
    return words + instructions(start.get("instructions"))


def program(analysis: Analysis) -> str:
    """The model, or the script with its arguments."""
    script = analysis.run.plan.get("script")
    if script:
        return shlex.join([*script.get("words", ()), *script.get("arguments", ())])
    return str(analysis.start.get("model") or analysis.run.plan.get("model") or "unknown model")


def instructions(value: object) -> list[str]:
    """Which instructions the environment denies oneDNN on a CPU: such a run is slower than the CPU
    could be."""
    limit = value.get("onednn_limit") if isinstance(value, dict) else None
    return [f"oneDNN limited to {limit}"] if limit else []
