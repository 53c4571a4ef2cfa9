"""The token ids that each door to the models gives random rows."""

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset
from tokenizers.processors import TemplateProcessing

import fastrl
from fastrl.alignment import DatasLoader
from fastrl.collect.respond import Asked
from fastrl.data.columns import KINDS, PROMPTS
from fastrl.data.prompts import Prompts
from fastrl.trainers.groups.prompt_data import asked_of
from tests import chat_tokenizer, tiny_models
from tests.golden import tiny
from tests.oracles.surfaces import quiet, trainer_and_config
from tests.trainers.conftest import reward_model

Rows = list[dict[str, Any]]
_ROWS = 6
_QUICK: dict[str, Any] = {"use_cpu": True, "report_to": "none", "disable_tqdm": True}
_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ 'w10 ' if m.role == 'user' else 'w11 ' }}"
    "{{ m.content }} {% if m.role == 'assistant' %}{{ eos_token }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}w11 {% endif %}"
)


def _closing(bos: bool, eos: bool) -> Any:
    """Words, with BOS in front of texts and EOS behind them."""
    made = tiny.tokenizer()
    pattern = f"{'<bos> ' if bos else ''}$A{' <eos>' if eos else ''}"
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single=pattern, special_tokens=[("<bos>", tiny.BOS), ("<eos>", tiny.EOS)]
    )
    made.chat_template = _TEMPLATE
    return made


# Each with a length that cuts some rows.
TOKENIZERS: dict[str, tuple[Callable[[], Any], int]] = {
    "words": (lambda: _closing(bos=False, eos=False), 9),
    "words behind BOS": (lambda: _closing(bos=True, eos=False), 9),
    "words between BOS and EOS": (lambda: _closing(bos=True, eos=True), 9),
    "bytes": (chat_tokenizer.tokenizer, 70),
    "bytes that think": (lambda: chat_tokenizer.tokenizer("xml", thinks=True), 90),
}


def _words(rng: random.Random, most: int) -> str:
    return " ".join(f"w{rng.randrange(3, 97)}" for _ in range(rng.randint(1, most)))


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _rows(rng: random.Random, kind: str) -> Rows:
    rows: Rows = []
    for i in range(_ROWS):
        prompt, chosen, rejected = _words(rng, 5), _words(rng, 6), _words(rng, 8) + " w9"
        asked, further = [_turn("user", prompt)], rng.random() < 0.5
        if further:
            asked += [_turn("assistant", _words(rng, 3)), _turn("user", _words(rng, 3))]
        good, bad = _turn("assistant", chosen), _turn("assistant", rejected)
        row: dict[str, Any] = {
            "texts": {"text": prompt},
            "messages": {"messages": [*asked, good]},
            "prompts and completions": {"prompt": prompt + " ", "completion": chosen},
            "chats and answers": {"prompt": asked, "completion": [good]},
            "pairs": {"prompt": prompt + " ", "chosen": chosen, "rejected": rejected},
            "pairs of chats": {"prompt": asked, "chosen": [good], "rejected": [bad]},
            "pairs of whole chats": {"chosen": [*asked, good], "rejected": [*asked, bad]},
            "pairs of whole texts": {
                "chosen": f"\n\nHuman: {prompt}\n\nAssistant: {chosen}",
                "rejected": f"\n\nHuman: {prompt}\n\nAssistant: {rejected}",
            },
            "judged": {"prompt": prompt + " ", "completion": chosen, "label": i % 2 == 0},
            "judged chats": {"prompt": asked, "completion": [good], "label": i % 2 == 0},
        }[kind]  # fmt: skip
        rows.append(row)
    return rows


# What each door reads, with settings that change ids.
_SFT = ("texts", "messages", "prompts and completions", "chats and answers")
_PAIRS = ("pairs", "pairs of chats", "pairs of whole chats", "pairs of whole texts")


def _fitted(name: str, model: Any, read: Callable[[Any], Any], **settings: Any) -> Any:
    """What ``read`` finds in a trainer that is made with the rows."""
    trainer, config = trainer_and_config(name)

    def ids(tokenizer: Any, rows: Rows, folder: Path) -> Any:
        made = trainer(
            model(),
            args=config(str(folder), per_device_train_batch_size=_ROWS, **_QUICK, **settings),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        return read(made)

    return ids


def _prepared(trainer: Any) -> dict[str, Any]:
    return trainer.train_dataset[:]


def _collated(trainer: Any) -> dict[str, Any]:
    rows = trainer.train_dataset
    batch = trainer.data_collator([rows[i] for i in range(len(rows))])
    return {name: x.tolist() for name, x in batch.items() if hasattr(x, "tolist")}


def _sampled(tokenizer: Any, rows: Rows, folder: Path) -> Any:
    """The prompts of GRPOTrainer's responses."""
    made = fastrl.GRPOTrainer(
        _language_model(),
        lambda completions, **_: [float(len(x)) for x in completions],
        args=fastrl.GRPOConfig(
            str(folder), **_QUICK, num_generations=2,
            per_device_train_batch_size=2, max_completion_length=2,
        ),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        processing_class=tokenizer,
    )  # fmt: skip
    found = made._collect.respond(Asked(asked_of(rows), 1, range(len(rows)), 0))
    return [x.tolist() for x in found.prompt_ids]


def _prompts(closed: bool) -> Any:
    def ids(tokenizer: Any, rows: Rows, folder: Path) -> Any:
        made = Prompts.from_list([row["prompt"] for row in rows], tokenizer, closed=closed)
        return [made.samples.prompt_texts, [x.tolist() for x in made.samples.prompt_ids]]

    return ids


def _loaded(kind: str, **settings: Any) -> Any:
    def ids(tokenizer: Any, rows: Rows, folder: Path) -> Any:
        loader = DatasLoader(rows, tokenizer, kind, **settings)
        return [
            [example.prompt_ids, *([x.text, x.ids] for x in example.responses)]
            for example in loader
        ]

    return ids


def _language_model() -> Any:
    return tiny_models.language_model(vocab_size=chat_tokenizer.VOCABULARY, n_positions=512)


def _reward_model() -> Any:
    return reward_model("gpt2", vocab_size=chat_tokenizer.VOCABULARY, n_positions=512)


def doors(most: int) -> Iterator[tuple[str, str, Any]]:
    """Each door's name, the kind of rows that it gets, and the function that makes ids.

    Args:
        most: a max_length that cuts some rows.
    """
    settings: dict[str, Any]
    for settings in ({}, {"max_length": most}):
        cut = " cut" if settings else ""
        for kind in _SFT:
            yield f"SFT{cut}", kind, _fitted("SFT", _language_model, _prepared, **settings)
        for kind in _PAIRS:
            yield (
                f"reward model{cut}",
                kind,
                _fitted("Reward", _reward_model, _prepared, **settings),
            )
            for end in ("keep_start", "keep_end") if settings else ("keep_start",):
                own = {**settings, "truncation_mode": end}
                yield f"DPO{cut} {end}", kind, _fitted("DPO", _language_model, _collated, **own)
        for kind in ("judged", "judged chats"):
            yield f"KTO{cut}", kind, _fitted("KTO", _language_model, _collated, **settings)
        for kind in (*_SFT[1:], *_PAIRS, "judged", "judged chats"):
            for read in KINDS:
                own = settings if read != PROMPTS else {}
                yield f"DatasLoader as {read}{cut}", kind, _loaded(read, **own)
    for kind in ("prompts and completions", "chats and answers"):
        yield "GRPO", kind, _sampled
        for closed in (False, True):
            yield f"PPO's prompts{' closed' if closed else ''}", kind, _prompts(closed)


def ids_of_all(folder: Path) -> dict[str, Any]:
    """What every door makes of random rows, or the error that it raises."""
    found: dict[str, Any] = {}
    for name, (make, most) in TOKENIZERS.items():
        for i, (door, kind, ids) in enumerate(doors(most)):
            rows = _rows(random.Random(f"{name} {kind}"), kind)
            with quiet():
                try:
                    made = ids(make(), copy.deepcopy(rows), folder / f"{len(found)}-{i}")
                except (ValueError, TypeError) as error:
                    made = f"{type(error).__name__}: {error}"
            found[f"{door}, {kind}, {name}"] = made
    return found
