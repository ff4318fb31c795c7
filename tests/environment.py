"""The environment a user's shell would have: engines inside the test process change theirs, servers must not see it."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
USER_ENVIRONMENT = dict(os.environ)
