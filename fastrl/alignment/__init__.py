"""Aligning a language model from data or from live feedback, with a weight for every sample.

A :class:`DatasLoader` reads examples; a :class:`BatchFactory` makes batches for a task, of these
examples or of the policy's responses, which an annotator judges; a reweighter sets the weight of
each sample; a :class:`Trainer` minimises a :class:`Loss`.
"""

from fastrl.alignment import losses
from fastrl.alignment.annotator import Annotator, RewardAnnotator, load_annotator
from fastrl.alignment.arguments import AlignmentConfig
from fastrl.alignment.batch import Batch
from fastrl.alignment.batch_factory import BatchFactory
from fastrl.alignment.losses import *  # noqa: F403
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
    "TASKS",
    "AlignmentConfig",
    "Annotator",
    "Batch",
    "BatchFactory",
    "ByFunction",
    "ByImportance",
    "ByLength",
    "ByMargin",
    "DatasLoader",
    "Example",
    "JudgeAnnotator",
    "ModelJudge",
    "Response",
    "RewardAnnotator",
    "SampleReweighter",
    "Task",
    "Trainer",
    "Uniform",
    "load_annotator",
    "make_reweighter",
]
__all__ += losses.__all__
