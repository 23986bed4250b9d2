"""Human-readable formatting of counts, sizes, durations and percentages."""

from __future__ import annotations


def counted(count: int, one: str, many: str | None = None) -> str:
    """Format a count with its noun: ``1 worker``, ``12,345 workers``.

    Args:
        count: The number.
        one: Singular of the noun.
        many: Plural of the noun, if it is not the singular with an s.
    """
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def size(nbytes: float) -> str:
    """Format a size in bytes with binary units: ``512 B``, ``1.5 MiB``, ``120 GiB``."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(nbytes) < 1023.5:
            break
        nbytes, unit = nbytes / 1024, larger
    return f"{number(nbytes)} {unit}"


def number(value: float) -> str:
    """Format a number with three significant digits below 100, else as an integer: ``0.0123``, ``1.5``, ``12,345``."""
    if value == 0 or abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def seconds(value: float) -> str:
    """Format a duration: ``12 us``, ``3.4 ms``, ``1.2 s``, ``5 min 12 s``, ``3 h 7 min``, ``2 d 4 h``."""
    if value >= 59.95:
        return _long(round(value))
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= 0.9995 * factor:
            return f"{number(value / factor)} {unit}"
    return f"{number(value / 1e-6)} us" if value > 0 else "0 s"


def share(value: float) -> str:
    """Format a fraction as a percentage: ``7 %``, ``0.3 %``."""
    return f"{100 * value:.1f} %" if 0 < value < 0.0095 else f"{100 * value:.0f} %"


def _long(value: int) -> str:
    for larger, smaller, names in ((86400, 3600, "d h"), (3600, 60, "h min"), (60, 1, "min s")):
        if value >= larger:
            big, small = names.split()
            return f"{value // larger} {big} {value % larger // smaller} {small}"
    return f"{value} s"
