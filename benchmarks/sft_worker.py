"""One side of `python -m benchmarks sft`: drives one library's SFTTrainer on request.

`sft.py` starts this file once with fastrl's interpreter and once with the peer's. It is a script of
its own because the peer's environment has neither fastrl nor this package. Both trainers are
subclasses of transformers' and have the same surface, so they run the same lines here.

It speaks JSON, one object a line: {"ready": versions}, and then for each command read
- {"command": "check"}: the first epoch -> {"losses": [loss of each step]}
- {"command": "memory"}: a forward and backward pass -> {"peak", "beyond_gradients"}, in bytes
- {"command": "epoch"}: one more epoch -> {"seconds"}
"""

import argparse
import importlib
import importlib.util
import json
import tempfile
import time
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback
from transformers.utils import logging


def neighbour(name: str) -> ModuleType:
    """A file of this folder as a module, in an environment that does not have this package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


footprint = neighbour("memory").footprint
ppo_worker = neighbour("ppo_worker")
EOS = 1  # of the tokenizer, beside which only PAD is special
IGNORED = -100
# Nothing but training, in fp32; all else, AdamW among it, is transformers' default on both sides.
SETTINGS = {
    "bf16": False,
    "fp16": False,
    "gradient_checkpointing": False,  # TRL's default is True
    "learning_rate": 1e-3,  # so that ten steps go somewhere
    "lr_scheduler_type": "constant",
    "num_train_epochs": 1,
    "seed": 0,
    "report_to": "none",
    "save_strategy": "no",
    "eval_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
}


class Stopwatch(TrainerCallback):
    """The seconds of an epoch's steps: batches, passes, clipping and AdamW."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, 0.0

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.seconds -= self.now()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.seconds += self.now()

    def now(self) -> float:
        """The time at which everything asked of the device so far is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


class Side:
    """A trainer of one library on weights and texts that depend on nothing but the shape; it wants
    a folder, and saves nothing there."""

    def __init__(self, library: Any, shape: dict[str, Any], folder: str) -> None:
        model = GPT2LMHeadModel(model_config(shape))
        ppo_worker.fill_by_rule(model)
        self.trainer = library.SFTTrainer(
            model,
            library.SFTConfig(
                output_dir=folder,
                per_device_train_batch_size=shape["batch"],
                max_length=shape["longest"],
                **SETTINGS,
            ),
            train_dataset=datasets.Dataset.from_list(
                [{"input_ids": ids, "labels": labels_of(ids)} for ids in texts(shape)]
            ),
            processing_class=ppo_worker.padding_tokenizer(),
        )

    def check(self) -> dict[str, Any]:
        """The losses of an epoch's steps, as they are trained on."""
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
        """What the passes of a step take on top of weights and AdamW's state, and on top of
        gradients too: the most at a time, in bytes, on the order's first batch."""
        trainer = self.trainer
        batches = iter(trainer.get_train_dataloader())
        (batch,), tokens = trainer.get_batch_samples(batches, 1, trainer.args.device)
        found = {}
        for name, counted in (("peak", True), ("beyond_gradients", False)):
            trainer.model.zero_grad(set_to_none=True)
            found[name] = footprint(
                lambda: trainer.training_step(trainer.model, dict(batch), tokens),
                lambda _: [] if counted else [p.grad for p in trainer.model.parameters()],  # noqa: B023
                trainer.args.device,
            ).peak
        trainer.model.zero_grad(set_to_none=True)
        return found

    def epoch(self) -> dict[str, Any]:
        """Seconds of an epoch."""
        stopwatch = Stopwatch(self.trainer.args.device)
        self.trainer.add_callback(stopwatch)
        self.trainer.train()
        self.trainer.remove_callback(stopwatch)
        return {"seconds": stopwatch.seconds}


def model_config(shape: dict[str, Any]) -> GPT2Config:
    """GPT-2 at the given size, without dropout: the sides would draw it differently."""
    return GPT2Config(
        vocab_size=shape["vocabulary"],
        n_layer=shape["layers"],
        n_embd=shape["width"],
        n_head=shape["heads"],
        n_positions=shape["longest"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=EOS,
        eos_token_id=EOS,
    )


def texts(shape: dict[str, Any]) -> list[list[int]]:
    """Texts of every length in between, ended by EOS. Rarer words have higher ids, log-uniformly:
    there is something to learn, and a step that is not taken shows in the losses."""
    rng = np.random.RandomState(0)
    lengths = rng.randint(shape["shortest"], shape["longest"] + 1, shape["texts"])
    ordinary = shape["vocabulary"] - EOS - 1
    drawn = [np.floor(ordinary ** rng.random_sample(length - 1)).astype(int) for length in lengths]
    return [[*(ids + EOS).tolist(), EOS] for ids in drawn]


def labels_of(ids: list[int]) -> list[int]:
    """All tokens but the first, which nothing predicts. Said here because, left to itself, TRL
    divides a GPT-2's loss by the first tokens too (transformers knows that a loss shifts labels
    from a class's name, and not from GPT2LMHeadModel's)."""
    return [IGNORED, *ids[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--impl", choices=("fastrl", "trl"), required=True)
    parser.add_argument("--shape", type=json.loads, required=True)
    args = parser.parse_args()
    answer = ppo_worker.answering()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    datasets.disable_progress_bars()
    torch.set_num_threads(args.shape["threads"])
    with tempfile.TemporaryDirectory() as folder:
        side = Side(importlib.import_module(args.impl), args.shape, folder)
        answer({"ready": ppo_worker.versions(args.impl, "copy")})
        commands = {"check": side.check, "memory": side.memory, "epoch": side.epoch}
        ppo_worker.serve(answer, commands)


if __name__ == "__main__":
    main()
