"""How the report shows PPO iterations, from old files and from new ones."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.before import ppo_cases, record, report
from tests.benchmarks.ppo_results import (
    a_case,
    a_result,
    a_result_of,
    a_result_of_cases,
    an_entry,
    without_figures,
)


@pytest.fixture
def checkout(tmp_path: Path) -> argparse.Namespace:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "README.md").write_text(f"above\n{report.BEGIN}\nold\n{report.END}\nbelow\n")
    return argparse.Namespace(results=tmp_path / "benchmarks" / "results", root=tmp_path)


def test_the_report_takes_the_newest_result_and_leaves_the_rest_alone(
    checkout: argparse.Namespace,
) -> None:
    for date in ("2025-01-03", "2025-01-02"):
        record.save(a_result(date=date), checkout.results / "cpu-2core" / f"{date}.json")
    other = checkout.results / "cpu-2core" / "2025-01-04-other.json"
    other.write_text(json.dumps({"benchmark": "something else"}))

    assert report.run(checkout) == 0
    once = (checkout.root / "README.md").read_text()
    assert once.startswith(f"above\n{report.BEGIN}\n")
    assert once.endswith(f"{report.END}\nbelow\n")
    assert "2025-01-03" in once
    assert "2025-01-02" not in once
    assert "old" not in once
    assert "2.00 (1.00–3.00)" in once
    assert "old and reference scores" in (checkout.root / "benchmarks/README.md").read_text()

    assert report.run(checkout) == 0
    assert (checkout.root / "README.md").read_text() == once


def test_the_report_has_every_reference(checkout: argparse.Namespace) -> None:
    result = a_result_of(
        an_entry("copy"),
        without_figures("adapter", absent="trl: no peft"),
        an_entry("trunk"),
        without_figures("offload", red="step 0: objective/kl is missing"),
    )
    record.save(result, checkout.results / record.place(result))
    assert report.run(checkout) == 0
    brief, details = (
        (checkout.root / path).read_text() for path in ("README.md", "benchmarks/README.md")
    )
    assert "`python -m benchmarks ppo --peer trl==0.11.4 --reference copy adapter trunk" in brief
    assert "| generate; reference `copy` | 2 (1–4) |" in brief.replace(".00", "")
    assert "| iteration, whole; reference `adapter` | – | – | absent: trl: no peft |" in brief
    assert "| iteration, whole; reference `trunk` | 2 (1–4) | 4 (3–4) | 2.00 (1.00–3.00) |" in brief
    assert "generate; reference `trunk`" not in brief
    assert f"- Reference `trunk`: {ppo_cases.REFERENCES['trunk']}." in brief
    assert details.count("| old and reference scores | 2 (1–4) |") == 2
    assert "| red: step 0: objective/kl is missing |" in brief
    assert "red: step 0: objective/kl is missing" in details
    assert "1,234 parameters are trained" in details
    plot = (checkout.root / "benchmarks/plots/cpu-2core/ppo.svg").read_text()
    assert "reference trunk" in plot
    assert "reference adapter" not in plot


def test_the_report_stands_without_any_figures(checkout: argparse.Namespace) -> None:
    result = a_result_of(without_figures("adapter", absent="trl: no peft"))
    record.save(result, checkout.results / record.place(result))
    assert report.run(checkout) == 0
    assert "absent: trl: no peft" in (checkout.root / "README.md").read_text()
    assert not (checkout.root / "benchmarks/plots/cpu-2core/ppo.svg").exists()


def test_the_report_says_when_there_is_nothing_to_write(
    checkout: argparse.Namespace, capsys: pytest.CaptureFixture
) -> None:
    assert report.run(checkout) == 1
    assert "no result files" in capsys.readouterr().err


def test_a_result_is_filed_by_device_date_and_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    path = record.save(a_result())
    assert path.relative_to(tmp_path) == Path("cpu-2core/2025-01-02-abc1234-ppo.json")
    assert record.device_slug({"accelerator": "NVIDIA H100 80GB HBM3"}) == "nvidia-h100-80gb-hbm3"


GPT2, QWEN = (case.shape for case in ppo_cases.cases("cuda"))
GIB = {"peak": {"fastrl": [2**30] * 3, "peer": [2**31] * 3}}
MEMORY = GIB | {"at_rest": {"fastrl": [2**29], "peer": [2**29]}}
APART = {"objective/kl": {"difference": 0.00012, "of": 0.03}}
FIVE = ppo_cases.Goal(("nvidia", "amd"), 5.0)


def written(checkout: argparse.Namespace, result: dict) -> tuple[str, str]:
    record.save(result, checkout.results / record.place(result))
    assert report.run(checkout) == 0
    return tuple((checkout.root / p).read_text() for p in ("README.md", "benchmarks/README.md"))


def test_every_shape_is_shown_with_its_memory_and_its_goal(checkout: argparse.Namespace) -> None:
    entry = an_entry(memory=MEMORY, differences=APART)
    cases = [a_case(GPT2, entry, goal=FIVE), a_case(QWEN, entry, goal=FIVE)]
    for text in written(checkout, a_result_of_cases(*cases, gpu="NVIDIA H100 80GB HBM3")):
        gpt2, qwen = text.split("One PPO iteration against trl==0.11.4 on NVIDIA H100")[1:]
        assert "GPT-2 of 12 layers, width 768, 12 heads, vocabulary 50257, bf16" in gpt2
        assert "Qwen2 of 24 layers, width 896, 14 heads (2 of keys and values)" in qwen
        for part in (gpt2, qwen):
            assert "which both sides' generate is run under too" in part
            assert "| peak memory | 1 (1–1) GiB | 2 (2–2) GiB | 2.00 (2.00–2.00) |" in part
            assert "2.00 (1.00–3.00) | ≥ 5× trl==0.11.4: **missed** |" in part
            assert "In bf16, mean |Δ| of two steps' statistics, of the peer's own: " in part
            assert "objective/kl 1.2e-04 (of 0.03)." in part
            assert "the peer's does not wait for the device" in part
    assert "| memory at rest | 0.5 (0.5–0.5) GiB | 0.5 (0.5–0.5) GiB | 1.00" in text
    plot = (checkout.root / "benchmarks/plots/nvidia-h100-80gb-hbm3/ppo.svg").read_text()
    assert plot.count("Qwen2.5 0.5B") == plot.count("GPT-2 124M") == 7


@pytest.mark.parametrize(
    ("speedup", "devices", "said"),
    [(2.0, ("cpu",), "≥ 2× trl==0.11.4: reached"), (2.0, ("nvidia",), ""), (None, (), "")],
)
def test_a_goal_is_for_its_devices(
    checkout: argparse.Namespace, speedup: float | None, devices: tuple[str, ...], said: str
) -> None:
    (small,) = ppo_cases.cases("cpu")
    goal = ppo_cases.Goal(devices, speedup) if speedup else None
    brief, _ = written(checkout, a_result_of_cases(a_case(small.shape, goal=goal)))
    row = next(line for line in brief.splitlines() if line.startswith("| iteration, whole"))
    assert row.count("|") == (6 if goal else 5)
    assert (said in row) if said else ("≥" not in row)
    assert "memory" not in brief.split("One PPO iteration")[1].split("No GPU")[0]


def test_a_goal_is_for_one_way_of_keeping_the_reference(checkout: argparse.Namespace) -> None:
    entries = an_entry("copy"), an_entry("trunk")
    result = a_result_of_cases(a_case(QWEN, *entries, goal=FIVE), gpu="AMD Instinct MI300X")
    brief, _ = written(checkout, result)
    copied, trunk = (line for line in brief.splitlines() if line.startswith("| iteration"))
    assert copied.endswith("≥ 5× trl==0.11.4: **missed** |")
    assert trunk.endswith("|  |")


def test_the_small_shape_reads_as_it_did_in_older_files(checkout: argparse.Namespace) -> None:
    (small,) = ppo_cases.cases("cpu", threads=2)
    known = {"layers": 4, "width": 256, "heads": 4, "vocabulary": 50257, "batch": 16, "query": 16}
    known |= {"response": 48, "mini_batch": 4, "epochs": 4, "threads": 2}
    old = written(checkout, a_result(shape=known))
    new = a_result_of_cases(a_case(small.shape, an_entry(memory=None)), time="01:00:00")
    assert written(checkout, new) == old


def test_what_was_left_and_who_the_peer_is_are_said(checkout: argparse.Namespace) -> None:
    result = a_result_of_cases(
        a_case(GPT2, an_entry(memory=MEMORY)),
        gpu="NVIDIA H100",
        peer="eager",
        left={"Qwen2.5 0.5B, reference copy": "about 420 s, 70 s were left"},
    )
    for text in written(checkout, result):
        assert "against eager (the same algorithm on eager torch and model.generate) on" in text
        assert "- Left: Qwen2.5 0.5B, reference copy: about 420 s, 70 s were left." in text
        assert "does not wait" not in text


def test_an_adapter_is_where_its_family_has_it(checkout: argparse.Namespace) -> None:
    result = a_result_of_cases(
        a_case(GPT2, an_entry("adapter")), a_case(QWEN, an_entry("adapter")), gpu="NVIDIA H100"
    )
    gpt2, qwen = written(checkout, result)[0].split("One PPO iteration")[1:]
    assert "rank 8 on c_attn is" in gpt2
    assert "rank 8 on q_proj and v_proj is" in qwen
