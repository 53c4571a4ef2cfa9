"""The losses, each a class that is called with a batch."""

from fastrl.alignment.losses.base import LOSSES, Loss, LossOutput, register, weighted_mean
from fastrl.alignment.losses.make import make_loss
from fastrl.alignment.losses.pairwise import (
    DPO,
    IPO,
    ORPO,
    ConservativeDPO,
    Hinge,
    PairwiseLoss,
    RobustDPO,
    SimPO,
    SLiC,
)
from fastrl.alignment.losses.pointwise import KTO, SFT
from fastrl.alignment.losses.ppo import PPO
from fastrl.alignment.losses.reward import BradleyTerry
from fastrl.learn.preferences import loss_of_pairs

__all__ = [
    "DPO",
    "IPO",
    "KTO",
    "LOSSES",
    "ORPO",
    "PPO",
    "SFT",
    "BradleyTerry",
    "ConservativeDPO",
    "Hinge",
    "Loss",
    "LossOutput",
    "PairwiseLoss",
    "RobustDPO",
    "SLiC",
    "SimPO",
    "loss_of_pairs",
    "make_loss",
    "register",
    "weighted_mean",
]
