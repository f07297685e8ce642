"""Step function -> StepGraph: run once on fake tensors, backward and optimizer included."""
