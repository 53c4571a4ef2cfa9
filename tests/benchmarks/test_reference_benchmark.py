"""The benchmark of references: its gate, its arithmetic, its result file, and its report."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

import fastrl.references.choose
from benchmarks.before import (
    record,
    reference,
    reference_gate,
    reference_tables,
    report,
    rollout_cases,
)
from benchmarks.before.reference_cases import (
    CHECKPOINTING,
    COPY,
    FIRST_TOKEN,
    HALF,
    MODES,
    Case,
    Goal,
    cases,
    samples,
)
from benchmarks.before.reference_sides import Side, own_accelerate, sides, storage_bytes, trainer
from benchmarks.before.rollout_cases import Shape
from fastrl.references import AdapterReference, CopyReference, NoReference
from fastrl.references.trunk import Unshareable

CPU = torch.device("cpu")
WIDTH, LAYERS, VOCABULARY = 16, 4, 101
TINY = Shape("tiny", "gpt2", LAYERS, WIDTH, 2, 2, 32, VOCABULARY, 64, "fp32", tied=False)
CASE = Case(
    TINY, samples=4, mini_batch=2, prompt=(2, 4), response=(3, 9), main=True,
    goal=Goal(("cpu",), HALF, 1e-3),
)  # fmt: skip


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """What a run sets for its process."""
    verbosity, threads = logging.get_verbosity(), torch.get_num_threads()
    yield
    logging.set_verbosity(verbosity)
    torch.set_num_threads(threads)


@pytest.fixture
def tiny_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "cases", lambda device_type: (CASE,))


@pytest.fixture
def checkout(tmp_path: Path) -> argparse.Namespace:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "README.md").write_text(f"above\n{report.BEGIN}\nold\n{report.END}\nbelow\n")
    return argparse.Namespace(results=tmp_path / "benchmarks" / "results", root=tmp_path)


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    reference.add_arguments(parser)
    common = ["--device", "cpu", "--threads", "1", "--rounds", "2"]
    return reference.run(parser.parse_args([*common, *arguments]))


def a_side(scores: list[float], update: list[float], **changes: object) -> dict:
    return {
        "note": "", "difference": 2e-6, "scores": scores, "update": update, "weights": 2048,
        "weights_on_host": 0, "optimizer": 3072, "boundaries": 0, "samples_run_again": 0,
        "peak": 5120,
    } | changes  # fmt: skip


def an_entry(**changes: object) -> dict:
    return {
        "label": CASE.label,
        "work": CASE.work,
        "case": {"main": True, "shape": {"name": "tiny"}},
        "goal": dataclasses.asdict(Goal(("cpu",), HALF, 1.3)),
        "sides": {
            COPY: a_side([2.0, 3.0], [4.0, 6.0]),
            HALF: a_side([1.0, 2.0], [2.0, 4.0], weights=1024, boundaries=512, note="half of it"),
            "offload": a_side([2.0, 3.0], [4.0, 6.0], weights=1024, weights_on_host=1024),
            "none": a_side([1.0, 1.5], [4.0, 6.0], difference=None),
            COPY + CHECKPOINTING: a_side([2.0, 3.0], [6.0, 9.0]),
            HALF + CHECKPOINTING: a_side([1.0, 2.0], [3.0, 3.0], note="half of it"),
        },
        "absent": {"adapter": "not installed"},
        "red": None,
    } | changes


def a_result(**changes: object) -> dict:
    return {
        "benchmark": "reference",
        "date": "2025-01-02",
        "time": "10:00:00",
        "commit": "abc1234",
        "machine": {"cpu": "Some CPU", "cores": 2, "memory_gib": 8},
        "versions": {"peft": "0"},
        "threads": 2,
        "references": [an_entry()],
    } | changes


def test_a_run_saves_what_every_side_took_and_the_report_shows_it(
    tiny_case: None, checkout: argparse.Namespace, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("peft")
    assert run("--results", str(checkout.results)) == 0
    assert f"goal {HALF}, update ≥ 0.001× copy: reached" in capsys.readouterr().out
    (path,) = checkout.results.glob("cpu-*core/*-reference.json")
    result = json.loads(path.read_text())
    assert result.keys() >= {"benchmark", "date", "commit", "machine", "versions", "threads"}
    (entry,) = result["references"]
    assert entry.keys() == an_entry().keys()
    assert set(entry["sides"]) == {*MODES, COPY + CHECKPOINTING, HALF + CHECKPOINTING}
    for name, side in entry["sides"].items():
        assert side.keys() == an_entry()["sides"][COPY].keys()
        assert len(side["scores"]) == len(side["update"]) == 2
        assert min(side["scores"] + side["update"]) > 0
        assert (side["difference"] is None) == (name == "none")

    assert report.run(checkout) == 0
    assert f"| {CASE.label} |" in (checkout.root / "README.md").read_text()
    details = (checkout.root / "benchmarks/README.md").read_text()
    assert "| trunk 3/4 |" in details
    assert "2 of 4 layers are shared and frozen." in details


@pytest.fixture(scope="module")
def observed() -> dict[str, dict]:
    """Observations of each side, and the bytes that its policy trains."""
    pytest.importorskip("peft")
    with own_accelerate():
        made, absent = sides(CASE, CPU)
        assert not absent
        seen = {}
        for name, side in made.items():
            side.step()
            trained = [p for p in side.trainer.model.parameters() if p.requires_grad]
            seen[name] = dataclasses.asdict(side.observe()) | {"trained": storage_bytes(trained)}
        return seen


def test_weights_are_counted_once_where_policy_and_reference_share_them(observed) -> None:
    layer = (WIDTH * 48 + 48) + (WIDTH * WIDTH + WIDTH) + (WIDTH * 32 + 32) + (32 * WIDTH + WIDTH)
    layer += 4 * WIDTH  # two norms
    embeddings = (VOCABULARY + 64) * WIDTH
    model = 4 * (LAYERS * layer + embeddings + 2 * WIDTH + VOCABULARY * WIDTH + WIDTH + 1)
    assert observed["none"]["weights"] == model
    assert observed[COPY]["weights"] == observed["offload"]["weights"] == 2 * model
    for name, share in (("trunk 1/4", 1), (HALF, 2), ("trunk 3/4", 3)):
        assert observed[name]["weights"] == 2 * model - 4 * (share * layer + embeddings)
    rank = 8
    adapter = 4 * LAYERS * rank * ((WIDTH + 48) + (WIDTH + WIDTH))
    assert observed["adapter"]["weights"] == model + adapter
    assert {seen["weights_on_host"] for seen in observed.values()} == {0}


def test_the_optimizer_has_two_moments_of_what_is_trained(observed) -> None:
    for seen in observed.values():
        moments = 2 * seen["trained"]
        assert moments < seen["optimizer"] < moments + 4 * 100  # and counts of steps
    assert observed[HALF]["optimizer"] < observed["trunk 1/4"]["optimizer"]


def test_boundaries_are_those_of_all_tokens_of_the_batch(observed) -> None:
    data = samples(CASE)
    tokens = sum(len(x) for x in (*data.queries, *data.responses))
    for name, seen in observed.items():
        assert seen["boundaries"] == (4 * tokens * WIDTH if name.startswith("trunk") else 0)
        assert seen["samples_run_again"] == 0


def test_an_update_needs_less_with_a_trunk_and_less_with_checkpointing(observed) -> None:
    peaks = {name: seen["peak"] for name, seen in observed.items()}
    assert peaks["trunk 3/4"] < peaks[HALF] < peaks["trunk 1/4"] < peaks[COPY]
    assert peaks[COPY + CHECKPOINTING] < peaks[COPY]
    assert peaks[HALF + CHECKPOINTING] < peaks[HALF]
    assert peaks[COPY] == pytest.approx(peaks["none"], rel=0.01)


def test_boundaries_that_are_run_again_show_no_figures(tiny_case, monkeypatch, capsys) -> None:
    honest = reference.reference_sides.PPOConfig
    monkeypatch.setattr(
        reference.reference_sides,
        "PPOConfig",
        lambda **k: honest(**k, trunk_cache_gib=0.0, trunk_cache_host_gib=0.0),
    )
    assert run("--no-save") == 1
    assert "RED, no figures: trunk 1/4: 4 boundaries were not kept" in capsys.readouterr().out


def _off_by(amount: float):
    def change(monkeypatch: pytest.MonkeyPatch) -> None:
        honest = CopyReference.score

        def score(self, inputs, request):
            scored = honest(self, inputs, request)
            return scored._replace(logprobs=scored.logprobs + amount)

        monkeypatch.setattr(CopyReference, "score", score)

    return change


def _adapter_left_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdapterReference, "_instead", lambda self: contextlib.nullcontext())


def _policy_in_place_of_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def score(self, inputs, request):
        with torch.no_grad():
            return self._policy(**inputs, scoring=request)

    monkeypatch.setattr(CopyReference, "score", score)


def _cannot_share(monkeypatch: pytest.MonkeyPatch) -> None:
    def split_off(model, layers):
        raise Unshareable("it is made so")

    monkeypatch.setattr(fastrl.references.choose, "split_off", split_off)


def _one_layer_more(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = fastrl.references.choose.split_off
    monkeypatch.setattr(
        fastrl.references.choose, "split_off", lambda model, layers: honest(model, layers + 1)
    )


def _there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = NoReference.score

    def score(self, inputs, request):
        unknown = honest(self, inputs, request)
        return unknown._replace(logprobs=unknown.logprobs.nan_to_num())

    monkeypatch.setattr(NoReference, "score", score)


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (_off_by(2e-5), "copy: reference log-probs are off by 2."),
        (_policy_in_place_of_its_copy, "copy: reference log-probs are off by"),
        (_adapter_left_on, "adapter: reference log-probs are off by"),
        (_cannot_share, "trunk 1/4: the reference is kept as copy (its layers cannot be shared)"),
        (_one_layer_more, "trunk 1/4: it shares 2 layers, not 1"),
        (_there_is_one, "log-probs, though there is no reference"),
    ],
)
def test_a_red_gate_shows_no_figures(
    break_it, says, tiny_case, checkout, monkeypatch, capsys
) -> None:
    pytest.importorskip("peft")
    break_it(monkeypatch)
    monkeypatch.setattr(reference, "_take_turns", lambda *_: pytest.fail("timed after a red gate"))
    assert run("--results", str(checkout.results)) == 1
    out = capsys.readouterr().out
    assert "RED, no figures: " in out
    assert says in out
    assert "faster by" not in out
    assert report.run(checkout) == 0
    brief, details = (
        (checkout.root / p).read_text() for p in ("README.md", "benchmarks/README.md")
    )
    assert CASE.label not in brief
    assert f"No figures for {CASE.label}: " in details
    assert not (checkout.root / "benchmarks/plots").exists()


def test_lower_precision_is_judged_in_fp32_too_and_by_the_mean() -> None:
    pytest.importorskip("peft")
    verdict = reference_gate.judge(dataclasses.replace(CASE, precision="bf16"), CPU)
    assert verdict.red is None
    assert max(x for x in verdict.differences.values() if x is not None) < 1e-5
    expected = torch.zeros(1000)
    found = expected.clone()
    found[0] = 0.1  # one of many
    assert reference_gate.compare(found, expected, MODES[COPY], "bf16")[1] is None
    assert "largest" in str(reference_gate.compare(found, expected, MODES[COPY], "fp32")[1])
    for precision in ("fp32", "bf16"):
        wrong = reference_gate.compare(found * torch.nan, expected, MODES[COPY], precision)[1]
        assert "off by nan" in str(wrong)
    assert "mean" in str(reference_gate.compare(found + 0.01, expected, MODES[COPY], "bf16")[1])


def test_the_gate_moves_all_that_is_trained_and_nothing_else() -> None:
    with own_accelerate():
        side = Side(trainer(CASE, MODES[HALF], CPU), samples(CASE))
        before = [p.detach().clone() for p in side.trainer.model.parameters()]
        reference_gate.move(side)
        for parameter, was in zip(side.trainer.model.parameters(), before, strict=True):
            moved = (parameter - was).abs().max().item()
            assert (moved > 1e-3) == parameter.requires_grad
            assert moved == 0 or parameter.requires_grad


def test_plain_log_probs_are_the_trainer_s_own_before_it_moves() -> None:
    data = samples(CASE)
    model = rollout_cases.build(CASE.shape, CPU)
    expected = reference_gate.plain_logprobs(model, data, "fp32")
    with own_accelerate():
        side = Side(trainer(CASE, MODES[COPY], CPU), data)
        torch.testing.assert_close(side.reference_logprobs(), expected, rtol=0, atol=1e-5)
    assert len(expected) == sum(len(x) for x in data.responses)


def test_a_batch_is_the_same_every_time_and_within_its_bounds() -> None:
    case = dataclasses.replace(CASE, samples=200)
    first, second = samples(case), samples(case)
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert {len(x) for x in first.queries} == {2, 3, 4}
    assert {len(x) for x in first.responses} == set(range(3, 10))
    tokens = torch.cat([*first.queries, *first.responses])
    assert (int(tokens.min()), int(tokens.max())) == (FIRST_TOKEN, VOCABULARY - 1)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_all_cases_fit_their_model_and_share_as_much_as_they_say(device_type) -> None:
    found = cases(device_type)
    assert len({case.label for case in found}) == len(found)
    assert {case.shape.tied for case in found} == {True, False}
    for case in found:
        assert case.prompt[1] + case.response[1] <= case.shape.context
        assert case.samples % case.mini_batch == 0
        assert case.shape.dtype == "fp32"
        for mode in MODES.values():
            layers = mode.shared_layers(case.shape.layers)
            assert layers is None or Fraction(layers, case.shape.layers) == mode.share


def test_a_tied_head_is_named_where_a_trunk_freezes_it() -> None:
    tied = dataclasses.replace(CASE, shape=dataclasses.replace(TINY, tied=True))
    assert "untied head" in CASE.label
    assert ", tied head" in tied.label
    assert reference.note(CASE, HALF) == "2 of 4 layers are shared and frozen"
    assert reference.note(tied, HALF).endswith("and the head, which is tied to the embeddings")
    with own_accelerate():
        for case, frozen in ((CASE, False), (tied, True)):
            head = trainer(case, MODES[HALF], CPU).model.get_output_embeddings()
            assert head.weight.requires_grad != frozen


def test_figures_are_of_pairs_and_a_goal_holds_on_its_device_alone() -> None:
    entry = an_entry()
    assert reference_tables.speedups(entry, HALF, "scores") == [2.0, 1.5]
    assert reference_tables.speedups(entry, HALF, "update") == [2.0, 1.5]
    words = f"{HALF}, update ≥ 1.3× copy"
    assert reference_tables.verdicts(entry, "cpu: Some") == [(words, True)]
    assert reference_tables.verdicts(entry, "NVIDIA H100") == []
    assert reference_tables.verdicts(an_entry(goal=None), "cpu") == []
    high = dataclasses.asdict(Goal(("cpu",), HALF, 1.8))
    assert reference_tables.verdicts(an_entry(goal=high), "cpu")[0][1] is False


def test_the_report_has_rows_remarks_and_a_plot(checkout: argparse.Namespace) -> None:
    minor = an_entry(label="minor", case={"main": False, "shape": {"name": "minor"}})
    result = a_result(references=[an_entry(), minor])
    record.save(result, checkout.results / record.place(result))
    assert report.run(checkout) == 0
    brief, details = (
        (checkout.root / p).read_text() for p in ("README.md", "benchmarks/README.md")
    )
    row = (
        f"| {CASE.label} | 1.75 (1.50–2.00) | 1.75 (1.50–2.00) | 1 KiB | 2 KiB | 5 KiB | 5 KiB "
        f"| {HALF}, update ≥ 1.3× copy: reached |"
    )
    assert row in brief
    assert "minor" not in brief
    assert "| minor | copy |" in details
    assert "| 1 KiB + 1 KiB on the host | 3 KiB | – | 5 KiB | 2.0e-06 |" in details
    assert f"- {HALF}: half of it.\n" in details
    assert f"{HALF}{CHECKPOINTING}: half of it" not in details
    faster = f"{HALF}{CHECKPOINTING}: update faster than {COPY}{CHECKPOINTING} by 2.50 (2.00–3.00)"
    assert faster in details
    assert "absent, adapter: not installed." in details
    assert "reference" not in details.split("Not measured yet on cpu-2core: ")[1].splitlines()[0]
    plot = (checkout.root / "benchmarks/plots/cpu-2core/reference.svg").read_text()
    assert "offload" in plot
    assert "1.75" in plot


def test_what_cannot_be_measured_is_refused(tiny_case, capsys) -> None:
    assert run("--case", "no such thing", "--no-save") == 2
    assert CASE.label in capsys.readouterr().err
    assert run("--rounds", "0", "--no-save") == 2
    assert "--rounds must be at least 1, got 0" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert run("--device", "cuda", "--no-save") == 2
