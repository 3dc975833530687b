"""What a router knows of roles, from one or two coordinators."""

from __future__ import annotations

from serve_app.pool.messages import ModelRole, RoleMap, Serving, Version
from serve_app.pool.roles import Roles

BOTH = ("old", "new")


def role_map(version: Version, *active: str, standbys: int = 0, stages: dict[str, str] | None = None) -> RoleMap:
    models = {"m": ModelRole(("m",), standbys)}
    return RoleMap(version, dict.fromkeys(active, Serving("m", 4)), models, stages=stages or {})


def roles(**maps: RoleMap) -> Roles:
    made = Roles()
    for name, one in maps.items():
        made.update(name, one)
    return made


def test_roles_before_the_first_map_nothing_is_active() -> None:
    """Without a map: nobody active, nothing seen, nobody to ask."""
    empty = Roles()
    assert (empty.active(), empty.stages(), empty.newest(), empty.answerable("m", {"c"})) == ({}, {}, None, None)
    assert empty.seen("c") == (0, 0)


def test_roles_older_map_is_dropped() -> None:
    """A map that was overtaken on the way changes nothing, nor does one seen before."""
    known = roles(c=role_map((1, 5), "a"))
    assert not known.update("c", role_map((1, 4), "b"))
    assert not known.update("c", role_map((1, 5), "b"))
    assert known.active() == {"a": Serving("m", 4)}


def test_roles_restarted_coordinator_is_newer_though_it_counts_anew() -> None:
    """A later epoch beats any number of an earlier one."""
    known = roles(c=role_map((1, 500), "a"))
    assert known.update("c", role_map((2, 1), "b"))
    assert (known.active(), known.seen("c")) == ({"b": Serving("m", 4)}, (2, 1))


def test_roles_two_coordinators_are_merged() -> None:
    """In a redeploy each coordinator speaks for its own slots."""
    known = roles(
        old=role_map((1, 9), "a", stages={"x": "standby"}), new=role_map((2, 1), "b", stages={"y": "starting"})
    )
    assert known.active() == {"a": Serving("m", 4), "b": Serving("m", 4)}
    assert known.stages() == {"x": "standby", "y": "starting"}
    assert known.newest() == role_map((2, 1), "b", stages={"y": "starting"})


def test_roles_need_goes_to_the_newest_with_a_usable_standby() -> None:
    """The newest coordinator that can do something is asked; where none can, the newest."""
    assert roles(old=role_map((1, 9), standbys=1), new=role_map((2, 1), standbys=1)).answerable("m", BOTH) == "new"
    assert roles(old=role_map((1, 9), standbys=1), new=role_map((2, 1))).answerable("m", BOTH) == "old"
    assert roles(old=role_map((1, 9)), new=role_map((2, 1))).answerable("m", BOTH) == "new"


def test_roles_need_goes_to_nobody_out_of_reach() -> None:
    """What a coordinator had last said it could do is worth nothing once it is gone."""
    known = roles(old=role_map((1, 9), standbys=1), new=role_map((2, 1)))
    assert known.answerable("m", {"new"}) == "new"
    assert known.answerable("m", {"another"}) is None


def test_roles_keep_only_forgets_a_coordinator_without_replicas() -> None:
    """When a code version has gone its slots are not routed to any more."""
    known = roles(old=role_map((1, 9), "a"), new=role_map((2, 1), "b"))
    known.keep_only({"new"})
    assert known.active() == {"b": Serving("m", 4)}
    assert known.seen("old") == (0, 0)


def test_a_pool_without_active_slots_answers_on_demand_only_if_it_is_meant_to() -> None:
    """`min_active: 0` and a standby: the first request wakes it; a pool that lost its active slot is not that."""
    roles = Roles()
    roles.update("c", RoleMap((1, 1), models={"m": ModelRole(usable=1)}))
    assert not roles.on_demand()
    roles.update("c", RoleMap((1, 2), models={"m": ModelRole(usable=0, on_demand=True)}))
    assert not roles.on_demand()
    roles.update("c", RoleMap((1, 3), models={"m": ModelRole(usable=1, on_demand=True)}))
    assert roles.on_demand()
