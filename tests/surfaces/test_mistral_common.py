"""The tokenizers of mistral-common, which AutoTokenizer returns where that package is, train."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

import fastrl
from fastrl import cli
from fastrl.alignment import DatasLoader
from fastrl.data.encode import Encoder
from fastrl.models.fast_tokenizer import as_fast
from fastrl.models.load import load_tokenizer
from fastrl.rewards.classifier import ClassifierReward
from fastrl.rewards.judges import ModelJudge
from fastrl.tools.reports import report
from tests import mistral_folders
from tests.together import together
from tests.trainers.conftest import ONE_STEP

# `make test` has it, wherever pyproject.toml asks for it.
request = pytest.importorskip("mistral_common.protocol.instruct.request")
mistral = pytest.importorskip("mistral_common.tokens.tokenizers.mistral")

_ASKS = {"role": "user", "content": "hello [é] 😀"}
_SAYS = {"role": "assistant", "content": " the world\n"}
_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    ],
}
_RESULT = {"role": "tool", "content": "2", "tool_call_id": "123456789"}
_TOOLS = [
    {"type": "function",
     "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}},
]  # fmt: skip
CHATS = {
    "one turn": ([_ASKS, _SAYS], None),
    "two turns": ([_ASKS, _SAYS, _ASKS, {**_SAYS, "content": "it is"}], None),
    "system": ([{"role": "system", "content": "is"}, _ASKS, _SAYS], None),
    "tools": ([_ASKS, _CALL, _RESULT, _SAYS], _TOOLS),
}
_REMEDY = r"mistral_format=False"


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "write_report", lambda folder: folder.report)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tekken")
    return {
        version: mistral_folders.save(root / version, version) for version in ("v3", "v7", "v13")
    }


def written(folder: Path, chat: list[Any], tools: Any, mode: str) -> list[int]:
    """The ids that the package itself writes, in the mode that it has for such a chat."""
    own = mistral.MistralTokenizer.from_file(str(folder / "tekken.json"), mode=mode)
    asked = request.ChatCompletionRequest.from_openai(messages=chat, tools=tools)
    return own.encode_chat_completion(asked).tokens


@pytest.mark.parametrize("version", ["v3", "v7", "v13"])
@pytest.mark.parametrize("name", CHATS)
def test_chats_are_read_as_the_package_writes_them(folders, version, name):
    chat, tools = CHATS[name]
    folder = folders[version]
    encoder = Encoder(as_fast(AutoTokenizer.from_pretrained(folder)), template={"tools": tools})
    whole = written(folder, chat, tools, "finetuning")
    prompt = written(folder, chat[:-1], tools, "test")
    assert whole[: len(prompt)] == prompt
    assert encoder.joined(chat[:-1], chat[-1:]) == (whole, len(prompt))
    ids, learned = encoder.alone(chat, assistant_only=True)
    assert ids == whole
    text = encoder.tokenizer.decode([i for i, x in zip(ids, learned, strict=True) if x])
    answers = [m for m in chat if m["role"] == "assistant" and m["content"]]
    for message in answers:
        assert f"{message['content']}</s>" in text
    assert text.count("</s>") == sum(m["role"] == "assistant" for m in chat)
    assert "[INST]" not in text


def test_texts_are_read_as_the_package_reads_them(folders):
    raw = AutoTokenizer.from_pretrained(folders["v7"])
    encoder = Encoder(as_fast(raw))
    text = "hello [INST] é"
    assert encoder.alone(text)[0] == [*raw(text)["input_ids"], raw.eos_token_id]
    assert encoder.joined("hello", " the")[0] == [*raw("hello the")["input_ids"], raw.eos_token_id]


def test_spans_are_those_of_characters(folders):
    tokenizer = as_fast(AutoTokenizer.from_pretrained(folders["v7"]))
    text = "<s>[INST]hello é😀[/INST] the</s>"
    made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert [text[a:b] for a, b in made["offset_mapping"]] == [
        *("<s>", "[INST]", "hello", " ", "é", "é", *"😀😀😀😀", "[/INST]", " the", "</s>")
    ]


def score(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(set(ids))) for ids in completion_ids]


_WORSE = {**_SAYS, "content": "a"}
_PAIRS = {"prompt": [[_ASKS]] * 4, "chosen": [[_SAYS]] * 4, "rejected": [[_WORSE]] * 4}
_ONLINE = {"num_generations": 4, "max_completion_length": 4}
TRAINERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "SFT": ({"messages": [[_ASKS, _SAYS]] * 4}, {"assistant_only_loss": True}),
    "DPO": (_PAIRS, {}),
    "KTO": ({"prompt": [[_ASKS]] * 4, "completion": [[_SAYS]] * 4, "label": [True, False] * 2}, {}),
    "Reward": (_PAIRS, {}),
    "GRPO": ({"prompt": [[_ASKS]] * 4}, _ONLINE),
    "RLOO": ({"prompt": [[_ASKS]] * 4}, _ONLINE),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_trainers_learn_and_save_it(folders, name, tmp_path):
    rows, settings = TRAINERS[name]
    kind, config = (getattr(fastrl, f"{name}{part}") for part in ("Trainer", "Config"))
    own = {"reward_funcs": score} if "num_generations" in settings else {}
    raw = AutoTokenizer.from_pretrained(folders["v7"])
    trainer = kind(
        model=str(folders["v7"]),
        args=config(output_dir=str(tmp_path / "run"), **ONE_STEP, **settings),
        train_dataset=Dataset.from_dict(rows),
        processing_class=raw,
        **own,
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "end"))
    again = AutoTokenizer.from_pretrained(tmp_path / "end")
    assert type(again) is type(raw)
    assert again("hello")["input_ids"] == raw("hello")["input_ids"]


def test_ppo_generates_learns_and_scores_with_it(folders):
    raw = AutoTokenizer.from_pretrained(folders["v7"])
    policy = fastrl.AutoModelForCausalLMWithValueHead.from_pretrained(folders["v7"])
    trainer = fastrl.PPOTrainer(
        fastrl.PPOConfig(batch_size=2, mini_batch_size=2), policy, tokenizer=raw
    )
    queries = [torch.tensor(raw("hello")["input_ids"])] * 2
    responses = trainer.generate(queries, max_new_tokens=3, return_prompt=False)
    trainer.step(queries, responses, [torch.tensor(1.0), torch.tensor(0.0)])


@together("door", ["loaded", "policy", "classifier", "judge", "reward model"])
def test_what_scores_and_judges_reads_chats(folders, door, tmp_path):
    folder = folders["v7"]
    raw = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    scorer = AutoModelForSequenceClassification.from_config(
        AutoConfig.from_pretrained(folder, num_labels=1)
    )
    args = fastrl.GRPOConfig(str(tmp_path), **ONE_STEP, **_ONLINE)
    prompts = Dataset.from_dict({"prompt": [[_ASKS]] * 4})
    tokenizer = {
        "loaded": lambda: load_tokenizer(folder),
        "policy": lambda: (
            fastrl.PPOTrainer(
                fastrl.PPOConfig(), fastrl.AutoModelForCausalLMWithValueHead(model), tokenizer=raw
            ).tokenizer
        ),
        "classifier": lambda: ClassifierReward(scorer, raw).tokenizer,
        "judge": lambda: ModelJudge(model, raw).tokenizer,
        "reward model": lambda: fastrl.GRPOTrainer(
            model, scorer, args, prompts, processing_class=raw, reward_processing_classes=raw
        ).reward_processing_classes[0],
    }[door]()
    assert getattr(tokenizer, "is_fast", False)
    assert Encoder(tokenizer).alone([_ASKS, _SAYS])[0] == written(
        folder, [_ASKS, _SAYS], None, "finetuning"
    )


def test_alignments_loader_reads_chats(folders):
    raw = AutoTokenizer.from_pretrained(folders["v7"])
    whole = written(folders["v7"], [_ASKS, _SAYS], None, "finetuning")
    loader = DatasLoader([{"prompt": [_ASKS], "response": [_SAYS]}], raw)
    example = loader[0]
    assert [*example.prompt_ids, *example.responses[0].ids] == whole


@pytest.mark.parametrize("name", ["sft", "align", "ppo"])
def test_commands_learn_with_it(folders, name, tmp_path):
    rows = {
        "sft": [{"messages": [_ASKS, _SAYS]}] * 8,
        "align": [{key: x[0] for key, x in _PAIRS.items()}] * 8,
        "ppo": [{"prompt": [_ASKS]}] * 8,
    }
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
    flags: dict[str, Any] = {"model": folders["v7"], "dataset": data, "output": tmp_path / "run"}
    if name == "ppo":
        flags |= {"steps": 1, "batch-size": 8, "mini-batch-size": 4, "ppo-epochs": 1}
        flags |= {"eval-prompts": 0, "max-new-tokens": 3, "reward": 'length:{"target": 2}'}
    else:
        flags |= {"max-steps": 1, "per-device-train-batch-size": 4, "eval-examples": 0}
        flags["use-cpu"] = "true"
    assert cli.main([name, *(str(x) for k, v in flags.items() for x in (f"--{k}", v))]) == 0
    saved = tmp_path / "run" / "model"
    assert (saved / "tekken.json").read_bytes() == (folders["v7"] / "tekken.json").read_bytes()
    assert "AutoTokenizer.from_pretrained" in (saved / "README.md").read_text()


def test_a_template_of_the_users_beside_it_is_refused(folders, tmp_path):
    folder = mistral_folders.save(tmp_path / "model")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"

    def make(tokenizer: Any, **settings: Any) -> Any:
        args = fastrl.SFTConfig(output_dir=str(tmp_path / "run"), **ONE_STEP, **settings)
        rows = Dataset.from_dict(TRAINERS["SFT"][0])
        return fastrl.SFTTrainer(str(folder), args, rows, processing_class=tokenizer)

    raw = AutoTokenizer.from_pretrained(folder)
    raw.chat_template = template
    with pytest.raises(ValueError, match=rf"tokenizer\.chat_template would be ignored.*{_REMEDY}"):
        make(raw)
    raw.chat_template = None
    (tmp_path / "own.jinja").write_text(template)
    with pytest.raises(ValueError, match=rf"chat_template_path\) would be ignored.*{_REMEDY}"):
        make(raw, chat_template_path=str(tmp_path / "own.jinja"))
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=rf"chat_template\.jinja would be ignored.*{_REMEDY}"):
        make(raw)
    same = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]"
        "{{ m.content }}[/SYSTEM_PROMPT]{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(same)
    make(raw)


def test_what_it_would_drop_or_read_otherwise_is_refused(folders):
    tokenizer = as_fast(AutoTokenizer.from_pretrained(folders["v7"]))
    with pytest.raises(ValueError, match="no option enable_thinking"):
        tokenizer.apply_chat_template([_ASKS], enable_thinking=False)
    with pytest.raises(ValueError, match=r"quotes a control token, such as \[INST\]"):
        tokenizer.apply_chat_template([{**_ASKS, "content": "what is [INST]?"}])
