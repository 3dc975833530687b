"""The documentation names commands, options and files that exist, and facts that are so."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
import yaml
from safetensors.torch import load_file, save_file

from serve_app import cli
from serve_app.checking import check_config
from serve_app.gpu.requirements import CHECKS, SURVEY_CHECKS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("cluster/**/*.md")])
COMMANDS: dict[str, Any] = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
# What stands in a command line instead of a value, and where a command ends in a shell line.
_ENDS = re.compile(r"\s*(?:&&|\||;|>|'$|#|\)).*")


def named_commands(page: Path) -> list[str]:
    """Every `serve-app ...` in code, as far as it is part of the command."""
    text = page.read_text()
    code = re.findall(r"```.*?\n(.*?)```", text, re.S) + re.findall(
        r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S)
    )
    lines = "\n".join(code).splitlines()
    found = [match[1] for line in lines for match in re.finditer(r"(?<!-n )serve-app +(.+)", line)]
    return [command for one in found for command in [_ENDS.sub("", one.replace("[", "").replace("]", ""))] if command]


def named() -> list[tuple[Path, str]]:
    return [(page, command) for page in PAGES for command in named_commands(page)]


def test_commands_are_found() -> None:
    """The test below is about something, here and in the README."""
    assert {page.name for page, _ in named()} >= {"README.md", "operations.md"}
    assert len(named()) > 40


@pytest.mark.parametrize(("page", "command"), named(), ids=lambda value: getattr(value, "name", value))
def test_command_in_documentation_exists(page: Path, command: str) -> None:
    """With the options and the number of arguments that it is shown with."""
    name, *rest = shlex.split(command)
    if name.startswith("--"):
        return
    assert name in COMMANDS, f"{page.name}: serve-app {command}"
    known = COMMANDS[name]
    if hasattr(known, "commands"):  # `trace export`
        known, rest = known.commands[rest[0]], rest[1:]
    options = {option: parameter for parameter in known.params for option in parameter.opts if option.startswith("-")}
    arguments, given = [parameter for parameter in known.params if parameter.param_type_name == "argument"], 0
    words = iter(rest)
    for word in words:
        if word.startswith("-"):
            assert word in options or word == "--help", f"{page.name}: serve-app {command}"
            parameter = options.get(word)
            if parameter is not None and not parameter.is_flag:
                next(words)
        else:
            given += 1
    assert given <= len(arguments), f"{page.name}: serve-app {command}"


def test_checks_of_doctor_in_documentation_exist() -> None:
    """`serve-app doctor ...` (name, name): each is the name of a check."""
    page = (ROOT / "docs" / "operations.md").read_text()
    listed = re.findall(r"`serve-app doctor[^`]*` \(([a-z_, ]+)\)", page)
    names = {name.strip() for group in listed for name in group.split(",")}
    checks = {check.__name__.removeprefix("check_") for check in CHECKS + SURVEY_CHECKS} | {
        "gpus",
        "versions",
        "clocks",
        "ports",
    }
    assert len(names) > 10
    assert names <= checks


def test_files_in_documentation_exist() -> None:
    """Tests, benchmarks, configurations and modules that operations.md points to."""
    page = (ROOT / "docs" / "operations.md").read_text()
    named = set(re.findall(r"\b((?:tests|configs|benchmarks|serve_app|docs)/[\w./]+\.\w+)", page))
    assert len(named) > 5
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_example_of_the_readme_is_good_but_for_what_it_leaves_out() -> None:
    """It is an excerpt, and says so: only Serve's environment is missing."""
    text = (ROOT / "README.md").read_text()
    [example] = re.findall(r"```yaml\n(.*?)```", text, re.S)
    report = check_config(yaml.safe_load(example))
    assert report.problems == []
    assert all(note.startswith("controller_options.runtime_env.env_vars.") for note in report.notes)
    assert "**an excerpt**" in text and len(text.splitlines()) < 200


def test_safetensors_does_not_notice_a_changed_byte(tmp_path: Path) -> None:
    """Why whole files have to be checked by other means."""
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100)}, file)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert load_file(file)["a"][-1] != 0
