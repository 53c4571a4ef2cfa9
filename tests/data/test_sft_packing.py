"""Packed texts are as if alone: their losses, and what their neighbours do to them."""

import itertools
import random
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

import fastrl_kernels
from fastrl import DataCollatorForCompletionOnlyLM, pack_dataset
from fastrl.data.collators import IGNORED
from fastrl.data.sft_packing import PackedCollator, PackedTexts, choose_collator, pack
from fastrl.trainers import supervised as base
from tests import tiny_models
from tests.golden import tiny
from tests.trainers.conftest import GRADIENT_STEP, Make, assert_moved_by, texts, weights
from tests.trainers.test_sft import exact

FAMILIES = ("gpt2", "llama", "opt", "gpt_neox", "qwen2", "gemma2", "phi3")


@pytest.mark.parametrize("seed", range(3))
def test_every_text_is_in_one_row_and_rows_are_full(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 40) for _ in range(200)]
    rows = pack(lengths, 40)
    assert sorted(i for row in rows for i in row) == list(range(200))
    filled = [sum(lengths[i] for i in row) for row in rows]
    assert max(filled) <= 40
    # First-fit decreasing needs at most 11/9 of the best, plus one.
    assert len(rows) <= sum(lengths) / 40 * 11 / 9 + 1


def test_a_text_as_long_as_a_row_and_empty_input() -> None:
    assert pack([4, 4, 1, 3], 4) == [[0], [1], [2, 3]]
    assert pack([], 4) == []


def test_positions_begin_anew_and_no_text_learns_the_next_ones_first_token() -> None:
    texts = Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9]], "labels": [[5, 6, 7], [8, 9]]})
    rows = PackedTexts(texts, 5)
    assert len(rows) == 1
    other = {"input_ids": [3, 4], "labels": [3, 4]}  # one that is not packed
    batch = PackedCollator(tiny.tokenizer(), torch.bool)([rows[0], other])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9], [3, 4, 2, 2, 2]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]
    x = IGNORED
    assert batch["labels"].tolist() == [[x, 6, 7, x, 9], [x, 4, x, x, x]]
    assert batch["rows"].tolist() == [0, 1, 3, 5]
    assert batch["targets"].tolist() == [6, 7, 9, 4]
    assert batch["attention_mask"].shape == (2, 1, 5, 5)
    assert batch["attention_mask"][0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]


class Scored:
    """The log-probs of the batches that a trainer computes a loss of."""

    def __init__(self, monkeypatch: Any, trainer: Any):
        self.trainer, self._kept = trainer, []
        op = fastrl_kernels.linear_nll_loss

        def kept(*args: Any, **kwargs: Any) -> Any:
            found = op(*args, **kwargs)
            self._kept.append(found[1])
            return found

        monkeypatch.setattr(fastrl_kernels, "linear_nll_loss", kept)

    def __call__(self, rows: list[dict[str, Any]]) -> Tensor:
        with torch.no_grad():
            self.trainer.compute_loss(self.trainer.model, self.trainer.data_collator(rows))
        return self._kept[-1].clone()


@pytest.fixture
def scored(monkeypatch: Any) -> Any:
    return lambda trainer: Scored(monkeypatch, trainer)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_tokens_have_the_losses_that_they_have_alone(
    make_sft: Make, scored: Any, family: str
) -> None:
    model = tiny_models.language_model(family)
    trainer = make_sft(model, texts(12), packing=True, max_length=30)
    packed = trainer.train_dataset
    assert max(len(row) for row in packed.rows) > 2
    score = scored(trainer)
    together = score([packed[i] for i in range(len(packed))])
    alone = torch.cat([score([packed.texts[i]]) for row in packed.rows for i in row])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_neighbours_text_never_changes_a_loss(make_sft: Make, scored: Any, family: str) -> None:
    model = tiny_models.language_model(family)
    trainer = make_sft(model, texts(12), packing=True, max_length=30)
    score = scored(trainer)
    row, other = trainer.train_dataset[0], trainer.train_dataset[1]
    first, second, *_ = row["seq_lengths"]
    before = score([row, other])
    changed = {**row, "input_ids": list(row["input_ids"])}
    for i in range(first, first + second):  # of the text in the middle, on both sides of which
        changed["input_ids"][i] = 3 + (changed["input_ids"][i] + 40) % 90
    changed["labels"] = [
        x if x == IGNORED else t for x, t in zip(row["labels"], changed["input_ids"], strict=True)
    ]
    after = score([changed, other])
    its = slice(first - 1, first - 1 + second - 1)  # one target less than tokens
    assert (before[its] - after[its]).abs().max() > 1e-2
    before[its] = after[its] = 0
    torch.testing.assert_close(before, after, rtol=0, atol=1e-5)  # rounding, as above


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eager_attention_keeps_texts_apart(dtype: Any) -> None:
    """It adds its mask, one of truth values as ones; and OPT reads no positions."""
    model = tiny_models.language_model("opt", attn_implementation="eager").to(dtype)
    assert choose_collator(model, tiny.tokenizer()).mask is dtype
    model = tiny_models.language_model("opt").to(dtype)
    assert choose_collator(model, tiny.tokenizer()).mask is torch.bool


@pytest.mark.filterwarnings("ignore:BloomForCausalLM. batches are padded")
@pytest.mark.parametrize("family", ["bloom"])
def test_a_model_that_cannot_keep_texts_apart_is_refused(make_sft: Make, family: str) -> None:
    model = tiny_models.language_model(family)
    with pytest.raises(
        ValueError, match="lets packed texts attend to each other: leave packing out"
    ):
        make_sft(model, packing=True)
    make_sft(model)


@pytest.mark.parametrize("error", [None, AssertionError("lengths")])
def test_positions_that_a_model_does_not_heed_are_found_out(error: Exception | None) -> None:
    class Heedless(torch.nn.Module):
        """Takes positions and masks, and uses neither, or says that it cannot take them."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_models.language_model("llama")
            self.config, self.device = self.inner.config, torch.device("cpu")
            self.dtype = torch.float32

        def forward(self, input_ids: Tensor, use_cache: bool, **given: Any) -> Any:
            if error is not None and "attention_mask" in given:
                raise error
            return self.inner(input_ids=input_ids, use_cache=use_cache)

    with pytest.raises(ValueError, match="Heedless lets packed texts attend to each other"):
        choose_collator(Heedless(), tiny.tokenizer())


def test_a_packed_step_is_the_formulas(make_sft: Make) -> None:
    from tests.trainers.conftest import GRADIENT_STEP

    model, data = tiny_models.language_model("llama"), texts(6)
    loss, gradients = exact(model, data)
    before = weights(model)
    trainer = make_sft(model, data, packing=True, max_length=30, **GRADIENT_STEP)
    assert len(trainer.train_dataset) < 4
    assert trainer.train().training_loss == pytest.approx(loss, rel=1e-5)
    assert_moved_by(before, model, gradients)


def test_evaluation_packs_as_training_does_unless_it_is_told(make_sft: Make) -> None:
    losses = []
    for packing, evaluation in ((False, None), (True, None), (True, False), (False, True)):
        trainer = make_sft(
            None, texts(6), eval_dataset=texts(6, seed=1), packing=packing, eval_packing=evaluation,
            max_length=40, per_device_eval_batch_size=16,
        )  # fmt: skip
        packs = packing if evaluation is None else evaluation
        assert isinstance(trainer.eval_dataset, PackedTexts) == packs
        assert isinstance(trainer.train_dataset, PackedTexts) == packing
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)


def test_packing_needs_a_length_and_its_own_batches(make_sft: Make, monkeypatch: Any) -> None:
    with pytest.raises(ValueError, match="leave out data_collator"):
        make_sft(packing=True, data_collator=lambda rows: rows)
    endless = tiny_models.language_model("llama")
    monkeypatch.setattr(base, "context_length", lambda _model: None)
    with pytest.raises(ValueError, match="packing needs max_length"):
        make_sft(endless, packing=True, max_length=None)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("packing", [False, True])
def test_a_batch_without_padding_trains_as_a_padded_one_does(
    make_sft: Make, family: str, packing: bool
) -> None:
    rows = [{"text": f"w5 w{20 + i} w10" + f" w{30 + i}" * (i + 1)} for i in range(4)]
    settings = {**GRADIENT_STEP, "packing": packing, "max_length": 20}
    moved, losses = [], []
    for padding_free in (False, True):
        model = tiny_models.language_model(family)
        before = weights(model)
        collator = DataCollatorForCompletionOnlyLM(
            "w10", tokenizer=tiny.tokenizer(), padding_free=padding_free
        )
        trainer = make_sft(model, Dataset.from_list(rows), data_collator=collator, **settings)
        losses.append(trainer.train().training_loss)
        moved.append({name: before[name] - p for name, p in weights(model).items()})
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["input_ids"].shape == (1, sum(3 + i + 1 + 1 for i in range(4)))  # EOS
    assert len(batch["targets"]) == sum(i + 1 + 1 for i in range(4))
    # Sums in fp32, in another order.
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name, by in moved[0].items():
        torch.testing.assert_close(by, moved[1][name], rtol=2e-4, atol=2e-6, msg=name)


@pytest.mark.filterwarnings("ignore:BloomForCausalLM. batches are padded")
def test_a_model_that_cannot_keep_texts_apart_takes_no_batch_without_padding(
    make_sft: Make,
) -> None:
    collator = DataCollatorForCompletionOnlyLM("w9", tokenizer=tiny.tokenizer(), padding_free=True)
    rows = Dataset.from_list([{"text": "w5 w9 w6"}])
    with pytest.raises(ValueError, match="a data collator with padding_free=False"):
        make_sft(tiny_models.language_model("bloom"), rows, data_collator=collator)


def of_trl(rows: dict[str, Any], room: int, strategy: str = "bfd") -> Any:
    """Rows that TRL packs: a Dataset whose ``seq_lengths`` are those of the texts in a row."""
    data_utils = pytest.importorskip("trl.data_utils")
    return data_utils.pack_dataset(Dataset.from_dict(rows), room, strategy)


ROWS: dict[str, list[list[int]]] = {
    "input_ids": [[5, 6, 7, 8, 9], [6, 7], [], [8, 9, 10], [11, 12]],
    "completion_mask": [[0, 0, 0, 1, 1], [0, 1], [], [0, 0, 1], [1, 1]],
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_token_ids_are_packed_as_trl_packs_them(strategy: str, stream: bool) -> None:
    """And masks, which other trainers than TRL's do not read, are labels."""
    rows = Dataset.from_dict(ROWS | {"name": list("abcde")})
    packed = pack_dataset(rows.to_iterable_dataset() if stream else rows, 4, strategy)
    assert texts_of(packed) == texts_of(of_trl(ROWS, 4, strategy))


def texts_of(rows: Any) -> list[tuple[list[int], list[int]]]:
    """The texts of packed rows, sorted: their tokens and what is learned of them but the first."""
    found = []
    for row in rows:
        labels = row.get("labels") or [
            token if learned else IGNORED
            for token, learned in zip(row["input_ids"], row["completion_mask"], strict=True)
        ]
        ends = list(itertools.accumulate(row.get("seq_lengths", [len(labels)]), initial=0))
        for start, end in itertools.pairwise(ends):
            found.append((row["input_ids"][start:end], labels[start + 1 : end]))
    return sorted(found)


def test_what_cannot_be_packed_is_refused() -> None:
    rows = Dataset.from_dict({"input_ids": [[1, 2], [3]]})
    assert pack_dataset({"train": rows}, 4)["train"][0]["labels"] == [IGNORED, 2, IGNORED]
    with pytest.raises(ValueError, match="must be one of bfd, bfd_split, wrapped"):
        pack_dataset(rows, 4, "best")
    with pytest.raises(ValueError, match="seq_length must be at least 1"):
        pack_dataset(rows, 0)
    with pytest.raises(ValueError, match="the rows have no input_ids, but text: tokenise them"):
        pack_dataset(Dataset.from_dict({"text": ["w3"]}), 4)
    with pytest.raises(ValueError, match="packed already"):
        pack_dataset(pack_dataset(rows, 4), 8)


@pytest.mark.parametrize(
    "settings", [{}, {"packing": True, "max_length": 40}, {"padding_free": True}]
)
@pytest.mark.parametrize("kind", ["trl", "fastrl", "stream", "list"])
def test_texts_of_rows_that_came_packed_are_kept_apart(
    make_sft: Make, kind: str, settings: dict[str, Any]
) -> None:  # fmt: skip
    """A step's gradient is that of the texts in rows of their own."""
    rng = random.Random(3)
    ids = [[rng.randrange(3, 60) for _ in range(rng.randint(2, 9))] for _ in range(12)]
    rows: Any = of_trl({"input_ids": ids}, 20)
    rows = pack_dataset(Dataset.from_dict({"input_ids": ids}), 20) if kind == "fastrl" else rows
    alone = {**GRADIENT_STEP, "per_device_train_batch_size": 12}
    plain = make_sft(None, Dataset.from_dict({"input_ids": ids}), **alone)
    one = {**alone, "per_device_train_batch_size": len(rows)}
    rows = rows.to_iterable_dataset() if kind == "stream" else rows
    rows = rows.to_list() if kind == "list" else rows
    packs = make_sft(None, rows, **one, **settings)
    plain.train()
    packs.train()
    for name, weight in plain.model.named_parameters():
        torch.testing.assert_close(packs.model.get_parameter(name), weight, rtol=1e-4, atol=1e-6)


def test_packed_rows_that_would_be_learned_as_one_text_are_refused(make_sft: Make) -> None:
    rows = Dataset.from_dict({"input_ids": [[5, 6, 7]], "seq_lengths": [[1, 1]]})
    with pytest.raises(ValueError, match="row 0: input_ids has 3 tokens, and seq_lengths"):
        make_sft(None, rows)
    rows = Dataset.from_dict({"input_ids": [[5, 6, 7]], "seq_lengths": [[1, 2]]})
    template = DataCollatorForCompletionOnlyLM([7], tokenizer=tiny.tokenizer())
    with pytest.raises(ValueError, match="make labels with -100"):
        make_sft(None, rows, data_collator=template)
    with pytest.raises(ValueError, match="make it with packing=True"):
        make_sft(None, texts(4)).evaluate(rows)
