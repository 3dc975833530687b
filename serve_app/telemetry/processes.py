"""When this process started, for stages that began before any of our code ran."""

from __future__ import annotations

import os
import time
from pathlib import Path


def start_time_s() -> float:
    """Start of this process, seconds since the Unix epoch, to 10 ms (Linux clock ticks).

    Not psutil's create_time: it rounds the boot time to whole seconds and is up to a second off.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = float(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), seconds after boot
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - (uptime - started)
