"""What a user asks of a step when it is decorated, checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..compiler import AUTO, check_mode
from ..config import parse_memory
from ..errors import FlowError, PlacementError, PlanError
from ..mesh import Placement

#: What can become of a step whose loss or gradients are not finite.
ON_NAN = ("raise", "skip", "rollback")


@dataclass(frozen=True)
class Options:
    """The arguments of `flow.graph`, which documents them.

    Attributes:
        placement: the devices; None for all ranks of the job.
        memory: bytes; 0 for no limit, None for what an accelerator has.
        micro_batches: None to let the planner choose.
        stages: of a pipeline; None for one a rank of its axis.
        zero_bubble: whether its schedule is "zero-bubble".
        mode: of `compile=`.
        on_nan: what becomes of a step whose loss or gradients are not finite.
    """

    placement: Placement | None
    plan: str | Path | None
    memory: int | None
    batch_stats: str
    micro_batches: int | None
    balance: str
    stages: int | None
    zero_bubble: bool
    mode: str
    on_nan: str = "raise"

    @property
    def checks_gradients(self) -> bool:
        """Whether state may change only if every gradient is finite, whatever that takes."""
        return self.on_nan != "raise"

    @property
    def plan_or_default(self) -> str | Path:
        """The plan that was asked for, or the default one.

        Statistics of a rank's own rows depend on how the batch is split: not for a search to choose. Nor is
        it to find a plan whose ranks meet within a micro-batch that any of them should be able to do.
        """
        default = AUTO if self.batch_stats == "global" and self.balance == "static" else "data"
        return self.plan or default


def checked(
    placement: object,
    plan: object,
    memory: object,
    batch_stats: object,
    micro_batches: object,
    balance: object,
    stages: object,
    schedule: object,
    compile: object,
    on_nan: object,
) -> Options:
    """The arguments as options.

    Raises:
        FlowError: one has no meaning, or two exclude each other.
    """
    if plan is not None and not isinstance(plan, (str, Path)):
        raise PlanError(
            f"plan={plan!r} is no plan; choose auto, data, zero, tensor, pipeline, a product, or a Path"
        )
    if placement == "auto":
        placement = None
    if placement is not None and not isinstance(placement, Placement):
        raise PlacementError(
            f'placement={placement!r} is not a placement; write flow.placement("cpu", {placement!r})'
        )
    if on_nan not in ON_NAN:
        raise FlowError(f"on_nan={on_nan!r} is none of {', '.join(ON_NAN)}")
    return Options(
        placement,
        plan,
        _checked_memory(memory, plan),
        _either("batch_stats", batch_stats, ("global", "local"), FlowError),
        _checked_micro_batches(micro_batches, plan),
        _checked_balance(balance, plan),
        _checked_stages(stages, plan),
        _is_zero_bubble(schedule, plan),
        check_mode(compile),
        str(on_nan),
    )


def _checked_memory(memory: object, plan: str | Path | None) -> int | None:
    """Bytes of `memory=`, 0 for no limit. Raises FlowError."""
    if memory is None:
        return None
    limit = parse_memory(memory, "memory=") if isinstance(memory, str) else memory
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        raise FlowError(f'memory={memory!r} is not a size of memory; write bytes, such as 2**30, or "80GB"')
    if limit and plan not in (None, AUTO):
        raise PlanError(
            f"memory={memory!r} limits what a search may choose, and plan={str(plan)!r} is no search; "
            "leave out one of them"
        )
    return limit


def _checked_micro_batches(num: object, plan: str | Path | None) -> int | None:
    """`micro_batches=` as a number, None for "auto". Raises PlanError."""
    if num == "auto":
        return None
    number = _count(num, f'micro_batches={num!r} is no number of micro-batches; give 1, 2, ... or "auto"')
    _leave_to_saved(plan, f"micro_batches={num}", "in how many")
    return number


def _checked_balance(balance: object, plan: str | Path | None) -> str:
    """`balance=`. Raises PlanError."""
    chosen = _either("balance", balance, ("static", "dynamic"), PlanError)
    if chosen == "dynamic":
        _leave_to_saved(plan, f"balance={balance!r}", "whether")
    return chosen


def _checked_stages(num: object, plan: str | Path | None) -> int | None:
    """`stages=`. Raises PlanError."""
    if num is None:
        return None
    number = _count(num, f"stages={num!r} is no number of a pipeline's stages; give one or several a rank")
    _leave_to_saved(plan, f"stages={num}", "how many")
    return number


def _is_zero_bubble(schedule: object, plan: str | Path | None) -> bool:
    """Whether `schedule=` is "zero-bubble". Raises PlanError."""
    chosen = _either("schedule", schedule, ("1f1b", "zero-bubble"), PlanError)
    if chosen == "zero-bubble":
        _leave_to_saved(plan, f"schedule={schedule!r}", "which")
    return chosen == "zero-bubble"


def _either(name: str, value: object, two: tuple[str, str], error: type[FlowError]) -> str:
    if value not in two:
        raise error(f'{name}={value!r} is neither "{two[0]}" nor "{two[1]}"')
    return str(value)


def _count(num: object, refusal: str) -> int:
    if isinstance(num, bool) or not isinstance(num, int) or num < 1:
        raise PlanError(refusal)
    return num


def _leave_to_saved(plan: str | Path | None, given: str, says: str) -> None:
    """Refuses what a saved plan says itself."""
    if isinstance(plan, Path):
        raise PlanError(f"{given}: the plan in {plan} says {says}; leave out one of them")
