"""The classic documentation's loops run as they stand in ``examples``."""

import math
import runpy
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastrl import AutoModelForCausalLMWithValueHead
from tests import tiny_models
from tests.golden import tiny

EXAMPLE = Path(__file__).parents[1] / "examples" / "classic_loop.py"
QUERIES = ["w3 w4", "w5 w6 w7", "w8 w9", "w10 w11"]

pytestmark = pytest.mark.filterwarnings("ignore:the KL estimate is negative")


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny GPT-2 whose tokenizer, like GPT-2's own, has no pad token."""
    path = tmp_path_factory.mktemp("gpt2")
    model = tiny_models.language_model("gpt2", pad_token_id=None)
    model.save_pretrained(path)
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(path)
    assert AutoTokenizer.from_pretrained(path).pad_token is None
    return str(path)


def test_the_quick_start_runs_without_a_pad_token(example, checkpoint):
    with pytest.warns(UserWarning, match="batch_size=1: advantages are whitened"):
        stats = example["one_query"](checkpoint)
    assert stats["ppo/mean_scores"] == 1.0
    assert stats["tokens/responses_len_mean"] == 20
    assert math.isfinite(stats["ppo/loss/total"])


# The documentation's settings name no max_new_tokens, and its loop hands the prompts back in.
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`")
@pytest.mark.filterwarnings("ignore:responses.* begins with its query")
def test_the_guides_loop_runs_and_saves(example, checkpoint, tmp_path, capsys):
    output = tmp_path / "tuned"
    stats = example["whole_loop"](
        checkpoint, QUERIES, str(output), epochs=1, batch_size=2, ppo_epochs=1
    )
    assert math.isfinite(stats["ppo/loss/total"])
    assert 0 <= stats["ppo/mean_scores"] <= 1
    assert "response" in capsys.readouterr().out  # the table of samples
    tuned = AutoModelForCausalLMWithValueHead.from_pretrained(output)
    before = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    after = tuned.pretrained_model.state_dict()
    assert any(not after[name].equal(value) for name, value in before.items())
    assert AutoTokenizer.from_pretrained(output).pad_token == "<eos>"


def test_the_example_has_a_command_line(example, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--help"])
    with pytest.raises(SystemExit, match="0"):
        example["main"]()
    assert "--model" in capsys.readouterr().out
