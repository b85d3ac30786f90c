"""What ran, in words: the same on the terminal and on the page."""

from __future__ import annotations

from contract.text import counted
from report.analysis import Analysis
from report.files import number
from report.units import millions


def setup(analysis: Analysis) -> list[str]:
    """Model, machines, batch and what else decides how fast a step is, as far as it is known."""
    summary, start = analysis.summary, analysis.start
    words = [
        str(start.get("model") or analysis.run.plan.get("model") or "unknown model"),
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
    words.append(f"sync {summary['sync'] or 'unknown'}")
    words += [str(start["device"])] if start.get("device") else []
    words += [f"torch {start['torch']}"] if start.get("torch") else []
    return words + instructions(start.get("instructions"))


def instructions(value: object) -> list[str]:
    """Which instructions the environment denies oneDNN on a CPU: such a run is slower than the CPU
    could be."""
    limit = value.get("onednn_limit") if isinstance(value, dict) else None
    return [f"oneDNN limited to {limit}"] if limit else []
