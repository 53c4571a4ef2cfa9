"""Aligning a language model from data or from live feedback, with a weight for every sample.

A :class:`DatasLoader` reads examples; a :class:`BatchFactory` makes batches for a task, of these
examples or of the policy's responses, which an annotator judges; a reweighter sets the weight of
each sample; a :class:`Trainer` minimises a :class:`Loss`.
"""

from fastrl.alignment.annotator import Annotator, RewardAnnotator, load_annotator
from fastrl.alignment.arguments import AlignmentConfig
from fastrl.alignment.batch import Batch
from fastrl.alignment.batch_factory import BatchFactory
from fastrl.alignment.losses import (
    DPO,
    IPO,
    KTO,
    LOSSES,
    ORPO,
    PPO,
    SFT,
    BradleyTerry,
    ConservativeDPO,
    Hinge,
    Loss,
    LossOutput,
    PairwiseLoss,
    RobustDPO,
    SimPO,
    SLiC,
    make_loss,
    register,
)
from fastrl.alignment.reweighter import (
    ByFunction,
    ByImportance,
    ByLength,
    ByMargin,
    SampleReweighter,
    Uniform,
    make_reweighter,
)
from fastrl.alignment.tasks import TASKS, Task
from fastrl.alignment.trainer import Trainer
from fastrl.data.datas_loader import DatasLoader
from fastrl.data.examples import Example, Response
from fastrl.rewards.judges import JudgeAnnotator, ModelJudge

__all__ = [
    "DPO",
    "IPO",
    "KTO",
    "LOSSES",
    "ORPO",
    "PPO",
    "SFT",
    "TASKS",
    "AlignmentConfig",
    "Annotator",
    "Batch",
    "BatchFactory",
    "BradleyTerry",
    "ByFunction",
    "ByImportance",
    "ByLength",
    "ByMargin",
    "ConservativeDPO",
    "DatasLoader",
    "Example",
    "Hinge",
    "JudgeAnnotator",
    "Loss",
    "LossOutput",
    "ModelJudge",
    "PairwiseLoss",
    "Response",
    "RewardAnnotator",
    "RobustDPO",
    "SLiC",
    "SampleReweighter",
    "SimPO",
    "Task",
    "Trainer",
    "Uniform",
    "load_annotator",
    "make_loss",
    "make_reweighter",
    "register",
]
