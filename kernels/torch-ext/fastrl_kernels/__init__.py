"""Fused ops for reinforcement learning on language models. Needs torch; triton where it is used."""

from . import layers, losses, preference
from .advance_slots import advance_slots
from .decode_attention import LiveTokens, decode_attention
from .dispatch import Choice, explain
from .full_kl import full_kl
from .gae import gae
from .kl import kl_penalty, kl_rewards
from .linear_kl import linear_kl, linear_kl_loss
from .linear_logprobs import linear_logprobs
from .linear_nll import linear_nll_loss
from .linear_ppo_loss import linear_ppo_loss
from .linear_sample import linear_sample, linear_sample_pays
from .logprob import token_logprobs
from .moments import masked_mean, masked_moments, masked_var, masked_whiten, merge_moments
from .policy_losses import PolicyLoss
from .ppo_loss import ppo_loss
from .preference import *  # noqa: F403
from .rms_norm import rms_norm
from .rng import sample_keys
from .rotary import rotate_and_store
from .sample_with_support import sample_with_support
from .sampling import sample_tokens
from .swiglu import swiglu
from .token_sets import TokenSets
from .types import (
    Extras,
    HeadNorms,
    KLTerm,
    LinearLossStats,
    LossStats,
    Moments,
    SampledTokens,
    SlotBuffers,
    TeacherHead,
    TeacherTokens,
    TokenDivergences,
    ValueTerm,
)
from .vocab_parallel import VocabParallel

__all__ = [
    "Choice",
    "Extras",
    "HeadNorms",
    "KLTerm",
    "LinearLossStats",
    "LiveTokens",
    "LossStats",
    "Moments",
    "PolicyLoss",
    "SampledTokens",
    "SlotBuffers",
    "TeacherHead",
    "TeacherTokens",
    "TokenDivergences",
    "TokenSets",
    "ValueTerm",
    "VocabParallel",
    "advance_slots",
    "decode_attention",
    "explain",
    "full_kl",
    "gae",
    "kl_penalty",
    "kl_rewards",
    "layers",
    "linear_kl",
    "linear_kl_loss",
    "linear_logprobs",
    "linear_nll_loss",
    "linear_ppo_loss",
    "linear_sample",
    "linear_sample_pays",
    "losses",
    "masked_mean",
    "masked_moments",
    "masked_var",
    "masked_whiten",
    "merge_moments",
    "ppo_loss",
    "rms_norm",
    "rotate_and_store",
    "sample_keys",
    "sample_tokens",
    "sample_with_support",
    "swiglu",
    "token_logprobs",
]
__all__ += preference.__all__
