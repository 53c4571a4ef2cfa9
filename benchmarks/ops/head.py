"""Ops that fuse the LM head [V, H]: linear_logprobs, linear_ppo_loss, linear_nll_loss, linear_kl
and linear_kl_loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

import fastrl_kernels as kernels
from benchmarks import eager, peers
from benchmarks.cases import Goal
from benchmarks.gate import Problem, Results
from benchmarks.ops.inputs import (
    ACTIVE,
    COMPILED_VOCABULARIES,
    HEADS,
    ROWS,
    checked_rows,
    flags,
    labels_of,
    normal,
    upstream,
)
from benchmarks.ops.logits import CUTS
from benchmarks.ops.record import HOPPER, MIB, Compiled, Expect, Op, Sizes, Work
from benchmarks.shapes import Shape
from benchmarks.timing import DTYPES
from fastrl_kernels import reference

# The kernels work on a chunk of logits whose rows begin at 16-byte boundaries and are padded to
# whole vectors, unlike logits from users, of any vocabulary.
CHUNK = Expect(
    load_bytes=16,
    store_bytes=16,
    exempt=frozenset(
        {"_load_tail", "_store_tail", "_earlier_maximum"}
        | {"_keep", "_put_back", "_drop", "_cut_by_bits", "_load_end", "_store_end"}
    ),
    why="the last window of a row is masked per vector; a label that is the largest logit is rare, "
    "and so is the look at what stands before it; ids of sets name logits one by one",
)
# Per-token tensors of a few rows, by the kernels of ppo_loss, which has calls of its own: where a
# specialisation is shared with those, their demands and exemptions count.
POLICY = Expect(load_bytes=0, any_tile=True, exempt=frozenset({"partials_ptr"}))
COMPILED_ROWS, COMPILED_WIDTH = 32, 8


def _head(shape: Shape, generator: torch.Generator) -> dict[str, Tensor]:
    """Hidden states, a head whose logits have a standard deviation of about 3, and labels."""
    dtype = DTYPES[shape.dtype]
    hidden = normal(generator, shape.rows, shape.hidden).to(dtype)
    weight = torch.empty(shape.vocabulary, shape.hidden, dtype=dtype)
    for rows in weight.split(8192):
        rows.copy_(normal(generator, *rows.shape, scale=3.0 / shape.hidden**0.5))
    return {"hidden": hidden, "weight": weight, "labels": labels_of(shape, generator)}


def _leaves(shape: Shape) -> tuple[str, ...]:
    if not shape.backward:
        return ()
    return ("hidden", "weight") if shape.head == "trained" else ("hidden",)


def _work(products: int, what: str) -> Callable[[Shape], Work]:
    def of(shape: Shape) -> Work:
        count = products - (shape.head == "frozen") if shape.backward else 1
        flops = 2.0 * count * shape.active * shape.rows * shape.vocabulary * shape.hidden
        # Each product reads the weight, or writes its gradient.
        nbytes = count * shape.vocabulary * shape.hidden * shape.itemsize
        return Work(nbytes, flops, f"{count} GEMMs of N·V·H" + (what if shape.backward else ""))

    return of


def _axes(*entropy: str, backward: Sequence[bool] = (True,)) -> dict[str, Sequence[Any]]:
    return {
        "hidden_vocabulary": HEADS,
        "rows": ROWS,
        "dtype": tuple(DTYPES),
        "active": ACTIVE,
        "entropy": entropy,
        "head": ("trained", "frozen"),
        "backward": backward,
    }


def _compiled_inputs(dtype: torch.dtype, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden": torch.zeros(COMPILED_ROWS, COMPILED_WIDTH, dtype=dtype, requires_grad=True),
        "weight": torch.zeros(vocabulary, COMPILED_WIDTH, dtype=dtype, requires_grad=True),
        "labels": torch.zeros(COMPILED_ROWS, dtype=torch.int64),
        "backend": "triton",
    }


def _options() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {
        "": {},
        "entropy": {"entropy": True},
        "softcap": {"softcap": 30.0},
        "temperatures": {"temperature": torch.ones(COMPILED_ROWS)},
        "extras": {"extras": kernels.Extras._fields},
    }
    return found | {"all": {k: v for options in found.values() for k, v in options.items()}}


def _sets(vocabulary: int) -> kernels.TokenSets:
    """Sets of all kinds for the rows of a compiled call."""
    few, half = torch.arange(3), torch.arange(0, vocabulary, 2)
    most = torch.arange(vocabulary - 3)
    kinds = (few, half, most)
    return kernels.TokenSets.of_ids([kinds[i % 3] for i in range(COMPILED_ROWS)], vocabulary)


def _linear_logprobs(
    shape: Shape, generator: torch.Generator, backend: str, pick_rows: bool
) -> Problem:
    entropy = shape.entropy != "off"
    names = ("logprobs", "entropies") if entropy else ("logprobs",)
    inputs = _head(shape, generator)
    sets = None
    if shape.sampling:
        inputs["labels"], inputs["inside"] = _drawn(shape, inputs)
        sets = kernels.TokenSets.of_mask(inputs["inside"]).to(inputs["inside"].device)
    rows = None
    if shape.active != 1:
        inputs["mask"] = flags(generator, shape.rows, share=shape.active)
        if pick_rows:
            rows = inputs["mask"].nonzero().squeeze(-1)  # callers know them on the host

    def ours(
        hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor | None = None, **_: Tensor
    ) -> Results:
        if rows is not None:
            hidden, labels, mask = hidden[rows], labels[rows], None
        found = kernels.linear_logprobs(
            hidden, weight, labels, mask=mask, entropy=entropy, support=sets, backend=backend
        )
        found = found if entropy else (found,)
        if rows is not None:
            found = [x.new_zeros(shape.rows).index_copy(0, rows, x) for x in found]
        return dict(zip(names, found, strict=True))

    def exact(
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        mask: Tensor | None = None,
        inside: Tensor | None = None,
    ) -> Results:
        logits = hidden @ weight.T
        if inside is not None:
            logits = logits.masked_fill(~inside, -torch.inf)
        found = reference.token_logprobs(logits, labels, mask=mask, entropy=entropy)
        return dict(zip(names, found if entropy else (found,), strict=True))

    return Problem(
        inputs,
        ours=ours,
        eager=partial(eager.linear_logprobs, entropy=entropy),
        exact=exact,
        wrt=_leaves(shape),
        upstream=upstream(shape, generator),
        by_row=frozenset({"hidden", "labels", "mask", "inside", *names}),
        row_bytes=8 * shape.vocabulary,
    )


def _drawn(shape: Shape, head: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A token for each row from a part of its distribution, and that part [N, V]."""
    tokens, inside = [], []
    for hidden in head["hidden"].split(512):
        logits = hidden @ head["weight"].T
        keys = torch.arange(len(hidden), device=hidden.device)
        drawn = kernels.sample_tokens(logits, keys, **CUTS[shape.sampling])
        tokens.append(drawn.tokens)
        inside.append(logits.float() >= drawn.cutoffs[:, None])
    return torch.cat(tokens), torch.cat(inside)


def _compiled_linear_logprobs() -> Iterator[Compiled]:
    def call(dtype: torch.dtype, vocabulary: int, options: dict[str, Any]) -> None:
        # Half of the rows at a time, so that backward computes chunks of columns as well.
        half = COMPILED_ROWS // 2 * vocabulary * dtype.itemsize
        inputs = _compiled_inputs(dtype, vocabulary)
        found = kernels.linear_logprobs(**inputs, workspace_bytes=half, **options)
        found = [found] if isinstance(found, Tensor) else list(found)
        outputs = [x for x in found if isinstance(x, Tensor)]
        torch.autograd.backward(outputs, [torch.zeros_like(x) for x in outputs])

    every, few = _options(), ("", "all")
    calls = [
        (name, vocabulary, label)
        for name, vocabulary in product(DTYPES, COMPILED_VOCABULARIES)
        for label in (every if name == "bf16" else few)
    ]
    calls += [("bf16", 503, label) for label in few]  # fits in one window
    calls += [(name, 50257, "sets") for name in DTYPES] + [("bf16", 50257, "sets, softcap")]
    for name, vocabulary, label in calls:
        options = dict(every[label.removeprefix("sets").removeprefix(", ")])
        if label.startswith("sets"):
            options["support"] = _sets(vocabulary)
        made = partial(call, DTYPES[name], vocabulary, options)
        yield Compiled(f"{name} V={vocabulary} {label}".strip(), made, CHUNK)


_CPU = {"hidden": 768, "vocabulary": 50257}
_CUT = "top-k=50 top-p=0.9"


def _alone(op: str) -> list[tuple[Shape, tuple[Goal, ...]]]:
    """Without entropy, in one thread: at least as fast as all logits in eager PyTorch."""
    sizes = ((512, 512), (1024, 768), (2048, 256))
    shapes = [Shape(op, rows, hidden=h, vocabulary=50257, threads=1) for rows, h in sizes]
    return [(shape, (Goal("speedup", 1.0),)) for shape in shapes]


_CUDA = {"dtype": "bf16", "hidden": 4096, "vocabulary": 131072}
LINEAR_LOGPROBS = Op(
    problem=_linear_logprobs,
    work=_work(4, ", the logits' one twice"),
    main={
        "cpu": (
            (
                # The entropy has a gradient; in the loss it is a statistic, as in classic PPO.
                Shape("linear_logprobs", 1024, entropy="gradient", **_CPU),
                (Goal("speedup", 1.6), Goal("memory share", 1 / 8)),
            ),
            (
                Shape("linear_logprobs", 1024, entropy="gradient", sampling=_CUT, **_CPU),
                (Goal("speedup", 1.6), Goal("memory share", 1 / 8)),
            ),
            *_alone("linear_logprobs"),
        ),
        "cuda": (
            (
                Shape("linear_logprobs", 4096, **_CUDA),
                (Goal("seconds", 26e-3, HOPPER), Goal("memory", 600 * MIB, HOPPER)),
            ),
        ),
    },
    axes=_axes("off", "metric", "gradient", backward=(True, False)),
    checked=checked_rows("linear_logprobs", entropy="gradient", active=0.5, hidden=True),
    compiled=_compiled_linear_logprobs,
    peers={
        "liger-kernel": peers.liger_linear,
        "cut-cross-entropy": peers.cut_cross_entropy,
        "trl": peers.trl_chunked,
    },
)


def _linear_ppo_loss(
    shape: Shape, generator: torch.Generator, backend: str, pick_rows: bool
) -> Problem:
    entropy = shape.entropy != "off"
    head = _head(shape, generator)
    mask = flags(generator, shape.rows, share=shape.active)
    rows = mask.nonzero().squeeze(-1) if pick_rows and shape.active != 1 else None
    split = zip(head["hidden"].split(512), head["labels"].split(512), strict=True)
    with torch.no_grad():
        old = [eager.linear_logprobs(x, head["weight"], y)["logprobs"] for x, y in split]
    tokens = {
        "old_logprobs": torch.cat(old) + normal(generator, shape.rows, scale=0.2),
        "advantages": normal(generator, shape.rows),
        "mask": mask,
    }

    def ours(weight: Tensor, denominator: float, **by_row: Tensor) -> Results:
        if rows is not None:
            by_row = {name: x[rows] for name, x in by_row.items()}
        loss, stats = kernels.linear_ppo_loss(
            weight=weight, denominator=denominator, entropy=entropy, backend=backend, **by_row
        )
        return {"loss": loss} | ({"entropy": stats.entropy} if entropy else {})

    def exact(
        hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, denominator: float,
        **tokens: Tensor,
    ) -> Results:  # fmt: skip
        logits = hidden @ weight.T
        logprobs, entropies = reference.token_logprobs(logits, labels, mask=mask, entropy=True)
        loss, _ = reference.ppo_loss(logprobs, mask=mask, denominator=denominator, **tokens)
        return {"loss": loss} | ({"entropy": entropies.sum() / denominator} if entropy else {})

    return Problem(
        head | tokens | {"denominator": float(mask.sum())},
        ours=ours,
        eager=partial(eager.linear_ppo_loss, entropy=entropy),
        exact=exact,
        wrt=_leaves(shape),
        upstream={"loss": torch.ones(())},
        by_row=frozenset({"hidden", "labels", *tokens}),
        row_bytes=8 * shape.vocabulary,
    )


def _compiled_linear_ppo_loss() -> Iterator[Compiled]:
    def call(dtype: torch.dtype, vocabulary: int, options: dict[str, Any]) -> None:
        tokens = torch.zeros(COMPILED_ROWS)
        loss, _ = kernels.linear_ppo_loss(
            **_compiled_inputs(dtype, vocabulary), old_logprobs=tokens, advantages=tokens,
            mask=tokens == 0, kl=kernels.KLTerm(tokens, 0.05), **options,
        )  # fmt: skip
        loss.backward()

    def scale_a_large_gradient() -> None:
        """Past 2 GiB, AMD addresses by pointer in place of buffer. The pages are never touched."""
        from fastrl_kernels._triton.lm_head import TritonHead

        TritonHead.scale_(torch.empty(2**30 + 2**20, dtype=torch.bfloat16), torch.ones(()))

    everything = {k: v for k, v in _options()["all"].items() if k != "extras"}
    yield from _compiled_losses(call, {"": {}, "all": everything}, {"_ppo_loss_*": POLICY})
    yield Compiled("a gradient >2GiB", scale_a_large_gradient, CHUNK)


def _compiled_linear_nll_loss() -> Iterator[Compiled]:
    def call(dtype: torch.dtype, vocabulary: int, options: dict[str, Any]) -> None:
        loss, _ = kernels.linear_nll_loss(**_compiled_inputs(dtype, vocabulary), **options)
        loss.backward()

    yield from _compiled_losses(call, {"": {}, "softcap": {"softcap": 30.0}}, {})


def _linear_kl_loss(
    shape: Shape, generator: torch.Generator, backend: str, pick_rows: bool
) -> Problem:
    head = _head(shape, generator)
    teacher = _head(dataclasses.replace(shape, hidden=shape.teacher), generator)
    given: dict[str, Any] = {f"teacher_{name}": teacher[name] for name in ("hidden", "weight")}
    rows = None
    if shape.active != 1:
        mask = given["mask"] = flags(generator, shape.rows, share=shape.active)
        rows = mask.nonzero().squeeze(-1) if pick_rows else None
    by_row = frozenset({"hidden", "labels", "mask", "teacher_hidden"})

    def ours(
        weight: Tensor, teacher_weight: Tensor, denominator: float, **by_row: Tensor
    ) -> Results:
        if rows is not None:
            by_row = {name: x[rows] for name, x in by_row.items() if name != "mask"}
        teacher = kernels.TeacherHead(by_row.pop("teacher_hidden"), teacher_weight)
        loss, _ = kernels.linear_kl_loss(
            weight=weight, teacher=teacher, beta=shape.beta, denominator=denominator,
            backend=backend, **by_row,
        )  # fmt: skip
        return {"loss": loss}

    def exact(
        hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor,
        denominator: float, labels: Tensor, mask: Tensor | None = None,
    ) -> Results:  # fmt: skip
        log_p, log_q = (
            (x @ w.T).log_softmax(-1)
            for x, w in ((hidden, weight), (teacher_hidden, teacher_weight))
        )
        values = reference.divergence(log_p, log_q, shape.beta)
        values = values if mask is None else torch.where(mask, values, 0.0)
        return {"loss": values.sum() / denominator}

    return Problem(
        {**head, **given, "denominator": shape.active * shape.rows},
        ours=ours,
        eager=partial(eager.linear_kl_loss, beta=shape.beta),
        exact=exact,
        wrt=_leaves(shape),
        upstream={"loss": torch.ones(())},
        by_row=by_row,
        row_bytes=16 * shape.vocabulary,
    )


def _kl_work(shape: Shape) -> Work:
    count = 3 - (shape.head == "frozen") if shape.backward else 1
    width = count * shape.hidden + shape.teacher
    flops = 2.0 * shape.active * shape.rows * shape.vocabulary * width
    nbytes = shape.vocabulary * width * shape.itemsize
    return Work(nbytes, flops, f"{count} GEMMs of N·V·H, one of N·V·H'")


def _checked_kl(sizes: Sizes) -> Iterator[Shape]:
    """Each divergence, of a teacher that is twice as wide."""
    betas = (1.0, 0.0, 0.5, 0.3, 1.0)
    for beta, shape in zip(
        betas, checked_rows("linear_kl_loss", active=0.5, hidden=True)(sizes), strict=False
    ):
        yield dataclasses.replace(shape, teacher=2 * shape.hidden, beta=beta)


def _compiled_linear_kl() -> Iterator[Compiled]:
    """Each divergence, against a teacher of the other dtype and width; and K tokens' log-probs."""

    def call(dtype: torch.dtype, vocabulary: int, options: dict[str, Any]) -> None:
        beta, cap, dtypes, tokens = (options[x] for x in ("beta", "softcap", "dtypes", "tokens"))
        inputs = _compiled_inputs(dtype, vocabulary)
        other = torch.float32 if dtype == torch.bfloat16 and dtypes else dtype
        states = torch.zeros(COMPILED_ROWS, 2 * COMPILED_WIDTH, dtype=other)
        heads = torch.zeros(vocabulary, 2 * COMPILED_WIDTH, dtype=other)
        teacher: Any = kernels.TeacherHead(states, heads, softcap=cap)
        if tokens:
            ids = torch.arange(4).expand(COMPILED_ROWS, 4)
            teacher = kernels.TeacherTokens(ids, torch.full((COMPILED_ROWS, 4), -2.0))
        temperature = torch.ones(COMPILED_ROWS) if cap else 1.0
        found = kernels.linear_kl(
            **inputs, teacher=teacher, beta=beta, softcap=cap, entropy=cap is not None,
            temperature=temperature,
        )  # fmt: skip
        total = found.divergences.sum() + found.logprobs.sum()
        if found.entropies is not None:
            total = total + found.entropies.sum()
        total.backward()

    plain = {"beta": 1.0, "softcap": None, "dtypes": False, "tokens": False}
    options = {
        "": plain,
        "forward": {**plain, "beta": 0.0},
        "mixed": {**plain, "beta": 0.5, "dtypes": True},
        "all": {**plain, "beta": 0.5, "softcap": 30.0},
        "forward, all": {**plain, "beta": 0.0, "softcap": 30.0},
        "reverse, all": {**plain, "softcap": 30.0},
        "tokens": {**plain, "tokens": True},
    }
    yield from _compiled_losses(call, options, {})


def _compiled_linear_kl_loss() -> Iterator[Compiled]:
    def call(dtype: torch.dtype, vocabulary: int, options: dict[str, Any]) -> None:
        heads = (torch.zeros(n, COMPILED_WIDTH, dtype=dtype) for n in (COMPILED_ROWS, vocabulary))
        loss, _ = kernels.linear_kl_loss(
            **_compiled_inputs(dtype, vocabulary), teacher=kernels.TeacherHead(*heads), **options
        )
        loss.backward()

    yield from _compiled_losses(call, {"": {}, "mixed": {"beta": 0.5, "entropy": True}}, {})


def _compiled_losses(
    call: Callable[..., None], options: dict[str, dict[str, Any]], others: dict[str, Expect]
) -> Iterator[Compiled]:
    for (name, dtype), vocabulary in product(DTYPES.items(), COMPILED_VOCABULARIES):
        for label, given in options.items():
            made = partial(call, dtype, vocabulary, given)
            yield Compiled(f"{name} V={vocabulary} {label}".strip(), made, CHUNK, others)


LINEAR_PPO_LOSS = Op(
    problem=_linear_ppo_loss,
    work=_work(3, ""),
    main={
        "cpu": (
            (
                Shape("linear_ppo_loss", 1024, entropy="metric", **_CPU),
                (Goal("speedup", 2.2), Goal("memory share", 1 / 8)),
            ),
            *_alone("linear_ppo_loss"),
        ),
        "cuda": (
            (
                Shape("linear_ppo_loss", 4096, entropy="metric", **_CUDA),
                (Goal("seconds", 20.5e-3, HOPPER),),
            ),
        ),
    },
    axes=_axes("off", "metric"),
    checked=checked_rows("linear_ppo_loss", entropy="metric", active=0.5, hidden=True),
    compiled=_compiled_linear_ppo_loss,
    peers={"liger-kernel": peers.liger_loss, "trl": peers.trl_chunked_loss},
)
LINEAR_NLL_LOSS = Op(compiled=_compiled_linear_nll_loss)
LINEAR_KL = Op(compiled=_compiled_linear_kl)
_OF_BOTH = {"vocabulary": 50257, "hidden": 256, "teacher": 512, "threads": 2}
LINEAR_KL_LOSS = Op(
    problem=_linear_kl_loss,
    work=_kl_work,
    main={
        "cpu": [
            (
                Shape("linear_kl_loss", 1024, beta=beta, **_OF_BOTH),
                (
                    Goal("speedup", 1.25),
                    Goal("memory share", 1 / 8),
                    Goal("memory share", 1 / 8, against="trl"),
                ),
            )
            for beta in (1.0, 0.5)
        ],
        "cuda": [
            (Shape("linear_kl_loss", 4096, teacher=8192, beta=beta, **_CUDA), ())
            for beta in (1.0, 0.5)
        ],
    },
    checked=_checked_kl,
    compiled=_compiled_linear_kl_loss,
    peers={"trl": peers.trl_divergence},
)
