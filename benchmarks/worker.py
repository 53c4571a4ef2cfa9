"""One side of a comparison, in a process and an environment of its own.

`Worker` starts this file as a script, with fastrl's interpreter or with the peer's: a peer's
environment has neither fastrl nor this package, so that nothing of either is imported here but on
request. All libraries have the same surface as far as a side needs it, and run the same lines.

The script speaks JSON, one object a line: {"ready": versions} or {"absent": why}, and then an
answer to each {"command": name} that it reads; the methods of a side are its commands.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import copy
import dataclasses
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import types
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

PAD, EOS = 0, 1  # the only special tokens
IGNORED = -100
OURS = ("fastrl", "eager", "float64")  # implementations in this source tree
ROOT = Path(__file__).resolve().parent.parent


# --- the other end -------------------------------------------------------------------------------


class WorkerError(RuntimeError):
    """A worker ended instead of answering."""


class Absent(RuntimeError):
    """A side cannot have in its environment what it was asked for."""


class Worker:
    """A side in a process of its own; idle, it waits on its input and costs nothing.

    Args:
        python: the interpreter.
        implementation: what it drives: one of `LIBRARIES`.
        kind: of its side: one of `SIDES`.
        shape: sizes of the model and the data.
        device: ``cpu`` hides GPUs from it.
        options: of its side, further ones.
    """

    def __init__(
        self,
        python: Path,
        implementation: str,
        kind: str,
        shape: dict[str, Any],
        device: str = "auto",
        **options: str,
    ) -> None:
        self.implementation = implementation
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__
        words = [implementation, kind, json.dumps(shape), json.dumps(options)]
        self.process = subprocess.Popen(
            [python, __file__, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment(implementation, device),
        )

    def ready(self) -> dict[str, str]:
        """Waits for the side; the versions it runs on.

        Raises:
            Absent: its environment lacks something.
        """
        answer = self._answer()
        if "absent" in answer:
            raise Absent(f"{self.implementation}: {answer['absent']}")
        return answer["ready"]

    def ask(self, command: str) -> dict[str, Any]:
        """Sends a command and waits for its answer."""
        with contextlib.suppress(BrokenPipeError):  # it ended: _answer says how
            print(json.dumps({"command": command}), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        self.process.wait()
        self.log.seek(0)
        raise WorkerError(f"the {self.implementation} worker ended:\n{self.log.read()[-4000:]}")

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.process.stdin.close()
        if error is not None:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.log.close()


def environment(implementation: str, device: str = "auto") -> dict[str, str]:
    """A worker's environment: ours find this source tree, a peer's finds nothing of it."""
    found = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    found |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    found["PYTHONSAFEPATH"] = "1"  # else the worker's folder hides packages of equal names
    if implementation in OURS:
        sources = (ROOT, ROOT / "kernels" / "torch-ext")
        found["PYTHONPATH"] = os.pathsep.join(map(str, sources))
    if device == "cpu":
        found["CUDA_VISIBLE_DEVICES"] = ""  # accelerate takes a GPU where it sees one
    return found


@contextlib.contextmanager
def pair(
    peer: str, python: Path, kind: str, shape: dict[str, Any], device: str, **options: str
) -> Iterator[dict[str, Worker]]:
    """Fastrl's side and the peer's, once both are ready; `versions` of each are theirs."""
    sides = {"fastrl": (Path(sys.executable), "fastrl"), peer: (python, peer.split("==")[0])}
    with contextlib.ExitStack() as stack:
        workers = {
            name: stack.enter_context(Worker(path, library, kind, shape, device, **options))
            for name, (path, library) in sides.items()
        }
        for worker in workers.values():
            worker.versions = worker.ready()
        yield workers


# --- models and data, which depend on nothing but the shape --------------------------------------


@dataclasses.dataclass(frozen=True)
class Model:
    """A model's sizes; the weights are random."""

    name: str
    family: str  # gpt2 or qwen2
    layers: int
    width: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    context: int
    dtype: str = "bf16"
    tied: bool = True  # the head is the embeddings' table


SMALL = Model("GPT-2 4×256", "gpt2", 4, 256, 4, 4, 1024, 50257, 256, "fp32")
GPT2 = Model("GPT-2 124M", "gpt2", 12, 768, 12, 12, 3072, 50257, 1024)
QWEN = Model("Qwen2.5 0.5B", "qwen2", 24, 896, 14, 2, 4864, 151936, 1024)
TOY = Model("toy GPT-2", "gpt2", 2, 32, 4, 4, 128, 503, 128, "fp32")
TOY_QWEN = Model("toy Qwen2", "qwen2", 2, 32, 4, 2, 96, 503, 128, "bf16")


def described(model: dict[str, Any]) -> str:
    """`GPT-2 of 4 layers, width 256, 4 heads, vocabulary 50257`."""
    grouped = model["kv_heads"] != model["heads"]
    keys = f" ({model['kv_heads']} of keys and values)" if grouped else ""
    family = {"gpt2": "GPT-2", "qwen2": "Qwen2"}[model["family"]]
    return (
        f"{family} of {model['layers']} layers, width {model['width']}, {model['heads']} "
        f"heads{keys}, vocabulary {model['vocabulary']}"
    )


def config_of(model: dict[str, Any], positions: int = 0, end: int | None = EOS) -> Any:
    """transformers' configuration, without dropout, which sides would draw differently.

    Args:
        positions: at least; the model's own context where that is more.
        end: the end-of-sequence token. EOS is the tokenizer's too, so that generation which is to
            make a certain number of tokens leaves it out.
    """
    from transformers import GPT2Config, Qwen2Config

    positions = max(model["context"], positions)
    common = {
        "vocab_size": model["vocabulary"],
        "tie_word_embeddings": model["tied"],
        "bos_token_id": end,
        "eos_token_id": end,
    }
    if end is None:
        common["pad_token_id"] = None
    if model["family"] == "gpt2":
        return GPT2Config(
            n_layer=model["layers"],
            n_embd=model["width"],
            n_head=model["heads"],
            n_inner=model["intermediate"],
            n_positions=positions,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **common,
        )
    return Qwen2Config(
        num_hidden_layers=model["layers"],
        hidden_size=model["width"],
        num_attention_heads=model["heads"],
        num_key_value_heads=model["kv_heads"],
        intermediate_size=model["intermediate"],
        max_position_embeddings=positions,
        **common,
    )


def model_of(shape: dict[str, Any], positions: int = 0) -> Any:
    """The model, in fp32, filled by rule."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config_of(shape, positions)).float()
    fill_by_rule(model)
    return model


@torch.no_grad()
def fill_by_rule(*modules: torch.nn.Module) -> None:
    """Weights drawn by parameter name, GPT-2's way: the same under every version of a library.

    Those of an adapter too, whose model therefore differs from its base at once.
    """
    for name, parameter in (named for module in modules for named in module.named_parameters()):
        rng = np.random.RandomState(zlib.crc32(name.encode()))
        noise = torch.from_numpy(rng.standard_normal(tuple(parameter.shape)).astype(np.float32))
        is_gain = parameter.dim() == 1 and name.endswith("weight")
        parameter.copy_(0.02 * noise + (1.0 if is_gain else 0.0))


def word_tokenizer(vocabulary: int = EOS + 1) -> Any:
    """Every number is a word, and its own id; without any, it knows how to pad and to end."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {"<pad>": PAD, "<eos>": EOS} | {str(i): i for i in range(EOS + 1, vocabulary)}
    core = Tokenizer(models.WordLevel(known, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


def words(ids: Sequence[int]) -> str:
    """Text that `word_tokenizer` makes these ids of."""
    return " ".join(map(str, ids))


def drawn(rng: np.random.RandomState, length: int, vocabulary: int) -> list[int]:
    """Words, whose ids are higher the rarer they are, log-uniformly: there is something to learn,
    and a step that is not taken shows in the losses."""
    ordinary = vocabulary - EOS - 1
    return (np.floor(ordinary ** rng.random_sample(length)).astype(int) + EOS).tolist()


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


def own_folder() -> str:
    """A folder that goes with the process."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, True)
    return folder


# --- PPO -----------------------------------------------------------------------------------------

# Of plain gradient descent, which moves each weight in proportion to its gradient, rounding too:
# about as far in two steps as Adam does at its default.
SGD_RATE = 1e-2
# Where `step` says what it spent: our phases, and the timers that make them up in both libraries.
TIMERS = {
    "old and reference scores": ("time/ppo/forward_pass",),
    "rewards, advantages": ("time/ppo/compute_rewards", "time/ppo/compute_advantages"),
    "update": ("time/ppo/optimize_step",),
    "statistics": ("time/ppo/calc_stats",),
}


class PPOSide:
    """A PPO trainer on given weights and queries.

    Without a `ref_model` both libraries make the reference themselves: of a PEFT model its base,
    with `num_shared_layers` a copy above frozen layers, else a copy.
    """

    def __init__(
        self, library: Any, shape: dict[str, Any], reference: str = "copy", optimizer: str = "adam"
    ) -> None:
        self.shape = shape
        self.rng = np.random.RandomState(0)
        # Both draw the same mini-batches: this is fastrl's shuffle, TRL's is numpy's global one.
        np.random.permutation = np.random.RandomState(0).permutation
        model = library.AutoModelForCausalLMWithValueHead.from_pretrained(
            model_of(shape, shape["query"] + shape["response"]),
            summary_dropout_prob=0.0,
            peft_config=lora(shape["family"]) if reference == "adapter" else None,
        )
        fill_by_rule(model.pretrained_model, model.v_head)
        precision = {} if shape["dtype"] == "fp32" else {"mixed_precision": shape["dtype"]}
        self.trainer = library.PPOTrainer(
            config=library.PPOConfig(
                batch_size=shape["batch"],
                mini_batch_size=shape["mini_batch"],
                ppo_epochs=shape["epochs"],
                seed=0,
                accelerator_kwargs=precision,  # bf16 is autocast over weights in fp32
                **kept(library, reference),
            ),
            model=model,
            tokenizer=word_tokenizer(),
            optimizer=descent(model) if optimizer == "sgd" else None,
            num_shared_layers=shape["layers"] // 2 if reference == "trunk" else None,
        )
        self.device = next(model.parameters()).device
        self.queries = self.random_tokens(shape["query"])

    def random_tokens(self, length: int) -> list[torch.Tensor]:
        """A batch of random token ids that are not special."""
        ids = self.rng.randint(1, self.shape["vocabulary"] - 1, (self.shape["batch"], length))
        return list(torch.from_numpy(ids).to(self.device))

    def random_scores(self) -> list[torch.Tensor]:
        """A standard normal score for each sample."""
        scores = torch.from_numpy(self.rng.standard_normal(self.shape["batch"]))
        return list(scores.float().to(self.device))

    def check(self) -> dict[str, Any]:
        """{"statistics": of two steps on given responses, of which the second sees what the first
        changed, "trained": {parameter that the optimizer has: its size}, "at rest": bytes}."""
        statistics = []
        for _ in range(2):
            responses = self.random_tokens(self.shape["response"])
            stats = self.trainer.step(self.queries, responses, self.random_scores())
            statistics.append({k: float(v) for k, v in stats.items() if is_compared(k, v)})
        del stats, responses
        return {"statistics": statistics, "trained": self.trained(), "at rest": self.at_rest()}

    def trained(self) -> dict[str, int]:
        """The parameters that the optimizer moves, by name, and how many numbers each holds."""
        groups = self.trainer.optimizer.param_groups
        chosen = {id(p) for group in groups for p in group["params"] if p.requires_grad}
        named = self.trainer.model.named_parameters()
        return {name: p.numel() for name, p in named if id(p) in chosen}

    def turn(self) -> dict[str, Any]:
        """{"seconds": of each phase of one iteration, "peak": bytes}: sample the responses, and
        step on them."""
        scores, length = self.random_scores(), self.shape["response"]
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        started = now(self.device)
        with self.autocast(), warnings.catch_warnings():
            # All responses are of one length, for which no library's draw is the policy's own.
            warnings.filterwarnings("ignore", message="generate: min_new_tokens")
            responses = self.trainer.generate(
                self.queries,
                batch_size=self.shape["batch"],
                return_prompt=False,
                **sampling(length),
            )
        generated = now(self.device)
        stats = self.trainer.step(self.queries, responses, scores)
        done = now(self.device)
        assert {len(response) for response in responses} == {length}
        seconds = {"iteration": done - started, "generate": generated - started}
        seconds |= {"step()": done - generated}
        seconds |= {phase: sum(stats[t] for t in timers) for phase, timers in TIMERS.items()}
        peak = torch.cuda.max_memory_allocated(self.device) if on_gpu else None
        return {"seconds": seconds, "peak": peak}

    def autocast(self) -> contextlib.AbstractContextManager:
        """For `generate`. TRL calls the model there past the forward that accelerate has wrapped,
        which would then run in fp32: what a user does who cares for speed is done for it, and for
        fastrl, which needs it not, alike."""
        if self.shape["dtype"] == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def at_rest(self) -> int | None:
        """Bytes that are allocated now: weights, the reference, Adam's state; None on a CPU, which
        keeps no count."""
        if self.device.type != "cuda":
            return None
        gc.collect()
        return torch.cuda.memory_allocated(self.device)


def now(device: torch.device) -> float:
    """The time at which everything asked of the device so far is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def sampling(length: int) -> dict[str, Any]:
    """From the whole softmax, responses of one length."""
    lengths = {"min_new_tokens": length, "max_new_tokens": length}
    return {**lengths, "do_sample": True, "top_k": 0, "top_p": 1.0, "pad_token_id": PAD}


def is_compared(key: str, value: Any) -> bool:
    """Whether both libraries must agree on this statistic: scalars of TRL's that are no timings."""
    return np.ndim(value) == 0 and key.startswith(("objective/", "ppo/", "tokens/"))


def kept(library: Any, reference: str) -> dict[str, Any]:
    """What the configuration says of the reference. TRL's cannot: it keeps a copy instead."""
    found: dict[str, Any] = {"init_kl_coef": 0.0} if reference == "none" else {}
    if library.__name__ == "fastrl" and reference in ("offload", "none"):
        found["reference"] = reference
    return found


def descent(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Gradient descent, for checks. Adam divides each gradient by its size: where that is small,
    its rounding moves a weight as far as a gradient does, and two right libraries drift apart."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=SGD_RATE)


def lora(family: str) -> Any:
    """Rank 8 on the attention's input projections."""
    from peft import LoraConfig

    is_gpt2 = family == "gpt2"
    return LoraConfig(
        r=8,
        target_modules=["c_attn"] if is_gpt2 else ["q_proj", "v_proj"],
        fan_in_fan_out=is_gpt2,  # its weights lie transposed
        task_type="CAUSAL_LM",
    )


# --- trainers on transformers' own ---------------------------------------------------------------

# Nothing but training, in fp32; all else, AdamW among it, is transformers' default on both sides.
SETTINGS = {
    "bf16": False,
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
    """A trainer whose epochs are timed; it wants a folder, and saves nothing there."""

    trainer: Any

    def __init__(self, library: Any, shape: dict[str, Any], **options: str) -> None:
        import datasets
        from transformers.utils import logging

        logging.set_verbosity_error()
        datasets.disable_progress_bars()
        arguments = {
            "output_dir": own_folder(),
            "per_device_train_batch_size": shape["batch"],
            "num_train_epochs": 1,
            "max_length": shape["longest"],
            "learning_rate": 1e-3,  # so that ten steps go somewhere
            **SETTINGS,
        }
        self.trainer = self.make(library, shape, model_of(shape), arguments, **options)

    def rewind(self) -> None:
        """Lets the trainer's next batch be the first; an epoch does so by itself."""

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
        """What the passes of a step take on top of weights and AdamW's state, and on top of
        gradients too: the most at a time, in bytes, on the order's first batch."""
        trainer, footprint = self.trainer, neighbour("harness").footprint
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
            ).peak
        trainer.model.zero_grad(set_to_none=True)
        return found

    def turn(self) -> dict[str, Any]:
        """{"seconds": of an epoch's steps: batches, passes, clipping and AdamW}."""
        return {"seconds": {"epoch": timed_train(self.trainer, "epoch")}}


def timed_train(trainer: Any, what: str) -> float:
    """Seconds of what `train()` does between the callbacks of an epoch or a step."""
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


class SFTSide(TrainerSide):
    """Supervised fine-tuning on texts."""

    def make(
        self, library: Any, shape: dict[str, Any], model: Any, arguments: dict[str, Any]
    ) -> Any:
        from datasets import Dataset

        # All tokens are learned but the first, which nothing predicts. Said here because, left to
        # itself, TRL divides a GPT-2's loss by the first tokens too (transformers knows that a loss
        # shifts labels from a class's name, and not from GPT2LMHeadModel's).
        rows = [{"input_ids": ids, "labels": [IGNORED, *ids[1:]]} for ids in texts(shape)]
        return library.SFTTrainer(
            model,
            library.SFTConfig(**arguments),
            train_dataset=Dataset.from_list(rows),
            processing_class=word_tokenizer(),
        )


BETA = 0.1  # of DPO


class DPOSide(TrainerSide):
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
        from datasets import Dataset

        tokenizer = word_tokenizer(shape["vocabulary"])
        if library.__name__ == "fastrl":
            alignment = importlib.import_module("fastrl.alignment")
            factory = alignment.BatchFactory(
                "offline-pairwise",
                Loader(pairs(shape), tokenizer),
                batch_size=shape["batch"],
                shuffle=False,
            )
            settings = alignment.AlignmentConfig(reference=reference, **arguments)
            return alignment.Trainer(model, settings, factory, alignment.DPO(beta=BETA))
        # Its trainer takes no tokens; it appends EOS by itself.
        rows = [
            {"prompt": words(p), "chosen": f" {words(c)}", "rejected": f" {words(r)}"}
            for p, c, r in pairs(shape)
        ]
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
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )

    def rewind(self) -> None:
        if hasattr(self.trainer, "factory"):  # fastrl's
            self.trainer.factory.skip(0)


class Loader:
    """Pairs as fastrl's batch factory takes them."""

    def __init__(self, found: list[tuple[list[int], ...]], tokenizer: Any) -> None:
        alignment = importlib.import_module("fastrl.alignment")
        self.tokenizer = tokenizer
        self.examples = [
            alignment.Example(
                words(prompt),
                tuple(prompt),
                tuple(alignment.Response(f" {words(ids)}", (*ids, EOS)) for ids in responses),
            )
            for prompt, *responses in found
        ]

    def as_kind(self, kind: Any) -> Loader:
        return self

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, i: int) -> Any:
        return self.examples[i]


# --- GRPO ----------------------------------------------------------------------------------------


class GRPOSide:
    """GRPO steps on prompts of one length: completions of one length are drawn, scored by the share
    of their ids that are even, and learned from once, with k3 to a copy as a part of the loss."""

    def __init__(self, library: Any, shape: dict[str, Any], optimizer: str = "adam") -> None:
        from transformers.utils import logging

        logging.set_verbosity_error()
        self.shape, self.tokenizer = shape, word_tokenizer(shape["vocabulary"])
        self.tokenizer.padding_side = "left"
        self.model = model_of(shape, shape["prompt"] + shape["completion"])
        self.before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        rng = np.random.RandomState(0)
        count = 8 * shape["batch"] // shape["group"]
        high = min(1000, shape["vocabulary"])
        self.prompts = rng.randint(EOS + 1, high, (count, shape["prompt"])).tolist()
        self.rng = rng
        self.optimizer = descent(self.model) if optimizer == "sgd" else None
        self.ours = library.__name__ == "fastrl"
        self.trainer = self.make_ours(library) if self.ours else self.make_trls(library)

    def make_ours(self, library: Any) -> Any:
        shape = self.shape
        return library.PPOTrainer(
            library.PPOConfig(
                batch_size=shape["batch"],
                mini_batch_size=shape["batch"],
                ppo_epochs=1,
                advantage="grpo",
                group_size=shape["group"],
                kl_in="loss",
                init_kl_coef=shape["beta"],
                adap_kl_ctrl=False,
                loss_aggregate="seq-mean-token-mean",
                learning_rate=1e-5,
                max_grad_norm=1.0,
            ),
            self.model,
            tokenizer=self.tokenizer,
            optimizer=self.optimizer,
        )

    def make_trls(self, library: Any) -> Any:
        from datasets import Dataset

        shape = self.shape
        folder = own_folder()

        # It copies only what it can load again by a name.
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        self.model.config._name_or_path = folder
        return library.GRPOTrainer(
            model=self.model,
            reward_funcs=lambda completion_ids, **_: list(map(even_share, completion_ids)),
            args=library.GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=shape["batch"],
                num_generations=shape["group"],
                max_completion_length=shape["completion"],
                temperature=1.0,
                beta=shape["beta"],
                num_iterations=1,
                loss_type="grpo",
                shuffle_dataset=False,
                max_steps=1,
                learning_rate=1e-5,
                generation_kwargs={"min_new_tokens": shape["completion"]},
                **SETTINGS,
            ),
            train_dataset=Dataset.from_dict({"prompt": list(map(words, self.prompts))}),
            processing_class=self.tokenizer,
            optimizers=(self.optimizer, None),
        )

    def check(self) -> dict[str, Any]:
        """{"moved": how far, in norm, two steps of gradient descent on given completions move each
        parameter}."""
        shape = self.shape
        for _ in range(2):
            size = (shape["batch"], shape["completion"])
            given = self.rng.randint(EOS + 1, shape["vocabulary"], size).tolist()
            if self.ours:
                self.learn(self.queries(), list(map(torch.tensor, given)))
            else:
                drawn_by = self.trainer._generate_single_turn
                self.trainer._generate_single_turn = lambda *_, given=given, **__: (given, None)
                self.trainer.train()
                self.trainer._generate_single_turn = drawn_by
        moved = {
            name: float((p.detach().cpu() - self.before[name]).norm())
            for name, p in self.model.named_parameters()
        }
        return {"moved": moved}

    def queries(self) -> list[torch.Tensor]:
        """The first prompts, each as often as there are completions of it."""
        group = self.shape["group"]
        chosen = self.prompts[: self.shape["batch"] // group]
        return [torch.tensor(ids) for ids in chosen for _ in range(group)]

    def learn(self, queries: list[torch.Tensor], responses: list[torch.Tensor]) -> None:
        """Scores responses and steps on them."""
        scores = [torch.tensor(even_share(ids.tolist())) for ids in responses]
        self.trainer.step(queries, responses, scores)

    def step(self) -> None:
        """Draws completions and learns from them, as fastrl has it."""
        length, queries = self.shape["completion"], self.queries()
        responses = self.trainer.generate(
            queries,
            batch_size=len(queries),
            return_prompt=False,
            **sampling(length),
        )
        self.learn(queries, responses)

    def turn(self) -> dict[str, Any]:
        """{"seconds": of a step}."""
        if not self.ours:
            return {"seconds": {"step": timed_train(self.trainer, "step")}}
        device = next(self.model.parameters()).device
        started = now(device)
        self.step()
        return {"seconds": {"step": now(device) - started}}

    def memory(self) -> dict[str, Any]:
        """{"peak": the most bytes that a step takes beyond weights, the reference's and Adam's}."""
        footprint = neighbour("harness").footprint
        device = next(self.model.parameters()).device
        step = self.step if self.ours else self.trainer.train
        return {"peak": footprint(step, lambda _: (), device).peak}


def even_share(ids: Sequence[int]) -> float:
    """A reward that costs nothing."""
    return sum(i % 2 == 0 for i in ids) / max(len(ids), 1)


# --- the script ----------------------------------------------------------------------------------

LIBRARIES = {
    "fastrl": "fastrl",
    "trl": "trl",
    "eager": "benchmarks.eager_ppo",
    "float64": "benchmarks.eager_ppo",
}
SIDES = {"ppo": PPOSide, "sft": SFTSide, "dpo": DPOSide, "grpo": GRPOSide}


def neighbour(name: str) -> types.ModuleType:
    """A file of this folder as a module, in an environment that does not have this package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def library_of(implementation: str) -> Any:
    """What has the trainers; the float64 PPO is the eager one's other half."""
    library = importlib.import_module(LIBRARIES[implementation])
    return library.FLOAT64 if implementation == "float64" else library


def why_absent(options: dict[str, str]) -> str | None:
    """What this environment lacks for what is asked for."""
    if options.get("reference") == "adapter":
        try:
            importlib.import_module("peft")
        except Exception as error:  # of its dependencies too, whatever they raise
            return f"peft cannot be imported ({type(error).__name__}: {error})"
    return None


def versions(implementation: str, options: dict[str, str]) -> dict[str, str]:
    """The versions of what decides this side's speed."""
    found = {"python": sys.version.split()[0]}
    own = {"fastrl": ["fastrl-lm"], "trl": ["trl"]}.get(implementation, [])
    peft = ["peft"] if options.get("reference") == "adapter" else []
    for name in [*own, "torch", "transformers", "accelerate", *peft]:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # a source tree on PYTHONPATH
            found[name] = "source"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("implementation", choices=tuple(LIBRARIES))
    parser.add_argument("kind", choices=tuple(SIDES))
    parser.add_argument("shape", type=json.loads)
    parser.add_argument("options", type=json.loads)
    args = parser.parse_args()
    # Answers have stdout to themselves: what libraries print goes where their errors go.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    warnings.simplefilter("ignore")
    torch.set_num_threads(args.shape["threads"])
    torch.manual_seed(0)
    if why := why_absent(args.options):
        answer({"absent": why})
        return
    side = SIDES[args.kind](library_of(args.implementation), args.shape, **args.options)
    answer({"ready": versions(args.implementation, args.options)})
    for line in sys.stdin:
        answer(getattr(side, json.loads(line)["command"])())


if __name__ == "__main__":
    main()
