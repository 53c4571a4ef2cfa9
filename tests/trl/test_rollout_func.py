"""TRLRollouts: TRL's own GRPOTrainer on fastrl's rollouts."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from datasets import Dataset

import fastrl
from fastrl import RolloutEngine, SamplingParams, TRLRollouts
from fastrl.run.random_state import seed_at
from tests import tiny_models
from tests.golden import tiny
from tests.weights import assert_same_weights

if sys.version_info < (3, 11):
    pytest.skip("TRL 1.16 needs Python 3.11", allow_module_level=True)
pytest.importorskip("trl")

# TRL's own: it passes settings that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

CPU = {"use_cpu": not torch.cuda.is_available()}


@pytest.fixture(autouse=True)
def _silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def even_words(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of even tokens."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def make(folder: Path, rollouts: Any = None, family: str = "qwen2", **settings: Any) -> Any:
    """TRL's trainer."""
    from trl import GRPOConfig, GRPOTrainer

    common: dict[str, Any] = {
        "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6,
        "max_steps": 2, "learning_rate": 1e-2, "seed": 3, "bf16": False, "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, **CPU,
    }  # fmt: skip
    others = {k: settings.pop(k) for k in ("model", "peft_config") if k in settings}
    texts = Dataset.from_dict({"prompt": [f"w{3 + i} w4 w{5 + i}" for i in range(8)]})
    data = settings.pop("train_dataset", texts)
    return GRPOTrainer(
        others.pop("model", None) or tiny_models.language_model(family),
        even_words,
        GRPOConfig(output_dir=str(folder), **{**common, **settings}),
        train_dataset=data,
        processing_class=tiny.tokenizer("left"),
        rollout_func=rollouts,
        **others,
    )


class Noted:
    """Rollouts with their results, and what TRL's model says of these at that time."""

    def __init__(self, rollouts: TRLRollouts):
        self.rollouts = rollouts
        self.prompts: list[list[str]] = []
        self.seen: list[dict[str, Any]] = []
        self.off: list[float] = []

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        found = self.rollouts(prompts, trainer)
        self.prompts.append(prompts)
        self.seen.append(found)
        for one in zip(*found.values(), strict=True):
            self.off.append(self._apart(trainer, *one))
        return found

    @torch.no_grad()
    def _apart(self, trainer: Any, prompt: list, response: list, logprobs: list) -> float:
        ids = torch.tensor([prompt + response], device=trainer.accelerator.device)
        found, *_ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, torch.ones_like(ids), len(response)
        )
        return float((found[0].cpu() - torch.tensor(logprobs)).abs().max())


@pytest.mark.parametrize("settings", [
    {},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1},
    {"gradient_checkpointing": False, "generation_kwargs": {"min_new_tokens": 2}},
], ids=["plain", "truncated", "generation_kwargs"])  # fmt: skip
def test_log_probs_are_those_that_trl_computes_of_the_weights_it_trains(
    settings: dict, tmp_path: Path
) -> None:
    """After updates too: the rollouts follow the weights. Sums in fp32 differ by less than 1e-5."""
    noted = Noted(TRLRollouts())
    trainer = make(tmp_path, noted, max_steps=3, **settings)
    start = [p.detach().clone().cpu() for p in trainer.model.parameters()]
    trainer.train()
    assert len(noted.seen) == 3
    moved = zip(start, trainer.model.parameters(), strict=True)
    assert max(float((a - b.detach().cpu()).abs().max()) for a, b in moved) > 1e-3
    assert max(noted.off) <= 1e-4
    lengths = [len(x) for found in noted.seen for x in found["completion_ids"]]
    assert max(lengths) <= 6
    assert min(lengths) >= settings.get("generation_kwargs", {}).get("min_new_tokens", 1)


def test_tokens_are_those_of_the_engine_alone(tmp_path: Path) -> None:
    noted = Noted(TRLRollouts())
    trainer = make(tmp_path, noted, max_steps=1)
    model = tiny_models.language_model("qwen2")
    trainer.train()
    (found,), (prompts,) = noted.seen, noted.prompts
    assert prompts == [prompts[0]] * 4 + [prompts[4]] * 4
    assert found["prompt_ids"] == trainer._tokenize_prompts(prompts)[0]
    alone = RolloutEngine(model, tiny.tokenizer()).generate(
        [torch.tensor(found["prompt_ids"][i]) for i in (0, 4)],
        SamplingParams(max_new_tokens=6, n=4, seed=seed_at(trainer.args.seed, "train", 0, 1)),
    )
    assert found["completion_ids"] == [x.tolist() for x in alone.sequences]


def test_chats_are_put_through_the_trainers_template(tmp_path: Path) -> None:
    trainer = make(tmp_path, noted := Noted(TRLRollouts()))
    template = "{% for m in messages %}{{ m.content }} {% endfor %}{% if loud %}w9{% endif %}"
    trainer.processing_class.chat_template = template
    trainer.chat_template_kwargs = {"loud": True}
    chats: list = [[{"role": "user", "content": "w5 w6"}]] * 4
    found = noted(chats, trainer)
    assert found["prompt_ids"] == trainer._tokenize_prompts(chats)[0]
    assert len(found["prompt_ids"][0]) == 3


def test_evaluation_has_groups_of_its_own(tmp_path: Path) -> None:
    trainer = make(tmp_path, rollouts := TRLRollouts(), num_generations_eval=2)
    trainer.model.eval()
    sizes = []
    trainer.train()
    engine = rollouts._engine
    assert engine is not None
    generate = engine.generate
    engine.generate = lambda p, params, ids: sizes.append(params.n) or generate(p, params, ids)  # type: ignore[method-assign, func-returns-value]
    trainer.model.eval()
    rollouts(["w3 w4"] * 2 + ["w5 w6"] * 2, trainer)
    trainer.model.train()
    rollouts(["w3 w4"] * 4, trainer)
    rollouts(["w3 w4"] * 3, trainer)  # a group's end in another process
    assert sizes == [2, 4, 1]


def trend(folder: Path, rollouts: Any) -> tuple[float, float]:
    """Mean rewards of the first and the last quarter of the steps."""
    settings = {"max_steps": 24, "per_device_train_batch_size": 32, "learning_rate": 2e-2}
    trainer = make(folder, rollouts, **settings)
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    return sum(rewards[:6]) / 6, sum(rewards[-6:]) / 6


def test_rewards_rise_as_with_trls_own_generation(tmp_path: Path) -> None:
    (first, last), (own_first, own_last) = (
        trend(tmp_path / str(i), rollouts) for i, rollouts in enumerate([TRLRollouts(), None])
    )
    assert abs(first - own_first) < 0.15
    assert last - first > 0.2
    assert own_last - own_first > 0.2


@pytest.mark.parametrize("sleep", [False, True])
def test_a_resumed_run_ends_with_the_weights_of_one_that_was_not_broken_off(
    sleep: bool, tmp_path: Path
) -> None:
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = make(tmp_path, TRLRollouts(sleep=sleep), **settings)
    whole.train()
    resumed = make(tmp_path, TRLRollouts(sleep=sleep), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_weights(resumed.model, whole.model)


def test_checkpoints_keep_the_size_of_the_kv_cache(tmp_path: Path) -> None:
    """Which decides the last bits on some devices."""
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    data = Dataset.from_dict({"prompt": ["w3 w4"] * 4})
    make(tmp_path, TRLRollouts(), **settings, train_dataset=data).train()
    kept = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())
    room = kept["stateful_callbacks"]["TRLRollouts"]["attributes"]
    assert room["slots"] == 8

    state = tmp_path / "checkpoint-1" / "trainer_state.json"
    kept["stateful_callbacks"]["TRLRollouts"]["attributes"] = {"slots": 8, "length": 192}
    state.write_text(json.dumps(kept))
    resumed = make(tmp_path, rollouts := TRLRollouts(), **settings, train_dataset=data)
    resumed.train(resume_from_checkpoint=str(state.parent))
    assert rollouts._room == {"slots": 8, "length": 192}


@pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
def test_adapters_are_rolled_out(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    noted = Noted(TRLRollouts())
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    make(tmp_path, noted, peft_config=lora, learning_rate=0.1).train()
    assert max(noted.off) <= 1e-4


@pytest.mark.parametrize(("settings", "says"), [
    ({"generation_kwargs": {"num_beams": 2}}, "generation_kwargs has num_beams=2"),
    ({"generation_kwargs": {"temperature": 0.5}}, r"GRPOConfig\(temperature=0.5\)"),
    ({"family": "bloom"}, "cannot generate with BloomForCausalLM"),
], ids=["argument", "temperature", "model"])  # fmt: skip
def test_what_the_engine_does_not_do_is_refused(settings: dict, says: str, tmp_path: Path) -> None:
    trainer = make(tmp_path, TRLRollouts(), **settings)
    with pytest.raises(ValueError, match=says):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    "name", ["use_vllm", "tools", "environment_factories", "use_transformers_continuous_batching"]
)
def test_other_generation_is_refused(name: str, tmp_path: Path) -> None:
    trainer = make(tmp_path, rollouts := TRLRollouts())
    setattr(trainer, name, [print])
    named = name.replace("factories", "factory")
    with pytest.raises(ValueError, match=f"leave {named} out"):
        rollouts(["w3"], trainer)


@pytest.mark.parametrize(
    ("of_weights", "says"),
    [
        (
            {"distributed_type": DistributedType.FSDP, "is_fsdp2": False, "state": None},
            "need FSDP2, and FSDP1 was asked for: set fsdp_version: 2",
        ),
        (
            {
                "distributed_type": DistributedType.DEEPSPEED,
                "state": SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3)),
            },
            "DeepSpeed's ZeRO-3 spreads them: use FSDP2 .* or zero_stage: 2",
        ),
    ],
    ids=["fsdp1", "zero-3"],
)
def test_weights_that_cannot_be_whole_are_refused(
    of_weights: dict, says: str, tmp_path: Path
) -> None:
    trainer = make(tmp_path, rollouts := TRLRollouts())
    trainer.accelerator = SimpleNamespace(num_processes=1, **of_weights)
    with pytest.raises(ValueError, match=says):
        rollouts(["w3"], trainer)
    assert rollouts._engine is None


def test_images_are_refused(tmp_path: Path) -> None:
    trainer = make(tmp_path, rollouts := TRLRollouts())
    trainer._is_vlm = True
    with pytest.raises(ValueError, match="a processor of images"):
        rollouts(["w3"], trainer)


def test_trainers_of_another_kind_are_refused(tmp_path: Path) -> None:
    rollouts = TRLRollouts()
    with pytest.raises(TypeError, match=r"TRL 1\.16's GRPOTrainer, and were called by a Simple"):
        rollouts(["w3"], SimpleNamespace())
    own = fastrl.GRPOTrainer(
        tiny_models.language_model(),
        even_words,
        fastrl.GRPOConfig(str(tmp_path), report_to=[], **CPU),
        train_dataset=Dataset.from_dict({"prompt": ["w3"]}),
        processing_class=tiny.tokenizer(),
        rollout_func=rollouts,
    )
    with pytest.raises(TypeError, match="has the rollout engine already"):
        rollouts(["w3"], own)


def test_each_trainer_has_rollouts_of_its_own(tmp_path: Path) -> None:
    rollouts = TRLRollouts()
    make(tmp_path / "1", rollouts, max_steps=1).train()
    with pytest.raises(ValueError, match=r"make TRLRollouts\(\) for each"):
        make(tmp_path / "2", rollouts, max_steps=1).train()


@pytest.mark.parametrize("wrong", [{"slots": 0}, {"kv_cache_gib": 0.0}])
def test_settings_out_of_range_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match="must be"):
        TRLRollouts(**wrong)
