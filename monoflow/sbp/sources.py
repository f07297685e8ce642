"""Which rule an op has, and from where: our table, the user, torch's table, or a trial, in this order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from functools import partial
from typing import Any

from ..log import stage_logger
from .registry import Forms, OpRule
from .rules import RULES
from .signature import LocalCall, LocalOp, OpCall, Signature
from .strides import on_contiguous
from .torch_rules import torch_signatures
from .trial import Found, confirm, refusal, search
from .user_rules import REGISTERED, UserRule

log = stage_logger("plan")


class Source(StrEnum):
    """Where a rule comes from."""

    OURS = "monoflow's table"
    USER = "flow.sbp.register"
    TORCH = "torch's table, proven by trial"
    TRIAL = "trial"


class RuleBook(Mapping[Callable, OpRule]):
    """Rules by op, for one planning or lowering: of every operator that has one or may be tried.

    Trials are remembered here, so they last as long as the planning call that made them.

    Attributes:
        sources: where the rules that were asked for came from, so far.
        refused: why ops that were tried have no rule, so far.
    """

    def __init__(
        self,
        own: Mapping[Callable, OpRule] = RULES,
        registered: Mapping[Callable, UserRule] = REGISTERED,
    ) -> None:
        self._own, self._registered = own, registered
        self._made: dict[Callable, OpRule] = {}
        self._found: dict[tuple[str, int], Found] = {}
        self.sources: dict[Callable, Source] = {}
        self.refused: dict[Callable, str] = {}

    def __getitem__(self, op: Callable) -> OpRule:
        if op in self._own:
            return self._own[op]
        if op not in self._made:
            rule = self._rule(op)
            if rule is None:
                raise KeyError(op)
            self._made[op] = rule
        return self._made[op]

    def __iter__(self) -> Iterator[Callable]:
        return iter(dict.fromkeys([*self._own, *self._registered]))

    def __len__(self) -> int:
        return len(self._own.keys() | self._registered.keys())

    def _rule(self, op: Callable) -> OpRule | None:
        user = self._registered.get(op)
        if user is not None:
            self._note(op, Source.USER, "")
            return OpRule(partial(self._by_user, user), user.rule.local or _contiguous, tried=True)
        reason = refusal(op)
        if reason is not None:
            self.refused.setdefault(op, reason)
            return None
        strided = getattr(op, "namespace", "") in ("aten", "prims")  # kernels that take any strides
        return OpRule(self._by_trial, None if strided else _contiguous, tried=True)

    def _by_user(self, user: UserRule, call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
        if axis_size > 1 and not user.is_proven(call):
            key = repr(call), axis_size
            if key not in self._found:
                self._found[key] = Found((), user.prove(call, axis_size))
                if self._found[key].reason:
                    log.warning("the rule of %s is not used: %s", call.op, self._found[key].reason)
            if self._found[key].reason:
                self.refused[call.op] = self._found[key].reason
                return []
        return user.rule.signatures(call, axis_size, forms)

    def _by_trial(self, call: OpCall, axis_size: int, forms: Forms) -> list[Signature]:
        if axis_size == 1:
            return []
        key = repr(call), axis_size
        if key not in self._found:
            self._found[key] = self._try(call, axis_size)
        return list(self._found[key].signatures)

    def _try(self, call: OpCall, axis_size: int) -> Found:
        wanted = torch_signatures(call)
        if wanted:
            found = confirm(call, axis_size, wanted)
            if found.signatures:
                self._note(call.op, Source.TORCH, found.signatures)
                return found
        found = search(call, axis_size)
        if found.signatures:
            self._note(call.op, Source.TRIAL, found.signatures)
        else:
            self.refused[call.op] = found.reason
            log.info("%s has no rule by trial: %s", call.op, found.reason)
        return found

    def _note(self, op: Callable, source: Source, found: Any) -> None:
        if op not in self.sources:
            self.sources[op] = source
            listed = f": {'; '.join(map(str, found))}" if found else ""
            log.info("%s has its rule from %s%s", op, source, listed)


def _contiguous(call: LocalCall) -> LocalOp:
    """A shard may be a strided cut, which a kernel that was written for whole tensors may misread."""
    return on_contiguous, (call.op, *call.args), call.kwargs
