"""Locust against any OpenAI server: streams at a steady rate, a step, spikes, a square wave, or a trace.

How to use it is in docs/load.md.

    python -m locust -f benchmarks/load/locustfile.py --headless -H http://127.0.0.1:8000 --shape spike --seconds 60

Locust's users wait for an answer before they ask again, so a slow server sees less load, which hides what a burst does
to it. Here one user sends every request when it is due, whatever became of the earlier ones; when all have ended, so
does the run. Beside the requests, Locust reports `first token`, and `first token, held` for those that the pool held.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import gevent
from gevent.pool import Group
from locust import HttpUser, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from urllib3 import PoolManager

from benchmarks.load.arrivals import NAMES, Wave, arrivals
from serve_app import traces
from serve_app.cli import burst_client, replay_plan, replay_run
from serve_app.cli.burst_client import Answer
from serve_app.errors import ServeAppError
from serve_app.traces import TraceRequest

ROUTE = "/v1/chat/completions"
MAX_CONNECTIONS = 4096
# Ending the run kills the user long before.
QUIT_S = 60
log = logging.getLogger(__name__)


@events.init_command_line_parser.add_listener
def _options(parser: LocustArgumentParser) -> None:
    group = parser.add_argument_group("Load")
    group.add_argument("--shape", choices=[*NAMES, "trace"], default="steady")
    group.add_argument("--rate", type=float, default=1.0, help="requests per second at rest")
    group.add_argument("--peak", type=float, default=8.0, help="requests per second at the height")
    group.add_argument("--period", type=float, default=20.0, help="seconds from one spike, or rise, to the next")
    group.add_argument("--seconds", type=float, default=60.0, help="how long requests are sent")
    group.add_argument("--prompt-tokens", type=int, default=100)
    group.add_argument("--output-tokens", type=int, default=50)
    group.add_argument("--model", default="", help="model id; if left out, the first one that is served")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--trace", default="", help="CSV file for --shape trace")
    group.add_argument("--speed", type=float, default=1.0, help="how many times faster than in the trace")


def schedule(options: Any, host: str) -> list[TraceRequest]:
    """All requests that the options ask for. Raises ConfigError, or NotRunning if no server answers."""
    served = burst_client.served_models(host)
    if options.shape != "trace":
        [model] = replay_plan.model_names([], [options.model], next(iter(served), "")).values()
        wave = Wave(options.shape, options.rate, options.peak, options.period, options.seconds)
        tokens = options.prompt_tokens, options.output_tokens
        return [TraceRequest(at_s, *tokens, model) for at_s in arrivals(wave, options.seed)]
    trace = traces.read(Path(options.trace))
    mapping = [options.model] if options.model else []
    names = replay_plan.model_names(mapping, {request.model for request in trace}, next(iter(served), ""))
    plan = replay_plan.plan(trace, names, served, start_s=0, seconds=options.seconds, speed=options.speed)
    return list(plan.requests)


class Arrivals(HttpUser):
    """The one user that sends everything; more of them would send it several times."""

    fixed_count = 1
    environment: Environment
    pool_manager = PoolManager(maxsize=MAX_CONNECTIONS, block=False)

    @task
    def send_all(self) -> None:
        """Send each request when it is due, and end the run when the last one has ended."""
        try:
            requests = schedule(self.environment.parsed_options, self.client.base_url.rstrip("/"))
            began_s, streams = time.monotonic(), Group()
            for index, request in enumerate(requests):
                gevent.sleep(max(0.0, began_s + request.at_s - time.monotonic()))
                streams.spawn(self._stream, index, request)
            streams.join()
        except ServeAppError as error:  # Locust itself would log it and begin anew, for ever
            log.error("%s", error)
            self.environment.process_exit_code = 1
        assert self.environment.runner is not None
        # Not from this user's own greenlet, which ending the run waits for.
        gevent.spawn(self.environment.runner.quit)
        gevent.sleep(QUIT_S)

    def _stream(self, index: int, request: TraceRequest) -> None:
        answer, began_s = Answer(), time.monotonic()
        body = replay_run.body(index, request, exact=True)
        with self.client.post(
            ROUTE, json=body, headers=burst_client.key(), stream=True, catch_response=True
        ) as response:
            burst_client.take_headers(answer, response.status_code, response.headers)
            if answer.status == 200:
                answer.error = burst_client.CUT_OFF
                for line in response.iter_lines(decode_unicode=True):
                    burst_client.take_line(answer, line, time.monotonic() - began_s)
            else:
                answer.error = str(response.error or burst_client.message(response.content))
            # Locust's own time ends with the headers.
            response.request_meta["response_time"] = (time.monotonic() - began_s) * 1000
            if answer.error:
                response.failure(answer.error)
            else:
                response.success()
        self._tell_first_token(answer)

    def _tell_first_token(self, answer: Answer) -> None:
        if answer.first_token_s is not None and not answer.error:
            name = "first token, held" if answer.held_s else "first token"
            fire: Any = self.environment.events.request.fire
            fire(
                request_type="SSE", name=name, response_time=answer.first_token_s * 1000, response_length=0, context={}
            )
