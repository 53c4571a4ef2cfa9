"""GRPOTrainer and RLOOTrainer: one step against its formula, metrics, evaluations, resumed runs."""

import copy
import json
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from rich.console import Console
from torch import Tensor
from transformers import GenerationMixin

from fastrl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from fastrl.collect.completions_table import CompletionsTable
from fastrl.data.tables import as_dataset
from fastrl.learn.samples import learned_counts
from fastrl.rollout import RolloutEngine
from fastrl.run.checkpoints import BadCheckpoint
from fastrl.run.metric_means import MetricMeans
from fastrl.samples import Samples
from fastrl.trainers.groups.group_sampler import GroupSampler, in_groups
from tests import tiny_models
from tests.golden import tiny
from tests.resuming import OwnStates, assert_same_run, resumed, straight
from tests.run.test_transformers_checkpoints import At, failing
from tests.trainers.conftest import GRADIENT_STEP, ONE_STEP

SETTINGS: dict[str, Any] = {
    **ONE_STEP, "num_generations": 4, "max_completion_length": 6, "logging_steps": 1,
}  # fmt: skip
_ARGUMENTS = ("callbacks", "eval_dataset", "peft_config", "rollout_func", "processing_class")
KINDS: dict[str, tuple[type, type]] = {
    "grpo": (GRPOTrainer, GRPOConfig),
    "rloo": (RLOOTrainer, RLOOConfig),
}


def prompts(count: int = 8) -> Dataset:
    return Dataset.from_dict(
        {"prompt": [f"w{3 + i} w4 w{5 + i}" for i in range(count)], "index": list(range(count))}
    )


def small_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs within a group."""
    return [sum(token % 7 for token in ids) / 7 for ids in completion_ids]


def make(folder: Path, kind: str = "grpo", rewards: Any = small_tokens, **settings: Any) -> Any:
    trainer, config = KINDS[kind]
    own = {k: settings.pop(k) for k in _ARGUMENTS if k in settings}
    own.setdefault("processing_class", tiny.tokenizer())
    data = settings.pop("train_dataset", None)
    return trainer(
        settings.pop("model", None) or tiny_models.language_model(),
        reward_funcs=rewards,
        args=config(output_dir=str(folder), **{**SETTINGS, **settings}),
        train_dataset=prompts() if data is None else data,
        **own,
    )


def logprobs(model: Any, of: Samples, i: int) -> Tensor:
    """Of a response's tokens, from the logits of what they were drawn from, in the model's
    dtype."""
    ids = torch.cat([of.prompt_ids[i], of.sequences[i]])
    logits = model(ids[None]).logits[0, len(of.prompt_ids[i]) - 1 : -1]
    if getattr(of, "supports", None) is not None:
        logits = logits.masked_fill(~of.supports[i].mask(), -torch.inf)
    return logits.log_softmax(-1).gather(1, of.sequences[i][:, None])[:, 0]


def advantages(rewards: Tensor, kind: str) -> Tensor:
    """Of one group."""
    if kind == "grpo":
        return (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    return rewards - (rewards.sum() - rewards) / (len(rewards) - 1)


def loss_of(model: Any, start: Any, of: Samples, name: str, beta: float, **args: Any) -> Tensor:
    """The loss as its formula has it; the old policy is the model as the step begins."""
    rewards = torch.tensor(small_tokens([x.tolist() for x in of.sequences])).double()
    ref = [logprobs(start, of, i).detach() for i in range(len(of))]
    if name == "rloo":
        kl = torch.stack([(x - r).sum() for x, r in zip(ref, ref, strict=True)])
        a = advantages(rewards - beta * kl, "rloo")
        sums = [logprobs(model, of, i) - ref[i] for i in range(len(of))]
        return -torch.stack([x.sum().exp() * a[i] for i, x in enumerate(sums)]).mean()
    a = advantages(rewards, "grpo")
    losses = []
    for i in range(len(of)):
        new = logprobs(model, of, i)
        ratio = (new - ref[i]).exp()
        if args.get("importance_sampling_level") == "sequence":
            ratio = (new - ref[i]).mean().exp().expand_as(new)
        each = -ratio * a[i]
        if name == "cispo":
            each = -min(1.0, 0.2) * a[i] * new
        if name == "vespo":
            each = -a[i] * new  # φ(1) = 1
        if name == "sapo":
            tau = 1.0 if a[i] > 0 else 1.05
            each = -4 * torch.sigmoid(tau * (ratio - 1)) / tau * a[i]
        r = ref[i] - new
        losses.append(each + beta * (r.exp() - r - 1) * ratio)
    tokens = sum(map(len, losses))
    if name in ("grpo", "sapo"):
        return torch.stack([x.mean() for x in losses]).mean()
    if name == "luspo":
        return torch.stack([x.sum() for x in losses]).mean()
    if name == "dr_grpo":
        return torch.cat(losses).sum() / (len(of) * SETTINGS["max_completion_length"])
    return torch.cat(losses).sum() / tokens  # bnpo; dapo, cispo and vespo with one batch in a step


@pytest.mark.parametrize(("name", "settings"), [
    ("grpo", {}),
    ("bnpo", {}),
    ("dr_grpo", {}),
    ("dapo", {"beta": 0.1}),
    ("cispo", {}),
    ("sapo", {}),
    ("vespo", {}),
    ("luspo", {"importance_sampling_level": "sequence"}),
    ("grpo", {"importance_sampling_level": "sequence"}),
    ("rloo", {"beta": 0.1}),
])  # fmt: skip
def test_a_step_follows_the_formula(name: str, settings: dict, tmp_path: Path) -> None:
    kind = "rloo" if name == "rloo" else "grpo"
    own = {} if name == "rloo" else {"loss_type": name}
    trainer = make(tmp_path, kind, **GRADIENT_STEP, **own, **settings)
    start = copy.deepcopy(trainer.model)
    trainer.train()
    exact = copy.deepcopy(start).double().eval()
    loss = loss_of(
        exact,
        copy.deepcopy(exact),
        trainer._generations.buffer[0],
        name,
        **{"beta": 0.0, **settings},
    )
    loss.backward()
    found = dict(trainer.model.named_parameters())
    for weight_name, weight in start.named_parameters():
        gradient = dict(exact.named_parameters())[weight_name].grad
        step = (weight - found[weight_name]).double()
        # The step is a difference of two fp32 weights.
        rounding = 4 * torch.finfo(torch.float32).eps * weight.detach().abs().max()
        torch.testing.assert_close(
            step, gradient, rtol=1e-3, atol=float(rounding + 1e-4 * gradient.abs().max())
        )
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_log_has_trls_names(kind: str, tmp_path: Path) -> None:
    trainer = make(tmp_path, kind, beta=0.1, eval_dataset=prompts(2))
    trainer.train()
    named = {
        *("loss", "grad_norm", "learning_rate", "reward", "reward_std", "frac_reward_zero_std"),
        *("num_tokens", "kl", "entropy", "step_time", "rewards/small_tokens/mean"),
        *("rewards/small_tokens/std", "clip_ratio/low_mean", "clip_ratio/low_min"),
        *("clip_ratio/high_mean", "clip_ratio/high_max", "clip_ratio/region_mean"),
        *(f"completions/{x}_length" for x in ("mean", "min", "max", "mean_terminated")),
        *("completions/min_terminated_length", "completions/clipped_ratio"),
    }
    assert named <= trainer.state.log_history[0].keys()
    assert {f"eval_{name}" for name in ("loss", "reward", "entropy")} <= trainer.evaluate().keys()
    assert {"trl", kind, "fastrl"} <= set(trainer.model.model_tags)


def test_an_evaluation_is_of_the_data_that_it_is_given(tmp_path: Path) -> None:
    def place(index: list[int], **_: Any) -> list[float]:
        return [float(i) for i in index]

    held_out = {"two": prompts(2), "three": prompts(3)}
    trainer = make(tmp_path, "grpo", place, eval_dataset=held_out)
    for given in (None, "three", prompts(5)):
        trainer.evaluate(given)
    names = ("eval_two_reward", "eval_three_reward", "eval_reward", "eval_reward")
    found = [log[name] for name, log in zip(names, trainer.state.log_history, strict=True)]
    assert found == [0.5, 1.0, 1.0, 2.0]


def test_metrics_that_nobody_logs_do_not_pile_up(tmp_path: Path) -> None:
    trainer = make(tmp_path, max_steps=2, logging_strategy="no")
    states = OwnStates(trainer)
    trainer.train()
    assert [x["metrics"] for x in states.seen] == [MetricMeans().state()] * 2


@pytest.mark.filterwarnings("ignore:suppress_tokens=")
@pytest.mark.parametrize("kind", KINDS)
def test_responses_that_are_all_cut_teach_nothing(kind: str, tmp_path: Path) -> None:
    settings = {"generation_kwargs": {"suppress_tokens": [tiny.EOS]}}
    trainer = make(tmp_path, kind, mask_truncated_completions=True, **settings)
    before = copy.deepcopy(trainer.model)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(0, abs=1e-7)  # Σ A is rounded
    for old, new in zip(before.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(old, new)


@pytest.mark.filterwarnings("ignore:output_dir .* holds checkpoints later")
def test_a_table_of_completions_outlives_the_run_that_sampled_them(tmp_path: Path) -> None:
    def noted(completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        log_extra("length", [len(x) for x in completions])
        return [float(len(x)) for x in completions]

    settings: dict[str, Any] = {
        "rewards": noted, "log_completions": True, "max_steps": 2, "save_strategy": "steps",
        "save_steps": 1, "steps_per_generation": 2,
    }  # fmt: skip
    make(tmp_path, **settings).train()
    path = tmp_path / "completions" / "completions_00002.parquet"
    rows = Dataset.from_parquet(str(path)).to_list()
    path.unlink()
    make(tmp_path, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert Dataset.from_parquet(str(path)).to_list() == rows
    assert len(rows) == 8


def test_a_list_of_rows_keeps_the_columns_of_all(tmp_path: Path) -> None:
    rows = [{"prompt": "w5 w6"}, {"prompt": "w7", "gold": "w8"}] * 4
    several: Any = {"few": rows[:2], "all": rows}
    trained = [
        make(tmp_path / kind, kind, train_dataset=rows, eval_dataset=several) for kind in KINDS
    ]
    pairs = [{"chosen": " w9", "rejected": " w8", **row} for row in rows]
    args = DPOConfig(str(tmp_path / "dpo"), use_cpu=True, bf16=False, report_to="none")
    of_pairs = DPOTrainer(
        tiny_models.language_model(),
        args=args,
        train_dataset=pairs,
        eval_dataset={"first": pairs[:2], "rest": Dataset.from_list(pairs[2:])},
        processing_class=tiny.tokenizer(),
    )
    for trainer in trained:
        assert trainer.train_dataset["gold"][:4] == [None, "w8", None, "w8"]
        assert list(trainer.eval_dataset["few"]) == [{**rows[0], "gold": None}, rows[1]]
    sets = of_pairs.eval_dataset
    assert [len(x) for x in (of_pairs.train_dataset, *sets.values())] == [8, 2, 6]
    with pytest.raises(TypeError, match="row 1 is a str: rows are dicts by column"):
        make(tmp_path, train_dataset=[{"prompt": "w5"}, "w6"])
    with pytest.raises(TypeError, match="row 0 is a str: rows are dicts by column"):
        as_dataset(["w5", "w6"])


def test_groups_are_repeated_in_order() -> None:
    order = GroupSampler(range(7), size=2, prompts=3, uses=2, shuffle=False)
    once = [0, 0, 1, 1, 2, 2]
    second = [3, 3, 4, 4, 5, 5]
    assert list(order) == once * 2 + second * 2
    assert len(order) == len(list(order))
    stream = IterableDataset.from_generator(lambda: ({"x": i} for i in range(7)))
    assert [row["x"] for row in in_groups(stream, 2, 3, 2)] == list(order)


@pytest.mark.filterwarnings("ignore:settings of other versions in GRPOConfig")
def test_an_adapter_on_the_head_is_refused(tmp_path: Path) -> None:
    head, model = tiny_models.lora(target_modules=["lm_head"]), tiny_models.language_model()
    with pytest.raises(ValueError, match="an adapter on lm_head is not supported"):
        make(tmp_path, use_liger_kernel=True, peft_config=head, model=model)
    assert not hasattr(model, "peft_config")


def test_penalties_for_how_responses_end(tmp_path: Path) -> None:
    """0.5 for no EOS, and DAPO's equation 13 with a buffer of 4 of the longest."""
    told, eos = [], tiny.tokenizer().eos_token_id

    def fixed(completion_ids: list[list[int]], **_: Any) -> list[float]:
        for ids in completion_ids:
            over = max(0, len(ids) - 6 + 4) / 4
            told.append(3.0 - 0.5 * (ids[-1] != eos) - 2.0 * over)
        return [3.0] * len(completion_ids)

    settings = {"missing_eos_penalty": 0.5, "overlong_buffer": 4, "overlong_penalty": 2.0}
    model = tiny_models.language_model(vocab_size=12)
    trainer = make(tmp_path, rewards=fixed, model=model, temperature=30.0, **settings)
    trainer.train()
    log = trainer.state.log_history[0]
    assert len(set(told)) > 1
    assert log["reward"] == pytest.approx(sum(told) / len(told), rel=1e-6)
    assert log["rewards/fixed/mean"] == 3.0


STOPS = [[3, 4], [5]]


def stopped_or_cut(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Of each four responses one ends at each stop, one in EOS, and one is cut."""
    said = [[6, 3, 4], [5], [6, tiny.EOS], [3, 5, 6, 6, 6, 4]] * (len(prompts) // 4)
    return {"prompt_ids": [[3]] * len(said), "completion_ids": said, "logprobs": None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rollout_func", [None, stopped_or_cut], ids=["policy", "function"])
def test_a_response_that_ends_at_a_stop_is_whole(
    kind: str, rollout_func: Any, tmp_path: Path
) -> None:
    told = []

    def noted(completion_ids: list[list[int]], **_: Any) -> list[float]:
        told.extend(completion_ids)
        return small_tokens(completion_ids)

    trainer = make(
        tmp_path, kind, noted, model=tiny_models.language_model(vocab_size=12), temperature=30.0,
        generation_kwargs={"stop": STOPS, "eos_token_id": [tiny.EOS, 7]}, rollout_func=rollout_func,
        mask_truncated_completions=True, missing_eos_penalty=0.5, num_generations=8,
        per_device_train_batch_size=8,
    )  # fmt: skip
    trainer.train()
    whole = {x: x[-1] in (tiny.EOS, 7, 5) or x[-2:] == (3, 4) for x in map(tuple, told)}
    count = sum(whole[tuple(ids)] for ids in told)
    assert {True, False} == {*whole.values()}
    assert any(whole[x] and x[-1] in (4, 5) for x in whole)
    samples, log = trainer._generations.buffer[0], trainer.state.log_history[0]
    for ids, mask in zip(samples.sequences, samples.learned, strict=True):
        assert mask.all() if whole[tuple(ids.tolist())] else not mask.any()
    assert log["completions/clipped_ratio"] == 1 - count / 8
    lengths = [len(ids) for ids in told if whole[tuple(ids)]]
    assert log["completions/mean_terminated_length"] == pytest.approx(sum(lengths) / count)
    assert log["reward"] == pytest.approx(sum(small_tokens(told)) / 8 - 0.5 * (8 - count) / 8)


@pytest.mark.parametrize(
    "settings", [{"load_best_model_at_end": True}, {"lr_scheduler_type": "reduce_lr_on_plateau"}]
)
def test_a_best_metric_of_no_evaluation_set_is_refused(settings: dict, tmp_path: Path) -> None:
    each = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    data = {"one": prompts(4), "other": prompts(8)}
    with pytest.raises(ValueError, match=r"sets one, other: .*such as 'eval_one_reward'"):
        make(tmp_path, eval_dataset=data, **each, **settings)
    make(tmp_path, eval_dataset=data, metric_for_best_model="one_reward", **each, **settings)


def test_what_is_cut_whole_has_no_entropy(tmp_path: Path) -> None:
    """Of two batches one is cut: the mean is that of the other."""
    said = iter([[6, 7, tiny.EOS], [6, 7, 8]])

    def answer(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        ids = [next(said)] * len(prompts)
        return {"prompt_ids": [[3]] * len(ids), "completion_ids": ids, "logprobs": None}

    settings = {"mask_truncated_completions": True, "max_steps": 2, "logging_steps": 2}
    trainer = make(tmp_path, rollout_func=answer, learning_rate=0.0, **settings)
    whole = copy.deepcopy(trainer.model)
    trainer.train()
    logits = whole(torch.tensor([[3, 6, 7, tiny.EOS]])).logits[0, :-1]
    exact = torch.distributions.Categorical(logits=logits.detach().double()).entropy().mean()
    log = trainer.state.log_history[0]
    assert log["entropy"] == pytest.approx(float(exact), rel=1e-5)
    assert log["completions/mean_terminated_length"] == 3


def test_a_buffer_longer_than_completions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"overlong_buffer=99 .* max_completion_length, which is"):
        make(tmp_path, overlong_buffer=99)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_without_spread_give_way_to_others(kind: str, tmp_path: Path) -> None:
    """Of 8 prompts 5 are flat: what stays, or comes in their place, is of the other 3 alone."""
    asked: list[list[int]] = []

    def judge(completion_ids: list[list[int]], index: list[int], **more: Any) -> list[float]:
        asked.append(list(index))
        more["log_extra"]("row", list(index))
        return [
            0.0 if row < 5 else float(sum(ids) + i)
            for i, (row, ids) in enumerate(zip(index, completion_ids, strict=True))
        ]

    settings = {"dynamic_sampling_rounds": 9, "steps_per_generation": 2, "log_completions": True}
    trainer = make(tmp_path, kind, judge, **settings)
    trainer.train()
    rows, log = list(trainer._logs["extra"]["row"]), trainer.state.log_history[0]
    assert all(row >= 5 for row in rows)
    assert [rows[i : i + 4] for i in range(0, 8, 4)] == [[row] * 4 for row in rows[::4]]
    assert log["frac_reward_zero_std"] == 0
    assert log["groups/replaced"] == sum(map(len, asked[1:])) / 4 > 0
    assert log["groups/sampling_rounds"] == len(asked) - 1


@pytest.mark.filterwarnings("ignore:resume. settings differ")
def test_prompts_that_came_in_the_place_of_others_are_not_drawn_again(tmp_path: Path) -> None:
    def judge(completion_ids: list[list[int]], index: list[int], **_: Any) -> list[float]:
        drawn.append(list(index[::4]))
        return [
            0.0 if row % 2 else sum(ids) / 99
            for row, ids in zip(index, completion_ids, strict=True)
        ]

    drawn: list[list[int]] = []
    settings = {"dynamic_sampling_rounds": 3, "max_steps": 4}
    settings |= {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    straight = make(tmp_path / "a", rewards=judge, **settings)
    straight.train()
    whole, drawn = drawn, []
    make(tmp_path / "b", rewards=judge, **{**settings, "max_steps": 2}).train()
    resumed = make(tmp_path / "b", rewards=judge, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert drawn == whole
    for one, other in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_dynamic_sampling_that_cannot_be_is_refused(monkeypatch: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a stream of prompts: leave dynamic_sampling_rounds at 0"):
        make(tmp_path, train_dataset=prompts().to_iterable_dataset(), dynamic_sampling_rounds=1)
    monkeypatch.setattr(GRPOConfig, "world_size", 2)
    with pytest.raises(ValueError, match=r"\(2\) is no multiple of num_generations \(4\)"):
        make(tmp_path, per_device_train_batch_size=2, dynamic_sampling_rounds=1)


def test_a_stream_of_prompts_is_learned_from(tmp_path: Path) -> None:
    stream = IterableDataset.from_generator(lambda: iter(prompts()))
    trainer = make(tmp_path, train_dataset=stream, max_steps=2, dataloader_num_workers=0)
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
def test_an_adapter_alone_is_trained_beside_its_base(tmp_path: Path) -> None:
    trainer = make(
        tmp_path,
        beta=0.1,
        learning_rate=1e-2,
        max_steps=2,
        peft_config=tiny_models.lora(init_lora_weights=True),
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert trainer.ref_model is None
    for name, weight in trainer.model.named_parameters():
        assert "lora_B" not in name or not torch.equal(weight, before[name])
        assert "lora_" in name or torch.equal(weight, before[name])
    first, second = (row["kl"] for row in trainer.state.log_history[:2])
    assert first == pytest.approx(0, abs=1e-6)
    assert second > 1e-6


@pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
def test_a_reference_beside_an_adapter_follows_it(tmp_path: Path) -> None:
    trainer = make(
        tmp_path,
        beta=0.1,
        learning_rate=1e-2,
        max_steps=2,
        sync_ref_model=True,
        ref_model_sync_steps=2,
        ref_model_mixup_alpha=1.0,
        peft_config=tiny_models.lora(init_lora_weights=True),
    )
    trainer.train()
    weights = dict(trainer.model.named_parameters())
    followed = trainer._reference.own_weights()
    assert followed
    for name, weight in followed.items():
        assert torch.equal(weight, weights[name.replace(".reference.", ".default.")])


def test_trackers_get_one_response_to_each_prompt(monkeypatch: Any) -> None:
    sent: list[Any] = []
    tracker = SimpleNamespace(
        run=object(),
        log=lambda row: sent.append(row["completions"]),
        Table=lambda dataframe: dataframe,
    )
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "wandb" or None)
    table = CompletionsTable(4)
    for i, prompt in enumerate(["a", "a", [{"role": "user"}], [{"role": "user"}]]):
        table["prompt"].append(prompt)
        table["completion"].append(f"c{i}")
        table["advantages"].append(float(i))
    for unique in (True, False):
        table.report(["wandb"], 7, unique)
    table.report(["tensorboard"], 7, False)
    assert [list(x["completion"]) for x in sent] == [["c0", "c2"], ["c0", "c1", "c2", "c3"]]
    assert list(sent[0]["step"]) == [7, 7]


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_rollouts_compute_in_the_precision_of_training(kind: str, tmp_path: Path) -> None:
    """Or the engine's numbers would not be the model's, and ``model.generate`` took its place."""
    trainer = make(tmp_path, kind, max_steps=1, bf16=True)
    trainer.train()
    (engine,) = trainer._rollouts.backend._engines.values()
    assert isinstance(engine, RolloutEngine)
    assert engine.model_runner.autocast_dtype() == torch.bfloat16


def test_a_table_has_the_rewards_that_no_row_lacks() -> None:
    table = CompletionsTable(4)
    table.add(["a"], ["b"], {"of all": [1.0], "of one": [2.0]})
    table.add(["c"], ["d"], {"of all": [3.0]})
    assert table.columns(1) | {"step": 1} == {
        "step": 1, "prompt": ["a", "c"], "completion": ["b", "d"], "of all": [1.0, 3.0],
    }  # fmt: skip


def test_a_table_shows_several_prompts_first(capsys: pytest.CaptureFixture[str]) -> None:
    table = CompletionsTable(6)
    said = [f"said{i}" for i in range(6)]
    table.add(["a", "a", "a", "b", "b", "c"], said, {"reward": map(float, range(6))})
    for step, (most, shown) in enumerate([(2, [0, 3]), (4, [0, 1, 3, 5]), (None, [*range(6)])]):
        table._shown = {}
        table.show(step, most)
        found = re.findall(r"said\d", capsys.readouterr().out)
        assert found == [said[i] for i in shown]


def test_a_table_fits_the_terminal_and_keeps_numbers_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow = Console(highlight=False, width=80)
    monkeypatch.setattr("fastrl.collect.completions_table.run_console", lambda: narrow)
    table = CompletionsTable(4)
    chat = [{"role": "user", "content": "[b]hi\x1b[31m"}]
    table.add(
        ["first " + "what is it? " * 80, chat],
        ["four " * 200 + "last", [{"role": "assistant", "content": "ok"}]],
        {"a_reward_of_a_long_name": [-0.123456, 1.0], "other": [float("nan"), 12345.678]},
        [1.5, -0.75],
    )
    table.show(7, None)
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 20
    assert all(x in said for x in ("Step 7", "-0.123", "1.23e+04", "nan", "-0.75"))
    assert "\x1b" not in said
    assert "first" not in said  # of a prompt the end is shown
    assert "last" not in said
    table.show(7, None)
    assert capsys.readouterr().out == ""
    table.show(8, 1)
    assert "-0.75" not in capsys.readouterr().out


def test_a_head_in_less_than_float32_is_refused_where_float32_is_asked_for(tmp_path: Path) -> None:
    make(tmp_path, cast_lm_head_to_fp32=True)
    with pytest.raises(ValueError, match="head in bfloat16"):
        make(
            tmp_path,
            cast_lm_head_to_fp32=True,
            model=tiny_models.language_model().to(torch.bfloat16),
            master_weights=True,
        )


def test_another_number_of_processes_begins_with_new_responses(tmp_path: Path) -> None:
    trainer = make(tmp_path, num_iterations=2, max_steps=3)
    trainer.train()
    state = trainer.own_state()
    with pytest.raises(BadCheckpoint, match="1 of 2 batches into"):
        trainer.joined_state([state] * 2)
    trainer._generations.step = 4
    joined = trainer.joined_state([trainer.own_state()] * 2)
    assert joined["online"]["buffer"] is None
    assert joined["metrics"] == MetricMeans().state()


@pytest.mark.parametrize(("changed", "named"), [
    ({"logprobs": ...}, r"must return keys \['logprobs'\]"),
    ({"completion_ids": [[4, 5]]}, "1 completion_ids for 4 prompts"),
    ({"env_mask": [[1]] * 4}, r"env_mask of 1 tokens .* of 2 \(response 0\)"),
    ({"logprobs": [[-1.0]] * 4}, "logprobs of 1 tokens"),
    ({"completion_ids": [[4.7, 5]] * 4}, r"completion_ids\[0\] .* must hold whole token ids"),
    ({"completion_ids": [[True, False]] * 4}, r"completion_ids\[0\] .*whole token ids"),
    ({"completion_ids": [[4, 5]] * 3 + [[4, -1]]}, r"completion_ids\[3\] has the token id -1"),
    ({"prompt_ids": [[3, 97]] * 4}, r"prompt_ids\[0\] has the token id 97, .* of 97 tokens"),
    ({"prompt_ids": [[3], [], [3], [3]]}, r"prompt_ids\[1\] is empty"),
    ({"prompt_ids": [[3] * 47] * 4}, r"47 \+ 2 tokens of response 0 exceed the .*context of 48"),
    ({"completion_ids": [[[4], [5]]] * 4}, r"completion_ids\[0\] .* one number for each token"),
    ({"completion_ids": ["45"] * 4}, r"completion_ids\[0\] .* one number for each token"),
    ({"completion_ids": None}, "completion_ids must be a list"),
    ({"env_mask": [[0.5, 1.0]] * 4}, r"env_mask\[0\] holds 0.5: "),
    ({"env_mask": [[1, 1]] * 3 + [[1, 2]]}, r"env_mask\[3\] holds 2: "),
    ({"logprobs": [[-1.0, 0.4]] * 4}, r"logprobs\[0\] holds 0.4.*: log-probs are 0 or less"),
    ({"logprobs": [[[-1.0], [-1.0]]] * 4}, r"logprobs\[0\] .* one number for each token"),
    ({"turns": [1, 2]}, "2 turns for 4 prompts"),
])  # fmt: skip
def test_rollouts_that_are_none_are_named(changed: dict, named: str, tmp_path: Path) -> None:
    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        whole = {"prompt_ids": [[3]] * 4, "completion_ids": [[4, 5]] * 4, "logprobs": None}
        return {k: x for k, x in {**whole, **changed}.items() if x is not ...}

    trainer = make(tmp_path, rollout_func=rollout)
    with pytest.raises(ValueError, match=named):
        trainer.train()


@pytest.mark.parametrize("kind", KINDS)
def test_a_rollout_function_takes_the_place_of_sampling(kind: str, tmp_path: Path) -> None:
    seen: list[Any] = []

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [[3, 4]] * len(prompts),
            "completion_ids": [[5, 6, 7 + i] for i in range(len(prompts))],
            "logprobs": None,
            "env_mask": [[1, 0, 1]] * len(prompts),
            "turns": list(range(len(prompts))),
        }

    def judge(completion_ids: list[list[int]], turns: list[int], **_: Any) -> list[float]:
        seen.append((completion_ids, turns))
        return [float(x) for x in turns]

    trainer = make(tmp_path, kind, judge, rollout_func=rollout)
    trainer.train()
    assert seen == [([[5, 6, 7 + i] for i in range(4)], list(range(4)))]
    assert trainer.state.log_history[0]["completions/mean_length"] == 2.0
    assert learned_counts(trainer._generations.buffer[0]) == [2] * 4


def test_only_the_settings_say_how_is_sampled(tmp_path: Path) -> None:
    drawn: list[list[list[int]]] = []
    saved = {
        "min_p": 0.9, "suppress_tokens": [*range(5, 60)], "min_new_tokens": 3, "do_sample": True,
    }  # fmt: skip
    for found in ({}, saved):
        seen: list[list[int]] = []
        model = tiny_models.language_model()
        model.generation_config.update(**found)

        def noted(completion_ids: Any, seen: Any = seen, **_: Any) -> list[float]:
            seen.extend(completion_ids)
            return small_tokens(completion_ids)

        make(tmp_path, rewards=noted, model=model, max_steps=1).train()
        drawn.append(seen)
    assert drawn[0] == drawn[1]


def test_a_generate_that_a_program_has_replaced_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []

    def noted(completion_ids: Any, **_: Any) -> list[float]:
        seen.extend(completion_ids)
        return small_tokens(completion_ids)

    def fives(self: Any, input_ids: Tensor, **_: Any) -> Tensor:
        return torch.cat([input_ids, torch.full((len(input_ids), 2), 5)], 1)

    monkeypatch.setattr(GenerationMixin, "generate", fives)
    make(tmp_path, rewards=noted, max_steps=1).train()
    assert {tuple(ids) for ids in seen} == {(5, 5)}


def test_a_table_of_completions_holds_calls_without_arguments(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "now", "arguments": {}}}
    prompt = [{"role": "user", "content": "When?"}, {"role": "assistant", "tool_calls": [call]}]
    table = CompletionsTable(4)
    table.add([prompt], [[{"role": "assistant", "content": "At noon."}]], {"good": [1.0]})
    table["extra"]["place"].append({"at": {}})
    table.save(tmp_path, 1)
    (row,) = Dataset.from_parquet(str(tmp_path / "completions" / "completions_00001.parquet"))
    assert json.loads(row["prompt"]) == prompt
    assert row["completion"] == [{"role": "assistant", "content": "At noon."}]
    assert json.loads(row["place"]) == {"at": {}}


def test_tokens_that_the_run_has_seen_are_those_of_its_responses(tmp_path, caplog):
    """Which transformers cannot count in a batch, and would warn of."""
    logger = logging.getLogger("transformers.trainer")
    logger.addHandler(caplog.handler)
    try:
        trainer = make(tmp_path, max_steps=2, include_num_input_tokens_seen="all")
        trainer.train()
    finally:
        logger.removeHandler(caplog.handler)
    assert trainer.state.num_input_tokens_seen == trainer.state.log_history[-2]["num_tokens"] > 0
    assert "number of tokens seen" not in caplog.text


def test_a_step_that_failed_moves_the_entropy_coefficient_once(tmp_path: Path) -> None:
    """It is moved within the step, before the weights are updated."""
    settings = {
        "use_adaptive_entropy": True, "entropy_target": 9.0, "entropy_coef": 0.1, "max_steps": 3,
        "save_strategy": "steps", "save_steps": 9, "logging_steps": 1,
    }  # fmt: skip
    whole = make(tmp_path / "whole", **settings)
    whole.train()
    failed = make(tmp_path / "run", **settings, callbacks=[At("on_pre_optimizer_step", 1, failing)])
    with pytest.warns(UserWarning, match="saved in"), pytest.raises(RuntimeError, match="tired"):
        failed.train()
    again = make(tmp_path / "run", **settings)
    again.train(resume_from_checkpoint=True)
    coefficients = [
        [row["entropy_coef"] for row in x.state.log_history if "entropy_coef" in row]
        for x in (again, whole)
    ]
    assert coefficients[0] == coefficients[1]
    assert len(set(coefficients[1])) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_of_a_step_whose_callback_failed_are_of_that_step(
    kind: str, tmp_path: Path
) -> None:
    def made(folder: Path, *callbacks: Any) -> Any:
        settings = {"max_steps": 4, "save_strategy": "steps", "callbacks": list(callbacks)}
        return make(folder, kind, **settings)

    fails = made(tmp_path / "run", At("on_step_end", 2, failing))
    with pytest.warns(UserWarning, match="saved in"), pytest.raises(RuntimeError, match="tired"):
        fails.train()
    assert_same_run(resumed(made, tmp_path / "run", True), straight(made, tmp_path / "whole"))
