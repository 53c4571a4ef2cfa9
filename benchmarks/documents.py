"""The README's table of figures: five of them, from the result files of one machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Result = dict[str, Any]

BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"


def between_markers(text: str, figures: str) -> str:
    """`text` with `figures` in place of what lay between the markers.

    Raises:
        ValueError: a marker is missing.
    """
    if BEGIN not in text or END not in text:
        raise ValueError(f"the document lacks {BEGIN} … {END}")
    before, rest = text.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    return f"{before}{BEGIN}\n\n{figures}\n\n{END}{after}"


def readme_figures(devices: Mapping[str, Sequence[Result]]) -> str:
    """The table of one machine, a GPU's where there is one; ``devices`` are the newest results of
    each by the device's name."""
    order = sorted(devices.values(), key=lambda results: "accelerator" not in results[0]["machine"])
    table = next((table for table in map(readme_table, order) if table), "")
    if any("accelerator" in results[0]["machine"] for results in order):
        return table
    return f"{table}\n\nNo GPU has been measured yet.".strip()


def readme_table(results: Sequence[Result]) -> str:
    """What the figures were measured on, and a row for each benchmark of ``_OF`` that there is."""
    results = [result for result in results if result["benchmark"] in _OF]
    if not results:
        return ""
    machine = results[0]["machine"]
    where = machine.get("accelerator", f"{machine['cores']} cores of an {machine['cpu']}")
    dates = sorted({result["date"] for result in results})
    measured = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    rows = (_OF[result["benchmark"]](result) for result in results)
    return "\n".join(
        [
            f"On {where}, {measured}, in fp32: medians of runs in which both sides took turns.",
            "",
            "| | fastrl | the other | faster | memory |",
            "| --- | --: | --: | --: | --: |",
            *(f"| {' | '.join(row)} |" for row in rows if row),
        ]
    )


def _ppo(result: Result) -> tuple[str, ...]:
    case = result if "references" in result else result["cases"][0]
    shape, seconds = case["shape"], case["references"][0]["phases"]["iteration"]
    ours, theirs = statistics.median(seconds["fastrl"]), statistics.median(seconds["peer"])
    peer = _named(result["peer"])
    return (
        f"PPO iteration, {_model(shape)}, {shape['batch']} responses of {shape['response']} tokens",
        f"{ours:.2g} s",
        f"{peer}: {theirs:.2g} s",
        _times(_paired(seconds["peer"], seconds["fastrl"])),
        "",
    )


def _training(title: str, unit: str) -> Callable[[Result], tuple[str, ...]]:
    def row(result: Result) -> tuple[str, ...]:
        run = result["references"][0] if "references" in result else result
        ours, theirs = run["sides"]["fastrl"], run["sides"]["peer"]
        rates = [result[unit] / statistics.median(s["seconds"]) for s in (ours, theirs)]
        peer = _named(result["peer"])
        return (
            f"{title}, {_model(result['shape'])}, {unit} per second",
            _rate(rates[0]),
            f"{peer}: {_rate(rates[1])}",
            _times(_paired(theirs["seconds"], ours["seconds"])),
            f"{ours['peak'] / theirs['peak']:.2f}×",
        )

    return row


def _rollout(result: Result) -> tuple[str, ...]:
    entry = next(entry for entry in result["rollouts"] if not entry["red"])
    ours, theirs = (entry["sides"][name]["seconds"] for name in ("fastrl", "generate"))
    rates = [entry["useful"] / statistics.median(seconds) for seconds in (ours, theirs)]
    return (
        f"Rollouts, {entry['case']['shape']['name']}, tokens per second",
        _rate(rates[0]),
        f"`generate`: {_rate(rates[1])}",
        _times(_paired(theirs, ours)),
        "",
    )


def _linear_logprobs(result: Result) -> tuple[str, ...]:
    case = next(case for case in result["cases"] if not case["red"])
    ours, theirs = (case["implementations"][name] for name in ("fastrl", "eager"))
    return (
        f"`linear_logprobs` with gradients, {' '.join(case['label'].split()[:3])}",
        f"{statistics.median(ours['seconds']):.2g} s",
        f"PyTorch: {statistics.median(theirs['seconds']):.2g} s",
        _times(_paired(theirs["seconds"], ours["seconds"])),
        f"{ours['memory']['peak'] / theirs['memory']['peak']:.2f}×",
    )


_OF: dict[str, Callable[[Result], tuple[str, ...]]] = {
    "ppo": _ppo,
    "sft": _training("SFT", "tokens"),
    "dpo": _training("DPO", "pairs"),
    "rollout": _rollout,
    "linear_logprobs": _linear_logprobs,
}


def _model(shape: Mapping[str, Any]) -> str:
    return f"GPT-2 {shape['layers']}×{shape['width']}"


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.2g}"


def _named(peer: str) -> str:
    return peer.replace("trl==", "TRL ")


def _paired(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def _times(ratio: float) -> str:
    return f"{ratio:.1f}×"
