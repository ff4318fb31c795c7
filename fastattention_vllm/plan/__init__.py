"""`fastattention plan`: what a model needs on a machine that nobody has to own. Reads config.json alone."""
