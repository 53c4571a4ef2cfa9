"""The examples of the alignment framework run on tiny local models."""

import json
import re

import pytest

from tests.test_more_examples import QUIET, language_model, run

__all__ = ["language_model"]

WORDS = [f"w{i}" for i in range(3, 27)]
PAIRS = [
    {"prompt": f"{word} ", "chosen": f"w40 {word}", "rejected": f"w50 {word}", "votes": 3 + i % 3}
    for i, word in enumerate(WORDS)
]
FAST = {**QUIET, "learning_rate": 5e-3, "logging_steps": 1}


def test_offline_dpo(language_model, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, PAIRS[:20])))
    _, before, after = run("offline_dpo")["train"](
        language_model, str(path), str(tmp_path / "out"), held_out=PAIRS[20:], epochs=4, **FAST
    )
    assert before["eval_rewards/accuracies"] == 0.5  # all margins are 0
    assert after["eval_rewards/accuracies"] == 1.0
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_kto_feedback(language_model, tmp_path):
    feedback = [
        {"prompt": row["prompt"], "response": row[side], "label": side == "chosen"}
        for i, row in enumerate(PAIRS)
        for side in (("chosen", "rejected") if i % 2 else ("rejected",))
    ]
    trainer = run("kto_feedback")["train"](language_model, feedback, str(tmp_path), **FAST)
    assert trainer.loss.desirable_weight == pytest.approx(1.5)
    assert trainer.loss.undesirable_weight == pytest.approx(0.75)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert logs[0]["rewards/chosen"] == logs[0]["rewards/rejected"] == 0
    assert logs[-1]["rewards/chosen"] - logs[-1]["rewards/rejected"] > 0.1
    with pytest.raises(SystemExit, match="both kinds are needed"):
        run("kto_feedback")["train"](language_model, feedback[:1], str(tmp_path))


def test_online_judge(language_model, tmp_path):
    """A judge who likes high numbers, and now and then says nothing."""

    def judge(questions):
        answers = []
        for question in questions:
            parts = re.split(r"\[Response [AB]\]", question)[1:]
            one, two = (max(map(int, re.findall(r"w(\d+)", part)), default=0) for part in parts)
            answers.append("[[A]]" if one > two else "[[B]]" if two > one else "hm")
        return answers

    prompts = [{"prompt": f"{word} "} for word in WORDS]
    trainer, (before, after) = run("online_judge")["train"](
        language_model,
        prompts,
        judge,
        str(tmp_path),
        held_out=prompts,
        max_new_tokens=4,
        max_steps=12,
        **FAST,
    )
    assert (before["eval_win_rate"], before["eval_win_rate_sem"]) == (0.5, 0.0)
    assert before["eval_annotator/calls"] == 0  # each response is compared with itself
    assert after["eval_win_rate"] > 0.5
    log = next(log for log in trainer.state.log_history if "loss" in log)
    assert log["annotator/calls"] > 0
    assert "annotator/unparsed" in log


def test_custom_reweighter(language_model, tmp_path):
    example = run("custom_reweighter")
    trainer = example["train"](language_model, PAIRS, str(tmp_path), **FAST)
    of_16, of_8 = (log["weights"] for log in trainer.state.log_history if "weights" in log)
    expected = [max(0.0, (row["votes"] - 2.5) / 2.5) for row in PAIRS]
    assert 16 * of_16 + 8 * of_8 == pytest.approx(sum(expected), rel=1e-4)
    with pytest.raises(ValueError, match=r"weights\[0\] is -1"):
        example["train"](
            language_model, PAIRS, str(tmp_path), lambda batch: [-1.0] * batch.size, **QUIET
        )
