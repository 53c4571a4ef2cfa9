"""SFTTrainer: its loss, its gradients, its keywords and files."""

import copy
import itertools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    T5Config,
    T5ForConditionalGeneration,
    TrainingArguments,
)

import fastrl_kernels
from fastrl import DataCollatorForCompletionOnlyLM, SFTConfig, SFTTrainer
from tests import tiny_models
from tests.golden import tiny
from tests.trainers.conftest import (
    GRADIENT_STEP,
    SETTINGS,
    Make,
    assert_moved_by,
    reward_model,
    texts,
    weights,
)
from tests.weights import assert_same_weights


def exact(model: Any, data: Dataset) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients in float64, text by text: the mean over tokens of -log softmax."""
    model, tokenizer = copy.deepcopy(model).double(), tiny.tokenizer()
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for row in data:
        before = tokenizer(row.get("prompt", ""))["input_ids"]
        ids = [*before, *tokenizer(row.get("completion") or row["text"])["input_ids"], tiny.EOS]
        logits = model(input_ids=torch.tensor([ids])).logits[0]
        for i in range(max(len(before), 1), len(ids)):
            total = total - logits[i - 1].log_softmax(0)[ids[i]]
            tokens += 1
    loss = total / tokens
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}


def completions(count: int) -> Dataset:
    return Dataset.from_list(
        [
            {"prompt": f"w{5 + i} w6 ", "completion": "w7 " * (1 + i % 3) + "w8"}
            for i in range(count)
        ]
    )


RAGGED = texts(4, low=2, high=20)


def parts(count: int) -> dict[str, int]:
    return {"per_device_train_batch_size": 4 // count, "gradient_accumulation_steps": count}


@pytest.mark.parametrize(("family", "data", "settings"), [
    *((family, texts(4), {}) for family in ("gpt2", "llama", "gemma2", "opt_projected", "granite")),
    ("gpt2", completions(4), {}),  # of which completions alone are learned
    ("gpt2", RAGGED, parts(4)),
    ("gpt2", RAGGED, parts(2)),
])  # fmt: skip
def test_loss_and_gradients_are_those_of_the_formula(
    make_sft: Make, family: str, data: Dataset, settings: dict[str, Any]
) -> None:
    """Of accumulated gradients, those of one big batch."""
    model = tiny_models.language_model(family)
    loss, gradients = exact(model, data)
    before = weights(model)
    trainer = make_sft(model, data, **settings, **GRADIENT_STEP)
    assert trainer.train().training_loss == pytest.approx(loss, rel=1e-5)
    assert_moved_by(before, model, gradients)


def test_the_head_sees_learned_tokens_alone_and_no_logits_are_made(
    make_sft: Make, monkeypatch: Any
) -> None:
    model, data = tiny_models.language_model(), completions(4)
    trainer = make_sft(model, data, eval_dataset=data)
    rows, logits = [], []
    trainer.evaluate()  # chooses the head
    for name in ("linear_nll_loss", "linear_logprobs"):  # of training, of evaluation
        op = getattr(fastrl_kernels, name)

        def counting(hidden: Any, *args: Any, op: Any = op, **kwargs: Any) -> Any:
            rows.append(len(hidden))
            return op(hidden, *args, **kwargs)

        monkeypatch.setattr(fastrl_kernels, name, counting)
    model.get_output_embeddings().register_forward_hook(
        lambda _module, _args, out: logits.append(out.numel())
    )
    trainer.train()
    trainer.evaluate()
    learned = sum(len(row["completion"].split()) + 1 for row in data)
    assert rows == [learned] * 3  # the loss, what is logged beside it, the evaluation
    assert sum(logits) == 0


def test_evaluation_loss_is_the_mean_over_all_tokens(make_sft: Make) -> None:
    model, data = tiny_models.language_model(), texts(6)
    trainer = make_sft(model, eval_dataset=data)
    parts = [data.select(range(4)), data.select(range(4, 6))]
    means = [exact(model, part)[0] for part in parts]
    counts = [sum(len(row["text"].split()) for row in part) for part in parts]
    expected = sum(m * n for m, n in zip(means, counts, strict=True)) / sum(counts)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert trainer.evaluate(texts(4))["eval_loss"] == pytest.approx(
        exact(model, texts(4))[0], rel=1e-5
    )


def test_metrics_get_logits_and_labels_of_all_tokens(make_sft: Make) -> None:
    seen: dict[str, Any] = {}

    def accuracy(prediction: Any) -> dict[str, float]:
        logits, labels = prediction
        seen.update(logits=logits.shape, labels=labels.shape)
        hits = (logits[:, :-1].argmax(-1) == labels[:, 1:])[labels[:, 1:] != -100]
        return {"accuracy": float(hits.mean())}

    model, data = tiny_models.language_model(), texts(6)
    trainer = make_sft(model, eval_dataset=data, compute_metrics=accuracy)
    metrics = trainer.evaluate()
    widest = max(len(row["text"].split()) + 1 for row in data)
    assert seen == {"logits": (6, widest, tiny.VOCABULARY), "labels": (6, widest)}
    assert 0 <= metrics["eval_accuracy"] <= 1
    plain = make_sft(model, eval_dataset=data).evaluate()
    assert metrics["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-5)


@pytest.mark.filterwarnings("ignore:.* tokens and are cut")
def test_the_classic_keywords_are_taken(tmp_path: Path) -> None:
    rows = [{"q": f"w{i} w20", "a": "w7 w8 w9"} for i in range(5, 13)]

    def prompts(batch: dict[str, list[str]]) -> list[str]:
        return [f"{batch['q'][i]} w30 {batch['a'][i]}" for i in range(len(batch["q"]))]

    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, use_cpu=True, save_strategy="no"
    )
    tokenizer = tiny.tokenizer()
    common = {"args": args, "train_dataset": Dataset.from_list(rows), "tokenizer": tokenizer}
    trainer = SFTTrainer(
        tiny_models.language_model(),
        formatting_func=prompts,
        data_collator=DataCollatorForCompletionOnlyLM("w30", tokenizer=tokenizer),
        max_seq_length=6,
        **common,
    )
    assert trainer.train_dataset[0]["labels"] == [-100, -100, -100, 7, 8, 9]
    trainer.train()
    with pytest.warns(UserWarning, match="num_of_sequences=8 .changes nothing: packing"):
        trainer = SFTTrainer(
            tiny_models.language_model(), dataset_text_field="q", packing=True, max_seq_length=10,
            dataset_num_proc=1, num_of_sequences=8, **common,
        )  # fmt: skip
    assert [row["seq_lengths"] for row in trainer.train_dataset] == [[3, 3, 3], [3, 3, 3], [3, 3]]
    trainer.train()
    with pytest.raises(TypeError, match="unexpected keyword argument 'packed'"):
        SFTTrainer(tiny_models.language_model(), packed=True, **common)


@pytest.mark.filterwarnings("ignore:.* tokens and are cut")
def test_texts_are_cut_where_the_models_positions_end(make_sft: Make) -> None:
    data = Dataset.from_list([{"text": "w5 " * 200}])
    assert len(make_sft(None, data).train_dataset[0]["input_ids"]) == tiny_models.CONTEXT
    assert len(make_sft(None, data, max_length=7).train_dataset[0]["input_ids"]) == 7


def test_transformers_own_collators_do(make_sft: Make) -> None:
    tokenizer, data = tiny.tokenizer(), texts(4)
    usual = tiny_models.language_model()
    loss = make_sft(usual, data, **GRADIENT_STEP).train().training_loss
    for collator in (
        DataCollatorForLanguageModeling(tokenizer, mlm=False),
        DataCollatorForSeq2Seq(tokenizer),
    ):
        model = tiny_models.language_model()
        trainer = make_sft(model, data, data_collator=collator, **GRADIENT_STEP)
        assert trainer.train().training_loss == pytest.approx(loss, rel=1e-5)
        for one, other in zip(usual.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    tokenizer.mask_token = "w3"
    with pytest.raises(ValueError, match="the data collator masks tokens: pass mlm=False"):
        make_sft(data_collator=DataCollatorForLanguageModeling(tokenizer))
    trainer = make_sft(data_collator=lambda rows: {"input_ids": torch.ones(1, 2).long()})
    with pytest.raises(ValueError, match="batches need labels, the data collator makes input_ids"):
        trainer.train()


def test_a_batch_with_nothing_to_learn_gives_zero(make_sft: Make) -> None:
    def collate(rows: list[Any]) -> dict[str, Any]:
        ids = torch.full((2, 4), 5)
        return {"input_ids": ids, "labels": torch.full_like(ids, -100)}

    model = tiny_models.language_model()
    before = weights(model)
    settings = {"logging_nan_inf_filter": False, **GRADIENT_STEP}
    trainer = make_sft(model, data_collator=collate, **settings)
    assert trainer.train().training_loss == 0.0
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])


def test_an_unusual_head_gives_the_same_step(make_sft: Make) -> None:
    usual, unusual = tiny_models.language_model(), tiny_models.language_model()
    unusual.get_output_embeddings().register_forward_hook(lambda _module, _args, out: out.clone())
    settings = {"gradient_accumulation_steps": 2, **GRADIENT_STEP}
    make_sft(usual, **settings).train()
    with pytest.warns(UserWarning, match="GPT2LMHeadModel: logits of"):
        make_sft(unusual, **settings).train()
    for one, other in zip(usual.parameters(), unusual.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


# transformers 5.23 has the second name for it, and warns of the first; 5.17 has the first alone.
@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_checkpointed_activations_give_the_same_step(make_sft: Make, name: str) -> None:
    plain, saved = tiny_models.language_model("llama"), tiny_models.language_model("llama")
    make_sft(plain, **GRADIENT_STEP).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = make_sft(saved, **{name: True}, **GRADIENT_STEP)
        trainer.train()
    assert trainer.args.gradient_checkpointing is trainer.args.activation_checkpointing is True
    assert any(getattr(m, "gradient_checkpointing", False) for m in saved.modules())
    for one, other in zip(plain.parameters(), saved.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_a_scaled_loss_is_made_of_scaled_gradients(make_sft: Make) -> None:
    """Under fp16's scaler the loss is not fused: the op's backward would come after rounding."""
    plain, scaled = tiny_models.language_model(), tiny_models.language_model()
    one, other = make_sft(plain), make_sft(scaled)
    other.args.fp16 = True
    for trainer in (one, other):
        batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
        trainer.compute_loss(trainer.model, batch).backward()
    for a, b in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-6)
    loss = other.compute_loss(other.model, batch)
    loss.backward(retain_graph=True)
    loss.backward()
    loss = one.compute_loss(one.model, batch)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="hands its gradients out once"):
        loss.backward()


def test_bf16_runs_through_the_fused_head(make_sft: Make) -> None:
    from fastrl.models.lm_head import FusedHead

    trainer = make_sft(bf16=True, packing=True, max_length=30, eval_dataset=texts(4))
    assert np.isfinite(trainer.train().training_loss)
    assert isinstance(trainer.scorer.head, FusedHead)


def test_models_of_another_kind_are_refused(make_sft: Make) -> None:
    seq2seq = T5ForConditionalGeneration(
        T5Config(vocab_size=97, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )
    for model in (seq2seq, reward_model("gpt2")):
        with pytest.raises(ValueError, match="is no causal language model"):
            make_sft(model)


def test_a_saved_model_gives_the_same_losses(make_sft: Make, tmp_path: Path) -> None:
    trainer = make_sft(max_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "model.safetensors").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", use_safetensors=True)
    assert_same_weights(loaded, trainer.model)
    expected = trainer.evaluate(texts(4))["eval_loss"]
    found = make_sft(loaded).evaluate(texts(4))["eval_loss"]
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("greater", [False, True])
@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", "greedy"])
def test_a_schedule_by_a_metric_knows_what_is_better(
    make_sft: Make, schedule: str, greater: bool
) -> None:
    least = {"min_lr": 1e-9} if schedule == "greedy" else {}
    count = itertools.count()
    trainer = make_sft(
        eval_dataset=texts(2), compute_metrics=lambda _: {"score": float(next(count))},
        metric_for_best_model="score", greater_is_better=greater, eval_strategy="steps",
        eval_steps=1, max_steps=3, lr_scheduler_type=schedule,
        lr_scheduler_kwargs={"patience": 0, **least},
    )  # fmt: skip
    trainer.train()
    assert (trainer.optimizer.param_groups[0]["lr"] >= SETTINGS["learning_rate"]) == greater
    assert trainer.args.lr_scheduler_kwargs == {"patience": 0, **least}


def test_model_init_makes_the_model(tmp_path: Path) -> None:
    args = SFTConfig(output_dir=str(tmp_path), packing=True, padding_free=False, **SETTINGS)
    trainer = SFTTrainer(
        model_init=lambda: tiny_models.language_model("opt"),
        args=args,
        train_dataset=texts(),
        processing_class=tiny.tokenizer(),
        peft_config=tiny_models.lora(target_modules=["q_proj"], fan_in_fan_out=False),
    )
    trainer.train()
    assert hasattr(trainer.model, "peft_config")
    assert trainer.data_collator.mask, "OPT reads no positions"
