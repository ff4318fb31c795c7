"""`fastattention plan`: predicts what a model needs on a machine, from its config.json alone."""
