"""A genuine `openai` client sends images to `vllm serve`, as data: URLs."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from fastattention_vllm.integration import compat
from tests.environment import USER_ENVIRONMENT
from tests.image_references import IMAGE, Case, image_answers, letters, picture, qwen2_5_vl, save_with_processor
from tests.server.conftest import START_TIMEOUT_S, free_port

VLLM = Path(sys.executable).parent / "vllm"
TOKENS = 8
TEXT = letters(12, 1)

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not compat.has_kernel_dispatcher(), reason="refused with this vLLM"),
]


@contextlib.contextmanager
def serving(model: Path, log: Path) -> Iterator[openai.OpenAI]:
    port = free_port()
    flags = "--attention-backend fastattention --dtype float32 --enforce-eager --host 127.0.0.1 --max-model-len 1024"
    flags += f" --served-model-name tiny --kv-cache-memory-bytes {32 << 20} --port {port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(VLLM), "serve", str(model), *flags.split()],
            env=USER_ENVIRONMENT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=30).status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the server did not become ready:\n{log.read_text()[-4000:]}")
            time.sleep(0.2)
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=600, max_retries=0)
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(120)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def data_url(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def ask(client: openai.OpenAI, part: dict[str, Any]) -> list[int]:
    answer = client.chat.completions.create(
        model="tiny",
        temperature=0,
        max_tokens=TOKENS,
        logprobs=True,
        extra_body={"ignore_eos": True, "return_tokens_as_token_ids": True},
        messages=[{"role": "user", "content": [{"type": "text", "text": TEXT}, part]}],  # type: ignore[list-item, misc]
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    return [int(one.token.removeprefix("token_id:")) for one in logprobs.content]


def test_data_urls_are_answered_as_by_hugging_face_and_videos_are_refused(tmp_path: Path) -> None:
    model = save_with_processor(qwen2_5_vl(), tmp_path / "model")
    images = [picture(seed, 96, 128) for seed in (0, 1)]
    expected = image_answers(model, [Case(TEXT + IMAGE, [image]) for image in images], TOKENS)
    assert expected[0].token_ids != expected[1].token_ids
    log = tmp_path / "serve.log"
    with serving(model, log) as client:
        for image, answer in zip(images, expected, strict=True):
            assert ask(client, {"type": "image_url", "image_url": {"url": data_url(image)}}) == answer.token_ids
        with pytest.raises(openai.BadRequestError, match=r"At most 0 video\(s\) may be provided"):
            ask(client, {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}})
    assert "Videos are off" in log.read_text()
