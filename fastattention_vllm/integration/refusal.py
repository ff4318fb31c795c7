"""Bad input ends in one sentence.

This plugin raises a ``Refusal`` for everything it does not support. It names the value, the reason and the fix. In a
program (``LLM(...)``) it is an ordinary ``ValueError``. Under the ``vllm`` command the excepthook below prints only the
sentence, because a traceback of forty lines through vLLM's argument parsing would hide it.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

PREFIX = "fastattention: "
SHORT = 300
OUR_NAME = "FASTATTENTION"
"""In vLLM's lists of valid names."""
NO_CONFIG = re.compile(r"local directory specified: '(?P<folder>[^']+)'")
"""How vLLM begins to say that it can read nothing in a folder. The name of the missing file is at its end."""


class Refusal(ValueError):
    """A start that cannot work, explained in one sentence: the value, the reason, the fix."""


class EngineEnded(RuntimeError):
    """A server that ended because its engine died, explained in one sentence."""


def install_excepthook() -> None:
    """Print refusals, the end of an engine, and bad values that vLLM itself finds at start, as one sentence.

    The exit status stays 1.

    This applies only to the process of the ``vllm`` command. A program that embeds vLLM keeps its tracebacks, and
    VLLM_LOGGING_LEVEL=DEBUG keeps them for the command too.
    """
    if os.path.basename(sys.argv[0]) == "vllm" and os.environ.get("VLLM_LOGGING_LEVEL") != "DEBUG":
        sys.excepthook = _excepthook


def _excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    message = sentence(error)
    if message is None:
        sys.__excepthook__(kind, error, traceback)
    else:
        print(message, file=sys.stderr, flush=True)


def sentence(error: BaseException) -> str | None:
    """The line to show for ``error``. None if ``error`` is not a bad value, because then a traceback helps more."""
    for link in _chain(error):
        if isinstance(link, Refusal | EngineEnded):
            return PREFIX + str(link)
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return (
            f"{PREFIX}the port is already in use ({error.strerror}); stop the other server, or choose another port "
            "with --port."
        )
    messages = [str(entry["msg"]).removeprefix("Value error, ") for entry in _pydantic_errors(error)]
    if isinstance(error, ValueError | OSError):
        message = "; ".join(messages) or str(error)
        if (found := NO_CONFIG.search(message)) and Path(found["folder"]).is_dir():
            return PREFIX + _without_config(Path(found["folder"]))
        return f"vllm: {_short(message)} (VLLM_LOGGING_LEVEL=DEBUG shows more)"
    return None


def _short(message: str) -> str:
    """Shorten to one line. Some of vLLM's own messages list every model, or every backend, that it has."""
    shown = textwrap.shorten(message, SHORT, placeholder=" ...")
    if OUR_NAME in message and OUR_NAME not in shown:
        return textwrap.shorten(message, SHORT - len(OUR_NAME), placeholder=f" ... {OUR_NAME} ...")
    return shown


def _without_config(folder: Path) -> str:
    fix = "pass a folder with config.json and safetensors files"
    gguf = sorted(folder.glob("*.gguf"))
    if gguf:
        return f"{folder} has {gguf[0].name} and no config.json; a folder of GGUF files is not read; {fix}."
    return f"{folder} has no config.json; {fix}."


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """``error``, the errors that pydantic wrapped in it, and its chain of causes, outermost first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        for entry in _pydantic_errors(error):
            context = entry.get("ctx")
            wrapped = context.get("error") if isinstance(context, dict) else None
            if isinstance(wrapped, BaseException):
                yield wrapped
        error = error.__cause__


def _pydantic_errors(error: BaseException) -> list[dict[str, object]]:
    from pydantic import ValidationError

    return [dict(entry) for entry in error.errors()] if isinstance(error, ValidationError) else []
