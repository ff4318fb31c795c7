"""Sources of the kernels, and the tools that compile and simulate them. Not part of the installed package."""
