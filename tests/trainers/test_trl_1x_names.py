"""What scripts of TRL 1.x write: its settings, columns, streams and metrics."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from tokenizers import processors

from fastrl import ConstantLengthDataset, SFTConfig, SFTTrainer
from tests import tiny_models
from tests.golden import tiny
from tests.trainers.conftest import Make, pairs, reward_model, texts, weights

X = -100
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}w10 {% else %}w11 {% endif %}"
    "{{ m.content }} {% if loud %}w96 {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}w11 {% endif %}"
)


def chats() -> Any:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def said(*turns: str) -> list[dict[str, str]]:
    return [
        {"role": "assistant" if i % 2 else "user", "content": each} for i, each in enumerate(turns)
    ]


def labels_of(trainer: Any) -> list[list[int]]:
    return [row["labels"] for row in trainer.train_dataset]


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    """In float64, of the tokens but the first, [T - 1, V]."""
    whole = torch.tensor([ids])
    with torch.no_grad():
        return model.double()(input_ids=whole).logits[0, :-1]


def test_a_stream_of_texts_trains_as_the_data_set_does(make_sft: Make) -> None:
    trained = []
    for data in (texts(), texts().to_iterable_dataset()):
        trainer = make_sft(
            data=data, max_steps=2, data_seed=0, train_sampling_strategy="sequential"
        )
        trainer.train()
        trained.append(weights(trainer.model))
    assert all(torch.equal(a, trained[1][name]) for name, a in trained[0].items())


def test_a_stream_of_pairs_trains_and_is_evaluated(make_reward: Make) -> None:
    trainer = make_reward(data=pairs().to_iterable_dataset(), num_print_samples=1)
    assert set(next(iter(trainer.train_dataset))) == {"chosen_ids", "rejected_ids"}
    trainer.train()
    read, counted = (
        trainer.evaluate(data)["eval_loss"] for data in (pairs().to_iterable_dataset(), pairs())
    )
    assert read == counted


def test_an_evaluation_of_a_stream_scores_its_tokens(make_sft: Make) -> None:
    trainer = make_sft()
    streamed = trainer.evaluate(texts().to_iterable_dataset())
    counted = trainer.evaluate(texts())
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert streamed[name] == counted[name]


def test_a_stream_needs_max_steps(make_sft: Make) -> None:
    with pytest.raises(ValueError, match="set max_steps"):
        make_sft(data=texts().to_iterable_dataset(), max_steps=-1)
    with pytest.raises(ValueError, match="the data set is empty"):
        make_sft(data=IterableDataset.from_generator(lambda: iter(())))
    with pytest.raises(ValueError, match="leave dispatch_batches out"):
        make_sft(accelerator_config={"dispatch_batches": True})


@pytest.mark.parametrize(("strategy", "rows"), [
    ("bfd", [[3, 4, 5, 6], [7, 8, 9]]),
    ("bfd_split", [[3, 4, 5, 6], [7, 8, 9, 2]]),
    ("wrapped", [[3, 4, 5, 6], [2, 7, 8, 9]]),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:1 of 2 texts are longer")
@pytest.mark.parametrize("streams", [False, True])
def test_texts_are_packed_by_a_strategy(
    make_sft: Make, strategy: str, rows: list[list[int]], streams: bool
) -> None:
    data = Dataset.from_list([{"input_ids": [3, 4, 5, 6, 2]}, {"input_ids": [7, 8, 9]}])
    data = data.to_iterable_dataset() if streams else data
    trainer = make_sft(data=data, packing=True, packing_strategy=strategy, max_length=4)
    assert sorted(sorted(row["input_ids"]) for row in trainer.train_dataset) == sorted(
        map(sorted, rows)
    )
    trainer.train()


def test_masks_make_labels_and_labels_come_first(make_sft: Make) -> None:
    rows = [
        {"input_ids": [3, 4, 5, 6], "assistant_masks": [0, 1, 1, 1],
         "completion_mask": [1, 1, 1, 0]},
    ]  # fmt: skip
    assert labels_of(make_sft(data=rows)) == [[X, 4, 5, X]]
    assert labels_of(make_sft(data=[{**rows[0], "labels": [X, X, 5, X]}])) == [[X, X, 5, X]]
    with pytest.raises(ValueError, match="make them of one length"):
        make_sft(data=[{**rows[0], "assistant_masks": [1]}])


@pytest.mark.parametrize(("row", "named"), [
    ({"input_ids": [3, 5.5, 4]}, r"input_ids of row 0 holds \[3.0, 5.5, 4.0\]"),
    ({"input_ids": [3, -4, 5]}, "input_ids of row 0 holds .*0 or more"),
    ({"input_ids": [3, 4, 5], "completion_mask": [0, 2, 7]}, r"completion_mask.* \[0, 2, 7\]"),
    ({"input_ids": [3, 4, 5], "labels": [3, -1, 5]}, "labels of row 0 holds"),
    ({"input_ids": [3, 4, 5], "labels": [3, 4]}, "3 tokens, its labels 2"),
])  # fmt: skip
def test_rows_of_what_are_no_token_ids_are_refused(make_sft: Make, row: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make_sft(data=[row])


def test_rows_that_are_ready_are_taken_as_they_are(make_sft: Make) -> None:
    ready = {"dataset_kwargs": {"skip_prepare_dataset": True}}
    data = Dataset.from_list([{"input_ids": [3, 4, 5]}] * 4)
    trainer = make_sft(data=data, **ready)
    assert trainer.train_dataset is data
    trainer.train()
    masks = data.add_column("completion_mask", [[0, 1, 1]] * 4)
    with pytest.raises(ValueError, match="Add a 'labels' column"):
        make_sft(data=masks, **ready)
    with pytest.raises(ValueError, match=r"removes keys that are None.*skip_prepare_dataset"):
        make_sft(data=texts().with_transform(lambda rows: rows))
    for wrong in ({"add_special_token": False}, {"append_concat_token": 1}):
        with pytest.raises(ValueError, match=r"dataset_kwargs has .* may hold skip"):
            make_sft(dataset_kwargs=wrong)


@pytest.mark.parametrize("as_keyword", [False, True])
def test_texts_begin_and_end_as_dataset_kwargs_says(as_keyword: bool, tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tiny.BOS)]
    )
    rows = [{"text": "w5 w6"}, {"prompt": "w5", "completion": "w6"}]

    def encoded(row: dict, dataset_kwargs: dict, **settings: Any) -> list[int]:
        said = {"dataset_kwargs": dataset_kwargs}
        own = settings if as_keyword else settings | said
        trainer = SFTTrainer(
            tiny_models.language_model(),
            SFTConfig(str(tmp_path), use_cpu=True, report_to="none", **own),
            train_dataset=Dataset.from_list([row] * 2),
            processing_class=tokenizer,
            **(said if as_keyword else {}),
        )
        return trainer.train_dataset[0]["input_ids"]

    for row in rows:
        assert encoded(row, {}) == [tiny.BOS, 5, 6, tiny.EOS]
        assert encoded(row, {"add_special_tokens": False}) == [5, 6, tiny.EOS]
        assert encoded(row, {"append_concat_token": False})[-1] == tiny.EOS
    plain = {"add_special_tokens": False, "append_concat_token": False}
    assert encoded(rows[0], plain, packing=True, max_length=8) == [5, 6, 5, 6]


def test_the_assistants_turns_are_found_without_marks(make_sft: Make) -> None:
    given = {"processing_class": chats(), "assistant_only_loss": True}
    messages = said("w5", "w6", "w7", "w8")
    trainer = make_sft(data=[{"messages": messages}], **given)
    assert labels_of(trainer) == [[X, X, X, 6, X, X, X, 8]]
    theirs = {"user": "human", "assistant": "gpt"}
    for names in ({}, theirs):
        sharegpt = [
            {"from": names.get(m["role"], m["role"]), "value": m["content"]} for m in messages
        ]
        found = make_sft(data=[{"conversations": sharegpt}], **given)
        assert labels_of(found) == labels_of(trainer)
    row = {"prompt": messages[:2] + messages[2:3], "completion": messages[3:]}
    assert labels_of(make_sft(data=[row], **given)) == [[X] * 7 + [8]]
    whole = make_sft(data=[row], completion_only_loss=False, **given)
    assert labels_of(whole) == labels_of(trainer)


def test_a_template_that_rewrites_turns_says_that_they_cannot_be_found(make_sft: Make) -> None:
    tokenizer = chats()
    tokenizer.chat_template = "{% for m in messages %}w{{ 10 + loop.length }} w5 {% endfor %}"
    with pytest.raises(ValueError, match=r"mark it there with \{% generation %\}"):
        make_sft(
            data=[{"messages": said("w5", "w6", "w7", "w8")}],
            processing_class=tokenizer,
            assistant_only_loss=True,
        )


def test_a_rows_own_arguments_reach_the_template(make_sft: Make, make_reward: Make) -> None:
    loud = [{"loud": False}, {"loud": True}]
    rows = [{"messages": said("w5", "w6"), "chat_template_kwargs": each} for each in loud]
    trainer = make_sft(data=rows, processing_class=chats())
    assert [row["input_ids"] for row in trainer.train_dataset] == [
        [10, 5, 11, 6],
        [10, 5, 96, 11, 6, 96],
    ]
    sides = {"chosen": said("w5", "w6"), "rejected": said("w5", "w7")}
    made = make_reward(
        data=[{**sides, "chat_template_kwargs": each} for each in loud], processing_class=chats()
    )
    assert made.train_dataset["rejected_ids"][:] == [[10, 5, 11, 7], [10, 5, 96, 11, 7, 96]]
    with pytest.raises(ValueError, match="'tools' of row 0 is not valid JSON"):
        make_sft(data=[{**rows[0], "tools": "{"}], processing_class=chats())


def test_texts_may_keep_their_ends(make_sft: Make) -> None:
    data = [{"input_ids": [3, 4, 5, 6, 7]}]
    with pytest.warns(UserWarning, match="are cut"):
        kept = [
            labels_of(make_sft(data=data, max_length=3, truncation_mode=mode))
            for mode in ("keep_start", "keep_end")
        ]
    assert kept == [[[3, 4, 5]], [[5, 6, 7]]]


@pytest.mark.parametrize(
    ("name", "value"),
    [("packing_strategy", "best"), ("truncation_mode", "middle"), ("loss_type", "mse")],
)
def test_unknown_choices_are_refused_by_name(make_sft: Make, name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"unknown {name} '{value}': choose one of"):
        make_sft(**{name: value})


@pytest.mark.parametrize("fp32_logits", [False, True])
def test_dft_weighs_each_token_by_its_probability(make_sft: Make, fp32_logits: bool) -> None:
    ids = [3, 4, 5, 6]
    metrics = {"compute_metrics": lambda _: {}} if fp32_logits else {}
    trainer = make_sft(data=[{"input_ids": ids}] * 4, loss_type="dft", **metrics)
    found = trainer.evaluate([{"input_ids": ids}])["eval_loss"]
    logprobs = logits_of(trainer.model, ids).log_softmax(-1)
    of_labels = logprobs[range(3), ids[1:]]
    assert found == pytest.approx(float(-(of_labels.exp() * of_labels).mean()), rel=1e-5)


def test_dfts_gradient_is_that_of_its_formula(make_sft: Make) -> None:
    ids = [3, 4, 5, 6]
    trainer = make_sft(data=[{"input_ids": ids}] * 4, loss_type="dft")
    batch = trainer.data_collator([trainer.train_dataset[0]])
    trainer.model.train()
    trainer.compute_loss(trainer.model, batch).backward()
    found = {n: p.grad.double() for n, p in trainer.model.named_parameters()}
    trainer.model.zero_grad()
    model = trainer.model.double()
    logprobs = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    of_labels = logprobs[range(3), ids[1:]]
    (-(of_labels.detach().exp() * of_labels).mean()).backward()
    for name, parameter in model.named_parameters():
        # Sums in fp32 are off by some 1e-6.
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_training_logs_accuracy_entropy_and_tokens(make_sft: Make) -> None:
    ids = [3, 4, 5, 6]
    model = tiny_models.language_model()
    logprobs = logits_of(tiny_models.language_model(), ids).log_softmax(-1)
    trainer = make_sft(model, data=[{"input_ids": ids}] * 8, logging_steps=1, max_steps=2)
    trainer.train()
    first, *_, summary = trainer.state.log_history
    assert first["entropy"] == pytest.approx(
        float(-(logprobs.exp() * logprobs).sum(-1).mean()), rel=1e-5
    )
    right = logprobs.argmax(-1) == torch.tensor(ids[1:])
    assert first["mean_token_accuracy"] == pytest.approx(float(right.double().mean()))
    assert (first["num_tokens"], summary["num_tokens"]) == (16, 32)
    assert math.isfinite(summary["mean_token_accuracy"])


def test_reward_models_log_how_far_the_sides_are_apart(make_reward: Make) -> None:
    trainer = make_reward(reward_model("gpt2"), logging_steps=1, per_device_train_batch_size=8)
    rewards = {}
    for side in ("chosen", "rejected"):
        rows = [torch.tensor([ids]) for ids in trainer.train_dataset[f"{side}_ids"][:]]
        with torch.no_grad():
            rewards[side] = torch.cat([trainer.model(input_ids=row).logits[0] for row in rows])
    both = torch.stack([*rewards.values()])
    expected = {
        "accuracy": float((both[0] > both[1]).float().mean()),
        "margin": float((both[0] - both[1]).mean()), "mean_reward": float(both.mean()),
        "min_reward": float(both.min()), "max_reward": float(both.max()),
    }  # fmt: skip
    held_out = trainer.evaluate(pairs(), num_print_samples=0)
    trainer.train()
    logged = trainer.state.log_history[-2]
    for name, value in expected.items():
        assert logged[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
        assert held_out[f"eval_{name}"] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
# PEFT hands its prefixes to the model by a name that transformers 5.24 has another for.
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_prompt_tuning_learns_the_tokens_and_not_their_neighbours(
    make_sft: Make, kind: str
) -> None:
    import peft

    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    ids = [3, 4, 5, 6]
    data = [{"input_ids": ids}, {"input_ids": ids[:2]}] * 2
    trainer = make_sft(data=data, peft_config=config)
    row = torch.tensor([ids])
    with torch.no_grad():
        logits = trainer.model(input_ids=row, attention_mask=torch.ones_like(row)).logits
    own = logits[0, -4:-1].double().log_softmax(-1)[range(3), ids[1:]]
    found = trainer.evaluate(data[:1] + data[:1])
    assert found["eval_loss"] == pytest.approx(float(-own.mean()), rel=1e-5)
    padded = trainer.evaluate(data)["eval_loss"]
    assert padded == pytest.approx(float(-(own.sum() + own[0]) / 4), rel=1e-5)
    before = weights(trainer.model)
    trainer.train()
    moved = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in before if "prompt_encoder" in n}
    with pytest.raises(ValueError, match="leave packing out"):
        make_sft(data=data, peft_config=config, packing=True)


def test_a_template_and_its_tokens_come_from_another_tokenizer(
    make_sft: Make, tmp_path: Path
) -> None:
    other = chats()
    other.add_tokens(["<turn>"])
    other.save_pretrained(tmp_path / "other")
    rows = {"data": [{"messages": said("w5", "w6")}] * 4}
    trainer = make_sft(chat_template_path=str(tmp_path / "other"), **rows)
    assert trainer.processing_class.chat_template == TEMPLATE
    assert "<turn>" in trainer.processing_class.get_vocab()
    rows_of = trainer.model.get_input_embeddings().num_embeddings
    assert rows_of >= len(trainer.processing_class)
    trainer.train()
    with pytest.raises(ValueError, match="an adapter does not train them"):
        make_sft(chat_template_path=str(tmp_path / "other"), peft_config=tiny_models.lora(), **rows)
    (tmp_path / "t.jinja").write_text(TEMPLATE + " ")
    trainer = make_sft(chat_template_path=str(tmp_path / "t.jinja"), **rows)
    assert trainer.processing_class.chat_template == TEMPLATE + " "
    with pytest.raises(OSError, match=r"chat_template_path='.*nothing' is no file that ends in"):
        make_sft(chat_template_path=str(tmp_path / "nothing"), **rows)


def test_tokens_are_set_by_name(make_sft: Make) -> None:
    trainer = make_sft(eos_token="w50", pad_token="w51", data=[{"text": "w5 w6"}] * 4)
    assert trainer.train_dataset[0]["input_ids"][-1] == 50
    assert trainer.model.config.eos_token_id == 50
    assert trainer.model.config.pad_token_id == 51
    with pytest.raises(ValueError, match="eos_token='<none>' is not in the vocabulary"):
        make_sft(eos_token="<none>")


@pytest.mark.parametrize(("multiple", "width"), [(8, 8), ("auto", 3), (None, 3)])
def test_batches_are_padded_to_a_multiple(
    make_sft: Make, make_reward: Make, multiple: Any, width: int
) -> None:
    trainer = make_sft(pad_to_multiple_of=multiple)
    batch = trainer.data_collator([{"input_ids": [3, 4, 5]}, {"input_ids": [6]}])
    assert {batch[name].shape[1] for name in ("input_ids", "labels", "attention_mask")} == {width}
    assert batch["targets"].tolist() == [4, 5]
    reward = make_reward(pad_to_multiple_of=multiple)
    batch = reward.data_collator([{"chosen_ids": [3, 4, 5], "rejected_ids": [6]}])
    assert batch["input_ids_chosen"].shape[1] == width


def test_a_quantization_config_is_for_a_path(make_sft: Make) -> None:
    from fastrl import SFTConfig, SFTTrainer

    with pytest.raises(ValueError, match="quantization_config is for a model that is loaded"):
        SFTTrainer(
            tiny_models.language_model(),
            SFTConfig(use_cpu=True),
            train_dataset=texts(),
            processing_class=tiny.tokenizer(),
            quantization_config=object(),
        )
    with pytest.raises(TypeError, match="does not take compute_loss_func: the loss is computed"):
        SFTTrainer(compute_loss_func=len)
    with pytest.raises(ValueError, match=r"router_aux_loss_coef=0\.1, but GPT2LMHeadModel"):
        make_sft(router_aux_loss_coef=0.1)


def test_reward_models_train_without_dropout_where_asked(make_reward: Make) -> None:
    model = reward_model("gpt2", resid_pdrop=0.5)
    assert any(m.p for m in model.modules() if isinstance(m, torch.nn.Dropout))
    make_reward(model, disable_dropout=True)
    dropouts = [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    assert dropouts
    assert not any(dropouts)


def test_images_are_refused(make_sft: Make) -> None:
    with pytest.raises(ValueError, match="column 'images' of the data set would not"):
        make_sft(data=[{"text": "w5 w6", "images": []}])


def test_models_are_tagged_as_trls(make_sft: Make) -> None:
    assert make_sft().model.model_tags == ["fastrl", "trl", "sft"]


def test_the_routers_loss_is_added_with_its_weight(make_sft: Make) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 16, "head_dim": 8}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "vocab_size": tiny.VOCABULARY}
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **counts, **experts))
    losses = []
    for coef in (None, 0.5):
        trainer = make_sft(model, router_aux_loss_coef=coef, logging_steps=1)
        assert trainer.aux_loss_enabled == bool(coef)
        batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
        model.train()
        losses.append(trainer.compute_loss(model, batch).item())
    with torch.no_grad():
        given = {name: batch[name] for name in ("input_ids", "attention_mask")}
        aux = model(**given, output_router_logits=True).aux_loss
    # Padding counts in neither; packed and padded rows are summed in other orders.
    assert losses[1] - losses[0] == pytest.approx(0.5 * float(aux), rel=1e-4)
    trainer.train()
    assert trainer.state.log_history[0]["aux_loss"] > 0


def test_a_tokenizer_is_of_its_models_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastrl import SFTConfig, SFTTrainer
    from fastrl.models import load

    tiny_models.language_model().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    asked: list[dict[str, Any]] = []
    find = load.AutoTokenizer.from_pretrained

    def record(path: Any, **options: Any) -> Any:
        asked.append(options)
        return find(path, **options)

    monkeypatch.setattr(load.AutoTokenizer, "from_pretrained", record)
    for options, expected in (
        ({"revision": "v2"}, {"trust_remote_code": False, "revision": "v2"}),
        (None, {"trust_remote_code": False}),
    ):
        args = SFTConfig(str(tmp_path), use_cpu=True, report_to=None, model_init_kwargs=options)
        SFTTrainer(str(tmp_path / "model"), args, train_dataset=texts())
        assert asked.pop() == expected


@pytest.mark.parametrize("streams", [False, True])
def test_token_ids_of_pairs_may_have_their_older_names(make_reward: Make, streams: bool) -> None:
    rows = {"chosen_ids": [[3, 4], [5, 6]], "rejected_ids": [[7], [8]]}
    older = {name.replace("_ids", "_input_ids"): column for name, column in rows.items()}
    data = Dataset.from_dict(older)
    with pytest.warns(FutureWarning, match="call them chosen_ids and rejected_ids"):
        trainer = make_reward(data=data.to_iterable_dataset() if streams else data)
    assert list(trainer.train_dataset) == list(Dataset.from_dict(rows))
    trainer.train()


@pytest.mark.parametrize("kind", ["table", "stream", "endless"])
def test_rows_of_constant_length_are_trained_on(kind: str, make_sft: Make) -> None:
    data: Any = Dataset.from_list([{"text": f"w{3 + i} w4 w5"} for i in range(8)])
    given = data.to_iterable_dataset() if kind == "stream" else data
    rows = ConstantLengthDataset(
        tiny.tokenizer(), given, "text", infinite=kind == "endless", seq_length=5, shuffle=False
    )
    given = {"packing": True, "max_length": 5, "max_steps": 3, "eval_dataset": rows}
    trainer = make_sft(data=rows, formatting_func=lambda row: row["text"], **given)
    first = next(iter(trainer.train_dataset))
    assert list(first["input_ids"]) == [3, 4, 5, tiny.EOS, 4]
    trainer.train()
    assert trainer.state.global_step == 3
