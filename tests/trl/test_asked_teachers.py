"""Teachers that are functions: what they teach, what they must not say, and the ledger."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl.run.ledger import read_ledger
from fastrl.samples import Samples
from fastrl_kernels import reference
from tests import tiny_models
from tests.taught import Likeliest, another, exact, log_probs
from tests.trainers.conftest import GRADIENT_STEP
from tests.trl.test_distillation import divergences, make, online, prompts


@pytest.mark.parametrize("rest", ["bucket", "renormalised"])
@pytest.mark.parametrize("hint", [False, True])
def test_a_function_teaches_by_the_likeliest_tokens(rest: str, hint: bool, tmp_path: Path) -> None:
    teacher = Likeliest(0.7)
    data = prompts(hint=hint, level=[*range(8)])
    trainer = make(
        tmp_path, teacher, beta=0.3, temperature=0.7, train_dataset=data, teacher_rest=rest,
        gradient_accumulation_steps=2, **GRADIENT_STEP,
    )  # fmt: skip
    start = exact(trainer.model)
    trainer.train()
    ((read, written, columns),) = teacher.asked  # of both batches at once
    samples = Samples.joined(trainer._generations.buffer)
    behind = samples.teacher_prompt_ids if hint else samples.prompt_ids
    assert sorted(read) == sorted(x.tolist() for x in behind)
    assert sorted(written) == sorted(x.tolist() for x in samples.sequences)
    assert sorted(columns["level"]) == [*range(8)]
    found = []
    for i, response in enumerate(samples.sequences):
        logp = log_probs(start, samples.prompt_ids[i], response, 0.7)
        with torch.no_grad():
            top = log_probs(teacher.model, behind[i], response, 0.7).topk(2 + int(behind[i][0]) % 3)
        found.append(reference.top_divergence(logp, top.indices, top.values, 0.3, rest))
    loss = torch.cat(found).mean()
    loss.backward()
    for name, weight in start.named_parameters():
        step = (weight - dict(trainer.model.named_parameters())[name].double()).detach()
        torch.testing.assert_close(step, weight.grad, rtol=2e-3, atol=2e-6, msg=name)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), abs=1e-5)


def test_a_function_and_a_model_are_chosen_by_a_column(tmp_path: Path) -> None:
    function, model = Likeliest(), another(2)
    data = prompts(of=["a", "b", "b", "a"] * 2)
    trainer = make(
        tmp_path, {"a": function, "b": model}, train_dataset=data, teacher_column="of",
        **GRADIENT_STEP,
    )  # fmt: skip
    start = exact(trainer.model)
    trainer.train()
    samples, found = trainer._generations.buffer[0], []
    assert {0, 1} == set(samples.teachers)
    assert set(function.asked[0][2]["of"]) == {"a"}
    for i, number in enumerate(samples.teachers):
        one = samples.select([i])
        if number:
            found.append(divergences(start, exact(model), one, 1.0))
            continue
        prompt, response = one.prompt_ids[0], one.sequences[0]
        top = log_probs(function.model, prompt, response).topk(2 + int(prompt[0]) % 3)
        logp = log_probs(start, prompt, response)
        found.append(reference.top_divergence(logp, top.indices, top.values, 1.0, "bucket"))
    loss = torch.cat(found).mean()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert "reference" in str(trainer.plan(8, 6))  # of the model; a function has no memory here


def changed(change: Callable[[Tensor, Tensor], Any]) -> Callable[..., list[Any]]:
    """A function that says something else of its second completion."""

    def function(prompt_ids: Any, completion_ids: Any, **_: Any) -> list[Any]:
        said: list[Any] = [
            (torch.arange(3, 6).repeat(len(x), 1), torch.full((len(x), 3), -2.0))
            for x in completion_ids
        ]
        said[1] = change(*said[1])
        return said

    return function


@pytest.mark.parametrize(("change", "said"), [
    (lambda ids, x: None, "returned None for completion 1: a pair"),
    (lambda ids, x: (ids, x[:, :2]), r"ids \(\d, 3\) and log-probs \(\d, 2\) for completion 1"),
    (lambda ids, x: (ids[0], x[0]), r"both must be \(\d, K\), K tokens for each"),
    (lambda ids, x: (x, x), "ids of torch.float32 for completion 1: they must be integers"),
    (lambda ids, x: (ids + 93, x), r"a token outside of \[0, 97\) at token 0 of completion 1"),
    (lambda ids, x: (ids * 0, x), "a token twice at token 0 of completion 1"),
    (lambda ids, x: (ids, x + 2.5), "a log-prob above 0 at token 0 of completion 1"),
    (lambda ids, x: (ids, x + 1.5), "probabilities with a sum above 1 at token 0"),
    (lambda ids, x: (ids, x * torch.nan), "NaN at token 0 of completion 1"),
    (lambda ids, x: (ids, x - torch.inf), "no token, so that nothing can be renormalised at"),
])  # fmt: skip
def test_what_a_function_must_not_say_is_named(change: Any, said: str, tmp_path: Path) -> None:
    trainer = make(tmp_path, changed(change), teacher_rest="renormalised")
    before = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises((TypeError, ValueError), match="teacher 'function' .*" + said):
        trainer.train()
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weight, before[name])
    batch = {f"{of}_{what}": torch.full((1, 2), 3 if what == "ids" else 1)
             for of in ("prompt", "completion") for what in ("ids", "mask")}  # fmt: skip
    with pytest.raises(ValueError, match="and not of batches that are passed to compute_loss"):
        trainer.compute_loss(trainer.model, batch)


def test_a_function_need_say_nothing_of_a_response_without_tokens(tmp_path: Path) -> None:
    def says(prompt_ids: list, completion_ids: list, **_: Any) -> list:
        return [([[3, 4]] * len(x), [[-1.0, -2.0]] * len(x)) for x in completion_ids]

    def responds(prompts: list, trainer: Any) -> dict[str, Any]:
        written = [[] if i == 1 else [3 + i, 4] for i in range(len(prompts))]
        ids = [trainer.processing_class(prompt).input_ids for prompt in prompts]
        return {"prompt_ids": ids, "completion_ids": written, "logprobs": None}

    trainer = make(tmp_path, says, **GRADIENT_STEP)
    trainer.rollout_func = responds
    trainer.train()
    samples = Samples.joined(trainer._generations.buffer)
    found = []
    with torch.no_grad():
        for prompt, response in zip(samples.prompt_ids, samples.sequences, strict=True):
            if len(response):
                logp = log_probs(exact(tiny_models.language_model("qwen2")), prompt, response)
                said = torch.tensor([[3, 4]] * 2), torch.tensor([[-1.0, -2.0]] * 2)
                found.append(reference.top_divergence(logp, *said, 1.0, "bucket"))
    assert len(found) == len(samples) - 1
    loss = trainer.state.log_history[0]["loss"]
    assert loss == pytest.approx(torch.cat(found).mean().item(), abs=1e-5)


def test_the_ledger_has_no_log_probs_of_functions(tmp_path: Path) -> None:
    def says(prompt_ids: list, completion_ids: list, **_: Any) -> list:
        lengths = map(len, completion_ids)
        return [(torch.zeros(n, 1, dtype=torch.long), torch.zeros(n, 1)) for n in lengths]

    teacher = another()
    data = prompts(of=["a", "b"] * 4)
    settings = {"teacher_column": "of", "temperature": 0.7, "ledger": True}
    trainer = make(tmp_path, {"a": teacher, "b": says}, train_dataset=data, **settings)
    trainer.train()
    rows = read_ledger(tmp_path / "ledger").to_pylist()
    assert {row["teacher"] for row in rows} == {"a", "b"}
    for row in rows:
        if row["teacher"] == "b":
            assert row["teacher_logprobs"] is None
            continue
        ids, response = (torch.tensor(row[x]) for x in ("prompt_ids", "completion_ids"))
        with torch.no_grad():
            said = log_probs(exact(teacher), ids, response, 0.7)
        said = said.gather(1, response[:, None])[:, 0].float()
        found = torch.tensor(row["teacher_logprobs"])
        torch.testing.assert_close(found, said, rtol=1e-4, atol=1e-4)


def test_a_function_gives_no_rewards(tmp_path: Path) -> None:
    settings = {"teacher_kl_coef": 1.0, "teacher_kl_in": "reward"}
    with pytest.raises(ValueError, match="'Likeliest' is a function, which need not name the tok"):
        online(tmp_path, "grpo", Likeliest(), **settings)
