"""Frames at the bottom of a real (pseudo-)terminal, as an emulator shows them."""

import logging
import os
import sys

import pytest

from appo.algorithms.runtime.monitor.terminal import Screen
from appo.utils.logging import configure
from tests.unit.runtime.terminals import Terminal


@pytest.fixture
def _logs_to_stdout():
    """What main's entry does, undone."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before, level


def test_a_frame_takes_the_place_of_the_one_before() -> None:
    with Terminal() as terminal:
        print("before")
        screen = Screen(sys.stdout.fileno())
        screen.show(["a" * 79, "b", "c"])
        screen.show(["d", "e"])
        assert terminal.lines() == ["before", "d", "e"]
        screen.show(["f", "g", "h"])
        screen.close()
        print("after")
        assert terminal.lines() == ["before", "f", "g", "h", "after"]


@pytest.mark.usefixtures("_logs_to_stdout")
def test_what_is_logged_or_printed_stands_above_the_frame_and_nothing_is_lost() -> None:
    with Terminal(rows=8) as terminal:
        configure("main", None)
        stdout = sys.stdout
        screen = Screen(sys.stdout.fileno())
        for number in range(20):
            screen.show([f"frame {number}", "its end"])
            logging.getLogger("a").info("info %d", number)
            logging.getLogger("a").warning("warning %d", number)
            print("printed", end=" ")
            print(number)
        expected = [f"{word} {number}" for number in range(20) for word in ("info", "warning", "printed")]
        assert terminal.lines() == [*expected, "frame 19", "its end"]
        print("no end of line", end="")
        screen.close()
        logging.getLogger("a").info(", and more")
        assert sys.stdout is stdout
        assert terminal.lines() == [*expected, "frame 19", "its end", "no end of line, and more"]
        assert terminal.screen.cursor.hidden is False
        assert b"\x1b[?" not in terminal.written  # no mode is ever changed


def test_lines_that_are_written_at_once_stand_above_the_frame_and_the_stream_is_like_the_terminal() -> None:
    with Terminal() as terminal:
        before = sys.stdout.fileno(), sys.stdout.encoding, sys.stdout.isatty(), sys.stdout.writable()
        screen = Screen(sys.stdout.fileno())
        screen.show(["frame"])
        sys.stdout.writelines(["a\n", "b", "c\n"])
        assert terminal.lines() == ["a", "bc", "frame"]
        assert (sys.stdout.fileno(), sys.stdout.encoding, sys.stdout.isatty(), sys.stdout.writable()) == before
        screen.close()


def test_of_a_bar_that_is_drawn_again_the_last_one_is_kept() -> None:
    with Terminal() as terminal:
        screen = Screen(sys.stdout.fileno())
        screen.show(["frame"])
        for number in range(1000):
            print(f"{number} of 1000", end="\r")
            assert len(sys.stdout._begun) < 20  # type: ignore[attr-defined]
        print()
        print("1\r2", end="\n")
        assert terminal.lines() == ["999 of 1000", "2", "frame"]
        screen.close()


def test_a_stream_that_goes_elsewhere_is_left_alone(tmp_path) -> None:
    with Terminal() as terminal, open(tmp_path / "log", "w") as log, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", log)
        screen = Screen(sys.stdout.fileno())
        assert sys.stderr is log
        screen.show(["frame"])
        assert terminal.lines() == ["frame"]
        screen.close()


def test_a_terminal_that_takes_nothing_costs_frames_and_no_time() -> None:
    """Nobody reads at the other end: without a limit of time in the test, a wait would be for ever."""
    with Terminal() as terminal:
        screen = Screen(sys.stdout.fileno())
        for number in range(200):
            screen.show([f"{number:03}" + "x" * 70] * 20)
        terminal.read()  # the end of a frame may still be missing
        screen.show(["last"])
        terminal.read()
        screen.show(["the very last"])
        assert terminal.lines() == ["the very last"]
        screen.close()


@pytest.mark.parametrize(("columns", "rows"), [(100, 2), (79, 2), (78, 4), (40, 4), (39, 6)])
def test_in_a_narrower_terminal_lines_have_become_several(columns: int, rows: int) -> None:
    with Terminal(columns=80) as terminal:
        screen = Screen(sys.stdout.fileno())
        screen.show(["a" * 79, "b" * 79])
        terminal.read()
        terminal.resize(columns, 24)
        screen.show(["c"])
        assert terminal.read().replace(b"\r\r\n", b"\r\n") == f"\r\x1b[{rows}A\x1b[Jc\r\n".encode()
        screen.close()


def test_a_terminal_that_is_gone_is_said_to_be() -> None:
    with Terminal() as terminal:
        screen = Screen(sys.stdout.fileno())
        screen.show(["a"])
        terminal.hang_up()
        with pytest.raises(OSError, match="Input/output error"):
            screen.show(["b"])
        screen.close()


def test_what_is_no_terminal_of_ours_is_refused(tmp_path) -> None:
    with pytest.raises(OSError, match="No such file"):
        Screen(os.open(tmp_path, os.O_RDONLY) + 1000)
