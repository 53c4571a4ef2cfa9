"""Each method once: whatever surface asks for it, the same samples teach the same weights.

Float32, no dropout, plain gradient descent at a constant rate, two epochs of one mini-batch, with
formula of the KL, aggregate and bounds set alike.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM

import fastrl
from fastrl import alignment, cli
from fastrl.learn.preferences import PAIR_LOSSES, UNPAIRED_LOSSES
from fastrl.models import AutoModelForCausalLMWithValueHead, CausalLMPolicy
from fastrl.rewards.functions import load_function
from fastrl.rollout import RolloutOutput, SamplingParams
from fastrl.rollout.backends import EngineBackend
from fastrl.tools.reports import report
from fastrl.trainers.pairs.dpo_config import DPO_LOSSES
from tests import tables, tiny_models
from tests.golden import tiny

PROMPTS = ["w3 w4 w5", "w10 w11"]
PROMPT_IDS = [[3, 4, 5], [10, 11]]
# Of the first prompt, then of the second.
RESPONSES = [
    [[20, 21, 22, 1], [23, 24], [25, 26, 27, 28, 29, 1], [30, 31, 1]],
    [[40, 41], [42, 43, 44, 45, 1], [46, 47, 48, 1], [49, 50, 51, 52, 53, 54]],
]
FLAT = [response for group in RESPONSES for response in group]
QUERIES = [ids for ids in PROMPT_IDS for _ in range(4)]
EPOCHS, RATE, BETA, CLIP = 2, 0.3, 0.2, 0.02
Weights = dict[str, Tensor]

pytestmark = [
    pytest.mark.filterwarnings("ignore:the KL estimate is negative"),
    pytest.mark.filterwarnings("ignore:settings that nothing reads"),
]
FITTED: dict[str, Any] = {
    "per_device_train_batch_size": 8, "max_steps": EPOCHS, "learning_rate": RATE, "optim": "sgd",
    "lr_scheduler_type": "constant", "max_grad_norm": 1e9, "save_strategy": "no", "use_cpu": True,
    "report_to": "none", "disable_tqdm": True,
}  # fmt: skip
FLAGS: dict[str, Any] = {
    "steps": 1, "batch-size": 8, "mini-batch-size": 8, "ppo-epochs": EPOCHS, "optim": "sgd",
    "learning-rate": RATE, "max-grad-norm": 1e9, "cliprange": CLIP, "init-kl-coef": BETA,
    "adap-kl-ctrl": "false", "old-logprobs": "recompute", "max-new-tokens": 6, "eval-prompts": 0,
}  # fmt: skip


REWARD = """
def score(completions, **_):
    return [float(sum(int(word[1:]) for word in text.split()) % 7) for text in completions]
"""


def scored(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(int(word[1:]) for word in text.split()) % 7) for text in completions]


SCORES = scored([" ".join(f"w{i}" for i in ids if i != tiny.EOS) for ids in FLAT])


def weights(model: Any) -> Weights:
    named = {name.removeprefix("pretrained_model."): p for name, p in model.named_parameters()}
    return {name: p.detach().clone() for name, p in named.items()}


def run(command: str, folder: Path, data: list[dict[str, Any]], **flags: Any) -> Path:
    """A command on these rows; where it leaves its model."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    (folder / "reward.py").write_text(REWARD)
    given = {"dataset": folder / "rows.jsonl", "output": folder / "run", **flags}
    words = [word for k, v in given.items() if v is not None for word in (f"--{k}", str(v))]
    assert cli.main([command, *words]) == 0
    return folder / "run" / "model"


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "write_report", lambda folder: folder.report)


@pytest.fixture
def plays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollout engine says what is recorded."""

    def recorded(self: Any, model: Any, request: Any) -> RolloutOutput:
        known = {tuple(ids): iter(RESPONSES[i]) for i, ids in enumerate(PROMPT_IDS)}
        said = [next(known[tuple(ids.tolist())]) for ids in request.repeated()]
        reasons = ["eos" if ids[-1] == tiny.EOS else "length" for ids in said]
        stats = {"time/rollout": 0.0, "perf/rollout_tokens_per_second": 0.0}
        return RolloutOutput(list(map(torch.tensor, said)), reasons, stats=stats)

    monkeypatch.setattr(EngineBackend, "__call__", recorded)


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder / "start")
    tiny.tokenizer().save_pretrained(folder / "start")
    return folder / "start"


def assert_one(found: dict[str, Weights], start: Weights, without: dict[str, Weights]) -> None:
    """All surfaces have learned the same, and more than rounding; without clip or KL another."""
    first, *others = found.values()
    moved = max(float((first[name] - x).abs().max()) for name, x in start.items())
    assert moved >= 1e-2
    for name, x in first.items():
        for surface, other in zip([*found][1:], others, strict=True):
            off = float((other[name] - x).abs().max())
            assert off <= 1e-6, f"{surface}: {name} is off by {off:.1e}"
    for what, other in without.items():
        apart = max(float((first[name] - x).abs().max()) for name, x in other.items())
        assert apart > 1e-5, f"{what} does not act"


def by_step(model: Any, steps: int = 1, ref_model: Any = None, **settings: Any) -> Weights:
    """Of PPOTrainer.step."""
    config = fastrl.PPOConfig(
        batch_size=8, mini_batch_size=8, ppo_epochs=EPOCHS, optim="sgd", learning_rate=RATE,
        adap_kl_ctrl=False, **{"cliprange": CLIP, "init_kl_coef": BETA, **settings},
    )  # fmt: skip
    trainer = fastrl.PPOTrainer(config, model, ref_model, tiny.tokenizer())
    given = [list(map(torch.tensor, x)) for x in (QUERIES, FLAT)]
    for _ in range(steps):
        trainer.step(*given, [torch.tensor(x) for x in SCORES])
    return weights(trainer.model)


def respond(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A rollout_func that says what is recorded."""
    known = {text: iter(RESPONSES[i]) for i, text in enumerate(PROMPTS)}
    return {
        "prompt_ids": [PROMPT_IDS[PROMPTS.index(text)] for text in prompts],
        "completion_ids": [next(known[text]) for text in prompts], "logprobs": None,
    }  # fmt: skip


def test_grpo(plays: None, tmp_path: Path) -> None:
    start = tiny_models.language_model()
    grpo = {
        "advantage": "grpo", "group_size": 4, "kl_in": "loss",
        "loss_aggregate": "seq-mean-token-mean",
    }  # fmt: skip

    def step(**settings: Any) -> Weights:
        policy = CausalLMPolicy(tiny_models.language_model())
        return by_step(policy, **{**grpo, **settings})

    def trainer() -> Weights:
        args = fastrl.GRPOConfig(
            str(tmp_path / "trainer"), num_generations=4, num_iterations=EPOCHS, epsilon=CLIP,
            steps_per_generation=1, loss_type="grpo", beta=BETA, use_bias_correction_kl=False,
            max_completion_length=6, **FITTED,
        )  # fmt: skip
        made = fastrl.GRPOTrainer(
            tiny_models.language_model(), scored, args,
            Dataset.from_list([{"prompt": text} for text in PROMPTS]),
            processing_class=tiny.tokenizer(), rollout_func=respond,
        )  # fmt: skip
        made.train()
        return weights(made.model)

    def command() -> Weights:
        folder = saved(tiny_models.language_model(), tmp_path)
        flags = {**FLAGS, "group-size": 4, "loss-aggregate": "seq-mean-token-mean"}
        rows = [{"prompt": text} for text in PROMPTS]
        reward = f"{tmp_path / 'reward.py'}:score"
        model = run("grpo", tmp_path, rows, model=folder, reward=reward, **flags)
        return weights(AutoModelForCausalLM.from_pretrained(model))

    without = {"the clip": step(cliprange=10.0), "the KL": step(init_kl_coef=0.0)}
    found = {"step()": step(), "GRPOTrainer": trainer(), "fastrl grpo": command()}
    assert_one(found, weights(start), without)


def test_rloo(plays: None, tmp_path: Path) -> None:
    """With a KL in the rewards, which is nothing in the loss, and a second use of the responses."""
    start = tiny_models.language_model()
    rloo = {
        "advantage": "rloo", "group_size": 4, "kl_in": "reward", "ratio_level": "product",
        "loss_aggregate": "seq-mean-token-mean", "init_kl_coef": 0.0, "ratio_threshold": 1e9,
    }  # fmt: skip

    def step(**settings: Any) -> Weights:
        policy = CausalLMPolicy(tiny_models.language_model(perturbation=0.2))
        reference = CausalLMPolicy(tiny_models.language_model())
        return by_step(policy, ref_model=reference, **{**rloo, **settings})

    def trainer() -> Weights:
        args = fastrl.RLOOConfig(
            str(tmp_path / "trainer"), num_generations=4, num_iterations=EPOCHS, epsilon=CLIP,
            steps_per_generation=1, beta=BETA, max_completion_length=6, **FITTED,
        )  # fmt: skip
        made = fastrl.RLOOTrainer(
            tiny_models.language_model(perturbation=0.2), scored, args,
            Dataset.from_list([{"prompt": text} for text in PROMPTS]),
            processing_class=tiny.tokenizer(), rollout_func=respond,
        )  # fmt: skip
        # Another reference than the policy as training begins, so that the KL is not 0.
        for p, x in zip(made.ref_model.parameters(), start.parameters(), strict=True):
            p.data.copy_(x)
        made.train()
        return weights(made.model)

    without = {
        "the clip": step(cliprange=10.0, init_kl_coef=BETA), "the KL": step(),
    }  # fmt: skip
    found = {"step()": step(init_kl_coef=BETA), "RLOOTrainer": trainer()}
    assert_one(found, weights(start), without)


def test_ppo(plays: None, tmp_path: Path) -> None:
    start = tiny_models.policy()
    gae: dict[str, Any] = {"lam": 0.9, "vf_coef": 0.3}
    steps = 2  # the policy is its own reference in the first

    def step(**settings: Any) -> Weights:
        return by_step(tiny_models.policy(), steps, **{**gae, **settings})

    def command() -> Weights:
        folder = saved(tiny_models.policy(), tmp_path)
        rows = [{"prompt": text} for text in PROMPTS for _ in range(4)]
        reward = f"{tmp_path / 'reward.py'}:score"
        flags = {**FLAGS, "lam": 0.9, "vf-coef": 0.3, "steps": steps}
        model = run("ppo", tmp_path, rows, model=folder, reward=reward, **flags)
        return weights(AutoModelForCausalLMWithValueHead.from_pretrained(model))

    def framework() -> Weights:
        class Recites:
            model = tiny_models.language_model()

            def generate(self, prompts: Any, params: Any, ids: Any = None) -> RolloutOutput:
                known = {tuple(ids): iter(RESPONSES[i]) for i, ids in enumerate(PROMPT_IDS)}
                said = [torch.tensor(next(known[tuple(ids.tolist())])) for ids in prompts]
                return RolloutOutput(said, ["length"] * len(said))

        loader = alignment.DatasLoader(
            Dataset.from_list([{"prompt": text} for text in PROMPTS for _ in range(4)]),
            tiny.tokenizer(),
        )
        factory = alignment.BatchFactory(
            "reinforcement-learning", loader, batch_size=8, epochs=steps, engine=Recites(),
            annotator=alignment.RewardAnnotator(scored, tiny.tokenizer()),
            params=SamplingParams(max_new_tokens=6),
        )  # fmt: skip
        args = {k: v for k, v in FITTED.items() if not k.startswith("per_device")}
        args["max_steps"] = steps * EPOCHS
        loss = alignment.PPO(epochs=EPOCHS, kl_coef=BETA, cliprange=CLIP, **gae)
        trainer = alignment.Trainer(
            tiny_models.policy(), alignment.AlignmentConfig(str(tmp_path / "f"), **args), factory,
            loss,
        )  # fmt: skip
        trainer.train()
        return weights(trainer.model)

    without = {"the clip": step(cliprange=10.0), "the KL": step(init_kl_coef=0.0)}
    found = {"step()": step(), "fastrl ppo": command(), "the framework": framework()}
    assert_one(found, weights(start), without)


ROWS = [
    {"prompt": f"w{3 + i} w{4 + i} ", "chosen": f"w{20 + i} w{31 + 2 * i} w5",
     "rejected": f"w{60 - i} w{50 + i}"}
    for i in range(8)
]  # fmt: skip
LABELLED = [
    {"prompt": row["prompt"], "completion": row["chosen"], "label": i % 4 != 3}
    for i, row in enumerate(ROWS)
]
OWN = """
from fastrl.alignment import loss_of_pairs

@loss_of_pairs("a user")
def squared(chosen, rejected, beta=0.1):
    return (beta * (chosen.ratio - rejected.ratio) - 1).square()
"""
# Settings of DPOTrainer beside its loss_type, and the framework's loss with its coefficients.
PAIRS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    **{x: ({}, x, {}) for x in DPO_LOSSES if x not in ("aot", "aot_unpaired", "sft")},
    "sigmoid": ({}, "dpo", {}),
    "ipo": ({}, "ipo", {"length_means": True}),
    "squared": ({}, "squared", {}),
    **{
        kind: (
            {"loss_type": "sigmoid", "f_divergence_type": kind, "f_alpha_divergence_coef": 0.3},
            "dpo", {"divergence": kind, "divergence_alpha": 0.3},
        )
        for kind in ("forward_kl", "js_divergence", "alpha_divergence")
    },
}  # fmt: skip


@pytest.fixture
def own_loss(tmp_path: Path) -> Iterator[str]:
    """As a command names it."""
    (tmp_path / "mine.py").write_text(OWN)
    with tables.kept():
        load_function(f"{tmp_path / 'mine.py'}:squared")
        yield f"{tmp_path / 'mine.py'}:squared"


def by_trainer(folder: Path, method: str, rows: Any, **settings: Any) -> Weights:
    kind, config = (getattr(fastrl, f"{method}{each}") for each in ("Trainer", "Config"))
    args = config(str(folder / "trainer"), **{"beta": BETA, **FITTED, **settings})
    data, model = Dataset.from_list(rows), tiny_models.language_model()
    made = kind(model, args=args, train_dataset=data, processing_class=tiny.tokenizer())
    made.train()
    return weights(made.model)


def by_framework(
    folder: Path,
    task: str,
    rows: Any,
    loss: str,
    options: Any,
    settings: dict[str, Any] | None = None,
    **sizes: int,
) -> Weights:
    loader = alignment.DatasLoader(Dataset.from_list(rows), tiny.tokenizer())
    factory = alignment.BatchFactory(task, loader, **{"batch_size": 8, "epochs": EPOCHS, **sizes})
    args = {k: v for k, v in FITTED.items() if not k.startswith(("per_device", "max_steps"))}
    config = alignment.AlignmentConfig(str(folder / "f"), **args | (settings or {}))
    model, objective = tiny_models.language_model(), alignment.make_loss(loss, **options)
    made = alignment.Trainer(model, config, factory, objective)
    made.train()
    return weights(made.model)


@pytest.mark.parametrize("name", PAIRS)
def test_losses_of_pairs(name: str, own_loss: str, tmp_path: Path) -> None:
    """And one of a user's, which is a row like any other."""
    settings, loss, options = PAIRS[name]
    rate = 0.03 if name in ("ipo", "sppo_hard") else RATE  # squares are steep
    settings = {"loss_type": name, "learning_rate": rate, **settings}
    options, own = {"beta": BETA, **options}, {"learning_rate": rate}
    if loss != "dpo" and "label_smoothing" in PAIR_LOSSES[loss].options:
        settings, options = ({**x, "label_smoothing": 0.2} for x in (settings, options))
    found = {
        "DPOTrainer": by_trainer(tmp_path, "DPO", ROWS, **settings),
        "the framework": by_framework(tmp_path, "offline-pairwise", ROWS, loss, options, own),
    }
    if name in ("sigmoid", "squared"):
        flags = {k.replace("_", "-"): v for k, v in FITTED.items() if k not in ("disable_tqdm",)}
        flags |= {"loss": own_loss if name == "squared" else loss, "loss-args": json.dumps(options)}
        flags |= {"use-cpu": "true", "task": "offline-pairwise", "eval-examples": 0}
        start = saved(tiny_models.language_model(), tmp_path)
        model = run("align", tmp_path, ROWS, model=start, **flags)
        found["fastrl align"] = weights(AutoModelForCausalLM.from_pretrained(model))
    other = by_trainer(tmp_path, "DPO", ROWS, **{**settings, "beta": 2 * BETA})
    assert_one(found, weights(tiny_models.language_model()), {"β": other})


FOLLOWS = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}


def assert_follows(found: dict[str, Weights], by_trainer: Callable[..., Weights]) -> None:
    """All have followed by half of the way behind every other of four steps."""
    without = {
        "following": by_trainer(),
        "its steps": by_trainer(**FOLLOWS | {"ref_model_sync_steps": 1}),
        "its way": by_trainer(**FOLLOWS | {"ref_model_mixup_alpha": 1.0}),
    }
    assert_one(found, weights(tiny_models.language_model()), without)


def test_a_reference_of_pairs_that_follows(tmp_path: Path) -> None:
    def trainer(**settings: Any) -> Weights:
        return by_trainer(tmp_path, "DPO", ROWS, **{"max_steps": 4, **settings})

    flags = {k.replace("_", "-"): v for k, v in (FITTED | FOLLOWS | {"max_steps": 4}).items()}
    flags |= {"loss-args": json.dumps({"beta": BETA}), "eval-examples": 0, "disable-tqdm": None}
    start = saved(tiny_models.language_model(), tmp_path)
    options = {"beta": BETA}, FOLLOWS
    found = {
        "DPOTrainer": trainer(**FOLLOWS),
        "the framework": by_framework(
            tmp_path, "offline-pairwise", ROWS, "dpo", *options, epochs=4
        ),
        "fastrl align": weights(
            AutoModelForCausalLM.from_pretrained(
                run("align", tmp_path, ROWS, model=start, loss="dpo", **flags)
            )
        ),
    }
    assert_follows(found, trainer)


def test_a_reference_of_single_responses_that_follows(tmp_path: Path) -> None:
    def trainer(**settings: Any) -> Weights:
        sizes = {"per_device_train_batch_size": 2, "max_steps": 4}
        return by_trainer(tmp_path, "KTO", LABELLED, **sizes, **settings)

    sizes = {"batch_size": 2, "epochs": 1, "shuffle": False}
    options = {"beta": BETA}, FOLLOWS
    found = {
        "KTOTrainer": trainer(**FOLLOWS),
        "the framework": by_framework(
            tmp_path, "offline-pointwise", LABELLED, "kto", *options, **sizes
        ),
    }
    assert_follows(found, trainer)


@pytest.mark.parametrize("name", UNPAIRED_LOSSES)
def test_losses_of_single_responses(name: str, tmp_path: Path) -> None:
    """In batches of two, in which the row before is the row behind."""
    rows = LABELLED
    sizes = {"batch_size": 2, "epochs": 1, "shuffle": False}
    options = {"beta": BETA}

    def trainer(**settings: Any) -> Weights:
        given = {"loss_type": name, "per_device_train_batch_size": 2, "max_steps": 4, **settings}
        return by_trainer(tmp_path, "KTO", rows, **given)

    found = {
        "KTOTrainer": trainer(),
        "the framework": by_framework(tmp_path, "offline-pointwise", rows, name, options, **sizes),
    }
    without = {"β": trainer(beta=2 * BETA)}
    if name == "kto":
        without["the KL"] = trainer(loss_type="apo_zero_unpaired")
    assert_one(found, weights(tiny_models.language_model()), without)
