"""Work that takes too long to wait for its end."""

import contextlib
import signal
import threading
import time

import pytest

from fastrl.run.breaking_off import BrokenOff, broken_off_by


def sleep_on():
    while True:
        with contextlib.suppress(Exception):
            time.sleep(60)


def test_news_ends_a_sleep_even_where_exceptions_are_caught():
    begin = time.perf_counter()
    with pytest.raises(BrokenOff), broken_off_by(lambda: time.perf_counter() - begin > 0.2):
        sleep_on()
    assert time.perf_counter() - begin < 10


def test_work_that_nothing_is_heard_of_comes_to_its_end():
    threads, before = {*threading.enumerate()}, signal.getsignal(signal.SIGURG)
    with broken_off_by(lambda: False):
        assert len({*threading.enumerate()} - threads) == 1  # those of others may end meanwhile
        time.sleep(0.6)
    time.sleep(0.1)
    assert {*threading.enumerate()} <= threads
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
