"""What `serve-app status` and `serve-app ledger` show, as plain values. Pure."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from serve_app.pool.book import PoolBook
from serve_app.pool.messages import EngineReport, SlotReport
from serve_app.pool.records import SlotRecord


def of_book(book: PoolBook, now: float, gpus: float, *, ledger: bool) -> dict[str, Any]:
    """Everything a coordinator knows.

    Args:
        now: the book's clock. gpus: of one slot.
        ledger: False for who asks many times a second: the ledger is by far the larger part.
    """
    shortage = book.outlook.shortage
    return {
        "epoch": book.epoch,
        "pid": os.getpid(),
        "version": book.role_map.version[1],
        "blind": book.blind(now),
        "frozen": book.frozen,
        "breaker_open": book.breaker_open,
        "verify": str(book.verify),
        "fits_another": book.outlook.room_beside(book.asked) > 0,
        "shortage": asdict(shortage) if shortage else None,
        "held": sum(router.need.waiting for router in book.routers.values()),
        "routers": len(book.routers),
        "models": _models(book, gpus),
        "live": book.live.model_dump(mode="json"),
        "slots": [_slot(record, now) for _, record in sorted(book.slots.items())],
        "ledger": [{"slot": slot} | asdict(transition) for slot, transition in book.entries.ledger] if ledger else [],
    }


def _models(book: PoolBook, gpus: float) -> dict[str, dict[str, Any]]:
    """Each model's slots by role, what is held for it, and the GPU-seconds of standbys that it has to answer for."""
    view, held = book.view(), book.held()
    return {
        model.model: {
            "names": list(book.models[model.model]),
            "active": len(view.active(model.model)),
            "coming": len(view.coming(model.model)),
            "standby": sum(1 for slot in view.slots if slot.is_standby and model.model in slot.holds),
            "held": held.get(model.model, 0),
            "standby_gpu_s": book.meter.slot_s.get(model.model, 0.0) * gpus,
        }
        for model in view.models
    }


def _slot(record: SlotRecord, now: float) -> dict[str, Any]:
    said = record.report
    return (
        asdict(said)
        | _sums(said)
        | {
            "pending": str(record.pending.verb) if record.pending else "",
            "taken_for": record.taken_for,
            "leaving": record.leaving,
            "heard_s": now - record.heard_s,
        }
    )


def _sums(said: SlotReport) -> dict[str, Any]:
    """Over all engines of a slot; tier and wake are those of the model that it serves or has served last."""
    own = next((engine for engine in said.engines if engine.model == said.model), EngineReport(said.model, None))
    ranks = zip(*(engine.device_bytes for engine in said.engines if engine.device_bytes), strict=False)
    return {
        "tier": str(own.tier or ""),
        "wake_s": own.wake_s,
        "host_bytes": sum(engine.host_bytes for engine in said.engines),
        "device_bytes": [sum(held) for held in ranks],
        "engine_pids": [pid for engine in said.engines for pid in engine.pids],
    }
