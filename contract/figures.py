"""Figures in words, spelled alike by all tools: durations, sizes, rates, parts."""

from __future__ import annotations


def seconds(value: float | None) -> str:
    """A duration: 85 ms, 1.41 s, 61 s, 4 min 5 s, 3 h 12 min, 2 d 4 h."""
    if value is None:
        return "unknown"
    if value < 0:
        return f"-{seconds(-value)}"
    if value < 0.0995:
        return f"{value * 1000:.0f} ms"
    if value < 120:
        return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def size(count: float) -> str:
    """Bytes: 512 B, 44.7 MB, 153 MB, 1.3 GB (powers of ten)."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{three_digits(count / scale)} {unit}"
    return f"{count:.0f} B"


def three_digits(value: float) -> str:
    """Three significant digits at most, never an exponent: 153, 44.7, 1.23, 0.04."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def millions(number: float) -> str:
    """A large count: 25.6 M, 0.96 M."""
    return f"{three_digits(number / 1e6)} M"


def percent(fraction: float) -> str:
    """A fraction in [0, 1] as whole percent; small ones are not rounded to nothing."""
    return "< 1 %" if 0 < fraction < 0.005 else f"{fraction:.0%}".replace("%", " %")


def link(mbit: float) -> str:
    """The nominal speed of a link: 100 Mbit/s, 1 Gbit/s, 2.5 Gbit/s."""
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit:g} Mbit/s"
