"""The command line: flags, YAML, help, error messages and exit codes."""

import io
import re
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
import torch
from tqdm.auto import tqdm

from fastrl import cli
from fastrl.run.progress import line_start
from fastrl.tools.commands.ppo import PPOFlags, PPOJob
from fastrl.tools.commands.sft import SFTFlags, SFTJob
from fastrl_kernels._cpu.native.build import why_not
from fastrl_kernels.dispatch import NATIVE

REQUIRED = ["--model", "m", "--dataset", "d.jsonl", "--reward", "r"]


def parse_ppo(*arguments: str):
    return cli.parse("ppo", [PPOJob, PPOFlags], [*arguments])


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = cli.main([*arguments])
    return (status, *capsys.readouterr())


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_names_every_command(capsys, arguments):
    status, out, _ = run(capsys, *arguments)
    assert status == 0
    assert all(f"\n  {command} " in out for command in ("demo", "ppo", "grpo", "env"))
    assert all(len(line) <= 80 for line in out.split("\n"))


def test_version(capsys):
    status, out, _ = run(capsys, "--version")
    assert status == 0
    assert out.startswith("fastrl 0.")


@pytest.mark.parametrize("command", ["demo", "env", "plan"])
@pytest.mark.parametrize("flag", ["--help", "--help-all"])
def test_command_help_exits_with_zero(capsys, command, flag):
    with pytest.raises(SystemExit) as exit_info:
        cli.main([command, flag])
    assert exit_info.value.code == 0
    assert f"usage: fastrl {command}" in capsys.readouterr().out


def test_flags_take_dashes_and_underscores():
    job, flags = parse_ppo(*REQUIRED, "--max-new-tokens", "7", "--mini_batch_size", "4")
    assert job.max_new_tokens == 7
    assert flags.mini_batch_size == 4
    assert (job.output, flags.steps) == ("runs/ppo", 100)


def test_flags_win_over_yaml(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: m\ndataset: d.jsonl\nreward: r\nsteps: 20\nlearning-rate: 1e-4\n"
        "adap_kl_ctrl: false\nreward_label: -1\nmax_grad_norm: null\n"
        "tracker_kwargs: {wandb: {entity: me}}\n"
    )
    job, flags = parse_ppo(str(path))
    assert (job.model, flags.steps, flags.adap_kl_ctrl) == ("m", 20, False)
    assert flags.learning_rate == 1e-4  # YAML reads 1e-4 as a string
    assert job.reward_label == "-1"
    assert flags.max_grad_norm is None
    assert flags.tracker_kwargs == {"wandb": {"entity": "me"}}
    _, flags = parse_ppo(str(path), "--steps", "10", "--adap-kl-ctrl", "true")
    assert (flags.steps, flags.adap_kl_ctrl) == (10, True)


def test_steps_count_ppo_steps_and_names_come_from_the_job():
    job, flags = parse_ppo(*REQUIRED, "--steps", "3", "--batch-size", "8")
    config = flags.config_for(job)
    assert config.steps == 24
    assert (config.model_name, config.query_dataset, config.reward_model) == ("m", "d.jsonl", "r")
    job, flags = parse_ppo(*REQUIRED, "--model-name", "mine")
    assert flags.config_for(job).model_name == "mine"


@pytest.mark.parametrize(("arguments", "message"), [
    (["pop"], "unknown command 'pop': did you mean 'ppo'?"),
    (["rm"], "unknown command 'rm': it is fastrl reward"),
    (["dpo"], "unknown command 'dpo': it is fastrl align --loss dpo"),
    (["RLOO"], "it is fastrl grpo --advantage rloo"),
    (["gkd"], "unknown command 'gkd': it is fastrl distill"),
    (["sdft"], "it is fastrl distill --hint-column"),
    (["ppo", "-model", "m"], "unknown argument '-model': did you mean '--model'?"),
    (["ppo"], "the following arguments are required: --model, --dataset"),
    (["ppo", *REQUIRED, "--batch-sise", "8"], "did you mean '--batch-size'?"),
    (["ppo", *REQUIRED, "--steps", "many"], "argument --steps: invalid int value: 'many'"),
    (["ppo", *REQUIRED, "--top-p", "1.5"], "top_p must lie in (0, 1], got 1.5"),
    (["ppo", *REQUIRED, "--temperature", "0"], "temperature must be positive, got 0"),
    (["ppo", *REQUIRED, "--max-new-tokens", "0"], "max_new_tokens must be at least 1, got 0"),
    (["ppo", *REQUIRED, "--eval-prompts", "-1"], "eval_prompts must be 0 or more or None, got -1"),
    (["ppo", *REQUIRED, "--batch-size", "0"], "batch_size must be positive, got 0"),
    (["ppo", "config.txt"], "unexpected argument 'config.txt': a configuration ends in .yaml"),
    (["demo", "--steps", "0"], "steps must be at least 1 or None, got 0"),
    (["env", "--all"], "unknown argument '--all'"),
])  # fmt: skip
def test_user_errors_are_one_line_and_exit_with_two(capsys, arguments, message):
    status, out, err = run(capsys, *arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("fastrl: error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("text", "message"), [
    ("stepz: 3\n", "unknown setting 'stepz': did you mean 'steps'?"),
    ("- steps\n", "must hold settings"),
    ("steps: [\n", "is not valid YAML"),
    ("steps: 3\n\tbatch_size: 4\n", "config.yml has a tab in line 2, where YAML takes spaces"),
    ("batch-size: 4\nsteps: 1\nbatch_size: 8\n", "sets 'batch_size' twice (line 3)"),
    ("steps: 1.5\n", "argument --steps: invalid int value: '1.5'"),
    ("model: [a, b]\n", "model takes one value (text), not a list"),
    ("model: {a: 1}\n", "model takes one value (text), not a mapping"),
    ("dataset: [a, b]\n", "dataset takes one value (text), not a list"),
    ("learning_rate: [1e-4]\n", "learning_rate takes one value (float), not a list"),
    ("help: true\n", "unknown setting 'help'"),
    ("batch_size: caf\xe9\n".encode("latin-1"), "config.yml is not UTF-8"),
])  # fmt: skip
def test_yaml_errors_name_what_is_wrong(capsys, tmp_path, text, message):
    path = tmp_path / "config.yml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    status, _, err = run(capsys, "ppo", str(path), *REQUIRED)
    assert status == 2
    assert message in err


def test_a_plain_no_in_yaml_is_text(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: m\ndataset: d\neval_strategy: no\npacking: no\nbf16: false\n")
    _, flags = cli.parse("sft", [SFTJob, SFTFlags], [str(path)])
    assert flags.eval_strategy == "no"
    assert not flags.packing


def test_settings_of_other_versions_are_taken(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: m\ndataset: d\nevaluation_strategy: 'no'\nmax_seq_length: 7\n")
    with pytest.warns(UserWarning, match="in SFTConfig: .*max_seq_length=7 .now max_length=7"):
        _, flags = cli.parse("sft", [SFTJob, SFTFlags], [str(path), "--warmup-ratio", "0.5"])
    assert (flags.max_length, flags.eval_strategy, flags.warmup_steps) == (7, "no", 0.5)
    with pytest.raises(ValueError, match="SFTConfig has no tpu_num_cores=3: fastrl does not"):
        cli.parse("sft", [SFTJob, SFTFlags], [str(path), "--tpu_num_cores=3"])


def test_empty_yaml_is_no_settings(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("# nothing yet\n")
    assert parse_ppo(str(path), *REQUIRED)[0].model == "m"


COMMANDS = ("sft", "reward", "align", "distill", "ppo", "grpo")


def shown(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        cli.main([*arguments])
    assert exit_info.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_a_screen_of_what_matters(capsys, monkeypatch, command, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = shown(capsys, command, "--help").splitlines()
    assert len(lines) <= 68
    assert max(map(len, lines)) <= columns
    flags = [line.split()[0] for line in lines if line.startswith("  --")]
    assert 18 <= len(flags) <= 30
    assert "--dataset text " in "\n".join(lines)  # of JSON files, and not JSON itself
    assert {"--model", "--dataset", "--output", "--learning-rate", "--lora-r"} <= set(flags)
    (count,) = re.findall(r"--help-all shows all (\d+) flags", "\n".join(lines))
    assert int(count) > 2 * len(flags)
    text = " ".join(" ".join(lines).split())
    assert "held out for evaluation, 0 for none; by default a tenth, 256 at most" in text
    assert f"[runs/{command}]" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_all_shows_every_flag_in_a_users_words(capsys, command):
    out = shown(capsys, command, "--help-all")
    flags = re.findall(r"^  (--[a-z].*)", out, flags=re.MULTILINE)
    (count,) = re.findall(r"shows all (\d+) flags", shown(capsys, command, "--help"))
    assert len([flag for flag in flags if not flag.startswith(("--no-", "--help"))]) == int(count)
    for flag in flags:
        assert not re.search(r"<|string_to_bool|NoneType|\bstr\b|Enum|Option", flag.split("  ")[0])
    json_flags = {flag.split()[0] for flag in flags if " JSON" in flag.split("  ")[0]}
    if command in ("ppo", "grpo"):
        assert json_flags == {
            "--tracker-kwargs", "--response-format", "--accelerator-kwargs", "--project-kwargs",
            "--push-to-hub-if-best-kwargs", "--teacher-model-init-kwargs",
        }  # fmt: skip
    else:
        assert {"--fsdp-config", "--deepspeed", "--model-init-kwargs"} <= json_flags
        # choices are listed
        assert "cosine_with_restarts" in out
        assert re.search("--logging-strategy no\\|steps\\|epoch", out)


def test_a_flag_that_turns_another_off_says_so(capsys):
    out = " ".join(shown(capsys, "ppo", "--help-all").split())
    assert "--no-ledger The same as --ledger false. " in out
    assert out.count("Keep a row for each sample") == 1


def test_a_bar_is_closed_before_the_message(monkeypatch, capsys):
    def stopping(*_):
        bar = tqdm(total=3, desc="mapping", leave=True)
        bar.update()
        raise ValueError("too\n  few")

    monkeypatch.setattr(cli, "_run", stopping)
    status, _, err = run(capsys, "env")
    assert status == 2
    assert err.split("\n")[-1] == ""
    *_, last = err.rstrip("\n").replace("\r", "\n").split("\n")
    assert last == "fastrl: error: too few"
    assert not tqdm._instances


def test_a_warning_is_one_line_without_a_place_in_the_source():
    program = (
        "import warnings; from fastrl import cli; before = warnings.formatwarning\n"
        "cli._run = lambda *_: warnings.warn('top_p=0.8\\n  acts') or 0\n"
        "assert cli.main(['env']) == 0 and warnings.formatwarning is before"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "fastrl: warning: top_p=0.8 acts\n")


def test_a_warning_is_not_behind_a_bar():
    program = (
        "import warnings; from tqdm.auto import tqdm; from fastrl import cli\n"
        "def run(*_):\n"
        "    bar = tqdm(total=3, desc='PPO')\n"
        "    warnings.warn('top_p acts')\n"
        "    bar.update(3); bar.close()\n"
        "    warnings.warn('no bar')\n"
        "    return 0\n"
        "cli._run = run; cli.main(['env'])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert {"fastrl: warning: top_p acts", "fastrl: warning: no bar"} <= set(ran.stderr.split("\n"))


def test_a_bar_is_erased_from_a_terminals_line(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert line_start(sys.stderr) == ""
    with tqdm(total=3, file=io.StringIO()):
        assert line_start(sys.stderr).startswith("\r")


def test_a_device_that_is_full_is_no_defect(monkeypatch, capsys):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(cli, "_run", full)
    status, _, err = run(capsys, "env")
    assert status == 2
    assert err.startswith("fastrl: error: CUDA out of memory. Lower the batch size")


def test_a_missing_file_is_named_without_its_number(capsys):
    assert run(capsys, "ppo", "gone.yaml")[2] == "fastrl: error: there is no file gone.yaml\n"


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("FASTRL_DEBUG", "1")
    with pytest.raises(cli.UsageError):
        cli.main(["pop"])


def test_defects_keep_their_traceback(monkeypatch):
    def defect(*_):
        raise AssertionError("a defect")

    monkeypatch.setattr(cli, "_run", defect)
    with pytest.raises(AssertionError):
        cli.main(["env"])


def test_interrupt_exits_with_130(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    assert run(capsys, "env")[0] == 130


def test_env_says_which_backend_each_kernel_uses_and_why(capsys):
    status, out, _ = run(capsys, "env")
    assert status == 0
    for name in ("python", "torch", "triton", "transformers", "flash-attn", "ppo_loss", "gae"):
        assert f"  {name} " in out
    assert re.search(r"BACKEND=(torch|native) asks for it|tensors are on cuda", out)


@pytest.mark.skipif(why_not() is not None, reason="no compiled code here")
def test_env_says_which_kernels_have_compiled_code(capsys, monkeypatch):
    monkeypatch.setenv("FASTRL_KERNELS_BACKEND", "native")
    _, out, _ = run(capsys, "env")
    backends = dict(re.findall(r"^    (\w+) +(\w+)$", out, re.MULTILINE))
    assert {name for name in backends if backends[name] == "native"} == set(NATIVE)
    assert backends["ppo_loss"] == "torch"


def test_optional_booleans_take_a_value():
    @dataclass
    class Settings:
        maybe: bool | None = field(default=None)

    (settings,) = cli.parse("x", [Settings], ["--maybe", "true"])
    assert settings.maybe is True


@pytest.mark.parametrize(("command", "heavy"), [
    *((name, {"torch", "transformers"}) for name in ("report", "replay")),
    *((name, {"torch", "peft", "datasets"}) for name in ("grpo", "ppo", "plan")),
    ("demo", {"transformers.modeling_utils", "torch._inductor", "peft", "datasets"}),
])  # fmt: skip
def test_help_imports_no_more_than_flags_need(command, heavy):
    program = (
        "import sys; from fastrl.cli import main\n"
        f"try: main([{command!r}, '--help'])\n"
        f"except SystemExit: sys.exit(', '.join({heavy} & set(sys.modules)) or 0)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
