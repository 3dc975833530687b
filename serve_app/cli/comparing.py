"""Two files' measurements against each other: which differ, by how much, and whether that is too much. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from serve_app.cli.measurements import Key, Measured, Measurements
from serve_app.differences import Difference, Sample, Verdict, differences, enough
from serve_app.errors import UnusableFile

LEDGER_PERCENTS: tuple[float, ...] = (50,)
REPLAY_PERCENTS: tuple[float, ...] = (50, 95, 99)


@dataclass(frozen=True)
class Row:
    """One line of the comparison; `difference` None where only one of the files has it.

    Attributes:
        counts: how many values there are of each.
        too_much: it is why the whole comparison fails.
    """

    key: Key
    unit: str
    judged: bool
    counts: tuple[int, int]
    difference: Difference | None
    too_much: bool = False

    @property
    def only_in(self) -> str:
        return "" if all(self.counts) else "A" if self.counts[0] else "B"


@dataclass(frozen=True)
class Comparison:
    """All rows, in reading order.

    Attributes:
        error: the chance that any of the judged rows' intervals is wrong, and the same again for all other rows.
        same_requests: of two replays, whether both were asked for the same; None of ledgers.
    """

    what: str
    rows: tuple[Row, ...]
    error: float
    same_requests: bool | None = None

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.too_much]

    @property
    def told(self) -> bool:
        """Whether anything could be said of any row by which a rollout is judged."""
        judged = [row.difference for row in self.rows if row.judged and row.unit == "s" and row.difference]
        return any(difference.verdict is not Verdict.TOO_FEW for difference in judged)


def compare(
    a: Measurements,
    b: Measurements,
    percents: Sequence[float],
    error: float,
    *,
    fail_over: float | None = None,
    seed: int = 0,
) -> Comparison:
    """B against A.

    Args:
        percents: which percentiles of each; empty: those that are usual for what is compared.
        error: 0.05 for intervals at 95 %; divided among the rows, as one of many would look different by chance.
        fail_over: by how many per cent a judged row may be worse, when it is shown to be.
    Raises:
        UnusableFile: one is a ledger and the other a replay.
    """
    if a.what != b.what:
        raise UnusableFile(f"A is a {a.what} and B a {b.what}: they have nothing to compare")
    percents = percents or (LEDGER_PERCENTS if a.what == "ledger" else REPLAY_PERCENTS)
    pairs = _pairs(a, b)
    rows: list[Row] = []
    shared = {judged: _shared_error(pairs, percents, error, judged) for judged in (True, False)}
    for before, after in pairs:
        rows += _rows(before, after, percents, shared[before.judged], seed)
    if fail_over is not None:
        rows = [replace(row, too_much=_too_much(row, fail_over)) for row in rows]
    same = a.sent == b.sent if a.what == "replay" else None
    return Comparison(a.what, tuple(rows), error, same)


def _pairs(a: Measurements, b: Measurements) -> list[tuple[Measured, Measured]]:
    """In A's order; what only B has stands after what it follows there."""
    of_a, of_b = ({one.key: one for one in all_of.measured} for all_of in (a, b))
    order = list(of_a)
    last = -1
    for key in of_b:
        if key not in of_a:
            order.insert(last + 1, key)
        last = order.index(key)
    missing = {key: replace(of_a.get(key) or of_b[key], sample=None) for key in order}
    return [(of_a.get(key, missing[key]), of_b.get(key, missing[key])) for key in order]


def _shared_error(
    pairs: list[tuple[Measured, Measured]], percents: Sequence[float], error: float, judged: bool
) -> float:
    """The error divided among the rows that have enough values to be told apart at all."""
    count = sum(
        not enough(before.sample, percent, error) and not enough(after.sample, percent, error)
        for before, after in pairs
        if before.judged is judged and before.sample and after.sample
        for percent in _statistics(before, percents)
    )
    return error / max(1, count)


def _statistics(measured: Measured, percents: Sequence[float]) -> Sequence[float | None]:
    return (None,) if measured.unit == "share" else percents


def _rows(before: Measured, after: Measured, percents: Sequence[float], error: float, seed: int) -> list[Row]:
    counts = (_count(before.sample), _count(after.sample))
    blank = Row(before.key, before.unit, before.judged, counts, None)
    if before.sample is None or after.sample is None:
        return [blank] if any(counts) else []
    found = differences(before.sample, after.sample, _statistics(before, percents), error, seed)
    return [replace(blank, difference=_strict(one, before.unit)) for one in found]


def _count(sample: Sample | None) -> int:
    return len(sample.values) if sample else 0


def _strict(difference: Difference, unit: str) -> Difference:
    """Where nothing failed before, one failure is worse: no statistics excuse it."""
    is_first = unit == "share" and difference.before == 0 and difference.after > 0
    return replace(difference, verdict=Verdict.WORSE) if is_first else difference


def _too_much(row: Row, fail_over: float) -> bool:
    if not row.judged or row.difference is None or row.difference.verdict is not Verdict.WORSE:
        return False
    relative = row.difference.relative
    return row.unit == "share" or relative is None or 100 * relative > fail_over
