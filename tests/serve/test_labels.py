"""Slots only on nodes with a label, as on nodes of one kind of market."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray import serve
from ray.cluster_utils import Cluster

from .pool import Pool

LABELS = {"ray.io/market-type": "on-demand"}


@pytest.fixture
def labelled(cluster: Cluster, serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """An application beside one node with the label and one without."""
    made = [cluster.add_node(num_cpus=1, labels=LABELS), cluster.add_node(num_cpus=1)]
    yield Pool(serve_port, tmp_path_factory.mktemp("script") / "script.json")
    serve.delete("default")
    for node in made:
        cluster.remove_node(node)


def test_slots_are_on_labelled_nodes_only_and_others_are_no_room(labelled: Pool) -> None:
    """Three slots are wanted, two fit; the node without label, and the head with its 16 CPUs, do not count."""
    labelled.deploy({"slots": {"min": 2, "max": 3, "standby": 2}}, slot={"cpus": 0.5, "labels": LABELS})
    status = labelled.settled(active=1, standby=1)
    assert len({slot["node"] for slot in status["slots"]}) == 1
    assert not status["fits_another"]
