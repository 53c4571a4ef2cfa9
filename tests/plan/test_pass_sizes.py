"""Passes that are chosen for a GPU: which, that they fit, and that they learn the same."""

from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fastrl import (
    AutoModelForCausalLMWithValueHead,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    PPOConfig,
    PPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from fastrl.alignment import AlignmentConfig, BatchFactory, DatasLoader, Trainer
from fastrl.rollout import rehearsed_engine
from fastrl.tools.commands import memory
from fastrl.tools.commands.memory import RunMemory
from fastrl.trainers.plan import passes
from fastrl.trainers.plan.memory import ACTIVATIONS, PARAMETERS, Peak
from fastrl.trainers.plan.passes import PassSize, choose_passes, fit_passes
from fastrl.trainers.plan.report import CONTEXT_BYTES, GAPS, GIB, Plan
from fastrl.trainers.plan.skeleton import blank_tokenizer, words

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": 0,
}  # fmt: skip
MIB = 2**20


def gib_with(nbytes):
    """GiB of a GPU on which tensors can have so many bytes."""
    return (nbytes / (1 - GAPS) + CONTEXT_BYTES) / GIB + 1e-9


@pytest.mark.parametrize(
    ("whole", "room", "expected", "plans"),
    [
        (8192, 20_000, PassSize(), 1),
        (65536, 30_000, PassSize(16384), 1),
        (65536, 20_000, PassSize(8192), 2),
        (65536, 14_800, PassSize(2048), 3),  # in proportion to 16384 tokens, 4096 would fit
        (65536, 12_000, PassSize(16384, recomputed=True), 2),
        (65536, 10_500, PassSize(4096, recomputed=True), 3),
        (65536, 10_050, PassSize(500, recomputed=True), 3),  # the samples' own tokens
        (65536, 9_000, PassSize(500, recomputed=True), 2),  # nothing fits
    ],
)
def test_large_passes_come_before_small_ones_and_these_before_activations_computed_again(
    whole, room, expected, plans
):
    """Beside 10000 MiB a pass takes 1 MiB a token and 1000 MiB, or a tenth of a MiB where
    activations are computed again."""
    asked = []

    def plan_with(size):
        asked.append(size)
        tokens = size.tokens or whole
        taken = tokens // 10 if size.recomputed else tokens + 1000
        kinds = {PARAMETERS: 10_000 * MIB, ACTIVATIONS: taken * MIB}
        return Plan("", "cuda", {"update": Peak((10_000 + taken) * MIB, kinds)})

    found, plan = choose_passes(plan_with, whole, 500, gib_with(room * MIB))
    assert (found, len(asked)) == (expected, plans)
    assert plan == plan_with(found)
    assert plan.fits(gib_with(room * MIB)) == (room > 10_000)


def _model(kind=LlamaForCausalLM, **more):
    torch.manual_seed(0)
    return kind(LlamaConfig(**SIZES, **more))


def _ppo(tmp_path):
    config = PPOConfig(
        batch_size=64, mini_batch_size=64, ppo_epochs=1, accelerator_kwargs={"cpu": True},
        optim="sgd", learning_rate=1.0,
    )  # fmt: skip
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(_model())
    trainer = PPOTrainer(config, policy, tokenizer=blank_tokenizer())

    def train():
        draws = torch.Generator().manual_seed(1)
        lengths = torch.randint(4, 33, (64,), generator=draws).tolist()
        texts = [torch.randint(2, 64, (n,), generator=draws) for n in lengths]
        trainer.step(
            [x[:3] for x in texts],
            [x[3:] for x in texts],
            [torch.tensor(float(i % 3)) for i in range(64)],
        )

    return trainer, policy, (32, 32), train


def _settings(kind, tmp_path, **more):
    return kind(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", max_steps=1,
        per_device_train_batch_size=64, optim="sgd", learning_rate=1.0, disable_tqdm=True, **more,
    )  # fmt: skip


def _sft(tmp_path):
    rows = Dataset.from_dict({"input_ids": [[2 + i % 40] * (2 + i % 31) for i in range(64)]})
    trainer = SFTTrainer(
        _model(), _settings(SFTConfig, tmp_path), train_dataset=rows,
        processing_class=blank_tokenizer(),
    )  # fmt: skip
    return trainer, trainer.model, (32,), trainer.train


def _reward(tmp_path):
    rows = {"chosen": [words(1 + i % 31) for i in range(64)], "rejected": [words(7, 1)] * 64}
    trainer = RewardTrainer(
        _model(LlamaForSequenceClassification, num_labels=1), _settings(RewardConfig, tmp_path),
        train_dataset=Dataset.from_dict(rows), processing_class=blank_tokenizer(),
    )  # fmt: skip
    return trainer, trainer.model, (32,), trainer.train


def _alignment(tmp_path):
    rows = {
        "prompt": [words(1 + i % 5, others=1) for i in range(64)],
        "chosen": [words(1 + i % 9) for i in range(64)],
        "rejected": [words(5, 1)] * 64,
    }
    loader = DatasLoader(Dataset.from_dict(rows), blank_tokenizer(), max_length=32)
    factory = BatchFactory("offline-pairwise", loader, batch_size=64)
    args = _settings(AlignmentConfig, tmp_path)
    trainer = Trainer(_model(), args, factory, "dpo")
    return trainer, trainer.model, (16, 16), trainer.train


def _dpo(tmp_path):
    rows = [
        {"prompt": [2] * (1 + i % 5), "chosen": [3] * (1 + i % 9), "rejected": [4, 5, 3]}
        for i in range(64)
    ]
    ids = [{f"{name}_ids": x for name, x in row.items()} for row in rows]
    args = _settings(DPOConfig, tmp_path, gradient_checkpointing=False)
    trainer = DPOTrainer(
        _model(), args=args, train_dataset=Dataset.from_list(ids),
        processing_class=blank_tokenizer(),
    )  # fmt: skip
    return trainer, trainer.model, (16, 16), trainer.train


def _grpo(tmp_path):
    args = _settings(
        GRPOConfig, tmp_path, gradient_checkpointing=False, max_completion_length=16, beta=0.1,
        loss_type="grpo",
    )  # fmt: skip
    rows = Dataset.from_dict({"prompt": [words(1 + i % 9) for i in range(8)]})
    trainer = GRPOTrainer(
        _model(), lambda completion_ids, **_: [float(sum(x) % 7) for x in completion_ids],
        args=args, train_dataset=rows, processing_class=blank_tokenizer(),
    )  # fmt: skip
    return trainer, trainer.model, (16, 16), trainer.train


def _counted(model):
    """The tokens of each forward to come, and the calls of a layer."""
    sizes, layers = [], []
    table = getattr(model, "pretrained_model", model).get_input_embeddings()
    table.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].numel()))
    layer = next(x for x in model.modules() if isinstance(x, LlamaDecoderLayer))
    layer.register_forward_pre_hook(lambda *_: layers.append(1))
    return sizes, layers


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("made", [_ppo, _sft, _reward, _alignment, _dpo, _grpo])
def test_a_trainer_learns_the_same_in_passes_that_fit(made, tmp_path, monkeypatch):
    monkeypatch.setattr(passes, "_MOST", 512)
    monkeypatch.setattr(passes, "_ENOUGH", 256)
    monkeypatch.setattr(rehearsed_engine, "copied_bytes", lambda _: 4)  # 128 MiB in earnest
    trained = []
    for fitted in (False, True):
        trainer, model, lengths, train = made(tmp_path)
        before = {name: x.detach().clone() for name, x in model.named_parameters()}
        if fitted:
            room = int(0.97 * trainer.plan(*lengths, passes=PassSize(512), device="cuda").peak)
            found, plan = fit_passes(trainer, *lengths, gpu_gib=gib_with(room))
            assert plan.peak <= room
            assert found.recomputed or found.tokens < 512
            sizes, layers = _counted(model)
        train()
        if fitted:
            assert max(sizes) <= (found.tokens or 4096)
            assert (len(layers) > len(sizes)) == found.recomputed
        trained.append(dict(model.named_parameters()))
    whole, limited = trained
    assert any(not torch.equal(x, before[name]) for name, x in whole.items())
    for name, x in whole.items():
        assert torch.allclose(x, limited[name], rtol=0, atol=1e-6), name


class Told:
    """A trainer that is told its passes."""

    limited = None

    def plan(self, *lengths, passes=None, device=None):
        assert device == "cuda"
        kinds = {ACTIVATIONS: (passes.tokens or 65536) * MIB}
        return Plan("", "cuda", {"update": Peak(kinds[ACTIVATIONS], kinds)})

    def tokens_of(self, *lengths):
        return 65536, sum(lengths)

    def limit_passes(self, passes):
        self.limited = passes


@pytest.mark.parametrize(("device", "processes", "asked", "is_open", "limited", "said"), [
    ("cuda", 1, None, True, PassSize(8192), "passes have 8192 tokens at most: set --micro"),
    ("cuda", 1, False, True, PassSize(8192), "passes have 8192 tokens at most: set --micro"),
    ("cuda", 2, None, True, PassSize(16384), "passes have 16384 tokens at most"),
    ("cuda", 2, None, False, None, ""),
    ("cuda", 2, True, False, None, "no plan of memory: a run of several processes has none"),
    ("cpu", 1, None, True, None, ""),
])  # fmt: skip
def test_commands_limit_passes_on_a_gpu_where_nobody_has(
    monkeypatch, capsys, device, processes, asked, is_open, limited, said
):
    gpu = SimpleNamespace(total_memory=10_000 * MIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(memory, "process_count", lambda: processes)
    monkeypatch.setattr(passes, "process_count", lambda: processes)
    trainer = Told()
    run = RunMemory(asked, device, trainer, lambda: (10, 20), is_open)
    assert trainer.limited == limited
    error = capsys.readouterr().err
    assert said in error if said else not error
    assert (run.plan is not None) == ("8192" in said and asked is None)
