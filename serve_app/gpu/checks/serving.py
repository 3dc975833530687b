"""What Ray Serve's own processes must find in their environment."""

from __future__ import annotations

from serve_app import SERVE_ENVIRONMENT
from serve_app.gpu.facts import Finding, HttpPort, Level, NodeFacts, Wanted

_CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"


def check_environment(facts: NodeFacts, wanted: Wanted) -> Finding:
    """A proxy has what Ray had in its environment on its node, and what the config file's controller_options add."""
    survey = facts.survey
    if survey is None or survey.rays_environment is None:
        return Finding("environment", Level.OK, "not known here: the environment in which Ray was started")
    effective = {**survey.rays_environment, **wanted.serve_environment}
    missing = {name: value for name, value in SERVE_ENVIRONMENT.items() if effective.get(name) != value}
    if survey.http is HttpPort.OURS:  # what its proxy does says more than what we can see of its environment
        missing.pop(_CALLBACK, None)
    if not missing:
        return Finding("environment", Level.OK, "Serve's processes have what they need")
    level = Level.ERROR if _CALLBACK in missing else Level.WARNING
    wants = ", ".join(f"{name}={value}" for name, value in missing.items())
    todo = (
        "set it where Ray starts, or in controller_options.runtime_env.env_vars of the config file (configs/cpu.yaml)"
    )
    return Finding("environment", level, f"missing for Serve's processes: {wants}", todo)


def check_api_keys(facts: NodeFacts, wanted: Wanted) -> Finding:
    """A proxy that cannot read the file with the keys lets nobody in."""
    if facts.survey is None or not facts.survey.unreadable_keys:
        return Finding("api_keys", Level.OK, "no file with keys that could not be read")
    what = f"{facts.survey.unreadable_keys} cannot be read here: proxies on this node let nobody in"
    return Finding("api_keys", Level.ERROR, what, "put it there, or change SERVE_APP_API_KEYS_FILE where Ray starts")
