"""A folder of every kind in which fastrl leaves a model, by a run of two steps on tiny models, and
what that model said as it was saved."""

import contextlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from datasets import Dataset
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

import fastrl
from fastrl import cli
from fastrl.run import model_card
from tests import chat_tokenizer, seq2seq_models, tiny_models
from tests.alignment.conftest import make_factory
from tests.models.test_value_head_file import as_before
from tests.oracles.surfaces import judged, small_tokens
from tests.trainers.conftest import pairs, texts

IDS = [5, 6, 7, 8, 9, 10, 11, 12]
RANK = 4  # of adapters
FAMILIES = ("llama", "qwen2")
TOKENIZER = chat_tokenizer.tokenizer()
TOKENIZER.add_tokens(["<|endoftext|>"])  # as which Qwen2's class reads it
# Heads of 32 are among those that vLLM has on CPUs.
_SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 128}
_FITTED: dict[str, Any] = {
    "per_device_train_batch_size": 4, "max_steps": 2, "save_strategy": "no", "report_to": "none",
    "disable_tqdm": True, "use_cpu": True,
}  # fmt: skip
_OF_GROUPS = {"num_generations": 4, "max_completion_length": 4}
_ONLINE_FLAGS = {
    "reward": "tests.oracles.surfaces:small_tokens", "steps": 2, "batch-size": 4,
    "mini-batch-size": 2, "max-new-tokens": 4, "eval-prompts": 0,
}  # fmt: skip
_FITTED_FLAGS = {
    "max-steps": 2, "per-device-train-batch-size": 4, "eval-examples": 0, "use-cpu": "true",
    "report-to": "none",
}  # fmt: skip


class World:
    """A folder with the models and data that runs begin with."""

    def __init__(self, folder: Path):
        self.folder = folder
        special = {"vocab_size": len(TOKENIZER), "bos_token_id": None}
        special |= {
            f"{name}_token_id": getattr(TOKENIZER, f"{name}_token_id") for name in ("eos", "pad")
        }
        for family in FAMILIES:
            model = tiny_models.language_model(family, **_SHAPE, **special)
            model.save_pretrained(self.base(family))
            TOKENIZER.save_pretrained(self.base(family))
        for name, rows in (
            *(("texts", texts(8)), ("pairs", pairs(8)), ("judged", judged(8, 0))),
            ("prompts", prompts()),
        ):
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}.jsonl").write_text(lines)

    def base(self, family: str) -> Path:
        return self.folder / family


def prompts() -> Dataset:
    return Dataset.from_list([{"prompt": row["text"]} for row in texts(8, high=6)])


def policy(base: Path, adapter: Any = None) -> Any:
    """A policy with a value head."""
    return fastrl.AutoModelForCausalLMWithValueHead.from_pretrained(base, peft_config=adapter)


def lora(kind: str = "CAUSAL_LM") -> Any:
    targets = ["q_proj", "v_proj"]
    return tiny_models.lora(r=RANK, target_modules=targets, fan_in_fan_out=False, task_type=kind)


def run_of(folder: Path) -> Path:
    """Where the run is that leaves a folder."""
    return folder.with_name(f"{folder.name} run")


Write = Callable[[World, Path, str, bool], None]


def by_command(command: str, data: str, *flags: str) -> Write:
    """The ``model/`` of a command's run."""
    online = command in ("ppo", "grpo")

    def write(world: World, folder: Path, family: str, adapts: bool) -> None:
        run = run_of(folder)
        given = {
            "model": world.base(family),
            "dataset": world.folder / f"{data}.jsonl",
            "output": run,
            "learning-rate": 0.1 if adapts else 0.01,
            **(_ONLINE_FLAGS if online else _FITTED_FLAGS),
            **({"group-size": 2} if command == "grpo" else {}),
            **({"lora-r": RANK} if adapts else {}),
        }
        words = [str(x) for name, value in given.items() for x in (f"--{name}", value)]
        with contextlib.redirect_stderr(io.StringIO()) as said:
            status = cli.main([command, *words, *flags])
        assert status == 0, said.getvalue()
        (run / "model").rename(folder)

    return write


def by_trainer(name: str, data: Callable[[], Dataset], **settings: Any) -> Write:
    """What a trainer saves on transformers' Trainer."""

    def write(world: World, folder: Path, family: str, adapts: bool) -> None:
        args = getattr(fastrl, f"{name}Config")(
            str(run_of(folder)), **_FITTED, **settings, learning_rate=0.01
        )
        trainer = getattr(fastrl, f"{name}Trainer")(
            str(world.base(family)),
            **({"reward_funcs": small_tokens} if name in ("GRPO", "RLOO") else {}),
            args=args,
            train_dataset=data(),
            processing_class=TOKENIZER,
            peft_config=lora("SEQ_CLS" if name == "Reward" else "CAUSAL_LM") if adapts else None,
        )
        trainer.train()
        trainer.save_model(str(folder))

    return write


def by_step(save: Callable[[Any, Path], None]) -> Write:
    """What PPOTrainer saves behind a step."""

    def write(world: World, folder: Path, family: str, adapts: bool) -> None:
        save(_stepped(policy(world.base(family), lora() if adapts else None)), folder)

    return write


def _stepped(model: Any) -> Any:
    config = fastrl.PPOConfig(batch_size=4, ppo_epochs=1, learning_rate=1e-2)
    trainer = fastrl.PPOTrainer(config, model, None, TOKENIZER)
    asked, said = tiny_models.prompts(3, 2, 3, 4), tiny_models.prompts(4, 5, 2, 3, seed=1)
    trainer.step(asked, said, [torch.tensor(float(i)) for i in range(4)])
    return trainer


def of_ppo(trainer: Any, folder: Path) -> None:
    trainer.save_pretrained(folder)


def in_shards(trainer: Any, folder: Path) -> None:
    trainer.model.save_pretrained(folder, max_shard_size="50KB")
    trainer.tokenizer.save_pretrained(folder)
    trainer.create_model_card(folder)


def as_of_0_1(trainer: Any, folder: Path) -> None:
    """In the layout of the release before, with the value head among the weights."""
    as_before(trainer.model, folder)
    trainer.tokenizer.save_pretrained(folder)
    trainer.create_model_card(folder)


def of_encoder_decoder(world: World, folder: Path, family: str, adapts: bool) -> None:
    seq2seq_models.language_model().save_pretrained(world.folder / "t5")
    model = fastrl.AutoModelForSeq2SeqLMWithValueHead.from_pretrained(world.folder / "t5")
    of_ppo(_stepped(model), folder)


def of_ppo_v2(world: World, folder: Path, family: str, adapts: bool) -> None:
    """What the trainer of TRL 0.12 to 1.9 saves: policy, and a critic of its own beside it."""
    reward, values = (
        AutoModelForSequenceClassification.from_pretrained(world.base(family), num_labels=1)
        for _ in range(2)
    )
    trainer = fastrl.PPOv2Trainer(
        fastrl.PPOv2Config(
            str(run_of(folder)), total_episodes=8, response_length=4, learning_rate=1e-2,
            **{k: x for k, x in _FITTED.items() if k != "max_steps"},
        ),
        TOKENIZER,
        AutoModelForCausalLM.from_pretrained(world.base(family)),
        None,
        reward,
        Dataset.from_dict({"input_ids": [[3 + i, 4, 5] for i in range(8)]}),
        value_model=values,
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(folder))


def of_alignment(world: World, folder: Path, family: str, adapts: bool) -> None:
    """What the framework saves of a policy with values."""
    args = fastrl.alignment.AlignmentConfig(
        str(run_of(folder)), learning_rate=1e-2,
        **{k: x for k, x in _FITTED.items() if not k.startswith("per_device")},
    )  # fmt: skip
    model = policy(world.base(family), lora() if adapts else None)
    factory = make_factory("reinforcement-learning")
    trainer = fastrl.alignment.Trainer(model, args, factory, "ppo")
    trainer.train()
    trainer.save_model(str(folder))


_BOTH: dict[str, Write] = {  # as a whole model, and as an adapter
    "fastrl sft": by_command("sft", "texts"),
    "fastrl reward": by_command("reward", "pairs"),
    "fastrl ppo": by_command("ppo", "prompts"),
    "fastrl grpo": by_command("grpo", "prompts"),
    "fastrl align, dpo": by_command("align", "pairs", "--loss", "dpo"),
    "fastrl align, kto": by_command("align", "judged", "--loss", "kto"),
    "SFTTrainer": by_trainer("SFT", lambda: texts(8)),
    "RewardTrainer": by_trainer("Reward", lambda: pairs(8)),
    "PPOTrainer": by_step(of_ppo),
    "GRPOTrainer": by_trainer("GRPO", prompts, beta=0.1, **_OF_GROUPS),
    "RLOOTrainer": by_trainer("RLOO", prompts, **_OF_GROUPS),
    "DPOTrainer": by_trainer("DPO", lambda: pairs(8)),
    "KTOTrainer": by_trainer("KTO", lambda: judged(8, 0)),
    "alignment's Trainer, ppo": of_alignment,
    "PPOTrainer of 0.1": by_step(as_of_0_1),
}
_ONE: dict[str, Write] = {
    "fastrl grpo, rloo": by_command("grpo", "prompts", "--advantage", "rloo"),
    "fastrl align, reward model": by_command("align", "pairs", "--task", "reward-modelling"),
    "PPOTrainer in shards": by_step(in_shards),
    "PPOv2Trainer": of_ppo_v2,
    "PPOTrainer, encoder-decoder": of_encoder_decoder,
}
KINDS: dict[str, tuple[Write, str, bool]] = {}  # with the family of the base, and: an adapter?
for _i, (_name, _write) in enumerate(_BOTH.items()):
    KINDS[_name] = _write, FAMILIES[_i % 2], False
    KINDS[f"{_name}, LoRA"] = _write, FAMILIES[_i % 2], True
for _i, (_name, _write) in enumerate(_ONE.items()):
    KINDS[_name] = _write, FAMILIES[_i % 2], False


def write_folder(kind: str, world: World, folder: Path) -> Tensor:
    """Writes a folder; returns the logits that the model in the trainer had of :data:`IDS`.

    Raises:
        AssertionError: the run has left the model as it was.
    """
    write, family, adapts = KINDS[kind]
    torch.manual_seed(0)
    with noted_logits() as noted:
        write(world, folder, family, adapts)
    said = noted[-1]
    if auto_class(kind) is AutoModelForCausalLM:
        before = logits(AutoModelForCausalLM.from_pretrained(world.base(family)))
        assert (said - before).abs().max() > 0.1, f"{kind} has learned nothing"
    return said


@contextlib.contextmanager
def noted_logits() -> Iterator[list[Tensor]]:
    """Context that lists the logits of models as they are saved: a card is written of each."""
    noted: list[Tensor] = []
    make = model_card.model_card

    def model_card_of(name: str, model: Any, *rest: Any, **named: Any) -> Any:
        noted.append(logits(model))
        return make(name, model, *rest, **named)

    with mock.patch.object(model_card, "model_card", model_card_of):
        yield noted


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """Of :data:`IDS`, without dropout: [tokens, vocabulary], or [1, 1] of a reward model."""
    inner = getattr(model, "pretrained_model", model)
    inputs = {"input_ids": torch.tensor([IDS])}
    if inner.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    training = inner.training
    found = inner.eval()(**inputs).logits
    inner.train(training)
    return found.float().reshape(-1, found.shape[-1])


def auto_class(kind: str) -> Any:
    """The class of transformers that loads the folder."""
    if "reward" in kind.lower():
        return AutoModelForSequenceClassification
    return AutoModelForSeq2SeqLM if "encoder" in kind else AutoModelForCausalLM


def is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").exists()
