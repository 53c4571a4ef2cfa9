"""Sides of `test_training.py`: SFT and DPO trainers on transformers' Trainer."""

from __future__ import annotations

import atexit
import copy
import importlib
import shutil
import tempfile
from typing import Any

import numpy as np
import torch

from benchmarks.memory import footprint
from benchmarks.models import EOS, model_of, word_tokenizer, words
from benchmarks.timing import now

IGNORED = -100
BETA = 0.1  # of DPO
# Nothing but training, in fp32; all else, AdamW among it, is transformers' default on both sides.
SETTINGS = {
    "bf16": False,
    "use_cpu": not torch.cuda.is_available(),  # without a GPU, bf16 is refused otherwise
    "fp16": False,
    "gradient_checkpointing": False,  # TRL's default is True
    "lr_scheduler_type": "constant",
    "seed": 0,
    "report_to": "none",
    "save_strategy": "no",
    "eval_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
}


class TrainerSide:
    """A trainer whose epochs are timed. It needs a folder, and saves nothing there."""

    trainer: Any

    def __init__(self, library: Any, shape: dict[str, Any], **options: str) -> None:
        import datasets
        from transformers.utils import logging

        logging.set_verbosity_error()
        datasets.disable_progress_bars()
        arguments = {
            "output_dir": temporary_folder(),
            "per_device_train_batch_size": shape["batch"],
            "num_train_epochs": 1,
            "max_length": shape["longest"],
            "learning_rate": 1e-3,  # so that ten steps change the losses
            **SETTINGS | {"bf16": shape["dtype"] == "bf16"},
        }
        self.trainer = self.make(library, shape, model_of(shape), arguments, **options)

    def rewind(self) -> None:
        """Makes the trainer's next batch the first one; an epoch does so by itself."""

    def check(self) -> dict[str, Any]:
        """{"losses": of an epoch's steps, as they are trained on}."""
        losses, step = [], self.trainer.training_step

        def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
            loss = step(*args, **kwargs)
            losses.append(loss.item())
            return loss

        self.trainer.training_step = noted
        self.trainer.train()
        self.trainer.training_step = step
        return {"losses": losses}

    def memory(self) -> dict[str, Any]:
        """The peak, in bytes, of a step's passes on the first batch: above weights and AdamW's
        state, and above gradients too."""
        trainer = self.trainer
        self.rewind()
        batches = iter(trainer.get_train_dataloader())
        (batch,), tokens = trainer.get_batch_samples(batches, 1, trainer.args.device)
        found = {}
        for name, counted in (("peak", True), ("beyond gradients", False)):
            trainer.model.zero_grad(set_to_none=True)
            found[name] = footprint(
                lambda: trainer.training_step(trainer.model, copy.copy(batch), tokens),
                lambda _: [] if counted else [p.grad for p in trainer.model.parameters()],  # noqa: B023
                trainer.args.device,
            )
        trainer.model.zero_grad(set_to_none=True)
        return found

    def turn(self) -> dict[str, Any]:
        """{"seconds": of an epoch's steps: batches, passes, clipping and AdamW}."""
        return {"seconds": {"epoch": timed_train(self.trainer, "epoch")}}


def timed_train(trainer: Any, what: str) -> float:
    """Seconds that `train()` spends between the callbacks of an "epoch" or "step"."""
    from transformers import TrainerCallback

    device, found = trainer.args.device, [0.0]

    def begin(*_: Any, **__: Any) -> None:
        found[0] -= now(device)

    def end(*_: Any, **__: Any) -> None:
        found[0] += now(device)

    body = {f"on_{what}_begin": begin, f"on_{what}_end": end}
    stopwatch = type("Stopwatch", (TrainerCallback,), body)()
    trainer.add_callback(stopwatch)
    trainer.train()
    trainer.remove_callback(stopwatch)
    return found[0]


def temporary_folder() -> str:
    """A folder that is removed when the process ends."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, True)
    return folder


class SFTSide(TrainerSide):
    """Supervised fine-tuning on texts."""

    def make(
        self, library: Any, shape: dict[str, Any], model: Any, arguments: dict[str, Any]
    ) -> Any:
        from datasets import Dataset

        # All tokens are learned but the first, which nothing predicts. Without labels, TRL divides
        # a GPT-2's loss by the first tokens too (transformers knows that a loss shifts labels from
        # a class's name, and not from GPT2LMHeadModel's).
        rows = [{"input_ids": ids, "labels": [IGNORED, *ids[1:]]} for ids in texts(shape)]
        return library.SFTTrainer(
            model,
            library.SFTConfig(**arguments),
            train_dataset=Dataset.from_list(rows),
            processing_class=word_tokenizer(),
        )


class DPOSide(TrainerSide):
    """DPO on pairs, in their order. The reference is a copy that runs in every step, or its
    log-probs are computed before training begins, and are not timed."""

    def make(
        self,
        library: Any,
        shape: dict[str, Any],
        model: Any,
        arguments: dict[str, Any],
        reference: str = "copy",
    ) -> Any:
        if library.__name__ != "fastrl":
            return self.by_trls_names(library, shape, model, arguments, reference)
        alignment = importlib.import_module("fastrl.alignment")
        data = alignment.DatasLoader(preferences(shape), word_tokenizer(shape["vocabulary"]))
        factory = alignment.BatchFactory(
            "offline-pairwise", data, batch_size=shape["batch"], shuffle=False
        )
        settings = alignment.AlignmentConfig(reference=reference, **arguments)
        return alignment.Trainer(model, settings, factory, alignment.DPO(beta=BETA))

    def by_trls_names(
        self,
        library: Any,
        shape: dict[str, Any],
        model: Any,
        arguments: dict[str, Any],
        reference: str = "copy",
    ) -> Any:
        from datasets import Dataset

        return library.DPOTrainer(
            model,
            # TRL copies only what it can load again by a name.
            copy.deepcopy(model) if reference == "copy" else None,
            library.DPOConfig(
                beta=BETA,
                precompute_ref_log_probs=reference == "cached",
                train_sampling_strategy="sequential",
                **arguments,
            ),
            train_dataset=Dataset.from_list(preferences(shape)),
            processing_class=word_tokenizer(shape["vocabulary"]),
        )

    def rewind(self) -> None:
        if hasattr(self.trainer, "factory"):  # fastrl's
            self.trainer.factory.skip(0)


class DPOScriptSide(DPOSide):
    """The same by TRL 1.x's names, with either library's DPOTrainer."""

    make = DPOSide.by_trls_names


def drawn(rng: np.random.RandomState, length: int, vocabulary: int) -> list[int]:
    """Words, log-uniformly distributed: there is something to learn, and a step that is not taken
    shows in the losses."""
    ordinary = vocabulary - EOS - 1
    return (np.floor(ordinary ** rng.random_sample(length)).astype(int) + EOS).tolist()


def texts(shape: dict[str, Any]) -> list[list[int]]:
    """Texts of uniformly distributed lengths, ended by EOS."""
    rng = np.random.RandomState(0)
    lengths = rng.randint(shape["shortest"], shape["longest"] + 1, shape["count"])
    return [[*drawn(rng, length - 1, shape["vocabulary"]), EOS] for length in lengths]


def preferences(shape: dict[str, Any]) -> list[dict[str, str]]:
    """Prompts, preferred responses and others, each of up to half the longest with the EOS that
    both libraries append. The other responses take all words alike."""
    rng, vocabulary = np.random.RandomState(0), shape["vocabulary"]
    found = []
    for _ in range(shape["count"]):
        prompt, *responses = rng.randint(shape["shortest"], shape["longest"] // 2 + 1, 3)
        found.append(
            {
                "prompt": words(drawn(rng, prompt, vocabulary)),
                "chosen": " " + words(drawn(rng, responses[0] - 1, vocabulary)),
                "rejected": " " + words(rng.randint(EOS + 1, vocabulary, responses[1] - 1)),
            }
        )
    return found
