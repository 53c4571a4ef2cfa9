"""What a step of PPO costs by the way its reference is kept.

A gate comes first: reference log-probs equal to a separate full copy's, after the policy has
moved. Then trainers take turns, one whole step at a time. Their own timers give the seconds of
scoring the batch (old and reference log-probs) and of an epoch of the update.
"""

from __future__ import annotations

import dataclasses
import warnings
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks import models, results
from benchmarks.cases import Case, Goal
from benchmarks.harness import Measurement, Run, own_accelerate
from benchmarks.memory import footprint, free, storage_bytes
from benchmarks.models import Model, build, lora, plain_logprobs, word_tokenizer, wrong_logprobs
from benchmarks.timing import Seconds, Side
from fastrl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

HALF = "trunk 1/2"
CHECKPOINTING = ", checkpointing"  # ends the names of sides with activation checkpointing
FIRST_TOKEN = 2  # after padding and end of sequence
# The phases of step(), by its own timers; the trunk's pass over a batch is part of the scores.
TIMERS = {"update": "time/ppo/optimize_step", "scores": "time/ppo/forward_pass"}
MOVED = 0.02  # standard deviation, that of initial weights


class Mode(NamedTuple):
    """How a trainer keeps its reference."""

    reference: str  # PPOConfig's
    share: Fraction | None = None  # of the layers, in a trunk

    def shared_layers(self, layers: int) -> int | None:
        """How many of a model's layers policy and reference share; None: it is no trunk."""
        return None if self.share is None else round(self.share * layers)


COPY = "copy"
MODES = {
    COPY: Mode("copy"),
    "trunk 1/4": Mode("trunk", Fraction(1, 4)),
    HALF: Mode("trunk", Fraction(1, 2)),
    "trunk 3/4": Mode("trunk", Fraction(3, 4)),
    "adapter": Mode("adapter"),
    "offload": Mode("offload"),
    "none": Mode("none"),
}
CHECKPOINTED = (COPY, HALF)  # these are also measured with activation checkpointing


@dataclasses.dataclass(frozen=True)
class RefModelJob:
    """A model, and the batch that each trainer steps on.

    Lengths of prompts and responses are uniform. Weights are fp32; `precision` is that of forwards.
    """

    model: Model
    precision: str = "fp32"  # or bf16, by autocast
    samples: int = 16
    mini_batch: int = 4
    prompt: tuple[int, int] = (8, 32)  # tokens, from and to
    response: tuple[int, int] = (16, 64)

    @property
    def label(self) -> str:
        head = "tied head" if self.model.tied else "untied head"
        return f"vocabulary {self.model.vocabulary}, {head}, {self.precision}"

    @property
    def what(self) -> str:
        """A step in words."""
        prompt, response = (f"{low} to {high}" for low, high in (self.prompt, self.response))
        return (
            f"{self.samples} samples with prompts of {prompt} tokens and responses of {response}, "
            f"one epoch in mini-batches of {self.mini_batch}"
        )


class Samples(NamedTuple):
    """A batch for `PPOTrainer.step`, on the host."""

    queries: list[Tensor]
    responses: list[Tensor]
    scores: list[Tensor]


_DEEP = Model("GPT-2 12×256", "gpt2", 12, 256, 4, 4, 1024, 8192, 128, "fp32", tied=False)
_WIDE_HEAD = Model("GPT-2 8×384", "gpt2", 8, 384, 6, 6, 1536, 50257, 128, "fp32")
_TOY = Model("tiny", "gpt2", 4, 16, 2, 2, 32, 101, 64, "fp32", tied=False)


def cases(run: Run) -> list[Case]:
    """The cases of a kind of device."""
    if run.toy:
        jobs = [RefModelJob(_TOY, samples=4, mini_batch=2, prompt=(2, 4), response=(3, 9))]
    elif run.device.type == "cpu":
        jobs = [RefModelJob(_DEEP), RefModelJob(_WIDE_HEAD)]
    else:  # short batches would measure how fast kernels are launched
        large = (
            dataclasses.replace(models.GPT2, dtype="fp32", tied=False),
            dataclasses.replace(models.QWEN, dtype="fp32"),
        )
        jobs = [RefModelJob(model, "bf16", 64, 8, (32, 128), (64, 256)) for model in large]
    goal = Goal("speedup", 1.3, side=HALF, against=COPY, phase="update")
    return [
        Case(
            "ref_model",
            job.model.name,
            job.label,
            job.what,
            job,
            goals=(goal,) if job.model is _DEEP else (),
            seconds=1.0 if run.toy else 120.0,
        )
        for job in jobs
    ]


def samples(job: RefModelJob) -> Samples:
    """The job's batch: the same every time."""
    rng = np.random.RandomState(0)

    def tokens(low: int, high: int) -> Tensor:
        length = rng.randint(low, high + 1)
        return torch.from_numpy(rng.randint(FIRST_TOKEN, job.model.vocabulary, length))

    queries = [tokens(*job.prompt) for _ in range(job.samples)]
    responses = [tokens(*job.response) for _ in range(job.samples)]
    scores = list(torch.from_numpy(rng.standard_normal(job.samples)).float())
    return Samples(queries, responses, scores)


@dataclasses.dataclass
class Stepping:
    """A trainer that steps on the same batch again and again."""

    trainer: PPOTrainer
    data: Samples
    checkpointing: bool = False

    def step(self) -> Seconds:
        """Seconds of the phases in `TIMERS`."""
        # The trainer's own setting: it is read at every update.
        self.trainer.config.gradient_checkpointing = self.checkpointing
        with warnings.catch_warnings():
            # The responses were drawn at random, not by the policy.
            warnings.filterwarnings("ignore", message="the KL estimate is negative")
            stats = self.trainer.step(*self.data)
        return {phase: stats[timer] for phase, timer in TIMERS.items()}

    def reference_logprobs(self) -> Tensor:
        """Of all response tokens, [N], sample by sample, on the host."""
        batch = self.trainer.make_batch(self.data.queries, self.data.responses, None)
        model = self.trainer.model
        training = model.training
        model.eval()
        try:
            return self.trainer.scorer(batch).ref_logprobs[batch.mask].cpu()
        finally:
            model.train(training)

    def observe(self) -> tuple[dict[str, float], int]:
        """Bytes that are kept and needed, by a further step, and the number of samples whose trunk
        activations were not kept.

        Weights are those of policy and reference, each storage counted once; the peak is the most
        that is live during an update beyond what is kept.
        """
        kept, run_again = self._kept(), 0
        update, device = self.trainer.update, torch.device(self.trainer.current_device)

        def watched(batch: Any, *given: Any) -> Any:
            nonlocal run_again
            if batch.tokens.boundaries is not None:
                kept["trunk activations"] = storage_bytes(batch.tokens.boundaries.stored())
                run_again = len(batch.tokens.boundaries.missing())
            done: list[Any] = []
            kept["peak"] = footprint(
                lambda: done.append(update(batch, *given)), lambda _: (), device
            )
            return done[0]

        self.trainer.update = watched  # type: ignore[assignment]
        try:
            self.step()
        finally:
            self.trainer.update = update
        return kept, run_again

    def _kept(self) -> dict[str, float]:
        trained = [self.trainer.model, self.trainer.ref_model]
        weights = [p for model in trained if model is not None for p in model.parameters()]
        here = torch.device(self.trainer.current_device).type
        states = [x for s in self.trainer.optimizer.state.values() for x in s.values()]
        on_host = storage_bytes(p for p in weights if p.device.type != here)
        found = {
            "weights": storage_bytes(p for p in weights if p.device.type == here),
            "Adam's state": storage_bytes(x for x in states if torch.is_tensor(x)),
        }
        return found | ({"weights on the host": on_host} if on_host else {})


def trainer(job: RefModelJob, mode: Mode, device: torch.device) -> PPOTrainer:
    """A trainer with a policy of its own, whose weights are the same in every mode.

    Raises:
        ImportError: an adapter, without PEFT.
    """
    config = PPOConfig(
        batch_size=job.samples,
        mini_batch_size=job.mini_batch,
        ppo_epochs=1,
        old_logprobs="recompute",
        reference=mode.reference,
        num_shared_layers=mode.shared_layers(job.model.layers),
        init_kl_coef=0.0 if mode.reference == "none" else 0.2,
        accelerator_kwargs={
            "cpu": device.type == "cpu",
            "mixed_precision": "bf16" if job.precision == "bf16" else "no",
        },
    )
    adapter = None
    if mode.reference == "adapter":
        # Of attention alone: GPT-2's c_proj would be that of its MLP too.
        qwen2 = ["q_proj", "k_proj", "v_proj", "o_proj"]
        adapter = lora(job.model.family, ["attn.c_attn", "attn.c_proj"], qwen2)
    base = build(job.model, device)
    # The notes mention a tied head that a trunk freezes; PEFT warns of others' deprecations.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLMWithValueHead.from_pretrained(
            base, peft_config=adapter, summary_dropout_prob=0.0
        )
        return PPOTrainer(config, model, tokenizer=word_tokenizer())


def note(job: RefModelJob, mode: Mode) -> str:
    """What a mode means for the job's model, in words."""
    shared = mode.shared_layers(job.model.layers)
    if shared is not None:
        head = ", and the head, which is tied to the embeddings" if job.model.tied else ""
        return f"{shared} of {job.model.layers} layers are shared and frozen{head}"
    return "LoRA of rank 8 on the attention, all else frozen" if mode.reference == "adapter" else ""


def judge(job: RefModelJob, device: torch.device) -> tuple[dict[str, float], str | None]:
    """The largest |Δ log-prob| in fp32 of each mode beside a separate full copy, and why the gate
    fails, there or in the job's own precision.

    Each trainer takes a step first, and its policy is then moved much further: weights that the
    reference shares with what is trained would show.
    """
    exact: dict[str, float] = {}
    for precision in dict.fromkeys(("fp32", job.precision)):
        found, red = _judge(dataclasses.replace(job, precision=precision), device)
        exact = exact or found
        if red:
            return exact, red
    return exact, None


def _judge(job: RefModelJob, device: torch.device) -> tuple[dict[str, float], str | None]:
    data = samples(job)
    expected = copy_logprobs(job, data, device)
    largest: dict[str, float] = {}
    with own_accelerate():
        for name, mode in MODES.items():
            try:
                side = Stepping(trainer(job, mode, device), data)
            except ImportError:  # it will be said where the side is made for the case
                continue
            wrong = another_mode(side.trainer, mode, job.model.layers)
            if not wrong:
                side.step()
                move(side.trainer.model)
                found = side.reference_logprobs()
                wrong = differing(found, expected, mode, job.precision)
                if mode.reference != "none":
                    largest[name] = (found - expected).abs().max().item()
            if wrong:
                return largest, f"{name}: {wrong}"
            del side
            free(device)
    return largest, None


def copy_logprobs(job: RefModelJob, data: Samples, device: torch.device) -> Tensor:
    """Log-probs of a separate copy for all response tokens, [N], each sample alone."""
    copy = build(job.model, device)
    with torch.autocast(device.type, torch.bfloat16, enabled=job.precision == "bf16"):
        both = zip(data.queries, data.responses, strict=True)
        return torch.cat([plain_logprobs(copy, *sample) for sample in both])


@torch.no_grad()
def move(model: torch.nn.Module) -> None:
    """Adds noise to all that is trained: a step of a small learning rate may not show in fp32."""
    drawn = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            noise = MOVED * torch.randn(parameter.shape, generator=drawn)
            parameter.add_(noise.to(parameter.device, parameter.dtype))


def another_mode(trainer: PPOTrainer, mode: Mode, layers: int) -> str | None:
    """What the trainer keeps in place of what was asked for, None where it does as asked."""
    reference, trunk = trainer.reference, trainer.model.trunk
    if reference.mode != mode.reference:
        return f"the reference is kept as {reference.mode} ({reference.why})"
    shared = trunk.layers if trunk is not None else None
    if shared != mode.shared_layers(layers):
        return f"it shares {shared} layers, not {mode.shared_layers(layers)}"
    return None


def differing(found: Tensor, expected: Tensor, mode: Mode, precision: str) -> str | None:
    """What is wrong with reference log-probs."""
    if mode.reference == "none":
        there = int(found.isfinite().sum())
        return f"{there} log-probs, though there is no reference" if there else None
    wrong = wrong_logprobs(found, expected, precision)
    return f"reference {wrong}" if wrong else None


def test_step(measurement: Measurement, case: Case, run: Run) -> None:
    packages = ("torch", "triton", "transformers", "accelerate", "peft")
    run.result("ref_model")["versions"] = results.versions(*packages)
    measure(measurement, case.of)


def measure(measurement: Measurement, job: RefModelJob) -> None:
    """Gate, an observed step of each trainer, then turns, which are compared with the copy's."""
    device, data = measurement.run.device, samples(job)
    differences, red = judge(job, device)
    if red:
        measurement.refuse(red)
    sides: dict[str, Side] = {}
    with own_accelerate():
        for name, mode in MODES.items():
            try:
                made = trainer(job, mode, device)
            except ImportError as error:
                measurement.absent(name, f"not installed ({error})")
                continue
            for checkpointing in (False, True) if name in CHECKPOINTED else (False,):
                stepping = Stepping(made, data, checkpointing)
                stepping.step()  # uncounted
                memory, lost = stepping.observe()
                side_name = name + CHECKPOINTING * checkpointing
                if lost:
                    measurement.refuse(f"{side_name}: activations of {lost} samples were not kept")
                facts = {"largest |Δ|": differences[name]} if name in differences else {}
                words = "" if checkpointing else note(job, mode)
                sides[side_name] = Side(stepping.step, words, memory=memory, facts=facts)
        measurement.measure(sides, 9, baseline=COPY)
