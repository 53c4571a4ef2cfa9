"""Helpers that training scripts use, under TRL's names: beside TRL's own where it has them."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import GenerationConfig

import fastrl
from fastrl.compat.scripts import helpers
from fastrl.compat.scripts.callbacks import LogCompletionsCallback
from tests import chat_tokenizer, tiny_models
from tests.golden import tiny
from tests.trl import test_dpo

CHAT = [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4 w5"}]
ROWS: list[dict[str, Any]] = [
    {"messages": CHAT},
    {"prompt": CHAT[:1]},
    {"prompt": CHAT[:1], "completion": CHAT[1:], "label": True},
    {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [{"role": "assistant", "content": "w9"}]},
    {"chosen": CHAT, "rejected": [CHAT[0], {"role": "assistant", "content": "w9"}]},
    {"prompt": "w3", "completion": " w4"},
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row))
def test_rows_are_written_as_trl_writes_them(row: dict[str, Any]) -> None:
    trl = pytest.importorskip("trl")
    from trl import data_utils

    assert trl is not None
    tokenizer = chat_tokenizer.tokenizer()
    assert fastrl.is_conversational(row) == data_utils.is_conversational(row)
    found = fastrl.maybe_apply_chat_template(row, tokenizer)
    assert found == data_utils.maybe_apply_chat_template(row, tokenizer)
    named = {"processing_class": tokenizer}  # as a map's fn_kwargs
    assert found == fastrl.maybe_apply_chat_template(row, **named)
    assert found == data_utils.maybe_apply_chat_template(row, **named)
    if "chosen" in row:
        assert fastrl.maybe_extract_prompt(row) == data_utils.maybe_extract_prompt(row)


def test_a_row_of_messages_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(TypeError, match="pass the tokenizer"):
        fastrl.apply_chat_template(ROWS[0])


def test_pairs_become_rows_with_labels() -> None:
    pairs = Dataset.from_dict(
        {"prompt": ["a", "b"], "chosen": ["c", "d"], "rejected": ["e", "f"], "n": [1, 2]}
    )
    found = fastrl.maybe_unpair_preference_dataset(pairs)
    assert found["completion"][:] == ["c", "d", "e", "f"]
    assert found["label"][:] == [True, True, False, False]
    assert found["prompt"][:] == ["a", "b", "a", "b"]
    assert fastrl.maybe_unpair_preference_dataset(found) is found


def test_parser_reads_file_then_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Own:
        parts: list[str]
        name: str = field(default="none")
        count: int = 1

    monkeypatch.setenv("OF_THE_FILE", "")
    path = tmp_path / "config.yaml"
    path.write_text(
        "env: {OF_THE_FILE: 7}\nparts: [one, two]\nname: file\ncount: 2\noutput_dir: out\n"
        "max_seq_length: 9\nuse_cpu: true\nreport_to: none\n"
    )
    parser = fastrl.TrlParser((Own, fastrl.SFTConfig))
    with pytest.warns(UserWarning, match="max_seq_length=9"):
        own, args = parser.parse_args_and_config(["--config", str(path), "--count", "5"])
    assert own.parts == ["one", "two"]
    assert (own.name, own.count, args.max_length, args.use_cpu) == ("file", 5, 9, True)
    assert os.environ["OF_THE_FILE"] == "7"
    path.write_text("nothing_reads: 1\nparts: [one]\n")
    with pytest.raises(ValueError, match="settings that nothing reads: --nothing_reads 1"):
        fastrl.TrlParser(Own).parse_args_and_config(["--config", str(path)])
    own, rest = fastrl.TrlParser(Own).parse_args_and_config(
        [f"--config={path}", "--more", "2"], return_remaining_strings=True
    )
    assert rest == ["--nothing_reads", "1", "--more", "2"]
    with pytest.raises(FileNotFoundError, match=r"there is no file 'nowhere\.yaml'"):
        parser.parse_args_and_config(["--config", "nowhere.yaml"])
    path.write_text("env: 3\n")
    with pytest.raises(ValueError, match="`env` field should be a dict"):
        parser.parse_args_and_config(["--config", str(path)])


def test_mixtures_have_their_shares(tmp_path: Path) -> None:
    for name, rows in (("a", 10), ("b", 40)):
        lines = (json.dumps({"text": f"{name}{i}", "n": i}) for i in range(rows))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))

    def mixed(*shares: float | None, **more: Any) -> Any:
        named = [
            {"path": "json", "data_files": str(tmp_path / f"{x}.jsonl"), "columns": ["text"],
             "fraction": share}
            for x, share in zip("ab", shares, strict=True)
        ]  # fmt: skip
        return fastrl.get_dataset(fastrl.DatasetMixtureConfig(datasets=named, **more))

    assert mixed(None, None)["train"].column_names == ["text"]
    assert len(mixed(None, None)["train"]) == 50
    train = mixed(1.0, 3.0)["train"]["text"]
    assert (sum(x[0] == "a" for x in train), len(train)) == (10, 40)
    once, again = (mixed(None, None, test_split_size=0.2) for _ in range(2))
    assert {k: len(x) for k, x in once.items()} == {"train": 40, "test": 10}
    assert once["test"]["text"][:] == again["test"]["text"][:], "a run is resumed with its rows"
    with pytest.raises(ValueError, match="fraction must be set for all data sets"):
        mixed(1.0, None)
    with pytest.raises(ValueError, match="streams are not split: leave test_split_size out"):
        mixed(None, None, test_split_size=0.2, streaming=True)
    with pytest.raises(ValueError, match="the mixture has no data set"):
        fastrl.get_dataset(fastrl.DatasetMixtureConfig())


def test_model_config_makes_adapters_and_quantised_loading() -> None:
    assert fastrl.get_peft_config(fastrl.ModelConfig()) is None
    config = fastrl.ModelConfig(use_peft=True, lora_r=3, lora_target_modules=["all-linear"])
    found = fastrl.get_peft_config(config)
    assert (found.r, found.lora_alpha, found.target_modules) == (3, 32, "all-linear")
    assert fastrl.get_quantization_config(fastrl.ModelConfig()) is None
    eight = fastrl.get_quantization_config(fastrl.ModelConfig(load_in_8bit=True))
    assert eight.load_in_8bit
    for bad, said in (
        ({"load_in_8bit": True, "load_in_4bit": True}, "exclude each other"),
        ({"dtype": "float8"}, "unknown dtype 'float8'"),
        ({"bnb_4bit_quant_type": "x"}, "unknown bnb_4bit_quant_type"),
    ):
        with pytest.raises(ValueError, match=said):
            fastrl.ModelConfig(**bad)


def test_chat_formats_have_tokens_and_embeddings(tmp_path: Path) -> None:
    model, tokenizer = tiny_models.language_model(), tiny.tokenizer()
    tokenizer.chat_template = None
    before = len(tokenizer)
    model, tokenizer = fastrl.setup_chat_format(model, tokenizer, resize_to_multiple_of=8)
    assert len(tokenizer) == before + 2
    assert model.get_input_embeddings().weight.shape[0] % 8 == 0
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert model.config.eos_token_id == tokenizer.eos_token_id
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert text == "<|im_start|>user\nw3<|im_end|>\n<|im_start|>assistant\nw4 w5<|im_end|>\n"
    with pytest.raises(ValueError, match="the tokenizer has a chat template"):
        fastrl.setup_chat_format(model, tokenizer)
    tokenizer.save_pretrained(tmp_path)
    other = tiny.tokenizer()
    model, other, added = fastrl.clone_chat_template(
        tiny_models.language_model(), other, str(tmp_path), resize_to_multiple_of=16
    )
    assert other.chat_template == tokenizer.chat_template
    assert other.eos_token == "<|im_end|>"
    assert len(other.get_vocab()) == model.get_input_embeddings().weight.shape[0]
    assert {"<|im_start|>", "<|im_end|>"} <= {str(x.content) for x in added}


def test_texts_in_rows_of_one_length() -> None:
    tokenizer = tiny.tokenizer()
    texts = Dataset.from_dict({"text": [f"w{3 + i} w4 w5" for i in range(10)]})
    data = fastrl.ConstantLengthDataset(
        tokenizer, texts, dataset_text_field="text", seq_length=8, shuffle=False
    )
    ids = [
        i for row in texts["text"] for i in (*tokenizer(row)["input_ids"], tokenizer.eos_token_id)
    ]
    rows = list(data)
    assert torch.equal(
        torch.cat([x["input_ids"] for x in rows]), torch.tensor(ids[: 8 * len(rows)])
    )
    assert len(rows) == len(ids) // 8
    assert torch.equal(rows[0]["labels"], rows[0]["input_ids"])
    with pytest.raises(ValueError, match="name the texts by dataset_text_field"):
        fastrl.ConstantLengthDataset(tokenizer, texts)


def test_rewards_are_their_formulas() -> None:
    said = [[{"role": "assistant", "content": x}] for x in (
        "<think>a</think>b", "<think>a<think>b</think>", "b", "x <think>a</think>",
    )]  # fmt: skip
    assert fastrl.think_format_reward(said) == [1.0, 0.0, 0.0, 0.0]
    punishment = fastrl.get_soft_overlong_punishment(100, 20)
    assert punishment(completion_ids=[[1] * n for n in (80, 90, 100, 101)]) == [0, -0.5, -1, -1]
    pytest.importorskip("math_verify")
    solution = [r"\frac{1}{3}", r"\frac{1}{3}", None]
    boxed = [r"\boxed{\frac{1}{3}}", r"\boxed{\frac{1}{2}}", r"\boxed{1}"]
    assert fastrl.accuracy_reward(boxed, solution) == [1.0, 0.0, None]
    thoughts = [rf"\boxed{{9}}</think> {x}" for x in boxed[:2]] + [r"\boxed{\frac{1}{3}}"]
    assert fastrl.reasoning_accuracy_reward(thoughts, [*solution[:2], solution[0]]) == [1, 0, 0]


def test_completions_are_logged(tmp_path: Path) -> None:
    held_out = test_dpo.pairs(3, seed=1)
    trainer = test_dpo.trainer(tmp_path, eval_dataset=held_out, max_steps=2, eval_steps=0.9)
    most = GenerationConfig(max_new_tokens=3, do_sample=False)
    trainer.add_callback(LogCompletionsCallback(trainer, most, num_prompts=2))
    trainer.add_callback(fastrl.RichProgressCallback())
    trainer.train()
    (table,) = (tmp_path / "completions").glob("*.parquet")
    rows = Dataset.from_parquet(str(table))
    assert rows["prompt"][:] == held_out["prompt"][:2]
    with pytest.raises(ValueError, match="needs an eval_dataset with a column prompt"):
        LogCompletionsCallback(test_dpo.trainer(tmp_path))


def test_completions_are_drawn_alone_where_padding_changes_them(
    tmp_path: Path, monkeypatch: Any
) -> None:
    held_out = Dataset.from_dict(
        {"prompt": ["w5 w6 w7", "w8"], "chosen": [" w9"] * 2, "rejected": [" w10"] * 2}
    )
    trainer = test_dpo.trainer(tmp_path, eval_dataset=held_out)
    kind = type(trainer.accelerator.unwrap_model(trainer.model))
    prepare = kind.prepare_inputs_for_generation

    def unmasked(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = prepare(self, *args, **kwargs)
        return {k: x for k, x in inputs.items() if k not in ("attention_mask", "position_ids")}

    monkeypatch.setattr(kind, "prepare_inputs_for_generation", unmasked)
    most = GenerationConfig(max_new_tokens=6, do_sample=False)
    callback = LogCompletionsCallback(trainer, most, freq=2)
    asked = [(prompt, {}) for prompt in callback.prompts]
    with pytest.warns(UserWarning, match="padding changes what model.generate draws"):
        both = callback._complete(asked, 2)
    assert both == [callback._complete([each], 2)[0] for each in asked]


def test_functions_of_trls_insides_give_what_theirs_do() -> None:
    utils = pytest.importorskip("trl.trainer.utils")
    torch.manual_seed(0)
    logits, index = torch.randn(2, 5, 11), torch.randint(11, (2, 5))
    for given in ((index,), (index, 0.7), (index, 1.0, index > 3), (torch.stack([index] * 3, -1),)):
        found = helpers.selective_log_softmax(logits, *given)
        torch.testing.assert_close(found, utils.selective_log_softmax(logits, *given))
    rows = [torch.ones(3, 2), torch.zeros(1, 4)]
    for options in ({}, {"padding_value": 7, "padding_side": "left", "pad_to_multiple_of": 4}):
        assert torch.equal(helpers.pad(rows, **options), utils.pad(rows, **options))
    with pytest.raises(ValueError, match="padding_side must be 'left' or 'right'"):
        helpers.pad(rows, padding_side="middle")
    assert [x.shape for x in helpers.listify_batch(index)] == [(1, 5)] * 2
    named = helpers.profiling_decorator(helpers.pad)
    assert named.__name__ == "pad"
    assert torch.equal(named(rows), helpers.pad(rows))
