"""What a replay is going to send: which part of the trace, to which models, how long each request. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from serve_app import traces
from serve_app.errors import ConfigError, NotRunning
from serve_app.traces import TraceRequest


@dataclass(frozen=True)
class Plan:
    """What is sent.

    Attributes:
        factors: model id -> by what its token counts are multiplied.
        unknown: models whose context nobody has told; their token counts are as in the trace.
    """

    requests: Sequence[TraceRequest]
    factors: Mapping[str, float]
    unknown: Sequence[str] = ()

    @property
    def seconds(self) -> float:
        """When the last request is due."""
        return self.requests[-1].at_s

    def scaling(self) -> str:
        """One sentence about the token counts."""
        told = [f"{model} x {factor:.3g}" for model, factor in self.factors.items() if factor < 1]
        said = f"token counts scaled to the context: {', '.join(told)}" if told else "token counts as in the trace"
        return f"{said}; nobody says how long the context of {', '.join(self.unknown)} is" if self.unknown else said


def plan(
    trace: Sequence[TraceRequest],
    names: Mapping[str, str],
    contexts: Mapping[str, int],
    *,
    start_s: float,
    seconds: float,
    speed: float,
) -> Plan:
    """Choose, map and scale. Raises ConfigError if nothing is left to send.

    Args:
        names: the trace's model names -> ids to ask for. contexts: by id, in tokens; 0 or missing: not known.
    """
    mapped = [replace(request, model=names[request.model]) for request in trace]
    ids = sorted({request.model for request in mapped})
    # By the whole trace: what a request is scaled to must not depend on which part of the trace is replayed.
    factors = {
        model: traces.scale((request for request in mapped if request.model == model), contexts.get(model, 0))
        for model in ids
    }
    chosen = traces.window(mapped, start_s, seconds, speed)
    if not chosen:
        raise ConfigError(f"no request of the trace lies in these seconds; it has {len(trace)} in {trace[-1].at_s:g} s")
    requests = [traces.scaled(request, factors[request.model]) for request in chosen]
    return Plan(requests, factors, [model for model in ids if not contexts.get(model)])


def model_names(options: Iterable[str], found: Iterable[str], served: str) -> dict[str, str]:
    """Which model id each model name of a trace stands for.

    Args:
        options: `ID` for all of them, or `NAME=ID` for one; a name that is left out is itself an id.
        found: the names in the trace, an empty one for requests without.
        served: what the application serves, for a trace that names no models; empty if it does not say.

    Raises:
        ConfigError: the options contradict each other or the trace. NotRunning: nobody says which model to ask for.
    """
    given = list(options)
    mapping = dict(option.split("=", 1) for option in given if "=" in option)
    ids = [option for option in given if "=" not in option]
    if len(ids) > 1 or (ids and mapping):
        raise ConfigError(f"--model {' --model '.join(given)}: either one id for all, or NAME=ID for each")
    names = set(found)
    unknown = sorted(set(mapping) - names)
    if unknown:
        raise ConfigError(f"--model {unknown[0]}=...: the trace has no such model; it has {_listed(names)}")
    usual = ids[0] if ids else ""
    chosen = {name: usual or mapping.get(name, name) or served for name in sorted(names)}
    if not all(chosen.values()):
        raise NotRunning("no slot is active, so nobody can say which model is served; name it with --model")
    return chosen


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(filter(None, names))) or "no column Model"
