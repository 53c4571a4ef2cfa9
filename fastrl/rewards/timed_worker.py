"""The process in which :class:`fastrl.rewards.timed.TimedChild` judges questions.

``python timed_worker.py FILE`` reads questions and writes answers, a JSON object a line: first
whether it is ready, then what the function that FILE's ``make_judge()`` returned makes of each
question's fields. A question that takes longer than its ``seconds`` ends the process, even within a
regular expression; memory is limited. The process needs the standard library and FILE's imports.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import runpy
import signal
import sys
from contextlib import suppress
from typing import Any

MEMORY = 2 << 30  # bytes of address space


def main() -> None:
    # stdout is for answers alone: what libraries print goes to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # The alarm's default action needs no interpreter. Ctrl-C is the parent's, which closes stdin.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)
    with suppress(ValueError, OSError):  # a system may have no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    def answer(verdict: dict[str, Any]) -> None:
        answers.write(json.dumps(verdict) + "\n")
        answers.flush()

    try:
        judge = runpy.run_path(sys.argv[1])["make_judge"]()
    except Exception as error:
        answer({"failed": f"{type(error).__name__}: {error}"})
        return
    answer({"ready": True})
    for line in sys.stdin:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, question.pop("seconds"))
        verdict = judge(**question)
        signal.setitimer(signal.ITIMER_REAL, 0)
        answer(verdict)


if __name__ == "__main__":
    main()
