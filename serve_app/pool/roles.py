"""What one router knows of roles: the maps of all coordinators, merged per slot. Pure."""

from __future__ import annotations

from collections.abc import Collection

from serve_app.pool.messages import ModelRole, RoleMap, Serving, Version


class Roles:
    """The newest role map of every coordinator that some replica of ours belongs to.

    Usually there is one. During a redeploy each slot follows the coordinator of its own code version, so the maps are
    about different slots and merging is a union. What was last known stays until something newer comes.
    """

    def __init__(self) -> None:
        self._maps: dict[str, RoleMap] = {}

    def update(self, coordinator: str, role_map: RoleMap) -> bool:
        """Take a map over; False if it is not newer than what is known."""
        known = self._maps.get(coordinator)
        if known is not None and role_map.version <= known.version:
            return False
        self._maps[coordinator] = role_map
        return True

    def keep_only(self, coordinators: set[str]) -> None:
        """Forget coordinators that no replica belongs to any more."""
        for name in set(self._maps) - coordinators:
            del self._maps[name]

    def active(self) -> dict[str, Serving]:
        """What each active slot does, over all coordinators."""
        merged: dict[str, Serving] = {}
        for role_map in self._maps.values():
            merged |= role_map.active
        return merged

    def flex(self) -> dict[str, Serving] | None:
        """Standbys that serve requests of `service_tier: flex`; None where that means nothing."""
        merged: dict[str, Serving] | None = None
        for role_map in self._maps.values():
            merged = merged if role_map.flex is None else (merged or {}) | role_map.flex
        return merged

    def newest(self) -> RoleMap | None:
        return max(self._maps.values(), key=lambda role_map: role_map.version, default=None)

    def models(self) -> dict[str, tuple[str, ...]]:
        """Model id -> what clients may call it, over all coordinators; the newest one's first model comes first."""
        merged: dict[str, tuple[str, ...]] = {}
        for role_map in sorted(self._maps.values(), key=lambda role_map: role_map.version, reverse=True):
            merged |= {name: role.names for name, role in role_map.models.items() if name not in merged}
        return merged

    def answerable(self, model: str, reachable: Collection[str]) -> str | None:
        """Which of the coordinators within reach need for a model goes to: the newest with a usable standby, or else
        with a slot that the model may be given, or else the newest. None if no map of theirs is known."""
        known = [name for name in self._maps if name in reachable]
        return max(known, key=lambda name: self._merit(name, model), default=None)

    def _merit(self, coordinator: str, model: str) -> tuple[bool, bool, Version]:
        role_map = self._maps[coordinator]
        role = role_map.models.get(model, ModelRole())
        return role.usable > 0, role.takeable > 0, role_map.version

    def usable(self, model: str) -> bool:
        """Whether some slot can become active for a model without a cold start."""
        return any(self._merit(name, model)[:2] != (False, False) for name in self._maps)

    def on_demand(self) -> bool:
        """Whether a request would be served though no slot is active: by a standby that it wakes."""
        roles = [role for role_map in self._maps.values() for role in role_map.models.values()]
        return any(role.on_demand and (role.usable or role.takeable) for role in roles)

    def seen(self, coordinator: str) -> tuple[int, int]:
        """The version acted on, (0, 0) before the first map."""
        role_map = self._maps.get(coordinator)
        return role_map.version if role_map else (0, 0)

    def trace(self, slot: str) -> str:
        """Traceparent of the slot's last promotion, empty if none is known."""
        return next((m.traces[slot] for m in self._maps.values() if slot in m.traces), "")

    def stages(self) -> dict[str, str]:
        """State and stage of slots that are not active, over all coordinators."""
        merged: dict[str, str] = {}
        for role_map in self._maps.values():
            merged |= role_map.stages
        return merged
