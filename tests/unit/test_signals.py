"""Signals to the launcher, sent to this process."""

import os
import signal

import pytest

from muster.events import StopAsked
from muster.signals import HOW, signals


def heard(*sent):
    with signals() as bell:
        for sig in sent:
            os.kill(os.getpid(), sig)
        return bell.take(5.0)


@pytest.mark.parametrize("sig", HOW)
def test_a_signal_asks_for_a_clean_end(sig):
    assert heard(sig) == [StopAsked(5.0, HOW[sig])]


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGUSR1])
def test_twice_is_at_once(sig):
    assert [asked.now for asked in heard(sig, sig)] == [False, True]


def test_a_terminal_that_closes_hangs_up_twice_and_still_asks_for_a_clean_end():
    """By the kernel, and by the shell; systemd sends TERM and HUP together."""
    assert not any(asked.now for asked in heard(signal.SIGHUP, signal.SIGHUP, signal.SIGTERM))
    assert heard(signal.SIGHUP, signal.SIGINT)[1].now


def test_a_run_under_nohup_outlives_its_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals() as bell:
            os.kill(os.getpid(), signal.SIGHUP)
            assert bell.count == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_afterwards_signals_are_as_before():
    before = {sig: signal.getsignal(sig) for sig in HOW}
    with signals():
        assert all(signal.getsignal(sig) is not before[sig] for sig in HOW)
    assert {sig: signal.getsignal(sig) for sig in HOW} == before
