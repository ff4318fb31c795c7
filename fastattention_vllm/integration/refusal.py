"""Bad input ends in one sentence.

A ``Refusal`` is raised for everything this plugin will not do: it names the value, the reason and the fix. Inside a
program (``LLM(...)``) it is an ordinary ``ValueError``. Under the ``vllm`` command the excepthook below prints the
sentence alone, because forty lines of traceback through vLLM's argument parsing hide it.
"""

from __future__ import annotations

import errno
import os
import sys
import textwrap
from collections.abc import Iterator
from types import TracebackType

PREFIX = "fastattention: "
SHORT = 300


class Refusal(ValueError):
    """A start that cannot work, explained in one sentence: the value, the reason, the fix."""


def install_excepthook() -> None:
    """Print refusals, and the bad values vLLM itself finds at start, as one sentence; exit status stays 1.

    Only in the ``vllm`` command's own process: a program that embeds vLLM keeps its tracebacks. The command keeps them
    with VLLM_LOGGING_LEVEL=DEBUG.
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
    """The one line to show for ``error``, or None where a traceback is what helps: anything but a bad value."""
    for link in _chain(error):
        if isinstance(link, Refusal):
            return PREFIX + str(link)
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return (
            f"{PREFIX}the port is already in use ({error.strerror}); stop the other server or choose another port "
            "with --port."
        )
    messages = [str(entry["msg"]).removeprefix("Value error, ") for entry in _pydantic_errors(error)]
    if isinstance(error, ValueError | OSError):
        return f"vllm: {_short('; '.join(messages) or str(error))} (VLLM_LOGGING_LEVEL=DEBUG shows more)"
    return None


def _short(message: str) -> str:
    """One line; vLLM's own may list every model it knows."""
    return textwrap.shorten(message, SHORT, placeholder=" ...")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """``error``, the errors pydantic wrapped in it, and what it says caused it, outermost first."""
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
