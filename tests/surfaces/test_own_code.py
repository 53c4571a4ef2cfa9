"""What goes wrong with functions of one's own, and would not be seen: said before it is learned."""

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

import fastrl
from fastrl import cli
from fastrl.alignment import BatchFactory, PairwiseLoss, Trainer, loss_of_pairs, make_loss
from fastrl.learn.baselines import compared, standardised
from fastrl.learn.preferences import Side
from fastrl.models import CausalLMPolicy
from fastrl.tools.commands.ppo import GRPOFlags, GRPOJob
from fastrl.tools.commands.report import run_report
from fastrl.trainers.groups.replay import replay
from fastrl.user_code import forget_files
from tests import tables, tiny_models
from tests.golden import tiny
from tests.surfaces import test_one_method as one
from tests.surfaces.test_own_methods import leaky

ALIKE = "makes no difference"
Losses = Callable[[Tensor, Tensor, tuple[float, float]], Any]

pytestmark = pytest.mark.filterwarnings("ignore:the KL estimate is negative")


@pytest.fixture(autouse=True)
def _tables() -> Iterator[None]:
    with tables.kept():
        yield


def steep(log_ratio: Tensor, advantages: Tensor, cliprange: tuple[float, float]) -> Tensor:
    return -advantages * log_ratio.exp() * torch.where(advantages < 0, 0.5, 1.0)


def test_a_loss_of_pairs_keeps_its_defaults() -> None:
    def squared(chosen: Side, rejected: Side, beta: float = 0.3, tau: float = 2.0) -> Tensor:
        return (beta * tau * (chosen.ratio - rejected.ratio) - 1).square()

    loss_of_pairs()(squared)
    with pytest.warns(
        UserWarning, match=r"own default, beta=0.3, as DPOConfig's beta is at its de"
    ):
        config = fastrl.DPOConfig("x", loss_type="squared")
    chosen, rejected = (Side(torch.randn(3), torch.ones(3), torch.randn(3)) for _ in "wl")
    for made, coefficients in (
        (config, {}),
        (fastrl.DPOConfig("x", loss_type="squared", beta=0.2, discopop_tau=3.0), {"beta": 0.2}),
    ):
        row, options = made.objective("squared")
        framework: Any = make_loss("squared", **coefficients)
        wanted = framework.losses(chosen, rejected)
        torch.testing.assert_close(row(chosen, rejected, **options), wanted)
    said = "label_smoothing is ignored by squared: it is read by sigmoid, "
    with pytest.warns(UserWarning, match=said):
        fastrl.DPOConfig("x", loss_type="squared", beta=0.2, label_smoothing=0.1)


@pytest.mark.parametrize("loss", ["leaky", "steep", "sapo", "clip"])
def test_a_policy_loss_at_ratios_of_one_is_said_to_be_the_clip(loss: str) -> None:
    """But for one whose gradient there is another, and where ratios move."""
    fastrl.register_policy_loss("leaky")(leaky)
    fastrl.register_policy_loss("steep")(steep)
    grpo: dict[str, Any] = {"policy_loss": loss, "advantage": "grpo", "group_size": 4}
    names = {"clip": "dapo"}
    online = {"loss_type": names.get(loss, loss), "per_device_train_batch_size": 8}

    def said(make: Callable[[], Any]) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            make()
        return [str(each.message) for each in found if ALIKE in str(each.message)]

    job = GRPOJob(model="x", dataset="x", reward=["length"])
    once = (
        lambda: fastrl.PPOConfig(**grpo, ppo_epochs=1, batch_size=8),
        lambda: GRPOFlags(policy_loss=loss, batch_size=8).config_for(job),
        lambda: fastrl.GRPOConfig("x", **online),
    )
    counts = [len(said(make)) for make in once]
    assert counts == {"leaky": [1, 1, 1], "sapo": [1, 1, 0]}.get(loss, [0, 0, 0])
    for make in (
        lambda: fastrl.PPOConfig(**grpo, ppo_epochs=2, batch_size=8),
        lambda: fastrl.PPOConfig(**grpo, ppo_epochs=1, batch_size=8, mini_batch_size=4),
        lambda: fastrl.GRPOConfig("x", **online, num_iterations=2),
        lambda: fastrl.GRPOConfig("x", **online, steps_per_generation=2),
    ):
        assert not said(make)


def test_titles_name_a_policy_loss_by_its_function() -> None:
    fastrl.register_policy_loss("mine.py:leaky")(leaky)
    assert fastrl.PPOConfig().title == "PPO"
    assert fastrl.PPOConfig(policy_loss="mine.py:leaky").title == "PPO with leaky"


def test_settings_that_a_loss_or_an_advantage_does_not_read() -> None:
    fastrl.register_policy_loss("leaky")(leaky)
    fastrl.PPOConfig(policy_loss="leaky", cliprange_high=0.3)  # warns of nothing
    with pytest.warns(UserWarning, match=r"reads: lam=0.5 .*, vf_coef=0.5 \(advantage='grpo', not"):
        fastrl.PPOConfig(advantage="grpo", group_size=2, lam=0.5, vf_coef=0.5)
    job = GRPOJob(model="x", dataset="x", reward=["length"])
    with pytest.warns(UserWarning, match="nothing reads") as said:
        GRPOFlags(lam=0.5).config_for(job)
    assert len(said) == 1
    with pytest.raises(ValueError, match="delta is for losses with PPO's clip, not 'leaky'"):
        fastrl.GRPOConfig("x", loss_type="leaky", num_iterations=2, delta=2.0)
    with pytest.warns(UserWarning, match="delta=2.0 is not read by loss_type='sapo', as in TRL"):
        fastrl.GRPOConfig("x", loss_type="sapo", delta=2.0)


def _calls(function: Losses) -> tuple[Losses, list[int]]:
    calls: list[int] = []

    def counted(log_ratio: Tensor, advantages: Tensor, cliprange: tuple[float, float]) -> Any:
        calls.append(len(log_ratio))
        return function(log_ratio, advantages, cliprange)

    return counted, calls


def test_a_policy_loss_that_mixes_tokens_or_has_no_gradient_is_refused() -> None:
    def normalised(log_ratio: Tensor, a: Tensor, cliprange: tuple[float, float]) -> Tensor:
        return leaky(log_ratio, a - a.mean(), cliprange)

    def still(log_ratio: Tensor, a: Tensor, cliprange: tuple[float, float]) -> Tensor:
        return -a * 0 * log_ratio

    def dropped(log_ratio: Tensor, a: Tensor, cliprange: tuple[float, float]) -> Tensor:
        return leaky(log_ratio, a, cliprange) * torch.rand_like(a).round()

    for function, says in (
        (normalised, "'own' gives a token another loss among other tokens: compute it element by"),
        (still, "'own' has the gradient 0 for every token, and nothing would be learned"),
    ):
        fastrl.register_policy_loss("own")(function)
        for make in (
            lambda: fastrl.GRPOConfig("x", loss_type="own", num_iterations=2),
            lambda: fastrl.PPOTrainer(
                fastrl.PPOConfig(policy_loss="own", batch_size=8), tiny_models.policy(),
                tokenizer=tiny.tokenizer(),
            ),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=says):
                make()
    before = torch.random.get_rng_state()
    for function in (dropped, leaky):
        counted, calls = _calls(function)
        fastrl.register_policy_loss("own")(counted)
        for _ in range(2):
            fastrl.GRPOConfig("x", loss_type="own", num_iterations=2)
        assert len(calls) == (2 if function is leaky else 3)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_loss_of_pairs_without_a_gradient_is_refused() -> None:
    def detached(chosen: Side, rejected: Side, beta: float = 0.1) -> Tensor:
        return (beta * (rejected.ratio - chosen.ratio)).detach()

    def zero(chosen: Side, rejected: Side) -> Tensor:
        return 0 * chosen.sums

    for function in (detached, zero):
        loss_of_pairs(name="own")(function)
        for make in (make_loss, lambda name: fastrl.DPOConfig("x", loss_type=name)):
            with pytest.raises(ValueError, match="'own' does not depend on the policy's log-probs"):
                make("own")


def test_an_advantage_that_is_not_finite_names_its_function() -> None:
    def ratio(rewards: Tensor, counts: Tensor) -> Tensor:
        return rewards / rewards.std(-1, keepdim=True)

    rewards, counts = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2).bool()
    with pytest.raises(ValueError, match="advantage ratio returned nan for response 0 of group 1"):
        compared(ratio, rewards, counts)
    counts[1, 1] = False  # and nothing is compared
    assert compared(ratio, rewards, counts).isfinite().all()
    unknown = torch.tensor([[0.0, torch.nan], [0.0, 1.0]])  # is not the function's
    assert compared(standardised, unknown, counts).isnan().any()
    assert compared(ratio, unknown, counts).isnan().any()
    weight = torch.ones((), requires_grad=True)
    with pytest.raises(ValueError, match=r"<lambda> returned advantages with a gradient: they"):
        compared(lambda rewards, counts: weight * rewards, rewards, counts)
    fastrl.group_advantage("ratio")(ratio)
    policy = CausalLMPolicy(tiny_models.language_model())
    config = fastrl.PPOConfig(
        advantage="ratio", group_size=4, batch_size=8, init_kl_coef=0.0, on_nonfinite="skip"
    )
    trainer = fastrl.PPOTrainer(config, policy, tokenizer=tiny.tokenizer())
    texts = [[torch.tensor(ids) for ids in each] for each in (one.QUERIES, one.FLAT)]
    with pytest.raises(ValueError, match="advantage ratio returned nan"):
        trainer.step(*texts, [torch.tensor(1.0)] * 8)


@pytest.mark.parametrize(("found", "says"), [
    (lambda v, r: (v, r), "must return .values, advantages, returns., got a tuple of 2"),
    (lambda v, r: (v, r[:, :-1], r), r"each \(8, \d+\) as its arguments are; advantages are"),
    (lambda v, r: (v, r, torch.full_like(r, torch.inf)), r"finite .*; returns\[0, \d+\] is inf"),
    (lambda v, r: (v, (r + 0).requires_grad_(), r), "advantages have a gradient: detach them"),
])  # fmt: skip
def test_advantages_of_a_subclass_are_checked(found: Callable[..., Any], says: str) -> None:
    class Own(fastrl.PPOTrainer):
        def compute_advantages(self, values: Tensor, rewards: Tensor, mask: Tensor) -> Any:
            return found(values, rewards)

    trainer = Own(fastrl.PPOConfig(batch_size=8), tiny_models.policy(), tokenizer=tiny.tokenizer())
    texts = [[torch.tensor(ids) for ids in each] for each in (one.QUERIES, one.FLAT)]
    with pytest.raises((TypeError, ValueError), match=says):
        trainer.step(*texts, [torch.tensor(x) for x in one.SCORES])


@pytest.mark.usefixtures("plays")
def test_the_clip_fraction_of_a_loss_of_ones_own_is_what_the_clip_would_cut(tmp_path: Path) -> None:
    def clipped(log_ratio: Tensor, a: Tensor, cliprange: tuple[float, float]) -> Tensor:
        ratio, (low, high) = log_ratio.exp(), cliprange
        return torch.maximum(-a * ratio, -a * ratio.clamp(1 - low, 1 + high))

    fastrl.register_policy_loss("own")(clipped)
    found: dict[str, list[float]] = {}
    for loss in ("clip", "own"):
        settings: dict[str, Any] = {"group_size": 4, "advantage": "grpo", "policy_loss": loss}
        config = fastrl.PPOConfig(
            **settings, batch_size=8, ppo_epochs=2, cliprange=0.02, init_kl_coef=0.0,
            learning_rate=one.RATE, optim="sgd",
        )  # fmt: skip
        policy = CausalLMPolicy(tiny_models.language_model())
        trainer = fastrl.PPOTrainer(config, policy, tokenizer=tiny.tokenizer())
        texts = [[torch.tensor(ids) for ids in each] for each in (one.QUERIES, one.FLAT)]
        stats = trainer.step(*texts, [torch.tensor(x) for x in one.SCORES])
        args = fastrl.GRPOConfig(
            str(tmp_path), num_generations=4, num_iterations=2, epsilon=0.02, logging_steps=2,
            loss_type="dapo" if loss == "clip" else loss, max_completion_length=6, **one.FITTED,
        )  # fmt: skip
        rows = Dataset.from_list([{"prompt": text} for text in one.PROMPTS])
        made = fastrl.GRPOTrainer(
            tiny_models.language_model(), one.scored, args, rows, processing_class=tiny.tokenizer()
        )
        made.train()
        log = made.state.log_history[0]
        found[loss] = [stats["ppo/policy/clipfrac"], log["clip_ratio/region_mean"]]
    assert found["own"] == found["clip"]
    assert min(found["own"]) > 0


MINE = """
import torch

def leaky(log_ratio, advantages, cliprange):
    return -advantages * log_ratio.exp()

def centred(rewards, counts):
    return rewards - rewards.mean(-1, keepdim=True)

def pairs(chosen, rejected, beta=0.1):
    return -torch.nn.functional.logsigmoid(beta * (chosen.ratio - rejected.ratio))

def weigh(batch):
    return [1.0] * batch.size
"""


def _changed(path: Path) -> None:
    path.write_text(path.read_text().replace("    return ", "    return 0.5 * ", 1))
    path.write_text(path.read_text().replace("rewards - ", "2 * rewards - "))
    path.write_text(path.read_text().replace("return -torch", "return -2 * torch"))
    path.write_text(path.read_text().replace("[1.0]", "[0.5]"))
    forget_files()


def test_changed_code_is_named_by_resuming_and_replaying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As is where two runs differ, and a run is replayed from another folder."""
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    Path("mine.py").write_text(MINE)
    Path("reward.py").write_text(one.REWARD)
    one.saved(tiny_models.language_model(), Path())
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": x}) + "\n" for x in one.PROMPTS))
    grpo = (
        "grpo --model start --dataset rows.jsonl --reward reward.py:score --group-size 4 "
        "--policy-loss mine.py:leaky --advantage mine.py:centred --batch-size 8 --ppo-epochs 2 "
        "--eval-prompts 0 --init-kl-coef 0 --keep-last 0 --learning-rate 0.01 --output run "
    )

    def status_of(line: str) -> int:
        return cli.main(line.split())

    assert status_of(f"{grpo} --steps 2 --save-every 1") == 0
    code = json.loads(Path("run/run.json").read_text())["code"]
    names = ["the policy loss mine.py:leaky", "the advantage mine.py:centred"]
    assert {f"code or weights of {name}" for name in names} < code.keys()
    monkeypatch.chdir(tmp_path)
    assert status_of("replay a/run --step 2") == 0
    _changed(tmp_path / "a" / "mine.py")
    said = rf"code or weights of {names[0]}: \w+ → \w+, code or weights of {names[1]}: \w+ → \w+"
    shutil.move("a/run/checkpoints/checkpoint-1", "a/later")
    with pytest.warns(UserWarning, match=rf"not that of the run \({said}\): updates") as warned:
        status_of("replay a/run --step 2")
    assert sum("code or weights" in str(each.message) for each in warned) == 1
    shutil.move("a/later", "a/run/checkpoints/checkpoint-1")
    monkeypatch.chdir(tmp_path / "a")
    with pytest.warns(UserWarning, match=rf"resume: settings differ .*\({said}\)"):
        assert status_of(f"{grpo} --steps 3 --resume") == 0
    shutil.copytree("run", "other")
    changed = json.loads(Path("run/run.json").read_text())
    assert changed["code"].keys() == code.keys()
    assert changed["code"] != code
    Path("other/run.json").write_text(json.dumps({**changed, "code": code}))
    assert run_report(["run", "other", "--output", "both"]) == 0
    assert names[0] in Path("both/report.html").read_text().split("Settings that differ")[1]


def _online(folder: Path) -> Any:
    mine = f"{folder / 'mine.py'}:"
    args = fastrl.GRPOConfig(
        str(folder / "grpo"), num_generations=4, num_iterations=2, advantage=f"{mine}centred",
        loss_type=f"{mine}leaky", max_completion_length=6, ledger=True,
        **{**one.FITTED, "save_strategy": "steps", "save_steps": 2, "max_steps": 4},
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": text} for text in one.PROMPTS])
    policy, tokenizer = tiny_models.language_model(), tiny.tokenizer()
    return fastrl.GRPOTrainer(policy, one.scored, args, rows, processing_class=tokenizer)


PAIRS = [{"prompt": "w3 w4", "chosen": f" w{i}", "rejected": " w9"} for i in (10, 11, 12, 13)]
SAVED = {**one.FITTED, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
SAVED |= {"per_device_train_batch_size": 2}


def _dpo(folder: Path) -> Any:
    args = fastrl.DPOConfig(str(folder / "dpo"), loss_type=f"{folder / 'mine.py'}:pairs", **SAVED)
    return fastrl.DPOTrainer(
        tiny_models.language_model(), args=args, train_dataset=Dataset.from_list(PAIRS),
        processing_class=tiny.tokenizer(),
    )  # fmt: skip


def _framework(folder: Path) -> Any:
    from fastrl.alignment import AlignmentConfig, DatasLoader, make_reweighter

    rows = Dataset.from_list(PAIRS)
    data = DatasLoader(rows, tiny.tokenizer())
    factory = BatchFactory("offline-pairwise", data, batch_size=2)
    mine = f"{folder / 'mine.py'}:"
    loss = make_loss(f"{mine}pairs")
    assert isinstance(loss, PairwiseLoss)
    settings = {k: v for k, v in SAVED.items() if k != "per_device_train_batch_size"}
    args = AlignmentConfig(output_dir=str(folder / "align"), **settings)
    weigh = make_reweighter(f"{mine}weigh")
    return Trainer(tiny_models.language_model(), args, factory, loss, reweighter=weigh)


@pytest.mark.filterwarnings("ignore:output_dir .* holds checkpoints later")
@pytest.mark.parametrize(("make", "names"), [
    (_online, ("policy loss .*:leaky", "advantage .*:centred")),
    (_dpo, ("loss .*:pairs",)),
    (_framework, ("loss .*:pairs", "reweighter")),
])  # fmt: skip
def test_trainers_name_changed_code(
    make: Callable[[Path], Any], names: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    make(tmp_path).train()
    checkpoint = min(tmp_path.glob("*/checkpoint-*"))
    _changed(tmp_path / "mine.py")
    changed = make(tmp_path)
    said = ", ".join(rf"code or weights of the {name}: \w+ → \w+" for name in names)
    with pytest.warns(UserWarning, match=rf"resume: settings differ .*\({said}\)"):
        changed.train(resume_from_checkpoint=str(checkpoint))
    if make is _online:
        with pytest.warns(UserWarning, match=r"the code is not that of the run \(code or weights"):
            replay(make(tmp_path), tmp_path / "grpo", 1)


plays, _no_figures = one.plays, one._no_figures
