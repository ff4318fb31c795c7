"""Replacements for parts of vLLM that need its compiled CPU extension or Triton."""
