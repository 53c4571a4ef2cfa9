"""Teachers for tests, and what they say in float64."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from tokenizers import Tokenizer
from torch import Tensor

from tests import tiny_models
from tests.golden import tiny

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def another(seed: int = 1, **changes: Any) -> Any:
    """A teacher of another width."""
    torch.manual_seed(seed)
    return tiny_models.language_model(
        "qwen2", 0.1 * seed, hidden_size=24, num_attention_heads=6, **changes
    )


def exact(model: Any) -> Any:
    return copy.deepcopy(getattr(model, "pretrained_model", model)).double().eval()


def log_probs(model: Any, prompt: Tensor, response: Tensor, temperature: float = 1.0) -> Tensor:
    """Of all tokens at each place of a response."""
    ids = torch.cat([prompt, response])
    logits = model(ids[None]).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def swapped(folder: Path) -> str:
    """The path of a teacher whose tokenizer is of the same size, with two words swapped."""
    tokenizer = tiny.tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    vocabulary["w5"], vocabulary["w6"] = vocabulary["w6"], vocabulary["w5"]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    another().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


class Likeliest:
    """A teacher's K likeliest tokens as a function gives them, in float64; K is another one for
    each completion."""

    def __init__(self, temperature: float = 1.0):
        self.model, self.temperature = exact(another()), temperature
        self.asked: list[tuple[Any, Any, Any]] = []

    @torch.no_grad()
    def __call__(self, prompt_ids: Any, completion_ids: Any, **columns: Any) -> list[Any]:
        self.asked.append((prompt_ids, completion_ids, columns))
        found = []
        for prompt, response in zip(prompt_ids, completion_ids, strict=True):
            ids = [torch.tensor(x) for x in (prompt, response)]
            top = log_probs(self.model, *ids, self.temperature).topk(2 + prompt[0] % 3)
            found.append((top.indices.numpy(), top.values.tolist()))
        return found
