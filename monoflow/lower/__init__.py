"""StepGraph + Plan -> Program: what one rank executes."""
