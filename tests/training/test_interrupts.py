"""Ctrl-C once is a wish, twice an order."""

import os
import signal
import threading
import time

import pytest

from fastweights.training.interrupts import ANSWER, StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_the_work_goes_on(number):
    request = StopRequest()
    with request.listening():
        assert not request.asked
        os.kill(os.getpid(), number)
        assert request.asked


@pytest.mark.parametrize("answered", [True, False])
def test_whoever_asks_is_answered_once(capsys, answered):
    with StopRequest(answered=answered).listening():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
    assert capsys.readouterr().out == (f"{ANSWER}\n" if answered else "")


def test_the_answer_comes_at_once(capsys):
    with StopRequest().listening():
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 10
        while not (printed := capsys.readouterr().out) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert printed == f"{ANSWER}\n"


def test_a_second_ctrl_c_is_not_caught():
    request = StopRequest()
    with request.listening():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_signals_are_as_they_were_afterwards():
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    with StopRequest().listening():
        assert [signal.getsignal(number) for number in numbers] != before
        os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in numbers] == before


def test_another_thread_leaves_signals_alone():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work():
        with StopRequest().listening():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
