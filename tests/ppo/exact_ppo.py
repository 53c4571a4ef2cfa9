"""A PPO step with SGD by its formulas alone, response by response, in float64."""

from typing import Any

import torch
from torch import Tensor


def scored(model: Any, query: Tensor, response: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and values of a response's tokens by a policy with a value head, whose own heads
    read its hidden states."""
    out = model.pretrained_model(torch.cat([query, response])[None], output_hidden_states=True)
    where = slice(len(query) - 1, -1)
    logprobs = out.logits[0, where].log_softmax(-1).gather(-1, response[:, None])[:, 0]
    return logprobs, model.v_head.summary(out.hidden_states[-1][0, where])[:, 0]


def estimates(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """A_t = r_t + γ·V_(t+1) - V_t + γλ·A_(t+1) and A_t + V_t of one response, [L] each."""
    next_value = next_advantage = torch.zeros((), dtype=rewards.dtype)
    found: list[Tensor] = []
    for r, v in zip(rewards.flip(0), values.flip(0), strict=True):
        next_advantage = r + gamma * next_value - v + gamma * lam * next_advantage
        next_value = v
        found.insert(0, next_advantage)
    return torch.stack(found), torch.stack(found) + values


def exact_step(
    policy: Any,
    reference: Any,
    batch: dict[str, Any],
    *,
    rate: float,
    critic: Any = scored,
    critic_model: Any = None,
    coef: float = 0.3,
    gamma: float = 1.0,
    lam: float = 0.95,
    lam_value: float = 0.95,
    vf_coef: float = 0.1,
    epochs: int = 1,
    clip: float = 0.2,
    policy_coef: float = 1.0,
    learns: Any = lambda name: True,
) -> None:
    """Changes the policy, and the critic model where there is one.

    Args:
        policy, reference, critic_model: in float64.
        batch: queries, responses, and scores of their tokens.
        critic: ``critic(model, query, response)[1]`` are values; of ``critic_model``, by default
            the policy.
        learns: whether a weight of the policy does, by its name.
    """
    valued = policy if critic_model is None else critic_model
    given = list(zip(batch["queries"], batch["responses"], batch["scores"], strict=True))
    advantages, returns, old = [], [], []
    with torch.no_grad():
        for query, response, scores in given:
            logprobs, values = (
                scored(policy, query, response)[0],
                critic(valued, query, response)[1],
            )
            rewards = scores.double() - coef * (logprobs - scored(reference, query, response)[0])
            advantages.append(estimates(rewards, values, gamma, lam)[0])
            returns.append(estimates(rewards, values, gamma, lam_value)[1])
            old.append((logprobs, values))
    flat = torch.cat(advantages)
    whitened = ((flat - flat.mean()) / (flat.var() + 1e-8).sqrt()).split(list(map(len, advantages)))
    models = [policy] if critic_model is None else [policy, critic_model]
    for _ in range(epochs):
        losses = []
        for (query, response, _), a, ret, (old_lp, old_v) in zip(
            given, whitened, returns, old, strict=True
        ):
            logprobs, values = (
                scored(policy, query, response)[0],
                critic(valued, query, response)[1],
            )
            ratio = (logprobs - old_lp).exp()
            loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - clip, 1 + clip))
            near = values.clamp(old_v - clip, old_v + clip)
            value_loss = 0.5 * torch.maximum((values - ret).square(), (near - ret).square())
            losses.append(policy_coef * loss + vf_coef * value_loss)
        for model in models:
            model.zero_grad()
        torch.cat(losses).mean().backward()
        with torch.no_grad():
            for model in models:
                for name, p in model.named_parameters():
                    if p.grad is not None and (model is critic_model or learns(name)):
                        p -= rate * p.grad
