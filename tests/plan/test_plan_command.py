"""``fastrl plan``: what it prints, what it suggests, and what it refuses."""

import json

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForSequenceClassification

from fastrl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, SFTConfig, SFTTrainer
from fastrl.cli import main
from fastrl.tools.commands.plan import planned_run
from fastrl.tools.commands.plan_job import new_adapter
from fastrl.trainers.plan.advice import Dial, Remedy, what_fits, what_to_change
from fastrl.trainers.plan.memory import ACTIVATIONS, Peak
from fastrl.trainers.plan.report import Plan
from fastrl.trainers.plan.skeleton import blank_tokenizer

SIZES = {
    "vocab_size": 4001, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
FLAGS = ["--prompt-tokens", "16", "--response-tokens", "16", "--batch-size", "4"]


@pytest.fixture
def folder(tmp_path):
    """A model's folder with a configuration, and no weights."""
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    return tmp_path


def planned(capsys, *arguments):
    assert main(["plan", *map(str, arguments), "--as-json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments):
    assert main(["plan", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_a_plan_has_the_bytes_of_each_kind_by_phase(folder, capsys):
    plan = planned(capsys, folder, *FLAGS)
    weights = sum(p.numel() for p in _model().parameters()) * 4
    update, step = plan["phases"]["update"], plan["phases"]["optimizer"]
    assert update["by_kind"]["reference"] == pytest.approx(weights, rel=0.01)
    assert step["by_kind"]["gradients"] == pytest.approx(weights, rel=0.01)
    assert step["by_kind"]["optimizer"] == pytest.approx(2 * weights, rel=0.01)
    # 4 samples of 64 tokens at most: two layers of keys and values of two heads of 16.
    assert update["by_kind"]["KV cache"] == 2 * 2 * 4 * 64 * 2 * 16 * 4
    assert plan["peak"] == max(phase["total"] for phase in plan["phases"].values())


@pytest.mark.parametrize("method", ["ppo", "sft"])
def test_masters_of_weights_in_bf16_are_of_the_optimizer(folder, capsys, method):
    sizes = FLAGS if method == "ppo" else FLAGS[:4]
    plan = planned(capsys, folder, *sizes, "--method", method, "--dtype", "bfloat16")
    weights = sum(p.numel() for p in _model().parameters()) * 4
    for phase in ("update", "optimizer"):
        kept = plan["phases"][phase]["by_kind"]["optimizer"]
        assert kept == pytest.approx(3 * weights, rel=0.01), phase


def test_a_critic_of_its_own_is_counted(tmp_path, folder, capsys):
    critic = LlamaConfig(**{**SIZES, "num_hidden_layers": 1})
    critic.save_pretrained(tmp_path / "critic")
    plain = planned(capsys, folder, *FLAGS)["phases"]["update"]["by_kind"]
    found = planned(capsys, folder, *FLAGS, "--critic", tmp_path / "critic")["phases"]
    torch.manual_seed(0)
    policy = PPOTrainer(
        PPOConfig(batch_size=4, accelerator_kwargs={"cpu": True}),
        _model(),
        tokenizer=blank_tokenizer(),
        critic=LlamaForSequenceClassification(critic_config(critic)),
    )
    weights = sum(p.nbytes for p in policy.critic.unwrapped.parameters())
    own = found["update"]["by_kind"]
    assert own["parameters"] - plain["parameters"] == pytest.approx(weights, rel=0.01)
    assert own["optimizer"] - plain["optimizer"] == pytest.approx(2 * weights, rel=0.01)
    of_trainer = policy.plan(16, 16).phases["update"].by_kind
    assert of_trainer["parameters"] == own["parameters"]
    assert of_trainer["optimizer"] == own["optimizer"]


def critic_config(config):
    return LlamaConfig(**{**config.to_dict(), "num_labels": 1, "pad_token_id": 0})


@pytest.mark.parametrize("method", ["grpo", "sft", "reward", "dpo"])
def test_each_method_is_planned_with_the_flags_of_its_command(folder, capsys, method):
    sizes = ["--prompt-tokens", "16", "--response-tokens", "16"]
    name = "--batch-size" if method == "grpo" else "--per-device-train-batch-size"
    small, large = (
        planned(capsys, folder, "--method", method, *sizes, name, size)["peak"] for size in (8, 64)
    )
    assert small < large


REFUSED = 100


class Fake:
    """A run of some GiB, and ways to lower them."""

    def __init__(self, gib, *savings):
        self.gib, self.savings = gib, savings

    def plan(self):
        size = int(self.gib * 2**30)
        return Plan("", "cuda", {"update": Peak(size, {ACTIVATIONS: size})})

    def changes(self):
        return [
            Remedy(f"--{x} true", "", {ACTIVATIONS: 0.0}, lambda run, x=x: run.saving(x))
            for x in self.savings
        ]

    def saving(self, gib):
        if gib == REFUSED:
            raise ValueError("refused")
        return Fake(self.gib - gib, *self.savings)


def test_a_tiny_model_is_not_planned_with_millions_of_samples():
    tried = []

    class Tiny(Fake):
        kv_cache_flag = None

        def dials(self):
            return [Dial(ACTIVATIONS, 1e9, self.turned)]

        def turned(self, factor):
            tried.append(factor)
            return f"--size {factor}", Tiny(self.gib * factor)

    run = Tiny(0.001)
    (said,) = what_fits(run, run.plan(), 24)
    assert tried == [64]
    assert said.startswith("there is room for --size 64 ")


@pytest.mark.parametrize(("gib", "said"), [
    (23.5, "--1 true "),  # the first that is enough
    (25, "--3 true "),
    (26, "--1 true --3 true together"),
    (27, "--3 true --2 true together"),  # without the one that is not needed
    (40, "nothing known; --1 true --3 true --2 true leaves 34.00 GiB"),
])  # fmt: skip
def test_what_does_not_fit_comes_with_the_first_change_that_is_enough(gib, said):
    run = Fake(gib, REFUSED, 1, 3, 2)
    assert not run.plan().fits(24)
    assert what_to_change(run, run.plan(), 24).startswith(said)


@pytest.mark.parametrize(("method", "given"), [
    ("ppo", ["--batch-size", "8", "--mini-batch-size", "4", "--micro-batch-tokens", "2048"]),
    ("ppo", ["--reference", "copy", "--reference-dtype", "float32"]),
    ("ppo", ["--lora-r", "8"]),
    ("ppo", ["--sync-ref-every", "2", "--ref-ema", "0.5"]),
    ("grpo", ["--num-shared-layers", "1"]),
    ("sft", ["--lora-r", "8"]),
    ("dpo", ["--reference", "cached", "--reference-dtype", "bfloat16"]),
    ("dpo", ["--reference", "offload"]),
    ("dpo", ["--task", "online-pairwise", "--per-device-train-batch-size", "64"]),
    ("reward", []),
])  # fmt: skip
def test_a_run_with_the_flags_that_are_suggested_is_the_one_that_was_planned(folder, method, given):
    asked = [str(folder), "--method", method, "--device", "cuda"]
    run = planned_run([*asked, *given])
    found = [(each.flags, each.apply(run), each.cost) for each in run.changes()]
    found += [(*dial.turned(2), "") for dial in run.dials() if dial.most >= 2]
    changes = [each for each in found if each[1] is not None]
    assert len(changes) > 5
    for flags, changed, cost in changes:
        kept = [] if "without num_shared_layers" in cost else given
        taken = planned_run([*asked, *kept, *flags.split()])
        assert taken.flags == changed.flags, flags
        for name in ("dtype", "adapter", "four_bits"):
            assert vars(taken.skeleton)[name] == vars(changed.skeleton)[name], flags


@pytest.mark.parametrize(("sizes", "said"), [
    ((48, 1, 1), "--mini-batch-size 16 ("),  # 32 are no part of 48
    ((12, 1, 3), "--mini-batch-size 4 --gradient-accumulation-steps 1 ("),
])  # fmt: skip
def test_a_size_that_the_run_refuses_is_not_suggested(folder, capsys, sizes, said):
    names = ("--batch-size", "--mini-batch-size", "--gradient-accumulation-steps")
    flags = [word for name, size in zip(names, sizes, strict=True) for word in (name, size)]
    advice = " ".join(planned(capsys, folder, *FLAGS[:4], *flags, "--gpu-gib", "24")["advice"])
    assert said in advice


def test_a_reference_that_follows_slowly_stays_in_fp32_beside_weights_in_bf16(folder):
    run = planned_run([str(folder), "--sync-ref-every", "2", "--ref-ema", "0.5"])
    flags = {each.flags for each in run.changes() if each.apply(run) is not None}
    assert "--dtype bfloat16 --reference-dtype float32" in flags
    assert not any(each.startswith("--reference-dtype bfloat16") for each in flags)


def test_what_fits_names_flags_of_the_methods_command_alone(folder, capsys):
    sizes = ["--prompt-tokens", "16", "--response-tokens", "16"]
    asked = [folder, "--method", "dpo", "--task", "online-pairwise", *sizes, "--gpu-gib", "8"]
    advice = " ".join(planned(capsys, *asked)["advice"])
    assert "there is room for --" in advice
    named = {word for word in advice.split() if word.startswith("--")}
    assert named <= {"--rollout-slots", "--per-device-train-batch-size"}


def test_the_command_says_that_a_run_does_not_fit(folder, capsys):
    flags = [*FLAGS, "--mini-batch-size", "1", "--rollout-sleep", "true", "--gpu-gib", "0.8"]
    plan = planned(capsys, folder, *flags, "--gradient-checkpointing", "true")
    assert "does not fit" in plan["advice"][0]
    assert plan["advice"][1].startswith("cheapest change")


def test_a_reference_in_host_memory_takes_none_of_a_gpus(folder, capsys):
    flags = [*FLAGS, "--device", "cuda", "--precision", "fp32", "--reference"]
    copy, offload = (
        planned(capsys, folder, *flags, mode)["phases"] for mode in ("copy", "offload")
    )
    weights = copy["loading"]["by_kind"]["reference"]
    assert weights > 0
    assert offload["loading"]["by_kind"]["reference"] == pytest.approx(0, abs=0.01 * weights)
    assert 0.3 * weights < offload["scoring"]["by_kind"]["reference"] < weights


def test_what_fits_says_what_more_there_is_room_for(folder, capsys):
    shown = planned(capsys, folder, *FLAGS, "--mini-batch-size", "1", "--gpu-gib", "24")
    assert any("there is room for --mini-batch-size 4" in line for line in shown["advice"])


def test_an_unknown_architecture_says_what_is_a_guess(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "strange", **SIZES}))
    plan = planned(capsys, tmp_path, *FLAGS)
    assert any("'strange' is unknown" in guess for guess in plan["guesses"])
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "strange"}))
    assert "hidden_size" in refused(capsys, tmp_path, *FLAGS)


@pytest.mark.parametrize(("arguments", "named"), [
    (["--gpu-gib", "0"], "gpu_gib"),
    (["--gpu-gib", "5000"], "gpu_gib"),
    (["--method", "dpoo"], "dpo"),
    (["--method", "what"], "choose one of ppo, grpo, sft"),
    (["--method", "ppo", "--task", "sft"], "task='sft'"),
    (["--method", "dpo", "--task", "sft"], "offline-pairwise"),
    (["--load-in-4bit", "true"], "--lora-r 16"),
    (["--lora-r", "4", "--bnb-4bit-quant-type", "fp4"], "set load_in_4bit, too"),
    (["--dtype", "int8"], "unknown dtype 'int8'"),
    (["--method", "sft", "--prompt-tokens", "400", "--response-tokens", "400"],
     "--prompt-tokens=400 + --response-tokens=400 are more than the model's context of 512"),
    (["--method", "sft", "--max-length", "100"],
     "--prompt-tokens + --response-tokens = 512 are more than --max-length=100"),
    (["--method", "dpo", "--micro-batch-tokens", "511"],
     "--prompt-tokens + --response-tokens = 512: more than --micro-batch-tokens=511"),
    (["--method", "reward", "--micro-batch-tokens", "1023"],
     "512, and a pair has 1024: more than --micro-batch-tokens=1023"),
    (["--prompt-tokens", "1"], "--prompt-tokens must be a number of 2 or more, got 1"),
    (["--reference", "adapter"], "reference='adapter'"),
])  # fmt: skip
def test_bad_input_is_refused_by_name(folder, capsys, arguments, named):
    assert named in refused(capsys, folder, *arguments)


def test_a_second_adapter_is_refused_as_by_the_command_that_is_planned(tmp_path, folder, capsys):
    adapter = new_adapter(4)
    adapter.base_model_name_or_path = str(folder)
    adapter.save_pretrained(tmp_path / "adapter")
    said = refused(capsys, tmp_path / "adapter", "--lora-r", "4")
    assert "lora_r=4 asks for a new adapter" in said
    assert "leave out lora_r" in said


def test_a_folder_without_a_configuration_is_refused(tmp_path, capsys):
    assert "config.json" in refused(capsys, tmp_path)


def _model(**changes):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | changes))


@pytest.mark.parametrize("settings", [{}, {"sampler_correction": "token-mask"}], ids=str)
def test_a_trainer_plans_itself_and_stays_as_it_is(settings):
    torch.manual_seed(0)
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(_model())
    config = PPOConfig(
        batch_size=4, mini_batch_size=2, accelerator_kwargs={"cpu": True}, **settings
    )
    trainer = PPOTrainer(config, policy, tokenizer=blank_tokenizer())
    weights = {name: p.clone() for name, p in policy.named_parameters()}
    state, draws = trainer.accelerator.state, torch.get_rng_state()
    plan = trainer.plan(16, 16)
    assert plan.peak > 4 * sum(p.nbytes for p in policy.pretrained_model.parameters())
    assert torch.equal(torch.get_rng_state(), draws)
    assert trainer.accelerator.state is state
    assert all(torch.equal(p, weights[name]) for name, p in policy.named_parameters())


@pytest.mark.parametrize("tokens", [8, 16, 24])
def test_a_model_is_planned_for_that_is_smaller_than_its_activations(tokens):
    small = _model(vocab_size=97, hidden_size=16, intermediate_size=32)
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(small)
    config = PPOConfig(batch_size=4, mini_batch_size=2, accelerator_kwargs={"cpu": True})
    trainer = PPOTrainer(config, policy, tokenizer=blank_tokenizer())
    # The weights are real tensors, and the logits of 16 tokens and more have no memory.
    assert trainer.plan(16, tokens).peak > sum(p.nbytes for p in policy.parameters())


def test_a_four_bit_base_is_counted_as_it_is_stored(folder, capsys, monkeypatch):
    pytest.importorskip("bitsandbytes")
    # A forced library's pieces of so small a head would hold numbers, and sums over them none.
    monkeypatch.delenv("FASTRL_KERNELS_PRODUCTS", raising=False)
    flags = [*FLAGS, "--method", "grpo", "--group-size", "2", "--lora-r", "4"]
    whole = planned(capsys, folder, *flags)["phases"]["loading"]["by_kind"]["parameters"]
    quantised = planned(capsys, folder, *flags, "--load-in-4bit", "true")
    found = quantised["phases"]["loading"]["by_kind"]["parameters"]
    linear = 4 * sum(
        m.weight.numel()
        for name, m in _model().named_modules()
        if isinstance(m, torch.nn.Linear) and name != "lm_head"
    )
    # Half a byte for each weight, and four bytes of a scale for each 64 of them.
    assert whole - found == pytest.approx(linear * (1 - (0.5 + 4 / 64) / 4), rel=0.02)


def test_an_adapter_on_four_bits_is_planned_as_it_was_saved(tmp_path, folder, capsys):
    pytest.importorskip("bitsandbytes")
    from fastrl.models.load import load_language_model, with_adapter
    from fastrl.models.quantised import four_bit_config, save_beside_adapter

    _model().save_pretrained(tmp_path / "base")
    base = load_language_model(tmp_path / "base", quantization_config=four_bit_config())
    adapted = with_adapter(base, new_adapter(4))
    adapted.save_pretrained(tmp_path / "adapter")
    save_beside_adapter(adapted, tmp_path / "adapter")
    flags = [*FLAGS[:4], "--method", "sft"]
    saved = planned(capsys, tmp_path / "adapter", *flags)
    told = planned(capsys, tmp_path / "base", *flags, "--lora-r", "4", "--load-in-4bit", "true")
    assert saved["peak"] == told["peak"]
    whole = planned(capsys, tmp_path / "adapter", *flags, "--load-in-4bit", "false")
    assert saved["peak"] < whole["peak"]


@pytest.mark.parametrize(("method", "task"), [
    ("dpo", "online-pairwise"),
    ("kto", "offline-pointwise"),
    ("kto", "online-pointwise"),
    ("bradley-terry", "reward-modelling"),
])  # fmt: skip
def test_each_task_of_preference_learning_is_planned(folder, capsys, method, task):
    sizes = ["--prompt-tokens", "16", "--response-tokens", "16"]
    plan = planned(capsys, folder, "--method", method, "--task", task, *sizes)
    keys = plan["phases"].get("rollout", {}).get("by_kind", {}).get("KV cache", 0)
    assert (keys > 0) == task.startswith("online")
    assert plan["phases"]["update"]["by_kind"]["activations"] > 0


def test_what_is_kept_in_host_memory_is_not_counted(folder, capsys):
    flags = [*FLAGS, "--mini-batch-size", "4", "--device", "cuda", "--precision", "fp32"]
    kept, offloaded = (
        planned(capsys, folder, *flags, *more)["phases"]
        for more in ([], ["--offload-optimizer", "true", "--activation-offloading", "true"])
    )
    assert kept["optimizer"]["by_kind"]["optimizer"] > 0
    assert offloaded["optimizer"]["by_kind"]["optimizer"] == 0
    activations = [x["update"]["by_kind"]["activations"] for x in (kept, offloaded)]
    assert activations[1] < 0.7 * activations[0]


def test_what_fits_fills_slots_passes_and_keys(folder, capsys):
    flags = ["--prompt-tokens", "16", "--response-tokens", "16", "--batch-size", "16"]
    flags += ["--rollout-slots", "4", "--micro-batch-tokens", "128", "--gpu-gib", "24"]
    said = " ".join(planned(capsys, folder, *flags)["advice"])
    assert "--rollout-slots 16 --micro-batch-tokens 512 (" in said
    assert "--rollout-kv-cache-gib can be up to 2" in said  # nearly all of the GPU


@pytest.mark.parametrize("method", ["sft", "reward", "dpo"])
def test_batches_of_several_passes_are_planned_as_such(folder, capsys, method):
    flags = ["--method", method, "--prompt-tokens", "16", "--response-tokens", "16"]
    flags += ["--per-device-train-batch-size", "24"]
    whole = planned(capsys, folder, *flags)
    parts = planned(capsys, folder, *flags, "--gpu-gib", "24", "--micro-batch-tokens", "96")
    activations = [x["phases"]["update"]["by_kind"]["activations"] for x in (whole, parts)]
    assert activations[1] < 0.3 * activations[0]
    assert "--micro-batch-tokens " in " ".join(parts["advice"])
    too_small = refused(capsys, folder, *flags, "--micro-batch-tokens", "25")
    assert "more than --micro-batch-tokens=25" in too_small


def test_trainers_plan_themselves(tmp_path):
    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    rows = Dataset.from_dict({"input_ids": [[2, 3, 2, 3]] * 4})
    trainer = SFTTrainer(_model(), args, train_dataset=rows, processing_class=blank_tokenizer())
    weights = sum(p.nbytes for p in trainer.model.parameters())
    assert trainer.plan(32).phases["optimizer"].by_kind["optimizer"] == pytest.approx(
        2 * weights, rel=0.01
    )
    assert trainer.state.global_step == 0
    with pytest.raises(ValueError, match="tokens=1000"):
        trainer.plan(1000)
    with pytest.raises(ValueError, match="tokens must be"):
        trainer.plan("many")


def test_a_smaller_base_of_the_same_adapter_comes_before_what_learns_another(folder):
    adapted = planned_run([str(folder), "--lora-r", "4"])
    whole = planned_run([str(folder)])
    assert not any(each.learns_other for each in adapted.changes() if each.apply(adapted))
    assert any(each.learns_other for each in whole.changes() if each.apply(whole))
