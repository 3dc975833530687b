"""Write configs/sample-trace.csv: a small trace to rehearse `serve-app replay` with. Made, not measured.

Two minutes at a calm rate, with a burst every 30 s, like the code trace of the Azure LLM inference traces in shape:
most seconds are empty, and then many requests come at once. The same seed writes the same file.
"""

import csv
import random
from datetime import datetime, timedelta
from pathlib import Path

SEED = 7
SECONDS, CALM_PER_S, BURST_EVERY_S, BURST_REQUESTS, BURST_S = 120.0, 0.5, 30.0, 16, 0.5
BEGIN = datetime(2000, 1, 1)
SAMPLE = Path(__file__).resolve().parent.parent / "configs" / "sample-trace.csv"


def arrivals(chance: random.Random) -> list[float]:
    """A calm Poisson process, and bursts in between."""
    calm, at_s = [], chance.expovariate(CALM_PER_S)
    while at_s < SECONDS:
        calm.append(at_s)
        at_s += chance.expovariate(CALM_PER_S)
    begins = [BURST_EVERY_S * (index + 0.5) for index in range(int(SECONDS / BURST_EVERY_S))]
    return sorted(calm + [begin + chance.uniform(0, BURST_S) for begin in begins for _ in range(BURST_REQUESTS)])


def write(path: Path) -> None:
    """Write the trace; prompts and outputs are log-normal, as in the traces it imitates."""
    chance = random.Random(SEED)
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
        for at_s in arrivals(chance):
            when = BEGIN + timedelta(seconds=round(at_s, 3))
            prompt, output = chance.lognormvariate(5.0, 0.8), chance.lognormvariate(3.5, 0.6)
            rows.writerow([when.isoformat(sep=" ", timespec="milliseconds"), round(prompt), max(1, round(output))])


if __name__ == "__main__":
    write(SAMPLE)
