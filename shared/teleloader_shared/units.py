"""Numbers as people read them."""

from __future__ import annotations


def counted(count: int, one: str, many: str | None = None) -> str:
    """So many things: ``1 worker``, ``12,345 workers``; `many` is the plural where it is not `one` with an s."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def size(nbytes: float) -> str:
    """Bytes in powers of 1024: ``512 B``, ``1.5 MiB``, ``120 GiB``."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(nbytes) < 1023.5:
            break
        nbytes, unit = nbytes / 1024, larger
    return f"{number(nbytes)} {unit}"


def number(value: float) -> str:
    """Three digits where there are decimals, all where there are none: ``0.0123``, ``1.5``, ``120``, ``12,345``."""
    if value == 0 or abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def seconds(value: float) -> str:
    """A time: ``12 us``, ``3.4 ms``, ``1.2 s``, ``5 min 12 s``, ``3 h 7 min``, ``2 d 4 h``."""
    if value >= 59.95:
        return _long(round(value))
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= 0.9995 * factor:
            return f"{number(value / factor)} {unit}"
    return f"{number(value / 1e-6)} us" if value > 0 else "0 s"


def share(value: float) -> str:
    """A part of a whole: ``7 %``, ``0.3 %``."""
    return f"{100 * value:.1f} %" if 0 < value < 0.0095 else f"{100 * value:.0f} %"


def _long(value: int) -> str:
    for larger, smaller, names in ((86400, 3600, "d h"), (3600, 60, "h min"), (60, 1, "min s")):
        if value >= larger:
            big, small = names.split()
            return f"{value // larger} {big} {value % larger // smaller} {small}"
    return f"{value} s"
