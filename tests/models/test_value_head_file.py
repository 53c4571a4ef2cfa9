"""The value head's own file: what lies beside it, what it replaces, and folders without it."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fastrl import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead
from fastrl.models import CausalLMPolicy
from fastrl.run import hub
from tests import seq2seq_models, tiny_models
from tests.weights import assert_same_weights

pytestmark = pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
SHARDS = {"max_shard_size": "8KB"}


def served(folder):
    """The weights that vLLM and SGLang load: of all *.safetensors, or of those in the index."""
    files = set(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        named = json.loads(index.read_text())["weight_map"]
        assert {folder / name for name in named.values()} <= files
        files = {folder / name for name in named.values()}
        assert set(named) == set().union(*map(load_file, files))
    return set().union(*map(load_file, files))


def as_before(model, folder, **options):
    """Saves a policy in the layout of earlier versions, which is TRL's: its head among the weights,
    or alone in model.safetensors beside an adapter."""
    head = {f"v_head.{k}": x.clone() for k, x in model.v_head.state_dict().items()}
    inner = model.pretrained_model
    if model.is_peft_model:
        inner.save_pretrained(folder)
        save_file(head, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        inner.save_pretrained(folder, state_dict={**inner.state_dict(), **head}, **options)


def policy(kind, perturbation=0.0):
    if kind == "t5":
        return seq2seq_models.policy("t5_tied", perturbation)
    return tiny_models.policy("gpt2" if kind == "whole" else "llama", perturbation)


def adapted(base, seed=0):
    torch.manual_seed(seed)
    return AutoModelForCausalLMWithValueHead.from_pretrained(
        base, peft_config=tiny_models.lora()
    ).eval()


OPTIONS = {"whole": {}, "sharded": SHARDS, "t5": {}}


@pytest.mark.parametrize("kind", OPTIONS)
def test_servers_find_the_language_model_alone(kind, tmp_path):
    model = policy(kind)
    model.save_pretrained(tmp_path, **OPTIONS[kind])
    names = served(tmp_path)
    assert names <= set(model.pretrained_model.state_dict())
    assert not any(name.startswith("v_head.") for name in names)
    loader = model.transformers_parent_class
    plain, found = loader.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values())
    assert_same_weights(plain, model.pretrained_model)


@pytest.mark.parametrize(
    ("old", "new"), [*itertools.product(("whole", "sharded"), repeat=2), ("t5", "t5")]
)
def test_what_an_earlier_save_left_is_not_read(old, new, tmp_path):
    as_before(policy("sharded" if new == "sharded" else old, 0.5), tmp_path, **OPTIONS[old])
    model = policy(new)
    model.save_pretrained(tmp_path, **OPTIONS[new])
    assert_same_weights(type(model).from_pretrained(tmp_path), model)
    assert served(tmp_path) <= set(model.pretrained_model.state_dict())


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_layout_of_earlier_versions_loads_and_the_file_wins(kind, tmp_path):
    model, other = policy(kind), policy(kind, 0.5)
    as_before(model, tmp_path, **OPTIONS[kind])
    assert_same_weights(type(model).from_pretrained(tmp_path), model)
    fresh = policy(kind, 0.5)
    fresh.load_weights(tmp_path)
    assert_same_weights(fresh, model)
    head = {f"v_head.{k}": x for k, x in other.v_head.state_dict().items()}
    save_file(head, tmp_path / "value_head.safetensors")
    assert_same_weights(type(model).from_pretrained(tmp_path).v_head, other.v_head)
    fresh.load_weights(tmp_path)
    assert_same_weights(fresh.v_head, other.v_head)


def test_beside_an_adapter_nothing_is_called_a_model(tmp_path):
    tiny_models.language_model().save_pretrained(tmp_path / "base")
    folder, model = tmp_path / "tuned", adapted(tmp_path / "base")
    as_before(adapted(tmp_path / "base", seed=1), folder)
    first = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    assert not torch.equal(first.v_head.summary.weight, model.v_head.summary.weight)
    model.save_pretrained(folder)
    assert {x.name for x in folder.glob("*.safetensors*")} == {
        "adapter_model.safetensors",
        "value_head.safetensors",
    }
    assert_same_weights(AutoModelForCausalLMWithValueHead.from_pretrained(folder), model)
    plain = AutoModelForCausalLM.from_pretrained(folder)  # transformers loads adapters too
    ids = torch.stack(tiny_models.prompts(6))
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, model(ids)[0])


def test_a_model_without_values_leaves_no_head(tmp_path):
    tiny_models.policy().save_pretrained(tmp_path)
    CausalLMPolicy(tiny_models.language_model()).save_pretrained(tmp_path)
    assert {x.name for x in tmp_path.glob("*.safetensors*")} == {"model.safetensors"}


def test_a_head_on_the_hub_is_found_by_its_file(monkeypatch, tmp_path):
    model = tiny_models.policy()
    model.save_pretrained(tmp_path)
    asked = []

    def of_hub(path, name, options):
        asked.append(name)
        return str(tmp_path / name) if (tmp_path / name).exists() else None

    monkeypatch.setattr("fastrl.models.value_head.find_file", of_hub)
    found = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert asked[-1] == "value_head.safetensors"
    assert "model.safetensors" not in asked
    assert_same_weights(found, model)


def test_saving_with_an_upload_uploads_the_head_too(monkeypatch, tmp_path):
    calls = []

    def upload(folder, repo_id, **options):
        calls.append((repo_id, options, {x.name for x in Path(folder).iterdir()}))

    monkeypatch.setattr(hub, "upload", upload)
    model = seq2seq_models.policy()
    assert isinstance(model, AutoModelForSeq2SeqLMWithValueHead)
    model.save_pretrained(tmp_path / "tuned", push_to_hub=True, private=True)
    ((repo_id, options, files),) = calls
    assert (repo_id, options) == ("tuned", {"private": True})
    assert {"README.md", "config.json", "model.safetensors", "value_head.safetensors"} <= files
