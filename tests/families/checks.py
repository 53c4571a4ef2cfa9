"""What a family computes of a text in each kind of batch, beside what it computes of it alone."""

import contextlib
import io
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

import fastrl
from fastrl import (
    DPOConfig,
    DPOTrainer,
    RewardConfig,
    RewardTrainer,
    SamplingParams,
    SFTConfig,
    SFTTrainer,
)
from fastrl.rollout.choose_engine import choose_engine
from tests.families.tiny import VOCABULARY, spread, tiny

# Texts longer than every window, and shorter ones.
_LENGTHS = (40, 26, 9, 33)
_PROMPTS, _NEW = (5, 21, 9), 6
_FASTRL = Path(fastrl.__file__).parent
_OFF = 1e-3  # of losses, log-probs and rewards near 1, in float32 beside float64
EQUAL, TOLD, REFUSED, SILENT, FAILED = "equal", "warned of", "refused", "SILENT", "FAILED"


class Outcome(NamedTuple):
    """What came of a check, and the number or message that says so."""

    kind: str
    why: str = ""


def tokenizer() -> PreTrainedTokenizerFast:
    words = {0: "<pad>", 1: "<s>", 2: "</s>", 4: "<unk>"}
    table = {words.get(i, f"t{i}"): i for i in range(VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(table, unk_token="<unk>")),
        pad_token="<pad>",
        eos_token="</s>",
    )


def texts(lengths: tuple[int, ...] = _LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(5, VOCABULARY, (n,), generator=generator) for n in lengths]


@torch.no_grad()
def alone(model: Any, ids: Tensor) -> Tensor:
    """The logits of a text by itself, in float64 where the family computes in it."""
    try:
        return model.double()(input_ids=ids[None], use_cache=False).logits[0].double()
    except RuntimeError:  # layers that cast
        return model.float()(input_ids=ids[None], use_cache=False).logits[0].double()


def logprobs(model: Any, ids: Tensor) -> Tensor:
    """Of each token behind the first, alone."""
    return alone(model, ids)[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def _sft(name: str, folder: str, **settings: Any) -> tuple[float, float]:
    rows = [{"input_ids": x.tolist(), "labels": x.tolist()} for x in texts()]
    args = SFTConfig(
        folder, max_length=128, append_eos=False, eval_packing=settings.get("packing", False),
        per_device_eval_batch_size=4, dataset_kwargs={"skip_prepare_dataset": True},
        **_COMMON, **settings,
    )  # fmt: skip
    data = Dataset.from_list(rows)
    trainer = SFTTrainer(
        tiny(name), args, train_dataset=data, eval_dataset=data, processing_class=tokenizer()
    )
    model = tiny(name)
    expected = -torch.cat([logprobs(model, x) for x in texts()]).mean()
    return trainer.evaluate()["eval_loss"], float(expected)


def _dpo(name: str, folder: str) -> tuple[float, float]:
    long, other, short, _ = texts()
    rows = [
        {"prompt_ids": x[:4].tolist(), "chosen_ids": x[4:].tolist(), "rejected_ids": y.tolist()}
        for x, y in ((long, other), (short, other[:3]))
    ]
    data = Dataset.from_list(rows)
    args = DPOConfig(folder, per_device_eval_batch_size=2, **_COMMON)
    trainer = DPOTrainer(
        tiny(name), args=args, train_dataset=data, eval_dataset=data, processing_class=tokenizer()
    )
    model = tiny(name)
    expected = sum(float(logprobs(model, x)[3:].sum()) for x in (long, short)) / 2
    return trainer.evaluate()["eval_logps/chosen"] / 20, expected / 20  # a mean over tokens, about


def _reward(name: str, folder: str) -> tuple[float, float] | None:
    config = tiny(name).config
    if type(config) not in AutoModelForSequenceClassification._model_mapping:
        return None
    config.num_labels = 1

    def classifier() -> Any:
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config)
        spread(model)
        return model.eval()

    end = torch.tensor([tokenizer().eos_token_id])  # where BART and its like read a text
    long, other, short, last = (torch.cat([x, end]) for x in texts())
    pairs = [(long, short), (last, other)]
    rows = [{"chosen_ids": x.tolist(), "rejected_ids": y.tolist()} for x, y in pairs]
    data = Dataset.from_list(rows)
    args = RewardConfig(folder, per_device_eval_batch_size=2, max_length=128, **_COMMON)
    trainer = RewardTrainer(
        classifier(), args, train_dataset=data, eval_dataset=data, processing_class=tokenizer()
    )
    model = classifier()
    expected = sum(float(alone(model, x).flatten()[0]) for pair in pairs for x in pair) / 4
    return trainer.evaluate()["eval_mean_reward"], expected


@torch.no_grad()
def _rollouts(name: str, folder: str) -> tuple[float, float]:
    """By how much the log-prob of a greedy token is below the largest of the prompt alone."""
    model, prompts = tiny(name), texts(_PROMPTS)
    engine = choose_engine(model, tokenizer(), max_slots=len(prompts))
    params = SamplingParams(max_new_tokens=_NEW, temperature=0)
    output = engine.generate(prompts, params)
    off, plain = 0.0, tiny(name)
    for prompt, response in zip(prompts, output.sequences, strict=True):
        scores = alone(plain, torch.cat([prompt, response])).log_softmax(-1)
        at = scores[len(prompt) - 1 : -1]
        drawn = at.gather(1, response[:, None])[:, 0]
        off = max(off, float((at.amax(-1) - drawn).max()))
    return off, 0.0


_COMMON: dict[str, Any] = {
    "report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True, "save_strategy": "no",
}  # fmt: skip
Check = Callable[[str, str], "tuple[float, float] | None"]
CHECKS: dict[str, Check] = {
    "SFT, padded": lambda name, folder: _sft(name, folder, padding_free=False),
    "SFT, without padding": _sft,
    "SFT, packed": lambda name, folder: _sft(name, folder, packing=True),
    "DPO": _dpo, "reward model": _reward, "rollouts": _rollouts,
}  # fmt: skip


def outcome(name: str, check: Check) -> Outcome | None:
    """What comes of a check of a family; None where it does not apply."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        try:
            found = check(name, folder)
        except Exception as error:
            by = traceback.extract_tb(error.__traceback__)[-1].filename
            if isinstance(error, ValueError) and Path(by).is_relative_to(_FASTRL):
                return Outcome(REFUSED, _short(str(error)))
            return Outcome(FAILED, _short(f"{type(error).__name__}: {error}"))
    if found is None:
        return None
    # Rounding and tokens count less where a loss is larger.
    off = abs(found[0] - found[1]) / max(1.0, abs(found[1]))
    told = [_short(str(x.message)) for x in caught if _names_the_cause(str(x.message))]
    if off <= _OFF:
        return Outcome(EQUAL, told[0] if told else "")
    return Outcome(TOLD, told[0]) if told else Outcome(SILENT, f"off by {off:.1e}")


def _names_the_cause(message: str) -> bool:
    return any(
        words in message for words in ("padding changes", "generate computes", "one prompt at")
    )


def _short(message: str) -> str:
    return " ".join(message.split())[:160]
