"""The StepGraph: one functional graph of a whole training step, and the passes over it."""
