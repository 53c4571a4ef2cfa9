"""Models of a handful of tokens train and generate like others."""

import pytest
import torch

from fastrl import PPOConfig, PPOTrainer
from tests import tiny_models
from tests.golden import tiny


@pytest.mark.filterwarnings("ignore:.*begins with its query")  # there may be no other token
@pytest.mark.parametrize("shared_layers", [None, 1])
@pytest.mark.parametrize("vocabulary", [1, 2, 3, 5, 7, 8, 9])
def test_a_step_and_a_rollout(vocabulary: int, shared_layers: int | None) -> None:
    special = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    special |= {"tie_word_embeddings": False}
    policy = tiny_models.policy(vocab_size=vocabulary, **special)
    config = PPOConfig(batch_size=2, mini_batch_size=1)
    trainer = PPOTrainer(
        config, policy, tokenizer=tiny.tokenizer(), num_shared_layers=shared_layers
    )
    queries = [torch.zeros(2, dtype=torch.long), torch.full((3,), vocabulary - 1)]
    responses = trainer.generate(queries, return_prompt=False, max_new_tokens=3)
    assert all(int(r.min()) >= 0 and int(r.max()) < vocabulary for r in responses)
    stats = trainer.step(queries, responses, [torch.tensor(1.0), torch.tensor(0.0)])
    assert torch.isfinite(torch.tensor(float(stats["ppo/loss/total"])))
