"""Fused ops for reinforcement learning on language models. Needs torch; triton where it is used."""

from . import compiled, compiled_head, layers  # noqa: F401 (operators register themselves)
from .decode_attention import decode_attention
from .dispatch import Choice, explain
from .full_kl import full_kl
from .gae import gae
from .keys import sample_keys
from .kl import kl_penalty, kl_rewards
from .linear import Extras, linear_logprobs
from .linear_loss import LinearLossStats, linear_ppo_loss
from .linear_nll import linear_nll_loss
from .logprob import token_logprobs
from .moments import Moments, masked_mean, masked_moments, masked_var, masked_whiten, merge_moments
from .ppo_loss import KLTerm, LossStats, ValueTerm, ppo_loss
from .preference import (
    dpo_loss,
    ipo_loss,
    kto_loss,
    orpo_loss,
    reward_loss,
    simpo_loss,
    slic_loss,
)
from .sampling import SampledTokens, sample_tokens

__all__ = [
    "Choice",
    "Extras",
    "KLTerm",
    "LinearLossStats",
    "LossStats",
    "Moments",
    "SampledTokens",
    "ValueTerm",
    "decode_attention",
    "dpo_loss",
    "explain",
    "full_kl",
    "gae",
    "ipo_loss",
    "kl_penalty",
    "kl_rewards",
    "kto_loss",
    "layers",
    "linear_logprobs",
    "linear_nll_loss",
    "linear_ppo_loss",
    "masked_mean",
    "masked_moments",
    "masked_var",
    "masked_whiten",
    "merge_moments",
    "orpo_loss",
    "ppo_loss",
    "reward_loss",
    "sample_keys",
    "sample_tokens",
    "simpo_loss",
    "slic_loss",
    "token_logprobs",
]
