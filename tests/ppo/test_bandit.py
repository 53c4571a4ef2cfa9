"""PPO against an optimum that is known in closed form."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from fastrl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from tests.golden import tiny

V, BATCH, BETA = 32, 256, 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bandit_converges_to_the_tilted_reference(dtype: torch.dtype) -> None:
    """max E[r] - β·KL(π || ref) has its optimum at π* ∝ ref·exp(r/β), token by token; with weights
    in bf16, too, as their float32 masters are trained."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=V,
            n_positions=8,
            n_embd=32,
            n_layer=1,
            n_head=2,
            eos_token_id=1,
            bos_token_id=0,
        )
    )
    with torch.no_grad():
        model.transformer.wte.weight.mul_(8)
    policy = AutoModelForCausalLMWithValueHead(model.to(dtype), summary_dropout_prob=0.0)
    config = PPOConfig(
        batch_size=BATCH, ppo_epochs=4, learning_rate=3e-3, adap_kl_ctrl=False, init_kl_coef=BETA,
        cliprange=0.2, vf_coef=0.1, cliprange_value=10.0,
    )  # fmt: skip
    trainer = PPOTrainer(config, policy, None, tiny.tokenizer())
    query = torch.tensor([5])
    rewards = torch.linspace(-1, 1, V)[torch.randperm(V)]

    def log_policy(of: AutoModelForCausalLMWithValueHead) -> torch.Tensor:
        with torch.no_grad():
            logits = of.eval()(query[None].to(trainer.current_device))[0][0, -1]
            return logits.double().log_softmax(-1).cpu()

    optimum = (log_policy(trainer.ref_model) + rewards.double() / BETA).log_softmax(-1)

    def distance() -> float:
        current = log_policy(trainer.model)
        return float((current.exp() * (current - optimum)).sum())

    assert distance() > 0.3  # otherwise there is nothing to learn
    schedule = torch.optim.lr_scheduler.LambdaLR(
        trainer.optimizer.optimizer, lambda step: max(0.02, 0.88**step)
    )
    for _ in range(32):
        actions = torch.multinomial(log_policy(trainer.model).exp().float(), BATCH, True)
        trainer.step([query] * BATCH, list(actions[:, None]), list(rewards[actions]))
        schedule.step()
    assert distance() < 1e-2, distance()
