"""Work that takes too long to wait for its end."""

import contextlib
import signal
import threading
import time

import pytest

from fastrl.run.breaking_off import BrokenOff, broken_off_by
from tests.patience import PATIENCE


def test_news_ends_a_sleep_even_where_exceptions_are_caught():
    with pytest.raises(BrokenOff), broken_off_by(lambda: True), contextlib.suppress(Exception):
        time.sleep(PATIENCE)


def test_work_that_nothing_is_heard_of_comes_to_its_end():
    threads, before = {*threading.enumerate()}, signal.getsignal(signal.SIGURG)
    asked = threading.Event()
    with broken_off_by(lambda: bool(asked.set())):
        (watching,) = {*threading.enumerate()} - threads  # those of others may end meanwhile
        assert asked.wait(PATIENCE)
    watching.join(PATIENCE)
    assert not watching.is_alive()
    assert signal.getsignal(signal.SIGURG) is before
    signal.raise_signal(signal.SIGURG)


def test_another_thread_works_on():
    done = []

    def work():
        with broken_off_by(lambda: True):
            time.sleep(0.7)
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
