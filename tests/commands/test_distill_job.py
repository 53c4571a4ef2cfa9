"""``fastrl distill`` from end to end, on tiny models and local files."""

import json
import shutil

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2ForSequenceClassification

from fastrl import cli
from fastrl.run.folder import RunFolder
from fastrl.tools.demo.models import build_tokenizer
from fastrl.tools.reports.curves import RunCurves
from tests import tiny_models
from tests.resuming import untimed

pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),
    pytest.mark.filterwarnings(tiny_models.PEFT_WARNING),
]


@pytest.fixture(scope="module")
def folder(world):
    texts = [
        json.loads(line)["text"] for line in (world / "reviews.jsonl").read_text().splitlines()
    ]
    rows = [
        {"prompt": " ".join(x.split()[:3]), "solution": " ".join(x.split()[3:6])} for x in texts
    ]
    (world / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    hinted = [{"prompt": x["prompt"], "privileged_context": x["solution"]} for x in rows]
    (world / "hinted.jsonl").write_text("".join(json.dumps(row) + "\n" for row in hinted))
    both = [{**x, **y} for x, y in zip(rows, hinted, strict=True)]
    (world / "both.jsonl").write_text("".join(json.dumps(row) + "\n" for row in both))
    two = [{**row, "teacher_prompt": row["prompt"]} for row in rows]
    (world / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in two))
    untitled = [{"words": row["prompt"]} for row in rows]
    (world / "untitled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in untitled))
    (world / "lines.txt").write_text("".join(row["prompt"] + "\n" for row in rows))
    model = AutoModelForCausalLM.from_pretrained(world / "lm")
    model.save_pretrained(world / "other")
    GPT2ForSequenceClassification(model.config).save_pretrained(world / "scored")
    build_tokenizer(sorted(texts, reverse=True)[:9]).save_pretrained(world / "other")
    return world


def arguments(folder, output, **flags):
    settings = {
        "model": "lm", "dataset": "prompts.jsonl", "output": output, "max-completion-length": 6,
        "eval-examples": 12, "max-steps": 4, "save-steps": 2, "logging-steps": 1,
        "learning-rate": "1e-2", "use-cpu": "true", "gradient-checkpointing": "false", **flags,
    }  # fmt: skip
    for name in ("model", "teacher", "dataset"):
        if name in settings:
            settings[name] = folder / settings[name]
    return ["distill", *(word for k, v in settings.items() for word in (f"--{k}", str(v)))]


def metrics_of(run):
    return untimed(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))


@pytest.mark.usefixtures("figures")
def test_a_run_comes_nearer_to_its_teacher_and_says_so(folder, tmp_path, capsys):
    run = tmp_path / "run"
    flags = {"teacher": "wide", "plan": "true", "report-to": "none"}
    assert cli.main(arguments(folder, run, **flags)) == 0
    shown, said = capsys.readouterr()
    assert "planned memory: " in said
    assert "Held-out prompts, before and after" in shown
    assert "nan" not in shown  # there are no rewards
    assert "held out divergence: " in shown
    summary = json.loads((run / "summary.json").read_text())
    assert summary["held_out_divergence_after"] < summary["held_out_divergence_before"]
    names = {f"held_out_{x}_{y}" for x in ("entropy", "length") for y in ("before", "after")}
    assert names <= set(summary)
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 12
    assert {row["reward_after"] for row in rows} == {None}
    # The report and the doctor find the metrics of responses under their names.
    curves = RunCurves.of(RunFolder.open(run))
    for name in ("divergence", "ppo/policy/entropy", "tokens/cut_share"):
        assert len(curves.read([name]).steps) == 4, name
    assert cli.main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "Divergence from the teacher" in page
    assert "score nan" not in page
    AutoModelForCausalLM.from_pretrained(run / "model")
    assert AutoTokenizer.from_pretrained(run / "model").eos_token == "<eos>"


def test_without_a_teacher_the_student_with_a_hint_teaches_an_adapter(folder, tmp_path, capsys):
    """Of a column of any name, as of privileged_context."""
    models = {}
    for name, flags in {
        "hinted": {"dataset": "hinted.jsonl"},
        "named": {"dataset": "hinted.jsonl", "hint-column": "privileged_context"},
        "solved": {"hint-column": "solution"},
    }.items():
        assert cli.main(arguments(folder, tmp_path / name, **{"lora-r": 2}, **flags)) == 0
        models[name] = tmp_path / name / "model" / "adapter_model.safetensors"
    assert len({path.read_bytes() for path in models.values()}) == 1
    run = json.loads((tmp_path / "solved" / "run.json").read_text())
    assert run["title"].endswith(f"distillation from itself (base) on {folder / 'prompts.jsonl'}")
    # An adapter is a teacher of a student with an adapter, on the one base.
    teaches = {"teacher": tmp_path / "solved" / "model", "lora-r": 2, "plan": "true"}
    capsys.readouterr()
    assert cli.main(arguments(folder, tmp_path / "third", **teaches)) == 0
    assert "a guess: a teacher's adapter: as large as" in capsys.readouterr().err
    other = {"model": shutil.copytree(folder / "lm", tmp_path / "other"), **teaches}
    with pytest.warns(UserWarning, match="was trained on .*lm, and is put on .*other here"):
        assert cli.main(arguments(folder, tmp_path / "fourth", **other)) == 0


def test_teachers_by_a_column_are_a_json_object(folder, tmp_path, capsys):
    rows = [json.loads(x) for x in (folder / "prompts.jsonl").read_text().splitlines()]
    data = tmp_path / "kinds.jsonl"
    data.write_text(
        "".join(json.dumps({**x, "kind": "ab"[i % 2]}) + "\n" for i, x in enumerate(rows))
    )
    config = tmp_path / "run.yaml"
    teachers = json.dumps({"a": str(folder / "wide"), "b": str(folder / "lm")})
    config.write_text(f"teacher: '{teachers}'\nteacher_column: kind\n")
    words = arguments(folder, tmp_path / "run", dataset=data)
    assert cli.main([words[0], str(config), *words[1:]]) == 0
    without = arguments(folder, tmp_path / "other")
    assert cli.main([words[0], str(config), *without[1:]]) == 2
    assert "has no column 'kind', teacher_column" in capsys.readouterr().err
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "| teachers | a, b |" in card or "a, b" in card


def test_a_run_that_is_resumed_is_the_run_and_its_samples_are_drawn_again(folder, tmp_path, capsys):
    """With a teacher that is an average of the student, and the first evaluation's texts."""
    flags = {"dataset": "hinted.jsonl", "teacher-model-kind": "ema", "ledger": "true"}
    flags |= {"log-completions": "true", "save-total-limit": 0}
    run = tmp_path / "run"
    assert cli.main(arguments(folder, run, **flags)) == 0
    assert sorted(x.name for x in (run / "completions").iterdir())
    files = run / "model" / "model.safetensors", run / "samples.jsonl"
    left = [path.read_bytes() for path in files]
    metrics = metrics_of(run)
    capsys.readouterr()
    assert cli.main(["replay", str(run), "--step", "4"]) == 0
    out = capsys.readouterr().out
    assert "step 4, from checkpoint-2: 1 update" in out
    assert out.splitlines()[-1] == "8 of 8 samples are identical"
    behind = run / "checkpoints" / "checkpoint-2"
    assert cli.main(arguments(folder, run, **flags, resume=behind)) == 0
    assert [path.read_bytes() for path in files] == left
    assert metrics_of(run) == metrics


@pytest.mark.parametrize(("flags", "message"), [
    ({}, "the teacher is the policy itself (teacher_model_kind='base') behind the same prompts"),
    ({"teacher": "other"}, "has another tokenizer"),
    ({"teacher": "nowhere"}, "nowhere"),
    ({"teacher": "lm"}, "has the very weights that the policy begins with"),
    ({"teacher": "scored"}, "is a classifier or reward model (GPT2ForSequenceClassification)"),
    ({"teacher": "wide", "teacher-model-kind": "ema"}, "leave one of them out"),
    ({"teacher": "wide", "teacher-column": "kind"}, "several teachers are --teacher '{"),
    ({"teacher-model": '{"a": "lm"}'}, "several teachers are --teacher '{"),
    ({"hint-column": "answer"}, "name the one that holds what the teacher knows"),
    ({"hint-column": "prompt"}, "hint_column='prompt': the data have the columns prompt, solution"),
    ({"dataset": "both.jsonl", "hint-column": "solution"}, "leave hint_column out, or remove"),
    ({"teacher": "wide", "dataset": "untitled.jsonl"}, "none of the columns prompt, query, text"),
    ({"dataset": "two.jsonl", "hint-column": "solution"}, "has both teacher_prompt and privileged"),
    ({"teacher": "lm", "lora-r": 2}, "has the very weights that the policy begins with"),
    ({"teacher": "wide", "missing-eos-penalty": 1},
     "--missing-eos-penalty 1.0 is not supported: nothing is rewarded here"),
    ({"teacher": "wide", "teacher-kl-coef": 0.5}, "--teacher-kl-coef 0.5 is not supported: the"),
    ({"teacher": "wide", "lmbda": 0.5}, "leave it out, or use fastrl.GKDTrainer"),
    ({"teacher": "wide", "max-completion-length": 64}, "exceeds the model's context of 48"),
    ({"teacher-model-kind": "old"}, "teacher_model_kind"),
])  # fmt: skip
def test_what_is_wrong_is_said_in_a_line(folder, tmp_path, capsys, flags, message):
    assert cli.main(arguments(folder, tmp_path / "run", **flags)) == 2
    (*_, last) = capsys.readouterr().err.rstrip("\n").split("\n")
    assert message in last
    assert not (tmp_path / "run").exists()


def test_a_file_of_lines_has_prompts(folder, tmp_path, capsys):
    flags = {"teacher": "wide", "dataset": "lines.txt", "max-steps": 1}
    assert cli.main(arguments(folder, tmp_path / "run", **flags)) == 0
    assert capsys.readouterr().err.count("prompts are its column 'text'") == 1


def test_a_row_is_named_by_its_place_in_the_file(folder, tmp_path, capsys):
    rows = [json.loads(x) for x in (folder / "hinted.jsonl").read_text().splitlines()]
    rows[41]["privileged_context"] = None
    data = tmp_path / "gap.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(arguments(folder, tmp_path / "run", dataset=data)) == 2
    assert "row 41 of " in capsys.readouterr().err


def test_a_plan_reads_the_teacher_and_names_what_saves_memory(folder, tmp_path, capsys):
    from transformers import LlamaConfig

    for name, width in (("student", 64), ("teacher", 1024)):
        LlamaConfig(
            hidden_size=width, intermediate_size=2 * width, num_hidden_layers=8,
            num_attention_heads=4, vocab_size=32000,
        ).save_pretrained(tmp_path / name)  # fmt: skip
    words = ["plan", str(tmp_path / "student"), "--method", "distill", "--teacher",
             str(tmp_path / "teacher"), "--device", "cuda", "--as-json", "true",
             "--prompt-tokens", "64", "--response-tokens", "64"]  # fmt: skip
    found = {}
    for name, more in {
        "device": [],
        "half": ["--teacher-model-init-kwargs", '{"dtype": "bfloat16"}'],
        "host": ["--teacher-placement", "host"],
        "none": ["--teacher-model-kind", "live", "--teacher-prompt-tokens", "96"],
    }.items():
        own = [x for x in words if x != "--teacher" and not x.endswith("/teacher")]
        assert cli.main([*(own if name == "none" else words), *more]) == 0
        plan = json.loads(capsys.readouterr().out)
        found[name] = plan["phases"]["update"]["by_kind"].get("reference", 0)
        if name == "none":
            assert plan["settings"]["teacher_prompt_tokens"] == 96
    parameters = 2 * 32000 * 1024 + 8 * (4 * 1024**2 + 3 * 2048 * 1024)
    assert found["device"] == pytest.approx(4 * parameters, rel=0.01)
    assert found["half"] == pytest.approx(2 * parameters, rel=0.01)
    layer = 4 * 1024**2 + 3 * 2048 * 1024
    assert found["host"] == pytest.approx(4 * (2 * 32000 * 1024 + layer), rel=0.01)
    assert found["none"] < found["device"] / 100
    assert cli.main(["plan", "x", "--method", "sft", "--teacher-prompt-tokens", "9"]) == 2
    assert "is for the method distill" in capsys.readouterr().err
