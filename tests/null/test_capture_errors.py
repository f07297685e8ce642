"""What one graph cannot hold is refused with the user's line and the way out, and nothing is left behind."""

from __future__ import annotations

import logging
import re
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from monoflow.capture.subject import subject_of
from monoflow.errors import CaptureError

from .graph_run import Things, trace

X, Y = torch.ones(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
MODEL = nn.Linear(4, 3)
OTHER = nn.Linear(3, 3)
CLOSED_OVER = torch.zeros(3)


class Keeps(nn.Module):
    """Stores what it should not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner, self.last, self.history = how, nn.Linear(4, 3), None, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        if self.how == "attribute":
            self.last = out
        elif self.how == "list":
            self.history.append(out.sum())
        elif self.how == "buffer":
            self.register_buffer("late", out)
        return out


def branches(x: torch.Tensor) -> torch.Tensor:
    loss = MODEL(x).sum()
    if loss > 0:  # LINE
        loss = loss * 2
    return loss


def takes_item(x: torch.Tensor) -> torch.Tensor:
    return MODEL(x) * MODEL(x).sum().item()  # LINE


def takes_list(x: torch.Tensor) -> torch.Tensor:
    return x * MODEL(x).sum(0).tolist()[0]  # LINE


def takes_array(x: torch.Tensor) -> torch.Tensor:
    return x * float(MODEL(x).detach().numpy().sum())  # LINE


def formats(x: torch.Tensor) -> torch.Tensor:
    loss = MODEL(x).sum()
    print(f"{loss:.3f}")  # LINE
    return loss


def takes_float(x: torch.Tensor) -> torch.Tensor:
    return x * float(MODEL(x).sum())  # LINE


def finds_nonzero(x: torch.Tensor) -> torch.Tensor:
    return x.nonzero()  # LINE


def indexes_by_mask(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0].sum()  # LINE


def selects_by_mask(x: torch.Tensor) -> torch.Tensor:
    return torch.masked_select(x, x > 0).sum()  # LINE


def finds_unique(x: torch.Tensor) -> torch.Tensor:
    return torch.unique(x)  # LINE


def compares(x: torch.Tensor) -> torch.Tensor:
    return x if torch.equal(x, x + 1) else x * 2  # LINE


def writes_closure(x: torch.Tensor) -> torch.Tensor:
    CLOSED_OVER.add_(MODEL(x).detach().sum(0))  # LINE
    return x.sum()


def writes_closure_out(x: torch.Tensor) -> torch.Tensor:
    torch.mul(x[0, :3], 2, out=CLOSED_OVER)  # LINE
    return x.sum()


def writes_batch(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)  # LINE
    return MODEL(x)


def writes_batch_view(x: torch.Tensor) -> torch.Tensor:
    x.detach().T[1:][0] = 0  # LINE
    return MODEL(x)


def writes_batch_out(x: torch.Tensor) -> torch.Tensor:
    torch.mul(MODEL.weight[0].detach(), 2, out=x[0])  # LINE
    return MODEL(x)


def writes_batch_statistics(x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(MODEL(x), x[0, :3], x[1, :3], training=True)  # LINE


def uses_other_module(x: torch.Tensor) -> torch.Tensor:
    return OTHER(MODEL(x)).sum()  # LINE


def permutes(x: torch.Tensor) -> torch.Tensor:
    return x[torch.randperm(6)]  # LINE


def draws_multinomial(x: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(MODEL(x).softmax(-1), 1)  # LINE


class LooksBack(torch.autograd.Function):
    """A gradient that looks at values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return grad * grad.sum().item()  # LINE


def looks_in_backward(x: torch.Tensor) -> torch.Tensor:
    loss = LooksBack.apply(MODEL(x)).sum()  # pyright: ignore
    loss.backward()
    return loss


READS = "torch.where or tensor arithmetic, or move this outside the step"
SIZED = "use a mask with torch.where"
FAILURES: list[tuple[Callable, str, str]] = [
    (branches, r"reads a tensor's value", READS),
    (takes_item, r"reads a tensor's value", READS),
    (looks_in_backward, r"reads a tensor's value", READS),
    (takes_list, r"reads a tensor's value", READS),
    (takes_array, r"takes a tensor's values to Python \(.numpy\(\)\)", READS),
    (formats, r"takes a tensor's values to Python \(formatting", READS),
    (takes_float, r"reads a tensor's value", READS),
    (finds_nonzero, "nonzero", SIZED),
    (indexes_by_mask, "indexing with a boolean mask", SIZED),
    (selects_by_mask, "masked_select", SIZED),
    (finds_unique, "unique", SIZED),
    (compares, "compares two tensors", READS),
    (writes_closure, r"writes in place to a tensor it closes over, shape \(3,\)", "make it a buffer"),
    (writes_closure_out, r"writes in place to a tensor it closes over, shape \(3,\)", "make it a buffer"),
    (writes_batch, r"writes in place to its argument batch.0 ", "write to a copy (x = x.clone())"),
    (writes_batch_view, r"writes in place to its argument batch.0 ", "write to a copy (x = x.clone())"),
    (writes_batch_out, r"writes in place to its argument batch.0 ", "write to a copy (x = x.clone())"),
    (writes_batch_statistics, r"writes in place to its argument batch.0 ", "x.clone()"),
    (uses_other_module, r"a parameter of shape \(3, 3\)", "add its module: @flow.graph"),
    (permutes, "aten.randperm", "draw it outside the step"),
    (draws_multinomial, "aten.multinomial", "draw it outside the step"),
]


def line_in(function: Callable) -> str:
    """`file:line` of the line marked LINE in a function."""
    lines = Path(__file__).read_text().splitlines()
    first = function.__code__.co_firstlineno
    return f"{__file__}:{next(i for i in range(first, len(lines)) if '# LINE' in lines[i - 1])}"


@pytest.mark.parametrize(("function", "what", "advice"), FAILURES, ids=lambda x: getattr(x, "__name__", ""))
def test_refusals_name_the_line_and_the_way_out(function: Callable, what: str, advice: str) -> None:
    with pytest.raises(CaptureError, match=what) as error:
        trace(function, (MODEL,), X)
    message = str(error.value)
    function = LooksBack.backward if function is looks_in_backward else function
    assert f"at {line_in(function)}" in message and advice in message, message
    assert error.value.__cause__ is None and error.value.__suppress_context__ == (
        error.value.__context__ is not None
    )
    assert not any(
        "tlparse" in note or "While executing" in note for note in getattr(error.value, "__notes__", ())
    )
    assert_untouched(MODEL)


def assert_untouched(model: nn.Module) -> None:
    for module in model.modules():
        assert not any(isinstance(x, FakeTensor) for x in [*module.__dict__.values(), *module.parameters()])
        assert "zero_grad" not in module.__dict__
    assert all(param.grad is None and type(param) is nn.Parameter for param in model.parameters())


def test_the_written_argument_is_named_among_several() -> None:
    def step(x: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = x.clone()
        x.add_(1)
        batch["y"].masked_fill_(batch["y"] == 0, -100)  # LINE
        return MODEL(x).sum() + batch["y"].sum()

    with pytest.raises(CaptureError, match=r"its argument batch.1.y ") as error:
        trace(step, (MODEL,), X, {"y": Y})
    assert line_in(step) in str(error.value)


def test_a_write_to_a_copy_of_an_argument_is_fine() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x.masked_fill_(x > 0, 2.0)
        x[0] = 0
        return MODEL(x).sum()

    assert trace(step, (MODEL,), X) is not None


def test_a_line_in_a_library_comes_with_the_line_of_the_step() -> None:
    class Library(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x.sum().item()

    model = nn.Sequential(MODEL, Library())

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x)  # LINE

    with pytest.raises(CaptureError, match=r"\(in module '1'\)") as error:
        trace(step, (model,), X)
    assert f"called from {line_in(step)}" in str(error.value)


@pytest.mark.parametrize(
    ("how", "what", "text"),
    [
        ("attribute", "stores a tensor as attribute 'last' of module '' .Keeps.", "self.last = out"),
        ("list", "stores a tensor as attribute 'history' of module ''", "self.history.append(out.sum())"),
        ("buffer", "registers buffer 'late' of module ''", ""),
    ],
)
def test_tensors_that_a_module_would_keep_are_refused(how: str, what: str, text: str) -> None:
    model = Keeps(how)
    with pytest.raises(CaptureError, match=what) as error:
        trace(lambda x: model(x).sum(), (model,), X)
    assert "register" in str(error.value)
    if text:
        lines = Path(__file__).read_text().splitlines()
        number = next(i for i, line in enumerate(lines, 1) if line.strip() == text)
        assert f"{__file__}:{number}" in str(error.value)
    assert model.last is None and model.history == [] and not dict(model.named_buffers())
    assert_untouched(model)


def test_a_parameter_that_no_model_has() -> None:
    optimizer = torch.optim.SGD([*MODEL.parameters(), *OTHER.parameters()], lr=0.1)
    with pytest.raises(CaptureError, match=r"parameter 2 of group 0 of SGD, shape \(3, 3\).*pass the module"):
        subject_of((MODEL, optimizer))
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1)
    subject = subject_of((MODEL, optimizer))
    optimizer.add_param_group({"params": list(OTHER.parameters())})
    with pytest.raises(CaptureError, match="parameter 0 of group 1 of SGD"):
        subject.check()
    with pytest.raises(
        CaptureError, match=r"takes modules and optimizers, got dict.*@flow.graph\(model, optimizer\)"
    ):
        subject_of((MODEL, {}))


def test_a_tensor_computed_from_parameters_before_the_step() -> None:
    doubled = MODEL.weight * 2

    def step(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, doubled).sum()  # LINE

    with pytest.raises(CaptureError, match="computed from parameters before the step") as error:
        trace(step, (MODEL,), X)
    assert line_in(step) in str(error.value)


@pytest.mark.parametrize("value", [1.5, "done", 3, {1, 2}])
def test_results_that_are_no_tensors(value: Any) -> None:
    def step(x: torch.Tensor) -> Any:
        return {"loss": MODEL(x).sum(), "extra": [value]}

    with pytest.raises(
        CaptureError, match=rf"returns a {type(value).__name__}.*loss.item\(\) after the call"
    ) as error:
        trace(step, (MODEL,), X)
    assert f"{__file__}:{step.__code__.co_firstlineno}" in str(error.value) and "result.extra.0" in str(
        error.value
    )


@pytest.mark.parametrize(
    ("batch", "advice"),
    [
        (UserDict(x=X), r"argument batch.0 of the step is a UserDict; pass dict\(batch\)"),
        ({"x": np.ones(3)}, r"argument batch.0.x of the step is a ndarray; pass torch.as_tensor"),
        ([object()], r"argument batch.0.0 of the step is a object; pass tensors"),
    ],
)
def test_arguments_that_are_no_tree_of_tensors(batch: Any, advice: str) -> None:
    with pytest.raises(CaptureError, match=advice):
        trace(lambda batch: batch["x"], (MODEL,), batch)


def scheduled(*, scheduler_inside: bool) -> tuple[Callable, Things]:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        if scheduler_inside:
            scheduler.step()  # LINE
        else:
            optimizer.param_groups[0]["lr"] = 0.05
        return loss

    return step, (model, optimizer)


def test_a_scheduler_inside_the_step() -> None:
    step, things = scheduled(scheduler_inside=True)
    with pytest.raises(
        CaptureError, match=r"changes the learning rate.*train_step\(batch\); scheduler.step\(\)"
    ) as error:
        trace(step, things, X)
    assert line_in(step) in str(error.value)
    assert things[1].param_groups[0]["lr"] == 0.1 and not things[1].state
    assert_untouched(things[0])


def test_a_learning_rate_set_inside_the_step() -> None:
    step, things = scheduled(scheduler_inside=False)
    with pytest.raises(CaptureError, match=r"sets the optimizer's 'lr' \(to 0.05\); set it outside the step"):
        trace(step, things, X)
    assert things[1].param_groups[0]["lr"] == 0.1


def test_errors_of_the_users_own_keep_their_type_and_traceback() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as error:
        trace(step, (MODEL,), X)
    assert [entry.name for entry in error.traceback][-1] == "step"
    (note,) = error.value.__notes__
    assert re.search(rf"while monoflow captured the step at {__file__}:\d+", note)
    assert_untouched(MODEL)


def test_a_wrong_shape_is_said_once(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        trace(lambda x: MODEL(x).sum(), (MODEL,), torch.ones(6, 5))
    assert capfd.readouterr().err == ""
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert not logging.getLogger("torch._subclasses.fake_tensor").disabled


def compiled_in_place() -> nn.Module:
    model = nn.Linear(4, 3)
    model.compile()
    return model


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "what", "advice"),
    [
        (lambda: torch.jit.script(nn.Linear(4, 3)), "TorchScript", "plain module that it was scripted"),
        (lambda: torch.jit.trace(nn.Linear(4, 3), X), "TorchScript", "plain module that it was scripted"),
        (lambda: torch.compile(nn.Linear(4, 3)), "compiled by torch.compile", "compiled._orig_mod"),
        (compiled_in_place, "compiled by torch.compile", r"without a call of .compile\(\)"),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_compiled_models_are_refused(
    make: Callable[[], nn.Module], what: str, advice: str, inside: bool
) -> None:
    model = nn.Sequential(make()) if inside else make()
    where = "model 0 given to flow.graph" + ", in module '0'," * inside
    with pytest.raises(CaptureError, match=rf"^{where} is {what}.*{advice}"):
        trace(lambda x: model(x).sum(), (model,), X)


def test_a_number_on_a_module_that_moves_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = nn.Linear(4, 3), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.inner(x) * self.calls

    model = Counts()
    trace(lambda x: model(x).sum(), (model,), X)
    assert (
        "changes the Python number 'calls' of module '' (Counts)" in caplog.text and __file__ in caplog.text
    )
    assert model.calls == 0
