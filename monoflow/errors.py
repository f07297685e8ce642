"""Every error a user can meet. Each says what, both values, where, and what to do."""

from __future__ import annotations


class FlowError(ValueError):
    """Base of every error that monoflow raises for a user's input."""


class PlacementError(FlowError):
    """The placement is malformed or does not fit the ranks that run."""


class CaptureError(FlowError):
    """The step function does something that one graph cannot hold; the message names the line."""


class LayoutError(FlowError):
    """A split, pin or plan does not fit the tensor or the placement."""


class PlanError(FlowError):
    """No plan satisfies the request, or a saved plan belongs to another graph."""


class RunError(FlowError):
    """A step failed while running; the message names the task and the user's line."""


class NonFiniteError(RunError):
    """A step's loss or gradients are NaN or Inf; it changed nothing. The message names where that began."""


class CheckpointError(FlowError):
    """A checkpoint cannot be written or read, or does not fit the model; it names file and tensor."""


class DamagedError(CheckpointError):
    """What a checkpoint's files hold is not what was written."""
