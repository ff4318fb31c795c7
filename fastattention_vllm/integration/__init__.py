"""The only package that imports vLLM (except attention/flash.py), with one module per interface of vLLM."""
