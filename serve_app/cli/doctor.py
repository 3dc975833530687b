"""`doctor`: is every node fit for what is to run? The same checks as a slot's own, before there is a slot."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from serve_app.cli import cluster
from serve_app.cli.text import console
from serve_app.config import AppConfig
from serve_app.errors import ConfigError, InterfaceNotFound, NotRunning
from serve_app.live import LiveSettings

if TYPE_CHECKING:
    from serve_app.gpu.facts import Finding, NodeFacts
    from serve_app.slot.probes import Between

# Serve's own default.
HTTP_PORT = 8000
COLORS = {"ok": "green", "warning": "yellow", "error": "bold red"}


@dataclass(frozen=True)
class Application:
    """What is to run."""

    name: str
    app: AppConfig
    live: LiveSettings
    http_port: int = HTTP_PORT
    serve_environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Variable:
    """One variable of the ranks on a node; `said_by`: `environment` or `serve_app`."""

    name: str
    value: str
    said_by: str


@dataclass(frozen=True)
class Examined:
    """One node after the checks; `trouble` instead of facts where it could not be asked."""

    node_id: str
    facts: NodeFacts | None
    findings: list[Finding]
    variables: list[Variable]
    trouble: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.trouble) or _any_error(self.findings)


@dataclass(frozen=True)
class Diagnosis:
    """One application: all nodes, and what only all of them together show."""

    application: str
    nodes: list[Examined]
    together: list[Finding]

    @property
    def failed(self) -> bool:
        return _any_error(self.together) or any(node.failed for node in self.nodes)


def doctor(
    config: Annotated[
        Path | None, typer.Option("--config", help="The Serve config file that is to be deployed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Plain JSON for scripts.")] = False,
) -> None:
    """Check every node of the cluster, or this machine where Ray does not run: GPUs, versions, memory, disk, network.

    Without --config the settings' defaults are what is to run. The environment shown is that of a slot's ranks, where
    it has several GPUs. Exit status 1 if there is an error.
    \f
    `--json` prints one object: {note, applications: [{application, together: findings, nodes: [{node, node_id, address,
    gpus, trouble, findings, variables: [{name, value, said_by: environment|serve_app}]}]}]}; a finding is {check,
    level: ok|warning|error, what, todo}.
    """
    applications = _applications(config)
    note = _connect()
    found = [_examine(application, connected=not note) for application in applications]
    if as_json:
        typer.echo(json.dumps({"note": note, "applications": [plain(diagnosis) for diagnosis in found]}, indent=2))
    else:
        show(console(), note, found)
    if any(diagnosis.failed for diagnosis in found):
        raise typer.Exit(1)


def _examine(application: Application, *, connected: bool) -> Diagnosis:
    """Ask all nodes at the same time; this machine without a cluster."""
    from serve_app.slot import preflight, probes

    if not connected:
        return diagnose(application, {"": _here(application)})
    if port := _serves_port():
        application = replace(application, http_port=port)
    models, nccl, given = application.app.served, application.app.slot.nccl, application.serve_environment
    nodes = preflight.ray_nodes()
    arguments = {node_id: (node, models, nccl, application.http_port, given) for node_id, node in nodes.items()}
    answers = preflight.on_every_node(preflight.examine, arguments)
    there = {node_id: nodes[node_id] for node_id, answer in answers.items() if not isinstance(answer, str)}
    return diagnose(application, answers, probes.between(there))


def diagnose(
    application: Application, answers: Mapping[str, NodeFacts | str], between: Between | None = None
) -> Diagnosis:
    """Check what the nodes answered, by Ray's node id: facts, or why there are none; and what is between them."""
    from serve_app.gpu.requirements import check, check_cluster
    from serve_app.slot.preflight import wanted
    from serve_app.slot.probes import Between

    asked = replace(
        wanted(application.app, application.live),
        http_port=application.http_port,
        serve_environment=application.serve_environment,
    )
    nodes = [
        Examined(node_id, None, [], [], trouble=answer)
        if isinstance(answer, str)
        else Examined(node_id, answer, check(answer, asked), _variables(answer, application.app))
        for node_id, answer in answers.items()
    ]
    found = [node for node in nodes if node.facts]
    names = {node.node_id: f"{node.facts.network.node}/{node.node_id[:8]}" for node in found if node.facts}
    seen = between.by_name(names) if between else Between()
    together = check_cluster([node.facts for node in found if node.facts], asked, seen.clocks, seen.unreachable)
    return Diagnosis(application.name, nodes, together)


def _serves_port() -> int | None:
    """The port of Serve's proxies where Serve runs; None where it does not."""
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        details = serve.context._get_global_client().get_serve_details()
    except RayServeException:
        return None
    return int(details["http_options"]["port"])


def _applications(config: Path | None) -> list[Application]:
    """What is to run, according to a config file. Raises ConfigError with all that is wrong in it."""
    if config is None:
        return [Application("default", AppConfig(), LiveSettings())]
    from serve_app.checking import given_environment
    from serve_app.cli.files import check_file
    from serve_app.yaml_file import read_yaml

    report = check_file(config)
    if report.problems:
        raise ConfigError("\n".join(f"{config}: {problem}" for problem in report.problems))
    if not report.applications:
        raise ConfigError(f"{config}: no application in it is serve_app's")
    content = read_yaml(config)
    port = (content.get("http_options") or {}).get("port", HTTP_PORT)
    return [
        Application(checked.name, checked.app, checked.live or LiveSettings(), port, given_environment(content))
        for checked in report.applications
        if checked.app is not None
    ]


def _connect() -> str:
    """Connect to the cluster; why there is none, if that was not asked for by RAY_ADDRESS."""
    try:
        cluster.connect()
    except NotRunning as error:
        if os.environ.get("RAY_ADDRESS"):
            raise
        return f"only this machine was checked: {error}"
    return ""


def _here(application: Application) -> NodeFacts:
    """This machine's facts without a cluster: its GPUs are those that the driver shows."""
    from ray.util import get_node_ip_address

    from serve_app.gpu.facts import RayNode
    from serve_app.slot import preflight

    alone = RayNode(address=get_node_ip_address())
    app = application.app
    facts = preflight.examine(alone, app.served, app.slot.nccl, application.http_port, application.serve_environment)
    return replace(facts, ray=replace(alone, gpus=facts.software.gpus))


def _variables(facts: NodeFacts, app: AppConfig) -> list[Variable]:
    """What the ranks of a slot on this node would have; nothing where the interface is not there."""
    from serve_app.gpu import nccl

    try:
        added = nccl.environment(app.slot.nccl, facts.network, facts.environment)
    except InterfaceNotFound:
        added = {}
    there = {name: value for name, value in facts.environment.items() if not name.startswith("PYTORCH_")}
    rows = [Variable(name, value, "environment") for name, value in there.items()]
    rows += [Variable(name, value, "serve_app") for name, value in added.items()]
    return sorted(rows, key=lambda variable: variable.name)


def _any_error(findings: list[Finding]) -> bool:
    return any(found.level == "error" for found in findings)


def plain(diagnosis: Diagnosis) -> dict[str, Any]:
    """One application of `--json`."""
    return {
        "application": diagnosis.application,
        "together": [asdict(found) for found in diagnosis.together],
        "nodes": [
            {
                "node": node.facts.network.node if node.facts else "",
                "node_id": node.node_id,
                "address": node.facts.network.address if node.facts else "",
                "gpus": node.facts.ray.gpus if node.facts else 0,
                "trouble": node.trouble,
                "findings": [asdict(found) for found in node.findings],
                "variables": [asdict(variable) for variable in node.variables],
            }
            for node in diagnosis.nodes
        ],
    }


def show(out: Console, note: str, found: list[Diagnosis]) -> None:
    """Print a table for each node."""
    for diagnosis in found:
        out.print(Text(f"application {diagnosis.application}", style="bold"))
        out.print(_table(diagnosis.together, []))
        for node in diagnosis.nodes:
            out.print(_headline(node))
            out.print(_table(node.findings, node.variables))
    if note:
        out.print(Text.assemble(("note: ", "yellow"), note))


def _headline(node: Examined) -> Text:
    if node.facts is None:
        return Text.assemble(
            ("node ", "bold"), f"{node.node_id[:8]}  ", (f"not examined: {node.trouble}", COLORS["error"])
        )
    network = node.facts.network
    where = f"  {network.address}  {node.facts.ray.gpus:g} GPUs  "
    return Text.assemble((f"node {network.node}", "bold"), where, (node.node_id[:8], "dim"))


def _table(findings: list[Finding], variables: list[Variable]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for found in findings:
        todo = Text(f"\n{found.todo}", style="bold") if found.todo else Text()
        table.add_row(Text(f"  {found.level}", style=COLORS[found.level]), found.check, Text(found.what) + todo)
    for variable in variables:
        there = Text(" (set there)", style="dim") if variable.said_by == "environment" else Text()
        table.add_row("", "environment", Text(f"{variable.name}={variable.value}") + there)
    return table
