"""Heads whose rows processes share: what one process computes of the whole head."""

import functools
import gc
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl_kernels import (
    Extras,
    KLTerm,
    TeacherHead,
    VocabParallel,
    linear_kl,
    linear_kl_loss,
    linear_logprobs,
    linear_nll_loss,
    linear_ppo_loss,
    reference,
    vocab_parallel,
)
from tests.kernels import test_linear_kl, test_linear_ppo_loss
from tests.kernels.group_of_threads import GroupOfThreads
from tests.kernels.judge import assert_close_to_exact, names, results
from tests.kernels.roundings import Rounded
from tests.kernels.test_linear_logprobs import LEAVES, Inputs, batch, temperatures, with_holes

BF16, FP32 = torch.bfloat16, torch.float32
EXTRAS = Extras._fields
CUTS = {"2": (0, 190, 507), "3": (0, 1, 320, 507)}
Join = Callable[..., "Shared"]


class Shared:
    """What the processes of a group compute."""

    def __init__(self, by_process: list[dict[str, Tensor]], cut: tuple[int, ...]) -> None:
        self.by_process = by_process
        first = by_process[0]
        self.joined = dict(first)  # with whole gradients of weight and bias
        for name in first.keys() & {"dweight", "dbias"}:
            self.joined[name] = torch.cat([found[name] for found in by_process])
        assert sum(len(found.get("dweight", ())) for found in by_process) in (0, cut[-1])


@pytest.fixture
def group(monkeypatch) -> Callable[[int], GroupOfThreads]:
    def make(size: int) -> GroupOfThreads:
        threads = GroupOfThreads(size)
        monkeypatch.setattr(vocab_parallel, "dist", threads)
        return threads

    return make


def test_processes_that_have_left_their_group_are_refused(group):
    threads = group(1)

    def process(_: int) -> None:
        given = VocabParallel(0, 9)
        inputs = {**batch(2, 9), "vocab_parallel": given}
        linear_logprobs(**inputs)
        threads.group.WORLD = object()  # another default group, of the same size
        with pytest.raises(RuntimeError, match="process group of vocab_parallel has been destr"):
            linear_logprobs(**inputs)

    threads.run(process)


def own(inputs: Inputs, start: int, stop: int) -> Inputs:
    """A process's inputs."""
    heads = ("weight", "bias", "teacher_weight", "teacher_bias")
    return {k: x[start:stop] if k in heads else x for k, x in inputs.items()}


@pytest.fixture
def shared(group) -> Join:
    """Runs an op on processes that share a vocabulary, whose ranges may be in any order."""

    def run(op: Any, inputs: Inputs, cut: tuple[int, ...], order=None, wrt=None) -> Shared:
        ranges = list(itertools.pairwise(cut))
        threads = group(len(ranges))
        order = order or range(len(ranges))
        wrt = [name for name in LEAVES if name in inputs] if wrt is None else wrt

        def process(rank: int) -> dict[str, Tensor]:
            start, stop = ranges[order[rank]]
            given = functools.partial(op, vocab_parallel=VocabParallel(start, stop))
            return results(given, own(inputs, start, stop), wrt)

        found = threads.run(process)
        return Shared([found[list(order).index(k)] for k in range(len(ranges))], cut)

    return run


def judge(
    shared: Join, op: Any, formula: Any, inputs: Inputs, cut: tuple[int, ...], **options: Any
) -> Shared:
    """Judges values and gradients by the formula of the whole head, in the tensors' own dtypes; all
    processes must have the same bits of what is not theirs alone."""
    found = shared(op, inputs, cut, **options)
    wrt = [name for name in LEAVES if name in inputs]
    runs = Rounded(lambda: results(formula, inputs, wrt))
    exact = results(formula, inputs, wrt, torch.float64)
    assert found.joined.keys() == exact.keys()
    for name in exact:
        assert_close_to_exact(found.joined[name], runs[name], exact[name], name)
    for other in found.by_process[1:]:
        for name in exact.keys() - {"dweight", "dbias"}:
            torch.testing.assert_close(
                other[name], found.joined[name], rtol=0, atol=0, equal_nan=True
            )
    return found


def flat(op: Any, **options: Any) -> Any:
    """The op with extras among its results."""

    def call(**given: Any) -> tuple[Tensor, ...]:
        out = op(**given, **options)
        *others, extras = out if isinstance(out, tuple) else (out, ())
        if isinstance(extras, tuple):
            return *others, *(x for x in extras if x is not None)
        return *others, extras

    return call


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=names([FP32, BF16]))
@pytest.mark.parametrize("workspace", [None, 3000], ids=["one chunk", "chunks"])
def test_logprobs_entropies_and_their_gradients(backend, device, shared, dtype, workspace):
    inputs = with_holes(batch(3, 4, 507, dtype=dtype, device=device, bias=True))
    inputs["temperature"] = temperatures(inputs)
    options = {"entropy": True, "softcap": 8.0, "logit_scale": 1.5}
    op = functools.partial(linear_logprobs, **options, workspace_bytes=workspace, backend=backend)
    formula = functools.partial(reference.linear_logprobs, **options)
    judge(shared, op, formula, inputs, CUTS["3"])


@pytest.mark.parametrize("processes", CUTS)
def test_without_a_cap_or_an_entropy(backend, device, shared, processes):
    inputs = batch(9, 507, device=device)
    op = functools.partial(linear_logprobs, backend=backend)
    judge(shared, op, reference.linear_logprobs, inputs, CUTS[processes])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=["in order", "in another order"])
def test_extras_of_the_whole_vocabulary(backend, device, shared, order):
    inputs = with_holes(batch(4, 3, 507, device=device, bias=True))
    inputs["temperature"] = temperatures(inputs)
    options = {"extras": EXTRAS, "softcap": 20.0, "logit_scale": 0.8, "entropy": True}
    op = flat(linear_logprobs, **options, backend=backend)
    formula = flat(reference.linear_logprobs, **options)
    logits = inputs["hidden"] @ inputs["weight"].t() + inputs["bias"]
    inputs["labels"][::2] = logits.argmax(-1)[::2]
    found = judge(shared, op, formula, inputs, CUTS["3"], order=order)
    assert found.joined["output 4"].any()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=["in order", "in another order"])
def test_of_tied_logits_in_several_processes_the_first_is_top(backend, device, shared, order):
    inputs = batch(5, 60, device=device, bias=True)
    inputs["weight"].zero_()
    inputs["bias"][[15, 35, 36, 55]] = 50.0
    inputs["labels"] = torch.tensor([15, 35, 55, 36, 0], device=device)
    op = flat(linear_logprobs, extras=("is_top1",), backend=backend)
    found = shared(op, inputs, (0, 20, 40, 60), order=order, wrt=[])
    for each in found.by_process:
        assert each["output 1"].tolist() == [True, False, False, False, False]


@pytest.mark.parametrize("softcap", [None, 8.0])
@pytest.mark.parametrize("workspace", [None, 6000], ids=["one chunk", "chunks"])
def test_the_loss_in_one_pass(backend, device, shared, softcap, workspace):
    inputs = test_linear_ppo_loss.batch(11, 300, device=device, bias=True)
    ref_logprobs, names_ = inputs.pop("ref_logprobs"), ("logprobs", "entropies")

    def op(**given: Any) -> tuple[Tensor, ...]:
        loss, stats = linear_ppo_loss(
            **given, kl=KLTerm(ref_logprobs, 0.15), workspace_bytes=workspace, backend=backend,
            softcap=softcap, entropy=True,
        )  # fmt: skip
        return loss, *(getattr(stats, name) for name in (*names_, "entropy", "clipfrac"))

    def formula(**given: Any) -> tuple[Tensor, ...]:
        ref = ref_logprobs.to(given["old_logprobs"].dtype)
        loss, stats = reference.linear_ppo_loss(
            **given, kl=(ref, 0.15, "k3"), softcap=softcap, entropy=True
        )
        return loss, *(stats[name] for name in (*names_, "entropy", "clipfrac"))

    judge(shared, op, formula, inputs, (0, 70, 300))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=names([FP32, BF16]))
@pytest.mark.parametrize("workspace", [None, 12_000], ids=["one chunk", "chunks"])
def test_the_likelihood_in_one_pass_by_any_library(device, shared, monkeypatch, dtype, workspace):
    """In pieces of the vocabulary, and with a share that is too small for a library of its own."""
    from fastrl_kernels import gemm

    monkeypatch.setattr(gemm, "PIECE", 100)
    library = {"float32": "onednn", "bfloat16": "bf16"}[str(dtype).removeprefix("torch.")]
    if gemm.LIBRARIES[str(dtype).removeprefix("torch.")][library].absent():
        pytest.skip("not on this processor")
    inputs = with_holes(batch(3, 5, 507, dtype=dtype, bias=True))
    op = functools.partial(linear_nll_loss, backend="torch", workspace_bytes=workspace)

    def chosen(**given: Any) -> Any:
        chosen = {str(dtype).removeprefix("torch."): gemm.Choice(library, 8 * 200)}
        with gemm.using(chosen):  # of this thread
            return op(**given)

    judge(shared, chosen, reference.linear_nll_loss, inputs, (0, 100, 507))


def against_a_teacher(
    op: Any, inputs: Inputs, backend: str, workspace_bytes: int | None = None, **options: Any
) -> tuple[Any, Any, Inputs]:
    """The op, its formula, and the inputs that are tensors."""
    tensors = {k: x for k, x in inputs.items() if isinstance(x, Tensor)}
    options |= {k: x for k, x in inputs.items() if k not in tensors}

    def flattened(function: Any, **given: Any) -> tuple[Tensor, ...]:
        found = test_linear_kl.called(function, {**given, **options})
        loss, results = found if op is linear_kl_loss else ((), found)
        return *((loss,) if op is linear_kl_loss else ()), *(x for x in results if x is not None)

    limits = {"backend": backend, "workspace_bytes": workspace_bytes}
    formula = functools.partial(flattened, getattr(reference, op.__name__))
    return functools.partial(flattened, functools.partial(op, **limits)), formula, tensors


@pytest.mark.parametrize("op", [linear_kl, linear_kl_loss])
@pytest.mark.parametrize("kind", test_linear_kl.KINDS)
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("workspace", [None, 6000], ids=["one chunk", "chunks"])
def test_divergences_and_their_gradients(backend, device, shared, op, kind, beta, workspace):
    inputs = with_holes(test_linear_kl.batch(2, 4, 507, kind=kind, device=device, bias=True))
    inputs["temperature"] = temperatures(inputs)
    options = {"beta": beta, "entropy": True, "softcap": 8.0}
    if kind == "head":
        options |= {"teacher_softcap": 9.0, "teacher_logit_scale": 1.3}
    op, formula, tensors = against_a_teacher(op, inputs, backend, workspace, **options)
    judge(shared, op, formula, tensors, CUTS["3"], order=(2, 0, 1))


@pytest.mark.parametrize("kind", test_linear_kl.KINDS)
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_divergences_where_shares_are_far_below_others(backend, device, shared, kind, beta):
    """Beyond the range of fp32's exp, where the other side has what is likely."""
    inputs = test_linear_kl.batch(4, 60, kind="head", device=device, bias=True)
    inputs["bias"][20:40] -= 200.0
    inputs["teacher_bias"][:20] -= 300.0
    if kind != "head":
        head = {k: inputs.pop(f"teacher_{k}") for k in LEAVES}
        inputs |= test_linear_kl.tokens_of({f"teacher_{k}": x for k, x in head.items()}, 60, kind)
    op, formula, tensors = against_a_teacher(linear_kl, inputs, backend, beta=beta)
    judge(shared, op, formula, tensors, (0, 20, 40, 60))


@pytest.mark.parametrize("kind", test_linear_kl.KINDS)
def test_divergences_where_a_share_has_no_possible_token(backend, device, shared, kind):
    inputs = test_linear_kl.batch(4, 60, kind=kind, device=device, bias=True)
    inputs["labels"].clamp_(max=19)
    inputs["bias"][20:40] = -torch.inf
    if kind == "head":
        inputs["teacher_bias"][20:45] = -torch.inf
    else:
        inputs["teacher_ids"] = torch.arange(7, device=device).mul(3).expand(4, 7).clone()
    op, formula, tensors = against_a_teacher(linear_kl, inputs, backend, beta=0.0)
    judge(shared, op, formula, tensors, (0, 20, 40, 60))


def test_what_is_sent_of_divergences(backend, device, group):
    """Statistics of both sides and two numbers per row, each way, and the hidden states'
    gradient."""
    inputs = test_linear_kl.batch(10, 60, device=device)
    threads = group(2)

    def process(rank: int) -> None:
        start, stop = ((0, 20), (20, 60))[rank]
        given = {"vocab_parallel": VocabParallel(start, stop), "backend": backend}
        test_linear_kl.run_loss(own(inputs, start, stop), **given)

    threads.run(process)
    rows = [("all_gather", 120), ("all_gather", 120), ("all_gather", 80)]
    assert threads.sent[1:] == [*rows, ("all_reduce", 10 * 8 * 4)]


def test_a_teacher_of_other_rows_or_a_padded_vocabulary_is_refused(backend, device, group):
    inputs = test_linear_kl.batch(3, 60, device=device)
    threads = group(1)

    def process(_: int) -> None:
        given = {"vocab_parallel": VocabParallel(0, 60), "backend": backend}
        with pytest.raises(ValueError, match="vocabulary does not go with vocab_parallel, whose"):
            test_linear_kl.called(linear_kl, inputs, vocabulary=50, **given)
        fewer = TeacherHead(inputs["teacher_hidden"], inputs["teacher_weight"][:30])
        head = [inputs[name] for name in ("hidden", "weight", "labels")]
        with pytest.raises(ValueError, match=r"teacher.weight has 30 rows, weight 60: both must"):
            linear_kl(*head, fewer, **given)

    threads.run(process)


@pytest.mark.parametrize("op", [linear_logprobs, linear_nll_loss])
def test_a_share_whose_tokens_are_all_impossible(backend, device, shared, op):
    """As that of a vocabulary that is padded for its processes; a label there has probability 0."""
    inputs = batch(4, 60, device=device, bias=True)
    inputs["bias"][20:40], inputs["bias"][50:] = -torch.inf, -torch.inf
    inputs["labels"] = torch.tensor([3, 47, 19, 40], device=device)
    entropies = {"entropy": True} if op is linear_logprobs else {}
    given = functools.partial(op, **entropies, backend=backend)
    formula = functools.partial(getattr(reference, op.__name__), **entropies)
    judge(shared, given, formula, inputs, (0, 20, 40, 60))
    judge(shared, given, formula, inputs, (0, 40, 50, 60))
    inputs["labels"][1] = 55
    logprobs = flat(linear_logprobs, entropy=True, backend=backend)
    found = shared(logprobs, inputs, (0, 20, 50, 60), wrt=[])
    assert found.joined["output 0"].isneginf().tolist() == [False, True, False, False]
    assert found.joined["output 1"].isfinite().all()


@pytest.mark.parametrize("op", [linear_logprobs, linear_nll_loss])
def test_shares_far_below_others(backend, device, shared, op):
    """Beyond the range of fp32's exp, with labels there."""
    inputs = batch(4, 60, device=device, bias=True)
    inputs["bias"][20:40] -= 60.0
    inputs["bias"][40:] -= 500.0
    inputs["labels"] = torch.tensor([3, 25, 47, 59], device=device)
    given = functools.partial(op, backend=backend)
    judge(shared, given, getattr(reference, op.__name__), inputs, (0, 20, 40, 60))


def test_shares_below_what_was_taken_for_impossible(backend, device, shared):
    """Biases of large negative numbers, as masks have them in the place of -inf."""
    inputs = batch(3, 60, device=device, bias=True)
    inputs["bias"][20:40] = -1e31
    inputs["labels"] = torch.tensor([3, 25, 47], device=device)
    for bias in (0.0, -2e31):  # of the others, too: then all that is likely is a share of them
        inputs["bias"][:20] += bias
        inputs["bias"][40:] += bias
        wide = {k: x.double() if x.is_floating_point() else x for k, x in inputs.items()}
        expected, entropies = reference.linear_logprobs(**wide, entropy=True)
        op = flat(linear_logprobs, entropy=True, backend=backend)
        found = shared(op, inputs, (0, 20, 40, 60), wrt=[]).joined
        torch.testing.assert_close(found["output 0"].double(), expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found["output 1"].double(), entropies, rtol=1e-6, atol=1e-6)


def test_shift_among_processes(backend, device, shared):
    inputs = batch(2, 5, 507, device=device, bias=True)
    op = functools.partial(linear_logprobs, shift=2, entropy=True, backend=backend)
    formula = functools.partial(reference.linear_logprobs, shift=2, entropy=True)
    judge(shared, op, formula, inputs, CUTS["2"])


@pytest.mark.parametrize("label", [60, -1, 2**32 + 5])
def test_a_label_of_no_process_is_an_error_or_nan(backend, device, shared, label):
    inputs = batch(3, 60, device=device)
    inputs["labels"][1] = label
    checked = functools.partial(linear_logprobs, check_labels=True, backend=backend)
    with pytest.raises(ValueError, match=rf"labels\[1\] is {label}, outside \[0, 60\)"):
        shared(checked, inputs, (0, 20, 60))
    if backend == "triton":
        for op in (linear_logprobs, linear_nll_loss):
            found = shared(functools.partial(op, backend=backend), inputs, (0, 20, 60)).joined
            logprobs = found["output 0" if op is linear_logprobs else "output 1"]
            assert logprobs.isnan().tolist() == [False, True, False]
            assert found["dhidden"].isnan().all(-1).tolist() == [False, True, False]


def test_no_tokens(backend, device, shared):
    for op in (linear_logprobs, linear_nll_loss):
        inputs = batch(0, 60, device=device)
        found = shared(functools.partial(op, backend=backend), inputs, (0, 20, 60)).joined
        assert found["dhidden"].shape == (0, 8)
        assert not found["dweight"].any()


@pytest.mark.parametrize("op", [linear_logprobs, linear_nll_loss])
def test_what_is_sent(backend, device, group, op):
    """12 bytes per row, 16 with entropies, and the hidden states' gradient in fp32, once."""
    inputs = batch(10, 60, dtype=BF16, device=device)
    threads = group(2)

    def process(rank: int) -> None:
        start, stop = ((0, 20), (20, 60))[rank]
        given = VocabParallel(start, stop)
        wrt = ["hidden", "weight"]
        results(functools.partial(op, vocab_parallel=given), own(inputs, start, stop), wrt)

    threads.run(process)
    assert threads.sent == [("all_gather", 16), ("all_gather", 120), ("all_reduce", 10 * 8 * 4)]


def test_chunks_of_rows_are_the_same_on_all_processes(device, group):
    """Whatever they have of the vocabulary: each chunk is an exchange."""
    inputs = batch(64, 600, device=device)
    threads = group(2)

    def process(rank: int) -> None:
        start, stop = ((0, 20), (20, 600))[rank]
        given = VocabParallel(start, stop)
        linear_nll_loss(
            **own(inputs, start, stop), vocab_parallel=given, workspace_bytes=580 * 4 * 16
        )

    threads.run(process)
    assert threads.sent[1:] == [("all_gather", 16 * 12)] * 4


RANGES = {
    "a gap": [(0, 20), (25, 60)], "an overlap": [(0, 20), (15, 60)],
    "no beginning": [(5, 20), (20, 60)], "an empty one": [(0, 60), (60, 60)],
    "the same": [(0, 60), (0, 60)], "backwards": [(0, 60), (60, 20)],
}  # fmt: skip


@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
def test_ranges_that_do_not_cut_the_vocabulary_are_refused_by_all(group, ranges):
    threads = group(2)

    def process(rank: int) -> str:
        with pytest.raises(ValueError, match="they must cut") as error:
            VocabParallel(*ranges[rank])
        return str(error.value)

    first, second = threads.run(process)
    assert first == second
    assert f"[{ranges[1][0]}, {ranges[1][1]})" in first


def test_what_is_refused_and_why(group, backend, device):
    inputs = batch(3, 60, device=device)
    threads = group(1)

    def process(_: int) -> None:
        with pytest.raises(TypeError, match=r"stop must be an int, got 6\.0"):
            VocabParallel(0, 6.0)
        half = VocabParallel(0, 30)
        with pytest.raises(ValueError, match="weight has 60 rows, vocab_parallel has 0 to 30"):
            linear_logprobs(**inputs, vocab_parallel=half, backend=backend)
        with pytest.raises(TypeError, match="vocab_parallel is a tuple: pass VocabParallel"):
            linear_logprobs(**inputs, vocab_parallel=(0, 60), backend=backend)
        with pytest.raises(TypeError, match="weight is a Tensor: pass a DTensor"):
            VocabParallel.of(inputs["weight"])

    threads.run(process)


def test_compiled_code_says_that_its_vocabulary_is_gone(group):
    threads = group(1)
    key = threads.run(lambda _: VocabParallel(0, 60).key)[0]
    gc.collect()
    with pytest.raises(RuntimeError, match="is gone: keep it until backward"):
        vocab_parallel.find(key, 60)


def test_without_processes_it_says_what_to_start():
    with pytest.raises(RuntimeError, match="init_process_group first"):
        VocabParallel(0, 60)


def test_runs_give_the_same_bits(backend, device, shared):
    inputs = batch(9, 507, dtype=BF16, device=device)
    op = functools.partial(linear_logprobs, entropy=True, backend=backend)
    first, second = (shared(op, inputs, CUTS["3"]).joined for _ in range(2))
    for name, x in first.items():
        assert torch.equal(second[name], x)
        assert not math.isnan(x.float().sum())
