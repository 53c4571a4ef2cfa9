"""A run that was stopped ends with the status that shells give such programs."""

import signal

import pytest

from fastrl.run.stopping import Stopped, Terminated, stop_at_a_steps_end


def stopped_by(number: int) -> None:
    """Raises what a trainer does that finds itself asked to stop by this signal."""
    signal.raise_signal(number)
    stop = Stopped("at step 3")
    assert stop.status == 128 + number
    raise stop


def test_a_stop_has_the_status_of_its_signal() -> None:
    assert Stopped().status == 130
    with pytest.raises(Terminated, match="at step 3") as terminated, stop_at_a_steps_end():
        stopped_by(signal.SIGTERM)
    assert terminated.value.status == terminated.value.code == 143
    with pytest.raises(KeyboardInterrupt, match="at step 3") as interrupted, stop_at_a_steps_end():
        stopped_by(signal.SIGINT)
    assert type(interrupted.value) is KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt), stop_at_a_steps_end():  # the block did not look
        signal.raise_signal(signal.SIGINT)
