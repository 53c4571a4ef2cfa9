"""A wrong argument is refused by name before anything changes; the trainer still works after."""

import math
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import get_scheduler

from fastrl import PPOConfig, PPOTrainer
from fastrl.rollout import RolloutOutput
from tests.golden import tiny
from tests.ppo.conftest import make_batch, make_policy, make_trainer, perturbed
from tests.together import together

NAN, INF = math.nan, math.inf


def put(name: str, index: int, value: Any) -> dict[str, Any]:
    batch: dict[str, Any] = make_batch()
    batch[name] = list(batch[name])
    batch[name][index] = value
    return batch


CASES = {
    "queries shorter": (make_batch() | {"queries": make_batch(3)["queries"]}, "queries has 3"),
    "responses longer": (make_batch() | {"responses": make_batch(5)["responses"]},
     "responses has 5 elements, batch_size is 4"),
    "scores shorter": (make_batch() | {"scores": make_batch(3)["scores"]}, "scores has 3"),
    "not a list": (make_batch() | {"queries": torch.ones(4, 3)}, "queries must be a list"),
    "no tensor": (put("responses", 2, [5, 6]), r"responses\[2\] must be a tensor, got list"),
    "float score": (put("scores", 1, 0.5), r"scores\[1\] must be a tensor, got float"),
    "empty query": (put("queries", 1, torch.tensor([], dtype=torch.long)),
     r"queries\[1\] is empty"),
    "empty response": (put("responses", 3, torch.tensor([], dtype=torch.long)),
     r"responses\[3\] is empty"),
    "2-D query": (put("queries", 0, torch.ones(1, 3, dtype=torch.long)),
     r"queries\[0\] must be 1-D"),
    "float ids": (put("queries", 0, torch.ones(3)), r"queries\[0\] must hold integer"),
    "token too large": (put("responses", 2, torch.tensor([5, 97])),
     r"responses\[2\] holds token id 97, outside the vocabulary of 97"),
    "negative token": (put("queries", 2, torch.tensor([5, -1])), r"queries\[2\] holds token id -1"),
    "NaN score": (put("scores", 3, torch.tensor(NAN)), r"scores\[3\] is nan \(prompt 'w"),
    "infinite score": (put("scores", 0, torch.tensor(-INF)), r"scores\[0\] is -inf"),
    "2-D score": (put("scores", 0, torch.ones(1, 1)), r"scores\[0\] must be one number"),
    "two scores": (put("scores", 0, torch.ones(2)), r"scores\[0\] has 2 numbers, responses\[0\]"),
    "mask length": (make_batch() | {"response_masks": [torch.ones(2)] * 4},
     r"response_masks\[0\] has shape"),
    "mask between": (
        make_batch()
        | {"response_masks": [torch.full((len(r),), 0.5) for r in make_batch()["responses"]]},
        r"response_masks\[0\] holds 0.5: a token counts",
    ),
    "complex score": (put("scores", 1, torch.tensor(1j)), r"scores\[1\] must be real"),
    "mask count": (make_batch() | {"response_masks": [torch.ones(2)] * 3},
     "response_masks has 3 elements"),
    "too long": (put("queries", 1, torch.full((48,), 5)),
     r"queries\[1\] and responses\[1\] have 48 \+ \d tokens, beyond the model's context of 48"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "column", "error", "message"), [
    ("sequences", None, ValueError, "rollout has no sequences: give one for each response"),
    ("finish_reasons", None, ValueError, "rollout has no finish_reasons"),
    ("finish_reasons", ["eos"] * 3, ValueError, "rollout.finish_reasons has 3 elements for 4"),
    ("logprobs", [[0.0]] * 4, TypeError, r"rollout.logprobs\[0\] must be a tensor, got list"),
    ("values", [torch.zeros(1)] * 5, ValueError, "rollout.values has 5 elements for 4"),
])  # fmt: skip
def test_a_rollout_of_other_sizes_is_refused(
    name: str, column: Any, error: Any, message: str, shared_trainer: PPOTrainer, unchanged: Any
) -> None:
    batch = make_batch()
    fields = {"sequences": batch["responses"], "finish_reasons": ["eos"] * 4, name: column}
    with unchanged(shared_trainer), pytest.raises(error, match=message):
        shared_trainer.step(**batch, rollout=RolloutOutput(**fields))


@pytest.fixture(scope="module")
def shared_trainer() -> PPOTrainer:
    reference = perturbed(make_policy())
    return make_trainer(reference=reference, use_score_scaling=True, on_nonfinite="raise")


@together("case", CASES)
def test_step_refuses(case: str, shared_trainer: PPOTrainer, unchanged: Any) -> None:
    batch, message = CASES[case]
    with unchanged(shared_trainer), pytest.raises(ValueError, match=message):
        shared_trainer.step(**batch)


def test_the_trainer_works_after_an_error(unchanged: Any) -> None:
    trainer, untouched = make_trainer(on_nonfinite="raise"), make_trainer()
    with unchanged(trainer), pytest.raises(ValueError, match="scores"):
        trainer.step(**put("scores", 0, torch.tensor(NAN)))
    after, plain = trainer.step(**make_batch()), untouched.step(**make_batch())
    assert after["ppo/loss/total"] == pytest.approx(plain["ppo/loss/total"], rel=1e-5)


def test_padding_without_a_token_that_pads() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    trainer = PPOTrainer(PPOConfig(batch_size=4), make_policy(), None, tokenizer)
    with pytest.raises(ValueError, match=r"no pad token.*tokenizer\.pad_token"):
        trainer.step(**make_batch())
    trainer = PPOTrainer(
        PPOConfig(batch_size=4, rollout_backend="generate"), make_policy(), None, tokenizer
    )
    queries = [torch.tensor([5, 6]), torch.tensor([7])]
    with pytest.raises(ValueError, match="no pad token"):
        trainer.generate(queries, max_new_tokens=2)


def test_one_length_needs_no_pad_token() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = None
    trainer = PPOTrainer(PPOConfig(batch_size=2), make_policy(), None, tokenizer)
    query, response = torch.tensor([5, 6]), torch.tensor([7, 8])
    stats = trainer.step([query] * 2, [response] * 2, [torch.tensor(1.0), torch.tensor(0.0)])
    assert math.isfinite(stats["ppo/loss/total"])


@pytest.mark.parametrize(("arguments", "message"), [
    ({"config": {"batch_size": 4}}, "config must be a PPOConfig"),
    ({"model": tiny.language_model("gpt2")}, "model must be an AutoModelForCausalLMWithValueHead"),
    ({"ref_model": "gpt2"}, "ref_model must be"),
    ({"model": torch.nn.Linear(2, 2)}, "model must be an AutoModelForCausalLMWithValueHead"),
    ({"tokenizer": None}, "tokenizer must be a Hugging Face tokenizer, got NoneType"),
    ({"lr_scheduler": 1.0}, "lr_scheduler must be a torch LRScheduler"),
    ({"lr_scheduler": ReduceLROnPlateau}, "steps by a metric"),
    ({"lr_scheduler": lambda x: get_scheduler("greedy", x)}, "GreedyLR.*steps by a metric"),
])  # fmt: skip
def test_construction_refuses_wrong_types(arguments: dict[str, Any], message: str) -> None:
    right = {"config": PPOConfig(), "model": make_policy(), "tokenizer": tiny.tokenizer()}
    with pytest.raises(TypeError, match=message):
        PPOTrainer(**{**right, **arguments})


def test_generate_refuses_prompts_that_fill_the_context() -> None:
    trainer = make_trainer()
    with pytest.raises(ValueError, match=r"prompts\[1\] has 48 tokens.*context of 48"):
        trainer.generate([torch.tensor([5]), torch.full((48,), 5)], max_new_tokens=1)
