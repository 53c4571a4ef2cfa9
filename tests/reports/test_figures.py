"""The figures: what is drawn of which metrics, and that nothing of it is hidden."""

import pytest
from matplotlib.figure import Figure

from fastrl.tools.reports.curves import RunCurves
from fastrl.tools.reports.figures import draw, draw_alone, draw_panel
from fastrl.tools.reports.panels import Panel, TimePanel, panels_of


def run_of(name="run", steps=20, **metrics) -> RunCurves:
    """Metrics by step, or numbers; "__" in a name is "/"."""
    rows = [
        {
            "step": step,
            **{
                key.replace("__", "/"): value(step) if callable(value) else value
                for key, value in metrics.items()
            },
        }
        for step in range(1, steps + 1)
    ]
    return RunCurves(name, rows)


def drawn(title, *runs):
    """The axes and the legend of a panel."""
    (panel,) = (panel for panel in panels_of(runs) if panel.title == title)
    figure, legend = draw_alone(panel, runs)
    figure.draw_without_rendering()
    return figure.axes[0], [name.text for name in legend]


def test_there_is_a_panel_for_what_was_recorded_and_no_other():
    run = run_of(reward__mean=1.0, ppo__val__var_explained=0.1, tokens__eos_share=0.5, other=1.0)
    assert [panel.title for panel in panels_of([run])] == [
        "Reward",
        "Responses that end with EOS",
        "Explained variance of the returns",
    ]
    (only,) = panels_of([run_of(other=1.0)])
    assert only.title == "Reward"  # which says that it was not recorded


def test_several_reward_functions_have_a_panel_with_a_line_each():
    run = run_of(reward__mean=1.0, reward__brief__mean=0.5, reward__polite__mean=0.2)
    axes, legend = drawn("Reward by function", run)
    assert legend == ["brief", "polite"]
    curves = [line.get_ydata() for line in axes.lines if len(line.get_ydata()) == 20]
    assert [curve[0] for curve in curves] == [0.5, 0.2]
    assert len(panels_of([run_of(reward__mean=1.0, reward__brief__mean=1.0)])) == 1


def test_runs_are_overlaid_each_in_its_colour():
    axes, _ = drawn("Reward", *(run_of(str(i), reward__mean=float(i)) for i in range(3)))
    curves = [line for line in axes.lines if len(line.get_xdata()) == 20]
    assert [line.get_ydata()[0] for line in curves] == [0.0, 1.0, 2.0]
    assert len({line.get_color() for line in curves}) == 3


@pytest.mark.parametrize("runs", [1, 2])
def test_a_slow_step_is_marked_with_its_time(runs):
    slow = run_of(time__rollout=lambda s: 40.0 if s == 1 else 0.2, time__ppo__optimize_step=0.8)
    others = [run_of("other", time__rollout=1.0)] * (runs - 1)
    axes, legend = drawn("Time per step", slow, *others)
    assert axes.get_ylim()[1] < 2  # the other steps can be read
    assert [text.get_text() for text in axes.texts] == ["40.8 s"]
    (marks,) = (line for line in axes.lines if line.get_marker() == "^")
    assert list(marks.get_xdata()) == [1.0]
    assert marks.get_ydata()[0] <= axes.get_ylim()[1]
    assert "above the scale" in legend


def test_where_no_step_is_slow_the_scale_holds_all():
    axes, legend = drawn("Time per step", run_of(time__rollout=lambda s: 1 + s / 20))
    assert axes.get_ylim()[1] > 2
    assert legend == ["rollout"]


@pytest.mark.parametrize(("title", "metrics"), [
    ("KL to the reference", {"objective__kl": lambda s: -0.3 - 0.1 / s}),
    ("KL to the reference", {"objective__kl": lambda s: 5.0 + s}),
    ("Reward", {"reward__mean": lambda s: s - 5.0}),
    ("Clip fraction", {"ppo__policy__clipfrac": 0.0}),
])  # fmt: skip
def test_zero_is_shown_and_the_curve_beside_it(title, metrics):
    axes, _ = drawn(title, run_of(**metrics))
    bottom, top = axes.get_ylim()
    assert bottom <= 0 <= top
    levels = [line.get_ydata()[0] for line in axes.lines if len(line.get_ydata()) == 2]
    assert bottom == 0 or 0 in levels  # the axis itself, or a line
    curve = axes.lines[0].get_ydata()
    assert bottom < min(curve) <= max(curve) < top


def test_far_from_zero_a_reward_has_the_panel_for_itself():
    axes, _ = drawn("Reward", run_of(reward__mean=lambda s: 500 + s / 10))
    assert axes.get_ylim()[0] > 490


def test_ticks_are_numbers_of_their_own_without_an_offset():
    axes, _ = drawn("Learning rate", run_of(learning_rate=lambda s: 1e-5 + 1e-10 * s))
    axes.set_ylim(1e-5, 1e-5 + 2e-9)
    axes.figure.draw_without_rendering()
    assert axes.yaxis.get_offset_text().get_text() == ""
    texts = [label.get_text() for label in axes.get_yticklabels()]
    assert len(set(texts)) == len(texts)
    assert [float(text) for text in texts] == pytest.approx(list(axes.get_yticks()), abs=1e-11)


def test_a_dollar_in_a_name_is_a_dollar():
    run = run_of(reward__mean=1.0, **{"reward__$_{$__mean": 1.0, "reward__b__mean": 2.0})
    draw([run, run], title="runs/$_{$").draw_without_rendering()


def test_a_single_step_can_be_seen():
    axes, _ = drawn("Reward", run_of(steps=1, reward__mean=1.0))
    assert axes.lines[0].get_marker() == "o"
    axes, _ = drawn("Time per step", run_of(steps=1, time__rollout=1.0))
    assert len(axes.patches) == 1


def test_held_out_values_have_their_standard_errors():
    rows = [{"step": 0, "eval/reward_mean": 1.0, "eval/reward_sem": 0.25}]
    axes = Figure().subplots()
    (panel,) = panels_of([RunCurves("run", rows)])
    assert isinstance(panel, Panel)
    assert not isinstance(panel, TimePanel)
    draw_panel(axes, panel, [RunCurves("run", rows)])
    (bars,) = axes.collections
    assert bars.get_segments()[0][:, 1].tolist() == [0.75, 1.25]
