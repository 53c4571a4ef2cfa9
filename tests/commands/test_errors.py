"""What the commands say of mistakes: in one line, the last, with the name of what is wrong."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from peft import LoraConfig
from tqdm.auto import tqdm
from transformers import (
    AutoTokenizer,
    BartConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForSequenceClassification,
    Trainer,
)

from fastrl import cli
from tests import tiny_models
from tests.patience import PATIENCE

COMMANDS = ("sft", "reward", "align", "ppo", "grpo")
REWARDS = """\
import time

def hangs(**columns):
    time.sleep(60)

def mean(numbers):
    return sum(numbers) / len(numbers)

def late(prompts, state={"calls": 0}, **columns):
    state["calls"] += 1
    if state["calls"] > 2:
        return [mean([]) for _ in prompts]
    return [0.0] * len(prompts)

def interrupted(prompts, **columns):
    raise KeyboardInterrupt

def zero(prompts, **columns):
    return [0.0] * len(prompts)

def nan(prompts, **columns):
    return [float("nan")] * len(prompts)

def words(prompts, **columns):
    return ["good"] * len(prompts)

def narrow(prompts, completions, completion_ids):
    return [0.0] * len(prompts)

def wide(prompts, answer, **columns):
    return [0.0] * len(prompts)
"""


@pytest.fixture(scope="module")
def folder(world):
    (world / "faulty.py").write_text(REWARDS)
    (world / "unfinished.py").write_text("def f(**columns:\n    return 1\n")
    rows = [json.loads(line) for line in (world / "pairs.jsonl").read_text().splitlines()]
    prompted = [{"prompt": "the ", **row} for row in rows]
    (world / "prompted.jsonl").write_text("".join(json.dumps(r) + "\n" for r in prompted))
    (world / "empty.jsonl").write_text("")
    (world / "broken.jsonl").write_text(json.dumps(rows[0]) + "\n{oops\n")
    (world / "latin.csv").write_bytes("text\ncaf\xe9\n".encode("latin-1"))
    (world / "not.parquet").write_text("no")
    (world / "afile").write_text("")
    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1)).save_pretrained(world / "untold")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (world / "t5").mkdir(exist_ok=True)
        (world / "t5" / name).write_bytes((world / "lm" / name).read_bytes())
    (world / "cut").mkdir(exist_ok=True)
    for file in (world / "lm").iterdir():
        short = 100 if file.suffix == ".safetensors" else None
        (world / "cut" / file.name).write_bytes(file.read_bytes()[:short])
    T5Config(d_model=8, num_layers=1).save_pretrained(world / "t5")
    shutil.copytree(world / "t5", world / "bart")
    BartConfig(d_model=8).save_pretrained(world / "bart")
    shutil.copytree(world / "t5", world / "t5-lora")
    (world / "t5-lora" / "config.json").unlink()
    lora = LoraConfig(task_type="SEQ_2_SEQ_LM", base_model_name_or_path=str(world / "t5"))
    lora.save_pretrained(world / "t5-lora")
    return world


def arguments(command, folder, output, /, **flags):
    settings = {"model": folder / "lm", "output": output}
    if command in ("ppo", "grpo"):
        settings |= {
            "dataset": folder / "reviews.jsonl", "reward": folder / "faulty.py:late",
            "prompt-words": 3, "max-new-tokens": 3, "steps": 2, "batch-size": 8,
            "eval-prompts": 4,
        }  # fmt: skip
    else:
        data = {"sft": "reviews", "reward": "pairs", "align": "prompted"}[command]
        settings |= {"dataset": folder / f"{data}.jsonl", "max-steps": 2, "use-cpu": "true"}
    settings |= {name.replace("_", "-"): value for name, value in flags.items()}
    if "reward" in flags:
        settings["reward"] = folder / flags["reward"]
    return [command, *(word for k, v in settings.items() for word in (f"--{k}", str(v)))]


def failed(capsys, *words: str) -> str:
    """What a command said last."""
    assert cli.main([*words]) == 2
    return last(capsys.readouterr().err)


def last(text: str) -> str:
    """What the last line shows, where a carriage return begins the line again."""
    assert text.endswith("\n")
    assert "Traceback" not in text
    return text[:-1].rpartition("\n")[2].rpartition("\r")[2]


ONLINE = {"task": "online-pairwise", "annotator": "faulty.py:zero"}
OF_MODELS = ("sft", "align", "ppo", "grpo")
IN_PYTHON = "fastrl.AutoModelForSeq2SeqLMWithValueHead"
EPOCHS = {"max_steps": -1, "num_train_epochs": 0}
# Commands, flags in which {folder} is the world's, and what the last line has of it.
REFUSED: list[tuple[tuple[str, ...], dict, tuple[str, ...]]] = [
    (COMMANDS, {"dtype": "float33"}, ("unknown dtype 'float33': choose one of float32, bfloat16",)),
    (COMMANDS, {"output": "{folder}/afile/run"}, ("{folder}/afile is a file, name a folder",)),
    (COMMANDS, {"seed": -1}, ("seed must lie between 0 and 4294967295, got -1",)),
    (COMMANDS, {"dataset": ""}, ("the data set's name is empty",)),
    (COMMANDS, {"model": "{folder}/untold"}, ("untold has no tokenizer: save one there with",)),
    (COMMANDS, {"model": "{folder}/cut"}, ("{folder}/cut/model.safetensors cannot be read: ",)),
    (COMMANDS, {"model": " "}, ("the model's name is empty",)),
    (OF_MODELS, {"model": "{folder}/t5"}, ("{folder}/t5 is an encoder–decoder (t5)", IN_PYTHON)),
    # BART has a class for its decoder alone; an adapter is told by its base.
    (OF_MODELS, {"model": "{folder}/bart"}, ("{folder}/bart is an encoder–decoder (bart)",)),
    (OF_MODELS, {"model": "{folder}/t5-lora"}, ("{folder}/t5 is an encoder–decoder (t5)",)),
    (("sft", "reward"), {"per_device_train_batch_size": 0},
     ("per_device_train_batch_size must be at least 1, got 0",)),
    (("sft", "reward"), {"learning_rate": "nan"},
     ("learning_rate must be 0 or more and finite, got nan",)),
    (("sft", "reward"), {"max_steps": 0},
     ("max_steps must be positive, or -1 for whole epochs, got 0",)),
    (("sft", "reward"), EPOCHS, ("num_train_epochs must be positive",)),
    (("sft", "reward"), {"resume_from_checkpoint": "last"}, ("resume: there is no folder last",)),
    (("ppo",), {"reward_label": "good"}, ("reward_label='good' is a label of a classifier",)),
    (("ppo",), {"no_gpus": "true"}, ("unknown argument '--no-gpus'",)),
    (("align",), {"reweighter_args": "{{}}"}, ("reweighter_args is read with reweighter alone",)),
    (("align",), {"annotator_label": "1"}, ("annotator_label is read with annotator alone",)),
    (("align",), {"judge_unparsed": "tie"}, ("judge_unparsed is read with judge alone",)),
    (("align",), {**ONLINE, "annotator_label": "1"},
     ("annotator_label='1' is a label of a class",)),
    (("align",), {"lora_r": 2, "num_shared_layers": 1},
     ("shared whole; leave num_shared_layers out",)),
    (("ppo",), {"reward": "unfinished.py:f"}, ("unfinished.py raised SyntaxError: ",)),
    (("ppo",), {"reward": "faulty.py:narrow"},
     ("cannot be called: got an unexpected keyword argument 'text'",)),
    (("ppo",), {"reward": "faulty.py:wide"},
     ("cannot be called: missing a required argument: 'answer'",)),
    (("ppo",), {"reward": "faulty.py:words"},
     ("faulty.py:words returned 'good' for completion 0",)),
    (("ppo",), {"reward": "faulty.py:hangs", "reward_timeout": 0.2},
     ("faulty.py:hangs did not return within reward_timeout=0.2 s",)),
    (("ppo",), {"max_ratio": 0.5}, ("exceeds max_ratio=0.5: lower learning_rate",)),
    (("ppo",), {"reward": "faulty.py:nan", "on_nonfinite": "raise"}, ("faulty.py:nan",)),
]  # fmt: skip
BEFORE_A_STEP = 15  # of these


@pytest.mark.filterwarnings("ignore:after .* the state is saved", tiny_models.PEFT_WARNING)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize(
    ("command", "row"),
    [(command, i) for i, (commands, *_) in enumerate(REFUSED) for command in commands],
)
def test_what_a_command_cannot_do_is_refused(command, row, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    _, flags, messages = REFUSED[row]
    flags = {name: str(value).format(folder=folder) for name, value in flags.items()}
    if flags.get("reward", "").startswith(("faulty", "unfinished")):
        flags.setdefault("reward_timeout", str(PATIENCE))
    said = failed(capsys, *arguments(command, folder, tmp_path / "run", **flags))
    assert [x for x in messages if x.format(folder=folder) not in said] == []
    assert len(said) < 500  # not the names of all architectures
    assert not (tmp_path / "run").exists() or row >= BEFORE_A_STEP


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["dataset", "eval_dataset"])
def test_a_file_that_cannot_be_read_is_named(command, flag, folder, tmp_path, capsys):
    files = {
        "empty.jsonl": "empty.jsonl is empty",
        "broken.jsonl": "broken.jsonl, line 2 is not valid JSON",
        "latin.csv": "latin.csv, line 2 is not UTF-8",
        "not.parquet": "not.parquet cannot be read as Parquet",
    }
    if command != "sft":  # all of them read files by one function
        files = {"empty.jsonl": files["empty.jsonl"]}
    for name, message in files.items():
        said = failed(
            capsys, *arguments(command, folder, tmp_path / "run", **{flag: folder / name})
        )
        assert said.startswith(f"fastrl: error: {folder / message}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_an_error_of_one_of_two_data_sets_says_which(command, folder, tmp_path, capsys):
    other = tmp_path / "other.jsonl"
    other.write_text('{"texts": "a"}\n')
    said = failed(capsys, *arguments(command, folder, tmp_path / "run", eval_dataset=other))
    which = other if command in ("ppo", "grpo") else "eval_dataset"
    assert said.startswith(f"fastrl: error: {which}: the data set has ")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_tracker_that_is_not_installed_is_named(command, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", list)
    monkeypatch.setattr("transformers.integrations.get_available_reporting_integrations", list)
    flag = "log_with" if command in ("ppo", "grpo") else "report_to"
    said = failed(capsys, *arguments(command, folder, tmp_path / "run", **{flag: "wandb"}))
    assert said == f"fastrl: error: {flag}=wandb needs a package: pip install wandb"
    said = failed(capsys, *arguments(command, folder, tmp_path / "run", **{flag: "wandbb"}))
    assert said.startswith(f"fastrl: error: unknown tracker {flag}='wandbb': choose one of")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_peft_is_named(command, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    said = failed(capsys, *arguments(command, folder, tmp_path / "run", lora_r=2))
    assert said == "fastrl: error: lora_r=2 needs peft: pip install 'peft>=0.21.2'"


def test_an_error_in_a_reward_function_shows_its_lines_and_comes_last(folder, tmp_path):
    """In a process of its own: nothing is printed on the way out either."""
    words = arguments("ppo", folder, tmp_path / "run")
    done = subprocess.run(
        [sys.executable, "-m", "fastrl.cli", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache")},
        timeout=PATIENCE,
    )
    assert done.returncode == 2
    said = last(done.stderr)
    assert said == (
        f"fastrl: error: {folder / 'faulty.py'}:late raised ZeroDivisionError: division by zero "
        f"({folder / 'faulty.py'}, line 7)"
    )
    assert "PPO: stopped after 1 of 2 steps\n" in done.stderr
    frames = [line for line in done.stderr.splitlines() if line.startswith('  File "')]
    assert [frame.rpartition(" ")[2] for frame in frames] == ["late", "<listcomp>", "mean"] or [
        frame.rpartition(" ")[2] for frame in frames
    ] == ["late", "mean"]  # Python 3.12 has no frame for a comprehension


def test_an_interrupted_run_leaves_no_bar(folder, tmp_path, capsys):
    reward = "faulty.py:interrupted"
    assert cli.main(arguments("grpo", folder, tmp_path / "run", reward=reward)) == 130
    assert last(capsys.readouterr().err).startswith("fastrl: interrupted; there is no checkpoint")
    assert not tqdm._instances


@pytest.mark.filterwarnings("ignore:after ValueError the state is saved")
@pytest.mark.parametrize(("error", "status", "message"), [
    (KeyboardInterrupt(), 130,
     "fastrl: interrupted; there is no checkpoint yet: --resume (resume=True) begins anew"),
    (ValueError("no\n more"), 2, "fastrl: error: no more"),
])  # fmt: skip
def test_training_that_stops_takes_its_bar_away(
    error, status, message, folder, tmp_path, capsys, monkeypatch
):
    learn = Trainer.training_step

    def stopping(trainer, *arguments, **keywords):
        if trainer.state.global_step == 1:
            raise error
        return learn(trainer, *arguments, **keywords)

    monkeypatch.setattr(Trainer, "training_step", stopping)
    assert cli.main(arguments("sft", folder, tmp_path / "run")) == status
    err = capsys.readouterr().err
    assert last(err) == message
    assert "SFT: stopped after 1 of 2 steps\n" in err
    assert not tqdm._instances


def summary(path) -> dict:
    return json.loads((path / "summary.json").read_text())


@pytest.mark.parametrize("command", ["sft", "reward", "align"])
def test_a_tenth_of_the_examples_is_held_out(command, folder, tmp_path):
    assert cli.main(arguments(command, folder, tmp_path / "run")) == 0
    told = summary(tmp_path / "run")
    assert (told["train_examples"], told["eval_examples"]) == (54, 6)


def test_a_tenth_of_distinct_prompts_is_held_out(folder, tmp_path):
    rows = [{"text": f"a film {i % 20}"} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {"steps": 1, "dataset": tmp_path / "rows.jsonl", "reward": "faulty.py:zero"}
    words = arguments("ppo", folder, tmp_path / "run", **flags)
    where = words.index("--eval-prompts")
    assert cli.main([*words[:where], *words[where + 2 :], "--prompt-words", "9"]) == 0
    told = summary(tmp_path / "run")
    assert (told["train_examples"], told["eval_examples"]) == (54, 2)


@pytest.mark.parametrize("command", ["sft", "ppo"])
def test_of_few_rows_none_is_held_out_and_a_line_says_so(command, folder, tmp_path, capsys):
    rows = (folder / "reviews.jsonl").read_text().splitlines()[:9]
    (tmp_path / "few.jsonl").write_text("\n".join(rows) + "\n")
    words = arguments(command, folder, tmp_path / "run", dataset=tmp_path / "few.jsonl")
    if command == "ppo":
        where = words.index("--eval-prompts")
        words = [*words[:where], *words[where + 2 :], "--steps", "1", "--prompt-words", "9"]
    assert cli.main(words) == 0
    what = "prompts" if command == "ppo" else "examples"
    assert f"9 {what} are too few to hold any out" in capsys.readouterr().err
    assert summary(tmp_path / "run")["eval_examples"] == 0


def test_a_data_set_to_evaluate_on_is_taken_whole(folder, tmp_path):
    flags = {"eval_dataset": folder / "reviews.jsonl"}
    assert cli.main(arguments("sft", folder, tmp_path / "run", **flags)) == 0
    told = summary(tmp_path / "run")
    assert (told["train_examples"], told["eval_examples"]) == (60, 60)


@pytest.mark.parametrize(
    ("command", "flags"), [*((name, {}) for name in COMMANDS), ("sft", {"packing": "true"})]
)
def test_a_token_that_the_model_has_no_row_for_is_named(command, flags, folder, tmp_path, capsys):
    """Before a step, also where it is in the last text."""
    grown = tmp_path / "grown"
    shutil.copytree(folder / "lm", grown)
    tokenizer = AutoTokenizer.from_pretrained(grown)
    rows = len(tokenizer)
    tokenizer.add_tokens(["zznew"])
    tokenizer.save_pretrained(grown)
    words = arguments(command, folder, tmp_path / "run", model=grown, **flags)
    at = words.index("--dataset") + 1
    *lines, last_line = Path(words[at]).read_text().splitlines()
    column = "text" if '"text": "' in last_line else "chosen"
    lines.append(last_line.replace(f'"{column}": "', f'"{column}": "zznew '))
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    words[at] = str(tmp_path / "data.jsonl")
    said = failed(capsys, *words)
    assert f"token 'zznew' (id {rows})" in said
    assert f"embeddings for {rows} tokens only; its tokenizer has {rows + 1}" in said
    assert "model.resize_token_embeddings(len(tokenizer))" in said


@pytest.mark.parametrize("where", ["dataset", "eval_dataset"])
@pytest.mark.parametrize(("command", "columns", "says"), [
    ("sft", {"text": 5}, "column 'text' must hold text, but row 7 holds '5'"),
    ("reward", {"margin": None}, "margin[7] is None"),
    ("reward", {"chosen": 5}, "column 'chosen' of row 7 holds 5"),
    ("align", {"prompt": ""}, "column 'prompt' of row 7 is empty"),
])  # fmt: skip
def test_a_row_that_cannot_be_used_is_named_as_in_its_file(
    command, columns, says, where, folder, tmp_path, capsys
):
    """Although rows are shuffled, and some held out."""
    words = arguments(command, folder, tmp_path / "run")
    given = words.index("--dataset") + 1
    good = {"margin": 1.0, "prompt": "the ", "chosen": "a", "rejected": "b", "text": "the"}
    rows = [{**good, **(columns if i == 7 else {})} for i in range(30)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if where == "dataset":
        words[given] = str(tmp_path / "data.jsonl")
    else:
        words += ["--eval-dataset", str(tmp_path / "data.jsonl")]
    assert says in failed(capsys, *words)


def test_an_encoder_decoder_reward_model_needs_texts_that_end(folder, tmp_path, capsys):
    words = arguments("reward", folder, tmp_path / "run", model=folder / "t5-whole")
    t5 = T5Config(
        vocab_size=200, d_model=8, num_layers=1, num_heads=1, d_kv=8, d_ff=8, num_labels=1
    )
    T5ForSequenceClassification(t5).save_pretrained(folder / "t5-whole")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "t5" / name, folder / "t5-whole" / name)
    assert "pass append_eos=True (commands: --append-eos true)" in failed(capsys, *words)


@pytest.mark.parametrize(("command", "flags", "says"), [
    ("reward", {}, "(mamba) cannot be a reward model or a classifier: transformers has no"),
    ("sft", {"packing": "true"}, "(packing=False; commands: --packing false)"),
])  # fmt: skip
def test_what_a_kind_of_model_cannot_do_is_said_once(
    command, flags, says, folder, tmp_path, capsys
):
    tokenizer = AutoTokenizer.from_pretrained(folder / "lm")
    shape = MambaConfig(
        vocab_size=len(tokenizer), hidden_size=8, state_size=2, num_hidden_layers=1,
        bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    MambaForCausalLM(shape).save_pretrained(folder / "mamba")
    tokenizer.save_pretrained(folder / "mamba")
    words = arguments(command, folder, tmp_path / "run", model=folder / "mamba", **flags)
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert says in last(said)
    assert len(last(said)) < 300
    assert "batches are padded" not in said
