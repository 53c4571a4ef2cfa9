"""`python -m benchmarks support`: learning from what top-p and top-k leave of the vocabulary.

It is kept as a result file, drawn, and written into `docs/policy_support.md`; `report` does these
two anew.

A model of GPT-2's size and vocabulary learns a made-up language by SFT. From there GRPO raises the
share of words that begin with one of ``REWARDED``, with responses that are drawn with top-p or with
top-k: with log-probs over the whole vocabulary (``policy_support="full"``) and over the sets that
tokens were drawn from ("sampled"). What comes of it is judged by the plain code of `judged`, which
is the same for both.

And for samples of the model after SFT, the ratio of a trainer's probabilities to the sampler's, as
TRL's pull request 7269 shows it for vLLM. The trainer's are those of a forward of transformers in
float64.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
import statistics
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback

from benchmarks import results
from benchmarks.experiments import add_places
from benchmarks.support_figures import NAME, write

SEEDS = (0, 1, 2)
SUPPORTS = ("full", "sampled")
CUTS: dict[str, dict[str, float]] = {"top_p=0.8": {"top_p": 0.8}, "top_k=20": {"top_k": 20}}
NO_CUT = "neither"
# What the sampler's log-probs are over, and the trainer's.
PAIRS = (("sampled", "full"), ("sampled", "sampled"), ("full", "full"))
VOCABULARY, SPECIAL = 50257, ("<pad>", "<eos>", "<unk>")
WIDTH, LAYERS, HEADS = 768, 12, 12  # as GPT-2's
CONSONANTS, VOWELS, REWARDED = "bdfgklmnprstvz", "aeiou", "bdfg"
# Of each class of words, how steeply the probability of a word falls with its rank: there are
# positions where nearly all of it is the likeliest word's, as in texts, and flat ones.
EXPONENTS = (1.1, 3.0, 1.3, 2.0, 1.2, 4.0, 1.5, 1.2)
SENTENCE, OPENING, LENGTH = 24, 8, 16  # words of a sentence, of a prompt; tokens of a response
PROMPTS, HELD_OUT = 512, 32
SFT_STEPS, SFT_BATCH, SFT_RATE = 300, 32, 6e-4
STEPS, EVERY, RATE = 20, 5, 5e-5  # of GRPO; how often it is judged
BATCH, GROUP = 32, 8
MEASURED = 4  # responses to each held-out prompt; distributions are judged at the first one's
NEAR = 0.9, 1.1  # ratios outside of these are counted
QUIET = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "bf16": False}
QUIET |= {"logging_strategy": "no", "eval_strategy": "no", "gradient_checkpointing": False}


class Language:
    """Sentences of made-up words.

    A word has a class, which mostly decides the next one's; within a class, words have Zipf's
    probabilities with an exponent of the class.
    """

    def __init__(self) -> None:
        syllables = [a + b for a in CONSONANTS for b in VOWELS]
        every = [x for n in (2, 3) for x in itertools.product(syllables, repeat=n)]
        drawn = random.Random(0).sample(every, VOCABULARY - len(SPECIAL))
        self.words = ["".join(x) for x in drawn]
        self._classes = [self.words[i :: len(EXPONENTS)] for i in range(len(EXPONENTS))]
        self._weights = [
            list(itertools.accumulate(rank**-exponent for rank in range(1, len(words) + 1)))
            for words, exponent in zip(self._classes, EXPONENTS, strict=True)
        ]

    def sentence(self, rng: random.Random, length: int = SENTENCE) -> str:
        """Words, separated by spaces."""
        said, kind = [], rng.randrange(len(EXPONENTS))
        for _ in range(length):
            said += rng.choices(self._classes[kind], cum_weights=self._weights[kind])
            follows = (kind + 1, 3 * kind + 2, rng.randrange(len(EXPONENTS)))
            kind = rng.choices(follows, (6, 3, 1))[0] % len(EXPONENTS)
        return " ".join(said)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """One with a token for each word."""
        from tokenizers import Tokenizer, models, pre_tokenizers

        ids = {word: i for i, word in enumerate((*SPECIAL, *self.words))}
        tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        named = dict(zip(("pad_token", "eos_token", "unk_token"), SPECIAL, strict=True))
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, model_max_length=2 * SENTENCE, **named
        )


class Task(NamedTuple):
    """What the runs have in common: the model after SFT, prompts, and where files go."""

    folder: Path
    model: GPT2LMHeadModel
    tokenizer: PreTrainedTokenizerFast
    prompts: list[str]
    held_out: list[str]

    def sampled(self, model: Any, count: int, **settings: Any) -> Any:
        """Responses of a model to the held-out prompts."""
        from fastrl import RolloutEngine, SamplingParams

        engine = RolloutEngine(model, self.tokenizer, max_slots=128)
        params = SamplingParams(max_new_tokens=LENGTH, n=count, seed=7, **settings)
        return engine.generate(self.held_out, params)

    def logits(self, model: Any, sequences: Sequence[Tensor], each: int) -> Iterator[Tensor]:
        """Of each response's tokens, ``each`` responses to a held-out prompt, by a plain forward:
        [L, V]."""
        for i, sequence in enumerate(sequences):
            prompt = torch.tensor(self.tokenizer(self.held_out[i // each]).input_ids)
            ids = torch.cat([prompt, sequence])[None]
            yield model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]


def task_of(folder: Path, steps: int, learned: Path | None) -> Task:
    """The language, and the model that has learned it by SFT, in an earlier run where it is given,
    or else now; it is kept in the folder."""
    from datasets import Dataset

    from fastrl import SFTConfig, SFTTrainer, set_seed

    set_seed(0)
    language, rng = Language(), random.Random(1)
    tokenizer = language.tokenizer()
    ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, "vocab_size": VOCABULARY}
    shape = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
    shape["n_positions"] = 2 * SENTENCE
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    texts = [language.sentence(rng) for _ in range(steps * SFT_BATCH)]
    args = SFTConfig(
        str(folder / "sft"), max_steps=steps, learning_rate=SFT_RATE,
        per_device_train_batch_size=SFT_BATCH, **QUIET,
    )  # fmt: skip
    if learned:
        model = GPT2LMHeadModel.from_pretrained(learned)
    else:
        model = GPT2LMHeadModel(GPT2Config(**ids, **shape, **dropout))
        data = Dataset.from_dict({"text": texts})
        SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer).train()
        model.save_pretrained(folder / "model")
    openings = [language.sentence(rng, OPENING) for _ in range(PROMPTS + HELD_OUT)]
    return Task(folder, model.eval(), tokenizer, openings[HELD_OUT:], openings[:HELD_OUT])


def rewarded(completions: Sequence[str], **columns: Any) -> list[float]:
    """The share of words that begin with one of ``REWARDED``."""
    said = [text.split() for text in completions]
    return [sum(word[0] in REWARDED for word in words) / max(1, len(words)) for words in said]


def kept(p: Tensor, cut: dict[str, float]) -> Tensor:
    """Which of the probabilities p [N, V] a cut keeps, by its definition, with all that equal the
    least."""
    if "top_k" in cut:
        return p >= p.topk(int(cut["top_k"])).values[:, -1:]
    if "top_p" not in cut:
        return torch.ones_like(p, dtype=torch.bool)
    highest = p.topk(min(4096, p.shape[1])).values
    if (highest.sum(-1) < cut["top_p"]).any():
        highest = p.sort(descending=True).values
    before = highest.cumsum(-1) - highest
    return p >= highest.where(before < cut["top_p"], 1.0).amin(-1, keepdim=True)


@torch.no_grad()
def judged(task: Task, model: Any, cut: dict[str, float]) -> dict[str, float]:
    """Of a policy's responses to held-out prompts, drawn with a cut: the mean reward, and at their
    tokens the probability that the cut leaves out, the entropy and the KL to the model after SFT
    [nats], both over the whole vocabulary."""
    out = task.sampled(model, MEASURED, **cut)
    said = task.tokenizer.batch_decode(out.sequences, skip_special_tokens=True)
    rewards = rewarded(said)
    firsts = out.sequences[::MEASURED]
    found: dict[str, list[Tensor]] = {"outside": [], "entropy": [], "kl": []}
    both = (task.logits(x, firsts, 1) for x in (model, task.model))
    for logits, begun in zip(*both, strict=True):
        logp, start = logits.log_softmax(-1), begun.log_softmax(-1)
        p = logp.exp()
        found["outside"].append(1 - p.where(kept(p, cut), 0.0).sum(-1))
        found["entropy"].append(-(p * logp).sum(-1))
        found["kl"].append((p * (logp - start)).sum(-1))
    means = {name: float(torch.cat(each).mean()) for name, each in found.items()}
    return {"reward": statistics.mean(rewards), **means}


class Judge(TrainerCallback):
    """Keeps what is judged of a policy, before it learns and every few steps."""

    def __init__(self, task: Task, cut: dict[str, float], every: int):
        self.task, self.cut, self.every = task, cut, every
        self.rows: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note(kwargs["model"], 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self._note(kwargs["model"], state.global_step)

    def _note(self, model: Any, step: int) -> None:
        was = model.training
        self.rows.append({"step": step, **judged(self.task, model.eval(), self.cut)})
        model.train(was)


class Run(NamedTuple):
    """The settings of runs of GRPO that are not what is compared."""

    steps: int
    every: int  # steps between judgements
    rate: float


def curve(
    task: Task, run: Run, cut: dict[str, float], support: str, seed: int
) -> list[dict[str, float]]:
    """What is judged of a policy in the course of a run of GRPO."""
    from datasets import Dataset

    from fastrl import GRPOConfig, GRPOTrainer, set_seed

    set_seed(seed)
    args = GRPOConfig(
        str(task.folder / "grpo"), policy_support=support, max_steps=run.steps, seed=seed,
        learning_rate=run.rate, lr_scheduler_type="constant", num_generations=GROUP,
        per_device_train_batch_size=BATCH, max_completion_length=LENGTH, **cut, **QUIET,
    )  # fmt: skip
    judge = Judge(task, cut, run.every)
    model, data = copy.deepcopy(task.model), Dataset.from_dict({"prompt": task.prompts})
    made = {"processing_class": task.tokenizer, "callbacks": [judge]}
    with warnings.catch_warnings():  # they tell what is measured here
        warnings.filterwarnings("ignore", ".*changes what tokens are drawn from")
        GRPOTrainer(model, rewarded, args, data, **made).train()
    return judge.rows


class Drawn(NamedTuple):
    """Responses to the held-out prompts, ``each`` to one; the set [L, V] bool that each token was
    drawn from; log-probs of each response by what they are over, "full" or "sampled"."""

    sequences: Sequence[Tensor]
    sets: Sequence[Tensor]
    logprobs: dict[str, Sequence[Tensor]]
    each: int


def drawn_here(task: Task, cut: dict[str, float]) -> Drawn:
    """What fastrl's engine draws."""
    found = {x: task.sampled(task.model, MEASURED, policy_support=x, **cut) for x in SUPPORTS}
    sequences = found["sampled"].sequences
    assert all(map(torch.equal, sequences, found["full"].sequences))
    sets = [x.mask() for x in found["sampled"].supports]
    return Drawn(sequences, sets, {x: of.logprobs for x, of in found.items()}, MEASURED)


@torch.no_grad()
def compared(task: Task, name: str, cut: dict[str, float], drawn: Drawn) -> dict[str, Any]:
    """How much of the probability a cut keeps, the share of recorded sets that a float64 forward
    takes as well, and ratios by what the log-probs of the sampler and of the trainer are over."""
    judge, mass, same = copy.deepcopy(task.model).double(), [], []
    trainer: dict[str, list[Tensor]] = {support: [] for support in SUPPORTS}
    both = zip(drawn.sequences, drawn.sets, strict=True)
    forwards = task.logits(judge, drawn.sequences, drawn.each)
    for logits, (ids, recorded) in zip(forwards, both, strict=True):
        p = logits.softmax(-1)
        mass.append(p.where(recorded, 0.0).sum(-1))
        same.append((recorded == kept(p, cut)).all(-1))
        over = {"full": logits, "sampled": logits.masked_fill(~recorded, -torch.inf)}
        for support, x in over.items():
            trainer[support].append(x.log_softmax(-1).gather(-1, ids[:, None])[:, 0])
    row = {"name": name, "tokens": sum(map(len, drawn.sequences)), "ratios": []}
    row |= {"kept": float(torch.cat(mass).mean())}
    row |= {"same_sets": float(torch.cat(same).double().mean())}
    for of_sampler, of_trainer in PAIRS:
        if of_sampler not in drawn.logprobs:
            continue
        sampled = torch.cat(list(drawn.logprobs[of_sampler])).double()
        ratio = (torch.cat(trainer[of_trainer]) - sampled).exp()
        row["ratios"].append(
            {
                "sampler": of_sampler,
                "trainer": of_trainer,
                "mean": float(ratio.mean()),
                "median": float(ratio.median()),
                "outside": float(((ratio < NEAR[0]) | (ratio > NEAR[1])).double().mean()),
                "farthest": float((ratio - 1).abs().max()),
            }
        )
    return row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks support`."""
    add_places(parser, NAME, SEEDS)
    parser.add_argument("--sft-steps", type=int, default=SFT_STEPS, help="before GRPO")
    parser.add_argument("--model", type=Path, help="after these, of an earlier run: FOLDER/model")
    parser.add_argument("--steps", type=int, default=STEPS, help="of GRPO")
    parser.add_argument("--every", type=int, default=EVERY, help="steps between judgements")
    parser.add_argument("--rate", type=float, default=RATE, help="GRPO's learning rate")
    parser.add_argument("--threads", type=int, default=1)


def run(args: argparse.Namespace) -> int:
    """Runs all of it, keeps what was measured, and writes it."""
    torch.set_num_threads(args.threads)
    result = results.start_of_result(NAME, torch.device("cpu"))
    result["versions"] = results.versions("fastrl-lm", "torch", "transformers")
    result["settings"] = {"steps": args.steps, "rate": args.rate, "sft_steps": args.sft_steps}
    result["settings"] |= {"batch": BATCH, "group": GROUP, "length": LENGTH}
    result["settings"]["threads"] = args.threads
    result["settings"] |= {"vocabulary": VOCABULARY, "width": WIDTH, "layers": LAYERS}
    task = task_of(args.folder, args.sft_steps, args.model)
    cuts: dict[str, dict[str, float]] = {**CUTS, NO_CUT: {}}
    result["ratios"] = [compared(task, x, cut, drawn_here(task, cut)) for x, cut in cuts.items()]
    result["curves"] = []
    settings, saved = Run(args.steps, args.every, args.rate), None
    for (name, cut), support, seed in itertools.product(CUTS.items(), SUPPORTS, args.seeds):
        rows = curve(task, settings, cut, support, seed)
        result["curves"].append({"cut": name, "support": support, "seed": seed, "rows": rows})
        print(f"{name}, {support}, seed {seed}: {rows[0]} → {rows[-1]}", flush=True)
        saved = results.save(result, args.folder, saved)  # what there is of it, if it ends here
    results.save(result, args.results)
    write(args.results, args.docs)
    return 0
