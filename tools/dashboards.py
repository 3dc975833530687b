"""The Grafana dashboards of cluster/observability/grafana/dashboards, as values; `tools.observability` writes them."""

from __future__ import annotations

from typing import Any

P = "ray_serve_app"
HERE = 'application=~"$application"'
_SOURCE = {"type": "prometheus", "uid": "prometheus"}
Json = dict[str, Any]


def panel(title: str, queries: dict[str, str], unit: str = "short", kind: str = "timeseries", **more: Any) -> Json:
    """One panel; queries by legend."""
    targets = [
        {"refId": chr(65 + index), "expr": expr, "legendFormat": legend, "datasource": _SOURCE}
        for index, (legend, expr) in enumerate(queries.items())
    ]
    defaults: Json = {"unit": unit, "min": 0}
    return {"title": title, "type": kind, "datasource": _SOURCE, "targets": targets, "width": 12, "height": 8} | {
        "fieldConfig": {"defaults": defaults | more.pop("defaults", {}), "overrides": more.pop("overrides", [])},
        **more,
    }


def stacked(title: str, queries: dict[str, str], unit: str = "short") -> Json:
    custom = {"custom": {"stacking": {"mode": "normal"}, "fillOpacity": 40, "drawStyle": "line"}}
    return panel(title, queries, unit, defaults=custom)


def matrix(title: str, expr: str, row: str, description: str) -> Json:
    """A table with a row for each `row` and a column for each stage, its cells coloured by seconds."""
    found = panel(title, {"": expr}, "s", "table", width=24, height=10, description=description)
    steps = [(None, "green"), (5, "yellow"), (20, "orange"), (60, "red")]
    found["fieldConfig"]["defaults"] |= {
        "custom": {"cellOptions": {"type": "color-background", "mode": "gradient"}, "align": "center"},
        "thresholds": {"mode": "absolute", "steps": [{"value": value, "color": color} for value, color in steps]},
        "decimals": 2,
    }
    found["targets"][0] |= {"format": "table", "instant": True}
    options = {"rowField": row, "columnField": "stage", "valueField": "Value", "emptyValue": "null"}
    return found | {"transformations": [{"id": "groupingToMatrix", "options": options}]}


def heatmap(title: str, name: str, labels: str) -> Json:
    """How often a histogram's values fell into which bucket, over time."""
    expr = f"sum by (le) (increase({name}_bucket{{{labels}}}[$__rate_interval]))"
    found = panel(title, {"{{le}}": expr}, "s", "heatmap")
    found["targets"][0]["format"] = "heatmap"
    return found | {"options": {"calculate": False, "yAxis": {"unit": "s"}, "color": {"scheme": "Oranges"}}}


def quantiles(title: str, name: str, by: str, labels: str = HERE) -> Json:
    def expr(share: float) -> str:
        return f"histogram_quantile({share}, sum by ({by}, le) (rate({name}_bucket{{{labels}}}[$__rate_interval])))"

    return panel(title, {f"{{{{{by}}}}} p50": expr(0.5), f"{{{{{by}}}}} p99": expr(0.99)}, "s")


def pool() -> list[Json]:
    roles = f"sum by (role) ({P}_slots{{{HERE}}}) > 0"
    return [
        panel("Time to first bytes", _ttft(), "s", width=16),
        panel("Waiting requests with a slot or a standby", {"": f"serve_app:standby_hit:ratio_rate1h{{{HERE}}}"},
              "percentunit", "stat", width=4, defaults={"max": 1}),
        panel("Slots wanted", {"": f"max({P}_slots_wanted{{{HERE}}})"}, "short", "stat", width=4),
        stacked("Slots by role", {"{{role}}": roles}),
        stacked("Active slots by model", {"{{model}}": f'sum by (model) ({P}_slots{{role="active",{HERE}}})'}),
        panel("Held requests", {"{{model}}": f"sum by (model) ({P}_held_requests{{{HERE}}})"}),
        panel("Oldest held request", {"{{model}}": f"max by (model) ({P}_held_oldest_seconds{{{HERE}}})"}, "s"),
        stacked("Requests by path", {
            "{{path}}": f"sum by (path) (rate({P}_ttft_seconds_count{{{HERE}}}[$__rate_interval]))"}, "reqps"),
        stacked("Requests refused", {
            "{{reason}}": f"sum by (reason) (rate({P}_shed_total{{{HERE}}}[$__rate_interval]))"}, "reqps"),
        stacked("Promotions", {"{{reason}} {{outcome}}": (
            f"sum by (reason, outcome) (increase({P}_promotions_total{{{HERE}}}[$__rate_interval]))")}),
        quantiles("Promotion, from need to routable", f"{P}_promotion_seconds", "model"),
        panel("Slots without a place", {"{{reason}}": f"max by (reason) ({P}_slot_pending_seconds{{{HERE}}})"}, "s"),
        panel("Age of the routers' view", {
            "{{NodeAddress}}": f"max by (NodeAddress) ({P}_router_view_age_seconds{{{HERE}}})"}, "s"),
        panel("What should not be", {
            "slots that failed the golden check": f"max({P}_golden_failed_slots{{{HERE}}})",
            "breaker open": f"max({P}_breaker_open{{{HERE}}})",
            "frozen": f"max({P}_frozen{{{HERE}}})",
            "slots died in an hour": f"sum(increase({P}_slot_deaths_total{{{HERE}}}[1h]))",
            "coordinator restarts in an hour": (
                f"changes(max({P}_coordinator_start_time_seconds{{{HERE}}})[1h:15s])")}, width=24),
    ]  # fmt: skip


def _ttft() -> dict[str, str]:
    def expr(share: float, by: str) -> str:
        buckets = f"rate({P}_ttft_seconds_bucket{{{HERE}}}[$__rate_interval])"
        return f"histogram_quantile({share}, sum by ({by}le) ({buckets}))"

    return {"p50": expr(0.5, ""), "p99": expr(0.99, ""), "p99 {{path}}": expr(0.99, "path, ")}


def cold_starts() -> list[Json]:
    last = f'{P}_last_stage_seconds{{path="cold_start",stage!="cold_start",{HERE}}}'
    count = f'rate({P}_stage_seconds_count{{{{path="{{0}}",{HERE}}}}}[1h])'
    total = f'rate({P}_stage_seconds_sum{{{{path="{{0}}",{HERE}}}}}[1h])'
    means = f"sum by (stage) ({total}) / (sum by (stage) ({count}) > 0)"
    return [
        matrix("Where each slot's cold start went", f"max by (slot, stage) ({last})", "slot",
               "The last cold start of every living slot, seconds by stage. engine.core contains those that run in "
               "the engine's own processes."),
        matrix("The same by node", f"max by (node, stage) ({last})", "node", "The slowest slot of each node."),
        heatmap("Cold starts", f"{P}_stage_seconds", f'stage="cold_start",path="cold_start",{HERE}'),
        panel("Cold starts in an hour", {
            "{{outcome}}": f"sum by (outcome) (increase({P}_cold_starts_total{{{HERE}}}[1h]))"}),
        panel("Weights in the node cache, last hour", {
            "{{result}}": f"sum by (result) (increase({P}_node_cache_loads_total{{{HERE}}}[1h]))"}),
        panel("Mean of each stage of cold starts, last hour", {"{{stage}}": means.format("cold_start")}, "s"),
        panel("Mean of each stage of promotions, last hour", {"{{stage}}": means.format("promotion")}, "s"),
        matrix("Each slot's last promotion",
               f'max by (slot, stage) ({P}_last_stage_seconds{{path="promotion",{HERE}}})',
               "slot", "Seconds by stage, the whole among them."),
    ]  # fmt: skip


def gpus() -> list[Json]:
    return [
        stacked("GPUs of slots by state", {"{{state}}": f"sum by (state) ({P}_gpus{{{HERE}}})"}),
        panel("Cost of standing by", {
            "{{model}} GPUs": f"sum by (model) (rate({P}_standby_gpu_seconds_total{{{HERE}}}[$__rate_interval]))",
            "{{model}} slots": f"sum by (model) (rate({P}_standby_slot_seconds_total{{{HERE}}}[$__rate_interval]))"}),
        panel("Memory held by sleepers", {"{{model}} {{kind}}": (
            f"sum by (model, kind) ({P}_sleeping_memory_bytes{{{HERE}}})")}, "bytes"),
        panel("Memory that nobody uses", {"{{node}} {{kind}}": (
            f"min by (node, kind) ({P}_memory_headroom_bytes{{{HERE}}})")}, "bytes"),
        panel("GPU memory kept for nothing", {"{{model}} {{kind}}": (
            f"max by (model, kind) ({P}_allocator_unused_bytes{{{HERE}}})")}, "bytes"),
        panel("Node weight cache", {"{{node}}": f"max by (node) ({P}_node_cache_bytes{{{HERE}}})"}, "bytes"),
        panel("GPU utilisation", {"{{ip}} GPU {{GpuIndex}}": "ray_node_gpus_utilization"}, "percent"),
        panel("GPU memory used", {"{{ip}} GPU {{GpuIndex}}": "ray_node_gram_used * 1048576"}, "bytes"),
        panel("CPU", {"{{ip}}": "sum by (ip) (ray_node_cpu_utilization)"}, "percent"),
        panel("Host memory used", {"{{ip}}": "sum by (ip) (ray_node_mem_used)"}, "bytes"),
        panel("Engine: requests in the batch", {
            "{{model_name}} {{ReplicaId}}": "sum by (model_name, ReplicaId) (ray_vllm_num_requests_running)"}),
        panel("Engine: KV cache in use", {
            "{{model_name}} {{ReplicaId}}": "max by (model_name, ReplicaId) (ray_vllm_kv_cache_usage_perc)"},
            "percentunit"),
    ]  # fmt: skip


def dashboard(uid: str, title: str, panels: list[Json]) -> Json:
    """Panels laid out from left to right, in the order given."""
    x = y = tallest = 0
    placed = []
    for number, values in enumerate(panels, 1):
        width, height = values.pop("width"), values.pop("height")
        if x + width > 24:
            x, y, tallest = 0, y + tallest, 0
        placed.append(values | {"id": number, "gridPos": {"x": x, "y": y, "w": width, "h": height}})
        x, tallest = x + width, max(tallest, height)
    choice = {
        "name": "application",
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": f"label_values({P}_slots_wanted, application)", "refId": "A"},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".+",
        "current": {"text": "All", "value": "$__all"},
    }
    return {
        "uid": uid,
        "title": title,
        "tags": ["serve_app"],
        "timezone": "browser",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [choice]},
        "panels": placed,
    }


def everything() -> dict[str, Json]:
    """File name -> dashboard."""
    return {
        "pool.json": dashboard("serve-app-pool", "serve_app: pool", pool()),
        "cold_starts.json": dashboard("serve-app-cold-starts", "serve_app: cold starts and promotions", cold_starts()),
        "gpus.json": dashboard("serve-app-gpus", "serve_app: GPUs and nodes", gpus()),
    }
