"""One side of `python -m benchmarks sft` or `dpo`: drives one library's trainer on request.

`training.py` starts this file once with fastrl's interpreter and once with the peer's. It is a
script of its own because the peer's environment has neither fastrl nor this package. All trainers
are subclasses of transformers' and have the same surface, so they run the same lines here.

It speaks JSON, one object a line: {"ready": versions}, and then for each command read
- {"command": "check"}: the first epoch -> {"losses": [loss of each step]}
- {"command": "memory"}: a forward and backward pass -> {"peak", "beyond_gradients"}, in bytes
- {"command": "epoch"}: one more epoch -> {"seconds"}
"""

import argparse
import copy
import importlib
import importlib.util
import json
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback
from transformers.utils import logging


def neighbour(name: str) -> ModuleType:
    """A file of this folder as a module, in an environment that does not have this package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


footprint = neighbour("memory").footprint
ppo_worker = neighbour("ppo_worker")
PAD, EOS = 0, 1  # the only special tokens
IGNORED = -100
BETA = 0.1  # of DPO
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
    """A trainer of one library on weights and data that depend on nothing but the shape; it wants
    a folder, and saves nothing there."""

    trainer: Any

    def __init__(self, library: Any, shape: dict[str, Any], folder: str, **options: str) -> None:
        model = GPT2LMHeadModel(model_config(shape))
        ppo_worker.fill_by_rule(model)
        arguments = {
            "output_dir": folder,
            "per_device_train_batch_size": shape["batch"],
            "max_length": shape["longest"],
            **SETTINGS,
        }
        self.trainer = self.make(library, shape, model, arguments, **options)

    def make(
        self, library: Any, shape: dict[str, Any], model: Any, arguments: dict[str, Any]
    ) -> Any:
        """The library's trainer."""
        raise NotImplementedError

    def rewind(self) -> None:
        """Lets the trainer's next batch be the first; an epoch does so by itself."""

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
        self.rewind()
        batches = iter(trainer.get_train_dataloader())
        (batch,), tokens = trainer.get_batch_samples(batches, 1, trainer.args.device)
        found = {}
        for name, counted in (("peak", True), ("beyond_gradients", False)):
            trainer.model.zero_grad(set_to_none=True)
            found[name] = footprint(
                lambda: trainer.training_step(trainer.model, copy.copy(batch), tokens),
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


class SFTSide(Side):
    """Supervised fine-tuning on texts."""

    def make(
        self, library: Any, shape: dict[str, Any], model: Any, arguments: dict[str, Any]
    ) -> Any:
        return library.SFTTrainer(
            model,
            library.SFTConfig(**arguments),
            train_dataset=datasets.Dataset.from_list(
                [{"input_ids": ids, "labels": labels_of(ids)} for ids in texts(shape)]
            ),
            processing_class=ppo_worker.padding_tokenizer(),
        )


class DPOSide(Side):
    """DPO on pairs, in their order. The reference is a copy that runs in every step, or what it
    would say is computed before training begins, and is not timed."""

    def make(
        self,
        library: Any,
        shape: dict[str, Any],
        model: Any,
        arguments: dict[str, Any],
        reference: str = "copy",
    ) -> Any:
        tokenizer = word_tokenizer(shape["vocabulary"])
        if library.__name__ != "fastrl":
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
                # Its trainer takes no tokens; it appends EOS by itself.
                train_dataset=datasets.Dataset.from_list(
                    [
                        {"prompt": words(p), "chosen": f" {words(c)}", "rejected": f" {words(r)}"}
                        for p, c, r in pairs(shape)
                    ]
                ),
                processing_class=tokenizer,
            )
        alignment = {
            name: importlib.import_module(f"fastrl.alignment.{name}")
            for name in ("arguments", "batch_factory", "losses", "trainer")
        }
        factory = alignment["batch_factory"].BatchFactory(
            "offline-pairwise",
            Loader(pairs(shape), tokenizer),
            batch_size=shape["batch"],
            shuffle=False,
        )
        settings = alignment["arguments"].AlignmentConfig(reference=reference, **arguments)
        loss = alignment["losses"].DPO(beta=BETA)
        return alignment["trainer"].Trainer(model, settings, factory, loss)

    def rewind(self) -> None:
        if hasattr(self.trainer, "factory"):  # fastrl's
            self.trainer.factory.skip(0)


class Loader:
    """Pairs as fastrl's batch factory takes them."""

    def __init__(self, found: list[tuple[list[int], ...]], tokenizer: Any) -> None:
        examples = importlib.import_module("fastrl.alignment.examples")
        self.tokenizer = tokenizer
        self.examples = [
            examples.Example(
                words(prompt),
                tuple(prompt),
                tuple(examples.Response(f" {words(ids)}", (*ids, EOS)) for ids in responses),
            )
            for prompt, *responses in found
        ]

    def as_kind(self, kind: Any) -> "Loader":
        return self

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, i: int) -> Any:
        return self.examples[i]


SIDES = {"sft": SFTSide, "dpo": DPOSide}


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
    """Texts of every length in between, ended by EOS."""
    rng = np.random.RandomState(0)
    lengths = rng.randint(shape["shortest"], shape["longest"] + 1, shape["texts"])
    return [[*drawn(rng, length - 1, shape["vocabulary"]), EOS] for length in lengths]


def pairs(shape: dict[str, Any]) -> list[tuple[list[int], list[int], list[int]]]:
    """Prompts, preferred and other responses, the latter without EOS, which comes on top. Each is
    of any length up to half the longest. The other responses take all words alike."""
    rng = np.random.RandomState(0)
    found = []
    for _ in range(shape["pairs"]):
        prompt, *responses = rng.randint(shape["shortest"], shape["longest"] // 2 + 1, 3)
        found.append(
            (
                drawn(rng, prompt, shape["vocabulary"]),
                drawn(rng, responses[0] - 1, shape["vocabulary"]),
                rng.randint(EOS + 1, shape["vocabulary"], responses[1] - 1).tolist(),
            )
        )
    return found


def drawn(rng: np.random.RandomState, length: int, vocabulary: int) -> list[int]:
    """Words, whose ids are higher the rarer they are, log-uniformly: there is something to learn,
    and a step that is not taken shows in the losses."""
    ordinary = vocabulary - EOS - 1
    return (np.floor(ordinary ** rng.random_sample(length)).astype(int) + EOS).tolist()


def labels_of(ids: list[int]) -> list[int]:
    """All tokens but the first, which nothing predicts. Said here because, left to itself, TRL
    divides a GPT-2's loss by the first tokens too (transformers knows that a loss shifts labels
    from a class's name, and not from GPT2LMHeadModel's)."""
    return [IGNORED, *ids[1:]]


def words(ids: Sequence[int]) -> str:
    """Text that `word_tokenizer` makes these ids of."""
    return " ".join(map(str, ids))


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Every number is a word, and its own id."""
    known = {"<pad>": PAD, "<eos>": EOS} | {str(i): i for i in range(EOS + 1, vocabulary)}
    core = Tokenizer(models.WordLevel(known, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--impl", choices=("fastrl", "trl"), required=True)
    parser.add_argument("--shape", type=json.loads, required=True)
    parser.add_argument("--training", choices=tuple(SIDES), required=True)
    parser.add_argument("--reference", choices=("copy", "cached"), help="of dpo")
    args = parser.parse_args()
    answer = ppo_worker.answering()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    datasets.disable_progress_bars()
    torch.set_num_threads(args.shape["threads"])
    options = {"reference": args.reference} if args.reference else {}
    library = importlib.import_module(args.impl)
    with tempfile.TemporaryDirectory() as folder:
        side = SIDES[args.training](library, args.shape, folder, **options)
        answer({"ready": ppo_worker.versions(args.impl, "copy")})
        commands = {"check": side.check, "memory": side.memory, "epoch": side.epoch}
        ppo_worker.serve(answer, commands)


if __name__ == "__main__":
    main()
