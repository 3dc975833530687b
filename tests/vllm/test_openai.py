"""OpenAI's API on a real application: `serve run`, two slots, SmolLM2-135M on CPU, and the clients that people use.

One application for all tests here, in their order: what breaks things comes last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import psutil
import pytest

from serve_app.models import ensure_model

from .application import HARD, MODEL, Application, engine_core, is_alive

# A cold start on busy cores is slow, and the first test waits for one.
pytestmark = pytest.mark.timeout(900)

CAPITAL = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
# Longer than any test watches it.
LONG = 900


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    """`serve run`, with one slot active and one standby."""
    ensure_model(MODEL, progress=False)
    application = Application(tmp_path_factory.mktemp("application"))
    try:
        application.start()
        yield application
    finally:
        application.end()


@pytest.fixture(scope="module")
def client(application: Application) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{application.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def chat(client: openai.OpenAI, *messages: dict[str, str], **options: Any) -> Any:
    """A greedy chat completion."""
    defaults: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_completion_tokens": 24}
    return client.chat.completions.create(messages=messages, **(defaults | options))


def text(completion: Any) -> str:
    return completion.choices[0].message.content


def long_stream(client: openai.OpenAI) -> Any:
    """A stream that runs until somebody ends it; it has begun when this returns."""
    stream = chat(
        client,
        user("Tell me a long story."),
        stream=True,
        max_completion_tokens=LONG,
        extra_body={"ignore_eos": True},
    )
    for _ in range(3):
        next(stream)
    return stream


# What clients ask for.


def test_models(client: openai.OpenAI) -> None:
    """`/v1/models` names the configured id."""
    assert [model.id for model in client.models.list()] == [MODEL]


def test_chat_goes_on_over_several_turns(client: openai.OpenAI) -> None:
    """The model sees the earlier turns: it names what only they name, and the prompt has grown."""
    first = chat(client, user(CAPITAL))
    assert text(first) == ANSWER
    assert first.choices[0].finish_reason == "stop"
    told = [user("My dog is called Bruno."), {"role": "assistant", "content": "Bruno is a lovely name for a dog."}]
    second = chat(client, *told, user("What is my dog called?"))
    assert "Bruno" in text(second)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_stream_with_usage(client: openai.OpenAI) -> None:
    """A stream is the whole answer piece by piece, and ends with the usage that was asked for."""
    chunks = list(chat(client, user(CAPITAL), stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(piece or "" for piece in pieces) == ANSWER
    assert len(pieces) > 5
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 8)


def test_stop(client: openai.OpenAI) -> None:
    """Generation ends before the stop string."""
    completion = client.completions.create(
        model=MODEL, prompt="1, 2, 3, 4, 5, 6,", temperature=0, max_tokens=30, stop=["9"]
    )
    assert completion.choices[0].finish_reason == "stop"
    assert completion.choices[0].text == " 7, 8, "


def test_two_choices(client: openai.OpenAI) -> None:
    """`n=2` with a temperature gives two different texts."""
    completion = chat(client, user("Tell me a story."), n=2, temperature=1, seed=1)
    assert [choice.index for choice in completion.choices] == [0, 1]
    assert len({choice.message.content for choice in completion.choices} - {""}) == 2


def test_logprobs(client: openai.OpenAI) -> None:
    """Each greedy token comes with its log probability, which is the largest of the top ones."""
    completion = chat(client, user(CAPITAL), logprobs=True, top_logprobs=3)
    tokens = completion.choices[0].logprobs.content
    assert "".join(token.token for token in tokens).startswith(ANSWER)
    for token in tokens:
        assert token.logprob == max(top.logprob for top in token.top_logprobs) <= 0
        assert len(token.top_logprobs) == 3
    old = client.completions.create(
        model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=1, logprobs=3
    )
    assert old.choices[0].logprobs.tokens == [" Paris"]
    assert old.choices[0].logprobs.token_logprobs[0] == max(old.choices[0].logprobs.top_logprobs[0].values()) < 0


def test_responses(client: openai.OpenAI) -> None:
    """The responses API answers too."""
    response = client.responses.create(model=MODEL, input=CAPITAL, temperature=0, max_output_tokens=24)
    assert (response.status, response.output_text) == ("completed", ANSWER)


def test_tokenize(application: Application, client: openai.OpenAI) -> None:
    """`/tokenize` counts what a request is charged, and `/detokenize` gives the text back."""
    with httpx.Client(base_url=application.url, timeout=60) as http:
        counted = http.post("/tokenize", json={"model": MODEL, "messages": [user(CAPITAL)]}).json()
        tokens = http.post("/tokenize", json={"model": MODEL, "prompt": ANSWER}).json()["tokens"]
        back = http.post("/detokenize", json={"model": MODEL, "tokens": tokens}).json()["prompt"]
    assert counted["count"] == chat(client, user(CAPITAL)).usage.prompt_tokens
    assert back == ANSWER


def test_errors_have_openais_shape(application: Application, client: openai.OpenAI) -> None:
    """An unknown model is 404; a prompt beyond the context and a body that is no JSON are 400."""
    with pytest.raises(openai.NotFoundError, match="`other` does not exist"):
        chat(client, user(CAPITAL), model="other")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1024"):
        chat(client, user("word " * 2000))
    headers = {"content-type": "application/json"}
    broken = httpx.post(f"{application.url}/v1/chat/completions", content=b'{"model": ', headers=headers)
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, 400)


def test_admin_routes_do_not_exist(application: Application) -> None:
    """What operators and vLLM's developers may do, the public port may not."""
    paths = (
        *("sleep", "wake_up", "is_sleeping", "collective_rpc", "reset_prefix_cache", "reset_mm_cache", "server_info"),
        *("pause", "resume", "abort_requests", "update_weights", "start_profile", "stop_profile", "scale_elastic_ep"),
        *("metrics", "load", "invocations", "v1/load_lora_adapter", "v1/unload_lora_adapter", "v1/%2e%2e/sleep"),
    )
    with httpx.Client(base_url=application.url, timeout=60) as http:
        found = {(path, http.request(method, f"/{path}").status_code) for path in paths for method in ("GET", "POST")}
    assert {status for _, status in found} == {404}, found


# What the pool does.


def test_disconnect_ends_generation(application: Application, client: openai.OpenAI) -> None:
    """Seconds after a client hung up its request is gone, and its EngineCore computes nothing any more."""
    stream = long_stream(client)
    (slot,) = application.slots("active")
    core = engine_core(slot)
    assert eventually(lambda: computes(core), within_s=20)
    stream.close()
    application.wait(lambda status: not any(s["in_flight"] for s in status["slots"]), "no request", timeout_s=5)
    assert eventually(lambda: not computes(core), within_s=5)


def eventually(condition: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
    return True


def computes(process: psutil.Process) -> bool:
    """Whether it uses the processor, seen for a second."""
    before = sum(process.cpu_times()[:2])
    time.sleep(1)
    return sum(process.cpu_times()[:2]) - before > 0.05


def test_burst_is_served_by_both_slots(application: Application) -> None:
    """More requests than one slot takes: the standby is woken and verified, and all get the right answer."""
    application.settled()
    before = promotions(application)

    async def burst() -> list[Any]:
        url = f"{application.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=240) as client:
            call = client.chat.completions.create
            calls = [
                call(model=MODEL, messages=[user(CAPITAL)], temperature=0, max_completion_tokens=24) for _ in range(12)
            ]
            return await asyncio.gather(*calls)

    assert {text(completion) for completion in asyncio.run(burst())} == {ANSWER}
    (promotion,) = promotions(application)[len(before) :]
    assert promotion["error"] == ""
    stages = [stage["stage"] for stage in promotion["stages"]]
    assert {"engine.wake.weights", "engine.wake.kv_cache", "engine.verify"} <= set(stages)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_answers_stay_the_same_over_promotions(application: Application, client: openai.OpenAI, tier: str) -> None:
    """A slot that slept, at either tier and twice in a row, gives the answers that it gave before."""
    prompts = [CAPITAL, "Write one sentence about the sea.", "List three colours."]
    wanted = [text(chat(client, user(prompt))) for prompt in prompts]
    application.deploy({"models": {MODEL: {"min_active": 1, "tier": tier}}})
    for _ in range(2):
        (slept,) = (slot for slot in application.settled(tier)["slots"] if slot["state"] == "standby")
        with ExitStack() as streams, ThreadPoolExecutor(HARD) as threads:
            for stream in threads.map(long_stream, [client] * HARD):  # the other slot takes no more
                streams.callback(stream.close)
            application.wait(lambda status: states(status)[slept["slot"]] == "active", "the promotion")  # noqa: B023
            assert [text(chat(client, user(prompt))) for prompt in prompts] == wanted
            (full,) = (slot for slot in application.slots("active") if slot["slot"] != slept["slot"])
            assert full["in_flight"] == HARD
        last = promotions(application)[-1]
        assert (last["slot"], last["error"]) == (slept["slot"], "")


def promotions(application: Application) -> list[dict[str, Any]]:
    return [entry for entry in application.status()["ledger"] if entry["kind"] == "promotion"]


def states(status: dict[str, Any]) -> dict[str, str]:
    return {slot["slot"]: slot["state"] for slot in status["slots"]}


# What ends something.


def test_killed_engine_core(application: Application, client: openai.OpenAI) -> None:
    """Its clients are told, the standby takes over, Serve replaces the slot, and no process of the dead one is left."""
    application.settled()
    (victim,) = application.slots("active")
    (heir,) = application.slots("standby")
    its = [psutil.Process(pid) for pid in (victim["pid"], *victim["engine_pids"])]
    stream = long_stream(client)
    engine_core(victim).kill()
    with pytest.raises((openai.APIError, httpx.HTTPError)):
        for _ in stream:
            pass
    application.wait(lambda status: states(status).get(heir["slot"]) == "active", "the standby takes over")
    assert text(chat(client, user(CAPITAL))) == ANSWER
    replaced = application.settled(timeout_s=400)
    assert victim["slot"] not in states(replaced)
    assert states(replaced)[heir["slot"]] == "active"
    assert [process for process in its if is_alive(process)] == []


def test_ctrl_c_leaves_no_process(application: Application) -> None:
    """Ctrl-C ends `serve run` and all that it started: Ray, proxies, slots, EngineCores, forkservers."""
    assert len(application.processes()) > 10
    assert application.interrupt() == []
