"""A model of the Ascend 910B that times compiled programs without an NPU. All its times are predicted."""
