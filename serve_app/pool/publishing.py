"""What routers are told of the pool. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from serve_app.live import Hold
from serve_app.pool import takeover
from serve_app.pool.messages import ModelRole, RoleMap, Serving
from serve_app.pool.records import SlotRecord
from serve_app.pool.view import ModelView, View


def role_map(
    known: RoleMap,
    view: View,
    records: Mapping[str, SlotRecord],
    names: Mapping[str, tuple[str, ...]],
    hold: Hold,
    retry_after_s: float,
) -> RoleMap:
    """What is true now, under the version of what is known.

    Args:
        names: what clients may call each model.
    """
    active = [slot for slot in view.slots if slot.is_active]
    return replace(
        known,
        # Flex requests that a slot took as a standby are no reason to give it fewer others.
        active={
            slot.slot: Serving(slot.model, slot.hard + records[slot.slot].report.flex_in_flight) for slot in active
        },
        flex=_flex(view, records),
        models={model.model: _role(model, view, names[model.model]) for model in view.models},
        stages={slot.slot: _stage(records[slot.slot]) for slot in view.slots if not slot.is_active},
        traces={slot.slot: records[slot.slot].trace for slot in active},
        hold=hold,
        retry_after_s=retry_after_s,
    )


def _flex(view: View, records: Mapping[str, SlotRecord]) -> dict[str, Serving] | None:
    """Standbys whose engine is awake; None where no slot serves such requests ever."""
    said = {slot.slot: records[slot.slot].report for slot in view.standbys}
    if not any(record.report.flex_hard for record in records.values()):
        return None
    return {name: Serving(report.flex_model, report.flex_hard) for name, report in said.items() if report.flex_model}


def _role(model: ModelView, view: View, names: tuple[str, ...]) -> ModelRole:
    standbys = [slot for slot in view.standbys if model.model in slot.holds]
    coming = view.coming(model.model)
    drains = [slot for slot in coming if slot.is_taken_over]
    return ModelRole(
        names=names,
        usable=len(standbys) + len(coming) - len(drains),
        takeable=len(takeover.others(view, model)) + len(drains),
        on_demand=model.min_active == 0,
    )


def _stage(record: SlotRecord) -> str:
    report = record.report
    return report.error or (f"{report.state}: {report.stage}" if report.stage else str(report.state))
