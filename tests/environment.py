"""The environment of a user's shell. Engines inside the test process change theirs, which servers must not see."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tests run beside each other. Their engines and servers count as one server, or they would unbind each other's threads.
os.environ.setdefault("FASTATTENTION_SERVER", "tests")
# Two processes of pytest share two cores, each with two OpenMP threads. A thread that waits must not spin on a core
# that another needs: engines would take four times as long. libgomp reads this when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
USER_ENVIRONMENT = dict(os.environ)
