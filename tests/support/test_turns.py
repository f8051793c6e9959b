"""A test that is `alone` waits for running tests, and no other test starts while it runs."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

from tests.support.turns import turn


def take(folder: Path, alone: bool, began, end) -> None:
    with turn(folder, alone):
        began.set()
        end.wait(60)


def test_others_run_side_by_side_and_one_alone_has_nobody_beside_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    turns = [(context.Event(), context.Event(), alone) for alone in (False, False, True, False)]
    processes = [
        context.Process(target=take, args=(tmp_path, alone, began, end), daemon=True) for began, end, alone in turns
    ]
    (first, end_first, _), (second, end_second, _), (third, end_third, _), (fourth, end_fourth, _) = turns
    for process, began in ((processes[0], first), (processes[1], second)):
        process.start()
        assert began.wait(60)  # the first has not ended
    processes[2].start()
    assert not third.wait(0.2)
    end_first.set()
    assert not third.wait(0.2)
    processes[3].start()
    assert not fourth.wait(0.2)  # although one runs that would bear company
    end_second.set()
    assert third.wait(60)
    assert not fourth.wait(0.2)
    end_third.set()
    assert fourth.wait(60)
    end_fourth.set()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
