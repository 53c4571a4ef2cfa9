"""A folder with what the commands are given: models, data, reward functions."""

import json

import pytest
import torch
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

import fastrl.tools.commands.report  # noqa: F401 - it has the function itself, which draws
from fastrl.tools.demo.models import build_tokenizer
from fastrl.tools.demo.text import preference_pairs, reviews
from fastrl.tools.reports import report

SHAPE = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 48}
REWARD = "def by_label(prompts, completions, completion_ids, label, **columns):\n"
REWARD += "    return [float(len(i) + l) for i, l in zip(completion_ids, label, strict=True)]\n"
REWARD += "def length(prompts, completions, completion_ids, **columns):\n"
REWARD += "    return [float(len(ids)) for ids in completion_ids]\n"
REWARD += "def remainder(prompts, completions, completion_ids, **columns):\n"
REWARD += "    return [float(sum(ids) % 7) for ids in completion_ids]\n"
REWARD += "async def labelled(completions, label, **columns):\n"
REWARD += "    return [2.0 if wanted else None for wanted in label]\n"

_write_report = report.write_report


@pytest.fixture(autouse=True, scope="module")
def _no_figures():
    """To draw them takes half of a tiny run's time. Of a module's scope, as runs are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "write_report", lambda folder: folder.report)
        yield


@pytest.fixture
def figures(monkeypatch):
    """Runs have figures: for tests that look at them."""
    monkeypatch.setattr(report, "write_report", _write_report)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with a language model, a classifier, reward functions and prompts."""
    folder = tmp_path_factory.mktemp("world")
    torch.manual_seed(0)
    corpus = reviews(60, seed=0)
    tokenizer = build_tokenizer([r.text for r in corpus])
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    shape = {**SHAPE, **ids, "bos_token_id": tokenizer.eos_token_id, "vocab_size": len(tokenizer)}
    GPT2LMHeadModel(GPT2Config(**shape)).save_pretrained(folder / "lm")
    wide = GPT2Config(**{**shape, "n_embd": 2 * shape["n_embd"]})
    with torch.random.fork_rng():
        GPT2LMHeadModel(wide).save_pretrained(folder / "wide")
    GPT2ForSequenceClassification(GPT2Config(**shape, num_labels=2)).save_pretrained(folder / "clf")
    for name in ("lm", "wide", "clf"):
        tokenizer.save_pretrained(folder / name)
    (folder / "rewards.py").write_text(REWARD)
    rows = [json.dumps({"text": r.text, "label": r.label}) for r in corpus]
    (folder / "reviews.jsonl").write_text("\n".join(rows) + "\n")
    pairs = [{"chosen": a, "rejected": b} for a, b in preference_pairs(60, seed=0)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
