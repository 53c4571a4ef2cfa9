"""The page of a report: complete in itself, and safe whatever the runs hold."""

import json
import re
from html.parser import HTMLParser

import pytest

from fastrl.cli import main
from fastrl.run.folder import RunFolder
from fastrl.run.ledger import Ledger
from fastrl.tools.commands.report import run_report
from fastrl.tools.reports.html_report import page, short_names
from fastrl.tools.reports.notable_samples import notable_samples
from fastrl.tools.reports.report import write_overlay, write_page

EVIL = "<script>alert('$x')</script>&\"'"


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def make_run(folder, *, samples=(), summary=None, **config) -> RunFolder:
    run = RunFolder(folder, {"command": "ppo", "title": "a run", **config})
    run.begin()
    rows = [
        {
            "step": s,
            "reward/mean": s / 8,
            "reward/std": 0.5,
            "tokens/cut_share": 0.9,
            "tokens/eos_share": 0.1,
        }
        for s in range(1, 9)
    ]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.write_rows("samples.jsonl", samples)
    run.write_summary(summary or {"reward_after": 1.25})
    return run


def held_out(**changes):
    row = {"prompt": "p", "before": "b", "reward_before": 0.0, "after": "a", "reward_after": 1.0}
    return {**row, **changes}


def test_what_comes_from_runs_is_text(tmp_path):
    run = make_run(
        tmp_path / "a<b>",
        samples=[held_out(prompt=EVIL, after=EVIL, before=EVIL)],
        title=EVIL,
        job={EVIL: EVIL},
        summary={EVIL: 1.0},
    )
    read = Page(page([run, run], {EVIL: ["1", "2"]}))
    assert "script" not in read.tags
    assert read.text.count("<script>alert") >= 5
    assert "b" not in read.tags


def test_the_page_asks_for_nothing_from_elsewhere(tmp_path):
    text = page([make_run(tmp_path / "run", samples=[held_out()])], {})
    read = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(read.tags)
    links = [v for k, v in read.attributes if k in ("src", "href", "xlink:href", "srcset")]
    assert all(link.startswith("#") for link in links)
    assert not re.search(r"@import|url\((?!#)", text)
    ids = [value for name, value in read.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in links} <= set(ids)


def test_findings_lead_to_their_figure(tmp_path):
    text = page([make_run(tmp_path / "run")], {})
    found = re.search(r'90% of the responses .*<a href="#([^"]+)">figure</a>', text)
    assert found
    assert f'<figure id="{found[1]}" aria-label="Responses that end with EOS">' in text


def test_figures_have_the_colours_of_the_page(tmp_path):
    """Which differ with the reader's theme."""
    text = page([make_run(tmp_path / "run")], {})
    (svg, *_) = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert set(re.findall(r"#[0-9a-fA-F]{6}\b", svg)) == set()
    assert "var(--c0)" in svg
    assert "prefers-color-scheme: dark" in text


def test_a_lone_surrogate_does_not_stop_the_page(tmp_path):
    run = make_run(tmp_path / "run", samples=[held_out(after="half \ud83d of a pair")])
    assert "half ? of a pair" in write_page([run], run).read_text(encoding="utf-8")


def test_settings_that_differ_are_named_and_no_others(tmp_path):
    runs = [
        make_run(tmp_path / str(rate), settings={"learning_rate": rate, "seed": 3})
        for rate in (0.1, 0.2)
    ]
    text = Page(page(runs, {})).text
    assert "learning_rate" in text
    assert "seed" not in text
    assert "seed" in Page(page(runs[:1], {})).text  # of one run all


def test_a_setting_that_a_run_does_not_have_differs_from_another_than_its_default(tmp_path):
    program = make_run(tmp_path / "a", settings={"temperature": 1.0})
    job = {"top_k": 0, "top_p": 0.9}
    command = make_run(
        tmp_path / "b", job=job, settings={"temperature": 1.0, "exp_name": "x", "gamma": None}
    )
    text = Page(page([program, command], {}, lambda run: {"top_k": 0, "top_p": 1.0})).text
    settings = text.split("Settings that differ")[1]
    assert "top_p" in settings
    for name in ("top_k", "exp_name", "gamma"):
        assert name not in settings


def test_several_runs_have_a_page_and_a_picture_of_their_own(tmp_path):
    runs = [make_run(tmp_path / name) for name in ("a", "b")]
    target = RunFolder(tmp_path / "report")
    assert write_overlay(runs, target).read_bytes()[:4] == b"\x89PNG"
    text = Page(write_page(runs, target).read_text(encoding="utf-8")).text
    assert "reward after" in text
    assert not (tmp_path / "a" / "report.html").exists()


def test_a_report_beside_its_runs_is_no_run(tmp_path, capsys):
    """As all folders of a folder are named; and twelve runs have twelve colours."""
    for i in range(12):
        make_run(tmp_path / f"{i:02}")
    for _ in range(2):
        assert run_report([str(path) for path in sorted(tmp_path.iterdir())]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"left out: {tmp_path / 'report'}, which holds a report of several runs" in out
    assert "colours" not in out
    names = Page((tmp_path / "report" / "report.html").read_text(encoding="utf-8")).attributes
    assert {f"color: var(--c{i})" for i in range(12)} <= {v for k, v in names if k == "style"}


@pytest.mark.parametrize(("paths", "names"), [
    (["runs/a", "runs/b"], ["a", "b"]),
    (["/x/runs/a/1", "/x/runs/b/1"], ["a/1", "b/1"]),
    (["runs/a"], ["a"]),
    (["a", "b/c"], ["a", "b/c"]),
    (["runs/a", "runs/a"], ["a", "a"]),
    (["runs/a", "runs/a/b"], ["a", "a/b"]),
])  # fmt: skip
def test_names_are_paths_without_what_all_share(paths, names):
    assert short_names(paths) == names


def ledger_of(folder, scores, lengths):
    """Steps of two samples each."""
    ledger = Ledger(folder, every=2)
    for step in range(1, len(scores) // 2 + 1):
        chosen = range(2 * step - 2, 2 * step)
        ledger.add(
            step,
            {
                "prompt": [f"prompt {i}" for i in chosen],
                "completion": [f"completion {i}" for i in chosen],
                "completion_ids": [[7] * lengths[i] for i in chosen],
                "finish_reason": ["eos", "length"],
                "score": [scores[i] for i in chosen],
            },
        )
    ledger.flush()


def test_notable_samples_are_those_of_the_ledger(tmp_path):
    run = make_run(tmp_path / "run", samples=[held_out()])
    scores = [float("nan"), 1.0, 5.0, -3.0, 0.0, 2.0, 9.0, 4.0]
    ledger_of(run.ledger, scores, [1, 2, 3, 9, 1, 1, 4, 1])
    found = notable_samples(run, count=2)
    assert found is not None
    assert found.source == "training samples"
    assert {kind: [s.completion for s in chosen] for kind, chosen in found.kinds.items()} == {
        "first": ["completion 0", "completion 1"],
        "best": ["completion 6", "completion 2"],
        "worst": ["completion 3", "completion 4"],
        "longest": ["completion 3", "completion 6"],
    }
    (longest, _) = found.kinds["longest"]
    assert (longest.length, longest.unit) == (9, "tokens")
    assert longest.prompt == "prompt 3"
    assert longest.place == "step 2, sample 1, length"


def test_without_a_ledger_they_are_the_held_out_ones_each_text_once(tmp_path):
    rows = [
        held_out(after="same", reward_after=3.0),
        held_out(after="same", reward_after=3.0),
        held_out(after="worst of all", reward_after=-1.0),
        held_out(after="nan", reward_after=None),
    ]
    found = notable_samples(make_run(tmp_path / "run", samples=rows), count=2)
    assert found is not None
    best = found.kinds["best"]
    assert [sample.completion for sample in best] == ["same", "worst of all"]
    assert best[0].before == ("b", 0.0)
    assert [s.completion for s in found.kinds["longest"]] == ["worst of all", "same"]


def test_a_run_without_samples_or_results_has_a_page(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.begin()
    assert notable_samples(run) is None
    assert "none were recorded" in page([run], {})


ESCAPES = "\x1b[31m\x07\x9b5m"


def test_no_text_of_a_run_controls_the_terminal(tmp_path, capsys):
    run = make_run(
        tmp_path / f"run{ESCAPES}",
        samples=[held_out(prompt=ESCAPES, after=ESCAPES)],
        title=ESCAPES,
        summary={f"held out {ESCAPES}": 1.0},
    )
    for arguments in (["report", run.path], ["doctor", run.path], ["report", f"gone{ESCAPES}"]):
        main(list(map(str, arguments)))
        out, err = capsys.readouterr()
        assert r"\x1b" in out + err
        assert not set(ESCAPES[0] + "\x07\x9b") & set(out + err)


def test_numbers_whose_sums_are_infinite_are_drawn_and_examined(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    rows = [{"step": s, "reward/mean": (-1) ** s * 1e308, "objective/kl": 1e308} for s in range(9)]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["report", str(run.path)]) == 0
    assert main(["doctor", str(run.path)]) == 0
    assert "error" not in capsys.readouterr().err
