"""Reads result files of the forms before `cases.Entry`, one function for each form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.cases import OURS, Entry
from benchmarks.results import Result

BENCHMARKS = {"reference": "ref_model", "sft": "sft", "dpo": "dpo", "ppo": "ppo",
              "rollout": "rollout"}  # fmt: skip


def converted(result: Result) -> Result | None:
    """The result with entries; None where it is of no benchmark."""
    name = result.get("benchmark")
    form = _FORMS.get(name) or (_ops if "roofline" in result else None)
    if form is None:
        return None
    found = {**result, "benchmark": BENCHMARKS.get(name, "ops"), "left": {}}
    found.setdefault("threads", result.get("shape", {}).get("threads"))
    entry = {
        "what": "", "main": True, "goals": [], "baseline": None, "red": None, "absent": {},
        "work": None, "units": None, "remarks": [],
    }  # fmt: skip
    side = {"note": "", "calls": 1, "limit": None, "limited": None, "memory": {}, "facts": {}}
    found["entries"] = [
        entry | one | {"sides": {name: side | taken for name, taken in one["sides"].items()}}
        for one in form(result)
    ]
    return found


def _goal(figure: str, bound: float, **more: Any) -> dict[str, Any]:
    return {"figure": figure, "bound": bound, "devices": ["cpu"], "side": OURS,
            "against": "eager", "phase": None, **more}  # fmt: skip


def _ops(result: Result) -> Iterator[Entry]:
    for case in result["cases"]:
        goal = case["goal"] or {}
        figures = {"speedup": "speedup", "memory_share": "memory share"}
        yield {
            "name": case["op"],
            "label": case["label"],
            "what": case["work"]["what"],
            "main": case["case"]["main"],
            "goals": [
                _goal(figure, goal[key], against=goal["against"])
                for key, figure in figures.items()
                if goal.get(key) is not None
            ],
            "red": case["red"],
            "absent": case["absent"],
            "work": case["work"],
            "sides": {
                name: {
                    "note": taken["note"],
                    "seconds": {"call": taken["seconds"]},
                    "limit": case["limit"],
                    "memory": {"peak": taken["memory"]["peak"]},
                    "facts": {"error": taken["error"]},
                }
                for name, taken in case["implementations"].items()
            },
        }


_PPO_PHASES = {
    "iteration": "iteration",
    "generate": "generate",
    "step": "step()",
    "forward_pass": "old and reference scores",
    "rewards_advantages": "rewards, advantages",
    "optimize_step": "update",
    "calc_stats": "statistics",
}


def _ppo(result: Result) -> Iterator[Entry]:
    """The oldest ones know no references: a copy is meant."""
    copied = {"reference": "copy", "absent": None, "red": None, "phases": result.get("phases")}
    peer, shape = result["peer"], result["shape"]
    for found in result.get("references", [copied]):
        phases, sides = found["phases"] or {}, {}
        for side, name in ((OURS, OURS), ("peer", peer)) if phases else ():
            sides[name] = {"seconds": {new: phases[old][side] for old, new in _PPO_PHASES.items()}}
        yield {
            "name": f"GPT-2 {shape['layers']}×{shape['width']}",
            "label": f"reference {found['reference']}",
            "what": f"{shape['batch']} samples of {shape['query']} + {shape['response']} "
            f"tokens, mini-batches of {shape['mini_batch']}, {shape['epochs']} epochs",
            "red": found["red"] or (None if sides else "no figures"),
            "absent": {peer: found["absent"]} if found["absent"] else {},
            "sides": sides,
        }


def _training(result: Result) -> Iterator[Entry]:
    peer, name = result["peer"], result["benchmark"]
    unit = "tokens" if name == "sft" else "pairs"
    goals = [_goal(*goal, against=peer) for goal in (("speedup", 1.3), ("memory share", 0.5))]
    for i, found in enumerate(result.get("references", [result])):
        reference = found.get("reference")
        yield {
            "name": name.upper(),
            "label": f"reference {reference}" if reference else "texts",
            "units": [unit, result[unit]],
            "goals": goals if i == 0 else [],
            "remarks": [f"losses differ by {found['difference']:.0e} at most"],
            "sides": {
                peer if side == "peer" else side: {
                    "seconds": {"epoch": taken["seconds"]},
                    "memory": {
                        "peak": taken["peak"],
                        "beyond gradients": taken["beyond_gradients"],
                    },
                }
                for side, taken in found["sides"].items()
            },
        }


def _rollout(result: Result) -> Iterator[Entry]:
    for found in result["rollouts"]:
        speedup, sides = (found["goal"] or {}).get("speedup"), {}
        for name, taken in found["sides"].items():
            side = sides[name] = {"note": taken["note"], "seconds": {"rollout": taken["seconds"]}}
            if "steps" in taken:
                nbytes = found["weight_bytes"] * taken["steps"] + found["kv_bytes"]
                side["seconds"] |= {name: taken[name] for name in ("prefill", "decode")}
                side["seconds"]["decode step"] = [x / taken["steps"] for x in taken["decode"]]
                side |= {"limit": [nbytes / copy for copy in found["copy"]], "limited": "decode"}
                side["facts"] = {"slots used": taken["utilisation"]}
                side["facts"]["largest |Δ log-prob|"] = taken["audit"]["largest"]
        name, label = found["label"].split(": ", 1)
        yield {
            "name": name,
            "label": label,
            "what": found["lengths"],
            "main": found["case"]["main"],
            "goals": [_goal("speedup", speedup, against="generate")] if speedup else [],
            "red": found["red"],
            "absent": found["absent"],
            "units": ["tokens", found["useful"]],
            "sides": sides,
        }


def _reference(result: Result) -> Iterator[Entry]:
    kinds = {
        "weights": "weights",
        "weights_on_host": "weights on the host",
        "optimizer": "Adam's state",
        "boundaries": "trunk activations",
        "peak": "peak",
    }
    for found in result["references"]:
        goal = found["goal"]
        against = {"against": "copy", "phase": "update"}
        name, label = found["label"].split(", ", 1)
        yield {
            "name": name,
            "label": label,
            "what": found["work"],
            "main": found["case"]["main"],
            "baseline": "copy",
            "goals": [_goal("speedup", goal["speedup"], side=goal["side"], **against)]
            if goal
            else [],
            "red": found["red"],
            "absent": found["absent"],
            "sides": {
                side: {
                    "note": taken["note"],
                    "seconds": {"update": taken["update"], "scores": taken["scores"]},
                    "memory": {new: taken[old] for old, new in kinds.items() if taken[old]},
                    "facts": {}
                    if taken["difference"] is None
                    else {"largest |Δ|": taken["difference"]},
                }
                for side, taken in found["sides"].items()
            },
        }


_FORMS: dict[str, Callable[[Result], Iterator[Entry]]] = {
    "ppo": _ppo,
    "sft": _training,
    "dpo": _training,
    "rollout": _rollout,
    "reference": _reference,
}
