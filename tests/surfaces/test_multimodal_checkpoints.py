"""Checkpoints of images and texts are trained on texts, and saved in their own format."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

import fastrl
from fastrl import RolloutEngine, cli
from fastrl.models import AutoModelForCausalLMWithValueHead
from fastrl.models.load import load_language_model
from fastrl.tools.reports import report
from fastrl_kernels import reference
from tests import multimodal_models, tiny_models
from tests.trainers.conftest import ONE_STEP

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* reads texts alone here:UserWarning"),
    pytest.mark.filterwarnings("ignore:Casting complex values"),  # Llama 4's RoPE
    pytest.mark.filterwarnings(tiny_models.PEFT_WARNING),
]
TOWERS = ("visual", "vision_tower", "vision_model", "multi_modal_projector")
CHATS = [[{"role": "user", "content": text}] for text in ("abcd", "bcd", "cdef", "defgh")]
ANSWERS = [[{"role": "assistant", "content": text}] for text in ("aab", "ab", "bba", "abba")]
_PAIRS = {"prompt": CHATS, "chosen": ANSWERS, "rejected": ANSWERS[::-1]}
_ONLINE = {"num_generations": 4, "max_completion_length": 4}
TRAINERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # data, settings
    "SFT": ({"messages": [a + b for a, b in zip(CHATS, ANSWERS, strict=True)]}, {}),
    "DPO": (_PAIRS, {}),
    "KTO": ({"prompt": CHATS, "completion": ANSWERS, "label": [True, False] * 2}, {}),
    "GRPO": ({"prompt": CHATS}, {**_ONLINE, "beta": 0.1}),
    "Reward": (_PAIRS, {}),
}
_RL: dict[str, Any] = {
    "dataset": "texts.jsonl", "prompt-words": 2, "max-new-tokens": 4, "steps": 2, "batch-size": 8,
    "mini-batch-size": 4, "ppo-epochs": 1, "eval-prompts": 0, "save-every": 1,
}  # fmt: skip
_FIT: dict[str, Any] = {
    "eval-examples": 0, "max-steps": 2, "per-device-train-batch-size": 4, "use-cpu": "true",
}  # fmt: skip
COMMANDS = {
    "sft": {"dataset": "texts.jsonl", **_FIT},
    "align": {"dataset": "pairs.jsonl", "max-length": 40, **_FIT},
    "reward": {"dataset": "pairs.jsonl", **_FIT}, "ppo": _RL, "grpo": {**_RL, "group-size": 4},
}  # fmt: skip


def letters(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(set(str(each)))) for each in completions]


def train(name: str, start: Path, folder: Path, data: Any = None, **given: Any) -> None:
    """One step of a trainer by TRL's name; the model is in ``end`` then."""
    rows, settings = TRAINERS[name]
    kind, config = (getattr(fastrl, f"{name}{part}") for part in ("Trainer", "Config"))
    own = {"reward_funcs": letters} if "num_generations" in settings else {}
    trainer = kind(
        model=str(start),
        args=config(output_dir=str(folder / "run"), learning_rate=1e-2, **ONE_STEP, **settings),
        train_dataset=Dataset.from_dict({**rows, **(data or {})}),
        **own,
        **given,
    )
    shutil.rmtree(start)  # what is saved later was read before
    trainer.train()
    trainer.save_model(str(folder / "end"))


def command(name: str, start: Path, folder: Path, **flags: Any) -> Path:
    """A run of a command; returns the folder of its model."""
    texts = [f"{'abcd'[i % 4]} {'efg'[i % 3]} b a" for i in range(16)]
    pairs = [{"prompt": f"{x} ", "chosen": x, "rejected": x[::-1]} for x in texts]
    for file, rows in (("texts", [{"text": x} for x in texts]), ("pairs", pairs)):
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"model": start, "output": folder / name, "learning-rate": "1e-2", **COMMANDS[name]}
    settings["dataset"] = folder / settings["dataset"]
    if name in ("ppo", "grpo"):
        settings["reward"] = f"{__file__}:letters"
    words = [str(x) for k, v in {**settings, **flags}.items() for x in (f"--{k}", v)]
    assert cli.main([name, *words]) == 0
    return folder / name / "model"


def check_saved(before: dict[str, torch.Tensor], source: Path, saved: Path) -> None:
    """Names of weights, the towers' bits, and the processor's are those of the source; what reads
    texts has learned."""
    after = load_file(saved / "model.safetensors")
    heads = {name for name in before if "lm_head" in name}
    assert before.keys() - heads <= after.keys()
    changed = {name for name, x in before.items() if name in after and (x != after[name]).any()}
    of_towers = {name for name in before if any(tower in name for tower in TOWERS)}
    assert of_towers
    assert not changed & of_towers
    assert len(changed) > 10
    one, other = (json.loads((x / "config.json").read_text()) for x in (source, saved))
    assert one["vision_config"].items() <= other["vision_config"].items()
    if "score.weight" not in after:
        assert one["architectures"] == other["architectures"]
        assert before.keys() == after.keys()
    for file in source.glob("*process*.json"):
        assert (saved / file.name).read_bytes() == file.read_bytes()


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "write_report", lambda folder: folder.report)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    for family in multimodal_models.FAMILIES:
        multimodal_models.save(folder / family, family)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", multimodal_models.FAMILIES)
@pytest.mark.parametrize("name", ["SFT", "DPO", "GRPO"])
def test_trainers_by_trls_names_save_the_format_that_they_were_given(
    name, family, checkpoints, tmp_path
):
    start = shutil.copytree(checkpoints / family, tmp_path / "start")
    train(name, start, tmp_path)
    check_saved(weights(checkpoints / family), checkpoints / family, tmp_path / "end")


@pytest.mark.parametrize("name", ["KTO", "Reward"])
def test_feedback_and_rewards_too(name, checkpoints, tmp_path):
    start = shutil.copytree(checkpoints / "gemma3", tmp_path / "start")
    train(name, start, tmp_path)
    check_saved(weights(checkpoints / "gemma3"), checkpoints / "gemma3", tmp_path / "end")


@pytest.mark.parametrize(
    ("name", "family"),
    [("sft", "gemma3"), ("align", "qwen3_5"), ("reward", "qwen3_5"), ("ppo", "qwen3_5")]
    + [("grpo", "gemma3")],
)
def test_commands_do_so_and_resume(name, family, checkpoints, tmp_path):
    source = checkpoints / family
    model = command(name, source, tmp_path)
    check_saved(weights(source), source, model)
    if name in ("ppo", "grpo"):
        before = weights(model)
        command(name, source, tmp_path, steps=3, resume="true")
        assert any((x != before[key]).any() for key, x in weights(model).items())
        check_saved(weights(source), source, model)


def test_what_was_trained_loads_as_a_model_of_images_with_its_processor(checkpoints, tmp_path):
    source = checkpoints / "gemma3"
    saved = command("sft", source, tmp_path)
    trained = AutoModelForImageTextToText.from_pretrained(saved).eval()
    before = AutoModelForImageTextToText.from_pretrained(source).eval()
    processor = AutoProcessor.from_pretrained(saved)
    assert type(processor) is type(AutoProcessor.from_pretrained(source))
    inputs = processor(
        text="<|boi|>ab",
        images=[[torch.randint(255, (3, 16, 16), dtype=torch.uint8).numpy()]],
        return_tensors="pt",
    )
    with torch.no_grad():
        pictures = [m.get_image_features(inputs["pixel_values"]) for m in (before, trained)]
        logits = [m(**inputs).logits for m in (before, trained)]
    torch.testing.assert_close(*(x.pooler_output for x in pictures), rtol=0, atol=0)
    assert (logits[0] - logits[1]).abs().max() > 1e-3


@pytest.mark.parametrize("family", multimodal_models.FAMILIES)
def test_the_text_model_learns_and_runs_in_the_engine(family, checkpoints):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(checkpoints / family)
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == {
        name for name, _ in model.named_parameters() if any(tower in name for tower in TOWERS)
    }
    RolloutEngine(model, multimodal_models.tokenizer())


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_an_adapter_leaves_out_the_tower_and_is_merged_into_the_whole(
    family, checkpoints, tmp_path
):
    source = checkpoints / family
    adapter = command("sft", source, tmp_path, **{"lora-r": 2})
    names = load_file(adapter / "adapter_model.safetensors")
    assert names
    assert not [name for name in names if any(tower in name for tower in TOWERS)]
    assert cli.main(["merge", str(adapter), str(tmp_path / "merged")]) == 0
    merged = weights(tmp_path / "merged")
    before = weights(source)
    assert merged.keys() == before.keys()
    changed = {name for name, x in before.items() if (x != merged[name]).any()}
    assert changed
    assert not [name for name in changed if any(tower in name for tower in TOWERS)]
    for file in source.glob("*process*.json"):
        assert (tmp_path / "merged" / file.name).read_bytes() == file.read_bytes()


def test_an_adapter_on_the_text_model_alone_is_still_read(checkpoints, tmp_path):
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    text = AutoModelForCausalLM.from_pretrained(checkpoints / "qwen3_5", dtype=torch.float32)
    adapted = get_peft_model(text, LoraConfig(target_modules=["o_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path)
    ids = torch.arange(65, 75)[None]
    with torch.no_grad():
        found = load_language_model(tmp_path)(input_ids=ids).logits
        torch.testing.assert_close(found, adapted.eval()(input_ids=ids).logits)


@pytest.mark.parametrize(("student", "teacher"), [
    ("qwen3_vl", "qwen2_5_vl"), ("gemma3", "llama4"), ("qwen3_vl", None), ("qwen3_vl", "adapter"),
])  # fmt: skip
@pytest.mark.parametrize("padding_free", [False, True])
def test_distillation_on_texts(student, teacher, padding_free, checkpoints, tmp_path):
    """Of another family's teacher, or of the student itself behind a hint, with an adapter or
    without: the divergence is that of both whole models' logits in float64."""
    rows = {"prompt": ["ab c", "d", "bc d e", "ea b"]}
    given = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")}
    if teacher in (None, "adapter"):
        rows["privileged_context"] = ["a", "b c", "d", "e d"]
    trainer = fastrl.DistillationTrainer(
        str(checkpoints / student),
        str(checkpoints / teacher) if "privileged_context" not in rows else None,
        fastrl.DistillationConfig(
            str(tmp_path), max_completion_length=4, padding_free=padding_free, logging_steps=1,
            **ONE_STEP,
        ),
        Dataset.from_dict(rows),
        **(given if teacher == "adapter" else {}),
    )  # fmt: skip
    sides = [trainer.model, trainer.teacher_model or trainer.model]
    sides = [copy.deepcopy(model).double().eval() for model in sides]
    trainer.train()
    samples = trainer._generations.buffer[0]
    prompts = samples.prompt_ids, samples.teacher_prompt_ids or samples.prompt_ids
    found = []
    for i, response in enumerate(samples.sequences):
        both = []
        for model, read in zip(sides, prompts, strict=True):
            ids = torch.cat([read[i], response])[None]
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, len(read[i]) - 1 : -1]
            both.append(logits.log_softmax(-1))
        found.append(reference.divergence(*both, 1.0))
    expected = torch.cat(found).mean().item()
    assert expected > 0.01
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ["SFT", "DPO", "GRPO"])
def test_pictures_and_processors_are_refused_by_name(name, checkpoints, tmp_path):
    start = checkpoints / "gemma3"
    rows = len(CHATS)
    with pytest.raises(ValueError, match=r"column 'images' of .* would not be learned from"):
        train(name, start, tmp_path, {"images": [["a.png"]] * rows})
    with pytest.raises(TypeError, match=r"Gemma3Processor, and only texts are learned from"):
        train(name, start, tmp_path, processing_class=AutoProcessor.from_pretrained(start))
    shown = {"role": "user", "content": [{"type": "image", "text": "a.png"}]}
    said = {"role": "assistant", "content": [{"type": "text", "text": "a"}]}
    chats = {"messages": [[shown, said]] * rows} if name == "SFT" else {"prompt": [[shown]] * rows}
    with pytest.raises(ValueError, match=r"content of the type 'image'|must be a text"):
        train(name, start, tmp_path, chats)
    assert start.is_dir()
