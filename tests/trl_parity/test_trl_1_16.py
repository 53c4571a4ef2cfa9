"""TRL 1.16's trainers compute the same, patched and not; patched, none of its own functions run."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import fastrl
from fastrl.compat.patch import Calls
from tests import tiny_models
from tests.golden import tiny
from tests.trl_parity.originals import counted_originals

if sys.version_info < (3, 11):
    pytest.skip("TRL 1.16 needs Python 3.11", allow_module_level=True)

# TRL's own: it passes settings that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

HEAD = "_ChunkedLogProbFunction"
STEPS = 2
# Of the largest change of any weight. A weight of 0.5 is stored to 3e-8, and changes by some 1e-2.
TOLERANCE = 2e-5


class Run(NamedTuple):
    """What a training run came to."""

    losses: list[float]
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def replacements() -> Any:
    return importlib.import_module("fastrl.compat.patch.trl_1_16").REPLACEMENTS


@pytest.fixture(autouse=True)
def _unpatched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    yield
    fastrl.unpatch_trl()


def sentence(start: int, length: int) -> str:
    words = range(start, start + 5 * length, 5)
    return " ".join(f"w{tiny.FIRST_WORD + w % (tiny.VOCABULARY - tiny.FIRST_WORD)}" for w in words)


def rows(n: int = 4) -> list[dict[str, Any]]:
    """Prompts of different lengths with three completions each."""
    return [
        {
            "prompt": sentence(7 * i, 3 + i % 2),
            "chosen": " " + sentence(11 * i, 4 + i % 3),
            "rejected": " " + sentence(13 * i + 1, 6 - i % 3),
            "reference": " " + sentence(17 * i + 2, 5),
        }
        for i in range(n)
    ]


def columns(*names: str) -> Any:
    from datasets import Dataset

    return Dataset.from_list([{name: row[name] for name in names} for row in rows()])


def even_words(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that tells completions apart."""
    return [sum(i % 2 == 0 for i in ids) / 7 + ids[0] / 97 for ids in completion_ids]


def sft(common: dict[str, Any], model: str) -> Any:
    from trl import SFTConfig, SFTTrainer

    data = columns("prompt", "chosen").rename_column("chosen", "completion")
    return SFTTrainer(model, SFTConfig(**common), train_dataset=data, **tokenizer())


def dpo(common: dict[str, Any], model: str, **settings: Any) -> Any:
    from trl import DPOConfig, DPOTrainer

    config = DPOConfig(**{**common, **settings})
    data = columns("prompt", "chosen", "rejected")
    return DPOTrainer(model, args=config, train_dataset=data, **tokenizer())


def weighted_dpo(common: dict[str, Any], model: str) -> Any:
    """With weights from log Σ p²: products of many probabilities, hence the learning rate."""
    return dpo(common, model, use_weighting=True, learning_rate=1e3)


def kto(common: dict[str, Any], model: str) -> Any:
    from trl import KTOConfig, KTOTrainer

    data = columns("prompt", "chosen").rename_column("chosen", "completion")
    data = data.add_column("label", [True, False, False, True])
    return KTOTrainer(model, args=KTOConfig(**common), train_dataset=data, **tokenizer())


def grpo(common: dict[str, Any], model: str) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        **common,
        num_generations=4,
        max_completion_length=5,
        temperature=0.7,
        beta=0.1,
        entropy_coef=0.05,  # so that entropies have gradients
        num_iterations=2,
    )
    return GRPOTrainer(model, even_words, config, train_dataset=columns("prompt"), **tokenizer())


def rloo(common: dict[str, Any], model: str) -> Any:
    from trl import RLOOConfig, RLOOTrainer

    config = RLOOConfig(**common, num_generations=4, max_completion_length=5, temperature=1.3)
    return RLOOTrainer(model, even_words, config, train_dataset=columns("prompt"), **tokenizer())


def cpo(common: dict[str, Any], model: str) -> Any:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    model = tiny_models.AutoModelForCausalLM.from_pretrained(model)
    data = columns("prompt", "chosen", "rejected")
    return CPOTrainer(model, args=CPOConfig(**common), train_dataset=data, **tokenizer())


def tpo(common: dict[str, Any], model: str) -> Any:
    from trl.experimental.tpo import TPOConfig, TPOTrainer

    data = columns("prompt", "chosen", "rejected", "reference")
    return TPOTrainer(model, args=TPOConfig(**common), train_dataset=data, **tokenizer())


def tokenizer() -> dict[str, Any]:
    return {"processing_class": tiny.tokenizer("left")}


def train(make: Callable[[dict[str, Any], str], Any], folder: Path, family: str) -> Run:
    """A few steps of plain gradient descent, in which a small difference stays small."""
    path = folder / family
    if not path.exists():
        model = tiny_models.language_model(family)
        model.save_pretrained(path)
    common = {
        "output_dir": str(folder / "run"), "per_device_train_batch_size": 4, "max_steps": STEPS,
        "learning_rate": 0.1, "lr_scheduler_type": "constant", "optim": "sgd", "seed": 3,
        "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "use_cpu": not torch.cuda.is_available(), "bf16": False, "disable_tqdm": True,
    }  # fmt: skip
    torch.manual_seed(3)
    trainer = make(common, str(path))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = {k: v.detach().clone() for k, v in trainer.model.state_dict().items()}
    return Run(losses, weights)


TRAINERS = {
    sft: ("gemma2", HEAD),  # a soft cap
    dpo: ("qwen2", HEAD),
    weighted_dpo: ("cohere", HEAD),  # a logit scale
    kto: ("qwen2", HEAD),
    grpo: ("gpt2", HEAD),  # a tied head
    rloo: ("qwen2", HEAD),
    cpo: ("qwen2", "selective_log_softmax"),
    tpo: ("qwen2", "selective_log_softmax_and_entropy"),
}


@pytest.mark.parametrize("make", TRAINERS, ids=lambda make: make.__name__)
def test_a_trainer_computes_the_same_patched_and_not(make, replacements, tmp_path):
    family, replaced = TRAINERS[make]
    theirs = train(make, tmp_path, family)
    with counted_originals(replacements) as originals, fastrl.patch_trl() as patch:
        originals.clear()  # what the patch's own check ran
        ours = train(make, tmp_path, family)
        counts = patch.call_counts()

    assert not originals, "TRL's own functions ran"
    assert counts[replaced].ours >= STEPS
    assert all(calls.delegated == 0 for calls in counts.values())
    before = tiny_models.language_model(family).state_dict()
    changes = {k: (w.cpu() - before[k]) for k, w in theirs.weights.items()}
    largest = max(change.abs().max().item() for change in changes.values())
    assert largest > 1e-3
    for name, weight in ours.weights.items():
        difference = (weight - theirs.weights[name]).abs().max().item()
        assert difference <= TOLERANCE * largest, name
    assert len(ours.losses) == STEPS
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5, abs=1e-6)


def head_inputs(
    dtype: torch.dtype = torch.float32, n: int = 37, vocabulary: int = 53, bias: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    hidden = torch.randn(n, 8, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, 8, generator=g).to(dtype).requires_grad_()
    offsets = torch.randn(vocabulary, generator=g).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(vocabulary, (n,), generator=g)
    with torch.no_grad():
        targets[: n // 2] = (hidden[: n // 2] @ weight.t()).argmax(-1)  # so that some are the top
        weight[1:3] = weight[0]  # ties, of which only the first is the top
        targets[:3] = torch.arange(3)[:n]
    return hidden, weight, offsets, targets


def apply_head(function: Any, inputs: tuple[Any, ...], *rest: Any) -> tuple[Any, Any]:
    """Results, and gradients under upstream ones that differ by token."""
    results = function.apply(*inputs, *rest)
    roots = [x for x in results if x is not None and x.requires_grad]
    leaves = [x for x in inputs[:3] if x is not None and x.requires_grad]
    upstream = [torch.linspace(-1, 2, len(x)) for x in roots]
    return results, torch.autograd.grad(roots, leaves, upstream)


OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@pytest.mark.parametrize(
    "outputs", [OUTPUTS, OUTPUTS[:1], OUTPUTS[:2], OUTPUTS[2:], ("is_top1", "entropy")]
)
@pytest.mark.parametrize(
    ("temperature", "softcap", "scale", "bias"),
    [(1.0, None, 1.0, False), (0.7, 3.0, 1.5, True), (1.3, None, 0.25, True)],
)
def test_the_head_is_trls(outputs, temperature, softcap, scale, bias):
    from trl.trainer import utils

    rest = (temperature, 16, softcap, scale, outputs)
    expected = apply_head(utils._ChunkedLogProbFunction, head_inputs(bias=bias), *rest)
    with fastrl.patch_trl() as patch:
        found = apply_head(utils._ChunkedLogProbFunction, head_inputs(bias=bias), *rest)
        assert patch.call_counts()[HEAD] == Calls(ours=1)
    # fp32 sums of 53 terms of size 10 and below, in another order.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
    flows = [[x is not None and x.requires_grad for x in xs[0]] for xs in (found, expected)]
    assert flows[0] == flows[1]


def test_the_head_takes_autocast_and_frozen_weights_and_no_rows():
    from trl.trainer import utils

    def run() -> list[Any]:
        hidden, weight, bias, targets = head_inputs()
        frozen = (hidden, weight.detach(), bias.detach(), targets)
        function = utils._ChunkedLogProbFunction
        found = [
            apply_head(function, frozen, 1.0, 16),
            apply_head(function, head_inputs(n=0), 1.0, 16),
        ]
        with torch.autocast("cpu", torch.bfloat16):
            found.append(apply_head(function, (hidden, weight, bias, targets), 1.0, 16))
        return found

    theirs = run()
    with fastrl.patch_trl() as patch:
        ours = run()
        assert patch.call_counts()[HEAD] == Calls(ours=3)
    torch.testing.assert_close(ours[:2], theirs[:2], rtol=1e-5, atol=2e-5)
    # Logits below 16 in bf16 are right to 1/32; TRL adds the bias after rounding, ours before.
    (results, gradients), (their_results, their_gradients) = ours[2], theirs[2]
    torch.testing.assert_close(results[:4], their_results[:4], rtol=0.02, atol=0.1)
    torch.testing.assert_close(gradients, their_gradients, rtol=0.05, atol=0.3)
    assert [x.dtype for x in gradients] == [torch.float32] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_and_entropies_are_trls(dtype, masked, temperature):
    from trl.trainer import utils

    g = torch.Generator().manual_seed(1)
    logits = (4 * torch.randn(2, 5, 33, generator=g)).to(dtype)
    index = torch.randint(33, (2, 5), generator=g)
    mask = (torch.rand(2, 5, generator=g) < 0.5).long() if masked else None

    def run(x: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        x = x.clone().requires_grad_()
        results = (
            utils.selective_log_softmax(x, index, temperature, row_mask=mask),
            utils.entropy_from_logits(x, chunk_size=3),
            *utils.selective_log_softmax_and_entropy(x, index, True, temperature, mask),
        )
        detached = utils.selective_log_softmax_and_entropy(x, index, False, temperature, mask)[1]
        assert not detached.requires_grad
        upstream = [torch.linspace(-1, 2, 10).reshape(2, 5).to(x.dtype) for _ in results]
        return (*results, detached), torch.autograd.grad(results, x, upstream)[0]

    theirs = run(logits)
    wide = run(logits.double())
    with fastrl.patch_trl() as patch:
        ours = run(logits)
        counts = patch.call_counts()
    assert counts["selective_log_softmax"] == counts["entropy_from_logits"] == Calls(ours=1)
    assert counts["selective_log_softmax_and_entropy"] == Calls(ours=2)
    # As far from float64 as TRL's own at most, and a rounding of a result of size 10.
    rounding = 16 * torch.finfo(dtype).eps
    flat = ((*results, gradient) for results, gradient in (ours, theirs, wide))
    for here, there, exact in zip(*flat, strict=True):
        assert here.dtype == there.dtype
        error, their_error = ((x.double() - exact).abs().max() for x in (here, there))
        assert error <= 2 * their_error + rounding


def test_what_the_ops_do_not_cover_is_handed_on():
    from trl.trainer import utils

    logits = torch.arange(42.0).sin().reshape(2, 3, 7)
    index = torch.arange(6).reshape(2, 3)
    hidden, weight, bias, targets = head_inputs()
    sharded = weight.detach().clone()
    sharded.ds_id = 0  # as DeepSpeed marks it
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("selective_log_softmax", lambda: utils.selective_log_softmax(logits, index[..., None])),
        ("selective_log_softmax", lambda: utils.selective_log_softmax(logits.double(), index)),
        ("entropy_from_logits", lambda: utils.entropy_from_logits(logits.double())),
        (
            "selective_log_softmax_and_entropy",
            lambda: utils.selective_log_softmax_and_entropy(logits.double(), index),
        ),
        *(
            (HEAD, lambda arguments=arguments: utils._ChunkedLogProbFunction.apply(*arguments))
            for arguments in (
                (hidden, sharded, bias, targets, 1.0, 16),
                (hidden.bfloat16(), weight, bias, targets, 1.0, 16),
                (hidden, weight, bias, targets, 1.0, 16, None, 0.0),
            )
        ),
    ]
    for name, call in calls:
        expected = call()
        with fastrl.patch_trl() as patch:
            found = call()
            assert patch.call_counts()[name] == Calls(delegated=1)
        torch.testing.assert_close(found, expected)


def test_modules_that_imported_by_name_follow_and_are_undone():
    from trl import kernels
    from trl.experimental.cpo import cpo_trainer
    from trl.trainer import utils

    own = utils.selective_log_softmax, kernels.ChunkedLogProbFunction
    patch = fastrl.patch_trl()
    assert cpo_trainer.selective_log_softmax is utils.selective_log_softmax is not own[0]
    assert kernels.ChunkedLogProbFunction is utils._ChunkedLogProbFunction is not own[1]
    assert patch.version.startswith("1.16.")
    assert "trl.experimental.cpo.cpo_trainer.selective_log_softmax" in str(patch)
    fastrl.unpatch_trl()
    assert (cpo_trainer.selective_log_softmax, utils.selective_log_softmax) == (own[0], own[0])
    assert (kernels.ChunkedLogProbFunction, utils._ChunkedLogProbFunction) == (own[1], own[1])
