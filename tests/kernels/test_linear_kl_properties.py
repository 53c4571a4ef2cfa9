"""linear_kl and linear_kl_loss, values and gradients, on whatever hypothesis draws, against
float64."""

import math
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl_kernels import dispatch, linear_kl, linear_kl_loss, reference
from tests.kernels.test_linear_kl import called
from tests.kernels.test_linear_properties import LAYOUTS, check
from tests.kernels.test_properties import Draw, Op, examples, laid_out

BETAS = (0.0, 1e-3, 0.3, 0.5, 0.999, 1.0)
# Of tokens and vocabulary; in the interpreter a row takes its time.
SIZES = (
    ((), 60), ((1,), 7), ((8,), 17), ((2, 3), 507), ((2, 1, 5), 300), ((9,), 1500), ((4,), 5003),
    ((2,), 50257), ((1,), 50257), ((0, 4), 60), ((33,), 17),
)  # fmt: skip
MANY_ROWS = ((300,), 17), ((3, 37), 60), ((40,), 1500), ((300,), 507)
WIDTHS = (1, 4, 17)
DTYPES = (torch.float32, torch.float32, torch.bfloat16)
PER_TOKEN = ("hidden", "temperature", "weights", "teacher_hidden", "teacher_logprobs")


def drawn_head(
    draw: Draw, name: str, leading: tuple[int, ...], rows: int, scale: float
) -> dict[str, Tensor]:
    """Hidden states, weight and perhaps a bias, in fp32; its logits have a deviation of ``scale``,
    and may be far from 0."""
    width = draw.one_of(WIDTHS, f"width of {name}")
    tensors = {
        "hidden": draw.normal((*leading, width)),
        "weight": draw.normal((rows, width), scale / width**0.5),
    }
    # Of equal logits all are rounded alike, and weights of one size show it.
    if width > 1 and scale:
        tensors["hidden"][..., -1] = 1.0
        tensors["weight"][:, -1] = draw.one_of((0.0, 0.0, 300.0, -9000.0), "shift")
    if draw.sometimes(f"bias of {name}"):
        tensors["bias"] = draw.normal((rows,))
    return tensors


def near(draw: Draw, head: dict[str, Tensor], rows: int, apart: float) -> dict[str, Tensor]:
    """A head whose logits are almost those of another; with as many rows of padding as it needs."""
    found = {k: x * (1 + draw.normal(x.shape, apart)) for k, x in head.items()}
    for name in found.keys() & {"weight", "bias"}:
        x = found[name][:rows]
        found[name] = torch.cat([x, x.new_full((rows - len(x), *x.shape[1:]), 3.0)])
    return found


def settings(draw: Draw, name: str) -> dict[str, Any]:
    return {
        "softcap": draw.one_of((None, None, 3.0, 30.0), f"soft cap of {name}"),
        "logit_scale": draw.one_of((1.0, 0.0625, 4.0), f"scale of {name}"),
    }


def inputs_of(draw: Draw, backend: str, beta: float, kind: str) -> dict[str, Any]:
    """Arguments of both ops; those of the teacher's are named ``teacher_…``."""
    few = backend == "triton" and dispatch.interpreting()
    leading, vocabulary = draw.one_of(SIZES if few else SIZES + MANY_ROWS, "size")
    padded = draw.sometimes("rows of padding")
    rows, more = (
        vocabulary + (n if padded else 0)
        for n in ((3, 0), (0, 6), (5, 2))[draw.one_of((0, 1, 2), "padding")]
    )
    scale = draw.one_of((1.0, 0.0, 10.0, 3000.0), "scale")
    student = drawn_head(draw, "student", leading, rows, scale)
    relation = draw.one_of(("unrelated", "near", "same"), "teacher")
    if relation == "unrelated":
        teacher = drawn_head(draw, "teacher", leading, more, scale)
    else:
        teacher = near(draw, student, more, 1e-3 if relation == "near" else 0.0)
    of_student = settings(draw, "student")
    of_teacher = settings(draw, "teacher") if relation == "unrelated" else dict(of_student)
    allowed = shut_out(draw, beta, vocabulary, student, teacher)
    inputs: dict[str, Any] = {"beta": beta, **of_student}
    for name, head in (("", student), ("teacher_", teacher)):
        dtype = draw.one_of(DTYPES, f"dtype of {name or 'student'}")
        for field, x in head.items():
            layout = draw.one_of(LAYOUTS, f"layout of {name}{field}")
            inputs[name + field] = laid_out(x.to(draw.device, dtype), layout)
    labels = (draw.uniform(leading) * vocabulary).long()
    bias = student.get("bias")
    if bias is not None:  # a label that cannot be has no gradient to compare
        labels[bias[labels].isneginf()] = allowed
    labels[draw.uniform(leading) < draw.one_of((0.0, 0.2), "share of -100")] = -100
    inputs["labels"] = draw.placed(labels)
    inputs["vocabulary"] = vocabulary if padded else None
    inputs["workspace_bytes"] = draw.one_of((None, 1, 4000, 24_000), "workspace_bytes")
    scored = leading
    if len(leading) and leading[-1] > 2 and draw.one_of((True, False, False), "shifted"):
        shift = inputs["shift"] = draw.one_of((1, 2), "shift")
        scored = (*leading[:-1], leading[-1] - shift)
        inputs["teacher_hidden"] = inputs["teacher_hidden"][..., : scored[-1], :]
    inputs["mask"] = draw.perhaps(draw.mask(scored), "masked")
    one = draw.one_of((1.0, 0.5, 4.0, None), "temperature")
    per_row = draw.placed(3.5 * draw.uniform(scored) + 0.5)
    inputs["temperature"] = per_row if one is None else one
    inputs["entropy"] = draw.sometimes("entropy")
    if kind == "head":
        inputs |= {f"teacher_{k}": x for k, x in of_teacher.items()}
    else:
        as_tokens(draw, inputs, of_teacher, vocabulary, kind, allowed)
    return inputs


def shut_out(
    draw: Draw, beta: float, vocabulary: int, student: dict[str, Tensor], teacher: dict[str, Tensor]
) -> int:
    """Biases of -inf, where the divergence stays finite: a token that one of both allows alone is
    one that it has no expectation of, or between the ends any. Returns a token that both allow."""
    allowed = int(draw.uniform(()) * vocabulary)
    if not {"bias"} <= student.keys() & teacher.keys() or not draw.sometimes("impossible tokens"):
        return allowed
    neither = draw.uniform((vocabulary,)) < 0.3
    one = neither | (draw.uniform((vocabulary,)) < 0.2)
    other = neither | (draw.uniform((vocabulary,)) < 0.2) if 0 < beta < 1 else neither
    closed = (other, one) if beta == 0 else (one, other)
    for head, impossible in zip((student, teacher), closed, strict=True):
        impossible[allowed] = False
        head["bias"][:vocabulary][impossible] = -math.inf
    return allowed


def as_tokens(
    draw: Draw, inputs: dict[str, Any], of_teacher: dict[str, Any], vocabulary: int, kind: str,
    allowed: int,
) -> None:  # fmt: skip
    """Log-probs of some tokens in the place of the teacher's head."""
    head = {k: inputs.pop(f"teacher_{k}", None) for k in ("hidden", "weight", "bias")}
    wide = [None if x is None else x.cpu().double() for x in head.values()]
    temperature = inputs["temperature"]
    if isinstance(temperature, Tensor):
        temperature = temperature.cpu().double()
    logits = reference._head_logits(*wide, temperature, **of_teacher)[..., :vocabulary]
    log_q = logits.log_softmax(-1)
    count = draw.one_of((1, 2, 5, 20, vocabulary - 1, vocabulary), "K")
    count = max(1, min(count, vocabulary))
    order = log_q.clone() if draw.sometimes("the likeliest") else draw.normal(log_q.shape)
    order[..., allowed] = math.inf
    ids = order.argsort(-1, descending=True)[..., :count]
    found = log_q.gather(-1, ids).to(draw.one_of(DTYPES, "dtype of log-probs"))
    dropped = draw.uniform(found.shape) < draw.one_of((0.0, 0.3), "share of -inf")
    dropped[..., 0] = False
    found[dropped], ids[dropped] = -math.inf, draw.one_of((-1, 0, 10**9), "id of none")
    scored, shift = inputs["labels"], inputs.get("shift", 0)
    scored = scored[..., shift:] if shift else scored
    if draw.sometimes("label inside"):
        scored[scored != -100] = allowed
    inputs["teacher_ids"] = draw.placed(ids)
    inputs["teacher_logprobs"] = laid_out(found.to(draw.device), draw.one_of(LAYOUTS, "layout"))
    inputs["rest"] = kind


def drawn(random: Random, device: str, *setting: Any) -> Draw:
    """Another case for each setting: hypothesis gives all settings of a test the same states."""
    return Draw(Random(f"{random.getrandbits(32)} {setting}"), device)


def both(name: str, backend: str) -> tuple[Op, Op]:
    """The op and its formula."""

    def flat(op: Op, **options: Any) -> tuple[Tensor, ...]:
        found = called(op, options)
        first, others = ([], found) if name == "linear_kl" else ([found[0]], found[1])
        return *first, *(x for x in others if x is not None)

    op = {"linear_kl": linear_kl, "linear_kl_loss": linear_kl_loss}[name]
    return partial(flat, partial(op, backend=backend)), partial(flat, getattr(reference, name))


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("kind", ["head", "bucket", "renormalised"])
@examples(7)
def test_linear_kl(backend, device, kind, beta, random):
    draw = drawn(random, device, backend, kind, beta)
    inputs = inputs_of(draw, backend, beta, kind)
    check(*both("linear_kl", backend), inputs, [k for k in PER_TOKEN if k in inputs])


def loss_options(draw: Draw, inputs: dict[str, Any], kind: str) -> None:
    shape = inputs["teacher_hidden" if kind == "head" else "teacher_ids"].shape[:-1]
    inputs["weights"] = draw.perhaps(draw.placed(draw.uniform(shape)), "weights")
    over = (None, 7.0, torch.tensor(11.0, device=draw.device), 0.0)
    inputs["denominator"] = draw.one_of(over, "denominator")


@pytest.mark.parametrize("beta", BETAS)
@examples(4)
def test_linear_kl_loss(backend, device, beta, random):
    draw = drawn(random, device, backend, beta)
    kind = draw.one_of(("head", "head", "bucket", "renormalised"), "kind")
    inputs = inputs_of(draw, backend, beta, kind)
    loss_options(draw, inputs, kind)
    check(*both("linear_kl_loss", backend), inputs, [k for k in PER_TOKEN if k in inputs])
