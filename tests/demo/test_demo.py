"""The demo: its text, and a quick run through all of its stages."""

import json
import random

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastrl import cli
from fastrl.models import AutoModelForCausalLMWithValueHead
from fastrl.tools.demo import experiment
from fastrl.tools.demo.experiment import GAIN_IN_SEMS, KL_CEILING, failures
from fastrl.tools.demo.text import (
    opening,
    polarity,
    preference_pairs,
    reviews,
    sentence,
    split_openings,
)
from fastrl.tools.reports.report import Comparison


def test_reviews_depend_on_the_seed_alone():
    assert reviews(20, seed=3) == reviews(20, seed=3)
    assert reviews(20, seed=3) != reviews(20, seed=4)


def test_reviews_are_varied_and_balanced():
    corpus = reviews(2000, seed=0)
    assert len({r.text for r in corpus}) > 1900
    assert 0.45 < sum(r.label for r in corpus) / len(corpus) < 0.55
    assert all(r.text.endswith(" .") for r in corpus)
    assert len({word for r in corpus for word in r.text.split()}) > 150


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the film is moving .", 2),
        ("the film is clumsy .", -1),
        ("the film is never moving .", -2),
        ("the film is moving and the plot is clever .", 3),
        ("the film is moving but the plot is clumsy .", 0),  # after "but" counts twice
        ("the film is never moving , clumsy .", -3),  # a comma ends the negation
        ("the film takes place in a small town .", 0),
    ],
)
def test_polarity_follows_the_words(text, expected):
    assert polarity(text) == expected


def test_labels_mostly_agree_with_the_rule():
    agree = [(polarity(r.text) > 0) == bool(r.label) for r in reviews(2000, 1) if polarity(r.text)]
    assert 0.8 < sum(agree) / len(agree) < 1.0


def test_pairs_mostly_have_the_more_favourable_review_first():
    pairs = preference_pairs(1000, seed=0)
    assert pairs == preference_pairs(1000, seed=0)
    differences = [polarity(chosen) - polarity(rejected) for chosen, rejected in pairs]
    decided = [d for d in differences if d]
    assert len(decided) > 800
    assert 0.75 < sum(d > 0 for d in decided) / len(decided) < 0.98
    assert all(chosen != rejected for chosen, rejected in pairs)


def test_openings_say_nothing_favourable_and_are_split_without_overlap():
    rng = random.Random(0)
    assert all(polarity(opening(rng)) == 0 for _ in range(500))
    train, held_out = split_openings(1024, 256, seed=0)
    assert (len(train), len(held_out)) == (1024, 256)
    assert len({*train, *held_out}) == 1280
    assert any(sentence(rng).startswith(tuple(train)) for _ in range(50))


def test_quick_demo_runs_every_stage_and_reaches_its_goal(tmp_path, capsys, monkeypatch):
    output = tmp_path / "demo"
    monkeypatch.setattr("shutil.which", lambda name: name)
    assert cli.main(["demo", "--quick", "--output", str(output)]) == 0
    out = capsys.readouterr().out
    assert "PASSED" in out
    assert "before and after" in out
    assert f"next:\n\n  fastrl chat {output} " in out

    summary = json.loads((output / "summary.json").read_text())
    assert summary["reward_gain_in_sems"] >= GAIN_IN_SEMS
    assert summary["kl_after"] <= summary["kl_ceiling"] == KL_CEILING
    assert summary["distinct_after"] > 128
    assert 0.55 < summary["reward_accuracy"] < 0.95  # fallible, but not blind
    assert set(summary["seconds_by_stage"]) == {"sft", "reward", "ppo"}
    for stage, metric in (("sft", "eval_loss"), ("reward", "eval_accuracy")):
        rows = (output / stage / "metrics.jsonl").read_text().splitlines()
        assert any(metric in json.loads(row) for row in rows), stage
        assert (output / stage / "model" / "model.safetensors").exists()
    prompts, held_out = (
        {json.loads(row)["prompt"] for row in (output / f"{name}.jsonl").read_text().splitlines()}
        for name in ("prompts", "held_out")
    )
    assert len(prompts) == 512
    assert len(held_out) == 256
    assert not prompts & held_out

    assert (output / "report.png").stat().st_size > 10_000
    assert "looks ill" not in out
    assert cli.main(["doctor", str(output)]) == 0
    assert "0 checks" not in capsys.readouterr().out
    steps = [
        json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()
    ]
    assert max(steps) == summary["ppo_steps"]

    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    model = AutoModelForCausalLM.from_pretrained(output / "model")
    prompt = tokenizer("the film is", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=4, do_sample=False).shape[1] > 3
    AutoModelForCausalLMWithValueHead.from_pretrained(output / "model")


@pytest.mark.parametrize(("after", "kl", "missed"), [
    (1.0, 3.0, []),
    (0.5, 3.0, ["the reward rose by 3.5 standard errors, not by 4"]),
    (1.0, 30.0, ["KL is 30.00, above its ceiling of 5 nats"]),
    (1.0, float("nan"), ["KL is nan, above its ceiling of 5 nats"]),
])  # fmt: skip
def test_each_condition_can_be_missed(after, kl, missed):
    assert failures(Comparison(0.0, 0.1, after, 0.1, kl=kl)) == missed


def test_a_missed_condition_ends_the_demo_with_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fastrl.tools.demo.experiment.KL_CEILING", 0.0)
    small = experiment.Size(
        reviews=64, language_model_steps=1, pairs=64, reward_steps=1, ppo_steps=1, batch_size=8,
        train_prompts=16, eval_prompts=8, eval_every=0,
    )  # fmt: skip
    monkeypatch.setattr(experiment, "QUICK", small)
    words = ["demo", "--quick", "--output", str(tmp_path)]
    assert cli.main(words) == 1
    assert "FAILED in" in capsys.readouterr().out


def test_a_file_in_the_way_is_named_before_any_work(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["demo", "--output", str(tmp_path / "file" / "run")]) == 2
    assert f"{tmp_path / 'file'} is a file, name a folder" in capsys.readouterr().err
