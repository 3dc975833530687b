"""The configurations for `ray up`, by Ray's own loader, which looks neither at a network nor at an account here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from serve_app import RAY_ENVIRONMENT

CLUSTER = Path(__file__).parents[2] / "cluster"
FILES = sorted(CLUSTER.glob("*.yaml"))


def prepared(file: Path) -> dict[str, Any]:
    """As `ray up` sees it: with its defaults, and valid."""
    config = prepare_config(yaml.safe_load(file.read_text()))
    validate_config(config)
    return config


@pytest.fixture(scope="module")
def aws() -> dict[str, Any]:
    return prepared(CLUSTER / "config.yaml")


def node_types(config: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in config["available_node_types"].items() if key.startswith(name)}


def test_files_are_found() -> None:
    """The tests below are about something."""
    assert [file.name for file in FILES] == ["config.yaml", "local.yaml"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_config_is_valid(file: Path) -> None:
    """And a key that Ray does not know would not have been."""
    prepared(file)
    with pytest.raises(Exception, match="unheard_of"):
        validate_config(prepare_config(yaml.safe_load(file.read_text()) | {"unheard_of": 1}))


def test_no_slot_lands_on_the_head(aws: dict[str, Any]) -> None:
    """Slots ask for CPUs, and the head has none for them, by either way in which Ray could learn of them."""
    assert aws["available_node_types"][aws["head_node_type"]]["resources"] == {"CPU": 0}
    assert any("--num-cpus=0" in command for command in aws["head_start_ray_commands"])


def test_pairs_come_in_pairs_with_a_network_of_their_own(aws: dict[str, Any]) -> None:
    """TP8 x PP2: even counts, one placement group, sixteen EFA interfaces of which one carries IP."""
    [pair] = node_types(aws, "tp8-pp2").values()
    assert pair["min_workers"] % 2 == 0 and pair["max_workers"] % 2 == 0
    assert pair["node_config"]["Placement"]["GroupName"]
    cards = pair["node_config"]["NetworkInterfaces"]
    assert [card["NetworkCardIndex"] for card in cards] == list(range(16))
    assert [card["InterfaceType"] for card in cards] == ["efa"] + ["efa-only"] * 15
    assert [card["DeviceIndex"] for card in cards] == [0] + [1] * 15
    assert "--device=/dev/infiniband" in pair["docker"]["worker_run_options"]


def test_spot_nodes_say_what_they_are_and_heed_their_notice(aws: dict[str, Any]) -> None:
    """A label for each kind of market; on spot something waits for the notice and leaves within it."""
    for name, node in node_types(aws, "tp8").items():
        market = node["node_config"].get("InstanceMarketOptions", {}).get("MarketType", "on-demand")
        assert node["labels"]["ray.io/market-type"] == market, name
    [watch] = [command for command in aws["worker_start_ray_commands"] if "spot/instance-action" in command]
    assert "serve-app leave --notice-s 110" in watch, "AWS gives 120 s"


def test_models_are_there_before_ray_is(aws: dict[str, Any]) -> None:
    """Set-up ends before Ray starts on a worker; models and caches are on the disk that was mounted."""
    assert any(command.startswith("serve-app prepare ") for command in aws["worker_setup_commands"])
    options = aws["docker"]["run_options"]
    assert "--volume=/mnt/nvme:/mnt/nvme" in options
    assert all(
        any(f"--env={name}=/mnt/nvme/" in option for option in options) for name in ("SERVE_APP_HOME", "HF_HOME")
    )
    assert any("mount -o noatime /dev/md/serve_app /mnt/nvme" in command for command in aws["initialization_commands"])


def test_local_machines_have_rays_environment() -> None:
    """What the image sets elsewhere."""
    config = prepared(CLUSTER / "local.yaml")
    for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        assert all(f"{name}={value}" in commands[-1] for name, value in RAY_ENVIRONMENT.items())


def test_image_has_rays_environment() -> None:
    """Also for Kubernetes."""
    dockerfile = (CLUSTER / "kuberay" / "Dockerfile").read_text()
    assert all(f"{name}={value}" in dockerfile for name, value in RAY_ENVIRONMENT.items())
    assert "\nUSER 1000\n" in dockerfile
