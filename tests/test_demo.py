"""The demo: its text, and a quick run through all of its stages."""

import json
import random

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastrl import cli
from fastrl.demo import experiment as demo
from fastrl.demo.text import (
    opening,
    polarity,
    preference_pairs,
    reviews,
    sentence,
    split_openings,
)
from fastrl.models import AutoModelForCausalLMWithValueHead
from fastrl.run.report import Comparison


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


def test_critic_mostly_agrees_with_the_rule():
    verdicts = [
        (polarity(r.text) > 0) == bool(r.label) for r in reviews(2000, 1) if polarity(r.text)
    ]
    assert 0.8 < sum(verdicts) / len(verdicts) < 1.0


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


def test_quick_demo_runs_every_stage_and_reaches_its_goal(tmp_path, capsys):
    output = tmp_path / "demo"
    assert cli.main(["demo", "--quick", "--output", str(output)]) == 0
    out = capsys.readouterr().out
    assert "PASSED" in out
    assert "before and after" in out

    summary = json.loads((output / "summary.json").read_text())
    assert summary["reward_gain_in_sems"] >= demo.GAIN_IN_SEMS
    assert summary["kl_after"] <= summary["kl_ceiling"] == demo.KL_CEILING
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
    steps = [
        json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()
    ]
    assert max(steps) == summary["ppo_steps"]

    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    model = AutoModelForCausalLM.from_pretrained(output / "model")
    prompt = tokenizer("the film is", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=4, do_sample=False).shape[1] > 3
    AutoModelForCausalLMWithValueHead.from_pretrained(output / "model")


def test_demo_fails_when_a_condition_does(capsys):
    from rich.console import Console

    console = Console(width=200)
    assert demo._verdict(Comparison(0.0, 0.1, 1.0, 0.1, kl=3.0), console, 1.0) == 0
    assert demo._verdict(Comparison(0.0, 0.1, 0.5, 0.1, kl=3.0), console, 1.0) == 1
    assert "the reward rose by 3.5 standard errors, not by 4" in capsys.readouterr().out
    assert demo._verdict(Comparison(0.0, 0.1, 1.0, 0.1, kl=30.0), console, 1.0) == 1
    assert "KL is 30.00, above its ceiling" in capsys.readouterr().out
    assert demo._verdict(Comparison(0.0, 0.1, 1.0, 0.1, kl=float("nan")), console, 1.0) == 1
