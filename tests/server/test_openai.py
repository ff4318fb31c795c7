"""The genuine `openai` client against the genuine server."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable

import httpx
import openai
import pytest

from fastattention_vllm.demo.haystack import make_haystack
from tests.server.conftest import Served

MODEL = "demo"
QUESTION = "delta=4711. The weather is fine. delta="


def complete(client: openai.OpenAI, prompt: str, **options: object) -> str:
    answer = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=4, **options)  # type: ignore[call-overload]
    return str(answer.choices[0].text).strip()


def test_the_banner_shows_model_kernel_and_a_line_to_paste(served: Served) -> None:
    assert "demo (up to 65,536 tokens)" in served.banner
    assert "instruction set" in served.banner
    assert "-> '7319' (right," in served.banner
    assert f"curl {served.url}/v1/chat/completions" in served.banner


def test_the_backend_that_runs_is_ours(served: Served) -> None:
    assert "Attention kernel: fastattention CPU" in served.log.read_text()


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=QUESTION, temperature=0, max_tokens=8)
    assert answer.choices[0].text.strip() == "4711"
    assert answer.choices[0].finish_reason == "stop", "the model must end its answer itself"


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        temperature=0,
        messages=[
            {"role": "system", "content": "You remember numbers."},
            {"role": "user", "content": "gamma=1234, beta=5678."},
            {"role": "assistant", "content": "Noted."},
            {"role": "user", "content": "What is the value of gamma?"},
        ],
    )
    assert answer.choices[0].message.content == "1234"


def test_a_number_that_is_not_in_the_context_is_not_invented(client: openai.OpenAI) -> None:
    assert complete(client, "delta=4711. omega=") == "unknown"


def test_streaming_gives_the_same_text(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        messages=[{"role": "user", "content": "alpha=8080. alpha="}],
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "8080"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2  # the number and the end token


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=QUESTION, temperature=0, max_tokens=1, logprobs=5)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["4711"]
    assert logprobs.top_logprobs is not None
    best = logprobs.top_logprobs[0]
    assert len(best) >= 5
    assert max(best, key=lambda token: best[token]) == "4711"
    assert all(value <= 0 for value in best.values())


def words(served: Served) -> list[int]:
    """Token ids of sixteen plain words of the model's vocabulary."""
    text = make_haystack(200, {}, distractors=False, seed=5).text
    body = {"model": MODEL, "prompt": text, "return_token_strs": True}
    tokens = httpx.post(f"{served.url}/tokenize", json=body, timeout=300).json()
    plain = {i for i, string in zip(tokens["tokens"], tokens["token_strs"], strict=True) if string[1:].isalpha()}
    return sorted(plain)[:16]


def sample(client: openai.OpenAI, served: Served, seed: int, n: int = 1) -> list[str]:
    """Twelve sampled tokens. The model is certain of its answers, so only sixteen other words are allowed."""
    answer = client.completions.create(
        model=MODEL,
        prompt=QUESTION,
        temperature=2.0,
        max_tokens=12,
        seed=seed,
        n=n,
        extra_body={"ignore_eos": True, "allowed_token_ids": words(served)},
    )
    return [choice.text for choice in answer.choices]


def test_n_gives_n_samples(client: openai.OpenAI, served: Served) -> None:
    first, second = sample(client, served, seed=7, n=2)
    assert first != second


def test_a_seed_repeats_and_another_differs(client: openai.OpenAI, served: Served) -> None:
    assert sample(client, served, seed=1) == sample(client, served, seed=1)
    assert sample(client, served, seed=1) != sample(client, served, seed=2)


def test_stop_ends_before_the_stop_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=QUESTION, temperature=0, max_tokens=8, stop=["47"])
    assert answer.choices[0].text == ""
    assert answer.choices[0].finish_reason == "stop"


def test_32_concurrent_requests_each_get_their_own_answer(client: openai.OpenAI) -> None:
    def ask(number: int) -> tuple[str, str]:
        haystack = make_haystack(50 + 37 * number, {"kappa": str(1000 + number)}, seed=number, ask="kappa")
        return str(1000 + number), complete(client, haystack.text)

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(ask, range(32)))
    assert [got for _, got in answers] == [wanted for wanted, _ in answers]


def unfinished_requests(served: Served) -> float:
    text = httpx.get(f"{served.url}/metrics", timeout=120).text
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting"))
    )


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_a_client_that_disconnects_frees_its_request(served: Served, client: openai.OpenAI) -> None:
    body = {
        "model": MODEL,
        "prompt": QUESTION,
        "max_tokens": 60000,
        "temperature": 2.0,
        "stream": True,
        "ignore_eos": True,
    }
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=300) as response:
        lines = response.iter_lines()  # kept because a dropped iterator closes the connection
        next(lines)
        assert wait_for(lambda: unfinished_requests(served) == 1), "the request must be running"
    assert wait_for(lambda: unfinished_requests(served) == 0), "the request of a disconnected client must end"
    assert complete(client, QUESTION) == "4711"


def test_a_prompt_over_the_limit_is_a_400_that_names_the_limit(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, make_haystack(65_600, {"alpha": "1"}).text)
    assert caught.value.status_code == 400
    assert "65536" in str(caught.value)


def test_an_unknown_model_is_a_404_that_names_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.completions.create(model="no-such-model", prompt="alpha=", max_tokens=1)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_tokens", [1_000, 8_000, pytest.param(64_000, marks=pytest.mark.full)])
def test_the_needle_is_found_at_every_depth(num_tokens: int, client: openai.OpenAI) -> None:
    """One haystack with a needle at each depth, and one question for each; the prefix cache makes later ones cheap."""
    needles = {"alpha": "7319", "beta": "2046", "gamma": "90", "delta": "5", "omega": "318"}
    depths = [0.0, 0.1, 0.5, 0.9, 1.0]
    haystack = make_haystack(num_tokens, needles, depths=depths, seed=3)
    found = {name: complete(client, f"{haystack.text} {name}=") for name in needles}
    assert found == needles
