"""The model's files, and how fast they can be read."""

from __future__ import annotations

from serve_app.gpu.facts import Finding, Level, NodeFacts, Wanted

# Share of a cold start's deadline that reading the weights may take without a word.
_PATIENCE = 1 / 3


def check_model(facts: NodeFacts, wanted: Wanted) -> Finding:
    """Files that an index names and that are not there, or that end too early, fail a slot after minutes."""
    models = facts.survey.models if facts.survey else {}
    broken = {source: problems for source, problems in models.items() if problems}
    if broken:
        what = "; ".join(f"{source}: {_some(problems)}" for source, problems in broken.items())
        sources = ", ".join(f"`serve-app prepare {source}`" for source in broken)
        todo = f"remove what is broken and run {sources} again, or copy it from a node that has it"
        return Finding("model", Level.ERROR, what, todo)
    missing = [source for source, problems in models.items() if problems is None]
    if missing:
        commands = ", ".join(f"`serve-app prepare {source}`" for source in missing)
        todo = f"run {commands} on this node, else the first slot downloads it"
        return Finding("model", Level.WARNING, f"{', '.join(missing)} is not on this node", todo)
    return Finding("model", Level.OK, f"{', '.join(models)}: complete" if models else "no files are needed")


def _some(problems: tuple[str, ...]) -> str:
    more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
    return f"{', '.join(problems[:3])}{more}"


def check_disk(facts: NodeFacts, wanted: Wanted) -> Finding:
    """Weights that are not in the page cache come from the disk, in every cold start and in a wake of tier `disk`."""
    if facts.survey is None or facts.survey.disk is None:
        return Finding("disk", Level.OK, "not measured")
    disk, weights = facts.survey.disk, facts.weights_bytes
    if not disk.bytes_per_s:
        todo = "name a directory that can be written to in SERVE_APP_HOME"
        return Finding("disk", Level.WARNING, f"{disk.path} could not be measured: {disk.trouble}", todo)
    what = f"{disk.path} reads {disk.bytes_per_s / 1e9:.2f} GB/s past the page cache"
    if weights is None or not wanted.runs_on_gpus_of(facts):
        return Finding("disk", Level.OK, what)
    seconds = weights / wanted.slot.nodes / disk.bytes_per_s
    what, deadline = f"{what}: {seconds:.0f} s for a slot's weights", wanted.slot.start_deadline_s
    todo = "put the models on local NVMe (SERVE_APP_HOME, HF_HOME), or raise slot.start_deadline_s"
    if seconds > deadline:
        return Finding("disk", Level.ERROR, f"{what}, slot.start_deadline_s is {deadline:g}", todo)
    if seconds > deadline * _PATIENCE:
        return Finding("disk", Level.WARNING, f"{what}, slot.start_deadline_s is {deadline:g}", todo)
    return Finding("disk", Level.OK, what)
