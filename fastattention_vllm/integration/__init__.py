"""The only room that knows vLLM; one file per seam."""
