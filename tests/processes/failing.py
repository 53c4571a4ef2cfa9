"""Runs of several processes in which something goes wrong."""

import contextlib
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fastrl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, SFTConfig, SFTTrainer
from fastrl.alignment import AlignmentConfig, Trainer
from fastrl.data import columns
from fastrl.rollout import SamplingParams
from fastrl.run import checkpoints, transformers_files
from fastrl.run.callbacks import TrainCallback
from fastrl.run.checkpoints import Checkpoints, find_checkpoint
from fastrl.run.launcher import launched_accelerator
from fastrl.run.processes import PeerFailed, processes_of
from tests import tiny_models
from tests.alignment.conftest import LikesHigh, examples, make_factory
from tests.golden import tiny
from tests.patience import LONG
from tests.processes.jobs import PROMPTS, make_trainer, reward, sizes_of_steps, train
from tests.processes.launch import keep
from tests.trainers.conftest import texts


class InTheThirdCall:
    """The reward function, whose third call does something else before: an action for each process;
    those for which there is none do nothing."""

    __name__ = "reward"

    def __init__(self, *actions: Callable[[], object]) -> None:
        self.calls, self.actions = 0, actions

    def __call__(self, completion_ids: list[list[int]], **columns: Any) -> list[float]:
        self.calls += 1
        if self.calls == 3:
            own = int(os.environ["RANK"])
            for action in self.actions[own : own + 1]:
                action()
        return reward(completion_ids, **columns)


def find(folder: Path) -> None:
    """Looks for the newest checkpoint that is whole; keeps which one that is, and how many bytes
    this process has read for that."""
    processes, read = processes_of(launched_accelerator()), list[int]()

    def noted(path: Path) -> str:
        read.append(path.stat().st_size)
        return sha256(path)

    sha256, checkpoints._sha256 = checkpoints._sha256, noted
    for _ in range(2):  # a command and its trainer
        found = find_checkpoint(True, Checkpoints(folder), processes=processes)
    assert found is not None
    keep({"found": found.name, "bytes": sum(read)}, "find", folder)


def _wait() -> None:
    time.sleep(LONG)


def _raise() -> None:
    raise LookupError("the judge is gone")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class _FailsInMain(TrainCallback):
    """A callback whose second call raises an exception in the main process alone."""

    def on_step(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        if step == 2 and trainer.processes.is_main:
            raise LookupError("the disk of the notes is full")


def hangs(folder: Path) -> None:
    """In process 1 a function does not return, whatever signals it gets."""

    def hang() -> None:
        end = time.time() + LONG
        while time.time() < end:
            with contextlib.suppress(BaseException):
                time.sleep(LONG)

    # Ten times what the others wait for it in a step, where the machine is busy.
    train(folder, InTheThirdCall(_nothing, hang), make_trainer(ddp_timeout=40))


def _nothing() -> None:
    pass


@contextlib.contextmanager
def _kept(messages: list[str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        messages.append(f"{type(error).__name__}: {error}")
    else:
        messages.append("")


def differs(folder: Path) -> None:
    """Writes what each process says of settings, models and samples that do not fit together."""
    rank, said = int(os.environ["RANK"]), list[str]()
    trainer = make_trainer()
    with _kept(said):
        make_trainer(learning_rate=0.1 if rank else 0.2)
    with _kept(said):
        torch.manual_seed(rank)
        policy = tiny_models.policy("gpt2")
        policy.pretrained_model.transformer.h[0].mlp.c_fc.weight.data += rank
        make_trainer(policy)
    with _kept(said):
        train(folder, trainer=trainer, prompts=PROMPTS[rank:])
    with _kept(said):
        train(folder, trainer=trainer, steps=4 + rank)
    with _kept(said):
        train(folder, trainer=trainer, output=None if rank else folder)
    with _kept(said):
        train(folder, trainer=trainer, eval_prompts=PROMPTS[:1])
    ids = [torch.tensor([3, 4])] * (0 if rank else trainer.config.batch_size)
    with _kept(said):
        trainer.step(ids, ids, [torch.tensor(1.0)] * len(ids))
    (folder / f"{rank}.json").write_text(json.dumps(said))


def unseeded(folder: Path) -> None:
    """Writes how long processes wait for each other, by transformers' arguments, and which value
    heads trainers begin with, of which each process has made its own."""
    from torch.distributed import distributed_c10d

    own = int(os.environ["RANK"])
    said: dict[str, Any] = {}
    args = SFTConfig(str(folder), ddp_timeout=77, use_cpu=True, report_to="none")
    SFTTrainer(
        tiny_models.language_model(), args, train_dataset=texts(), processing_class=tiny.tokenizer()
    )
    group = distributed_c10d._get_default_group()
    said["timeout"] = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    for kind in ("plain", "with ref_model", "with an adapter"):
        torch.manual_seed(own)
        model = tiny_models.language_model("gpt2")
        adapter = tiny_models.lora() if kind == "with an adapter" else None
        policy = AutoModelForCausalLMWithValueHead.from_pretrained(model, peft_config=adapter)
        other = None
        if kind == "with ref_model":
            other = AutoModelForCausalLMWithValueHead(tiny_models.language_model("gpt2"))
        PPOTrainer(PPOConfig(**sizes_of_steps()), policy, other, tiny.tokenizer())
        trained = {k: p for k, p in policy.named_parameters() if "v_head" in k or "lora_" in k}
        said[kind] = {k: p.sum().item() for k, p in trained.items()}
    torch.manual_seed(own)
    policy = AutoModelForCausalLMWithValueHead(tiny_models.language_model("gpt2"))
    data = examples(columns.PROMPTS, 8)
    params = SamplingParams(max_new_tokens=3)
    factory = make_factory(
        "reinforcement-learning", data, batch_size=8, annotator=LikesHigh(), params=params
    )
    settings = {"use_cpu": True, "report_to": "none", "reference": "copy"}
    aligned = Trainer(policy, AlignmentConfig(str(folder), **settings), factory, "ppo")
    said["aligned"] = {
        "reference": aligned.learner.reference_identity(),
        "head": policy.v_head.summary.weight.sum().item(),
    }
    (folder / f"{own}.json").write_text(json.dumps(said))


def _slow(completion_ids: list[list[int]], **_: Any) -> list[float]:
    time.sleep(0.7)  # longer than from one look for news to the next
    return reward(completion_ids)


def begins_anew(folder: Path) -> None:
    """After a run that has failed, another trainer's in the same processes."""
    with contextlib.suppress(LookupError, PeerFailed):
        train(folder.with_name("failed"), InTheThirdCall(_wait, _raise))
    train(folder, _slow, steps=1)


def cannot_write(folder: Path) -> None:
    """Supervised training, in which the disk of process 1 is full at its third checkpoint."""
    trainer = SFTTrainer(
        tiny_models.language_model(),
        SFTConfig(
            str(folder), use_cpu=True, report_to="none", max_steps=4, save_strategy="steps",
            save_steps=1, per_device_train_batch_size=2,
        ),
        train_dataset=texts(8),
        processing_class=tiny.tokenizer(),
    )  # fmt: skip
    save = transformers_files.save_tree

    def full(*given: Any) -> None:
        if trainer.state.global_step == 3 and trainer.processes.index == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(*given)

    transformers_files.save_tree = full
    trainer.train()


JOBS: dict[str, Callable[[Path], object]] = {
    # The others are waiting for something that takes long.
    "raises": lambda folder: train(folder, InTheThirdCall(_wait, _raise)),
    "exits": lambda folder: train(folder, InTheThirdCall(_wait, sys.exit)),
    "dies": lambda folder: train(folder, InTheThirdCall(_wait, _die)),
    "main dies": lambda folder: train(folder, InTheThirdCall(_die, _wait), save_every=1),
    "is stopped": lambda folder: train(folder, InTheThirdCall(_wait, _terminate)),
    "hangs": hangs,
    "raises in a callback": lambda folder: train(folder, callbacks=[_FailsInMain()]),
    "cannot write": cannot_write,
    "begins anew": begins_anew,
    "goes on": lambda folder: train(folder, resume=True),
    "differs": differs,
    "unseeded": unseeded,
}


def fail(name: str, folder: Path) -> None:
    """Runs one of them."""
    JOBS[name](folder)
