from __future__ import annotations

import os

# In-process engines: one interpreter, no spawned engine core, so that tests see errors where they happen.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
