"""How the command line writes numbers, and the console it writes to."""

from __future__ import annotations

import os
import sys

from rich.console import Console

# A pipe has no width: wide enough that no column is left out there.
PIPE_WIDTH = 140


def console() -> Console:
    """Standard output; as wide as the terminal, or as COLUMNS says."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH, highlight=False)


def seconds(value: float) -> str:
    """Three digits that matter: 0.062 s, 4.31 s, 52.4 s, 412 s."""
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} s"


def age(value: float) -> str:
    """How long ago, in the two largest units: 12s, 3m 05s, 2h 13m, 4d 03h."""
    total = max(0, int(value))
    minutes, hours, days = total // 60, total // 3600, total // 86400
    if days:
        return f"{days}d {hours % 24:02d}h"
    if hours:
        return f"{hours}h {minutes % 60:02d}m"
    return f"{minutes}m {total % 60:02d}s" if minutes else f"{total}s"


def gigabytes(value: int) -> str:
    """10^9 bytes, as `host_ram_gb` counts them; a dash for none."""
    return f"{value / 1e9:.1f} GB" if value else "-"


def counted(count: int, one: str, many: str = "") -> str:
    """`1 slot`, `2 slots`; `many` where the plural has no -s."""
    return f"{count} {one if count == 1 else many or one + 's'}"
