"""SFT and reward models compute on real tokens alone, and what a pair begins with once."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fastrl.data.batch import pad
from fastrl.data.collators import TextCollator
from fastrl.data.padding_free import join_sides, right_padded
from fastrl.data.prepare import prepare_pairs
from tests import tiny_models
from tests.golden import tiny
from tests.trainers.conftest import Make, pairs, reward_model, texts

FAMILIES = ("gpt2", "llama", "opt", "gpt_neox", "qwen2", "qwen3", "mistral", "gemma2", "phi3")


def still(model: Any) -> Any:
    """Without dropout, which draws other numbers in another layout."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.config.attention_dropout = model.config.attn_pdrop = 0.0
    return model


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Context in which nothing is warned of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def tokens_of(layer: torch.nn.Module) -> list[int]:
    """Filled with the tokens of each of its forwards."""
    seen: list[int] = []
    layer.register_forward_pre_hook(lambda _m, args: seen.append(args[0].shape[:2].numel()))
    return seen


def learned(trainer: Any, batch: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    named = trainer.model.named_parameters()
    return float(loss.detach()), {n: p.grad.clone() for n, p in named if p.grad is not None}


def assert_alike(found: Any, expected: Any) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1].keys() == expected[1].keys()
    largest = max(float(x.abs().max()) for x in expected[1].values())
    for name, x in expected[1].items():
        assert (found[1][name] - x).abs().max() <= 1e-5 * largest, name


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_learn_what_they_learn_padded(make_sft: Make, family: str) -> None:
    found = []
    for padding_free in (False, True):
        model = still(tiny_models.language_model(family))
        trainer = make_sft(model, texts(6), padding_free=padding_free)
        batch = trainer.data_collator([trainer.train_dataset[i] for i in range(6)])
        trainer.compute_loss(trainer.model, batch)  # the head is chosen
        found.append(learned(trainer, batch))
        logits = trainer.compute_loss(trainer.model, batch, return_outputs=True)[1].logits
        real = batch["attention_mask"].bool()
        found[-1] += (logits[real].detach(),)
    assert_alike(found[1], found[0])
    torch.testing.assert_close(found[1][2], found[0][2], atol=1e-5, rtol=1e-5)


def test_no_padding_of_texts_is_computed(make_sft: Make) -> None:
    model = tiny_models.language_model("llama")
    trainer = make_sft(model, texts(6))
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(6)])
    trainer.compute_loss(trainer.model, batch)
    seen = tokens_of(model.model.layers[0])
    trainer.compute_loss(trainer.model, batch)
    real = int(batch["attention_mask"].sum())
    assert seen == [real]
    assert real < batch["input_ids"].numel()


def test_dropout_of_attention_is_kept_in_training(make_sft: Make) -> None:
    model = tiny_models.language_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.0, embd_pdrop=0.0)
    trainer = make_sft(model, texts(6))
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(6)])
    model.train()
    losses = {trainer.compute_loss(model, batch).item() for _ in range(3)}
    assert len(losses) == 3
    model.eval()
    losses = {trainer.compute_loss(model, batch).item() for _ in range(3)}
    assert len(losses) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_pairs_learn_what_they_learn_padded(make_reward: Make, family: str) -> None:
    found = []
    for padding_free in (False, True):
        trainer = make_reward(still(reward_model(family)), pairs(5), padding_free=padding_free)
        batch = trainer.data_collator([trainer.train_dataset[i] for i in range(5)])
        found.append(learned(trainer, batch))
    assert_alike(found[1], found[0])


def test_what_a_pair_begins_with_runs_once(make_reward: Make) -> None:
    model = reward_model("llama")
    trainer = make_reward(model, pairs(5))
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(5)])
    trainer.compute_loss(trainer.model, batch)
    seen = tokens_of(model.model.layers[0])
    trainer.compute_loss(trainer.model, batch)
    sides = [batch[f"input_ids_{side}"] for side in ("chosen", "rejected")]
    masks = [batch[f"attention_mask_{side}"] for side in ("chosen", "rejected")]
    total = sum(int(mask.sum()) for mask in masks)
    width = min(side.shape[1] for side in sides)
    same = (sides[0][:, :width] == sides[1][:, :width]).cumprod(-1).sum(-1)
    shortest = torch.stack([mask.sum(-1) for mask in masks]).amin(0)
    assert seen == [total - int(torch.minimum(same, shortest - 1).sum())]


@pytest.mark.parametrize(("chosen", "rejected", "tokens", "ends"), [
    ([[1, 2, 3]], [[1, 2, 4, 5]], 2 + 1 + 2, [2, 4]),
    ([[1, 2]], [[1, 2]], 1 + 1 + 1, [1, 2]),
    ([[1, 2]], [[1, 2, 3]], 1 + 1 + 2, [1, 3]),
    ([[1]], [[2, 3]], 3, [0, 2]),
    ([[1, 2], [7]], [[3], [7]], 3 + 2, [1, 3, 2, 4]),
])  # fmt: skip
def test_pairs_share_the_longest_beginning_that_leaves_each_a_token(
    chosen: Any, rejected: Any, tokens: int, ends: list[int]
) -> None:
    sides = [[torch.tensor(x) for x in side] for side in (chosen, rejected)]
    found = join_sides(sides, "cpu")
    assert found.inputs["input_ids"].shape == (1, tokens)
    assert found.rows.tolist() == ends
    last = [x[-1] for side in (chosen, rejected) for x in side]
    assert found.inputs["input_ids"][0, found.rows].tolist() == last


def test_only_what_is_padded_on_the_right_is_taken_for_it() -> None:
    assert right_padded(torch.tensor([[1, 1, 0], [1, 1, 1]])) == [2, 3]
    assert right_padded(torch.tensor([[0, 1, 1], [1, 1, 1]])) is None
    assert right_padded(torch.tensor([[1, 0, 1]])) is None
    assert right_padded(torch.tensor([[0, 0], [1, 1]])) is None


def test_a_reward_is_read_where_the_classifier_itself_reads_it() -> None:
    """From the last token that is not the pad token, even where a text ends with it as its EOS."""
    sides = [[torch.tensor([5, 6, 2])], [torch.tensor([5, 7, 2, 2])]]
    found = join_sides(sides, "cpu", padding=2)
    assert found.inputs["input_ids"][0, found.rows].tolist() == [6, 7]
    same = join_sides([[torch.tensor([5, 2, 2])], [torch.tensor([5, 2, 2, 2])]], "cpu", padding=2)
    assert same.inputs["input_ids"][0, same.rows].tolist() == [5, 5]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_rewards_are_those_of_the_model_where_eos_pads(make_reward: Make, family: str) -> None:
    model = reward_model(family, pad_token_id=tiny.EOS)
    trainer = make_reward(model, prepare_pairs(pairs(5), tiny.tokenizer(), None, add_eos=True))
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(5)])
    _, rewards = trainer.compute_loss(model, batch, return_outputs=True)
    assert trainer.packing(trainer.model_wrapped)
    for side, found in zip(("chosen", "rejected"), rewards.values(), strict=True):
        ids, mask = batch[f"input_ids_{side}"], batch[f"attention_mask_{side}"].bool()
        for row, real, reward in zip(ids, mask, found, strict=True):
            alone = model(input_ids=row[real][None]).logits[0]
            torch.testing.assert_close(reward, alone, atol=1e-5, rtol=1e-5)


def test_a_classifier_that_changes_its_scores_gets_padded_batches(
    make_reward: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = reward_model("llama")
    forward = type(model).forward

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        out.logits = 5 * out.logits.tanh()
        return out

    monkeypatch.setattr(type(model), "forward", changed)
    trainer = make_reward(model, pairs(5))
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(5)])
    with pytest.warns(UserWarning, match="LlamaForSequenceClassification: batches are padded"):
        trainer.compute_loss(model, batch)


def test_labels_on_padding_are_learned_as_they_stand(make_sft: Make) -> None:
    def collate(rows: Any) -> Any:
        batch = TextCollator(tiny.tokenizer())(rows)
        batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
        return batch | {"labels": batch["input_ids"].clone()}

    losses = []
    for padding_free in (True, False):
        model = still(tiny_models.language_model("llama"))
        trainer = make_sft(model, texts(6), data_collator=collate, padding_free=padding_free)
        batch = collate([trainer.train_dataset[i] for i in range(6)])
        with pytest.warns(UserWarning, match="labels on padding") if padding_free else silence():
            losses.append(trainer.compute_loss(model, batch).item())
        with silence():  # it is said once
            trainer.compute_loss(model, batch)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_collator_that_pads_on_the_left_is_told_of(make_sft: Make) -> None:
    def collate(rows: Any) -> Any:
        batch = pad([torch.tensor(row["input_ids"]) for row in rows], tiny.PAD, "left")
        labels = torch.where(batch["attention_mask"].bool(), batch["input_ids"], -100)
        return batch | {"labels": labels}

    model = still(tiny_models.language_model("llama"))
    trainer = make_sft(model, texts(6), data_collator=collate)
    batch = collate([trainer.train_dataset[i] for i in range(6)])
    with pytest.warns(UserWarning, match="padding that is not on the right: pad there"):
        trainer.compute_loss(model, batch)
    even = collate([trainer.train_dataset[0]] * 2)
    seen = tokens_of(model.model.layers[0])
    with silence():
        trainer.compute_loss(model, even)
    assert seen == [even["input_ids"].numel()]
