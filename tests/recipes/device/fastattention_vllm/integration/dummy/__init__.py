"""vLLM on the dummy device of tests/test_recipes.py."""
