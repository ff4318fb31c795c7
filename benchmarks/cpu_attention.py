"""CPU attention next to torch SDPA, vLLM's CPU_ATTN and the machine's roofline: `fastattention bench cpu` as a script.

    python benchmarks/cpu_attention.py --suite quick
    python benchmarks/cpu_attention.py --case "decode bf16 (32,8,128) 32K b1" --threads 1,2 --json result.json

Run by: users who want to know the speed of their CPU, and contributors who change a CPU kernel.
Needs: this package with its extra `bench`, and an otherwise idle machine. A CPU build of vLLM adds CPU_ATTN.
"""

from __future__ import annotations

import sys

from fastattention_vllm.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "cpu"]
    main()
