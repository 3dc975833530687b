"""When requests arrive: steady, a step, spikes, a square wave. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Name = Literal["steady", "step", "spike", "square"]
NAMES: tuple[Name, ...] = ("steady", "step", "spike", "square")
# A spike lasts so long a part of its period.
SPIKE_SHARE = 0.1


@dataclass(frozen=True)
class Wave:
    """A rate over time.

    Attributes:
        rate, peak: requests per second at rest and at the height. period_s: from one spike, or rise, to the next.
        seconds: how long it lasts; a step comes in the middle.
    """

    name: Name
    rate: float
    peak: float
    period_s: float
    seconds: float

    def at(self, at_s: float) -> float:
        """Requests per second at a moment, in seconds from the beginning."""
        phase = at_s % self.period_s / self.period_s
        match self.name:
            case "steady":
                high = False
            case "step":
                high = at_s >= self.seconds / 2
            case "spike":
                high = 0.5 <= phase < 0.5 + SPIKE_SHARE
            case "square":
                high = phase >= 0.5
        return self.peak if high else self.rate


def arrivals(wave: Wave, seed: int) -> list[float]:
    """Moments of arrival, in seconds: a Poisson process of the wave's rate, the same for the same seed."""
    chance, highest = random.Random(seed), max(wave.rate, wave.peak)
    found, at_s = [], 0.0
    while highest > 0 and (at_s := at_s + chance.expovariate(highest)) < wave.seconds:
        if chance.random() * highest < wave.at(at_s):
            found.append(at_s)
    return found
