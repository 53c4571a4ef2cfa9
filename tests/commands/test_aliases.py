"""Names of TRL, verl and OpenRLHF for settings: what each becomes, and which are refused."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from fastrl import cli
from fastrl.eras import eras_of
from fastrl.tools.commands.aliases import aliases_of
from fastrl.tools.commands.align import AlignFlags, AlignJob
from fastrl.tools.commands.distill import DistillFlags, DistillJob
from fastrl.tools.commands.plan import parse_plan
from fastrl.tools.commands.ppo import GRPOFlags, GRPOJob, PPOFlags, PPOJob
from fastrl.tools.commands.reward import RewardFlags, RewardJob
from fastrl.tools.commands.sft import SFTFlags, SFTJob

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"
KINDS: dict[str, list[Any]] = {
    "sft": [SFTJob, SFTFlags], "reward": [RewardJob, RewardFlags], "align": [AlignJob, AlignFlags],
    "distill": [DistillJob, DistillFlags], "ppo": [PPOJob, PPOFlags], "grpo": [GRPOJob, GRPOFlags],
}  # fmt: skip


def parsed(command: str, *words: str) -> Any:
    needed = ["--model", "m", "--dataset", "d", "--output", "o"]
    reward = ["--reward", "r"] if command in ("ppo", "grpo") else []
    return cli.parse(command, KINDS[command], [*words, *needed, *reward])


@pytest.mark.parametrize("command", KINDS)
def test_every_name_is_new_and_means_a_setting(command: str) -> None:
    fields = {name for kind in KINDS[command] for name in kind.__dataclass_fields__}
    old = {name for kind in KINDS[command] for name in eras_of(kind)}
    for name, alias in aliases_of(command).items():
        own = [kind.__dataclass_fields__.get(name) for kind in KINDS[command]]
        assert name not in old
        assert not any(field and field.init for field in own)
        assert alias.base in fields or (not alias.setting and alias.remedy)
        flags = set(re.findall(r"--[a-z-]*[a-z]", alias.remedy))
        assert {flag[2:].replace("-", "_") for flag in flags} <= fields, alias.remedy


def test_flags_mean_the_settings() -> None:
    job, flags = parsed(
        "grpo", "--beta", "0.1", "--lr=3e-6", "--num-generations", "4", "--epsilon", "0.3",
        "--epsilon_high", "0.4", "--max_completion_length", "9", "--num_iterations", "2",
        "--use-peft", "--lora-rank", "8", "--bf16", "--accelerator-kwargs", '{"cpu": true}',
    )  # fmt: skip
    assert (flags.init_kl_coef, flags.learning_rate, flags.group_size) == (0.1, 3e-6, 4)
    assert (flags.cliprange, flags.cliprange_high, flags.ppo_epochs) == (0.3, 0.4, 2)
    assert (job.max_new_tokens, job.lora_r) == (9, 8)
    assert flags.accelerator_kwargs == {"cpu": True, "mixed_precision": "bf16"}
    assert parsed("ppo", "--kl-coef", "0.1", "--adap-kl-ctrl", "false")[1].init_kl_coef == 0.1
    job, flags = parsed("align", "--epochs", "2", "--beta", ".3", "--use_peft", "false")
    assert (flags.num_train_epochs, job.make_loss().beta, job.lora_r) == (2, 0.3, 0)
    job, flags = parse_plan(["m", "--method=grpo", "--num-generations=4", "--max-new-tokens=7"])
    assert (flags.group_size, job.response_tokens) == (4, 7)


def test_yaml_takes_them_and_flags_win(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model_name_or_path: a\ndataset_name: b\nbeta: 0.2\nloss_args: {label_smoothing: 0.1}\n"
        "output-dir: c\nlr: 1e-4\n"
    )
    job, flags = cli.parse("align", KINDS["align"], [str(path), "--learning-rate", "3e-4"])
    assert (job.model, job.dataset, job.output, flags.learning_rate) == ("a", "b", "c", 3e-4)
    assert (job.make_loss().beta, job.make_loss().label_smoothing) == (0.2, 0.1)
    job, _ = cli.parse("align", KINDS["align"], [str(path), "--beta", "0.5"])
    assert (job.make_loss().beta, job.make_loss().label_smoothing) == (0.5, 0.1)
    job, _ = cli.parse("align", KINDS["align"], [str(path), "--loss-args", '{"beta": 1}'])
    assert (job.make_loss().beta, job.make_loss().label_smoothing) == (1, 0)
    path.write_text("beta: 0.2\ninit_kl_coef: 0.1\n")
    with pytest.raises(ValueError, match=r"run.yaml: beta and .*run.yaml: init_kl_coef are one"):
        cli.parse("grpo", KINDS["grpo"], [str(path)])


@pytest.mark.parametrize(("command", "words", "message"), [
    ("grpo", "--beta 0.1 --init-kl-coef 0.2", "--beta and --init-kl-coef are one setting"),
    ("ppo", "--save-every 3 --save-steps 4", "--save-every and --save-steps are one setting"),
    ("align", '--beta 0.1 --loss-args {"beta":0.2}', "--beta and the beta of loss_args are"),
    ("align", "--beta 0.1 --loss sft", "the loss sft has no coefficient 'beta'"),
    ("align", "--max-completion-length 9", "--max-completion-length: this task's responses are"),
    ("ppo", "--beta 0.1", "--beta: it is a coefficient that stays: set --adap-kl-ctrl"),
    ("grpo", "--kl_coef 0.1", "--kl-coef: it is of a KL in the reward"),
    ("grpo", "--epsilon-high 5 --policy-loss cispo", "--epsilon-high: of cispo"),
    ("grpo", "--per-device-train-batch-size 8", "sizes count completions"),
    ("grpo", "--num-train-epochs 3", "--num-train-epochs: a run has --steps steps"),
    ("sft", "--use-peft", "--use-peft: --lora-r is the adapter's rank"),
    ("sft", "--use-peft false --lora-r 8", "--use-peft and --lora-r are one setting"),
    ("grpo", "--num-generations [1]", "invalid int value: '[1]'"),
    ("grpo", "--num-generation 4", "did you mean '--num-generations'?"),
])  # fmt: skip
def test_what_would_differ_is_refused(command: str, words: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parsed(command, *words.split())


def test_a_plan_reads_its_method_from_yaml(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("model: m\nmethod: grpo\nnum_generations: 4\n")
    job, flags = parse_plan([str(path)])
    assert (job.method, flags.group_size, flags.advantage) == ("grpo", 4, "grpo")


def test_one_value_by_two_names_is_taken() -> None:
    assert parsed("sft", "--lr", "1e-4", "--learning-rate", "0.0001")[1].learning_rate == 1e-4


def test_help_all_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["align", "--help-all"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--learning-rate, --lr float" in text
    assert "--beta is its beta." in text


def test_the_page_lists_them() -> None:
    render = runpy.run_path(str(PAGE.parent / ".api" / "aliases.py"))["render"]
    text = PAGE.read_text(encoding="utf-8")
    assert render(text) == text, "python docs/.api/aliases.py writes it anew"
