"""The live settings: the `user_config` of the `Pool` deployment, a change of which rolls nothing. Strict models."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from serve_app.config import AppConfig, Tier
from serve_app.errors import ConfigError
from serve_app.strict import Strict, parse_strict


class Verify(StrEnum):
    """What happens when the golden check fails."""

    ENFORCE = "enforce"
    WARN = "warn"
    OFF = "off"


class SlotCounts(Strict):
    """How many slots there are, and how they come and go."""

    min: int = Field(default=2, ge=1, description="Slots that always exist.")
    max: int = Field(default=3, ge=1, description="Slots that may exist.")
    standby: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        default=1,
        description="Standbys to keep beside the active slots; auto: as many as the largest burst of the last hour "
        "needed at once, at least one.",
    )
    refill: Literal["existing_nodes", "buy", "off"] = Field(
        default="existing_nodes",
        description="Replace a promoted standby: only where it fits now, also on new nodes, or never.",
    )
    refill_delay_s: float = Field(default=0, ge=0, description="How long a standby must be missing before that.")
    demote_after_s: float = Field(default=10, ge=0, description="Quiet seconds before an active slot is demoted.")
    keep_model_s: float = Field(
        default=5,
        ge=0,
        description="How long a busy slot stays with its model before another model may take it over.",
    )
    shrink_after_s: float | None = Field(
        default=None, gt=0, description="Seconds of surplus before a standby is retired; null: never shrink."
    )

    @field_validator("refill", mode="before")
    @classmethod
    def _yaml_off(cls, value: object) -> object:
        return "off" if value is False else value  # YAML 1.1 reads a bare `off` as false

    @property
    def least_standby(self) -> int:
        return 1 if self.standby == "auto" else self.standby

    @model_validator(mode="after")
    def _ordered(self) -> SlotCounts:
        if self.min > self.max:
            raise ValueError(f"slots.min is {self.min}, more than slots.max = {self.max}")
        return self


class LiveModel(Strict):
    """What the pool does for one model."""

    min_active: int = Field(
        default=1, ge=0, description="Active slots that always exist for this model; 0 by default for one of several."
    )
    tier: Tier = Field(default=Tier.HOST, description="How warm its standbys are kept.")
    weight: float = Field(
        default=1, gt=0, description="Its share of the slots, where several models want more than there are."
    )


class PromoteWhen(Strict):
    """Soft capacity: a promotion is asked for while the active slots still take requests."""

    in_flight: int | None = Field(
        default=None, ge=1, description="Requests per active slot; null: 80 % of slot.max_ongoing_requests."
    )
    engine_waiting: int | None = Field(
        default=None, ge=1, description="Requests that wait inside the engine of every active slot; null: any number."
    )
    kv_use: float | None = Field(
        default=0.9, gt=0, le=1, description="Share of the KV cache in use on every active slot; null: any share."
    )
    predicted_ttft_s: float | None = Field(
        default=None, gt=0, description="Predicted time to first token on every active slot; null: not predicted."
    )
    prefill_tokens_per_s: float | None = Field(
        default=None,
        gt=0,
        description="Prompt tokens a second of one slot, for that: `serve-app calibrate` measures it.",
    )

    @model_validator(mode="after")
    def _prediction_needs_a_rate(self) -> PromoteWhen:
        if self.predicted_ttft_s is not None and self.prefill_tokens_per_s is None:
            raise ValueError("predicted_ttft_s needs prefill_tokens_per_s, which `serve-app calibrate` measures")
        return self


class Hold(Strict):
    """Bounds for requests that no active slot can take yet; beyond them: 503 with Retry-After."""

    max_held_requests: int = Field(default=256, ge=0, description="Per proxy and model.")
    max_hold_s: float = Field(default=60, gt=0, description="A client's own shorter timeout goes first.")


class Deadlines(Strict):
    """Beyond these a stage has failed, in seconds."""

    wake_s: float = Field(default=60, gt=0, description="Waking up a standby's engine.")
    verify_s: float = Field(default=30, gt=0, description="Its golden check.")
    sleep_s: float = Field(default=60, gt=0, description="Putting an engine to sleep; its slot has then failed.")
    drain_s: float = Field(default=600, gt=0, description="Then the demotion is given up, not the stream.")


class LiveSettings(Strict):
    """The live half: the `user_config` of the `Pool` deployment."""

    slots: SlotCounts = SlotCounts()
    models: dict[str, LiveModel] = Field(default_factory=dict, description="By model id; missing ones get defaults.")
    promote_when: PromoteWhen = PromoteWhen()
    hold: Hold = Hold()
    deadlines: Deadlines = Deadlines()
    verify: Verify = Field(default=Verify.ENFORCE, description="What happens when the golden check fails.")
    verify_tolerance: float = Field(default=0.2, gt=0, description="Largest allowed difference of a log probability.")
    breaker_failures: int = Field(
        default=3,
        ge=1,
        description="Golden-check failures on different GPUs within an hour that turn `enforce` into `warn`.",
    )

    @field_validator("verify", mode="before")
    @classmethod
    def _yaml_off(cls, value: object) -> object:
        return "off" if value is False else value

    @model_validator(mode="after")
    def _fits(self) -> LiveSettings:
        return _check_counts(self)

    def model(self, model_id: str) -> LiveModel:
        return self.models.get(model_id, LiveModel())


def _live_model(live: LiveSettings, model_id: str, *, several: bool) -> LiveModel:
    """What the pool does for one model, with the default that depends on how many there are."""
    given = live.model(model_id)
    on_demand = several and "min_active" not in given.model_fields_set
    return given.model_copy(update={"min_active": 0 if on_demand else given.min_active})


def _check_shared(live: LiveSettings) -> None:
    """What must hold where several models share slots. Raises ConfigError."""
    ready = [name for name, model in live.models.items() if model.tier is Tier.READY]
    if len(live.models) > 1 and len(ready) > 1:
        raise ConfigError(
            f"Pool.user_config.models: {ready} have tier ready, but a slot keeps one engine awake: use host for all "
            "but one of them"
        )
    try:
        _check_counts(live)
    except ValueError as wrong:
        raise ConfigError(f"Pool.user_config: {wrong}") from None


def _check_counts(live: LiveSettings) -> LiveSettings:
    """Raises ValueError."""
    # What is not set depends on how many models share the slots, which only the static half tells.
    active = sum(model.min_active for model in live.models.values() if "min_active" in model.model_fields_set)
    standby, most = live.slots.least_standby, live.slots.max
    if active + standby > most:
        raise ValueError(
            f"slots.max is {most}, but models.*.min_active ({active}) + slots.standby ({standby}) = {active + standby}"
        )
    return live


def parse_live(user_config: dict[str, Any] | None, app: AppConfig | None) -> LiveSettings:
    """Read the `user_config` of `Pool`. Raises ConfigError naming each wrong key.

    Checked against the static half too, unless that could not be read itself (None).
    """
    live = parse_strict(LiveSettings, user_config or {}, "Pool.user_config")
    if app is None:
        return live
    ids = [model.id for model in app.served]
    unknown = sorted(set(live.models) - set(ids))
    if unknown:
        raise ConfigError(f"Pool.user_config.models: {unknown} not among args.models; allowed: {ids}")
    live = live.model_copy(update={"models": {name: _live_model(live, name, several=len(ids) > 1) for name in ids}})
    _check_shared(live)
    soft, hard = live.promote_when.in_flight, app.slot.max_ongoing_requests
    if soft is not None and soft > hard:
        raise ConfigError(
            f"Pool.user_config.promote_when.in_flight is {soft}, more than args.slot.max_ongoing_requests = {hard}: "
            "requests would be held before a promotion is asked for"
        )
    return live
