"""`prepare`: a model's files, and what engines would compile at their first start, before anything is started."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from serve_app.config import DEFAULT_MODEL, AppConfig, ModelConfig, SlotConfig
from serve_app.errors import ConfigError


def prepare(
    model: Annotated[str, typer.Argument(help="Directory, hub id (org/name), or the default model.")] = DEFAULT_MODEL,
    caches: Annotated[
        Path | None, typer.Option(help="A Serve config file: start its engines once here and fill the caches.")
    ] = None,
) -> None:
    """Put a model's files on this node, and print the directory that holds them.

    Checksums of its weights are written beside them, with which engines compare what they load from the node's weight
    cache. With --caches, start each engine of a Serve config file once, on this machine's own GPUs, and print the
    directory of compiled code and measured sizes, which can be copied to every machine with the same GPU, driver and
    versions.
    """
    if caches is None:
        typer.echo(_prepared(model))
        return
    from serve_app.engine.caches import directory

    for config in _applications(caches):
        for chosen in config.served:
            if chosen.engine == "vllm":
                _prepared(chosen.resolved_source)
            if not chosen.engine_of:
                asyncio.run(_fill(chosen, config.slot))
    typer.echo(directory())


def _prepared(source: str) -> Path:
    """The directory of a model, with a manifest of its weights if it can have one."""
    from serve_app.models import ensure_model
    from serve_app.weights import manifest

    directory = ensure_model(source)
    try:
        manifest.write(directory)
    except OSError as error:
        typer.echo(f"serve-app: no checksums of the weights: {directory} cannot be written to: {error}", err=True)
    return directory


def _applications(path: Path) -> list[AppConfig]:
    from serve_app.cli.files import check_file

    report = check_file(path)
    if report.problems:
        raise ConfigError("\n".join(report.problems))
    return [found.app for found in report.applications if found.app is not None]


async def _fill(model: ModelConfig, slot: SlotConfig) -> None:
    """What a cold start does, without Ray: an engine that has served its warm-up has compiled what it needs."""
    from serve_app import engine as engines

    engine = engines.create(model, slot)
    try:
        await engine.start()
        await engine.warm_up()
        await engine.fingerprint()
        await engine.worker_stages()
    finally:
        await engine.shutdown()
