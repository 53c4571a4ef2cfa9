"""A folder with tiny models and data, and a process that runs commands on them."""

import json
from collections.abc import Iterator

import pytest
from transformers import AutoTokenizer

from tests import tiny_models
from tests.commands.conftest import world  # noqa: F401 - a fixture
from tests.faults.zygote import Zygote


@pytest.fixture(scope="session")
def zygote(tmp_path_factory) -> Iterator[Zygote]:
    found = Zygote(tmp_path_factory.mktemp("logs"))
    yield found
    found.close()


REWARD = """\
import random

def varied(completion_ids, **_):
    return [len(set(ids)) + random.random() for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def data(world):  # noqa: F811
    """The same folder, with pairs that have prompts, a reward that draws random numbers, and a
    model whose layers keep states."""
    (world / "varied.py").write_text(REWARD)
    rows = [json.loads(line) for line in (world / "pairs.jsonl").read_text().splitlines()]
    rows = [{"prompt": "the ", **row} for row in rows]
    (world / "prompted.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = AutoTokenizer.from_pretrained(world / "lm")
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    shape = {"bos_token_id": tokenizer.eos_token_id, "vocab_size": len(tokenizer), **ids}
    tiny_models.language_model("qwen3_5", **shape).save_pretrained(world / "hybrid")
    tokenizer.save_pretrained(world / "hybrid")
    return world
